// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/stages/tables.h"

#include <math.h>
#include <string.h>

#include "backend/base/math.h"

/* ---- the check ---- */

enum { MOST_LAYERS = 65536, MOST_STAGES = 1024, MOST_OPTIONS = 4096 };
static const double MOST_BYTES = 9007199254740992.0; /* 2^53 */

static int is_time(double seconds) { return isfinite(seconds) && seconds >= 0; }

static sluice_status_t check_sizes(const sluice_stages_problem_t* p) {
  SLUICE_TRY(SLUICE_REQUIRE(p->num_layers >= 1 && p->num_layers <= MOST_LAYERS && p->layers != NULL,
                            "num_layers is %d; it must be in [1, %d], with layers", p->num_layers, MOST_LAYERS));
  SLUICE_TRY(SLUICE_REQUIRE(
      p->num_stages >= 1 && p->num_stages <= MOST_STAGES && p->num_stages <= p->num_layers,
      "num_stages is %d; it must be in [1, %d] and at most the number of layers, %d: no stage stays empty",
      p->num_stages, MOST_STAGES, p->num_layers));
  SLUICE_TRY(SLUICE_REQUIRE(p->num_micro_batches >= 1, "num_micro_batches is %d; it must be at least 1",
                            p->num_micro_batches));
  SLUICE_TRY(SLUICE_REQUIRE(p->schedule >= SLUICE_STAGES_1F1B && p->schedule <= SLUICE_STAGES_MESSAGE_DRIVEN,
                            "schedule is %d: use SLUICE_STAGES_1F1B, _GPIPE or _MESSAGE_DRIVEN", p->schedule));
  SLUICE_TRY(
      SLUICE_REQUIRE(p->in_flight_limit >= 0, "in_flight_limit is %d; it must be at least 0", p->in_flight_limit));
  SLUICE_TRY(SLUICE_REQUIRE(p->method >= SLUICE_STAGES_AUTO && p->method <= SLUICE_STAGES_UNCOARSENED,
                            "method is %d: use SLUICE_STAGES_AUTO, _EXACT, _HEURISTIC or _UNCOARSENED", p->method));
  SLUICE_TRY(SLUICE_REQUIRE((p->weight_versions == 0 || p->weight_versions == 1) &&
                                (p->copies_share_links == 0 || p->copies_share_links == 1),
                            "weight_versions is %d and copies_share_links %d: both are 0 or 1", p->weight_versions,
                            p->copies_share_links));
  SLUICE_TRY(SLUICE_REQUIRE(is_time(p->copy_bytes_per_second),
                            "copy_bytes_per_second is %g; it must be finite and at least 0", p->copy_bytes_per_second));
  return SLUICE_OK;
}

static sluice_status_t check_options(const sluice_stages_layer_t* layer, int32_t i) {
  SLUICE_TRY(SLUICE_REQUIRE(layer->options != NULL && layer->num_options >= 1 && layer->num_options <= MOST_OPTIONS,
                            "layer %d has %d options instead of 1 to %d", i, layer->num_options, MOST_OPTIONS));
  int copies_nothing = 0;
  for (int32_t o = 0; o < layer->num_options; ++o) {
    const sluice_stages_option_t* option = &layer->options[o];
    copies_nothing |= option->copied_bytes == 0;
    SLUICE_TRY(SLUICE_REQUIRE(is_time(option->forward_seconds) && is_time(option->backward_seconds),
                              "option %d of layer %d takes %g and %g seconds: both must be finite and at least 0", o, i,
                              option->forward_seconds, option->backward_seconds));
  }
  return SLUICE_REQUIRE(copies_nothing, "all options of layer %d copy bytes: give one option without copies", i);
}

static sluice_status_t check_edges(const sluice_stages_problem_t* p) {
  SLUICE_TRY(SLUICE_REQUIRE(p->num_edges >= 0 && (p->num_edges == 0 || p->edges != NULL),
                            "num_edges is %d: it must be at least 0, with edges", p->num_edges));
  for (int32_t e = 0; e < p->num_edges; ++e) {
    const sluice_stages_edge_t* edge = &p->edges[e];
    SLUICE_TRY(SLUICE_REQUIRE(
        edge->from >= 0 && edge->from < edge->to && edge->to < p->num_layers,
        "edge %d is from layer %d to layer %d: both must be in [0, %d), and the first must be the smaller one", e,
        edge->from, edge->to, p->num_layers));
  }
  return SLUICE_OK;
}

