// SPDX-License-Identifier: Apache-2.0
/* Waits for messages over a wire that delivers none, and the errors of an endpoint when ranks give up. */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "backend/comm/comm.h"
#include "backend/comm/messages.h"
#include "backend/comm/messages_wire.h"
#include "third_party/bazel/test.h"

#define MS UINT64_C(1000000)

/* ---- a wire whose fail callback takes time ---- */

typedef struct wire_s {
  sluice_wire_t base;
  atomic_int is_failing, may_end;
  int32_t culprit; /* the rank that other ranks are told */
} wire_t;

static void pause_1ms(void) {
  const struct timespec t = {.tv_nsec = 1000000};
  nanosleep(&t, NULL);
}

static void wire_send(sluice_wire_t* wire, sluice_outgoing_t* outgoing) { (void)wire, (void)outgoing; }
static void wire_fail(sluice_wire_t* wire, int32_t culprit) {
  wire_t* w = (wire_t*)wire;
  w->culprit = culprit;
  atomic_store(&w->is_failing, 1);
  while (!atomic_load(&w->may_end)) pause_1ms();
}
static void wire_close(sluice_wire_t* wire, int32_t is_orderly) { (void)wire, (void)is_orderly; }

static const sluice_wire_vtable_t wire_vtable = {.send = wire_send, .fail = wire_fail, .close = wire_close};

/* ---- a communicator that opens the wire; other ranks return what they receive ---- */

typedef struct mirror_s {
  sluice_comm_t base;
  wire_t wire;
} mirror_t;

static void mirror_destroy(sluice_comm_t* comm) { (void)comm; }
static sluice_status_t mirror_start(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                    sluice_comm_request_t** out_request) {
  for (int32_t r = 1; r < comm->world_size; ++r) memcpy(exchange->recv[r], exchange->send[r], exchange->send_bytes[r]);
  *out_request = (sluice_comm_request_t*)(void*)comm;
  return SLUICE_OK;
}
static sluice_status_t mirror_wait(sluice_comm_t* comm, sluice_comm_request_t* request, uint64_t deadline_ns,
                                   int32_t* out_peer) {
  (void)comm, (void)request, (void)deadline_ns, (void)out_peer;
  return SLUICE_OK;
}
static void mirror_abort(sluice_comm_t* comm) { (void)comm; }
static sluice_status_t mirror_open(sluice_comm_t* comm, sluice_messages_t* messages, sluice_wire_t** out_wire) {
  (void)messages;
  *out_wire = &((mirror_t*)comm)->wire.base;
  return SLUICE_OK;
}

static const sluice_comm_vtable_t mirror_vtable = {.destroy = mirror_destroy,
                                                   .exchange_start = mirror_start,
                                                   .exchange_wait = mirror_wait,
                                                   .abort = mirror_abort,
                                                   .messages_open = mirror_open};

static void mirror_init(mirror_t* mirror, int32_t world_size, uint64_t timeout_ns) {
  DEFAULTS(sluice_comm_config, config);
  *mirror = (mirror_t){.wire.base.vtable = &wire_vtable};
  config.world_size = world_size;
  config.timeout_ns = timeout_ns;
  sluice_comm_init_base(&mirror->base, &mirror_vtable, "mirror", &config);
}

/* ---- cases ------------------------------------------------------------------------------------------------------- */

static void* abort_it(void* messages) {
  sluice_messages_abort(messages);
  return NULL;
}

static void* end_later(void* wire) {
  for (int i = 0; i < 200; ++i) pause_1ms();
  atomic_store(&((wire_t*)wire)->may_end, 1);
  return NULL;
}

/* The deadline passes while another thread still handles an earlier failure. The wait then returns the earlier failure
 * when it is complete, and never OK without a message. */
TEST(Wait_DueWhileAnotherFailureIsUnderWay_ReturnsThatOne) {
  mirror_t mirror;
  sluice_messages_t* m;
  sluice_message_completion_t c;
  pthread_t aborter, ender;
  mirror_init(&mirror, 2, 50 * MS);
  assert_int_equal(sluice_messages_open(&mirror.base, NULL, &m), SLUICE_OK);
  assert_int_equal(sluice_messages_receive(m, 1, 1, 1, NULL), SLUICE_OK);
  assert_int_equal(pthread_create(&aborter, NULL, abort_it, m), 0);
  while (!atomic_load(&mirror.wire.is_failing)) pause_1ms();
  assert_int_equal(pthread_create(&ender, NULL, end_later, &mirror.wire), 0);
  assert_int_equal(sluice_messages_wait(m, "a gradient", &c), SLUICE_E_ABORTED);
  pthread_join(aborter, NULL);
  pthread_join(ender, NULL);
  sluice_messages_close(m);
  sluice_comm_release(&mirror.base);
}

/* Rank 1 of three gives up. All ranks report the same error, whichever is faster. */
static void one_gives_up(uint64_t because_of, int32_t lost, int32_t told) {
  mirror_t mirror;
  sluice_messages_t* m;
  sluice_message_completion_t c;
  const sluice_frame_t frame = {.kind = SLUICE_FRAME_LOST, .tag = because_of};
  sluice_error_info_t why;
  mirror_init(&mirror, 3, 50 * MS);
  atomic_store(&mirror.wire.may_end, 1);
  assert_int_equal(sluice_messages_open(&mirror.base, NULL, &m), SLUICE_OK);
  sluice_messages_hear(m, 1, &frame);
  assert_int_equal(sluice_messages_next(m, 0, &c), SLUICE_E_PEER_LOST);
  sluice_error_capture(&why);
  assert_int_equal(why.peer, lost);
  assert_int_equal(mirror.wire.culprit, told);
  sluice_messages_close(m);
  sluice_comm_release(&mirror.base);
}
TEST(Lost_BecauseOfAThird_IsThatOneForAll) { one_gives_up(2, 2, 2); }
TEST(Lost_BecauseOfThisRank_ThisOneHasLostItsPeerAndOthersThisOne) { one_gives_up(0, 1, 0); }
TEST(Lost_BecauseOfItself_IsThatOneForAll) { one_gives_up(1, 1, 1); }
