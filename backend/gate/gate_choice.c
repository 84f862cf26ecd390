// SPDX-License-Identifier: Apache-2.0
#include "backend/gate/gate_choice.h"

#include <math.h>
#include <string.h>

#include "backend/base/structs.h"

/* ---- config --------------------------------------------------------------------------------------------------- */

static const sluice_gate_config_t defaults = {
    .struct_size = sizeof(sluice_gate_config_t),
    .top_k = 1,
    .capacity_factor = 1.0f,
    .scaling = 1.0f,
};

void sluice_gate_config_init(sluice_gate_config_t* out_config, size_t struct_size) {
  sluice_struct_init(out_config, struct_size, &defaults, sizeof defaults);
}

static sluice_status_t check_groups(const sluice_gate_config_t* c) {
  if (c->num_groups < 0 || (c->num_groups > 0 && c->num_experts % c->num_groups != 0)) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "sluice_gate_config_t.num_groups is %d: want 0 (no groups) or a divisor of num_experts = %d",
                       (int)c->num_groups, (int)c->num_experts);
  }
  if (c->num_groups <= 1) return SLUICE_OK;
  if (c->top_groups < 1 || c->top_groups > c->num_groups) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "sluice_gate_config_t.top_groups is %d: want 1 to num_groups = %d groups kept per token",
                       (int)c->top_groups, (int)c->num_groups);
  }
  int32_t group_size = c->num_experts / c->num_groups;
  if (c->group_score_top < 0 || c->group_score_top > group_size) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "sluice_gate_config_t.group_score_top is %d: want 0 (2) to %d, the experts of one group",
                       (int)c->group_score_top, (int)group_size);
  }
  if ((int64_t)c->top_groups * group_size < c->top_k) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "sluice_gate_config_t: %d groups of %d experts leave fewer than top_k = %d to choose from; "
                       "raise top_groups",
                       (int)c->top_groups, (int)group_size, (int)c->top_k);
  }
  return SLUICE_OK;
}

static sluice_status_t check_capacity(const sluice_gate_config_t* c) {
  if (c->drop_policy < SLUICE_DROP_NONE || c->drop_policy > SLUICE_DROP_SCORE) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_gate_config_t.drop_policy is %d: want a SLUICE_DROP_* value",
                       (int)c->drop_policy);
  }
  if (c->capacity < 0 || c->min_capacity < 0) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "sluice_gate_config_t: capacity %lld and min_capacity %lld must not be negative",
                       (long long)c->capacity, (long long)c->min_capacity);
  }
  if (!(c->capacity_factor >= 0) || isinf(c->capacity_factor)) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "sluice_gate_config_t.capacity_factor is %g: want a finite number >= 0",
                       (double)c->capacity_factor);
  }
  return SLUICE_OK;
}

sluice_status_t sluice_gate_config_read(const sluice_gate_config_t* config, sluice_gate_config_t* out_config) {
  sluice_gate_config_t c = defaults;
  SLUICE_TRY(sluice_struct_copy(&c, sizeof c, config, sizeof c, "sluice_gate_config_t"));
  if (c.next != NULL) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "sluice_gate_config_t.next: no optional block is known here (got type %d); pass NULL",
                       (int)c.next->type);
  }
  if (c.num_experts < 1) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_gate_config_t.num_experts is %d: want at least 1",
                       (int)c.num_experts);
  }
  if (c.top_k < 1 || c.top_k > c.num_experts) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_gate_config_t.top_k is %d: want 1 to num_experts = %d",
                       (int)c.top_k, (int)c.num_experts);
  }
  if (c.score != SLUICE_SCORE_SOFTMAX && c.score != SLUICE_SCORE_SIGMOID) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_gate_config_t.score is %d: want a SLUICE_SCORE_* value",
                       (int)c.score);
  }
  if (c.renormalize != 0 && c.renormalize != 1) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_gate_config_t.renormalize is %d: want 0 or 1",
                       (int)c.renormalize);
  }
  SLUICE_TRY(check_groups(&c));
  SLUICE_TRY(check_capacity(&c));
  *out_config = c;
  return SLUICE_OK;
}

int64_t sluice_gate_capacity(const sluice_gate_config_t* c, int64_t num_tokens) {
  int64_t routes = num_tokens * c->top_k;
  int64_t capacity = c->capacity;
  if (capacity == 0) {
    double exact = (double)routes / c->num_experts * (double)c->capacity_factor;
    /* 10 * 1.1f is a little above 11, and 11 is meant: the factor is known to half an ulp of f32 only. */
    double whole = nearbyint(exact);
    double needed = fabs(exact - whole) <= exact * 0x1p-24 ? whole : ceil(exact);
    capacity = needed >= (double)routes ? routes : (int64_t)needed;
    if (capacity < c->min_capacity) capacity = c->min_capacity;
  }
  return capacity < num_tokens ? capacity : num_tokens; /* a token chooses an expert at most once */
}

