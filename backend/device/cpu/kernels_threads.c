// SPDX-License-Identifier: Apache-2.0
#include "backend/device/cpu/kernels_threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include "backend/base/dtype.h"

#define COLUMNS 64 /* granularity of a part: whole cache lines of every dtype */

static _Atomic(const sluice_kernels_t*) one_thread; /* the kernels that each thread calls */
static _Atomic(const sluice_threads_t*) borrowed;

static const sluice_kernels_t* plain(void) { return atomic_load_explicit(&one_thread, memory_order_acquire); }

/* ---- parts ---- */

/* Items [first, first + count) of a call. */
typedef void (*part_fn_t)(const void* call, int64_t first, int64_t count);

typedef struct parts_s {
  part_fn_t fn;
  const void* call;
  int64_t items, unit;
} parts_t;

static void run_part(void* data, int index, int count) {
  const parts_t* p = data;
  const int64_t units = (p->items + p->unit - 1) / p->unit;
  int64_t first = units * index / count * p->unit, end = units * (index + 1) / count * p->unit;
  if (end > p->items) end = p->items;
  if (first < end) p->fn(p->call, first, end - first);
}

/* Splits items at multiples of `unit`; `bytes` is the total. */
static void run_parts(part_fn_t fn, const void* call, int64_t items, int64_t unit, int64_t bytes) {
  const sluice_threads_t* pool = atomic_load_explicit(&borrowed, memory_order_acquire);
  int64_t most = bytes / SLUICE_KERNELS_THREAD_BYTES;
  int threads = most < 2 || pool == NULL ? 1 : sluice_threads_available(pool);
  if (threads > most) threads = (int)most;
  if (threads <= 1) {
    fn(call, 0, items);
    return;
  }
  parts_t parts = {fn, call, items, unit};
  sluice_threads_run(pool, threads, run_part, &parts);
}

static int64_t size_of(int32_t dtype) { return (int64_t)sluice_dtype_bytes(dtype); }

static const void* at(const void* data, int64_t bytes) { return data == NULL ? NULL : (const char*)data + bytes; }

static void* at_out(void* data, int64_t bytes) { return data == NULL ? NULL : (char*)data + bytes; }

/* ---- copying rows ---- */

typedef struct gather_s {
  sluice_stream_t stream;
  int32_t dtype;
  int64_t width;
  const void* src;
  int64_t src_stride;
  const int32_t* index;
  void* dst;
} gather_t;

static void gather_part(const void* call, int64_t first, int64_t count) {
  const gather_t* c = call;
  plain()->gather_rows(c->stream, c->dtype, count, c->width, c->src, c->src_stride, c->index + first,
                       at_out(c->dst, first * c->width * size_of(c->dtype)));
}

static void gather_rows(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* src,
                        int64_t src_stride, const int32_t* index, void* dst) {
  const gather_t call = {stream, dtype, width, src, src_stride, index, dst};
  run_parts(gather_part, &call, rows, 1, 2 * rows * width * size_of(dtype));
}

typedef struct move_s {
  sluice_stream_t stream;
  int64_t row_bytes;
  const sluice_row_run_t* runs;
  int64_t num_runs;
  const void* src;
  void* dst;
} move_t;

/* Rows are counted through all runs: a part may begin and end within a run. */
static void move_part(const void* call, int64_t first, int64_t count) {
  const move_t* c = call;
  const int64_t end = first + count;
  int64_t before = 0;
  for (int64_t i = 0; i < c->num_runs && before < end; ++i) {
    const sluice_row_run_t* run = &c->runs[i];
    int64_t skip = first > before ? first - before : 0;
    int64_t rows = (end - before < run->rows ? end - before : run->rows) - skip;
    before += run->rows;
    if (rows <= 0) continue;
    const sluice_row_run_t part = {run->src_row + skip, run->dst_row + skip, rows};
    plain()->move_rows(c->stream, c->row_bytes, &part, 1, c->src, c->dst);
  }
}

static void move_rows(sluice_stream_t stream, int64_t row_bytes, const sluice_row_run_t* runs, int64_t num_runs,
                      const void* src, void* dst) {
  int64_t rows = 0;
  for (int64_t i = 0; i < num_runs; ++i) rows += runs[i].rows;
  if (2 * rows * row_bytes < 2 * SLUICE_KERNELS_THREAD_BYTES) { /* all runs in one call */
    plain()->move_rows(stream, row_bytes, runs, num_runs, src, dst);
    return;
  }
  const move_t call = {stream, row_bytes, runs, num_runs, src, dst};
  run_parts(move_part, &call, rows, 1, 2 * rows * row_bytes);
}

