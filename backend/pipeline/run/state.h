// SPDX-License-Identifier: Apache-2.0
/* A pipeline on one rank: what lasts, and where its batch is. Private to backend/pipeline/run. */
#ifndef SLUICE_BACKEND_PIPELINE_RUN_STATE_H_
#define SLUICE_BACKEND_PIPELINE_RUN_STATE_H_

#include "backend/pipeline/run/handshake.h"
#include "backend/pipeline/run/batch_metadata.h"
#include "backend/pipeline/run/plan.h"
#include "backend/pipeline/run/run.h"
#include "backend/pipeline/run/values.h"
#include "backend/pipeline/runner.h"

/* What another rank has said. */
typedef struct sluice_stage_peer_s {
  int32_t is_heard;                 /* a receive of its next word is posted */
  sluice_stage_head_t done;         /* the newest */
  sluice_batch_metadata_t notes[2]; /* of the ends of two batches; this rank's own too */
  uint64_t stopped;                 /* its newest batch that failed; 0: none */
  sluice_stage_reason_t reason;
  sluice_message_arrival_t* stop; /* with the tags of what it had sent here; NULL: all of that has been asked for */
  const uint64_t* tags;
  uint64_t num_tags;
  uint64_t waits_in; /* the batch in which it waits long, and for whom */
  int32_t waits_for;
} sluice_stage_peer_t;

/* What the first replica has begun. */
typedef struct sluice_stage_orders_s {
  uint64_t batch[4 * SLUICE_PIPELINE_MAX_TURNS];
  int32_t op[4 * SLUICE_PIPELINE_MAX_TURNS];
  int32_t first, count; /* a ring */
} sluice_stage_orders_t;

/* Where a batch is. */
typedef enum sluice_stage_phase_e {
  SLUICE_STAGE_IDLE = 0, /* between batches, or behind one that failed */
  SLUICE_STAGE_RUNS,
  SLUICE_STAGE_STOPS /* failed: nothing begins any more */
} sluice_stage_phase_t;

struct sluice_pipeline_s {
  sluice_pipeline_callbacks_t callbacks;
  void* user;
  sluice_stage_handshake_t agreed;
  sluice_stage_endpoint_t* endpoint; /* NULL: one rank */
  atomic_flag is_busy;
  _Atomic int32_t is_aborted;
  sluice_status_t broken; /* the failure that ended it, and its story */
  sluice_error_info_t why;

  /* Batches. */
  uint64_t number; /* of the newest, from 1 */
  uint64_t begin_ns;
  int32_t num_micro_batches, forward_only;
  sluice_stage_phase_t phase;
  int32_t needs_drain;          /* the newest has failed, and not all that was sent in it has arrived */
  int32_t stopper;              /* rank that stopped the newest batch; -1 */
  int32_t has_news;             /* a rank has ended the newest batch, and has not been compared */
  sluice_stage_plan_t plans[2]; /* of training and of evaluation, each for the newest m */
  sluice_stage_plan_t* plan;    /* of the newest batch; NULL: refused before it had one */
  sluice_runner_t runner;
  sluice_stage_peer_t* peers;    /* [num_ranks] */
  sluice_stage_orders_t* orders; /* where this rank follows; else NULL */

  /* Requests under way. */
  int64_t num_sends, num_receives, num_drains;
  uint64_t progress_ns; /* when something last happened that the batch waited for */
  int32_t has_said_so;  /* since then: that it waits */

