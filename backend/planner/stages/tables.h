// SPDX-License-Identifier: Apache-2.0
/* A problem: its check, and tables derived once from it: options worth choosing, sums over runs of layers, readers and
 * sources, messages. */
#pragma once

#include "backend/base/alloc.h"
#include "backend/base/status.h"
#include "backend/planner/stages/model.h"

/* Returns INVALID_ARGUMENT with the field, its value and the valid range. All sums of bytes of a valid problem stay
 * below 2^53, so that they are exact as doubles and no sum wraps. */
sluice_status_t sluice_stages_check(const sluice_stages_problem_t* problem);

/* Returns the most outstanding micro-batches on a stage, whose forward it has run and whose backward it has not: by the
 * problem's own numbers or by its schedule. >= 1. */
int32_t sluice_stages_in_flight(const sluice_stages_problem_t* problem, int32_t stage);

/* An option that no other option of its layer dominates. */
typedef struct sluice_stages_item_s {
  double seconds; /* forward and backward */
  uint64_t resident;
  uint64_t held;
  uint64_t copied;
  uint64_t working;
  uint64_t arena;
  int32_t option; /* index among the layer's options */
} sluice_stages_item_t;

/* Immutable once made. Runs of layers are [first, end) in execution order. */
typedef struct sluice_stages_tables_s {
  const sluice_stages_problem_t* problem; /* borrowed */
  int32_t num_layers;
  int32_t num_stages;
  int32_t num_items;
  int32_t is_chain;
  int32_t* first_item;         /* [num_layers + 1] */
  sluice_stages_item_t* items; /* by layer, fastest first */
  double* fastest;             /* [num_layers + 1] sums before a layer, of the fastest options' seconds */
  uint64_t* parameters;        /* [num_layers + 1] sums before a layer */
  uint64_t* states;            /* [num_layers + 1] */
  uint64_t* leanest;           /* [num_stages, num_layers + 1] of the least resident + k * held */
  uint64_t* cut;               /* [num_layers + 1] bytes that layers before pass to layers from here on */
  int32_t* last_reader;        /* [num_layers]; the layer itself if nothing reads its output */
  int32_t* first_reader;       /* [num_layers + 1] in readers */
  int32_t* readers;            /* of each layer's output */
  int32_t* first_source;       /* [num_layers + 1] in sources */
  int32_t* sources;            /* the layers whose output each layer reads */
  int32_t* in_flight;          /* [num_stages] */
  int32_t* versions;           /* [num_stages] of the weights */
  uint64_t* budget;            /* [num_stages]; UINT64_MAX: none */
  struct {
    void* data;
    uint64_t bytes;
  } block[20];
  int32_t num_blocks;
  sluice_allocator_t* allocator;
} sluice_stages_tables_t;

/* problem: checked, borrowed. Errors: NO_MEMORY, with everything freed. */
sluice_status_t sluice_stages_tables_make(const sluice_stages_problem_t* problem, sluice_allocator_t* allocator,
                                          sluice_stages_tables_t* out_tables);
void sluice_stages_tables_deinit(sluice_stages_tables_t* tables);

static inline double sluice_stages_run_fastest(const sluice_stages_tables_t* t, int32_t first, int32_t end) {
  return t->fastest[end] - t->fastest[first];
}

/* Returns the bytes of a stage with these layers that do not depend on options, without messages. */
static inline uint64_t sluice_stages_run_fixed_bytes(const sluice_stages_tables_t* t, int32_t stage, int32_t first,
                                                     int32_t end) {
  return t->problem->base_bytes + (uint64_t)t->versions[stage] * (t->parameters[end] - t->parameters[first]) +
         t->states[end] - t->states[first];
}

/* Returns a lower bound over all choices of this run on this stage. Grows with the run. */
static inline uint64_t sluice_stages_run_least_bytes(const sluice_stages_tables_t* t, int32_t stage, int32_t first,
                                                     int32_t end) {
  const uint64_t* lean = t->leanest + (uint64_t)stage * ((uint64_t)t->num_layers + 1);
  return sluice_stages_run_fixed_bytes(t, stage, first, end) + lean[end] - lean[first];
}

/* ---- messages between neighbouring stages: an output that a later stage reads crosses every boundary on its way once,
 * and its gradient returns ---- */

/* Returns the bytes that cross from stage `boundary` to the next, one way. stage_of: [num_layers]. */
uint64_t sluice_stages_boundary_bytes(const sluice_stages_tables_t* tables, const int32_t* stage_of, int32_t boundary);

/* Returns the bytes of a stage's buffers: one for its input, and all outputs whose backward has not run, which stages
 * keep. */
uint64_t sluice_stages_message_bytes(const sluice_stages_tables_t* tables, int32_t stage, uint64_t in_bytes,
                                     uint64_t out_bytes);

/* Returns the seconds of both directions of `bytes` on the link after stage `boundary`; zero bytes send nothing. */
double sluice_stages_link_seconds(const sluice_stages_problem_t* problem, int32_t boundary, uint64_t bytes);

/* Returns the seconds that a stage's links are busy; in_bytes arrive over the link before it, out_bytes leave over the
 * link after it. */
double sluice_stages_message_seconds(const sluice_stages_problem_t* problem, int32_t stage, uint64_t in_bytes,
                                     uint64_t out_bytes);

/* Returns the seconds of a stage from those of its parts. */
double sluice_stages_turn_seconds(const sluice_stages_problem_t* problem, double compute, double messages,
                                  double copies);

/* Returns the seconds for copying the bytes out and back in; INFINITY if nothing can be copied. */
double sluice_stages_copy_seconds(const sluice_stages_problem_t* problem, uint64_t bytes);
