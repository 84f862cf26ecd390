// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/needs.h"

#include <string.h>

/* An op needs at most the writer and the readers of each slot that it touches; a slot has few readers. The flush of a
 * stage needs the ops that no other op needs. */
#define NEEDS_PER_OP 8

int32_t sluice_pipeline_max_needs(int32_t num_ops) { return NEEDS_PER_OP * num_ops; }

/* The last uses of a slot, while a stage's ops are processed in order. */
typedef struct use_s {
  int32_t writer; /* op of the program; -1: none */
  int32_t first_reader;
} use_t;

typedef struct reader_s {
  int32_t op;
  int32_t next;
} reader_t;

typedef struct deriver_s {
  sluice_pipeline_program_t* program;
  int32_t capacity;
  int32_t first;    /* first op of the current stage */
  int32_t words;    /* per row of `before` */
  uint64_t* before; /* the row of an op is the set of ops of the stage that are known to end before it starts */
  use_t* uses;
  reader_t* readers;
  int32_t num_readers;
  int32_t first_use[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES][SLUICE_STAGE_T_COUNT];
} deriver_t;

static uint64_t* row(const deriver_t* d, int32_t op) { return d->before + (int64_t)(op - d->first) * d->words; }

static int is_known(const deriver_t* d, int32_t earlier, int32_t later) {
  int32_t bit = earlier - d->first;
  return (int)(row(d, later)[bit / 64] >> (bit % 64) & 1);
}

/* A need implies the needs of the needed op, so callers add later ops first where possible; drop_implied drops the
 * needs that a later one implies. */
static void need(deriver_t* d, int32_t op, int32_t earlier) {
  if (earlier < 0 || earlier == op || is_known(d, earlier, op)) return;
  sluice_pipeline_program_t* program = d->program;
  if (program->num_needs < d->capacity) program->needs[program->num_needs] = earlier;
  ++program->num_needs;
  ++program->ops[op].num_needs;
  uint64_t *to = row(d, op), *from = row(d, earlier);
  for (int32_t w = 0; w < d->words; ++w) to[w] |= from[w];
  int32_t bit = earlier - d->first;
  to[bit / 64] |= (uint64_t)1 << (bit % 64);
}

static void drop_implied(deriver_t* d, int32_t index) {
  sluice_stage_op_t* op = &d->program->ops[index];
  if (d->program->num_needs > d->capacity) return;
  int32_t kept = 0, *needs = d->program->needs + op->first_need;
  for (int32_t i = 0; i < op->num_needs; ++i) {
    int is_implied = 0;
    for (int32_t j = 0; j < op->num_needs; ++j) is_implied |= j != i && is_known(d, needs[i], needs[j]);
    /* Implication is transitive, so a need may be dropped even if the one that implies it was overwritten. */
    if (!is_implied) needs[kept++] = needs[i];
  }
  d->program->num_needs -= op->num_needs - kept;
  op->num_needs = kept;
}

static use_t* use_of(deriver_t* d, sluice_stage_slot_t slot) {
  return &d->uses[d->first_use[slot.virtual_stage][slot.tensor] + slot.slot];
}

static void read_slot(deriver_t* d, int32_t index, sluice_stage_slot_t slot) {
  use_t* use = use_of(d, slot);
  need(d, index, use->writer);
  d->readers[d->num_readers] = (reader_t){index, use->first_reader};
  use->first_reader = d->num_readers++;
}

static void write_slot(deriver_t* d, int32_t index, sluice_stage_slot_t slot) {
  use_t* use = use_of(d, slot);
  for (int32_t r = use->first_reader; r >= 0; r = d->readers[r].next) need(d, index, d->readers[r].op);
  need(d, index, use->writer);
  *use = (use_t){index, -1};
}

static void derive_stage(deriver_t* d, int32_t stage) {
  sluice_pipeline_program_t* program = d->program;
  int32_t flush = program->first_op[stage + 1] - 1;
  d->first = program->first_op[stage];
  d->num_readers = 0;
  d->words = (flush - d->first) / 64 + 1;
  memset(d->before, 0, (size_t)d->words * (size_t)(flush + 1 - d->first) * sizeof *d->before);
  for (int32_t i = d->first; i <= flush; ++i) {
    sluice_stage_op_t* op = &program->ops[i];
    op->first_need = program->num_needs;
    op->num_needs = 0;
    if (i == flush) {
      for (int32_t j = i - 1; j >= d->first; --j) need(d, i, j);
      break;
    }
    for (int32_t r = 0; r < op->num_reads; ++r) read_slot(d, i, op->reads[r]);
    for (int32_t w = 0; w < op->num_writes; ++w) write_slot(d, i, op->writes[w]);
    drop_implied(d, i);
  }
}

static int32_t count_uses(deriver_t* d) {
  int32_t count = 0;
  for (int32_t c = 0; c < sluice_pipeline_num_virtual_stages(&d->program->spec); ++c) {
    for (int32_t t = 0; t < SLUICE_STAGE_T_COUNT; ++t) {
      d->first_use[c][t] = count;
      count += d->program->ring[c][t];
    }
  }
  return count;
}

static int32_t largest_stage(const sluice_pipeline_program_t* program) {
  int32_t largest = 0;
  for (int32_t s = 0; s < program->spec.num_stages; ++s) {
    int32_t ops = program->first_op[s + 1] - program->first_op[s];
    if (ops > largest) largest = ops;
  }
  return largest;
}

sluice_status_t sluice_pipeline_derive_needs(sluice_pipeline_program_t* program, int32_t capacity,
                                             sluice_allocator_t* allocator) {
  deriver_t d = {.program = program, .capacity = capacity};
  int32_t ops = largest_stage(program), uses = count_uses(&d);
  uint64_t before_bytes = (uint64_t)ops * ((uint64_t)ops / 64 + 1) * sizeof *d.before;
  uint64_t use_bytes = (uint64_t)uses * sizeof *d.uses;
  uint64_t bytes = before_bytes + use_bytes + (uint64_t)ops * SLUICE_STAGE_MAX_ACCESSES * sizeof *d.readers;
  char* scratch = sluice_alloc(allocator, bytes, "stage program: needs");
  if (scratch == NULL) return sluice_alloc_status();
  d.before = (uint64_t*)(void*)scratch;
  d.uses = (use_t*)(void*)(scratch + before_bytes);
  d.readers = (reader_t*)(void*)(scratch + before_bytes + use_bytes);
  for (int32_t i = 0; i < uses; ++i) d.uses[i] = (use_t){-1, -1};
  program->num_needs = 0;
  for (int32_t s = 0; s < program->spec.num_stages; ++s) derive_stage(&d, s);
  sluice_free(allocator, scratch, bytes);
  if (program->num_needs <= capacity) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INTERNAL,
                     "pipeline: %d needs, and there is room for %d; raise NEEDS_PER_OP in "
                     "backend/pipeline/needs.c",
                     program->num_needs, capacity);
}