static sluice_status_t check_stages(const sluice_stages_problem_t* p, int32_t* out_most_in_flight) {
  *out_most_in_flight = 1;
  for (int32_t s = 0; s < p->num_stages; ++s) {
    const int32_t k = sluice_stages_in_flight(p, s);
    SLUICE_TRY(SLUICE_REQUIRE(k >= 1, "in_flight of stage %d is %d; it must be at least 1", s, k));
    *out_most_in_flight = (int32_t)sluice_max(*out_most_in_flight, k);
    if (p->links == NULL || s == p->num_stages - 1) continue;
    const sluice_stages_link_t* link = &p->links[s];
    SLUICE_TRY(SLUICE_REQUIRE(isfinite(link->bytes_per_second) && link->bytes_per_second > 0 &&
                                  is_time(link->latency_seconds) && (link->full_duplex == 0 || link->full_duplex == 1),
                              "link %d has %g bytes per second, %g seconds of latency and full_duplex %d: a rate is "
                              "above 0, a latency at least 0, full_duplex 0 or 1",
                              s, link->bytes_per_second, link->latency_seconds, link->full_duplex));
  }
  return SLUICE_OK;
}

/* An upper bound of all bytes that any sum can reach. */
static sluice_status_t check_bytes(const sluice_stages_problem_t* p, int32_t k) {
  double sum = (double)p->base_bytes;
  for (int32_t i = 0; i < p->num_layers; ++i) {
    const sluice_stages_layer_t* layer = &p->layers[i];
    double most = 0;
    for (int32_t o = 0; o < layer->num_options; ++o) {
      const sluice_stages_option_t* option = &layer->options[o];
      most = fmax(most, (double)option->resident_bytes + k * (double)option->held_bytes +
                            (k + 1.0) * (double)option->copied_bytes + (double)option->working_bytes +
                            (double)option->arena_bytes);
    }
    sum += k * (double)layer->parameter_bytes + (double)layer->state_bytes + (k + 1.0) * (double)layer->output_bytes +
           most;
  }
  return SLUICE_REQUIRE(sum < MOST_BYTES, "the layers take up to %g bytes, more than the %g that can be planned", sum,
                        MOST_BYTES);
}

sluice_status_t sluice_stages_check(const sluice_stages_problem_t* p) {
  int32_t most_in_flight = 1;
  SLUICE_TRY(check_sizes(p));
  for (int32_t i = 0; i < p->num_layers; ++i) SLUICE_TRY(check_options(&p->layers[i], i));
  SLUICE_TRY(check_edges(p));
  SLUICE_TRY(check_stages(p, &most_in_flight));
  return check_bytes(p, most_in_flight);
}

/* ---- memory ---- */

int32_t sluice_stages_in_flight(const sluice_stages_problem_t* p, int32_t stage) {
  const int32_t m = p->num_micro_batches;
  if (p->in_flight != NULL) return p->in_flight[stage];
  if (p->schedule == SLUICE_STAGES_GPIPE) return m;
  if (p->schedule == SLUICE_STAGES_1F1B) return (int32_t)sluice_min(m, p->num_stages - stage);
  /* The last stage gets the gradient of a forward at once, and backwards have priority. */
  if (stage == p->num_stages - 1) return 1;
  return (int32_t)sluice_min(m, p->in_flight_limit > 0 ? p->in_flight_limit : p->num_stages);
}

static void* take(sluice_stages_tables_t* t, int64_t count, size_t size) {
  const uint64_t bytes = (uint64_t)count * size;
  void* data = sluice_alloc_zeroed(t->allocator, bytes, "tables of layers and stages");
  if (data == NULL) return NULL;
  t->block[t->num_blocks].data = data, t->block[t->num_blocks].bytes = bytes;
  ++t->num_blocks;
  return data;
}

/* ---- options ---- */

static int is_no_better(const sluice_stages_item_t* a, const sluice_stages_item_t* b) {
  return a->seconds >= b->seconds && a->resident >= b->resident && a->held >= b->held && a->copied >= b->copied &&
         a->working >= b->working && a->arena >= b->arena;
}

