#include "backend/tune/search.h"

#include <math.h>
#include <string.h>

#include "sluice/context.h"

const int32_t sluice_search_sizes[SLUICE_SEARCH_SIZES] = {1, 2, 3, 4, 6, 8, 12, 16};

/* Stages of a race. */
enum { ENDS = 0, WALK, FIRST, SKETCHED, FEW, MORE, WGRAD, DUEL, QUESTION };

#define REPEATS         3
#define BUDGET_SHARE    0.004
#define HOPELESS        1.5  /* two counted steps this much slower than their neighbours end a candidate's race */
#define CLOSE           1.05 /* candidates this close to the best meet it again in a duel */
#define SKETCH_HOPELESS 1.15 /* as HOPELESS, where a sketch said where to look */
#define SKETCH_WITHIN   1.10 /* of the best measured time: a sketch's prediction that is worth a race */
#define SKETCH_BESIDE   1.3  /* of the first candidate's: its neighbour is tried although the sketch likes it less */
#define SKETCH_TRUST    1.25 /* times: a first step that is so near to its sketch saw the same machine */
#define SKETCH_OP_NS    5000.0
#define DRIFT           1.2 /* times: an anchor that took so much more or less than before saw another machine */
#define FEW_COUNT       3
#define FEW_WITHIN      1.25 /* of the best prediction */
#define FIRST_QUESTION  512  /* passes of one size before its answer is questioned; doubles while it stands */
#define LATEST_QUESTION 16384
#define NEAR            4     /* buckets, one octave: so near an answer a race begins at its n */
#define LONE_PASSES     24    /* forwards without a backward after which a candidate is taken out */
#define WORTH_A_CHANGE  1.005 /* an answer that is questioned stands unless another is faster by this */
#define HILL            1.03  /* slower than what lies on both sides by so much: no single valley */
#define EXPENSIVE       5     /* times the share that races may cost: then new sizes take the nearest answer */

int32_t sluice_search_size_of(int32_t num_chunks) {
  int32_t i = SLUICE_SEARCH_SIZES - 1;
  while (i > 0 && sluice_search_sizes[i] > num_chunks) --i;
  return i;
}

int32_t sluice_search_bucket(int64_t rows) {
  if (rows < 1) return 0;
  int32_t bucket = (int32_t)floor(4 * log2((double)rows) + 0.5);
  return bucket < SLUICE_SEARCH_BUCKETS ? bucket : SLUICE_SEARCH_BUCKETS - 1;
}

const char* sluice_tuner_why_name(int32_t why) {
  static const char* const names[SLUICE_WHY_COUNT] = {"nothing timed yet", "on trial", "inside the range",
                                                      "the only one left", "raced",    "predicted",
                                                      "raced again",       "imported"};
  return why >= 0 && why < SLUICE_WHY_COUNT ? names[why] : "unknown";
}

void sluice_search_init(sluice_search_t* s, const sluice_search_config_t* config) {
  memset(s, 0, sizeof *s);
  s->config = *config;
  s->scale = 1;
  if (s->config.repeats == 0) s->config.repeats = REPEATS;
  if (s->config.budget_share == 0) s->config.budget_share = BUDGET_SHARE;
  if (!s->config.open_wgrad && s->config.wgrad_mode < 0) s->config.wgrad_mode = 0;
}

/* ---- times ---- */

static int size_of(int32_t pick) { return pick % SLUICE_SEARCH_SIZES; }

/* What its race says, ns per row; infinite where it has not run to the end of one. */
static double time_of(const sluice_spot_t* spot, int32_t pick) {
  return spot->time[pick] > 0 ? (double)spot->time[pick] : INFINITY;
}

/* Shortest forward and backward of the present window, ns per row; 0 where one is missing. */
static double shortest(const sluice_spot_t* spot, int32_t pick) {
  const sluice_sample_t *f = &spot->forward[size_of(pick)], *b = &spot->backward[pick];
  if (f->count < 2 || b->count < 2 || f->best_ns_per_row <= 0 || b->best_ns_per_row <= 0) return 0;
  return (double)f->best_ns_per_row + (double)b->best_ns_per_row;
}

/* Without a machine ADAPTIVE makes a model of its own from what lanes took. */
static int makes_sketches(const sluice_search_t* s) {
  return s->config.mode == SLUICE_TUNER_ADAPTIVE && s->config.predict == NULL;
}

static int32_t points_of(const sluice_spot_t* spot, int32_t direction, int32_t mode, sluice_sketch_point_t* points) {
  int32_t count = 0;
  for (int32_t size = 0; size < SLUICE_SEARCH_SIZES; ++size) {
    const sluice_sample_t* x =
        direction == SLUICE_FORWARD ? &spot->forward[size] : &spot->backward[size + SLUICE_SEARCH_SIZES * mode];
    if (x->count < 2 || x->compute <= 0) continue;
    points[count++] = (sluice_sketch_point_t){
        sluice_search_sizes[size],
        (double)x->best_ns_per_row,
        {(double)x->compute, (double)x->comm, (double)x->comm_cpu, (double)spot->startup[direction]}};
  }
  return count;
}

