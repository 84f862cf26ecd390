// SPDX-License-Identifier: Apache-2.0
/* Failures of an endpoint, and what peers report about themselves. */
#include <stdio.h>

#include "backend/comm/comm_life.h"
#include "backend/comm/messages_state.h"

void sluice_messages_fail_with(sluice_messages_t* m, const sluice_error_info_t* why, int32_t culprit) {
  pthread_mutex_lock(&m->mutex);
  const int is_first = !m->is_failing;
  if (is_first) {
    m->is_failing = 1;
    m->why = *why;
  }
  pthread_mutex_unlock(&m->mutex);
  if (!is_first) return;
  if (m->wire != NULL) m->wire->vtable->fail(m->wire, culprit);
  /* Set only now: once a call returns the failure, all spans belong to the owner again. */
  pthread_mutex_lock(&m->mutex);
  m->has_failed = 1;
  pthread_cond_broadcast(&m->changed);
  pthread_mutex_unlock(&m->mutex);
}

void sluice_messages_fail(sluice_messages_t* m, int32_t culprit) {
  sluice_error_info_t why;
  sluice_error_capture(&why);
  sluice_messages_fail_with(m, &why, culprit);
}

int sluice_messages_has_failed(sluice_messages_t* m) {
  pthread_mutex_lock(&m->mutex);
  const int has_failed = m->is_failing;
  pthread_mutex_unlock(&m->mutex);
  return has_failed;
}

sluice_status_t sluice_messages_check(sluice_messages_t* m) {
  if (sluice_comm_is_inherited(m->comm)) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "rank %d: these messages were opened before fork and cannot be used in the child; open them "
                       "there, on a communicator made there",
                       m->comm->rank);
  }
  pthread_mutex_lock(&m->mutex);
  const int has_failed = m->has_failed;
  pthread_mutex_unlock(&m->mutex);
  return has_failed ? sluice_error_adopt(&m->why) : SLUICE_OK; /* `why` does not change once it is set */
}

sluice_status_t sluice_messages_record_loss(const sluice_messages_t* m, int32_t peer, int32_t native_error,
                                            const char* how) {
  return sluice_error_record(
      SLUICE_E_PEER_LOST, m->comm->rank, peer, native_error,
      "rank %d lost rank %d, which died or left: see its log. These messages can no longer be used. " SLUICE_COMM_BROKEN
      " (%s: %s)",
      m->comm->rank, peer, m->comm->name, how);
}

/* Returns a rank that has left although a request needs it. A rank that leaves is no failure by itself. */
int32_t sluice_messages_find_left(const sluice_messages_t* m) {
  for (int32_t r = 0; r < m->comm->world_size; ++r) {
    const sluice_message_peer_t* p = &m->peers[r];
    if (p->has_left && (p->num_sending > 0 || sluice_list_first(&p->receives) != NULL)) return r;
  }
  return -1;
}

void sluice_messages_hear(sluice_messages_t* m, int32_t peer, const sluice_frame_t* frame) {
  const int32_t rank = m->comm->rank;
  const uint64_t world_size = (uint64_t)m->comm->world_size;
  if (frame->kind == SLUICE_FRAME_WAITS || frame->kind == SLUICE_FRAME_LEAVES) {
    pthread_mutex_lock(&m->mutex);
    if (frame->kind == SLUICE_FRAME_LEAVES) m->peers[peer].has_left = 1;
    m->peers[peer].waits_for = frame->kind == SLUICE_FRAME_WAITS && frame->tag < world_size ? (int32_t)frame->tag : -1;
    pthread_cond_broadcast(&m->changed);
    pthread_mutex_unlock(&m->mutex);
  } else if (frame->kind == SLUICE_FRAME_LOST) {
    /* If a peer gives up because of this rank, this rank has lost that peer. Third ranks report this rank as lost in
     * any case, because both ranks tell them, in any order. */
    const int is_third = frame->tag < world_size && frame->tag != (uint64_t)rank;
    const int32_t culprit = is_third ? (int32_t)frame->tag : peer;
    (void)sluice_messages_record_loss(m, culprit, 0, culprit == peer ? "it gave up" : "another rank reported it");
    sluice_messages_fail(m, frame->tag == (uint64_t)rank ? rank : culprit);
  } else {
    (void)SLUICE_FAIL_PEER(SLUICE_E_INTERNAL, rank, peer,
                           "rank %d received a frame of unknown kind %#x from rank %d; please report it", rank,
                           (unsigned)frame->kind, peer);
    sluice_messages_fail(m, rank);
  }
}

void sluice_messages_abort(sluice_messages_t* m) {
  if (m == NULL || sluice_comm_is_inherited(m->comm)) return;
  sluice_error_info_t why; /* separate from the thread's own record, which must not change */
  sluice_error_info_init(&why, sizeof why);
  why.status = SLUICE_E_ABORTED;
  why.rank = m->comm->rank;
  why.peer = -1;
  snprintf(why.message, sizeof why.message, "rank %d: these messages were aborted", m->comm->rank);
  sluice_messages_fail_with(m, &why, m->comm->rank);
}
