// SPDX-License-Identifier: Apache-2.0
/* A plan as bytes, and the check of a plan that was read from bytes. Its choices are checked, and everything that
 * follows from them is computed again, because arena sizes and divisions depend on these numbers. */
#include <assert.h>
#include <float.h>
#include <stddef.h>
#include <string.h>

#include "backend/base/hash.h"
#include "backend/model/words.h"
#include "backend/plan/plan_search.h"
#include "backend/plan/plan_sizes.h"

#define PLAN_MAGIC 0x51ce504cu
#define PLAN_FORM  4u

typedef struct plan_file_s {
  uint32_t magic;
  uint32_t form;
  uint64_t fingerprint; /* of the layer */
  sluice_plan_data_t data;
  uint64_t checksum; /* of everything before it */
} plan_file_t;
static_assert(sizeof(plan_file_t) == SLUICE_PLAN_FILE_BYTES, "callers bring so much room");

static uint64_t checksum_of(const plan_file_t* file) {
  return sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, file, offsetof(plan_file_t, checksum));
}

void sluice_plan_file_write(const sluice_plan_data_t* plan, uint64_t fingerprint, void* data) {
  plan_file_t file;
  memset(&file, 0, sizeof file);
  file.magic = PLAN_MAGIC, file.form = PLAN_FORM, file.fingerprint = fingerprint;
  memcpy(&file.data, plan, sizeof file.data);
  file.checksum = checksum_of(&file);
  memcpy(data, &file, sizeof file);
}

sluice_status_t sluice_plan_file_read(const void* data, uint64_t bytes, uint64_t fingerprint, int32_t layer_id,
                                      sluice_plan_data_t* out_plan) {
  plan_file_t file;
  SLUICE_TRY(SLUICE_REQUIRE(bytes == sizeof file, "sluice_plan_read: %llu bytes; a plan has %llu",
                            (unsigned long long)bytes, (unsigned long long)sizeof file));
  memcpy(&file, data, sizeof file);
  SLUICE_TRY(
      SLUICE_REQUIRE(file.magic == PLAN_MAGIC, "sluice_plan_read: magic is %#x; this is not a plan", file.magic));
  SLUICE_TRY(SLUICE_REQUIRE(file.form == PLAN_FORM, "sluice_plan_read: form is %u; this library reads form %u",
                            file.form, PLAN_FORM));
  SLUICE_TRY(SLUICE_REQUIRE(file.checksum == checksum_of(&file),
                            "sluice_plan_read: checksum is wrong; the bytes were changed"));
  SLUICE_TRY(SLUICE_REQUIRE(file.fingerprint == fingerprint,
                            "sluice_plan_read: fingerprint is of another layer than layer %d", layer_id));
  *out_plan = file.data;
  return SLUICE_OK;
}

/* ---- the check ---- */

#define MOST_BYTES (UINT64_MAX >> 2) /* sums of a few of these do not overflow */

static int is_di(int32_t restore) { return sluice_restore_is_for(restore, SLUICE_T_DI); }

static int is_m(int32_t restore) { return sluice_restore_is_for(restore, SLUICE_T_M); }

