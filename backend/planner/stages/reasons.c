// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/stages/reasons.h"

#include <math.h>

#include "backend/base/math.h"
#include "backend/planner/stages/problem/messages.h"

/* ---- options ---- */

/* The largest working or copied bytes or arena of a stage without one of its layers. */
typedef uint64_t (*bytes_fn)(const sluice_stages_option_t* option);

static uint64_t working_of(const sluice_stages_option_t* option) { return option->working_bytes; }
static uint64_t copied_of(const sluice_stages_option_t* option) { return option->copied_bytes; }
static uint64_t arena_of(const sluice_stages_option_t* option) { return option->arena_bytes; }

static uint64_t largest_without(const sluice_partition_t* part, int32_t layer, bytes_fn bytes_of) {
  const sluice_stages_problem_t* p = part->tables->problem;
  uint64_t largest = 0;
  for (int32_t i = 0; i < p->num_layers; ++i) {
    if (i == layer || part->stage_of[i] != part->stage_of[layer]) continue;
    largest = sluice_max_u64(largest, bytes_of(&p->layers[i].options[part->option_of[i]]));
  }
  return largest;
}

/* Returns the least time from the end of a layer's forward to the start of its backward. */
static double gap_of(const sluice_partition_t* part, int32_t layer) {
  const sluice_stages_tables_t* t = part->tables;
  double all = 0, after = 0;
  for (int32_t i = 0; i < t->num_layers; ++i) {
    if (part->stage_of[i] != part->stage_of[layer]) continue;
    all += t->items[t->first_item[i]].seconds;
    if (i > layer) after += t->items[t->first_item[i]].seconds;
  }
  return after + (t->in_flight[part->stage_of[layer]] - 1) * all;
}

static void give_option_reason(const sluice_partition_t* part, int32_t layer, sluice_stages_plan_t* plan) {
  const sluice_stages_tables_t* t = part->tables;
  sluice_stages_choice_t* choice = &plan->choices[layer];
  const sluice_stages_stage_t* s = &plan->stages[choice->stage];
  const sluice_stages_option_t* now = &t->problem->layers[layer].options[choice->option];
  choice->fastest = t->items[t->first_item[layer]].option;
  choice->reason = SLUICE_STAGES_FASTEST, choice->reason_bytes = 0, choice->reason_seconds = 0;
  if (choice->option == choice->fastest) return;
  const sluice_stages_option_t* then = &t->problem->layers[layer].options[choice->fastest];
  const double k = s->in_flight;
  const double bytes =
      (double)s->bytes + (double)then->resident_bytes - (double)now->resident_bytes +
      k * ((double)then->held_bytes - (double)now->held_bytes) +
      (double)sluice_max_u64(largest_without(part, layer, working_of), then->working_bytes) - (double)s->working_bytes +
      (double)sluice_max_u64(largest_without(part, layer, copied_of), then->copied_bytes) - (double)s->staging_bytes +
      (double)sluice_max_u64(largest_without(part, layer, arena_of), then->arena_bytes) - (double)s->arena_bytes;
  const double compute = s->compute_seconds + then->forward_seconds + then->backward_seconds - now->forward_seconds -
                         now->backward_seconds;
  const double copies = s->copy_seconds + sluice_stages_copy_seconds(t->problem, then->copied_bytes) -
                        sluice_stages_copy_seconds(t->problem, now->copied_bytes);
  const double turn = sluice_stages_turn_seconds(t->problem, compute, s->message_seconds, copies);
  const double costs = s->seconds - turn;
  const double over = s->budget_bytes == 0 ? 0 : bytes - (double)s->budget_bytes;
  if (over > 0) choice->reason_bytes = (uint64_t)over;
  if (s->budget_bytes != 0 && s->bytes > s->budget_bytes) {
    choice->reason = SLUICE_STAGES_OVER_BUDGET;
  } else if (then->copied_bytes > 0 &&
             sluice_stages_copy_seconds(t->problem, then->copied_bytes) > gap_of(part, layer)) {
    choice->reason = SLUICE_STAGES_NO_TIME;
  } else if (over > 0) {
    const int is_free = costs <= 1e-12 * s->seconds;
    choice->reason = is_free ? SLUICE_STAGES_FREE : SLUICE_STAGES_SAVES;
    choice->reason_seconds = is_free ? 0 : costs;
  } else {
    choice->reason = SLUICE_STAGES_UNBURDENS, choice->reason_seconds = fmax(-costs, 0);
  }
}

/* ---- cuts ---- */

/* Returns the layer next to a cut that may cross it: the last of the stage before it, or the first of the stage after
 * it. */
static int32_t next_to_cut(const sluice_partition_t* part, int32_t stage, int32_t step) {
  const sluice_stages_tables_t* t = part->tables;
  const int32_t* first = step > 0 ? t->first_reader : t->first_source;
  const int32_t* list = step > 0 ? t->readers : t->sources;
  int32_t count = 0, found = -1;
  for (int32_t i = 0; i < t->num_layers; ++i) {
    const int32_t layer = step > 0 ? t->num_layers - 1 - i : i;
    if (part->stage_of[layer] != stage) continue;
    ++count;
    int may = found < 0;
    for (int32_t a = first[layer]; a < first[layer + 1]; ++a) may &= part->stage_of[list[a]] != stage;
    if (may) found = layer;
  }
  return count > 1 ? found : -1; /* no stage stays empty */
}

static sluice_stages_other_cut_t try_cut(sluice_partition_t* part, int32_t from, int32_t step) {
  sluice_stages_other_cut_t other = {.slowest_seconds = INFINITY, .layer = next_to_cut(part, from, step)};
  if (other.layer < 0) return other;
  part->stage_of[other.layer] += step;
  const sluice_stage_judgement_t here = sluice_partition_judge(part, from, 0);
  const sluice_stage_judgement_t there = sluice_partition_judge(part, from + step, 0);
  part->stage_of[other.layer] -= step;
  other.short_bytes = (uint64_t)fmax(here.short_bytes, there.short_bytes);
  if (other.short_bytes > 0) return other;
  other.slowest_seconds = fmax(here.turn, there.turn);
  for (int32_t s = 0; s < part->tables->num_stages; ++s) {
    if (s != from && s != from + step) other.slowest_seconds = fmax(other.slowest_seconds, part->judged[s].turn);
  }
  return other;
}

void sluice_stages_give_reasons(sluice_partition_t* part, sluice_stages_plan_t* plan) {
  const sluice_stages_other_cut_t none = {.slowest_seconds = INFINITY, .layer = -1};
  for (int32_t i = 0; i < part->tables->num_layers; ++i) give_option_reason(part, i, plan);
  for (int32_t s = 0; s < part->tables->num_stages; ++s) {
    plan->stages[s].begins_earlier = s == 0 ? none : try_cut(part, s - 1, 1);
    plan->stages[s].begins_later = s == 0 ? none : try_cut(part, s, -1);
  }
}
