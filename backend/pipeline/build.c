// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/build.h"

#include <string.h>

#include "backend/base/math.h"

/* ---- needs, from the slots that ops touch ---- */

/* An op needs at most the writer and the readers of each slot that it touches; a slot has few readers. The flush of a
 * stage needs the ops that no other op needs. */
#define NEEDS_PER_OP 8

/* Returns a sufficient capacity. */
static int32_t max_needs(int32_t num_ops) { return NEEDS_PER_OP * num_ops; }

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

/* Fills first_need, num_needs and at most `capacity` entries of program->needs; num_needs of the program is the number
 * of entries. Two ops of a stage that touch the same slot, one of them writing, keep their order in the list of ops;
 * the flush comes last. Needs that other needs imply are omitted. Errors: NO_MEMORY, INTERNAL (capacity). */
static sluice_status_t derive_needs(sluice_pipeline_program_t* program, int32_t capacity,
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
                     "backend/pipeline/build.c",
                     program->num_needs, capacity);
}

/* ---- the orders of a policy ---- */

typedef struct orders_s {
  int32_t first[SLUICE_PIPELINE_MAX_STAGES + 1]; /* into turns; all 0 if the policy has no order */
  sluice_stage_turn_t* turns;
  uint64_t bytes;
} orders_t;

static void free_orders(orders_t* orders, sluice_allocator_t* allocator) {
  sluice_free(allocator, orders->turns, orders->bytes);
  orders->turns = NULL;
}

/* out_orders: release with free_orders. Errors: NO_MEMORY, INTERNAL (more turns than a stage has
 * ops). */
static sluice_status_t write_orders(const sluice_pipeline_spec_t* spec, sluice_allocator_t* allocator,
                                    orders_t* out_orders) {
  *out_orders = (orders_t){.turns = NULL};
  const sluice_policy_t* policy = sluice_policy(spec->policy);
  int32_t capacity = SLUICE_STAGE_OP_COUNT * spec->num_virtual * spec->num_micro_batches;
  out_orders->bytes = (uint64_t)capacity * (uint64_t)spec->num_stages * sizeof *out_orders->turns;
  out_orders->turns = sluice_alloc(allocator, out_orders->bytes, "stage program: orders");
  if (out_orders->turns == NULL) return sluice_alloc_status();
  for (int32_t s = 0; s < spec->num_stages; ++s) {
    sluice_stage_order_t order = {out_orders->turns + out_orders->first[s], capacity, 0};
    if (policy->order != NULL) policy->order(spec, s, &order);
    if (order.count > capacity) {
      free_orders(out_orders, allocator);
      return SLUICE_FAIL(SLUICE_E_INTERNAL,
                         "pipeline: policy %s gives stage %d an order of %d ops, but it has at most %d", policy->name,
                         s, order.count, capacity);
    }
    out_orders->first[s + 1] = out_orders->first[s] + order.count;
  }
  return SLUICE_OK;
}

/* Returns the maximum of (number of `from` ops - number of `to` ops) of a virtual stage over its stage's order. */
static int32_t most_between(const orders_t* orders, int32_t stage, int32_t c, int32_t from, int32_t to) {
  int32_t now = 0, most = 0;
  for (int32_t i = orders->first[stage]; i < orders->first[stage + 1]; ++i) {
    const sluice_stage_turn_t* turn = &orders->turns[i];
    if (turn->virtual_stage != c) continue;
    now += (turn->kind == from) - (turn->kind == to);
    if (now > most) most = now;
  }
  return most;
}

