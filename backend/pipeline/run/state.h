// SPDX-License-Identifier: Apache-2.0
/* The state of a pipeline on one rank, and of its current batch: one stage, with the same runner as the simulator, over
 * messages (comm/messages.h) and the host's callbacks (sluice/pipeline.h). Private to backend/pipeline/run.
 *
 * The thread in sluice_pipeline_run_batch runs all callbacks. Messages progress in the background: the executor posts
 * what is ready before each callback, and takes completions after it. */
#pragma once

#include "backend/comm/comm.h"
#include "backend/pipeline/run/values.h"
#include "backend/pipeline/runner.h"
#include "backend/pipeline/simulate/simulate.h"
#include "sluice/pipeline.h"

/* The handshake of all ranks of a pipeline before its first batch. */

/* The settings that one rank asks for; ranks compare them. */
typedef struct sluice_pipeline_terms_s {
  sluice_pipeline_config_t config; /* placement and separate_wgrad are set; pointers are borrowed for the call */
  int32_t policy;                  /* SLUICE_POLICY_* of policy.h */
  int32_t reduces;                 /* whether the host has the callback */
} sluice_pipeline_terms_t;

typedef struct sluice_stage_handshake_s {
  sluice_pipeline_spec_t spec; /* without num_micro_batches; in_flight and held are 0 if open */
  int32_t num_ranks;
  int32_t num_replicas;
  int32_t rank, stage, replica; /* of this rank */
  int32_t* rank_of;             /* [p][num_replicas] */
  int32_t* replica_of;          /* [num_ranks] */
  int32_t* stage_of;            /* [num_ranks] */
} sluice_stage_handshake_t;

/* Collective over comm (NULL: one rank), with the same terms on all ranks. mine: this rank's earlier status; a failure
 * is told to the other ranks and returned, and terms are ignored. out_agreed: release with sluice_stage_handshake_free.
 */
sluice_status_t sluice_stage_shake_hands(const sluice_pipeline_terms_t* terms, sluice_status_t mine,
                                         sluice_comm_t* comm, sluice_stage_handshake_t* out_agreed);
void sluice_stage_handshake_free(sluice_stage_handshake_t* agreed);

/* The program of a batch and its memory, made when m or the limits change. */

typedef struct sluice_stage_record_s {
  uint64_t begin_ns, end_ns;
  uint64_t bytes;
  sluice_message_request_t request; /* of a message in flight; 0: none */
  int32_t was_posted;
  int32_t has_ended;
} sluice_stage_record_t;

typedef struct sluice_stage_plan_s {
  sluice_pipeline_program_t* program; /* NULL: none yet */
  uint64_t fingerprint;               /* of everything that determines its run */
  int32_t num_micro_batches;
  int32_t had_times; /* whether times were known when it was made */
  int32_t is_chosen; /* L was chosen with them */
  int32_t first_op;  /* of this rank's stage, and their number */
  int32_t num_ops;
  sluice_stage_value_t* values;   /* [v][SLUICE_STAGE_VALUE_COUNT][m] */
  sluice_stage_record_t* records; /* by op of the stage */
  uint64_t* tags;                 /* [num_ops]: reported to the other ranks if the batch fails */
  int32_t* ends;                  /* ops in the order in which they ended */
  int32_t num_ends;
  void* memory;
  uint64_t memory_bytes;
} sluice_stage_plan_t;

/* Makes a plan for m. times: [p * v] for all virtual stages if they are measured, else NULL. Keeps the present plan if
 * it still fits. Errors: those of sluice_pipeline_program_build and sluice_pipeline_choose; the plan is then empty. */
sluice_status_t sluice_stage_plan_make(sluice_stage_plan_t* plan, const sluice_pipeline_spec_t* agreed, int32_t stage,
                                       int32_t num_micro_batches, int32_t forward_only,
                                       const sluice_stage_times_t* times);
/* Fills the times of a simulation from the measured ones (NULL: a backward takes as long as two forwards, messages take
 * no time). */
void sluice_stage_fill_times(const sluice_pipeline_spec_t* spec, const sluice_stage_times_t* measured,
                             sluice_pipeline_times_t* out_times);
/* Prepares the plan for the next batch. */
void sluice_stage_plan_reset(sluice_stage_plan_t* plan);
void sluice_stage_plan_free(sluice_stage_plan_t* plan);

/* The numbers of a host that are sent with the end of a batch. */
typedef struct sluice_batch_metadata_s {
  double* numbers; /* [room] */
  int32_t count;   /* of valid numbers */
  int32_t room;
} sluice_batch_metadata_t;

