// SPDX-License-Identifier: Apache-2.0
/* Machines as data: curves, and the JSON form with its errors. */
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/test/refused.h"
#include "backend/cost/machine.h"
#include "sluice/context.h"

static const char profile[] =
    "{\"sluice_machine\": 2, \"name\": \"two boxes\", \"provenance\": \"profile\", \"world_size\": 16,\n"
    " \"ranks_per_node\": 8,\n"
    " \"gemm\": {\"bf16\": {\"flops_per_second\": 2e14, \"half_rows\": 100},\n"
    "           \"f32\": {\"forward\": [[1, 4e-11], [64, 1e-11]], \"weight_grad\": [[1, 8e-11]]}},\n"
    " \"rows\": {\"bytes_per_second\": 1e12, \"startup_seconds\": 2e-6},\n"
    " \"exchange\": {\"bytes_per_second\": 25e9, \"startup_seconds\": 1e-5, \"per_peer_seconds\": 1e-6},\n"
    " \"node_exchange\": {\"points\": [[1000, 1e-6], [2000, 1.002e-6]]},\n"
    " \"exchange_contention\": {\"points\": [[1024, 2e-3], [1048576, 5e-4]]},\n"
    " \"compute_contention\": {\"points\": [[1024, 1e-4], [1048576, 2e-4]]},\n"
    " \"second_exchange_seconds\": 3e-4, \"second_exchange_contention\": 1e-3, \"second_compute_contention\": 2e-5,\n"
    " \"exchange_skew_gain\": 0.25,\n"
    " \"host_copy\": {\"bytes_per_second\": 2e10},\n"
    " \"cache_miss_forward\": {\"points\": [[1e6, 1], [4e6, 1.2]]}, \"cache_miss_backward\": {\"points\": [[1e6, 1], "
    "[4e6, "
    "1.3]]},\n"
    " \"gemm_call_seconds\": 3e-6, \"op_seconds\": 1e-6, \"pass_seconds\": 1e-4,\n"
    " \"activation_seconds\": 1e-12, \"activation_grad_seconds\": 2e-12,\n"
    " \"relu_seconds\": 3e-13, \"relu_grad_seconds\": 4e-13,\n"
    " \"share\": [{\"lane\": \"comm\", \"beside\": [\"compute\"], \"share\": 0.8}],\n"
    " \"copy_share\": [{\"lane\": \"comm\", \"beside\": [\"copy_in\"], \"share\": 0.9, \"bytes\": 4e6},\n"
    "  {\"lane\": \"copy_out\", \"beside\": [\"compute\"], \"share\": 0.7, \"bytes\": 1e5},\n"
    "  {\"lane\": \"compute\", \"beside\": [\"copy_out\"], \"share\": 0.6, \"bytes\": 4e6}],\n"
    " \"error\": {\"median\": 0.04, \"p90\": 0.1, \"count\": 12}}";

static int is_near(double a, double b) { return fabs(a - b) <= 1e-9 * fabs(b); }

static sluice_machine_t read_profile(void) {
  sluice_machine_t m;
  WORKS(sluice_machine_read(profile, sizeof profile - 1, &m));
  return m;
}

TEST(Curve_InsideBelowAndAbove_IsPiecewiseLinear) {
  const sluice_curve_t c = {3, {10, 20, 40}, {5, 7, 15}};
  assert_true(sluice_curve_at(&c, 10) == 5 && sluice_curve_at(&c, 15) == 6 && sluice_curve_at(&c, 30) == 11);
  assert_true(sluice_curve_at(&c, 1) == 5 && sluice_curve_at(&c, 60) == 23 && sluice_curve_at(&c, 0) == 0);
  const sluice_curve_t one = {1, {10}, {5}};
  assert_true(sluice_curve_at(&one, 30) == 15);
  const sluice_curve_t falling = {2, {10, 20}, {5, 4}};
  assert_true(sluice_curve_at(&falling, 200) == 4); /* never below the last measured time */
}

TEST(Gemm_BetweenPoints_IsLinearInSecondsOfTheGemm) {
  sluice_machine_t m = read_profile();
  double at_one = 1 * 4e-11, at_64 = 64 * 1e-11, rows = 22;
  double want = (at_one + (at_64 - at_one) * (rows - 1) / 63) / rows;
  assert_true(is_near(sluice_machine_gemm(&m, SLUICE_DTYPE_F32, SLUICE_FORM_FORWARD, rows), want));
  assert_true(is_near(sluice_machine_gemm(&m, SLUICE_DTYPE_F32, SLUICE_FORM_FORWARD, 1e6), 1e-11));
  assert_true(is_near(sluice_machine_gemm(&m, SLUICE_DTYPE_F32, SLUICE_FORM_INPUT_GRAD, rows), want)); /* as forward */
  assert_true(is_near(sluice_machine_gemm(&m, SLUICE_DTYPE_F32, SLUICE_FORM_WEIGHT_GRAD, rows), 8e-11));
  assert_true(is_near(sluice_machine_gemm(&m, SLUICE_DTYPE_BF16, SLUICE_FORM_FORWARD, 16), (1 + 100.0 / 16) / 2e14));
}

