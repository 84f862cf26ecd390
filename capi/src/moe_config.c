// SPDX-License-Identifier: Apache-2.0
/* Creates a layer: every field of the config is checked here, with a message that says what, where and what to do. */
#include <float.h>
#include <stdio.h>
#include <unistd.h>

#include "backend/base/dtype.h"
#include "backend/base/structs.h"
#include "backend/model/restore.h"
#include "backend/model/words.h"
#include "backend/moe/context/row_memory.h"
#include "backend/moe/layer/layer.h"
#include "backend/moe/layer/layer_life.h"
#include "backend/moe/layer/placement.h"
#include "backend/moe/run/active_plan.h"
#include "backend/moe/run/run.h"
#include "capi/src/check_layer.h"

SLUICE_DEFINE_INIT(sluice_moe_config, .top_k = 1, .dtype = SLUICE_DTYPE_F32, .activation = SLUICE_ACTIVATION_GELU,
                   .wgrad_mode = SLUICE_WGRAD_ADAPTIVE, .restore_input = SLUICE_RESTORE_ADAPTIVE,
                   .restore_pre_activation = SLUICE_RESTORE_ADAPTIVE, .swiglu_alpha = 1.0f, .swiglu_limit = FLT_MAX)

/* above < x, and finite; false for NaN */
static int is_between(float x, float above) { return x > above && x <= FLT_MAX; }

static int is_flag(int32_t value) { return value == 0 || value == 1; }

static sluice_status_t check_numbers(const sluice_moe_config_t* c) {
  int32_t id = c->layer_id;
  SLUICE_TRY(SLUICE_REQUIRE(c->model_width >= 1 && c->model_width <= INT32_MAX,
                            "layer %d: model_width is %lld; it must be in [1, 2^31)", id, (long long)c->model_width));
  SLUICE_TRY(SLUICE_REQUIRE(c->callback_experts || (c->hidden_width >= 1 && c->hidden_width <= INT32_MAX / 2),
                            "layer %d: hidden_width is %lld; it must be in [1, 2^30)", id, (long long)c->hidden_width));
  SLUICE_TRY(SLUICE_REQUIRE(c->num_experts >= 1 && c->num_experts <= 1 << 20,
                            "layer %d: num_experts is %d; it must be in [1, 2^20]", id, c->num_experts));
  SLUICE_TRY(SLUICE_REQUIRE(c->top_k >= 1 && c->top_k <= c->num_experts,
                            "layer %d: top_k is %d; it must be in [1, num_experts = %d]", id, c->top_k,
                            c->num_experts));
  SLUICE_TRY(SLUICE_REQUIRE(c->dtype >= SLUICE_DTYPE_F32 && c->dtype <= SLUICE_DTYPE_F64,
                            "layer %d: dtype is %s (%d); known are f32 (1), bf16 (2), f16 (3) and f64 (4)", id,
                            sluice_dtype_name(c->dtype), c->dtype));
  SLUICE_TRY(SLUICE_REQUIRE(
      c->activation >= SLUICE_ACTIVATION_IDENTITY && c->activation <= SLUICE_ACTIVATION_SWIGLU,
      "layer %d: activation is %d; known are identity (0), relu (1), gelu (2), gelu_tanh (3), silu (4), relu2 (5) and "
      "swiglu (6)",
      id, c->activation));
  SLUICE_TRY(SLUICE_REQUIRE(c->gated >= SLUICE_GATED_NO && c->gated <= SLUICE_GATED_INTERLEAVED,
                            "layer %d: gated is %d; known are no (0), halves (1) and interleaved (2)", id, c->gated));
  SLUICE_TRY(SLUICE_REQUIRE(c->activation != SLUICE_ACTIVATION_SWIGLU || c->gated != SLUICE_GATED_NO,
                            "layer %d: activation swiglu needs a gate: set gated", id));
  SLUICE_TRY(SLUICE_REQUIRE(
      is_between(c->swiglu_alpha, 0) && is_between(c->swiglu_limit, 0) && is_between(c->swiglu_offset, -FLT_MAX),
      "layer %d: swiglu_alpha is %g, swiglu_limit %g and swiglu_offset %g; the first two are above 0, all are finite",
      id, (double)c->swiglu_alpha, (double)c->swiglu_limit, (double)c->swiglu_offset));
  SLUICE_TRY(SLUICE_REQUIRE(c->num_chunks >= 0 && c->num_chunks <= SLUICE_MAX_CHUNKS,
                            "layer %d: num_chunks is %d; it must be in [1, %d], or 0 to let Sluice choose", id,
                            c->num_chunks, SLUICE_MAX_CHUNKS));
  SLUICE_TRY(SLUICE_REQUIRE(c->wgrad_mode >= SLUICE_WGRAD_ADAPTIVE && c->wgrad_mode <= SLUICE_WGRAD_PER_CHUNK,
                            "layer %d: wgrad_mode is %d; known are adaptive (-1), deferred (0) and per chunk (1)", id,
                            c->wgrad_mode));
  SLUICE_TRY(SLUICE_REQUIRE(c->grouping >= SLUICE_GROUPING_ADAPTIVE && c->grouping <= SLUICE_GROUPING_ON,
                            "layer %d: grouping is %d; known are adaptive (0), off (1) and on (2)", id, c->grouping));
  char known[SLUICE_RESTORE_TEXT_BYTES];
  SLUICE_TRY(SLUICE_REQUIRE(
      c->restore_input == SLUICE_RESTORE_ADAPTIVE || sluice_restore_is_for(c->restore_input, SLUICE_T_DI),
      "layer %d: restore_input is %d; known are adaptive (-1), %s", id, c->restore_input,
      sluice_restore_choices(SLUICE_T_DI, known)));
  SLUICE_TRY(SLUICE_REQUIRE(c->restore_pre_activation == SLUICE_RESTORE_ADAPTIVE ||
                                sluice_restore_is_for(c->restore_pre_activation, SLUICE_T_M),
                            "layer %d: restore_pre_activation is %d; known are adaptive (-1), %s", id,
                            c->restore_pre_activation, sluice_restore_choices(SLUICE_T_M, known)));
  return SLUICE_REQUIRE(is_flag(c->bias) && is_flag(c->callback_experts),
                        "layer %d: bias and callback_experts are 0 or 1, found %d, %d", id, c->bias,
                        c->callback_experts);
}

