// SPDX-License-Identifier: Apache-2.0
/* Chooses, for each size of a batch, whether the exchanges of a layer take an alternative form that the layer leaves
 * open. It runs after the search for n and compares the answer of the search in the plain form with the same n, or more
 * chunks, in the alternative forms: grouped (a returning and a departing chunk are in flight together), copies of
 * tokens instead of rows, or copies in two levels instead of one.
 *
 * With a machine, the model decides which alternatives can pay and at which n. Without one, a layer has one
 * alternative: grouping is tried if loads are uneven (only then do the two directions of a link carry different
 * amounts), and levels are always tried. The forms then alternate in ordinary steps, one warm-up and three counted
 * steps each. An alternative stays if it is faster by 1 %. The race repeats now and then, like those of the search.
 * Mode MODEL compares predictions instead. All numbers are the same on all ranks.
 *
 * Source: ours; the order S1 S2 (R1 S3) .. is that of MPipeMoE Fig. 4(b) with pairs in flight together, as the
 * concurrent dispatches and combines of PipeMoE. Private to backend/tune. */
#pragma once

#include "backend/tune/search/search_state.h"

#define SLUICE_GROUPING_SIDES 3 /* the answer of the search, and two candidates in alternative forms */
#define SLUICE_GROUPING_FORMS 3 /* alternatives */

typedef struct sluice_grouping_decision_s {
  int64_t rows;
  int32_t pick, form;             /* the choice; form 0: the plain one */
  int32_t other_pick, other_form; /* the plain form, or the best alternative if the plain form won; pick -1: none */
  int32_t why, num_raced;
  double seconds, predicted_seconds; /* of a step; 0: not measured, no model */
  double other_seconds, other_predicted_seconds;
} sluice_grouping_decision_t;

/* An alternative form. */
typedef struct sluice_grouping_form_s {
  int32_t form;         /* its number, not 0 */
  int32_t least_chunks; /* least n */
  double least_skew;    /* least skew for a trial without a model */
  int32_t needs_model;  /* 1: it is never tried without a model */
} sluice_grouping_form_t;

typedef struct sluice_grouping_config_s {
  sluice_grouping_form_t forms[SLUICE_GROUPING_FORMS];
  int32_t num_forms; /* 0: all passes have the same form */
  int32_t mode;      /* SLUICE_TUNER_* */
  /* Seconds of one direction in this form, 0 if the model does not know the form; NULL: no model. Returns the same
   * number on all ranks. */
  double (*predict)(void* user, int64_t rows, int32_t num_chunks, int32_t wgrad_mode, int32_t direction, int32_t form);
  void* user;
  int32_t tells_plain; /* 1: `decided` is also called when the plain form wins */
  /* Called when an alternative form wins, and when it loses again; may be NULL. */
  void (*decided)(void* user, const sluice_grouping_decision_t* decision);
} sluice_grouping_config_t;

typedef struct sluice_grouping_side_s {
  float forward_ns_per_row; /* of a step whose backward has not run yet; 0: none */
  float best_ns_per_row;    /* of the counted steps */
  int32_t count;            /* steps, including the warm-up */
} sluice_grouping_side_t;

typedef struct sluice_grouping_spot_s {
  /* 0: nothing; 1: racing; 2: decided; 3: decided without the steps of its race; 4: imported, which is final */
  uint8_t state;
  uint8_t num_sides; /* 1: no alternative to try */
  uint8_t winner;    /* index of a side; 0: the plain form */
  /* Candidates of the search; the first is its answer. If there is no alternative to try, the second is the best one
   * that the model predicts. */
  uint8_t picks[SLUICE_GROUPING_SIDES];
  uint8_t forms[SLUICE_GROUPING_SIDES]; /* the first is the plain one, 0 */
  uint8_t is_question;                  /* a repeated race: `winner` is the previous answer */
  uint8_t told;                         /* the last report. 0: none; 1: the plain form won; 2: an alternative form */
  uint16_t question_after;              /* steps */
  uint16_t asked;                       /* steps since the last counted one */
  uint32_t steps;                       /* since the decision */
  float skew;                           /* at the start of the race */
  sluice_grouping_side_t sides[SLUICE_GROUPING_SIDES];
} sluice_grouping_spot_t;

typedef struct sluice_grouping_s {
  sluice_grouping_config_t config;
  sluice_grouping_spot_t spots[SLUICE_SEARCH_BUCKETS];
} sluice_grouping_t;

void sluice_grouping_init(sluice_grouping_t* grouping, const sluice_grouping_config_t* config);
/* The candidate that a pass of `rows` received rows runs, and its form, if the search chose `pick` for the reason
 * *inout_why. skew: rows of the fullest rank over those of balanced routing. *inout_why becomes
 * SLUICE_WHY_ON_TRIAL while sides race. */
int32_t sluice_grouping_next(sluice_grouping_t* grouping, sluice_search_t* search, int64_t rows, double skew,
                             int32_t pick, int32_t* inout_why, int32_t* out_form);
/* The candidate that a pass of that size would run next; changes nothing. Returns `pick` if the size is unknown. */
int32_t sluice_grouping_peek(const sluice_grouping_t* grouping, int64_t rows, int32_t pick, int32_t* out_form);
/* The decided candidate for that size, and its form, if the search's answer is `pick`; -1: the form is not decided. A
 * form under question still counts as decided. */
int32_t sluice_grouping_answer_of(const sluice_grouping_t* grouping, int64_t rows, int32_t pick, int32_t* out_form);
/* Whether the layer leaves this form open. */
int sluice_grouping_has(const sluice_grouping_t* grouping, int32_t form);
/* Sets the form of that size for good, with the search's answer `pick`. */
void sluice_grouping_answer(sluice_grouping_t* grouping, const sluice_search_t* search, int64_t rows, int32_t pick,
                            int32_t form);
/* Observes a pass that all ranks ran with the same choice. */
void sluice_grouping_observe(sluice_grouping_t* grouping, int32_t direction, int32_t pick, int32_t form, int64_t rows,
                             uint64_t ns);