static sluice_status_t check_numbers(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* q) {
  SLUICE_TRY(SLUICE_REQUIRE(q->max_tokens >= 1 && q->max_tokens <= INT32_MAX,
                            "sluice_plan_read: max_tokens is %lld; it must be in [1, 2^31)", (long long)q->max_tokens));
  SLUICE_TRY(SLUICE_REQUIRE(q->max_outstanding >= 1, "sluice_plan_read: max_outstanding is %d; it must be at least 1",
                            q->max_outstanding));
  SLUICE_TRY(SLUICE_REQUIRE(q->num_chunks >= 0 && q->num_chunks <= SLUICE_MAX_CHUNKS,
                            "sluice_plan_read: num_chunks is %d as asked for; it must be in [0, %d]", q->num_chunks,
                            SLUICE_MAX_CHUNKS));
  SLUICE_TRY(SLUICE_REQUIRE(q->wgrad_mode >= SLUICE_WGRAD_ADAPTIVE && q->wgrad_mode <= SLUICE_WGRAD_PER_CHUNK,
                            "sluice_plan_read: wgrad_mode is %d as asked for; it must be in [-1, 1]", q->wgrad_mode));
  SLUICE_TRY(
      SLUICE_REQUIRE(q->separate_wgrad == 0 || (q->separate_wgrad == 1 && !problem->shape.config.callback_experts),
                     "sluice_plan_read: separate_wgrad is %d; it must be 0, or 1 where experts are not the host's own",
                     q->separate_wgrad));
  SLUICE_TRY(SLUICE_REQUIRE(q->may_keep_part == 0 || q->may_keep_part == 1,
                            "sluice_plan_read: may_keep_part is %d; it must be 0 or 1", q->may_keep_part));
  SLUICE_TRY(
      SLUICE_REQUIRE(q->reuse == 0 || q->reuse == 1, "sluice_plan_read: reuse is %d; it must be 0 or 1", q->reuse));
  SLUICE_TRY(SLUICE_REQUIRE(q->base <= MOST_BYTES, "sluice_plan_read: base_bytes is %llu; it must be in [0, 2^62)",
                            (unsigned long long)q->base));
  return SLUICE_OK;
}

static int is_zero(const uint8_t* list) {
  int any = 0;
  for (int32_t i = 0; i < SLUICE_MAX_CHUNKS; ++i) any |= list[i];
  return any == 0;
}

/* Checks the requested policies: one for all chunks, or lists that the policies for all chunks must match. */
static sluice_status_t check_asked(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  const sluice_plan_inputs_t* q = &plan->inputs;
  const sluice_chunk_policies_t* p = &q->policies;
  if (p->count == 0) {
    SLUICE_TRY(SLUICE_REQUIRE(q->restore_input == SLUICE_RESTORE_ADAPTIVE || is_di(q->restore_input),
                              "sluice_plan_read: restore_input is %s (%d) as asked for",
                              sluice_restore_word(q->restore_input), q->restore_input));
    SLUICE_TRY(SLUICE_REQUIRE(q->restore_pre_activation == SLUICE_RESTORE_ADAPTIVE || is_m(q->restore_pre_activation),
                              "sluice_plan_read: restore_pre_activation is %s (%d) as asked for",
                              sluice_restore_word(q->restore_pre_activation), q->restore_pre_activation));
    SLUICE_TRY(SLUICE_REQUIRE(
        is_zero(p->di) && is_zero(p->m),
        "sluice_plan_read: restore_input_of and restore_pre_activation_of name no chunk, and hold policies"));
    return SLUICE_OK;
  }
  SLUICE_TRY(
      SLUICE_REQUIRE(p->count == plan->num_chunks,
                     "sluice_plan_read: restore_input_of and restore_pre_activation_of name %d chunks; the plan has %d",
                     p->count, plan->num_chunks));
  int32_t di[SLUICE_MAX_CHUNKS], m[SLUICE_MAX_CHUNKS];
  for (int32_t i = 0; i < p->count; ++i) di[i] = p->di[i], m[i] = p->m[i];
  int32_t of_di = SLUICE_RESTORE_ADAPTIVE, of_m = SLUICE_RESTORE_ADAPTIVE;
  sluice_chunk_policies_t again;
  SLUICE_TRY(sluice_chunk_policies_read("sluice_plan_read", p->count, problem->shape.config.callback_experts, di, m,
                                        &of_di, &of_m, &again));
  SLUICE_TRY(SLUICE_REQUIRE(
      q->restore_input == of_di && q->restore_pre_activation == of_m && memcmp(&again, p, sizeof again) == 0,
      "sluice_plan_read: restore_input is %s and restore_pre_activation %s; by the lists of the chunks they are %s and "
      "%s",
      sluice_restore_word(q->restore_input), sluice_restore_word(q->restore_pre_activation), sluice_restore_word(of_di),
      sluice_restore_word(of_m)));
  return SLUICE_OK;
}

