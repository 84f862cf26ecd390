// SPDX-License-Identifier: Apache-2.0
/* The public calls of the planner: check the arguments, then call backend/planner. */
#include "sluice/planner.h"

#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/structs.h"
#include "backend/calibrate/calibrate.h"
#include "backend/model/restore.h"
#include "backend/planner/layer_planner.h"
#include "backend/planner/placement/plan_placement.h"
#include "capi/src/check_layer.h"
#include "capi/src/planner.h"
#include "sluice/placement.h"

#define MOST_COUNTED 1152921504606846976.0 /* 2^60: sums of a few such numbers fit 64 bits */

struct sluice_planner_s {
  sluice_machine_t machine;
};

sluice_status_t sluice_planner_create(const char* machine_json, uint64_t length, sluice_planner_t** out_planner) {
  SLUICE_TRY(SLUICE_REQUIRE(out_planner != NULL, "sluice_planner_create: out_planner is NULL"));
  *out_planner = NULL;
  SLUICE_TRY(SLUICE_REQUIRE(machine_json != NULL, "sluice_planner_create: machine_json is NULL"));
  SLUICE_TRY(SLUICE_REQUIRE(length <= 1 << 24,
                            "sluice_planner_create: machine_json has %llu bytes; at most 16 MiB are read",
                            (unsigned long long)length));
  sluice_machine_t machine;
  SLUICE_TRY(sluice_machine_read(machine_json, length, &machine));
  return sluice_planner_of_machine(&machine, out_planner);
}

sluice_status_t sluice_planner_of_machine(const sluice_machine_t* machine, sluice_planner_t** out_planner) {
  sluice_planner_t* planner = sluice_alloc(sluice_process_allocator(), sizeof *planner, "planner");
  if (planner == NULL) return sluice_alloc_status();
  planner->machine = *machine;
  *out_planner = planner;
  return SLUICE_OK;
}

const sluice_machine_t* sluice_planner_machine(const sluice_planner_t* planner) { return &planner->machine; }

void sluice_planner_destroy(sluice_planner_t* planner) {
  sluice_free(sluice_process_allocator(), planner, sizeof *planner);
}

sluice_status_t sluice_planner_write_machine(const sluice_planner_t* planner, char* text, uint64_t* inout_bytes) {
  SLUICE_TRY(SLUICE_REQUIRE(planner != NULL && inout_bytes != NULL, "sluice_planner_write_machine: %s is NULL",
                            planner == NULL ? "planner" : "inout_bytes"));
  uint64_t room = *inout_bytes, needed = sluice_machine_write(&planner->machine, NULL, 0) + 1;
  *inout_bytes = needed;
  if (text == NULL) return SLUICE_OK;
  SLUICE_TRY(SLUICE_REQUIRE(room >= needed, "sluice_planner_write_machine: room for %llu bytes, the machine has %llu",
                            (unsigned long long)room, (unsigned long long)needed));
  sluice_machine_write(&planner->machine, text, room);
  return SLUICE_OK;
}

/* ---- calibrating ---- */

SLUICE_DEFINE_INIT(sluice_calibration_config, .seconds = 8, .dtype = SLUICE_DTYPE_F32)

sluice_status_t sluice_planner_calibrate(sluice_context_t* context, const sluice_calibration_config_t* config,
                                         sluice_planner_t** out_planner) {
  SLUICE_TRY(SLUICE_REQUIRE(out_planner != NULL, "sluice_planner_calibrate: out_planner is NULL"));
  *out_planner = NULL;
  SLUICE_TRY(SLUICE_REQUIRE(context != NULL, "sluice_planner_calibrate: context is NULL"));
  SLUICE_READ_EXTENSIBLE(sluice_calibration_config, c, config, sizeof c);
  SLUICE_TRY(SLUICE_REQUIRE(c.model_width >= 1 && c.model_width <= INT32_MAX,
                            "calibration: model_width is %lld; it must be in [1, 2^31)", (long long)c.model_width));
  SLUICE_TRY(SLUICE_REQUIRE(c.hidden_width >= 1 && c.hidden_width <= INT32_MAX / 2,
                            "calibration: hidden_width is %lld; it must be in [1, 2^30)", (long long)c.hidden_width));
  SLUICE_TRY(SLUICE_REQUIRE(c.seconds >= 0.05 && c.seconds <= 3600,
                            "calibration: seconds is %g; it must be in [0.05, 3600]", c.seconds));
  SLUICE_TRY(SLUICE_REQUIRE(c.dtype >= SLUICE_DTYPE_F32 && c.dtype <= SLUICE_DTYPE_F16,
                            "calibration: dtype is %s (%d); known are f32 (1), bf16 (2) and f16 (3)",
                            sluice_dtype_name(c.dtype), c.dtype));
  SLUICE_TRY(SLUICE_REQUIRE(c.refresh == 0 || c.refresh == 1, "calibration: refresh is %d; it is 0 or 1", c.refresh));
  SLUICE_TRY(sluice_engine_enter(context, "sluice_planner_calibrate"));
  const sluice_calibration_t wanted = {c.model_width, c.hidden_width, c.dtype, c.seconds};
  sluice_machine_t machine;
  sluice_status_t status = sluice_calibrate_cached(context, &wanted, c.cache_dir, c.refresh, &machine);
  sluice_engine_leave(context);
  return status == SLUICE_OK ? sluice_planner_of_machine(&machine, out_planner) : status;
}

