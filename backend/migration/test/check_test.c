// SPDX-License-Identifier: Apache-2.0
/* Checks the protocol: explores every order of events of a few ranks. Each rank trains a step and sends the contents of
 * its place to the next rank, while messages are in flight, ranks are killed, are late, and refuse.
 *
 * For each place the checker knows the parts that must move together, the expert of each part, and the number of
 * updates of each part.
 *
 * It finds no fault in the protocol, and finds each planted fault. */
#include <string.h>

#include "backend/base/alloc.h"
#include "backend/base/state_set.h"
#include "backend/migration/protocol.h"
#include "third_party/bazel/test.h"

enum { MAX_RANKS = 4, MAX_RULES = 32 };

enum {
  PART_WEIGHTS = 1,
  PART_STATE = 2, /* masters, moments, step counts */
  PART_GRADIENTS = 4,
  PARTS_ALL = 7
};

enum {
  FAULT_NONE = 0,
  FAULT_EPOCHS,  /* one rank has committed, another has aborted */
  FAULT_MIXED,   /* parts of different experts in one place */
  FAULT_STEP,    /* a part has missed an update */
  FAULT_TABLE,   /* the table of slots names another expert than the one in the place */
  FAULT_DEADLOCK /* a live rank waits for ever */
};

typedef struct options_s {
  const sluice_move_rule_t* rules; /* NULL: those of the protocol */
  int32_t num_rules;
  int32_t num_ranks;    /* [2, MAX_RANKS] */
  int32_t max_killed;   /* maximum number of ranks that are killed, at any time */
  int32_t max_late;     /* maximum number of times that a waiting rank gives up although no rank is gone */
  int32_t max_refusals; /* maximum number of ranks that refuse, at any time before they are ready */
  /* The behaviour of the host and the executor; tests inject errors here. */
  int32_t parts;         /* SLUICE_MOVE_PART_*: the parts that are sent */
  int32_t updates_first; /* the host updates streamed state, and only then reaches the boundary */
  int32_t keeps_table;   /* the host does not replace the table of slots */
} options_t;

#define MESSAGE_BITS 3

/* The messages in flight from one rank to another, in the order in which they were sent. */
enum { STREAMED = 1, FLUSHED, READY, AGREE, REFUSE };

/* The progress of the host. It begins a move after an update. */
enum { TRAINS = 0, HAS_GRADIENTS, HAS_UPDATED };

/* The state of one rank. The place of a rank contains parts of experts: `weights`, `state` and `gradients` are expert
 * numbers. Expert e began on rank e. */
typedef struct rank_s {
  uint32_t phase : 4, is_dead : 1, position : 2, has_streamed : 1, has_flushed : 1, ready : 4, agreed : 4, weights : 2,
      weight_updates : 2, state : 2, state_updates : 2, gradients : 2, table : 2;
} rank_t;

typedef struct state_s {
  rank_t ranks[MAX_RANKS];
  uint16_t under_way[MAX_RANKS][MAX_RANKS]; /* [from][to]: the oldest message in the lowest bits */
  uint8_t killed, late, refusals, padding[5];
} state_t;

enum { WORDS = sizeof(state_t) / sizeof(uint64_t) };
_Static_assert(sizeof(state_t) % sizeof(uint64_t) == 0, "a state is whole words");

typedef struct checker_s {
  const options_t* options;
  sluice_state_set_t states;
  int32_t fault; /* FAULT_*, the first one found, on a shortest path */
  int64_t moves; /* of the current state */
} checker_t;

static void find(checker_t* c, int32_t fault) {
  if (c->fault == FAULT_NONE) c->fault = fault;
}

/* ---- effects of events ---- */

static int hears(const rank_t* rank) {
  return rank->phase >= SLUICE_MIGRATION_STREAMS && rank->phase <= SLUICE_MIGRATION_AGREED;
}

static int has_ended(const rank_t* rank) {
  return rank->phase == SLUICE_MIGRATION_COMMITTED || rank->phase == SLUICE_MIGRATION_ABORTED;
}