/* Seconds of a step by the lanes of those that ran here; 0 where none did. */
static double sketched(const sluice_search_t* s, const sluice_spot_t* spot, int32_t pick) {
  sluice_sketch_point_t points[SLUICE_SEARCH_SIZES];
  double ns_per_row = 0, rows = (double)spot->rows;
  for (int32_t direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction) {
    int32_t count = points_of(spot, direction, sluice_pick_wgrad(pick), points);
    if (count == 0) return 0;
    double per_expert = rows / (s->config.num_local > 0 ? s->config.num_local : 1);
    ns_per_row +=
        sluice_sketch_pass(points, count, direction, per_expert, SKETCH_OP_NS / rows, sluice_pick_chunks(pick));
  }
  return ns_per_row > 0 ? ns_per_row * rows * 1e-9 : 0;
}

/* Predictions are made once for the rows at a spot's start, and scaled by rows. */
static double predicted(sluice_search_t* s, const sluice_spot_t* spot, int32_t pick) {
  const sluice_search_config_t* c = &s->config;
  if (makes_sketches(s)) return sketched(s, spot, pick);
  if (c->predict == NULL || spot->at < 1) return 0;
  if (s->cached_at != spot->at) {
    memset(s->cached, 0, sizeof s->cached);
    s->cached_at = spot->at;
  }
  if (s->cached[pick] == 0) {
    for (int32_t direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction) {
      s->cached[pick] += c->predict(c->user, spot->at, sluice_pick_chunks(pick), sluice_pick_wgrad(pick), direction);
    }
  }
  return s->cached[pick] * (double)spot->rows / (double)spot->at;
}

/* The best of a set by time; the first of equal ones. -1: none was timed. */
static int32_t best_of(const sluice_spot_t* spot, uint32_t set) {
  int32_t best = -1;
  for (int32_t p = 0; p < SLUICE_SEARCH_PICKS; ++p) {
    if (!(set >> p & 1) || time_of(spot, p) == INFINITY) continue;
    if (best < 0 || time_of(spot, p) < time_of(spot, best)) best = p;
  }
  return best;
}

static int32_t default_mode(const sluice_search_t* s) { return s->config.open_wgrad ? 0 : s->config.wgrad_mode; }
static int32_t pick_of(const sluice_search_t* s, int32_t size) { return size + SLUICE_SEARCH_SIZES * default_mode(s); }

/* ---- answers ---- */

static void tell(sluice_search_t* s, const sluice_spot_t* spot, int32_t why) {
  ++s->stats.num_decisions;
  if (s->config.decided == NULL) return;
  double rows = (double)spot->rows, time = time_of(spot, spot->pick);
  int32_t second = best_of(spot, spot->raced & ~(1u << spot->pick));
  const sluice_search_decision_t decision = {
      .rows = spot->rows,
      .pick = spot->pick,
      .why = why,
      .seconds = time == INFINITY ? 0 : time * rows * 1e-9,
      .predicted_seconds = predicted(s, spot, spot->pick),
      .runner_up = second,
      .runner_up_seconds = second < 0 ? 0 : time_of(spot, second) * rows * 1e-9,
      .num_raced = __builtin_popcount(spot->raced),
      .race_passes = spot->race_passes,
  };
  s->config.decided(s->config.user, &decision);
}

static const sluice_spot_t* answer_within(const sluice_search_t* s, int32_t bucket, int32_t step, int32_t distance) {
  for (int32_t b = bucket + step; b >= 0 && b < SLUICE_SEARCH_BUCKETS && distance > 0; b += step, --distance) {
    if (s->spots[b].state == SLUICE_SPOT_ANSWERED) return &s->spots[b];
  }
  return NULL;
}

static const sluice_spot_t* answer_near(const sluice_search_t* s, int32_t bucket, int32_t step) {
  return answer_within(s, bucket, step, SLUICE_SEARCH_BUCKETS);
}

/* "The best n grows with q", told from a raced answer and those beside it. */
static void test_hypothesis(sluice_search_t* s, int32_t bucket) {
  const sluice_spot_t *below = answer_near(s, bucket, -1), *above = answer_near(s, bucket, 1);
  int size = size_of(s->spots[bucket].pick);
  if (below == NULL && above == NULL) return;
  int holds = (below == NULL || size_of(below->pick) <= size) && (above == NULL || size_of(above->pick) >= size);
  *(holds ? &s->stats.monotonic : &s->stats.not_monotonic) += 1;
}

/* "Time over n has one valley", told from all that ran with the answer's mode: between two of them none is slower than
 * both by more than noise. */
