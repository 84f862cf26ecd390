// SPDX-License-Identifier: Apache-2.0
/* Divides a budget among contexts: each gets the minimum that it needs, and the rest is divided in proportion. */
#include "backend/plan/budget_division.h"

/* Sizes in quarters of the first batch. */
static const int64_t QUARTERS[SLUICE_BUDGET_SIZES] = {4, 5, 6, 8, 12, 16, 24, 32};

int64_t sluice_budget_tokens(int64_t num_tokens, int32_t size) {
  const int64_t tokens = (num_tokens * QUARTERS[size] + 3) / 4;
  return tokens < INT32_MAX ? tokens : INT32_MAX;
}

/* Returns a * b / c, rounded down, for b <= c < 2^63. Computed bit by bit, since the product may need 128 bits. */
static uint64_t scaled(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t quotient = 0, rest = 0;
  for (int bit = 63; bit >= 0; --bit) {
    quotient *= 2, rest *= 2;
    if (rest >= c) ++quotient, rest -= c;
    if ((a >> bit & 1) != 0) rest += b;
    if (rest >= c) ++quotient, rest -= c;
  }
  return quotient;
}

typedef struct division_s {
  int32_t num_contexts, num_sizes;
  const uint64_t *weights, *needs;
} division_t;

static uint64_t need_of(const division_t* d, int32_t context, int32_t size) {
  return d->needs[(size_t)context * (size_t)d->num_sizes + (size_t)size];
}

/* Returns how many of the sizes fit, for all contexts together. */
static int32_t fitting_sizes(const division_t* d, uint64_t total) {
  for (int32_t size = 0; size < d->num_sizes; ++size) {
    uint64_t sum = 0;
    for (int32_t c = 0; c < d->num_contexts; ++c) sum += need_of(d, c, size);
    if (sum > total) return size;
  }
  return d->num_sizes;
}

/* Returns the weight by which the rest is divided: the additional need of the next size, so that batches between two
 * sizes fit as well. If all sizes fit, the rest is divided by rows. */
static uint64_t weight_of(const division_t* d, int32_t context, int32_t fitting) {
  if (fitting == d->num_sizes) return d->weights[context];
  return need_of(d, context, fitting) - need_of(d, context, fitting - 1);
}

sluice_status_t sluice_budget_division(uint64_t total, int32_t num_contexts, const uint64_t* weights, int32_t num_sizes,
                                       const uint64_t* needs, uint64_t* out_shares) {
  const division_t d = {num_contexts, num_sizes, weights, needs};
  const int32_t fitting = fitting_sizes(&d, total);
  if (num_sizes > 0 && fitting == 0) {
    return SLUICE_FAIL(SLUICE_E_OVER_BUDGET,
                       "sluice_budget_divide: the %d contexts need more than the %llu bytes of their memory_budget: "
                       "raise it to the sum of what they need, or pass fewer tokens at a time",
                       num_contexts, (unsigned long long)total);
  }
  uint64_t rest = total, weight = 0;
  for (int32_t c = 0; c < num_contexts; ++c) {
    out_shares[c] = num_sizes > 0 ? need_of(&d, c, fitting - 1) : 0;
    rest -= out_shares[c], weight += weight_of(&d, c, fitting);
  }
  for (int32_t c = 0; c < num_contexts; ++c) {
    out_shares[c] += scaled(rest, weight_of(&d, c, fitting), weight);
    if (out_shares[c] == 0) out_shares[c] = 1;
  }
  return SLUICE_OK;
}
