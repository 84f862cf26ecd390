// SPDX-License-Identifier: Apache-2.0
/* Sends and receives of activations and gradients, and the waits for them. */
#include <stdio.h>

#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/group/wait.h"
#include "backend/pipeline/run/state.h"

static int32_t rank_of_peer(const sluice_pipeline_t* pipeline, const sluice_stage_op_t* op) {
  const sluice_stage_handshake_t* agreed = &pipeline->agreed;
  return agreed->rank_of[op->peer * agreed->num_replicas + agreed->replica];
}

static sluice_stage_record_t* record_of(const sluice_pipeline_t* pipeline, int32_t op) {
  return &pipeline->plan->records[op - pipeline->plan->first_op];
}

sluice_status_t sluice_stage_break(sluice_pipeline_t* pipeline, sluice_status_t status) {
  if (pipeline->broken == SLUICE_OK) {
    pipeline->broken = status;
    sluice_error_capture(&pipeline->why);
  }
  return status;
}

sluice_status_t sluice_stage_break_endpoint(sluice_pipeline_t* pipeline, sluice_status_t status) {
  sluice_error_info_t why;
  sluice_error_capture(&why);
  status = sluice_error_record(status, pipeline->agreed.rank, why.peer, why.native_code, "pipeline: batch %llu: %s",
                               (unsigned long long)pipeline->number, why.message);
  return sluice_stage_break(pipeline, status);
}

/* Handles the status of a call that starts a request: an error that leaves the endpoint unchanged does not break it. */
static sluice_status_t note_failure(sluice_pipeline_t* pipeline, sluice_status_t status) {
  const int lives_on = status == SLUICE_OK || sluice_is_out_of_memory(status) || status == SLUICE_E_INVALID_ARGUMENT;
  return lives_on ? status : sluice_stage_break_endpoint(pipeline, status);
}

/* ---- posting ---- */

static sluice_status_t post_send(sluice_pipeline_t* pipeline, int32_t index) {
  const sluice_stage_op_t* op = &pipeline->plan->program->ops[index];
  const int is_activation = op->kind == SLUICE_STAGE_SEND_ACTIVATION;
  const int32_t which = is_activation ? SLUICE_STAGE_VALUE_OUTPUT : SLUICE_STAGE_VALUE_INPUT_GRAD;
  sluice_stage_value_t* value = sluice_stage_value(pipeline, which, op->virtual_stage, op->micro_batch);
  sluice_stage_record_t* record = record_of(pipeline, index);
  sluice_stage_head_t head = sluice_stage_new_head(pipeline, SLUICE_STAGE_HEAD_TENSORS);
  head.num_tensors = value->view.num_tensors;
  head.word = value->view.word;
  if (!is_activation) {
    const sluice_stage_value_t* input =
        sluice_stage_value(pipeline, SLUICE_STAGE_VALUE_INPUT, op->virtual_stage, op->micro_batch);
    head.dwell_ns = record->begin_ns - input->since_ns;
  }
  value->since_ns = record->begin_ns;
  record->bytes = value->bytes;
  const sluice_message_t message = {
      .peer = rank_of_peer(pipeline, op),
      .num_spans = value->packed.num_spans,
      .tag = sluice_stage_tag(pipeline->number, op),
      .head = &head,
      .head_bytes = sizeof head,
      .spans = value->packed.spans,
  };
  SLUICE_TRY(sluice_messages_send(pipeline->endpoint->messages, &message,
                                  sluice_stage_request(SLUICE_STAGE_REQUEST_SEND, index), &record->request));
  ++pipeline->num_sends;
  ++pipeline->stats.messages_sent;
  pipeline->stats.bytes_sent += record->bytes;
  return SLUICE_OK;
}

static sluice_status_t post_receive(sluice_pipeline_t* pipeline, int32_t index) {
  const sluice_stage_op_t* op = &pipeline->plan->program->ops[index];
  SLUICE_TRY(sluice_messages_receive(
      pipeline->endpoint->messages, rank_of_peer(pipeline, op), sluice_stage_tag(pipeline->number, op),
      sluice_stage_request(SLUICE_STAGE_REQUEST_RECEIVE, index), &record_of(pipeline, index)->request));
  ++pipeline->num_receives;
  return SLUICE_OK;
}

