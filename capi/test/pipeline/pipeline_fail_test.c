// SPDX-License-Identifier: Apache-2.0
/* A batch that fails on one rank fails on all ranks, quickly and with the same report. The next batch works. */
#include "capi/test/pipeline/pipeline_world.h"

#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backend/base/alloc.h"
#include "backend/base/clock.h"

#define SECOND_NS  UINT64_C(1000000000)
#define BOUNDED_NS (20 * SECOND_NS)

static const char* const transports[] = {"local", "tcp"};

/* ---- a callback fails ---- */

static struct {
  int32_t rank, call, micro_batch;
  _Atomic uint64_t at_ns;
} fault;

static sluice_status_t fail_once(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op,
                                 sluice_host_failure_t* out_failure) {
  if (rank->batch != 1 || rank->rank != fault.rank || call != fault.call || op->micro_batch != fault.micro_batch) {
    return SLUICE_OK;
  }
  out_failure->native_code = 42;
  (void)snprintf(out_failure->message, sizeof out_failure->message, "ValueError: boom");
  atomic_store(&fault.at_ns, sluice_now_ns());
  return SLUICE_E_EXTERNAL;
}

static void try_fault(const char* transport, int32_t p, int32_t v, int32_t rank, int32_t call, int32_t micro_batch) {
  pw_world_t* world = pw_world_new(transport, p);
  world->config.num_virtual = v;
  world->config.separate_wgrad = call == PW_WEIGHT_GRAD;
  world->reduces = call == PW_REDUCE ? UINT32_MAX : 0;
  world->in_call = fail_once;
  fault.rank = rank, fault.call = call, fault.micro_batch = micro_batch;
  atomic_store(&fault.at_ns, 0);
  for (int32_t b = 0; b < 4; ++b) pw_world_add(world, 5, b == 2);
  pw_world_run(world);
  char text[64];
  (void)snprintf(text, sizeof text, "rank %d ended batch 2: EXTERNAL", rank);
  assert_true(atomic_load(&fault.at_ns) > 0);
  for (int32_t r = 0; r < p; ++r) {
    assert_status(world, r, 1, r == rank ? SLUICE_E_EXTERNAL : SLUICE_E_PEER_REFUSED, r == rank ? NULL : text);
    assert_status(world, r, 1, world->ranks[r].ended[1], "ValueError: boom");
    assert_int_equal(world->ranks[r].errors[1].native_code, 42);
    assert_true(world->ranks[r].returned_ns[1] - atomic_load(&fault.at_ns) < BOUNDED_NS);
    assert_int_equal(world->ranks[r].stats[3].num_failed, 1);
  }
  assert_all_work(world, 0);
  assert_all_work(world, 2);
  assert_all_work(world, 3);
  finish(world);
}

TEST(Callback_AnyFailsAnywhere_AllHearAndTheNextBatchWorks) {
  for (size_t t = 0; t < 2; ++t) {
    for (int32_t rank = 0; rank < 3; ++rank) {
      for (int32_t i = 0; i < 5; i += 2) {
        try_fault(transports[t], 3, 1, rank, PW_FORWARD, i);
        try_fault(transports[t], 3, 1, rank, PW_BACKWARD, i);
      }
      try_fault(transports[t], 3, 2, rank, PW_WEIGHT_GRAD, 4);
      try_fault(transports[t], 3, 2, rank, PW_REDUCE, 4);
    }
    try_fault(transports[t], 3, 1, 0, PW_LOAD, 3);
    try_fault(transports[t], 3, 1, 2, PW_LOAD, 3);
    try_fault(transports[t], 3, 1, 2, PW_LOSS, 3);
  }
  try_fault("local", 1, 2, 0, PW_BACKWARD, 2);
}

/* Fails once the previous stage has sent all messages that it may send, more than this stage has requested. */
static sluice_status_t fail_often(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op,
                                  sluice_host_failure_t* out_failure) {
  static _Atomic int32_t num_sent;
  (void)op;
  (void)out_failure;
  if (rank->batch % 2 == 0 || call != PW_FORWARD) return SLUICE_OK;
  if (rank->rank == 1) atomic_fetch_add(&num_sent, 1);
  if (rank->rank != 2) return SLUICE_OK;
  for (int32_t i = 0; i < 1000 && atomic_load(&num_sent) < 4; ++i) usleep(10000);
  usleep(10000); /* the last message is sent after its callback; without it, one message less remains */
  atomic_store(&num_sent, 0);
  return SLUICE_E_EXTERNAL;
}

/* Messages to the failed stage are received and dropped before the next batch. The last stage receives at most six
 * messages of 1.5 KiB in a batch; 21 would remain otherwise. */
