// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/run/planned_forward.h"

#include <stdio.h>

#include "backend/base/log.h"
#include "backend/base/text.h"
#include "backend/model/restore.h"
#include "backend/moe/context/row_memory.h"
#include "backend/moe/layer/layer_life.h"
#include "backend/moe/routing/binding_arrays.h"
#include "backend/moe/routing/chunks_by_tokens.h"
#include "backend/moe/routing/routes.h"
#include "backend/plan/candidates.h"

static sluice_status_t check_budget(const sluice_moe_t* moe, int of_host, uint64_t held, uint64_t step, uint64_t room,
                                    uint64_t budget) {
  if (held + step <= room) return SLUICE_OK;
  const sluice_budget_shares_t shares = sluice_context_budget_shares(moe->context);
  const sluice_budget_messages_t words = sluice_budget_messages(&shares, of_host, budget, budget);
  char of_held[SLUICE_SIZE_TEXT_BYTES], of_step[SLUICE_SIZE_TEXT_BYTES];
  return SLUICE_FAIL(
      SLUICE_E_OVER_BUDGET,
      "layer %d: forwards without their backward hold %llu bytes%s on one of the ranks (%s) and one more "
      "may take %llu (%s), %llu more than there is room for in %s (max_outstanding is %d): run their backward or "
      "drop steps first, raise max_outstanding, or raise %s",
      moe->shape.config.layer_id, (unsigned long long)held, of_host ? " of offloaded rows" : "",
      sluice_size_text(held, of_held), (unsigned long long)step, sluice_size_text(step, of_step),
      (unsigned long long)(held + step - room), words.what, moe->plan->inputs.max_outstanding,
      of_host ? "host_memory_budget" : "memory_budget");
}

sluice_status_t sluice_planned_check_room(const sluice_moe_t* moe, uint64_t held, uint64_t held_pool) {
  const sluice_plan_data_t* plan = moe->plan;
  const sluice_plan_inputs_t* inputs = &plan->inputs;
  if (inputs->budget > 0) {
    const uint64_t fixed = plan->bytes.total - (uint64_t)inputs->max_outstanding * plan->bytes.step;
    SLUICE_TRY(check_budget(moe, 0, held, plan->bytes.step, inputs->budget - fixed, inputs->budget));
  }
  if (inputs->host_budget == 0) return SLUICE_OK;
  return check_budget(moe, 1, held_pool, sluice_plan_pool_of_step(plan), inputs->host_budget, inputs->host_budget);
}

static sluice_status_t check_deferred(const sluice_moe_t* moe, uint64_t bytes) {
  const sluice_plan_data_t* plan = moe->plan;
  const sluice_plan_inputs_t* inputs = &plan->inputs;
  if (inputs->reuse && inputs->budget == 0) return SLUICE_OK; /* no limit applies */
  if (!inputs->separate_wgrad) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "layer %d: dgrad alone keeps %llu bytes of gradient rows until wgrad, which "
                       "the plan in force does not count: set separate_wgrad to 1 in the context's config (with a plan "
                       "of your own: in sluice_plan_config_t), or ask for SLUICE_BACKWARD_BOTH",
                       moe->shape.config.layer_id, (unsigned long long)bytes);
  }
  if (inputs->budget == 0) return SLUICE_OK;
  uint64_t room = inputs->budget - (plan->bytes.total - (uint64_t)inputs->max_outstanding * plan->bytes.step);
  uint64_t held = atomic_load(&moe->context->step_bytes);
  if (held + bytes <= room) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_OVER_BUDGET,
                     "layer %d: outstanding forwards hold %llu bytes on this rank, and dgrad alone would keep "
                     "%llu until wgrad, %llu more than the memory_budget of %llu has for them "
                     "(max_outstanding is %d): run wgrads or whole backwards first, raise max_outstanding, or "
                     "raise memory_budget",
                     moe->shape.config.layer_id, (unsigned long long)held, (unsigned long long)bytes,
                     (unsigned long long)(held + bytes - room), (unsigned long long)inputs->budget,
                     inputs->max_outstanding);
}

