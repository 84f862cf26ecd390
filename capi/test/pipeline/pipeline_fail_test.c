/* A batch that fails on one rank fails on all, soon and with one story; the next one works. Ranks that disagree are
 * told so. A rank that is gone is named. */
#include "capi/test/pipeline/pipeline_checks.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backend/base/alloc.h"
#include "backend/base/clock.h"
#include "backend/comm/comm.h"

#define SECOND_NS  UINT64_C(1000000000)
#define BOUNDED_NS (20 * SECOND_NS)
#define SHORT_NS   (2 * SECOND_NS)

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
  return SLUICE_E_FOREIGN;
}

static void try_fault(const char* transport, int32_t p, int32_t v, int32_t rank, int32_t call, int32_t micro_batch) {
  pw_world_t* world = pw_world_new(transport, p);
  world->config.num_virtual = v;
  world->config.weight_apart = call == PW_WEIGHT_GRAD;
  world->reduces = call == PW_REDUCE ? UINT32_MAX : 0;
  world->in_call = fail_once;
  fault.rank = rank, fault.call = call, fault.micro_batch = micro_batch;
  atomic_store(&fault.at_ns, 0);
  for (int32_t b = 0; b < 4; ++b) pw_world_add(world, 5, b == 2);
  pw_world_run(world);
  char text[64];
  (void)snprintf(text, sizeof text, "rank %d ended batch 2: FOREIGN", rank);
  assert_true(atomic_load(&fault.at_ns) > 0);
  for (int32_t r = 0; r < p; ++r) {
    assert_status(world, r, 1, r == rank ? SLUICE_E_FOREIGN : SLUICE_E_PEER_REFUSED, r == rank ? NULL : text);
    assert_status(world, r, 1, world->ranks[r].ended[1], "ValueError: boom");
    assert_int_equal(world->ranks[r].errors[1].native_code, 42);
    assert_true(world->ranks[r].returned_ns[1] - atomic_load(&fault.at_ns) < BOUNDED_NS);
    assert_int_equal(world->ranks[r].stats[3].num_failed, 1);
  }
  assert_all_work(world, 0);
  assert_all_work(world, 2);
  assert_all_work(world, 3);
  assert_nothing_wrong(world);
  assert_same_bits(world);
  pw_world_free(world);
}

static void Callback_AnyFailsAnywhere_AllHearAndTheNextBatchWorks(void** state) {
  (void)state;
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

/* Fails when the stage before has sent all that it may: more than this one has asked for. */
static sluice_status_t fail_often(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op,
                                  sluice_host_failure_t* out_failure) {
  static _Atomic int32_t num_sent;
  (void)op;
  (void)out_failure;
  if (rank->batch % 2 == 0 || call != PW_FORWARD) return SLUICE_OK;
  if (rank->rank == 1) atomic_fetch_add(&num_sent, 1);
  if (rank->rank != 2) return SLUICE_OK;
  for (int32_t i = 0; i < 1000 && atomic_load(&num_sent) < 4; ++i) usleep(10000);
  usleep(10000); /* the last of them is sent behind its callback; where it is not, one message less lies there */
  atomic_store(&num_sent, 0);
  return SLUICE_E_FOREIGN;
}

/* What had been sent to the stage that failed is taken and dropped before the next batch: it would lie there for good.
 * A batch has at most six messages of 1.5 KiB on its last stage; 21 would be left. */
static void Callback_FailsManyTimes_NothingPilesUp(void** state) {
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
    assert_nothing_wrong(world);
    assert_same_bits(world);
    pw_world_free(world);
  }
}

#define LARGE_BYTES (UINT64_C(32) << 20)

static struct {
  void* data[PW_MAX_MICRO_BATCHES];
  int64_t shape[2];
} large = {.shape = {1, LARGE_BYTES / sizeof(float)}};

/* Behind the first micro-batch of a batch that is to fail: memory that is gone as soon as the library gives it back. */
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

