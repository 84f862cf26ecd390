// SPDX-License-Identifier: Apache-2.0
#include "capi/test/nth/nth_ranks.h"

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/base/alloc.h"
#include "backend/base/clock.h"
#include "backend/base/test/refused.h"
#include "capi/test/nth/failing_calls.h"

enum { NUM_COUNTS = 3, TRIES = 3, HANG_S = 120 };

#define MS         UINT64_C(1000000)
#define TIMEOUT_NS (8000 * MS)
#define CONNECT_NS (4000 * MS)
/* Joining over the parent, connecting and one exchange may each take this long on a busy machine. */
#define BOUNDED_NS (60000 * MS)

static int32_t world_size;
static nth_way_t way;
static nth_work_t do_work;
static nth_rank_t ranks[NTH_MOST_RANKS];
static pthread_barrier_t barrier; /* of all ranks and the test */
static char planned[256];         /* describes the planned failure; a hang prints it */

static void hang(int signal_number) {
  (void)signal_number;
  (void)!write(STDERR_FILENO, planned, strlen(planned));
  abort();
}

/* ---- one rank ---------------------------------------------------------------------------------------------------- */

sluice_status_t nth_said(nth_rank_t* me, sluice_status_t status) {
  if (status == SLUICE_OK) return status;
  snprintf(me->message, sizeof me->message, "%.511s", last_message());
  return status;
}

static sluice_status_t join(nth_rank_t* me, sluice_local_group_t* group, int32_t rank, int32_t size,
                            sluice_comm_t** out_comm) {
  DEFAULTS(sluice_comm_config, config);
  config.rank = rank, config.world_size = size, config.timeout_ns = TIMEOUT_NS;
  return nth_said(me, sluice_comm_create_local(group, &config, out_comm));
}

sluice_status_t nth_pair(nth_rank_t* me, sluice_comm_t** out_comm) {
  return join(me, me->pair, me->rank % 2, 2, out_comm);
}

static sluice_status_t connect_and_work(nth_rank_t* me) {
  sluice_comm_t *local = NULL, *tcp = NULL;
  DEFAULTS(sluice_tcp_config, config);
  config.connect_timeout_ns = CONNECT_NS;
  const int is_tcp = way != NTH_WITHIN;
  sluice_status_t status = SLUICE_OK;
  if (way == NTH_OVER_TCP_AND_LATER) status = join(me, me->second, me->rank, me->world_size, &me->later);
  if (status == SLUICE_OK) status = join(me, me->group, me->rank, me->world_size, &local);
  if (status == SLUICE_OK && is_tcp) status = nth_said(me, sluice_comm_create_tcp(local, &config, &tcp));
  if (status == SLUICE_OK) status = do_work(me, is_tcp ? tcp : local, is_tcp ? local : NULL);
  sluice_comm_destroy(me->later);
  sluice_comm_destroy(tcp);
  sluice_comm_destroy(local);
  return status;
}

static void* rank_main(void* argument) {
  nth_rank_t* me = argument;
  pthread_barrier_wait(&barrier);
  const uint64_t began_ns = sluice_now_ns();
  me->status = connect_and_work(me);
  me->took_ns = sluice_now_ns() - began_ns;
  return NULL;
}

/* ---- all of them ------------------------------------------------------------------------------------------------- */

