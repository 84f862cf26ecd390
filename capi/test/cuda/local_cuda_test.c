// SPDX-License-Identifier: Apache-2.0
/* A local communicator on memory of CUDA devices, with the fake driver: bytes, ordering by events, and all failures. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/comm/comm.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/src/context_on_device.h"
#include "capi/test/ranks/play.h"

enum { ROUNDS = 6, ROOM = 4096, FAILS = 999 };

typedef struct world_s world_t;
typedef struct rank_s {
  const world_t* world;
  int32_t rank;
  sluice_comm_t* comm;
  void* stream;
  /* Device memory: all rounds reuse send and recv, and each round has its own part of got. */
  unsigned char *send, *recv, *got;
  sluice_status_t status; /* the first error */
  int32_t peer;
  char message[1024];
} rank_t;

struct world_s {
  int32_t world_size;
  int32_t devices; /* 1: all ranks share one device; otherwise each rank has its own */
  uint64_t timeout_ns;
  void (*run)(rank_t* me);
  void (*check)(const world_t* world); /* after a run without errors; may be NULL */
  int64_t failing_call;                /* of the driver, from 1; 0: none */
  rank_t ranks[MAX_RANKS];
};

static int32_t device_of(const rank_t* me) { return me->world->devices == 1 ? 0 : me->rank; }

static sluice_status_t keep(rank_t* me, sluice_status_t status) {
  if (status == SLUICE_OK || me->status != SLUICE_OK) return status;
  me->status = status;
  me->peer = last_error()->peer;
  snprintf(me->message, sizeof me->message, "%s", last_message());
  return status;
}

static sluice_status_t use_cuda(rank_t* me, int32_t device_id) {
  const sluice_cuda_sources_t sources = {sluice_fake_cuda_driver(), sluice_fake_cuda_image(), NULL, NULL};
  return sluice_comm_local_use_cuda(me->comm, device_id, &sources);
}

static world_t* running;

static void run_rank(part_t* part) {
  rank_t* me = &running->ranks[part->rank];
  me->comm = part->comm;
  meet(part);
  running->run(me);
  meet(part);
}

/* Returns the number of ranks with an error. Fails the test on a leak, and on a hazard of a run that is to be checked
 * or in which a rank has an error. */
static int run_world(world_t* world) {
  char live[200], hazard[200];
  int failed = 0;
  sluice_fake_cuda_reset();
  sluice_fake_cuda_fail_call(world->failing_call - 1, FAILS);
  for (int32_t r = 0; r < world->world_size; ++r) {
    rank_t* me = &world->ranks[r];
    *me = (rank_t){.world = world, .rank = r, .peer = -1};
    me->stream = sluice_fake_cuda_open_stream(device_of(me));
    me->send = sluice_fake_cuda_take(device_of(me), ROOM);
    me->recv = sluice_fake_cuda_take(device_of(me), ROOM);
    me->got = sluice_fake_cuda_take(device_of(me), (uint64_t)ROUNDS * ROOM);
  }
  running = world;
  const uint64_t timeout_ns = world->timeout_ns > 0 ? world->timeout_ns : 10 * PATIENT_NS;
  perform(&(play_t){.run = run_rank, .world_size = world->world_size, .timeout_ns = timeout_ns});
  for (int32_t r = 0; r < world->world_size; ++r) assert_true(sluice_fake_cuda_idle(world->ranks[r].stream));
  for (int32_t r = 0; r < world->world_size; ++r) failed += world->ranks[r].status != SLUICE_OK;
  int64_t hazards = sluice_fake_cuda_hazards(hazard, sizeof hazard);
  if (hazards != 0 && (failed > 0 || world->check != NULL)) fail_msg("%lld hazards: %s", (long long)hazards, hazard);
  if (failed == 0 && world->check != NULL) world->check(world);
  for (int32_t r = 0; r < world->world_size; ++r) {
    sluice_fake_cuda_close_stream(world->ranks[r].stream);
    sluice_fake_cuda_give(world->ranks[r].send);
    sluice_fake_cuda_give(world->ranks[r].recv);
    sluice_fake_cuda_give(world->ranks[r].got);
  }
  int64_t left = sluice_fake_cuda_live(live, sizeof live);
  if (left != 0) fail_msg("left: %s", live);
  return failed;
}

/* ---- exchanges ------------------------------------------------------------------------------------------------- */

static uint64_t size_of(int32_t source, int32_t target, int32_t round) {
  return (source * 7 + target * 3 + round * 5) % 4 == 0 ? 0 : 1 + (uint64_t)(source * 109 + target * 37 + round) % 900;
}
static unsigned char byte_of(int32_t source, int32_t target, int32_t round) {
  return (unsigned char)(1 + source * 61 + target * 17 + round * 5);
}
static uint64_t device_address(const void* data) { return (uint64_t)(uintptr_t)data; }

typedef struct arrays_s {
  const void* send[MAX_RANKS];
  void* recv[MAX_RANKS];
  uint64_t send_bytes[MAX_RANKS], recv_bytes[MAX_RANKS];
} arrays_t;