/* ---- workloads ---- */

SLUICE_DEFINE_INIT(sluice_planner_workload, .skew = 1, .top_k = 1, .world_size = 1, .max_outstanding = 1,
                   .dtype = SLUICE_DTYPE_F32)

static sluice_status_t check_sizes(const sluice_planner_workload_t* w) {
  SLUICE_TRY(SLUICE_REQUIRE(w->model_width >= 1 && w->model_width <= INT32_MAX,
                            "workload: model_width is %lld; it must be in [1, 2^31)", (long long)w->model_width));
  SLUICE_TRY(SLUICE_REQUIRE(w->hidden_width >= 1 && w->hidden_width <= INT32_MAX / 2,
                            "workload: hidden_width is %lld; it must be in [1, 2^30)", (long long)w->hidden_width));
  SLUICE_TRY(SLUICE_REQUIRE(w->num_tokens >= 1 && w->num_tokens <= INT32_MAX,
                            "workload: num_tokens is %lld; it must be in [1, 2^31)", (long long)w->num_tokens));
  SLUICE_TRY(SLUICE_REQUIRE(w->world_size >= 1 && w->world_size <= 1 << 20,
                            "workload: world_size is %d; it must be in [1, 2^20]", w->world_size));
  SLUICE_TRY(SLUICE_REQUIRE(w->num_experts >= 1 && w->num_experts <= 1 << 20,
                            "workload: num_experts is %d; it must be in [1, 2^20]", w->num_experts));
  SLUICE_TRY(SLUICE_REQUIRE(w->num_experts % w->world_size == 0,
                            "workload: num_experts is %d and world_size %d; experts divide evenly over ranks",
                            w->num_experts, w->world_size));
  return SLUICE_REQUIRE(w->top_k >= 1 && w->top_k <= w->num_experts,
                        "workload: top_k is %d; it must be in [1, num_experts = %d]", w->top_k, w->num_experts);
}

/* Rejects sizes that are valid one by one but overflow 64 bits together. */
static sluice_status_t check_counts(const sluice_planner_workload_t* w) {
  double rows = (double)w->num_tokens * (double)w->world_size * (double)w->top_k;
  double row_bytes = 4 * ((double)w->model_width + 2 * (double)w->hidden_width + 64);
  double slots = rows * row_bytes * 16, steps = slots * (double)w->max_outstanding;
  SLUICE_TRY(SLUICE_REQUIRE(
      slots <= MOST_COUNTED && rows * (double)w->num_experts <= MOST_COUNTED,
      "workload: num_tokens %lld on each of world_size %d ranks, top_k %d, model_width %lld and hidden_width %lld "
      "make %.3g bytes on a rank that receives all, more than plans count (%.3g); is one of them wrong?",
      (long long)w->num_tokens, w->world_size, w->top_k, (long long)w->model_width, (long long)w->hidden_width,
      rows * row_bytes, MOST_COUNTED));
  SLUICE_TRY(
      SLUICE_REQUIRE(steps <= MOST_COUNTED,
                     "workload: max_outstanding is %d forwards of up to %.3g bytes each, more than plans count (%.3g)",
                     w->max_outstanding, rows * row_bytes, MOST_COUNTED));
  const int32_t experts = w->num_experts / w->world_size;
  double weights = (double)experts * (double)w->model_width * (double)w->hidden_width;
  return SLUICE_REQUIRE(
      weights * 64 <= MOST_COUNTED,
      "workload: num_experts %d on world_size %d ranks with model_width %lld and hidden_width %lld have %.3g "
      "parameters on a rank, more than plans count (%.3g)",
      w->num_experts, w->world_size, (long long)w->model_width, (long long)w->hidden_width, weights, MOST_COUNTED / 64);
}

