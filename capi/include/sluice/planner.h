// SPDX-License-Identifier: Apache-2.0
/* The planner predicts time and memory of a choice of (n, restore policy, weight-gradient mode) on a machine, finds the
 * best choice, and says why it rejects each other choice. It needs no context, no ranks and no data, so it can predict
 * for machines that are not available.
 *
 * A machine is a set of costs, as data: calibrated on the spot, or a named profile. docs/tuning.md describes its JSON
 * form.
 *
 * Source: prediction by the schedule itself in virtual time. MPMoE's three paradigms of five phases and MPipeMoE eq. 10
 * are reported as second opinions. */
#ifndef SLUICE_PLANNER_H_
#define SLUICE_PLANNER_H_

#include "sluice/context.h"
#include "sluice/moe.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sluice_planner_s sluice_planner_t;

/* Creates a planner from a machine: machine_json [length], which is copied. out_planner: new, sluice_planner_destroy.
 * Immutable: any thread. Errors: INVALID_ARGUMENT (names the line or field, what was found and the remedy; for an
 * unknown field the known ones); NO_MEMORY. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_planner_create(const char* machine_json, uint64_t length,
                                                                     sluice_planner_t** out_planner);
SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_planner_destroy(sluice_planner_t* planner); /* accepts NULL */

/* Returns the machine as JSON. On entry *inout_bytes is the room in `text`; on return it is the length with the
 * terminating 0; text may be NULL to ask for it. Any thread. Errors: INVALID_ARGUMENT (too little room). */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_planner_write_machine(const sluice_planner_t* planner, char* text,
                                                                            uint64_t* inout_bytes);

typedef struct sluice_calibration_config_s {
  size_t struct_size;              /* set by sluice_calibration_config_init */
  const sluice_ext_header_t* next; /* NULL */
  int64_t model_width;             /* M of the layers to predict; above 4096 it is measured at 4096 */
  int64_t hidden_width;            /* H */
  double seconds;                  /* approximate duration, in [0.05, 3600]; default 8 */
  const char* cache_dir;           /* folder with machines that were measured before; NULL: SLUICE_CACHE_DIR, else
                                      XDG_CACHE_HOME/sluice, else HOME/.cache/sluice; "": no file is read or written */
  int32_t dtype;                   /* SLUICE_DTYPE_F32, _BF16 or _F16 */
  int32_t refresh;                 /* 1: measure even if the cache has the machine */
} sluice_calibration_config_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_calibration_config_init(sluice_calibration_config_t* out_config,
                                                                      size_t struct_size);

