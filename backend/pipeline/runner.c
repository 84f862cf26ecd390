// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/runner.h"

static void count_dependents(sluice_runner_t* runner) {
  const sluice_pipeline_program_t* program = runner->program;
  for (int32_t i = 0; i < runner->num_ops; ++i) {
    const sluice_stage_op_t* op = &program->ops[runner->first_op + i];
    runner->missing[i] = op->num_needs;
    for (int32_t n = 0; n < op->num_needs; ++n) {
      ++runner->first_dependent[program->needs[op->first_need + n] - runner->first_op + 1];
    }
  }
  for (int32_t i = 0; i < runner->num_ops; ++i) runner->first_dependent[i + 1] += runner->first_dependent[i];
}

/* Iterates backwards: each list is filled from its end, and first_dependent ends at the beginning of the list. */
static void list_dependents(sluice_runner_t* runner) {
  const sluice_pipeline_program_t* program = runner->program;
  for (int32_t i = 0; i < runner->num_ops; ++i) runner->first_dependent[i] = runner->first_dependent[i + 1];
  for (int32_t i = runner->num_ops - 1; i >= 0; --i) {
    const sluice_stage_op_t* op = &program->ops[runner->first_op + i];
    for (int32_t n = 0; n < op->num_needs; ++n) {
      runner->dependents[--runner->first_dependent[program->needs[op->first_need + n] - runner->first_op]] = i;
    }
  }
}

static void becomes_ready(sluice_runner_t* runner, int32_t op_of_stage) {
  int32_t index = runner->first_op + op_of_stage;
  const sluice_stage_op_t* op = &runner->program->ops[index];
  int64_t arrived = runner->arrived[op_of_stage];
  int64_t since = arrived > 0 ? arrived : ++runner->clock;
  const sluice_policy_t* policy = runner->program->policy;
  if (sluice_stage_op_is_message(op->kind) && !policy->is_blocking) {
    runner->posts[runner->num_posts++] = index;
  } else if (!policy->is_planned) {
    runner->ready[runner->num_ready++] =
        (sluice_stage_candidate_t){index, op->kind, op->virtual_stage, op->micro_batch, op->place, arrived > 0, since};
  }
}

static int32_t count_needs(const sluice_pipeline_program_t* program, int32_t stage) {
  int32_t count = 0;
  for (int32_t i = program->first_op[stage]; i < program->first_op[stage + 1]; ++i) count += program->ops[i].num_needs;
  return count;
}

sluice_status_t sluice_runner_init(sluice_runner_t* runner, const sluice_pipeline_program_t* program, int32_t stage,
                                   sluice_allocator_t* allocator) {
  *runner = (sluice_runner_t){.program = program, .stage = stage, .first_op = program->first_op[stage]};
  runner->num_ops = program->first_op[stage + 1] - runner->first_op;
  uint64_t ops = (uint64_t)runner->num_ops;
  uint64_t numbers = ops + (ops + 1) + ops + (uint64_t)count_needs(program, stage);
  uint64_t ready_bytes = ops * sizeof *runner->ready, arrived_bytes = ops * sizeof *runner->arrived;
  runner->bytes = ready_bytes + arrived_bytes + numbers * sizeof *runner->missing;
  char* memory = sluice_alloc_zeroed(allocator, runner->bytes, "stage runner");
  if (memory == NULL) return sluice_alloc_status();
  runner->ready = (sluice_stage_candidate_t*)(void*)memory;
  runner->arrived = (int64_t*)(void*)(memory + ready_bytes);
  runner->missing = (int32_t*)(void*)(memory + ready_bytes + arrived_bytes);
  runner->first_dependent = runner->missing + ops;
  runner->posts = runner->first_dependent + ops + 1;
  runner->dependents = runner->posts + ops;
  count_dependents(runner);
  list_dependents(runner);
  for (int32_t i = 0; i < runner->num_ops; ++i) {
    if (runner->missing[i] == 0) becomes_ready(runner, i);
  }
  return SLUICE_OK;
}

void sluice_runner_deinit(sluice_runner_t* runner, sluice_allocator_t* allocator) {
  sluice_free(allocator, runner->ready, runner->bytes);
  runner->ready = NULL;
}

static int32_t next_of_plan(sluice_runner_t* runner) {
  const sluice_pipeline_program_t* program = runner->program;
  int32_t at = program->first_position[runner->stage] + runner->next_place;
  if (at == program->first_position[runner->stage + 1]) return -1;
  int32_t op = program->order[at];
  if (runner->missing[op - runner->first_op] > 0) return -1;
  ++runner->next_place;
  return op;
}

static int32_t take_ready(sluice_runner_t* runner, int32_t at) {
  int32_t op = runner->ready[at].op;
  runner->ready[at] = runner->ready[--runner->num_ready];
  return op;
}

int32_t sluice_runner_next(sluice_runner_t* runner) {
  const sluice_pipeline_program_t* program = runner->program;
  if (program->policy->is_planned) return next_of_plan(runner);
  int32_t best = -1;
  for (int32_t i = 0; i < runner->num_ready; ++i) {
    const sluice_stage_candidate_t* one = &runner->ready[i];
    if (runner->follows && one->virtual_stage >= 0 &&
        sluice_stage_op_is_collective(&program->spec, one->kind, one->virtual_stage)) {
      continue;
    }
    if (best < 0 || program->policy->before(one, &runner->ready[best])) best = i;
  }
  return best < 0 ? -1 : take_ready(runner, best);
}

int sluice_runner_take(sluice_runner_t* runner, int32_t op) {
  for (int32_t i = 0; i < runner->num_ready; ++i) {
    if (runner->ready[i].op == op) return take_ready(runner, i) == op;
  }
  return 0;
}

int32_t sluice_runner_next_post(sluice_runner_t* runner) {
  return runner->first_post < runner->num_posts ? runner->posts[runner->first_post++] : -1;
}

void sluice_runner_end(sluice_runner_t* runner, int32_t op) {
  int32_t at = op - runner->first_op;
  int32_t kind = runner->program->ops[op].kind;
  int64_t arrival = sluice_stage_op_is_message(kind) && !sluice_stage_op_is_send(kind) ? ++runner->clock : 0;
  ++runner->num_ended;
  for (int32_t d = runner->first_dependent[at]; d < runner->first_dependent[at + 1]; ++d) {
    int32_t dependent = runner->dependents[d];
    if (arrival > 0) runner->arrived[dependent] = arrival;
    if (--runner->missing[dependent] == 0) becomes_ready(runner, dependent);
  }
}
