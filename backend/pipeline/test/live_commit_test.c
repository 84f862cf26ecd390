// SPDX-License-Identifier: Apache-2.0
/* A layer that changes its stage during a batch, from its announcement to its commit: in every order of events,
 * including ranks that are killed and ranks that refuse, the survivors reach one epoch. In the new epoch the layer is
 * on its new stage, with each micro-batch of the batch once in its gradient; in the old one it is on its old stage, as
 * the last update left it. Planted errors are found.
 *
 * The rules are those that executors use: backend/pipeline/layer_move.h decides which stage runs the layer, and
 * backend/migration the commit. A batch ends on a rank when its own ops have ended and all others have reported the end
 * of theirs. */

#include "backend/base/state_set.h"
#include "backend/migration/protocol.h"
#include "backend/pipeline/layer_move.h"
#include "third_party/bazel/test.h"

enum { MOST_RANKS = 3, MOST = 2, WINDOW = 2 };

/* Faults to plant. */
typedef enum mutant_e {
  NONE = 0,
  DOES_NOT_WAIT,          /* the upper stage triggers before the receiver has the parameters */
  SUM_LEAVES_EARLY,       /* the sum of gradients is sent with the parameters */
  DROPS_WHAT_WAS_HELD,    /* held gradients, at the commit */
  FOLLOWS_THE_TRIGGER,    /* the layer's owner is the stage that ran it last, whatever the epoch */
  COMMITS_A_FAILED_BATCH, /* a batch that ended on this rank only */
  KEEPS_GRADIENTS,        /* of a failed batch */
  COMMITS_WHEN_READY,     /* before all ranks are ready */
  NUM_MUTANTS
} mutant_t;

enum { RUNS = 0, DONE, ENDED, FAILED };

/* Messages of a migration, oldest in the lowest bits. */
enum { STREAMED = 1, FLUSHED, READY, AGREE, REFUSE, MESSAGE_BITS = 3 };

/* The state of a rank. Micro-batches are bits. */
typedef struct rank_s {
  uint8_t phase, batch, is_dead, heard_ends, has_streamed, has_flushed, ready, agreed;
  uint8_t forwards, backwards, ran; /* of a stage at the cut */
  uint8_t folded, twice, held, without;
  uint8_t has;
  int8_t trigger;
  uint8_t padding[7];
} rank_t;

typedef struct state_s {
  rank_t ranks[MOST_RANKS];
  uint16_t under_way[MOST_RANKS][MOST_RANKS]; /* from, to */
  uint8_t ends_under_way[MOST_RANKS];         /* by source: ranks to which it reports that its batch has ended */
  uint8_t activation_ran, gradient_has;       /* contents of messages, by micro-batch */
  uint8_t sum;                                /* in flight: micro-batches */
  uint8_t killed, refusals, padding[6];
} state_t;

enum { WORDS = sizeof(state_t) / sizeof(uint64_t) };
_Static_assert(sizeof(state_t) % sizeof(uint64_t) == 0, "a state is whole words");

typedef struct checker_s {
  int32_t num_ranks, m, to_lower, max_killed, max_refusals;
  mutant_t mutant;
  sluice_state_set_t states;
  int64_t moves; /* from the current state */
  const char* fault;
  int64_t new_ends, old_ends, triggered;
} checker_t;

static void find(checker_t* c, const char* fault) {
  if (c->fault == NULL) c->fault = fault;
}

static void keep(checker_t* c, const state_t* state) {
  uint64_t words[WORDS];
  ++c->moves;
  memcpy(words, state, sizeof words);
  assert_int_equal(sluice_state_set_add(&c->states, words), SLUICE_OK);
}

static int32_t receiver(const checker_t* c) { return c->to_lower ? SLUICE_LAYER_MOVE_LOWER : SLUICE_LAYER_MOVE_UPPER; }
static uint8_t bit(int32_t i) { return (uint8_t)(1U << i); }
static uint8_t others(const checker_t* c, int32_t r) { return (uint8_t)(((1U << c->num_ranks) - 1) & ~(1U << r)); }

static sluice_layer_move_t live_of(const checker_t* c, const state_t* state, int32_t s) {
  const rank_t* rank = &state->ranks[s];
  return (sluice_layer_move_t){.role = s, .to_lower = c->to_lower, .has = rank->has, .trigger = rank->trigger};
}

