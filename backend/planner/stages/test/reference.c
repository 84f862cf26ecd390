// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/stages/test/reference.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>

#include "backend/planner/stages/model.h"
#include "backend/planner/stages/tables.h"

/* splitmix64 (Steele, Lea, Flood 2014) */
static uint64_t next(random_t* random) {
  uint64_t z = random->state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

double random_between(random_t* random, double low, double high) {
  return low + (high - low) * (double)(next(random) >> 11) * 0x1p-53;
}

int32_t random_index(random_t* random, int32_t count) { return (int32_t)(next(random) % (uint64_t)count); }

static uint64_t bytes_between(random_t* random, double low, double high) {
  return (uint64_t)random_between(random, low, high);
}

/* ---- layers ---- */

static void fill_layer(random_t* random, sluice_stages_layer_t* layer, sluice_stages_option_t* options) {
  sluice_stages_profile_t profile = {.forward_seconds = exp(random_between(random, -1, 1)),
                                     .activation_bytes = bytes_between(random, 20, 200),
                                     .workspace_bytes = bytes_between(random, 0, 10)};
  profile.backward_seconds = profile.forward_seconds * random_between(random, 1.5, 2.5);
  profile.recompute_seconds = profile.forward_seconds * random_between(random, 0.9, 1.1);
  profile.checkpoint_bytes = (uint64_t)((double)profile.activation_bytes / random_between(random, 2, 12));
  sluice_stages_options_of_profile(&profile, options);
  *layer = (sluice_stages_layer_t){.options = options,
                                   .parameter_bytes = bytes_between(random, 5, 40),
                                   .output_bytes = profile.checkpoint_bytes,
                                   .num_options = SLUICE_STAGES_PROFILE_OPTIONS};
  layer->state_bytes = 3 * layer->parameter_bytes;
  if (random_index(random, 5) != 0) return;
  for (; layer->num_options < RANDOM_OPTIONS; ++layer->num_options) {
    sluice_stages_option_t* option = &options[layer->num_options];
    const double part = random_between(random, 0, 1);
    *option = options[SLUICE_STAGES_KEEP];
    option->kind = SLUICE_STAGES_MIXED, option->tag = layer->num_options;
    option->backward_seconds += part * profile.recompute_seconds;
    option->held_bytes = (uint64_t)((1 - part) * (double)profile.activation_bytes);
    option->copied_bytes = random_index(random, 2) * profile.activation_bytes / 3;
    option->working_bytes += profile.activation_bytes / 2;
    option->resident_bytes = bytes_between(random, 0, 20);
    option->arena_bytes = 3 * option->resident_bytes; /* derived: the rest of the random sequence stays the same */
  }
}

/* Bytes of an even partition that keeps everything: the unit of budgets. */
static double kept_bytes(const random_problem_t* r) {
  const sluice_stages_problem_t* p = &r->problem;
  double most = 0;
  for (int32_t s = 0; s < p->num_stages; ++s) {
    const int32_t k = sluice_stages_in_flight(p, s);
    double bytes = (double)p->base_bytes;
    for (int32_t i = s * p->num_layers / p->num_stages; i < (s + 1) * p->num_layers / p->num_stages; ++i) {
      const sluice_stages_layer_t* l = &r->layers[i];
      bytes += (p->weight_versions ? k : 1) * (double)l->parameter_bytes + (double)l->state_bytes +
               k * (double)l->options[SLUICE_STAGES_KEEP].held_bytes;
    }
    most = fmax(most, bytes);
  }
  return most;
}

static void fill_budgets(random_t* random, random_problem_t* r) {
  const double even = kept_bytes(r) * random_between(random, 0.35, 1.15);
  const int are_equal = random_index(random, 3) > 0;
  for (int32_t s = 0; s < r->problem.num_stages; ++s) {
    r->budgets[s] = (uint64_t)(are_equal ? even : even * random_between(random, 0.8, 1.3));
  }
  if (random_index(random, 10) == 0) r->budgets[random_index(random, r->problem.num_stages)] = 0;
  r->problem.budget_bytes = r->budgets;
}

static void fill_machine(random_t* random, random_problem_t* r) {
  sluice_stages_problem_t* p = &r->problem;
  p->base_bytes = bytes_between(random, 0, 50);
  p->num_micro_batches = 1 + random_index(random, 16);
  p->schedule = random_index(random, 3);
  p->in_flight_limit = random_index(random, 2 * p->num_stages);
  p->weight_versions = random_index(random, 4) == 0;
  p->copies_share_links = random_index(random, 2);
  p->copy_bytes_per_second = random_index(random, 4) == 0 ? 0 : exp(random_between(random, 2, 6));
  for (int32_t s = 0; s + 1 < p->num_stages; ++s) {
    r->links[s] = (sluice_stages_link_t){.bytes_per_second = exp(random_between(random, 1, 6)),
                                         .latency_seconds = random_between(random, 0, 0.05),
                                         .full_duplex = random_index(random, 2)};
  }
  if (random_index(random, 5) > 0) p->links = r->links;
}

random_problem_t random_chain(random_t* random, int32_t num_layers, int32_t num_stages) {
  const size_t n = (size_t)num_layers, p = (size_t)num_stages;
  random_problem_t r = {.problem = {.num_layers = num_layers, .num_stages = num_stages}};
  r.layers = calloc(n, sizeof *r.layers);
  r.options = calloc(n * RANDOM_OPTIONS, sizeof *r.options);
  r.links = calloc(p, sizeof *r.links);
  r.budgets = calloc(p, sizeof *r.budgets);
  r.plan.choices = calloc(n, sizeof *r.plan.choices);
  r.plan.stages = calloc(p, sizeof *r.plan.stages);
  for (int32_t i = 0; i < num_layers; ++i) fill_layer(random, &r.layers[i], r.options + (size_t)i * RANDOM_OPTIONS);
  r.problem.layers = r.layers;
  fill_machine(random, &r);
  fill_budgets(random, &r);
  return r;
}

/* ---- graphs ---- */

static void add_edge(random_problem_t* r, int32_t from, int32_t to) {
  r->edges[r->problem.num_edges++] = (sluice_stages_edge_t){from, to};
}

random_problem_t random_nests(random_t* random, int32_t num_layers, int32_t num_stages) {
  random_problem_t r = random_chain(random, num_layers, num_stages);
  r.edges = calloc(3 * (size_t)num_layers, sizeof *r.edges);
  r.problem.edges = r.edges;
  for (int32_t first = 0; first + 1 < num_layers;) {
    /* In a nest each layer reads the first one or an earlier one, and the last one reads every output without a
     * reader. */
    int32_t last = first + 4 + random_index(random, 9);
    last = last < num_layers ? last : num_layers - 1;
    for (int32_t i = first + 1; i < last; ++i) {
      add_edge(&r, first + random_index(random, i - first), i);
      add_edge(&r, i, last);
    }
    add_edge(&r, last - 1, last);
    first = last;
  }
  for (int32_t i = 0; i < num_layers / 100; ++i) {
    const int32_t from = random_index(random, num_layers / 2);
    add_edge(&r, from, from + 1 + random_index(random, num_layers - from - 1));
  }
  return r;
}

random_problem_t random_graph(random_t* random, int32_t num_layers, int32_t num_stages) {
  random_problem_t r = random_chain(random, num_layers, num_stages);
  r.edges = calloc(3 * (size_t)num_layers, sizeof *r.edges);
  r.problem.edges = r.edges;
  for (int32_t i = 1; i < num_layers; ++i) {
    for (int32_t e = random_index(random, 3); e >= 0; --e) add_edge(&r, random_index(random, i), i);
  }
  return r;
}

void random_problem_free(random_problem_t* r) {
  free(r->layers), free(r->options), free(r->edges), free(r->links), free(r->budgets);
  free(r->plan.choices), free(r->plan.stages);
}

/* ---- the exhaustive search ---- */

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
