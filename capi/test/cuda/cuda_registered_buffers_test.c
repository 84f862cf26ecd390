// SPDX-License-Identifier: Apache-2.0
/* Registered buffers of NCCL: the ranks of a context decide together in the context's first header whether to register
 * buffers, so contexts of one communicator may decide differently. If ranks call contexts that decided differently, all
 * ranks report an error. */
#include "backend/comm/nccl/fake/fake_nccl.h"
#include "capi/test/cuda/fakes.h"
#include "capi/test/ranks/play.h"
#include "third_party/bazel/test.h"

enum { RANKS = 2 };
/* Kinds of contexts: the slots are Sluice's own, under a budget, or (on rank 1 only) allocated by the host. */
enum { OWN_SLOTS, BUDGET, HOSTS_ON_RANK_1, KINDS };

static struct {
  sluice_status_t crossed;
  char crossed_why[512];
  int64_t registered[KINDS]; /* registered messages so far, after a round of this context */
  uint64_t digest[KINDS], again[KINDS];
} found[RANKS];
static int32_t numbers[RANKS] = {0, 1};
static _Atomic int told, told_why; /* told_why: for this reason */
static const char* reason = "";
static _Thread_local int kind_to_make;

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
    changed.allocate = take_of_host, changed.release = give_of_host, changed.allocate_user = &numbers[rank];
  }
  return fakes_machine()->make_context(rank, &changed, comm, out_context);
}

static void count_logs(void* user, int32_t level, const char* text) {
  (void)user;
  if (level != SLUICE_LOG_INFO || strstr(text, "no registered buffers, because rank") == NULL) return;
  ++told;
  told_why += strstr(text, reason) != NULL;
}

/* One round of each context, then one round in which rank 0 calls the first context's layer and rank 1 the last one's,
 * then one more round of each context. */
static void cross(part_t* me) {
  const sluice_moe_config_t layer = rig_config();
  rig_t others[KINDS], *rigs[KINDS] = {&me->rig, &others[BUDGET], &others[HOSTS_ON_RANK_1]};
  world_machine_t machine = *fakes_machine();
  WORKS(rig_open(&me->rig, me->comm, &layer));
  machine.make_context = make_context;
  rig_use_machine(&machine, me->rank);
  for (kind_to_make = BUDGET; kind_to_make < KINDS; ++kind_to_make) {
    if (rig_open(rigs[kind_to_make], me->comm, &layer) != SLUICE_OK) abort();
  }
  for (int kind = 0; kind < KINDS; ++kind) {
    WORKS(rig_round(rigs[kind], &found[me->rank].digest[kind]));
    fakes_machine()->settle(me->rank);
    meet(me);
    found[me->rank].registered[kind] = sluice_fake_nccl_registered();
    meet(me);
  }
  found[me->rank].crossed = rig_round(rigs[me->rank == 0 ? OWN_SLOTS : HOSTS_ON_RANK_1], NULL);
  snprintf(found[me->rank].crossed_why, sizeof found->crossed_why, "%s", last_message());
  for (int kind = 0; kind < KINDS; ++kind) WORKS(rig_round(rigs[kind], &found[me->rank].again[kind]));
  for (int kind = BUDGET; kind < KINDS; ++kind) rig_close(rigs[kind]);
}

/* Checks hazards, leaks, and NCCL's rules too. */
static void cross_on_ranks(void) {
  memset(found, 0, sizeof found);
  told = told_why = 0;
  sluice_set_log(count_logs, NULL, SLUICE_LOG_INFO);
  perform(&(play_t){.run = cross, .world_size = RANKS, .machine = fakes_layer_machine(0)});
  sluice_set_log(NULL, NULL, SLUICE_LOG_ERROR);
}

TEST(RegisteredBuffers_DifferentContextsOfOneCommunicator_EachDecides) {
  int64_t before = sluice_fake_nccl_registered();
  cross_on_ranks();
  for (int i = 0; i < RANKS; ++i) {
    assert_true(found[i].registered[OWN_SLOTS] > before);
    assert_int_equal(found[i].registered[BUDGET], found[i].registered[OWN_SLOTS]);
    assert_int_equal(found[i].registered[HOSTS_ON_RANK_1], found[i].registered[OWN_SLOTS]);
    for (int kind = 0; kind < KINDS; ++kind) {
      assert_true(found[i].digest[kind] == found[i].digest[OWN_SLOTS]);
      assert_true(found[i].again[kind] == found[i].digest[OWN_SLOTS]);
    }
    /* The contexts have decided differently: both ranks report the pair, and later rounds still work. */
    assert_int_equal(found[i].crossed, SLUICE_E_MISMATCH);
    if (strstr(found[i].crossed_why, "registered memory (2) on rank 0 and plain memory (0) on rank 1") == NULL) {
      fail_msg("rank %d: %s", i, found[i].crossed_why);
    }
  }
  assert_int_equal(told, 2 * RANKS); /* two contexts, one line on each rank */
}

/* NCCL is too old, or the environment forbids registration, on all ranks: no buffer is registered, all bytes arrive. */
TEST(RegisteredBuffers_OldNcclOrForbidden_NobodyRegisters) {
  const char* const reasons[] = {"version is 22203, registered buffers need 2.23.0", "SLUICE_NCCL_REGISTER is 0"};
  for (int variant = 0; variant < 2; ++variant) {
    reason = reasons[variant];
    int64_t before = sluice_fake_nccl_registered();
    if (variant == 0) sluice_fake_nccl_set_version(22203);
    if (variant == 1) setenv("SLUICE_NCCL_REGISTER", "0", 1);
    cross_on_ranks();
    sluice_fake_nccl_set_version(22809);
    unsetenv("SLUICE_NCCL_REGISTER");
    for (int i = 0; i < RANKS; ++i) {
      assert_true(found[i].again[OWN_SLOTS] == found[i].digest[HOSTS_ON_RANK_1]);
      assert_int_equal(found[i].crossed, SLUICE_OK); /* contexts that decided the same may be paired */
    }
    assert_int_equal(sluice_fake_nccl_registered(), before);
    assert_int_equal(told, KINDS * RANKS);
    assert_in_range(told_why, RANKS, told); /* the contexts with slots of their own say why */
  }
}
