// SPDX-License-Identifier: Apache-2.0
/* Simulates a stage program in virtual time: the duration of a batch, the waits of stages, the data in flight.
 *
 * Each stage runs one op at a time, which the program's policy chooses among the ready ones. A link from one stage to
 * another carries one message at a time, in the order in which they could begin; the two directions between two stages
 * are two links. Rendezvous: a message begins when its send and its receive are both posted, and the send ends with it,
 * as MPI and gloo do for large messages. Buffered: the send ends at once and the message begins without waiting for its
 * receive. Under a blocking plan the stage does nothing else while it sends or receives.
 *
 * Cards: if stages have one network card each, messages to the next and to the previous stage share its outgoing
 * capacity, and messages from both share its incoming capacity. Messages in flight then have max-min fair rates, as
 * connections do.
 *
 * A reduction begins when its stage chooses it and runs concurrently with the stage's thread; the reductions of one
 * stage run one after the other. The flush waits for them.
 *
 * All events of one moment precede the choices of stages at that moment. Seconds may be in any unit, the same
 * everywhere. */
#pragma once

#include "backend/pipeline/program.h"

typedef struct sluice_pipeline_times_s {
  /* Times by virtual stage, for one micro-batch. A backward without split weight gradients takes backward + weight. */
  double forward_s[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  double backward_s[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  double weight_s[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  double reduce_s[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES]; /* of all gradients of a virtual stage, once per batch */
  /* Times of the messages between c and c + 1, each way: latency + the spec's message_bytes · s_per_byte. */
  double latency_s[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  double s_per_byte[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  int32_t is_buffered;
  int32_t shares_cards; /* else each direction between two stages has its own link */
  /* The time of an op or a message (its send) that begins at begin_s, instead of `seconds`: jitter, a slow stage, a
   * link that stalls. Called once for each as it begins. NULL: seconds. */
  double (*seconds_of)(void* user, const sluice_stage_op_t* op, double begin_s, double seconds);
  void* user;
} sluice_pipeline_times_t;

typedef struct sluice_stage_result_s {
  double busy_s;          /* in forwards, backwards and weight gradients */
  double bubble;          /* share of the makespan that is not busy */
  int32_t most_in_flight; /* begun forwards without an ended backward, over all virtual stages of the stage */
  int32_t most_held;      /* ended backwards without an ended weight gradient */
  uint64_t peak_bytes;    /* maximum of the bytes of both kinds, by the sizes in the spec */
} sluice_stage_result_t;

typedef struct sluice_pipeline_result_s {
  double makespan_s; /* from the first op to the last flush */
  double bubble;     /* share of all stages' time that is not busy */
  sluice_stage_result_t stages[SLUICE_PIPELINE_MAX_STAGES];
  int32_t most_in_flight[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES]; /* by virtual stage */
} sluice_pipeline_result_t;

/* out_begin, out_end: [num_ops], or NULL; for a message the time on its link. Thread-safe: nothing is shared. Errors:
 * INVALID_ARGUMENT (a time below 0 or not finite, also from seconds_of), NO_MEMORY, INTERNAL (a program that deadlocks,
 * which the checker would reject). */
sluice_status_t sluice_pipeline_simulate(const sluice_pipeline_program_t* program, const sluice_pipeline_times_t* times,
                                         sluice_allocator_t* allocator, sluice_pipeline_result_t* out_result,
                                         double* out_begin, double* out_end);