static void put_live(state_t* state, int32_t s, const sluice_layer_move_t* live) {
  state->ranks[s].has = (uint8_t)live->has;
  state->ranks[s].trigger = (int8_t)live->trigger;
}

/* ---- the migration ---- */

static int hears(const rank_t* rank) {
  return rank->phase >= SLUICE_MIGRATION_STREAMS && rank->phase <= SLUICE_MIGRATION_AGREED;
}

static void say(state_t* state, int32_t from, int32_t to, uint32_t message) {
  if (from == to || !hears(&state->ranks[to])) return;
  uint16_t* queue = &state->under_way[from][to];
  int32_t length = 0;
  while (*queue >> (MESSAGE_BITS * length)) ++length;
  *queue = (uint16_t)(*queue | (message << (MESSAGE_BITS * length)));
}

static int apply(const checker_t* c, state_t* state, int32_t r, int32_t event) {
  rank_t* rank = &state->ranks[r];
  int32_t count;
  const sluice_move_rule_t* rules = sluice_move_rules(&count);
  const sluice_move_rule_t* rule = sluice_move_find_rule(rules, count, rank->phase, event);
  if (rule == NULL) return 0;
  rank->phase = (uint8_t)rule->to;
  if (c->mutant == COMMITS_WHEN_READY && event == SLUICE_MOVE_EVENT_ALL_HERE) rank->phase = SLUICE_MIGRATION_COMMITTED;
  if (rule->act == SLUICE_MOVE_DO_FLUSH && r == 1 - receiver(c)) {
    if (c->mutant != SUM_LEAVES_EARLY) state->sum = rank->folded;
    say(state, r, receiver(c), FLUSHED);
  }
  for (int32_t to = 0; to < c->num_ranks; ++to) {
    if (rule->say == SLUICE_MOVE_SAY_READY) say(state, r, to, READY);
    if (rule->say == SLUICE_MOVE_SAY_AGREE) say(state, r, to, AGREE);
    if (rule->say == SLUICE_MOVE_SAY_REFUSE) say(state, r, to, REFUSE);
  }
  for (int32_t from = 0; from < c->num_ranks && !hears(rank); ++from) state->under_way[from][r] = 0;
  return 1;
}

static void occur(checker_t* c, const state_t* from, int32_t r, int32_t event) {
  state_t to = *from;
  if (apply(c, &to, r, event)) keep(c, &to);
}

static void hear(checker_t* c, const state_t* from, int32_t source, int32_t r) {
  const uint32_t message = from->under_way[source][r] & ((1U << MESSAGE_BITS) - 1);
  if (message == 0 || !hears(&from->ranks[r])) return;
  state_t to = *from;
  to.under_way[source][r] = (uint16_t)(to.under_way[source][r] >> MESSAGE_BITS);
  rank_t* rank = &to.ranks[r];
  switch (message) {
    case STREAMED: {
      sluice_layer_move_t live = live_of(c, &to, r);
      rank->has_streamed = 1;
      sluice_live_arrived(&live);
      put_live(&to, r, &live);
      break;
    }
    case FLUSHED: rank->has_flushed = 1; break;
    case READY: rank->ready = (uint8_t)(rank->ready | bit(source)); break;
    case AGREE: rank->agreed = (uint8_t)(rank->agreed | bit(source)); break;
    default: (void)apply(c, &to, r, SLUICE_MOVE_EVENT_REFUSED); break;
  }
  keep(c, &to);
}

/* A rank that is dead, or has aborted the move, is lost to the ranks that wait for it in the commit. */
static void lose(checker_t* c, const state_t* from, int32_t r) {
  if (from->ranks[r].phase < SLUICE_MIGRATION_FLUSHES) return;
  for (int32_t o = 0; o < c->num_ranks; ++o) {
    const rank_t* other = &from->ranks[o];
    const int has_gone = other->phase == SLUICE_MIGRATION_ABORTED || other->phase == SLUICE_MIGRATION_UNDECIDED;
    if (o == r || !(other->is_dead || has_gone)) continue;
    occur(c, from, r, SLUICE_MOVE_EVENT_LOST);
    return;
  }
}