static void Callback_FailsWhileMuchIsUnderWay_ResultsAreReadUntilReleased(void** state) {
  (void)state;
  for (size_t t = 0; t < 2; ++t) {
    pw_world_t* world = pw_world_new(transports[t], 2);
    world->in_call = fail_once;
    world->bend_output = give_large;
    world->released = unmap_large;
    fault.rank = 1, fault.call = PW_BACKWARD, fault.micro_batch = 0;
    for (int32_t b = 0; b < 3; ++b) pw_world_add(world, 3, 0);
    pw_world_run(world);
    assert_status(world, 0, 1, SLUICE_E_PEER_REFUSED, "boom");
    assert_status(world, 1, 1, SLUICE_E_FOREIGN, "boom");
    assert_all_work(world, 2);
    assert_nothing_wrong(world);
    assert_same_bits(world);
    pw_world_free(world);
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
    assert_status(world, r, 1, r == 3 ? SLUICE_E_FOREIGN : SLUICE_E_PEER_REFUSED, "boom");
  }
  assert_all_work(world, 2);
  assert_nothing_wrong(world);
  assert_same_bits(world);
  pw_world_free(world);
}

/* Often: ranks that go on, and leave, while others still end the batch that failed are not taken for lost. */
static void Callback_FailsInOneReplica_FailsInAll(void** state) {
  (void)state;
  for (int32_t i = 0; i < 40; ++i) fail_in_one_replica();
}

/* ---- what a host gives ---- */

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

static void Output_CannotBeSent_IsRefusedByName(void** state) {
  (void)state;
  static const char* const texts[] = {"tensor 0 of the output of micro-batch 2 in virtual stage 0 is not row-major",
                                      "is not in host memory",
                                      "tensor 0 of the output of micro-batch 2 in virtual stage 0 has no data",
                                      "tensor 1 of the output",
                                      "has a shape that cannot be",
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
    assert_nothing_wrong(world);
    assert_same_bits(world);
    pw_world_free(world);
  }
}

/* ---- ranks disagree ---- */

static int32_t odd_rank, odd_m, odd_forward_only;

static void bend_batch(pw_rank_t* rank, sluice_pipeline_batch_t* batch) {
  if (rank->batch != 1 || rank->rank != odd_rank) return;
  if (odd_m >= 0) batch->num_micro_batches = odd_m;
  if (odd_forward_only >= 0) batch->forward_only = odd_forward_only;
}

static void try_odd(const char* transport, int32_t p, int32_t rank, int32_t m, int32_t forward_only, int32_t evaluates,
                    sluice_status_t status, const char* text) {
  odd_rank = rank, odd_m = m, odd_forward_only = forward_only;
  pw_world_t* world = pw_world_new(transport, p);
  world->bend_batch = bend_batch;
  pw_world_add(world, 4, 0);
  pw_world_add(world, 4, evaluates);
  pw_world_add(world, 4, 0);
  pw_world_run(world);
  for (int32_t r = 0; r < p; ++r) {
    const int is_alone = status != SLUICE_E_MISMATCH && r != rank;
    assert_status(world, r, 1, is_alone ? SLUICE_E_PEER_REFUSED : status, text);
  }
  assert_all_work(world, 0);
  assert_all_work(world, 2);
  assert_nothing_wrong(world);
  assert_same_bits(world);
  pw_world_free(world);
}

static void Batch_RanksDiffer_IsAMismatchOnAll(void** state) {
  (void)state;
  for (size_t t = 0; t < 2; ++t) {
    for (int32_t p = 2; p <= 3; ++p) {
      for (int32_t rank = 0; rank < p; ++rank) {
        try_odd(transports[t], p, rank, 3, -1, 0, SLUICE_E_MISMATCH, "micro-batches on rank");
        try_odd(transports[t], p, rank, 6, -1, 0, SLUICE_E_MISMATCH, "micro-batches on rank");
        try_odd(transports[t], p, rank, 3, -1, 1, SLUICE_E_MISMATCH, "micro-batches on rank");
        try_odd(transports[t], p, rank, -1, 1, 0, SLUICE_E_MISMATCH, "forward_only");
        try_odd(transports[t], p, rank, 0, -1, 0, SLUICE_E_INVALID_ARGUMENT, "num_micro_batches is 0");
      }
    }
  }
}

