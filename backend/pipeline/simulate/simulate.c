// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/simulate/simulate.h"

#include <math.h>

#include "backend/base/math.h"
#include "backend/pipeline/runner.h"

/* ---- events, in the order of their time; those of equal time in the order of insertion ---- */

typedef struct event_s {
  double time;
  int64_t number;
  int32_t op;
} event_t;

typedef struct event_queue_s {
  event_t* heap; /* memory for all events, owned by the caller */
  int32_t count;
  int64_t added;
} event_queue_t;

static int event_before(const event_t* a, const event_t* b) {
  return a->time < b->time || (a->time <= b->time && a->number < b->number);
}

static void event_swap(event_t* a, event_t* b) {
  event_t kept = *a;
  *a = *b;
  *b = kept;
}

static void event_add(event_queue_t* queue, double time, int32_t op) {
  int32_t at = queue->count++;
  queue->heap[at] = (event_t){time, queue->added++, op};
  for (; at > 0 && event_before(&queue->heap[at], &queue->heap[(at - 1) / 2]); at = (at - 1) / 2) {
    event_swap(&queue->heap[at], &queue->heap[(at - 1) / 2]);
  }
}

/* The queue must not be empty. */
static event_t event_take(event_queue_t* queue) {
  event_t first = queue->heap[0];
  queue->heap[0] = queue->heap[--queue->count];
  for (int32_t at = 0, least = 0;; at = least) {
    for (int32_t child = 2 * at + 1; child <= 2 * at + 2 && child < queue->count; ++child) {
      if (event_before(&queue->heap[child], &queue->heap[least])) least = child;
    }
    if (least == at) return first;
    event_swap(&queue->heap[at], &queue->heap[least]);
  }
}

/* ---- network cards ---- */

/* Messages that share network cards: each stage has one card, and its outgoing messages share one direction, its
 * incoming ones the other. Rates are max-min fair, and change whenever a message begins or ends. */
typedef struct card_flow_s {
  int32_t op;
  int32_t from, to; /* stages */
  double left_s;    /* at full rate */
  double rate;      /* share of a card, in (0, 1] */
  int32_t is_fixed; /* its rate, while rates are distributed */
} card_flow_t;

typedef struct cards_s {
  card_flow_t* flows; /* memory for all flows in flight, owned by the caller */
  int32_t count;
  double now_s; /* time for which left_s is valid */
} cards_t;

/* One direction of a card, while rates are distributed. */
typedef struct side_s {
  double room;      /* unassigned capacity */
  int32_t num_open; /* number of flows whose rate is not fixed */
} side_t;

typedef struct sides_s {
  side_t out[SLUICE_PIPELINE_MAX_STAGES], in[SLUICE_PIPELINE_MAX_STAGES];
} sides_t;

static double share_of(const side_t* side) { return side->num_open > 0 ? side->room / side->num_open : INFINITY; }

/* Returns the least capacity per open flow of any side: that of the side that fills up first. */
static double least_share(const cards_t* cards, const sides_t* sides) {
  double least = INFINITY;
  for (int32_t i = 0; i < cards->count; ++i) {
    const card_flow_t* flow = &cards->flows[i];
    if (flow->is_fixed) continue;
    least = fmin(least, fmin(share_of(&sides->out[flow->from]), share_of(&sides->in[flow->to])));
  }
  return least;
}

static void fix(card_flow_t* flow, sides_t* sides, double rate) {
  side_t* both[] = {&sides->out[flow->from], &sides->in[flow->to]};
  flow->rate = rate;
  flow->is_fixed = 1;
  for (int32_t i = 0; i < 2; ++i) {
    both[i]->room = fmax(0, both[i]->room - rate);
    --both[i]->num_open;
  }
}

/* Progressive filling: the flows of the side that fills up first get its share, then the rest is distributed. */
static void share_out(cards_t* cards) {
  sides_t sides;
  for (int32_t s = 0; s < SLUICE_PIPELINE_MAX_STAGES; ++s) sides.out[s] = sides.in[s] = (side_t){.room = 1};
  for (int32_t i = 0; i < cards->count; ++i) {
    cards->flows[i].is_fixed = 0;
    ++sides.out[cards->flows[i].from].num_open;
    ++sides.in[cards->flows[i].to].num_open;
  }
  for (double least = least_share(cards, &sides); !isinf(least); least = least_share(cards, &sides)) {
    for (int32_t i = 0; i < cards->count; ++i) {
      card_flow_t* flow = &cards->flows[i];
      if (flow->is_fixed) continue;
      if (fmin(share_of(&sides.out[flow->from]), share_of(&sides.in[flow->to])) <= least) fix(flow, &sides, least);
    }
  }
}