sluice_status_t sluice_stage_post(sluice_pipeline_t* pipeline, int32_t index) {
  sluice_stage_record_t* record = record_of(pipeline, index);
  record->begin_ns = sluice_now_ns();
  const int is_send = sluice_stage_op_is_send(pipeline->plan->program->ops[index].kind);
  sluice_status_t status = is_send ? post_send(pipeline, index) : post_receive(pipeline, index);
  record->was_posted = status == SLUICE_OK;
  return note_failure(pipeline, status);
}

/* ---- completions ---- */

/* Measures a link: half of the round trip, without the time that the other end took; the minimum over all
 * micro-batches, since either end may have been busy when a message arrived. */
static void note_link(sluice_pipeline_t* pipeline, const sluice_stage_op_t* op, const sluice_stage_head_t* head,
                      const sluice_stage_value_t* gradient) {
  const sluice_stage_value_t* output =
      sluice_stage_value(pipeline, SLUICE_STAGE_VALUE_OUTPUT, op->virtual_stage, op->micro_batch);
  const uint64_t there_and_back_ns = gradient->since_ns - output->since_ns;
  if (there_and_back_ns <= head->dwell_ns) return;
  sluice_stage_times_t* times = &pipeline->own_times[sluice_stage_local(pipeline, op->virtual_stage)];
  const double link_s = sluice_seconds(there_and_back_ns - head->dwell_ns) / 2;
  if (times->link_s == 0 || link_s < times->link_s) times->link_s = link_s;
  times->message_bytes = sluice_max_u64(times->message_bytes, gradient->bytes);
}

static sluice_status_t take_tensors(sluice_pipeline_t* pipeline, int32_t index,
                                    const sluice_message_completion_t* completion) {
  const sluice_stage_op_t* op = &pipeline->plan->program->ops[index];
  const sluice_stage_head_t* head = completion->head;
  sluice_status_t status = SLUICE_OK;
  if (completion->head_bytes != sizeof *head || head->magic != SLUICE_STAGE_MAGIC) {
    status = SLUICE_FAIL_PEER(SLUICE_E_INTERNAL, pipeline->agreed.rank, completion->peer,
                              "pipeline: rank %d sent an invalid message; please report it", completion->peer);
  } else {
    status = sluice_stage_compare(pipeline, completion->peer, head);
  }
  if (status != SLUICE_OK) {
    sluice_messages_release(pipeline->endpoint->messages, completion->arrival);
    return status;
  }
  const int is_activation = op->kind == SLUICE_STAGE_RECEIVE_ACTIVATION;
  const int32_t which = is_activation ? SLUICE_STAGE_VALUE_INPUT : SLUICE_STAGE_VALUE_OUTPUT_GRAD;
  sluice_stage_value_t* value = sluice_stage_value(pipeline, which, op->virtual_stage, op->micro_batch);
  char where[96];
  (void)snprintf(where, sizeof where, "the %s of micro-batch %d in virtual stage %d",
                 is_activation ? "input" : "gradient of the output", op->micro_batch, op->virtual_stage);
  SLUICE_TRY(sluice_stage_value_arrive(value, pipeline->endpoint, completion, where));
  value->since_ns = sluice_now_ns();
  if (!is_activation) note_link(pipeline, op, head, value);
  record_of(pipeline, index)->bytes = value->bytes;
  pipeline->stats.bytes_received += value->bytes;
  return SLUICE_OK;
}

static sluice_status_t take_receive(sluice_pipeline_t* pipeline, int32_t index,
                                    const sluice_message_completion_t* completion) {
  --pipeline->num_receives;
  record_of(pipeline, index)->request = 0;
  record_of(pipeline, index)->has_ended = 1;
  if (pipeline->phase != SLUICE_STAGE_RUNS) {
    sluice_messages_release(pipeline->endpoint->messages, completion->arrival);
    return SLUICE_OK;
  }
  SLUICE_TRY(take_tensors(pipeline, index, completion));
  sluice_stage_ended(pipeline, index);
  return SLUICE_OK;
}