static void say(state_t* state, int32_t from, int32_t to, uint32_t message) {
  if (from == to || !hears(&state->ranks[to])) return;
  uint16_t* queue = &state->under_way[from][to];
  int32_t length = 0;
  while (*queue >> (MESSAGE_BITS * length)) ++length;
  *queue = (uint16_t)(*queue | (message << (MESSAGE_BITS * length)));
}

static void say_to_all(const checker_t* c, state_t* state, int32_t from, uint32_t message) {
  for (int32_t to = 0; to < c->options->num_ranks; ++to) say(state, from, to, message);
}

static int32_t source_of(const checker_t* c, int32_t rank) {
  return (rank + c->options->num_ranks - 1) % c->options->num_ranks;
}

static void install(const checker_t* c, state_t* state, int32_t r) {
  rank_t* rank = &state->ranks[r];
  const uint32_t expert = (uint32_t)source_of(c, r) & 3u;
  if (c->options->parts & PART_WEIGHTS) rank->weights = expert, rank->weight_updates = 0;
  if (c->options->parts & PART_STATE) rank->state = expert, rank->state_updates = 0;
  if (c->options->parts & PART_GRADIENTS) rank->gradients = expert;
  if (!c->options->keeps_table) rank->table = expert;
}

/* Applies an event. Returns whether it occurs in this phase. */
static int apply(checker_t* c, state_t* state, int32_t r, int32_t event) {
  rank_t* rank = &state->ranks[r];
  const sluice_move_rule_t* rule =
      sluice_move_find_rule(c->options->rules, c->options->num_rules, (int32_t)rank->phase, event);
  if (rule == NULL) return 0;
  rank->phase = (uint32_t)rule->to & 15u;
  if (rule->act == SLUICE_MOVE_DO_FLUSH) say(state, r, (r + 1) % c->options->num_ranks, FLUSHED);
  if (rule->act == SLUICE_MOVE_DO_INSTALL) install(c, state, r);
  if (rule->say == SLUICE_MOVE_SAY_READY) say_to_all(c, state, r, READY);
  if (rule->say == SLUICE_MOVE_SAY_AGREE) say_to_all(c, state, r, AGREE);
  if (rule->say == SLUICE_MOVE_SAY_REFUSE) say_to_all(c, state, r, REFUSE);
  if (!hears(rank)) { /* its connection is closed */
    for (int32_t from = 0; from < c->options->num_ranks; ++from) state->under_way[from][r] = 0;
  }
  return 1;
}

static sluice_status_t keep(checker_t* c, const state_t* state) {
  uint64_t words[WORDS];
  ++c->moves;
  memcpy(words, state, sizeof words);
  return sluice_state_set_add(&c->states, words);
}

static sluice_status_t occur(checker_t* c, const state_t* from, int32_t r, int32_t event) {
  state_t to = *from;
  return apply(c, &to, r, event) ? keep(c, &to) : SLUICE_OK;
}

/* ---- possible moves ---- */

static sluice_status_t train(checker_t* c, const state_t* from, int32_t r) {
  state_t to = *from;
  rank_t* rank = &to.ranks[r];
  if (rank->position == TRAINS) {
    rank->position = HAS_GRADIENTS;
    return keep(c, &to);
  }
  const int is_early = c->options->updates_first && rank->phase == SLUICE_MIGRATION_STREAMS;
  if (rank->position != HAS_GRADIENTS || !(has_ended(rank) || is_early)) return SLUICE_OK;
  if (rank->weights != rank->state || rank->weights != rank->gradients) find(c, FAULT_MIXED);
  ++rank->weight_updates;
  ++rank->state_updates;
  rank->position = HAS_UPDATED;
  return keep(c, &to);
}

static sluice_status_t come_to_boundary(checker_t* c, const state_t* from, int32_t r) {
  const uint32_t wanted = c->options->updates_first ? HAS_UPDATED : HAS_GRADIENTS;
  if (from->ranks[r].position != wanted) return SLUICE_OK;
  return occur(c, from, r, SLUICE_MOVE_EVENT_BOUNDARY);
}

