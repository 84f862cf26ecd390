// SPDX-License-Identifier: Apache-2.0
/* Many ranks, which are processes: 32 every day, 256 with SLUICE_FULL set. All connect at the same time. When one of
 * them stops, all others query a slow store for the straggler. */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/base/clock.h"
#include "backend/base/test/refused.h"
#include "backend/comm/test/process_ranks.h"

enum { FEW = 32, ROW_INTS = 16 };

#define MS        UINT64_C(1000000)
#define LONG_NS   (300000 * MS)
#define SHORT_NS  (10000 * MS)
#define ANSWER_NS (50 * MS)
/* Time from the deadline to the status on a busy machine: two seconds of lookups, and abandoning a request. */
#define BOUNDED_NS (15000 * MS)

static pid_t children[PROCESS_MOST_RANKS];

static int32_t num_ranks(void) { return getenv("SLUICE_FULL") != NULL ? PROCESS_MOST_RANKS : FEW; }

/* Sends a row to every rank that identifies sender and receiver. */
static sluice_status_t exchange_rows(const process_rank_t* me, int32_t* out_wrong) {
  static int32_t sent[PROCESS_MOST_RANKS][ROW_INTS], received[PROCESS_MOST_RANKS][ROW_INTS];
  const void* send[PROCESS_MOST_RANKS];
  void* recv[PROCESS_MOST_RANKS];
  uint64_t bytes[PROCESS_MOST_RANKS];
  sluice_comm_request_t* request;
  for (int32_t r = 0; r < me->world_size; ++r) {
    for (int32_t i = 0; i < ROW_INTS; ++i) sent[r][i] = me->rank * 1000 + r;
    send[r] = sent[r], recv[r] = received[r], bytes[r] = r == me->rank ? 0 : sizeof sent[r];
  }
  const sluice_exchange_t exchange = {.send = send, .send_bytes = bytes, .recv = recv, .recv_bytes = bytes};
  sluice_status_t status = sluice_comm_exchange_start(me->comm, &exchange, &request);
  if (status == SLUICE_OK) status = sluice_comm_exchange_wait(me->comm, request, "rows of the test");
  *out_wrong = 0;
  for (int32_t r = 0; r < me->world_size && status == SLUICE_OK; ++r) {
    for (int32_t i = 0; i < ROW_INTS && r != me->rank; ++i) *out_wrong += received[r][i] != r * 1000 + me->rank;
  }
  return status;
}

static void check_reports(int32_t world_size, int32_t but) {
  for (int32_t r = 0; r < world_size; ++r) {
    const process_report_t* report = process_ranks_report(r);
    if (r == but || report->line == 0) continue;
    fail_msg("rank %d of %d: line %d, %s, peer %d: %s", r, world_size, report->line, sluice_status_name(report->status),
             report->peer, report->message);
  }
}

static int32_t meet(process_rank_t* me, process_report_t* report) {
  (void)report;
  for (int i = 0; i < 3; ++i) {
    int32_t wrong = 0;
    if (exchange_rows(me, &wrong) != SLUICE_OK || wrong != 0) return __LINE__;
  }
  return 0;
}

TEST(Crowd_ConnectsAtOnce_AllMeet) {
  const int32_t world_size = num_ranks();
  uint64_t longest_ns = 0;
  process_ranks_answer_after(0);
  process_ranks_start(world_size, LONG_NS, meet, children);
  for (int32_t r = 0; r < world_size; ++r) process_ranks_join(children[r]);
  check_reports(world_size, -1);
  for (int32_t r = 0; r < world_size; ++r) {
    const uint64_t took_ns = process_ranks_report(r)->created_ns;
    if (took_ns > longest_ns) longest_ns = took_ns;
  }
  process_ranks_end();
  print_message("%d processes were connected %.1f s after the first fork at the latest\n", world_size,
                (double)longest_ns / 1e9);
}

/* The last rank stops after all have connected. */
static int32_t stop_or_wait(process_rank_t* me, process_report_t* report) {
  int32_t wrong = 0;
  if (exchange_rows(me, &wrong) != SLUICE_OK || wrong != 0) return __LINE__;
  if (me->rank == me->world_size - 1) (void)raise(SIGSTOP);
  const uint64_t began_ns = sluice_now_ns();
  if (exchange_rows(me, &wrong) != SLUICE_E_TIMED_OUT) return __LINE__;
  report->took_ns = sluice_now_ns() - began_ns;
  report->peer = last_error()->peer;
  (void)snprintf(report->message, sizeof report->message, "%.*s", (int)sizeof report->message - 1, last_message());
  return report->took_ns > SHORT_NS + BOUNDED_NS ? __LINE__ : 0;
}

TEST(Crowd_OneStopsBehindASlowStore_IsNamedSoonAfterTheDeadline) {
  const int32_t world_size = num_ranks(), victim = world_size - 1;
  uint64_t longest_ns = 0;
  process_ranks_answer_after(ANSWER_NS);
  process_ranks_start(world_size, SHORT_NS, stop_or_wait, children);
  for (int32_t r = 0; r < victim; ++r) process_ranks_join(children[r]);
  (void)kill(children[victim], SIGKILL);
  process_ranks_join(children[victim]);
  check_reports(world_size, victim);
  for (int32_t r = 0; r < victim; ++r) {
    const process_report_t* report = process_ranks_report(r);
    if (report->peer != victim) fail_msg("rank %d names rank %d: %s", r, report->peer, report->message);
    if (report->took_ns > longest_ns) longest_ns = report->took_ns;
  }
  const int64_t lookups = process_ranks_lookups();
  process_ranks_end();
  print_message("%d ranks: named %.1f s after the beginning, of which %.0f s were the deadline; %lld questions\n",
                world_size, (double)longest_ns / 1e9, (double)SHORT_NS / 1e9, (long long)lookups);
  assert_true(lookups <= (int64_t)world_size * (world_size - 1));
}