typedef struct combine_s {
  sluice_stream_t stream;
  int32_t dtype;
  int64_t top_k, width;
  const void* rows;
  const int32_t* position;
  const float* scale;
  int64_t scale_t, scale_k;
  void* out;
  int64_t out_stride;
} combine_t;

static void combine_part(const void* call, int64_t first, int64_t count) {
  const combine_t* c = call;
  const float* scale = c->scale == NULL ? NULL : c->scale + first * c->scale_t;
  plain()->combine_rows(c->stream, c->dtype, count, c->top_k, c->width, c->rows, c->position + first * c->top_k, scale,
                        c->scale_t, c->scale_k, at_out(c->out, first * c->out_stride * size_of(c->dtype)),
                        c->out_stride);
}

static void combine_rows(sluice_stream_t stream, int32_t dtype, int64_t num_tokens, int64_t top_k, int64_t width,
                         const void* rows, const int32_t* position, const float* scale, int64_t scale_t,
                         int64_t scale_k, void* out, int64_t out_stride) {
  const combine_t call = {stream, dtype, top_k, width, rows, position, scale, scale_t, scale_k, out, out_stride};
  run_parts(combine_part, &call, num_tokens, 1, (top_k + 1) * num_tokens * width * size_of(dtype));
}

/* ---- activations ---- */

/* A part starts at the same row of every buffer, so buffers that alias keep the same relative position. */
typedef struct activation_s {
  sluice_stream_t stream;
  int32_t dtype;
  const sluice_unit_t* unit;
  int64_t hidden;
  const void *b1, *b3;     /* forward */
  const void *pre, *dact;  /* backward */
  const float* weight;     /* backward */
  void *pre_out, *act_out; /* forward: pre and act; backward: dpre and act_w */
  float* dweight;
} activation_t;

static void forward_part(const void* call, int64_t first, int64_t count) {
  const activation_t* c = call;
  int64_t row = c->hidden * size_of(c->dtype);
  void* pre = at_out(c->pre_out, first * row * (c->unit->gated ? 2 : 1));
  void* act = at_out(c->act_out, first * row);
  plain()->unit_forward(c->stream, c->dtype, c->unit, count, c->hidden, pre, c->b1, c->b3, act);
}

static void backward_part(const void* call, int64_t first, int64_t count) {
  const activation_t* c = call;
  int64_t row = c->hidden * size_of(c->dtype), wide = row * (c->unit->gated ? 2 : 1);
  const void *pre = at(c->pre, first * wide), *dact = at(c->dact, first * row);
  void *dpre = at_out(c->pre_out, first * wide), *act_w = at_out(c->act_out, first * row);
  plain()->unit_backward(c->stream, c->dtype, c->unit, count, c->hidden, pre, dact, c->weight + first, dpre, act_w,
                         c->dweight + first);
}

static void unit_forward(sluice_stream_t stream, int32_t dtype, const sluice_unit_t* unit, int64_t rows, int64_t hidden,
                         void* pre, const void* b1, const void* b3, void* act) {
  const activation_t call = {.stream = stream,
                             .dtype = dtype,
                             .unit = unit,
                             .hidden = hidden,
                             .b1 = b1,
                             .b3 = b3,
                             .pre_out = pre,
                             .act_out = act};
  run_parts(forward_part, &call, rows, 1, rows * hidden * size_of(dtype) * (unit->gated ? 3 : 2));
}

static void unit_backward(sluice_stream_t stream, int32_t dtype, const sluice_unit_t* unit, int64_t rows,
                          int64_t hidden, const void* pre, const void* dact, const float* weight, void* dpre,
                          void* act_w, float* dweight) {
  const activation_t call = {.stream = stream,
                             .dtype = dtype,
                             .unit = unit,
                             .hidden = hidden,
                             .pre = pre,
                             .dact = dact,
                             .weight = weight,
                             .pre_out = dpre,
                             .act_out = act_w,
                             .dweight = dweight};
  run_parts(backward_part, &call, rows, 1, rows * hidden * size_of(dtype) * (unit->gated ? 6 : 4));
}

/* ---- rows and vectors ---- */

/* Arguments of the smaller kernels; each uses some of them. */
typedef struct rows_s {
  sluice_stream_t stream;
  int32_t dtype, dtype_out, accumulate;
  int64_t width, rows, in_stride, out_stride;
  const void *in, *other;
  const float *weight, *sums;
  void* out;
} rows_t;

static void add_bias_part(const void* call, int64_t first, int64_t count) {
  const rows_t* c = call;
  plain()->add_bias(c->stream, c->dtype, count, c->width, at_out(c->out, first * c->width * size_of(c->dtype)),
                    c->other);
}

static void add_bias(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, void* data, const void* bias) {
  const rows_t call = {.stream = stream, .dtype = dtype, .width = width, .other = bias, .out = data};
  run_parts(add_bias_part, &call, rows, 1, 2 * rows * width * size_of(dtype));
}

