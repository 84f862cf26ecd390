// SPDX-License-Identifier: Apache-2.0
/* The planner over layers assigns layers to the stages of a pipeline, and chooses for each layer how its activations
 * are stored between its forward and its backward, so that the slowest stage is as fast as budgets in bytes allow. A
 * model without a pipeline is one stage.
 *
 * Pure: it needs no context, no ranks, no clock and no random numbers; equal problems give equal plans.
 *
 * Units: seconds and bytes of one micro-batch, unless a field says otherwise. A stage is one rank, or a group of ranks
 * that all do the same. Layers are listed in the order in which they run.
 *
 * Memory and time of a stage with k outstanding micro-batches:
 *   bytes   = base + parameters * versions + state + one message in + k * the message out
 *           + sum over its layers of (resident + k * held) + largest working + largest copied + largest arena
 *   seconds = max(compute, messages, copies), with copies_share_links max(compute, messages + copies)
 * Bytes are copied out after a layer's forward and copied back before its backward. An option with copies is allowed
 * only if both copies fit in between, in the time of the stage's later layers (forward and backward) and of k - 1 other
 * micro-batches.
 *
 * Source: vPipe (TPDS 2022), whose stored text lacks equations and numbers: both formulas are reconstructed; message
 * buffers, working memory, the arena and the one buffer of copies are added. PipeDream (SOSP 2019) for chains.
 * docs/planner.md describes the method. */
#ifndef SLUICE_STAGES_H_
#define SLUICE_STAGES_H_

#include "sluice/planner.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How an option stores a layer's activations. Plans do not depend on the kind, only on seconds and bytes. */
enum {
  SLUICE_STAGES_KEEP = 0,
  SLUICE_STAGES_RECOMPUTE = 1,
  SLUICE_STAGES_OFFLOAD = 2,
  SLUICE_STAGES_MIXED = 3 /* a plan of the layer itself, which `tag` names */
};

/* One way to run a layer; a plan uses one of them. */
typedef struct sluice_stages_option_s {
  double forward_seconds;
  double backward_seconds; /* includes the time of recomputation */
  uint64_t resident_bytes; /* allocated at all times in addition to the layer's own bytes: buffers of this option */
  uint64_t held_bytes;     /* from the forward of a micro-batch to its backward */
  uint64_t copied_bytes;   /* to host memory and back, of each micro-batch */
  uint64_t working_bytes;  /* while the layer runs; the layers of a stage run in turns */
  uint64_t arena_bytes;    /* allocated at all times, once for all layers of a stage: as large as the largest of them
                              needs */
  int32_t kind;            /* SLUICE_STAGES_KEEP, ... */
  int32_t tag;             /* for use by the caller; plans do not depend on it */
} sluice_stages_option_t;

/* Layer `to` reads the output of layer `from`, which runs earlier. */
typedef struct sluice_stages_edge_s {
  int32_t from;
  int32_t to;
} sluice_stages_edge_t;

/* The link between a stage and the next. A message takes latency + bytes / rate. */
typedef struct sluice_stages_link_s {
  double bytes_per_second; /* > 0 */
  double latency_seconds;
  int32_t full_duplex; /* 1: outputs and gradients are sent at the same time; 0: one after the other */
  int32_t reserved;    /* 0 */
} sluice_stages_link_t;

/* The number of micro-batches between their forward and their backward on stage s of p. */
enum {
  SLUICE_STAGES_1F1B = 0,          /* min(m, p - s) */
  SLUICE_STAGES_GPIPE = 1,         /* m: all forwards, then all backwards */
  SLUICE_STAGES_MESSAGE_DRIVEN = 2 /* micro-batches run as they arrive, backwards first: min(m, L), on the last stage
                                      1 */
};

enum {
  SLUICE_STAGES_AUTO = 0,       /* chains by dynamic programming; other graphs by the heuristic and the best cut of the
                                   order */
  SLUICE_STAGES_EXACT = 1,      /* only chains: the optimal slowest stage, regardless of the time that this takes */
  SLUICE_STAGES_HEURISTIC = 2,  /* vPipe's heuristic: coarsen, Kernighan-Lin, refine, alternating with the choice of
                                   options */
  SLUICE_STAGES_UNCOARSENED = 3 /* the same without coarsening */
};

/* A layer. Its kind depends on which of `moe` and `options` is set.
 *
 *   neither  its activations are kept, recomputed or offloaded as a whole. Keep holds activation_bytes. Recompute holds
 *            checkpoint_bytes, and the rest once, while the layer runs. Offload copies activation_bytes.
 *   moe      a Mixture-of-Experts layer: its options are its plans (number of chunks n, restore policies,
 *            weight-gradient mode), with times on the machine of `planner`. Seconds and bytes below are those that the
 *            host adds to each (its gate, its copy of the tokens). The slots of all such layers of a stage share one
 *            arena.
 *   options  the caller's own options. */