static void test_valley(sluice_search_t* s, const sluice_spot_t* spot, int32_t mode) {
  double before = INFINITY, crest = 0; /* the best so far, and the worst behind it */
  int32_t count = 0, holds = 1;
  for (int32_t size = 0; size < SLUICE_SEARCH_SIZES; ++size) {
    double time = time_of(spot, size + SLUICE_SEARCH_SIZES * mode);
    if (time == INFINITY) continue;
    ++count;
    if (crest > HILL * before && crest > HILL * time) holds = 0;
    if (time < before) before = time, crest = 0;
    if (time > crest) crest = time;
  }
  if (count >= 3) *(holds ? &s->stats.one_valley : &s->stats.not_one_valley) += 1;
}

static void answer(sluice_search_t* s, int32_t bucket, int32_t pick, int32_t why) {
  sluice_spot_t* spot = &s->spots[bucket];
  int questioned = spot->stage == QUESTION && why == SLUICE_WHY_RACED;
  if (questioned && time_of(spot, spot->pick) <= WORTH_A_CHANGE * time_of(spot, pick)) pick = spot->pick;
  int changed = questioned && spot->pick != pick;
  spot->question_after = questioned && !changed && spot->question_after < LATEST_QUESTION ? 2 * spot->question_after
                         : questioned && !changed                                         ? LATEST_QUESTION
                                                                                          : FIRST_QUESTION;
  s->stats.num_questioned += questioned;
  s->stats.num_changed += changed;
  spot->state = SLUICE_SPOT_ANSWERED;
  spot->pick = (uint8_t)pick;
  spot->why = (uint8_t)(questioned ? SLUICE_WHY_QUESTIONED : why);
  spot->racing = 0;
  spot->passes_since = 0;
  double model = predicted(s, spot, pick), time = time_of(spot, pick);
  if (model > 0 && time < INFINITY) s->scale = time * 1e-9 * (double)spot->rows / model;
  if (why == SLUICE_WHY_RACED) {
    test_hypothesis(s, bucket);
    test_valley(s, spot, sluice_pick_wgrad(pick));
  }
  tell(s, spot, spot->why);
}

void sluice_search_answer(sluice_search_t* s, int64_t rows, int32_t pick) {
  int32_t bucket = sluice_search_bucket(rows);
  s->spots[bucket].rows = rows;
  s->spots[bucket].stage = 0;
  answer(s, bucket, pick, SLUICE_WHY_IMPORTED);
}

/* ---- races ---- */

/* The size's window; where all are taken, the one that was used longest ago makes room and forgets its steps. */
static sluice_window_t* window_of(sluice_search_t* s, const sluice_spot_t* spot) {
  int32_t bucket = (int32_t)(spot - s->spots);
  sluice_window_t* oldest = &s->windows[0];
  for (int32_t i = 0; i < SLUICE_SEARCH_WINDOWS; ++i) {
    sluice_window_t* w = &s->windows[i];
    if (w->used_at > 0 && w->bucket == bucket) return w;
    if (w->used_at < oldest->used_at) oldest = w;
  }
  *oldest = (sluice_window_t){.bucket = bucket, .used_at = (uint32_t)s->stats.race_passes + 1};
  return oldest;
}

/* The anchor runs again beside newcomers: its samples are counted from anew. */
static void lift_anchor(sluice_spot_t* spot, sluice_window_t* window) {
  sluice_sample_t* samples[] = {&spot->forward[size_of(spot->anchor)], &spot->backward[spot->anchor]};
  for (int32_t direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction) {
    window->before[direction] = *samples[direction];
    *samples[direction] = (sluice_sample_t){.count = 1};
  }
}

/* A window: those of the set run in turns. Where somebody has a time already, the best of them is the anchor, and runs
 * with them unless newcomers run alone. */
static void enter(sluice_search_t* s, sluice_spot_t* spot, uint32_t set, uint8_t stage, int alone) {
  int32_t best = best_of(spot, spot->raced);
  sluice_window_t* window = window_of(s, spot);
  memset(window->before, 0, sizeof window->before);
  spot->state = SLUICE_SPOT_RACING;
  spot->stage = stage;
  spot->anchor = (int8_t)(best >= 0 ? best : set >> spot->pick & 1 ? spot->pick : __builtin_ctz(set));
  spot->is_extended = 0;
  sluice_race_log_restart(&window->log, spot->anchor);
  if (best >= 0 && !alone) {
    set |= 1u << best;
    lift_anchor(spot, window);
  }
  spot->racing = (uint16_t)set;
  spot->window = (uint16_t)(set | 1u << spot->anchor);
  spot->raced |= spot->window;
}

static void clear_samples(sluice_search_t* s, sluice_spot_t* spot) {
  sluice_window_t* window = window_of(s, spot);
  memset(spot->forward, 0, sizeof spot->forward);
  memset(spot->backward, 0, sizeof spot->backward);
  memset(spot->time, 0, sizeof spot->time);
  memset(spot->startup, 0, sizeof spot->startup);
  window->log.count = 0;
  window->step_ns_per_row = 0;
  spot->raced = 0;
  spot->is_unsteady = 0;
  spot->race_passes = 0;
}

