/* The planner over layers: which layer runs on which stage of a pipeline, and what is done with what each layer keeps
 * between its forward and its backward, so that the slowest stage is as fast as budgets in bytes allow. A model without
 * a pipeline is one stage.
 *
 * Pure: needs no context, no ranks, no clock and no random numbers; equal problems give equal plans.
 *
 * Units. Seconds and bytes of one micro-batch, unless a field says otherwise. A stage is one rank, or a group of ranks
 * that all do the same. Layers stand in the order in which they run.
 *
 * What a stage takes, with k outstanding micro-batches:
 *   bytes   = base + parameters * versions + state + one message in + k * the message out
 *           + sum over its layers of (resident + k * held) + largest working + largest copied + largest arena
 *   seconds = max(compute, messages, copies), with copies_share_links max(compute, messages + copies)
 * Copied bytes go out behind a layer's forward and come back before its backward. Such an option is open only where
 * both copies fit in between: the stage's layers behind it, twice, and k - 1 other micro-batches.
 *
 * Source: vPipe (TPDS 2022), whose stored text lacks equations and numbers: both formulas are reconstructed; message
 * buffers, working memory, the arena and the one buffer of copies are added. PipeDream (SOSP 2019) for chains.
 * docs/planner.md has the method.
 */
#ifndef SLUICE_STAGES_H_
#define SLUICE_STAGES_H_

#include "sluice/planner.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What an option does with a layer's activations. For people and hosts: plans go by seconds and bytes. */
enum {
  SLUICE_STAGES_KEEP = 0,
  SLUICE_STAGES_RECOMPUTE = 1,
  SLUICE_STAGES_OFFLOAD = 2,
  SLUICE_STAGES_MIXED = 3 /* a plan of the layer's own, which `tag` names */
};

/* One way to run a layer, of which a plan takes one. */
typedef struct sluice_stages_option_s {
  double forward_seconds;
  double backward_seconds; /* with what it computes again */
  uint64_t resident_bytes; /* always there, over what the layer has anyway: buffers of this option's */
  uint64_t held_bytes;     /* from the forward of a micro-batch to its backward */
  uint64_t copied_bytes;   /* to host memory and back, of each micro-batch */
  uint64_t working_bytes;  /* while the layer runs; the layers of a stage take turns */
  uint64_t arena_bytes;    /* always there, and one for all layers of a stage: as large as the largest of them needs */
  int32_t kind;            /* SLUICE_STAGES_KEEP, ... */
  int32_t tag;             /* the caller's; plans do not depend on it */
} sluice_stages_option_t;

/* Layer `to` reads the output of layer `from`, which runs earlier. */
typedef struct sluice_stages_edge_s {
  int32_t from;
  int32_t to;
} sluice_stages_edge_t;

/* Between a stage and the next. A message takes latency + bytes / rate. */
typedef struct sluice_stages_link_s {
  double bytes_per_second; /* > 0 */
  double latency_seconds;
  int32_t full_duplex; /* 1: outputs and gradients pass each other; 0: one after the other */
  int32_t reserved;    /* 0 */
} sluice_stages_link_t;

/* How many micro-batches are between their forward and their backward on stage s of p. */
enum {
  SLUICE_STAGES_1F1B = 0,          /* min(m, p - s) */
  SLUICE_STAGES_GPIPE = 1,         /* m: all forwards, then all backwards */
  SLUICE_STAGES_MESSAGE_DRIVEN = 2 /* what has arrived runs, backwards first: min(m, L), on the last stage 1 */
};

enum {
  SLUICE_STAGES_AUTO = 0,  /* chains by dynamic programming, others by the heuristic and the best cut of the order */
  SLUICE_STAGES_EXACT = 1, /* chains alone: the least possible slowest stage, however long it takes */
  SLUICE_STAGES_HEURISTIC = 2,  /* vPipe's: coarsen, Kernighan-Lin, refine, in turns with the choice of options */
  SLUICE_STAGES_UNCOARSENED = 3 /* the same without coarsening */
};

/* A layer: of three kinds, by which of `moe` and `options` is set.
 *
 * neither  its activations are kept, recomputed or offloaded as a whole. Keep holds activation_bytes; recompute holds
 *          checkpoint_bytes and has the rest once, while the layer runs; offload copies activation_bytes.
 * moe      a Mixture-of-Experts layer: its options are its plans (number of chunks n, restore policies,
 *          weight-gradient mode), priced on the machine of `planner`. Seconds and bytes below are what the host adds to
 *          each (its gate, its copy of the tokens). Slots are one arena of all such layers of a stage.
 * options  the caller's own.
 */
