// SPDX-License-Identifier: Apache-2.0
/* sluice_swap_predict: simulates swapping in virtual time, with the rules of order.h, the given seconds of layers, and
 * one link. */
#include "backend/base/math.h"
#include "backend/base/structs.h"
#include "backend/swap/order.h"

SLUICE_DEFINE_INIT(sluice_swap_workload, .num_micro_batches = 1, .in_flight = 1)

/* The times at which the copies of one layer end, for one micro-batch. */
typedef struct times_s {
  double out_ends;
  double in_ends;
} times_t;

typedef struct run_s {
  const sluice_swap_workload_t* w;
  sluice_swap_order_t order;
  sluice_swap_op_t* ops; /* [room] */
  int32_t room;
  times_t* times; /* [in_flight][num_layers] */
  double now;
  double link_is_free; /* time at which the link becomes free */
  double last_out;     /* end of the newest copy out */
  uint64_t near, out;  /* bytes of swapped layers now: on the device, and out */
  sluice_swap_prediction_t found;
} run_t;

static times_t* times_of(run_t* r, const sluice_swap_op_t* op) {
  return r->times + (op->micro_batch % r->w->in_flight) * r->w->num_layers + op->layer;
}

static uint64_t bytes_of(const run_t* r, int32_t layer) { return r->w->layers[layer].bytes; }

static double copy(run_t* r, int32_t layer) {
  r->link_is_free = sluice_max(r->link_is_free, r->now) + (double)bytes_of(r, layer) / r->w->bytes_per_second;
  return r->link_is_free;
}

static void wait_until(run_t* r, double end) {
  if (end <= r->now) return;
  r->found.wait_seconds += end - r->now;
  ++r->found.num_waits;
  r->now = end;
}

static void run_op(run_t* r, const sluice_swap_op_t* op) {
  const uint64_t bytes = bytes_of(r, op->layer);
  switch (op->kind) {
    case SLUICE_SWAP_OP_PUT:
      times_of(r, op)->out_ends = r->last_out = copy(r, op->layer);
      r->found.out_bytes += bytes;
      r->out += bytes;
      r->found.most_out_bytes = sluice_max(r->found.most_out_bytes, r->out);
      break;
    case SLUICE_SWAP_OP_SETTLE:
      wait_until(r, times_of(r, op)->out_ends);
      r->near -= bytes;
      break;
    case SLUICE_SWAP_OP_PREFETCH:
      times_of(r, op)->in_ends = copy(r, op->layer);
      r->found.in_bytes += bytes;
      r->near += bytes;
      break;
    case SLUICE_SWAP_OP_TAKE:
      wait_until(r, times_of(r, op)->in_ends);
      r->out -= bytes;
      break;
    default: r->out -= bytes; break;
  }
  r->found.most_near_bytes = sluice_max(r->found.most_near_bytes, r->near);
}

static sluice_status_t reach(run_t* r, int32_t event, int32_t micro_batch, int32_t layer) {
  int32_t count = 0;
  SLUICE_TRY(
      sluice_swap_order_reach(&r->order, event, micro_batch, layer, r->last_out <= r->now, r->ops, r->room, &count));
  for (int32_t i = 0; i < count; ++i) run_op(r, r->ops + i);
  return SLUICE_OK;
}

static void compute(run_t* r, double seconds) {
  r->now += seconds;
  r->found.compute_seconds += seconds;
}

/* A layer occupies its bytes from the start of its forward on. */
static sluice_status_t forward(run_t* r, int32_t micro_batch) {
  for (int32_t layer = 0; layer < r->w->num_layers; ++layer) {
    r->near += bytes_of(r, layer);
    r->found.most_near_bytes = sluice_max(r->found.most_near_bytes, r->near);
    compute(r, r->w->layers[layer].forward_seconds);
    SLUICE_TRY(reach(r, SLUICE_SWAP_FORWARD_ENDS, micro_batch, layer));
  }
  return SLUICE_OK;
}

static sluice_status_t backward(run_t* r, int32_t micro_batch) {
  SLUICE_TRY(reach(r, SLUICE_SWAP_BACKWARD_NEXT, micro_batch, 0));
  for (int32_t layer = r->w->num_layers - 1; layer >= 0; --layer) {
    SLUICE_TRY(reach(r, SLUICE_SWAP_BACKWARD_BEGINS, micro_batch, layer));
    compute(r, r->w->layers[layer].backward_seconds);
    r->near -= bytes_of(r, layer);
  }
  return reach(r, SLUICE_SWAP_BACKWARD_ENDS, micro_batch, 0);
}

