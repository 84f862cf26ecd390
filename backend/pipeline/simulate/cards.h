/* Messages that share network cards: each stage has one, and what goes out of it, like what comes in, is shared by all
 * messages that do. Rates are max-min fair, and change whenever a message begins or ends.
 * Private to backend/pipeline/simulate. */
#ifndef SLUICE_BACKEND_PIPELINE_SIMULATE_CARDS_H_
#define SLUICE_BACKEND_PIPELINE_SIMULATE_CARDS_H_

#include <stdint.h>

#include "backend/pipeline/spec.h"

typedef struct sluice_card_flow_s {
  int32_t op;
  int32_t from, to; /* stages */
  double left_s;    /* that it would take alone */
  double rate;      /* share of a card, in (0, 1] */
  int32_t is_fixed; /* its rate, while rates are shared out */
} sluice_card_flow_t;

typedef struct sluice_cards_s {
  sluice_card_flow_t* flows; /* room for all that are under way at once: the caller's */
  int32_t count;
  double now_s; /* up to which left_s counts */
} sluice_cards_t;

/* A message begins at now_s, which never goes back. */
void sluice_cards_add(sluice_cards_t* cards, double now_s, int32_t op, int32_t from, int32_t to, double seconds);
/* When the next of them ends; infinite: none is under way. */
double sluice_cards_next_end(const sluice_cards_t* cards);
/* Takes the op that ends next, at now_s. There is one. */
int32_t sluice_cards_take(sluice_cards_t* cards, double now_s);

#endif /* SLUICE_BACKEND_PIPELINE_SIMULATE_CARDS_H_ */