  /* What was measured: of this rank's virtual stages in the batch that runs, of all in two batches, and of the first
   * training batch. */
  sluice_stage_times_t own_times[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  int32_t num_timed[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  sluice_stage_times_t told[2][SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  sluice_stage_times_t times[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  int32_t has_times;
  int32_t has_told;   /* the newest batch has ended, and all its times and notes are there */
  const double* note; /* the host's, read where this rank's batch ends */
  int32_t note_count;

  /* In flight now. */
  int32_t in_flight, held;
  uint64_t bytes;
  const sluice_stage_tensors_t *input_now, *output_grad_now; /* of the callback that runs */
  sluice_stage_value_t *input_value, *output_grad_value;
  sluice_pipeline_stats_t stats;
};

/* The k-th of this rank's virtual stages is c. */
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

/* Whether the output of c - 1 lies on this rank, where c is. */
static inline int sluice_stage_is_in_place(const sluice_pipeline_t* pipeline, int32_t virtual_stage) {
  return virtual_stage > 0 && !sluice_pipeline_crosses(&pipeline->agreed.spec, virtual_stage - 1);
}

/* ---- values.c's functions with the host's release: release.c ---- */

/* The host's result is read no more, or was refused. */
void sluice_stage_tell_released(const sluice_pipeline_t* pipeline, int32_t which, int32_t virtual_stage,
                                int32_t micro_batch);
void sluice_stage_leave(sluice_pipeline_t* pipeline, int32_t which, int32_t virtual_stage, int32_t micro_batch);
void sluice_stage_drop_all(sluice_pipeline_t* pipeline);

/* ---- messages.c ---- */

/* Posts a send or a receive of the program. */
sluice_status_t sluice_stage_post(sluice_pipeline_t* pipeline, int32_t op);
/* Takes a completion, waiting for one until deadline_ns (0: only looks). out_taken may not be NULL. */
sluice_status_t sluice_stage_take(sluice_pipeline_t* pipeline, uint64_t deadline_ns, int32_t* out_taken);
/* Waits until something is taken. Errors: TIMED_OUT naming the straggler, EXTERNAL (interrupted), failures. */
sluice_status_t sluice_stage_wait(sluice_pipeline_t* pipeline);
/* Something happened that the batch waited for: its deadline begins anew. */
void sluice_stage_note_progress(sluice_pipeline_t* pipeline);
/* Remembers that the endpoint has failed. Returns status. */
sluice_status_t sluice_stage_break(sluice_pipeline_t* pipeline, sluice_status_t status);
/* The same where the endpoint has failed, which knows whom it has lost and not in which batch. */
sluice_status_t sluice_stage_break_endpoint(sluice_pipeline_t* pipeline, sluice_status_t status);

/* ---- report.c ---- */

/* Between batches: nothing else of the pipeline runs until is_busy is cleared. Errors: BUSY. */
sluice_status_t sluice_stage_enter(sluice_pipeline_t* pipeline);

/* ---- control.c ---- */

/* From now on every rank is heard, until it has ended the batch that runs: then it owes nothing more, and may leave. */
sluice_status_t sluice_stage_listen(sluice_pipeline_t* pipeline);
sluice_status_t sluice_stage_take_control(sluice_pipeline_t* pipeline, const sluice_message_completion_t* completion);
/* payload: [num_spans], what they point to is borrowed until the send has ended, which num_sends counts. */
sluice_status_t sluice_stage_tell(sluice_pipeline_t* pipeline, int32_t rank, const void* head, uint64_t head_bytes,
                                  const sluice_message_span_t* payload, int32_t num_spans);
sluice_stage_head_t sluice_stage_new_head(const sluice_pipeline_t* pipeline, int32_t kind);
/* Whether another rank runs the same batch; else MISMATCH. */
sluice_status_t sluice_stage_compare(const sluice_pipeline_t* pipeline, int32_t rank, const sluice_stage_head_t* head);

/* ---- stop.c ---- */

/* Where a peer has stopped this batch, or has ended another one than this: the failure. */
sluice_status_t sluice_stage_check_peers(sluice_pipeline_t* pipeline);
/* Ends a batch that failed with `status`, which this thread has recorded: tells all, takes back what can be, waits for
 * the rest. Returns it, recorded again. */
sluice_status_t sluice_stage_stop(sluice_pipeline_t* pipeline, sluice_status_t status);
/* Asks for what the rank has sent in the batch that it stopped and this one has failed too. */
sluice_status_t sluice_stage_drain_from(sluice_pipeline_t* pipeline, int32_t rank);
/* Before the next batch: nothing of the failed one is under way any more. */
sluice_status_t sluice_stage_drain(sluice_pipeline_t* pipeline);

/* ---- work.c ---- */

/* Runs an op of the stage's thread. */
sluice_status_t sluice_stage_work(sluice_pipeline_t* pipeline, int32_t op);
/* The op has ended. */
void sluice_stage_ended(sluice_pipeline_t* pipeline, int32_t op);

#endif /* SLUICE_BACKEND_PIPELINE_RUN_STATE_H_ */