/* The state of another rank, from its control messages. */
typedef struct sluice_stage_peer_s {
  int32_t is_heard;                 /* a receive of its next control message is posted */
  sluice_stage_head_t done;         /* the newest one */
  sluice_batch_metadata_t notes[2]; /* for the ends of two batches; for this rank its own */
  uint64_t stopped;                 /* its newest batch that failed; 0: none */
  sluice_stage_reason_t reason;
  sluice_message_arrival_t*
      stop; /* lists the tags of its messages to this rank; NULL: all of them have been received or posted */
  const uint64_t* tags;
  uint64_t num_tags;
  uint64_t waits_in; /* the batch in which it has waited long, and the rank that it waits for */
  int32_t waits_for;
} sluice_stage_peer_t;

/* The ops that the first replica has begun. */
typedef struct sluice_stage_orders_s {
  uint64_t batch[4 * SLUICE_PIPELINE_MAX_TURNS];
  int32_t op[4 * SLUICE_PIPELINE_MAX_TURNS];
  int32_t first, count; /* of a ring buffer */
} sluice_stage_orders_t;

/* The phase of a batch. */
typedef enum sluice_stage_phase_e {
  SLUICE_STAGE_IDLE = 0, /* between batches, or after a failed one */
  SLUICE_STAGE_RUNS,
  SLUICE_STAGE_STOPS /* failed: no op begins any more */
} sluice_stage_phase_t;

struct sluice_pipeline_s {
  sluice_pipeline_callbacks_t callbacks;
  void* user;
  sluice_stage_handshake_t agreed;
  sluice_stage_endpoint_t* endpoint; /* NULL with one rank */
  atomic_flag is_busy;
  _Atomic int32_t is_aborted;
  sluice_status_t broken; /* the failure that ended it, and its record */
  sluice_error_info_t why;

  /* Batches. */
  uint64_t number; /* of the newest one, from 1 */
  uint64_t begin_ns;
  int32_t num_micro_batches, forward_only;
  sluice_stage_phase_t phase;
  int32_t needs_drain;          /* the newest has failed, and not all its messages have arrived */
  int32_t stopper;              /* the rank that stopped the newest batch; -1: none */
  int32_t has_news;             /* a rank has ended the newest batch, and its values have not been compared yet */
  sluice_stage_plan_t plans[2]; /* for training and for evaluation, each for the newest m */
  sluice_stage_plan_t* plan;    /* of the newest batch; NULL: it was refused before it had one */
  sluice_runner_t runner;
  sluice_stage_peer_t* peers;    /* [num_ranks] */
  sluice_stage_orders_t* orders; /* if this rank follows; else NULL */

  /* Numbers of requests in flight. */
  int64_t num_sends, num_receives, num_drains;
  uint64_t progress_ns; /* the last event that the batch waited for */
  int32_t has_said_so;  /* the others were told, since then, that this rank waits */

