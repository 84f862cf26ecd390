// SPDX-License-Identifier: Apache-2.0
/* Stops a batch that fails: all ranks learn of it, no message of it stays in flight, and the next batch works.
 *
 * Every rank tells every other that it has stopped, why, and the tags of the messages that it has sent there in this
 * batch. Its own sends complete, or are cancelled, before its call returns. Messages that this rank has not received
 * are received when their senders report them: at the latest before the next batch, which waits until all ranks have
 * stopped this one. */
#include <stdio.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/pipeline/run/state.h"

#define FAREWELL_NS UINT64_C(1000000000) /* to tell ranks, which may be in a callback, that a pipeline ends */

static sluice_status_t fail_stopped(const sluice_pipeline_t* pipeline) {
  const int32_t own = pipeline->agreed.rank;
  const sluice_stage_reason_t* reason = &pipeline->peers[pipeline->stopper].reason;
  if (reason->is_final) return SLUICE_FAIL_PEER(reason->status, own, reason->rank, "%s", reason->message);
  /* If ranks disagree, none of them is at fault. */
  const sluice_status_t status = reason->status == SLUICE_E_MISMATCH ? reason->status : SLUICE_E_PEER_REFUSED;
  return sluice_error_record(status, own, reason->rank, reason->native_code, "rank %d ended batch %llu: %s: %s",
                             reason->rank, (unsigned long long)pipeline->number, sluice_status_name(reason->status),
                             reason->message);
}

