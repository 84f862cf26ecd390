// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/stages/test/random_problem.h"

#include <math.h>
#include <stdlib.h>

#include "backend/planner/stages/tables.h"
#include "backend/planner/stages/model.h"

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