typedef struct sluice_planner_layer_s {
  size_t struct_size;              /* set by sluice_planner_layer_init */
  const sluice_ext_header_t* next; /* NULL */
  double forward_seconds;
  double backward_seconds;
  double recompute_seconds;  /* of the forward once more; not with moe or options */
  uint64_t activation_bytes; /* what the backward needs, the layer's input included; not with options */
  uint64_t checkpoint_bytes; /* what recomputing starts from: the input. <= activation_bytes; not with moe or options */
  uint64_t workspace_bytes;  /* while it runs, in any case; not with options */
  uint64_t parameter_bytes;  /* one version of the weights */
  uint64_t state_bytes;      /* gradients, master weights, moments: once, whatever is outstanding */
  uint64_t output_bytes;     /* what layers that read it get; its gradient is as large */
  const sluice_planner_t* planner;       /* the machine of `moe`; borrowed */
  const sluice_planner_workload_t* moe;  /* memory_budget, kept_chunks and may_keep_part 0, max_outstanding 1, no
                                            lists by chunk; world_size alike in all layers. host_memory_budget 0 */
  const sluice_planner_choice_t* wanted; /* of `moe`, as in sluice_planner_choose: what is fixed. NULL: all open */
  const sluice_stages_option_t* options; /* [num_options], one of which copies nothing */
  int32_t num_options;
  int32_t may_recompute; /* 1; 0: this layer must not run again (as one that draws random numbers of its own) */
  int32_t may_offload;   /* 1; 0: its activations stay. With moe: no option that offloads */
  int32_t reserved;      /* 0 */
} sluice_planner_layer_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_planner_layer_init(sluice_planner_layer_t* out_layer, size_t struct_size);

/* Prepared by _init: one stage, one micro-batch, no budget. */
typedef struct sluice_planner_problem_s {
  size_t struct_size;                          /* set by sluice_planner_problem_init */
  const sluice_ext_header_t* next;             /* NULL */
  const sluice_planner_layer_t* const* layers; /* [num_layers] in the order in which they run */
  const sluice_stages_edge_t* edges;           /* [num_edges]; none: a chain, each layer reads the one before it */
  const sluice_stages_link_t* links;           /* [num_stages - 1]; NULL: messages take no time */
  const uint64_t* budget_bytes;                /* [num_stages] of device memory; NULL: no limits. 0: none there */
  const int32_t* in_flight;     /* [num_stages] outstanding micro-batches in place of the schedule's, or NULL */
  uint64_t base_bytes;          /* on each stage, whatever runs there */
  double copy_bytes_per_second; /* between device and host memory; 0: nothing is offloaded */
  int32_t num_layers;           /* >= num_stages: no stage stays empty */
  int32_t num_edges;
  int32_t num_stages;
  int32_t num_micro_batches;  /* m >= 1 of a step */
  int32_t schedule;           /* SLUICE_STAGES_1F1B, ... */
  int32_t in_flight_limit;    /* L of MESSAGE_DRIVEN; 0: num_stages */
  int32_t weight_versions;    /* 0: one (synchronous); 1: one for each outstanding micro-batch (PipeDream) */
  int32_t copies_share_links; /* 1: copies take the wire of the messages, which go first */
  int32_t method;             /* SLUICE_STAGES_AUTO, ... */
  int32_t reserved;           /* 0 */
} sluice_planner_problem_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_planner_problem_init(sluice_planner_problem_t* out_problem,
                                                                   size_t struct_size);

/* Why a layer has its option, by what would be if it alone had its fastest one. */
enum {
  SLUICE_STAGES_FASTEST = 0,    /* it has; nothing is faster */
  SLUICE_STAGES_FREE = 1,       /* reason_bytes over the budget; and this option does not make the stage slower */
  SLUICE_STAGES_SAVES = 2,      /* reason_bytes over the budget; this option costs the stage reason_seconds */
  SLUICE_STAGES_UNBURDENS = 3,  /* it fits, but copies would make the stage reason_seconds slower */
  SLUICE_STAGES_NO_TIME = 4,    /* its copies do not return before the backward, which comes too soon */
  SLUICE_STAGES_OVER_BUDGET = 5 /* nothing fits: this option is of those that take the fewest bytes together */
};

/* Where a layer runs, and how. */
typedef struct sluice_stages_choice_s {
  int32_t stage;
  int32_t kind;    /* SLUICE_STAGES_KEEP, ...: of the option */
  int32_t option;  /* index in the layer's; of a layer with neither moe nor options its kind; of moe see `moe` below */
  int32_t fastest; /* index of the option that the reason speaks of */
  int32_t reason;  /* SLUICE_STAGES_FASTEST, ... */
  int32_t reserved;
  uint64_t reason_bytes;
  double reason_seconds;
} sluice_stages_choice_t;