static void advance(cards_t* cards, double now_s) {
  for (int32_t i = 0; i < cards->count; ++i) {
    card_flow_t* flow = &cards->flows[i];
    flow->left_s = fmax(0, flow->left_s - (now_s - cards->now_s) * flow->rate);
  }
  cards->now_s = now_s;
}

/* A message begins at now_s, which never decreases. */
static void cards_add(cards_t* cards, double now_s, int32_t op, int32_t from, int32_t to, double seconds) {
  advance(cards, now_s);
  cards->flows[cards->count++] = (card_flow_t){.op = op, .from = from, .to = to, .left_s = seconds};
  share_out(cards);
}

static int32_t find_next(const cards_t* cards) {
  int32_t next = -1;
  for (int32_t i = 0; i < cards->count; ++i) {
    const card_flow_t *flow = &cards->flows[i], *best = next >= 0 ? &cards->flows[next] : NULL;
    if (best == NULL || flow->left_s * best->rate < best->left_s * flow->rate) next = i;
  }
  return next;
}

/* Returns the end of the next message; infinity if none is in flight. */
static double cards_next_end(const cards_t* cards) {
  const int32_t next = find_next(cards);
  return next < 0 ? INFINITY : cards->now_s + cards->flows[next].left_s / cards->flows[next].rate;
}

/* Removes the message that ends next, at now_s, and returns its op. There must be one. */
static int32_t cards_take(cards_t* cards, double now_s) {
  const int32_t next = find_next(cards), op = cards->flows[next].op;
  advance(cards, now_s);
  cards->flows[next] = cards->flows[--cards->count];
  share_out(cards);
  return op;
}

/* ---- a batch ---- */

#define NOBODY (-1)
/* Times that differ only by rounding of sums count as the same moment. */
#define SAME_MOMENT 1e-9

/* A message, by its send. */
typedef struct message_s {
  uint8_t is_sent, is_awaited, has_arrived; /* posted at its two ends; arrived */
  int32_t next;                             /* in the queue of its link */
} message_t;

typedef struct link_s {
  int32_t first, last; /* sends that wait for it */
  int32_t is_busy;
} link_t;

typedef struct simulation_s {
  const sluice_pipeline_program_t* program;
  const sluice_pipeline_times_t* times;
  sluice_pipeline_result_t* result;
  double now;
  double *begin, *end;
  event_queue_t events;
  message_t* messages; /* by op */
  link_t* links;       /* p · p */
  cards_t cards;
  int32_t wrong_op; /* op with invalid seconds; NOBODY */
  uint64_t bytes[SLUICE_PIPELINE_MAX_STAGES];
  int32_t in_flight[SLUICE_PIPELINE_MAX_VIRTUAL_STAGES];
  int32_t of_stage[SLUICE_PIPELINE_MAX_STAGES];
  int32_t held[SLUICE_PIPELINE_MAX_STAGES];
  int32_t running[SLUICE_PIPELINE_MAX_STAGES];
  double reduced_s[SLUICE_PIPELINE_MAX_STAGES]; /* end of the last reduction that has begun */
  sluice_runner_t runners[SLUICE_PIPELINE_MAX_STAGES];
} simulation_t;

/* ---- times ---- */

static double usual_seconds(const simulation_t* s, const sluice_stage_op_t* op) {
  const sluice_pipeline_times_t* times = s->times;
  int32_t c = op->virtual_stage;
  double seconds = 0;
  if (sluice_stage_op_is_message(op->kind)) {
    int32_t edge = op->kind == SLUICE_STAGE_SEND_ACTIVATION ? c : c - 1;
    seconds = times->latency_s[edge] + (double)s->program->spec.message_bytes[edge] * times->s_per_byte[edge];
  } else if (op->kind == SLUICE_STAGE_FORWARD) {
    seconds = times->forward_s[c];
  } else if (op->kind == SLUICE_STAGE_BACKWARD) {
    seconds = times->backward_s[c] + (s->program->spec.separate_wgrad ? 0 : times->weight_s[c]);
  } else if (op->kind == SLUICE_STAGE_WEIGHT_GRAD) {
    seconds = times->weight_s[c];
  } else if (op->kind == SLUICE_STAGE_REDUCE) {
    seconds = times->reduce_s[c];
  }
  return seconds;
}

