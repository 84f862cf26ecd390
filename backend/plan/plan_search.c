// SPDX-License-Identifier: Apache-2.0
/* Chooses a plan: enumerates candidates (n, restore policy, weight-gradient mode), computes their bytes at the
 * capacities, and a relative time for each by the closed forms, or by the policy hook if it knows the machine. */
#include <stdio.h>
#include <string.h>

#include "backend/base/hash.h"
#include "backend/model/pass_sizes.h"
#include "backend/model/tensors.h"
#include "backend/plan/plan_search.h"
#include "backend/plan/plan_sizes.h"

typedef struct search_s {
  const sluice_plan_problem_t* problem;
  const sluice_plan_inputs_t* inputs;
  sluice_plan_bytes_t least;        /* what other plans need of the shared memory, and for each step */
  const sluice_plan_rates_t* rates; /* NULL: round figures */
  sluice_plan_visit_fn_t visit;
  void* user;
  sluice_plan_search_t* found;
} search_t;

/* Returns the maximum number of rows that may be kept: all that can arrive, or what the host pool allows. */
static int64_t most_kept(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan, int64_t least) {
  uint64_t row = sluice_plan_row_bytes(problem, plan, sluice_restore_is_offloaded), budget = plan->inputs.host_budget;
  uint64_t fixed = sluice_plan_host_pool_bytes(problem, plan, 0);
  if (row == 0 || budget == 0) return plan->worst_rows;
  uint64_t room = budget > fixed ? (budget - fixed) / ((uint64_t)plan->inputs.max_outstanding * row) : 0;
  if (room >= (uint64_t)plan->worst_rows) return plan->worst_rows;
  return sluice_max(least, (int64_t)room);
}

static uint64_t lift(uint64_t* bytes, uint64_t least) {
  uint64_t more = least > *bytes ? least - *bytes : 0;
  *bytes += more;
  return more;
}

/* Blocks of gradient rows are used by the steps of every plan. */
static void lift_deferred(const search_t* s, sluice_plan_data_t* plan) {
  uint64_t more = 0;
  for (int32_t i = 0; i < SLUICE_NUM_DEFERRED; ++i) more += lift(&plan->bytes.deferred[i], s->least.deferred[i]);
  plan->bytes.step += more;
  plan->bytes.total += (uint64_t)plan->inputs.max_outstanding * more;
}

static sluice_status_t measure(const search_t* s, sluice_plan_data_t* plan) {
  SLUICE_TRY(sluice_plan_measure(s->problem, plan));
  sluice_plan_bytes_t* b = &plan->bytes;
  b->total += lift(&b->slots, s->least.slots) + lift(&b->routing, s->least.routing) +
              lift(&b->schedules, s->least.schedules) + lift(&b->gemms, s->least.gemms);
  lift_deferred(s, plan);
  return SLUICE_OK;
}

/* Returns the bytes to add to the total if another layer's steps are larger. */
static uint64_t larger_steps(const search_t* s, const sluice_plan_data_t* plan) {
  const uint64_t step = plan->bytes.step;
  return (uint64_t)plan->inputs.max_outstanding * (sluice_max_u64(step, s->least.step) - step);
}

/* Called last, because kept rows are chosen by the bytes of the layer's own steps. */
static void count_larger_steps(const search_t* s, sluice_plan_data_t* plan) {
  plan->bytes.total += larger_steps(s, plan);
  (void)lift(&plan->bytes.step, s->least.step);
}

static int fits_host(const sluice_plan_data_t* plan) {
  return plan->inputs.host_budget == 0 || plan->bytes.host_pool <= plan->inputs.host_budget;
}

static int fits_room(const search_t* s, const sluice_plan_data_t* plan) {
  const sluice_plan_room_t* room = s->problem->room;
  if (room == NULL) return 1;
  int fits_deferred = 1;
  for (int32_t i = 0; i < SLUICE_NUM_DEFERRED; ++i) {
    fits_deferred &= plan->bytes.deferred[i] <= s->least.deferred[i];
  }
  return plan->max_chunks <= room->max_chunks && plan->bytes.slots <= s->least.slots && fits_deferred;
}

static int fits(const search_t* s, const sluice_plan_data_t* plan) {
  const uint64_t total = plan->bytes.total + larger_steps(s, plan);
  return (plan->inputs.budget == 0 || total <= plan->inputs.budget) && fits_host(plan) && fits_room(s, plan);
}

