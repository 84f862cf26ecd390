// SPDX-License-Identifier: Apache-2.0
/* Takes random walks through the interleavings of a program. */
#include <string.h>

#include "backend/base/check.h"
#include "backend/pipeline/check/check.h"
#include "backend/pipeline/check/conflicts.h"
#include "backend/pipeline/runner.h"

#define NOTHING (-1)

/* One replica of one stage. */
typedef struct rank_s {
  sluice_runner_t runner;
  uint8_t* has_ended; /* by op of the stage */
  int32_t* posted;    /* messages that have not ended */
  int32_t num_posted;
  int32_t running; /* op of the program that the thread runs */
  int32_t is_idle; /* the policy had no op, and nothing has changed since */
} rank_t;

typedef enum move_kind_e { BEGIN, END, SEND_ENDS, MESSAGE_ENDS } move_kind_t;

typedef struct move_s {
  move_kind_t kind;
  int32_t rank, op;
} move_t;

typedef struct walk_s {
  const sluice_pipeline_program_t* program;
  const sluice_pipeline_check_options_t* options;
  int32_t replicas, num_ranks;
  rank_t* ranks; /* stage · replicas + replica */
  move_t* moves; /* the possible ones */
  int32_t num_moves;
  int64_t num_events;
  uint64_t random;
  sluice_pipeline_finding_t* finding;
} walk_t;