static sluice_status_t hear(checker_t* c, const state_t* from, int32_t source, int32_t r) {
  const uint32_t message = from->under_way[source][r] & ((1u << MESSAGE_BITS) - 1);
  if (message == 0 || !hears(&from->ranks[r])) return SLUICE_OK;
  state_t to = *from;
  to.under_way[source][r] = (uint16_t)(to.under_way[source][r] >> MESSAGE_BITS);
  rank_t* rank = &to.ranks[r];
  switch (message) {
    case STREAMED: rank->has_streamed = 1; break;
    case FLUSHED: rank->has_flushed = 1; break;
    case READY: rank->ready = (rank->ready | 1u << source) & 15u; break;
    case AGREE: rank->agreed = (rank->agreed | 1u << source) & 15u; break;
    default: (void)apply(c, &to, r, SLUICE_MOVE_EVENT_REFUSED); break;
  }
  return keep(c, &to);
}

static sluice_status_t notice(checker_t* c, const state_t* from, int32_t r) {
  const rank_t* rank = &from->ranks[r];
  const uint32_t others = ((1u << c->options->num_ranks) - 1) & ~(1u << r);
  if (rank->has_streamed && rank->has_flushed) SLUICE_TRY(occur(c, from, r, SLUICE_MOVE_EVENT_ALL_HERE));
  if (rank->ready == others) SLUICE_TRY(occur(c, from, r, SLUICE_MOVE_EVENT_ALL_READY));
  if (rank->agreed == others) SLUICE_TRY(occur(c, from, r, SLUICE_MOVE_EVENT_ALL_AGREED));
  return SLUICE_OK;
}

/* A rank that is dead, or has closed its connection without having committed, is lost to others; its messages may
 * arrive or not. */
static sluice_status_t lose(checker_t* c, const state_t* from, int32_t r) {
  const rank_t* rank = &from->ranks[r];
  int is_lost = 0;
  for (int32_t other = 0; other < c->options->num_ranks; ++other) {
    const rank_t* o = &from->ranks[other];
    const int has_gone = o->is_dead || o->phase == SLUICE_MIGRATION_ABORTED || o->phase == SLUICE_MIGRATION_UNDECIDED;
    is_lost |= other != r && has_gone;
  }
  if (is_lost) return occur(c, from, r, SLUICE_MOVE_EVENT_LOST);
  if (rank->phase < SLUICE_MIGRATION_FLUSHES || from->late == c->options->max_late) return SLUICE_OK;
  state_t to = *from;
  if (!apply(c, &to, r, SLUICE_MOVE_EVENT_LOST)) return SLUICE_OK;
  ++to.late;
  return keep(c, &to);
}

static sluice_status_t refuse(checker_t* c, const state_t* from, int32_t r) {
  const uint32_t phase = from->ranks[r].phase;
  if (from->refusals == c->options->max_refusals) return SLUICE_OK;
  if (phase != SLUICE_MIGRATION_STREAMS && phase != SLUICE_MIGRATION_FLUSHES) return SLUICE_OK;
  state_t to = *from;
  if (!apply(c, &to, r, SLUICE_MOVE_EVENT_REFUSED)) return SLUICE_OK;
  ++to.refusals;
  return keep(c, &to);
}

static sluice_status_t die(checker_t* c, const state_t* from, int32_t r) {
  if (from->killed == c->options->max_killed) return SLUICE_OK;
  state_t to = *from;
  to.ranks[r].is_dead = 1;
  ++to.killed;
  return keep(c, &to);
}

static sluice_status_t move_rank(checker_t* c, const state_t* from, int32_t r) {
  if (from->ranks[r].is_dead) return SLUICE_OK;
  SLUICE_TRY(train(c, from, r));
  SLUICE_TRY(come_to_boundary(c, from, r));
  for (int32_t source = 0; source < c->options->num_ranks; ++source) SLUICE_TRY(hear(c, from, source, r));
  if (hears(&from->ranks[r])) {
    SLUICE_TRY(notice(c, from, r));
    SLUICE_TRY(lose(c, from, r));
    SLUICE_TRY(refuse(c, from, r));
  }
  return die(c, from, r);
}

