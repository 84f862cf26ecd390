// SPDX-License-Identifier: Apache-2.0
/* Costs of the ops of a layer's passes on a machine, and so of a choice of (n, restore policy, weight-gradient mode):
 * the real template walked on the sim device with these costs, and the closed forms of the papers.
 *
 * The timed rank is the fullest: it receives skew times the rows of balanced routing, and the others wait for it.
 */
#pragma once

#include "backend/cost/closed_forms.h"
#include "backend/cost/machine.h"
#include "backend/cost/predict.h"
#include "backend/model/chunk_policies.h"

typedef struct sluice_workload_s {
  int64_t model_width, hidden_width; /* M, H */
  int32_t num_experts, top_k;        /* E, K */
  int32_t gate_factor;               /* g: 2 for gated experts, else 1 */
  int32_t dtype;
  int32_t world_size;
  int32_t callback;       /* the host's own experts, priced as if they were Sluice's */
  int32_t chunking;       /* SLUICE_CHUNKING_* */
  int64_t num_tokens;     /* T per rank */
  double skew;            /* rows of the fullest rank over those of balanced routing, >= 1 */
  int32_t deduplicate;    /* SLUICE_DEDUPLICATE_* */
  int32_t activation;     /* SLUICE_ACTIVATION_* */
  int32_t ranks_per_node; /* for SLUICE_DEDUPLICATE_NODES; 0: not known */
  int32_t wire_dtype;     /* SLUICE_WIRE_*, as from sluice_layer_wire */
  int32_t lora_rank;      /* rank of the adapter of every matrix (gate and up share one); above 0, W is frozen */
  int32_t is_frozen;      /* 1: W has no gradients, although there are no adapters either */
} sluice_workload_t;

typedef struct sluice_choice_s {
  int32_t num_chunks;
  int32_t restore_input, restore_pre_activation;
  int32_t wgrad_mode;
  int32_t bounded;                         /* under a plan: slots do not grow with n */
  const sluice_chunk_policies_t* by_chunk; /* lists that replace restore_input and restore_pre_activation; NULL: none */
  int32_t kept_chunks;                     /* later chunks are sent again and recomputed; 0: all follow the policies */
  int32_t shares_act;                      /* with T_M offloaded: T_ACT has no slot of its own, as without a plan */
  int32_t grouped; /* exchanges, with several ranks and enough chunks (sluice_template_spec_t) */
} sluice_choice_t;

/* Rows of one chunk on the fullest rank; all chunks have the same. */
typedef struct sluice_chunk_rows_s {
  double sent, sent_remote;         /* of this rank's tokens */
  double received, received_remote; /* for its experts */
  double tokens;
  double experts, per_expert; /* experts with rows in the chunk, and the rows of each */
  double out, in,
      returned;   /* rows on the wire, to and from other ranks, and rows that are summed at the end: the remote ones and
                     `sent`, or token copies if the layer is deduplicated. `out` is the average that a rank sends */
  double leaving; /* the part of `out` of the fullest rank: rows for its own experts do not leave */
  double between; /* two levels: node copies sent to other nodes; else 0 */
  double passed_on; /* rows that a rank forwards within its node, including those to itself */
} sluice_chunk_rows_t;
/* Bytes of a row on the wire. */
double sluice_wire_row_bytes(const sluice_workload_t* workload);
/* Whether tokens travel once to each node: several nodes with several ranks each. */
int sluice_workload_has_two_levels(const sluice_workload_t* workload);
sluice_chunk_rows_t sluice_rows_of(const sluice_workload_t* workload, const sluice_choice_t* choice);

/* Bytes of a rank's rows and of the tensors computed from them, over all chunks. A backward reads all of them again. */
double sluice_bytes_touched(const sluice_workload_t* workload);

/* Whether chunks of such a pass are divided by experts, not by tokens [chunks_by_experts.h of moe]. */
int sluice_choice_chunks_by_experts(const sluice_workload_t* workload, const sluice_choice_t* choice);
/* Expected number of ranks that hold the K different experts of a token, under uniform routing. */
double sluice_ranks_per_token(const sluice_workload_t* workload);

/* Input of the pricing of a pass's ops. */
typedef struct sluice_pass_costs_s {
  const sluice_machine_t* machine;
  const sluice_workload_t* work;
  sluice_chunk_rows_t rows;
  double row_bytes;
  double cache_miss_factor; /* of the compute lane */
  int32_t num_chunks, chunks_by_experts;
} sluice_pass_costs_t;
/* The costs of a pass's ops (predict.h). machine and work are borrowed; `state` is filled in and borrowed. */
sluice_op_costs_t sluice_pass_costs(sluice_pass_costs_t* state, const sluice_machine_t* machine,
                                    const sluice_workload_t* work, const sluice_choice_t* choice, int32_t direction);
/* The papers' S, C, R and copy of one chunk, from the same costs. */
sluice_chunk_times_t sluice_chunk_times(const sluice_machine_t* machine, const sluice_workload_t* workload,
                                        const sluice_choice_t* choice, int32_t direction);
/* MPMoE's alpha(y, x) on the machine, at the sizes of a chunk. */
sluice_alphas_t sluice_alphas_of(const sluice_machine_t* machine, const sluice_workload_t* workload,
                                 const sluice_choice_t* choice, int32_t direction);
/* Seconds of one pass: MPMoE's phases of the paradigm that the choice falls under, and MPipeMoE eq. 10. */
double sluice_mpmoe_seconds(const sluice_machine_t* machine, const sluice_workload_t* workload,
                            const sluice_choice_t* choice, int32_t direction);
double sluice_mpipemoe_seconds(const sluice_machine_t* machine, const sluice_workload_t* workload,
                               const sluice_choice_t* choice, int32_t direction);

/* The template of one whole training pass of a choice. Errors: as sluice_template_build. */
sluice_status_t sluice_choice_template(const sluice_workload_t* workload, const sluice_choice_t* choice,
                                       int32_t direction, sluice_template_t** out_template);
/* Seconds of a pass outside of its ops: routing, header, bookkeeping, and the tables of a deduplicated forward. */
double sluice_pass_overhead(const sluice_machine_t* machine, const sluice_workload_t* workload, int32_t direction);

typedef struct sluice_step_prediction_s {
  double seconds[2];                /* by direction, with the overhead of a pass */
  double busy[2][SLUICE_NUM_LANES]; /* seconds by direction and lane */
} sluice_step_prediction_t;

/* One direction, with its lanes; `total` includes the overhead of a pass. */
sluice_status_t sluice_predict_pass_lanes(const sluice_machine_t* machine, const sluice_workload_t* workload,
                                          const sluice_choice_t* choice, int32_t direction,
                                          sluice_prediction_t* out_prediction);
/* One direction. */
sluice_status_t sluice_predict_pass(const sluice_machine_t* machine, const sluice_workload_t* workload,
                                    const sluice_choice_t* choice, int32_t direction, double* out_seconds);
/* Forward and backward of one training step. Errors: those of sluice_predict and of the template. */
sluice_status_t sluice_predict_step(const sluice_machine_t* machine, const sluice_workload_t* workload,
                                    const sluice_choice_t* choice, sluice_step_prediction_t* out_prediction);