static int32_t config_field;

static void bend_config(pw_rank_t* rank, sluice_pipeline_config_t* config) {
  static const int32_t limits[] = {1, 1, 1};
  if (rank->rank != 1) return;
  switch (config_field) {
    case 0: config->policy = "gpipe"; break;
    case 1: config->partition = "0,3,8"; break;
    case 2: config->num_virtual = 2; break;
    case 3: config->weight_apart = 1; break;
    case 4: config->in_flight = 2; break;
    case 5: config->in_flight_of = limits; break;
    case 6: config->receives_ahead = 0; break;
    case 7: config->stage = 0; break;
    case 8: config->policy = "fastest"; break;
    case 9: config->num_virtual = 0; break;
    case 10: config->memory_budget = 1; break;
    case 11: config->num_replicas = 2; break;
    default: config->policy = "adaptive"; break;
  }
}

static void Config_RanksDiffer_AllAreToldAndCommStaysUsable(void** state) {
  (void)state;
  static const struct {
    sluice_status_t there, here;
    const char* text;
  } wanted[] = {
      {SLUICE_E_MISMATCH, SLUICE_E_MISMATCH, "policy is gpipe on rank 1 and backward_first on rank 0"},
      {SLUICE_E_MISMATCH, SLUICE_E_MISMATCH, "partition is \"0,3,8\" on rank 1 and \"0,4,8\" on rank 0"},
      {SLUICE_E_MISMATCH, SLUICE_E_MISMATCH, "num_virtual is 2 on rank 1"},
      {SLUICE_E_MISMATCH, SLUICE_E_MISMATCH, "weight_apart is 1 on rank 1"},
      {SLUICE_E_MISMATCH, SLUICE_E_MISMATCH, "in_flight is 2 on rank 1"},
      {SLUICE_E_MISMATCH, SLUICE_E_MISMATCH, "in_flight_of differs on ranks 1 and 0"},
      {SLUICE_E_MISMATCH, SLUICE_E_MISMATCH, "receives_ahead is 0 on rank 1"},
      {SLUICE_E_MISMATCH, SLUICE_E_MISMATCH, "ranks 0 and 1 are both stage 0"},
      {SLUICE_E_INVALID_ARGUMENT, SLUICE_E_PEER_REFUSED, "policy \"fastest\" is not known; give one of message_driven"},
      {SLUICE_E_INVALID_ARGUMENT, SLUICE_E_PEER_REFUSED, "num_virtual is 0"},
      {SLUICE_E_INVALID_ARGUMENT, SLUICE_E_PEER_REFUSED, "memory_budget needs activation_bytes"},
      {SLUICE_E_INVALID_ARGUMENT, SLUICE_E_PEER_REFUSED, "num_replicas is 2, which does not divide the 3 ranks"},
      {SLUICE_E_MISMATCH, SLUICE_E_MISMATCH, "policy is adaptive on rank 1 and backward_first on rank 0"},
  };
  for (size_t t = 0; t < 2; ++t) {
    for (config_field = 0; config_field < 13; ++config_field) {
      pw_world_t* world = pw_world_new(transports[t], 3);
      world->config.partition = "0,4,8";
      world->bend_config = bend_config;
      world->tries_again = 1;
      pw_world_add(world, 3, 0);
      pw_world_run(world);
      for (int32_t r = 0; r < 3; ++r) {
        const pw_rank_t* rank = &world->ranks[r];
        const sluice_status_t status = r == 1 ? wanted[config_field].there : wanted[config_field].here;
        if (rank->made != status || strstr(rank->made_error.message, wanted[config_field].text) == NULL) {
          fail_msg("field %d, rank %d: %s: %s", config_field, r, sluice_status_name(rank->made),
                   rank->made_error.message);
        }
        assert_int_equal(rank->made_again, SLUICE_OK);
      }
      for (int32_t r = 0; r < 3; ++r) assert_status(world, r, 0, SLUICE_OK, NULL);
      assert_same_bits(world);
      pw_world_free(world);
    }
  }
}

