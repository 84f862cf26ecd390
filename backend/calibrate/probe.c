// SPDX-License-Identifier: Apache-2.0
#include "backend/calibrate/probe.h"

#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/dtype.h"
#include "backend/base/math.h"

#define MOST_WIDTH 4096
#define SCALARS    64 /* bytes to each peer */

/* ---- memory ---- */

/* Lays out all memory except the target of copies. */
static void lay_out(sluice_bench_t* b, uint64_t rows, uint64_t pre_activation, uint64_t weights, uint64_t moved,
                    uint64_t small) {
  char* at = b->memory;
  b->rows = at, at += rows;
  b->pre_activation = at, at += 2 * pre_activation;
  b->weights = at, at += weights;
  b->grads = at, at += weights;
  b->send = at, at += moved;
  b->recv = at, at += moved;
  b->index = (int32_t*)(void*)at, at += small;
  b->scalars = (float*)(void*)at, at += small;
  b->sums = (float*)(void*)at;
}

void sluice_bench_fill_tables(int32_t* index, float* scalars) {
  for (int32_t i = 0; i < SLUICE_BENCH_ROWS; ++i) {
    index[i] = (int32_t)((int64_t)i * 7919 % SLUICE_BENCH_ROWS); /* scattered, like routes */
    scalars[i] = 0.5f;
  }
}

static sluice_status_t open_near(sluice_bench_t* b) {
  b->memory = sluice_alloc(sluice_process_allocator(), b->bytes, "calibration");
  b->copied = sluice_alloc(sluice_process_allocator(), SLUICE_BENCH_BYTES, "calibration");
  if (b->memory == NULL || b->copied == NULL) return sluice_alloc_status();
  memset(b->memory, 0x3c, b->bytes); /* small finite numbers in every dtype */
  memset(b->copied, 0x3c, SLUICE_BENCH_BYTES);
  return SLUICE_OK;
}

sluice_status_t sluice_bench_open(sluice_context_t* context, const sluice_calibration_t* wanted, sluice_bench_t* b) {
  memset(b, 0, sizeof *b);
  b->context = context, b->dtype = wanted->dtype, b->element = sluice_dtype_bytes(wanted->dtype);
  b->model_width = sluice_min(wanted->model_width, MOST_WIDTH);
  b->hidden_width = sluice_min(wanted->hidden_width, MOST_WIDTH);
  uint64_t rows = sluice_align_up(SLUICE_BENCH_ROWS * (uint64_t)b->model_width * b->element);
  uint64_t pre_activation = sluice_align_up(SLUICE_BENCH_ROWS * (uint64_t)b->hidden_width * b->element);
  uint64_t weights = sluice_align_up((uint64_t)(b->model_width * b->hidden_width) * b->element);
  uint64_t moved = (uint64_t)SLUICE_BENCH_BYTES + (uint64_t)context->world_size * SLUICE_ALIGNMENT;
  uint64_t small = sluice_align_up(SLUICE_BENCH_ROWS * sizeof(int32_t));
  b->bytes = rows + 2 * pre_activation + 2 * weights + 2 * moved + 3 * small;
  sluice_status_t status = sluice_bench_on_device_memory(b) ? sluice_bench_open_on_device(b) : open_near(b);
  if (status == SLUICE_OK) {
    lay_out(b, rows, pre_activation, weights, moved, small);
    if (!sluice_bench_on_device_memory(b)) {
      sluice_bench_fill_tables(b->index, b->scalars);
    } else {
      status = sluice_bench_send_tables_on_device(b);
    }
  }
  if (status != SLUICE_OK) {
    sluice_error_info_t why;
    sluice_error_capture(&why);
    sluice_bench_close(b);
    return sluice_error_adopt(&why);
  }
  return SLUICE_OK;
}