static sluice_stages_item_t item_of(const sluice_stages_option_t* option, int32_t index) {
  return (sluice_stages_item_t){.seconds = option->forward_seconds + option->backward_seconds,
                                .resident = option->resident_bytes,
                                .held = option->held_bytes,
                                .copied = option->copied_bytes,
                                .working = option->working_bytes,
                                .arena = option->arena_bytes,
                                .option = index};
}

/* If two options are equal in everything, the first one is kept. */
static int is_worth_choosing(const sluice_stages_layer_t* layer, int32_t index) {
  const sluice_stages_item_t item = item_of(&layer->options[index], index);
  for (int32_t o = 0; o < layer->num_options; ++o) {
    const sluice_stages_item_t other = item_of(&layer->options[o], o);
    if (o != index && is_no_better(&item, &other) && (o < index || !is_no_better(&other, &item))) return 0;
  }
  return 1;
}

/* Orders by seconds, then by copied bytes, then by index. */
static int comes_before(const sluice_stages_item_t* a, const sluice_stages_item_t* b) {
  if (a->seconds != b->seconds) return a->seconds < b->seconds;
  if (a->copied != b->copied) return a->copied < b->copied;
  return a->option < b->option;
}

static void fill_items(sluice_stages_tables_t* t) {
  int32_t count = 0;
  for (int32_t i = 0; i < t->num_layers; ++i) {
    const sluice_stages_layer_t* layer = &t->problem->layers[i];
    t->first_item[i] = count;
    for (int32_t o = 0; o < layer->num_options; ++o) {
      if (!is_worth_choosing(layer, o)) continue;
      const sluice_stages_item_t item = item_of(&layer->options[o], o);
      int32_t at = count++;
      for (; at > t->first_item[i] && comes_before(&item, &t->items[at - 1]); --at) t->items[at] = t->items[at - 1];
      t->items[at] = item;
    }
  }
  t->first_item[t->num_layers] = t->num_items = count;
}

/* ---- sums ---- */

static uint64_t least_of_layer(const sluice_stages_tables_t* t, int32_t layer, int32_t in_flight) {
  uint64_t least = UINT64_MAX;
  for (int32_t a = t->first_item[layer]; a < t->first_item[layer + 1]; ++a) {
    const sluice_stages_item_t* item = &t->items[a];
    least = sluice_min_u64(least, item->resident + (uint64_t)in_flight * item->held);
  }
  return least;
}

static void fill_sums(sluice_stages_tables_t* t) {
  for (int32_t i = 0; i < t->num_layers; ++i) {
    t->fastest[i + 1] = t->fastest[i] + t->items[t->first_item[i]].seconds;
    t->parameters[i + 1] = t->parameters[i] + t->problem->layers[i].parameter_bytes;
    t->states[i + 1] = t->states[i] + t->problem->layers[i].state_bytes;
  }
  for (int32_t s = 0; s < t->num_stages; ++s) {
    uint64_t* lean = t->leanest + (uint64_t)s * ((uint64_t)t->num_layers + 1);
    for (int32_t i = 0; i < t->num_layers; ++i) lean[i + 1] = lean[i] + least_of_layer(t, i, t->in_flight[s]);
  }
}

static void fill_stages(sluice_stages_tables_t* t) {
  const sluice_stages_problem_t* p = t->problem;
  for (int32_t s = 0; s < t->num_stages; ++s) {
    t->in_flight[s] = sluice_stages_in_flight(p, s);
    t->versions[s] = p->weight_versions ? t->in_flight[s] : 1;
    t->budget[s] = p->budget_bytes == NULL || p->budget_bytes[s] == 0 ? UINT64_MAX : p->budget_bytes[s];
  }
}

/* ---- readers and sources ---- */

/* Lists by layer: counts, then offsets, then entries. A duplicate edge does no harm. */
static void fill_lists(const sluice_stages_edge_t* edges, int32_t num_edges, int32_t num_layers, int by_source,
                       int32_t* first, int32_t* list) {
  memset(first, 0, ((size_t)num_layers + 1) * sizeof *first);
  for (int32_t e = 0; e < num_edges; ++e) ++first[(by_source ? edges[e].from : edges[e].to) + 1];
  for (int32_t i = 0; i < num_layers; ++i) first[i + 1] += first[i];
  for (int32_t e = num_edges; e-- > 0;) {
    /* Filled from the end of each list, whose end moves down to its beginning. */
    const int32_t at = by_source ? edges[e].from : edges[e].to;
    list[--first[at + 1]] = by_source ? edges[e].to : edges[e].from;
  }
  for (int32_t i = 0; i < num_layers; ++i) first[i] = first[i + 1];
  first[num_layers] = num_edges;
}