/* A rank in a later batch has already compared this one. */
static sluice_status_t compare_ended(sluice_pipeline_t* pipeline) {
  pipeline->has_news = 0;
  for (int32_t r = 0; r < pipeline->agreed.num_ranks; ++r) {
    const sluice_stage_head_t* done = &pipeline->peers[r].done;
    if (done->batch == pipeline->number) SLUICE_TRY(sluice_stage_compare(pipeline, r, done));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_stage_check_peers(sluice_pipeline_t* pipeline) {
  if (pipeline->stopper >= 0) return fail_stopped(pipeline);
  return pipeline->has_news ? compare_ended(pipeline) : SLUICE_OK;
}

/* ---- messages in flight ---- */

static void cancel_messages(sluice_pipeline_t* pipeline) {
  sluice_stage_plan_t* plan = pipeline->plan;
  for (int32_t i = 0; i < plan->num_ops; ++i) {
    sluice_stage_record_t* record = &plan->records[i];
    if (record->request == 0 || !sluice_messages_cancel(pipeline->endpoint->messages, record->request)) continue;
    const sluice_stage_op_t* op = &plan->program->ops[plan->first_op + i];
    record->request = 0;
    record->was_posted = 0;
    if (!sluice_stage_op_is_send(op->kind)) {
      --pipeline->num_receives;
      continue;
    }
    --pipeline->num_sends;
    const int is_activation = op->kind == SLUICE_STAGE_SEND_ACTIVATION;
    sluice_stage_leave(pipeline, is_activation ? SLUICE_STAGE_VALUE_OUTPUT : SLUICE_STAGE_VALUE_INPUT_GRAD,
                       op->virtual_stage, op->micro_batch);
  }
}

static uint64_t list_tags(const sluice_pipeline_t* pipeline, int32_t rank, uint64_t* tags) {
  const sluice_stage_plan_t* plan = pipeline->plan;
  const sluice_stage_handshake_t* agreed = &pipeline->agreed;
  if (agreed->replica_of[rank] != agreed->replica) return 0;
  uint64_t count = 0;
  for (int32_t i = 0; i < plan->num_ops; ++i) {
    const sluice_stage_op_t* op = &plan->program->ops[plan->first_op + i];
    if (!sluice_stage_op_is_send(op->kind) || !plan->records[i].was_posted) continue;
    if (op->peer == agreed->stage_of[rank]) tags[count++] = sluice_stage_tag(pipeline->number, op);
  }
  return count;
}

static sluice_status_t tell_stop(sluice_pipeline_t* pipeline, const sluice_error_info_t* why) {
  struct {
    sluice_stage_head_t head;
    sluice_stage_reason_t reason;
  } stop;
  memset(&stop, 0, sizeof stop);
  stop.head = sluice_stage_new_head(pipeline, SLUICE_STAGE_HEAD_STOP);
  if (pipeline->stopper >= 0) {
    stop.reason = pipeline->peers[pipeline->stopper].reason; /* the same error on all ranks */
  } else {
    stop.reason.status = why->status;
    stop.reason.is_final = pipeline->broken == SLUICE_E_TIMED_OUT;
    stop.reason.rank = stop.reason.is_final ? why->peer : pipeline->agreed.rank;
    stop.reason.native_code = why->native_code;
    (void)snprintf(stop.reason.message, sizeof stop.reason.message, "%.*s", (int)sizeof stop.reason.message - 1,
                   why->message);
  }
  uint64_t used = 0;
  sluice_status_t status = SLUICE_OK;
  for (int32_t r = 0; r < pipeline->agreed.num_ranks && status == SLUICE_OK; ++r) {
    if (r == pipeline->agreed.rank) continue;
    uint64_t* tags = pipeline->plan != NULL ? pipeline->plan->tags + used : NULL;
    const uint64_t count = tags != NULL ? list_tags(pipeline, r, tags) : 0;
    used += count;
    const sluice_message_span_t span = {tags, count * sizeof *tags};
    status = sluice_stage_tell(pipeline, r, &stop, sizeof stop, &span, count > 0);
  }
  return status;
}

/* ---- messages of other ranks ---- */

static int was_received(const sluice_pipeline_t* pipeline, uint64_t tag) {
  const sluice_stage_plan_t* plan = pipeline->plan;
  for (int32_t i = 0; plan != NULL && i < plan->num_ops; ++i) {
    const sluice_stage_op_t* op = &plan->program->ops[plan->first_op + i];
    if (!sluice_stage_op_is_message(op->kind) || sluice_stage_op_is_send(op->kind)) continue;
    if (plan->records[i].has_ended && sluice_stage_tag(pipeline->number, op) == tag) return 1;
  }
  return 0;
}

sluice_status_t sluice_stage_drain_from(sluice_pipeline_t* pipeline, int32_t rank) {
  sluice_stage_peer_t* peer = &pipeline->peers[rank];
  sluice_status_t status = SLUICE_OK;
  for (uint64_t i = 0; i < peer->num_tags && status == SLUICE_OK; ++i) {
    if (was_received(pipeline, peer->tags[i])) continue;
    status = sluice_messages_receive(pipeline->endpoint->messages, rank, peer->tags[i],
                                     sluice_stage_request(SLUICE_STAGE_REQUEST_DRAIN, rank), NULL);
    if (status == SLUICE_OK) ++pipeline->num_drains;
  }
  sluice_messages_release(pipeline->endpoint->messages, peer->stop);
  peer->stop = NULL;
  peer->num_tags = 0;
  return status;
}

static int all_have_stopped(const sluice_pipeline_t* pipeline) {
  for (int32_t r = 0; r < pipeline->agreed.num_ranks; ++r) {
    if (r != pipeline->agreed.rank && pipeline->peers[r].stopped < pipeline->number) return 0;
  }
  return 1;
}

sluice_status_t sluice_stage_drain(sluice_pipeline_t* pipeline) {
  if (!pipeline->needs_drain) return SLUICE_OK;
  while (!all_have_stopped(pipeline) || pipeline->num_drains > 0) SLUICE_TRY(sluice_stage_wait(pipeline));
  pipeline->needs_drain = 0;
  return SLUICE_OK;
}

/* ---- the end of a failed batch ---- */

/* Without the endpoint this rank can tell the others nothing: ranks that wait for it are told by the endpoint that it
 * is gone. */
static void end_pipeline(sluice_pipeline_t* pipeline) {
  sluice_messages_abort(pipeline->endpoint->messages);
  pipeline->num_sends = pipeline->num_receives = pipeline->num_drains = 0;
}

static sluice_status_t drain_from_all(sluice_pipeline_t* pipeline) {
  for (int32_t r = 0; r < pipeline->agreed.num_ranks; ++r) {
    const sluice_stage_peer_t* peer = &pipeline->peers[r];
    if (peer->stop != NULL && peer->stopped == pipeline->number) SLUICE_TRY(sluice_stage_drain_from(pipeline, r));
  }
  return SLUICE_OK;
}

static sluice_status_t stop_messages(sluice_pipeline_t* pipeline, const sluice_error_info_t* why) {
  if (pipeline->plan != NULL) cancel_messages(pipeline);
  SLUICE_TRY(tell_stop(pipeline, why));
  SLUICE_TRY(sluice_stage_listen(pipeline));
  SLUICE_TRY(drain_from_all(pipeline));
  while (pipeline->num_sends > 0 || pipeline->num_receives > 0) SLUICE_TRY(sluice_stage_wait(pipeline));
  return SLUICE_OK;
}

static int all_know(const sluice_pipeline_t* pipeline, int32_t straggler) {
  for (int32_t r = 0; r < pipeline->agreed.num_ranks; ++r) {
    if (r == pipeline->agreed.rank || r == straggler) continue;
    if (pipeline->peers[r].stopped < pipeline->number) return 0;
  }
  return 1;
}

/* For a pipeline that ends at a deadline: every rank except the straggler must learn which rank is at fault, and pass
 * it on, before the first of them leaves; otherwise the endpoint would report the rank that left. */
static void say_farewell(sluice_pipeline_t* pipeline, const sluice_error_info_t* why) {
  if (tell_stop(pipeline, why) != SLUICE_OK || sluice_stage_listen(pipeline) != SLUICE_OK) return;
  const uint64_t deadline_ns = sluice_now_ns() + FAREWELL_NS;
  while (!all_know(pipeline, why->peer) && sluice_now_ns() < deadline_ns) {
    int32_t is_taken;
    if (sluice_stage_take(pipeline, deadline_ns, &is_taken) != SLUICE_OK) return;
  }
}

sluice_status_t sluice_stage_stop(sluice_pipeline_t* pipeline, sluice_status_t status) {
  sluice_error_info_t why;
  sluice_error_capture(&why);
  pipeline->phase = SLUICE_STAGE_STOPS;
  if (pipeline->endpoint == NULL) return status;
  const int is_told = pipeline->stopper >= 0 && pipeline->peers[pipeline->stopper].reason.is_final;
  if (is_told) (void)sluice_stage_break(pipeline, status);
  if (is_told || pipeline->broken == SLUICE_E_TIMED_OUT) say_farewell(pipeline, &why);
  sluice_stage_note_progress(pipeline);
  if (pipeline->broken == SLUICE_OK) {
    sluice_status_t stopped = stop_messages(pipeline, &why);
    if (stopped != SLUICE_OK) (void)sluice_stage_break(pipeline, stopped);
    pipeline->needs_drain = 1;
  }
  if (pipeline->broken != SLUICE_OK) end_pipeline(pipeline);
  return sluice_error_adopt(&why);
}