void sluice_bench_close(sluice_bench_t* bench) {
  if (sluice_bench_on_device_memory(bench)) {
    sluice_bench_close_on_device(bench);
  } else {
    sluice_free(sluice_process_allocator(), bench->memory, bench->bytes);
    sluice_free(sluice_process_allocator(), bench->copied, SLUICE_BENCH_BYTES);
  }
  bench->memory = bench->copied = NULL;
}

sluice_status_t sluice_bench_longest(sluice_bench_t* b, double* seconds, int32_t count) {
  if (b->context->comm == NULL) return SLUICE_OK;
  int64_t femtoseconds[SLUICE_PROBES];
  for (int32_t i = 0; i < count; ++i) femtoseconds[i] = (int64_t)(seconds[i] * 1e15);
  SLUICE_TRY(sluice_comm_all_reduce_i64(b->context->comm, femtoseconds, count, SLUICE_REDUCE_MAX, "calibration"));
  for (int32_t i = 0; i < count; ++i) seconds[i] = (double)femtoseconds[i] * 1e-15;
  return SLUICE_OK;
}

/* ---- ops ---- */

/* The three GEMMs of an expert: y = x W', dx = dy W, dW = dy' x, with W [H, M] row-major. */
static sluice_status_t run_gemm(sluice_bench_t* b, int32_t form, int64_t rows, sluice_stream_t stream) {
  int64_t m = b->model_width, h = b->hidden_width;
  const sluice_matrix_t x = {b->rows, m, 1}, y = {b->pre_activation, h, 1}, w = {b->weights, m, 1};
  const sluice_matrix_t transposed_w = {b->weights, 1, m}, transposed_y = {b->pre_activation, 1, h},
                        dw = {b->grads, m, 1};
  sluice_gemm_problem_t problem = {rows, h, m, x, transposed_w, y};
  if (form == SLUICE_FORM_INPUT_GRAD) problem = (sluice_gemm_problem_t){rows, m, h, y, w, x};
  if (form == SLUICE_FORM_WEIGHT_GRAD) problem = (sluice_gemm_problem_t){h, m, rows, transposed_y, x, dw};
  const sluice_grouped_gemm_t list = {&problem, 1, b->dtype, b->dtype, 0, stream};
  return sluice_gemm_run(b->context->gemm, &list);
}

/* Exchanges bytes such that a rank receives the given number, spread evenly over the others; with `hot`, only the first
 * rank receives. With device memory it is enqueued, and *out_request stays NULL. */
static sluice_status_t start_exchange(sluice_bench_t* b, int64_t bytes, int hot, char* from, char* to,
                                      sluice_stream_t stream, sluice_comm_request_t** out_request) {
  int32_t world = b->context->world_size, self = b->context->rank;
  const void* send[256];
  void* recv[256];
  uint64_t send_bytes[256], recv_bytes[256];
  if (world > 256) return SLUICE_FAIL(SLUICE_E_UNSUPPORTED, "calibration: at most 256 ranks, found %d", world);
  uint64_t each = (uint64_t)(bytes / (world - 1));
  for (int32_t r = 0, at = 0; r < world; ++r) {
    send[r] = from + (uint64_t)at * sluice_align_up(each);
    recv[r] = to + (uint64_t)at * sluice_align_up(each);
    send_bytes[r] = r == self || (hot && r != 0) ? 0 : each;
    recv_bytes[r] = r == self || (hot && self != 0) ? 0 : each;
    at += r != self;
  }
  const sluice_exchange_t exchange = {send, send_bytes, recv, recv_bytes};
  if (sluice_bench_on_device_memory(b)) return sluice_comm_exchange_enqueue(b->context->comm, &exchange, stream);
  return sluice_comm_exchange_start(b->context->comm, &exchange, out_request);
}

static sluice_status_t run_exchange(sluice_bench_t* b, int64_t bytes, int hot, sluice_stream_t stream) {
  sluice_comm_request_t* request = NULL;
  SLUICE_TRY(start_exchange(b, bytes, hot, b->send, b->recv, stream, &request));
  return request == NULL ? SLUICE_OK : sluice_comm_exchange_wait(b->context->comm, request, "calibration");
}