static void settle(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  int32_t best = best_of(spot, spot->raced);
  answer(s, bucket, best < 0 ? spot->pick : best, SLUICE_WHY_RACED);
}

/* Those near the best meet it again: in turns, so that drift hits both. */
static void duel_or_settle(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  int32_t best = best_of(spot, spot->raced), second = best_of(spot, spot->raced & ~(1u << best));
  if (spot->stage == DUEL || spot->stage == QUESTION || second < 0 ||
      time_of(spot, second) > CLOSE * time_of(spot, best)) {
    settle(s, bucket);
    return;
  }
  sluice_sample_t *f = &spot->forward[size_of(second)], *b = &spot->backward[second];
  if (spot->is_unsteady) *f = *b = (sluice_sample_t){0};
  f->count = b->count = 1; /* k more steps */
  enter(s, spot, 1u << second, DUEL, 0);
}

static void try_wgrad(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  int32_t best = best_of(spot, spot->raced);
  int32_t other = (best + SLUICE_SEARCH_SIZES) % SLUICE_SEARCH_PICKS;
  if (s->config.open_wgrad && size_of(best) > 0 && !(spot->raced >> other & 1)) {
    enter(s, spot, 1u << other, WGRAD, 0);
    return;
  }
  duel_or_settle(s, bucket);
}

/* To the bottom of the valley: whoever stands beside the best and has not run races next; where a neighbour is close to
 * the best, also the one behind it, so that one unlucky time does not end the way. */
static void walk_on(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  int32_t best = best_of(spot, spot->raced);
  uint32_t set = 0;
  for (int32_t step = -1; step <= 1; step += 2) {
    for (int32_t size = size_of(best) + step; size >= spot->lo && size <= spot->hi; size += step) {
      int32_t pick = pick_of(s, size);
      if (!(spot->raced >> pick & 1)) {
        set |= 1u << pick;
        break;
      }
      if (time_of(spot, pick) > CLOSE * time_of(spot, best)) break;
    }
  }
  if (set == 0) {
    try_wgrad(s, bucket);
  } else {
    enter(s, spot, set, WALK, 0);
  }
}

static int is_open(const sluice_search_t* s, int32_t pick) {
  int size = size_of(pick);
  if (size < s->config.min_size || size > s->config.max_size) return 0;
  if (!s->config.open_wgrad) return sluice_pick_wgrad(pick) == s->config.wgrad_mode;
  return size > 0 || sluice_pick_wgrad(pick) == 0; /* one chunk: both modes are the same */
}

/* The best prediction among open candidates outside `set`; -1. */
static int32_t best_predicted(sluice_search_t* s, const sluice_spot_t* spot, uint32_t set, const double* correction) {
  int32_t best = -1;
  double least = INFINITY;
  for (int32_t p = 0; p < SLUICE_SEARCH_PICKS; ++p) {
    if (!is_open(s, p) || (set >> p & 1)) continue;
    double time = predicted(s, spot, p) * (correction == NULL ? 1 : correction[size_of(p)]);
    if (time < least) least = time, best = p;
  }
  return best;
}

/* Measured over predicted at each n: of the raced candidate whose n is nearest. */
static void corrections(sluice_search_t* s, const sluice_spot_t* spot, double* out) {
  for (int32_t size = 0; size < SLUICE_SEARCH_SIZES; ++size) {
    int32_t nearest = 2 * SLUICE_SEARCH_SIZES;
    out[size] = s->scale;
    for (int32_t p = 0; p < SLUICE_SEARCH_PICKS; ++p) {
      int32_t distance = size_of(p) > size ? size_of(p) - size : size - size_of(p);
      if (!(spot->raced >> p & 1) || time_of(spot, p) == INFINITY || distance >= nearest) continue;
      nearest = distance;
      out[size] = time_of(spot, p) * 1e-9 * (double)spot->rows / predicted(s, spot, p);
    }
  }
}

static void after_few(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  double correction[SLUICE_SEARCH_SIZES];
  corrections(s, spot, correction);
  double best = time_of(spot, best_of(spot, spot->raced)) * 1e-9 * (double)spot->rows;
  int32_t next = best_predicted(s, spot, spot->raced, correction);
  if (next >= 0 && predicted(s, spot, next) * correction[size_of(next)] < best && spot->worse < FEW_COUNT) {
    ++spot->worse;
    enter(s, spot, 1u << next, MORE, 0);
    return;
  }
  duel_or_settle(s, bucket);
}

static void start_few(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  uint32_t set = 0;
  int32_t first = best_predicted(s, spot, 0, NULL);
  for (int32_t i = 0; i < FEW_COUNT; ++i) {
    int32_t next = best_predicted(s, spot, set, NULL);
    if (next < 0 || predicted(s, spot, next) > FEW_WITHIN * predicted(s, spot, first)) break;
    set |= 1u << next;
  }
  /* A neighbour in any case: a single candidate would confirm nothing. */
  if ((set & (set - 1)) == 0) {
    for (int32_t step = -1; step <= 1; step += 2) {
      int32_t size = size_of(first) + step, p = first + step;
      if (size >= s->config.min_size && size <= s->config.max_size && is_open(s, p)) set |= 1u << p;
    }
  }
  spot->worse = 0;
  enter(s, spot, set, FEW, 0);
}

