// SPDX-License-Identifier: Apache-2.0
/* A small world for tests of the layer: W ranks as threads, parameters and tokens of all ranks, and a plain reference
 * in f64 that computes the whole layer with its gradients. */
#ifndef SLUICE_CAPI_TEST_WORLD_WORLD_H_
#define SLUICE_CAPI_TEST_WORLD_WORLD_H_

#include <stdint.h>

#include "sluice/sluice.h"

#define WORLD_MAX_RANKS 8
#define WORLD_CYCLE     7

enum {
  WORLD_MOVES_NONE = 0,
  WORLD_MOVES_EVEN,          /* as many experts on each rank as before */
  WORLD_MOVES_UNEVEN,        /* any number, 0 too */
  WORLD_MOVES_BY_STALE_SLOTS /* EVEN, by a host that orders its experts by id instead of by slot: wrong */
};

enum {
  WORLD_LORA_GATE = 1,  /* la1 and lb1 */
  WORLD_LORA_UP = 2,    /* la3 and lb3 */
  WORLD_LORA_JOINT = 4, /* lb3 with la1, with GATE; interleaved layers have it with GATE alone */
  WORLD_LORA_DOWN = 8   /* la2 and lb2 */
};

/* A machine other than this CPU. Inputs of the host are copied there, and results are fetched after a settle. */
typedef struct world_machine_s {
  int32_t device_type;
  int32_t (*device_id)(int32_t rank);
  void* (*allocate)(int32_t rank, uint64_t bytes);
  void (*release)(void* data);
  void (*send)(int32_t rank, void* there, const void* here, uint64_t bytes); /* host-complete, both */
  void (*fetch)(int32_t rank, void* here, const void* there, uint64_t bytes);
  sluice_status_t (*make_comm)(int32_t rank, const sluice_comm_config_t* config, sluice_comm_t** out_comm);
  sluice_status_t (*make_context)(int32_t rank, const sluice_context_config_t* config, sluice_comm_t* comm,
                                  sluice_context_t** out_context);
  sluice_stream_t (*stream)(int32_t rank);
  void (*settle)(int32_t rank); /* until all enqueued work has run */
  /* Called around every pass: direction SLUICE_FORWARD or _BACKWARD; before it, or after its return. May be NULL. */
  void (*note)(int32_t rank, int32_t direction, int32_t has_returned);
  /* A graph of the work enqueued on the rank's stream between the two; end returns 0, or the error. */
  void (*begin_capture)(int32_t rank);
  int (*end_capture)(int32_t rank);
  void (*launch)(int32_t rank);
  void (*drop_graph)(int32_t rank); /* also where there is none */
  uint64_t timeout_ns;              /* of communicators between its ranks; 0: 20 s */
} world_machine_t;

typedef struct case_s {
  int32_t world_size;
  int64_t tokens[WORLD_MAX_RANKS]; /* T of each rank */
  int64_t model_width, hidden_width;
  int32_t num_experts, top_k, num_chunks, dtype, activation, gated, bias, wgrad_mode, callback_experts;
  int32_t lora;           /* WORLD_LORA_*, of which the layer has adapters in this call */
  int32_t lora_rank;      /* of the config: largest rank; 0: W is trained */
  int32_t frozen;         /* no gradients of parameters are wanted */
  int32_t lora_f32;       /* adapters in f32 whatever the dtype */
  int32_t lora_odd;       /* factors have no stride of 1; 2: nor gaps, but as in PEFT's B those of other experts */
  int32_t callback_waits; /* callback experts wait for their stream; other machines alone */
  int32_t drop_every;     /* every how many routes one is dropped; 0 none; 1 all */
  int32_t hot_expert;     /* all first routes go to it, or as hot_times says; -1 none */
  double hot_times;   /* first routes go to it so often that it gets this many times the mean of all experts; 0 all */
  int32_t transposed; /* parameters are stored [in, out] */
  int32_t stacked;    /* with SLUICE_GATED_HALVES: W1 and W3 are one matrix, W3 after W1 */
  int32_t accumulate; /* gradients are added to existing ones */
  int32_t grad_f32;   /* gradients in f32 whatever the dtype */
  int32_t separate_wgrad;                        /* INPUT, then WEIGHT */
  int32_t halves_unsaid;                         /* the context is not configured for it */
  int32_t restore;                               /* the step is dropped and rebuilt from copies of its saved buffers */
  int32_t uneven_owners;                         /* expert_rank table: most experts on the last rank */
  int32_t restore_input, restore_pre_activation; /* SLUICE_RESTORE_* */
  const int32_t* restore_input_of;               /* [num_chunks], or NULL */
  const int32_t* restore_pre_activation_of;
  int32_t chunking;                 /* SLUICE_CHUNKING_* */
  int32_t grouping;                 /* SLUICE_GROUPING_* */
  int32_t reuse_saved;              /* the backward may write over saved buffers */
  uint64_t budget;                  /* of each rank's context; 0: none */
  uint64_t host_budget;             /* of its offloaded rows; 0: none */
  int32_t outstanding;              /* forwards before the first backward; 0: 1 */
  int32_t max_outstanding;          /* the configured value of the context; 0: the true number */
  int64_t capacity;                 /* rows of one rank for one expert in one chunk; 0: exchange_mode exact */
  int32_t deduplicate;              /* SLUICE_DEDUPLICATE_* */
  int32_t ranks_per_node;           /* 0: not said */
  int32_t wire_dtype;               /* SLUICE_WIRE_* */
  int32_t reuse;                    /* buffers are reused, n and policies chosen */
  int32_t repeat_every;             /* every how many tokens all routes go to the expert of the first; 0 none */
  int32_t captured;                 /* passes run once with other routes, are captured, and launched */
  int32_t parts;                    /* dispatch, experts, combine called one by one */
  int32_t cycles;                   /* of WORLD_CYCLE rounds with fewer and more tokens, before all of it */
  int32_t rounds;                   /* steps before the checked one, each followed by an update of the weights */
  int32_t placed;                   /* experts begin where a move would have put them */
  int32_t moves;                    /* WORLD_MOVES_*: experts change owner and slot after each of them */
  int32_t weights;                  /* SLUICE_WEIGHTS_*; others than PLAIN are frozen, and have values of their own */
  int32_t weight_block;             /* INT8, INT4 */
  int32_t weight_block_of_1;        /* what rank 1 says it is; 0: weight_block */
  int32_t weights_decoded;          /* the same weights in the layer's dtype */
  const sluice_plan_config_t* plan; /* the layer runs under its own plan; NULL: none */
  const char* gemm;                 /* NULL: "ref" */
  const world_machine_t* machine;   /* NULL: this CPU */
} case_t;

