// SPDX-License-Identifier: Apache-2.0
/* The division of rows into chunks whose first and last chunk have half the rows of the others. */

#include "backend/schedule/uneven_chunks.h"
#include "third_party/bazel/test.h"

#define MOST_CHUNKS 32

TEST(Starts_AnyRowsAnyN_EachRowIsInOneChunk) {
  for (int32_t n = 1; n <= MOST_CHUNKS; ++n) {
    for (int64_t rows = 0; rows < 200; ++rows) {
      assert_true(sluice_uneven_chunk_start(rows, 0, n) == 0 && sluice_uneven_chunk_start(rows, n, n) == rows);
      for (int32_t i = 0; i < n; ++i) {
        int64_t size = sluice_uneven_chunk_start(rows, i + 1, n) - sluice_uneven_chunk_start(rows, i, n);
        double exact = (double)rows * sluice_uneven_chunk_share(i, n);
        assert_true(size >= 0 && (double)size > exact - 1 && (double)size < exact + 1);
      }
    }
  }
}

TEST(Shares_ThreeOrMore_EndsHaveHalfOfTheOthers) {
  assert_true(sluice_uneven_chunk_share(0, 1) == 1);
  assert_true(sluice_uneven_chunk_share(0, 2) == 0.5 && sluice_uneven_chunk_share(1, 2) == 0.5);
  for (int32_t n = 3; n <= MOST_CHUNKS; ++n) {
    double end = sluice_uneven_chunk_share(0, n);
    assert_true(end == sluice_uneven_chunk_share(n - 1, n));
    for (int32_t i = 1; i + 1 < n; ++i) assert_true(sluice_uneven_chunk_share(i, n) == 2 * end);
  }
}

TEST(Starts_ManyRows_DoNotOverflow) {
  const int64_t rows = INT64_C(1) << 50;
  assert_true(sluice_uneven_chunk_start(rows, 3, 5) == rows / 8 * 5);
}
