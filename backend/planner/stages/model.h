/* A model, a pipeline and its budgets as plain data, and the plan over them: which layer runs on which stage, and what
 * is done with what each layer keeps between its forward and its backward.
 *
 * Units. Seconds and bytes of one micro-batch, unless a field says otherwise. A stage is one rank, or a group of ranks
 * that all do the same. Layers stand in the order in which they run.
 *
 * Options. A layer has one or several options, of which a plan takes one. Keeping, recomputing and offloading
 * activations are options of one kind (sluice_stages_options_of_profile makes the three); so are the plans of a
 * Mixture-of-Experts layer (numbers of chunks n, restore policies), each with its own seconds and bytes.
 *
 * What a stage takes, with k outstanding micro-batches (predict_stages.h has the same as code):
 *   bytes   = base + parameters * versions + state + one buffer of each message in and out
 *           + sum over its layers of (resident + k * held) + largest working + largest copied
 *   seconds = max(compute, messages, copies), with copies_share_links max(compute, messages + copies)
 * Copies: two for each copied byte, out behind the forward and in before the backward. One buffer is under way at a
 * time: where it is not free the stage waits, so that bytes are an upper bound and seconds a prediction.
 *
 * An option that copies is open to a layer only where both copies fit between its forward and its backward, which the
 * order of the stage predicts: the stage's layers behind it, twice, and k - 1 other micro-batches.
 *
 * Source: vPipe (TPDS 2022), SRP problem and local algorithm. The stored text of the paper has neither its equations
 * nor its numbers, so that both formulas above are reconstructed; message buffers, working memory and the one buffer of
 * copies are added here. */
#ifndef SLUICE_BACKEND_PLANNER_STAGES_MODEL_H_
#define SLUICE_BACKEND_PLANNER_STAGES_MODEL_H_

#include <stdint.h>

/* What an option does with a layer's activations. For people and hosts: the planner looks at seconds and bytes. */
enum {
  SLUICE_STAGES_KEEP = 0,
  SLUICE_STAGES_RECOMPUTE = 1,
  SLUICE_STAGES_OFFLOAD = 2,
  SLUICE_STAGES_MIXED = 3 /* a plan of the layer's own, which `tag` names */
};

typedef struct sluice_stages_option_s {
  double forward_seconds;
  double backward_seconds; /* with what it computes again */
  uint64_t resident_bytes; /* always there, over what the layer has anyway: buffers of this option's */
  uint64_t held_bytes;     /* from the forward of a micro-batch to its backward */
  uint64_t copied_bytes;   /* to host memory and back, of each micro-batch */
  uint64_t working_bytes;  /* while the layer runs; the layers of a stage take turns */
  int32_t kind;            /* SLUICE_STAGES_* */
  int32_t tag;             /* the caller's; plans do not depend on it */
} sluice_stages_option_t;

typedef struct sluice_stages_layer_s {
  const sluice_stages_option_t* options; /* [num_options] */
  uint64_t parameter_bytes;              /* one version of the weights */
  uint64_t state_bytes;                  /* gradients, master weights, moments: once, whatever is outstanding */
  uint64_t output_bytes;                 /* what layers that read it get; its gradient is as large */
  int32_t num_options;                   /* >= 1 */
  int32_t reserved;                      /* 0 */
} sluice_stages_layer_t;

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

/* How many micro-batches are between their forward and their backward on stage s of p (in_flight.h). */
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

typedef struct sluice_stages_problem_s {
  const sluice_stages_layer_t* layers; /* [num_layers] in the order in which they run */
  const sluice_stages_edge_t* edges;   /* [num_edges]; none: a chain, each layer reads the one before it */
  const sluice_stages_link_t* links;   /* [num_stages - 1]; NULL: messages take no time */
  const uint64_t* budget_bytes;        /* [num_stages] of device memory; NULL: no limits. 0: none for that stage */
  const int32_t* in_flight;            /* [num_stages] outstanding micro-batches in place of the schedule's, or NULL */
  uint64_t base_bytes;                 /* on each stage, whatever runs there */
  double copy_bytes_per_second;        /* between device and host memory; 0: nothing can be copied */
  int32_t num_layers;                  /* >= num_stages: no stage stays empty */
  int32_t num_edges;
  int32_t num_stages;
  int32_t num_micro_batches;  /* m >= 1 of a step */
  int32_t schedule;           /* SLUICE_STAGES_1F1B, ... */
  int32_t in_flight_limit;    /* L of MESSAGE_DRIVEN; 0: num_stages */
  int32_t weight_versions;    /* 0: one (synchronous); 1: one for each outstanding micro-batch (PipeDream) */
  int32_t copies_share_links; /* 1: copies take the wire of the messages, which go first */
  int32_t method;             /* SLUICE_STAGES_AUTO, ... */
  int32_t reserved;           /* 0 */
} sluice_stages_problem_t;

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
  int32_t option;  /* index in the layer's */
  int32_t reason;  /* SLUICE_STAGES_FASTEST, ... */
  int32_t fastest; /* index of the option that the reason speaks of */
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
  uint64_t bytes;         /* all of the following but host_bytes */
  uint64_t base_bytes;
  uint64_t parameter_bytes; /* all versions */
  uint64_t state_bytes;
  uint64_t message_bytes;
  uint64_t resident_bytes;
  uint64_t held_bytes; /* of all outstanding micro-batches */
  uint64_t working_bytes;
  uint64_t staging_bytes; /* the buffer of copies under way */
  uint64_t host_bytes;    /* in host memory: copied bytes of all outstanding micro-batches */
  uint64_t budget_bytes;  /* 0: none */
  int32_t in_flight;      /* k */
  int32_t num_layers;
  /* Why the stage begins where it does; of the first stage no layer may move. */
  sluice_stages_other_cut_t begins_earlier; /* a layer more, from the stage before */
  sluice_stages_other_cut_t begins_later;   /* a layer less, to the stage before */
} sluice_stages_stage_t;

typedef struct sluice_stages_plan_s {
  sluice_stages_choice_t* choices; /* [num_layers], the caller's memory */
  sluice_stages_stage_t* stages;   /* [num_stages], the caller's memory */
  double slowest_seconds;          /* of the slowest stage: what a micro-batch adds to a step */
  double step_seconds;             /* m micro-batches: one through all stages, m - 1 by the slowest */
  uint64_t smallest_budget_bytes;  /* OVER_BUDGET: what blocking_stage needs in the partition that needs least */
  uint64_t short_bytes;            /* OVER_BUDGET: what every budget lacks, at least */
  int32_t slowest_stage;           /* index */
  int32_t blocking_stage;          /* OVER_BUDGET: index; otherwise -1 */
  int32_t is_optimal;              /* 1: no plan has a faster slowest stage */
  int32_t num_rounds;              /* the heuristic's turns of partition and options */
} sluice_stages_plan_t;

#endif /* SLUICE_BACKEND_PLANNER_STAGES_MODEL_H_ */
