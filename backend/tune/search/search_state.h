// SPDX-License-Identifier: Apache-2.0
/* The state of the search for n: candidates, the spots of a table, their windows and samples, and the cost of races.
 * search.h describes the algorithm. */
#pragma once

#include "backend/base/status.h"
#include "backend/cost/bootstrap_model.h"
#include "backend/model/tensors.h"
#include "backend/tune/race/race_log.h"
#include "backend/tune/race/race_timeout.h"
#include "sluice/context.h"
#include "sluice/tuner.h"

#define SLUICE_SEARCH_SIZES   SLUICE_MOST_CHOSEN_CHUNKS /* a size is n - 1 */
#define SLUICE_SEARCH_MODES   2                         /* weight gradients deferred, per chunk */
#define SLUICE_SEARCH_PICKS   (SLUICE_SEARCH_SIZES * SLUICE_SEARCH_MODES)
#define SLUICE_SEARCH_BUCKETS 128 /* rows up to 2^32 */
#define SLUICE_SEARCH_WINDOWS 8   /* sizes that can race at a time without losing their steps */
/* Candidates of a race: fewer than SLUICE_SEARCH_PICKS, since a budget counts these bytes. Each n of
 * sluice_chunk_counts, or the few best predictions, with one mode, and some with the other. */
#define SLUICE_SEARCH_RACED 10

#define SLUICE_WHY_COUNT 8 /* reasons: SLUICE_WHY_* of sluice/tuner.h */

/* Candidate index: size + SLUICE_SEARCH_SIZES * mode. */
typedef struct sluice_search_decision_s {
  int64_t rows; /* the size at which the decision was made */
  int32_t pick;
  int32_t why;
  double seconds;           /* measured, forward plus backward of the slowest rank at that size; 0: not measured */
  double predicted_seconds; /* 0: no model */
  int32_t runner_up;        /* -1: none */
  double runner_up_seconds;
  int32_t num_raced; /* candidates */
  int64_t race_passes;
} sluice_search_decision_t;

typedef struct sluice_search_config_s {
  int32_t mode;               /* SLUICE_TUNER_* */
  int32_t min_size, max_size; /* equal: n is fixed */
  int32_t fixed_chunks; /* a fixed n above 1 that is none of the sizes: min_size and max_size stand for it; else 0 */
  int32_t open_wgrad;   /* 0: the mode is `wgrad_mode` */
  int32_t wgrad_mode;
  int32_t repeats;     /* k; 0: default */
  double budget_share; /* share of all timed passes that races may cost beyond the time of the best candidate, switches
                          included; 0: default */
  int32_t num_local;   /* experts with rows in each chunk, the same on all ranks, for bootstrap models; 0: 1 */
  int32_t uneven_chunks; /* chunks have rows as in backend/schedule/uneven_chunks.h, for bootstrap models */
  /* Seconds of one direction; NULL: no model. Must return the same number on all ranks. */
  double (*predict)(void* user, int64_t rows, int32_t num_chunks, int32_t wgrad_mode, int32_t direction);
  void* user;
  /* Called for every decision; may be NULL. */
  void (*decided)(void* user, const sluice_search_decision_t* decision);
} sluice_search_config_t;

typedef struct sluice_sample_s {
  float best_ns_per_row;         /* below 0: of the warm-up, until the next pass shows its cost */
  float compute, comm, comm_cpu; /* sluice_lanes_t of that pass, ns per row; compute 0: unknown */
  int32_t count;                 /* timed passes; the first is the warm-up */
} sluice_sample_t;

/* Stages of a race. */
enum {
  SLUICE_STAGE_ENDS = 0,
  SLUICE_STAGE_WALK,
  SLUICE_STAGE_FIRST,
  SLUICE_STAGE_BOOTSTRAPPED,
  SLUICE_STAGE_FEW,
  SLUICE_STAGE_MORE,
  SLUICE_STAGE_WGRAD,
  SLUICE_STAGE_DUEL,
  SLUICE_STAGE_QUESTION
};