static void commit(checker_t* c, const state_t* from, int32_t r) {
  const rank_t* rank = &from->ranks[r];
  const int is_failed = rank->batch == FAILED && c->mutant != COMMITS_A_FAILED_BATCH;
  if (rank->phase == SLUICE_MIGRATION_STREAMS && rank->batch >= ENDED) {
    occur(c, from, r, is_failed ? SLUICE_MOVE_EVENT_REFUSED : SLUICE_MOVE_EVENT_BOUNDARY);
  }
  if (!hears(rank)) return;
  for (int32_t source = 0; source < c->num_ranks; ++source) hear(c, from, source, r);
  if (r != receiver(c) || (rank->has_streamed && rank->has_flushed)) occur(c, from, r, SLUICE_MOVE_EVENT_ALL_HERE);
  if (rank->ready == others(c, r)) occur(c, from, r, SLUICE_MOVE_EVENT_ALL_READY);
  if (rank->agreed == others(c, r)) occur(c, from, r, SLUICE_MOVE_EVENT_ALL_AGREED);
  lose(c, from, r);
  const int may_refuse = rank->phase == SLUICE_MIGRATION_STREAMS || rank->phase == SLUICE_MIGRATION_FLUSHES;
  if (from->refusals == c->max_refusals || !may_refuse) return;
  state_t to = *from;
  ++to.refusals;
  if (apply(c, &to, r, SLUICE_MOVE_EVENT_REFUSED)) keep(c, &to);
}

/* ---- the batch ---- */

static void forward(checker_t* c, const state_t* from, int32_t s) {
  state_t to = *from;
  rank_t* rank = &to.ranks[s];
  const int32_t i = rank->forwards++;
  sluice_layer_move_t live = live_of(c, from, s);
  if (c->mutant == DOES_NOT_WAIT && s == SLUICE_LAYER_MOVE_UPPER && i > 0) live.has = 1;
  const uint64_t word =
      s == SLUICE_LAYER_MOVE_LOWER ? sluice_live_activation_word((from->activation_ran & bit(i)) != 0) : 0;
  const int ran = sluice_live_forward(&live, i, word);
  put_live(&to, s, &live);
  if (ran) rank->ran = (uint8_t)(rank->ran | bit(i));
  if (ran && s == receiver(c) && !rank->has_streamed) rank->without = 1;
  if (s == SLUICE_LAYER_MOVE_UPPER && (sluice_live_activation_word(ran) & SLUICE_LAYER_MOVE_RAN) != 0) {
    to.activation_ran = (uint8_t)(to.activation_ran | bit(i));
  }
  keep(c, &to);
}

static void fold(rank_t* rank, uint8_t micro_batches) {
  rank->twice = (uint8_t)(rank->twice | (rank->folded & micro_batches));
  rank->folded = (uint8_t)(rank->folded | micro_batches);
}

static void backward(checker_t* c, const state_t* from, int32_t s) {
  state_t to = *from;
  rank_t* rank = &to.ranks[s];
  const int32_t i = rank->backwards++;
  sluice_layer_move_t live = live_of(c, from, s);
  if (s == SLUICE_LAYER_MOVE_UPPER)
    sluice_live_heard(&live, (from->gradient_has & bit(i)) != 0 ? SLUICE_LAYER_MOVE_HAS : 0);
  put_live(&to, s, &live);
  if ((rank->ran & bit(i)) != 0 && sluice_live_receives(&live)) {
    rank->held = (uint8_t)(rank->held | bit(i));
  } else if ((rank->ran & bit(i)) != 0) {
    fold(rank, bit(i));
  }
  if (s == SLUICE_LAYER_MOVE_LOWER && (sluice_live_gradient_word(&live) & SLUICE_LAYER_MOVE_HAS) != 0) {
    to.gradient_has = (uint8_t)(to.gradient_has | bit(i));
  }
  keep(c, &to);
}

static void run_ops(checker_t* c, const state_t* from, int32_t s) {
  const rank_t* rank = &from->ranks[s];
  const int is_upper = s == SLUICE_LAYER_MOVE_UPPER;
  const rank_t* other = &from->ranks[1 - s];
  const int32_t limit = is_upper ? rank->backwards + WINDOW : other->forwards;
  const int32_t ready = is_upper ? other->backwards : rank->forwards;
  if (rank->forwards < c->m && rank->forwards < limit) forward(c, from, s);
  if (rank->backwards < ready) backward(c, from, s);
}