static void Callbacks_OneRankReduces_IsAMismatch(void** state) {
  (void)state;
  pw_world_t* world = pw_world_new("local", 3);
  world->reduces = 1u << 1;
  pw_world_add(world, 3, 0);
  pw_world_run(world);
  for (int32_t r = 0; r < 3; ++r) {
    assert_int_equal(world->ranks[r].made, SLUICE_E_MISMATCH);
    assert_non_null(strstr(world->ranks[r].made_error.message, "whether callback reduce is given is 1 on rank 1"));
  }
  pw_world_free(world);
}

/* ---- ranks that are gone ---- */

static sluice_status_t abort_in_call(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op,
                                     sluice_host_failure_t* out_failure) {
  (void)out_failure;
  if (rank->batch == 1 && rank->rank == 1 && call == PW_FORWARD && op->micro_batch == 2) {
    sluice_pipeline_abort(rank->pipeline);
  }
  return SLUICE_OK;
}

/* A rank that is gone in a batch may be missed at the end of the one before, where that has not ended on all. */
static void meet(pw_rank_t* rank) { pthread_barrier_wait(&rank->world->meeting); }

static void Abort_InABatch_EndsThePipelineOnAll(void** state) {
  (void)state;
  for (size_t t = 0; t < 2; ++t) {
    pw_world_t* world = pw_world_new(transports[t], 3);
    world->in_call = abort_in_call;
    world->between = meet;
    for (int32_t b = 0; b < 3; ++b) pw_world_add(world, 4, 0);
    pw_world_run(world);
    assert_all_work(world, 0);
    for (int32_t b = 1; b < 3; ++b) {
      assert_status(world, 1, b, SLUICE_E_ABORTED, NULL);
      for (int32_t r = 0; r < 3; r += 2) {
        assert_status(world, r, b, SLUICE_E_PEER_LOST, "rank 1");
        assert_int_equal(world->ranks[r].errors[b].peer, 1);
        assert_true(world->ranks[r].took_ns[b] < BOUNDED_NS);
      }
    }
    assert_nothing_wrong(world);
    pw_world_free(world);
  }
}

static void leave_early(pw_rank_t* rank) {
  meet(rank);
  if (rank->rank != 0 || rank->batch != 0 || rank->calls[PW_FORWARD] == 0) return;
  sluice_pipeline_destroy(rank->pipeline);
  rank->pipeline = NULL;
}

static void Rank_LeavesBetweenBatches_IsNamedOnAll(void** state) {
  (void)state;
  for (size_t t = 0; t < 2; ++t) {
    pw_world_t* world = pw_world_new(transports[t], 3);
    world->between = leave_early;
    for (int32_t b = 0; b < 2; ++b) pw_world_add(world, 4, 0);
    pw_world_run(world);
    for (int32_t r = 1; r < 3; ++r) {
      assert_status(world, r, 1, SLUICE_E_PEER_LOST, "rank 0");
      assert_int_equal(world->ranks[r].errors[1].peer, 0);
    }
    pw_world_free(world);
  }
}

static _Atomic int32_t num_returned;

static sluice_status_t hold_until_others_are_back(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op,
                                                  sluice_host_failure_t* out_failure) {
  (void)out_failure;
  if (rank->batch == 0) return SLUICE_OK;
  if (rank->rank != 0 || call != PW_FORWARD || op->micro_batch != 1) {
    rank->comm->timeout_ns = SHORT_NS; /* from here on: the batch before took as long as it took */
    return SLUICE_OK;
  }
  for (int32_t i = 0; i < 6000 && atomic_load(&num_returned) < 2; ++i) usleep(10000);
  return SLUICE_OK;
}