enum { SLUICE_SPOT_NOTHING = 0, SLUICE_SPOT_RACING = 1, SLUICE_SPOT_ANSWERED = 2 };
typedef struct sluice_spot_s {
  uint8_t state;   /* 0: nothing; 1: racing; 2: answered */
  uint8_t stage;   /* of the race: SLUICE_STAGE_* */
  uint8_t why;     /* of the answer */
  uint8_t pick;    /* the answer; while a race questions it, the previous answer */
  uint32_t racing; /* set of candidates */
  uint32_t window; /* candidates that alternate now, including eliminated ones */
  uint32_t raced;  /* all candidates of this race */
  uint32_t asked;  /* also those of earlier races, until questions have tried all */
  int8_t anchor;   /* the candidate of the window that the others are compared with; -1: not chosen yet */
  /* the window runs twice as long; the speed of the machine changed during this race */
  uint8_t is_extended, is_unsteady;
  int8_t worse;
  int16_t lo, hi;
  sluice_race_timeout_t timeout; /* since the last pass that advanced the race */
  int32_t race_passes;
  uint32_t passes_since;   /* since the last race */
  uint32_t question_after; /* passes */
  int64_t rows;            /* of the last pass of this size */
  int64_t at;              /* rows for predictions: those at the start of the race */
  /* By place in `places`, which lists candidates in the order in which they entered the race. Candidates of the same n
   * share the forward of the first. */
  int32_t num_places;
  uint8_t places[SLUICE_SEARCH_RACED];
  sluice_sample_t forward[SLUICE_SEARCH_RACED];
  sluice_sample_t backward[SLUICE_SEARCH_RACED];
  float startup[2]; /* of an almost empty exchange, by direction, ns per row: the shortest seen; 0: unknown */
  float time[SLUICE_SEARCH_RACED]; /* ns per row, normalized to the speed at which the first of them ran; 0: unknown */
  /* for a new candidate that runs alone: its predicted time over the anchor's, by the bootstrap model */
  float expected;
  float usual[2]; /* of the answer's passes outside of races, by direction, ns per row: a running mean; 0: none */
  uint8_t is_switched[2]; /* the next reported pass of that direction is the first after a switch */
} sluice_spot_t;

/* The steps of a running window; few sizes race at a time. */
typedef struct sluice_window_s {
  int32_t bucket;
  uint32_t used_at;          /* number of race passes of the search at the last use; 0: free */
  sluice_sample_t before[2]; /* samples of the anchor, by direction, before this window */
  float step_ns_per_row;     /* the forward of a step whose backward has not run yet; 0: none */
  int32_t step_pick;
  sluice_race_log_t log;
} sluice_window_t;

typedef struct sluice_search_stats_s {
  int64_t timed_passes;
  int64_t race_passes;
  double total_seconds;       /* of timed passes */
  double excess_seconds;      /* of raced passes beyond the time of the answer, once that is known */
  double switch_seconds;      /* of first passes after a switch, beyond the usual time of the same choice */
  double race_switch_seconds; /* the part of switch_seconds that races caused */
  int64_t num_decisions, num_questioned, num_changed;
  int64_t monotonic, not_monotonic; /* raced answers for which "the best n grows with q" held, or did not */
  /* races of at least three n for which "time over n has one valley" held, or did not */
  int64_t one_valley, not_one_valley;
} sluice_search_stats_t;

typedef struct sluice_search_s {
  sluice_search_config_t config;
  sluice_search_stats_t stats;
  double scale;      /* measured over predicted, of the last raced candidates; 1 before the first race */
  int32_t turn;      /* of the race: candidates alternate */
  int64_t cached_at; /* rows that these predictions are for, forward plus backward in seconds; 0: none */
  double cached[SLUICE_SEARCH_PICKS];
  sluice_spot_t spots[SLUICE_SEARCH_BUCKETS];
  sluice_window_t windows[SLUICE_SEARCH_WINDOWS];
} sluice_search_t;

