// SPDX-License-Identifier: Apache-2.0
/* The rules of swapping under every order of events of a stage, checked by the meaning of the ops; and simulated
 * times. */
#include <math.h>

#include "backend/swap/order.h"
#include "third_party/bazel/test.h"

enum { MOST_LAYERS = 4, MOST_MICRO_BATCHES = 3, MOST_STEPS = 256 };

/* ---- the checker: a list of computations and ops, and the layers on the device ---- */

enum { RUN_FORWARD = 100, RUN_BACKWARD = 101 }; /* kinds in addition to those of ops */

typedef struct trace_s {
  sluice_swap_op_t steps[MOST_STEPS];
  int32_t count;
  const int32_t* swapped;
} trace_t;

enum { NOWHERE, RUNS, LEAVES, OUT, COMES, USED };

/* Returns the first fault; NULL: the list is valid. */
static const char* check(const trace_t* t) {
  int32_t where[MOST_MICRO_BATCHES][MOST_LAYERS] = {{NOWHERE}};
  for (int32_t i = 0; i < t->count; ++i) {
    const sluice_swap_op_t* step = t->steps + i;
    int32_t* at = &where[step->micro_batch][step->layer];
    int32_t near = 0;
    if (!t->swapped[step->layer] && step->kind < RUN_FORWARD) return "an op of a layer that is kept";
    switch (step->kind) {
      case RUN_FORWARD:
        if (t->swapped[step->layer]) *at = RUNS;
        break;
      case RUN_BACKWARD:
        if (t->swapped[step->layer] && *at != USED) return "a backward without what its forward has saved";
        break;
      case SLUICE_SWAP_OP_PUT:
        if (*at != RUNS) return "a put of what is not there";
        *at = LEAVES;
        break;
      case SLUICE_SWAP_OP_SETTLE:
        if (*at != LEAVES) return "a settle of what does not leave";
        *at = OUT;
        break;
      case SLUICE_SWAP_OP_PREFETCH:
        if (*at != OUT) return "a fetch of what is not out";
        *at = COMES;
        break;
      case SLUICE_SWAP_OP_TAKE:
        if (*at != COMES) return "a take of what does not come";
        *at = USED;
        break;
      default: *at = NOWHERE; break;
    }
    for (int32_t k = 0; k < MOST_MICRO_BATCHES; ++k) {
      for (int32_t layer = 0; layer < MOST_LAYERS; ++layer)
        near += where[k][layer] == LEAVES || where[k][layer] == COMES;
    }
    /* Between a put and its settle there may be one more, because nothing runs in between. */
    if (near > 1 && step->kind >= RUN_FORWARD) return "a layer runs, and two more are on the device";
    if (step->kind == RUN_BACKWARD) *at = NOWHERE;
  }
  for (int32_t k = 0; k < MOST_MICRO_BATCHES; ++k) {
    for (int32_t layer = 0; layer < MOST_LAYERS; ++layer) {
      if (where[k][layer] != NOWHERE) return "something is left over";
    }
  }
  return NULL;
}

/* ---- every order ---- */

typedef struct choices_s {
  int32_t taken[MOST_STEPS], of[MOST_STEPS];
  int32_t count, next;
} choices_t;

static int32_t choose(choices_t* c, int32_t of) {
  if (c->next == c->count) c->taken[c->count] = 0, c->of[c->count++] = of;
  return c->taken[c->next++];
}

/* Advances to the next combination. Returns 0 after the last one. */
static int32_t go_on(choices_t* c) {
  while (c->count > 0 && c->taken[c->count - 1] + 1 == c->of[c->count - 1]) --c->count;
  if (c->count == 0) return 0;
  ++c->taken[c->count - 1];
  c->next = 0;
  return 1;
}

typedef struct walk_s {
  sluice_swap_order_t order;
  choices_t choices;
  trace_t trace;
  int32_t leaves; /* copies out that may not have ended yet */
} walk_t;

static void note(walk_t* w, int32_t kind, int64_t micro_batch, int32_t layer) {
  assert_true(w->trace.count < MOST_STEPS);
  w->trace.steps[w->trace.count++] = (sluice_swap_op_t){.micro_batch = micro_batch, .kind = kind, .layer = layer};
}

