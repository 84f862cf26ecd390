// SPDX-License-Identifier: Apache-2.0
/* Completions: the next one, with a deadline of the owner or of the communicator; and the rank that delays a wait. */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/comm/comm_life.h"
#include "backend/comm/messages_state.h"
#include "backend/group/wait.h"

/* ---- the next one ------------------------------------------------------------------------------------------------ */

/* Call with the mutex held. */
static int take_completed(sluice_messages_t* m, sluice_message_completion_t* out_completion) {
  sluice_link_t* first = sluice_list_first(&m->completed);
  if (first == NULL) return 0;
  sluice_message_operation_t* o = SLUICE_ENTRY_OF(first, sluice_message_operation_t, place);
  sluice_message_arrival_t* a = o->arrival;
  *out_completion = (sluice_message_completion_t){
      .kind = o->kind, .peer = o->peer, .tag = o->tag, .user = o->user, .request = o->number, .arrival = a};
  if (a != NULL) {
    out_completion->head = sluice_messages_head_of(a);
    out_completion->payload = sluice_messages_payload_of(a);
    out_completion->head_bytes = a->head_bytes;
    out_completion->payload_bytes = a->payload_bytes;
  }
  sluice_messages_recycle(m, o);
  atomic_fetch_sub(&m->outstanding, 1);
  return 1;
}

enum { CAME, FAILED, LEFT, DUE };

/* out_left: set if the result is LEFT, to a rank that has left and is needed. */
static int await(sluice_messages_t* m, uint64_t deadline_ns, sluice_message_completion_t* out_completion,
                 int32_t* out_left) {
  int is_due = deadline_ns == 0;
  for (;;) {
    /* Check completions first: one rank may have said why it leaves, and another rank only that it has left. */
    if (take_completed(m, out_completion)) return CAME;
    if (m->has_failed) return FAILED;
    *out_left = m->is_failing ? -1 : sluice_messages_find_left(m);
    if (*out_left >= 0) return LEFT;
    if (is_due) return DUE;
    is_due = sluice_cond_wait_until(&m->changed, &m->mutex, deadline_ns) != 0; /* and check once more */
  }
}

/* out_is_due: 1 if TIMED_OUT is due to the deadline. */
static sluice_status_t next(sluice_messages_t* m, uint64_t deadline_ns, sluice_message_completion_t* out_completion,
                            int* out_is_due) {
  memset(out_completion, 0, sizeof *out_completion);
  *out_is_due = 0;
  for (;;) {
    int32_t left = -1;
    pthread_mutex_lock(&m->mutex);
    const int what = await(m, deadline_ns, out_completion, &left);
    pthread_mutex_unlock(&m->mutex);
    if (what == CAME) return SLUICE_OK;
    if (what == FAILED) return sluice_messages_check(m);
    *out_is_due = what == DUE;
    if (what == DUE) return SLUICE_E_TIMED_OUT;
    (void)sluice_messages_record_loss(m, left, 0, "it has left");
    sluice_messages_fail(m, left);
  }
}

sluice_status_t sluice_messages_next(sluice_messages_t* m, uint64_t deadline_ns,
                                     sluice_message_completion_t* out_completion) {
  int is_due;
  if (sluice_comm_is_inherited(m->comm)) return sluice_messages_check(m);
  return next(m, deadline_ns, out_completion, &is_due);
}

/* ---- finding the straggler --------------------------------------------------------------------------------------- */

static void look_at_oldest(const sluice_link_t* list, const sluice_message_operation_t** oldest) {
  const sluice_link_t* first = sluice_list_first(list);
  if (first == NULL) return;
  const sluice_message_operation_t* o = SLUICE_ENTRY_OF(first, sluice_message_operation_t, place);
  if (*oldest == NULL || o->number < (*oldest)->number) *oldest = o;
}

/* Returns the peer of the oldest request; -1: there is none. */
static int32_t find_missing(sluice_messages_t* m) {
  const sluice_message_operation_t* oldest = NULL;
  pthread_mutex_lock(&m->mutex);
  look_at_oldest(&m->sends, &oldest);
  for (int32_t r = 0; r < m->comm->world_size; ++r) look_at_oldest(&m->peers[r].receives, &oldest);
  const int32_t peer = oldest != NULL ? oldest->peer : -1;
  pthread_mutex_unlock(&m->mutex);
  return peer;
}

static int32_t waits_for(const void* user, int32_t rank) {
  const sluice_messages_t* m = user;
  const int32_t next_one = m->peers[rank].waits_for;
  return next_one == m->comm->rank ? -1 : next_one; /* the two ranks wait for each other */
}

