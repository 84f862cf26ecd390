// SPDX-License-Identifier: Apache-2.0
/* Encoded rows: bounds of errors, values that keep their bits, and bytes sent. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/test/refused.h"
#include "backend/moe/ops/wire.h"
#include "capi/test/rig/rig.h"
#include "capi/test/world/checks.h"

/* ---- one row and many ---- */

enum { MOST_ROWS = 5, MOST_WIDTH = 700, GUARD = 64 };

static float value_of(uint32_t* seed, float size) {
  *seed = *seed * 1664525u + 1013904223u;
  return size * ((float)(*seed >> 8) / (float)(1 << 23) - 1);
}

/* Encodes and decodes as a transfer does: bytes written at the front arrive at the end of the decoder's memory. */
static void travel(const sluice_wire_t* wire, float* rows, int64_t num_rows, int64_t width) {
  static char out[MOST_ROWS * MOST_WIDTH * 4 + GUARD], in[MOST_ROWS * MOST_WIDTH * 4 + GUARD];
  const uint64_t room = (uint64_t)(num_rows * width) * 4, bytes = (uint64_t)num_rows * wire->row_bytes(width);
  memset(out, 0x5a, sizeof out), memset(in, 0x5a, sizeof in);
  memcpy(out, rows, room);
  wire->write(out, num_rows, width);
  memcpy(in + room - bytes, out, bytes);
  wire->read(in, num_rows, width);
  for (int i = 0; i < GUARD; ++i) assert_true(out[room + (uint64_t)i] == 0x5a && in[room + (uint64_t)i] == 0x5a);
  memcpy(rows, in, room);
}

/* The largest magnitude of the elements that share a scale with element i of a row. */
static float most_around(const float* row, int64_t width, int64_t i) {
  float most = 0;
  const int64_t first = i / 128 * 128;
  for (int64_t k = first; k < width && k < first + 128; ++k) most = fmaxf(most, fabsf(row[k]));
  return most;
}

static void check_errors(const sluice_wire_t* wire, int is_bf16) {
  static float rows[MOST_ROWS * MOST_WIDTH], before[MOST_ROWS * MOST_WIDTH];
  static const int64_t widths[] = {2, 3, 5, 127, 128, 129, 255, 256, 300, 700};
  uint32_t seed = 7;
  double worst = 0;
  for (size_t w = 0; w < sizeof widths / sizeof widths[0]; ++w) {
    for (int64_t n = 1; n <= MOST_ROWS; ++n) {
      const int64_t width = widths[w], count = n * width;
      for (int64_t i = 0; i < count; ++i) before[i] = rows[i] = value_of(&seed, powf(10, (float)(i / width) * 8 - 16));
      travel(wire, rows, n, width);
      for (int64_t i = 0; i < count; ++i) {
        const float* row = before + i / width * width;
        const double size = is_bf16 ? fabs((double)before[i]) / 256 : (double)most_around(row, width, i % width) / 253;
        const double off = fabs((double)rows[i] - (double)before[i]);
        if (!(off <= size))
          fail_msg("width %lld, %lld: %g became %g", (long long)width, (long long)i, before[i], rows[i]);
        if (size > 0) worst = fmax(worst, off / size);
      }
    }
  }
  assert_true(worst > 0.9); /* the bound is tight */
}

TEST(Wire_Bf16_IsOffByARoundingOfItself) { check_errors(&sluice_wire_bf16, 1); }

TEST(Wire_Int8_IsOffByAShareOfItsBlock) { check_errors(&sluice_wire_int8, 0); }

TEST(Wire_NumbersThatAreNone_ComeAsSaid) {
  const float odd[] = {NAN, INFINITY, -INFINITY, 3.4e38f, FLT_MAX}; /* FLT_MAX / 127 * 127 is infinite */
  for (int i = 0; i < 5; ++i) {
    float bf16[300], int8[300];
    for (int k = 0; k < 300; ++k) bf16[k] = int8[k] = 0.5f;
    bf16[130] = int8[130] = odd[i];
    travel(&sluice_wire_bf16, bf16, 1, 300);
    travel(&sluice_wire_int8, int8, 1, 300);
    for (int k = 0; k < 300; ++k) {
      const int is_odd = k == 130, is_beside = k >= 128 && k < 256;
      assert_true(is_odd ? (isnan(odd[i]) ? isnan(bf16[k]) : bf16[k] == (odd[i] < 0 ? -INFINITY : INFINITY))
                         : bf16[k] == 0.5f);
      if (!is_beside) assert_true(fabsf(int8[k] - 0.5f) <= 0.5f / 253);
      if (is_beside && i < 3) assert_true(isnan(int8[k]));
      if (is_beside && i >= 3) assert_true(isfinite(int8[k]));
    }
  }
  float small[4] = {1e-38f, -1e-40f, 0, 1e-45f}, zero[4] = {0};
  travel(&sluice_wire_int8, small, 1, 4);
  assert_memory_equal(small, zero, sizeof zero);
}

/* ---- layers ---- */

static const int32_t wires[] = {SLUICE_WIRE_BF16, SLUICE_WIRE_INT8};

static case_t base_case(int32_t deduplicate) {
  case_t c = world_small_case();
  c.world_size = 4, c.ranks_per_node = 2, c.num_experts = 12, c.top_k = 3, c.bias = 1;
  c.deduplicate = deduplicate, c.num_chunks = 2, c.model_width = 13;
  for (int32_t r = 0; r < 4; ++r) c.tokens[r] = 9 + 5 * r % 7;
  return c;
}

/* Values are of the order of 1. Each of two hops adds its relative error, amplified by the gain of an expert's layers.
 */