static inline int sluice_pick_size(int32_t pick) { return pick % SLUICE_SEARCH_SIZES; }
static inline int32_t sluice_pick_chunks(int32_t pick) { return pick % SLUICE_SEARCH_SIZES + 1; }
/* The n of a candidate of this search. */
static inline int32_t sluice_search_chunks(const sluice_search_t* search, int32_t pick) {
  return search->config.fixed_chunks > 0 ? search->config.fixed_chunks : sluice_pick_chunks(pick);
}
static inline int32_t sluice_pick_wgrad(int32_t pick) { return pick / SLUICE_SEARCH_SIZES; }
/* The largest candidate with at most num_chunks. */
int32_t sluice_search_size_of(int32_t num_chunks);
/* The next size after `size` (step 1) or before it (-1) that races try without a prediction: that of the next of
 * sluice_chunk_counts, or the end of the range [lo, hi]. Outside of the range: there is none. */
int32_t sluice_search_next_size(int32_t size, int32_t step, int32_t lo, int32_t hi);
int32_t sluice_search_bucket(int64_t rows);

/* Seconds that races have cost so far: slower candidates, and switches between candidates. */
static inline double sluice_search_spent(const sluice_search_t* search) {
  return search->stats.excess_seconds + search->stats.race_switch_seconds;
}

/* Whether races have used less than their share of the time so far. */
static inline int sluice_search_may_spend(const sluice_search_t* search) {
  return sluice_search_spent(search) <= search->config.budget_share * search->stats.total_seconds;
}

/* ---- search_answers.c: answers by size, and the two hypotheses of the papers ---- */

#define SLUICE_SEARCH_NEAR 4 /* buckets, one octave: a race begins at the n of an answer this close */

/* The nearest answer below (step -1) or above (1), at any distance or within this many buckets; NULL if there is
 * none. */
const sluice_spot_t* sluice_search_answer_near(const sluice_search_t* search, int32_t bucket, int32_t step);
const sluice_spot_t* sluice_search_answer_within(const sluice_search_t* search, int32_t bucket, int32_t step,
                                                 int32_t distance);
void sluice_search_decide(sluice_search_t* search, int32_t bucket, int32_t pick, int32_t why);
/* Whether a spot's pick should be written for later runs, which would not race it again: also while it is under
 * question, but not the result of a race without timed passes. */
int sluice_spot_is_worth_keeping(const sluice_spot_t* spot);

/* ---- search_windows.c: candidates that alternate, early elimination, and the times that result ---- */

/* Factor over the steps of the others that eliminates a candidate that the bootstrap model chose. */
#define SLUICE_BOOTSTRAP_HOPELESS 1.15

/* The window of the size. If all are in use, the least recently used one is reset and reused. */
sluice_window_t* sluice_search_window(sluice_search_t* search, const sluice_spot_t* spot);
/* Opens a window: the candidates of the set alternate, together with the best so far, if any, unless they run alone. */
void sluice_search_enter(sluice_search_t* search, sluice_spot_t* spot, uint32_t set, uint8_t stage, int alone);
/* Forgets the passes of a size. */
void sluice_search_clear(sluice_search_t* search, sluice_spot_t* spot);
/* The passes of each direction that a candidate runs in its window; whether it has run them. Eliminates candidates;
 * lets the anchor run again. */
int32_t sluice_search_wanted(const sluice_search_t* search, const sluice_spot_t* spot);
int sluice_search_is_done(const sluice_search_t* search, const sluice_spot_t* spot, int32_t pick);
void sluice_search_drop_hopeless(const sluice_search_t* search, sluice_spot_t* spot, const sluice_window_t* window);
void sluice_search_recall_anchor(sluice_spot_t* spot, sluice_window_t* window);
/* Nonzero: the window is complete. Zero: the speed changed and steps contradict each other, so the window continues. */
int sluice_search_close_window(sluice_search_t* search, sluice_spot_t* spot, sluice_window_t* window);

/* ---- search_stages.c: which candidates run against each other next, until there is an answer ---- */

void sluice_search_start(sluice_search_t* search, int32_t bucket);
/* Called after each counted pass: opens the next window once this one is complete. */
void sluice_search_advance(sluice_search_t* search, int32_t bucket);
/* Ends the race with the times measured so far. */
void sluice_search_give_up(sluice_search_t* search, int32_t bucket);
/* Whether the answer may race its neighbours again: only while races have used less than their share. */
int sluice_search_may_question(const sluice_search_t* search, const sluice_spot_t* spot);
void sluice_search_question(sluice_search_t* search, int32_t bucket);
