// SPDX-License-Identifier: Apache-2.0
/* Refused placements of experts: on all ranks, with the cause named, and without any effect. */

#include "backend/moe/context/context.h"
#include "capi/test/ranks/play.h"
#include "third_party/bazel/test.h"

enum { MOST = 8 };

/* Owners and slots of a new layer, in a placement that a test modifies. */
typedef struct table_s {
  int32_t rank[MOST], slot[MOST];
  sluice_expert_placement_t placement;
} table_t;

static void make_table(const part_t* me, uint64_t epoch, table_t* t) {
  for (int32_t e = 0; e < 2 * me->world_size; ++e) t->rank[e] = e / 2, t->slot[e] = e % 2;
  sluice_expert_placement_init(&t->placement, sizeof t->placement);
  t->placement.expert_rank = t->rank, t->placement.expert_slot = t->slot, t->placement.epoch = epoch;
}

static void swap(int32_t* items, int32_t a, int32_t b) {
  const int32_t item = items[a];
  items[a] = items[b], items[b] = item;
}

/* Swaps experts 0 and 2, of ranks 0 and 1. */
static void make_swapped(const part_t* me, uint64_t epoch, table_t* t) {
  make_table(me, epoch, t);
  swap(t->rank, 0, 2);
  swap(t->slot, 0, 2);
}

static sluice_status_t replace(part_t* me, const table_t* t) {
  return sluice_moe_replace_experts(me->rig.moe, &t->placement);
}

static void expect_in_force(part_t* me, int line, const table_t* t) {
  int32_t rank[MOST], slot[MOST];
  uint64_t epoch = 0;
  expect_status(me, line, "get_placement", sluice_moe_get_placement(me->rig.moe, rank, slot, &epoch), SLUICE_OK, "");
  int32_t local = 0;
  for (int32_t e = 0; e < 2 * me->world_size; ++e) {
    if (rank[e] != t->rank[e] || slot[e] != t->slot[e]) note(me, line, "expert %d is on %d, %d", e, rank[e], slot[e]);
    local += t->rank[e] == me->rank;
  }
  if (epoch != t->placement.epoch) note(me, line, "epoch is %llu", (unsigned long long)epoch);
  if (sluice_moe_num_local_experts(me->rig.moe) != local) note(me, line, "not %d experts", local);
}
#define IN_FORCE(t) expect_in_force(me, __LINE__, (t))

static void open_rig(part_t* me) {
  const sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
}

static void on_ranks(void (*run)(part_t* me)) {
  for (int32_t w = 2; w <= 3; ++w) perform(&(play_t){.run = run, .world_size = w});
}

/* ---- placements that differ ---- */

static void differ_run(part_t* me) {
  table_t old, t;
  open_rig(me);
  make_table(me, 0, &old);
  IN_FORCE(&old);
  const uint64_t digest = good_round(me, __LINE__);
  make_swapped(me, 5, &t);
  if (me->rank == 1) swap(t.slot, 2, 3), swap(t.rank, 2, 3); /* experts 2 and 3 change places */
  STATUS(replace(me, &t), SLUICE_E_MISMATCH, "(expert_rank[2], expert_slot[2]) is (");
  EXPECT(strstr(last_message(), me->rank == 1 ? "(0, 0) on rank 0 and (1, 1) on rank 1"
                                              : "(1, 1) on rank 1 and (0, 0) on rank ") != NULL ||
         me->world_size > 2);
  EXPECT(last_error()->peer == (me->rank == 1 ? 0 : 1));
  IN_FORCE(&old);
  make_swapped(me, me->rank == 1 ? 6 : 5, &t);
  STATUS(replace(me, &t), SLUICE_E_MISMATCH, "epoch is ");
  EXPECT(strstr(last_message(), "6 on rank 1") != NULL && strstr(last_message(), "5 on rank ") != NULL);
  IN_FORCE(&old);
  EXPECT(good_round(me, __LINE__) == digest);
  make_swapped(me, 5, &t);
  WORKS(replace(me, &t));
  IN_FORCE(&t);
  (void)good_round(me, __LINE__);
}

TEST(Replace_PlacementsDiffer_NamesRanksAndEntry) { on_ranks(differ_run); }

/* More entries than fit into one exchange; the last one differs. */
enum { MANY = 300 };

