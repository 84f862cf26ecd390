// SPDX-License-Identifier: Apache-2.0
#include "backend/schedule/check/check.h"

#include <string.h>

#include "backend/schedule/check/finding.h"
#include "backend/schedule/check/releases.h"

#define NOBODY    (-1)
#define NO_CHUNK  (-2)
#define NO_TENSOR (-1)

/* The state of one slot at a point of program order. */
typedef struct slot_state_s {
  int32_t writer;       /* op, or NOBODY */
  int32_t chunk;        /* chunk whose rows it holds; NO_CHUNK: nothing, or the pass's input if is_input */
  int32_t tensor;       /* tensor of its rows, since tensors share slots; NO_TENSOR: no op may read them */
  int32_t first_reader; /* since that write; head of a list in `reads` */
} slot_state_t;

typedef struct reader_s {
  int32_t op;
  int32_t next;
} reader_t;

typedef struct checker_s {
  const sluice_template_t* t;
  sluice_before_t* before;
  slot_state_t* slots; /* of all tensors, one ring after the other */
  int32_t first_slot[SLUICE_T_COUNT + 1];
  reader_t* readers;
  int32_t num_readers;
  sluice_finding_t* finding;
} checker_t;

static int report(checker_t* c, int32_t hazard, int32_t op, int32_t other, int32_t tensor, int32_t slot) {
  int32_t chunk = op >= 0 ? c->t->ops[op].chunk : NOBODY;
  *c->finding = (sluice_finding_t){hazard, op, other, tensor, slot, chunk};
  return 0;
}

/* ---- form ---- */

static int ref_is_valid(const sluice_template_t* t, sluice_slot_ref_t ref) {
  return ref.tensor >= 0 && ref.tensor < SLUICE_T_COUNT && ref.slot >= -1 && ref.slot < t->ring[ref.tensor];
}

/* Checks that a group is two adjacent exchanges on one lane. */
static int group_is_valid(const sluice_template_t* t, int32_t index) {
  const sluice_op_t* op = &t->ops[index];
  if (op->group == SLUICE_GROUP_NONE) return 1;
  if (op->group != SLUICE_GROUP_OPENS && op->group != SLUICE_GROUP_CLOSES) return 0;
  const int32_t other = op->group == SLUICE_GROUP_OPENS ? index + 1 : index - 1;
  if (other < 0 || other >= t->num_ops || t->ops[other].group + op->group != SLUICE_GROUP_OPENS + SLUICE_GROUP_CLOSES)
    return 0;
  return sluice_op_is_exchange(op->kind) && sluice_op_is_exchange(t->ops[other].kind) && t->ops[other].lane == op->lane;
}

static int op_is_valid(const sluice_template_t* t, const sluice_op_t* op) {
  if (op->kind < 0 || op->kind >= SLUICE_OP_COUNT || op->lane >= SLUICE_NUM_LANES) return 0;
  if (op->chunk < -1 || op->chunk >= t->spec.num_chunks) return 0;
  if (!group_is_valid(t, (int32_t)(op - t->ops))) return 0;
  if (op->num_reads < 0 || op->num_reads > SLUICE_OP_MAX_ACCESSES) return 0;
  if (op->num_writes < 0 || op->num_writes > SLUICE_OP_MAX_ACCESSES) return 0;
  const int32_t reads = SLUICE_RELEASES_READ(op->num_reads) - 1;
  const int32_t writes = SLUICE_RELEASES_WRITE(op->num_writes) - SLUICE_RELEASES_WRITE(0);
  if ((op->releases & ~(reads | writes)) != 0) return 0;
  if (op->first_dep < 0 || op->num_deps < 0 || op->first_dep > t->num_deps - op->num_deps) return 0;
  for (int32_t i = 0; i < op->num_reads; ++i) {
    if (!ref_is_valid(t, op->reads[i])) return 0;
  }
  for (int32_t i = 0; i < op->num_writes; ++i) {
    if (!ref_is_valid(t, op->writes[i])) return 0;
  }
  return 1;
}

static int declares(const sluice_slot_ref_t* refs, int32_t count, sluice_slot_ref_t wanted) {
  for (int32_t i = 0; i < count; ++i) {
    if (refs[i].tensor == wanted.tensor && (refs[i].slot == wanted.slot || refs[i].slot == -1)) return 1;
  }
  return 0;
}

