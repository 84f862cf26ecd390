// SPDX-License-Identifier: Apache-2.0
#include "backend/schedule/check/releases.h"

#include <string.h>

#include "backend/schedule/tensor_table.h"

/* ---- the order of ops ---- */

int sluice_order_op(const sluice_template_t* t, int32_t index, sluice_before_t* before, int32_t* last_of_lane,
                    int32_t* out_dep) {
  const sluice_op_t* op = &t->ops[index];
  int32_t* own = before[index];
  int32_t previous = last_of_lane[op->lane];
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) own[lane] = previous >= 0 ? before[previous][lane] : -1;
  own[op->lane] = previous;
  for (int32_t d = 0; d < op->num_deps; ++d) {
    int32_t dep = t->deps[op->first_dep + d];
    *out_dep = dep;
    if (dep < 0 || dep >= index) return 0;
    for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) {
      if (before[dep][lane] > own[lane]) own[lane] = before[dep][lane];
    }
    int32_t lane = t->ops[dep].lane;
    if (dep > own[lane]) own[lane] = dep;
  }
  last_of_lane[op->lane] = index;
  return 1;
}

void sluice_order_all(const sluice_template_t* t, sluice_before_t* before) {
  int32_t last_of_lane[SLUICE_NUM_LANES], dep = 0;
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) last_of_lane[lane] = -1;
  for (int32_t i = 0; i < t->num_ops; ++i) (void)sluice_order_op(t, i, before, last_of_lane, &dep);
}

/* ---- releases ---- */

#define NOBODY (-1)
#define BITS   (2 * SLUICE_OP_MAX_ACCESSES)

int sluice_slot_outlasts(const sluice_template_spec_t* spec, int32_t tensor) {
  int separate_wgrad = spec->direction == SLUICE_BACKWARD && (spec->wgrad == SLUICE_WGRAD_CALL_LATER || !spec->dgrad);
  const int32_t lives = sluice_tensor_row(tensor)->lives;
  if (lives & SLUICE_LIVES_FOR_EVER) return 1;
  return ((lives & SLUICE_LIVES_FOR_WGRAD) && separate_wgrad) || ((lives & SLUICE_LIVES_FOR_SPLIT) && spec->only != 0);
}

static sluice_slot_ref_t ref_of(const sluice_op_t* op, int32_t bit) {
  return bit < SLUICE_OP_MAX_ACCESSES ? op->reads[bit] : op->writes[bit - SLUICE_OP_MAX_ACCESSES];
}

static int has_access(const sluice_op_t* op, int32_t bit) {
  return bit < SLUICE_OP_MAX_ACCESSES ? bit < op->num_reads : bit - SLUICE_OP_MAX_ACCESSES < op->num_writes;
}

static int touches(sluice_slot_ref_t ref, int32_t tensor, int32_t slot) {
  return ref.tensor == tensor && (ref.slot == slot || ref.slot < 0);
}

int sluice_op_releases(const sluice_op_t* op, int32_t tensor, int32_t slot) {
  for (int32_t bit = 0; bit < BITS; ++bit) {
    if ((op->releases >> bit & 1) && touches(ref_of(op, bit), tensor, slot)) return 1;
  }
  return 0;
}

uint64_t sluice_template_count_touches(const sluice_template_t* t) {
  uint64_t count = 0;
  for (int32_t i = 0; i < t->num_ops; ++i) {
    for (int32_t bit = 0; bit < BITS; ++bit) {
      if (!has_access(&t->ops[i], bit)) continue;
      sluice_slot_ref_t ref = ref_of(&t->ops[i], bit);
      count += ref.slot < 0 ? SLUICE_MAX_CHUNKS : 1; /* no ring is larger */
    }
  }
  return count;
}

/* ---- uses of slots, in program order ---- */

typedef struct access_s {
  int32_t op;
  int32_t bits; /* the op's accesses to this slot: two if it works in place */
  int32_t next; /* of the same use */
} access_t;

typedef struct uses_s uses_t;
/* Called at the end of a use; `newest` is its last access. Returns 0 to stop. */
typedef int (*close_fn_t)(uses_t* uses, int32_t tensor, int32_t slot, int32_t newest);

