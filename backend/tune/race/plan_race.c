// SPDX-License-Identifier: Apache-2.0
#include "backend/tune/race/plan_race.h"

#include <math.h>
#include <string.h>

#define COUNTED       3    /* steps of each plan, after its warm-up */
#define HOPELESS      1.15 /* times the best in two counted steps: the plan is eliminated */
#define HOPELESS_ONCE 1.95 /* the same after one step: more than a change of the machine's speed (1.7) explains */
#define ABOUT         1.19 /* factor around the first size, in both directions: 2^(1/4) */
#define ELSEWHERE     64   /* laps with passes of other sizes only, after which the race ends with its measurements */

static double time_of(const sluice_plan_race_t* r, int32_t plan) {
  if (r->counts[plan][0] < 2 || r->counts[plan][1] < 2) return INFINITY;
  return r->ns_per_row[plan][0] + r->ns_per_row[plan][1];
}

static int32_t best_but(const sluice_plan_race_t* r, int32_t left_out) {
  int32_t best = -1;
  for (int32_t p = 0; p < r->count; ++p) {
    if (p == left_out || time_of(r, p) == INFINITY) continue;
    if (best < 0 || time_of(r, p) < time_of(r, best)) best = p;
  }
  return best;
}

static int32_t ran(const sluice_plan_race_t* r, int32_t plan) {
  return r->counts[plan][0] < r->counts[plan][1] ? r->counts[plan][0] : r->counts[plan][1];
}

void sluice_plan_race_start(sluice_plan_race_t* r, const sluice_racing_plan_t* plans, int32_t count) {
  memset(r, 0, sizeof *r);
  r->count = count;
  r->is_settled = count == 1;
  r->alive = (1u << count) - 1;
  sluice_race_timeout_begin(&r->timeout);
  memcpy(r->plans, plans, (size_t)count * sizeof *plans);
}

int32_t sluice_plan_race_next(sluice_plan_race_t* r) {
  if (r->is_settled) return r->pick;
  /* Plans run one after the other: under a budget few schedules are cached, and alternating plans would rebuild them at
   * each step.
   */
  for (int32_t plan = 0; plan < r->count; ++plan) {
    if ((r->alive >> plan & 1) && ran(r, plan) <= COUNTED) return r->pick = plan;
  }
  return r->pick;
}

static int settle(sluice_plan_race_t* r) {
  int32_t best = best_but(r, -1);
  r->pick = best < 0 ? 0 : best;
  r->is_settled = 1;
  return 1;
}

static int judge(sluice_plan_race_t* r) {
  int32_t best = best_but(r, -1), open = 0;
  for (int32_t p = 0; p < r->count; ++p) {
    double time = time_of(r, p);
    double hopeless = ran(r, p) > 2 ? HOPELESS : HOPELESS_ONCE;
    int lost = best >= 0 && time < INFINITY && time > hopeless * time_of(r, best);
    if (lost) r->alive &= ~(1u << p);
    open += (r->alive >> p & 1) && ran(r, p) <= COUNTED;
  }
  /* The only plan left, and measured: it has won, and more steps would decide nothing. */
  int is_last = best >= 0 && r->alive == 1u << best;
  return open == 0 || is_last ? settle(r) : 0;
}

/* The cost of a warm-up is known once a second pass has run. Called before `each` is counted. */
static void count_warm_up(sluice_plan_race_t* r, int32_t plan, int32_t direction, double each, double rows) {
  double* first = &r->first_ns_per_row[plan][direction];
  if (r->counts[plan][direction] == 0) *first = each;
  if (r->counts[plan][direction] == 0) return;
  if (*first > each) r->switch_ns += (*first - each) * rows;
  *first = 0;
}

void sluice_plan_race_count_switch(sluice_plan_race_t* r, int32_t direction, int32_t plan, int64_t rows, uint64_t ns) {
  if (plan < 0 || plan >= r->count || r->counts[plan][direction] < 2) return;
  double more = (double)ns - r->ns_per_row[plan][direction] * (double)rows;
  if (more > 0) r->switch_ns += more;
}

int sluice_plan_race_wait(sluice_plan_race_t* r, int32_t layer) {
  if (r->is_settled) return 0;
  if (sluice_race_timeout_wait(&r->timeout, layer)) {
    r->elsewhere += r->saw_other && !r->saw_counted;
    r->saw_other = r->saw_counted = 0;
  }
  return r->elsewhere > ELSEWHERE || sluice_race_timeout_is_over(&r->timeout) ? settle(r) : 0;
}

int sluice_plan_race_observe(sluice_plan_race_t* r, int32_t direction, int32_t plan, int64_t rows, uint64_t ns) {
  if (rows < 1 || ns == 0 || plan < 0 || plan >= r->count) return 0;
  ++r->timed;
  r->total_ns += (double)ns;
  if (r->is_settled) return 0;
  if (r->rows == 0) r->rows = rows;
  double size = (double)rows / (double)r->rows;
  if (size > ABOUT || size < 1 / ABOUT) {
    r->saw_other = 1;
    return 0;
  }
  r->saw_counted = 1;
  ++r->passes;
  double each = (double)ns / (double)rows, *shortest = &r->ns_per_row[plan][direction];
  if (r->counts[plan][direction] <= COUNTED) sluice_race_timeout_renew(&r->timeout);
  count_warm_up(r, plan, direction, each, (double)rows);
  if (++r->counts[plan][direction] > 1 && (*shortest == 0 || each < *shortest)) *shortest = each;
  int32_t best = best_but(r, -1);
  if (best >= 0 && each > r->ns_per_row[best][direction]) {
    r->excess_ns += (each - r->ns_per_row[best][direction]) * (double)rows;
  }
  return judge(r);
}

double sluice_plan_race_seconds(const sluice_plan_race_t* r, int32_t plan) {
  double time = plan < 0 ? INFINITY : time_of(r, plan);
  return time == INFINITY ? 0 : time * (double)r->rows * 1e-9;
}

int32_t sluice_plan_race_second(const sluice_plan_race_t* r) { return best_but(r, r->pick); }