/* Returns whether the op's accesses include `tensor` at the home of its chunk, or of every chunk. */
static int declares_tensor(const sluice_template_t* t, const sluice_op_t* op, int32_t tensor, int writes) {
  const sluice_slot_ref_t* refs = writes ? op->writes : op->reads;
  int32_t count = writes ? op->num_writes : op->num_reads;
  int32_t first = op->chunk < 0 ? 0 : op->chunk, end = op->chunk < 0 ? t->spec.num_chunks : op->chunk + 1;
  for (int32_t i = first; i < end; ++i) {
    if (!declares(refs, count, sluice_template_home(t, tensor, i))) return 0;
  }
  return 1;
}

/* Returns the tensor whose rows a copy moves between the device and a host buffer. */
static int32_t copied_tensor(const sluice_template_t* t, const sluice_op_t* op) {
  const int32_t host = op->kind == SLUICE_OP_COPY_OUT ? op->writes[0].tensor : op->reads[0].tensor;
  return host == SLUICE_T_HOST_DI ? SLUICE_T_DI : sluice_pre_activation_of(&t->spec);
}

/* Checks that a copy moves one tensor of an offloaded chunk between its home and its host buffer. */
static int copy_is_valid(const sluice_template_t* t, const sluice_op_t* op) {
  int out = op->kind == SLUICE_OP_COPY_OUT;
  int32_t pre_activation = sluice_pre_activation_of(&t->spec);
  if (op->chunk < 0) return 0;
  int moves_di = sluice_restore_is_offloaded(t->spec.restore_input[op->chunk]) &&
                 declares_tensor(t, op, SLUICE_T_DI, !out) && declares_tensor(t, op, SLUICE_T_HOST_DI, out);
  int moves_m = sluice_restore_is_offloaded(t->spec.restore_pre_activation[op->chunk]) &&
                declares_tensor(t, op, pre_activation, !out) && declares_tensor(t, op, SLUICE_T_HOST_M, out);
  return moves_di || moves_m;
}

/* Checks that the chunks of an op of all chunks have separate slots of T_LOW, since the op writes T_LOW of each and
 * reads it again before it ends. */
static int check_low_rank(checker_t* c, int32_t index) {
  const sluice_op_t* op = &c->t->ops[index];
  if (op->chunk >= 0) return 1;
  for (int32_t i = 1; i < c->t->spec.num_chunks; ++i) {
    const sluice_slot_ref_t home = sluice_template_home(c->t, SLUICE_T_LOW, i);
    for (int32_t j = 0; j < i; ++j) {
      const sluice_slot_ref_t other = sluice_template_home(c->t, SLUICE_T_LOW, j);
      if (home.tensor == other.tensor && home.slot == other.slot)
        return report(c, SLUICE_HAZARD_OTHER_CHUNK, index, NOBODY, home.tensor, home.slot);
    }
  }
  return 1;
}

static int check_rules(checker_t* c, int32_t index) {
  const sluice_template_t* t = c->t;
  const sluice_op_t* op = &t->ops[index];
  if (!(sluice_op_row(op->kind)->passes >> t->spec.direction & 1)) {
    return report(c, SLUICE_HAZARD_WRONG_PASS, index, NOBODY, NOBODY, NOBODY);
  }
  sluice_op_rule_t rule = sluice_op_rule(op->kind, &t->spec);
  if (op->lane != rule.lane) return report(c, SLUICE_HAZARD_WRONG_LANE, index, NOBODY, NOBODY, NOBODY);
  if (sluice_op_row(op->kind)->is_copy && !copy_is_valid(t, op))
    return report(c, SLUICE_HAZARD_MISSING_ACCESS, index, NOBODY, NOBODY, NOBODY);
  for (int32_t i = 0; i < rule.num_reads; ++i) {
    if (!declares_tensor(t, op, rule.reads[i], 0)) {
      return report(c, SLUICE_HAZARD_MISSING_ACCESS, index, NOBODY, rule.reads[i], NOBODY);
    }
  }
  for (int32_t i = 0; i < rule.num_writes; ++i) {
    if (!declares_tensor(t, op, rule.writes[i], 1)) {
      return report(c, SLUICE_HAZARD_MISSING_ACCESS, index, NOBODY, rule.writes[i], NOBODY);
    }
    if (rule.writes[i] == SLUICE_T_LOW && !check_low_rank(c, index)) return 0;
  }
  return 1;
}

