// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/pass/slot_poisoner.h"

#include <stdatomic.h>
#include <string.h>

#include "backend/moe/pass/lanes.h"

#define NONE (-1)

/* A use of a slot. It ends with num_releases ops that release the slot, on lanes that need not wait for each other. */
typedef struct use_s {
  int32_t num_releases;
  int32_t next; /* next use of the same slot */
} use_t;

typedef struct slot_s {
  int32_t first, last; /* uses */
  int32_t current;     /* advanced by the last op that releases the slot in this use */
  int32_t num_open;    /* while uses are collected: releases of the newest so far */
  _Atomic int32_t num_done;
  int32_t by_lane[SLUICE_NUM_LANES]; /* where lanes are streams: the last op of the lane that released it, or NONE */
} slot_t;

struct sluice_slot_poisoner_s {
  uint64_t bytes;
  int32_t first_slot[SLUICE_T_COUNT];
  int32_t num_uses;
  slot_t* slots;
  use_t* uses;
  int32_t* waits; /* where lanes are streams: the waits of all submitted ops, concatenated */
  int32_t num_waits;
};

/* Slots of a reference: [*out_first, the result). */
static int32_t slots_of(const sluice_template_t* t, sluice_slot_ref_t ref, int32_t* out_first) {
  *out_first = ref.slot < 0 ? 0 : ref.slot;
  return ref.slot < 0 ? t->ring[ref.tensor] : ref.slot + 1;
}

typedef void (*visit_fn_t)(void* user, int32_t tensor, int32_t slot);

/* Visits each slot that the op releases once: a proved template marks no slot twice. */
static void visit_releases(const sluice_template_t* t, const sluice_op_t* op, visit_fn_t visit, void* user) {
  for (int32_t bit = 0; op->releases >> bit != 0; ++bit) {
    if (!(op->releases >> bit & 1)) continue;
    const int is_read = bit < SLUICE_OP_MAX_ACCESSES;
    const sluice_slot_ref_t ref = is_read ? op->reads[bit] : op->writes[bit - SLUICE_OP_MAX_ACCESSES];
    int32_t first = 0;
    const int32_t end = slots_of(t, ref, &first);
    for (int32_t s = first; s < end; ++s) visit(user, ref.tensor, s);
  }
}

static void count_one(void* user, int32_t tensor, int32_t slot) {
  (void)tensor, (void)slot;
  ++*(uint64_t*)user;
}

/* An upper bound of the number of uses that end. */
static uint64_t count_releases(const sluice_template_t* t) {
  uint64_t count = 0;
  for (int32_t i = 0; i < t->num_ops; ++i) visit_releases(t, &t->ops[i], count_one, &count);
  return count;
}

static int32_t count_slots(const sluice_template_t* t) {
  int32_t count = 0;
  for (int32_t tensor = 0; tensor < SLUICE_T_COUNT; ++tensor) count += t->ring[tensor];
  return count;
}

/* ---- uses, in program order ---- */

static void close_use(sluice_slot_poisoner_t* r, slot_t* slot) {
  if (slot->num_open == 0) return;
  r->uses[r->num_uses] = (use_t){slot->num_open, NONE};
  if (slot->last == NONE) {
    slot->first = slot->current = r->num_uses;
  } else {
    r->uses[slot->last].next = r->num_uses;
  }
  slot->last = r->num_uses++;
  slot->num_open = 0;
}

static void count_release(void* user, int32_t tensor, int32_t slot) {
  sluice_slot_poisoner_t* r = user;
  ++r->slots[r->first_slot[tensor] + slot].num_open;
}

static void collect(sluice_slot_poisoner_t* r, const sluice_template_t* t, int32_t num_slots) {
  for (int32_t i = 0; i < t->num_ops; ++i) {
    const sluice_op_t* op = &t->ops[i];
    for (int32_t w = 0; w < op->num_writes; ++w) { /* a use begins with a write of an op that does not read the slot */
      int32_t first = 0;
      const int32_t tensor = op->writes[w].tensor, end = slots_of(t, op->writes[w], &first);
      for (int32_t s = first; s < end; ++s) {
        if (!sluice_slot_is_among(op->reads, op->num_reads, tensor, s))
          close_use(r, &r->slots[r->first_slot[tensor] + s]);
      }
    }
    visit_releases(t, op, count_release, r);
  }
  for (int32_t s = 0; s < num_slots; ++s) close_use(r, &r->slots[s]);
}

static void forget_lanes(slot_t* slot) {
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) slot->by_lane[lane] = NONE;
}

sluice_status_t sluice_slot_poisoner_begin(sluice_pass_t* pass) {
  const sluice_template_t* t = pass->schedule;
  pass->poisoner = NULL;
  if (!pass->context->poison) return SLUICE_OK;
  const uint64_t slots = (uint64_t)count_slots(t) * sizeof(slot_t);
  const uint64_t uses = count_releases(t) * sizeof(use_t);
  const uint64_t waits = ((uint64_t)t->num_deps + (uint64_t)t->num_ops * SLUICE_NUM_LANES) * sizeof(int32_t);
  const uint64_t bytes = sizeof(sluice_slot_poisoner_t) + slots + uses + waits;
  char* block = sluice_alloc_zeroed(sluice_process_allocator(), bytes, "released slots");
  if (block == NULL) return sluice_alloc_status();
  sluice_slot_poisoner_t* r = (sluice_slot_poisoner_t*)(void*)block;
  r->bytes = bytes;
  r->slots = (slot_t*)(void*)(block + sizeof *r);
  r->uses = (use_t*)(void*)(block + sizeof *r + slots);
  r->waits = (int32_t*)(void*)(block + sizeof *r + slots + uses);
  int32_t count = 0;
  for (int32_t tensor = 0; tensor < SLUICE_T_COUNT; ++tensor) {
    r->first_slot[tensor] = count;
    count += t->ring[tensor];
  }
  for (int32_t s = 0; s < count; ++s) {
    r->slots[s].first = r->slots[s].last = r->slots[s].current = NONE;
    forget_lanes(&r->slots[s]);
  }
  collect(r, t, count);
  pass->poisoner = r;
  return SLUICE_OK;
}