static double seconds_of(simulation_t* s, int32_t index) {
  const sluice_stage_op_t* op = &s->program->ops[index];
  const double usual = usual_seconds(s, op);
  if (s->times->seconds_of == NULL || op->kind == SLUICE_STAGE_FLUSH) return usual;
  const double seconds = s->times->seconds_of(s->times->user, op, s->now, usual);
  if (isfinite(seconds) && seconds >= 0) return seconds;
  if (s->wrong_op == NOBODY) s->wrong_op = index;
  return 0;
}

static sluice_status_t check_times(const sluice_pipeline_program_t* program, const sluice_pipeline_times_t* times) {
  for (int32_t c = 0; c < sluice_pipeline_num_virtual_stages(&program->spec); ++c) {
    const double all[] = {times->forward_s[c], times->backward_s[c], times->weight_s[c],
                          times->reduce_s[c],  times->latency_s[c],  times->s_per_byte[c]};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) {
      SLUICE_TRY(SLUICE_REQUIRE(isfinite(all[i]) && all[i] >= 0,
                                "pipeline: a time of virtual stage %d is %g; give finite seconds of at least 0", c,
                                all[i]));
    }
  }
  return SLUICE_OK;
}

/* ---- micro-batches in flight ---- */

static void note_bytes(simulation_t* s, int32_t stage) {
  sluice_stage_result_t* result = &s->result->stages[stage];
  result->peak_bytes = sluice_max_u64(result->peak_bytes, s->bytes[stage]);
}

static void count_begin(simulation_t* s, const sluice_stage_op_t* op) {
  if (op->kind != SLUICE_STAGE_FORWARD || s->program->spec.forward_only) return;
  int32_t c = op->virtual_stage, stage = op->stage;
  sluice_stage_result_t* result = &s->result->stages[stage];
  ++s->in_flight[c];
  ++s->of_stage[stage];
  s->bytes[stage] += s->program->spec.activation_bytes[c];
  s->result->most_in_flight[c] = (int32_t)sluice_max(s->result->most_in_flight[c], s->in_flight[c]);
  result->most_in_flight = (int32_t)sluice_max(result->most_in_flight, s->of_stage[stage]);
  note_bytes(s, stage);
}

static void count_end(simulation_t* s, const sluice_stage_op_t* op) {
  int32_t c = op->virtual_stage, stage = op->stage;
  const sluice_pipeline_spec_t* spec = &s->program->spec;
  sluice_stage_result_t* result = &s->result->stages[stage];
  if (op->kind == SLUICE_STAGE_BACKWARD) {
    --s->in_flight[c];
    --s->of_stage[stage];
    s->bytes[stage] -= spec->activation_bytes[c];
    if (!spec->separate_wgrad) return;
    ++s->held[stage];
    s->bytes[stage] += spec->held_bytes[c];
    result->most_held = (int32_t)sluice_max(result->most_held, s->held[stage]);
    note_bytes(s, stage);
  } else if (op->kind == SLUICE_STAGE_WEIGHT_GRAD) {
    --s->held[stage];
    s->bytes[stage] -= spec->held_bytes[c];
  }
}

/* ---- moments ---- */

static void begin(simulation_t* s, int32_t op) {
  s->begin[op] = s->now;
  count_begin(s, &s->program->ops[op]);
}

static void end(simulation_t* s, int32_t index) {
  const sluice_stage_op_t* op = &s->program->ops[index];
  s->end[index] = s->now;
  const int is_beside = sluice_stage_op_is_message(op->kind) || op->kind == SLUICE_STAGE_REDUCE;
  if (!is_beside) s->result->stages[op->stage].busy_s += s->now - s->begin[index];
  count_end(s, op);
  if (s->running[op->stage] == index) s->running[op->stage] = NOBODY;
  sluice_runner_end(&s->runners[op->stage], index);
}

static link_t* link_of(const simulation_t* s, const sluice_stage_op_t* send) {
  return &s->links[send->stage * s->program->spec.num_stages + send->peer];
}