/* Combines what the problem says that other layers need with `shared`, which other plans of this layer need. */
static sluice_plan_bytes_t least_of(const sluice_plan_problem_t* problem, const sluice_plan_bytes_t* shared) {
  sluice_plan_bytes_t least = shared == NULL ? (sluice_plan_bytes_t){0} : *shared;
  least.step = 0;
  if (problem->beside == NULL) return least;
  least = sluice_plan_bytes_shared(&least, problem->beside);
  least.step = problem->beside->step;
  return least;
}

/* A policy that the host requested applies to all chunks. */
static int may_keep_part(const sluice_plan_inputs_t* q) {
  return q->may_keep_part && q->restore_input < 0 && q->restore_pre_activation < 0;
}

/* Returns the minimum number of rows that a plan keeps if it keeps all chunks of balanced routing, with a quarter more
 * to spare. */
static int64_t least_kept(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  int64_t balanced = sluice_plan_balanced_rows(problem, plan->inputs.max_tokens);
  return sluice_min(plan->worst_rows, sluice_plan_with_slack(balanced, 1));
}

/* Callback experts with policies by chunk recompute, because they would otherwise keep all chunks. */
static int runs_again(int32_t restore_pre_activation) {
  return restore_pre_activation == SLUICE_RESTORE_BY_CHUNK || sluice_restore_is_computed_again(restore_pre_activation);
}

int sluice_plan_can_fall_back(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  return (!problem->shape.config.callback_experts || runs_again(plan->restore_pre_activation)) &&
         sluice_shape_capacity(&problem->shape) == 0; /* with capacities all rows are known: the policy fits or not */
}

static void set_kept_chunks(const sluice_plan_problem_t* problem, int32_t kept_chunks, sluice_plan_data_t* plan) {
  int64_t balanced = sluice_plan_balanced_rows(problem, plan->inputs.max_tokens);
  plan->kept_rows =
      sluice_min(least_kept(problem, plan), kept_chunks * sluice_plan_with_slack(balanced, plan->num_chunks));
  plan->kept_chunks = kept_chunks;
}

sluice_status_t sluice_plan_keep_chunks(const sluice_plan_problem_t* problem, int32_t kept_chunks,
                                        sluice_plan_data_t* plan) {
  if (kept_chunks >= plan->num_chunks || sluice_plan_row_bytes(problem, plan, sluice_restore_is_stored) == 0)
    return SLUICE_OK;
  if (!sluice_plan_can_fall_back(problem, plan)) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "layer %d: %s keep their rows in all of %d chunks, not in %d: no chunk of theirs is sent and "
                       "computed again",
                       problem->shape.config.layer_id,
                       sluice_shape_capacity(&problem->shape) > 0 ? "layers with capacities" : "callback experts",
                       plan->num_chunks, kept_chunks);
  }
  set_kept_chunks(problem, kept_chunks, plan);
  return sluice_plan_measure(problem, plan);
}

/* If the budget has no space for all chunks of balanced routing, keeps as many of them as fit. If none fits, the plan
 * is left as it was, to report what is missing. */
static sluice_status_t keep_fewer_chunks(const search_t* s, sluice_plan_data_t* plan) {
  const int64_t all = plan->kept_rows;
  for (int32_t k = plan->num_chunks - 1; k > 0; --k) {
    set_kept_chunks(s->problem, k, plan);
    SLUICE_TRY(measure(s, plan));
    if (fits(s, plan)) return SLUICE_OK;
  }
  plan->kept_rows = all, plan->kept_chunks = plan->num_chunks;
  return measure(s, plan);
}

/* Returns whether the policies offload T_M of some chunk, whose copies then use two slots of it. */
static int offloads_m(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  const int32_t listed = plan->inputs.policies.count;
  int any = listed == 0 && sluice_restore_is_offloaded(plan->restore_pre_activation);
  for (int32_t i = 0; i < listed; ++i) any |= sluice_restore_is_offloaded(sluice_plan_m(plan, i));
  return any && !problem->shape.config.callback_experts;
}

/* Without a budget, T_ACT shares T_M's slots, because a host that requests a policy wants its savings; under a budget
 * only if the plan does not fit otherwise. */
