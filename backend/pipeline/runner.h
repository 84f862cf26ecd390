// SPDX-License-Identifier: Apache-2.0
/* The progress of one stage in its program: which ops have ended, which are ready, and which one the policy runs next.
 *
 * The executor and the simulator use it in the same way: they post what sluice_runner_next_post returns, run what
 * sluice_runner_next returns when the stage's thread is free, and call sluice_runner_end when an op has ended. A runner
 * belongs to one thread at a time. It allocates only in sluice_runner_init. */
#pragma once

#include "backend/pipeline/program.h"

typedef struct sluice_runner_s {
  const sluice_pipeline_program_t* program; /* borrowed until sluice_runner_deinit */
  int32_t stage;
  int32_t first_op;
  int32_t num_ops;
  int32_t num_ended;
  int32_t next_place; /* in a planned order */
  int32_t follows;    /* collective ops are started by sluice_runner_take, because another replica leads */
  int64_t clock;      /* increases with every arrival and every op that becomes ready */
  int32_t num_ready;
  int32_t first_post, num_posts; /* range of `posts`, in the order in which they became ready */
  int64_t* arrived;         /* by op of the stage: when its message arrived; 0: it has none, or it has not arrived */
  int32_t* missing;         /* by op of the stage: number of needs that have not ended */
  int32_t* first_dependent; /* [number of ops of the stage + 1] */
  int32_t* dependents;      /* ops of the stage that need it */
  int32_t* posts;
  sluice_stage_candidate_t* ready; /* for the stage's thread, if no order is binding */
  uint64_t bytes;
} sluice_runner_t;

/* Ops without needs are ready at once. Errors: NO_MEMORY. */
sluice_status_t sluice_runner_init(sluice_runner_t* runner, const sluice_pipeline_program_t* program, int32_t stage,
                                   sluice_allocator_t* allocator);
void sluice_runner_deinit(sluice_runner_t* runner, sluice_allocator_t* allocator);

/* Returns the op that the stage's thread runs next; -1: no op may run now. In a blocking plan it may be a message, in
 * which the thread waits. */
int32_t sluice_runner_next(sluice_runner_t* runner);
/* Starts an op for the stage's thread that another replica has chosen, if it is ready. Returns whether it was. */
int sluice_runner_take(sluice_runner_t* runner, int32_t op);
/* Returns the next message to post asynchronously; -1: none. */
int32_t sluice_runner_next_post(sluice_runner_t* runner);
/* Call when the op (of the program) has ended. */
void sluice_runner_end(sluice_runner_t* runner, int32_t op);

static inline int sluice_runner_is_done(const sluice_runner_t* runner) { return runner->num_ended == runner->num_ops; }