static void take_sent(sluice_pipeline_t* pipeline, int32_t index) {
  const sluice_stage_op_t* op = &pipeline->plan->program->ops[index];
  --pipeline->num_sends;
  record_of(pipeline, index)->request = 0;
  record_of(pipeline, index)->has_ended = 1;
  if (pipeline->phase == SLUICE_STAGE_RUNS) sluice_stage_ended(pipeline, index);
  const int is_activation = op->kind == SLUICE_STAGE_SEND_ACTIVATION;
  sluice_stage_leave(pipeline, is_activation ? SLUICE_STAGE_VALUE_OUTPUT : SLUICE_STAGE_VALUE_INPUT_GRAD,
                     op->virtual_stage, op->micro_batch);
}

static sluice_status_t take(sluice_pipeline_t* pipeline, const sluice_message_completion_t* completion) {
  const int32_t index = sluice_stage_request_index(completion->user);
  switch (sluice_stage_request_kind(completion->user)) {
    case SLUICE_STAGE_REQUEST_SEND: take_sent(pipeline, index); return SLUICE_OK;
    case SLUICE_STAGE_REQUEST_RECEIVE: return take_receive(pipeline, index, completion);
    case SLUICE_STAGE_REQUEST_TELL: --pipeline->num_sends; return SLUICE_OK;
    case SLUICE_STAGE_REQUEST_DRAIN:
      --pipeline->num_drains;
      sluice_messages_release(pipeline->endpoint->messages, completion->arrival);
      return SLUICE_OK;
    default: return sluice_stage_take_control(pipeline, completion);
  }
}

void sluice_stage_note_progress(sluice_pipeline_t* pipeline) {
  pipeline->progress_ns = sluice_now_ns();
  pipeline->has_said_so = 0;
}

sluice_status_t sluice_stage_take(sluice_pipeline_t* pipeline, uint64_t deadline_ns, int32_t* out_taken) {
  *out_taken = 0;
  sluice_message_completion_t completion;
  sluice_status_t status = sluice_messages_next(pipeline->endpoint->messages, deadline_ns, &completion);
  if (status == SLUICE_E_TIMED_OUT) return SLUICE_OK;
  if (status != SLUICE_OK) return sluice_stage_break_endpoint(pipeline, status);
  *out_taken = 1;
  /* A message that says how long a rank has waited is no progress. */
  const int32_t kind = sluice_stage_request_kind(completion.user);
  if (kind != SLUICE_STAGE_REQUEST_CONTROL && kind != SLUICE_STAGE_REQUEST_TELL) sluice_stage_note_progress(pipeline);
  return take(pipeline, &completion);
}

/* ---- waiting ---- */

/* Returns the rank that this one waits for; -1: unknown. */
static int32_t awaited(const sluice_pipeline_t* pipeline) {
  const sluice_stage_plan_t* plan = pipeline->plan;
  int32_t oldest = -1;
  for (int32_t i = 0; plan != NULL && pipeline->phase == SLUICE_STAGE_RUNS && i < plan->num_ops; ++i) {
    const sluice_stage_record_t* record = &plan->records[i];
    if (record->request == 0) continue;
    if (oldest < 0 || record->begin_ns < plan->records[oldest].begin_ns) oldest = i;
  }
  if (oldest >= 0) return rank_of_peer(pipeline, &plan->program->ops[plan->first_op + oldest]);
  for (int32_t r = 0; r < pipeline->agreed.num_ranks; ++r) {
    const sluice_stage_peer_t* peer = &pipeline->peers[r];
    if (r != pipeline->agreed.rank && peer->done.batch < pipeline->number && peer->stopped < pipeline->number) return r;
  }
  return -1;
}

