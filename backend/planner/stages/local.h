// SPDX-License-Identifier: Apache-2.0
/* Chooses the options within one stage whose layers are given: the fastest choice that fits its budget.
 *
 * Three solvers of one problem. _leanest finds the choice with the fewest bytes, exactly: a stage fits if that choice
 * does. _greedy is vPipe's local algorithm, generalised from {swap, recompute} to any options, run from both ends and
 * polished by single changes and exchanges of two. _exact is branch and bound that starts from the answer of _greedy.
 *
 * Source: vPipe, local swap and recompute algorithm: swap the tensors that free most bytes in idle link time, then
 * recompute those that free most bytes per second. Leanest, polish and branch and bound are ours. */
#pragma once

#include "backend/planner/stages/tables.h"

/* An option of a layer of this stage, with this stage's k and the predicted start of its backward. */
typedef struct sluice_stages_local_item_s {
  double seconds;
  double copy_seconds; /* out and in */
  uint64_t bytes;      /* resident, plus held by all outstanding micro-batches */
  uint64_t working;
  uint64_t staging;
  uint64_t arena;
  int32_t option; /* index among the layer's options */
  int32_t layer;  /* position in the stage */
} sluice_stages_local_item_t;

/* Of branch and bound: a step of a layer's hull: fewer bytes for more weighted seconds. */
typedef struct sluice_stages_local_increment_s {
  double bytes;
  double seconds;
  int32_t depth; /* of the layer in the decision order */
  int32_t index; /* breaks ties */
} sluice_stages_local_increment_t;

/* Cost of a choice. Stages are compared by turn; compute and copies break ties. */
typedef struct sluice_stages_local_sum_s {
  double turn;
  double compute;
  double copies;
  uint64_t bytes; /* total of the stage */
} sluice_stages_local_sum_t;

/* A stage and its answer. The memory is that of a workspace, for one stage at a time. */
typedef struct sluice_stages_local_s {
  const sluice_stages_tables_t* tables;
  int32_t count;                     /* layers */
  int32_t stage;                     /* number of the stage */
  int32_t* first;                    /* [count + 1] in items */
  sluice_stages_local_item_t* items; /* by layer, in order of seconds */
  uint64_t fixed_bytes;              /* base, parameters, state, messages */
  uint64_t budget;                   /* UINT64_MAX: none */
  double messages;
  int32_t* pick;                 /* [count] chosen items: the answer */
  sluice_stages_local_sum_t sum; /* of the answer */
  int32_t is_proven;             /* the answer is optimal */
  /* Scratch of the solvers. */
  int32_t* best;       /* [count] */
  int32_t* order;      /* [num_items] */
  void* increments;    /* of sluice_stages_local_increment_t, also other scratch */
  uint64_t* least;     /* [count] */
  double* suffix;      /* [6 * (num_layers + 1)] */
  uint64_t most_nodes; /* of branch and bound; 0: greedy only */
  uint64_t steps;      /* options and nodes visited so far: the cost, independent of the machine */
  void* block;
  uint64_t block_bytes;
} sluice_stages_local_t;

/* Allocates memory for stages with any layers of a problem. Errors: NO_MEMORY. */
sluice_status_t sluice_stages_local_make(const sluice_stages_tables_t* tables, sluice_stages_local_t* out_local);
void sluice_stages_local_deinit(sluice_stages_local_t* local);

/* Puts layers [count], in execution order, on a stage with messages of these bytes. */
void sluice_stages_local_set(sluice_stages_local_t* local, const int32_t* layers, int32_t count, int32_t stage,
                             uint64_t in_bytes, uint64_t out_bytes);
/* The same for the run [first, end), with the messages that cross its ends. */
void sluice_stages_local_set_run(sluice_stages_local_t* local, int32_t stage, int32_t first, int32_t end);

sluice_stages_local_sum_t sluice_stages_local_sum(const sluice_stages_local_t* local, const int32_t* pick);
/* Returns 1 if a is better than b, by more than rounding. Both must fit. */
int sluice_stages_local_is_better(const sluice_stages_local_sum_t* a, const sluice_stages_local_sum_t* b);

/* Returns the fewest bytes of any choice, exactly, if they are fewer than `below`; else `below`. */
uint64_t sluice_stages_local_fewest_bytes(sluice_stages_local_t* local, uint64_t below);
/* Sets the answer to the choice with the fewest bytes, exactly, whatever its seconds. */
void sluice_stages_local_leanest(sluice_stages_local_t* local);
/* Returns 1 if the answer fits; 0 if no choice fits, and the answer is the leanest. */
int sluice_stages_local_greedy(sluice_stages_local_t* local);
/* Improves a fitting answer until no single change and no exchange of two helps. */
void sluice_stages_local_polish(sluice_stages_local_t* local);
/* Runs greedy, then branch and bound up to most_nodes. Searches only for turns below cap: if is_proven and the turn of
 * the answer is not below cap, there is none. */
int sluice_stages_local_exact(sluice_stages_local_t* local, double cap);