int32_t sluice_planned_wgrad_mode(const sluice_moe_t* moe, const sluice_binding_t* binding) {
  return moe->plan != NULL && binding->plan == 0 ? moe->plan->wgrad_mode : binding->wgrad_mode;
}

sluice_status_t sluice_planned_check_pass(sluice_pass_t* pass) {
  if (pass->moe->plan == NULL || pass->schedule->spec.wgrad != SLUICE_WGRAD_CALL_LATER) return SLUICE_OK;
  SLUICE_TRY(sluice_pass_measure(pass));
  uint64_t bytes = 0;
  for (int32_t i = 0; i < SLUICE_NUM_DEFERRED; ++i) {
    bytes += sluice_align_up(pass->slots[sluice_deferred_tensors[i]].bytes);
  }
  return check_deferred(pass->moe, bytes);
}

static sluice_plan_inputs_t inputs_of(const sluice_moe_t* moe, const sluice_handshake_t* handshake) {
  const sluice_context_t* context = moe->context;
  sluice_plan_inputs_t inputs = {
      .max_tokens = handshake->max_tokens > 0 ? handshake->max_tokens : 1,
      .budget = context->memory_budget,
      .host_budget = context->host_memory_budget,
      .base = handshake->base_bytes,
      .max_outstanding = context->max_outstanding > 0 ? context->max_outstanding : context->num_layers,
      .may_keep_part = 1,
      .separate_wgrad = context->separate_wgrad,
  };
  sluice_plan_inputs_take_shape(&inputs, &moe->shape);
  return inputs;
}

uint64_t sluice_planned_base_bytes(const sluice_moe_t* moe) {
  sluice_context_t* context = moe->context;
  const uint64_t now = sluice_plan_base_bytes(context);
  if (!context->rows->counts_host_memory || context->expected_layers <= context->num_layers) return now;
  return now + (uint64_t)(context->expected_layers - context->num_layers) * sluice_layer_bytes(moe);
}

static sluice_status_t others_of(const sluice_moe_t* moe, const sluice_plan_problem_t* problem,
                                 const sluice_plan_inputs_t* inputs, sluice_plan_bytes_t* out_bytes) {
  return sluice_neighbours_bytes(&moe->context->shapes, sluice_layer_bytes_kind(moe), problem, inputs, out_bytes);
}

static void note(const sluice_moe_t* moe, const sluice_plan_set_t* set) {
  sluice_neighbours_note(&moe->context->shapes, sluice_layer_bytes_kind(moe), &moe->shape, set);
}

sluice_status_t sluice_planned_least_bytes(const sluice_moe_t* moe, int64_t num_tokens, uint64_t* out_bytes) {
  const sluice_handshake_t own = {.max_tokens = num_tokens, .base_bytes = sluice_planned_base_bytes(moe)};
  const sluice_plan_inputs_t inputs = inputs_of(moe, &own);
  sluice_plan_problem_t problem = sluice_layer_plan_problem(moe, 0);
  sluice_plan_bytes_t others;
  SLUICE_TRY(others_of(moe, &problem, &inputs, &others));
  problem.beside = &others;
  return sluice_plan_least_bytes(&problem, &inputs, out_bytes);
}

static int has_price(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  return problem->price != NULL && problem->price(problem->user, plan) >= 0;
}

/* Chooses the number of levels if it is open: exchanges go by node if such plans fit and are predicted to be faster,
 * else by rank. The two kinds of plans never race against each other, since all plans of a set share their memory. */