static void many_run(part_t* me) {
  static const int32_t far = MANY - 1;
  int32_t rank[MANY], slot[MANY];
  sluice_moe_config_t config = config_for(2);
  WORKS(rig_open(&me->rig, me->comm, &config));
  config.num_experts = MANY;
  sluice_moe_t* moe = NULL;
  WORKS(sluice_moe_create(me->rig.context, &config, &moe));
  for (int32_t e = 0; e < MANY; ++e) rank[e] = e % 2, slot[e] = MANY / 2 - 1 - e / 2;
  if (me->rank == 1) swap(slot, far, far - 2);
  DEFAULTS(sluice_expert_placement, placement);
  placement.expert_rank = rank, placement.expert_slot = slot, placement.epoch = 1;
  STATUS(sluice_moe_replace_experts(moe, &placement), SLUICE_E_MISMATCH, "expert_slot[297]) is (1, ");
  if (me->rank == 1) swap(slot, far, far - 2);
  WORKS(sluice_moe_replace_experts(moe, &placement));
  EXPECT(sluice_moe_num_local_experts(moe) == MANY / 2);
  sluice_moe_destroy(moe);
}

TEST(Replace_ManyExperts_FindsTheEntry) { perform(&(play_t){.run = many_run, .world_size = 2}); }

/* ---- bad placements ---- */

typedef struct bent_s {
  const char* text;
  void (*bend)(table_t* t);
} bent_t;

static void no_ranks(table_t* t) { t->placement.expert_rank = NULL; }
static void no_slots(table_t* t) { t->placement.expert_slot = NULL; }
static void no_such_rank(table_t* t) { t->rank[1] = 7; }
static void hole(table_t* t) { t->slot[3] = 2; }
static void below(table_t* t) { t->slot[0] = -1; }
static void shared(table_t* t) { t->slot[3] = t->slot[2] = 0; }
static void old_epoch(table_t* t) { t->placement.epoch = 0; }
static void extension(table_t* t) {
  static const sluice_ext_header_t stranger = {.type = 4711};
  t->placement.next = &stranger;
}

static const bent_t BENT[] = {
    {"expert_rank is NULL", no_ranks},
    {"expert_slot is NULL", no_slots},
    {"expert_rank[1] is 7; the group has", no_such_rank},
    {"expert_slot[3] is 2, and rank 1 owns 2 experts: its slots are 0 to 1", hole},
    {"expert_slot[0] is -1", below},
    {"experts 2 and 3 into slot 0 of rank 1", shared},
    {"epoch is 0, and the placement in force has 0", old_epoch},
    {"extension of unknown type 4711", extension},
};
enum { NUM_BENT = sizeof BENT / sizeof BENT[0] };

static void bad_run(part_t* me) {
  table_t old;
  open_rig(me);
  make_table(me, 0, &old);
  const uint64_t digest = good_round(me, __LINE__);
  for (int i = 0; i < NUM_BENT; ++i) {
    table_t t;
    const sluice_status_t own = BENT[i].bend == extension ? SLUICE_E_ABI : BAD;
    make_table(me, 1, &t);
    BENT[i].bend(&t);
    STATUS(replace(me, &t), own, BENT[i].text); /* on all ranks */
    make_table(me, 1, &t);
    if (me->rank == 1) BENT[i].bend(&t); /* on one rank */
    STATUS(replace(me, &t), me->rank == 1 ? own : SLUICE_E_PEER_REFUSED, BENT[i].text);
    if (me->rank != 1) EXPECT(strstr(last_message(), "rank 1 refused its replacement of experts") != NULL);
    IN_FORCE(&old);
  }
  STATUS(sluice_moe_replace_experts(me->rig.moe, NULL), BAD, "sluice_expert_placement_t");
  EXPECT(sluice_moe_replace_experts(NULL, &old.placement) == BAD);
  EXPECT(sluice_moe_get_placement(NULL, NULL, NULL, NULL) == BAD);
  WORKS(sluice_moe_get_placement(me->rig.moe, NULL, NULL, NULL));
  EXPECT(good_round(me, __LINE__) == digest);
}

TEST(Replace_BadPlacements_AreRefusedOnAllRanks) { on_ranks(bad_run); }

/* ---- not between steps ---- */