/* Sets the limits that are 0 in the spec: to the maximum in flight and held of a planned order, else to p and m. */
static void set_limits(const orders_t* orders, sluice_pipeline_spec_t* spec) {
  const sluice_policy_t* policy = sluice_policy(spec->policy);
  for (int32_t c = 0; c < sluice_pipeline_num_virtual_stages(spec); ++c) {
    int32_t stage = sluice_pipeline_stage_of(spec, c), m = spec->num_micro_batches;
    if (spec->in_flight[c] == 0) {
      spec->in_flight[c] = policy->is_planned
                               ? most_between(orders, stage, c, SLUICE_STAGE_FORWARD, SLUICE_STAGE_BACKWARD)
                               : spec->num_stages;
    }
    if (spec->held[c] == 0) {
      spec->held[c] = policy->is_planned && spec->separate_wgrad
                          ? most_between(orders, stage, c, SLUICE_STAGE_BACKWARD, SLUICE_STAGE_WEIGHT_GRAD)
                          : m;
    }
    spec->in_flight[c] = (int32_t)sluice_max(1, sluice_min(spec->in_flight[c], m));
    spec->held[c] = (int32_t)sluice_max(1, sluice_min(spec->held[c], m));
  }
}

static void put(sluice_pipeline_program_t* program, int32_t stage, int32_t* at, int32_t op) {
  program->ops[op].place = *at - program->first_position[stage];
  program->order[(*at)++] = op;
}

/* Places a reduction directly after the last gradient of its virtual stage, because a policy's order does not contain
 * reductions. */
static void put_reduce(sluice_pipeline_program_t* program, int32_t stage, int32_t* at, sluice_stage_turn_t turn) {
  const sluice_pipeline_spec_t* spec = &program->spec;
  if (sluice_pipeline_num_reduces(spec) == 0 || turn.kind != sluice_stage_gradient_kind(spec)) return;
  if (turn.micro_batch != spec->num_micro_batches - 1) return;
  put(program, stage, at, sluice_pipeline_find(program, SLUICE_STAGE_REDUCE, turn.virtual_stage, turn.micro_batch));
}

static sluice_status_t place_stage(const orders_t* orders, sluice_pipeline_program_t* program, int32_t stage) {
  int32_t at = program->first_position[stage];
  for (int32_t i = orders->first[stage]; i < orders->first[stage + 1]; ++i) {
    sluice_stage_turn_t turn = orders->turns[i];
    int32_t op = sluice_pipeline_find(program, turn.kind, turn.virtual_stage, turn.micro_batch);
    if (op < program->first_op[stage] || op >= program->first_op[stage + 1] || program->ops[op].place >= 0) {
      return SLUICE_FAIL(SLUICE_E_INTERNAL,
                         "pipeline: policy %s orders %s of micro-batch %d in virtual stage %d on "
                         "stage %d, which is %s",
                         program->policy->name, sluice_stage_op_name(turn.kind), turn.micro_batch, turn.virtual_stage,
                         stage, op < 0 ? "not an op of this stage" : "ordered twice");
    }
    put(program, stage, &at, op);
    put_reduce(program, stage, &at, turn);
  }
  for (int32_t i = program->first_op[stage]; i < program->first_op[stage + 1]; ++i) {
    sluice_stage_op_t* op = &program->ops[i];
    int is_ordered = !sluice_stage_op_is_message(op->kind) || program->policy->is_blocking;
    if (op->place >= 0 || !is_ordered) continue;
    if (op->kind != SLUICE_STAGE_FLUSH) {
      return SLUICE_FAIL(SLUICE_E_INTERNAL, "pipeline: policy %s omits %s of micro-batch %d on stage %d",
                         program->policy->name, sluice_stage_op_name(op->kind), op->micro_batch, stage);
    }
    put(program, stage, &at, i);
  }
  program->first_position[stage + 1] = at;
  return SLUICE_OK;
}

/* Fills place and order of a program that has its ops. Errors: INTERNAL (a turn that is no op of the stage, an op
 * repeated or missing). */
static sluice_status_t place_all(const orders_t* orders, sluice_pipeline_program_t* program) {
  if (program->policy->order == NULL) return SLUICE_OK;
  for (int32_t s = 0; s < program->spec.num_stages; ++s) SLUICE_TRY(place_stage(orders, program, s));
  return SLUICE_OK;
}

typedef struct run_s {
  const sluice_pipeline_program_t* program;
  uint8_t* has_ended; /* by op */
  int32_t next[SLUICE_PIPELINE_MAX_STAGES];
} run_t;

