// SPDX-License-Identifier: Apache-2.0
/* Waits for messages over a wire that delivers none, and the errors of an endpoint when ranks give up. */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "backend/comm/messages_wire.h"
#include "backend/comm/test/said.h"
#include "third_party/bazel/test.h"

#define MS UINT64_C(1000000)

/* Rank 0, whose wire takes its time to fail. */
typedef struct slow_s {
  said_t said;
  atomic_int is_failing, may_end;
  int32_t culprit; /* the rank that other ranks are told */
} slow_t;

static void pause_1ms(void) {
  const struct timespec t = {.tv_nsec = 1000000};
  nanosleep(&t, NULL);
}

static slow_t slow;

static void wire_send(sluice_wire_t* wire, sluice_outgoing_t* outgoing) { (void)wire, (void)outgoing; }
static void wire_fail(sluice_wire_t* wire, int32_t culprit) {
  (void)wire;
  slow.culprit = culprit;
  atomic_store(&slow.is_failing, 1);
  while (!atomic_load(&slow.may_end)) pause_1ms();
}
static void wire_close(sluice_wire_t* wire, int32_t is_orderly) { (void)wire, (void)is_orderly; }

static sluice_messages_t* open_slowly(int32_t world_size) {
  static const sluice_wire_vtable_t vtable = {.send = wire_send, .fail = wire_fail, .close = wire_close};
  sluice_messages_t* m;
  slow = (slow_t){.may_end = 0};
  said_init(&slow.said, 0, world_size, 50 * MS);
  assert_int_equal(sluice_messages_open(&slow.said.base, NULL, &m), SLUICE_OK);
  slow.said.wire.vtable = &vtable;
  return m;
}

/* ---- cases ------------------------------------------------------------------------------------------------------- */

static void* abort_it(void* messages) {
  sluice_messages_abort(messages);
  return NULL;
}

static void* end_later(void* unused) {
  for (int i = 0; i < 200; ++i) pause_1ms();
  atomic_store(&slow.may_end, 1);
  return unused;
}

/* The deadline passes while another thread still handles an earlier failure. The wait then returns the earlier failure
 * when it is complete, and never OK without a message. */
TEST(Wait_DueWhileAnotherFailureIsUnderWay_ReturnsThatOne) {
  sluice_messages_t* m = open_slowly(2);
  sluice_message_completion_t c;
  pthread_t aborter, ender;
  assert_int_equal(sluice_messages_receive(m, 1, 1, 1, NULL), SLUICE_OK);
  assert_int_equal(pthread_create(&aborter, NULL, abort_it, m), 0);
  while (!atomic_load(&slow.is_failing)) pause_1ms();
  assert_int_equal(pthread_create(&ender, NULL, end_later, NULL), 0);
  assert_int_equal(sluice_messages_wait(m, "a gradient", &c), SLUICE_E_ABORTED);
  pthread_join(aborter, NULL);
  pthread_join(ender, NULL);
  sluice_messages_close(m);
  sluice_comm_release(&slow.said.base);
}

/* Rank 1 of three gives up. All ranks report the same error, whichever is faster. */
static void one_gives_up(uint64_t because_of, int32_t lost, int32_t told) {
  sluice_messages_t* m = open_slowly(3);
  sluice_message_completion_t c;
  const sluice_frame_t frame = {.kind = SLUICE_FRAME_LOST, .tag = because_of};
  sluice_error_info_t why;
  atomic_store(&slow.may_end, 1);
  sluice_messages_hear(m, 1, &frame);
  assert_int_equal(sluice_messages_next(m, 0, &c), SLUICE_E_PEER_LOST);
  sluice_error_capture(&why);
  assert_int_equal(why.peer, lost);
  assert_int_equal(slow.culprit, told);
  sluice_messages_close(m);
  sluice_comm_release(&slow.said.base);
}
TEST(Lost_BecauseOfAThird_IsThatOneForAll) { one_gives_up(2, 2, 2); }
TEST(Lost_BecauseOfThisRank_ThisOneHasLostItsPeerAndOthersThisOne) { one_gives_up(0, 1, 0); }
TEST(Lost_BecauseOfItself_IsThatOneForAll) { one_gives_up(1, 1, 1); }