TEST(Callback_FailsManyTimes_NothingPilesUp) {
  static const int32_t limits[] = {4, 4, 1};
  (void)state;
  for (size_t t = 0; t < 2; ++t) {
    pw_world_t* world = pw_world_new(transports[t], 3);
    world->config.in_flight_of = limits;
    world->config.receives_ahead = 0;
    world->in_call = fail_often;
    for (int32_t b = 0; b < 15; ++b) pw_world_add(world, 6, 0);
    pw_world_run(world);
    for (int32_t b = 0; b < 15; b += 2) assert_all_work(world, b);
    const uint64_t bytes = world->ranks[2].stats[14].most_message_bytes;
    assert_true(bytes > 0);
    if (bytes > 24576) fail_msg("%s: %d bytes lie there after 7 failures", pw_name(world), (int)bytes);
    finish(world);
  }
}

#define LARGE_BYTES (UINT64_C(32) << 20)

static struct {
  void* data[PW_MAX_MICRO_BATCHES];
  int64_t shape[2];
} large = {.shape = {1, LARGE_BYTES / sizeof(float)}};

/* After the first micro-batch of a batch that will fail, returns memory that is freed as soon as the library releases
 * it. */
static void give_large(pw_rank_t* rank, const sluice_stage_call_t* op, sluice_stage_tensors_t* result) {
  const int32_t i = op->micro_batch;
  (void)result;
  if (rank->batch != 1 || rank->rank != 0 || i == 0) return;
  large.data[i] = mmap(NULL, LARGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true(large.data[i] != MAP_FAILED);
  rank->stash[0][i].out[0].data = large.data[i];
  rank->stash[0][i].out[0].shape = large.shape;
}

static void unmap_large(pw_rank_t* rank, int32_t which, int32_t c, int32_t i) {
  if (rank->rank != 0 || c != 0 || which != SLUICE_STAGE_OUTPUT || large.data[i] == NULL) return;
  munmap(large.data[i], LARGE_BYTES);
  large.data[i] = NULL;
}

TEST(Callback_FailsWhileMuchIsUnderWay_ResultsAreReadUntilReleased) {
  for (size_t t = 0; t < 2; ++t) {
    pw_world_t* world = pw_world_new(transports[t], 2);
    world->in_call = fail_once;
    world->bend_output = give_large;
    world->released = unmap_large;
    fault.rank = 1, fault.call = PW_BACKWARD, fault.micro_batch = 0;
    for (int32_t b = 0; b < 3; ++b) pw_world_add(world, 3, 0);
    pw_world_run(world);
    assert_status(world, 0, 1, SLUICE_E_PEER_REFUSED, "boom");
    assert_status(world, 1, 1, SLUICE_E_EXTERNAL, "boom");
    assert_all_work(world, 2);
    finish(world);
  }
}

static void fail_in_one_replica(void) {
  pw_world_t* world = pw_world_new("tcp", 2);
  world->num_replicas = 2;
  world->in_call = fail_once;
  fault.rank = 3, fault.call = PW_BACKWARD, fault.micro_batch = 1;
  for (int32_t b = 0; b < 3; ++b) pw_world_add(world, 4, 0);
  pw_world_run(world);
  for (int32_t r = 0; r < 4; ++r) {
    assert_status(world, r, 1, r == 3 ? SLUICE_E_EXTERNAL : SLUICE_E_PEER_REFUSED, "boom");
  }
  assert_all_work(world, 2);
  finish(world);
}

/* Repeats the case: ranks that leave while others still end the failed batch are not reported as lost. */
TEST(Callback_FailsInOneReplica_FailsInAll) {
  for (int32_t i = 0; i < 40; ++i) fail_in_one_replica();
}

/* ---- tensors from the host ---- */

static int32_t bend_how;

static void bend_output(pw_rank_t* rank, const sluice_stage_call_t* op, sluice_stage_tensors_t* result) {
  static int64_t strides[2] = {1, 2};
  if (rank->batch != 1 || rank->rank != 0 || op->micro_batch != 2) return;
  pw_stash_t* stash = &rank->stash[op->virtual_stage][op->micro_batch];
  switch (bend_how) {
    case 0: stash->out[0].strides = strides; break;
    case 1: stash->out[0].device_type = SLUICE_DEVICE_CUDA; break;
    case 2: stash->out[0].data = NULL; break;
    case 3: stash->out[1].ndim = -1; break;
    case 4: stash->shape[1] = -3; break;
    case 5: result->num_tensors = 600; break;
    default: result->tensors = NULL; break;
  }
}

TEST(Output_CannotBeSent_IsRefusedByName) {
  static const char* const texts[] = {"tensor 0 of the output of micro-batch 2 in virtual stage 0 is not row-major",
                                      "is not in host memory",
                                      "tensor 0 of the output of micro-batch 2 in virtual stage 0 has no data",
                                      "tensor 1 of the output",
                                      "has an invalid shape",
                                      "has 600 tensors; 0 to 511",
                                      "its array is NULL"};
  for (bend_how = 0; bend_how < 7; ++bend_how) {
    pw_world_t* world = pw_world_new("local", 2);
    world->bend_output = bend_output;
    for (int32_t b = 0; b < 3; ++b) pw_world_add(world, 4, 0);
    pw_world_run(world);
    assert_status(world, 0, 1, SLUICE_E_INVALID_ARGUMENT, texts[bend_how]);
    assert_status(world, 1, 1, SLUICE_E_PEER_REFUSED, texts[bend_how]);
    assert_all_work(world, 2);
    finish(world);
  }
}

/* ---- the host ---- */

static _Atomic int32_t num_returned;

static sluice_status_t hold_rank_0(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op,
                                   sluice_host_failure_t* out_failure) {
  (void)op;
  (void)out_failure;
  if (rank->batch != 1 || rank->rank != 0 || call != PW_FORWARD) return SLUICE_OK;
  for (int32_t i = 0; i < 6000 && atomic_load(&num_returned) < 1; ++i) usleep(10000);
  return SLUICE_OK;
}

static int32_t interrupt_rank_2(pw_rank_t* rank) {
  if (rank->batch != 1 || rank->rank != 2) return 0;
  atomic_store(&num_returned, 1);
  return 1;
}

TEST(Host_InterruptsAWait_TheBatchFailsAndTheNextWorks) {
  pw_world_t* world = pw_world_new("tcp", 3);
  world->in_call = hold_rank_0;
  world->is_interrupted = interrupt_rank_2;
  atomic_store(&num_returned, 0);
  for (int32_t b = 0; b < 3; ++b) pw_world_add(world, 4, 0);
  pw_world_run(world);
  assert_status(world, 2, 1, SLUICE_E_EXTERNAL, "interrupted");
  for (int32_t r = 0; r < 2; ++r) assert_status(world, r, 1, SLUICE_E_PEER_REFUSED, "rank 2 ended batch 2");
  assert_all_work(world, 2);
  finish(world);
}

static sluice_status_t run_in_call(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op,
                                   sluice_host_failure_t* out_failure) {
  (void)op;
  (void)out_failure;
  DEFAULTS(sluice_pipeline_batch, batch);
  sluice_pipeline_stats_t stats = {.struct_size = sizeof stats};
  if (call != PW_FORWARD) return SLUICE_OK;
  if (sluice_pipeline_run_batch(rank->pipeline, &batch) != SLUICE_E_BUSY) pw_wrong(rank, "a batch in a batch");
  if (sluice_pipeline_get_stats(rank->pipeline, &stats) != SLUICE_E_BUSY) pw_wrong(rank, "stats in a batch");
  return SLUICE_OK;
}

TEST(Batch_CalledInACallback_IsBusy) {
  pw_world_t* world = pw_world_new("local", 2);
  world->in_call = run_in_call;
  pw_world_add(world, 3, 0);
  pw_world_run(world);
  assert_all_work(world, 0);
  assert_nothing_wrong(world);
  pw_world_free(world);
}

/* ---- memory ---- */

/* Rank 0's allocation of this number fails in the second batch, or (in_create) while the pipeline is made. The barriers
 * ensure that only these allocations count. */
static int64_t failing_allocation;
static int32_t in_create;

static void plan_failure(pw_rank_t* rank, int64_t after) {
  pthread_barrier_wait(&rank->world->meeting);
  if (rank->rank == 0) sluice_process_allocator()->fail_after = after;
  pthread_barrier_wait(&rank->world->meeting);
}

static void plan_before_create(pw_rank_t* rank, sluice_pipeline_config_t* config) {
  (void)config;
  if (in_create) plan_failure(rank, failing_allocation);
}

static void plan_before_batch(pw_rank_t* rank) {
  plan_failure(rank, !in_create && rank->calls[PW_FORWARD] > 0 ? failing_allocation : -1);
}

TEST(Allocation_AnyFails_AllRanksFailOrNone) {
  int32_t num_ended[2][2] = {{0}}; /* by in_create and whether it failed */
  for (int32_t i = 0; i < 2 * 60; ++i) {
    failing_allocation = i / 2, in_create = i % 2;
    pw_world_t* world = pw_world_new(failing_allocation % 2 ? "tcp" : "local", 3);
    world->bend_config = plan_before_create;
    world->between = plan_before_batch;
    pw_world_add(world, 3, 0);
    pw_world_add(world, 4, 0);
    pw_world_run(world);
    sluice_process_allocator()->fail_after = -1;
    int32_t num_failed = 0;
    for (int32_t r = 0; r < 3; ++r) {
      num_failed += in_create ? world->ranks[r].made != SLUICE_OK : world->ranks[r].ended[1] != SLUICE_OK;
    }
    assert_true(num_failed == 0 || num_failed == 3);
    ++num_ended[in_create][num_failed == 3];
    if (in_create && num_failed == 3) {
      pw_world_free(world);
      continue;
    }
    assert_all_work(world, 0);
    finish(world);
  }
  /* A batch of four micro-batches makes more than ten allocations, and so does a pipeline; it makes fewer than 60. */
  assert_true(num_ended[0][1] > 10 && num_ended[1][1] > 10 && num_ended[1][0] > 0);
}