static int is_ready(const run_t* run, int32_t index) {
  const sluice_stage_op_t* op = &run->program->ops[index];
  for (int32_t n = 0; n < op->num_needs; ++n) {
    if (!run->has_ended[run->program->needs[op->first_need + n]]) return 0;
  }
  return 1;
}

/* Returns whether a message can be sent: both of its ends are ready and, in a blocking plan, next on their stages. */
static int can_go(const run_t* run, int32_t index) {
  const sluice_pipeline_program_t* program = run->program;
  const sluice_stage_op_t* op = &program->ops[index];
  int32_t ends[] = {index, op->match};
  for (int32_t e = 0; e < 2; ++e) {
    if (ends[e] < 0 || !is_ready(run, ends[e])) return 0;
    const sluice_stage_op_t* end = &program->ops[ends[e]];
    if (program->policy->is_blocking && end->place != run->next[end->stage]) return 0;
  }
  return 1;
}

static int end_what_can(run_t* run, int32_t stage) {
  const sluice_pipeline_program_t* program = run->program;
  int32_t ended = 0, is_blocking = program->policy->is_blocking;
  for (int32_t i = program->first_op[stage]; i < program->first_op[stage + 1]; ++i) {
    const sluice_stage_op_t* op = &program->ops[i];
    if (run->has_ended[i]) continue;
    if (sluice_stage_op_is_message(op->kind)) {
      if (sluice_stage_op_is_send(op->kind) || !can_go(run, i)) continue;
      run->has_ended[i] = run->has_ended[op->match] = 1;
      run->next[stage] += is_blocking;
      run->next[op->peer] += is_blocking;
    } else if (op->place == run->next[stage] && is_ready(run, i)) {
      run->has_ended[i] = 1;
      ++run->next[stage];
    } else {
      continue;
    }
    ++ended;
  }
  return ended > 0;
}

/* Progress never makes a ready op unready, so one run suffices. */
static sluice_status_t run_once(const sluice_pipeline_program_t* program, uint8_t* has_ended) {
  run_t run = {.program = program, .has_ended = has_ended};
  for (int moved = 1; moved;) {
    moved = 0;
    for (int32_t s = 0; s < program->spec.num_stages; ++s) moved |= end_what_can(&run, s);
  }
  for (int32_t s = 0; s < program->spec.num_stages; ++s) {
    int32_t place = program->first_position[s] + run.next[s];
    if (place == program->first_position[s + 1]) continue;
    char text[128];
    sluice_stage_op_describe(&program->ops[program->order[place]], text, sizeof text);
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "pipeline: the order of policy %s cannot run under these limits: %s waits forever; raise "
                       "in_flight or held, or use a policy that runs ops as they become ready",
                       program->policy->name, text);
  }
  return SLUICE_OK;
}

/* Checks that a planned order can complete under the limits. Errors: INVALID_ARGUMENT, NO_MEMORY. */
static sluice_status_t check_orders(const sluice_pipeline_program_t* program, sluice_allocator_t* allocator) {
  if (!program->policy->is_planned) return SLUICE_OK;
  uint64_t bytes = (uint64_t)program->num_ops;
  uint8_t* has_ended = sluice_alloc_zeroed(allocator, bytes, "stage program: whether its order can run");
  if (has_ended == NULL) return sluice_alloc_status();
  sluice_status_t status = run_once(program, has_ended);
  sluice_free(allocator, has_ended, bytes);
  return status;
}

/* ---- programs ---- */

/* The kinds of a micro-batch's ops, in an order in which they could run. */
static const int32_t down[] = {SLUICE_STAGE_RECEIVE_ACTIVATION, SLUICE_STAGE_FORWARD, SLUICE_STAGE_SEND_ACTIVATION};
static const int32_t up[] = {SLUICE_STAGE_RECEIVE_GRADIENT, SLUICE_STAGE_BACKWARD, SLUICE_STAGE_SEND_GRADIENT,
                             SLUICE_STAGE_WEIGHT_GRAD};
#define NUM_DOWN ((int32_t)(sizeof down / sizeof down[0]))
#define NUM_UP   ((int32_t)(sizeof up / sizeof up[0]))