static double bound_of(int32_t wire) { return wire == SLUICE_WIRE_BF16 ? 0.008 : 0.016; }

TEST(Layer_RowsInFewerBytes_AreNearTheReference) {
  for (int32_t i = 0; i < 2; ++i) {
    for (int32_t d = SLUICE_DEDUPLICATE_NONE; d <= SLUICE_DEDUPLICATE_NODES; ++d) {
      for (int32_t n = 1; n <= 3; ++n) {
        case_t c = base_case(d);
        c.wire_dtype = wires[i], c.num_chunks = n, c.gated = n % 2, c.wgrad_mode = n / 2;
        result_t got, want;
        world_run(&c, &got);
        world_reference(&c, &want);
        must_work(&c, &got);
        const double distance = world_distance(&c, &got, &want);
        print_message("wire %d, deduplicate %d, n %d: distance %.2g\n", c.wire_dtype, d, n, distance);
        assert_true(distance >= 0 && distance <= bound_of(c.wire_dtype));
        assert_true(distance > world_tolerance(&c)); /* rows were really rounded */
        world_free(&got);
        world_free(&want);
      }
    }
  }
}

/* Chunks, policies and the cut do not matter: each row is rounded separately. */
TEST(Layer_AnyChunksAndPolicies_HasTheSameBits) {
  for (int32_t i = 0; i < 2; ++i) {
    for (int32_t d = SLUICE_DEDUPLICATE_NONE; d <= SLUICE_DEDUPLICATE_NODES; ++d) {
      case_t one = base_case(d), other = one;
      one.wire_dtype = other.wire_dtype = wires[i];
      one.num_chunks = 1;
      for (int32_t way = 0; way < 4; ++way) {
        other.num_chunks = 2 + way, other.chunking = way % 2;
        other.restore_input = way == 1   ? SLUICE_RESTORE_REDISPATCH
                              : way == 2 ? SLUICE_RESTORE_OFFLOAD
                                         : one.restore_input;
        other.restore_pre_activation = way == 1 ? SLUICE_RESTORE_RECOMPUTE : one.restore_pre_activation;
        other.grouping = way == 3 ? SLUICE_GROUPING_ON : SLUICE_GROUPING_OFF;
        check_same_bits(&one, &other, 0);
      }
    }
  }
}

/* Rows take the bytes in the table of docs/c-abi.md; all other bytes are unchanged. */
TEST(Layer_BytesSent_AreThoseOfTheirRows) {
  for (int32_t d = SLUICE_DEDUPLICATE_NONE; d <= SLUICE_DEDUPLICATE_NODES; ++d) {
    result_t got[3];
    for (int32_t wire = 0; wire <= SLUICE_WIRE_INT8; ++wire) {
      case_t c = base_case(d);
      c.wire_dtype = wire, c.model_width = 300;
      world_run(&c, &got[wire]);
      must_work(&c, &got[wire]);
    }
    for (int32_t r = 0; r < 4; ++r) {
      const uint64_t full = got[0].bytes_sent[r], half = got[1].bytes_sent[r], quarter = got[2].bytes_sent[r];
      const uint64_t rows = (full - half) / (1200 - 600); /* number of sent rows */
      assert_true(rows > 0 && full - half == rows * 600);
      assert_int_equal(full - quarter, rows * (1200 - (300 + 3 * 4)));
    }
    for (int32_t wire = 0; wire <= SLUICE_WIRE_INT8; ++wire) world_free(&got[wire]);
  }
}

/* Other dtypes, one rank and rows of one value. */
TEST(Layer_RowsThatTravelAsTheyAre_KeepTheirBits) {
  for (int32_t what = 0; what < 4; ++what) {
    case_t plain = base_case(SLUICE_DEDUPLICATE_NONE), c;
    if (what < 2) plain.dtype = what == 0 ? SLUICE_DTYPE_BF16 : SLUICE_DTYPE_F64;
    if (what == 2) plain.world_size = 1, plain.ranks_per_node = 0;
    if (what == 3) plain.model_width = 1;
    c = plain, c.wire_dtype = SLUICE_WIRE_INT8;
    check_same_bits(&plain, &c, 1);
  }
}

/* Encoding allocates nothing: a budget that fits still fits, and predicted bytes are the allocator's. */
TEST(Layer_UnderABudget_TakesNoMoreBytes) {
  case_t plain = base_case(SLUICE_DEDUPLICATE_RANKS), c;
  plain.budget = 1 << 22;
  c = plain, c.wire_dtype = SLUICE_WIRE_INT8;
  result_t a, b;
  world_run(&plain, &a);
  world_run(&c, &b);
  must_work(&plain, &a);
  must_work(&c, &b);
  for (int32_t r = 0; r < 4; ++r) assert_int_equal(a.peak_bytes[r], b.peak_bytes[r]);
  world_free(&a);
  world_free(&b);
}

TEST(Context_WireThatIsNone_IsRefused) {
  DEFAULTS(sluice_context_config, config);
  sluice_context_t* context = NULL;
  config.wire_dtype = 3;
  REFUSED(sluice_context_create(&config, NULL, &context), SLUICE_E_INVALID_ARGUMENT,
          "wire_dtype is 3; it must be 0 (the dtype of the rows), 1 (bf16) or 2 (int8)");
  config.wire_dtype = SLUICE_WIRE_BF16, config.device_type = SLUICE_DEVICE_CUDA;
  REFUSED(sluice_context_create(&config, NULL, &context), SLUICE_E_UNSUPPORTED,
          "wire_dtype is 1, but a CUDA context sends rows in their own dtype only");
}

int main(void) {
  setenv("SLUICE_POISON", "1", 1);
  return run_cases(NULL, NULL);
}