struct uses_s {
  const sluice_template_t* t;
  const sluice_before_t* before;
  close_fn_t close;
  sluice_finding_t* finding; /* for checking */
  int32_t *wanted, *others;  /* for deriving: bits of last accesses by op, and of the others */
  int32_t* open;             /* by slot: newest access of its current use; NOBODY: none */
  int32_t first_slot[SLUICE_T_COUNT];
  int32_t num_slots;
  access_t* accesses;
  int32_t num_accesses;
};

static int reads_slot(const sluice_op_t* op, int32_t tensor, int32_t slot) {
  for (int32_t i = 0; i < op->num_reads; ++i) {
    if (touches(op->reads[i], tensor, slot)) return 1;
  }
  return 0;
}

/* Returns whether the access belongs to a use, which it may begin. Rows that existed before the pass belong to none. */
static int note(uses_t* uses, int32_t index, int32_t bit, int32_t tensor, int32_t slot, int* out_is_used) {
  int32_t* open = &uses->open[uses->first_slot[tensor] + slot];
  int is_write = bit >= SLUICE_OP_MAX_ACCESSES;
  int is_own = *open != NOBODY && uses->accesses[*open].op == index; /* two accesses of one op */
  if (is_write && !is_own && !reads_slot(&uses->t->ops[index], tensor, slot)) {
    if (*open != NOBODY && !uses->close(uses, tensor, slot, *open)) return 0;
    *open = NOBODY;
  } else if (*open == NOBODY) {
    return 1;
  }
  *out_is_used = 1;
  if (is_own) {
    uses->accesses[*open].bits |= 1 << bit;
    return 1;
  }
  uses->accesses[uses->num_accesses] = (access_t){index, 1 << bit, *open};
  *open = uses->num_accesses++;
  return 1;
}

static int report(uses_t* uses, int32_t hazard, int32_t op, int32_t other, int32_t tensor, int32_t slot) {
  *uses->finding = (sluice_finding_t){hazard, op, other, tensor, slot, uses->t->ops[op].chunk};
  return 0;
}

static int note_op(uses_t* uses, int32_t index) {
  const sluice_template_t* t = uses->t;
  const sluice_op_t* op = &t->ops[index];
  for (int32_t bit = 0; bit < BITS; ++bit) {
    if (!has_access(op, bit)) continue;
    sluice_slot_ref_t ref = ref_of(op, bit);
    int is_used = 0, outlasts = sluice_slot_outlasts(&t->spec, ref.tensor);
    int32_t first = ref.slot < 0 ? 0 : ref.slot, end = ref.slot < 0 ? t->ring[ref.tensor] : ref.slot + 1;
    for (int32_t slot = first; slot < end && !outlasts; ++slot) {
      if (!note(uses, index, bit, ref.tensor, slot, &is_used)) return 0;
    }
    if (uses->finding != NULL && (op->releases >> bit & 1) && !is_used) {
      return report(uses, SLUICE_HAZARD_DOUBLE_RELEASE, index, NOBODY, ref.tensor, first);
    }
  }
  return 1;
}

static void walk(uses_t* uses) {
  for (int32_t i = 0; i < uses->t->num_ops; ++i) {
    if (!note_op(uses, i)) return;
  }
  for (int32_t tensor = 0; tensor < SLUICE_T_COUNT; ++tensor) {
    for (int32_t slot = 0; slot < uses->t->ring[tensor]; ++slot) {
      int32_t open = uses->open[uses->first_slot[tensor] + slot];
      if (open != NOBODY && !uses->close(uses, tensor, slot, open)) return;
    }
  }
}

/* Returns an access of the use that follows this one; NOBODY: it is one of the last. */
static const access_t* successor(const uses_t* uses, int32_t newest, const access_t* access) {
  for (int32_t a = newest; a != NOBODY; a = uses->accesses[a].next) {
    const access_t* other = &uses->accesses[a];
    if (other->op > access->op && sluice_is_before(uses->t, uses->before, access->op, other->op)) return other;
  }
  return NULL;
}

