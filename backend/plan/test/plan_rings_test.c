// SPDX-License-Identifier: Apache-2.0
/* The cached rings that determine the size of plans are those of the templates, in any order of look-ups. */

#include "backend/plan/plan_rings.h"
#include "backend/schedule/template/template.h"
#include "third_party/bazel/test.h"

enum { NUM_SPECS = SLUICE_RINGS_KNOWN + 60 };

/* Returns a different spec for each i. */
static sluice_template_spec_t spec_of(int32_t i) {
  sluice_template_spec_t spec = {.direction = i % 2 == 0 ? SLUICE_FORWARD : SLUICE_BACKWARD,
                                 .num_chunks = 1 + i / 8 % 10,
                                 .keep = i % 2 == 0,
                                 .bounded = 1,
                                 .gated = i / 2 % 2,
                                 .dgrad = i % 2,
                                 .wgrad = i % 2 == 0 ? SLUICE_WGRAD_CALL_NONE : SLUICE_WGRAD_CALL_NOW,
                                 .wgrad_mode = i / 4 % 2};
  for (int32_t c = 0; c < spec.num_chunks; ++c) {
    spec.restore_input[c] = i / 80 % 2 ? SLUICE_RESTORE_REDISPATCH : SLUICE_RESTORE_KEEP;
    spec.restore_pre_activation[c] = i / 160 ? SLUICE_RESTORE_RECOMPUTE : SLUICE_RESTORE_KEEP;
  }
  return spec;
}

static void check(sluice_ring_memo_t* memo, int32_t i) {
  const sluice_template_spec_t spec = spec_of(i);
  sluice_plan_rings_t got;
  sluice_template_t* built = NULL;
  assert_int_equal(sluice_ring_memo_get(memo, &spec, &got), SLUICE_OK);
  assert_int_equal(sluice_template_build(&spec, sluice_process_allocator(), &built), SLUICE_OK);
  assert_memory_equal(&got.spec, &spec, sizeof spec);
  assert_memory_equal(got.ring, built->ring, sizeof got.ring);
  sluice_template_destroy(built, sluice_process_allocator());
}

TEST(Rings_OfMoreSpecsThanAreKept_AreThoseOfTheTemplates) {
  sluice_ring_memo_t memo = {0};
  const uint64_t before = sluice_process_allocator()->current_bytes;
  for (int round = 0; round < 2; ++round) {
    for (int32_t i = 0; i < NUM_SPECS; ++i) check(&memo, i);
  }
  assert_int_equal(memo.count, SLUICE_RINGS_KNOWN);
  sluice_ring_memo_deinit(&memo);
  assert_int_equal(sluice_process_allocator()->current_bytes, before);
}

TEST(Rings_OfASpecThatCannotBe_AreRefusedAndNotKept) {
  sluice_ring_memo_t memo = {0};
  sluice_template_spec_t spec = spec_of(0);
  sluice_plan_rings_t got;
  spec.num_chunks = 0;
  assert_int_equal(sluice_ring_memo_get(&memo, &spec, &got), SLUICE_E_INVALID_ARGUMENT);
  assert_int_equal(memo.count, 0);
  sluice_ring_memo_deinit(&memo);
}