/* What would be if one layer more, or one less, stood on a stage's side of the cut in front of it. */
typedef struct sluice_stages_other_cut_s {
  double slowest_seconds; /* of all stages then; INFINITY: no layer may move, or short_bytes says why not */
  uint64_t short_bytes;   /* that one of both stages would lack */
  int32_t layer;          /* that would move; -1: none may */
  int32_t reserved;
} sluice_stages_other_cut_t;

/* What is predicted of a stage. */
typedef struct sluice_stages_stage_s {
  double seconds;         /* of a micro-batch, forward and backward: the stage's turn in the pipeline */
  double compute_seconds; /* forward and backward of its layers */
  double extra_seconds;   /* of these, what the fastest options would not take: recomputation */
  double message_seconds; /* its links are busy for so long */
  double copy_seconds;    /* so are copies */
  uint64_t bytes;         /* all of the following but host_bytes: what budgets bound */
  uint64_t base_bytes;
  uint64_t parameter_bytes; /* all versions */
  uint64_t state_bytes;
  uint64_t message_bytes;
  uint64_t resident_bytes;
  uint64_t held_bytes; /* of all outstanding micro-batches */
  uint64_t working_bytes;
  uint64_t staging_bytes; /* the buffer of copies under way */
  uint64_t arena_bytes;
  uint64_t host_bytes;   /* in host memory: copied bytes of all outstanding micro-batches */
  uint64_t peak_bytes;   /* of `bytes`, what is there at a time at most: a layer that runs, what the layers before it
                            hold of its micro-batch, and all that the k - 1 others hold */
  uint64_t budget_bytes; /* 0: none */
  int32_t in_flight;     /* k */
  int32_t num_layers;
  /* Why the stage begins where it does; of the first stage no layer may move. */
  sluice_stages_other_cut_t begins_earlier; /* a layer more, from the stage before */
  sluice_stages_other_cut_t begins_later;   /* a layer less, to the stage before */
} sluice_stages_stage_t;

/* Prepared by _init; then the caller sets the arrays, which are its own memory. */
typedef struct sluice_planner_result_s {
  size_t struct_size;              /* set by sluice_planner_result_init */
  const sluice_ext_header_t* next; /* NULL */
  sluice_stages_choice_t* choices; /* [num_layers] */
  sluice_stages_stage_t* stages;   /* [num_stages] */
  /* [num_layers] or NULL. Of a layer with moe its choice, for sluice_planner_predict: seconds without the host's own,
   * slower_by over its fastest option, bytes_over as reason_bytes, and in total_bytes its share of the budget, which
   * is all that it would take alone with k outstanding micro-batches. Of other layers zeros. */
  sluice_planner_candidate_t* moe;
  /* [text_room] or NULL: the plan in lines, "stage S: ..." and behind it "  layer I: ..." for each of its layers, each
   * with its reason. */
  char* text;
  uint64_t text_room;
  uint64_t text_bytes;            /* out: what all of the text takes, the terminating 0 included */
  double slowest_seconds;         /* of the slowest stage: what a micro-batch adds to a step */
  double step_seconds;            /* m micro-batches: one through all stages, m - 1 by the slowest */
  uint64_t smallest_budget_bytes; /* OVER_BUDGET: what blocking_stage needs in the partition that needs least */
  uint64_t short_bytes;           /* OVER_BUDGET: what every budget lacks, at least */
  int32_t slowest_stage;          /* index */
  int32_t blocking_stage;         /* OVER_BUDGET: index; otherwise -1 */
  int32_t is_optimal;             /* 1: no plan has a faster slowest stage */
  int32_t num_rounds;             /* the heuristic's turns of partition and options */
} sluice_planner_result_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_planner_result_init(sluice_planner_result_t* out_result,
                                                                  size_t struct_size);

/* Plans. Everything is borrowed for the call. Any thread, with results of their own. Errors: INVALID_ARGUMENT naming
 * the layer, field or stage, what was found and what it may be; ABI; NO_MEMORY; UNSUPPORTED (callback experts that
 * cannot do the policy asked for): no result. OVER_BUDGET: the record and the result name the stage in the way, what it
 * lacks and the smallest budget with which it would not be, and the rest of the result is the plan that needs fewest
 * bytes. For a chain that is exact: with budgets all alike, smallest_budget_bytes on every stage fits and one byte less
 * does not; else every budget has to grow by short_bytes. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_planner_stages(const sluice_planner_problem_t* problem,
                                                                     sluice_planner_result_t* inout_result);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_STAGES_H_ */