/* Checks adapters, and weights in 4 or 8 bits. On return weight_block is that of the format. */
static sluice_status_t check_experts(sluice_planner_workload_t* w) {
  SLUICE_TRY(SLUICE_REQUIRE(w->lora_rank >= 0 && w->lora_rank <= SLUICE_MOST_LORA_RANK,
                            "workload: lora_rank is %d; it must be in [0, %d]", w->lora_rank, SLUICE_MOST_LORA_RANK));
  SLUICE_TRY(SLUICE_REQUIRE(!w->callback_experts || (w->lora_rank == 0 && w->weight_format == SLUICE_WEIGHTS_PLAIN),
                            "workload: lora_rank is %d and weight_format %d, but callback experts have weights and "
                            "adapters of their own: set "
                            "both to 0",
                            w->lora_rank, w->weight_format));
  return sluice_check_weight_format("workload", w->weight_format, &w->weight_block, w->model_width, w->hidden_width);
}

sluice_status_t sluice_planner_read_workload(const sluice_planner_workload_t* given, sluice_planner_workload_t* out) {
  SLUICE_TRY(SLUICE_REQUIRE(given != NULL, "workload is NULL: fill in a sluice_planner_workload_t"));
  SLUICE_READ_INTO(sluice_planner_workload, out, given, offsetof(sluice_planner_workload_t, host_memory_budget));
  SLUICE_TRY(check_sizes(out));
  SLUICE_TRY(SLUICE_REQUIRE(out->skew >= 1 && out->skew <= 1e6,
                            "workload: skew is %g; it must be at least 1 (1: balanced routing)", out->skew));
  SLUICE_TRY(SLUICE_REQUIRE(out->dtype >= SLUICE_DTYPE_F32 && out->dtype <= SLUICE_DTYPE_F16,
                            "workload: dtype is %s (%d); known are f32 (1), bf16 (2) and f16 (3)",
                            sluice_dtype_name(out->dtype), out->dtype));
  SLUICE_TRY(SLUICE_REQUIRE(out->gated >= SLUICE_GATED_NO && out->gated <= SLUICE_GATED_INTERLEAVED,
                            "workload: gated is %d; known are no (0), halves (1) and interleaved (2)", out->gated));
  SLUICE_TRY(SLUICE_REQUIRE(out->callback_experts == 0 || out->callback_experts == 1,
                            "workload: callback_experts is %d; it is 0 or 1", out->callback_experts));
  SLUICE_TRY(SLUICE_REQUIRE(out->max_outstanding >= 1, "workload: max_outstanding is %d; it must be at least 1",
                            out->max_outstanding));
  SLUICE_TRY(check_counts(out));
  SLUICE_TRY(SLUICE_REQUIRE(out->reserved == 0, "workload: reserved is %d; set it to 0", out->reserved));
  SLUICE_TRY(SLUICE_REQUIRE(out->chunking == SLUICE_CHUNKING_ADAPTIVE || out->chunking == SLUICE_CHUNKING_TOKENS,
                            "workload: chunking is %d; known are adaptive (0) and tokens (1)", out->chunking));
  SLUICE_TRY(SLUICE_REQUIRE(out->deduplicate >= SLUICE_DEDUPLICATE_NONE && out->deduplicate <= SLUICE_DEDUPLICATE_NODES,
                            "workload: deduplicate is %d; it must be 0, 1 (by rank) or 2 (by node)", out->deduplicate));
  SLUICE_TRY(SLUICE_REQUIRE(out->may_keep_part == 0 || out->may_keep_part == 1,
                            "workload: may_keep_part is %d; it is 0 or 1", out->may_keep_part));
  SLUICE_TRY(SLUICE_REQUIRE(
      out->activation >= SLUICE_ACTIVATION_IDENTITY && out->activation <= SLUICE_ACTIVATION_SWIGLU,
      "workload: activation is %d; known are SLUICE_ACTIVATION_* of sluice/moe.h, and 0 if it is not known",
      out->activation));
  SLUICE_TRY(
      SLUICE_REQUIRE(out->grouped == 0 || out->grouped == 1, "workload: grouped is %d; it is 0 or 1", out->grouped));
  SLUICE_TRY(SLUICE_REQUIRE(!out->grouped || (out->memory_budget == 0 && out->host_memory_budget == 0),
                            "workload: grouped is 1 under a budget, whose plans have one slot for rows in transit: "
                            "set grouped or the budgets to 0"));
  return check_experts(out);
}

static int may_restore(int32_t policy, int32_t tensor, int open) {
  return (open && policy == SLUICE_RESTORE_ADAPTIVE) || sluice_restore_is_for(policy, tensor);
}