/* Measures the machine of the context, through its own GEMMs, communicator and lanes, or reads it from the cache.
 * Collective: every rank calls it with equal numbers, and gets the same machine. Progress is logged at SLUICE_LOG_INFO.
 * If a cached file is damaged, of another version, or not the same on all ranks, the machine is measured again, with a
 * message at SLUICE_LOG_WARN. The call takes tens of MB from the process while it runs. A CUDA context is measured by
 * its device's clock, on its default stream. out_planner: new, sluice_planner_destroy. Context-exclusive. Errors:
 * INVALID_ARGUMENT, ABI, BUSY, NO_MEMORY, UNSUPPORTED (more than 256 ranks), errors of GEMMs, exchanges and a CUDA
 * device. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_planner_calibrate(sluice_context_t* context,
                                                                        const sluice_calibration_config_t* config,
                                                                        sluice_planner_t** out_planner);

/* The workload to predict. Times are those of the rank with the most rows, for which the others wait. */
typedef struct sluice_planner_workload_s {
  size_t struct_size;              /* set by sluice_planner_workload_init */
  const sluice_ext_header_t* next; /* NULL */
  int64_t model_width;             /* M */
  int64_t hidden_width;            /* H; of callback experts an equivalent H */
  int64_t num_tokens;              /* T >= 1 of each rank */
  uint64_t memory_budget;          /* limit in bytes on each rank over all layers; 0: none */
  double skew;                     /* rows of the rank with the most rows over those of balanced routing, >= 1; default
                                      1 */
  int32_t num_experts;             /* E, divisible by W */
  int32_t top_k;                   /* K */
  int32_t world_size;              /* W >= 1 */
  int32_t dtype;                   /* SLUICE_DTYPE_F32, _BF16 or _F16 */
  int32_t gated;                   /* SLUICE_GATED_* */
  int32_t callback_experts;        /* 0 or 1 */
  int32_t max_outstanding;         /* >= 1: forwards without their backward, over all layers */
  int32_t reserved;                /* 0; end of the first layout */
  uint64_t host_memory_budget;     /* limit in bytes of the offloaded rows of max_outstanding forwards; 0: no separate
                                      limit */
  int32_t deduplicate;             /* SLUICE_DEDUPLICATE_* but ADAPTIVE; NODES: by the machine's ranks_per_node */
  int32_t chunking;                /* SLUICE_CHUNKING_*, as sluice_moe_config_t has it; default ADAPTIVE */
  /* [num_chunks of the choice], or NULL: the policy of each chunk, used instead of the choice's restore_input or
   * restore_pre_activation, as in sluice_moe_config_t. Read during the call. */
  const int32_t* restore_input_of;
  const int32_t* restore_pre_activation_of;
  int32_t kept_chunks;   /* predict, under a budget: the first of the choice's num_chunks, to which its policies apply;
                            the others are sent and computed again. 0: all. choose: 0 */
  int32_t may_keep_part; /* choose: 1: a policy that does not fit for all chunks is also a candidate for as many of the
                            first chunks as fit, if both policies are open, as in plans; 0: only for all chunks */
  int32_t activation;    /* SLUICE_ACTIVATION_* of the experts; IDENTITY (the default): unknown, costed as GELU */
  int32_t grouped; /* predict: 1: exchanges are grouped (SLUICE_GROUPING_ON); plans do not have this option, so it is 0
                      under a budget. choose: 0 */
  int32_t lora_rank; /* rank of the adapters of every matrix, as in sluice_moe_config_t: above 0 the weights are frozen;
                        0: none. Not with callback experts */
  int16_t weight_format; /* SLUICE_WEIGHTS_*, as in sluice_moe_config_t: packed weights are frozen. Decoding them takes
                            no time here. Not with callback experts */
  int16_t weight_block;  /* INT8, INT4: inputs that share a scale, or 0 for 128; of others 0 */
} sluice_planner_workload_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_planner_workload_init(sluice_planner_workload_t* out_workload,
                                                                    size_t struct_size);

/* One choice. predict does not accept ADAPTIVE, except where the workload has the tensor's list. */
typedef struct sluice_planner_choice_s {
  int32_t num_chunks;             /* n in [1, 256] */
  int32_t restore_input;          /* SLUICE_RESTORE_KEEP, _OFFLOAD, _REDISPATCH; _BY_CHUNK with the workload's list */
  int32_t restore_pre_activation; /* SLUICE_RESTORE_KEEP, _OFFLOAD, _RECOMPUTE; _BY_CHUNK with the workload's list */
  int32_t wgrad_mode;             /* SLUICE_WGRAD_DEFERRED, _PER_CHUNK */
} sluice_planner_choice_t;

typedef struct sluice_planner_prediction_s {
  size_t struct_size; /* set by the caller: sizeof */
  double forward_seconds;
  double backward_seconds;
  double forward_busy[4];       /* seconds by lane (SLUICE_LANE_*) */
  double backward_busy[4];      /* as forward_busy */
  double overhead_seconds;      /* part of the times above, for each pass: routing, header, bookkeeping (without the
                                   tables of a deduplicated forward, which are also in forward_seconds) */
  double mpmoe_forward_seconds; /* MPMoE's phases, without overhead */
  double mpmoe_backward_seconds;
  double mpipemoe_forward_seconds; /* MPipeMoE eq. 10, without overhead */
  double mpipemoe_backward_seconds;
  double machine_error_median; /* |predicted / measured - 1| on sizes that were not used to fit the machine; 0: not
                                  measured */
  double machine_error_p90;
  int64_t chunk_rows; /* under a budget: maximum of the received rows of a chunk; otherwise 0 */
  /* Bytes on a rank as in sluice/plan.h, under a plan for this workload; base counts handles and tables of one layer.
   * total = base + slots + routing + schedules + headers + GEMMs + max_outstanding * step. */
  uint64_t base_bytes;
  uint64_t slot_bytes;
  uint64_t routing_bytes;
  uint64_t schedule_bytes;
  uint64_t header_bytes;
  uint64_t gemm_bytes;
  uint64_t step_bytes;
  uint64_t total_bytes;
  int32_t fits;        /* 1: total_bytes is within the budget, or there is no budget */
  int32_t num_entries; /* entries of the timeline: the ops of the forward, then those of the backward */
  int32_t max_chunks;  /* the largest n under any routing */
  int32_t run_chunks;  /* n under this skew: a budget divides the rows of the rank with the most rows into more
                          chunks */
  double sent_rows;    /* rows that one exchange of a pass sends from one rank to other ranks, over all chunks: routes,
                          or token copies */
  int32_t kept_chunks; /* the first of the choice's num_chunks, to which its policies apply */
  int32_t reserved;
  uint64_t usual_bytes; /* total_bytes with the rows that the rank with the most rows receives under this skew, instead
                           of the most that any routing gives a rank; at most total_bytes */
} sluice_planner_prediction_t;

