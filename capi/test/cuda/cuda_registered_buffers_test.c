// SPDX-License-Identifier: Apache-2.0
/* Registered buffers of NCCL: the ranks of a context decide together in the context's first header whether to register
 * buffers, so contexts of one communicator may decide differently. If ranks call contexts that decided differently, all
 * ranks report an error. */
#include <pthread.h>

#include "backend/comm/nccl/fake/fake_nccl.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/cuda/fakes.h"
#include "capi/test/rig/rig.h"
#include "third_party/bazel/test.h"

enum { RANKS = 2 };
/* Kinds of contexts: the slots are Sluice's own, under a budget, or (on rank 1 only) allocated by the host. */
enum { OWN_SLOTS, BUDGET, HOSTS_ON_RANK_1, KINDS };

typedef struct rank_s {
  int32_t rank;
  rig_t rigs[KINDS];
  int32_t num_open;
  sluice_status_t status, crossed;
  char why[512], crossed_why[512];
  int64_t registered[KINDS]; /* registered messages so far, after a round of this context */
  uint64_t digest[KINDS], again[KINDS];
} rank_t;

static struct {
  rank_t ranks[RANKS];
  pthread_barrier_t barrier;
  _Atomic int told;
} all;
static _Thread_local int kind_to_make;

static void note(rank_t* r, sluice_status_t status) {
  if (status == SLUICE_OK || r->status != SLUICE_OK) return;
  r->status = status;
  snprintf(r->why, sizeof r->why, "%s", last_message());
}

static void* take_of_host(void* user, uint64_t bytes) { return fakes_machine()->allocate(*(int32_t*)user, bytes); }
static void give_of_host(void* user, void* data, uint64_t bytes) {
  (void)user, (void)bytes;
  fakes_machine()->release(data);
}

static sluice_status_t make_context(int32_t rank, const sluice_context_config_t* config, sluice_comm_t* comm,
                                    sluice_context_t** out_context) {
  sluice_context_config_t changed = *config;
  changed.allocate = NULL, changed.release = NULL, changed.allocate_user = NULL;
  if (kind_to_make == BUDGET) changed.memory_budget = 64 << 20;
  if (kind_to_make == HOSTS_ON_RANK_1 && rank == 1) {
    changed.allocate = take_of_host, changed.release = give_of_host, changed.allocate_user = &all.ranks[rank].rank;
  }
  return fakes_machine()->make_context(rank, &changed, comm, out_context);
}

static void count_logs(void* user, int32_t level, const char* text) {
  (void)user;
  if (level == SLUICE_LOG_INFO && strstr(text, "no registered buffers, because rank") != NULL) ++all.told;
}

static void meet(void) { (void)pthread_barrier_wait(&all.barrier); }

/* One round of each context, then one round in which rank 0 calls the first context's layer and rank 1 the last one's,
 * then one more round of each context. */
static void play(rank_t* r) {
  for (int kind = 0; kind < r->num_open; ++kind) {
    note(r, rig_round(&r->rigs[kind], &r->digest[kind]));
    fakes_machine()->settle(r->rank);
    meet();
    r->registered[kind] = sluice_fake_nccl_registered();
    meet();
  }
  if (r->num_open < KINDS) return;
  r->crossed = rig_round(&r->rigs[r->rank == 0 ? OWN_SLOTS : HOSTS_ON_RANK_1], NULL);
  snprintf(r->crossed_why, sizeof r->crossed_why, "%s", last_message());
  for (int kind = 0; kind < KINDS; ++kind) note(r, rig_round(&r->rigs[kind], &r->again[kind]));
}

static void* rank_main(void* argument) {
  rank_t* r = argument;
  world_machine_t machine = *fakes_machine();
  machine.make_context = make_context;
  rig_use_machine(&machine, r->rank);
  sluice_moe_config_t layer = rig_config();
  DEFAULTS(sluice_comm_config, config);
  config.rank = r->rank, config.world_size = RANKS, config.timeout_ns = 60000000000u;
  sluice_comm_t* comm = NULL;
  note(r, machine.make_comm(r->rank, &config, &comm));
  for (kind_to_make = 0; kind_to_make < KINDS && r->status == SLUICE_OK; ++kind_to_make) {
    note(r, rig_open(&r->rigs[kind_to_make], comm, &layer));
    r->num_open += r->status == SLUICE_OK;
  }
  play(r);
  for (int kind = 0; kind < r->num_open; ++kind) rig_close(&r->rigs[kind]);
  sluice_comm_destroy(comm);
  return NULL;
}

