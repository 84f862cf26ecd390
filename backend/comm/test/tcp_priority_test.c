// SPDX-License-Identifier: Apache-2.0
/* Messages of low priority: while bytes of an exchange are unread, they are sent slowly, but still sent. */

#include "backend/base/clock.h"
#include "backend/comm/messages.h"
#include "backend/comm/test/tcp_ranks.h"
#include "third_party/bazel/test.h"

enum { UNREAD_BYTES = 8 << 20, CHUNK_BYTES = 64 << 10, NUM_CHUNKS = 64, PIECE_BYTES = 16 << 10 };

#define MS         UINT64_C(1000000)
#define TIMEOUT_NS (60000 * MS)
#define WATCHED_NS (300 * MS)
#define PAUSE_NS   (20 * MS) /* between two pieces of such messages */

static char unread[2][UNREAD_BYTES], chunk[CHUNK_BYTES];

static sluice_comm_request_t* start_exchange(const tcp_rank_t* me) {
  const int sends = me->rank == 0;
  const void* send[2] = {NULL, unread[0]};
  void* recv[2] = {unread[1], NULL};
  const uint64_t sent[2] = {0, sends ? UNREAD_BYTES : 0}, received[2] = {sends ? 0 : UNREAD_BYTES, 0};
  const sluice_exchange_t exchange = {.send = send, .send_bytes = sent, .recv = recv, .recv_bytes = received};
  sluice_comm_request_t* request;
  assert_int_equal(sluice_comm_exchange_start(me->comm, &exchange, &request), SLUICE_OK);
  return request;
}

static void send_chunks(sluice_messages_t* messages) {
  const sluice_message_span_t span = {.data = chunk, .bytes = CHUNK_BYTES};
  const sluice_message_t message = {.peer = 1, .num_spans = 1, .tag = 1, .spans = &span};
  for (int i = 0; i < NUM_CHUNKS; ++i) {
    assert_int_equal(sluice_messages_send(messages, &message, 0, NULL), SLUICE_OK);
  }
}

/* Waits a while, at least for one message. Returns the number of messages sent. */
static int watch(sluice_messages_t* messages, uint64_t* out_ns) {
  const uint64_t begin_ns = sluice_now_ns();
  sluice_message_completion_t done;
  int count = 0;
  for (;;) {
    const uint64_t now_ns = sluice_now_ns();
    if (count == NUM_CHUNKS || (count > 0 && now_ns - begin_ns > WATCHED_NS)) break;
    assert_true(now_ns - begin_ns < TIMEOUT_NS);
    const sluice_status_t status = sluice_messages_next(messages, now_ns + MS, &done);
    assert_true(status == SLUICE_OK || status == SLUICE_E_TIMED_OUT);
    count += status == SLUICE_OK;
  }
  *out_ns = sluice_now_ns() - begin_ns;
  return count;
}

static void finish(sluice_messages_t* messages, int left) {
  sluice_message_completion_t done;
  for (; left > 0; --left) {
    assert_int_equal(sluice_messages_wait(messages, "a chunk", &done), SLUICE_OK);
    if (done.kind == SLUICE_MESSAGE_RECEIVED) sluice_messages_release(messages, done.arrival);
  }
}

/* Rank 1 reads its exchange when rank 0 has finished watching, but reads messages at once. */
static void send_beside(tcp_rank_t* me, int32_t gives_way) {
  sluice_messages_t* messages;
  uint64_t took_ns = 0;
  int count = 0;
  assert_int_equal(sluice_messages_open(me->comm, NULL, &messages), SLUICE_OK);
  sluice_messages_set_gives_way(messages, gives_way);
  sluice_comm_request_t* request = start_exchange(me);
  if (me->rank == 0) {
    send_chunks(messages);
    count = watch(messages, &took_ns);
  } else {
    for (int i = 0; i < NUM_CHUNKS; ++i) assert_int_equal(sluice_messages_receive(messages, 0, 1, 0, NULL), SLUICE_OK);
  }
  tcp_ranks_meet(me);
  assert_int_equal(sluice_comm_exchange_wait(me->comm, request, "bytes of the test"), SLUICE_OK);
  finish(messages, NUM_CHUNKS - count);
  tcp_ranks_meet(me);
  sluice_messages_close(messages);
  if (me->rank != 0) return;
  const uint64_t most = (took_ns / PAUSE_NS + 2) * PIECE_BYTES;
  if (gives_way && (uint64_t)count * CHUNK_BYTES > most) {
    fail_msg("%d chunks in %.0f ms beside an exchange that is not read", count, (double)took_ns / 1e6);
  }
  if (!gives_way) assert_int_equal(count, NUM_CHUNKS);
}

static void gives_way(tcp_rank_t* me) { send_beside(me, 1); }
static void shares(tcp_rank_t* me) { send_beside(me, 0); }

static void run(void (*then)(tcp_rank_t* me)) {
  tcp_rank_t ranks[2] = {{.timeout_ns = TIMEOUT_NS, .then = then}, {.timeout_ns = TIMEOUT_NS, .then = then}};
  tcp_ranks_run(ranks, 2);
}

TEST(Messages_ThatGiveWay_GoAFewAtATimeBesideAnExchange) { run(gives_way); }

TEST(Messages_ThatDoNot_DoNotWaitForIt) { run(shares); }
