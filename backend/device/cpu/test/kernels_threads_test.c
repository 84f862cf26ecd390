// SPDX-License-Identifier: Apache-2.0
/* Kernels over a pool: the same bits as on one thread, for every entry and dtype, any number of threads, and fewer
 * threads than requested. No threads are requested for little work, inside a parallel region, or in a lane that forgoes
 * them. */
#include <pthread.h>

#include "backend/base/test/fake_pool.h"
#include "backend/device/cpu/kernels_threads.h"
#include "backend/device/test/kernel_buffers.h"

enum { ROWS = 301, WIDTH = 1030, K = 2 };

static const sluice_kernels_t *plain, *over;

/* Runs `call` on one thread and on several: `out`, and `more` if it is not NULL, must have the same bits. */
typedef void (*call_fn_t)(const sluice_kernels_t* kernels, int32_t dtype, buffer_t* out, buffer_t* more);

static void compare(const char* what, call_fn_t call, int32_t dtype, int64_t out, int32_t dtype_more, int64_t more) {
  for (int threads = 1; threads <= 5; threads += 2) {
    for (pool_fewer = 0; pool_fewer <= (threads > 1); ++pool_fewer) {
      buffer_t want = random_buffer(dtype, out), got = copy_of(&want);
      buffer_t want_more = random_buffer(dtype_more, more), got_more = copy_of(&want_more);
      pool_max = threads;
      pool_asked = 1;
      call(plain, dtype, &want, &want_more);
      assert_int_equal(pool_asked, 1);
      call(over, dtype, &got, &got_more);
      assert_true(threads == 1 ? pool_asked == 1 : pool_asked > 1 && pool_asked <= threads);
      assert_same(&want, &got, what);
      assert_same(&want_more, &got_more, what);
      release(&want), release(&got), release(&want_more), release(&got_more);
    }
  }
  pool_fewer = 0;
}

static buffer_t source[4]; /* by dtype: 3 * ROWS rows of WIDTH */
static float weights[3 * ROWS * K];
static int32_t places[ROWS * K];

static const void* data_of(int32_t dtype) {
  for (int d = 0; d < 4; ++d) {
    if (DTYPES[d] == dtype) return source[d].data;
  }
  return NULL;
}

static int make_sources(void** state) {
  (void)state;
  for (int d = 0; d < 4; ++d) source[d] = random_buffer(DTYPES[d], 3 * ROWS * WIDTH);
  for (int i = 0; i < 3 * ROWS * K; ++i) weights[i] = (float)random_real();
  for (int i = 0; i < ROWS * K; ++i) places[i] = (int32_t)(random_bits() % (2 * ROWS)) - 1;
  plain = sluice_cpu_kernels();
  over = sluice_cpu_kernels_over(plain, &fake_pool);
  return 0;
}

static int drop_sources(void** state) {
  (void)state;
  for (int d = 0; d < 4; ++d) release(&source[d]);
  return 0;
}

static void gather(const sluice_kernels_t* k, int32_t dtype, buffer_t* out, buffer_t* more) {
  (void)more;
  k->gather_rows(NULL, dtype, ROWS, WIDTH, data_of(dtype), WIDTH + 2, places, out->data);
}

/* Runs of rows that parts cut anywhere, including an empty run. */
static void move(const sluice_kernels_t* k, int32_t dtype, buffer_t* out, buffer_t* more) {
  (void)more;
  const sluice_row_run_t runs[] = {{ROWS, 7, 190}, {5, 0, 0}, {3, 0, 7}, {2 * ROWS, 198, ROWS - 198}};
  k->move_rows(NULL, WIDTH * (int64_t)sluice_dtype_bytes(dtype), runs, 4, data_of(dtype), out->data);
}

static void combine(const sluice_kernels_t* k, int32_t dtype, buffer_t* out, buffer_t* more) {
  (void)more;
  k->combine_rows(NULL, dtype, ROWS, K, WIDTH - 30, data_of(dtype), places, weights, 1, ROWS, out->data, WIDTH);
}

static void combine_alone(const sluice_kernels_t* k, int32_t dtype, buffer_t* out, buffer_t* more) {
  (void)more;
  k->combine_rows(NULL, dtype, ROWS, K, WIDTH, data_of(dtype), places, NULL, 0, 0, out->data, WIDTH);
}

enum { HIDDEN = WIDTH / 2 };

static const sluice_unit_t HALVES = {SLUICE_ACTIVATION_SWIGLU, SLUICE_GATED_HALVES, 1.702f, 7, 1},
                           PAIRS = {SLUICE_ACTIVATION_SWIGLU, SLUICE_GATED_INTERLEAVED, 1.702f, 7, 1},
                           RELU = {SLUICE_ACTIVATION_RELU, SLUICE_GATED_NO, 1, 1, 0};

static void unit_forward(const sluice_kernels_t* k, int32_t dtype, buffer_t* out, buffer_t* more) {
  const void* bias = data_of(dtype);
  k->unit_forward(NULL, dtype, &HALVES, ROWS, HIDDEN, out->data, bias, bias, more->data);
}

static void unit_forward_ungated(const sluice_kernels_t* k, int32_t dtype, buffer_t* out, buffer_t* more) {
  (void)more;
  k->unit_forward(NULL, dtype, &RELU, ROWS, WIDTH, out->data, NULL, NULL, out->data);
}

/* In place, as in a pass: dpre is pre, act_w is dact. */
static float dweight[ROWS];