static void fill_cut(sluice_stages_tables_t* t) {
  for (int32_t i = 0; i < t->num_layers; ++i) {
    int32_t last = i;
    for (int32_t a = t->first_reader[i]; a < t->first_reader[i + 1]; ++a)
      last = (int32_t)sluice_max(last, t->readers[a]);
    t->last_reader[i] = last;
  }
  for (int32_t i = 0; i < t->num_layers; ++i) {
    const uint64_t bytes = t->problem->layers[i].output_bytes;
    t->cut[i + 1] += bytes, t->cut[t->last_reader[i] + 1] -= bytes; /* differences first, sums below */
  }
  for (int32_t i = 0; i < t->num_layers; ++i) t->cut[i + 1] += t->cut[i];
}

static int is_chain(const sluice_stages_problem_t* p) {
  if (p->num_edges == 0) return 1;
  for (int32_t e = 0; e < p->num_edges; ++e) {
    if (p->edges[e].to != p->edges[e].from + 1) return 0;
  }
  return 1;
}

static sluice_status_t fill_graph(sluice_stages_tables_t* t) {
  const sluice_stages_problem_t* p = t->problem;
  const int32_t n = t->num_layers, num_edges = p->num_edges > 0 ? p->num_edges : n - 1;
  const sluice_stages_edge_t* edges = p->edges;
  const uint64_t bytes = (uint64_t)n * sizeof(sluice_stages_edge_t);
  sluice_stages_edge_t* chain = NULL;
  if (p->num_edges == 0) {
    chain = sluice_alloc(t->allocator, bytes, "edges of a chain");
    if (chain == NULL) return sluice_alloc_status();
    for (int32_t i = 0; i + 1 < n; ++i) chain[i] = (sluice_stages_edge_t){i, i + 1};
    edges = chain;
  }
  fill_lists(edges, num_edges, n, 1, t->first_reader, t->readers);
  fill_lists(edges, num_edges, n, 0, t->first_source, t->sources);
  sluice_free(t->allocator, chain, bytes);
  fill_cut(t);
  t->is_chain = is_chain(p);
  return SLUICE_OK;
}

/* ---- the whole table ---- */

static int take_all(sluice_stages_tables_t* t) {
  const sluice_stages_problem_t* p = t->problem;
  const int64_t n = t->num_layers, s = t->num_stages, edges = sluice_max(p->num_edges, n);
  int64_t options = 0;
  for (int32_t i = 0; i < n; ++i) options += p->layers[i].num_options;
  return (t->first_item = take(t, n + 1, sizeof *t->first_item)) != NULL &&
         (t->items = take(t, options, sizeof *t->items)) != NULL &&
         (t->fastest = take(t, n + 1, sizeof *t->fastest)) != NULL &&
         (t->parameters = take(t, n + 1, sizeof *t->parameters)) != NULL &&
         (t->states = take(t, n + 1, sizeof *t->states)) != NULL &&
         (t->leanest = take(t, s * (n + 1), sizeof *t->leanest)) != NULL &&
         (t->cut = take(t, n + 1, sizeof *t->cut)) != NULL &&
         (t->last_reader = take(t, n, sizeof *t->last_reader)) != NULL &&
         (t->first_reader = take(t, n + 1, sizeof *t->first_reader)) != NULL &&
         (t->readers = take(t, edges, sizeof *t->readers)) != NULL &&
         (t->first_source = take(t, n + 1, sizeof *t->first_source)) != NULL &&
         (t->sources = take(t, edges, sizeof *t->sources)) != NULL &&
         (t->in_flight = take(t, s, sizeof *t->in_flight)) != NULL &&
         (t->versions = take(t, s, sizeof *t->versions)) != NULL && (t->budget = take(t, s, sizeof *t->budget)) != NULL;
}