static sluice_status_t run_batch(run_t* r) {
  const int32_t count = r->w->num_micro_batches;
  for (int32_t begun = 0, ended = 0; ended < count;) {
    if (begun < count && begun - ended < r->w->in_flight) {
      SLUICE_TRY(forward(r, begun++));
    } else {
      SLUICE_TRY(backward(r, ended++));
    }
  }
  r->found.seconds = r->now;
  return SLUICE_OK;
}

static sluice_status_t check(const sluice_swap_workload_t* w) {
  SLUICE_TRY(SLUICE_REQUIRE(w->num_layers >= 1 && w->num_layers <= 1 << 16 && w->layers != NULL,
                            "sluice_swap_workload_t: num_layers is %d; give 1 to 65536 layers", w->num_layers));
  SLUICE_TRY(SLUICE_REQUIRE(w->num_micro_batches >= 1 && w->in_flight >= 1 && w->in_flight <= w->num_micro_batches,
                            "sluice_swap_workload_t: in_flight is %d; it must be in [1, num_micro_batches = %d]",
                            w->in_flight, w->num_micro_batches));
  SLUICE_TRY(SLUICE_REQUIRE((int64_t)w->in_flight * w->num_layers <= 1 << 24,
                            "sluice_swap_workload_t: in_flight times num_layers is over %d", 1 << 24));
  SLUICE_TRY(SLUICE_REQUIRE(w->bytes_per_second > 0, "sluice_swap_workload_t: bytes_per_second is %g; give more than 0",
                            w->bytes_per_second));
  SLUICE_TRY(SLUICE_REQUIRE(w->reserved == 0, "sluice_swap_workload_t: reserved is %d; set it to 0", w->reserved));
  for (int32_t layer = 0; layer < w->num_layers; ++layer) {
    const sluice_swap_layer_t* l = w->layers + layer;
    SLUICE_TRY(SLUICE_REQUIRE(l->forward_seconds >= 0 && l->backward_seconds >= 0,
                              "sluice_swap_workload_t: layer %d takes %g and %g seconds; both must be at least 0",
                              layer, l->forward_seconds, l->backward_seconds));
  }
  return SLUICE_OK;
}

static sluice_status_t simulate(const sluice_swap_workload_t* w, sluice_swap_prediction_t* out_prediction) {
  sluice_allocator_t* allocator = sluice_process_allocator();
  SLUICE_TRY(check(w));
  const uint64_t times_bytes = (uint64_t)w->in_flight * (uint64_t)w->num_layers * sizeof(times_t);
  run_t r = {.w = w, .room = sluice_max(w->num_layers + 1, SLUICE_SWAP_MOST_OPS)};
  const uint64_t ops_bytes = (uint64_t)r.room * sizeof *r.ops;
  const uint64_t flag_bytes = (uint64_t)w->num_layers * sizeof(int32_t);
  int32_t* swapped = sluice_alloc(allocator, flag_bytes, "swap: a prediction");
  sluice_status_t status = swapped == NULL ? sluice_alloc_status() : SLUICE_OK;
  if (status == SLUICE_OK) {
    for (int32_t layer = 0; layer < w->num_layers; ++layer) swapped[layer] = w->layers[layer].bytes > 0;
    r.ops = sluice_alloc(allocator, ops_bytes, "swap: a prediction");
    r.times = r.ops == NULL ? NULL : sluice_alloc_zeroed(allocator, times_bytes, "swap: a prediction");
    status = r.times == NULL ? sluice_alloc_status() : SLUICE_OK;
  }
  if (status == SLUICE_OK) status = sluice_swap_order_init(&r.order, swapped, w->num_layers, allocator);
  if (status == SLUICE_OK) status = run_batch(&r);
  if (status == SLUICE_OK) *out_prediction = r.found;
  sluice_swap_order_deinit(&r.order);
  sluice_free(allocator, r.times, times_bytes);
  sluice_free(allocator, r.ops, ops_bytes);
  sluice_free(allocator, swapped, flag_bytes);
  return status;
}

sluice_status_t sluice_swap_predict(const sluice_swap_workload_t* workload, sluice_swap_prediction_t* out_prediction) {
  SLUICE_TRY(SLUICE_REQUIRE(out_prediction != NULL, "sluice_swap_predict: out_prediction is NULL"));
  SLUICE_TRY(sluice_struct_check_size(out_prediction, "sluice_swap_prediction_t"));
  SLUICE_READ_EXTENSIBLE(sluice_swap_workload, w, workload, sizeof w);
  sluice_swap_prediction_t prediction = {.seconds = 0};
  SLUICE_TRY(simulate(&w, &prediction));
  sluice_struct_give(out_prediction, &prediction, sizeof prediction);
  return SLUICE_OK;
}