static sluice_status_t check_policies(const sluice_moe_config_t* c) {
  const int32_t di = sluice_restore_of(c->restore_input), m = sluice_restore_of(c->restore_pre_activation);
  if (!c->callback_experts || sluice_restore_fits_callback(di, m)) return SLUICE_OK;
  char known[SLUICE_RESTORE_TEXT_BYTES];
  return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                     "layer %d: callback experts take %s; found restore_input %s, restore_pre_activation %s",
                     c->layer_id, sluice_restore_callback_choices(known), sluice_restore_word(c->restore_input),
                     sluice_restore_word(c->restore_pre_activation));
}

static sluice_status_t check_lora(const sluice_moe_config_t* c) {
  const int32_t id = c->layer_id;
  SLUICE_TRY(SLUICE_REQUIRE(c->lora_rank >= 0 && c->lora_rank <= SLUICE_MOST_LORA_RANK,
                            "layer %d: lora_rank is %d; it must be in [0, %d]", id, c->lora_rank,
                            SLUICE_MOST_LORA_RANK));
  return SLUICE_REQUIRE(c->lora_rank == 0 || !c->callback_experts,
                        "layer %d: lora_rank is %d, but its experts are the host's own (callback_experts), and so "
                        "are their adapters: set it to 0",
                        id, c->lora_rank);
}