TEST(Exchange_TwoKindsOfLinks_TakesTheSlower) {
  sluice_machine_t m = read_profile();
  /* 16 ranks of 8 per node: 8 of 15 peers are outside. */
  double bytes = 15e6;
  assert_true(is_near(sluice_machine_exchange(&m, 16, bytes), 1e-5 + 8 * 1e-6 + 8e6 / 25e9));
  assert_true(is_near(sluice_machine_exchange(&m, 8, 2000), 1.002e-6)); /* one node */
  assert_true(sluice_machine_exchange(&m, 1, bytes) == 0);
  m.ranks_per_node = 0;
  assert_true(is_near(sluice_machine_exchange(&m, 16, bytes), 1e-5 + 15 * 1e-6 + 15e6 / 25e9));
}

TEST(Json_WrittenAndRead_IsTheSameMachine) {
  sluice_machine_t m = read_profile(), again;
  assert_string_equal(m.name, "two boxes");
  assert_true(m.share[SLUICE_LANE_COMM][1 << SLUICE_LANE_COMM | 1 << SLUICE_LANE_COMPUTE] == 0.8);
  assert_int_equal(m.error_count, 12);
  char text[16384], twice[16384];
  uint64_t length = sluice_machine_write(&m, NULL, 0);
  assert_true(length > 500 && length < sizeof text);
  assert_int_equal(sluice_machine_write(&m, text, sizeof text), length);
  assert_int_equal(sluice_machine_read(text, length, &again), SLUICE_OK);
  assert_int_equal(sluice_machine_write(&again, twice, sizeof twice), length);
  assert_string_equal(text, twice);
  assert_memory_equal(&again, &m, sizeof m);
  assert_true(m.exchange_contention.count == 2 && m.exchange_contention.y[0] == 2e-3 &&
              m.compute_contention.y[1] == 2e-4 && m.second_exchange_seconds == 3e-4 &&
              m.second_exchange_contention == 1e-3 && m.second_compute_contention == 2e-5);
  assert_true(m.num_copy_shares == 2 && m.copy_share[0].bytes == 1e5 && m.copy_share[1].bytes == 4e6 &&
              m.copy_share[1].share[SLUICE_LANE_COMM][1 << SLUICE_LANE_COMM | 1 << SLUICE_LANE_COPY_IN] == 0.9);
  assert_true(m.cache_miss_factor[0].count == 2 && m.cache_miss_factor[0].y[1] == 1.2 &&
              m.cache_miss_factor[1].y[1] == 1.3);
  assert_true(m.exchange_skew_gain == 0.25 && m.relu_seconds == 3e-13 && m.relu_grad_seconds == 4e-13);
}

/* Numbers that differ only in their last digits, the largest number, and a non-ASCII name. */
TEST(Json_AnyDigits_ReadBackAsTheyWere) {
  static const char fine[] =
      "{\"sluice_machine\": 2, \"name\": \"\xc3\xbc\", \"op_seconds\": 0.1234567890123456,\n"
      " \"rows\": {\"points\": [[1, 2], [1.00000000000001, 1.7976931348623157e308]]}}";
  sluice_machine_t m, again;
  char text[4096];
  assert_int_equal(sluice_machine_read(fine, sizeof fine - 1, &m), SLUICE_OK);
  const uint64_t length = sluice_machine_write(&m, text, sizeof text);
  assert_true(length < sizeof text);
  assert_int_equal(sluice_machine_read(text, length, &again), SLUICE_OK);
  assert_true(again.op_seconds == m.op_seconds && again.rows.x[1] == m.rows.x[1] && again.rows.y[1] == m.rows.y[1]);
  assert_string_equal(again.name, "\xc3\xbc");
  assert_non_null(strstr(text, "[[1, 2], ")); /* with as few digits as possible */
}

typedef struct refusal_s {
  const char* text;
  const char* says;
} refusal_t;

