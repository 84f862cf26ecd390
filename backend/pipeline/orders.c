// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/orders.h"

#include "backend/base/math.h"

/* ---- writing ---- */

sluice_status_t sluice_pipeline_orders_write(const sluice_pipeline_spec_t* spec, sluice_allocator_t* allocator,
                                             sluice_pipeline_orders_t* out_orders) {
  *out_orders = (sluice_pipeline_orders_t){.turns = NULL};
  const sluice_policy_t* policy = sluice_policy(spec->policy);
  int32_t capacity = SLUICE_STAGE_OP_COUNT * spec->num_virtual * spec->num_micro_batches;
  out_orders->bytes = (uint64_t)capacity * (uint64_t)spec->num_stages * sizeof *out_orders->turns;
  out_orders->turns = sluice_alloc(allocator, out_orders->bytes, "stage program: orders");
  if (out_orders->turns == NULL) return sluice_alloc_status();
  for (int32_t s = 0; s < spec->num_stages; ++s) {
    sluice_stage_order_t order = {out_orders->turns + out_orders->first[s], capacity, 0};
    if (policy->order != NULL) policy->order(spec, s, &order);
    if (order.count > capacity) {
      sluice_pipeline_orders_free(out_orders, allocator);
      return SLUICE_FAIL(SLUICE_E_INTERNAL,
                         "pipeline: policy %s gives stage %d an order of %d ops, but it has at most %d", policy->name,
                         s, order.count, capacity);
    }
    out_orders->first[s + 1] = out_orders->first[s] + order.count;
  }
  return SLUICE_OK;
}

void sluice_pipeline_orders_free(sluice_pipeline_orders_t* orders, sluice_allocator_t* allocator) {
  sluice_free(allocator, orders->turns, orders->bytes);
  orders->turns = NULL;
}

/* ---- limits ---- */

/* Returns the maximum of (number of `from` ops - number of `to` ops) of a virtual stage over its stage's order. */
static int32_t most_between(const sluice_pipeline_orders_t* orders, int32_t stage, int32_t c, int32_t from,
                            int32_t to) {
  int32_t now = 0, most = 0;
  for (int32_t i = orders->first[stage]; i < orders->first[stage + 1]; ++i) {
    const sluice_stage_turn_t* turn = &orders->turns[i];
    if (turn->virtual_stage != c) continue;
    now += (turn->kind == from) - (turn->kind == to);
    if (now > most) most = now;
  }
  return most;
}

void sluice_pipeline_orders_limit(const sluice_pipeline_orders_t* orders, sluice_pipeline_spec_t* spec) {
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

/* ---- places ---- */

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

static sluice_status_t place_stage(const sluice_pipeline_orders_t* orders, sluice_pipeline_program_t* program,
                                   int32_t stage) {
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

sluice_status_t sluice_pipeline_orders_place(const sluice_pipeline_orders_t* orders,
                                             sluice_pipeline_program_t* program) {
  if (program->policy->order == NULL) return SLUICE_OK;
  for (int32_t s = 0; s < program->spec.num_stages; ++s) SLUICE_TRY(place_stage(orders, program, s));
  return SLUICE_OK;
}

/* ---- checking that a plan can run ---- */

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

sluice_status_t sluice_pipeline_orders_check(const sluice_pipeline_program_t* program, sluice_allocator_t* allocator) {
  if (!program->policy->is_planned) return SLUICE_OK;
  uint64_t bytes = (uint64_t)program->num_ops;
  uint8_t* has_ended = sluice_alloc_zeroed(allocator, bytes, "stage program: whether its order can run");
  if (has_ended == NULL) return sluice_alloc_status();
  sluice_status_t status = run_once(program, has_ended);
  sluice_free(allocator, has_ended, bytes);
  return status;
}