static sluice_status_t check_choice(const sluice_planner_workload_t* w, const sluice_planner_choice_t* c, int open) {
  const char* any = open ? "any (-1), " : "";
  SLUICE_TRY(SLUICE_REQUIRE(c->num_chunks >= !open && c->num_chunks <= SLUICE_MAX_CHUNKS,
                            "choice: num_chunks is %d; it must be in [1, %d]%s", c->num_chunks, SLUICE_MAX_CHUNKS,
                            open ? ", or 0 for any" : ""));
  char known[SLUICE_RESTORE_TEXT_BYTES];
  SLUICE_TRY(SLUICE_REQUIRE(
      w->restore_input_of != NULL || may_restore(c->restore_input, SLUICE_T_DI, open),
      "choice: restore_input is %d; known are %s%s, and with the workload's restore_input_of by chunk (%d)",
      c->restore_input, any, sluice_restore_choices(SLUICE_T_DI, known), SLUICE_RESTORE_BY_CHUNK));
  SLUICE_TRY(SLUICE_REQUIRE(
      w->restore_pre_activation_of != NULL || may_restore(c->restore_pre_activation, SLUICE_T_M, open),
      "choice: restore_pre_activation is %d; known are %s%s, and with the workload's restore_pre_activation_of by "
      "chunk (%d)",
      c->restore_pre_activation, any, sluice_restore_choices(SLUICE_T_M, known), SLUICE_RESTORE_BY_CHUNK));
  return SLUICE_REQUIRE(c->wgrad_mode >= -open && c->wgrad_mode <= SLUICE_WGRAD_PER_CHUNK,
                        "choice: wgrad_mode is %d; known are %sdeferred (0) and per chunk (1)", c->wgrad_mode, any);
}

/* Only a plan determines which chunks are kept; without a budget there is none. */
static sluice_status_t check_kept(const sluice_planner_workload_t* w, const sluice_planner_choice_t* c) {
  SLUICE_TRY(SLUICE_REQUIRE(w->kept_chunks >= 0 && w->kept_chunks <= c->num_chunks,
                            "workload: kept_chunks is %d; it must be in [1, num_chunks = %d], or 0 for all",
                            w->kept_chunks, c->num_chunks));
  int is_part = w->kept_chunks > 0 && w->kept_chunks < c->num_chunks;
  return SLUICE_REQUIRE(
      !is_part || w->memory_budget != 0 || w->host_memory_budget != 0,
      "workload: kept_chunks is %d of %d and there is no budget, so all chunks are kept: set it to 0, or set "
      "memory_budget; to choose policies by chunk yourself, use restore_input_of and restore_pre_activation_of",
      w->kept_chunks, c->num_chunks);
}

sluice_status_t sluice_planner_read_choice(const sluice_planner_workload_t* w, const sluice_planner_choice_t* given,
                                           int open, sluice_planner_asked_t* out) {
  static const sluice_planner_choice_t any = {0, SLUICE_RESTORE_ADAPTIVE, SLUICE_RESTORE_ADAPTIVE,
                                              SLUICE_WGRAD_ADAPTIVE};
  if (given == NULL) given = &any;
  SLUICE_TRY(check_choice(w, given, open));
  out->choice = *given;
  return sluice_chunk_policies_read("workload", given->num_chunks, w->callback_experts, w->restore_input_of,
                                    w->restore_pre_activation_of, &out->choice.restore_input,
                                    &out->choice.restore_pre_activation, &out->policies);
}

/* ---- predicting ---- */

sluice_status_t sluice_planner_predict(const sluice_planner_t* planner, const sluice_planner_workload_t* workload,
                                       const sluice_planner_choice_t* choice,
                                       sluice_planner_prediction_t* out_prediction, sluice_planner_entry_t* out_entries,
                                       int32_t capacity) {
  SLUICE_TRY(SLUICE_REQUIRE(planner != NULL && choice != NULL && out_prediction != NULL,
                            "sluice_planner_predict: %s is NULL",
                            planner == NULL  ? "planner"
                            : choice == NULL ? "choice"
                                             : "out_prediction"));
  SLUICE_TRY(SLUICE_REQUIRE(capacity >= 0 && (capacity == 0 || out_entries != NULL),
                            "sluice_planner_predict: capacity is %d and out_entries %s", capacity,
                            out_entries == NULL ? "NULL" : "given"));
  SLUICE_TRY(sluice_struct_check_size(out_prediction, "sluice_planner_prediction_t"));
  sluice_planner_workload_t checked;
  SLUICE_TRY(sluice_planner_read_workload(workload, &checked));
  sluice_planner_asked_t asked;
  SLUICE_TRY(sluice_planner_read_choice(&checked, choice, 0, &asked));
  SLUICE_TRY(check_kept(&checked, choice));
  sluice_planner_prediction_t prediction;
  memset(&prediction, 0, sizeof prediction);
  SLUICE_TRY(sluice_planner_predict_layer(&planner->machine, &checked, &asked, &prediction, out_entries, capacity));
  sluice_struct_give(out_prediction, &prediction, sizeof prediction);
  return SLUICE_OK;
}