static void run_ranks(void) {
  pthread_t threads[RANKS];
  memset(&all, 0, sizeof all);
  pthread_barrier_init(&all.barrier, NULL, RANKS);
  fakes_open(RANKS, 1);
  for (int32_t i = 0; i < RANKS; ++i) {
    all.ranks[i].rank = i;
    pthread_create(&threads[i], NULL, rank_main, &all.ranks[i]);
  }
  for (int32_t i = 0; i < RANKS; ++i) pthread_join(threads[i], NULL);
  pthread_barrier_destroy(&all.barrier);
}

static void check_end(void) {
  char text[256];
  if (sluice_fake_cuda_hazards(text, sizeof text) != 0) fail_msg("%s", text);
  if (fakes_close(text, sizeof text) != 0) fail_msg("%s", text); /* leaks, and violations of NCCL's rules */
}

TEST(RegisteredBuffers_DifferentContextsOfOneCommunicator_EachDecides) {
  sluice_set_log(count_logs, NULL, SLUICE_LOG_INFO);
  int64_t before = sluice_fake_nccl_registered();
  run_ranks();
  sluice_set_log(NULL, NULL, SLUICE_LOG_ERROR);
  for (int i = 0; i < RANKS; ++i) {
    const rank_t* r = &all.ranks[i];
    if (r->status != SLUICE_OK) fail_msg("rank %d: %s", i, r->why);
    assert_true(r->registered[OWN_SLOTS] > before);
    assert_int_equal(r->registered[BUDGET], r->registered[OWN_SLOTS]);
    assert_int_equal(r->registered[HOSTS_ON_RANK_1], r->registered[OWN_SLOTS]);
    for (int kind = 0; kind < KINDS; ++kind) {
      assert_true(r->digest[kind] == r->digest[OWN_SLOTS]);
      assert_true(r->again[kind] == r->digest[OWN_SLOTS]);
    }
    /* The contexts have decided differently: both ranks report the pair, and later rounds still work. */
    assert_int_equal(r->crossed, SLUICE_E_MISMATCH);
    if (strstr(r->crossed_why, "registered memory (2) on rank 0 and plain memory (0) on rank 1") == NULL) {
      fail_msg("rank %d: %s", i, r->crossed_why);
    }
  }
  assert_int_equal(all.told, 2 * RANKS); /* two contexts, one line on each rank */
  check_end();
}

/* NCCL is too old, or the environment forbids registration, on all ranks: no buffer is registered, all bytes arrive. */
TEST(RegisteredBuffers_OldNcclOrForbidden_NobodyRegisters) {
  for (int variant = 0; variant < 2; ++variant) {
    int64_t before = sluice_fake_nccl_registered();
    if (variant == 0) sluice_fake_nccl_set_version(22203);
    if (variant == 1) setenv("SLUICE_NCCL_REGISTER", "0", 1);
    sluice_set_log(count_logs, NULL, SLUICE_LOG_INFO);
    run_ranks();
    sluice_set_log(NULL, NULL, SLUICE_LOG_ERROR);
    sluice_fake_nccl_set_version(22809);
    unsetenv("SLUICE_NCCL_REGISTER");
    for (int i = 0; i < RANKS; ++i) {
      if (all.ranks[i].status != SLUICE_OK) fail_msg("rank %d: %s", i, all.ranks[i].why);
      assert_true(all.ranks[i].again[OWN_SLOTS] == all.ranks[i].digest[HOSTS_ON_RANK_1]);
      assert_int_equal(all.ranks[i].crossed, SLUICE_OK); /* contexts that decided the same may be paired */
    }
    assert_int_equal(sluice_fake_nccl_registered(), before);
    assert_int_equal(all.told, KINDS * RANKS);
    check_end();
  }
}