static int32_t waits_for(const void* user, int32_t rank) {
  const sluice_pipeline_t* pipeline = user;
  const sluice_stage_peer_t* peer = &pipeline->peers[rank];
  return rank == pipeline->agreed.rank || peer->waits_in != pipeline->number ? -1 : peer->waits_for;
}

static int32_t find_straggler(const sluice_pipeline_t* pipeline) {
  return sluice_wait_find_straggler(awaited(pipeline), pipeline->agreed.num_ranks, waits_for, pipeline);
}

static sluice_status_t fail_timed_out(sluice_pipeline_t* pipeline, uint64_t waited_ns) {
  const int32_t straggler = find_straggler(pipeline);
  sluice_status_t status = SLUICE_FAIL_PEER(
      SLUICE_E_TIMED_OUT, pipeline->agreed.rank, straggler,
      "pipeline: rank %d has waited %.1f s in batch %llu for rank %d: check what that rank is doing (log, stack)",
      pipeline->agreed.rank, sluice_seconds(waited_ns), (unsigned long long)pipeline->number, straggler);
  return sluice_stage_break(pipeline, status);
}

static sluice_status_t tell_waiting(sluice_pipeline_t* pipeline) {
  sluice_stage_head_t head = sluice_stage_new_head(pipeline, SLUICE_STAGE_HEAD_WAITING);
  head.about = awaited(pipeline);
  pipeline->has_said_so = 1;
  for (int32_t r = 0; r < pipeline->agreed.num_ranks; ++r) {
    if (r != pipeline->agreed.rank) SLUICE_TRY(sluice_stage_tell(pipeline, r, &head, sizeof head, NULL, 0));
  }
  return SLUICE_OK;
}

static int is_interrupted(const sluice_pipeline_t* pipeline) {
  if (pipeline->phase != SLUICE_STAGE_RUNS) return 0;
  const sluice_pipeline_callbacks_t* callbacks = &pipeline->callbacks;
  if (callbacks->is_interrupted != NULL && callbacks->is_interrupted(pipeline->user)) return 1;
  sluice_comm_t* comm = pipeline->endpoint->comm;
  return comm->vtable->is_interrupted != NULL && comm->vtable->is_interrupted(comm);
}

sluice_status_t sluice_stage_wait(sluice_pipeline_t* pipeline) {
  const sluice_comm_t* comm = pipeline->endpoint->comm;
  sluice_wait_t wait = sluice_wait_begin(comm->timeout_ns, comm->warn_ns);
  for (;;) {
    /* Progress restarts the deadline. */
    wait.deadline_ns = sluice_add_saturating(pipeline->progress_ns, comm->timeout_ns);
    wait.note_ns = sluice_add_saturating(pipeline->progress_ns, comm->timeout_ns / 2);
    if (pipeline->has_said_so) wait.note_ns = UINT64_MAX;
    int32_t is_taken;
    SLUICE_TRY(sluice_stage_take(pipeline, sluice_wait_slice_end(&wait), &is_taken));
    const uint64_t now_ns = sluice_now_ns();
    if (is_taken) {
      pipeline->stats.wait_ns += now_ns - wait.start_ns;
      return SLUICE_OK;
    }
    if (is_interrupted(pipeline)) {
      return SLUICE_FAIL_PEER(SLUICE_E_EXTERNAL, pipeline->agreed.rank, -1,
                              "pipeline: the host of rank %d interrupted batch %llu", pipeline->agreed.rank,
                              (unsigned long long)pipeline->number);
    }
    if (now_ns >= wait.deadline_ns) return fail_timed_out(pipeline, now_ns - pipeline->progress_ns);
    if (sluice_wait_takes_note(&wait, now_ns)) SLUICE_TRY(tell_waiting(pipeline));
    char phase[64];
    (void)snprintf(phase, sizeof phase, "batch %llu of a pipeline", (unsigned long long)pipeline->number);
    sluice_wait_warn(&wait, now_ns, pipeline->agreed.rank, find_straggler(pipeline), phase);
  }
}
