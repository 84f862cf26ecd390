// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/build.h"

#include <string.h>

#include "backend/base/math.h"
#include "backend/pipeline/needs.h"
#include "backend/pipeline/orders.h"

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
  uint64_t need_bytes = sluice_align_up((uint64_t)sluice_pipeline_max_needs((int32_t)ops) * sizeof(int32_t));
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

static sluice_status_t fill(sluice_pipeline_program_t* program, const sluice_pipeline_orders_t* orders,
                            sluice_allocator_t* allocator) {
  sluice_pipeline_orders_limit(orders, &program->spec);
  SLUICE_TRY(check_bytes(&program->spec));
  set_rings(program);
  for (int32_t s = 0; s < program->spec.num_stages; ++s) add_stage(program, s);
  sluice_pipeline_match(program);
  SLUICE_TRY(sluice_pipeline_derive_needs(program, sluice_pipeline_max_needs(program->num_ops), allocator));
  SLUICE_TRY(sluice_pipeline_orders_place(orders, program));
  return sluice_pipeline_orders_check(program, allocator);
}

sluice_status_t sluice_pipeline_program_build(const sluice_pipeline_spec_t* spec, sluice_allocator_t* allocator,
                                              sluice_pipeline_program_t** out_program) {
  *out_program = NULL;
  SLUICE_TRY(sluice_pipeline_spec_check(spec));
  SLUICE_TRY(sluice_policy_check(spec));
  sluice_pipeline_program_t* program = NULL;
  SLUICE_TRY(new_program(spec, allocator, &program));
  sluice_pipeline_orders_t orders;
  sluice_status_t status = sluice_pipeline_orders_write(spec, allocator, &orders);
  if (status == SLUICE_OK) {
    status = fill(program, &orders, allocator);
    sluice_pipeline_orders_free(&orders, allocator);
  }
  if (status != SLUICE_OK) {
    sluice_pipeline_program_destroy(program, allocator);
    return status;
  }
  *out_program = program;
  return SLUICE_OK;
}
