// SPDX-License-Identifier: Apache-2.0
/* Explores every interleaving of a small program. */
#include <string.h>

#include "backend/base/state_set.h"
#include "backend/pipeline/check/check.h"

#define MAX_OPS   SLUICE_PIPELINE_CHECK_MAX_OPS
#define MAX_RANKS SLUICE_PIPELINE_CHECK_MAX_RANKS
#define NOTHING   (-1)

/* Per rank: the ended ops of its stage, and the collective in which it waits for other replicas. */
typedef struct state_s {
  uint64_t ended[MAX_RANKS];
  int8_t running[MAX_RANKS]; /* op of the stage, or NOTHING; in a state's words only with several replicas */
} state_t;

/* An op as bit sets over its stage's ops. */
typedef struct rule_s {
  uint64_t needs;             /* of the program, and under a plan the preceding ops of its order */
  uint64_t conflicts;         /* earlier ops of the list that touch its slots */
  int32_t match_stage, match; /* op of that stage; NOTHING */
  int32_t limit;        /* of forwards before their backward, or backwards before their weight gradient; 0: none */
  uint64_t begun, gone; /* ops that count towards it: those begun but not gone, including the op itself */
  int8_t is_message, is_send, is_collective;
} rule_t;

typedef struct explorer_s {
  const sluice_pipeline_program_t* program;
  const sluice_pipeline_check_options_t* options;
  int32_t num_stages, replicas, num_ranks;
  rule_t rules[MAX_RANKS][MAX_OPS];
  uint64_t all[MAX_RANKS];
  sluice_state_set_t states;
  sluice_pipeline_finding_t* finding;
  int64_t moves; /* of the current state */
} explorer_t;

static uint64_t bit(int32_t i) { return (uint64_t)1 << i; }
static int holds(uint64_t set, uint64_t wanted) { return (wanted & ~set) == 0; }

/* ---- rules ---- */

static uint64_t ops_of(const sluice_pipeline_program_t* program, int32_t stage, int32_t kind, int32_t c) {
  uint64_t set = 0;
  int32_t first = program->first_op[stage];
  for (int32_t i = first; i < program->first_op[stage + 1]; ++i) {
    if (program->ops[i].kind == kind && program->ops[i].virtual_stage == c) set |= bit(i - first);
  }
  return set;
}

static void set_limit(const sluice_pipeline_program_t* program, const sluice_stage_op_t* op, rule_t* rule) {
  int32_t c = op->virtual_stage;
  if (op->kind == SLUICE_STAGE_FORWARD && !program->spec.forward_only) {
    rule->limit = program->spec.in_flight[c];
    rule->begun = ops_of(program, op->stage, SLUICE_STAGE_FORWARD, c);
    rule->gone = ops_of(program, op->stage, SLUICE_STAGE_BACKWARD, c);
  } else if (op->kind == SLUICE_STAGE_BACKWARD && program->spec.separate_wgrad) {
    rule->limit = program->spec.held[c];
    rule->begun = ops_of(program, op->stage, SLUICE_STAGE_BACKWARD, c);
    rule->gone = ops_of(program, op->stage, SLUICE_STAGE_WEIGHT_GRAD, c);
  }
}

static void set_rule(explorer_t* e, int32_t index) {
  const sluice_pipeline_program_t* program = e->program;
  const sluice_stage_op_t* op = &program->ops[index];
  int32_t first = program->first_op[op->stage];
  rule_t* rule = &e->rules[op->stage][index - first];
  *rule = (rule_t){.match_stage = NOTHING, .match = NOTHING};
  rule->is_message = (int8_t)sluice_stage_op_is_message(op->kind);
  rule->is_send = (int8_t)sluice_stage_op_is_send(op->kind);
  rule->is_collective =
      (int8_t)(op->virtual_stage >= 0 && sluice_stage_op_is_collective(&program->spec, op->kind, op->virtual_stage));
  for (int32_t n = 0; n < op->num_needs; ++n) rule->needs |= bit(program->needs[op->first_need + n] - first);
  for (int32_t i = first; i < program->first_op[op->stage + 1]; ++i) {
    const sluice_stage_op_t* other = &program->ops[i];
    int is_before = program->policy->is_planned && op->place >= 0 && other->place >= 0 && other->place < op->place;
    if (is_before) rule->needs |= bit(i - first);
    if (i < index && sluice_stage_conflict(other, op) != SLUICE_PIPELINE_FAULT_NONE) rule->conflicts |= bit(i - first);
  }
  if (op->match >= 0 && program->ops[op->match].match == index) {
    rule->match_stage = program->ops[op->match].stage;
    rule->match = op->match - program->first_op[rule->match_stage];
  }
  set_limit(program, op, rule);
  e->all[op->stage] |= bit(index - first);
}

/* ---- faults ---- */