/* Runs all ranks once. place NULL: no call fails. Returns 1 if the planned call has failed. */
static int32_t perform(const call_place_t* place, int64_t nth) {
  pthread_t threads[NTH_MOST_RANKS];
  sluice_local_group_t *group, *second, *pairs[NTH_MOST_RANKS / 2] = {NULL};
  snprintf(planned, sizeof planned, "hangs: W = %d, %s at 0x%lx fails at hit %lld\n", world_size,
           place != NULL ? place->name : "nothing", place != NULL ? (unsigned long)place->address : 0, (long long)nth);
  alarm(HANG_S);
  assert_int_equal(sluice_local_group_create(world_size, &group), SLUICE_OK);
  assert_int_equal(sluice_local_group_create(world_size, &second), SLUICE_OK);
  for (int32_t p = 0; p < world_size / 2 && world_size % 2 == 0; ++p) {
    assert_int_equal(sluice_local_group_create(2, &pairs[p]), SLUICE_OK);
  }
  pthread_barrier_init(&barrier, NULL, (unsigned)world_size + 1);
  for (int32_t r = 0; r < world_size; ++r) {
    ranks[r] =
        (nth_rank_t){.group = group, .second = second, .pair = pairs[r / 2], .rank = r, .world_size = world_size};
    assert_int_equal(pthread_create(&threads[r], NULL, rank_main, &ranks[r]), 0);
  }
  if (place == NULL) calls_count();
  if (place != NULL) calls_fail(place, nth);
  pthread_barrier_wait(&barrier);
  for (int32_t r = 0; r < world_size; ++r) pthread_join(threads[r], NULL);
  const int32_t has_failed = calls_end();
  pthread_barrier_destroy(&barrier);
  sluice_local_group_destroy(group);
  sluice_local_group_destroy(second);
  for (int32_t p = 0; p < NTH_MOST_RANKS / 2; ++p) sluice_local_group_destroy(pairs[p]);
  alarm(0);
  return has_failed;
}

static void fail_with(const call_place_t* place, int64_t nth, const char* what, int64_t is, int64_t wanted) {
  for (int32_t r = 0; r < world_size; ++r) {
    print_message("rank %d: %s after %.1f s: %s\n", r, sluice_status_name(ranks[r].status),
                  (double)ranks[r].took_ns / 1e9, ranks[r].message);
  }
  fail_msg("W = %d, %s at 0x%lx (addr2line -fie of this program), hit %lld fails: %s: %lld instead of %lld", world_size,
           place != NULL ? place->name : "nothing", place != NULL ? (unsigned long)place->address : 0, (long long)nth,
           what, (long long)is, (long long)wanted);
}

typedef struct before_s {
  uint64_t num_live;
  int32_t num_descriptors, num_threads;
  uint64_t digests[NTH_MOST_RANKS];
} before_t;

/* Called after everything has been released. */
static void check_nothing_left(const before_t* before, const call_place_t* place, int64_t nth) {
  const int32_t descriptors = calls_count_entries("/proc/self/fd");
  int32_t threads = calls_count_entries("/proc/self/task");
  /* A thread that has been joined may stay listed for a moment. */
  for (int i = 0; threads > before->num_threads && i < 1000; ++i) {
    usleep(1000);
    threads = calls_count_entries("/proc/self/task");
  }
  const uint64_t num_live = sluice_process_allocator()->num_live;
  if (num_live != before->num_live) fail_with(place, nth, "live blocks", (int64_t)num_live, (int64_t)before->num_live);
  if (descriptors != before->num_descriptors) {
    fail_with(place, nth, "descriptors", descriptors, before->num_descriptors);
  }
  if (threads != before->num_threads) fail_with(place, nth, "threads", threads, before->num_threads);
  for (int32_t r = 0; r < world_size; ++r) {
    if (ranks[r].live_blocks != 0) fail_with(place, nth, "live blocks of a context", ranks[r].live_blocks, 0);
  }
}