/* Checks that the planner can have made these choices. */
static sluice_status_t check_chosen(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  const sluice_plan_inputs_t* q = &plan->inputs;
  const int32_t asked = sluice_shape_capacity(&problem->shape) > 0 ? problem->shape.config.num_chunks : q->num_chunks;
  SLUICE_TRY(SLUICE_REQUIRE(
      plan->num_chunks >= 1 && plan->num_chunks <= SLUICE_MAX_CHUNKS && (asked == 0 || plan->num_chunks == asked),
      "sluice_plan_read: num_chunks is %d; %d were asked for, and it must be in [1, %d]", plan->num_chunks, asked,
      SLUICE_MAX_CHUNKS));
  SLUICE_TRY(check_asked(problem, plan));
  const int is_list = q->policies.count > 0;
  SLUICE_TRY(SLUICE_REQUIRE(
      is_list ? plan->restore_input == q->restore_input
              : is_di(plan->restore_input) && (q->restore_input < 0 || plan->restore_input == q->restore_input),
      "sluice_plan_read: restore_input is %s (%d); %s was asked for", sluice_restore_word(plan->restore_input),
      plan->restore_input, sluice_restore_word(q->restore_input)));
  SLUICE_TRY(SLUICE_REQUIRE(
      is_list ? plan->restore_pre_activation == q->restore_pre_activation
              : is_m(plan->restore_pre_activation) &&
                    (q->restore_pre_activation < 0 || plan->restore_pre_activation == q->restore_pre_activation),
      "sluice_plan_read: restore_pre_activation is %s (%d); %s was asked for",
      sluice_restore_word(plan->restore_pre_activation), plan->restore_pre_activation,
      sluice_restore_word(q->restore_pre_activation)));
  SLUICE_TRY(SLUICE_REQUIRE(
      sluice_plan_is_allowed(problem, plan->restore_input, plan->restore_pre_activation),
      "sluice_plan_read: restore_input is %s and restore_pre_activation %s, which the experts of layer %d cannot do",
      sluice_restore_word(plan->restore_input), sluice_restore_word(plan->restore_pre_activation),
      problem->shape.config.layer_id));
  SLUICE_TRY(SLUICE_REQUIRE(plan->wgrad_mode >= SLUICE_WGRAD_DEFERRED && plan->wgrad_mode <= SLUICE_WGRAD_PER_CHUNK &&
                                (q->wgrad_mode < 0 || plan->wgrad_mode == q->wgrad_mode),
                            "sluice_plan_read: wgrad_mode is %s (%d); %s was asked for",
                            sluice_wgrad_word(plan->wgrad_mode), plan->wgrad_mode, sluice_wgrad_word(q->wgrad_mode)));
  SLUICE_TRY(
      SLUICE_REQUIRE(plan->cost >= 0 && plan->cost <= DBL_MAX, "sluice_plan_read: relative_time is %g", plan->cost));
  return SLUICE_OK;
}

static sluice_status_t check_layout(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  const int two_levels = sluice_shape_has_two_levels(&problem->shape);
  SLUICE_TRY(SLUICE_REQUIRE(plan->two_levels == two_levels,
                            "sluice_plan_read: two_levels is %d; of this layer it is %d", plan->two_levels,
                            two_levels));
  return SLUICE_REQUIRE(plan->shares_act == 0 || plan->shares_act == 1,
                        "sluice_plan_read: shares_act is %d; it must be 0 or 1", plan->shares_act);
}