/* splitmix64. */
static uint64_t draw(walk_t* w) {
  uint64_t x = w->random += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

static void find(walk_t* w, int32_t fault, int32_t rank, int32_t op, int32_t other) {
  if (w->finding->fault != SLUICE_PIPELINE_FAULT_NONE) return;
  *w->finding = (sluice_pipeline_finding_t){fault, op, other, rank % w->replicas, w->num_events};
}

static const sluice_stage_op_t* op_of(const walk_t* w, int32_t op) { return &w->program->ops[op]; }

static int is_collective(const walk_t* w, int32_t op) {
  int32_t c = op_of(w, op)->virtual_stage;
  return w->replicas > 1 && c >= 0 && sluice_stage_op_is_collective(&w->program->spec, op_of(w, op)->kind, c);
}

/* ---- faults ---- */

/* An op uses its slots from its begin to its end: everything that it conflicts with must have ended. */
static void check_begin(walk_t* w, int32_t r, int32_t op) {
  const rank_t* rank = &w->ranks[r];
  for (int32_t i = rank->runner.first_op; i < op; ++i) {
    if (rank->has_ended[i - rank->runner.first_op]) continue;
    int32_t fault = sluice_stage_conflict(op_of(w, i), op_of(w, op));
    if (fault != SLUICE_PIPELINE_FAULT_NONE) find(w, fault, r, op, i);
  }
}

static int32_t count(const walk_t* w, const rank_t* rank, int32_t kind, int32_t c) {
  int32_t ended = 0;
  for (int32_t i = 0; i < rank->runner.num_ops; ++i) {
    const sluice_stage_op_t* op = op_of(w, rank->runner.first_op + i);
    ended += rank->has_ended[i] && op->kind == kind && op->virtual_stage == c;
  }
  return ended;
}

static void check_limits(walk_t* w, int32_t r, int32_t index) {
  const sluice_pipeline_spec_t* spec = &w->program->spec;
  const rank_t* rank = &w->ranks[r];
  const sluice_stage_op_t* op = op_of(w, index);
  int32_t c = op->virtual_stage;
  int is_over = 0;
  if (op->kind == SLUICE_STAGE_FORWARD && !spec->forward_only) {
    is_over = count(w, rank, SLUICE_STAGE_FORWARD, c) - count(w, rank, SLUICE_STAGE_BACKWARD, c) > spec->in_flight[c];
  } else if (op->kind == SLUICE_STAGE_BACKWARD && spec->separate_wgrad) {
    is_over = count(w, rank, SLUICE_STAGE_BACKWARD, c) - count(w, rank, SLUICE_STAGE_WEIGHT_GRAD, c) > spec->held[c];
  }
  if (is_over) find(w, SLUICE_PIPELINE_FAULT_IN_FLIGHT, r, index, NOTHING);
}

/* ---- ranks ---- */

static void post(walk_t* w, int32_t r, int32_t op) {
  check_begin(w, r, op);
  w->ranks[r].posted[w->ranks[r].num_posted++] = op;
}

static void post_all(walk_t* w, int32_t r) {
  for (int32_t op; (op = sluice_runner_next_post(&w->ranks[r].runner)) >= 0;) post(w, r, op);
}

static void end(walk_t* w, int32_t r, int32_t op) {
  rank_t* rank = &w->ranks[r];
  rank->has_ended[op - rank->runner.first_op] = 1;
  rank->is_idle = 0;
  if (rank->running == op) rank->running = NOTHING;
  sluice_runner_end(&rank->runner, op);
  check_limits(w, r, op);
  post_all(w, r);
}

static void end_posted(walk_t* w, int32_t r, int32_t op) {
  rank_t* rank = &w->ranks[r];
  for (int32_t i = 0; i < rank->num_posted; ++i) {
    if (rank->posted[i] == op) rank->posted[i--] = rank->posted[--rank->num_posted];
  }
  end(w, r, op);
}

static int is_posted(const rank_t* rank, int32_t op) {
  for (int32_t i = 0; i < rank->num_posted; ++i) {
    if (rank->posted[i] == op) return 1;
  }
  return 0;
}

/* Chooses the next op of a rank. Replicas other than the first run the collective op of the first one. */
static int32_t choose(walk_t* w, int32_t r) {
  rank_t *rank = &w->ranks[r], *leader = &w->ranks[r - r % w->replicas];
  if (rank->runner.follows && leader->running != NOTHING && is_collective(w, leader->running) &&
      sluice_runner_take(&rank->runner, leader->running)) {
    return leader->running;
  }
  return sluice_runner_next(&rank->runner);
}

static void begin(walk_t* w, int32_t r) {
  rank_t* rank = &w->ranks[r];
  int32_t op = choose(w, r);
  rank->is_idle = op < 0;
  if (op < 0) return;
  rank->running = op;
  if (sluice_stage_op_is_message(op_of(w, op)->kind)) {
    post(w, r, op);
    return;
  }
  check_begin(w, r, op);
  if (!is_collective(w, op)) return;
  for (int32_t other = r - r % w->replicas; other < r - r % w->replicas + w->replicas; ++other) {
    int32_t running = w->ranks[other].running;
    w->ranks[other].is_idle = 0;
    if (running != NOTHING && running != op && is_collective(w, running)) {
      find(w, SLUICE_PIPELINE_FAULT_COLUMN_ORDER, r, op, running);
    }
  }
}

/* ---- a walk ---- */

static void add_move(walk_t* w, move_kind_t kind, int32_t rank, int32_t op) {
  w->moves[w->num_moves++] = (move_t){kind, rank, op};
}

static int all_inside(const walk_t* w, int32_t r, int32_t op) {
  for (int32_t other = r - r % w->replicas; other < r - r % w->replicas + w->replicas; ++other) {
    if (w->ranks[other].running != op) return 0;
  }
  return 1;
}

static void add_message_moves(walk_t* w, int32_t r) {
  const rank_t* rank = &w->ranks[r];
  for (int32_t i = 0; i < rank->num_posted; ++i) {
    int32_t index = rank->posted[i];
    const sluice_stage_op_t* op = op_of(w, index);
    if (sluice_stage_op_is_send(op->kind)) {
      if (w->options->is_buffered) add_move(w, SEND_ENDS, r, index);
      continue;
    }
    if (op->match < 0) continue;
    const rank_t* sender = &w->ranks[op_of(w, op->match)->stage * w->replicas + r % w->replicas];
    int is_there =
        w->options->is_buffered ? sender->has_ended[op->match - sender->runner.first_op] : is_posted(sender, op->match);
    if (is_there) add_move(w, MESSAGE_ENDS, r, index);
  }
}

static void list_moves(walk_t* w) {
  w->num_moves = 0;
  for (int32_t r = 0; r < w->num_ranks; ++r) {
    const rank_t* rank = &w->ranks[r];
    add_message_moves(w, r);
    if (rank->running == NOTHING) {
      if (!rank->is_idle) add_move(w, BEGIN, r, NOTHING);
    } else if (!sluice_stage_op_is_message(op_of(w, rank->running)->kind)) {
      if (!is_collective(w, rank->running) || all_inside(w, r, rank->running)) add_move(w, END, r, rank->running);
    }
  }
}

static void make_move(walk_t* w, move_t move) {
  int32_t first = move.rank - move.rank % w->replicas;
  ++w->num_events;
  switch (move.kind) {
    case BEGIN: begin(w, move.rank); break;
    case END:
      if (!is_collective(w, move.op)) {
        end(w, move.rank, move.op);
        break;
      }
      for (int32_t r = first; r < first + w->replicas; ++r) end(w, r, move.op);
      break;
    case SEND_ENDS: end_posted(w, move.rank, move.op); break;
    case MESSAGE_ENDS:
      if (!w->options->is_buffered) {
        int32_t send = op_of(w, move.op)->match;
        end_posted(w, op_of(w, send)->stage * w->replicas + move.rank % w->replicas, send);
      }
      end_posted(w, move.rank, move.op);
      break;
  }
}

static void find_deadlock(walk_t* w) {
  for (int32_t r = 0; r < w->num_ranks; ++r) {
    const rank_t* rank = &w->ranks[r];
    for (int32_t i = 0; i < rank->runner.num_ops; ++i) {
      if (!rank->has_ended[i]) find(w, SLUICE_PIPELINE_FAULT_DEADLOCK, r, rank->runner.first_op + i, NOTHING);
    }
  }
}

static void walk(walk_t* w) {
  for (int32_t r = 0; r < w->num_ranks; ++r) post_all(w, r);
  for (list_moves(w); w->num_moves > 0 && w->finding->fault == SLUICE_PIPELINE_FAULT_NONE; list_moves(w)) {
    make_move(w, w->moves[draw(w) % (uint64_t)w->num_moves]);
  }
  find_deadlock(w);
}

/* ---- memory ---- */

static uint64_t ops_of(const walk_t* w, int32_t r) {
  int32_t stage = r / w->replicas;
  return (uint64_t)(w->program->first_op[stage + 1] - w->program->first_op[stage]);
}

static uint64_t rank_bytes(const walk_t* w, int32_t r) { return sluice_align_up(ops_of(w, r) * (sizeof(int32_t) + 1)); }

/* memory: rank_bytes for each rank. */
static sluice_status_t begin_walk(walk_t* w, char* memory, sluice_allocator_t* allocator) {
  w->num_events = 0;
  for (int32_t r = 0; r < w->num_ranks; ++r) {
    w->ranks[r] = (rank_t){.posted = (int32_t*)(void*)memory, .running = NOTHING};
    w->ranks[r].has_ended = (uint8_t*)memory + ops_of(w, r) * sizeof(int32_t);
    memset(w->ranks[r].has_ended, 0, ops_of(w, r));
    memory += rank_bytes(w, r);
  }
  for (int32_t r = 0; r < w->num_ranks; ++r) {
    rank_t* rank = &w->ranks[r];
    SLUICE_TRY(sluice_runner_init(&rank->runner, w->program, r / w->replicas, allocator));
    rank->runner.follows = r % w->replicas > 0 && !w->options->followers_choose;
  }
  return SLUICE_OK;
}

static void end_walk(walk_t* w, sluice_allocator_t* allocator) {
  for (int32_t r = 0; r < w->num_ranks; ++r) {
    if (w->ranks[r].runner.ready != NULL) sluice_runner_deinit(&w->ranks[r].runner, allocator);
  }
}

sluice_status_t sluice_pipeline_sample(const sluice_pipeline_program_t* program,
                                       const sluice_pipeline_check_options_t* options, int64_t walks, uint64_t seed,
                                       sluice_allocator_t* allocator, sluice_pipeline_finding_t* out_finding) {
  sluice_pipeline_check_form(program, out_finding);
  if (out_finding->fault != SLUICE_PIPELINE_FAULT_NONE) return SLUICE_OK;
  SLUICE_TRY(SLUICE_REQUIRE(options->replicas >= 1 && options->replicas <= SLUICE_PIPELINE_CHECK_MAX_REPLICAS,
                            "pipeline: %d replicas; give 1 to %d", options->replicas,
                            SLUICE_PIPELINE_CHECK_MAX_REPLICAS));
  walk_t w = {
      .program = program, .options = options, .replicas = options->replicas, .random = seed, .finding = out_finding};
  w.num_ranks = program->spec.num_stages * w.replicas;
  /* A rank has a move for each posted message and one for its thread. */
  uint64_t num_moves = (uint64_t)program->num_ops * (uint64_t)w.replicas + (uint64_t)w.num_ranks;
  uint64_t head =
      sluice_align_up((uint64_t)w.num_ranks * sizeof *w.ranks) + sluice_align_up(num_moves * sizeof *w.moves);
  uint64_t bytes = head;
  for (int32_t r = 0; r < w.num_ranks; ++r) bytes += rank_bytes(&w, r);
  char* memory = sluice_alloc_zeroed(allocator, bytes, "walks through a pipeline");
  if (memory == NULL) return sluice_alloc_status();
  w.ranks = (rank_t*)(void*)memory;
  w.moves = (move_t*)(void*)(memory + sluice_align_up((uint64_t)w.num_ranks * sizeof *w.ranks));
  sluice_status_t status = SLUICE_OK;
  for (int64_t i = 0; i < walks && status == SLUICE_OK && out_finding->fault == SLUICE_PIPELINE_FAULT_NONE; ++i) {
    status = begin_walk(&w, memory + head, allocator);
    if (status == SLUICE_OK) walk(&w);
    end_walk(&w, allocator);
  }
  sluice_free(allocator, memory, bytes);
  return status;
}
