// SPDX-License-Identifier: Apache-2.0
/* Several batch sizes alternate, without a budget. Each size gets its own answer, for any skew of the loads. */

#include "capi/test/tuner/tuner_world.h"
#include "third_party/bazel/test.h"

enum { STEPS = 400, SETTLED = 64 };

/* Loads differ between sizes, and slightly between batches of one size. */
TEST(Sizes_DifferentlyUneven_EachSettles) {
  for (int32_t i = 0; i < 4; ++i) {
    const int32_t has_machine = i % 2;
    tuner_world_t* w = tuner_world(2, SLUICE_TUNER_ADAPTIVE, has_machine);
    w->changes = 1 + i / 2, w->uneven = 1, w->top_k = 2, w->layers = 1, w->steps = STEPS, w->waits = SETTLED;
    run_and_agree(w);
    const int32_t num_sizes = w->changes == 1 ? 3 : 4;
    for (int32_t k = 0; k < w->num_decisions[0]; ++k) {
      const sluice_tuner_decision_t* d = &w->decisions[0][k];
      printf("%lld rows: n %d (%s of %d)\n", (long long)d->rows, d->num_chunks, sluice_tuner_why_name(d->why),
             d->num_raced);
    }
    assert_true(w->settled[0] >= SETTLED && w->num_decisions[0] >= num_sizes);
    assert_true(w->stats[0].race_passes < w->stats[0].timed_passes / 2);
    /* An answer is used from the next batch of its size on. */
    const int32_t cycle = num_sizes * w->changes;
    for (int32_t step = w->num_picks[0] - w->settled[0] + cycle; step + cycle < w->num_picks[0]; ++step) {
      assert_int_equal(w->picks[0][step], w->picks[0][step + cycle]); /* the next batch of this size */
    }
  }
}