static void outstanding_run(part_t* me) {
  table_t old, t;
  open_rig(me);
  make_table(me, 0, &old);
  make_swapped(me, 1, &t);
  const uint64_t digest = good_round(me, __LINE__);
  sluice_step_t* step = NULL;
  rig_reset(&me->rig);
  WORKS(rig_forward(&me->rig, &step));
  STATUS(replace(me, &t), SLUICE_E_STATE, "steps of this layer are outstanding");
  WORKS(rig_backward(&me->rig, step));
  STATUS(replace(me, &t), SLUICE_E_STATE, "drop them"); /* a second backward is still possible */
  if (me->rank != 0) sluice_step_drop(step);
  STATUS(replace(me, &t), me->rank == 0 ? SLUICE_E_STATE : SLUICE_E_PEER_REFUSED,
         "steps of this layer are outstanding");
  if (me->rank == 0) sluice_step_drop(step);
  IN_FORCE(&old);
  EXPECT(good_round(me, __LINE__) == digest);
  /* Steps of another layer do not matter. */
  sluice_moe_t *first = me->rig.moe, *second = NULL;
  WORKS(sluice_moe_create(me->rig.context, &me->rig.config, &second));
  rig_reset(&me->rig);
  WORKS(rig_forward(&me->rig, &step));
  WORKS(sluice_moe_replace_experts(second, &t.placement));
  WORKS(rig_backward(&me->rig, step));
  sluice_step_drop(step);
  me->rig.moe = second;
  IN_FORCE(&t);
  me->rig.moe = first;
  IN_FORCE(&old);
  sluice_moe_destroy(second);
}

TEST(Replace_StepsOutstanding_IsState) { on_ranks(outstanding_run); }

typedef struct kept_s {
  sluice_context_t* context; /* NULL: the host's own memory */
  void* data[SLUICE_SAVED_COUNT];
  uint64_t bytes[SLUICE_SAVED_COUNT];
} kept_t;

static void* keep(void* user, int32_t which, uint64_t bytes) {
  kept_t* kept = user;
  kept->bytes[which] = bytes;
  if (kept->context == NULL) return kept->data[which] = aligned_alloc(64, (bytes + 127) / 64 * 64);
  return sluice_context_allocate_saved(kept->context, which, bytes, &kept->data[which]) == SLUICE_OK ? kept->data[which]
                                                                                                     : NULL;
}

static void forward_and_drop(part_t* me, kept_t* kept) {
  sluice_step_t* step = NULL;
  rig_reset(&me->rig);
  me->rig.forward.save = keep, me->rig.forward.save_user = kept;
  me->rig.forward.save_is_counted = kept->context != NULL;
  WORKS(rig_forward(&me->rig, &step));
  sluice_step_drop(step);
}

/* A host may drop a step and keep its buffers: the library tracks its own memory, and checks others at a restore. */
static void kept_run(part_t* me) {
  table_t t;
  sluice_step_t* step = NULL;
  open_rig(me);
  make_swapped(me, 1, &t);
  kept_t counted = {.context = me->rig.context}, own = {.context = NULL};
  forward_and_drop(me, &counted);
  STATUS(replace(me, &t), SLUICE_E_STATE, "free what they saved");
  for (int i = 0; i < SLUICE_SAVED_COUNT; ++i) sluice_context_free(me->rig.context, counted.data[i], counted.bytes[i]);
  forward_and_drop(me, &own);
  WORKS(sluice_step_restore(me->rig.moe, own.data, own.bytes, &step));
  STATUS(replace(me, &t), SLUICE_E_STATE, "outstanding");
  sluice_step_drop(step);
  WORKS(replace(me, &t));
  STATUS(sluice_step_restore(me->rig.moe, own.data, own.bytes, &step), BAD, "with the present placement of experts");
  make_table(me, 2, &t);
  WORKS(replace(me, &t)); /* the old placement again, but buffers of its time are no longer valid */
  STATUS(sluice_step_restore(me->rig.moe, own.data, own.bytes, &step), BAD, "with the present placement of experts");
  for (int i = 0; i < SLUICE_SAVED_COUNT; ++i) free(own.data[i]);
}

TEST(Replace_BuffersKept_AreSeenOrRefusedLater) { on_ranks(kept_run); }

static void crossed_run(part_t* me) {
  table_t old, t;
  open_rig(me);
  make_table(me, 0, &old);
  make_swapped(me, 1, &t);
  const uint64_t digest = good_round(me, __LINE__);
  sluice_step_t* step = NULL;
  rig_reset(&me->rig);
  STATUS(me->rank == 0 ? replace(me, &t) : rig_forward(&me->rig, &step), SLUICE_E_MISMATCH, "replacement of experts");
  EXPECT(strstr(last_message(), "layer 3, forward") != NULL && step == NULL);
  IN_FORCE(&old);
  EXPECT(good_round(me, __LINE__) == digest);
}

TEST(Replace_AgainstAForward_IsNamed) { perform(&(play_t){.run = crossed_run, .world_size = 2}); }

/* ---- memory ---- */