/* extra: bytes after the lists, at *out_extra. */
static sluice_status_t take_uses(const sluice_template_t* t, sluice_allocator_t* memory, uint64_t extra, uses_t* uses,
                                 char** out_extra, uint64_t* out_bytes) {
  int32_t num_slots = 0;
  for (int32_t tensor = 0; tensor < SLUICE_T_COUNT; ++tensor) {
    uses->first_slot[tensor] = num_slots;
    num_slots += t->ring[tensor];
  }
  uint64_t list = sluice_template_count_touches(t) * sizeof(access_t);
  uint64_t open = ((uint64_t)num_slots + 1) * sizeof(int32_t);
  *out_bytes = extra + list + open;
  char* block = sluice_alloc(memory, *out_bytes, "uses of slots");
  if (block == NULL) return sluice_alloc_status();
  *out_extra = block;
  uses->accesses = (access_t*)(void*)(block + extra);
  uses->open = (int32_t*)(void*)(block + extra + list);
  for (int32_t s = 0; s < num_slots; ++s) uses->open[s] = NOBODY;
  uses->t = t;
  return SLUICE_OK;
}

/* ---- deriving ---- */

static int collect(uses_t* uses, int32_t tensor, int32_t slot, int32_t newest) {
  (void)tensor, (void)slot;
  for (int32_t a = newest; a != NOBODY; a = uses->accesses[a].next) {
    const access_t* access = &uses->accesses[a];
    if (successor(uses, newest, access) == NULL) {
      uses->wanted[access->op] |= access->bits & -access->bits; /* in place: by the read */
    } else {
      uses->others[access->op] |= access->bits;
    }
  }
  return 1;
}

sluice_status_t sluice_template_mark_releases(sluice_template_t* t) {
  sluice_allocator_t* memory = sluice_process_allocator();
  uint64_t count = (uint64_t)t->num_ops + 1, bytes = 0;
  uint64_t order = count * sizeof(sluice_before_t), masks = count * sizeof(int32_t);
  uses_t uses = {.close = collect};
  char* block = NULL;
  SLUICE_TRY(take_uses(t, memory, order + 2 * masks, &uses, &block, &bytes));
  memset(block, 0, order + 2 * masks);
  sluice_before_t* before = (sluice_before_t*)(void*)block;
  uses.wanted = (int32_t*)(void*)(block + order);
  uses.others = (int32_t*)(void*)(block + order + masks);
  uses.before = before;
  sluice_order_all(t, before);
  walk(&uses);
  int fits = 1; /* an access of a whole ring releases all of it or nothing */
  for (int32_t i = 0; i < t->num_ops; ++i) {
    fits &= (uses.wanted[i] & uses.others[i]) == 0;
    t->ops[i].releases = uses.wanted[i];
  }
  sluice_free(memory, block, bytes);
  if (fits) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INTERNAL, "schedule: an op is the last of some slots of a ring and not of others");
}

/* ---- proving ---- */

static int prove(uses_t* uses, int32_t tensor, int32_t slot, int32_t newest) {
  const sluice_op_t* ops = uses->t->ops;
  int32_t leaks = NOBODY;
  for (int32_t a = newest; a != NOBODY; a = uses->accesses[a].next) {
    const access_t* access = &uses->accesses[a];
    const access_t* next = successor(uses, newest, access);
    int32_t marks = ops[access->op].releases & access->bits;
    if ((marks & (marks - 1)) != 0) {
      return report(uses, SLUICE_HAZARD_DOUBLE_RELEASE, access->op, access->op, tensor, slot);
    }
    if (marks != 0 && next != NULL) {
      int again = (ops[next->op].releases & next->bits) != 0;
      return report(uses, again ? SLUICE_HAZARD_DOUBLE_RELEASE : SLUICE_HAZARD_USE_AFTER_RELEASE, next->op, access->op,
                    tensor, slot);
    }
    if (marks == 0 && next == NULL) leaks = access->op;
  }
  return leaks == NOBODY ? 1 : report(uses, SLUICE_HAZARD_NOT_RELEASED, leaks, NOBODY, tensor, slot);
}

sluice_status_t sluice_releases_check(const sluice_template_t* t, const sluice_before_t* before,
                                      sluice_allocator_t* memory, sluice_finding_t* out_finding) {
  uses_t uses = {.before = before, .close = prove, .finding = out_finding};
  char* block = NULL;
  uint64_t bytes = 0;
  SLUICE_TRY(take_uses(t, memory, 0, &uses, &block, &bytes));
  walk(&uses);
  sluice_free(memory, block, bytes);
  return SLUICE_OK;
}