/* Checks what is possible if every exchange has a fixed size. */
static sluice_status_t check_capacity(const sluice_context_t* context, sluice_moe_config_t* c) {
  int32_t id = c->layer_id;
  SLUICE_TRY(SLUICE_REQUIRE(c->exchange_mode == SLUICE_EXCHANGE_EXACT || c->exchange_mode == SLUICE_EXCHANGE_CAPACITY,
                            "layer %d: exchange_mode is %d; known are exact (0) and capacity (1)", id,
                            c->exchange_mode));
  SLUICE_TRY(SLUICE_REQUIRE(c->chunking == SLUICE_CHUNKING_ADAPTIVE || c->chunking == SLUICE_CHUNKING_TOKENS,
                            "layer %d: chunking is %d; known are adaptive (0) and tokens (1)", id, c->chunking));
  if (c->exchange_mode == SLUICE_EXCHANGE_EXACT) {
    SLUICE_TRY(SLUICE_REQUIRE(c->capacity_rows == 0,
                              "layer %d: capacity_rows is %lld, but exchange_mode is exact: set 0, or mode capacity",
                              id, (long long)c->capacity_rows));
    return SLUICE_OK;
  }
  if (c->num_chunks == 0 && context->world_size > 1) {
    return SLUICE_FAIL(
        SLUICE_E_UNSUPPORTED,
        "layer %d: num_chunks is 0, chosen by Sluice, but capacity_rows is a number of rows per chunk: give num_chunks",
        id);
  }
  if (c->num_chunks == 0) c->num_chunks = 1;
  int64_t most = INT32_MAX / ((int64_t)c->num_chunks * c->num_experts);
  return SLUICE_REQUIRE(c->capacity_rows >= 1 && c->capacity_rows <= most,
                        "layer %d: capacity_rows is %lld; with %d chunks and %d experts it must be in [1, %lld]", id,
                        (long long)c->capacity_rows, c->num_chunks, c->num_experts, (long long)most);
}

/* Checks what is possible if token copies are sent instead of rows. A single rank sends neither. */
static sluice_status_t check_deduplicate(const sluice_context_t* context, const sluice_moe_config_t* c) {
  int32_t id = c->layer_id;
  SLUICE_TRY(SLUICE_REQUIRE(c->deduplicate >= SLUICE_DEDUPLICATE_NONE && c->deduplicate <= SLUICE_DEDUPLICATE_ANY,
                            "layer %d: deduplicate is %d; it must be 0, 1 (by rank), 2 (by node), 3 (by either) or 4 "
                            "(chosen)",
                            id, c->deduplicate));
  if (c->deduplicate == SLUICE_DEDUPLICATE_NONE || c->deduplicate == SLUICE_DEDUPLICATE_ANY) return SLUICE_OK;
  if (c->deduplicate == SLUICE_DEDUPLICATE_NODES && context->ranks_per_node > 64 &&
      context->ranks_per_node < context->world_size) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "layer %d: deduplicate is 2 (by node) with ranks_per_node %d, but it supports at most 64 ranks "
                       "per node: set it to 1 (by rank)",
                       id, context->ranks_per_node);
  }
  if (c->exchange_mode == SLUICE_EXCHANGE_CAPACITY) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "layer %d: deduplicate is %s, but exchange_mode capacity sends fixed numbers of rows for each "
                       "expert: set deduplicate to 0, or exchange_mode to exact",
                       id, sluice_deduplicate_word(c->deduplicate));
  }
  return SLUICE_OK;
}

/* On return weight_block is that of the format. */
static sluice_status_t check_weights(sluice_moe_config_t* c) {
  const int32_t id = c->layer_id;
  const char* name = sluice_weights_word(c->weight_format);
  SLUICE_TRY(SLUICE_REQUIRE(c->weight_format == SLUICE_WEIGHTS_PLAIN || !c->callback_experts,
                            "layer %d: weight_format is %s, but callback experts have weights of their own: set plain",
                            id, name));
  char what[32];
  snprintf(what, sizeof what, "layer %d", id);
  return sluice_check_weight_format(what, c->weight_format, &c->weight_block, c->model_width, c->hidden_width);
}