#define M "{\"sluice_machine\": 2, "
static const refusal_t refusals[] = {
    {"{\"name\": \"x\"}", "it must begin with \"sluice_machine\": 2"},
    {"{\"sluice_machine\": 3}", "this library reads version 2"},
    {"{\"sluice_machine\": 1}", "this library reads version 2"},
    {M "\"bandwith\": 3}", "unknown field \"bandwith\" in the machine; known are name, provenance"},
    {M "\"bandwith\": 3}", "pass_seconds, pass_byte_seconds, share, copy_share, error"},
    {M "\"exchange\": {\"bytes_per_second\": -1e9}}", "exchange.bytes_per_second is -1e+09"},
    {M "\"exchange\": {\"bytes_per_second\": 1e9, \"latency\": 1}}", "unknown field \"latency\" in exchange"},
    {M "\"exchange\": {\"startup_seconds\": 1}}", "exchange must have either points or bytes_per_second"},
    {M "\"rows\": {\"points\": [[1, 2], [1, 3]]}}", "points of rows.points must ascend"},
    {M "\"rows\": {\"points\": [[1, -2]]}}", "point 0 of rows.points is [1, -2]"},
    {M "\"rows\": {\"points\": [[0, 1]]}}", "point 0 of rows.points is [0, 1]; sizes are above 0"},
    {M "\"rows\": {\"points\": [1]}}", "must be a pair of numbers"},
    {M "\"rows\": 3}", "rows is a number; it must be an object"},
    {M "\"gemm\": {\"f64\": {}}}", "unknown field \"f64\" in gemm; known are f32, bf16 and f16"},
    {M "\"gemm\": {\"f32\": {\"flops_per_second\": 0}}}", "gemm.f32.flops_per_second is 0"},
    {M "\"gemm\": {\"f32\": {\"half_rows\": -1}}}", "gemm.f32.half_rows is -1; it is the number of rows"},
    {M "\"gemm\": {\"f32\": {\"forwards\": 1}}}", "known are forward, input_grad"},
    {M "\"gemm\": {\"f32\": {}}}", "gemm.f32 must have either forward or flops_per_second"},
    {M "\"ranks_per_node\": -1}", "ranks_per_node is -1; it must be a whole number"},
    {M "\"ranks_per_node\": 8}", "ranks_per_node is 8 but node_exchange is missing"},
    {M "\"ranks_per_node\": 1.5}", "ranks_per_node is 1.5; it must be a whole number"},
    {M "\"provenance\": \"guessed\"}", "provenance is \"guessed\"; known are profile, calibrated, refined"},
    {M "\"share\": [{\"lane\": \"comm\", \"beside\": [\"compute\"], \"share\": 1.2}]}", "share.share is 1.2"},
    {M "\"exchange_contention\": {\"points\": [[1024, -1]]}}", "point 0 of exchange_contention.points is [1024, -1]"},
    {M "\"compute_contention\": {}}", "compute_contention must have either points or bytes_per_second"},
    {M "\"cache_miss_forward\": {\"points\": [[1e6, 0]]}}",
     "point 0 of cache_miss_forward is a factor of 0; it is above 0"},
    {M "\"cache_miss_backward\": {\"bytes_per_second\": 1e9}}", "cache_miss_backward has points [bytes, factor]"},
    {M "\"exchange_skew_gain\": 1.5}", "exchange_skew_gain is 1.5; it is in [0, 1]"},
    {M "\"second_exchange_contention\": -1}", "second_exchange_contention is -1; it is a time in seconds"},
    {M "\"share\": [{\"lane\": \"comm\", \"beside\": [\"comm\"], \"share\": 1}]}", "names other lanes"},
    {M "\"copy_share\": [{\"lane\": \"comm\", \"beside\": [\"copy_in\"], \"share\": 1}]}", "has bytes, the size of"},
    {M "\"copy_share\": [{\"lane\": \"comm\", \"beside\": [\"compute\"], \"share\": 1, \"bytes\": 1}]}",
     "is about copy_out or copy_in"},
    {M "\"copy_share\": [{\"lane\": \"comm\", \"beside\": [\"copy_in\"], \"share\": 2, \"bytes\": 1}]}",
     "share.share is 2"},
    {M "\"share\": 1}", "share is a number; it must be an array"},
    {M "\"share\": [{\"lane\": \"comm\", \"beside\": [\"compute\"]}]}", "an entry of share has lane (a name)"},
    {M "\"share\": [{\"lane\": \"disk\", \"beside\": [\"compute\"], \"share\": 1}]}", "share.lane: known are compute"},
    {M "\"share\": [{\"lane\": \"comm\", \"beside\": [\"compute\"], \"share\": 0}]}", "share.share is 0"},
    {M "\"copy_share\": [{\"lane\": \"comm\", \"beside\": [\"copy_in\"], \"share\": 1, \"bytes\": 0}]}",
     "has bytes, the size of a copy, above 0"},
    {M "\"error\": {\"mean\": 1}}", "unknown field \"mean\" in error; known are median, p90 and count"},
    {M "\"error\": {\"median\": -1}}", "error.median is -1"},
    {M "\"error\": {\"p90\": -1}}", "error.p90 is -1"},
    {M "\"error\": {\"count\": 0.5}}", "error.count is 0.5; it must be a whole number"},
    {M "\"exchange_skew_gain\": -0.5}", "exchange_skew_gain is -0.5; it is in [0, 1]"},
    {M "\"exchange\": {\"bytes_per_second\": 1, \"startup_seconds\": -1}}", "exchange.startup_seconds is -1"},
    {M "\"exchange\": {\"bytes_per_second\": 1, \"per_peer_seconds\": -1}}", "exchange.per_peer_seconds is -1"},
    {M "\"relu_grad_seconds\": -1}", "relu_grad_seconds is -1; it is a time in seconds"},
    {M "\"op_seconds\": -1}", "op_seconds is -1; it is a time in seconds"},
    {M "\"op_seconds\": 1, \"op_seconds\": 2}", "two members of this name"},
    {M "\"op_seconds\": nan}", "line 1, column 37: a value is expected here"},
    {M "\n\"op_seconds\": 1", "line 2, column 16: a comma or } is expected here"},
    {M "\"name\": \"a\\\"b\"}", "escapes in strings are not used here"},
    {M "\"name\": \"a\nb\"}", "a string must end on the line where it begins"},
    {"[]", "the outermost value is an array; it must be an object"},
    {"[[[[[[[[[[[[[[[[[[[[", "nested too deep"},
    {"", "the text ends where a value is expected"},
    {M "\"op_seconds\": 1} 2", "nothing may follow"},
};