static sluice_exchange_t exchange_of(const rank_t* me, int32_t round, arrays_t* a) {
  for (int32_t p = 0; p < me->world->world_size; ++p) {
    a->send[p] = me->send + p * 1000;
    a->recv[p] = me->recv + p * 1000;
    a->send_bytes[p] = p == me->rank ? 77 : size_of(me->rank, p, round); /* a rank never reads its own entry */
    a->recv_bytes[p] = p == me->rank ? 99 : size_of(p, me->rank, round);
  }
  return (sluice_exchange_t){a->send, a->send_bytes, a->recv, a->recv_bytes};
}

/* Around the exchange, the stream writes the data to send and copies the received data. */
static sluice_status_t one_round(rank_t* me, int32_t round) {
  arrays_t a;
  const sluice_cuda_driver_t* driver = sluice_fake_cuda_driver();
  const sluice_exchange_t exchange = exchange_of(me, round, &a);
  for (int32_t p = 0; p < me->world->world_size; ++p) {
    if (p == me->rank || a.send_bytes[p] == 0) continue;
    (void)driver->cuMemsetD8Async(device_address(a.send[p]), byte_of(me->rank, p, round), a.send_bytes[p], me->stream);
  }
  SLUICE_TRY(sluice_comm_exchange_enqueue(me->comm, &exchange, me->stream));
  for (int32_t p = 0; p < me->world->world_size; ++p) {
    if (p == me->rank || a.recv_bytes[p] == 0) continue;
    (void)driver->cuMemcpyAsync(device_address(me->got + round * ROOM + p * 1000), device_address(a.recv[p]),
                                a.recv_bytes[p], me->stream);
  }
  return SLUICE_OK;
}

/* In every second round the hosts exchange a header, like the engine. */
static void all_rounds(rank_t* me) {
  if (keep(me, use_cuda(me, device_of(me))) != SLUICE_OK) {
    sluice_comm_abort(me->comm); /* like a rank that cannot take part in an exchange */
    return;
  }
  for (int32_t round = 0; round < ROUNDS; ++round) {
    int64_t sum = me->rank;
    if (round % 2 == 1 && keep(me, sluice_comm_all_reduce_i64(me->comm, &sum, 1, SLUICE_REDUCE_SUM, NULL)) != 0) return;
    if (keep(me, one_round(me, round)) != SLUICE_OK) return;
  }
}

static void check_bytes(const world_t* world) {
  for (int32_t r = 0; r < world->world_size; ++r) {
    for (int32_t i = 0; i < ROUNDS; ++i) {
      for (int32_t p = 0; p < world->world_size; ++p) {
        const unsigned char* at = world->ranks[r].got + i * ROOM + p * 1000;
        uint64_t bytes = p == r ? 0 : size_of(p, r, i);
        for (uint64_t b = 0; b < bytes; ++b) assert_int_equal(at[b], byte_of(p, r, i));
        assert_int_equal(at[bytes], 0xa5); /* no bytes are written after the message */
      }
    }
  }
}

TEST(LocalCuda_ManyExchanges_ArriveIntactAndInOrder) {
  for (int32_t devices = 1; devices <= 2; ++devices) {
    for (int32_t w = 2; w <= MAX_RANKS; ++w) {
      world_t world = {.world_size = w, .devices = devices, .run = all_rounds, .check = check_bytes};
      if (run_world(&world) != 0) fail_msg("%s", world.ranks[0].message);
    }
  }
}

/* Fails calls of the driver, one per run. All ranks return, those that the failure concerns with an error; nothing
 * leaks, and a run with an error has no hazards. */
TEST(LocalCuda_NthCallFails_AllRanksReturn) {
  int was_reached = 1;
  int64_t nth = 0, refusals = 0;
  for (; was_reached; nth += 3) {
    world_t world = {.world_size = 3, .devices = 1, .run = all_rounds, .failing_call = nth + 1};
    const int failed = run_world(&world);
    was_reached = sluice_fake_cuda_failed();
    for (int32_t r = 0; r < 3 && failed < 3; ++r) {
      const rank_t* me = &world.ranks[r];
      if (me->status != SLUICE_OK && me->status != SLUICE_E_PEER_LOST && me->status != SLUICE_E_EXTERNAL) {
        fail_msg("call %lld, rank %d: %s", (long long)nth, r, me->message);
      }
    }
    refusals += failed > 0;
  }
  printf("%lld calls, of which %lld ended the group\n", (long long)(nth / 3), (long long)refusals);
  assert_true(nth > 100 && refusals > 10);
}

/* ---- failures ------------------------------------------------------------------------------------------- */

static void rank_one_is_silent(rank_t* me) {
  (void)use_cuda(me, device_of(me));
  if (me->rank != 1) (void)keep(me, one_round(me, 0));
}