/* If the missing rank waits as well, the straggler is the rank that it waits for. */
static int32_t find_straggler(sluice_messages_t* m, int32_t missing) {
  pthread_mutex_lock(&m->mutex);
  const int32_t straggler = sluice_wait_find_straggler(missing, m->comm->world_size, waits_for, m);
  pthread_mutex_unlock(&m->mutex);
  return straggler;
}

/* Tells the peers which rank this one waits for, -1: none. A frame that is still being sent will carry the new
 * value. */
static void tell(sluice_messages_t* m, int32_t waits_for) {
  for (int32_t r = 0; r < m->comm->world_size && m->wire != NULL; ++r) {
    sluice_message_peer_t* p = &m->peers[r];
    sluice_outgoing_t* out = waits_for >= 0 ? p->waits : p->goes_on;
    int32_t* is_out = waits_for >= 0 ? &p->waits_is_out : &p->goes_on_is_out;
    if (r == m->comm->rank) continue;
    pthread_mutex_lock(&m->mutex);
    const int is_free = !*is_out && !p->has_left && !m->is_failing;
    if (is_free) {
      *is_out = 1;
      out->progress = 0;
      out->frame.tag = waits_for >= 0 ? (uint64_t)waits_for : UINT64_MAX;
    }
    pthread_mutex_unlock(&m->mutex);
    if (is_free) m->wire->vtable->send(m->wire, out);
  }
}

static sluice_status_t fail_late(sluice_messages_t* m, int32_t missing, uint64_t waited_ns, const char* phase,
                                 sluice_message_completion_t* out_completion) {
  const int32_t rank = m->comm->rank;
  const int32_t straggler = find_straggler(m, missing);
  char instead[64] = "";
  if (straggler != missing) snprintf(instead, sizeof instead, ", which itself waits for rank %d", straggler);
  (void)SLUICE_FAIL_PEER(
      SLUICE_E_TIMED_OUT, rank, straggler,
      "rank %d waited %.1f s for %s, from rank %d%s. See what rank %d is doing (log, stack); if it is only slow, raise "
      "the communicator's timeout. These messages can no longer be used: close them on all ranks.",
      rank, sluice_seconds(waited_ns), phase, missing, instead, straggler);
  sluice_messages_fail(m, straggler);
  int is_due;
  /* Another thread's failure may have come first, and may still be in progress. */
  return next(m, UINT64_MAX, out_completion, &is_due);
}

/* ---- until the communicator's timeout ---------------------------------------------------------------------------- */

static int is_interrupted(sluice_comm_t* comm) {
  return comm->vtable->is_interrupted != NULL && comm->vtable->is_interrupted(comm);
}

static sluice_status_t wait_long(sluice_messages_t* m, const char* phase, sluice_message_completion_t* out_completion,
                                 int* has_told) {
  const sluice_comm_t* comm = m->comm;
  sluice_wait_t wait = sluice_wait_begin(comm->timeout_ns, comm->warn_ns);
  for (;;) {
    int is_due;
    if (sluice_messages_outstanding(m) == 0) {
      SLUICE_TRY(sluice_messages_check(m));
      return SLUICE_FAIL(SLUICE_E_STATE,
                         "rank %d waits for %s, but has no message in flight: send a message or post a receive first",
                         comm->rank, phase);
    }
    const sluice_status_t status = next(m, sluice_wait_slice_end(&wait), out_completion, &is_due);
    if (!is_due) return status;
    if (is_interrupted(m->comm)) {
      (void)SLUICE_FAIL_PEER(SLUICE_E_ABORTED, comm->rank, -1, "rank %d was interrupted while it waited for %s",
                             comm->rank, phase);
      sluice_messages_fail(m, comm->rank);
      continue;
    }
    const uint64_t now_ns = sluice_now_ns();
    const int32_t missing = find_missing(m);
    if (missing < 0) continue; /* it has just completed */
    if (now_ns >= wait.deadline_ns) return fail_late(m, missing, now_ns - wait.start_ns, phase, out_completion);
    if (sluice_wait_takes_note(&wait, now_ns)) {
      tell(m, missing);
      *has_told = 1;
    }
    sluice_wait_warn(&wait, now_ns, comm->rank, missing, phase);
  }
}

sluice_status_t sluice_messages_wait(sluice_messages_t* m, const char* phase,
                                     sluice_message_completion_t* out_completion) {
  int has_told = 0;
  if (sluice_comm_is_inherited(m->comm)) return sluice_messages_check(m);
  const sluice_status_t status = wait_long(m, phase != NULL ? phase : "a message", out_completion, &has_told);
  if (has_told && status == SLUICE_OK) tell(m, -1);
  return status;
}