static void note_return(pw_rank_t* rank) {
  if (rank->rank != 0) atomic_fetch_add(&num_returned, 1);
}

static void Rank_SleepsInACallback_IsNamedAtTheDeadlineOnAll(void** state) {
  (void)state;
  for (size_t t = 0; t < 2; ++t) {
    pw_world_t* world = pw_world_new(transports[t], 3);
    world->in_call = hold_until_others_are_back;
    world->after = note_return;
    atomic_store(&num_returned, 0);
    for (int32_t b = 0; b < 2; ++b) pw_world_add(world, 6, 0);
    pw_world_run(world);
    for (int32_t r = 1; r < 3; ++r) {
      assert_status(world, r, 1, SLUICE_E_TIMED_OUT, "rank 0 holds it up");
      assert_int_equal(world->ranks[r].errors[1].peer, 0);
    }
    assert_true(world->ranks[0].ended[1] == SLUICE_E_TIMED_OUT || world->ranks[0].ended[1] == SLUICE_E_PEER_LOST);
    assert_nothing_wrong(world);
    pw_world_free(world);
  }
}

/* ---- ranks that end a batch and leave ---- */

static _Atomic int32_t num_left;

static void leave_at_once(pw_rank_t* rank) {
  sluice_pipeline_destroy(rank->pipeline);
  rank->pipeline = NULL;
  atomic_fetch_add(&num_left, 1);
}

/* That the others have left is known here, too: over TCP a thread reads it. */
static void wait_until_others_have_left(const pw_rank_t* rank) {
  for (int32_t i = 0; i < 6000 && atomic_load(&num_left) + 1 < rank->world->num_stages; ++i) usleep(10000);
  usleep(200000);
}

static _Atomic int32_t is_held; /* rank 0 */

static sluice_status_t fail_when_rank_0_is_held(sluice_host_failure_t* out_failure) {
  for (int32_t i = 0; i < 6000 && !atomic_load(&is_held); ++i) usleep(10000);
  (void)snprintf(out_failure->message, sizeof out_failure->message, "ValueError: boom");
  return SLUICE_E_FOREIGN;
}

/* Rank 0 has an output to send when it comes back. */
static sluice_status_t fail_and_hold_rank_0(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op,
                                            sluice_host_failure_t* out_failure) {
  if (call != PW_FORWARD) return SLUICE_OK;
  if (rank->rank == 0 && op->micro_batch == 1) {
    atomic_store(&is_held, 1);
    wait_until_others_have_left(rank);
  }
  return rank->rank == 1 ? fail_when_rank_0_is_held(out_failure) : SLUICE_OK;
}

static int is_last_call(const pw_rank_t* rank, int32_t call) {
  return call == PW_WEIGHT_GRAD && rank->calls[call] == rank->world->batches[0].num_micro_batches;
}

/* Rank 0 has nothing left, when it comes back, but to say that it is through. */
static sluice_status_t fail_and_hold_rank_0_at_the_end(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op,
                                                       sluice_host_failure_t* out_failure) {
  (void)op;
  if (!is_last_call(rank, call)) return SLUICE_OK;
  if (rank->rank == 0) {
    atomic_store(&is_held, 1);
    wait_until_others_have_left(rank);
  }
  return rank->rank == 1 ? fail_when_rank_0_is_held(out_failure) : SLUICE_OK;
}

/* Rank 0 has asked for all that is to come. */
static int32_t hold_rank_0_in_a_wait(pw_rank_t* rank) {
  if (rank->rank != 0 || atomic_exchange(&is_held, 1)) return 0;
  wait_until_others_have_left(rank);
  return 0;
}