static void find(explorer_t* e, const state_t* state, int32_t fault, int32_t rank, int32_t op, int32_t other) {
  if (e->finding->fault != SLUICE_PIPELINE_FAULT_NONE) return;
  int64_t events = 0;
  for (int32_t r = 0; r < e->num_ranks; ++r) events += __builtin_popcountll(state->ended[r]);
  int32_t stage = rank / e->replicas, first = e->program->first_op[stage];
  *e->finding = (sluice_pipeline_finding_t){fault, op == NOTHING ? -1 : first + op,
                                            other == NOTHING ? -1 : first + other, rank % e->replicas, events};
}

/* Ends an op: everything that it conflicts with must have ended before, and no limit may be exceeded. */
static void end_op(explorer_t* e, state_t* state, int32_t rank, int32_t op) {
  int32_t stage = rank / e->replicas, first = e->program->first_op[stage];
  const rule_t* rule = &e->rules[stage][op];
  uint64_t early = rule->conflicts & ~state->ended[rank];
  if (early != 0) {
    int32_t other = __builtin_ctzll(early);
    find(e, state, sluice_stage_conflict(&e->program->ops[first + other], &e->program->ops[first + op]), rank, op,
         other);
  }
  state->ended[rank] |= bit(op);
  if (rule->limit > 0) {
    uint64_t ended = state->ended[rank];
    int32_t now = __builtin_popcountll(rule->begun & ended) - __builtin_popcountll(rule->gone & ended);
    if (now > rule->limit) find(e, state, SLUICE_PIPELINE_FAULT_IN_FLIGHT, rank, op, NOTHING);
  }
}

/* ---- moves: each creates a new state from `from` if it is possible ---- */

static sluice_status_t keep(explorer_t* e, const state_t* state) {
  ++e->moves;
  uint64_t words[MAX_RANKS + MAX_RANKS / 8] = {0};
  memcpy(words, state->ended, (size_t)e->num_ranks * sizeof *words);
  if (e->replicas > 1) memcpy(words + e->num_ranks, state->running, MAX_RANKS);
  return sluice_state_set_add(&e->states, words);
}

static void load(const explorer_t* e, int64_t number, state_t* state) {
  const uint64_t* words = sluice_state_set_get(&e->states, number);
  memset(state->running, NOTHING, sizeof state->running);
  memcpy(state->ended, words, (size_t)e->num_ranks * sizeof *words);
  if (e->replicas > 1) memcpy(state->running, words + e->num_ranks, MAX_RANKS);
}

static int is_ready(const explorer_t* e, const state_t* state, int32_t rank, int32_t op) {
  return !(state->ended[rank] & bit(op)) && holds(state->ended[rank], e->rules[rank / e->replicas][op].needs);
}

static sluice_status_t move_message(explorer_t* e, const state_t* from, int32_t rank, int32_t op) {
  const rule_t* rule = &e->rules[rank / e->replicas][op];
  state_t to = *from;
  if (rule->is_send) {
    if (!e->options->is_buffered) return SLUICE_OK; /* it ends with its receive */
    end_op(e, &to, rank, op);
    return keep(e, &to);
  }
  if (rule->match == NOTHING) return SLUICE_OK;
  int32_t sender = rule->match_stage * e->replicas + rank % e->replicas;
  if (e->options->is_buffered) {
    if (!(from->ended[sender] & bit(rule->match))) return SLUICE_OK;
  } else {
    if (!is_ready(e, from, sender, rule->match)) return SLUICE_OK;
    end_op(e, &to, sender, rule->match);
  }
  end_op(e, &to, rank, op);
  return keep(e, &to);
}

/* Returns whether a replica may begin the collective by itself: the first replica chooses, and a plan has chosen for
 * all. */
static int may_begin(const explorer_t* e, const state_t* from, int32_t rank, int32_t op) {
  int32_t leader = rank - rank % e->replicas;
  if (rank == leader || e->program->policy->is_planned || e->options->followers_choose) return 1;
  return from->running[leader] == op;
}

static sluice_status_t move_collective(explorer_t* e, const state_t* from, int32_t rank, int32_t op) {
  if (!may_begin(e, from, rank, op)) return SLUICE_OK;
  state_t to = *from;
  int32_t leader = rank - rank % e->replicas, inside = 0;
  to.running[rank] = (int8_t)op;
  for (int32_t r = leader; r < leader + e->replicas; ++r) {
    inside += to.running[r] == op;
    if (to.running[r] != NOTHING && to.running[r] != op) {
      find(e, from, SLUICE_PIPELINE_FAULT_COLUMN_ORDER, rank, op, to.running[r]);
    }
  }
  for (int32_t r = leader; inside == e->replicas && r < leader + e->replicas; ++r) {
    to.running[r] = NOTHING;
    end_op(e, &to, r, op);
  }
  return keep(e, &to);
}

static sluice_status_t move(explorer_t* e, const state_t* from, int32_t rank, int32_t op) {
  const rule_t* rule = &e->rules[rank / e->replicas][op];
  if (rule->is_message) return move_message(e, from, rank, op);
  if (from->running[rank] != NOTHING) return SLUICE_OK;
  if (e->replicas > 1 && rule->is_collective) return move_collective(e, from, rank, op);
  state_t to = *from;
  end_op(e, &to, rank, op);
  return keep(e, &to);
}

