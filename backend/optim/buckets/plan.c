#include "backend/optim/buckets/plan.h"

#include "backend/base/check.h"
#include "backend/base/lanes.h"
#include "backend/base/math.h"
#include "backend/optim/buckets/accesses.h"
#include "sluice/context.h"

enum { NOBODY = -1 };

static const int32_t lane_of[SLUICE_BUCKET_NUM_KINDS] = {
    [SLUICE_BUCKET_COPY_IN] = SLUICE_LANE_COPY_IN,
    [SLUICE_BUCKET_STAGE] = SLUICE_LANE_COMPUTE,
    [SLUICE_BUCKET_UPDATE] = SLUICE_LANE_COMPUTE,
    [SLUICE_BUCKET_COPY_OUT] = SLUICE_LANE_COPY_OUT,
};

uint64_t sluice_bucket_slot_bytes(int64_t bucket, int32_t num_slots) {
  return (uint64_t)num_slots * 4 * sluice_align_up((uint64_t)bucket * sizeof(float));
}

/* Who used a room of a slot last. A lane runs in order, so its last reader stands for all before it. */
typedef struct room_s {
  int32_t writer;
  int32_t readers[SLUICE_NUM_LANES];
} room_t;

static void wait_for(sluice_bucket_plan_t* plan, sluice_bucket_op_t* op, int32_t other) {
  if (other == NOBODY || plan->ops[other].lane == op->lane) return;
  for (int32_t i = 0; i < op->num_waits; ++i) {
    /* The later op of a lane covers the earlier one. */
    if (plan->ops[op->waits[i]].lane != plan->ops[other].lane) continue;
    op->waits[i] = (int32_t)sluice_max(op->waits[i], other);
    return;
  }
  op->waits[op->num_waits++] = other;
}

static void derive_waits(sluice_bucket_plan_t* plan, int32_t index,
                         room_t rooms[SLUICE_BUCKET_MAX_SLOTS][SLUICE_BUCKET_NUM_ROOMS]) {
  sluice_bucket_op_t* op = plan->ops + index;
  for (int32_t r = 0; r < SLUICE_BUCKET_NUM_ROOMS; ++r) {
    const uint8_t access = sluice_bucket_accesses[op->kind][r];
    room_t* room = &rooms[op->slot][r];
    if (access == SLUICE_BUCKET_NOTHING) continue;
    wait_for(plan, op, room->writer);
    if (!(access & SLUICE_BUCKET_WRITES)) {
      room->readers[op->lane] = index;
      continue;
    }
    for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) {
      wait_for(plan, op, room->readers[lane]);
      room->readers[lane] = NOBODY;
    }
    room->writer = index;
  }
}

static void fill(sluice_bucket_plan_t* plan) {
  room_t rooms[SLUICE_BUCKET_MAX_SLOTS][SLUICE_BUCKET_NUM_ROOMS];
  for (int32_t i = 0; i < SLUICE_BUCKET_MAX_SLOTS * SLUICE_BUCKET_NUM_ROOMS; ++i) {
    room_t* room = &rooms[i / SLUICE_BUCKET_NUM_ROOMS][i % SLUICE_BUCKET_NUM_ROOMS];
    room->writer = NOBODY;
    for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) room->readers[lane] = NOBODY;
  }
  for (int32_t i = 0; i < plan->num_ops; ++i) {
    const int32_t kind = i % SLUICE_BUCKET_NUM_KINDS, bucket = i / SLUICE_BUCKET_NUM_KINDS;
    plan->ops[i] =
        (sluice_bucket_op_t){.kind = kind, .lane = lane_of[kind], .bucket = bucket, .slot = bucket % plan->num_slots};
    derive_waits(plan, i, rooms);
  }
}

static uint64_t bytes_of(int32_t num_ops) {
  return sizeof(sluice_bucket_plan_t) + (uint64_t)num_ops * sizeof(sluice_bucket_op_t);
}

sluice_status_t sluice_bucket_plan_create(int64_t count, int64_t bucket, int32_t num_slots,
                                          sluice_allocator_t* allocator, sluice_bucket_plan_t** out_plan) {
  *out_plan = NULL;
  SLUICE_TRY(SLUICE_REQUIRE(num_slots >= 1 && num_slots <= SLUICE_BUCKET_MAX_SLOTS,
                            "optimizer: %d slots for buckets; it is 1, or 2 for copies beside updates", num_slots));
  SLUICE_TRY(SLUICE_REQUIRE(count >= 0 && bucket >= 1, "optimizer: %lld elements in buckets of %lld", (long long)count,
                            (long long)bucket));
  const int64_t buckets = sluice_ceil_div(count, bucket);
  SLUICE_TRY(SLUICE_REQUIRE(buckets <= INT32_MAX / SLUICE_BUCKET_NUM_KINDS,
                            "optimizer: %lld buckets of %lld elements; take larger ones", (long long)buckets,
                            (long long)bucket));
  const int32_t num_ops = (int32_t)buckets * SLUICE_BUCKET_NUM_KINDS;
  sluice_bucket_plan_t* plan = sluice_alloc(allocator, bytes_of(num_ops), "optimizer: the ops of a step");
  if (plan == NULL) return sluice_alloc_status();
  *plan = (sluice_bucket_plan_t){.count = count,
                                 .bucket = bucket,
                                 .num_slots = num_slots,
                                 .num_ops = num_ops,
                                 .ops = (sluice_bucket_op_t*)(plan + 1)};
  fill(plan);
  *out_plan = plan;
  return SLUICE_OK;
}

void sluice_bucket_plan_destroy(sluice_bucket_plan_t* plan, sluice_allocator_t* allocator) {
  if (plan != NULL) sluice_free(allocator, plan, bytes_of(plan->num_ops));
}
