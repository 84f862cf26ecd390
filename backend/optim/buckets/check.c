// SPDX-License-Identifier: Apache-2.0
/* The checker. It tracks, for each op and lane, the last op that has certainly ended: what the previous op on the same
 * lane knew, and what the awaited ops knew. */
#include <string.h>

#include "backend/base/lanes.h"
#include "backend/base/math.h"
#include "backend/optim/buckets/plan.h"

enum { NOBODY = -1 };

typedef struct known_s {
  int32_t ended[SLUICE_NUM_LANES]; /* the last op of each lane that has ended; NOBODY: none */
} known_t;

static void learn(known_t* known, const known_t* from, int32_t lane, int32_t op) {
  for (int32_t l = 0; l < SLUICE_NUM_LANES; ++l) {
    known->ended[l] = (int32_t)sluice_max(known->ended[l], from[op].ended[l]);
  }
  known->ended[lane] = (int32_t)sluice_max(known->ended[lane], op);
}

static sluice_status_t learn_all(const sluice_bucket_plan_t* plan, known_t* known) {
  int32_t before[SLUICE_NUM_LANES];
  for (int32_t l = 0; l < SLUICE_NUM_LANES; ++l) before[l] = NOBODY;
  for (int32_t i = 0; i < plan->num_ops; ++i) {
    const sluice_bucket_op_t* op = plan->ops + i;
    for (int32_t l = 0; l < SLUICE_NUM_LANES; ++l) known[i].ended[l] = NOBODY;
    if (before[op->lane] != NOBODY) learn(known + i, known, op->lane, before[op->lane]);
    for (int32_t w = 0; w < op->num_waits; ++w) {
      SLUICE_TRY(
          SLUICE_REQUIRE(op->waits[w] >= 0 && op->waits[w] < i, "optimizer: op %d waits for op %d", i, op->waits[w]));
      learn(known + i, known, plan->ops[op->waits[w]].lane, op->waits[w]);
    }
    before[op->lane] = i;
  }
  return SLUICE_OK;
}

static int conflict(const sluice_bucket_op_t* a, const sluice_bucket_op_t* b, int32_t room) {
  const int32_t slot = sluice_bucket_slot_of(a, room);
  const uint8_t either = sluice_bucket_accesses[a->kind][room] | sluice_bucket_accesses[b->kind][room];
  return slot != SLUICE_BUCKET_NO_SLOT && slot == sluice_bucket_slot_of(b, room) && (either & SLUICE_BUCKET_WRITES);
}

/* Returns the kind that must have written last what an op reads; NOBODY: any. */
static int32_t writer_of(const sluice_bucket_op_t* op, int32_t room) {
  static const int32_t wanted[SLUICE_BUCKET_NUM_ROOMS] = {SLUICE_BUCKET_COPY_IN, SLUICE_BUCKET_STAGE,
                                                          SLUICE_BUCKET_LOOK, SLUICE_BUCKET_DECIDE};
  return op->kind == SLUICE_BUCKET_COPY_OUT ? SLUICE_BUCKET_UPDATE : wanted[room];
}

static int has_left_what(const sluice_bucket_op_t* writer, const sluice_bucket_op_t* op, int32_t room) {
  if (writer->kind != writer_of(op, room)) return 0;
  if (room == SLUICE_BUCKET_FOUND || room == SLUICE_BUCKET_VERDICT) return 1;
  return writer->bucket <= op->bucket && op->bucket + op->num_buckets <= writer->bucket + writer->num_buckets &&
         (room != SLUICE_BUCKET_GRADS || op->grad_at - writer->grad_at == op->first - writer->first);
}

/* Walks back from an op: every conflicting op must have ended, and the last writer must be the right one. The walk
 * stops at a writer that has ended, because the check of that writer covers what came before. */
static sluice_bucket_finding_t look_back(const sluice_bucket_plan_t* plan, const known_t* known, int32_t i,
                                         int32_t room) {
  const sluice_bucket_op_t* op = plan->ops + i;
  int32_t writer = NOBODY;
  for (int32_t j = i - 1; j >= 0 && writer == NOBODY; --j) {
    const sluice_bucket_op_t* other = plan->ops + j;
    if (!conflict(op, other, room)) continue;
    if (known[i].ended[other->lane] < j) return (sluice_bucket_finding_t){SLUICE_BUCKET_OVERWRITTEN, i, j};
    if (sluice_bucket_accesses[other->kind][room] & SLUICE_BUCKET_WRITES) writer = j;
  }
  const int reads = (sluice_bucket_accesses[op->kind][room] & SLUICE_BUCKET_READS) != 0;
  /* Nothing is decided, or nothing is scanned. */
  const int is_left_out =
      room == SLUICE_BUCKET_VERDICT ? !plan->form.decides : room == SLUICE_BUCKET_FOUND && plan->num_buckets == 0;
  if (!reads || is_left_out || sluice_bucket_slot_of(op, room) == SLUICE_BUCKET_NO_SLOT) {
    return (sluice_bucket_finding_t){0};
  }
  if (writer == NOBODY || !has_left_what(plan->ops + writer, op, room)) {
    return (sluice_bucket_finding_t){SLUICE_BUCKET_FOREIGN, i, writer};
  }
  return (sluice_bucket_finding_t){0};
}

