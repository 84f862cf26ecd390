// SPDX-License-Identifier: Apache-2.0
/* A rank sends all its data and leaves while its peer is stopped: the data arrives, whatever the leaving rank has not
 * read. The send buffer is enlarged if the system allows it. */
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/comm/messages.h"
#include "backend/comm/test/process_ranks.h"
#include "third_party/bazel/test.h"

enum { MOST_BYTES = 64 << 20, SMALL_BYTES = 256 << 10, MOST_DESCRIPTORS = 64 };

#define MS         UINT64_C(1000000)
#define TIMEOUT_NS (120000 * MS)
#define STOPPED_US 4000000      /* twice the time that a shutdown waits */
#define GONE_NS    (20000 * MS) /* two shutdowns of two seconds each, on a busy machine */

static char data[MOST_BYTES];
static uint64_t num_bytes;

static char byte_at(uint64_t i) { return (char)(i * 2654435761u >> 13); }

/* Enlarges the buffers of all stream sockets of this process. Returns 1 if a send of MOST_BYTES does not block. */
static int enlarge_buffers(void) {
  int found = 0;
  for (int fd = 3; fd < MOST_DESCRIPTORS; ++fd) {
    struct sockaddr_storage address;
    socklen_t length = sizeof address;
    int size = MOST_BYTES;
    if (getpeername(fd, (struct sockaddr*)&address, &length) != 0) continue;
    if (setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size) != 0) return 0;
    ++found;
  }
  return found > 0;
}

static void leave(process_rank_t* me, process_report_t* report) {
  const uint64_t began_ns = sluice_now_ns();
  sluice_comm_destroy(me->comm);
  me->comm = NULL;
  report->took_ns = sluice_now_ns() - began_ns;
}

static int all_arrived(const char* bytes, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    if (bytes[i] != byte_at(i)) return 0;
  }
  return 1;
}

/* ---- an exchange ------------------------------------------------------------------------------------------------- */

static sluice_status_t one_way(const process_rank_t* me, int32_t stops) {
  const int sends = me->rank == 0;
  const void* send[2] = {NULL, data};
  void* recv[2] = {data, NULL};
  const uint64_t sent[2] = {0, sends ? num_bytes : 0}, received[2] = {sends ? 0 : num_bytes, 0};
  const sluice_exchange_t exchange = {.send = send, .send_bytes = sent, .recv = recv, .recv_bytes = received};
  sluice_comm_request_t* request;
  const sluice_status_t status = sluice_comm_exchange_start(me->comm, &exchange, &request);
  if (status != SLUICE_OK) return status;
  if (stops) (void)raise(SIGSTOP);
  return sluice_comm_exchange_wait(me->comm, request, "bytes of the test");
}

/* Rank 0 sends and leaves; rank 1 is stopped before it reads. */
static int32_t exchange_and_go(process_rank_t* me, process_report_t* report) {
  int64_t can_hold = me->rank == 0 ? enlarge_buffers() : 1;
  if (sluice_comm_all_reduce_i64(me->comm, &can_hold, 1, SLUICE_REDUCE_SUM, "what fits") != SLUICE_OK) return __LINE__;
  if (can_hold < 2) num_bytes = SMALL_BYTES;
  if (me->rank == 0) {
    for (uint64_t i = 0; i < num_bytes; ++i) data[i] = byte_at(i);
  }
  if (one_way(me, me->rank == 1) != SLUICE_OK) return __LINE__;
  if (me->rank == 1 && !all_arrived(data, num_bytes)) return __LINE__;
  leave(me, report);
  report->peer = (int32_t)(num_bytes >> 10); /* KiB that were unread */
  return 0;
}

/* ---- messages ---------------------------------------------------------------------------------------------------- */

static int meet(const process_rank_t* me) {
  int64_t one = 1;
  return sluice_comm_all_reduce_i64(me->comm, &one, 1, SLUICE_REDUCE_SUM, "that it is sent") == SLUICE_OK;
}

/* Rank 0 also leaves a message unread. */
static int32_t send_and_go(process_rank_t* me, process_report_t* report) {
  sluice_messages_t* messages;
  sluice_message_completion_t done;
  if (sluice_messages_open(me->comm, NULL, &messages) != SLUICE_OK) return __LINE__;
  const int32_t other = 1 - me->rank;
  for (uint64_t i = 0; i < num_bytes; ++i) data[i] = byte_at(i);
  const sluice_message_span_t span = {.data = data, .bytes = num_bytes};
  const sluice_message_t message = {.peer = other, .num_spans = 1, .tag = 5, .spans = &span};
  if (me->rank == 1) { /* its message is sent and unread when this rank stops */
    if (sluice_messages_send(messages, &message, 0, NULL) != SLUICE_OK) return __LINE__;
    if (sluice_messages_wait(messages, "its end", &done) != SLUICE_OK) return __LINE__;
    if (!meet(me)) return __LINE__;
    (void)raise(SIGSTOP);
    if (sluice_messages_receive(messages, other, 5, 0, NULL) != SLUICE_OK) return __LINE__;
    if (sluice_messages_wait(messages, "a message", &done) != SLUICE_OK) return __LINE__;
    if (done.payload_bytes != num_bytes || !all_arrived(done.payload, num_bytes)) return __LINE__;
    sluice_messages_release(messages, done.arrival);
  } else {
    if (!meet(me)) return __LINE__; /* a rank that left earlier would fail the peer's send */
    if (sluice_messages_send(messages, &message, 0, NULL) != SLUICE_OK) return __LINE__;
    if (sluice_messages_wait(messages, "its end", &done) != SLUICE_OK) return __LINE__;
  }
  sluice_messages_close(messages);
  leave(me, report);
  return 0;
}

/* ---- both -------------------------------------------------------------------------------------------------------- */

static void run(uint64_t bytes, process_body_t body) {
  pid_t children[2];
  num_bytes = bytes;
  process_ranks_answer_after(0);
  process_ranks_start(2, TIMEOUT_NS, body, children);
  process_ranks_await_stop(children[1]);
  usleep(STOPPED_US);
  (void)kill(children[1], SIGCONT);
  process_ranks_join(children[0]);
  process_ranks_join(children[1]);
  for (int32_t r = 0; r < 2; ++r) {
    const process_report_t* report = process_ranks_report(r);
    if (report->line != 0) {
      fail_msg("rank %d: line %d, %s: %s", r, report->line, sluice_status_name(report->status), report->message);
    }
    assert_true(report->took_ns < GONE_NS);
  }
}

TEST(Goodbye_ToAStoppedPeerWithMuchUnread_TakesNothingBack) {
  run(MOST_BYTES, exchange_and_go);
  print_message("%d KiB were unread when the sender went, which took it %.1f s\n", process_ranks_report(0)->peer,
                (double)process_ranks_report(0)->took_ns / 1e9);
  process_ranks_end();
  run(SMALL_BYTES, exchange_and_go);
  process_ranks_end();
}

TEST(Goodbye_ToAStoppedPeerWithAMessageUnread_TakesNothingBack) {
  run(SMALL_BYTES, send_and_go);
  process_ranks_end();
}