static void unit_backward(const sluice_kernels_t* k, int32_t dtype, buffer_t* out, buffer_t* more) {
  k->unit_backward(NULL, dtype, &PAIRS, ROWS, HIDDEN, out->data, more->data, weights, out->data, more->data, dweight);
}

static void unit_backward_ungated(const sluice_kernels_t* k, int32_t dtype, buffer_t* out, buffer_t* more) {
  k->unit_backward(NULL, dtype, &RELU, ROWS, WIDTH, out->data, data_of(dtype), weights, out->data, NULL, more->data);
}

static void add_bias(const sluice_kernels_t* k, int32_t dtype, buffer_t* out, buffer_t* more) {
  (void)more;
  k->add_bias(NULL, dtype, ROWS, WIDTH, out->data, data_of(dtype));
}

static void dot(const sluice_kernels_t* k, int32_t dtype, buffer_t* out, buffer_t* more) {
  k->dot_rows(NULL, dtype, ROWS, WIDTH, out->data, data_of(dtype), WIDTH + 1, 1, more->data);
}

static void sum(const sluice_kernels_t* k, int32_t dtype, buffer_t* out, buffer_t* more) {
  (void)more;
  k->sum_columns(NULL, dtype, 3 * ROWS - 1, WIDTH, data_of(dtype), WIDTH, weights, 1, dtype, out->data);
}

static void sum_to_f32(const sluice_kernels_t* k, int32_t dtype, buffer_t* out, buffer_t* more) {
  (void)out;
  k->sum_columns(NULL, dtype, 3 * ROWS - 1, WIDTH, data_of(dtype), WIDTH, NULL, 0, SLUICE_DTYPE_F32, more->data);
}

static void round_off(const sluice_kernels_t* k, int32_t dtype, buffer_t* out, buffer_t* more) {
  (void)more;
  k->round_rows(NULL, dtype, ROWS, WIDTH - 7, data_of(SLUICE_DTYPE_F32), 1, out->data, WIDTH);
}

static void scale(const sluice_kernels_t* k, int32_t dtype, buffer_t* out, buffer_t* more) {
  (void)more;
  k->scale_rows(NULL, dtype, ROWS, WIDTH, out->data, weights, out->data);
}

TEST(Threads_AnyNumberAndFewerThanAsked_SameBitsAsOne) {
  const int64_t all = ROWS * WIDTH;
  for (int d = 0; d < 4; ++d) {
    int32_t t = DTYPES[d], f32 = SLUICE_DTYPE_F32;
    compare("gather_rows", gather, t, all, f32, 1);
    compare("move_rows", move, t, all, f32, 1);
    compare("combine_rows", combine, t, all, f32, 1);
    compare("combine_rows without scale", combine_alone, t, all, f32, 1);
    compare("unit_forward", unit_forward, t, all, t, ROWS * HIDDEN);
    compare("unit_forward, ungated", unit_forward_ungated, t, all, f32, 1);
    compare("unit_backward", unit_backward, t, all, t, ROWS * HIDDEN);
    compare("unit_backward, ungated", unit_backward_ungated, t, all, f32, ROWS);
    compare("add_bias", add_bias, t, all, f32, 1);
    compare("dot_rows", dot, t, all, f32, ROWS);
    compare("sum_columns", sum, t, WIDTH, f32, 1);
    compare("sum_columns to f32", sum_to_f32, t == SLUICE_DTYPE_F64 ? f32 : t, 1, f32, WIDTH);
    compare("round_rows", round_off, t, all, f32, 1);
    compare("scale_rows", scale, t, all, f32, 1);
  }
}

static void* in_a_lane(void* out) {
  sluice_threads_forgo();
  gather(over, SLUICE_DTYPE_F32, out, NULL);
  return NULL;
}

TEST(Threads_LittleToDoOrNoneToSpare_OneIsTaken) {
  buffer_t out = buffer(SLUICE_DTYPE_F32, ROWS * WIDTH);
  pool_max = 4;
  pool_asked = 0;
  /* in and out: just below the threshold for two threads */
  const int64_t few = SLUICE_KERNELS_THREAD_BYTES / (WIDTH * 4);
  over->gather_rows(NULL, SLUICE_DTYPE_F32, few, WIDTH, data_of(SLUICE_DTYPE_F32), WIDTH, places, out.data);
  pool_inside = 1;
  gather(over, SLUICE_DTYPE_F32, &out, NULL);
  pool_inside = 0;
  pthread_t lane;
  assert_int_equal(pthread_create(&lane, NULL, in_a_lane, &out), 0);
  assert_int_equal(pthread_join(lane, NULL), 0);
  assert_int_equal(pool_asked, 0);
  gather(over, SLUICE_DTYPE_F32, &out, NULL);
  assert_int_equal(pool_asked, 4);
  release(&out);
}

TEST(Scalars_ThroughThePool_AsWithoutIt) {
  float want[ROWS * K], got[ROWS * K];
  plain->gather_scalars(NULL, ROWS * K, K, weights, K, 1, places, want);
  over->gather_scalars(NULL, ROWS * K, K, weights, K, 1, places, got);
  assert_memory_equal(want, got, sizeof want);
  plain->spread_scalars(NULL, ROWS, K, weights, places, want, K, 1);
  over->spread_scalars(NULL, ROWS, K, weights, places, got, K, 1);
  assert_memory_equal(want, got, sizeof want);
}

int main(void) { return run_cases(make_sources, drop_sources); }
