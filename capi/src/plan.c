// SPDX-License-Identifier: Apache-2.0
/* The public calls of plans. */
#include "sluice/plan.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/structs.h"
#include "backend/cost/closed_forms.h"
#include "backend/model/restore.h"
#include "backend/moe/layer/layer_life.h"
#include "backend/moe/run/active_plan.h"
#include "backend/plan/budget_division.h"
#include "backend/plan/plan.h"

#define MAX_LINES 512

struct sluice_plan_s {
  sluice_moe_t* moe; /* retained */
  /* Properties of the layer when the plan was made; its experts may be placed differently now. */
  uint64_t key; /* sluice_layer_plan_key */
  sluice_shape_t shape;
  sluice_plan_data_t data;
  int32_t num_lines;
  sluice_plan_candidate_t lines[MAX_LINES];
};

SLUICE_DEFINE_INIT(sluice_plan_config, .max_outstanding = 1, .restore_input = SLUICE_RESTORE_ADAPTIVE,
                   .restore_pre_activation = SLUICE_RESTORE_ADAPTIVE, .wgrad_mode = SLUICE_WGRAD_ADAPTIVE)

static sluice_status_t check_config(const sluice_plan_config_t* c) {
  SLUICE_TRY(SLUICE_REQUIRE(c->max_tokens >= 1 && c->max_tokens <= INT32_MAX,
                            "plan: max_tokens is %lld; it must be in [1, 2^31)", (long long)c->max_tokens));
  SLUICE_TRY(SLUICE_REQUIRE(c->max_outstanding >= 1, "plan: max_outstanding is %d; it must be at least 1",
                            c->max_outstanding));
  SLUICE_TRY(SLUICE_REQUIRE(c->num_chunks >= 0 && c->num_chunks <= SLUICE_MAX_CHUNKS,
                            "plan: num_chunks is %d; it must be in [1, %d], or 0 for any", c->num_chunks,
                            SLUICE_MAX_CHUNKS));
  char known[SLUICE_RESTORE_TEXT_BYTES];
  SLUICE_TRY(SLUICE_REQUIRE(
      c->restore_input == SLUICE_RESTORE_ADAPTIVE || sluice_restore_is_for(c->restore_input, SLUICE_T_DI),
      "plan: restore_input is %d; known are adaptive (-1), %s", c->restore_input,
      sluice_restore_choices(SLUICE_T_DI, known)));
  SLUICE_TRY(SLUICE_REQUIRE(c->restore_pre_activation == SLUICE_RESTORE_ADAPTIVE ||
                                sluice_restore_is_for(c->restore_pre_activation, SLUICE_T_M),
                            "plan: restore_pre_activation is %d; known are adaptive (-1), %s",
                            c->restore_pre_activation, sluice_restore_choices(SLUICE_T_M, known)));
  SLUICE_TRY(SLUICE_REQUIRE(c->wgrad_mode >= SLUICE_WGRAD_ADAPTIVE && c->wgrad_mode <= SLUICE_WGRAD_PER_CHUNK,
                            "plan: wgrad_mode is %d; known are adaptive (-1), deferred (0) and per chunk (1)",
                            c->wgrad_mode));
  return SLUICE_REQUIRE(c->separate_wgrad == 0 || c->separate_wgrad == 1, "plan: separate_wgrad is %d; it is 0 or 1",
                        c->separate_wgrad);
}

/* With a capacity, the layer's config determines n, because the capacity is that of one chunk. */
static sluice_status_t check_chunks(const sluice_moe_t* moe, const sluice_plan_config_t* c) {
  int32_t wanted = moe->shape.config.num_chunks;
  return SLUICE_REQUIRE(
      sluice_shape_capacity(&moe->shape) == 0 || c->num_chunks == 0 || c->num_chunks == wanted,
      "plan: num_chunks is %d, but capacity_rows %lld of layer %d is per chunk for %d chunks: give %d, or 0",
      c->num_chunks, (long long)sluice_shape_capacity(&moe->shape), moe->shape.config.layer_id, wanted, wanted);
}

