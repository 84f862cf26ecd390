// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/stages/test/exhaustive.h"

#include <math.h>
#include <stddef.h>

static int32_t outstanding(const sluice_stages_problem_t* p, int32_t stage) {
  const int32_t m = p->num_micro_batches, limit = p->in_flight_limit > 0 ? p->in_flight_limit : p->num_stages;
  if (p->in_flight != NULL) return p->in_flight[stage];
  switch (p->schedule) {
    case SLUICE_STAGES_GPIPE: return m;
    case SLUICE_STAGES_1F1B: return m < p->num_stages - stage ? m : p->num_stages - stage;
    default: return stage == p->num_stages - 1 ? 1 : m < limit ? m : limit;
  }
}

static double fastest(const sluice_stages_layer_t* layer) {
  double least = INFINITY;
  for (int32_t o = 0; o < layer->num_options; ++o) {
    least = fmin(least, layer->options[o].forward_seconds + layer->options[o].backward_seconds);
  }
  return least;
}

static double message(const sluice_stages_problem_t* p, int32_t boundary, uint64_t bytes) {
  if (p->links == NULL || bytes == 0) return 0;
  const sluice_stages_link_t* l = &p->links[boundary];
  return (l->latency_seconds + (double)bytes / l->bytes_per_second) * (l->full_duplex ? 1 : 2);
}

uint64_t exhaustive_budget(const sluice_stages_problem_t* p, int32_t stage) {
  return p->budget_bytes == NULL || p->budget_bytes[stage] == 0 ? UINT64_MAX : p->budget_bytes[stage];
}

double exhaustive_turn(const sluice_stages_problem_t* p, int32_t stage, int32_t first, int32_t end,
                       const int32_t* options, uint64_t* out_bytes) {
  const int32_t k = outstanding(p, stage), versions = p->weight_versions ? k : 1;
  const uint64_t in = first == 0 ? 0 : p->layers[first - 1].output_bytes;
  const uint64_t out = end == p->num_layers ? 0 : p->layers[end - 1].output_bytes;
  uint64_t bytes = p->base_bytes + in + (uint64_t)k * out, working = 0, copied = 0, arena = 0;
  double compute = 0, copies = 0, all = 0, before = 0;
  int is_late = 0;
  for (int32_t i = first; i < end; ++i) all += fastest(&p->layers[i]);
  for (int32_t i = first; i < end; ++i) {
    const sluice_stages_layer_t* l = &p->layers[i];
    const sluice_stages_option_t* o = &l->options[options[i - first]];
    before += fastest(l);
    bytes += (uint64_t)versions * l->parameter_bytes + l->state_bytes + o->resident_bytes + (uint64_t)k * o->held_bytes;
    working = o->working_bytes > working ? o->working_bytes : working;
    copied = o->copied_bytes > copied ? o->copied_bytes : copied;
    arena = o->arena_bytes > arena ? o->arena_bytes : arena;
    compute += o->forward_seconds + o->backward_seconds;
    if (o->copied_bytes == 0) continue;
    const double both =
        p->copy_bytes_per_second > 0 ? 2 * (double)o->copied_bytes / p->copy_bytes_per_second : INFINITY;
    is_late |= !(both <= (all - before) + (k - 1) * all);
    copies += both;
  }
  if (out_bytes != NULL) *out_bytes = bytes + working + copied + arena;
  if (is_late) return INFINITY;
  const double front = stage == 0 ? 0 : message(p, stage - 1, in);
  const double back = stage == p->num_stages - 1 ? 0 : message(p, stage, out);
  if (p->copies_share_links) return fmax(compute, front + back + copies);
  return fmax(fmax(compute, copies), fmax(front, back));
}

/* The best of a run: its fastest turn within the budget, and its fewest bytes. */
typedef struct run_s {
  double turn;
  uint64_t bytes;
} run_t;

static run_t best_of_run(const sluice_stages_problem_t* p, int32_t stage, int32_t first, int32_t end) {
  int32_t options[EXHAUSTIVE_LAYERS] = {0};
  run_t best = {INFINITY, UINT64_MAX};
  for (;;) {
    uint64_t bytes;
    const double turn = exhaustive_turn(p, stage, first, end, options, &bytes);
    if (turn < INFINITY && bytes < best.bytes) best.bytes = bytes;
    if (bytes <= exhaustive_budget(p, stage) && turn < best.turn) best.turn = turn;
    int32_t i = 0;
    while (i < end - first && ++options[i] == p->layers[first + i].num_options) options[i++] = 0;
    if (i == end - first) return best;
  }
}

exhaustive_t exhaustive_search(const sluice_stages_problem_t* p) {
  static run_t runs[EXHAUSTIVE_STAGES][EXHAUSTIVE_LAYERS + 1][EXHAUSTIVE_LAYERS + 1];
  const int32_t n = p->num_layers, stages = p->num_stages;
  for (int32_t s = 0; s < stages; ++s) {
    for (int32_t first = s; first <= (s == 0 ? 0 : n - (stages - s)); ++first) {
      for (int32_t end = s == stages - 1 ? n : first + 1; end <= n - (stages - 1 - s); ++end) {
        runs[s][first][end] = best_of_run(p, s, first, end);
      }
    }
  }
  exhaustive_t best = {INFINITY, UINT64_MAX};
  /* as digits of a number, the last one fixed; sequences that do not increase are skipped */
  int32_t ends[EXHAUSTIVE_STAGES];
  for (int32_t s = 0; s < stages; ++s) ends[s] = s == stages - 1 ? n : 1;
  for (;;) {
    int32_t rises = 1, first = 0;
    for (int32_t s = 0; s < stages; first = ends[s++]) rises &= ends[s] > first && ends[s] <= n - (stages - 1 - s);
    if (rises) {
      double slowest = 0;
      uint64_t lack = 0;
      first = 0;
      for (int32_t s = 0; s < stages; first = ends[s++]) {
        const run_t* run = &runs[s][first][ends[s]];
        const uint64_t budget = exhaustive_budget(p, s), over = run->bytes > budget ? run->bytes - budget : 0;
        slowest = fmax(slowest, run->turn), lack = over > lack ? over : lack;
      }
      best.slowest = fmin(best.slowest, slowest);
      best.short_bytes = lack < best.short_bytes ? lack : best.short_bytes;
    }
    int32_t s = 0;
    while (s < stages - 1 && ++ends[s] == n) ends[s++] = 1;
    if (s == stages - 1) return best;
  }
}