/* All remaining ranks have stopped, and one of them is undecided. */
static sluice_status_t settle(checker_t* c, const state_t* from) {
  uint64_t most_in_force = 0, least_agreed = 1;
  int is_needed = 0;
  for (int32_t r = 0; r < c->options->num_ranks; ++r) {
    const rank_t* rank = &from->ranks[r];
    if (rank->is_dead) continue;
    const int is_undecided = rank->phase == SLUICE_MIGRATION_UNDECIDED;
    if (!has_ended(rank) && !is_undecided) return SLUICE_OK;
    const int has_new = rank->phase == SLUICE_MIGRATION_COMMITTED;
    if (has_new) most_in_force = 1;
    if (!has_new && !is_undecided) least_agreed = 0;
    is_needed |= is_undecided;
  }
  if (!is_needed) return SLUICE_OK;
  const int is_new = sluice_move_settled_epoch(most_in_force, least_agreed) == 1;
  state_t to = *from;
  for (int32_t r = 0; r < c->options->num_ranks; ++r) {
    if (to.ranks[r].is_dead) continue;
    (void)apply(c, &to, r, is_new ? SLUICE_MOVE_EVENT_SETTLED_NEW : SLUICE_MOVE_EVENT_SETTLED_OLD);
  }
  return keep(c, &to);
}

/* ---- invariants ---- */

static void check_epochs(checker_t* c, const state_t* state) {
  int32_t committed = 0, aborted = 0;
  for (int32_t r = 0; r < c->options->num_ranks; ++r) {
    /* The commit of a dead rank counts, because its messages may have made others commit; its abort does not. */
    committed |= state->ranks[r].phase == SLUICE_MIGRATION_COMMITTED;
    aborted |= state->ranks[r].phase == SLUICE_MIGRATION_ABORTED && !state->ranks[r].is_dead;
  }
  if (committed && aborted) find(c, FAULT_EPOCHS);
}

static void check_end(checker_t* c, const state_t* state) {
  for (int32_t r = 0; r < c->options->num_ranks; ++r) {
    const rank_t* rank = &state->ranks[r];
    if (rank->is_dead) continue;
    if (!has_ended(rank) || rank->position != HAS_UPDATED) {
      find(c, FAULT_DEADLOCK);
    } else if (rank->weights != rank->state) {
      find(c, FAULT_MIXED);
    } else if (rank->weights != rank->table) {
      find(c, FAULT_TABLE);
    } else if (rank->weight_updates != 1 || rank->state_updates != 1) {
      find(c, FAULT_STEP);
    }
  }
}

/* ---- exploration ---- */

static void begin(const checker_t* c, state_t* state) {
  memset(state, 0, sizeof *state);
  for (int32_t r = 0; r < c->options->num_ranks; ++r) {
    const uint32_t own = (uint32_t)r & 3u;
    state->ranks[r] =
        (rank_t){.phase = SLUICE_MIGRATION_STREAMS, .weights = own, .state = own, .gradients = own, .table = own};
  }
  for (int32_t r = 0; r < c->options->num_ranks; ++r) say(state, r, (r + 1) % c->options->num_ranks, STREAMED);
}

static sluice_status_t explore(checker_t* c) {
  state_t state;
  begin(c, &state);
  SLUICE_TRY(keep(c, &state));
  for (int64_t i = 0; i < c->states.count && c->fault == FAULT_NONE; ++i) {
    memcpy(&state, sluice_state_set_get(&c->states, i), sizeof state);
    check_epochs(c, &state);
    c->moves = 0;
    for (int32_t r = 0; r < c->options->num_ranks; ++r) SLUICE_TRY(move_rank(c, &state, r));
    SLUICE_TRY(settle(c, &state));
    /* The possibility that a rank is killed later does not count as progress. */
    int32_t living = 0;
    for (int32_t r = 0; r < c->options->num_ranks; ++r) living += !state.ranks[r].is_dead;
    const int can_die = state.killed < c->options->max_killed;
    if (c->moves == (can_die ? living : 0)) check_end(c, &state);
  }
  return SLUICE_OK;
}

/* Explores all orders. Returns the fault that was found. */
static int32_t fault_of(options_t options) {
  if (options.rules == NULL) options.rules = sluice_move_rules(&options.num_rules);
  checker_t c = {.options = &options};
  sluice_state_set_init(&c.states, WORDS, sluice_process_allocator());
  assert_int_equal(explore(&c), SLUICE_OK);
  assert_true(c.states.count > 1);
  if (c.fault == FAULT_NONE) print_message("%d ranks: %lld states\n", options.num_ranks, (long long)c.states.count);
  sluice_state_set_deinit(&c.states);
  return c.fault;
}