/* Returns the kinds of op that each bucket needs, as a bit mask. */
static int kinds_of(const sluice_bucket_plan_t* plan) {
  const int copies = 1 << SLUICE_BUCKET_COPY_IN | 1 << SLUICE_BUCKET_COPY_OUT;
  return 1 << SLUICE_BUCKET_UPDATE | (plan->form.num_slots > 0 ? copies : 0) |
         (plan->num_grad_slots > 0 ? 1 << SLUICE_BUCKET_STAGE : 0) | (plan->form.decides ? 1 << SLUICE_BUCKET_LOOK : 0);
}

/* Returns the bucket that has an op twice, or that had to be scanned before this op; NOBODY: none. */
static int32_t count_op(const sluice_bucket_plan_t* plan, const sluice_bucket_op_t* op, uint8_t* seen,
                        int32_t* decisions) {
  if (op->kind == SLUICE_BUCKET_DECIDE) {
    ++*decisions;
    for (int32_t b = 0; b < plan->num_buckets; ++b) {
      if (!(seen[b] & 1 << SLUICE_BUCKET_LOOK)) return b;
    }
    return NOBODY;
  }
  for (int32_t b = op->bucket; b < op->bucket + op->num_buckets; ++b) {
    if (b < 0 || b >= plan->num_buckets || (seen[b] & 1 << op->kind)) return b;
    seen[b] = (uint8_t)(seen[b] | 1 << op->kind);
  }
  return NOBODY;
}

/* Checks that each bucket has each kind once, and that all are scanned before the verdict. */
static sluice_bucket_finding_t count_ops(const sluice_bucket_plan_t* plan, uint8_t* seen) {
  int32_t decisions = 0;
  memset(seen, 0, (size_t)plan->num_buckets);
  for (int32_t i = 0; i < plan->num_ops; ++i) {
    const int32_t bucket = count_op(plan, plan->ops + i, seen, &decisions);
    if (bucket != NOBODY) return (sluice_bucket_finding_t){SLUICE_BUCKET_MISSING, bucket, i};
  }
  for (int32_t b = 0; b < plan->num_buckets; ++b) {
    if (seen[b] != kinds_of(plan)) return (sluice_bucket_finding_t){SLUICE_BUCKET_MISSING, b, NOBODY};
  }
  if (decisions != (plan->form.decides != 0)) return (sluice_bucket_finding_t){SLUICE_BUCKET_MISSING, NOBODY, NOBODY};
  return (sluice_bucket_finding_t){0};
}

static sluice_status_t check(const sluice_bucket_plan_t* plan, known_t* known, uint8_t* seen,
                             sluice_bucket_finding_t* out_finding) {
  SLUICE_TRY(learn_all(plan, known));
  *out_finding = count_ops(plan, seen);
  for (int32_t i = 0; i < plan->num_ops && out_finding->what == SLUICE_BUCKET_PROVED; ++i) {
    for (int32_t room = 0; room < SLUICE_BUCKET_NUM_ROOMS && out_finding->what == SLUICE_BUCKET_PROVED; ++room) {
      *out_finding = look_back(plan, known, i, room);
    }
  }
  return SLUICE_OK;
}

sluice_status_t sluice_bucket_plan_check(const sluice_bucket_plan_t* plan, sluice_allocator_t* memory,
                                         sluice_bucket_finding_t* out_finding) {
  *out_finding = (sluice_bucket_finding_t){0};
  const uint64_t known_bytes = (uint64_t)plan->num_ops * sizeof(known_t);
  const uint64_t bytes = known_bytes + (uint64_t)plan->num_buckets;
  if (bytes == 0) return SLUICE_OK;
  char* scratch = sluice_alloc(memory, bytes, "optimizer: the checker's scratch");
  if (scratch == NULL) return sluice_alloc_status();
  const sluice_status_t status = check(plan, (known_t*)(void*)scratch, (uint8_t*)scratch + known_bytes, out_finding);
  sluice_free(memory, scratch, bytes);
  return status;
}