/* The fewest chunks have run: what the sketch likes best meets them; where it likes them, their neighbour does, unless
 * the sketch speaks clearly against it. */
static void start_sketched(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  int32_t first = pick_of(s, spot->lo), best = first;
  for (int32_t size = spot->lo; size <= spot->hi; ++size) {
    if (predicted(s, spot, pick_of(s, size)) < predicted(s, spot, best)) best = pick_of(s, size);
  }
  if (best == first && predicted(s, spot, first + 1) <= SKETCH_BESIDE * predicted(s, spot, first)) best = first + 1;
  if (best == first) {
    answer(s, bucket, first, SLUICE_WHY_PREDICTED);
    return;
  }
  spot->worse = 0;
  /* The first have run a counted step: where others should beat them by far, and do, that will do. */
  spot->expected = (float)(predicted(s, spot, best) / predicted(s, spot, first));
  enter(s, spot, 1u << best, SKETCHED, SKETCH_HOPELESS * (double)spot->expected < 1);
}

/* The sketch knows more now: whatever it likes as well as the best that ran, races. */
static void after_sketched(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  double correction[SLUICE_SEARCH_SIZES], least = INFINITY;
  corrections(s, spot, correction);
  double best = time_of(spot, best_of(spot, spot->raced)) * 1e-9 * (double)spot->rows;
  int32_t next = -1;
  for (int32_t size = spot->lo; size <= spot->hi; ++size) {
    double time = predicted(s, spot, pick_of(s, size)) * correction[size];
    if (!(spot->raced >> pick_of(s, size) & 1) && time < least) least = time, next = pick_of(s, size);
  }
  if (next < 0 || least > SKETCH_WITHIN * best || spot->worse >= FEW_COUNT) {
    try_wgrad(s, bucket);
    return;
  }
  ++spot->worse;
  enter(s, spot, 1u << next, SKETCHED, 0);
}

/* Both ends and the middle: of two ends alone the lucky one would begin a walk that never sees the valley. */
static void start_ends(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  int32_t middle = (spot->lo + spot->hi) / 2;
  enter(s, spot, 1u << pick_of(s, spot->lo) | 1u << pick_of(s, middle) | 1u << pick_of(s, spot->hi), ENDS, 0);
}

static void start(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  const sluice_spot_t *below = answer_near(s, bucket, -1), *above = answer_near(s, bucket, 1);
  int32_t lo = below == NULL ? s->config.min_size : size_of(below->pick);
  int32_t hi = above == NULL ? s->config.max_size : size_of(above->pick);
  spot->pick = (uint8_t)pick_of(s, s->config.min_size);
  spot->at = spot->rows;
  if (s->config.min_size == s->config.max_size && !s->config.open_wgrad) {
    answer(s, bucket, pick_of(s, lo), SLUICE_WHY_ONE_LEFT);
    return;
  }
  if (below != NULL && above != NULL && below->pick == above->pick) {
    answer(s, bucket, below->pick, SLUICE_WHY_INSIDE_RANGE);
    return;
  }
  if (s->config.predict != NULL && s->config.mode == SLUICE_TUNER_MODEL) {
    answer(s, bucket, best_predicted(s, spot, 0, NULL), SLUICE_WHY_PREDICTED);
    return;
  }
  clear_samples(s, spot);
  if (s->config.predict != NULL && s->config.mode == SLUICE_TUNER_ADAPTIVE) {
    start_few(s, bucket);
    return;
  }
  spot->lo = (int16_t)(lo < hi ? lo : hi);
  spot->hi = (int16_t)(lo < hi ? hi : lo);
  int near_below = answer_within(s, bucket, -1, NEAR) != NULL, near_above = answer_within(s, bucket, 1, NEAR) != NULL;
  if (spot->lo < spot->hi && near_below != near_above) { /* that end is the better one: no need to try the other */
    int32_t from = near_below ? lo : hi, beside = from == spot->lo ? from + 1 : from - 1;
    enter(s, spot, 1u << pick_of(s, from) | 1u << pick_of(s, beside), WALK, 0);
    return;
  }
  if (makes_sketches(s) && spot->lo < spot->hi) {
    enter(s, spot, 1u << pick_of(s, spot->lo), FIRST, 0);
    return;
  }
  start_ends(s, bucket);
}

static void after_first(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  if (sketched(s, spot, pick_of(s, spot->lo)) > 0) {
    start_sketched(s, bucket);
  } else {
    start_ends(s, bucket); /* lanes were not timed */
  }
}

