/* Whether a layer's exchanges take the other form that it leaves open, at each size of a batch, behind the search for
 * n: its answer, in the plain form, against the same n, or more chunks, in the other. A layer has one such form:
 * grouped (a chunk that returns and one that leaves are under way together), or in two levels instead of one.
 *
 * With a machine the model says whether that can pay at all, and at which n; without one groups are tried where loads
 * are uneven, since only then the two directions of a link differ in what they carry, and levels always. Then both run
 * in turns as ordinary steps, a warm-up and three counted ones each. The other form stays where it is faster by a
 * hundredth. Now and then they run in turns again, as answers of the search do. Mode MODEL compares predictions
 * instead. All numbers are those that all ranks have.
 *
 * Source: ours; the order S1 S2 (R1 S3) .. is that of MPipeMoE Fig. 4(b) with pairs under way together, as PipeMoE's
 * concurrent dispatches and combines are. Private to backend/tune. */
#ifndef SLUICE_BACKEND_TUNE_SEARCH_GROUPING_H_
#define SLUICE_BACKEND_TUNE_SEARCH_GROUPING_H_

#include "backend/tune/search/search_state.h"

#define SLUICE_GROUPING_SIDES 3 /* the search's answer, and two candidates in the other form */

typedef struct sluice_grouping_decision_s {
  int64_t rows;
  int32_t pick, single_pick, is_grouped, why, num_raced;
  double seconds, single_seconds; /* of a step, in the other form and in the plain one; 0: not measured */
} sluice_grouping_decision_t;

typedef struct sluice_grouping_config_s {
  int32_t is_open;      /* 0: all passes have one form */
  int32_t mode;         /* SLUICE_TUNER_* */
  int32_t least_chunks; /* that the other form needs */
  double least_skew;    /* from which on it is tried without a model */
  /* Seconds of one direction in the other form; NULL: no model. The same number on all ranks. */
  double (*predict)(void* user, int64_t rows, int32_t num_chunks, int32_t wgrad_mode, int32_t direction);
  void* user;
  /* Told where the other form wins, and where it loses again; may be NULL. */
  void (*decided)(void* user, const sluice_grouping_decision_t* decision);
} sluice_grouping_config_t;

typedef struct sluice_grouping_side_s {
  float forward_ns_per_row; /* of a step whose backward is still to come; 0: none */
  float best_ns_per_row;    /* of the counted steps */
  int32_t count;            /* steps, the warm-up among them */
} sluice_grouping_side_t;

typedef struct sluice_grouping_spot_s {
  uint8_t state;                        /* 0: nothing; 1: racing; 2: decided */
  uint8_t num_sides;                    /* 1: there is nothing to try */
  uint8_t winner;                       /* of the sides; 0: the plain form */
  uint8_t picks[SLUICE_GROUPING_SIDES]; /* candidates of the search; the first one is its answer */
  uint8_t is_question;                  /* the race is not the first one: `winner` is what it was */
  uint8_t is_told;                      /* that the other form won, and of no other decision since */
  uint16_t question_after;              /* steps */
  uint16_t asked;                       /* steps since one was counted */
  uint32_t steps;                       /* since the decision */
  float skew;                           /* at its start */
  sluice_grouping_side_t sides[SLUICE_GROUPING_SIDES];
} sluice_grouping_spot_t;

typedef struct sluice_grouping_s {
  sluice_grouping_config_t config;
  sluice_grouping_spot_t spots[SLUICE_SEARCH_BUCKETS];
} sluice_grouping_t;

void sluice_grouping_init(sluice_grouping_t* grouping, const sluice_grouping_config_t* config);
/* What a pass of `rows` received rows does, where the search says `pick` for the reason *inout_why: the candidate, and
 * whether it has the other form. skew: rows of the fullest rank over those of balanced routing. *inout_why becomes
 * SLUICE_WHY_ON_TRIAL while sides run in turns. */
int32_t sluice_grouping_next(sluice_grouping_t* grouping, sluice_search_t* search, int64_t rows, double skew,
                             int32_t pick, int32_t* inout_why, int32_t* out_is_grouped);
/* What a pass of that size would do next, and nothing changes: `pick` where nothing of it is known. */
int32_t sluice_grouping_peek(const sluice_grouping_t* grouping, int64_t rows, int32_t pick, int32_t* out_is_grouped);
/* A pass that all ranks ran alike. */
void sluice_grouping_observe(sluice_grouping_t* grouping, int32_t direction, int32_t pick, int32_t is_grouped,
                             int64_t rows, uint64_t ns);

#endif /* SLUICE_BACKEND_TUNE_SEARCH_GROUPING_H_ */