/* Returns whether no policy chooses the order of this move relative to others. */
static int is_free_of_choice(const explorer_t* e, int32_t rank, int32_t op) {
  if (e->rules[rank / e->replicas][op].is_message || e->program->policy->is_planned) return 1;
  return rank % e->replicas > 0 && !e->options->followers_choose;
}

/* free_of_choice: makes only such moves, and only one. */
static sluice_status_t move_all(explorer_t* e, const state_t* from, int free_of_choice) {
  for (int32_t rank = 0; rank < e->num_ranks; ++rank) {
    uint64_t left = e->all[rank / e->replicas] & ~from->ended[rank];
    for (; left != 0; left &= left - 1) {
      int32_t op = __builtin_ctzll(left);
      if (!is_ready(e, from, rank, op) || (free_of_choice && !is_free_of_choice(e, rank, op))) continue;
      SLUICE_TRY(move(e, from, rank, op));
      if (free_of_choice && e->moves > 0) return SLUICE_OK;
    }
  }
  return SLUICE_OK;
}

/* Finds the first op that will never run, for the message. */
static void find_deadlock(explorer_t* e, const state_t* state) {
  for (int32_t rank = 0; rank < e->num_ranks; ++rank) {
    uint64_t left = e->all[rank / e->replicas] & ~state->ended[rank];
    if (left != 0) find(e, state, SLUICE_PIPELINE_FAULT_DEADLOCK, rank, __builtin_ctzll(left), NOTHING);
  }
}

static sluice_status_t explore(explorer_t* e) {
  state_t state = {.ended = {0}};
  memset(state.running, NOTHING, sizeof state.running);
  SLUICE_TRY(keep(e, &state));
  for (int64_t i = 0; i < e->states.count && e->finding->fault == SLUICE_PIPELINE_FAULT_NONE; ++i) {
    load(e, i, &state);
    e->moves = 0;
    if (e->options->is_reduced) SLUICE_TRY(move_all(e, &state, 1));
    if (e->moves == 0) SLUICE_TRY(move_all(e, &state, 0));
    if (e->moves == 0) find_deadlock(e, &state);
  }
  return SLUICE_OK;
}

/* ---- exploration ---- */

static sluice_status_t check_size(const sluice_pipeline_program_t* program,
                                  const sluice_pipeline_check_options_t* options) {
  SLUICE_TRY(SLUICE_REQUIRE(options->replicas >= 1 && options->replicas <= SLUICE_PIPELINE_CHECK_MAX_REPLICAS &&
                                program->spec.num_stages * options->replicas <= MAX_RANKS,
                            "pipeline: %d stages of %d replicas; at most %d ranks and %d replicas are explored",
                            program->spec.num_stages, options->replicas, MAX_RANKS,
                            SLUICE_PIPELINE_CHECK_MAX_REPLICAS));
  for (int32_t s = 0; s < program->spec.num_stages; ++s) {
    int32_t ops = program->first_op[s + 1] - program->first_op[s];
    SLUICE_TRY(
        SLUICE_REQUIRE(ops <= MAX_OPS, "pipeline: stage %d has %d ops; at most %d are explored", s, ops, MAX_OPS));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_pipeline_explore(const sluice_pipeline_program_t* program,
                                        const sluice_pipeline_check_options_t* options, sluice_allocator_t* allocator,
                                        sluice_pipeline_finding_t* out_finding, int64_t* out_states) {
  *out_finding = (sluice_pipeline_finding_t){.fault = SLUICE_PIPELINE_FAULT_NONE, .op = -1, .other = -1};
  if (out_states != NULL) *out_states = 0;
  SLUICE_TRY(check_size(program, options));
  explorer_t* e = sluice_alloc_zeroed(allocator, sizeof *e, "pipeline explorer");
  if (e == NULL) return sluice_alloc_status();
  e->program = program;
  e->options = options;
  e->num_stages = program->spec.num_stages;
  e->replicas = options->replicas;
  e->num_ranks = e->num_stages * e->replicas;
  e->finding = out_finding;
  for (int32_t i = 0; i < program->num_ops; ++i) set_rule(e, i);
  sluice_state_set_init(&e->states, e->num_ranks + (e->replicas > 1), allocator);
  sluice_status_t status = explore(e);
  if (out_states != NULL) *out_states = e->states.count;
  sluice_state_set_deinit(&e->states);
  sluice_free(allocator, e, sizeof *e);
  return status;
}

void sluice_pipeline_check_options_init(sluice_pipeline_check_options_t* options) {
  *options = (sluice_pipeline_check_options_t){.replicas = 1};
}

sluice_status_t sluice_pipeline_check(const sluice_pipeline_program_t* program,
                                      const sluice_pipeline_check_options_t* options, sluice_allocator_t* allocator,
                                      sluice_pipeline_finding_t* out_finding, int64_t* out_states) {
  if (out_states != NULL) *out_states = 0;
  sluice_pipeline_check_form(program, out_finding);
  if (out_finding->fault != SLUICE_PIPELINE_FAULT_NONE) return SLUICE_OK;
  return sluice_pipeline_explore(program, options, allocator, out_finding, out_states);
}