typedef struct sluice_planner_layer_s {
  size_t struct_size;              /* set by sluice_planner_layer_init */
  const sluice_ext_header_t* next; /* NULL */
  double forward_seconds;
  double backward_seconds;
  double recompute_seconds;  /* time to run the forward again; not with moe or options */
  uint64_t activation_bytes; /* data that the backward needs, including the layer's input; not with options */
  uint64_t checkpoint_bytes; /* data from which recomputation starts: the input. <= activation_bytes; not with moe or
                                options */
  uint64_t workspace_bytes;  /* while the layer runs, with every option; not with options */
  uint64_t parameter_bytes;  /* one version of the weights */
  uint64_t state_bytes;      /* gradients, master weights, moments: once, regardless of outstanding micro-batches */
  uint64_t output_bytes;     /* the output, for the layers that read it; its gradient has the same size */
  const sluice_planner_t* planner;       /* the machine of `moe`; borrowed */
  const sluice_planner_workload_t* moe;  /* memory_budget, kept_chunks and may_keep_part 0, max_outstanding 1, no lists
                                            by chunk; world_size equal in all layers. host_memory_budget 0 */
  const sluice_planner_choice_t* wanted; /* the fixed choices of `moe`, as in sluice_planner_choose. NULL: all are
                                            open */
  const sluice_stages_option_t* options; /* [num_options], one of which copies nothing */
  int32_t num_options;
  int32_t may_recompute; /* default 1; 0: this layer must not run again (for instance because it draws random
                            numbers) */
  int32_t may_offload;   /* default 1; 0: its activations stay. With moe: no option that offloads */
  int32_t reserved;      /* 0 */
} sluice_planner_layer_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_planner_layer_init(sluice_planner_layer_t* out_layer, size_t struct_size);

/* _init sets one stage, one micro-batch, no budget. */
typedef struct sluice_planner_problem_s {
  size_t struct_size;                          /* set by sluice_planner_problem_init */
  const sluice_ext_header_t* next;             /* NULL */
  const sluice_planner_layer_t* const* layers; /* [num_layers] in the order in which they run */
  const sluice_stages_edge_t* edges;           /* [num_edges]; none: a chain, each layer reads the one before it */
  const sluice_stages_link_t* links;           /* [num_stages - 1]; NULL: messages take no time */
  const uint64_t* budget_bytes;                /* [num_stages] limits of device memory; NULL: no limits. 0: no limit on
                                                  that stage */
  const int32_t* in_flight;     /* [num_stages] outstanding micro-batches, used instead of the schedule's, or NULL */
  uint64_t base_bytes;          /* allocated on each stage, regardless of its layers */
  double copy_bytes_per_second; /* between device and host memory; 0: nothing is offloaded */
  int32_t num_layers;           /* >= num_stages: no stage stays empty */
  int32_t num_edges;
  int32_t num_stages;
  int32_t num_micro_batches;  /* m >= 1 of a step */
  int32_t schedule;           /* SLUICE_STAGES_1F1B, ... */
  int32_t in_flight_limit;    /* L of MESSAGE_DRIVEN; 0: num_stages */
  int32_t weight_versions;    /* 0: one (synchronous); 1: one for each outstanding micro-batch (PipeDream) */
  int32_t copies_share_links; /* 1: copies use the links of the messages, which have priority */
  int32_t method;             /* SLUICE_STAGES_AUTO, ... */
  int32_t reserved;           /* 0 */
} sluice_planner_problem_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_planner_problem_init(sluice_planner_problem_t* out_problem,
                                                                   size_t struct_size);

/* The reason for a layer's option: the effect of giving this layer alone its fastest option. */
enum {
  SLUICE_STAGES_FASTEST = 0,    /* the layer has its fastest option */
  SLUICE_STAGES_FREE = 1,       /* the stage would be reason_bytes over the budget; the option that was chosen does not
                                   slow the stage down */
  SLUICE_STAGES_SAVES = 2,      /* the stage would be reason_bytes over the budget; the option that was chosen costs the
                                   stage reason_seconds */
  SLUICE_STAGES_UNBURDENS = 3,  /* the fastest option fits, but its copies would make the stage reason_seconds slower */
  SLUICE_STAGES_NO_TIME = 4,    /* the copies of the fastest option do not return before the backward */
  SLUICE_STAGES_OVER_BUDGET = 5 /* nothing fits: the options with the fewest bytes in total were chosen */
};

/* The stage and the option of a layer. */
typedef struct sluice_stages_choice_s {
  int32_t stage;
  int32_t kind;    /* SLUICE_STAGES_KEEP, ...: the kind of the option */
  int32_t option;  /* index in the layer's options; for a layer with neither moe nor options its kind; for moe see `moe`
                      below */
  int32_t fastest; /* index of the option that the reason is about */
  int32_t reason;  /* SLUICE_STAGES_FASTEST, ... */
  int32_t reserved;
  uint64_t reason_bytes;
  double reason_seconds;
} sluice_stages_choice_t;

/* The effect of moving the cut before a stage by one layer. */
typedef struct sluice_stages_other_cut_s {
  double slowest_seconds; /* slowest stage after the change; INFINITY: no layer may move, or short_bytes gives the
                             reason */
  uint64_t short_bytes;   /* bytes that one of the two stages would lack */
  int32_t layer;          /* the layer that would move; -1: none may */
  int32_t reserved;
} sluice_stages_other_cut_t;