static void start_if_free(simulation_t* s, link_t* link) {
  if (link->is_busy || link->first == NOBODY) return;
  int32_t send = link->first;
  link->first = s->messages[send].next;
  link->is_busy = 1;
  s->begin[send] = s->now;
  int32_t receive = s->program->ops[send].match;
  if (receive >= 0) s->begin[receive] = s->now;
  const double seconds = seconds_of(s, send);
  if (s->times->shares_cards) {
    const sluice_stage_op_t* op = &s->program->ops[send];
    cards_add(&s->cards, s->now, send, op->stage, op->peer, seconds);
  } else {
    event_add(&s->events, s->now + seconds, send);
  }
}

static void queue_on_link(simulation_t* s, int32_t send) {
  link_t* link = link_of(s, &s->program->ops[send]);
  s->messages[send].next = NOBODY;
  if (link->first == NOBODY) {
    link->first = send;
  } else {
    s->messages[link->last].next = send;
  }
  link->last = send;
  start_if_free(s, link);
}

static void post(simulation_t* s, int32_t index) {
  const sluice_stage_op_t* op = &s->program->ops[index];
  int is_send = sluice_stage_op_is_send(op->kind), is_buffered = s->times->is_buffered;
  int32_t send = is_send ? index : op->match;
  if (send < 0) return; /* no stage sends it: the simulation will find the stage waiting */
  message_t* message = &s->messages[send];
  if (is_send) {
    message->is_sent = 1;
  } else {
    message->is_awaited = 1;
  }
  if (is_buffered ? is_send : message->is_sent && message->is_awaited) queue_on_link(s, send);
  if (is_buffered && (is_send || message->has_arrived)) end(s, index);
}

static void end_message(simulation_t* s, int32_t send) {
  const sluice_stage_op_t* op = &s->program->ops[send];
  message_t* message = &s->messages[send];
  link_t* link = link_of(s, op);
  message->has_arrived = 1;
  link->is_busy = 0;
  start_if_free(s, link);
  if (s->times->is_buffered) {
    s->end[send] = s->now; /* for its time on the link: the op itself ended when it was posted */
  } else {
    end(s, send);
  }
  if (message->is_awaited && op->match >= 0) end(s, op->match);
}

static void end_event(simulation_t* s, int32_t op) {
  if (sluice_stage_op_is_message(s->program->ops[op].kind)) {
    end_message(s, op);
  } else {
    end(s, op);
  }
}

/* Returns whether anything was posted or begun. */
static int move(simulation_t* s, int32_t stage) {
  int has_moved = 0;
  for (int32_t op; (op = sluice_runner_next_post(&s->runners[stage])) >= 0; has_moved = 1) post(s, op);
  return has_moved;
}

static void reduce(simulation_t* s, int32_t op, int32_t stage) {
  s->begin[op] = fmax(s->now, s->reduced_s[stage]);
  s->reduced_s[stage] = s->begin[op] + seconds_of(s, op);
  event_add(&s->events, s->reduced_s[stage], op);
}

static int choose(simulation_t* s, int32_t stage) {
  if (s->running[stage] != NOBODY) return 0;
  int32_t op = sluice_runner_next(&s->runners[stage]);
  if (op < 0) return 0;
  if (s->program->ops[op].kind == SLUICE_STAGE_REDUCE) {
    reduce(s, op, stage);
    return 1;
  }
  s->running[stage] = op;
  if (sluice_stage_op_is_message(s->program->ops[op].kind)) {
    post(s, op);
  } else {
    begin(s, op);
    event_add(&s->events, s->now + seconds_of(s, op), op);
  }
  return 1;
}

/* Returns the time of the next end; infinity if there is none. */
static double next_end(const simulation_t* s) {
  const double event_s = s->events.count > 0 ? s->events.heap[0].time : INFINITY;
  return fmin(event_s, cards_next_end(&s->cards));
}

static int is_now(const simulation_t* s, double time) { return time <= s->now + SAME_MOMENT * (1 + s->now); }

/* Everything that happens at the next moment, including messages that take no time, before stages choose. */
static void end_moment(simulation_t* s) {
  for (;;) {
    while (s->events.count > 0 && is_now(s, s->events.heap[0].time)) end_event(s, event_take(&s->events).op);
    while (is_now(s, cards_next_end(&s->cards))) end_event(s, cards_take(&s->cards, s->now));
    int has_moved = 0;
    for (int32_t stage = 0; stage < s->program->spec.num_stages; ++stage) has_moved |= move(s, stage);
    if (!has_moved && !is_now(s, next_end(s))) return;
  }
}

