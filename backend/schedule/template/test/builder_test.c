// SPDX-License-Identifier: Apache-2.0
/* The builder: invalid calls set a status, and nothing is written after valid data. */
#include <stdlib.h>
#include <string.h>

#include "backend/base/test/refused.h"
#include "backend/schedule/template/builder.h"

enum { ROOM = 3, CHUNKS = 2, MARK = 0x5a };

typedef struct bench_s {
  sluice_builder_t builder;
  sluice_op_t* ops; /* one more than fits */
  sluice_slot_ref_t homes[SLUICE_T_COUNT * CHUNKS];
} bench_t;

static bench_t bench; /* of each case */

static int begin(void** state) {
  (void)state;
  memset(&bench, 0, sizeof bench);
  bench.ops = malloc((ROOM + 1) * sizeof *bench.ops);
  assert_non_null(bench.ops);
  memset(bench.ops, MARK, (ROOM + 1) * sizeof *bench.ops);
  bench.builder = (sluice_builder_t){
      .ops = bench.ops, .capacity = ROOM, .num_chunks = CHUNKS, .homes = bench.homes, .status = SLUICE_OK};
  sluice_builder_init_homes(&bench.builder);
  return 0;
}

static int end(void** state) {
  (void)state;
  for (size_t i = 0; i < sizeof *bench.ops; ++i) {
    assert_int_equal(((const unsigned char*)&bench.ops[ROOM])[i], MARK);
  }
  free(bench.ops);
  return 0;
}

static sluice_op_t* add(int32_t kind, int32_t chunk) { return sluice_builder_add(&bench.builder, kind, chunk); }

/* The status of finish, which then returns no dependencies. */
static void assert_refused(const char* text) {
  int32_t deps[8], num_deps = 7;
  assert_int_equal(sluice_builder_finish(&bench.builder, deps, 8, &num_deps), SLUICE_E_INTERNAL);
  assert_int_equal(num_deps, 0);
  if (strstr(last_message(), text) == NULL) fail_msg("%s", last_message());
}

TEST(Builder_OneOpTooMany_IsRefusedAndNothingWritten) {
  for (int32_t i = 0; i < ROOM; ++i) sluice_op_write(&bench.builder, add(SLUICE_OP_GEMM1, 0), SLUICE_T_M);
  assert_int_equal(bench.builder.status, SLUICE_OK);
  sluice_op_t* extra = add(SLUICE_OP_GEMM2, 1);
  sluice_op_read(&bench.builder, extra, SLUICE_T_ACT);
  sluice_op_write(&bench.builder, extra, SLUICE_T_DO);
  assert_int_equal(bench.builder.num_ops, ROOM);
  assert_refused("gemm2 of chunk 1 does not fit: 2 chunks have room for 3 ops; raise OPS_PER_CHUNK");
}

TEST(Builder_OneAccessTooMany_IsRefusedAndNothingWritten) {
  sluice_op_t* op = add(SLUICE_OP_GEMM1, 1);
  for (int32_t t = 0; t < SLUICE_OP_MAX_ACCESSES; ++t) sluice_op_read(&bench.builder, op, t);
  sluice_op_read(&bench.builder, op, 0); /* a repeated access is not counted again */
  assert_int_equal(bench.builder.status, SLUICE_OK);
  const sluice_op_t before = *op;
  sluice_op_read(&bench.builder, op, SLUICE_OP_MAX_ACCESSES);
  sluice_op_write(&bench.builder, op, SLUICE_T_M);
  assert_memory_equal(op, &before, sizeof before);
  assert_refused("gemm1 of chunk 1 reads T_ROUTE besides 8 other slots");
}

TEST(Builder_AccessesOfAllChunksTooMany_AreRefused) {
  sluice_op_t* op = add(SLUICE_OP_WEIGHT_GRAD, -1);
  for (int32_t t = 0; t < SLUICE_OP_MAX_ACCESSES; ++t) sluice_op_write(&bench.builder, op, t);
  sluice_builder_set_home(&bench.builder, SLUICE_T_DI, 1, SLUICE_T_KEPT_DI, 1);
  sluice_op_write(&bench.builder, op, SLUICE_T_DI); /* in two places now */
  assert_int_equal(op->num_writes, SLUICE_OP_MAX_ACCESSES);
  assert_int_equal(op->num_reads, 0);
  assert_refused("weight_grad of chunk -1 writes kept T_DI besides 8 other slots");
}

TEST(Builder_KindOrChunkUnknown_IsRefused) {
  const int32_t bad[][2] = {{SLUICE_OP_COUNT, 0}, {-1, 0}, {SLUICE_OP_GEMM1, CHUNKS}, {SLUICE_OP_GEMM1, -2}};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
    sluice_op_read(&bench.builder, add(bad[i][0], bad[i][1]), SLUICE_T_DI);
    assert_int_equal(bench.builder.num_ops, 0);
    assert_refused("op 0 is of kind");
    bench.builder.status = SLUICE_OK;
  }
}

TEST(Builder_DependenciesTooMany_AreRefusedAndNotWritten) {
  const int32_t kinds[ROOM] = {SLUICE_OP_GEMM1, SLUICE_OP_UNPACK, SLUICE_OP_GEMM2}; /* alternating lanes */
  for (int32_t i = 0; i < ROOM; ++i) sluice_op_write(&bench.builder, add(kinds[i], 0), SLUICE_T_M);
  int32_t deps[2] = {MARK, MARK}, num_deps = 7;
  assert_int_equal(sluice_builder_finish(&bench.builder, deps, 1, &num_deps), SLUICE_E_INTERNAL);
  assert_int_equal(num_deps, 0);
  assert_int_equal(deps[1], MARK);
  assert_int_equal(sluice_builder_finish(&bench.builder, deps, 2, &num_deps), SLUICE_OK);
  assert_int_equal(num_deps, 2);
  assert_int_equal(deps[0], 0);
  assert_int_equal(deps[1], 1);
}

int main(void) { return run_cases_each(begin, end); }