static sluice_status_t measure_either(const search_t* s, sluice_plan_data_t* plan) {
  const sluice_plan_inputs_t* q = &plan->inputs;
  const int may_share = offloads_m(s->problem, plan);
  plan->shares_act = may_share && q->budget == 0 && q->host_budget == 0;
  SLUICE_TRY(measure(s, plan));
  if (!may_share || plan->shares_act || fits(s, plan)) return SLUICE_OK;
  plan->shares_act = 1;
  return measure(s, plan);
}

/* Keeps as many rows as the budget allows: at least those of balanced routing and a quarter more, or those of its first
 * chunks. */
static sluice_status_t size_candidate(search_t* s, sluice_plan_data_t* plan) {
  const sluice_plan_problem_t* problem = s->problem;
  int64_t least = least_kept(problem, plan);
  uint64_t row = sluice_plan_row_bytes(problem, plan, sluice_restore_is_stored);
  int falls_back = sluice_plan_can_fall_back(problem, plan);
  plan->kept_rows = row == 0 ? 0 : falls_back ? least : plan->worst_rows;
  plan->kept_chunks = plan->num_chunks;
  SLUICE_TRY(measure_either(s, plan));
  if (row > 0 && falls_back && may_keep_part(s->inputs) && !fits(s, plan)) return keep_fewer_chunks(s, plan);
  if (row == 0 || plan->kept_rows == plan->worst_rows) return SLUICE_OK;
  uint64_t budget = s->inputs->budget == 0 ? UINT64_MAX : s->inputs->budget;
  if (plan->bytes.total >= budget) return SLUICE_OK;
  uint64_t counted =
      problem->shape.on_device_memory ? sluice_plan_row_bytes(problem, plan, sluice_restore_is_kept) : row;
  uint64_t room =
      counted == 0 ? UINT64_MAX : (budget - plan->bytes.total) / ((uint64_t)s->inputs->max_outstanding * counted);
  int64_t most = most_kept(problem, plan, least) - plan->kept_rows;
  int64_t more = room > (uint64_t)most ? most : (int64_t)room;
  plan->kept_rows += more;
  SLUICE_TRY(measure(s, plan));
  if (plan->bytes.total <= budget) return SLUICE_OK;
  plan->kept_rows -= more; /* rounding up needed more than was left */
  return measure(s, plan);
}

/* For a plan that does not fit as sized, which keeps as few rows as possible: returns how many outstanding forwards
 * fit. */
static int32_t outstanding_that_fit(const sluice_plan_data_t* plan) {
  const sluice_plan_bytes_t* b = &plan->bytes;
  const sluice_plan_inputs_t* q = &plan->inputs;
  const uint64_t fixed = b->total - (uint64_t)q->max_outstanding * b->step, pool = sluice_plan_pool_of_step(plan);
  int64_t steps = q->max_outstanding;
  if (q->budget > 0 && b->step > 0) {
    steps = sluice_min(steps, q->budget > fixed ? (int64_t)((q->budget - fixed) / b->step) : 0);
  }
  if (q->host_budget > 0 && pool > 0) steps = sluice_min(steps, (int64_t)(q->host_budget / pool));
  return (int32_t)steps;
}

sluice_status_t sluice_plan_size_beside(const sluice_plan_problem_t* problem, const sluice_plan_bytes_t* least,
                                        sluice_plan_data_t* plan, int32_t* out_fits) {
  search_t s = {.problem = problem, .inputs = &plan->inputs, .least = least_of(problem, least)};
  const int32_t kept_chunks = plan->kept_chunks, shares_act = plan->shares_act;
  SLUICE_TRY(size_candidate(&s, plan));
  count_larger_steps(&s, plan);
  /* Another plan must not take a kept chunk or the overlap from this one. */
  *out_fits = fits(&s, plan) && plan->kept_chunks >= kept_chunks && plan->shares_act <= shares_act;
  return SLUICE_OK;
}

/* All candidates of a layer are either priced or given a relative time, because they are compared. */
static double cost_of(const search_t* s, const sluice_plan_data_t* plan) {
  const sluice_plan_problem_t* problem = s->problem;
  double seconds = problem->price != NULL ? problem->price(problem->user, plan) : -1;
  return seconds >= 0 ? seconds : sluice_plan_relative_time(problem, plan, s->rates);
}