/* Reuse keeps no rows, so a policy that keeps them contradicts it. */
static sluice_status_t check_reuse(const sluice_moe_config_t* c) {
  SLUICE_TRY(SLUICE_REQUIRE(is_flag(c->reuse), "layer %d: reuse is %d; it must be 0 or 1", c->layer_id, c->reuse));
  if (!c->reuse) return SLUICE_OK;
  const int keeps = sluice_restore_is_kept(c->restore_input) || sluice_restore_is_kept(c->restore_pre_activation) ||
                    c->restore_input_of != NULL || c->restore_pre_activation_of != NULL;
  SLUICE_TRY(SLUICE_REQUIRE(!keeps,
                            "layer %d: reuse is 1, and a policy keeps rows or names chunks (restore_input %s, "
                            "restore_pre_activation %s): leave the policies open (-1), or set reuse to 0",
                            c->layer_id, sluice_restore_word(c->restore_input),
                            sluice_restore_word(c->restore_pre_activation)));
  char known[SLUICE_RESTORE_TEXT_BYTES];
  if (c->callback_experts && !sluice_restore_is_computed_again(c->restore_pre_activation)) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "layer %d: reuse is 1, and callback experts keep their rows unless their forward may run again: "
                       "they take %s",
                       c->layer_id, sluice_restore_callback_choices(known));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_moe_create(sluice_context_t* context, const sluice_moe_config_t* config,
                                  sluice_moe_t** out_moe) {
  if (out_moe == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_moe_create: out_moe is NULL");
  *out_moe = NULL;
  if (context == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_moe_create: context is NULL");
  SLUICE_READ_EXTENSIBLE(sluice_moe_config, checked, config, offsetof(sluice_moe_config_t, restore_input));
  SLUICE_TRY(check_numbers(&checked));
  const sluice_expert_placement_t placement = {.expert_rank = checked.expert_rank, .expert_slot = checked.expert_slot};
  SLUICE_TRY(sluice_placement_check(&placement, checked.layer_id, checked.num_experts, context->world_size));
  if (checked.callback_experts) checked.hidden_width = 0;
  SLUICE_TRY(check_weights(&checked));
  SLUICE_TRY(check_policies(&checked));
  SLUICE_TRY(check_reuse(&checked));
  char what[32];
  sluice_chunk_policies_t policies;
  snprintf(what, sizeof what, "layer %d", checked.layer_id);
  SLUICE_TRY(sluice_chunk_policies_read(what, checked.num_chunks, checked.callback_experts, checked.restore_input_of,
                                        checked.restore_pre_activation_of, &checked.restore_input,
                                        &checked.restore_pre_activation, &policies));
  SLUICE_TRY(check_lora(&checked));
  SLUICE_TRY(check_capacity(context, &checked));
  SLUICE_TRY(check_deduplicate(context, &checked));
  SLUICE_TRY(sluice_engine_enter(context, "sluice_moe_create"));
  sluice_status_t status = sluice_layer_create(context, &checked, &policies, out_moe);
  sluice_engine_leave(context);
  return status;
}

void sluice_moe_destroy(sluice_moe_t* moe) {
  if (moe != NULL && moe->context->pid == getpid()) sluice_plan_lift_limits(moe);
  sluice_layer_release(moe);
}

int32_t sluice_moe_num_local_experts(const sluice_moe_t* moe) { return moe == NULL ? 0 : moe->shape.num_local; }

/* ---- the table of restore policies ---- */

sluice_status_t sluice_restore_policies_json(char* text, uint64_t* inout_bytes) {
  SLUICE_TRY(SLUICE_REQUIRE(inout_bytes != NULL, "sluice_restore_policies_json: inout_bytes is NULL"));
  const uint64_t room = *inout_bytes;
  *inout_bytes = sluice_restore_write_json(NULL, 0) + 1;
  if (text == NULL) return SLUICE_OK;
  SLUICE_TRY(SLUICE_REQUIRE(room >= *inout_bytes,
                            "sluice_restore_policies_json: room for %llu bytes, the text has %llu",
                            (unsigned long long)room, (unsigned long long)*inout_bytes));
  sluice_restore_write_json(text, room);
  return SLUICE_OK;
}