static sluice_status_t choose_levels(const sluice_moe_t* moe, const sluice_plan_inputs_t* inputs,
                                     const sluice_plan_bytes_t* others, int32_t most, sluice_plan_set_t* set) {
  const sluice_plan_problem_t by_rank = sluice_layer_plan_problem(moe, 0);
  sluice_plan_problem_t by_node = sluice_layer_plan_problem(moe, 1);
  by_node.beside = others;
  if (!sluice_shape_levels_are_open(&moe->shape) || !has_price(&by_rank, &set->plans[0])) return SLUICE_OK;
  uint64_t least = 0;
  SLUICE_TRY(sluice_plan_least_bytes(&by_node, inputs, &least));
  if (inputs->budget > 0 && least > inputs->budget) return SLUICE_OK;
  sluice_plan_set_t other;
  SLUICE_TRY(sluice_candidates_make(&by_node, inputs, NULL, most, &other));
  if (has_price(&by_node, &other.plans[0]) && other.plans[0].cost < set->plans[0].cost) *set = other;
  return SLUICE_OK;
}

/* The hook that chooses the plan; NULL: there is none, and the cheapest plan is taken. */
static sluice_policy_hook_t* hook_of(const sluice_moe_t* moe) {
  return moe->decision.table != NULL ? moe->context->policy_hook : NULL;
}

/* The number of plans that may race for one size of batch. */
static int32_t most_candidates(const sluice_moe_t* moe) {
  sluice_policy_hook_t* hook = hook_of(moe);
  return hook != NULL ? hook->vtable->num_candidates(hook, moe) : 1;
}

/* The rates measured in passes with this number of tokens, by which plans are priced; NULL: none was measured. */
static const sluice_plan_rates_t* rates_for(const sluice_moe_t* moe, int64_t tokens, sluice_plan_rates_t* rates) {
  sluice_policy_hook_t* hook = hook_of(moe);
  return hook != NULL && hook->vtable->rates(hook, moe, tokens, rates) ? rates : NULL;
}

/* others: bytes of layers of other shapes; NULL: the plans leave no room for such layers. */
static sluice_status_t find_plans(const sluice_moe_t* moe, const sluice_plan_inputs_t* inputs,
                                  const sluice_plan_bytes_t* others, sluice_plan_set_t* set) {
  sluice_plan_problem_t problem = sluice_layer_plan_problem(moe, 0);
  problem.beside = others;
  sluice_plan_rates_t rates;
  const int32_t most = most_candidates(moe);
  SLUICE_TRY(sluice_candidates_make(&problem, inputs, rates_for(moe, inputs->max_tokens, &rates), most, set));
  return choose_levels(moe, inputs, others, most, set);
}

/* Makes plans for the largest number of tokens of any rank. If no plan leaves room for the other layers, one that takes
 * the whole budget may still work, because not all layers need to be outstanding at once. */
static sluice_status_t make_plans(sluice_moe_t* moe, const sluice_handshake_t* handshake) {
  const sluice_plan_inputs_t inputs = inputs_of(moe, handshake);
  const sluice_plan_problem_t problem = sluice_layer_plan_problem(moe, 0);
  sluice_plan_bytes_t others;
  sluice_plan_set_t set;
  SLUICE_TRY(others_of(moe, &problem, &inputs, &others));
  sluice_status_t status = find_plans(moe, &inputs, &others, &set);
  if (status == SLUICE_E_OVER_BUDGET) {
    sluice_error_info_t why;
    sluice_error_capture(&why);
    status = find_plans(moe, &inputs, NULL, &set);
    if (status != SLUICE_OK) return sluice_error_adopt(&why);
  }
  if (status == SLUICE_OK) status = sluice_plan_install_set(moe, &set);
  if (status == SLUICE_OK) note(moe, &set);
  return status;
}

/* Whether smaller batches may have a better plan than the largest batch. With a capacity all batches have one size. */
static int has_sizes(const sluice_moe_t* moe) {
  const sluice_plan_inputs_t* q = &moe->plans->of[0]->plans[0].inputs;
  const int is_open = q->num_chunks == 0 || q->restore_input < 0 || q->restore_pre_activation < 0 || q->wgrad_mode < 0;
  return is_open && sluice_shape_capacity(&moe->shape) == 0;
}