/* Only as long as races have cost less than their share. */
static int may_question(const sluice_search_t* s, const sluice_spot_t* spot) {
  return s->config.mode != SLUICE_TUNER_MODEL && spot->why != SLUICE_WHY_IMPORTED && spot->why != SLUICE_WHY_ONE_LEFT &&
         spot->passes_since >= spot->question_after &&
         s->stats.excess_seconds <= s->config.budget_share * s->stats.total_seconds;
}

static void question(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  uint32_t set = 1u << spot->pick;
  for (int32_t step = -1; step <= 1; step += 2) {
    int32_t size = size_of(spot->pick) + step, p = spot->pick + step;
    if (size >= s->config.min_size && size <= s->config.max_size && is_open(s, p)) set |= 1u << p;
  }
  int32_t other = (spot->pick + SLUICE_SEARCH_SIZES) % SLUICE_SEARCH_PICKS;
  if (s->config.min_size == s->config.max_size && is_open(s, other))
    set |= 1u << other; /* n is fixed: the mode is left */
  clear_samples(s, spot);
  spot->at = spot->rows;
  enter(s, spot, set, QUESTION, 0);
}

static int is_done(const sluice_search_t* s, const sluice_spot_t* spot, int32_t pick) {
  int32_t wanted = spot->stage == FIRST ? 2 : s->config.repeats * (1 + spot->is_extended) + 1;
  return spot->forward[size_of(pick)].count >= wanted && spot->backward[pick].count >= wanted;
}

/* Those that lost already, in two steps beside another's unless no flip of the machine's speed explains one, or whose
 * backward never comes, need not run their other steps. */
static void drop_hopeless(const sluice_search_t* s, sluice_spot_t* spot, const sluice_window_t* window) {
  int is_early = spot->stage == SKETCHED || (spot->stage == WGRAD && makes_sketches(s));
  double hopeless = is_early ? SKETCH_HOPELESS : HOPELESS;
  for (int32_t p = 0; p < SLUICE_SEARCH_PICKS; ++p) {
    if (!(spot->racing >> p & 1)) continue;
    int lost = spot->forward[size_of(p)].count > LONE_PASSES;
    for (int32_t other = 0; other < SLUICE_SEARCH_PICKS && !lost; ++other) {
      if (other == p || !(spot->window >> other & 1)) continue;
      lost = sluice_race_log_losses(&window->log, p, other, hopeless) >= 2;
    }
    if (lost) spot->racing = (uint16_t)(spot->racing & ~(1u << p));
  }
}

/* A newcomer that runs alone, since it should beat the anchor by far: where its first step says otherwise, perhaps the
 * machine's speed flipped, and the anchor runs beside it. */
static void recall_anchor(sluice_spot_t* spot, sluice_window_t* window) {
  if (spot->stage != SKETCHED || (spot->racing >> spot->anchor & 1) || window->before[0].count > 0) return;
  int32_t newcomer = __builtin_ctz(spot->window & ~(1u << spot->anchor));
  if (spot->backward[newcomer].count != 2) return;
  int is_clear = 0;
  double ratio = sluice_race_log_ratio(&window->log, newcomer, spot->anchor, &is_clear) / (double)spot->expected;
  if (ratio > 1 / SKETCH_TRUST && ratio < SKETCH_TRUST) return;
  lift_anchor(spot, window);
  spot->racing |= (uint16_t)(1u << spot->anchor);
}

static double scale_of(float before, float now) { return before > 0 && now > 0 ? (double)before / (double)now : 1; }

/* As if it had run while the anchor ran before: the pass by `scale`, each lane by the anchor's. */
static void rescale(sluice_sample_t* x, double scale, const sluice_sample_t* before, const sluice_sample_t* now) {
  x->best_ns_per_row *= (float)scale;
  x->compute *= (float)scale_of(before->compute, now->compute);
  double comm = scale_of(before->comm, now->comm);
  x->comm *= (float)comm, x->comm_cpu *= (float)comm;
}

/* What the window's candidates took. Where the machine stayed the same, all windows and this one: the shortest times.
 * Else the anchor's time stands, and the others' follow from what they took beside it. */