static void run(simulation_t* s) {
  for (;;) {
    end_moment(s);
    int has_chosen = 0;
    for (int32_t stage = 0; stage < s->program->spec.num_stages; ++stage) has_chosen |= choose(s, stage);
    if (has_chosen) continue; /* a message of a blocking plan may have ended at once */
    const double next_s = next_end(s);
    if (isinf(next_s)) return;
    s->now = next_s;
  }
}

/* ---- results ---- */

static sluice_status_t finish(const simulation_t* s) {
  sluice_pipeline_result_t* result = s->result;
  if (s->wrong_op != NOBODY) {
    char text[128];
    sluice_stage_op_describe(&s->program->ops[s->wrong_op], text, sizeof text);
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "pipeline: the time of %s is negative or not finite; return seconds of at least 0", text);
  }
  int32_t p = s->program->spec.num_stages;
  double busy = 0;
  result->makespan_s = s->now;
  for (int32_t stage = 0; stage < p; ++stage) {
    const sluice_runner_t* runner = &s->runners[stage];
    if (!sluice_runner_is_done(runner)) {
      return SLUICE_FAIL(SLUICE_E_INTERNAL, "pipeline: stage %d has run %d of %d ops, and no further op can run", stage,
                         runner->num_ended, runner->num_ops);
    }
    sluice_stage_result_t* of_stage = &result->stages[stage];
    of_stage->bubble = result->makespan_s > 0 ? 1 - of_stage->busy_s / result->makespan_s : 0;
    busy += of_stage->busy_s;
  }
  result->bubble = result->makespan_s > 0 ? 1 - busy / (p * result->makespan_s) : 0;
  return SLUICE_OK;
}

static sluice_status_t run_all(simulation_t* s, sluice_allocator_t* allocator) {
  int32_t p = s->program->spec.num_stages, made = 0;
  sluice_status_t status = SLUICE_OK;
  for (; made < p && status == SLUICE_OK; ++made) {
    s->running[made] = NOBODY;
    status = sluice_runner_init(&s->runners[made], s->program, made, allocator);
  }
  if (status == SLUICE_OK) {
    run(s);
    status = finish(s);
  } else {
    --made;
  }
  for (int32_t stage = 0; stage < made; ++stage) sluice_runner_deinit(&s->runners[stage], allocator);
  return status;
}

sluice_status_t sluice_pipeline_simulate(const sluice_pipeline_program_t* program, const sluice_pipeline_times_t* times,
                                         sluice_allocator_t* allocator, sluice_pipeline_result_t* out_result,
                                         double* out_begin, double* out_end) {
  *out_result = (sluice_pipeline_result_t){.makespan_s = 0};
  SLUICE_TRY(check_times(program, times));
  uint64_t ops = (uint64_t)program->num_ops, p = (uint64_t)program->spec.num_stages;
  uint64_t fixed = sluice_align_up(sizeof(simulation_t)), event_bytes = ops * sizeof(event_t);
  uint64_t time_bytes = 2 * ops * sizeof(double), link_bytes = sluice_align_up(p * p * sizeof(link_t));
  uint64_t message_bytes = sluice_align_up(ops * sizeof(message_t));
  uint64_t flow_bytes = times->shares_cards ? p * p * sizeof(card_flow_t) : 0;
  uint64_t bytes = fixed + event_bytes + time_bytes + link_bytes + message_bytes + flow_bytes;
  char* memory = sluice_alloc_zeroed(allocator, bytes, "pipeline simulation");
  if (memory == NULL) return sluice_alloc_status();
  simulation_t* s = (simulation_t*)(void*)memory;
  s->program = program;
  s->times = times;
  s->result = out_result;
  s->events.heap = (event_t*)(void*)(memory + fixed);
  double* own_times = (double*)(void*)(memory + fixed + event_bytes);
  s->begin = out_begin != NULL ? out_begin : own_times;
  s->end = out_end != NULL ? out_end : own_times + ops;
  s->links = (link_t*)(void*)(memory + fixed + event_bytes + time_bytes);
  s->messages = (message_t*)(void*)(memory + fixed + event_bytes + time_bytes + link_bytes);
  s->cards.flows = (card_flow_t*)(void*)((char*)s->messages + message_bytes);
  s->wrong_op = NOBODY;
  for (uint64_t i = 0; i < p * p; ++i) s->links[i].first = NOBODY;
  sluice_status_t status = run_all(s, allocator);
  sluice_free(allocator, memory, bytes);
  return status;
}