static sluice_status_t take_by_size(sluice_moe_t* moe, int64_t tokens) {
  const int64_t most = moe->plans->of[0]->plans[0].inputs.max_tokens;
  int32_t size = has_sizes(moe) ? sluice_plan_size(most, tokens) : 0;
  if (moe->plans->of[size] == NULL) {
    sluice_plan_rates_t rates;
    const sluice_plan_rates_t* known = rates_for(moe, sluice_plan_size_tokens(most, size), &rates);
    sluice_plan_problem_t problem = sluice_layer_plan_problem(moe, moe->plans->of[0]->plans[0].two_levels);
    sluice_plan_bytes_t others;
    SLUICE_TRY(others_of(moe, &problem, &moe->plans->of[0]->plans[0].inputs, &others));
    problem.beside = &others;
    SLUICE_TRY(sluice_plans_by_size_add(moe->plans, &problem, known, most_candidates(moe), size));
    note(moe, moe->plans->of[size]);
  }
  if (moe->plans->of[size]->count == 0) size = 0;
  sluice_policy_hook_t* hook = hook_of(moe);
  const int32_t plan = hook != NULL ? hook->vtable->choose_plan(hook, moe, size, &moe->decision) : 0;
  sluice_plan_take(moe, sluice_plan_number(size, plan));
  return SLUICE_OK;
}

static sluice_status_t prepare(sluice_moe_t* moe, const sluice_handshake_t* handshake,
                               const sluice_replay_forward_t* repeated) {
  const int64_t most = moe->plan != NULL ? moe->plans->of[0]->plans[0].inputs.max_tokens : -1;
  const int is_enough = most >= handshake->max_tokens;
  if (moe->plan_is_given && moe->plan != NULL) {
    if (is_enough) return SLUICE_OK;
    return SLUICE_FAIL(
        SLUICE_E_OVER_BUDGET,
        "layer %d: a rank has %lld tokens, but this layer's plan is for at most %lld; create a plan for more",
        moe->shape.config.layer_id, (long long)handshake->max_tokens, (long long)most);
  }
  if (is_enough && repeated != NULL) {
    sluice_plan_take(moe, repeated->plan);
    return SLUICE_OK;
  }
  if (!is_enough) SLUICE_TRY(make_plans(moe, handshake));
  return take_by_size(moe, handshake->max_tokens);
}

sluice_status_t sluice_planned_take(sluice_forward_t* f, const sluice_handshake_t* handshake,
                                    const sluice_replay_forward_t* repeated) {
  const sluice_moe_t* moe = f->pass.moe;
  SLUICE_TRY(prepare(f->pass.moe, handshake, repeated));
  f->choice.num_chunks = (int16_t)moe->plan->num_chunks;
  f->plan = moe->plan_number;
  return SLUICE_OK;
}

void sluice_planned_propose(const sluice_forward_t* f, sluice_proposal_t* proposal) {
  proposal->comm_hash = (uint64_t)sluice_forward_keeps(f);
  proposal->base_bytes = sluice_planned_base_bytes(f->pass.moe);
  proposal->held_pool_bytes = sluice_ledger_sums(&f->pass.context->ledger).pool;
}

/* Sums the rows of each block and rank over all ranks; with two levels also the rows that ranks forward. */
static sluice_status_t sum_rows(sluice_moe_t* moe, const sluice_tensor_t* expert_ids, const int32_t* counts,
                                int64_t* table) {
  sluice_context_t* context = moe->context;
  int32_t blocks = moe->plan->num_blocks;
  SLUICE_TRY(moe->strategies->routes->sum(moe, expert_ids, counts, blocks, table));
  if (context->world_size == 1) return SLUICE_OK;
  if (moe->plan->two_levels) sluice_chunks_by_tokens_count_forwards(moe, blocks, table);
  char phase[96];
  snprintf(phase, sizeof phase, "rows by block of layer %d", moe->shape.config.layer_id);
  const int64_t words = (int64_t)blocks * context->world_size * (moe->plan->two_levels ? 2 : 1);
  return sluice_comm_all_reduce_i64(context->comm, table, words, SLUICE_REDUCE_SUM, phase);
}

