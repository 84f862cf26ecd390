// SPDX-License-Identifier: Apache-2.0
/* Base case, runs, and comparison of results for world.h. */
#include "capi/test/world/world_split.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void* rank_main(void* argument) {
  world_run_rank(argument);
  return NULL;
}

void world_make_result(const case_t* c, result_t* out) {
  memset(out, 0, sizeof *out);
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    int64_t size = c->num_experts * world_param_size(c, kind);
    out->grad_params[kind] = calloc((size_t)size + 1, sizeof(double));
    for (int i = 0; i < 2 && c->moves; ++i) out->board[i][kind] = calloc((size_t)size + 1, sizeof(double));
  }
}

const int32_t world_pre_activations[3] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE};

case_t world_small_case(void) {
  return (case_t){.world_size = 1,
                  .tokens = {13, 9, 17, 5},
                  .model_width = 11,
                  .hidden_width = 19,
                  .num_experts = 12,
                  .top_k = 2,
                  .num_chunks = 1,
                  .dtype = SLUICE_DTYPE_F32,
                  .activation = SLUICE_ACTIVATION_GELU,
                  .restore_input = SLUICE_RESTORE_KEEP,
                  .restore_pre_activation = SLUICE_RESTORE_KEEP,
                  .hot_expert = -1};
}

double world_tolerance(const case_t* c) {
  switch (c->dtype) {
    case SLUICE_DTYPE_F64: return 3e-7;
    case SLUICE_DTYPE_F32: return 5e-6;
    case SLUICE_DTYPE_F16: return 1e-2;
    default: return 6e-2;
  }
}

const char* case_text(const case_t* c) {
  static char text[512];
  snprintf(
      text, sizeof text,
      "W %d by %d n %d T %lld M %lld H %lld K %d E %d dtype %d act %d gated %d bias %d wgrad %d restore %d %d reuse "
      "%d dedup %d capacity %lld grouping %d chunking %d callbacks %d halves %d lora %d moves %d budget %llu",
      c->world_size, c->ranks_per_node, c->num_chunks, (long long)c->tokens[0], (long long)c->model_width,
      (long long)c->hidden_width, c->top_k, c->num_experts, c->dtype, c->activation, c->gated, c->bias, c->wgrad_mode,
      c->restore_input, c->restore_pre_activation, c->reuse_saved, c->deduplicate, (long long)c->capacity, c->grouping,
      c->chunking, c->callback_experts, c->separate_wgrad, c->lora, c->moves, (unsigned long long)c->budget);
  return text;
}

void world_run(const case_t* c, result_t* out) {
  world_make_result(c, out);
  sluice_local_group_t* group = NULL;
  if (c->world_size > 1 && sluice_local_group_create(c->world_size, &group) != SLUICE_OK) abort();
  pthread_t threads[WORLD_MAX_RANKS];
  rank_t ranks[WORLD_MAX_RANKS];
  for (int32_t r = 0; r < c->world_size; ++r) {
    ranks[r] = (rank_t){c, out, group, r};
    pthread_create(&threads[r], NULL, rank_main, &ranks[r]);
  }
  for (int32_t r = 0; r < c->world_size; ++r) pthread_join(threads[r], NULL);
  sluice_local_group_destroy(group);
}

void world_free(result_t* result) {
  for (int r = 0; r < WORLD_MAX_RANKS; ++r) {
    free(result->out[r]);
    free(result->grad_tokens[r]);
    free(result->grad_weights[r]);
  }
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    free(result->grad_params[kind]);
    free(result->board[0][kind]);
    free(result->board[1][kind]);
  }
}

static double distance(const double* a, const double* b, int64_t count) {
  double worst = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (isnan(a[i]) && !isnan(b[i])) return -1;
    double d = fabs(a[i] - b[i]) / (1 + fabs(b[i]));
    if (d > worst) worst = d;
  }
  return worst;
}

double world_distance(const case_t* c, const result_t* a, const result_t* b) {
  double worst = 0;
  for (int32_t r = 0; r < c->world_size; ++r) {
    const double d[] = {distance(a->out[r], b->out[r], c->tokens[r] * c->model_width),
                        distance(a->grad_tokens[r], b->grad_tokens[r], c->tokens[r] * c->model_width),
                        distance(a->grad_weights[r], b->grad_weights[r], c->tokens[r] * c->top_k)};
    for (int i = 0; i < 3; ++i) {
      if (d[i] < 0) return -1;
      if (d[i] > worst) worst = d[i];
    }
  }
  for (int kind = 0; kind < NUM_PARAMS && !c->callback_experts; ++kind) {
    double d = distance(a->grad_params[kind], b->grad_params[kind], c->num_experts * world_param_size(c, kind));
    if (d < 0) return -1;
    if (d > worst) worst = d;
  }
  return worst;
}