  /* Measured times: of this rank's virtual stages in the current batch, of all virtual stages in two batches, and of
   * the first training batch. */
  sluice_stage_times_t own_times[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  sluice_stage_times_t told[2][SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  sluice_stage_times_t times[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  int32_t has_times;
  int32_t has_told;   /* the newest batch has ended, and all its times and metadata have arrived */
  const double* note; /* of the host, read when this rank's batch ends */
  int32_t note_count;

  /* Micro-batches in flight now. */
  int32_t in_flight, held;
  uint64_t bytes;
  sluice_stage_value_t *input_value, *output_grad_value;
  sluice_pipeline_stats_t stats;
};

/* Returns k if c is the k-th of this rank's virtual stages. */
static inline int32_t sluice_stage_local(const sluice_pipeline_t* pipeline, int32_t virtual_stage) {
  return virtual_stage / pipeline->agreed.spec.num_stages;
}

static inline int sluice_stage_is_last(const sluice_pipeline_t* pipeline, int32_t virtual_stage) {
  return virtual_stage + 1 == sluice_pipeline_num_virtual_stages(&pipeline->agreed.spec);
}

static inline sluice_stage_value_t* sluice_stage_value(const sluice_pipeline_t* pipeline, int32_t which,
                                                       int32_t virtual_stage, int32_t micro_batch) {
  int32_t k = sluice_stage_local(pipeline, virtual_stage);
  return &pipeline->plan->values[(k * SLUICE_STAGE_VALUE_COUNT + which) * pipeline->num_micro_batches + micro_batch];
}

/* Returns whether the output of c - 1 is on this rank, like c. */
static inline int sluice_stage_is_in_place(const sluice_pipeline_t* pipeline, int32_t virtual_stage) {
  return virtual_stage > 0 && !sluice_pipeline_crosses(&pipeline->agreed.spec, virtual_stage - 1);
}

/* ---- work.c: functions of values.c that also tell the host ---- */

/* Tells the host that its result is no longer used, or was refused. */
void sluice_stage_tell_released(const sluice_pipeline_t* pipeline, int32_t which, int32_t virtual_stage,
                                int32_t micro_batch);
void sluice_stage_leave(sluice_pipeline_t* pipeline, int32_t which, int32_t virtual_stage, int32_t micro_batch);
void sluice_stage_drop_all(sluice_pipeline_t* pipeline);

/* ---- messages.c ---- */

/* Posts a send or a receive of the program. */
sluice_status_t sluice_stage_post(sluice_pipeline_t* pipeline, int32_t op);
/* Takes a completion, and waits for one until deadline_ns (0: does not wait). out_taken may not be NULL. */
sluice_status_t sluice_stage_take(sluice_pipeline_t* pipeline, uint64_t deadline_ns, int32_t* out_taken);
/* Waits until a completion is taken. Errors: TIMED_OUT naming the straggler, EXTERNAL (interrupted), failures. */
sluice_status_t sluice_stage_wait(sluice_pipeline_t* pipeline);
/* Records progress of the batch: its deadline starts again. */
void sluice_stage_note_progress(sluice_pipeline_t* pipeline);
/* Remembers that the endpoint has failed. Returns status. */
sluice_status_t sluice_stage_break(sluice_pipeline_t* pipeline, sluice_status_t status);
/* The same after a failure of the endpoint, which knows the lost rank but not the batch. */
sluice_status_t sluice_stage_break_endpoint(sluice_pipeline_t* pipeline, sluice_status_t status);

/* ---- report.c ---- */

/* Call between batches: nothing else of the pipeline runs until is_busy is cleared. Errors: BUSY. */
sluice_status_t sluice_stage_enter(sluice_pipeline_t* pipeline);
/* numbers: [count], any alignment; copied. Errors: NO_MEMORY; then no numbers are valid. */
sluice_status_t sluice_batch_metadata_store(sluice_batch_metadata_t* note, const void* numbers, int32_t count);
void sluice_batch_metadata_free(sluice_batch_metadata_t* note);

/* ---- control.c ---- */

/* From now on this rank receives control messages of every rank, until that rank has ended the current batch: then it
 * sends nothing more, and may leave. */
sluice_status_t sluice_stage_listen(sluice_pipeline_t* pipeline);
sluice_status_t sluice_stage_take_control(sluice_pipeline_t* pipeline, const sluice_message_completion_t* completion);
/* payload: [num_spans]; their data is borrowed until the send has ended, which num_sends counts. */
sluice_status_t sluice_stage_tell(sluice_pipeline_t* pipeline, int32_t rank, const void* head, uint64_t head_bytes,
                                  const sluice_message_span_t* payload, int32_t num_spans);
sluice_stage_head_t sluice_stage_new_head(const sluice_pipeline_t* pipeline, int32_t kind);
/* Returns OK if another rank runs the same batch; else MISMATCH. */
sluice_status_t sluice_stage_compare(const sluice_pipeline_t* pipeline, int32_t rank, const sluice_stage_head_t* head);

/* ---- stop.c ---- */

/* Returns the failure if a peer has stopped this batch, or has ended a different one. */
sluice_status_t sluice_stage_check_peers(sluice_pipeline_t* pipeline);
/* Ends a batch that failed with `status`, which this thread has recorded: tells all ranks, cancels what can be
 * cancelled, waits for the rest. Returns `status`, recorded again. */
sluice_status_t sluice_stage_stop(sluice_pipeline_t* pipeline, sluice_status_t status);
/* Posts receives for the messages of a rank that stopped the batch, after this rank has failed it too. */
sluice_status_t sluice_stage_drain_from(sluice_pipeline_t* pipeline, int32_t rank);
/* Call before the next batch: afterwards no message of the failed one is in flight. */
sluice_status_t sluice_stage_drain(sluice_pipeline_t* pipeline);

/* ---- work.c ---- */

/* Runs an op on the stage's thread. */
sluice_status_t sluice_stage_work(sluice_pipeline_t* pipeline, int32_t op);
/* Call when an op has ended. */
void sluice_stage_ended(sluice_pipeline_t* pipeline, int32_t op);
