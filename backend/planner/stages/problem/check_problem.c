// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/stages/problem/check_problem.h"

#include <math.h>

#include "backend/base/math.h"
#include "backend/planner/stages/problem/tables.h"

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