/* ---- happens-before ---- */

static int order_op(checker_t* c, int32_t index, int32_t* last_of_lane) {
  int32_t dep = NOBODY;
  if (sluice_order_op(c->t, index, c->before, last_of_lane, &dep)) return 1;
  if (dep < 0 || dep >= c->t->num_ops) return report(c, SLUICE_HAZARD_FORM, index, NOBODY, NOBODY, NOBODY);
  return report(c, SLUICE_HAZARD_DEADLOCK, index, dep, NOBODY, NOBODY);
}

static int is_before(const checker_t* c, int32_t earlier, int32_t later) {
  return sluice_is_before(c->t, c->before, earlier, later);
}

/* ---- slots ---- */

/* Returns whether a pass may read the tensor without having written it: rows that forward left for backward, and
 * results of parts that were called before this one. */
static int is_input(const sluice_template_spec_t* spec, int32_t tensor) {
  int kept = tensor == SLUICE_T_KEPT_DI || tensor == SLUICE_T_KEPT_M;
  int lacks_dispatch = spec->only != 0 && !(spec->only & SLUICE_PART_DISPATCH);
  int lacks_experts = spec->only != 0 && !(spec->only & SLUICE_PART_EXPERTS);
  if (spec->direction == SLUICE_FORWARD) {
    if (lacks_dispatch && (tensor == SLUICE_T_DI || tensor == SLUICE_T_KEPT_DI)) return 1;
    return lacks_experts && tensor == SLUICE_T_DO;
  }
  if (kept || tensor == SLUICE_T_HOST_DI || tensor == SLUICE_T_HOST_M) return 1;
  if (lacks_dispatch && (tensor == SLUICE_T_DDO || tensor == SLUICE_T_ROUTE)) return 1;
  if (lacks_experts && (tensor == SLUICE_T_DDI || tensor == SLUICE_T_DGATE)) return 1;
  return !spec->dgrad; /* wgrad alone reads what dgrad left */
}

static slot_state_t* state_of(checker_t* c, int32_t tensor, int32_t slot) {
  return &c->slots[c->first_slot[tensor] + slot];
}

static int check_read(checker_t* c, int32_t index, int32_t tensor, int32_t slot) {
  slot_state_t* s = state_of(c, tensor, slot);
  if (s->writer >= 0 && !is_before(c, s->writer, index)) {
    return report(c, SLUICE_HAZARD_READ_AFTER_WRITE, index, s->writer, tensor, slot);
  }
  c->readers[c->num_readers] = (reader_t){index, s->first_reader};
  s->first_reader = c->num_readers++;
  return 1;
}

static int check_write(checker_t* c, int32_t index, int32_t tensor, int32_t slot) {
  slot_state_t* s = state_of(c, tensor, slot);
  for (int32_t r = s->first_reader; r >= 0; r = c->readers[r].next) {
    int32_t reader = c->readers[r].op;
    if (reader != index && !is_before(c, reader, index)) {
      return report(c, SLUICE_HAZARD_WRITE_AFTER_READ, index, reader, tensor, slot);
    }
  }
  if (s->writer >= 0 && s->writer != index && !is_before(c, s->writer, index)) {
    return report(c, SLUICE_HAZARD_WRITE_AFTER_WRITE, index, s->writer, tensor, slot);
  }
  s->writer = index;
  s->chunk = c->t->ops[index].chunk;
  s->first_reader = NOBODY;
  return 1;
}

static int for_slots(checker_t* c, int32_t index, sluice_slot_ref_t ref,
                     int (*check)(checker_t*, int32_t, int32_t, int32_t)) {
  if (ref.slot >= 0) return check(c, index, ref.tensor, ref.slot);
  for (int32_t s = 0; s < c->t->ring[ref.tensor]; ++s) {
    if (!check(c, index, ref.tensor, s)) return 0;
  }
  return 1;
}

/* Returns whether rows that existed before the pass belong to `chunk`: a kept or offloaded slot belongs to the chunk
 * with its number, any other slot to the only chunk with that home. */