/* Checks that chunks that are not kept can be sent and computed again. */
static sluice_status_t check_kept(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  const int is_stored = sluice_plan_row_bytes(problem, plan, sluice_restore_is_stored) > 0;
  const int64_t least = is_stored && !sluice_plan_can_fall_back(problem, plan) ? plan->worst_rows : 0;
  const int64_t most = is_stored ? plan->worst_rows : 0;
  SLUICE_TRY(SLUICE_REQUIRE(plan->kept_rows >= least && plan->kept_rows <= most,
                            "sluice_plan_read: kept_rows is %lld; it must be in [%lld, %lld]",
                            (long long)plan->kept_rows, (long long)least, (long long)most));
  const int32_t fewest = least > 0 ? plan->num_chunks : 1;
  SLUICE_TRY(SLUICE_REQUIRE(plan->kept_chunks >= fewest && plan->kept_chunks <= plan->num_chunks,
                            "sluice_plan_read: kept_chunks is %d; it must be in [%d, %d]", plan->kept_chunks, fewest,
                            plan->num_chunks));
  return SLUICE_OK;
}

/* Checks the bytes with sizes of this process: other GEMMs may need more. */
static sluice_status_t check_bytes(const sluice_plan_data_t* plan) {
  const sluice_plan_inputs_t* q = &plan->inputs;
  const sluice_plan_bytes_t* b = &plan->bytes;
  SLUICE_TRY(SLUICE_REQUIRE(
      b->step <= MOST_BYTES / (uint64_t)q->max_outstanding,
      "sluice_plan_read: max_outstanding is %d steps of %llu bytes each, more than the address space holds",
      q->max_outstanding, (unsigned long long)b->step));
  if (q->budget > 0 && b->total > q->budget) {
    return SLUICE_FAIL(SLUICE_E_OVER_BUDGET, "sluice_plan_read: memory_budget is %llu; the plan takes %llu here",
                       (unsigned long long)q->budget, (unsigned long long)b->total);
  }
  if (q->host_budget > 0 && b->host_pool > q->host_budget) {
    return SLUICE_FAIL(SLUICE_E_OVER_BUDGET,
                       "sluice_plan_read: host_memory_budget is %llu; offloaded rows take %llu here",
                       (unsigned long long)q->host_budget, (unsigned long long)b->host_pool);
  }
  return SLUICE_OK;
}

sluice_status_t sluice_plan_reread(const sluice_plan_problem_t* problem, sluice_plan_data_t* plan) {
  const sluice_plan_data_t file = *plan;
  SLUICE_TRY(check_numbers(problem, &plan->inputs));
  SLUICE_TRY(check_chosen(problem, plan));
  SLUICE_TRY(check_layout(problem, plan));
  sluice_plan_set_capacities(problem, file.num_chunks, plan);
  SLUICE_TRY(
      SLUICE_REQUIRE(plan->num_blocks == file.num_blocks && plan->blocks_per_chunk == file.blocks_per_chunk,
                     "sluice_plan_read: num_blocks is %d, %d to a chunk; by the other fields it is %d, %d to a chunk",
                     file.num_blocks, file.blocks_per_chunk, plan->num_blocks, plan->blocks_per_chunk));
  SLUICE_TRY(SLUICE_REQUIRE(plan->max_chunks == file.max_chunks,
                            "sluice_plan_read: max_chunks is %d; by the other fields it is %d", file.max_chunks,
                            plan->max_chunks));
  SLUICE_TRY(SLUICE_REQUIRE(
      plan->chunk_rows == file.chunk_rows && plan->worst_rows == file.worst_rows,
      "sluice_plan_read: chunk_rows is %lld of %lld rows at most; by the other fields it is %lld of %lld",
      (long long)file.chunk_rows, (long long)file.worst_rows, (long long)plan->chunk_rows,
      (long long)plan->worst_rows));
  SLUICE_TRY(check_kept(problem, plan));
  SLUICE_TRY(sluice_plan_measure(problem, plan));
  return check_bytes(plan);
}