int world_identical(const case_t* c, const result_t* a, const result_t* b, int params) {
  for (int32_t r = 0; r < c->world_size; ++r) {
    size_t bytes = (size_t)(c->tokens[r] * c->model_width) * sizeof(double);
    if (memcmp(a->out[r], b->out[r], bytes) != 0 || memcmp(a->grad_tokens[r], b->grad_tokens[r], bytes) != 0) return 0;
    if (memcmp(a->grad_weights[r], b->grad_weights[r], (size_t)(c->tokens[r] * c->top_k) * sizeof(double)) != 0)
      return 0;
  }
  for (int kind = 0; params && kind < NUM_PARAMS; ++kind) {
    size_t bytes = (size_t)(c->num_experts * world_param_size(c, kind)) * sizeof(double);
    if (memcmp(a->grad_params[kind], b->grad_params[kind], bytes) != 0) return 0;
  }
  return 1;
}

/* Runs one rank on this thread, which has the changed input. */
double world_objective(const case_t* c, int which, int64_t index, double delta) {
  world_move(which, index, delta);
  result_t result;
  world_make_result(c, &result);
  rank_t rank = {c, &result, NULL, 0};
  world_run_rank(&rank);
  world_move(-1, 0, 0);
  double sum = 0;
  for (int64_t t = 0; t < c->tokens[0]; ++t) {
    for (int64_t m = 0; m < c->model_width; ++m)
      sum += result.out[0][t * c->model_width + m] * world_grad_value(c, 0, t, m);
  }
  world_free(&result);
  return sum;
}

/* ---- the layer's own plan, and its rule that divides rows into chunks ---- */

#define MOST_BLOCKS 64

/* Counts the rows of all ranks by block and receiving rank. */
static void count_blocks(const case_t* c, int32_t num_blocks, int64_t table[MOST_BLOCKS][WORLD_MAX_RANKS]) {
  memset(table, 0, MOST_BLOCKS * sizeof *table);
  for (int32_t from = 0; from < c->world_size; ++from) {
    for (int32_t g = 0; g < num_blocks; ++g) {
      for (int64_t t = c->tokens[from] * g / num_blocks; t < c->tokens[from] * (g + 1) / num_blocks; ++t) {
        for (int32_t k = 0; k < c->top_k; ++k) {
          int64_t e = world_expert(c, from, t, k);
          if (e >= 0) ++table[g][world_owner(c, (int32_t)e)];
        }
      }
    }
  }
}

/* Blocks form a chunk while no rank receives more than chunk_rows. Writes this rank's rows by chunk; returns n. */
static int32_t rows_by_chunk(const case_t* c, const sluice_plan_info_t* info, int32_t rank, int64_t* rows,
                             int32_t* out_kept) {
  int64_t table[MOST_BLOCKS][WORLD_MAX_RANKS], so_far[WORLD_MAX_RANKS] = {0};
  int32_t most_blocks = (info->num_blocks + info->num_chunks - 1) / info->num_chunks, n = 0;
  count_blocks(c, info->num_blocks, table);
  *out_kept = 0;
  for (int32_t first = 0, end = 0; first < info->num_blocks; first = end, ++n) {
    int64_t sums[WORLD_MAX_RANKS] = {0}, most = 0;
    for (end = first; end < info->num_blocks && end - first < most_blocks; ++end) {
      most = 0;
      for (int32_t w = 0; w < c->world_size; ++w)
        most = sums[w] + table[end][w] > most ? sums[w] + table[end][w] : most;
      if (most > info->chunk_rows && end > first) break;
      for (int32_t w = 0; w < c->world_size; ++w) sums[w] += table[end][w];
    }
    rows[n] = sums[rank], most = 0;
    for (int32_t w = 0; w < c->world_size; ++w) {
      so_far[w] += sums[w];
      if (so_far[w] > most) most = so_far[w];
    }
    if (most <= info->kept_rows) *out_kept = n + 1;
  }
  return n;
}

sluice_status_t world_use_plan(rank_t* r, sluice_moe_t* moe) {
  const case_t* c = r->c;
  sluice_plan_t* plan = NULL;
  sluice_plan_info_t info = {.struct_size = sizeof info};
  int64_t rows[256], sent = 0;
  int32_t kept = 0;
  uint64_t step = 0, outstanding = (uint64_t)c->plan->max_outstanding;
  sluice_status_t status = sluice_plan_create(moe, c->plan, &plan);
  if (status == SLUICE_OK) status = sluice_moe_use_plan(moe, plan);
  if (status == SLUICE_OK) status = sluice_plan_get_info(plan, &info);
  if (status == SLUICE_OK) {
    int32_t n = rows_by_chunk(c, &info, r->rank, rows, &kept);
    for (int64_t t = 0; t < c->tokens[r->rank]; ++t) {
      for (int32_t k = 0; k < c->top_k; ++k) sent += world_expert(c, r->rank, t, k) >= 0;
    }
    status = sluice_plan_predict_step(plan, n, rows, kept, c->tokens[r->rank], sent, &step);
  }
  r->out->planned_bytes[r->rank] = info.total_bytes;
  r->out->predicted_bytes[r->rank] = info.total_bytes - outstanding * info.step_bytes + outstanding * step;
  r->out->lent_bytes[r->rank] = info.gemm_bytes;
  sluice_plan_destroy(plan);
  return status;
}