static void reach(walk_t* w, int32_t event, int64_t micro_batch, int32_t layer) {
  sluice_swap_op_t ops[MOST_LAYERS + 1];
  int32_t count = 0;
  const int32_t has_left = !w->leaves || choose(&w->choices, 2);
  assert_int_equal(
      sluice_swap_order_reach(&w->order, event, micro_batch, layer, has_left, ops, MOST_LAYERS + 1, &count), SLUICE_OK);
  for (int32_t i = 0; i < count; ++i) {
    note(w, ops[i].kind, ops[i].micro_batch, ops[i].layer);
    w->leaves += (ops[i].kind == SLUICE_SWAP_OP_PUT) - (ops[i].kind == SLUICE_SWAP_OP_SETTLE);
  }
}

static void forward(walk_t* w, int64_t micro_batch, int32_t num_layers) {
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    note(w, RUN_FORWARD, micro_batch, layer);
    reach(w, SLUICE_SWAP_FORWARD_ENDS, micro_batch, layer);
  }
}

/* The backward may end above layers that are not trained. */
static void backward(walk_t* w, int64_t micro_batch, int32_t num_layers) {
  const int32_t last = choose(&w->choices, 2) ? 1 : 0;
  for (int32_t layer = num_layers - 1; layer >= last; --layer) {
    reach(w, SLUICE_SWAP_BACKWARD_BEGINS, micro_batch, layer);
    note(w, RUN_BACKWARD, micro_batch, layer);
  }
  reach(w, SLUICE_SWAP_BACKWARD_ENDS, micro_batch, 0);
}

static void walk(walk_t* w, int32_t num_layers, int32_t num_micro_batches) {
  for (int32_t begun = 0, ended = 0; ended < num_micro_batches;) {
    const int32_t may_begin = begun < num_micro_batches, may_end = ended < begun;
    if (may_begin && (!may_end || choose(&w->choices, 2) == 0)) {
      forward(w, begun++, num_layers);
    } else {
      backward(w, ended++, num_layers);
    }
    if (ended < begun && choose(&w->choices, 2)) reach(w, SLUICE_SWAP_BACKWARD_NEXT, ended, 0);
  }
}

TEST(Rules_UnderEveryOrder_LeaveTwoLayersOnTheDeviceAtMost) {
  int64_t num_walks = 0;
  static const int32_t sizes[][2] = {{1, 3}, {2, 2}, {3, 1}, {4, 1}};
  for (size_t s = 0; s < sizeof sizes / sizeof *sizes; ++s) {
    for (int32_t mask = 0; mask < 1 << sizes[s][0]; ++mask) {
      int32_t swapped[MOST_LAYERS] = {0};
      for (int32_t layer = 0; layer < sizes[s][0]; ++layer) swapped[layer] = mask >> layer & 1;
      walk_t w = {.trace = {.swapped = swapped}};
      do {
        assert_int_equal(sluice_swap_order_init(&w.order, swapped, sizes[s][0], sluice_process_allocator()), SLUICE_OK);
        w.trace.count = w.leaves = 0;
        walk(&w, sizes[s][0], sizes[s][1]);
        const char* wrong = check(&w.trace);
        if (wrong != NULL) fail_msg("%d layers, %d micro-batches, mask %d: %s", sizes[s][0], sizes[s][1], mask, wrong);
        assert_int_equal(w.order.count, 0);
        sluice_swap_order_deinit(&w.order);
        ++num_walks;
      } while (go_on(&w.choices));
    }
  }
  print_message("%lld orders\n", (long long)num_walks);
  assert_true(num_walks > 10000);
}