/* ---- choosing ---- */

sluice_status_t sluice_planner_choose(const sluice_planner_t* planner, const sluice_planner_workload_t* workload,
                                      const sluice_planner_choice_t* wanted, sluice_planner_candidate_t* out_candidates,
                                      int32_t capacity, int32_t* out_count, int32_t* out_chosen) {
  SLUICE_TRY(SLUICE_REQUIRE(planner != NULL && out_count != NULL, "sluice_planner_choose: %s is NULL",
                            planner == NULL ? "planner" : "out_count"));
  SLUICE_TRY(SLUICE_REQUIRE(capacity >= 0 && (capacity == 0 || out_candidates != NULL),
                            "sluice_planner_choose: capacity is %d and out_candidates %s", capacity,
                            out_candidates == NULL ? "NULL" : "given"));
  *out_count = 0;
  if (out_chosen != NULL) *out_chosen = -1;
  sluice_planner_workload_t checked;
  SLUICE_TRY(sluice_planner_read_workload(workload, &checked));
  sluice_planner_asked_t asked;
  SLUICE_TRY(sluice_planner_read_choice(&checked, wanted, 1, &asked));
  SLUICE_TRY(SLUICE_REQUIRE(checked.kept_chunks == 0,
                            "workload: kept_chunks is %d, but each candidate has its own number: set it to 0, and "
                            "may_keep_part to 1 for candidates that keep a part",
                            checked.kept_chunks));
  SLUICE_TRY(
      SLUICE_REQUIRE(!checked.grouped, "workload: grouped is 1, but candidates do not group exchanges: set it to 0"));
  sluice_planner_candidates_t* all = sluice_alloc(sluice_process_allocator(), sizeof *all, "candidates");
  if (all == NULL) return sluice_alloc_status();
  sluice_status_t status = sluice_planner_choose_layer(&planner->machine, &checked, &asked, all);
  if (status == SLUICE_OK || status == SLUICE_E_OVER_BUDGET) {
    *out_count = all->count;
    if (out_chosen != NULL) *out_chosen = all->best;
    for (int32_t i = 0; i < all->count && i < capacity; ++i) out_candidates[i] = all->list[i];
  }
  sluice_free(sluice_process_allocator(), all, sizeof *all);
  return status;
}

const char* sluice_planner_verdict_name(int32_t verdict) {
  static const char* const names[] = {"chosen", "slower", "over budget", "as fast", "over host budget"};
  return verdict >= 0 && verdict <= SLUICE_PLANNER_OVER_HOST_BUDGET ? names[verdict] : "unknown";
}

/* ---- placements ---- */

SLUICE_DEFINE_INIT(sluice_placement_problem, .target = 1.05)
SLUICE_DEFINE_INIT(sluice_placement_result, 0)
SLUICE_DEFINE_INIT(sluice_planner_move, .horizon_steps = 100, .least_gain = 0.05, .steps_since_move = -1)

sluice_status_t sluice_planner_placement(const sluice_placement_problem_t* problem,
                                         sluice_placement_result_t* inout_result) {
  SLUICE_READ_EXTENSIBLE(sluice_placement_problem, p, problem, sizeof p);
  SLUICE_READ_EXTENSIBLE(sluice_placement_result, r, inout_result, sizeof r);
  SLUICE_TRY(SLUICE_REQUIRE(r.expert_rank != NULL && r.expert_slot != NULL,
                            "result: %s is NULL; pass an array with one entry for each expert",
                            r.expert_rank == NULL ? "expert_rank" : "expert_slot"));
  SLUICE_TRY(sluice_placement_plan(&p, sluice_process_allocator(), &r));
  sluice_struct_give(inout_result, &r, sizeof r);
  return SLUICE_OK;
}

sluice_status_t sluice_planner_move_verdict(const sluice_planner_move_t* move, int32_t* out_verdict) {
  SLUICE_TRY(SLUICE_REQUIRE(out_verdict != NULL, "sluice_planner_move_verdict: out_verdict is NULL"));
  SLUICE_READ_EXTENSIBLE(sluice_planner_move, m, move, sizeof m);
  return sluice_move_verdict(&m, out_verdict);
}
