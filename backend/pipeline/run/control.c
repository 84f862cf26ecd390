// SPDX-License-Identifier: Apache-2.0
/* Control messages between ranks. */
#include <string.h>

#include "backend/base/math.h"
#include "backend/pipeline/run/state.h"

sluice_stage_head_t sluice_stage_new_head(const sluice_pipeline_t* pipeline, int32_t kind) {
  return (sluice_stage_head_t){.magic = SLUICE_STAGE_MAGIC,
                               .kind = kind,
                               .batch = pipeline->number,
                               .program = pipeline->plan != NULL ? pipeline->plan->fingerprint : 0,
                               .num_micro_batches = pipeline->num_micro_batches,
                               .forward_only = pipeline->forward_only,
                               .about = -1};
}

sluice_status_t sluice_stage_compare(const sluice_pipeline_t* pipeline, int32_t rank, const sluice_stage_head_t* head) {
  static const sluice_record_field_t fields[] = {
      {SLUICE_RECORD_FIELD(sluice_stage_head_t, num_micro_batches), .name = "the number of micro-batches"},
      {SLUICE_RECORD_FIELD(sluice_stage_head_t, forward_only), .name = "forward_only"},
      {SLUICE_RECORD_FIELD(sluice_stage_head_t, program), .is_hash = 1, .name = "the program (as a checksum)",
       .hint = "; run the same build on machines of one kind"},
  };
  const sluice_stage_head_t own = sluice_stage_new_head(pipeline, head->kind);
  const sluice_record_pair_t pair = {&own, head, pipeline->agreed.rank, rank};
  char text[256];
  if (sluice_record_describe(fields, SLUICE_NUM_FIELDS(fields), &pair, text, sizeof text) == 0) return SLUICE_OK;
  return SLUICE_FAIL_PEER(SLUICE_E_MISMATCH, pair.rank, rank, "pipeline: batch %llu: %s",
                          (unsigned long long)pipeline->number, text);
}

/* ---- sending ---- */

sluice_status_t sluice_stage_tell(sluice_pipeline_t* pipeline, int32_t rank, const void* head, uint64_t head_bytes,
                                  const sluice_message_span_t* payload, int32_t num_spans) {
  const sluice_message_t message = {
      .peer = rank,
      .num_spans = num_spans,
      .tag = SLUICE_STAGE_CONTROL_TAG,
      .head = head,
      .head_bytes = head_bytes,
      .spans = payload,
  };
  sluice_status_t status = sluice_messages_send(pipeline->endpoint->messages, &message,
                                                sluice_stage_request(SLUICE_STAGE_REQUEST_TELL, rank), NULL);
  if (status == SLUICE_OK) {
    ++pipeline->num_sends;
  } else if (!sluice_is_out_of_memory(status)) {
    (void)sluice_stage_break_endpoint(pipeline, status);
  }
  return status;
}

/* ---- receiving ---- */

/* Returns whether a rank has finished this batch. It sends nothing more in it, and may have left: a receive from it
 * would count as needing a rank that is gone. A rank in a later batch has finished this one, failed or not. Only if
 * this rank's batch fails do the others send once more. */
static int is_through(const sluice_pipeline_t* pipeline, int32_t rank) {
  const sluice_stage_peer_t* peer = &pipeline->peers[rank];
  if (peer->done.batch > pipeline->number) return 1;
  return pipeline->phase == SLUICE_STAGE_RUNS &&
         (peer->done.batch == pipeline->number || peer->stopped == pipeline->number);
}

static sluice_status_t listen_to(sluice_pipeline_t* pipeline, int32_t rank) {
  sluice_stage_peer_t* peer = &pipeline->peers[rank];
  if (peer->is_heard || is_through(pipeline, rank)) return SLUICE_OK;
  const sluice_status_t status = sluice_messages_receive_up_to(
      pipeline->endpoint->messages, rank, SLUICE_STAGE_CONTROL_TAG, SLUICE_STAGE_CONTROL_BYTES,
      sluice_stage_request(SLUICE_STAGE_REQUEST_CONTROL, rank), NULL);
  peer->is_heard = status == SLUICE_OK;
  if (status == SLUICE_OK || sluice_is_out_of_memory(status)) return status;
  return sluice_stage_break_endpoint(pipeline, status);
}

sluice_status_t sluice_stage_listen(sluice_pipeline_t* pipeline) {
  for (int32_t r = 0; r < pipeline->agreed.num_ranks; ++r) {
    if (r != pipeline->agreed.rank) SLUICE_TRY(listen_to(pipeline, r));
  }
  return SLUICE_OK;
}

/* All ranks use the times of the first replica, so that all make the same choice. The batch numbers of two ranks differ
 * by at most one. */
static void take_times(sluice_pipeline_t* pipeline, int32_t rank, const sluice_stage_head_t* head,
                       const sluice_stage_times_t* times) {
  const sluice_stage_handshake_t* agreed = &pipeline->agreed;
  const int32_t v = agreed->spec.num_virtual;
  if (agreed->replica_of[rank] != 0) return;
  for (int32_t k = 0; k < v; ++k) {
    const int32_t c = sluice_pipeline_virtual_stage(&agreed->spec, agreed->stage_of[rank], k);
    pipeline->told[head->batch % 2][c] = times[k];
  }
}