void sluice_slot_poisoner_end(sluice_pass_t* pass) {
  if (pass->poisoner == NULL) return;
  sluice_free(sluice_process_allocator(), pass->poisoner, pass->poisoner->bytes);
  pass->poisoner = NULL;
}

/* ---- poisoning ---- */

/* An op that has ended, or that is being submitted. */
typedef struct releasing_s {
  sluice_pass_t* pass;
  const sluice_op_t* op;
  int32_t index;
  int32_t last[SLUICE_NUM_LANES]; /* the last op of each lane that released one of the same slots, or NONE */
  sluice_status_t status;         /* the first failure */
} releasing_t;

static slot_t* slot_at(const sluice_slot_poisoner_t* r, int32_t tensor, int32_t slot) {
  return &r->slots[r->first_slot[tensor] + slot];
}

/* Fills on the lane of the op, so that every op that waits for its end waits for the fill too. */
static void fill_bytes(releasing_t* by, void* to, uint64_t bytes) {
  sluice_context_t* context = by->pass->context;
  if (by->status != SLUICE_OK) return;
  by->status = context->rows->fill(context, sluice_pass_stream(by->pass, by->op), to, 0xff, bytes);
}

/* Fills the rows of one chunk, expert by expert, in a tensor that orders the rows of all chunks by expert. */
static void fill_chunk(releasing_t* by, int32_t tensor, int32_t chunk) {
  const sluice_binding_t* b = &by->pass->binding;
  const sluice_slots_t* slots = &by->pass->slots[tensor];
  for (int32_t e = 0; e < b->num_local; ++e) {
    const int64_t at = (int64_t)chunk * b->num_local + e;
    fill_bytes(by, slots->data + (uint64_t)b->first_in_pass[at] * slots->row_bytes,
               (uint64_t)b->rows_of_expert[at] * slots->row_bytes);
  }
}

static void fill(releasing_t* by, int32_t tensor, int32_t slot) {
  const sluice_pass_t* pass = by->pass;
  const sluice_slots_t* slots = &pass->slots[tensor];
  const sluice_arena_t* arena = &pass->memory->slots;
  const int32_t ring = pass->schedule->ring[tensor];
  if (slots->bytes == 0 || slots->data < arena->data || slots->data >= arena->data + arena->capacity) return;
  if (slots->layout == SLUICE_LAYOUT_EXPERT_MAJOR) {
    for (int32_t chunk = 0; chunk < pass->binding.num_chunks; ++chunk) {
      const sluice_slot_ref_t home = sluice_template_home(pass->schedule, tensor, chunk);
      if (home.tensor == tensor && home.slot == slot) fill_chunk(by, tensor, chunk);
    }
    return;
  }
  const uint64_t end = slot + 1 < ring ? slots->first[slot + 1] : slots->bytes;
  fill_bytes(by, slots->data + slots->first[slot], end - slots->first[slot]);
}

static void release(void* user, int32_t tensor, int32_t s) {
  releasing_t* by = user;
  sluice_slot_poisoner_t* r = by->pass->poisoner;
  slot_t* slot = slot_at(r, tensor, s);
  const use_t* use = &r->uses[slot->current]; /* current does not advance before this op is counted */
  const int are_streams = sluice_pass_lanes(by->pass)->are_streams;
  if (are_streams) slot->by_lane[by->op->lane] = by->index;
  if (atomic_fetch_add(&slot->num_done, 1) + 1 < use->num_releases) return;
  fill(by, tensor, s);
  if (are_streams) forget_lanes(slot);
  atomic_store(&slot->num_done, 0);
  slot->current = use->next;
}

sluice_status_t sluice_slot_poisoner_release(sluice_pass_t* pass, int32_t index) {
  if (pass->poisoner == NULL) return SLUICE_OK;
  releasing_t by = {.pass = pass, .op = &pass->schedule->ops[index], .index = index};
  visit_releases(pass->schedule, by.op, release, &by);
  return by.status;
}

/* ---- additional waits of the last op that releases a slot ---- */

static void note_others(void* user, int32_t tensor, int32_t s) {
  releasing_t* by = user;
  const sluice_slot_poisoner_t* r = by->pass->poisoner;
  const slot_t* slot = slot_at(r, tensor, s);
  if (slot->num_done + 1 < r->uses[slot->current].num_releases) return;
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) {
    if (slot->by_lane[lane] > by->last[lane]) by->last[lane] = slot->by_lane[lane];
  }
}

const int32_t* sluice_slot_poisoner_waits(sluice_pass_t* pass, int32_t index, int32_t* out_count) {
  sluice_slot_poisoner_t* r = pass->poisoner;
  const sluice_op_t* op = &pass->schedule->ops[index];
  const int32_t* deps = pass->schedule->deps + op->first_dep;
  *out_count = op->num_deps;
  if (r == NULL || !sluice_pass_lanes(pass)->are_streams) return deps;
  releasing_t by = {.pass = pass, .op = op, .index = index};
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) by.last[lane] = NONE;
  visit_releases(pass->schedule, op, note_others, &by);
  int32_t* waits = r->waits + r->num_waits;
  memcpy(waits, deps, (size_t)op->num_deps * sizeof *deps);
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) {
    if (lane != op->lane && by.last[lane] != NONE) waits[(*out_count)++] = by.last[lane];
  }
  r->num_waits += *out_count;
  return waits;
}