static sluice_status_t fail_while_rank_0_waits(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op,
                                               sluice_host_failure_t* out_failure) {
  (void)op;
  return rank->rank == 1 && call == PW_FORWARD ? fail_when_rank_0_is_held(out_failure) : SLUICE_OK;
}

static void Rank_EndsABatchAndLeavesAtOnce_ItsReasonIsHeard(void** state) {
  (void)state;
  for (int32_t i = 0; i < 12; ++i) {
    const int32_t what = i / 4;
    pw_world_t* world = pw_world_new(transports[i % 2], 2 + i / 2 % 2);
    world->config.weight_apart = what == 1;
    world->in_call = what == 0   ? fail_and_hold_rank_0
                     : what == 1 ? fail_and_hold_rank_0_at_the_end
                                 : fail_while_rank_0_waits;
    world->is_interrupted = what == 2 ? hold_rank_0_in_a_wait : NULL;
    world->after = leave_at_once;
    atomic_store(&num_left, 0);
    atomic_store(&is_held, 0);
    pw_world_add(world, 4, 0);
    pw_world_run(world);
    assert_status(world, 0, 0, SLUICE_E_PEER_REFUSED, "rank 1 ended batch 1: FOREIGN");
    assert_status(world, 0, 0, SLUICE_E_PEER_REFUSED, "boom");
    assert_nothing_wrong(world);
    pw_world_free(world);
  }
}

/* ---- the host ---- */

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

static void Host_InterruptsAWait_TheBatchFailsAndTheNextWorks(void** state) {
  (void)state;
  pw_world_t* world = pw_world_new("tcp", 3);
  world->in_call = hold_rank_0;
  world->is_interrupted = interrupt_rank_2;
  atomic_store(&num_returned, 0);
  for (int32_t b = 0; b < 3; ++b) pw_world_add(world, 4, 0);
  pw_world_run(world);
  assert_status(world, 2, 1, SLUICE_E_FOREIGN, "interrupted");
  for (int32_t r = 0; r < 2; ++r) assert_status(world, r, 1, SLUICE_E_PEER_REFUSED, "rank 2 ended batch 2");
  assert_all_work(world, 2);
  assert_same_bits(world);
  pw_world_free(world);
}

static sluice_status_t run_in_call(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op,
                                   sluice_host_failure_t* out_failure) {
  (void)op;
  (void)out_failure;
  sluice_pipeline_batch_t batch;
  sluice_pipeline_batch_init(&batch, sizeof batch);
  sluice_pipeline_stats_t stats = {.struct_size = sizeof stats};
  if (call != PW_FORWARD) return SLUICE_OK;
  if (sluice_pipeline_run_batch(rank->pipeline, &batch) != SLUICE_E_BUSY) pw_wrong(rank, "a batch in a batch");
  if (sluice_pipeline_get_stats(rank->pipeline, &stats) != SLUICE_E_BUSY) pw_wrong(rank, "stats in a batch");
  return SLUICE_OK;
}

static void Batch_CalledInACallback_IsBusy(void** state) {
  (void)state;
  pw_world_t* world = pw_world_new("local", 2);
  world->in_call = run_in_call;
  pw_world_add(world, 3, 0);
  pw_world_run(world);
  assert_all_work(world, 0);
  assert_nothing_wrong(world);
  pw_world_free(world);
}

/* ---- memory ---- */

static int64_t failing_allocation;

/* All meet, so that the number counts allocations of the batch alone. */
static void plan_failure(pw_rank_t* rank) {
  pthread_barrier_wait(&rank->world->meeting);
  if (rank->rank == 0) sluice_process_allocator()->fail_after = rank->calls[PW_FORWARD] > 0 ? failing_allocation : -1;
  pthread_barrier_wait(&rank->world->meeting);
}