void sluice_planned_note(const sluice_moe_t* moe, sluice_binding_t* binding) {
  binding->plan = (uint8_t)(1 + moe->plan_number);
  binding->wgrad_mode = (uint8_t)moe->plan->wgrad_mode;
  binding->shares_act = (uint8_t)moe->plan->shares_act;
}

/* Whether the plan would store rows of this chunk. */
static int is_stored(const sluice_plan_data_t* plan, int32_t chunk) {
  return sluice_restore_is_stored(sluice_plan_di(plan, chunk)) || sluice_restore_is_stored(sluice_plan_m(plan, chunk));
}

/* Counts the chunks whose rows no longer fit, which makes them slower, and logs this once for each layer. All ranks
 * find the same number; rank 0 logs it. */
static void note_fallback(sluice_moe_t* moe, const sluice_chunks_by_tokens_t* cut) {
  const sluice_plan_data_t* plan = moe->plan;
  sluice_context_t* context = moe->context;
  int32_t count = 0;
  for (int32_t i = 0; i < cut->num_chunks; ++i) count += !cut->is_kept[i] && is_stored(plan, i);
  count -= plan->num_chunks - plan->kept_chunks; /* fallback chunks that the plan expects */
  if (count < 0) count = 0;
  context->stats.num_fallback_chunks += (uint64_t)count;
  if (count == 0 || moe->has_told_fallback) return;
  moe->has_told_fallback = 1;
  if (context->rank != 0) return;
  sluice_log(SLUICE_LOG_WARN,
             "layer %d: a rank receives more rows than the budget keeps (%lld of up to %lld): %d of %d chunks (n is %d "
             "by the plan) are sent and computed again in backward, which is slower and gives the same results; "
             "routing that is more even or a larger budget avoids it (logged once; num_fallback_chunks keeps counting)",
             moe->shape.config.layer_id, (long long)plan->kept_rows, (long long)plan->worst_rows, count,
             cut->num_chunks, plan->num_chunks);
}

sluice_status_t sluice_planned_bind(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                                    const int32_t* counts, int keep, sluice_binding_t* binding) {
  const sluice_plan_data_t* plan = moe->plan;
  sluice_arena_t* arena = &binding->memory->cut;
  SLUICE_TRY(sluice_arena_reset(arena, arena->capacity, "rows by block"));
  const uint64_t words = (uint64_t)plan->num_blocks * (uint64_t)moe->context->world_size * (plan->two_levels ? 2 : 1);
  int64_t* table = sluice_arena_take(arena, words * sizeof *table);
  int64_t* first_token = sluice_arena_take(arena, ((uint64_t)plan->num_blocks + 1) * sizeof *first_token);
  SLUICE_TRY(sum_rows(moe, expert_ids, counts, table));
  sluice_chunks_by_tokens_t cut;
  SLUICE_TRY(sluice_chunks_by_tokens_make(moe, plan, table, &cut));
  sluice_chunks_by_tokens_of(&cut, plan->num_blocks, expert_ids->shape[0], first_token);
  const sluice_block_chunks_t chunks = {cut.num_chunks, first_token, cut.first_block};
  SLUICE_TRY(moe->strategies->routes->order_blocks(moe, stream, expert_ids, &chunks, counts, binding));
  sluice_binding_take_deduplication(
      binding, moe, plan->two_levels ? SLUICE_DEDUPLICATE_NODES : sluice_shape_deduplication(&moe->shape));
  if (keep) note_fallback(moe, &cut);
  for (int32_t i = 0; i < cut.num_chunks && keep; ++i) {
    binding->restore_input[i] = (uint8_t)(cut.is_kept[i] ? sluice_plan_di(plan, i) : sluice_restore_least(SLUICE_T_DI));
    binding->restore_pre_activation[i] =
        (uint8_t)(cut.is_kept[i] ? sluice_plan_m(plan, i) : sluice_restore_least(SLUICE_T_M));
  }
  sluice_planned_note(moe, binding);
  return sluice_exchange_counts(binding);
}
