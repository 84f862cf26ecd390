// SPDX-License-Identifier: Apache-2.0
/* A slow gate in double, written from gate.h alone, and tensors for the tests of the gate. */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "sluice/gate.h"

enum { MAX_T = 40, MAX_E = 16 };

/* ---- tensors -------------------------------------------------------------------------------------------------- */

typedef struct {
  sluice_tensor_t tensor;
  int64_t shape[2], strides[2];
} test_tensor_t;

static inline const sluice_tensor_t* tensor_of(test_tensor_t* t, void* data, int code, int bits, int64_t rows,
                                               int64_t columns, int64_t row_stride, int64_t column_stride) {
  memset(t, 0, sizeof *t);
  t->shape[0] = rows, t->shape[1] = columns, t->strides[0] = row_stride, t->strides[1] = column_stride;
  t->tensor = (sluice_tensor_t){.data = data,
                                .device_type = SLUICE_DEVICE_CPU,
                                .ndim = columns < 0 ? 1 : 2,
                                .type_code = (uint8_t)code,
                                .type_bits = (uint8_t)bits,
                                .type_lanes = 1,
                                .shape = t->shape,
                                .strides = t->strides};
  return &t->tensor;
}
#define REAL_2D(t, data, rows, columns, stride) tensor_of(t, data, SLUICE_TYPE_FLOAT, 32, rows, columns, stride, 1)
#define REAL_1D(t, data, count)                 tensor_of(t, data, SLUICE_TYPE_FLOAT, 32, count, -1, 1, 0)
#define I64_1D(t, data, count)                  tensor_of(t, data, SLUICE_TYPE_INT, 64, count, -1, 1, 0)

static uint64_t gate_seed = 11;
static inline double gate_random(void) {
  gate_seed = gate_seed * 6364136223846793005u + 1442695040888963407u;
  return (double)(gate_seed >> 33) / 2147483648.0 * 2 - 1;
}

/* ---- the slow gate -------------------------------------------------------------------------------------------- */

typedef struct {
  int T, E, K;
  double logits[MAX_T][MAX_E], bias[MAX_E];
  double score[MAX_T][MAX_E];
  int id[MAX_T][MAX_E];   /* before dropping */
  int kept[MAX_T][MAX_E]; /* by k */
  double weight[MAX_T][MAX_E];
  int64_t counts[MAX_E];
  double aux, z;
} slow_t;

static inline void slow_scores(const sluice_gate_config_t* c, slow_t* s) {
  s->z = 0;
  for (int t = 0; t < s->T; ++t) {
    double sum = 0;
    for (int e = 0; e < s->E; ++e) sum += exp(s->logits[t][e]);
    for (int e = 0; e < s->E; ++e) {
      s->score[t][e] = c->score == SLUICE_SCORE_SOFTMAX ? exp(s->logits[t][e]) / sum : 1 / (1 + exp(-s->logits[t][e]));
    }
    s->z += log(sum) * log(sum) / s->T;
  }
}

/* The index of the greatest value not yet taken, the first of equals. */
static inline int slow_argmax(const double* value, const int* taken, int count) {
  int best = -1;
  for (int i = 0; i < count; ++i) {
    if (!taken[i] && (best < 0 || value[i] > value[best])) best = i;
  }
  return best;
}

static inline void slow_choose(const sluice_gate_config_t* c, slow_t* s) {
  memset(s->counts, 0, sizeof s->counts);
  for (int t = 0; t < s->T; ++t) {
    double choosing[MAX_E];
    int taken[MAX_E] = {0};
    for (int e = 0; e < s->E; ++e) choosing[e] = s->score[t][e] + s->bias[e];
    if (c->num_groups > 1) {
      int size = s->E / c->num_groups, group_taken[MAX_E] = {0}, top = c->group_score_top ? c->group_score_top : 2;
      double group[MAX_E];
      for (int g = 0; g < c->num_groups; ++g) {
        int used[MAX_E] = {0};
        group[g] = 0;
        for (int i = 0; i < (top < size ? top : size); ++i) {
          int at = slow_argmax(choosing + g * size, used, size);
          used[at] = 1;
          group[g] += choosing[g * size + at];
        }
      }
      for (int i = 0; i < c->top_groups; ++i) group_taken[slow_argmax(group, group_taken, c->num_groups)] = 1;
      for (int e = 0; e < s->E; ++e) taken[e] = !group_taken[e / size];
    }
    for (int k = 0; k < s->K; ++k) {
      int e = slow_argmax(choosing, taken, s->E);
      taken[e] = 1;
      s->id[t][k] = e;
      s->kept[t][k] = 1;
      ++s->counts[e];
    }
  }
}

/* One expert's routes are ranked by counting the routes that come before each. */
static inline void slow_drop(const sluice_gate_config_t* c, slow_t* s, int64_t capacity) {
  if (c->drop_policy == SLUICE_DROP_NONE) return;
  for (int t = 0; t < s->T; ++t) {
    for (int k = 0; k < s->K; ++k) {
      int64_t rank = 0;
      int e = s->id[t][k];
      for (int u = 0; u < s->T; ++u) {
        for (int j = 0; j < s->K; ++j) {
          if (s->id[u][j] != e) continue;
          if (c->drop_policy == SLUICE_DROP_POSITION) {
            rank += j < k || (j == k && u < t);
          } else {
            rank += s->score[u][e] > s->score[t][e] || (s->score[u][e] == s->score[t][e] && u < t);
          }
        }
      }
      s->kept[t][k] = rank < capacity;
    }
  }
}

/* Weights and losses for the choices that stand in s. */
static inline void slow_finish(const sluice_gate_config_t* c, slow_t* s) {
  double mean[MAX_E] = {0};
  for (int t = 0; t < s->T; ++t) {
    double sum = 0, all = 0;
    for (int k = 0; k < s->K; ++k) sum += s->kept[t][k] ? s->score[t][s->id[t][k]] : 0;
    for (int e = 0; e < s->E; ++e) all += s->score[t][e];
    for (int e = 0; e < s->E; ++e) mean[e] += s->score[t][e] / all / s->T;
    for (int k = 0; k < s->K; ++k) {
      double w = s->kept[t][k] ? s->score[t][s->id[t][k]] : 0;
      if (c->renormalize && s->kept[t][k]) w /= sum;
      s->weight[t][k] = w * (double)c->scaling;
    }
  }
  s->aux = 0;
  for (int e = 0; e < s->E && s->T > 0; ++e) s->aux += s->E * (double)s->counts[e] / (s->T * s->K) * mean[e];
}

static inline void slow_gate(const sluice_gate_config_t* c, slow_t* s, int64_t capacity) {
  slow_scores(c, s);
  slow_choose(c, s);
  slow_drop(c, s, capacity);
  slow_finish(c, s);
}