static void Allocation_AnyFails_NobodyHangs(void** state) {
  (void)state;
  int32_t num_batches_failed = 0;
  for (failing_allocation = 0; failing_allocation < 60; ++failing_allocation) {
    pw_world_t* world = pw_world_new(failing_allocation % 2 ? "tcp" : "local", 3);
    world->between = plan_failure;
    pw_world_add(world, 3, 0);
    pw_world_add(world, 4, 0);
    pw_world_run(world);
    sluice_process_allocator()->fail_after = -1;
    assert_all_work(world, 0);
    int32_t num_failed = 0;
    for (int32_t r = 0; r < 3; ++r) num_failed += world->ranks[r].ended[1] != SLUICE_OK;
    assert_true(num_failed == 0 || num_failed == 3);
    num_batches_failed += num_failed == 3;
    assert_nothing_wrong(world);
    assert_same_bits(world);
    pw_world_free(world);
  }
  assert_true(num_batches_failed > 10); /* a batch of four micro-batches allocates more often than that */
}

static void plan_failure_of_create(pw_rank_t* rank, sluice_pipeline_config_t* config) {
  (void)config;
  pthread_barrier_wait(&rank->world->meeting);
  if (rank->rank == 0) sluice_process_allocator()->fail_after = failing_allocation;
  pthread_barrier_wait(&rank->world->meeting);
}

static void end_failures(pw_rank_t* rank) {
  pthread_barrier_wait(&rank->world->meeting);
  if (rank->rank == 0) sluice_process_allocator()->fail_after = -1;
  pthread_barrier_wait(&rank->world->meeting);
}

static void Allocation_AnyFailsWhileAPipelineIsMade_AllHaveItOrNone(void** state) {
  (void)state;
  int32_t num_made = 0, num_refused = 0;
  for (failing_allocation = 0; failing_allocation < 48; ++failing_allocation) {
    pw_world_t* world = pw_world_new(failing_allocation % 2 ? "tcp" : "local", 3);
    world->bend_config = plan_failure_of_create;
    world->between = end_failures;
    pw_world_add(world, 3, 0);
    pw_world_run(world);
    sluice_process_allocator()->fail_after = -1;
    int32_t num_failed = 0;
    for (int32_t r = 0; r < 3; ++r) num_failed += world->ranks[r].made != SLUICE_OK;
    assert_true(num_failed == 0 || num_failed == 3);
    if (num_failed == 0) assert_all_work(world, 0);
    if (num_failed == 0) assert_same_bits(world);
    num_made += num_failed == 0;
    num_refused += num_failed == 3;
    pw_world_free(world);
  }
  assert_true(num_refused > 10 && num_made > 0);
}

/* ---- arguments ---- */

static void assert_refused(sluice_status_t status, sluice_status_t wanted, const char* text) {
  sluice_error_info_t why;
  sluice_error_info_init(&why, sizeof why);
  sluice_error_last(&why);
  if (status != wanted || strstr(why.message, text) == NULL) {
    fail_msg("%s: %s, not %s: %s", sluice_status_name(status), why.message, sluice_status_name(wanted), text);
  }
}

static sluice_status_t do_nothing(void* user, const sluice_stage_call_t* op, sluice_stage_tensors_t* out_result,
                                  sluice_host_failure_t* out_failure) {
  (void)user, (void)op, (void)out_result, (void)out_failure;
  return SLUICE_OK;
}

