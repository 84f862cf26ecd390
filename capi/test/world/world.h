// SPDX-License-Identifier: Apache-2.0
/* A small world for tests of the layer: W ranks, which are threads, with the parameters and tokens of all ranks, and a
 * plain f64 reference of the whole layer with its gradients. */
#pragma once

#include <stdint.h>

#include "sluice/sluice.h"

#define WORLD_MAX_RANKS 8
#define WORLD_CYCLE     7

enum {
  WORLD_MOVES_NONE = 0,
  WORLD_MOVES_EVEN,  /* each rank keeps its number of experts */
  WORLD_MOVES_UNEVEN /* any number of experts on a rank, also none */
};

enum {
  WORLD_LORA_GATE = 1,  /* la1 and lb1 */
  WORLD_LORA_UP = 2,    /* la3 and lb3 */
  WORLD_LORA_JOINT = 4, /* lb3 shares la1; needs GATE (implied in interleaved layers) */
  WORLD_LORA_DOWN = 8   /* la2 and lb2 */
};

/* A machine other than this CPU. Inputs are copied to the machine, and results are copied back after settle. */
typedef struct world_machine_s {
  int32_t device_type;
  int32_t (*device_id)(int32_t rank);
  void* (*allocate)(int32_t rank, uint64_t bytes);
  void (*release)(void* data);
  void (*send)(int32_t rank, void* there, const void* here, uint64_t bytes); /* both are complete on return */
  void (*fetch)(int32_t rank, void* here, const void* there, uint64_t bytes);
  sluice_status_t (*make_comm)(int32_t rank, const sluice_comm_config_t* config, sluice_comm_t** out_comm);
  sluice_status_t (*make_context)(int32_t rank, const sluice_context_config_t* config, sluice_comm_t* comm,
                                  sluice_context_t** out_context);
  sluice_stream_t (*stream)(int32_t rank);
  void (*settle)(int32_t rank); /* returns when all enqueued work has run */
  /* Called before every pass (has_returned 0) and after its call has returned (1). May be NULL. */
  void (*note)(int32_t rank, int32_t direction, int32_t has_returned);
  /* Both capture the work on the rank's stream as a graph. end_capture returns 0, or the error. */
  void (*begin_capture)(int32_t rank);
  int (*end_capture)(int32_t rank);
  void (*launch)(int32_t rank);
  void (*drop_graph)(int32_t rank); /* also called without a graph */
  uint64_t timeout_ns;              /* timeout of communicators; 0: 20 s */
} world_machine_t;

typedef struct case_s {
  int32_t world_size;
  int64_t tokens[WORLD_MAX_RANKS]; /* T of each rank */
  int64_t model_width, hidden_width;
  int32_t num_experts, top_k, num_chunks, dtype, activation, gated, bias, wgrad_mode, callback_experts;
  int32_t lora;           /* set of WORLD_LORA_*: adapters that this call has */
  int32_t lora_rank;      /* the config's largest rank; 0: W is trained */
  int32_t frozen;         /* no gradients of parameters are wanted */
  int32_t lora_f32;       /* adapters are f32 for any dtype */
  int32_t lora_odd;       /* 1: factors have no stride of 1; 2: like PEFT's B, experts alternate in memory */
  int32_t callback_waits; /* callback experts wait for their stream; only on other machines */
  int32_t drop_every;     /* one of this many routes is dropped; 0: none; 1: all */
  int32_t hot_expert;     /* gets all first routes, or as many as hot_times says; -1: none */
  double hot_times;       /* the hot expert gets this many times the mean load; 0: all first routes */
  int32_t transposed;     /* parameters are stored [in, out] */
  int32_t stacked;        /* with SLUICE_GATED_HALVES, one matrix holds W1 and then W3 */
  int32_t accumulate;     /* gradients are added to existing ones */
  int32_t grad_f32;       /* gradients are f32 for any dtype */
  int32_t separate_wgrad; /* dgrad, then wgrad */
  int32_t halves_unsaid;  /* separate_wgrad of the context is not set */
  int32_t restore;        /* the step is dropped, and rebuilt from copies of its saved buffers */
  int32_t uneven_owners;  /* expert_rank table with most experts on the last rank */
  int32_t restore_input, restore_pre_activation; /* SLUICE_RESTORE_* */
  const int32_t* restore_input_of;               /* [num_chunks], or NULL */
  const int32_t* restore_pre_activation_of;
  int32_t chunking;                 /* SLUICE_CHUNKING_* */
  int32_t grouping;                 /* SLUICE_GROUPING_* */
  int32_t reuse_saved;              /* the backward may write over saved buffers */
  uint64_t budget;                  /* of each rank's context; 0: none */
  uint64_t host_budget;             /* of offloaded rows; 0: none */
  int32_t outstanding;              /* forwards before the first backward; 0: 1 */
  int32_t max_outstanding;          /* of the context; 0: same as outstanding */
  int64_t capacity;                 /* rows from a rank to an expert in one chunk; 0: exact mode */
  int32_t deduplicate;              /* SLUICE_DEDUPLICATE_* */
  int32_t ranks_per_node;           /* 0: not set */
  int32_t wire_dtype;               /* SLUICE_WIRE_* */
  int32_t reuse;                    /* buffers are reused; n and policies are chosen */
  int32_t repeat_every;             /* in one of this many tokens all routes go to the first expert; 0: none */
  int32_t captured;                 /* passes run with other routes, are captured, and then launched */
  int32_t parts;                    /* split calls instead of passes */
  int32_t cycles;                   /* cycles of WORLD_CYCLE rounds with other T, before the case itself */
  int32_t rounds;                   /* steps before the checked step; each updates the weights */
  int32_t placed;                   /* the config has the placement that a move would produce */
  int32_t moves;                    /* WORLD_MOVES_*: experts move after each round */
  int32_t weights;                  /* SLUICE_WEIGHTS_*; all but PLAIN are frozen and have other values */
  int32_t weight_block;             /* of INT8 and INT4 */
  int32_t weight_block_of_1;        /* the value on rank 1; 0: weight_block */
  int32_t weights_decoded;          /* the same weights in the layer's dtype */
  const sluice_plan_config_t* plan; /* the layer uses its own plan of this config; NULL: no plan */
  const char* gemm;                 /* NULL: "ref" */
  const world_machine_t* machine;   /* NULL: this CPU */
  /* Instead of the machine's functions of these names; NULL: none. */
  sluice_status_t (*make_comm)(int32_t rank, const sluice_comm_config_t* config, sluice_comm_t** out_comm);
  void (*note)(int32_t rank, int32_t direction, int32_t has_returned);
} case_t;