static int32_t ops_of_micro_batch(const sluice_pipeline_spec_t* spec, int32_t stage) {
  int32_t count = 0;
  for (int32_t k = 0; k < spec->num_virtual; ++k) {
    int32_t c = sluice_pipeline_virtual_stage(spec, stage, k);
    for (int32_t kind = 0; kind < SLUICE_STAGE_OP_COUNT; ++kind) count += sluice_stage_op_exists(spec, kind, c);
  }
  return count;
}

/* ---- slots ---- */

static void set_rings(sluice_pipeline_program_t* program) {
  const sluice_pipeline_spec_t* spec = &program->spec;
  for (int32_t c = 0; c < sluice_pipeline_num_virtual_stages(spec); ++c) {
    int32_t in_flight = spec->in_flight[c], *ring = program->ring[c];
    for (int32_t t = 0; t < SLUICE_STAGE_T_COUNT; ++t) ring[t] = in_flight;
    ring[SLUICE_STAGE_T_INPUT] =
        (int32_t)sluice_min((int64_t)in_flight + spec->receives_ahead, spec->num_micro_batches);
    ring[SLUICE_STAGE_T_HELD] = spec->held[c];
    ring[SLUICE_STAGE_T_FORWARD_STATE] = ring[SLUICE_STAGE_T_BACKWARD_STATE] = ring[SLUICE_STAGE_T_GRADIENTS] = 1;
  }
}

static sluice_stage_slot_t slot_of(const sluice_pipeline_program_t* program, sluice_stage_access_t access, int32_t i) {
  int32_t ring = program->ring[access.virtual_stage][access.tensor];
  return (sluice_stage_slot_t){(int16_t)access.tensor, (int16_t)access.virtual_stage, i % ring};
}

/* ---- ops ---- */

static void add_op(sluice_pipeline_program_t* program, int32_t stage, int32_t kind, int32_t c, int32_t i) {
  const sluice_pipeline_spec_t* spec = &program->spec;
  sluice_stage_op_t* op = &program->ops[program->num_ops++];
  *op = (sluice_stage_op_t){.kind = (int16_t)kind,
                            .stage = (int16_t)stage,
                            .virtual_stage = (int16_t)c,
                            .peer = -1,
                            .micro_batch = i,
                            .match = -1,
                            .place = -1};
  if (kind == SLUICE_STAGE_FLUSH) return;
  if (sluice_stage_op_is_message(kind)) {
    op->peer = (int16_t)sluice_pipeline_stage_of(spec, sluice_stage_op_other_end(kind, c));
  }
  sluice_stage_accesses_t accesses = sluice_stage_op_accesses(spec, kind, c);
  op->num_reads = accesses.num_reads;
  op->num_writes = accesses.num_writes;
  for (int32_t a = 0; a < accesses.num_reads; ++a) op->reads[a] = slot_of(program, accesses.reads[a], i);
  for (int32_t a = 0; a < accesses.num_writes; ++a) op->writes[a] = slot_of(program, accesses.writes[a], i);
}

static void add_kinds(sluice_pipeline_program_t* program, int32_t stage, int32_t c, int32_t i, const int32_t* kinds,
                      int32_t count) {
  for (int32_t n = 0; n < count; ++n) {
    if (sluice_stage_op_exists(&program->spec, kinds[n], c)) add_op(program, stage, kinds[n], c, i);
  }
}

static void add_stage(sluice_pipeline_program_t* program, int32_t stage) {
  const sluice_pipeline_spec_t* spec = &program->spec;
  program->first_op[stage] = program->num_ops;
  for (int32_t i = 0; i < spec->num_micro_batches; ++i) {
    for (int32_t k = 0; k < spec->num_virtual; ++k) {
      add_kinds(program, stage, sluice_pipeline_virtual_stage(spec, stage, k), i, down, NUM_DOWN);
    }
    for (int32_t k = spec->num_virtual - 1; k >= 0; --k) {
      add_kinds(program, stage, sluice_pipeline_virtual_stage(spec, stage, k), i, up, NUM_UP);
    }
  }
  for (int32_t k = sluice_pipeline_num_reduces(spec) - 1; k >= 0; --k) {
    const int32_t c = sluice_pipeline_virtual_stage(spec, stage, k);
    add_op(program, stage, SLUICE_STAGE_REDUCE, c, spec->num_micro_batches - 1);
  }
  add_op(program, stage, SLUICE_STAGE_FLUSH, -1, -1);
  program->first_op[stage + 1] = program->num_ops;
}