/* ---- scores --------------------------------------------------------------------------------------------------- */

double sluice_gate_scores(const sluice_gate_config_t* c, const float* logits, float* scores) {
  float greatest = logits[0];
  for (int32_t e = 1; e < c->num_experts; ++e) greatest = logits[e] > greatest ? logits[e] : greatest;
  double sum = 0;
  for (int32_t e = 0; e < c->num_experts; ++e) {
    scores[e] = expf(logits[e] - greatest);
    sum += (double)scores[e];
  }
  if (c->score == SLUICE_SCORE_SOFTMAX) {
    for (int32_t e = 0; e < c->num_experts; ++e) scores[e] = (float)((double)scores[e] / sum);
  } else {
    for (int32_t e = 0; e < c->num_experts; ++e) {
      float z = expf(-fabsf(logits[e]));
      scores[e] = (logits[e] < 0 ? z : 1.0f) / (1.0f + z);
    }
  }
  return (double)greatest + log(sum);
}

/* ---- choices -------------------------------------------------------------------------------------------------- */

/* True when a comes before b; equal values keep their order. */
static int better(float a, float b) { return a > b || (isnan(b) && !isnan(a)); }

/* Keeps the best `most` of what it is offered, best first. Returns how many it holds now. */
static int32_t keep_best(float* best, int32_t* at, int32_t held, int32_t most, float value, int32_t index) {
  if (held == most && !better(value, best[held - 1])) return held;
  int32_t i = held < most ? held : most - 1;
  for (; i > 0 && better(value, best[i - 1]); --i) {
    best[i] = best[i - 1];
    at[i] = at[i - 1];
  }
  best[i] = value;
  at[i] = index;
  return held < most ? held + 1 : most;
}

static int64_t up(int64_t bytes) { return (bytes + 15) / 16 * 16; }

sluice_status_t sluice_gate_room_create(const sluice_gate_config_t* c, sluice_gate_room_t* out_room) {
  int64_t floats = up((int64_t)c->num_experts * (int64_t)sizeof(float));
  sluice_gate_room_t room = {.bytes = 4 * floats + c->num_experts};
  char* base = sluice_alloc(sluice_process_allocator(), (uint64_t)room.bytes, "gate: choices of a token");
  if (base == NULL) return sluice_alloc_status();
  room.choosing = (float*)base;
  room.best = (float*)(base + floats);
  room.at = (int32_t*)(base + 2 * floats);
  room.group_score = (float*)(base + 3 * floats);
  room.allowed = base + 4 * floats;
  *out_room = room;
  return SLUICE_OK;
}

void sluice_gate_room_destroy(sluice_gate_room_t* room) {
  sluice_free(sluice_process_allocator(), room->choosing, (uint64_t)room->bytes);
}

/* allowed[g] for the top_groups groups with the best sums of their best scores. */
static void choose_groups(const sluice_gate_config_t* c, sluice_gate_room_t* room) {
  int32_t size = c->num_experts / c->num_groups, top = c->group_score_top == 0 ? 2 : c->group_score_top;
  for (int32_t g = 0; g < c->num_groups; ++g) {
    int32_t held = 0;
    float sum = 0;
    for (int32_t e = g * size; e < (g + 1) * size; ++e) {
      held = keep_best(room->best, room->at, held, top, room->choosing[e], e);
    }
    for (int32_t i = 0; i < held; ++i) sum += room->best[i];
    room->group_score[g] = sum;
  }
  int32_t held = 0;
  for (int32_t g = 0; g < c->num_groups; ++g) {
    held = keep_best(room->best, room->at, held, c->top_groups, room->group_score[g], g);
  }
  for (int32_t g = 0; g < c->num_groups; ++g) room->allowed[g] = 0;
  for (int32_t i = 0; i < held; ++i) room->allowed[room->at[i]] = 1;
}

void sluice_gate_choose(const sluice_gate_config_t* c, const float* scores, const float* bias, int64_t bias_stride,
                        sluice_gate_room_t* room, int32_t* ids) {
  int32_t groups = c->num_groups > 1 ? c->num_groups : 1, size = c->num_experts / groups, held = 0;
  for (int32_t e = 0; e < c->num_experts; ++e) {
    room->choosing[e] = bias == NULL ? scores[e] : scores[e] + bias[e * bias_stride];
  }
  if (groups > 1) choose_groups(c, room);
  for (int32_t g = 0; g < groups; ++g) {
    if (groups > 1 && !room->allowed[g]) continue;
    for (int32_t e = g * size; e < (g + 1) * size; ++e) {
      held = keep_best(room->best, room->at, held, c->top_k, room->choosing[e], e);
    }
  }
  memcpy(ids, room->at, (size_t)c->top_k * sizeof *ids);
}