static int is_own_place(const sluice_template_t* t, int32_t tensor, int32_t chunk) {
  sluice_slot_ref_t home = sluice_template_home(t, tensor, chunk);
  int numbered = home.tensor == SLUICE_T_KEPT_DI || home.tensor == SLUICE_T_KEPT_M;
  if (numbered) return home.slot == chunk;
  for (int32_t i = 0; i < t->spec.num_chunks; ++i) {
    sluice_slot_ref_t other = sluice_template_home(t, tensor, i);
    if (i != chunk && other.tensor == home.tensor && other.slot == home.slot) return 0;
  }
  return 1;
}

/* Checks that the home of `chunk` holds that chunk's rows. */
static int check_holds(checker_t* c, int32_t index, int32_t tensor, int32_t chunk) {
  sluice_slot_ref_t home = sluice_template_home(c->t, tensor, chunk);
  const slot_state_t* s = state_of(c, home.tensor, home.slot);
  if (s->chunk == chunk) {
    return s->tensor == tensor || report(c, SLUICE_HAZARD_OTHER_TENSOR, index, s->writer, home.tensor, home.slot);
  }
  if (s->chunk != NO_CHUNK) return report(c, SLUICE_HAZARD_OTHER_CHUNK, index, s->writer, home.tensor, home.slot);
  if (!is_input(&c->t->spec, home.tensor)) {
    return report(c, SLUICE_HAZARD_UNDEFINED, index, NOBODY, home.tensor, home.slot);
  }
  if (is_own_place(c->t, tensor, chunk)) return 1;
  return report(c, SLUICE_HAZARD_OTHER_CHUNK, index, NOBODY, home.tensor, home.slot);
}

static int check_defined(checker_t* c, int32_t index) {
  const sluice_op_t* op = &c->t->ops[index];
  sluice_op_rule_t rule = sluice_op_rule(op->kind, &c->t->spec);
  int32_t first = op->chunk < 0 ? 0 : op->chunk, end = op->chunk < 0 ? c->t->spec.num_chunks : op->chunk + 1;
  for (int32_t r = 0; r < rule.num_reads; ++r) {
    for (int32_t i = first; i < end; ++i) {
      if (!check_holds(c, index, rule.reads[r], i)) return 0;
    }
  }
  if (sluice_op_row(op->kind)->is_copy) {
    const slot_state_t* s = state_of(c, op->reads[0].tensor, op->reads[0].slot);
    if (s->chunk == op->chunk &&
        s->tensor != copied_tensor(c->t, op)) { /* for a copy out; a copy in reads its own buffer */
      return report(c, SLUICE_HAZARD_OTHER_TENSOR, index, s->writer, op->reads[0].tensor, op->reads[0].slot);
    }
    int came = s->chunk == NO_CHUNK && is_input(&c->t->spec, op->reads[0].tensor) && op->reads[0].slot == op->chunk;
    if (s->chunk != op->chunk && !came) {
      return report(c, SLUICE_HAZARD_OTHER_CHUNK, index, s->writer, op->reads[0].tensor, op->reads[0].slot);
    }
  }
  return 1;
}

/* Marks the slot as scratch until the op's row defines its tensor; a tensor that the op updates in place stays. */
static int forget_tensor(checker_t* c, int32_t index, int32_t tensor, int32_t slot) {
  const sluice_op_t* op = &c->t->ops[index];
  if (!sluice_slot_is_among(op->reads, op->num_reads, tensor, slot)) state_of(c, tensor, slot)->tensor = NO_TENSOR;
  return 1;
}

/* Records the tensor of the rows that the op has written. If several tensors share a slot, it is the last one in the
 * op's row: an activation in place leaves activated rows. */
static void note_tensors(checker_t* c, int32_t index) {
  const sluice_op_t* op = &c->t->ops[index];
  const sluice_op_rule_t rule = sluice_op_rule(op->kind, &c->t->spec);
  const int32_t first = op->chunk < 0 ? 0 : op->chunk, end = op->chunk < 0 ? c->t->spec.num_chunks : op->chunk + 1;
  for (int32_t i = 0; i < op->num_writes; ++i) (void)for_slots(c, index, op->writes[i], forget_tensor);
  for (int32_t w = 0; w < rule.num_writes; ++w) {
    for (int32_t i = first; i < end; ++i) {
      const sluice_slot_ref_t home = sluice_template_home(c->t, rule.writes[w], i);
      if (home.slot < c->t->ring[home.tensor]) state_of(c, home.tensor, home.slot)->tensor = rule.writes[w];
    }
  }
  if (!sluice_op_row(op->kind)->is_copy) return;
  const sluice_slot_ref_t to = op->writes[0];
  state_of(c, to.tensor, to.slot)->tensor = op->kind == SLUICE_OP_COPY_OUT ? to.tensor : copied_tensor(c->t, op);
}