static void dot_part(const void* call, int64_t first, int64_t count) {
  const rows_t* c = call;
  plain()->dot_rows(c->stream, c->dtype, count, c->width, at(c->in, first * c->width * size_of(c->dtype)),
                    at(c->other, first * c->in_stride * size_of(c->dtype)), c->in_stride, c->accumulate,
                    (float*)c->out + first);
}

static void dot_rows(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* a, const void* b,
                     int64_t b_stride, int32_t accumulate, float* out) {
  const rows_t call = {.stream = stream,
                       .dtype = dtype,
                       .accumulate = accumulate,
                       .width = width,
                       .in_stride = b_stride,
                       .in = a,
                       .other = b,
                       .out = out};
  run_parts(dot_part, &call, rows, 1, 2 * rows * width * size_of(dtype));
}

/* Divided by columns, because each column is a separate sum. */
static void sum_part(const void* call, int64_t first, int64_t count) {
  const rows_t* c = call;
  plain()->sum_columns(c->stream, c->dtype, c->rows, count, at(c->in, first * size_of(c->dtype)), c->in_stride,
                       c->weight, c->accumulate, c->dtype_out, at_out(c->out, first * size_of(c->dtype_out)));
}

static void sum_columns(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* data,
                        int64_t data_stride, const float* weight, int32_t accumulate, int32_t dtype_out, void* out) {
  const rows_t call = {.stream = stream,
                       .dtype = dtype,
                       .dtype_out = dtype_out,
                       .accumulate = accumulate,
                       .rows = rows,
                       .in_stride = data_stride,
                       .in = data,
                       .weight = weight,
                       .out = out};
  run_parts(sum_part, &call, width, COLUMNS, rows * width * size_of(dtype));
}

static void round_part(const void* call, int64_t first, int64_t count) {
  const rows_t* c = call;
  plain()->round_rows(c->stream, c->dtype, count, c->width, c->sums + first * c->width, c->accumulate,
                      at_out(c->out, first * c->out_stride * size_of(c->dtype)), c->out_stride);
}

static void round_rows(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const float* sums,
                       int32_t accumulate, void* out, int64_t out_stride) {
  const rows_t call = {.stream = stream,
                       .dtype = dtype,
                       .accumulate = accumulate,
                       .width = width,
                       .out_stride = out_stride,
                       .sums = sums,
                       .out = out};
  run_parts(round_part, &call, rows, 1, rows * width * ((int64_t)sizeof *sums + size_of(dtype)));
}

static void scale_part(const void* call, int64_t first, int64_t count) {
  const rows_t* c = call;
  int64_t offset = first * c->width * size_of(c->dtype);
  plain()->scale_rows(c->stream, c->dtype, count, c->width, at(c->in, offset), c->weight + first,
                      at_out(c->out, offset));
}

static void scale_rows(sluice_stream_t stream, int32_t dtype, int64_t rows, int64_t width, const void* src,
                       const float* weight, void* dst) {
  const rows_t call = {.stream = stream, .dtype = dtype, .width = width, .in = src, .weight = weight, .out = dst};
  run_parts(scale_part, &call, rows, 1, 2 * rows * width * size_of(dtype));
}

/* One scalar per row is never enough work for a second thread. */
static void gather_scalars(sluice_stream_t stream, int64_t count, int64_t top_k, const float* src, int64_t src_t,
                           int64_t src_k, const int32_t* route, float* dst) {
  plain()->gather_scalars(stream, count, top_k, src, src_t, src_k, route, dst);
}

static void spread_scalars(sluice_stream_t stream, int64_t num_tokens, int64_t top_k, const float* rows,
                           const int32_t* position, float* out, int64_t out_t, int64_t out_k) {
  plain()->spread_scalars(stream, num_tokens, top_k, rows, position, out, out_t, out_k);
}

#include "backend/device/cpu/kernels_table.inc.h"

const sluice_kernels_t* sluice_cpu_kernels_over(const sluice_kernels_t* kernels, const sluice_threads_t* pool) {
  atomic_store_explicit(&one_thread, kernels, memory_order_release);
  atomic_store_explicit(&borrowed, pool, memory_order_release);
  return &table;
}

const sluice_kernels_t* sluice_cpu_kernels_shared(void) {
  static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  static sluice_threads_t found; /* immutable once complete */
  pthread_mutex_lock(&mutex);
  if (found.parallel == NULL) found = sluice_threads_find();
  const sluice_kernels_t* shared =
      sluice_cpu_kernels_over(sluice_cpu_kernels(), found.parallel == NULL ? NULL : &found);
  pthread_mutex_unlock(&mutex);
  return shared;
}