static void take_times(sluice_spot_t* spot, const sluice_window_t* window, const double* ratio) {
  sluice_sample_t* samples[] = {&spot->forward[size_of(spot->anchor)], &spot->backward[spot->anchor]};
  sluice_sample_t now[] = {*samples[0], *samples[1]};
  int has_before = window->before[0].count > 0 && spot->time[spot->anchor] > 0,
      has_now = shortest(spot, spot->anchor) > 0;
  if (has_before && has_now) {
    double drift = shortest(spot, spot->anchor) / (double)spot->time[spot->anchor];
    if (drift > DRIFT || drift < 1 / DRIFT) spot->is_unsteady = 1;
  }
  for (int32_t p = 0; p < SLUICE_SEARCH_PICKS; ++p) {
    if ((spot->window >> p & 1) && sluice_race_log_spread(&window->log, p) > SLUICE_UNSTEADY) spot->is_unsteady = 1;
  }
  for (int32_t direction = 0; has_before && direction < 2; ++direction) {
    const sluice_sample_t* before = &window->before[direction];
    float best = samples[direction]->best_ns_per_row;
    if (spot->is_unsteady || best <= 0 || best > before->best_ns_per_row) *samples[direction] = *before;
    if (samples[direction]->count < 2) samples[direction]->count = 2;
  }
  if (!has_before || !spot->is_unsteady) spot->time[spot->anchor] = (float)shortest(spot, spot->anchor);
  for (int32_t p = 0; p < SLUICE_SEARCH_PICKS; ++p) {
    double raw = shortest(spot, p);
    if (!(spot->window >> p & 1) || p == spot->anchor || raw <= 0) continue;
    double time = spot->is_unsteady && ratio[p] > 0 ? ratio[p] * (double)spot->time[spot->anchor] : raw;
    spot->time[p] = (float)time;
    if (!has_before || !spot->is_unsteady || size_of(p) == size_of(spot->anchor)) continue;
    rescale(&spot->forward[size_of(p)], time / raw, &window->before[0], &now[0]);
    rescale(&spot->backward[p], time / raw, &window->before[1], &now[1]);
  }
}

/* Nonzero: all is said. Zero: the machine flipped and steps contradict each other, so that the window runs on. */
static int close_window(sluice_search_t* s, sluice_spot_t* spot, sluice_window_t* window) {
  double ratio[SLUICE_SEARCH_PICKS] = {0};
  int is_clear = 1;
  for (int32_t p = 0; p < SLUICE_SEARCH_PICKS; ++p) {
    int clear = 1;
    if (!(spot->window >> p & 1) || p == spot->anchor) continue;
    ratio[p] = sluice_race_log_ratio(&window->log, p, spot->anchor, &clear);
    if (spot->racing >> p & 1) is_clear &= clear;
  }
  if (!is_clear && !spot->is_extended && spot->stage != FIRST) {
    if (window->before[0].count == 0 && spot->time[spot->anchor] > 0) lift_anchor(spot, window);
    spot->racing |= (uint16_t)(1u << spot->anchor);
    spot->is_extended = 1;
    return 0;
  }
  take_times(spot, window, ratio);
  int32_t best = best_of(spot, spot->window);
  if (best >= 0) {
    s->stats.excess_seconds += sluice_race_log_excess(&window->log, best) * (double)spot->rows * 1e-9;
  }
  return 1;
}

static void advance(sluice_search_t* s, int32_t bucket) {
  sluice_spot_t* spot = &s->spots[bucket];
  sluice_window_t* window = window_of(s, spot);
  recall_anchor(spot, window);
  drop_hopeless(s, spot, window);
  for (int32_t p = 0; p < SLUICE_SEARCH_PICKS; ++p) {
    if ((spot->racing >> p & 1) && !is_done(s, spot, p)) return;
  }
  if (!close_window(s, spot, window)) return;
  if (best_of(spot, spot->raced) < 0) { /* nobody finished a step */
    settle(s, bucket);
    return;
  }
  switch (spot->stage) {
    case ENDS:
    case WALK: walk_on(s, bucket); return;
    case FIRST: after_first(s, bucket); return;
    case SKETCHED: after_sketched(s, bucket); return;
    case WGRAD: duel_or_settle(s, bucket); return;
    case FEW:
    case MORE: after_few(s, bucket); return;
    default: settle(s, bucket); return;
  }
}

/* ---- the two calls of every step ---- */

static int races_are_expensive(const sluice_search_t* s) {
  return s->stats.timed_passes > 1000 &&
         s->stats.excess_seconds > EXPENSIVE * s->config.budget_share * s->stats.total_seconds;
}

int32_t sluice_search_next(sluice_search_t* s, int64_t rows, int32_t* out_why) {
  int32_t ignored;
  int32_t* why = out_why != NULL ? out_why : &ignored;
  *why = SLUICE_WHY_NOTHING_YET;
  if (rows < 1) return pick_of(s, s->config.min_size);
  int32_t bucket = sluice_search_bucket(rows);
  sluice_spot_t* spot = &s->spots[bucket];
  spot->rows = rows;
  if (spot->state == SLUICE_SPOT_NOTHING) {
    const sluice_spot_t* near = races_are_expensive(s) ? answer_within(s, bucket, -1, NEAR) : NULL;
    if (near == NULL && races_are_expensive(s)) near = answer_within(s, bucket, 1, NEAR);
    if (near != NULL) {
      *why = SLUICE_WHY_INSIDE_RANGE;
      return near->pick;
    }
    start(s, bucket);
  }
  if (spot->state == SLUICE_SPOT_ANSWERED && may_question(s, spot)) question(s, bucket);
  *why = spot->state == SLUICE_SPOT_ANSWERED ? spot->why : SLUICE_WHY_ON_TRIAL;
  if (spot->state == SLUICE_SPOT_ANSWERED) return spot->pick;
  /* In turns: the next of the set behind the last one that still lacks steps. */
  int32_t pick = spot->pick;
  for (int32_t i = 0; i < SLUICE_SEARCH_PICKS; ++i) {
    s->turn = (s->turn + 1) % SLUICE_SEARCH_PICKS;
    if (!(spot->racing >> s->turn & 1) || is_done(s, spot, s->turn)) continue;
    pick = s->turn;
    break;
  }
  return pick;
}