static int check_accesses(checker_t* c, int32_t index) {
  const sluice_op_t* op = &c->t->ops[index];
  for (int32_t i = 0; i < op->num_reads; ++i) {
    if (!for_slots(c, index, op->reads[i], check_read)) return 0;
  }
  if (!check_defined(c, index)) return 0;
  for (int32_t i = 0; i < op->num_writes; ++i) {
    if (!for_slots(c, index, op->writes[i], check_write)) return 0;
  }
  note_tensors(c, index);
  return 1;
}

/* ---- results of the pass ---- */

/* written_by: the chunk of the op that wrote it. */
static int leaves_written(checker_t* c, int32_t tensor, int32_t chunk, int32_t written_by) {
  sluice_slot_ref_t home = sluice_template_home(c->t, tensor, chunk);
  if (c->t->ring[home.tensor] == 0 || state_of(c, home.tensor, home.slot)->chunk != written_by ||
      state_of(c, home.tensor, home.slot)->tensor != tensor) {
    *c->finding = (sluice_finding_t){SLUICE_HAZARD_LOST, NOBODY, NOBODY, home.tensor, home.slot, chunk};
    return 0;
  }
  return 1;
}

static int leaves(checker_t* c, int32_t tensor, int32_t chunk) { return leaves_written(c, tensor, chunk, chunk); }

/* Tokens are written chunk by chunk, or by one op for all chunks. */
static int leaves_tokens(checker_t* c, int32_t chunk) {
  return leaves_written(c, SLUICE_T_OUT, chunk, c->t->spec.chunks_by_experts ? -1 : chunk);
}

/* Checks the inputs of a separate wgrad pass: dgrad leaves them, or forward did. */
static int leaves_gradients(checker_t* c, int32_t chunk) {
  static const int32_t tensors[] = {SLUICE_T_DI, SLUICE_T_DDO, SLUICE_T_ROUTE, SLUICE_T_DACT, SLUICE_T_DM};
  for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; ++i) {
    int came = tensors[i] == SLUICE_T_DI && sluice_restore_is_kept(c->t->spec.restore_input[chunk]);
    if (!came && !leaves(c, tensors[i], chunk)) return 0;
  }
  return 1;
}

static int check_results(checker_t* c) {
  const sluice_template_spec_t* spec = &c->t->spec;
  int returns = spec->only == 0 || (spec->only & SLUICE_PART_COMBINE);
  int whole = spec->only == 0 && spec->direction == SLUICE_FORWARD && spec->keep;
  int32_t pre_activation = sluice_pre_activation_of(spec);
  for (int32_t i = 0; i < spec->num_chunks; ++i) {
    if (returns && (spec->direction == SLUICE_FORWARD || spec->dgrad) && !leaves_tokens(c, i)) return 0;
    int later = spec->direction == SLUICE_BACKWARD && spec->wgrad == SLUICE_WGRAD_CALL_LATER && spec->only == 0;
    if (later && !leaves_gradients(c, i)) return 0;
    if (!whole) continue;
    if (sluice_restore_is_kept(spec->restore_input[i]) && !leaves(c, SLUICE_T_DI, i)) return 0;
    if (sluice_restore_is_kept(spec->restore_pre_activation[i]) && !leaves(c, pre_activation, i)) return 0;
    if (sluice_restore_is_offloaded(spec->restore_input[i]) && !leaves(c, SLUICE_T_HOST_DI, i)) return 0;
    if (sluice_restore_is_offloaded(spec->restore_pre_activation[i]) && !leaves(c, SLUICE_T_HOST_M, i)) return 0;
  }
  return 1;
}

/* ---- whole templates ---- */