/* ---- the protocol ---- */

TEST(Protocol_RanksDieComeLateAndRefuse_OneEpochAndWholeState) {
  const int32_t most = getenv("SLUICE_FULL") != NULL ? 2 : 1;
  for (int32_t ranks = 2; ranks <= 3; ++ranks) {
    for (int32_t what = 0; what < 8; ++what) {            /* 0: nothing goes wrong */
      if (ranks == 3 && what == 7 && most == 1) continue; /* only with SLUICE_FULL: all three at once on three ranks */
      assert_int_equal(fault_of((options_t){.num_ranks = ranks,
                                            .parts = PARTS_ALL,
                                            .max_killed = what & 1 ? (ranks == 3 ? most : 1) : 0,
                                            .max_late = what & 2 ? 1 : 0,
                                            .max_refusals = what & 4 ? 1 : 0}),
                       FAULT_NONE);
    }
  }
}

/* ---- planted faults ---- */

#define PHASE(name) SLUICE_MIGRATION_##name
#define EVENT(name) SLUICE_MOVE_EVENT_##name

static const struct {
  const char* what;
  int32_t fault;
  options_t options;
  sluice_move_rule_t rule; /* replaces the rule of its phase and event; to 0: none */
} planted[] = {
    {"commits before all are ready",
     FAULT_EPOCHS,
     {.num_ranks = 3, .max_killed = 1, .parts = PARTS_ALL},
     {PHASE(READY), EVENT(ALL_READY), PHASE(COMMITTED), SLUICE_MOVE_SAY_AGREE, SLUICE_MOVE_DO_INSTALL}},
    {"goes back alone after it has agreed",
     FAULT_EPOCHS,
     {.num_ranks = 3, .max_killed = 1, .parts = PARTS_ALL},
     {PHASE(AGREED), EVENT(LOST), PHASE(ABORTED), SLUICE_MOVE_SAY_NOTHING, SLUICE_MOVE_DO_NOTHING}},
    {"commits when it has lost another",
     FAULT_EPOCHS,
     {.num_ranks = 2, .max_late = 1, .parts = PARTS_ALL},
     {PHASE(READY), EVENT(LOST), PHASE(COMMITTED), SLUICE_MOVE_SAY_NOTHING, SLUICE_MOVE_DO_INSTALL}},
    {"does not say that it is ready",
     FAULT_DEADLOCK,
     {.num_ranks = 2, .parts = PARTS_ALL},
     {PHASE(FLUSHES), EVENT(ALL_HERE), PHASE(READY), SLUICE_MOVE_SAY_NOTHING, SLUICE_MOVE_DO_NOTHING}},
    {"sends weights only", FAULT_MIXED, {.num_ranks = 2, .parts = PART_WEIGHTS}, {0}},
    {"keeps the gradients", FAULT_MIXED, {.num_ranks = 2, .parts = PART_WEIGHTS | PART_STATE}, {0}},
    {"updates what it has streamed", FAULT_STEP, {.num_ranks = 2, .parts = PARTS_ALL, .updates_first = 1}, {0}},
    {"keeps the table of slots", FAULT_TABLE, {.num_ranks = 2, .parts = PARTS_ALL, .keeps_table = 1}, {0}},
};

TEST(Planted_EachFault_IsFound) {
  for (size_t i = 0; i < sizeof planted / sizeof planted[0]; ++i) {
    sluice_move_rule_t rules[MAX_RULES];
    options_t options = planted[i].options;
    const sluice_move_rule_t *own = sluice_move_rules(&options.num_rules), *new = &planted[i].rule;
    assert_true(options.num_rules <= MAX_RULES);
    memcpy(rules, own, (size_t)options.num_rules * sizeof rules[0]);
    options.rules = rules;
    if (new->to != PHASE(NONE))
      rules[sluice_move_find_rule(own, options.num_rules, new->from, new->event) - own] = *new;
    if (fault_of(options) != planted[i].fault) fail_msg("a rank that %s is not found", planted[i].what);
  }
}