static void add_line(void* user, const sluice_plan_data_t* c, int32_t fits) {
  sluice_plan_t* plan = user;
  if (plan->num_lines == MAX_LINES) return;
  plan->lines[plan->num_lines++] = (sluice_plan_candidate_t){c->num_chunks, c->restore_input, c->restore_pre_activation,
                                                             c->wgrad_mode, c->bytes.total,   c->cost,
                                                             fits,          c->kept_chunks};
}

static sluice_status_t new_plan(sluice_moe_t* moe, sluice_plan_t** out_plan) {
  sluice_plan_t* plan = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *plan, "plan");
  if (plan == NULL) return sluice_alloc_status();
  sluice_layer_retain(moe);
  plan->moe = moe;
  plan->key = sluice_layer_plan_key(moe);
  plan->shape = moe->shape;
  *out_plan = plan;
  return SLUICE_OK;
}

static sluice_status_t make(sluice_moe_t* moe, const sluice_plan_config_t* c, sluice_plan_t** out_plan) {
  sluice_plan_t* plan = NULL;
  SLUICE_TRY(new_plan(moe, &plan));
  sluice_plan_inputs_t inputs = {
      .max_tokens = c->max_tokens,
      .budget = c->memory_budget,
      .host_budget = c->host_memory_budget,
      .base = c->base_bytes != 0 ? c->base_bytes : sluice_plan_base_bytes(moe->context),
      .max_outstanding = c->max_outstanding,
      .num_chunks = c->num_chunks,
      .restore_input = c->restore_input,
      .restore_pre_activation = c->restore_pre_activation,
      .wgrad_mode = c->wgrad_mode,
      .separate_wgrad = c->separate_wgrad,
      .may_keep_part = 1,
  };
  int32_t num_chunks = sluice_shape_capacity(&moe->shape) > 0 ? moe->shape.config.num_chunks : c->num_chunks;
  sluice_status_t status = sluice_chunk_policies_read(
      "plan", num_chunks, moe->shape.config.callback_experts, c->restore_input_of, c->restore_pre_activation_of,
      &inputs.restore_input, &inputs.restore_pre_activation, &inputs.policies);
  const sluice_plan_problem_t problem = sluice_layer_plan_problem(moe, 0);
  if (status == SLUICE_OK) status = sluice_plan_make(&problem, &inputs, NULL, add_line, plan, &plan->data);
  if (status != SLUICE_OK) {
    sluice_plan_destroy(plan);
    return status;
  }
  *out_plan = plan;
  return SLUICE_OK;
}