sluice_status_t sluice_stages_tables_make(const sluice_stages_problem_t* problem, sluice_allocator_t* allocator,
                                          sluice_stages_tables_t* t) {
  memset(t, 0, sizeof *t);
  t->problem = problem, t->allocator = allocator;
  t->num_layers = problem->num_layers, t->num_stages = problem->num_stages;
  sluice_status_t status = take_all(t) ? SLUICE_OK : sluice_alloc_status();
  if (status == SLUICE_OK) {
    fill_items(t);
    fill_stages(t);
    fill_sums(t);
    status = fill_graph(t);
  }
  if (status != SLUICE_OK) sluice_stages_tables_deinit(t);
  return status;
}

void sluice_stages_tables_deinit(sluice_stages_tables_t* t) {
  while (t->num_blocks > 0) {
    --t->num_blocks;
    sluice_free(t->allocator, t->block[t->num_blocks].data, t->block[t->num_blocks].bytes);
  }
}

/* ---- messages ---- */

uint64_t sluice_stages_boundary_bytes(const sluice_stages_tables_t* t, const int32_t* stage_of, int32_t boundary) {
  uint64_t bytes = 0;
  for (int32_t i = 0; i < t->num_layers; ++i) {
    if (stage_of[i] > boundary) continue;
    for (int32_t a = t->first_reader[i]; a < t->first_reader[i + 1]; ++a) {
      if (stage_of[t->readers[a]] <= boundary) continue;
      bytes += t->problem->layers[i].output_bytes;
      break;
    }
  }
  return bytes;
}

uint64_t sluice_stages_message_bytes(const sluice_stages_tables_t* t, int32_t stage, uint64_t in_bytes,
                                     uint64_t out_bytes) {
  return in_bytes + (uint64_t)t->in_flight[stage] * out_bytes;
}

double sluice_stages_link_seconds(const sluice_stages_problem_t* p, int32_t boundary, uint64_t bytes) {
  if (p->links == NULL || bytes == 0 || boundary < 0 || boundary >= p->num_stages - 1) return 0;
  const sluice_stages_link_t* link = &p->links[boundary];
  const double once = link->latency_seconds + (double)bytes / link->bytes_per_second;
  return link->full_duplex ? once : 2 * once;
}

double sluice_stages_message_seconds(const sluice_stages_problem_t* p, int32_t stage, uint64_t in_bytes,
                                     uint64_t out_bytes) {
  const double in = sluice_stages_link_seconds(p, stage - 1, in_bytes);
  const double out = sluice_stages_link_seconds(p, stage, out_bytes);
  /* Two wires work concurrently; the one that copies share is the machine's own, which both cross. */
  return p->copies_share_links ? in + out : fmax(in, out);
}

double sluice_stages_turn_seconds(const sluice_stages_problem_t* p, double compute, double messages, double copies) {
  return fmax(compute, p->copies_share_links ? messages + copies : fmax(messages, copies));
}

double sluice_stages_copy_seconds(const sluice_stages_problem_t* p, uint64_t bytes) {
  if (bytes == 0) return 0;
  return p->copy_bytes_per_second > 0 ? 2 * (double)bytes / p->copy_bytes_per_second : INFINITY;
}

/* ---- profiles ---- */

void sluice_stages_options_of_profile(const sluice_stages_profile_t* p,
                                      sluice_stages_option_t out_options[SLUICE_STAGES_PROFILE_OPTIONS]) {
  out_options[SLUICE_STAGES_KEEP] = (sluice_stages_option_t){.forward_seconds = p->forward_seconds,
                                                             .backward_seconds = p->backward_seconds,
                                                             .held_bytes = p->activation_bytes,
                                                             .working_bytes = p->workspace_bytes,
                                                             .kind = SLUICE_STAGES_KEEP};
  out_options[SLUICE_STAGES_RECOMPUTE] =
      (sluice_stages_option_t){.forward_seconds = p->forward_seconds,
                               .backward_seconds = p->backward_seconds + p->recompute_seconds,
                               .held_bytes = p->checkpoint_bytes,
                               .working_bytes = p->workspace_bytes + p->activation_bytes - p->checkpoint_bytes,
                               .kind = SLUICE_STAGES_RECOMPUTE};
  out_options[SLUICE_STAGES_OFFLOAD] =
      (sluice_stages_option_t){.forward_seconds = p->forward_seconds,
                               .backward_seconds = p->backward_seconds,
                               .copied_bytes = p->activation_bytes,
                               .working_bytes = p->workspace_bytes + p->activation_bytes,
                               .kind = SLUICE_STAGES_OFFLOAD};
}