/* Predictions for a stage. */
typedef struct sluice_stages_stage_s {
  double seconds;         /* forward and backward of a micro-batch: the period of the stage in the pipeline */
  double compute_seconds; /* forward and backward of its layers */
  double extra_seconds;   /* part of compute_seconds: time that the fastest options would not take (recomputation) */
  double message_seconds; /* time in which its links are busy */
  double copy_seconds;    /* time of its copies */
  uint64_t bytes;         /* sum of the following except host_bytes: the bytes that budgets limit */
  uint64_t base_bytes;
  uint64_t parameter_bytes; /* all versions */
  uint64_t state_bytes;
  uint64_t message_bytes;
  uint64_t resident_bytes;
  uint64_t held_bytes; /* held bytes of all outstanding micro-batches */
  uint64_t working_bytes;
  uint64_t staging_bytes; /* the buffer of copies in progress */
  uint64_t arena_bytes;
  uint64_t host_bytes;   /* in host memory: the copied bytes of all outstanding micro-batches */
  uint64_t peak_bytes;   /* maximum of `bytes` in use at one time: the layer that runs, the bytes that the layers before
                            it hold of its micro-batch, and all bytes that the k - 1 others hold */
  uint64_t budget_bytes; /* 0: none */
  int32_t in_flight;     /* k */
  int32_t num_layers;
  /* The alternatives to the stage's first layer. For the first stage no layer may move. */
  sluice_stages_other_cut_t begins_earlier; /* with one more layer, from the stage before */
  sluice_stages_other_cut_t begins_later;   /* with one layer less, which moves to the stage before */
} sluice_stages_stage_t;

/* After _init the caller sets the arrays, which are its own memory. */
typedef struct sluice_planner_result_s {
  size_t struct_size;              /* set by sluice_planner_result_init */
  const sluice_ext_header_t* next; /* NULL */
  sluice_stages_choice_t* choices; /* [num_layers] */
  sluice_stages_stage_t* stages;   /* [num_stages] */
  /* [num_layers] or NULL. For a layer with moe its choice, for sluice_planner_predict: seconds without those of the
   * host, slower_by relative to its fastest option, bytes_over as reason_bytes, and in total_bytes its share of the
   * budget, which is the memory that it would need alone with k outstanding micro-batches. Zeros for other layers. */
  sluice_planner_candidate_t* moe;
  /* [text_room] or NULL: the plan in lines, "stage S: ..." followed by "  layer I: ..." for each of its layers, each
   * with its reason. */
  char* text;
  uint64_t text_room;
  uint64_t text_bytes;            /* out: size of the whole text, the terminating 0 included */
  double slowest_seconds;         /* time of the slowest stage, which each micro-batch adds to a step */
  double step_seconds;            /* time of m micro-batches: one through all stages, m - 1 at the pace of the slowest
                                     stage */
  uint64_t smallest_budget_bytes; /* OVER_BUDGET: bytes that blocking_stage needs in the partition that needs the
                                     least */
  uint64_t short_bytes;           /* OVER_BUDGET: lower bound of the bytes that every budget lacks */
  int32_t slowest_stage;          /* index of the slowest stage */
  int32_t blocking_stage;         /* OVER_BUDGET: index; otherwise -1 */
  int32_t is_optimal;             /* 1: no plan has a faster slowest stage */
  int32_t num_rounds;             /* rounds of the heuristic, each with a partition and a choice of options */
} sluice_planner_result_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_planner_result_init(sluice_planner_result_t* out_result,
                                                                  size_t struct_size);

/* Computes a plan. Everything is borrowed for the call. Any thread, with results of their own. Errors: INVALID_ARGUMENT
 * (names the layer, field or stage, what was found and what it may be), ABI, NO_MEMORY, UNSUPPORTED (callback experts
 * do not support the requested policy): no result. OVER_BUDGET: the error and the result name the blocking stage, the
 * bytes that it lacks and the smallest budget with which it would not block; the rest of the result is the plan that
 * needs the fewest bytes. For a chain this is exact: with equal budgets, smallest_budget_bytes on every stage fits and
 * one byte less does not; with other budgets every budget has to grow by short_bytes. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_planner_stages(const sluice_planner_problem_t* problem,
                                                                     sluice_planner_result_t* inout_result);

/* Predicts a plan whose stages the caller gives, for a decision between the plan in force and another. Before the call
 * choices[i].stage is the stage of layer i: no stage is empty, and no layer reads one of a later stage.
 * choices[i].option is the layer's option, numbered as in a plan; or -1 in all layers, and the fastest options that fit
 * are chosen. Options with copies are priced even if their copies return too late. The call fills the result as
 * sluice_planner_stages does; begins_earlier and begins_later assume that the two stages choose their options again.
 * Any thread, with results of their own. Errors: as sluice_planner_stages. OVER_BUDGET is about the given stages, with
 * smallest_budget_bytes for the stage that lacks most. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_planner_price_stages(const sluice_planner_problem_t* problem,
                                                                           sluice_planner_result_t* inout_result);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_STAGES_H_ */