static void check_ranks(const before_t* before, const call_place_t* place, int64_t nth) {
  int32_t num_ok = 0;
  for (int32_t r = 0; r < world_size; ++r) {
    num_ok += ranks[r].status == SLUICE_OK;
    if (ranks[r].took_ns > BOUNDED_NS) {
      fail_with(place, nth, "seconds", (int64_t)(ranks[r].took_ns / MS / 1000), (int64_t)(BOUNDED_NS / MS / 1000));
    }
    if (ranks[r].is_torn) fail_with(place, nth, "torn states", 1, 0);
    if (ranks[r].status == SLUICE_E_INTERNAL) fail_with(place, nth, "internal errors", 1, 0);
    if (ranks[r].status != SLUICE_OK && ranks[r].message[0] == '\0') fail_with(place, nth, "messages", 0, 1);
    if (ranks[r].status == SLUICE_E_NO_MEMORY && strstr(ranks[r].message, "bytes refused by the test") != NULL) {
      fail_with(place, nth, "statuses that differ from the error record's", SLUICE_E_NO_MEMORY, SLUICE_E_OVER_BUDGET);
    }
    if (ranks[r].status == SLUICE_OK && ranks[r].digest != before->digests[r]) {
      fail_with(place, nth, "digest", (int64_t)ranks[r].digest, (int64_t)before->digests[r]);
    }
  }
  check_nothing_left(before, place, nth);
  if (place == NULL && num_ok < world_size) fail_with(place, nth, "ranks without an error", num_ok, world_size);
}

static void measure(before_t* before) {
  (void)perform(NULL, 0); /* loads what a process loads once */
  for (int32_t r = 0; r < world_size; ++r) before->digests[r] = ranks[r].digest;
  before->num_live = sluice_process_allocator()->num_live;
  before->num_descriptors = calls_count_entries("/proc/self/fd");
  before->num_threads = calls_count_entries("/proc/self/task");
}

typedef struct outcomes_s {
  int64_t struck, late, tolerated;
  int32_t num_missed; /* places at which no planned call was reached */
} outcomes_t;

static void strike(const before_t* before, const call_place_t* place, int64_t nth, outcomes_t* outcomes) {
  int32_t has_failed = 0, is_late = 0, all_ok = 1;
  for (int i = 0; i < TRIES && !has_failed; ++i) { /* the number of waits varies between runs */
    has_failed = perform(place, nth);
    check_ranks(before, place, nth);
  }
  for (int32_t r = 0; r < world_size; ++r) {
    is_late |= ranks[r].status == SLUICE_E_TIMED_OUT;
    all_ok &= ranks[r].status == SLUICE_OK;
  }
  outcomes->struck += has_failed, outcomes->late += is_late, outcomes->tolerated += has_failed && all_ok;
  if (all_ok) return;
  (void)perform(NULL, 0);
  check_ranks(before, NULL, 0);
}

static int is_chosen(const call_place_t* place, int64_t nth) {
  if (place->is_allocation && getenv("SLUICE_FULL") != NULL) return 1;
  return nth < 2 || nth == place->num_hits - 1;
}

void nth_call(int32_t num_ranks, nth_way_t over, nth_work_t work) {
  before_t before;
  outcomes_t outcomes = {0};
  int32_t num_places, num_allocations = 0;
  world_size = num_ranks, way = over, do_work = work;
  signal(SIGALRM, hang);
  calls_forget();
  measure(&before);
  for (int i = 0; i < NUM_COUNTS; ++i) {
    (void)perform(NULL, 0);
    check_ranks(&before, NULL, 0);
  }
  const call_place_t* places = calls_places(&num_places);
  for (int32_t p = 0; p < num_places; ++p) {
    const call_place_t place = places[p];
    const int64_t struck = outcomes.struck;
    num_allocations += place.is_allocation;
    for (int64_t nth = 0; nth < place.num_hits; ++nth) {
      if (is_chosen(&place, nth)) strike(&before, &place, nth, &outcomes);
    }
    outcomes.num_missed += outcomes.struck == struck;
  }
  print_message(
      "W = %d: %d places of the system, %d ways to an allocation; %lld calls have failed, %lld of them without "
      "harm, %lld until a deadline\n",
      num_ranks, num_places - num_allocations, num_allocations, (long long)outcomes.struck,
      (long long)outcomes.tolerated, (long long)outcomes.late);
  assert_in_range(outcomes.num_missed, 0, num_places / 10);
}