/* One op of a predicted pass. Each direction begins at 0; the overhead_seconds before its first op are excluded. */
typedef struct sluice_planner_entry_s {
  double begin_seconds;
  double end_seconds;
  const char* op; /* immutable name: "dispatch", "gemm1", ... */
  int32_t direction;
  int32_t lane;
  int32_t chunk; /* -1: all chunks */
  int32_t index; /* index of the op in its template */
} sluice_planner_entry_t;

/* Predicts one training step of one layer. out_entries [capacity]: the first entries of the timeline (capacity 0:
 * none); out_prediction->num_entries is how many there are. Any thread. Errors: INVALID_ARGUMENT (names the field;
 * among others, a machine that lacks what the workload needs), ABI, UNSUPPORTED (callback experts do not support the
 * policy), NO_MEMORY. A choice over the budget is not an error: `fits` reports it. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_planner_predict(
    const sluice_planner_t* planner, const sluice_planner_workload_t* workload, const sluice_planner_choice_t* choice,
    sluice_planner_prediction_t* out_prediction, sluice_planner_entry_t* out_entries, int32_t capacity);

/* The reason why a candidate was not chosen. */
enum {
  SLUICE_PLANNER_CHOSEN = 0,
  SLUICE_PLANNER_SLOWER = 1,          /* slower by slower_by */
  SLUICE_PLANNER_OVER_BUDGET = 2,     /* over the budget by bytes_over */
  SLUICE_PLANNER_EQUAL = 3,           /* as fast as the chosen candidate, which does not need more bytes or has fewer
                                         chunks */
  SLUICE_PLANNER_OVER_HOST_BUDGET = 4 /* its offloaded rows exceed their budget by bytes_over */
};

typedef struct sluice_planner_candidate_s {
  sluice_planner_choice_t choice;
  int32_t verdict;     /* SLUICE_PLANNER_* */
  int32_t kept_chunks; /* the first of num_chunks, to which the policies apply: all, or with may_keep_part fewer; the
                          others are sent and computed again. For the workload of predict */
  double forward_seconds;
  double backward_seconds;
  double slower_by; /* predicted time over that of the chosen candidate, minus 1 */
  uint64_t total_bytes;
  uint64_t bytes_over; /* bytes over the budget */
} sluice_planner_candidate_t;

/* Predicts every candidate and chooses the fastest that fits. Candidates that keep a part of the chunks come after all
 * others. wanted: fields >= 0 (num_chunks >= 1) are fixed, and ADAPTIVE (-1; num_chunks 0) is open; NULL: all are open.
 * out_candidates [capacity]: the first candidates; *out_count is how many there are; *out_chosen is the index of the
 * chosen one, or -1 if none fits. In that case OVER_BUDGET is returned, the error names the shortfall and the candidate
 * with the fewest bytes, and the candidates are still written. out_chosen may be NULL. Any thread. Errors: as predict;
 * OVER_BUDGET. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_planner_choose(
    const sluice_planner_t* planner, const sluice_planner_workload_t* workload, const sluice_planner_choice_t* wanted,
    sluice_planner_candidate_t* out_candidates, int32_t capacity, int32_t* out_count, int32_t* out_chosen);

/* Returns "chosen", "slower", "over budget", "as fast" or "over host budget"; immutable. */
SLUICE_EXPORT SLUICE_EXPERIMENTAL const char* sluice_planner_verdict_name(int32_t verdict);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_PLANNER_H_ */
