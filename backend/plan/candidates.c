// SPDX-License-Identifier: Apache-2.0
#include "backend/plan/candidates.h"

#include <string.h>

#include "backend/plan/plan_search.h"

#define MOST_LISTED 16   /* candidates that fit by themselves */
#define WITHIN      1.25 /* of the lowest cost */

/* ---- the cheapest that fit by themselves ---- */

typedef struct list_s {
  const sluice_plan_problem_t* problem;
  sluice_plan_data_t plans[MOST_LISTED]; /* by cost */
  int32_t count;
  sluice_plan_data_t pinned;
  int32_t is_pinned;
} list_t;

static int problem_pins(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  return problem->is_pinned != NULL && problem->is_pinned(problem->user, plan);
}

static void keep_cheapest(void* user, const sluice_plan_data_t* plan, int32_t fits) {
  list_t* list = user;
  const sluice_plan_problem_t* problem = list->problem;
  if (!fits) return;
  if (problem_pins(problem, plan)) list->pinned = *plan, list->is_pinned = 1;
  /* With one chunk, weight gradients are the same in both modes: one candidate is enough. */
  if (plan->num_chunks == 1 && plan->wgrad_mode == SLUICE_WGRAD_PER_CHUNK && plan->inputs.wgrad_mode < 0) return;
  int32_t at = list->count;
  while (at > 0 && list->plans[at - 1].cost > plan->cost) --at;
  if (at == MOST_LISTED) return;
  int32_t last = list->count < MOST_LISTED ? list->count++ : MOST_LISTED - 1;
  memmove(&list->plans[at + 1], &list->plans[at], (size_t)(last - at) * sizeof *plan);
  list->plans[at] = *plan;
}

/* ---- sets of plans that fit together ---- */

/* Sizes every plan of the set again, with space for the maximum of what they share; *out_fits: whether all still
 * fit. */
static sluice_status_t size_all(const sluice_plan_problem_t* problem, sluice_plan_set_t* set, int32_t* out_fits) {
  sluice_plan_bytes_t shared = problem->room == NULL ? (sluice_plan_bytes_t){0} : problem->room->shared;
  for (int32_t i = 0; i < set->count; ++i) shared = sluice_plan_bytes_shared(&shared, &set->plans[i].bytes);
  *out_fits = 1;
  for (int32_t i = 0; i < set->count && *out_fits; ++i) {
    SLUICE_TRY(sluice_plan_size_beside(problem, &shared, &set->plans[i], out_fits));
  }
  return SLUICE_OK;
}

static sluice_status_t choose(list_t* list, const sluice_plan_data_t* best, int32_t most, sluice_plan_set_t* out) {
  out->count = 1;
  out->plans[0] = list->count > 0 ? list->plans[0] : *best;
  for (int32_t i = 1; i < list->count && out->count < most; ++i) {
    if (list->plans[i].cost > WITHIN * list->plans[0].cost) break;
    sluice_plan_set_t wider = *out;
    wider.plans[wider.count++] = list->plans[i];
    int32_t fits = 0;
    SLUICE_TRY(size_all(list->problem, &wider, &fits));
    if (fits) *out = wider;
  }
  return SLUICE_OK;
}

/* A pinned plan is sized as it was in the set that it raced in, so that it keeps as many rows as then, and leaves as
 * much space to plans for other sizes. */
static void leave_pinned(const list_t* list, sluice_plan_set_t* out) {
  const sluice_plan_data_t* pinned = &list->pinned;
  for (int32_t i = 0; i < out->count; ++i) {
    const sluice_plan_data_t* plan = &out->plans[i];
    if (problem_pins(list->problem, plan)) pinned = plan;
  }
  out->plans[0] = *pinned, out->count = 1;
}

/* If there are plans for larger batches, these can run smaller batches too, so it is no failure if nothing fits. */
static sluice_status_t search(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                              const sluice_plan_rates_t* rates, list_t* list, sluice_plan_data_t* best, int* any) {
  *any = 1;
  if (problem->room == NULL) return sluice_plan_make(problem, inputs, rates, keep_cheapest, list, best);
  sluice_plan_search_t found;
  SLUICE_TRY(sluice_plan_search(problem, inputs, rates, keep_cheapest, list, &found));
  *any = found.num_fitting > 0;
  if (*any) *best = found.best;
  return SLUICE_OK;
}

sluice_status_t sluice_candidates_make(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                       const sluice_plan_rates_t* rates, int32_t most, sluice_plan_set_t* out) {
  list_t* list = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *list, "candidates for plans");
  if (list == NULL) return sluice_alloc_status();
  memset(out, 0, sizeof *out);
  list->problem = problem;
  sluice_plan_data_t best;
  int any = 0;
  sluice_status_t status = search(problem, inputs, rates, list, &best, &any);
  if (status == SLUICE_OK && any)
    status = choose(list, &best, most < SLUICE_PLAN_CANDIDATES ? most : SLUICE_PLAN_CANDIDATES, out);
  if (status == SLUICE_OK && list->is_pinned) leave_pinned(list, out);
  sluice_free(sluice_process_allocator(), list, sizeof *list);
  return status;
}
