// SPDX-License-Identifier: Apache-2.0
/* Finds the earlier forward from which a repeated one takes its n. */

#include "backend/moe/layer/replay.h"
#include "third_party/bazel/test.h"

enum { ROUTES = 7, OTHERS = 8 };

static void add(sluice_replay_t* replay, uint64_t routes, int32_t num_chunks) {
  const sluice_replay_forward_t forward = {.routes = routes, .choice.num_chunks = (int16_t)num_chunks};
  sluice_replay_add(replay, &forward);
}

/* Repeats a forward, then runs its backward, on a single rank. */
static int32_t repeat(sluice_replay_t* replay, uint64_t routes) {
  sluice_replay_forward_t* repeated = sluice_replay_choose(replay, sluice_replay_like(replay, routes));
  assert_non_null(repeated);
  repeated->is_repeated = 1;
  sluice_replay_end(replay);
  return repeated->choice.num_chunks;
}

TEST(Replay_BatchThatTrainedWithoutRepetitionBefore_IsOver) {
  sluice_replay_t replay = {0};
  add(&replay, ROUTES, 1);
  sluice_replay_end(&replay);
  add(&replay, ROUTES, 2);
  assert_int_equal(repeat(&replay, ROUTES), 2);
}

TEST(Replay_AlikeInAPipeline_OldestFirst) {
  sluice_replay_t replay = {0};
  for (int32_t n = 1; n <= 3; ++n) add(&replay, ROUTES, n);
  for (int32_t n = 1; n <= 3; ++n) assert_int_equal(repeat(&replay, ROUTES), n);
}

TEST(Replay_BackwardsInAnotherOrder_EachTakesItsOwn) {
  sluice_replay_t replay = {0};
  add(&replay, ROUTES, 1), add(&replay, OTHERS, 2);
  assert_int_equal(repeat(&replay, OTHERS), 2);
  assert_int_equal(repeat(&replay, ROUTES), 1);
}

TEST(Replay_MoreOutstandingThanItHolds_TakesTheOldestThatIsThere) {
  sluice_replay_t replay = {0};
  for (int32_t n = 1; n <= SLUICE_REPLAY_FORWARDS + 1; ++n) add(&replay, ROUTES, n);
  assert_int_equal(repeat(&replay, ROUTES), 2);
}
