// SPDX-License-Identifier: Apache-2.0
#include "backend/calibrate/pass_samples.h"

#include <string.h>

#include "backend/cost/fit.h"

#define LEAST_ROUNDS 3

const sluice_pass_kind_t sluice_pass_kinds[KINDS] = {
    [FEW] = {SLUICE_PASSES_FEW, 1, FEW},      [FEW_IN_2] = {SLUICE_PASSES_FEW, 2, FEW},
    [FEW_IN_4] = {SLUICE_PASSES_FEW, 4, FEW}, [FEW_IN_8] = {SLUICE_PASSES_FEW, 8, FEW},
    [MANY] = {SLUICE_PASSES_MANY, 1, MANY},   [MANY_IN_4] = {SLUICE_PASSES_MANY, 4, MANY},
    [FULL] = {SLUICE_PASSES_FULL, 1, FULL},   [FULL_IN_4] = {SLUICE_PASSES_FULL, 4, FULL},
};
/* The most informative kinds first: later ones are skipped if there is no time. */
static const int32_t by_worth[KINDS] = {FEW, FEW_IN_2, MANY, FULL, MANY_IN_4, FULL_IN_4, FEW_IN_4, FEW_IN_8};

static sluice_status_t sample(sluice_pass_samples_t* p, int32_t kind, int32_t round) {
  double seconds[PARTS][2];
  SLUICE_TRY(p->source->sample(p->source->user, sluice_pass_kinds[kind].tokens, sluice_pass_kinds[kind].chunks,
                               seconds[WHOLE], seconds[COMPUTE]));
  for (int32_t part = 0; part < PARTS; ++part) {
    for (int32_t d = 0; d < 2; ++d) p->samples[kind][part][d][round] = seconds[part][d];
  }
  return SLUICE_OK;
}

/* Runs passes that do not count: they allocate slots, build templates, and let "auto" decide. */
static sluice_status_t warm_up(sluice_pass_samples_t* p, int32_t kind) {
  SLUICE_TRY(sample(p, kind, 0));
  SLUICE_TRY(sample(p, kind, 0));
  p->took[kind] = p->samples[kind][WHOLE][0][0] + p->samples[kind][WHOLE][1][0];
  return p->source->longest(p->source->user, &p->took[kind], 1);
}

/* An upper bound: time grows at most in proportion to the tokens of the kinds tried before. */
static double guess(const sluice_pass_samples_t* p, int32_t kind) {
  const int32_t known = p->has[sluice_pass_kinds[kind].whole] ? sluice_pass_kinds[kind].whole
                        : p->has[MANY]                        ? MANY
                                                              : FEW;
  return p->took[known] * (double)sluice_pass_kinds[kind].tokens / (double)sluice_pass_kinds[known].tokens;
}

static sluice_status_t find_kinds(sluice_pass_samples_t* p, double seconds) {
  double round = 0, left = seconds;
  for (int32_t i = 0; i < KINDS; ++i) {
    const int32_t kind = by_worth[i],
                  needed = sluice_pass_kinds[kind].tokens == SLUICE_PASSES_FEW && sluice_pass_kinds[kind].chunks <= 2;
    if (sluice_pass_kinds[kind].chunks > 1 && p->source->work.world_size == 1)
      continue; /* a single rank has nothing to overlap */
    if (sluice_pass_kinds[kind].chunks > 1 && !p->has[sluice_pass_kinds[kind].whole]) continue;
    if (!needed && LEAST_ROUNDS * (round + guess(p, kind)) > left) continue;
    SLUICE_TRY(warm_up(p, kind));
    left -= 2 * p->took[kind];
    if (!needed && LEAST_ROUNDS * (round + p->took[kind]) > left) continue;
    round += p->took[kind], p->has[kind] = 1;
  }
  double rounds = left / (round + 1e-9);
  p->num_rounds = rounds < LEAST_ROUNDS           ? LEAST_ROUNDS
                  : rounds > SLUICE_PASSES_ROUNDS ? SLUICE_PASSES_ROUNDS
                                                  : (int32_t)rounds;
  return SLUICE_OK;
}

sluice_status_t sluice_pass_samples_take(const sluice_passes_source_t* source, double seconds,
                                         sluice_pass_samples_t* p) {
  memset(p, 0, sizeof *p);
  p->source = source;
  SLUICE_TRY(find_kinds(p, seconds));
  for (int32_t round = 0; round < p->num_rounds; ++round) {
    for (int32_t i = 0; i < KINDS; ++i) {
      if (p->has[i]) SLUICE_TRY(sample(p, i, round));
    }
  }
  for (int32_t i = 0; i < KINDS; ++i) {
    for (int32_t k = 0; k < 2 * PARTS && p->has[i]; ++k) {
      p->measured[i][k / 2][k % 2] = sluice_median(p->samples[i][k / 2][k % 2], p->num_rounds);
    }
  }
  return p->source->longest(p->source->user, &p->measured[0][0][0], KINDS * PARTS * 2);
}