static void Arguments_Wrong_AreRefused(void** state) {
  (void)state;
  sluice_pipeline_callbacks_t callbacks = {.struct_size = sizeof callbacks, .forward = do_nothing};
  sluice_pipeline_config_t config;
  sluice_pipeline_config_init(&config, sizeof config);
  sluice_pipeline_t* pipeline = NULL;
  const sluice_status_t bad = SLUICE_E_INVALID_ARGUMENT;
  assert_refused(sluice_pipeline_create(&config, NULL, &callbacks, NULL, NULL), bad, "out_pipeline is NULL");
  assert_refused(sluice_pipeline_create(NULL, NULL, &callbacks, NULL, &pipeline), bad, "sluice_pipeline_config_t");
  assert_refused(sluice_pipeline_create(&config, NULL, NULL, NULL, &pipeline), bad, "sluice_pipeline_callbacks_t");
  config.struct_size = 8;
  assert_refused(sluice_pipeline_create(&config, NULL, &callbacks, NULL, &pipeline), SLUICE_E_ABI, "config_t");
  config.struct_size = sizeof config;
  config.reserved = 1;
  assert_refused(sluice_pipeline_create(&config, NULL, &callbacks, NULL, &pipeline), bad, "reserved");
  config.reserved = 0;
  config.weight_apart = 1;
  assert_refused(sluice_pipeline_create(&config, NULL, &callbacks, NULL, &pipeline), bad, "weight_grad is NULL");
  config.weight_apart = -1;
  callbacks.forward = NULL;
  assert_refused(sluice_pipeline_create(&config, NULL, &callbacks, NULL, &pipeline), bad, "forward is NULL");
  callbacks.forward = do_nothing;
  assert_int_equal(sluice_pipeline_create(&config, NULL, &callbacks, NULL, &pipeline), SLUICE_OK);
  sluice_pipeline_batch_t batch;
  sluice_pipeline_batch_init(&batch, sizeof batch);
  void* kept = NULL;
  int64_t count = 0;
  sluice_stage_tensors_t none = {.num_tensors = 0};
  assert_refused(sluice_pipeline_run_batch(NULL, &batch), bad, "pipeline is NULL");
  assert_refused(sluice_pipeline_run_batch(pipeline, NULL), bad, "sluice_pipeline_batch_t");
  assert_refused(sluice_pipeline_run_batch(pipeline, &batch), bad, "backward is NULL");
  assert_refused(sluice_pipeline_keep(pipeline, &none, &kept), bad, "of the callback that runs");
  assert_refused(sluice_pipeline_get_events(pipeline, NULL, 3, &count), bad, "capacity is 3");
  batch.forward_only = 1;
  assert_int_equal(sluice_pipeline_run_batch(pipeline, &batch), SLUICE_OK);
  sluice_pipeline_abort(pipeline);
  assert_refused(sluice_pipeline_run_batch(pipeline, &batch), SLUICE_E_ABORTED, "was aborted");
  sluice_pipeline_destroy(pipeline);
  sluice_pipeline_destroy(NULL);
  sluice_pipeline_abort(NULL);
  sluice_pipeline_give_back(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(Callback_AnyFailsAnywhere_AllHearAndTheNextBatchWorks),
      cmocka_unit_test(Callback_FailsManyTimes_NothingPilesUp),
      cmocka_unit_test(Callback_FailsWhileMuchIsUnderWay_ResultsAreReadUntilReleased),
      cmocka_unit_test(Callback_FailsInOneReplica_FailsInAll),
      cmocka_unit_test(Output_CannotBeSent_IsRefusedByName),
      cmocka_unit_test(Batch_RanksDiffer_IsAMismatchOnAll),
      cmocka_unit_test(Config_RanksDiffer_AllAreToldAndCommStaysUsable),
      cmocka_unit_test(Callbacks_OneRankReduces_IsAMismatch),
      cmocka_unit_test(Abort_InABatch_EndsThePipelineOnAll),
      cmocka_unit_test(Rank_LeavesBetweenBatches_IsNamedOnAll),
      cmocka_unit_test(Rank_SleepsInACallback_IsNamedAtTheDeadlineOnAll),
      cmocka_unit_test(Rank_EndsABatchAndLeavesAtOnce_ItsReasonIsHeard),
      cmocka_unit_test(Host_InterruptsAWait_TheBatchFailsAndTheNextWorks),
      cmocka_unit_test(Batch_CalledInACallback_IsBusy),
      cmocka_unit_test(Allocation_AnyFails_NobodyHangs),
      cmocka_unit_test(Allocation_AnyFailsWhileAPipelineIsMade_AllHaveItOrNone),
      cmocka_unit_test(Arguments_Wrong_AreRefused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