/* What a warm-up cost is known once a second pass has run. Seconds. */
static double take_warm_up(sluice_sample_t* sample, double ns_per_row, double rows) {
  if (sample->best_ns_per_row >= 0) return 0;
  double more = -(double)sample->best_ns_per_row - ns_per_row;
  sample->best_ns_per_row = 0;
  return more > 0 ? more * rows * 1e-9 : 0;
}

static void count_sample(sluice_search_t* s, sluice_sample_t* sample, double ns_per_row, double rows,
                         const sluice_lanes_t* lanes) {
  ++sample->count;
  if (sample->count == 1) { /* meets new slots and templates */
    if (sample->best_ns_per_row == 0) sample->best_ns_per_row = -(float)ns_per_row;
    return;
  }
  s->stats.switch_seconds += take_warm_up(sample, ns_per_row, rows);
  if (sample->best_ns_per_row != 0 && ns_per_row >= (double)sample->best_ns_per_row) return;
  sample->best_ns_per_row = (float)ns_per_row;
  if (lanes == NULL) return;
  sample->compute = (float)(lanes->compute / rows), sample->comm = (float)(lanes->comm / rows);
  sample->comm_cpu = (float)(lanes->comm_cpu / rows);
}

void sluice_search_count_switch(sluice_search_t* s, int32_t direction, int32_t pick, int64_t rows, double seconds) {
  const sluice_spot_t* spot = &s->spots[sluice_search_bucket(rows)];
  const sluice_sample_t* x = direction == SLUICE_FORWARD ? &spot->forward[size_of(pick)] : &spot->backward[pick];
  double usual = x->count > 1 ? (double)x->best_ns_per_row * (double)rows * 1e-9 : 0;
  if (usual > 0 && seconds > usual) s->stats.switch_seconds += seconds - usual;
}

/* A step is a forward and the backward behind it. */
static void log_step(sluice_window_t* window, int32_t direction, int32_t pick, double ns_per_row, int is_warm_up) {
  if (direction == SLUICE_FORWARD) {
    window->step_ns_per_row = (float)ns_per_row, window->step_pick = pick;
    return;
  }
  if (window->step_ns_per_row > 0 && window->step_pick == pick) {
    sluice_race_log_add(&window->log, pick, (double)window->step_ns_per_row + ns_per_row, is_warm_up);
  }
  window->step_ns_per_row = 0;
}

/* What an answer's passes usually take, in turns with nobody: what a switch costs is judged by it. */
static void note_usual(sluice_spot_t* spot, int32_t direction, int32_t pick, double ns_per_row) {
  sluice_sample_t* x = direction == SLUICE_FORWARD ? &spot->forward[size_of(pick)] : &spot->backward[pick];
  if (pick == spot->pick && x->count > 1 && ns_per_row < (double)x->best_ns_per_row) {
    x->best_ns_per_row = (float)ns_per_row;
  }
}

void sluice_search_observe(sluice_search_t* s, int32_t direction, int32_t pick, int64_t rows, uint64_t ns,
                           const sluice_lanes_t* lanes) {
  if (rows < 1 || ns == 0) return;
  sluice_spot_t* spot = &s->spots[sluice_search_bucket(rows)];
  if (spot->state == SLUICE_SPOT_NOTHING && makes_sketches(s) && !races_are_expensive(s)) {
    spot->rows = rows; /* the pass that showed this size is the warm-up already */
    start(s, sluice_search_bucket(rows));
  }
  double ns_per_row = (double)ns / (double)rows;
  ++s->stats.timed_passes;
  s->stats.total_seconds += (double)ns * 1e-9;
  ++spot->passes_since;
  if (spot->state == SLUICE_SPOT_ANSWERED) note_usual(spot, direction, pick, ns_per_row);
  if (spot->state != SLUICE_SPOT_RACING || !(spot->racing >> pick & 1)) return;
  ++s->stats.race_passes;
  ++spot->race_passes;
  sluice_sample_t* sample = direction == SLUICE_FORWARD ? &spot->forward[size_of(pick)] : &spot->backward[pick];
  count_sample(s, sample, ns_per_row, (double)rows, lanes);
  float startup = lanes == NULL ? 0 : (float)(lanes->startup / (double)rows);
  if (startup > 0 && (spot->startup[direction] <= 0 || startup < spot->startup[direction])) {
    spot->startup[direction] = startup;
  }
  sluice_window_t* window = window_of(s, spot);
  window->used_at = (uint32_t)s->stats.race_passes;
  log_step(window, direction, pick, ns_per_row, sample->count == 1);
  advance(s, sluice_search_bucket(rows));
}