TEST(LocalCuda_SilentRank_TimesOutNamingIt) {
  world_t world = {.world_size = 3, .devices = 1, .run = rank_one_is_silent, .timeout_ns = 1000 * MS};
  (void)run_world(&world);
  int timed_out = 0;
  for (int32_t r = 0; r < 3; r += 2) {
    const rank_t* me = &world.ranks[r];
    timed_out += me->status == SLUICE_E_TIMED_OUT;
    if (me->status != SLUICE_E_TIMED_OUT && me->status != SLUICE_E_PEER_LOST) fail_msg("rank %d: %s", r, me->message);
    if (me->peer != 1) fail_msg("rank %d blames %d: %s", r, me->peer, me->message);
  }
  assert_true(timed_out > 0);
}

static void rank_one_aborts(rank_t* me) {
  (void)use_cuda(me, device_of(me));
  if (me->rank == 1) sluice_comm_abort(me->comm);
  (void)keep(me, one_round(me, 0));
}

TEST(LocalCuda_AbortedPeer_IsPeerLostNamingIt) {
  world_t world = {.world_size = 2, .devices = 1, .run = rank_one_aborts};
  (void)run_world(&world);
  assert_int_equal(world.ranks[0].status, SLUICE_E_PEER_LOST);
  assert_int_equal(world.ranks[0].peer, 1);
  assert_int_equal(world.ranks[1].status, SLUICE_E_ABORTED);
}

static void sizes_differ(rank_t* me) {
  arrays_t a;
  (void)use_cuda(me, device_of(me));
  const sluice_exchange_t exchange = exchange_of(me, 0, &a);
  for (int32_t p = 0; p < 2; ++p) a.send_bytes[p] = 48, a.recv_bytes[p] = me->rank == 0 ? 40 : 48;
  (void)keep(me, sluice_comm_exchange_enqueue(me->comm, &exchange, me->stream));
}
static void kinds_differ(rank_t* me) {
  arrays_t a;
  sluice_comm_request_t* request = NULL;
  (void)use_cuda(me, device_of(me));
  const sluice_exchange_t exchange = exchange_of(me, 0, &a);
  for (int32_t p = 0; p < 2; ++p) a.send_bytes[p] = a.recv_bytes[p] = 48;
  if (me->rank == 0) {
    (void)keep(me, sluice_comm_exchange_enqueue(me->comm, &exchange, me->stream));
  } else if (keep(me, sluice_comm_exchange_start(me->comm, &exchange, &request)) == SLUICE_OK) {
    (void)keep(me, sluice_comm_exchange_wait(me->comm, request, NULL));
  }
}
static void check_internal(void (*run)(rank_t* me), const char* text) {
  world_t world = {.world_size = 2, .devices = 1, .run = run};
  (void)run_world(&world);
  int found = 0;
  for (int32_t r = 0; r < 2; ++r) {
    const rank_t* me = &world.ranks[r];
    int is_internal = me->status == SLUICE_E_INTERNAL && strstr(me->message, text) != NULL;
    if (!is_internal && me->status != SLUICE_E_PEER_LOST) fail_msg("rank %d: %d %s", r, me->status, me->message);
    found += is_internal;
  }
  assert_true(found > 0);
}
TEST(LocalCuda_RanksThatDisagree_AreInternalNamingThem) {
  check_internal(sizes_differ, "the ranks disagree on their counts");
  check_internal(kinds_differ, "one with device memory and one with host memory");
}

static void refusals(rank_t* me) {
  (void)one_round(me, 0);
  if (last_error()->status != SLUICE_E_UNSUPPORTED || strstr(last_message(), "has no device") == NULL)
    me->status = last_error()->status;
}
static void other_device(rank_t* me) {
  if (use_cuda(me, 0) != SLUICE_OK || use_cuda(me, 0) != SLUICE_OK) me->status = SLUICE_E_INTERNAL;
  (void)keep(me, use_cuda(me, 2));
}
static void capturing(rank_t* me) {
  (void)use_cuda(me, 0);
  sluice_fake_graph_t* graph = NULL;
  sluice_fake_cuda_begin_capture(me->stream);
  (void)keep(me, one_round(me, 0));
  (void)sluice_fake_cuda_end_capture(me->stream, &graph);
  sluice_fake_cuda_destroy_graph(graph);
}
static void run_two(void (*run)(rank_t* me), sluice_status_t wanted, const char* text) {
  world_t world = {.world_size = 2, .devices = 1, .run = run};
  (void)run_world(&world);
  for (int32_t r = 0; r < 2; ++r) {
    const rank_t* me = &world.ranks[r];
    if (me->status != wanted || strstr(me->message, text) == NULL) {
      fail_msg("rank %d: %d %s", r, me->status, me->message);
    }
  }
}
TEST(LocalCuda_NoDeviceOtherDeviceOrCapture_IsRefused) {
  run_two(refusals, SLUICE_OK, "");
  run_two(other_device, SLUICE_E_INVALID_ARGUMENT, "a rank has one device");
  run_two(capturing, SLUICE_E_STATE, "captured into a graph");
}