static sluice_status_t take_done(sluice_pipeline_t* pipeline, int32_t rank,
                                 const sluice_message_completion_t* completion) {
  sluice_stage_peer_t* peer = &pipeline->peers[rank];
  const sluice_stage_head_t* head = completion->head;
  const uint64_t times = (uint64_t)pipeline->agreed.spec.num_virtual * sizeof(sluice_stage_times_t);
  const uint64_t count = (completion->payload_bytes - times) / sizeof(double);
  if (completion->payload_bytes < times || count > SLUICE_PIPELINE_MAX_NOTE) {
    return SLUICE_FAIL_PEER(SLUICE_E_INTERNAL, pipeline->agreed.rank, rank,
                            "pipeline: rank %d ended batch %llu with %llu bytes", rank, (unsigned long long)head->batch,
                            (unsigned long long)completion->payload_bytes);
  }
  SLUICE_TRY(sluice_batch_metadata_store(&peer->notes[head->batch % 2], (const char*)completion->payload + times,
                                         (int32_t)count));
  peer->done = *head;
  pipeline->has_news = 1;
  take_times(pipeline, rank, head, completion->payload);
  sluice_stage_note_progress(pipeline);
  return SLUICE_OK;
}

static void take_stop(sluice_pipeline_t* pipeline, int32_t rank, const sluice_message_completion_t* completion) {
  sluice_stage_peer_t* peer = &pipeline->peers[rank];
  const sluice_stage_head_t* head = completion->head;
  memcpy(&peer->reason, head + 1, sizeof peer->reason);
  peer->reason.message[sizeof peer->reason.message - 1] = 0;
  peer->stopped = head->batch;
  peer->stop = completion->arrival;
  peer->tags = completion->payload;
  peer->num_tags = sluice_min_u64(completion->payload_bytes, SLUICE_STAGE_CONTROL_BYTES) / sizeof(uint64_t);
  if (pipeline->stopper < 0 && head->batch == pipeline->number) pipeline->stopper = rank;
}

static sluice_status_t take_order(sluice_pipeline_t* pipeline, int32_t rank, const sluice_stage_head_t* head) {
  sluice_stage_orders_t* orders = pipeline->orders;
  const int32_t room = (int32_t)(sizeof orders->op / sizeof orders->op[0]);
  if (orders == NULL || orders->count == room) {
    return SLUICE_FAIL_PEER(SLUICE_E_INTERNAL, pipeline->agreed.rank, rank,
                            "pipeline: rank %d sent rank %d an order that it does not expect; please report it", rank,
                            pipeline->agreed.rank);
  }
  const int32_t at = (orders->first + orders->count++) % room;
  orders->batch[at] = head->batch;
  orders->op[at] = head->about;
  return SLUICE_OK;
}

static sluice_status_t take_head(sluice_pipeline_t* pipeline, const sluice_message_completion_t* completion,
                                 int* out_is_kept) {
  const int32_t rank = completion->peer;
  const sluice_stage_head_t* head = completion->head;
  sluice_stage_peer_t* peer = &pipeline->peers[rank];
  if (completion->head_bytes >= sizeof *head && head->magic == SLUICE_STAGE_MAGIC) {
    switch (head->kind) {
      case SLUICE_STAGE_HEAD_DONE: return take_done(pipeline, rank, completion);
      case SLUICE_STAGE_HEAD_STOP:
        if (completion->head_bytes != sizeof *head + sizeof peer->reason || peer->stop != NULL) break;
        *out_is_kept = 1;
        take_stop(pipeline, rank, completion);
        if (pipeline->phase != SLUICE_STAGE_RUNS && peer->stopped == pipeline->number) {
          return sluice_stage_drain_from(pipeline, rank);
        }
        return SLUICE_OK;
      case SLUICE_STAGE_HEAD_WAITING:
        peer->waits_in = head->batch;
        peer->waits_for = head->about >= 0 && head->about < pipeline->agreed.num_ranks ? head->about : -1;
        return SLUICE_OK;
      case SLUICE_STAGE_HEAD_ORDER: sluice_stage_note_progress(pipeline); return take_order(pipeline, rank, head);
      default: break;
    }
  }
  return SLUICE_FAIL_PEER(SLUICE_E_INTERNAL, pipeline->agreed.rank, rank,
                          "pipeline: rank %d sent an invalid message; please report it", rank);
}

sluice_status_t sluice_stage_take_control(sluice_pipeline_t* pipeline, const sluice_message_completion_t* completion) {
  int is_kept = 0;
  sluice_stage_peer_t* peer = &pipeline->peers[completion->peer];
  peer->is_heard = 0;
  sluice_status_t status = take_head(pipeline, completion, &is_kept);
  if (!is_kept) sluice_messages_release(pipeline->endpoint->messages, completion->arrival);
  if (status == SLUICE_OK) status = listen_to(pipeline, completion->peer);
  /* A rank that can no longer receive from another one would not learn of failures. */
  return status == SLUICE_OK ? SLUICE_OK : sluice_stage_break(pipeline, status);
}
