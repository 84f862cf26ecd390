// SPDX-License-Identifier: Apache-2.0
/* Finds what to change if no plan fits: a restriction to lift, and the plan that is then possible; and describes
 * budgets in messages. */
#include <stdio.h>

#include "backend/base/text.h"
#include "backend/model/restore.h"
#include "backend/plan/plan_search.h"

/* ---- the names of budgets ---- */

/* Returns the whole budget at which the share becomes `needed`, whatever was lost when the share was rounded down. */
static uint64_t whole_for(uint64_t needed, uint64_t share, uint64_t whole) {
  return (uint64_t)((double)needed * ((double)whole / (double)share) * (1 + 1e-12)) + 1;
}

sluice_budget_messages_t sluice_budget_messages(const sluice_budget_shares_t* shares, int of_host, uint64_t budget,
                                                uint64_t needed) {
  const uint64_t own = of_host ? shares->host_memory : shares->memory;
  const uint64_t whole = of_host ? shares->whole_host_memory : shares->whole_memory;
  const char *name = of_host ? "host memory budget" : "memory budget",
             *key = of_host ? "host_memory_budget" : "memory_budget";
  char size[SLUICE_SIZE_TEXT_BYTES], of_whole[SLUICE_SIZE_TEXT_BYTES];
  sluice_budget_messages_t messages;
  if (whole == 0 || whole == own || budget != own) { /* a plan of the host has a budget of its own */
    snprintf(messages.what, sizeof messages.what, "the %s of %llu bytes (%s)", name, (unsigned long long)budget,
             sluice_size_text(budget, size));
    snprintf(messages.raise, sizeof messages.raise, "%s to that", key);
    return messages;
  }
  snprintf(messages.what, sizeof messages.what, "%llu bytes (%s), this context's share of the %s of %llu (%s)",
           (unsigned long long)own, sluice_size_text(own, size), name, (unsigned long long)whole,
           sluice_size_text(whole, of_whole));
  snprintf(messages.raise, sizeof messages.raise, "%s to %llu", key, (unsigned long long)whole_for(needed, own, whole));
  return messages;
}

/* ---- what to change ---- */

enum { LIFT_CHUNKS = 1, LIFT_POLICY = 2, LIFT_OUTSTANDING = 4 };

/* Among changes with equal cost the first one is taken: changes of the layer come before one that asks the host to
 * wait. */
static const int alone[] = {LIFT_CHUNKS, LIFT_POLICY, LIFT_OUTSTANDING};
static const int together[] = {LIFT_CHUNKS | LIFT_POLICY, LIFT_CHUNKS | LIFT_OUTSTANDING,
                               LIFT_POLICY | LIFT_OUTSTANDING, LIFT_CHUNKS | LIFT_POLICY | LIFT_OUTSTANDING};

typedef struct change_s {
  int lifted; /* LIFT_*; 0: nothing helps */
  sluice_plan_data_t plan;
} change_t;

typedef struct advice_s {
  const sluice_plan_problem_t* problem;
  const sluice_plan_inputs_t* inputs;
  const sluice_plan_rates_t* rates;
} advice_t;

/* Returns the restrictions of the inputs. With a capacity n is fixed, because the capacity is given per chunk. */
static int restrictions(const advice_t* a) {
  const sluice_plan_inputs_t* q = a->inputs;
  return (q->num_chunks > 0 && sluice_shape_capacity(&a->problem->shape) == 0 ? LIFT_CHUNKS : 0) |
         (q->restore_input >= 0 || q->restore_pre_activation >= 0 ? LIFT_POLICY : 0) |
         (q->max_outstanding > 1 ? LIFT_OUTSTANDING : 0);
}

