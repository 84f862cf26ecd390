// SPDX-License-Identifier: Apache-2.0
/* Checksums of consecutive floats. */
#include <string.h>

#include "backend/base/math.h"
#include "backend/optim/file/state_file.h"

enum { WORDS = SLUICE_STATE_SUM_LANES, STRIPE = SLUICE_STATE_SUM_STRIPE };

#define FACTOR UINT64_C(0x9e3779b185ebca87)

static inline uint64_t turn(uint64_t lane, uint64_t word) {
  lane = (lane ^ word) * FACTOR;
  return lane << 29 | lane >> 35;
}

void sluice_state_sum_begin(sluice_state_sum_t* sum) {
  *sum = (sluice_state_sum_t){.count = 0};
  for (int i = 0; i < WORDS; ++i) sum->lanes[i] = turn(FACTOR, (uint64_t)i);
}

/* Unrolled by hand to stay in registers and to overlap the multiplications of the lanes. */
static void take_stripes(uint64_t* lanes, const float* data, int64_t stripes) {
  uint64_t a = lanes[0], b = lanes[1], c = lanes[2], d = lanes[3], e = lanes[4], f = lanes[5], g = lanes[6],
           h = lanes[7];
  for (int64_t i = 0; i < stripes; ++i, data += STRIPE) {
    uint64_t w[WORDS];
    memcpy(w, data, sizeof w);
    a = turn(a, w[0]), b = turn(b, w[1]), c = turn(c, w[2]), d = turn(d, w[3]);
    e = turn(e, w[4]), f = turn(f, w[5]), g = turn(g, w[6]), h = turn(h, w[7]);
  }
  lanes[0] = a, lanes[1] = b, lanes[2] = c, lanes[3] = d, lanes[4] = e, lanes[5] = f, lanes[6] = g, lanes[7] = h;
}

void sluice_state_sum_add(sluice_state_sum_t* sum, const float* data, int64_t count) {
  const int64_t held = sum->count % STRIPE;
  sum->count += count;
  if (held > 0) {
    const int64_t taken = sluice_min(STRIPE - held, count);
    memcpy(sum->rest + held, data, (size_t)taken * sizeof *data);
    data += taken, count -= taken;
    if (held + taken < STRIPE) return;
    take_stripes(sum->lanes, sum->rest, 1);
  }
  take_stripes(sum->lanes, data, count / STRIPE);
  const int64_t left = count % STRIPE;
  if (left > 0) memcpy(sum->rest, data + (count - left), (size_t)left * sizeof *data);
}

uint64_t sluice_state_sum_end(const sluice_state_sum_t* sum) {
  float last[STRIPE] = {0.0F};
  uint64_t lanes[WORDS], all = turn(FACTOR, (uint64_t)sum->count);
  memcpy(last, sum->rest, (size_t)(sum->count % STRIPE) * sizeof *last);
  memcpy(lanes, sum->lanes, sizeof lanes);
  take_stripes(lanes, last, 1);
  for (int i = 0; i < WORDS; ++i) all = turn(all, lanes[i]);
  return turn(all ^ all >> 32, 0);
}