TEST(Json_BadProfile_IsRefusedByFieldName) {
  for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; ++i) {
    sluice_machine_t m;
    REFUSED(sluice_machine_read(refusals[i].text, strlen(refusals[i].text), &m), BAD, refusals[i].says);
  }
}

/* Sets a locale that has only a decimal comma; 0 if none can be made. */
static int set_decimal_comma(void) {
  const char* folder = getenv("TEST_TMPDIR") != NULL ? getenv("TEST_TMPDIR") : "/tmp";
  char path[256], command[600];
  snprintf(path, sizeof path, "%s/comma.txt", folder);
  FILE* file = fopen(path, "w");
  if (file == NULL) return 0;
  fputs("LC_NUMERIC\ndecimal_point \",\"\nthousands_sep \"\"\ngrouping -1\nEND LC_NUMERIC\n", file);
  fclose(file);
  snprintf(command, sizeof command, "localedef -c -i '%s' -f ANSI_X3.4-1968 '%s/comma' >/dev/null 2>&1", path, folder);
  (void)!system(command); /* it exits with 1 because other categories are missing */
  setenv("LOCPATH", folder, 1);
  return setlocale(LC_NUMERIC, "comma") != NULL && strcmp(localeconv()->decimal_point, ",") == 0;
}

/* The host may have set the user's locale, in which a half is 0,5: the text of a machine does not depend on it. */
TEST(Json_UnderADecimalComma_IsTheSame) {
  static char text[16384], again[16384];
  sluice_machine_t m = read_profile();
  assert_true(sluice_machine_write(&m, text, sizeof text) < sizeof text);
  if (!set_decimal_comma()) skip_because("localedef makes no locale with a decimal comma");
  sluice_machine_t under = read_profile();
  sluice_machine_write(&m, again, sizeof again);
  double half = strtod("0.5", NULL); /* the host's own numbers are unaffected */
  setlocale(LC_NUMERIC, "C");
  assert_true(half == 0);
  assert_string_equal(again, text);
  assert_memory_equal(&under, &m, sizeof m);
}

TEST(CheckFor_MissingCurve_NamesIt) {
  sluice_machine_t m = read_profile();
  assert_int_equal(sluice_machine_check_for(&m, SLUICE_DTYPE_F32, 16), SLUICE_OK);
  REFUSED(sluice_machine_check_for(&m, SLUICE_DTYPE_F16, 16), SLUICE_E_INVALID_ARGUMENT, "gemm.f16 is missing");
  m.exchange.bytes.count = 0;
  assert_int_equal(sluice_machine_check_for(&m, SLUICE_DTYPE_F32, 8), SLUICE_OK); /* one node */
  REFUSED(sluice_machine_check_for(&m, SLUICE_DTYPE_F32, 16), SLUICE_E_INVALID_ARGUMENT,
          "exchange is missing, and 16 ranks");
}