/* ---- the whole program ---- */

static sluice_status_t check_bytes(const sluice_pipeline_spec_t* spec) {
  for (int32_t s = 0; s < spec->num_stages; ++s) {
    uint64_t bytes = sluice_pipeline_stage_bytes(spec, s);
    if (spec->byte_limit[s] == 0 || bytes <= spec->byte_limit[s]) continue;
    return SLUICE_FAIL(SLUICE_E_OVER_BUDGET,
                       "pipeline: the slots of stage %d take %llu bytes and its limit is %llu; give it fewer "
                       "micro-batches in flight",
                       s, (unsigned long long)bytes, (unsigned long long)spec->byte_limit[s]);
  }
  return SLUICE_OK;
}

static sluice_status_t new_program(const sluice_pipeline_spec_t* spec, sluice_allocator_t* allocator,
                                   sluice_pipeline_program_t** out_program) {
  uint64_t ops = 0;
  for (int32_t s = 0; s < spec->num_stages; ++s) {
    ops += (uint64_t)ops_of_micro_batch(spec, s) * (uint64_t)spec->num_micro_batches + 1;
    ops += (uint64_t)sluice_pipeline_num_reduces(spec);
  }
  uint64_t head = sluice_align_up(sizeof **out_program), op_bytes = sluice_align_up(ops * sizeof(sluice_stage_op_t));
  uint64_t need_bytes = sluice_align_up((uint64_t)max_needs((int32_t)ops) * sizeof(int32_t));
  uint64_t bytes = head + op_bytes + need_bytes + ops * sizeof(int32_t);
  char* memory = sluice_alloc(allocator, bytes, "stage program");
  if (memory == NULL) return sluice_alloc_status();
  sluice_pipeline_program_t* program = (sluice_pipeline_program_t*)(void*)memory;
  memset(program, 0, sizeof *program);
  program->spec = *spec;
  program->policy = sluice_policy(spec->policy);
  program->ops = (sluice_stage_op_t*)(void*)(memory + head);
  program->needs = (int32_t*)(void*)(memory + head + op_bytes);
  program->order = (int32_t*)(void*)(memory + head + op_bytes + need_bytes);
  program->memory = memory;
  program->memory_bytes = bytes;
  *out_program = program;
  return SLUICE_OK;
}

static sluice_status_t fill(sluice_pipeline_program_t* program, const orders_t* orders, sluice_allocator_t* allocator) {
  set_limits(orders, &program->spec);
  SLUICE_TRY(check_bytes(&program->spec));
  set_rings(program);
  for (int32_t s = 0; s < program->spec.num_stages; ++s) add_stage(program, s);
  sluice_pipeline_match(program);
  SLUICE_TRY(derive_needs(program, max_needs(program->num_ops), allocator));
  SLUICE_TRY(place_all(orders, program));
  return check_orders(program, allocator);
}

sluice_status_t sluice_pipeline_program_build(const sluice_pipeline_spec_t* spec, sluice_allocator_t* allocator,
                                              sluice_pipeline_program_t** out_program) {
  *out_program = NULL;
  SLUICE_TRY(sluice_pipeline_spec_check(spec));
  SLUICE_TRY(sluice_policy_check(spec));
  sluice_pipeline_program_t* program = NULL;
  SLUICE_TRY(new_program(spec, allocator, &program));
  orders_t orders;
  sluice_status_t status = write_orders(spec, allocator, &orders);
  if (status == SLUICE_OK) {
    status = fill(program, &orders, allocator);
    free_orders(&orders, allocator);
  }
  if (status != SLUICE_OK) {
    sluice_pipeline_program_destroy(program, allocator);
    return status;
  }
  *out_program = program;
  return SLUICE_OK;
}