static sluice_status_t try_change(const advice_t* a, int lifted, change_t* best) {
  sluice_plan_inputs_t inputs = *a->inputs;
  sluice_plan_search_t found;
  if (lifted & LIFT_POLICY) {
    inputs.restore_input = inputs.restore_pre_activation = SLUICE_RESTORE_ADAPTIVE;
    inputs.policies.count = 0;
  }
  if (lifted & LIFT_CHUNKS) {
    if (inputs.policies.count > 0) return SLUICE_OK; /* a list is for exactly this many chunks */
    inputs.num_chunks = 0;
  }
  SLUICE_TRY(sluice_plan_search(a->problem, &inputs, a->rates, NULL, NULL, &found));
  if (lifted & LIFT_OUTSTANDING) {
    if (found.num_fitting > 0 || found.most_outstanding < 1) return SLUICE_OK;
    inputs.max_outstanding = found.most_outstanding;
    SLUICE_TRY(sluice_plan_search(a->problem, &inputs, a->rates, NULL, NULL, &found));
  }
  if (found.num_fitting == 0 || (best->lifted != 0 && found.best.cost >= best->plan.cost)) return SLUICE_OK;
  best->lifted = lifted, best->plan = found.best;
  return SLUICE_OK;
}

static sluice_status_t find_change(const advice_t* a, change_t* best) {
  const int held = restrictions(a);
  best->lifted = 0;
  for (size_t i = 0; i < sizeof alone / sizeof alone[0]; ++i) {
    if ((alone[i] & ~held) == 0) SLUICE_TRY(try_change(a, alone[i], best));
  }
  for (size_t i = 0; i < sizeof together / sizeof together[0] && best->lifted == 0; ++i) {
    if ((together[i] & ~held) == 0) SLUICE_TRY(try_change(a, together[i], best));
  }
  return SLUICE_OK;
}

static void describe(const advice_t* a, const change_t* change, char* text, size_t size) {
  const sluice_plan_data_t* p = &change->plan;
  size_t used = (size_t)snprintf(text, size, ", or ");
  if (change->lifted & LIFT_CHUNKS) {
    used += (size_t)snprintf(text + used, size - used, "take %d chunks (not %d)", p->num_chunks, a->inputs->num_chunks);
  }
  if (change->lifted & LIFT_POLICY) {
    const char* paper = sluice_restore_set_name(p->restore_input, p->restore_pre_activation);
    used += (size_t)snprintf(text + used, size - used, "%sthe policy %s%sT_DI %s, T_M %s",
                             change->lifted & LIFT_CHUNKS ? " with " : "take ", paper != NULL ? paper : "",
                             paper != NULL ? ": " : "", sluice_restore_name(p->restore_input),
                             sluice_restore_name(p->restore_pre_activation));
  }
  if (change->lifted & LIFT_OUTSTANDING) {
    snprintf(text + used, size - used, "%sallow at most %d outstanding forwards (max_outstanding is %d)",
             change->lifted == LIFT_OUTSTANDING ? "" : " and ", p->inputs.max_outstanding, a->inputs->max_outstanding);
  }
}

static sluice_status_t fits_with(const advice_t* a, int64_t tokens, int* out_fits) {
  sluice_plan_inputs_t inputs = *a->inputs;
  sluice_plan_search_t found;
  inputs.max_tokens = tokens;
  SLUICE_TRY(sluice_plan_search(a->problem, &inputs, a->rates, NULL, NULL, &found));
  *out_fits = found.num_fitting > 0;
  return SLUICE_OK;
}

/* Finds the maximum number of tokens per rank that fit with everything else unchanged, by bisection; 0: not even
 * one. */
static sluice_status_t most_tokens(const advice_t* a, int64_t* out_tokens) {
  int64_t fit = 1, too_many = a->inputs->max_tokens;
  int fits = 0;
  *out_tokens = 0;
  if (too_many > 1) SLUICE_TRY(fits_with(a, 1, &fits));
  if (!fits) return SLUICE_OK;
  while (too_many - fit > 1) {
    int64_t half = fit + (too_many - fit) / 2;
    SLUICE_TRY(fits_with(a, half, &fits));
    if (fits) {
      fit = half;
    } else {
      too_many = half;
    }
  }
  *out_tokens = fit;
  return SLUICE_OK;
}