/* All results of a case, as f64, by rank; freed by world_free. */
typedef struct result_s {
  double* out[WORLD_MAX_RANKS];
  double* grad_tokens[WORLD_MAX_RANKS];
  double* grad_weights[WORLD_MAX_RANKS];
  double* grad_params[12];            /* w1 w3 w2 b1 b3 b2 la1 lb1 la3 lb3 la2 lb2 over all E experts */
  double* board[2][12];               /* parameters and gradients during a move, as in grad_params */
  int32_t ready[WORLD_MAX_RANKS];     /* calls of expert_ready */
  int32_t calls[WORLD_MAX_RANKS];     /* of callback experts in forward: one for each expert and chunk with rows */
  int64_t most_rows[WORLD_MAX_RANKS]; /* of one chunk; only with callback experts */
  uint64_t peak_bytes[WORLD_MAX_RANKS];
  uint64_t slot_bytes[WORLD_MAX_RANKS]; /* of the forward or the backward, the larger */
  uint64_t saved_bytes[WORLD_MAX_RANKS];
  uint64_t predicted_bytes[WORLD_MAX_RANKS]; /* predicted peak under the layer's own plan, */
  uint64_t lent_bytes[WORLD_MAX_RANKS];      /* with the bytes that GEMMs may borrow (0 with gemm "ref"), */
  uint64_t planned_bytes[WORLD_MAX_RANKS];   /* and the plan's maximum */
  uint64_t bytes_sent[WORLD_MAX_RANKS];
  uint64_t fallback_chunks[WORLD_MAX_RANKS];
  sluice_capacity_report_t report[WORLD_MAX_RANKS]; /* under a capacity */
  sluice_status_t report_status[WORLD_MAX_RANKS];
  uint64_t growth[WORLD_MAX_RANKS];    /* growth of current_bytes from the second cycle to the last */
  int32_t num_chunks[WORLD_MAX_RANKS]; /* of the last pass */
  sluice_status_t status[WORLD_MAX_RANKS];
  char message[WORLD_MAX_RANKS][1024];
} result_t;

/* The policies of the pre-activation; those of the input are 0, 1 and 2. */
extern const int32_t world_pre_activations[3];

/* A small base layer: one rank, one chunk, odd widths, everything kept. */
case_t world_small_case(void);
/* Tolerance of the distance from the reference by the dtype of a case: f64 layers have f32 gate scalars, bf16 rounds
 * every tensor between ops to 8 bits, and f16 to 11. */
double world_tolerance(const case_t* c);

/* The nearest value of a dtype. */
double world_rounded(int32_t dtype, double x);

/* The k-th expert of a token (distinct except with repeat_every), and the rank that owns an expert. */
int64_t world_expert(const case_t* c, int32_t rank, int64_t t, int32_t k);
int32_t world_owner(const case_t* c, int32_t e);

/* The fields of a case in which the cases of a suite differ, for messages; valid until the next call. */
const char* case_text(const case_t* c);

/* Runs forward and backward on all ranks through the public ABI. */
void world_run(const case_t* c, result_t* out);
/* Computes the same layer in f64, on one rank, from the same rounded inputs. */
void world_reference(const case_t* c, result_t* out);
void world_free(result_t* result);

/* The largest |a - b| / (1 + |b|) over all results; -1 if an unexpected value is NaN. */
double world_distance(const case_t* c, const result_t* a, const result_t* b);
/* Returns whether outputs and input gradients (with params also parameter gradients) have the same bits. */
int world_identical(const case_t* c, const result_t* a, const result_t* b, int params);

/* The objective for finite differences: the sum of all outputs times fixed factors, with `delta` added to one input.
 * which: 0 tokens, 1 route weights, from 2 on parameters; index counts over all ranks. */
double world_objective(const case_t* c, int which, int64_t index, double delta);
int64_t world_count(const case_t* c, int which);
