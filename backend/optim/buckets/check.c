/* The checker. An op knows of each lane up to which op it has ended: what its own lane's op before knew, and what those
 * that it waits for knew. */
#include <string.h>

#include "backend/base/check.h"
#include "backend/base/lanes.h"
#include "backend/base/math.h"
#include "backend/optim/buckets/accesses.h"
#include "backend/optim/buckets/plan.h"

enum { NOBODY = -1 };

typedef struct known_s {
  int32_t ended[SLUICE_NUM_LANES]; /* the last op of each lane that has ended; NOBODY */
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
  const uint8_t x = sluice_bucket_accesses[a->kind][room], y = sluice_bucket_accesses[b->kind][room];
  return a->slot == b->slot && x != 0 && y != 0 && ((x | y) & SLUICE_BUCKET_WRITES);
}

/* Walks back from an op: who it conflicts with has to have ended, and who wrote last has to be the right one. Behind a
 * writer that has ended nothing is left to look at: that op was looked at itself. */
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
  if (!(sluice_bucket_accesses[op->kind][room] & SLUICE_BUCKET_READS)) return (sluice_bucket_finding_t){0};
  static const int32_t wanted[SLUICE_BUCKET_NUM_KINDS][SLUICE_BUCKET_NUM_ROOMS] = {
      [SLUICE_BUCKET_UPDATE] = {SLUICE_BUCKET_COPY_IN, SLUICE_BUCKET_STAGE},
      [SLUICE_BUCKET_COPY_OUT] = {SLUICE_BUCKET_UPDATE, NOBODY},
  };
  const sluice_bucket_op_t* last = plan->ops + writer;
  if (writer == NOBODY || last->bucket != op->bucket || last->kind != wanted[op->kind][room]) {
    return (sluice_bucket_finding_t){SLUICE_BUCKET_FOREIGN, i, writer};
  }
  return (sluice_bucket_finding_t){0};
}

/* Each bucket once in each kind, and states that are written over have been copied out. */
static sluice_bucket_finding_t count_ops(const sluice_bucket_plan_t* plan, uint8_t* seen) {
  const int32_t buckets = (int32_t)sluice_ceil_div(plan->count, plan->bucket);
  memset(seen, 0, (size_t)buckets);
  for (int32_t i = 0; i < plan->num_ops; ++i) {
    const sluice_bucket_op_t* op = plan->ops + i;
    if (op->bucket < 0 || op->bucket >= buckets || (seen[op->bucket] & 1 << op->kind)) {
      return (sluice_bucket_finding_t){SLUICE_BUCKET_MISSING, op->bucket, i};
    }
    seen[op->bucket] = (uint8_t)(seen[op->bucket] | 1 << op->kind);
  }
  for (int32_t b = 0; b < buckets; ++b) {
    if (seen[b] != (1 << SLUICE_BUCKET_NUM_KINDS) - 1)
      return (sluice_bucket_finding_t){SLUICE_BUCKET_MISSING, b, NOBODY};
  }
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
  const uint64_t bytes = known_bytes + (uint64_t)sluice_ceil_div(plan->count, plan->bucket);
  if (bytes == 0) return SLUICE_OK;
  char* scratch = sluice_alloc(memory, bytes, "optimizer: the checker's scratch");
  if (scratch == NULL) return sluice_alloc_status();
  const sluice_status_t status = check(plan, (known_t*)(void*)scratch, (uint8_t*)scratch + known_bytes, out_finding);
  sluice_free(memory, scratch, bytes);
  return status;
}
