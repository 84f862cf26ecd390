// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/simulate/cards.h"

#include <math.h>

/* One direction of a card, while rates are distributed. */
typedef struct side_s {
  double room;      /* unassigned capacity */
  int32_t num_open; /* number of flows whose rate is not fixed */
} side_t;

typedef struct sides_s {
  side_t out[SLUICE_PIPELINE_MAX_STAGES], in[SLUICE_PIPELINE_MAX_STAGES];
} sides_t;

static double share_of(const side_t* side) { return side->num_open > 0 ? side->room / side->num_open : INFINITY; }

/* Returns the least capacity per open flow of any side: that of the side that fills up first. */
static double least_share(const sluice_cards_t* cards, const sides_t* sides) {
  double least = INFINITY;
  for (int32_t i = 0; i < cards->count; ++i) {
    const sluice_card_flow_t* flow = &cards->flows[i];
    if (flow->is_fixed) continue;
    least = fmin(least, fmin(share_of(&sides->out[flow->from]), share_of(&sides->in[flow->to])));
  }
  return least;
}

static void fix(sluice_card_flow_t* flow, sides_t* sides, double rate) {
  side_t* both[] = {&sides->out[flow->from], &sides->in[flow->to]};
  flow->rate = rate;
  flow->is_fixed = 1;
  for (int32_t i = 0; i < 2; ++i) {
    both[i]->room = fmax(0, both[i]->room - rate);
    --both[i]->num_open;
  }
}

/* Progressive filling: the flows of the side that fills up first get its share, then the rest is distributed. */
static void share_out(sluice_cards_t* cards) {
  sides_t sides;
  for (int32_t s = 0; s < SLUICE_PIPELINE_MAX_STAGES; ++s) sides.out[s] = sides.in[s] = (side_t){.room = 1};
  for (int32_t i = 0; i < cards->count; ++i) {
    cards->flows[i].is_fixed = 0;
    ++sides.out[cards->flows[i].from].num_open;
    ++sides.in[cards->flows[i].to].num_open;
  }
  for (double least = least_share(cards, &sides); !isinf(least); least = least_share(cards, &sides)) {
    for (int32_t i = 0; i < cards->count; ++i) {
      sluice_card_flow_t* flow = &cards->flows[i];
      if (flow->is_fixed) continue;
      if (fmin(share_of(&sides.out[flow->from]), share_of(&sides.in[flow->to])) <= least) fix(flow, &sides, least);
    }
  }
}

static void advance(sluice_cards_t* cards, double now_s) {
  for (int32_t i = 0; i < cards->count; ++i) {
    sluice_card_flow_t* flow = &cards->flows[i];
    flow->left_s = fmax(0, flow->left_s - (now_s - cards->now_s) * flow->rate);
  }
  cards->now_s = now_s;
}

void sluice_cards_add(sluice_cards_t* cards, double now_s, int32_t op, int32_t from, int32_t to, double seconds) {
  advance(cards, now_s);
  cards->flows[cards->count++] = (sluice_card_flow_t){.op = op, .from = from, .to = to, .left_s = seconds};
  share_out(cards);
}

static int32_t find_next(const sluice_cards_t* cards) {
  int32_t next = -1;
  for (int32_t i = 0; i < cards->count; ++i) {
    const sluice_card_flow_t *flow = &cards->flows[i], *best = next >= 0 ? &cards->flows[next] : NULL;
    if (best == NULL || flow->left_s * best->rate < best->left_s * flow->rate) next = i;
  }
  return next;
}

double sluice_cards_next_end(const sluice_cards_t* cards) {
  const int32_t next = find_next(cards);
  return next < 0 ? INFINITY : cards->now_s + cards->flows[next].left_s / cards->flows[next].rate;
}

int32_t sluice_cards_take(sluice_cards_t* cards, double now_s) {
  const int32_t next = find_next(cards), op = cards->flows[next].op;
  advance(cards, now_s);
  cards->flows[next] = cards->flows[--cards->count];
  share_out(cards);
  return op;
}