/* Everything a case computes, in f64, indexed by rank; freed by world_free. */
typedef struct result_s {
  double* out[WORLD_MAX_RANKS];
  double* grad_tokens[WORLD_MAX_RANKS];
  double* grad_weights[WORLD_MAX_RANKS];
  double* grad_params[12];        /* w1 w3 w2 b1 b3 b2 la1 lb1 la3 lb3 la2 lb2 over all E experts */
  double* board[2][12];           /* where experts that move are in between: parameters, gradients; as grad_params */
  int32_t ready[WORLD_MAX_RANKS]; /* readiness signals seen */
  int32_t calls[WORLD_MAX_RANKS]; /* of callback experts in forward: one for each chunk in which an expert has rows */
  int64_t most_rows[WORLD_MAX_RANKS]; /* of one chunk, callback experts alone */
  uint64_t peak_bytes[WORLD_MAX_RANKS];
  uint64_t slot_bytes[WORLD_MAX_RANKS]; /* of the forward or the backward, whichever has more */
  uint64_t saved_bytes[WORLD_MAX_RANKS];
  uint64_t predicted_bytes[WORLD_MAX_RANKS]; /* under its own plan: the predicted peak, */
  uint64_t lent_bytes[WORLD_MAX_RANKS];      /* including the bytes that GEMMs may borrow; 0 with gemm "ref" */
  uint64_t planned_bytes[WORLD_MAX_RANKS];   /* and the plan's maximum */
  uint64_t bytes_sent[WORLD_MAX_RANKS];
  uint64_t fallback_chunks[WORLD_MAX_RANKS];
  sluice_capacity_report_t report[WORLD_MAX_RANKS]; /* under a capacity */
  sluice_status_t report_status[WORLD_MAX_RANKS];
  uint64_t growth[WORLD_MAX_RANKS];    /* of current_bytes from the second cycle to the last */
  int32_t num_chunks[WORLD_MAX_RANKS]; /* of the last pass */
  sluice_status_t status[WORLD_MAX_RANKS];
  char message[WORLD_MAX_RANKS][1024];
} result_t;

/* A small base layer: one rank, one chunk, odd widths, everything kept. */
case_t world_small_case(void);
/* The largest distance from the reference that the dtype of a case allows: f64 layers still have f32 gate scalars; bf16
 * rounds every tensor between ops to 8 bits, f16 to 11. */
double world_tolerance(const case_t* c);

/* The k-th expert of a token, and the rank that owns an expert. Distinct within the token, except with repeat_every. */
int64_t world_expert(const case_t* c, int32_t rank, int64_t t, int32_t k);
int32_t world_owner(const case_t* c, int32_t e);

/* Runs forward and backward on all ranks through the public ABI. */
void world_run(const case_t* c, result_t* out);
/* The same layer, unsplit, in f64 on the same (rounded) inputs. */
void world_reference(const case_t* c, result_t* out);
void world_free(result_t* result);

/* Largest |a - b| / (1 + |b|) over everything; -1 if a value is unexpectedly NaN. */
double world_distance(const case_t* c, const result_t* a, const result_t* b);
/* Whether outputs and input gradients (and with params != 0 parameter gradients) are bit-identical. */
int world_identical(const case_t* c, const result_t* a, const result_t* b, int params);

/* The function for finite differences: the sum of all outputs times fixed factors, with one input changed by `delta`.
 * which: 0 tokens, 1 route weights, 2.. parameters; index counts over all ranks. */
double world_objective(const case_t* c, int which, int64_t index, double delta);
int64_t world_count(const case_t* c, int which);

#endif /* SLUICE_CAPI_TEST_WORLD_WORLD_H_ */
