// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/stages/predict_stages.h"

#include <string.h>

#include "backend/base/math.h"
#include "backend/planner/stages/problem/messages.h"

static void add_layer(const sluice_stages_tables_t* t, int32_t layer, int32_t choice, sluice_stages_stage_t* s,
                      uint64_t* copied) {
  const sluice_stages_layer_t* l = &t->problem->layers[layer];
  const sluice_stages_option_t* option = &l->options[choice];
  const uint64_t k = (uint64_t)s->in_flight;
  const double seconds = option->forward_seconds + option->backward_seconds;
  ++s->num_layers;
  s->compute_seconds += seconds, s->extra_seconds += seconds - t->items[t->first_item[layer]].seconds;
  s->parameter_bytes += l->parameter_bytes, s->state_bytes += l->state_bytes;
  s->resident_bytes += option->resident_bytes, s->held_bytes += k * option->held_bytes;
  s->working_bytes = sluice_max_u64(s->working_bytes, option->working_bytes);
  s->staging_bytes = sluice_max_u64(s->staging_bytes, option->copied_bytes);
  s->arena_bytes = sluice_max_u64(s->arena_bytes, option->arena_bytes);
  *copied += option->copied_bytes;
}

/* The layers after the running one hold nothing of its micro-batch: not yet, or no longer. */
static uint64_t most_at_a_time(const sluice_stages_tables_t* t, const int32_t* stage_of, int32_t stage,
                               const sluice_stages_plan_t* plan) {
  uint64_t held = 0, most = 0;
  for (int32_t i = 0; i < t->num_layers; ++i) {
    if (stage_of[i] != stage) continue;
    const sluice_stages_option_t* option = &t->problem->layers[i].options[plan->choices[i].option];
    held += option->held_bytes;
    most = sluice_max_u64(most, held + option->working_bytes);
  }
  return (uint64_t)(t->in_flight[stage] - 1) * held + most;
}

static void finish_stage(const sluice_stages_tables_t* t, const int32_t* stage_of, int32_t stage, uint64_t copied,
                         sluice_stages_stage_t* s) {
  const sluice_stages_problem_t* p = t->problem;
  const uint64_t in = stage == 0 ? 0 : sluice_stages_boundary_bytes(t, stage_of, stage - 1);
  const uint64_t out = stage == p->num_stages - 1 ? 0 : sluice_stages_boundary_bytes(t, stage_of, stage);
  s->parameter_bytes *= (uint64_t)t->versions[stage];
  s->base_bytes = p->base_bytes, s->message_bytes = sluice_stages_message_bytes(t, stage, in, out);
  s->host_bytes = (uint64_t)s->in_flight * copied;
  s->budget_bytes = t->budget[stage] == UINT64_MAX ? 0 : t->budget[stage];
  s->bytes = s->base_bytes + s->parameter_bytes + s->state_bytes + s->message_bytes + s->resident_bytes +
             s->held_bytes + s->working_bytes + s->staging_bytes + s->arena_bytes;
  s->message_seconds = sluice_stages_message_seconds(p, stage, in, out);
  s->copy_seconds = sluice_stages_copy_seconds(p, copied);
  s->seconds = sluice_stages_turn_seconds(p, s->compute_seconds, s->message_seconds, s->copy_seconds);
}

/* The first micro-batch passes all stages and back; each further one adds a turn of the slowest stage. */
static double step_seconds(const sluice_stages_tables_t* t, const int32_t* stage_of, const sluice_stages_plan_t* plan) {
  const sluice_stages_problem_t* p = t->problem;
  double first = 0;
  for (int32_t s = 0; s < p->num_stages; ++s) {
    first += plan->stages[s].compute_seconds;
    const uint64_t bytes = s + 1 < p->num_stages ? sluice_stages_boundary_bytes(t, stage_of, s) : 0;
    const double link = sluice_stages_link_seconds(p, s, bytes);
    first += link > 0 && p->links[s].full_duplex ? 2 * link : link; /* forward and back, sequentially */
  }
  return first + (p->num_micro_batches - 1) * plan->slowest_seconds;
}

void sluice_stages_predict(const sluice_stages_tables_t* t, const int32_t* stage_of, sluice_stages_plan_t* plan) {
  plan->slowest_seconds = 0, plan->slowest_stage = 0;
  for (int32_t stage = 0; stage < t->num_stages; ++stage) {
    sluice_stages_stage_t* s = &plan->stages[stage];
    memset(s, 0, sizeof *s);
    s->in_flight = t->in_flight[stage];
    uint64_t copied = 0;
    for (int32_t i = 0; i < t->num_layers; ++i) {
      if (stage_of[i] == stage) add_layer(t, i, plan->choices[i].option, s, &copied);
    }
    finish_stage(t, stage_of, stage, copied, s);
    s->peak_bytes = s->bytes - s->held_bytes - s->working_bytes + most_at_a_time(t, stage_of, stage, plan);
    if (s->seconds > plan->slowest_seconds) plan->slowest_seconds = s->seconds, plan->slowest_stage = stage;
  }
  plan->step_seconds = step_seconds(t, stage_of, plan);
}
