// SPDX-License-Identifier: Apache-2.0
/* Messages that share network cards: each stage has one card, and its outgoing messages share one direction, its
 * incoming ones the other. Rates are max-min fair, and change whenever a message begins or ends. Private to
 * backend/pipeline/simulate. */
#pragma once

#include <stdint.h>

#include "backend/pipeline/spec.h"

typedef struct sluice_card_flow_s {
  int32_t op;
  int32_t from, to; /* stages */
  double left_s;    /* at full rate */
  double rate;      /* share of a card, in (0, 1] */
  int32_t is_fixed; /* its rate, while rates are distributed */
} sluice_card_flow_t;

typedef struct sluice_cards_s {
  sluice_card_flow_t* flows; /* memory for all flows in flight, owned by the caller */
  int32_t count;
  double now_s; /* time for which left_s is valid */
} sluice_cards_t;

/* A message begins at now_s, which never decreases. */
void sluice_cards_add(sluice_cards_t* cards, double now_s, int32_t op, int32_t from, int32_t to, double seconds);
/* Returns the end of the next message; infinity if none is in flight. */
double sluice_cards_next_end(const sluice_cards_t* cards);
/* Removes the message that ends next, at now_s, and returns its op. There must be one. */
int32_t sluice_cards_take(sluice_cards_t* cards, double now_s);
