// SPDX-License-Identifier: Apache-2.0
/* Inputs: every value is a function of its tensor and index, rounded to the layer's dtype. */
#include "capi/test/world/world_split.h"

#include <math.h>

enum { TOKENS = 6, WEIGHTS, GRAD_OUT, ROUTES = 99, HOT_ROUTES, ADAPTERS = 200 };

static double noise(uint64_t kind, uint64_t a, uint64_t b, uint64_t c) {
  uint64_t x = kind * 0x9e3779b97f4a7c15u ^ (a + 1) * 0xbf58476d1ce4e5b9u ^ (b + 1) * 0x94d049bb133111ebu ^
               (c + 1) * 0xd6e8feb86659fd93u;
  x ^= x >> 31, x *= 0x7fb5d329728ea185u, x ^= x >> 27, x *= 0x81dadef4bc2dd44du, x ^= x >> 33;
  return (double)(x >> 11) / 9007199254740992.0 * 2 - 1;
}

double world_rounded(int32_t dtype, double x) {
  double rounded = 0;
  set_element(&rounded, 0, dtype, x);
  return get_element(&rounded, 0, dtype);
}

/* The input that world_move has changed, for finite differences. */
static _Thread_local struct {
  int which;
  int64_t index;
  double delta;
} moved = {-1, 0, 0};

void world_move(int which, int64_t index, double delta) {
  moved.which = which, moved.index = index, moved.delta = delta;
}

static double shifted(int which, int64_t index, double x) {
  return moved.which == which && moved.index == index ? x + moved.delta : x;
}

int64_t world_tokens_before(const case_t* c, int32_t rank) {
  int64_t total = 0;
  for (int32_t r = 0; r < rank; ++r) total += c->tokens[r];
  return total;
}

double world_token_value(const case_t* c, int32_t rank, int64_t t, int64_t m) {
  double x = world_rounded(c->dtype, noise(TOKENS, (uint64_t)rank, (uint64_t)t, (uint64_t)m));
  return shifted(0, (world_tokens_before(c, rank) + t) * c->model_width + m, x);
}

float world_weight_value(const case_t* c, int32_t rank, int64_t t, int32_t k) {
  double x = 0.5 + 0.5 * noise(WEIGHTS, (uint64_t)rank, (uint64_t)t, (uint64_t)k);
  return (float)shifted(1, (world_tokens_before(c, rank) + t) * c->top_k + k, (float)x);
}

double world_grad_value(const case_t* c, int32_t rank, int64_t t, int64_t m) {
  return world_rounded(c->dtype, noise(GRAD_OUT, (uint64_t)rank, (uint64_t)t, (uint64_t)m));
}

/* The ranks of adapters differ, so that confusing two of them is an error. */
static int64_t rank_of(const case_t* c, int kind) {
  const int is_joint = (c->lora & WORLD_LORA_JOINT) || c->gated == SLUICE_GATED_INTERLEAVED;
  const int64_t less = kind >= LA2 ? 2 : kind >= LA3 && !is_joint ? 1 : 0;
  return c->lora_rank > less ? c->lora_rank - less : c->lora_rank > 0;
}

float world_lora_scale(int kind) { return kind >= LA2 ? 1.5f : kind >= LA3 ? 1.0f : 0.7f; }

int64_t world_param_rows(const case_t* c, int kind) {
  if (kind >= LA1 && (kind - LA1) % 2 == 0) return rank_of(c, kind);
  return kind == W2 || kind == B2 || kind == LB2 ? c->model_width : c->hidden_width;
}
int64_t world_param_cols(const case_t* c, int kind) {
  if (kind >= LA1 && (kind - LA1) % 2 == 1) return rank_of(c, kind);
  if (kind == LA2) return c->hidden_width;
  return kind == B1 || kind == B2 || kind == B3 ? 1 : kind == W2 ? c->hidden_width : c->model_width;
}
int64_t world_param_size(const case_t* c, int kind) { return world_param_rows(c, kind) * world_param_cols(c, kind); }

int world_param_trained(const case_t* c, int kind) {
  return world_param_used(c, kind) && (kind > W2 || c->lora_rank == 0);
}

int32_t world_param_dtype(const case_t* c, int kind) {
  return kind >= LA1 && c->lora_f32 ? SLUICE_DTYPE_F32 : c->dtype;
}

static int lora_used(const case_t* c, int kind) {
  if (kind >= LA2) return c->lora & WORLD_LORA_DOWN;
  if (kind <= LB1) return c->lora & WORLD_LORA_GATE;
  if (c->gated == SLUICE_GATED_INTERLEAVED) return kind == LB3 && (c->lora & WORLD_LORA_GATE);
  return c->gated && ((c->lora & WORLD_LORA_UP) || (kind == LB3 && (c->lora & WORLD_LORA_JOINT)));
}

int world_param_used(const case_t* c, int kind) {
  if (kind >= LA1) return lora_used(c, kind) != 0;
  if (kind == W3) return c->gated;
  if (kind == B3) return c->gated && c->bias;
  return kind == B1 || kind == B2 ? c->bias : 1;
}

double world_param_value(const case_t* c, int kind, int32_t e, int64_t i) {
  const int is_bias = kind >= B1 && kind <= B2;
  const uint64_t seed = (uint64_t)(kind >= LA1 ? ADAPTERS + kind : kind);
  double scale = is_bias ? 0.3 : 1.0 / sqrt((double)world_param_cols(c, kind));
  return shifted(2 + kind, (int64_t)e * world_param_size(c, kind) + i,
                 world_rounded(world_param_dtype(c, kind), scale * noise(seed, (uint64_t)e, (uint64_t)i, 0)));
}

/* To give one of E experts x times the mean load with K routes per token, x K / E of all first routes go to it. */
static int is_hot(const case_t* c, int32_t rank, int64_t t) {
  if (c->hot_expert < 0) return 0;
  double chance = (noise(HOT_ROUTES, (uint64_t)rank, (uint64_t)t, 0) + 1) / 2;
  return c->hot_times == 0 || chance < c->hot_times * c->top_k / c->num_experts;
}

int64_t world_expert(const case_t* c, int32_t rank, int64_t t, int32_t k) {
  int64_t flat = t * c->top_k + k;
  if (c->drop_every > 0 && flat % c->drop_every == c->drop_every - 1) return -1;
  if (c->repeat_every > 0 && k > 0 && t % c->repeat_every == 0) k = 0;
  if (k == 0 && is_hot(c, rank, t)) return c->hot_expert;
  int64_t first = (int64_t)((noise(ROUTES, (uint64_t)rank, (uint64_t)t, 0) + 1) / 2 * c->num_experts) % c->num_experts;
  int64_t id = (first + k) % c->num_experts;
  if (c->hot_expert >= 0 && id == c->hot_expert) id = (first + c->top_k) % c->num_experts;
  return id;
}

int32_t world_owner(const case_t* c, int32_t e) {
  if (!c->uneven_owners) return e / (c->num_experts / c->world_size);
  return e < c->world_size ? e : c->world_size - 1;
}

int64_t world_count(const case_t* c, int which) {
  if (which == 0) return world_tokens_before(c, c->world_size) * c->model_width;
  if (which == 1) return world_tokens_before(c, c->world_size) * c->top_k;
  return world_param_used(c, which - 2) ? c->num_experts * world_param_size(c, which - 2) : 0;
}