sluice_status_t sluice_plan_create(sluice_moe_t* moe, const sluice_plan_config_t* config, sluice_plan_t** out_plan) {
  if (out_plan == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_plan_create: out_plan is NULL");
  *out_plan = NULL;
  if (moe == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_plan_create: moe is NULL");
  SLUICE_READ_EXTENSIBLE(sluice_plan_config, checked, config, offsetof(sluice_plan_config_t, host_memory_budget));
  SLUICE_TRY(check_config(&checked));
  SLUICE_TRY(check_chunks(moe, &checked));
  SLUICE_TRY(sluice_engine_enter(moe->context, "sluice_plan_create"));
  sluice_status_t status = make(moe, &checked, out_plan);
  sluice_engine_leave(moe->context);
  return status;
}

void sluice_plan_destroy(sluice_plan_t* plan) {
  if (plan == NULL) return;
  sluice_layer_release(plan->moe);
  sluice_free(sluice_process_allocator(), plan, sizeof *plan);
}

static sluice_plan_problem_t problem_of(const sluice_plan_t* plan) {
  sluice_plan_problem_t problem = sluice_layer_plan_problem(plan->moe, 0);
  problem.shape = plan->shape;
  sluice_shape_take_deduplication(
      &problem.shape, plan->data.two_levels ? SLUICE_DEDUPLICATE_NODES : sluice_shape_deduplication(&plan->shape));
  return problem;
}

sluice_status_t sluice_plan_get_info(const sluice_plan_t* plan, sluice_plan_info_t* out_info) {
  SLUICE_TRY(SLUICE_REQUIRE(plan != NULL && out_info != NULL, "sluice_plan_get_info: %s is NULL",
                            plan == NULL ? "plan" : "out_info"));
  SLUICE_TRY(sluice_struct_check_size(out_info, "sluice_plan_info_t"));
  const sluice_plan_data_t* d = &plan->data;
  sluice_plan_breakdown_t parts;
  const sluice_plan_problem_t problem = problem_of(plan);
  SLUICE_TRY(sluice_plan_break_down(&problem, d, &parts));
  sluice_plan_info_t info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  info.max_tokens = d->inputs.max_tokens;
  info.chunk_rows = d->chunk_rows, info.kept_rows = d->kept_rows;
  info.num_blocks = d->num_blocks, info.num_chunks = d->num_chunks, info.max_chunks = d->max_chunks;
  info.restore_input = d->restore_input, info.restore_pre_activation = d->restore_pre_activation,
  info.wgrad_mode = d->wgrad_mode;
  info.max_outstanding = d->inputs.max_outstanding, info.kept_chunks = d->kept_chunks;
  info.base_bytes = d->bytes.base, info.slot_bytes = d->bytes.slots, info.routing_bytes = d->bytes.routing;
  info.schedule_bytes = d->bytes.schedules, info.header_bytes = d->bytes.headers;
  info.gemm_bytes = d->bytes.gemms, info.step_bytes = d->bytes.step, info.total_bytes = d->bytes.total;
  info.relative_time = d->cost;
  info.host_pool_bytes = d->bytes.host_pool;
  info.communication_bytes = parts.communication, info.saved_bytes = parts.saved;
  info.deferred_bytes = parts.deferred, info.peak_slot_bytes = parts.peak_slots;
  info.peak_direction = parts.peak_direction;
  snprintf(info.peak_op, sizeof info.peak_op, "%s", sluice_op_name(parts.peak_op));
  sluice_struct_give(out_info, &info, sizeof info);
  return SLUICE_OK;
}

sluice_status_t sluice_plan_candidates(const sluice_plan_t* plan, sluice_plan_candidate_t* out_candidates,
                                       int32_t capacity, int32_t* out_count) {
  SLUICE_TRY(SLUICE_REQUIRE(plan != NULL && out_count != NULL && (out_candidates != NULL || capacity <= 0),
                            "sluice_plan_candidates: %s is NULL",
                            plan == NULL        ? "plan"
                            : out_count == NULL ? "out_count"
                                                : "out_candidates"));
  *out_count = plan->num_lines;
  for (int32_t i = 0; i < plan->num_lines && i < capacity; ++i) out_candidates[i] = plan->lines[i];
  return SLUICE_OK;
}

sluice_status_t sluice_plan_predict_step(const sluice_plan_t* plan, int32_t num_chunks, const int64_t* rows_per_chunk,
                                         int32_t kept_chunks, int64_t num_tokens, int64_t num_sent,
                                         uint64_t* out_bytes) {
  SLUICE_TRY(SLUICE_REQUIRE(plan != NULL && rows_per_chunk != NULL && out_bytes != NULL,
                            "sluice_plan_predict_step: %s is NULL",
                            plan == NULL             ? "plan"
                            : rows_per_chunk == NULL ? "rows_per_chunk"
                                                     : "out_bytes"));
  SLUICE_TRY(SLUICE_REQUIRE(num_chunks >= 1 && num_chunks <= SLUICE_MAX_CHUNKS,
                            "sluice_plan_predict_step: num_chunks is %d", num_chunks));
  SLUICE_TRY(SLUICE_REQUIRE(kept_chunks >= 0, "sluice_plan_predict_step: kept_chunks is %d; it must be at least 0",
                            kept_chunks));
  SLUICE_TRY(SLUICE_REQUIRE(num_tokens >= 0 && num_tokens <= INT32_MAX,
                            "sluice_plan_predict_step: num_tokens is %lld; it must be in [0, 2^31)",
                            (long long)num_tokens));
  SLUICE_TRY(SLUICE_REQUIRE(num_sent >= 0 && num_sent <= INT32_MAX,
                            "sluice_plan_predict_step: num_sent is %lld; it must be in [0, 2^31)",
                            (long long)num_sent));
  int64_t kept[SLUICE_MAX_CHUNKS], num_rows = 0;
  for (int32_t i = 0; i < num_chunks; ++i) {
    SLUICE_TRY(SLUICE_REQUIRE(rows_per_chunk[i] >= 0 && rows_per_chunk[i] <= INT32_MAX,
                              "sluice_plan_predict_step: rows_per_chunk[%d] is %lld", i, (long long)rows_per_chunk[i]));
    kept[i] = i < kept_chunks ? rows_per_chunk[i] : -1;
    num_rows += rows_per_chunk[i];
  }
  const sluice_plan_problem_t problem = problem_of(plan);
  *out_bytes = sluice_plan_step_bytes(&problem, &plan->data, num_chunks, kept, num_tokens, num_sent, num_rows);
  return SLUICE_OK;
}

sluice_status_t sluice_moe_use_plan(sluice_moe_t* moe, const sluice_plan_t* plan) {
  if (moe == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_moe_use_plan: moe is NULL");
  if (plan != NULL && plan->key != sluice_layer_plan_key(moe)) {
    return SLUICE_FAIL(
        SLUICE_E_INVALID_ARGUMENT,
        "layer %d: this plan was made for layer %d, which has another config or had other numbers of experts",
        moe->shape.config.layer_id, plan->moe->shape.config.layer_id);
  }
  SLUICE_TRY(sluice_engine_enter(moe->context, "sluice_moe_use_plan"));
  sluice_status_t status = SLUICE_OK;
  if (plan == NULL) {
    sluice_plan_remove(moe);
  } else {
    /* Memory left from passes without a plan may exceed the bounds of all plans. */
    const int is_budgeted = moe->context->memory_budget > 0 || moe->context->host_memory_budget > 0;
    if (moe->context->num_given_plans == 0 && !is_budgeted) sluice_engine_give_back(moe->context);
    status = sluice_plan_install(moe, &plan->data);
    if (status == SLUICE_OK) sluice_plan_was_given(moe);
  }
  sluice_engine_leave(moe->context);
  return status;
}

sluice_status_t sluice_moe_smallest_budget(sluice_moe_t* moe, int64_t num_tokens, uint64_t* out_bytes) {
  SLUICE_TRY(SLUICE_REQUIRE(out_bytes != NULL, "sluice_moe_smallest_budget: out_bytes is NULL"));
  *out_bytes = 0;
  SLUICE_TRY(SLUICE_REQUIRE(moe != NULL, "sluice_moe_smallest_budget: moe is NULL"));
  SLUICE_TRY(SLUICE_REQUIRE(num_tokens >= 1 && num_tokens <= INT32_MAX,
                            "sluice_moe_smallest_budget: num_tokens is %lld; it must be in [1, 2^31)",
                            (long long)num_tokens));
  SLUICE_TRY(sluice_engine_enter(moe->context, "sluice_moe_smallest_budget"));
  uint64_t bytes = 0;
  sluice_status_t status = sluice_planned_least_bytes(moe, num_tokens, &bytes);
  sluice_engine_leave(moe->context);
  if (status == SLUICE_OK) *out_bytes = bytes;
  return status;
}

/* Returns the maximum over the layers, in a context that is entered. */
static sluice_status_t least_of_all(sluice_moe_t* const* layers, int32_t num_layers, int64_t num_tokens,
                                    uint64_t* out_bytes) {
  uint64_t most = 0;
  for (int32_t i = 0; i < num_layers; ++i) {
    uint64_t bytes = 0;
    SLUICE_TRY(sluice_planned_least_bytes(layers[i], num_tokens, &bytes));
    most = bytes > most ? bytes : most;
  }
  *out_bytes = most;
  return SLUICE_OK;
}

sluice_status_t sluice_moe_smallest_budgets(sluice_moe_t* const* layers, int32_t num_layers, int64_t num_tokens,
                                            uint64_t most, int32_t* out_count, uint64_t* out_bytes) {
  SLUICE_TRY(SLUICE_REQUIRE(out_count != NULL && out_bytes != NULL, "sluice_moe_smallest_budgets: %s is NULL",
                            out_count == NULL ? "out_count" : "out_bytes"));
  *out_count = 0;
  SLUICE_TRY(SLUICE_REQUIRE(layers != NULL && num_layers >= 1,
                            "sluice_moe_smallest_budgets: there are no layers: give at least one"));
  SLUICE_TRY(SLUICE_REQUIRE(num_tokens >= 1 && num_tokens <= INT32_MAX,
                            "sluice_moe_smallest_budgets: num_tokens is %lld; it must be in [1, 2^31)",
                            (long long)num_tokens));
  for (int32_t i = 0; i < num_layers; ++i) {
    SLUICE_TRY(SLUICE_REQUIRE(layers[i] != NULL, "sluice_moe_smallest_budgets: layers[%d] is NULL", i));
    SLUICE_TRY(SLUICE_REQUIRE(
        layers[i]->context == layers[0]->context,
        "sluice_moe_smallest_budgets: layers[%d] has another context than layers[0]: make one call for each context",
        i));
  }
  SLUICE_TRY(sluice_engine_enter(layers[0]->context, "sluice_moe_smallest_budgets"));
  sluice_status_t status = SLUICE_OK;
  int32_t count = 0;
  while (count < SLUICE_BUDGET_SIZES && (count == 0 || out_bytes[count - 1] <= most)) {
    uint64_t bytes = 0;
    status = least_of_all(layers, num_layers, sluice_budget_tokens(num_tokens, count), &bytes);
    if (status != SLUICE_OK) break;
    out_bytes[count] = count > 0 && bytes < out_bytes[count - 1] ? out_bytes[count - 1] : bytes;
    ++count;
  }
  sluice_engine_leave(layers[0]->context);
  *out_count = count;
  return count > 0 ? SLUICE_OK : status;
}

#define MOST_CONTEXTS 512
#define MOST_BYTES    ((uint64_t)1 << 53) /* so that sums over the contexts stay below 2^63 */

static sluice_status_t check_division(uint64_t total, int32_t num_contexts, const uint64_t* weights, int32_t num_sizes,
                                      const uint64_t* needs) {
  SLUICE_TRY(SLUICE_REQUIRE(total >= 1, "sluice_budget_divide: total is 0: give the bytes to divide"));
  SLUICE_TRY(SLUICE_REQUIRE(num_contexts >= 1 && num_contexts <= MOST_CONTEXTS,
                            "sluice_budget_divide: num_contexts is %d; it must be in [1, %d]", num_contexts,
                            MOST_CONTEXTS));
  SLUICE_TRY(SLUICE_REQUIRE(num_sizes >= 0 && num_sizes <= SLUICE_BUDGET_SIZES,
                            "sluice_budget_divide: num_sizes is %d; it must be in [0, %d]", num_sizes,
                            SLUICE_BUDGET_SIZES));
  SLUICE_TRY(SLUICE_REQUIRE(weights != NULL && (needs != NULL || num_sizes == 0), "sluice_budget_divide: %s is NULL",
                            weights == NULL ? "weights" : "needs"));
  for (int32_t c = 0; c < num_contexts; ++c) {
    SLUICE_TRY(SLUICE_REQUIRE(weights[c] >= 1 && weights[c] <= MOST_BYTES,
                              "sluice_budget_divide: weights[%d] is %llu; it must be in [1, 2^53]", c,
                              (unsigned long long)weights[c]));
    for (int32_t s = 0; s < num_sizes; ++s) {
      const uint64_t* need = &needs[(size_t)c * (size_t)num_sizes + (size_t)s];
      SLUICE_TRY(SLUICE_REQUIRE(*need <= MOST_BYTES && (s == 0 || need[0] >= need[-1]),
                                "sluice_budget_divide: context %d needs %llu bytes for size %d; needs are at most 2^53 "
                                "and do not decrease",
                                c, (unsigned long long)*need, s));
    }
  }
  return SLUICE_OK;
}

sluice_status_t sluice_budget_divide(uint64_t total, int32_t num_contexts, const uint64_t* weights, int32_t num_sizes,
                                     const uint64_t* needs, uint64_t* out_shares) {
  SLUICE_TRY(SLUICE_REQUIRE(out_shares != NULL, "sluice_budget_divide: out_shares is NULL"));
  SLUICE_TRY(check_division(total, num_contexts, weights, num_sizes, needs));
  return sluice_budget_division(total, num_contexts, weights, num_sizes, needs, out_shares);
}

/* ---- plans as bytes ---- */

sluice_status_t sluice_plan_write(const sluice_plan_t* plan, void* data, uint64_t* inout_bytes) {
  SLUICE_TRY(SLUICE_REQUIRE(plan != NULL && inout_bytes != NULL, "sluice_plan_write: %s is NULL",
                            plan == NULL ? "plan" : "inout_bytes"));
  uint64_t room = *inout_bytes;
  *inout_bytes = SLUICE_PLAN_FILE_BYTES;
  if (data == NULL) return SLUICE_OK;
  SLUICE_TRY(SLUICE_REQUIRE(room >= SLUICE_PLAN_FILE_BYTES, "sluice_plan_write: room for %llu bytes, the plan has %llu",
                            (unsigned long long)room, (unsigned long long)SLUICE_PLAN_FILE_BYTES));
  sluice_plan_file_write(&plan->data, plan->key, data);
  return SLUICE_OK;
}

sluice_status_t sluice_plan_read(sluice_moe_t* moe, const void* data, uint64_t bytes, sluice_plan_t** out_plan) {
  if (out_plan == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_plan_read: out_plan is NULL");
  *out_plan = NULL;
  SLUICE_TRY(SLUICE_REQUIRE(moe != NULL && data != NULL, "sluice_plan_read: %s is NULL", moe == NULL ? "moe" : "data"));
  sluice_plan_data_t read;
  SLUICE_TRY(sluice_plan_file_read(data, bytes, sluice_layer_plan_key(moe), moe->shape.config.layer_id, &read));
  SLUICE_TRY(sluice_engine_enter(moe->context, "sluice_plan_read"));
  const sluice_plan_problem_t problem = sluice_layer_plan_problem(moe, 0);
  sluice_status_t status = sluice_plan_reread(&problem, &read);
  if (status == SLUICE_OK) status = new_plan(moe, out_plan);
  if (status == SLUICE_OK) (*out_plan)->data = read;
  sluice_engine_leave(moe->context);
  return status;
}

void sluice_paper_footprint(int64_t rows, int64_t model_width, int64_t hidden_width, int32_t num_experts,
                            int32_t num_chunks, sluice_paper_footprint_t* out) {
  sluice_footprint(rows, model_width, hidden_width, num_experts, num_chunks, out);
}