static sluice_status_t try_candidate(search_t* s, int32_t n, int32_t restore_input, int32_t restore_pre_activation,
                                     int32_t wgrad_mode) {
  sluice_plan_data_t plan;
  memset(&plan, 0, sizeof plan);
  plan.inputs = *s->inputs;
  plan.two_levels = sluice_shape_has_two_levels(&s->problem->shape);
  plan.restore_input = restore_input, plan.restore_pre_activation = restore_pre_activation,
  plan.wgrad_mode = wgrad_mode;
  sluice_plan_set_capacities(s->problem, n, &plan);
  SLUICE_TRY(size_candidate(s, &plan));
  count_larger_steps(s, &plan);
  plan.cost = cost_of(s, &plan);
  int in_budget = fits(s, &plan);
  if (s->visit != NULL) s->visit(s->user, &plan, in_budget);
  sluice_plan_search_t* f = s->found;
  if (f->num_seen++ == 0 || plan.bytes.total < f->leanest.bytes.total) f->leanest = plan;
  if (in_budget && (f->num_fitting++ == 0 || plan.cost < f->best.cost)) f->best = plan;
  if (!in_budget) f->most_outstanding = (int32_t)sluice_max(f->most_outstanding, outstanding_that_fit(&plan));
  return SLUICE_OK;
}

int sluice_plan_is_allowed(const sluice_plan_problem_t* problem, int32_t restore_input,
                           int32_t restore_pre_activation) {
  if (!problem->shape.config.callback_experts) return 1;
  if (runs_again(restore_pre_activation)) return sluice_shape_runs_again(&problem->shape);
  return sluice_restore_fits_callback(restore_input, restore_pre_activation);
}

/* Returns whether to try a mode: only the requested one, if any; reuse without a budget wants the mode with the fewest
 * bytes. */
static int may_be_mode(const search_t* s, int32_t n, int32_t mode) {
  const sluice_plan_inputs_t* q = s->inputs;
  if (q->wgrad_mode >= 0) return mode == q->wgrad_mode;
  if (!q->reuse || q->budget > 0) return 1;
  return mode ==
         sluice_leanest_wgrad_mode(&s->problem->shape, 1, 1, n, sluice_plan_balanced_rows(s->problem, q->max_tokens));
}

static sluice_status_t try_modes(search_t* s, int32_t n, int32_t restore_input, int32_t restore_pre_activation) {
  if (!sluice_plan_is_allowed(s->problem, restore_input, restore_pre_activation)) return SLUICE_OK;
  for (int32_t mode = SLUICE_WGRAD_DEFERRED; mode <= SLUICE_WGRAD_PER_CHUNK; ++mode) {
    if (!may_be_mode(s, n, mode)) continue;
    SLUICE_TRY(try_candidate(s, n, restore_input, restore_pre_activation, mode));
  }
  return SLUICE_OK;
}

/* asked: the host's request. ADAPTIVE: any policy, or with reuse any that keeps nothing. */
static int may_be(const sluice_plan_inputs_t* q, int32_t policy, int32_t tensor, int32_t asked) {
  if (!sluice_restore_is_for(policy, tensor)) return 0;
  return asked < 0 ? !(q->reuse && sluice_restore_is_kept(policy)) : asked == policy;
}

static sluice_status_t try_policies(search_t* s, int32_t n) {
  const sluice_plan_inputs_t* q = s->inputs;
  if (q->policies.count > 0) return try_modes(s, n, q->restore_input, q->restore_pre_activation);
  for (int32_t di = 0; di < SLUICE_NUM_RESTORES; ++di) {
    if (!may_be(q, di, SLUICE_T_DI, q->restore_input)) continue;
    for (int32_t m = 0; m < SLUICE_NUM_RESTORES; ++m) {
      if (may_be(q, m, SLUICE_T_M, q->restore_pre_activation)) SLUICE_TRY(try_modes(s, n, di, m));
    }
  }
  return SLUICE_OK;
}