/* If the second exchange cannot start, the first one is waited for: it uses memory that is freed. Not with device
 * memory. */
static sluice_status_t run_two_exchanges(sluice_bench_t* b, int64_t bytes) {
  sluice_comm_request_t *first = NULL, *second = NULL;
  SLUICE_TRY(start_exchange(b, bytes, 0, b->send, b->recv, NULL, &first));
  /* Scalars of few rows, in the space of copies. */
  sluice_status_t started = start_exchange(b, SCALARS * (int64_t)(b->context->world_size - 1), 0, b->copied,
                                           b->copied + SLUICE_BENCH_BYTES / 2, NULL, &second);
  sluice_status_t status = sluice_comm_exchange_wait(b->context->comm, first, "calibration");
  if (started != SLUICE_OK) return started;
  sluice_status_t waited = sluice_comm_exchange_wait(b->context->comm, second, "calibration");
  return status != SLUICE_OK ? status : waited;
}

sluice_status_t sluice_bench_run_jobs(sluice_bench_t* b, const sluice_job_t* jobs, int32_t count, sluice_job_fn_t fn,
                                      void* user) {
  sluice_device_t* device = b->context->device;
  SLUICE_TRY(device->vtable->begin(device, count, fn, user, NULL));
  sluice_status_t status = SLUICE_OK;
  for (int32_t i = 0; i < count && status == SLUICE_OK; ++i) status = device->vtable->submit(device, &jobs[i]);
  sluice_status_t joined = device->vtable->join(device);
  return status != SLUICE_OK ? status : joined;
}

static sluice_status_t do_nothing(void* user, int32_t index, sluice_stream_t stream) {
  (void)user, (void)index, (void)stream;
  return SLUICE_OK;
}

/* A chain over two lanes, in which each job waits for the previous one on the other lane. */
static sluice_status_t run_launches(sluice_bench_t* b, int32_t count) {
  int32_t other = b->context->comm == NULL ? SLUICE_LANE_COMPUTE : SLUICE_LANE_COMM, waits[256];
  sluice_job_t jobs[256];
  for (int32_t i = 0; i < count; ++i) {
    waits[i] = i - 1;
    jobs[i] = (sluice_job_t){i, i % 2 ? other : SLUICE_LANE_COMPUTE, &waits[i], i > 0 && other != 0, 0};
  }
  return sluice_bench_run_jobs(b, jobs, count, do_nothing, NULL);
}

static sluice_status_t copy(sluice_bench_t* b, int is_in, uint64_t bytes, sluice_stream_t stream) {
  sluice_device_t* device = b->context->device;
  if (sluice_bench_on_device_memory(b)) {
    char* apart = b->send + SLUICE_BENCH_BYTES / 2; /* exchanges in flight may read the first half */
    return device->memory->copy(device, stream, is_in ? apart : b->copied, is_in ? b->copied : b->send, bytes);
  }
  memcpy(b->copied, b->send, bytes); /* host memory has no direction, and another thread may be sending from `send` */
  return SLUICE_OK;
}

static void run_activation(sluice_bench_t* b, int32_t activation, int32_t direction, int64_t rows,
                           sluice_stream_t stream) {
  const sluice_kernels_t* kernels = b->context->device->kernels;
  const sluice_unit_t unit = {activation, SLUICE_GATED_NO, 1, 1, 0};
  char* other = b->pre_activation + SLUICE_BENCH_ROWS * (uint64_t)b->hidden_width * b->element;
  if (direction == SLUICE_FORWARD) {
    kernels->unit_forward(stream, b->dtype, &unit, rows, b->hidden_width, b->pre_activation, NULL, NULL, other);
  } else {
    kernels->unit_backward(stream, b->dtype, &unit, rows, b->hidden_width, b->pre_activation, other, b->scalars,
                           b->recv, other, b->sums);
  }
}

