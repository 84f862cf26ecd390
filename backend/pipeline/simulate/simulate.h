/* A stage program in virtual time: how long a batch takes, where stages wait, what is in flight.
 *
 * Each stage runs one op at a time, chosen by the program's policy among what is ready. A link from one stage to
 * another carries one message at a time, in the order in which they could begin; the two directions between two stages
 * are two links. Rendezvous: a message begins when its send and its receive are both posted, and the send ends with it,
 * as MPI and gloo do for large messages. Buffered: the send ends at once and the message begins without waiting for its
 * receive. Under a blocking plan the stage does nothing else while it sends or receives.
 *
 * Cards: where stages have one network card each, a message to the stage behind and one to the stage before share what
 * goes out of it, and what comes in from both shares what comes in. Messages under way then go at max-min fair rates,
 * as connections do.
 *
 * A reduction begins when its stage chooses it, and goes on beside the stage's thread; those of one stage one behind
 * the other. The flush waits for it.
 *
 * What happens at one moment has happened before any stage chooses. Seconds may be in any unit, the same everywhere. */
#ifndef SLUICE_BACKEND_PIPELINE_SIMULATE_SIMULATE_H_
#define SLUICE_BACKEND_PIPELINE_SIMULATE_SIMULATE_H_

#include "backend/pipeline/program.h"

typedef struct sluice_pipeline_times_s {
  /* By virtual stage, of one micro-batch. A backward whose weight gradients are not apart takes backward + weight. */
  double forward_s[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  double backward_s[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  double weight_s[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  double reduce_s[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES]; /* of all gradients of a virtual stage, once a batch */
  /* Of the messages between c and c + 1, each way: latency + the spec's message_bytes · s_per_byte. */
  double latency_s[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  double s_per_byte[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  int32_t is_buffered;
  int32_t shares_cards; /* else a link of its own for each direction between two stages */
  /* What an op or a message (its send) that begins at begin_s takes in place of seconds: jitter, a slow stage, a link
   * that stalls. Asked once for each as it begins. NULL: seconds. */
  double (*seconds_of)(void* user, const sluice_stage_op_t* op, double begin_s, double seconds);
  void* user;
} sluice_pipeline_times_t;

typedef struct sluice_stage_result_s {
  double busy_s;          /* in forwards, backwards and weight gradients */
  double bubble;          /* share of the makespan that is not busy */
  int32_t most_in_flight; /* forwards begun whose backward has not ended, over all virtual stages of the stage */
  int32_t most_held;      /* backwards ended whose weight gradient has not */
  uint64_t peak_bytes;    /* of both, by the spec's bytes */
} sluice_stage_result_t;

typedef struct sluice_pipeline_result_s {
  double makespan_s; /* from the first op to the last flush */
  double bubble;     /* share of all stages' time that is not busy */
  sluice_stage_result_t stages[SLUICE_PIPELINE_MAX_STAGES];
  int32_t most_in_flight[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES]; /* by virtual stage */
} sluice_pipeline_result_t;

/* out_begin, out_end: [num_ops], or NULL; of a message the time on its link. Thread-safe: nothing is shared. Errors:
 * INVALID_ARGUMENT (a time below 0 or not finite, seconds_of's among them), NO_MEMORY, INTERNAL (a program in which
 * nothing can move, which the checker would refuse). */
sluice_status_t sluice_pipeline_simulate(const sluice_pipeline_program_t* program, const sluice_pipeline_times_t* times,
                                         sluice_allocator_t* allocator, sluice_pipeline_result_t* out_result,
                                         double* out_begin, double* out_end);

#endif /* SLUICE_BACKEND_PIPELINE_SIMULATE_SIMULATE_H_ */