sluice_status_t sluice_plan_search(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                   const sluice_plan_rates_t* rates, sluice_plan_visit_fn_t visit, void* user,
                                   sluice_plan_search_t* out) {
  search_t s = {.problem = problem,
                .inputs = inputs,
                .least = least_of(problem, problem->room == NULL ? NULL : &problem->room->shared),
                .rates = rates,
                .visit = visit,
                .user = user,
                .found = out};
  memset(out, 0, sizeof *out);
  if (sluice_shape_capacity(&problem->shape) > 0)
    return try_policies(&s, problem->shape.config.num_chunks); /* capacity_rows is per chunk */
  if (inputs->num_chunks > 0) return try_policies(&s, inputs->num_chunks);
  for (int32_t i = 0; i < SLUICE_NUM_CHUNK_COUNTS; ++i) {
    if (i > 0 && sluice_chunk_counts[i] > inputs->max_tokens) break;
    SLUICE_TRY(try_policies(&s, sluice_chunk_counts[i]));
  }
  return SLUICE_OK;
}

static sluice_status_t fail_without_candidates(const sluice_plan_problem_t* problem) {
  return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                     "layer %d: callback experts keep their rows and outputs; no other restore policy is possible",
                     problem->shape.config.layer_id);
}

sluice_status_t sluice_plan_make(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                 const sluice_plan_rates_t* rates, sluice_plan_visit_fn_t visit, void* user,
                                 sluice_plan_data_t* out_plan) {
  sluice_plan_search_t found;
  SLUICE_TRY(sluice_plan_search(problem, inputs, rates, visit, user, &found));
  if (found.num_seen == 0) return fail_without_candidates(problem);
  if (found.num_fitting == 0) return sluice_plan_fail_over_budget(problem, inputs, rates, &found);
  *out_plan = found.best;
  return SLUICE_OK;
}

static void keep_least(void* user, const sluice_plan_data_t* plan, int32_t fits) {
  uint64_t* least = user;
  (void)fits;
  if (fits_host(plan) && plan->bytes.total < *least) *least = plan->bytes.total;
}

sluice_status_t sluice_plan_least_bytes(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                        uint64_t* out_bytes) {
  sluice_plan_inputs_t lean = *inputs;
  sluice_plan_search_t found;
  lean.budget = 1; /* nothing to spare, so that no candidate keeps more rows than necessary */
  *out_bytes = UINT64_MAX;
  SLUICE_TRY(sluice_plan_search(problem, &lean, NULL, keep_least, out_bytes, &found));
  if (*out_bytes != UINT64_MAX) return SLUICE_OK;
  if (found.num_seen == 0) return fail_without_candidates(problem);
  lean.budget = 0;
  return sluice_plan_fail_over_budget(problem, &lean, NULL, &found);
}

sluice_status_t sluice_plan_visit_leanest(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                          sluice_plan_visit_fn_t visit, void* user) {
  sluice_plan_inputs_t lean = *inputs;
  sluice_plan_search_t found;
  lean.budget = 1, lean.may_keep_part = 0; /* nothing to spare: a candidate over its budget is sized at its minimum */
  SLUICE_TRY(sluice_plan_search(problem, &lean, NULL, visit, user, &found));
  return found.num_seen > 0 ? SLUICE_OK : fail_without_candidates(problem);
}

uint64_t sluice_plan_hash(const sluice_plan_data_t* plan) {
  const int64_t numbers[] = {plan->inputs.max_tokens,
                             plan->num_blocks,
                             plan->num_chunks,
                             plan->blocks_per_chunk,
                             plan->chunk_rows,
                             plan->kept_rows,
                             plan->restore_input,
                             plan->restore_pre_activation,
                             plan->inputs.separate_wgrad,
                             plan->two_levels};
  const sluice_chunk_policies_t* p = &plan->inputs.policies;
  uint64_t hash = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, numbers, sizeof numbers);
  hash = sluice_hash_bytes(hash, p->di, (size_t)p->count * sizeof p->di[0]);
  return sluice_hash_bytes(hash, p->m, (size_t)p->count * sizeof p->m[0]);
}

void sluice_plan_message(const sluice_plan_data_t* plan, char* text, size_t room) {
  snprintf(text, room, "n %d, T_DI %s, T_M %s, %lld tokens, budget %llu (%08x)", plan->num_chunks,
           sluice_restore_name(plan->restore_input), sluice_restore_name(plan->restore_pre_activation),
           (long long)plan->inputs.max_tokens, (unsigned long long)plan->inputs.budget,
           (unsigned)sluice_plan_hash(plan));
}