/* The checker finds each missing op, and most swaps of two adjacent ops. */
TEST(Checker_OfAListWithAPlantedError_FindsIt) {
  static const int32_t swapped[MOST_LAYERS] = {1, 1, 1, 0};
  walk_t w = {.trace = {.swapped = swapped}};
  assert_int_equal(sluice_swap_order_init(&w.order, swapped, MOST_LAYERS, sluice_process_allocator()), SLUICE_OK);
  walk(&w, MOST_LAYERS, 2);
  sluice_swap_order_deinit(&w.order);
  assert_null(check(&w.trace));
  int32_t num_ops = 0;
  for (int32_t i = 0; i < w.trace.count; ++i) {
    if (w.trace.steps[i].kind >= RUN_FORWARD) continue;
    trace_t less = w.trace;
    memmove(less.steps + i, less.steps + i + 1, (size_t)(--less.count - i) * sizeof *less.steps);
    assert_non_null(check(&less));
    ++num_ops;
  }
  assert_int_equal(num_ops, 2 * 3 * 4);
  trace_t early = w.trace; /* all prefetches of a micro-batch together with the first one */
  int32_t last = -1;
  for (int32_t i = 0; i < early.count; ++i) {
    if (early.steps[i].kind != SLUICE_SWAP_OP_PREFETCH || early.steps[i].micro_batch != 0) continue;
    if (last < 0) last = i;
    const sluice_swap_op_t moved = early.steps[i];
    memmove(early.steps + last + 1, early.steps + last, (size_t)(i - last) * sizeof moved);
    early.steps[last++] = moved;
  }
  assert_string_equal(check(&early), "a layer runs, and two more are on the device");
}

TEST(Rules_WhatIsNoEvent_IsRefused) {
  static const int32_t swapped[2] = {1, 0};
  sluice_swap_order_t order;
  sluice_swap_op_t ops[SLUICE_SWAP_MOST_OPS];
  int32_t count;
  assert_int_equal(sluice_swap_order_init(&order, swapped, 2, sluice_process_allocator()), SLUICE_OK);
  assert_int_equal(sluice_swap_order_reach(&order, 7, 0, 0, 0, ops, 4, &count), SLUICE_E_INVALID_ARGUMENT);
  assert_int_equal(sluice_swap_order_reach(&order, 0, 0, 2, 0, ops, 4, &count), SLUICE_E_INVALID_ARGUMENT);
  assert_int_equal(sluice_swap_order_reach(&order, 0, 0, 0, 0, ops, 3, &count), SLUICE_E_INVALID_ARGUMENT);
  assert_int_equal(sluice_swap_order_reach(&order, 0, 0, 0, 0, ops, 4, &count), SLUICE_OK);
  assert_int_equal(sluice_swap_order_reach(&order, 0, 0, 0, 0, ops, 4, &count), SLUICE_E_STATE);
  sluice_swap_order_deinit(&order);
}

/* A host announces another backward than it then runs: no other layer is copied back in addition. */
TEST(Rules_WrongBackwardAnnounced_NothingElseComes) {
  static const int32_t swapped[3] = {1, 1, 0};
  sluice_swap_order_t order;
  sluice_swap_op_t ops[SLUICE_SWAP_MOST_OPS];
  int32_t count;
  assert_int_equal(sluice_swap_order_init(&order, swapped, 3, sluice_process_allocator()), SLUICE_OK);
  for (int32_t k = 0; k < 2; ++k) {
    for (int32_t layer = 0; layer < 3; ++layer)
      assert_int_equal(sluice_swap_order_reach(&order, SLUICE_SWAP_FORWARD_ENDS, k, layer, 1, ops, 4, &count), 0);
  }
  assert_int_equal(sluice_swap_order_reach(&order, SLUICE_SWAP_BACKWARD_NEXT, 1, 0, 1, ops, 4, &count), 0);
  assert_int_equal(count, 1);
  assert_true(ops[0].kind == SLUICE_SWAP_OP_PREFETCH && ops[0].micro_batch == 1 && ops[0].layer == 1);
  assert_int_equal(sluice_swap_order_reach(&order, SLUICE_SWAP_BACKWARD_BEGINS, 0, 2, 1, ops, 4, &count), 0);
  assert_int_equal(count, 0);
  sluice_swap_order_deinit(&order);
}

/* ---- virtual time ---- */

static sluice_swap_prediction_t predict(const sluice_swap_layer_t* layers, int32_t num_layers, double rate,
                                        int32_t num_micro_batches, int32_t in_flight) {
  sluice_swap_workload_t w;
  sluice_swap_prediction_t found = {.struct_size = sizeof found};
  sluice_swap_workload_init(&w, sizeof w);
  w.layers = layers, w.num_layers = num_layers, w.bytes_per_second = rate;
  w.num_micro_batches = num_micro_batches, w.in_flight = in_flight;
  assert_int_equal(sluice_swap_predict(&w, &found), SLUICE_OK);
  return found;
}

