// SPDX-License-Identifier: Apache-2.0
/* The tables of ops and of tensors are complete: a failure names the op or tensor and what it lacks. Rows of chunks. */

#include "backend/schedule/op_table.h"
#include "backend/schedule/tensor_table.h"
#include "backend/schedule/test/forms.h"
#include "backend/schedule/uneven_chunks.h"
#include "third_party/bazel/test.h"

static const char* name_of(int32_t kind) {
  const char* name = sluice_op_row(kind)->name;
  return name != NULL && name[0] != '\0' ? name : "(no name)";
}

#define EXPECT(kind, condition, what) \
  if (!(condition)) fail_msg("op %d, %s, has no %s in backend/schedule/op_table.c", (kind), name_of(kind), (what))

TEST(OpTable_EveryKind_IsComplete) {
  for (int32_t kind = 0; kind < SLUICE_OP_COUNT; ++kind) {
    const sluice_op_row_t* row = sluice_op_row(kind);
    EXPECT(kind, strcmp(name_of(kind), "(no name)") != 0, "name");
    EXPECT(kind, row->letter != NULL && row->letter[0] != '\0', "letter");
    for (int32_t other = 0; other < kind; ++other) {
      EXPECT(kind, strcmp(name_of(kind), name_of(other)) != 0, "name of its own");
      EXPECT(kind, strcmp(row->letter, sluice_op_row(other)->letter) != 0, "letter of its own");
    }
    EXPECT(kind, sluice_op_lane(kind) >= 0 && sluice_op_lane(kind) < SLUICE_NUM_LANES, "lane");
    /* All ranks issue the communication lane in the same order; an exchange on another lane would have no order with
     * the others. */
    if (sluice_op_is_exchange(kind)) assert_int_equal(sluice_op_lane(kind), SLUICE_LANE_COMM);
    EXPECT(kind, row->price != SLUICE_PRICE_NONE, "price");
    const int pays_exchange = row->price >= SLUICE_PRICE_SEND && row->price <= SLUICE_PRICE_NODE_RETURN;
    EXPECT(kind, pays_exchange == row->is_exchange, "price of an exchange where it is one");
    /* No op could wait for an op without writes, and the last use of a slot would be unknown. */
    EXPECT(kind, row->is_copy ? row->num_reads + row->num_writes == 0 : row->num_writes > 0, "list of what it writes");
  }
}

static void note_kinds(const sluice_template_t* t, void* user) {
  int32_t* seen = user;
  for (int32_t i = 0; i < t->num_ops; ++i) seen[t->ops[i].kind] |= 1 << t->spec.direction;
}

/* An op that is in no template is not covered by the checks of templates. */
TEST(OpTable_EveryKind_StandsInTheTemplatesOfItsPasses) {
  int32_t seen[SLUICE_OP_COUNT] = {0};
  for (int32_t policy = 0; policy < 9; ++policy) for_each_form(2, policy, 0, note_kinds, seen);
  for (int32_t kind = 0; kind < SLUICE_OP_COUNT; ++kind) {
    EXPECT(kind, sluice_op_row(kind)->passes != 0, "passes");
    EXPECT(kind, sluice_op_row(kind)->passes == seen[kind], "template of each pass that it says, and of no other,");
  }
}

TEST(TensorTable_EveryTensor_HasANameOfItsOwn) {
  for (int32_t t = 0; t < SLUICE_T_COUNT; ++t) {
    if (sluice_tensor_row(t)->name == NULL) fail_msg("tensor %d has no name in backend/schedule/tensor_table.c", t);
    for (int32_t u = 0; u < t; ++u) assert_string_not_equal(sluice_tensor_row(t)->name, sluice_tensor_row(u)->name);
  }
}

/* Without a lifetime, slots would be freed, and filled with NaN in debug runs, while they are still needed. */
TEST(TensorTable_EveryTensor_SaysHowLongItLives) {
  for (int32_t t = 0; t < SLUICE_T_COUNT; ++t) {
    const int32_t lives = sluice_tensor_row(t)->lives;
    const int longer = SLUICE_LIVES_FOR_SPLIT | SLUICE_LIVES_FOR_WGRAD;
    const int is_one = lives == SLUICE_LIVES_FOR_USE || lives == SLUICE_LIVES_FOR_EVER;
    if (is_one || (lives != 0 && (lives & ~longer) == 0)) continue;
    fail_msg("tensor %d, %s, does not say how long it lives in backend/schedule/tensor_table.c", t,
             sluice_tensor_kind_name(t));
  }
}

/* ---- rows of chunks whose first and last one have half the rows of the others ---- */

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
