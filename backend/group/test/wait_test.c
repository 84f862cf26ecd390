// SPDX-License-Identifier: Apache-2.0
/* When a wait tells the others, warns and gives up, by times that the test names; and which rank is the straggler. */

#include "backend/base/clock.h"
#include "backend/group/wait.h"
#include "third_party/bazel/test.h"

#define SECOND UINT64_C(1000000000)

TEST(Wait_Note_IsDueOnceAndBeforeAnyDeadline) {
  static const uint64_t timeouts[] = {SECOND / 10, SECOND, 4 * SECOND, 1800 * SECOND};
  for (int i = 0; i < 4; ++i) {
    sluice_wait_t wait = sluice_wait_begin(timeouts[i], SECOND);
    const uint64_t note_ns = wait.note_ns;
    assert_int_equal(note_ns - wait.start_ns, timeouts[i] >= 4 * SECOND ? SECOND : timeouts[i] / 4);
    assert_int_equal(wait.deadline_ns - wait.start_ns, timeouts[i]);
    assert_int_equal(sluice_wait_takes_note(&wait, note_ns - 1), 0);
    assert_int_equal(sluice_wait_takes_note(&wait, note_ns), 1);
    assert_int_equal(sluice_wait_takes_note(&wait, wait.deadline_ns), 0);
  }
}

TEST(Wait_Slice_EndsWithWhateverIsDueFirst) {
  sluice_wait_t wait = sluice_wait_begin(1800 * SECOND, 1800 * SECOND);
  const uint64_t before_ns = sluice_now_ns(), end_ns = sluice_wait_slice_end(&wait);
  assert_true(end_ns >= before_ns + SECOND / 5 && end_ns <= sluice_now_ns() + SECOND / 5);
  uint64_t* const due[] = {&wait.note_ns, &wait.next_warn_ns, &wait.deadline_ns};
  for (int i = 0; i < 3; ++i) {
    *due[i] = wait.start_ns - (uint64_t)i;
    assert_int_equal(sluice_wait_slice_end(&wait), *due[i]);
  }
  wait = sluice_wait_begin(UINT64_MAX, UINT64_MAX);
  assert_int_equal(wait.deadline_ns, UINT64_MAX);
}

TEST(Wait_Warning_ComesAgainAfterItsTime) {
  sluice_wait_t wait = sluice_wait_begin(1800 * SECOND, 30 * SECOND);
  const uint64_t first_ns = wait.next_warn_ns;
  sluice_wait_warn(&wait, first_ns - 1, 0, 1, "a test");
  assert_int_equal(wait.next_warn_ns, first_ns);
  sluice_wait_warn(&wait, first_ns + 5, 0, 1, "a test");
  assert_int_equal(wait.next_warn_ns, first_ns + 5 + 30 * SECOND);
}

static int32_t waits_for(const void* user, int32_t rank) { return ((const int32_t*)user)[rank]; }

TEST(Straggler_IsAtTheEndOfTheChain) {
  static const int32_t chain[] = {1, 2, 3, -1}, circle[] = {1, 2, 3, 0};
  for (int32_t rank = 0; rank < 4; ++rank) {
    assert_int_equal(sluice_wait_find_straggler(rank, 4, waits_for, chain), 3);
    const int32_t found = sluice_wait_find_straggler(rank, 4, waits_for, circle); /* it ends */
    assert_true(found >= 0 && found < 4);
  }
  assert_int_equal(sluice_wait_find_straggler(-1, 4, waits_for, chain), -1);
}