/* Returns the least time that a copy may take without a wait. A layer is copied out until the forward of the next
 * swapped layer has ended, and back from the start of that layer's backward on; for the last one, the layers above it
 * count. */
static double least_window(const sluice_swap_layer_t* layers, int32_t num_layers) {
  double least = INFINITY;
  for (int32_t i = 0; i < num_layers; ++i) {
    double forwards = 0, backwards = 0;
    if (layers[i].bytes == 0) continue;
    for (int32_t j = i + 1; j < num_layers; ++j) {
      forwards += layers[j].forward_seconds, backwards += layers[j].backward_seconds;
      if (layers[j].bytes > 0) break;
    }
    least = fmin(least, fmin(forwards, backwards));
  }
  return least;
}

static double drawn(void) { return 0.1 + (double)(rand() % 1000) / 500; }

TEST(VirtualTime_CopiesThatFitTheirGaps_WaitForNothing) {
  srand(7);
  int32_t num_waits = 0;
  for (int32_t draw = 0; draw < 500; ++draw) {
    enum { COUNT = 12, BYTES = 1000 };
    sluice_swap_layer_t layers[COUNT];
    for (int32_t i = 0; i < COUNT; ++i)
      layers[i] = (sluice_swap_layer_t){drawn(), 2 * drawn(), i + 1 < COUNT && rand() % 3 ? BYTES : 0};
    layers[0].bytes = BYTES;
    const double window = least_window(layers, COUNT);
    const sluice_swap_prediction_t fits = predict(layers, COUNT, BYTES / (window * 0.999999), 1, 1);
    assert_int_equal(fits.num_waits, 0);
    assert_true(fits.wait_seconds == 0 && fits.seconds == fits.compute_seconds);
    assert_int_equal(fits.out_bytes, fits.in_bytes);
    assert_true(fits.most_near_bytes <= 2 * BYTES);
    const sluice_swap_prediction_t late = predict(layers, COUNT, BYTES / (window * 3), 1, 1);
    assert_true(fabs(late.seconds - late.compute_seconds - late.wait_seconds) < 1e-9);
    num_waits += late.num_waits > 0;
  }
  print_message("%d of 500 wait where copies take 3 times the least gap\n", num_waits);
  assert_true(num_waits > 250);
}

TEST(VirtualTime_SlowLink_WaitsAsLongAsTheFormulaSays) {
  /* Copies of 3 s and forwards of 1 s: each later put waits for 2 s; the last copy has 1 + 2 s above it, of which the
   * first is over before the first mark. It leaves until 3 s after its forward: 2 s after the mark, when the backward
   * of the kept layer ends; it comes back for 3 s more. The others have 2 s of a backward for 3 s each. */
  const sluice_swap_layer_t layers[] = {{1, 2, 30}, {1, 2, 30}, {1, 2, 30}, {1, 2, 0}};
  const sluice_swap_prediction_t found = predict(layers, 4, 10, 1, 1);
  assert_true(fabs(found.wait_seconds - (2 + 2 + 3 + 1 + 1)) < 1e-9);
  assert_int_equal(found.num_waits, 5);
  assert_int_equal(found.most_near_bytes, 60);
}

TEST(VirtualTime_MicroBatchesInFlight_BytesAreThoseOfThePlan) {
  const sluice_swap_layer_t layers[] = {{1, 2, 30}, {1, 2, 50}, {1, 2, 0}, {1, 2, 20}, {1, 2, 0}};
  for (int32_t in_flight = 1; in_flight <= 4; ++in_flight) {
    const sluice_swap_prediction_t found = predict(layers, 5, 1000, 8, in_flight);
    assert_int_equal(found.out_bytes, 8 * 100);
    assert_int_equal(found.in_bytes, 8 * 100);
    assert_true(found.most_near_bytes <= 50 + 50); /* the largest layer that runs, and the largest that is staged */
    assert_true(found.most_out_bytes <= (uint64_t)in_flight * 100);
    assert_int_equal(found.num_waits, 0);
  }
}