static sluice_status_t describe_smaller_input(const advice_t* a, const sluice_plan_data_t* lean, char* text,
                                              size_t size) {
  if (sluice_shape_capacity(&a->problem->shape) > 0) {
    snprintf(text, size, ", or give a smaller capacity_rows (%lld now), or more chunks of fewer rows (%d now)",
             (long long)sluice_shape_capacity(&a->problem->shape), lean->num_chunks);
    return SLUICE_OK;
  }
  int64_t tokens = 0;
  SLUICE_TRY(most_tokens(a, &tokens));
  if (tokens > 0) {
    snprintf(text, size, ", or pass at most %lld tokens at a time (%lld now)", (long long)tokens,
             (long long)a->inputs->max_tokens);
  } else {
    snprintf(text, size, ": not even one token at a time fits");
  }
  return SLUICE_OK;
}

/* Describes the part of a budget that is needed however small the layer is. */
static void describe_reserve(const sluice_plan_data_t* lean, char* text, size_t size) {
  char reserve[SLUICE_SIZE_TEXT_BYTES];
  text[0] = '\0';
  if (lean->bytes.gemms == 0) return;
  snprintf(text, size, "; %s of it for GEMMs, whatever the layer's size", sluice_size_text(lean->bytes.gemms, reserve));
}

sluice_status_t sluice_plan_fail_over_budget(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                             const sluice_plan_rates_t* rates, const sluice_plan_search_t* search) {
  const advice_t a = {.problem = problem, .inputs = inputs, .rates = rates};
  const sluice_plan_data_t* lean = &search->leanest;
  const uint64_t budget = inputs->budget, least = lean->bytes.total;
  change_t change;
  char advice[256];
  SLUICE_TRY(find_change(&a, &change));
  char size[SLUICE_SIZE_TEXT_BYTES], reserve[96];
  const int is_of_host = budget == 0 || least <= budget;
  if (change.lifted != 0) {
    describe(&a, &change, advice, sizeof advice);
  } else {
    SLUICE_TRY(describe_smaller_input(&a, lean, advice, sizeof advice));
  }
  if (is_of_host) {
    const sluice_budget_messages_t words =
        sluice_budget_messages(&problem->shares, 1, inputs->host_budget, lean->bytes.host_pool);
    return SLUICE_FAIL(SLUICE_E_OVER_BUDGET,
                       "layer %d: no plan fits %s: offloading (T_DI %s, T_M %s) takes %llu (%s) with %d outstanding "
                       "forwards; raise %s%s",
                       problem->shape.config.layer_id, words.what, sluice_restore_name(lean->restore_input),
                       sluice_restore_name(lean->restore_pre_activation), (unsigned long long)lean->bytes.host_pool,
                       sluice_size_text(lean->bytes.host_pool, size), inputs->max_outstanding, words.raise, advice);
  }
  const sluice_budget_messages_t words = sluice_budget_messages(&problem->shares, 0, budget, least);
  const char* set = sluice_restore_set_name(lean->restore_input, lean->restore_pre_activation);
  describe_reserve(lean, reserve, sizeof reserve);
  return SLUICE_FAIL(
      SLUICE_E_OVER_BUDGET,
      "layer %d: no plan fits %s: the leanest (n = %d, %s%sT_DI %s, T_M %s) needs %llu (%s%s), %llu more; "
      "raise %s%s",
      problem->shape.config.layer_id, words.what, lean->num_chunks, set != NULL ? set : "", set != NULL ? ": " : "",
      sluice_restore_name(lean->restore_input), sluice_restore_name(lean->restore_pre_activation),
      (unsigned long long)least, sluice_size_text(least, size), reserve, (unsigned long long)(least - budget),
      words.raise, advice);
}