static int homes_are_valid(const sluice_template_t* t) {
  for (int32_t tensor = 0; tensor < SLUICE_T_COUNT; ++tensor) {
    if (t->ring[tensor] < 0 || t->ring[tensor] > SLUICE_MAX_CHUNKS) return 0;
    for (int32_t i = 0; i < t->spec.num_chunks; ++i) {
      sluice_slot_ref_t home = sluice_template_home(t, tensor, i);
      if (home.tensor < 0 || home.tensor >= SLUICE_T_COUNT || home.slot < 0) return 0;
      if (t->ring[home.tensor] > 0 && home.slot >= t->ring[home.tensor]) return 0;
    }
  }
  return 1;
}

static void walk(checker_t* c) {
  const sluice_template_t* t = c->t;
  int32_t last_of_lane[SLUICE_NUM_LANES];
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) last_of_lane[lane] = NOBODY;
  for (int32_t i = 0; i < t->num_ops; ++i) {
    if (!op_is_valid(t, &t->ops[i])) {
      (void)report(c, SLUICE_HAZARD_FORM, i, NOBODY, NOBODY, NOBODY);
      return;
    }
    if (!check_rules(c, i) || !order_op(c, i, last_of_lane) || !check_accesses(c, i)) return;
  }
  (void)check_results(c);
}

static int32_t count_slots(const sluice_template_t* t, checker_t* c) {
  int32_t count = 0;
  for (int32_t tensor = 0; tensor < SLUICE_T_COUNT; ++tensor) {
    c->first_slot[tensor] = count;
    count += t->ring[tensor] > 0 ? t->ring[tensor] : 1;
  }
  return count;
}

sluice_status_t sluice_schedule_check(const sluice_template_t* t, sluice_allocator_t* memory,
                                      sluice_finding_t* out_finding) {
  *out_finding = (sluice_finding_t){SLUICE_HAZARD_NONE, NOBODY, NOBODY, NOBODY, NOBODY, NOBODY};
  checker_t c = {.t = t, .finding = out_finding};
  if (t->spec.num_chunks < 1 || t->spec.num_chunks > SLUICE_MAX_CHUNKS || t->num_ops < 0 || !homes_are_valid(t)) {
    out_finding->hazard = SLUICE_HAZARD_FORM;
    return SLUICE_OK;
  }
  int32_t num_slots = count_slots(t, &c);
  uint64_t max_readers = sluice_template_count_touches(t);
  uint64_t before_bytes = ((uint64_t)t->num_ops + 1) * sizeof *c.before;
  uint64_t slot_bytes = (uint64_t)num_slots * sizeof *c.slots;
  uint64_t bytes = before_bytes + slot_bytes + max_readers * sizeof *c.readers;
  char* scratch = sluice_alloc(memory, bytes, "schedule checker");
  if (scratch == NULL) return sluice_alloc_status();
  c.before = (sluice_before_t*)(void*)scratch;
  c.slots = (slot_state_t*)(void*)(scratch + before_bytes);
  c.readers = (reader_t*)(void*)(scratch + before_bytes + slot_bytes);
  for (int32_t i = 0; i < num_slots; ++i) c.slots[i] = (slot_state_t){NOBODY, NO_CHUNK, NO_TENSOR, NOBODY};
  walk(&c);
  sluice_status_t status = SLUICE_OK;
  if (out_finding->hazard == SLUICE_HAZARD_NONE) status = sluice_releases_check(t, c.before, memory, out_finding);
  sluice_free(memory, scratch, bytes);
  return status;
}

sluice_status_t sluice_schedule_check_or_fail(const sluice_template_t* t, sluice_allocator_t* memory) {
  sluice_finding_t finding;
  SLUICE_TRY(sluice_schedule_check(t, memory, &finding));
  if (finding.hazard == SLUICE_HAZARD_NONE) return SLUICE_OK;
  char text[512];
  sluice_finding_describe(t, &finding, text, sizeof text);
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "schedule refused: %s", text);
}

int sluice_schedule_same_exchanges(const sluice_template_t* a, const sluice_template_t* b) {
  int32_t i = 0, j = 0;
  for (;; ++i, ++j) {
    while (i < a->num_ops && !sluice_op_is_exchange(a->ops[i].kind)) ++i;
    while (j < b->num_ops && !sluice_op_is_exchange(b->ops[j].kind)) ++j;
    if (i == a->num_ops || j == b->num_ops) return i == a->num_ops && j == b->num_ops;
    if (a->ops[i].kind != b->ops[j].kind || a->ops[i].chunk != b->ops[j].chunk) return 0;
    if (a->ops[i].group != b->ops[j].group) return 0;
  }
}
