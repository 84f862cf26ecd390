// SPDX-License-Identifier: Apache-2.0
/* Where one stage is in its program: what has ended, what is ready, what the policy runs next.
 *
 * An executor and the simulator drive it alike: they post what sluice_runner_next_post gives, run what
 * sluice_runner_next gives when the stage's thread is free, and say sluice_runner_end of either when it has ended. A
 * runner belongs to one thread at a time. It allocates when it is made and never afterwards. */
#ifndef SLUICE_BACKEND_PIPELINE_RUNNER_H_
#define SLUICE_BACKEND_PIPELINE_RUNNER_H_

#include "backend/pipeline/program.h"

typedef struct sluice_runner_s {
  const sluice_pipeline_program_t* program; /* borrowed until sluice_runner_deinit */
  int32_t stage;
  int32_t first_op;
  int32_t num_ops;
  int32_t num_ended;
  int32_t next_place; /* of a planned order */
  int32_t follows;    /* the policy leaves collective ops to sluice_runner_take: another replica leads */
  int64_t clock;      /* grows with everything that arrives or becomes ready */
  int32_t num_ready;
  int32_t first_post, num_posts; /* of `posts`, in the order in which they became ready */
  int64_t* arrived;              /* by op of the stage: when its message did; 0: it takes none, or it has not */
  int32_t* missing;              /* by op of the stage: needs that have not ended */
  int32_t* first_dependent;      /* by op of the stage, and one behind */
  int32_t* dependents;           /* ops of the stage that need it */
  int32_t* posts;
  sluice_stage_candidate_t* ready; /* for the stage's thread, where no order binds */
  uint64_t bytes;
} sluice_runner_t;

/* Ops that need nothing are ready at once. Errors: NO_MEMORY. */
sluice_status_t sluice_runner_init(sluice_runner_t* runner, const sluice_pipeline_program_t* program, int32_t stage,
                                   sluice_allocator_t* allocator);
void sluice_runner_deinit(sluice_runner_t* runner, sluice_allocator_t* allocator);

/* Takes the op that the stage's thread runs next; -1: nothing may run now. In a blocking plan it may be a message, in
 * which the thread waits. */
int32_t sluice_runner_next(sluice_runner_t* runner);
/* Takes an op for the stage's thread that another replica has chosen, where it is ready. Returns whether it was. */
int sluice_runner_take(sluice_runner_t* runner, int32_t op);
/* Takes the next message to be posted beside computation; -1: none. */
int32_t sluice_runner_next_post(sluice_runner_t* runner);
/* The op (of the program) has ended. */
void sluice_runner_end(sluice_runner_t* runner, int32_t op);

static inline int sluice_runner_is_done(const sluice_runner_t* runner) { return runner->num_ended == runner->num_ops; }

#endif /* SLUICE_BACKEND_PIPELINE_RUNNER_H_ */