/* A batch fails if a rank has died, or if it has failed there. */
static void fail_batch(checker_t* c, const state_t* from, int32_t r) {
  for (int32_t o = 0; o < c->num_ranks; ++o) {
    if (o == r || !(from->ranks[o].is_dead || from->ranks[o].batch == FAILED)) continue;
    state_t to = *from;
    to.ranks[r].batch = FAILED;
    keep(c, &to);
    return;
  }
}

static void train(checker_t* c, const state_t* from, int32_t r) {
  const rank_t* rank = &from->ranks[r];
  if (rank->batch == RUNS) {
    if (r <= SLUICE_LAYER_MOVE_LOWER) run_ops(c, from, r);
    if (r > SLUICE_LAYER_MOVE_LOWER || rank->backwards == c->m) {
      state_t to = *from;
      to.ranks[r].batch = DONE;
      to.ends_under_way[r] = others(c, r);
      keep(c, &to);
    }
  }
  for (int32_t source = 0; source < c->num_ranks && rank->batch <= DONE; ++source) {
    if ((from->ends_under_way[source] & bit(r)) == 0) continue;
    state_t to = *from;
    to.ends_under_way[source] = (uint8_t)(to.ends_under_way[source] & ~bit(r));
    to.ranks[r].heard_ends = (uint8_t)(to.ranks[r].heard_ends | bit(source));
    keep(c, &to);
  }
  if (rank->batch == DONE && rank->heard_ends == others(c, r)) {
    state_t to = *from;
    to.ranks[r].batch = ENDED;
    keep(c, &to);
  }
  if (rank->batch <= DONE) fail_batch(c, from, r);
}

static void die(checker_t* c, const state_t* from, int32_t r) {
  if (from->killed == c->max_killed) return;
  state_t to = *from;
  to.ranks[r].is_dead = 1;
  ++to.killed;
  keep(c, &to);
}

/* ---- the end ---- */

static int has_ended(const rank_t* rank) {
  return rank->phase == SLUICE_MIGRATION_COMMITTED || rank->phase == SLUICE_MIGRATION_ABORTED;
}

static void settle(checker_t* c, const state_t* from) {
  uint64_t most_in_force = 0, least_agreed = 1;
  int is_needed = 0;
  for (int32_t r = 0; r < c->num_ranks; ++r) {
    const rank_t* rank = &from->ranks[r];
    if (rank->is_dead) continue;
    const int is_undecided = rank->phase == SLUICE_MIGRATION_UNDECIDED;
    if (!has_ended(rank) && !is_undecided) return;
    if (rank->phase == SLUICE_MIGRATION_COMMITTED) most_in_force = 1;
    if (rank->phase == SLUICE_MIGRATION_ABORTED) least_agreed = 0;
    is_needed |= is_undecided;
  }
  if (!is_needed) return;
  const int is_new = sluice_move_settled_epoch(most_in_force, least_agreed) == 1;
  state_t to = *from;
  for (int32_t r = 0; r < c->num_ranks; ++r) {
    if (!to.ranks[r].is_dead)
      (void)apply(c, &to, r, is_new ? SLUICE_MOVE_EVENT_SETTLED_NEW : SLUICE_MOVE_EVENT_SETTLED_OLD);
  }
  keep(c, &to);
}

/* What the host does with the layer of a stage at the cut. */
static void finish(const checker_t* c, rank_t* rank, int32_t s, uint8_t sum, int is_new) {
  if (is_new && s == receiver(c)) {
    rank->folded = sum;
    if (c->mutant != DROPS_WHAT_WAS_HELD) fold(rank, rank->held);
  } else if (!is_new && c->mutant != KEEPS_GRADIENTS) {
    rank->folded = rank->held = 0;
  }
}

