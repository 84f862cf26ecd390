// SPDX-License-Identifier: Apache-2.0
#include "backend/cost/closed_forms.h"

#include <math.h>

#define ABSENT (-1.0)

enum { COMM = SLUICE_STREAM_COMM, COMP = SLUICE_STREAM_COMP, MEM = SLUICE_STREAM_MEM, STREAMS = 3 };

void sluice_footprint(int64_t rows, int64_t model_width, int64_t hidden_width, int32_t num_experts, int32_t num_chunks,
                      sluice_paper_footprint_t* out) {
  double b = (double)rows, m = (double)model_width, h = (double)hidden_width, n = num_chunks;
  out->states = 4 * (num_experts * m + 2 * h * m);
  out->activations = 4 * b * m + b * h;
  out->temporaries = b * m + b * h;
  out->pipelined_temporaries = 4 * b * m + b * h;
  /* One chunk shares nothing. The printed equation counts two buffers of T_DI and T_DO, and would be negative. */
  out->saving = num_chunks == 1 ? 0 : b * (2 * m * (n - 2) / n + h * (n - 1) / n);
  out->saved_share = 2 * out->saving / (out->states + out->activations + out->pipelined_temporaries);
}

sluice_alphas_t sluice_no_interference(void) {
  sluice_alphas_t alphas;
  for (int32_t y = 0; y < STREAMS; ++y) {
    for (int32_t x = 0; x <= SLUICE_STREAM_ALL; ++x) alphas.alpha[y][x] = 1;
  }
  return alphas;
}

/* A phase in which these streams run, each with the given seconds of work; ABSENT: it does not run. */
static double phase(const sluice_alphas_t* alphas, double comm, double comp, double mem) {
  const double work[STREAMS] = {comm, comp, mem};
  double longest = 0;
  int32_t running = 0, sum = 0;
  for (int32_t y = 0; y < STREAMS; ++y) {
    if (work[y] >= 0) ++running, sum += y;
  }
  for (int32_t y = 0; y < STREAMS; ++y) {
    if (work[y] < 0) continue;
    const double share = running == 1   ? 1
                         : running == 2 ? alphas->alpha[y][sum - y] /* the other running stream */
                                        : alphas->alpha[y][SLUICE_STREAM_ALL];
    longest = fmax(longest, work[y] / share);
  }
  return longest;
}

static double one_chunk(int32_t paradigm, sluice_chunk_times_t t, const sluice_alphas_t* a) {
  switch (paradigm) {
    case SLUICE_PARADIGM_COPY_AFTER: return t.dispatch + t.compute + phase(a, t.combine, ABSENT, t.copy);
    case SLUICE_PARADIGM_COPY_BEFORE: return phase(a, t.dispatch, ABSENT, t.copy) + t.compute + t.combine;
    default: return t.dispatch + t.compute + t.combine;
  }
}

double sluice_mpmoe_pass(int32_t paradigm, int32_t n, sluice_chunk_times_t t, const sluice_alphas_t* a) {
  if (n == 1) return one_chunk(paradigm, t, a);
  double s = t.dispatch, c = t.compute, r = t.combine, x = t.copy, middle = (double)n - 2;
  switch (paradigm) {
    case SLUICE_PARADIGM_COPY_AFTER:
      return s + phase(a, s, c, ABSENT) + middle * phase(a, s + r, c, x) + phase(a, r, c, x) + phase(a, r, ABSENT, x);
    case SLUICE_PARADIGM_COPY_BEFORE:
      return phase(a, s, ABSENT, x) + phase(a, s, c, x) + middle * phase(a, s + r, c, x) + phase(a, r, c, ABSENT) + r;
    default: return s + phase(a, s, c, ABSENT) + middle * phase(a, s + r, c, ABSENT) + phase(a, r, c, ABSENT) + r;
  }
}

double sluice_mpipemoe_pass(int32_t n, sluice_chunk_times_t t, const sluice_alphas_t* a) {
  return n * phase(a, t.dispatch + t.combine, t.compute, t.copy > 0 ? t.copy : ABSENT);
}