static sluice_status_t run_once(sluice_bench_t* b, const sluice_probe_t* p, sluice_stream_t stream) {
  const sluice_kernels_t* kernels = b->context->device->kernels;
  int64_t row_bytes = b->model_width * (int64_t)b->element;
  switch (p->kind) {
    case SLUICE_PROBE_ROWS:
      /* To memory that exchanges send, as packing does. */
      kernels->gather_rows(stream, b->dtype, sluice_min(p->size, SLUICE_BENCH_BYTES) / row_bytes, b->model_width,
                           b->rows, b->model_width, b->index, b->send);
      return SLUICE_OK;
    case SLUICE_PROBE_COPY:
    case SLUICE_PROBE_COPY_IN: return copy(b, p->kind == SLUICE_PROBE_COPY_IN, (uint64_t)p->size, stream);
    case SLUICE_PROBE_ACTIVATION:
    case SLUICE_PROBE_ACTIVATION_GRAD:
      run_activation(b, SLUICE_ACTIVATION_GELU, p->kind != SLUICE_PROBE_ACTIVATION, p->size, stream);
      return SLUICE_OK;
    case SLUICE_PROBE_RELU:
    case SLUICE_PROBE_RELU_GRAD:
      run_activation(b, SLUICE_ACTIVATION_RELU, p->kind != SLUICE_PROBE_RELU, p->size, stream);
      return SLUICE_OK;
    case SLUICE_PROBE_EXCHANGE: return run_exchange(b, p->size, 0, stream);
    case SLUICE_PROBE_HOT_EXCHANGE: return run_exchange(b, p->size, 1, stream);
    case SLUICE_PROBE_TWO_EXCHANGES: return run_two_exchanges(b, p->size);
    case SLUICE_PROBE_LAUNCH: return run_launches(b, (int32_t)p->size);
    default: return run_gemm(b, p->kind - SLUICE_PROBE_GEMM, p->size, stream);
  }
}

sluice_status_t sluice_bench_run(sluice_bench_t* b, const sluice_probe_t* p, int32_t repeats, sluice_stream_t stream) {
  for (int32_t i = 0; i < repeats; ++i) SLUICE_TRY(run_once(b, p, stream));
  return SLUICE_OK;
}

static int32_t lane_of(int32_t kind) {
  switch (kind) {
    case SLUICE_PROBE_EXCHANGE:
    case SLUICE_PROBE_HOT_EXCHANGE: return SLUICE_LANE_COMM;
    case SLUICE_PROBE_COPY: return SLUICE_LANE_COPY_OUT;
    case SLUICE_PROBE_COPY_IN: return SLUICE_LANE_COPY_IN;
    default: return SLUICE_LANE_COMPUTE;
  }
}

static sluice_status_t time_on_device(sluice_bench_t* b, const sluice_probe_t* p, int32_t repeats,
                                      double* out_seconds) {
  if (p->kind == SLUICE_PROBE_LAUNCH) {
    double sum = 0;
    for (int32_t i = 0; i < repeats; ++i) {
      SLUICE_TRY(sluice_bench_launch_on_device(b, (int32_t)p->size, out_seconds));
      sum += *out_seconds;
    }
    *out_seconds = sum;
    return SLUICE_OK;
  }
  sluice_bench_job_t job = {lane_of(p->kind), p, repeats, 0};
  SLUICE_TRY(sluice_bench_run_on_device(b, &job, 1));
  *out_seconds = job.seconds;
  return SLUICE_OK;
}

sluice_status_t sluice_bench_time(sluice_bench_t* b, const sluice_probe_t* p, int32_t repeats, double* out_seconds) {
  if (sluice_bench_on_device_memory(b)) return time_on_device(b, p, repeats, out_seconds);
  uint64_t begin = sluice_now_ns();
  SLUICE_TRY(sluice_bench_run(b, p, repeats, NULL));
  *out_seconds = (double)(sluice_now_ns() - begin) * 1e-9;
  return SLUICE_OK;
}