/* Replacing experts allocates nothing, so it can be called when memory is full. */
static void memory_run(part_t* me) {
  open_rig(me);
  (void)good_round(me, __LINE__);
  for (uint64_t epoch = 1; epoch < 4; ++epoch) {
    table_t t;
    (epoch % 2 ? make_swapped : make_table)(me, epoch, &t);
    const int64_t calls = atomic_load(&me->rig.heap.calls), live = atomic_load(&me->rig.heap.live_bytes);
    atomic_store(&me->rig.heap.fail_at, calls);
    WORKS(replace(me, &t));
    EXPECT(atomic_load(&me->rig.heap.calls) == calls && atomic_load(&me->rig.heap.live_bytes) == live);
    atomic_store(&me->rig.heap.fail_at, -1);
    IN_FORCE(&t);
    (void)good_round(me, __LINE__);
  }
}

TEST(Replace_WithoutMemory_Works) { on_ranks(memory_run); }

/* Calls without headers have headers again, in which a rank can refuse. */
static void capacity_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  config.exchange_mode = SLUICE_EXCHANGE_CAPACITY, config.capacity_rows = 12;
  WORKS(rig_open(&me->rig, me->comm, &config));
  const uint64_t digest = good_round(me, __LINE__);
  EXPECT(good_round(me, __LINE__) == digest);
  table_t t;
  make_swapped(me, 1, &t);
  WORKS(replace(me, &t));
  sluice_step_t* step = NULL;
  rig_reset(&me->rig);
  if (me->rank == 0) me->rig.forward.tokens = NULL;
  STATUS(rig_forward(&me->rig, &step), me->rank == 0 ? BAD : SLUICE_E_PEER_REFUSED, "tokens");
  (void)good_round(me, __LINE__);
  make_table(me, 2, &t);
  WORKS(replace(me, &t));
  EXPECT(good_round(me, __LINE__) == digest);
}

TEST(Replace_UnderACapacity_OpensHeadersAgain) { on_ranks(capacity_run); }

static void plan_run(part_t* me) {
  open_rig(me);
  table_t old, t;
  make_table(me, 0, &old);
  DEFAULTS(sluice_plan_config, wanted);
  wanted.max_tokens = 64, wanted.num_chunks = 2;
  sluice_plan_t* plan = NULL;
  WORKS(sluice_plan_create(me->rig.moe, &wanted, &plan));
  WORKS(sluice_moe_use_plan(me->rig.moe, plan));
  (void)good_round(me, __LINE__);
  make_swapped(me, 1, &t);
  WORKS(replace(me, &t)); /* equally many on each rank: the plan stays */
  (void)good_round(me, __LINE__);
  make_table(me, 2, &t);
  t.rank[0] = 1, t.slot[0] = 2, t.slot[1] = 0;
  STATUS(replace(me, &t), SLUICE_E_STATE, "the plan set with sluice_moe_use_plan is for other numbers of experts");
  WORKS(sluice_moe_use_plan(me->rig.moe, NULL));
  WORKS(replace(me, &t));
  IN_FORCE(&t);
  STATUS(sluice_moe_use_plan(me->rig.moe, plan), BAD, "other numbers of experts");
  me->rig.num_local = sluice_moe_num_local_experts(me->rig.moe);
  (void)good_round(me, __LINE__);
  sluice_plan_info_t info = {.struct_size = sizeof info};
  WORKS(sluice_plan_get_info(plan, &info)); /* for the former placement */
  make_table(me, 3, &t);
  WORKS(replace(me, &t));
  WORKS(sluice_moe_use_plan(me->rig.moe, plan));
  me->rig.num_local = 2;
  (void)good_round(me, __LINE__);
  sluice_plan_destroy(plan);
}

TEST(Replace_UnderAPlan_KeepsItWithTheNumbers) { on_ranks(plan_run); }

/* Memory of graphs may not grow; equally many experts need the same memory. */
static void captured_run(part_t* me) {
  open_rig(me);
  table_t old, t;
  make_table(me, 0, &old);
  me->rig.context->num_captured = 1; /* as after a capture */
  make_table(me, 1, &t);
  t.rank[0] = 1, t.slot[0] = 2, t.slot[1] = 0;
  STATUS(replace(me, &t), SLUICE_E_STATE, "graphs were captured in this context");
  IN_FORCE(&old);
  make_swapped(me, 1, &t);
  WORKS(replace(me, &t));
  IN_FORCE(&t);
  me->rig.context->num_captured = 0;
}

TEST(Replace_BesideGraphs_KeepsTheNumbers) { on_ranks(captured_run); }