static void check_end(checker_t* c, const state_t* state) {
  int32_t committed = 0, aborted = 0;
  for (int32_t r = 0; r < c->num_ranks; ++r) {
    const rank_t* rank = &state->ranks[r];
    if (rank->is_dead) continue;
    if (!has_ended(rank)) find(c, "a rank waits for ever");
    committed += rank->phase == SLUICE_MIGRATION_COMMITTED;
    aborted += rank->phase == SLUICE_MIGRATION_ABORTED;
    if (rank->phase == SLUICE_MIGRATION_COMMITTED && rank->batch != ENDED) find(c, "a batch that failed is in force");
  }
  if (committed > 0 && aborted > 0) find(c, "two epochs");
  const int is_new = committed > 0;
  c->new_ends += is_new;
  c->old_ends += !is_new;
  c->triggered += state->ranks[SLUICE_LAYER_MOVE_UPPER].trigger >= 0;
  for (int32_t s = 0; s < 2; ++s) {
    rank_t rank = state->ranks[s];
    if (rank.is_dead) continue;
    finish(c, &rank, s, state->sum, is_new);
    int is_owner = is_new == (s == receiver(c));
    if (c->mutant == FOLLOWS_THE_TRIGGER)
      is_owner = (state->ranks[SLUICE_LAYER_MOVE_UPPER].trigger >= 0) == (s == receiver(c));
    if (is_owner != (is_new == (s == receiver(c)))) find(c, "the layer lies on another stage than the epoch says");
    if (!is_owner) continue;
    if (rank.without || (s == receiver(c) && !rank.has_streamed)) find(c, "a layer without its parameters");
    const uint8_t wanted = is_new ? (uint8_t)((1U << c->m) - 1) : 0;
    if (rank.folded != wanted || rank.twice) find(c, "gradients of other micro-batches than those of the batch");
  }
}

/* ---- the whole ---- */

static void explore(checker_t* c) {
  state_t state;
  memset(&state, 0, sizeof state);
  for (int32_t r = 0; r < c->num_ranks; ++r) {
    state.ranks[r].phase = SLUICE_MIGRATION_STREAMS;
    state.ranks[r].trigger = -1;
  }
  say(&state, 1 - receiver(c), receiver(c), STREAMED);
  sluice_state_set_init(&c->states, WORDS, sluice_process_allocator());
  keep(c, &state);
  for (int64_t i = 0; i < c->states.count && c->fault == NULL; ++i) {
    memcpy(&state, sluice_state_set_get(&c->states, i), sizeof state);
    c->moves = 0;
    int32_t living = 0;
    for (int32_t r = 0; r < c->num_ranks; ++r) {
      if (state.ranks[r].is_dead) continue;
      ++living;
      train(c, &state, r);
      commit(c, &state, r);
      die(c, &state, r);
    }
    settle(c, &state);
    /* A rank does not wait for possible later kills. */
    if (c->moves == (state.killed < c->max_killed ? living : 0)) check_end(c, &state);
  }
}

static const char* fault_of(checker_t* c) {
  explore(c);
  if (c->fault == NULL) {
    print_message("%d ranks, m %d, to the %s stage: %lld states; ends: %lld old, %lld new, %lld after a trigger\n",
                  c->num_ranks, c->m, c->to_lower ? "lower" : "upper", (long long)c->states.count,
                  (long long)c->old_ends, (long long)c->new_ends, (long long)c->triggered);
  }
  sluice_state_set_deinit(&c->states);
  return c->fault;
}

TEST(Move_RanksDieAndRefuse_OneEpochAndAWholeBatchOrNone) {
  const int is_full = getenv("SLUICE_FULL") != NULL;
  for (int32_t what = 0; what < 8; ++what) {
    const int32_t num_ranks = what & 1 ? 3 : 2, to_lower = what >> 1 & 1;
    checker_t c = {.num_ranks = num_ranks, .m = MOST, .to_lower = to_lower};
    c.max_killed = what & 4 ? 0 : 1;
    c.max_refusals = what & 4 || is_full ? 1 : 0;
    if (fault_of(&c) != NULL) fail_msg("%d ranks, to_lower %d: %s", num_ranks, to_lower, c.fault);
    assert_true(c.new_ends > 0 && c.old_ends > 0 && c.triggered > 0);
  }
}

TEST(Move_PlantedErrors_AreFound) {
  for (mutant_t mutant = NONE + 1; mutant < NUM_MUTANTS; ++mutant) {
    const char* fault = NULL;
    for (int32_t to_lower = 0; to_lower < 2 && fault == NULL; ++to_lower) {
      checker_t c = {.num_ranks = 2, .m = MOST, .to_lower = to_lower, .max_killed = 1, .max_refusals = 1};
      c.mutant = mutant;
      fault = fault_of(&c);
    }
    if (fault == NULL) fail_msg("mutant %d goes unseen", (int)mutant);
    print_message("mutant %d: %s\n", (int)mutant, fault);
  }
}
