// SPDX-License-Identifier: Apache-2.0
/* A layer that changes its stage during a batch: in every order of events each micro-batch runs it forward and backward
 * once, on one stage, with its parameters there, and its gradients accumulate in order. */

#include "sluice/pipeline.h"
#include "third_party/bazel/test.h"

enum { MOST = 5 };

typedef struct world_s {
  int32_t m, window; /* micro-batches, and the limit in flight of the upper stage */
  sluice_layer_move_t stage[2];
  int32_t forwards[2], backwards[2]; /* ended ones, by stage */
  int32_t is_here;                   /* L's parameters have arrived at the receiver */
  uint64_t activation_word[MOST], gradient_word[MOST];
  int8_t ran[2][MOST];                     /* which micro-batches ran L in the forward */
  int8_t without;                          /* L ran without its parameters */
  int8_t folded[2 * MOST], held[2 * MOST]; /* a faulty rule may run L on both stages */
  int32_t num_folded, num_held;
  int32_t num_marked; /* accumulated gradients in the sum in flight; -1: none */
  int8_t has_sum;     /* of the receiver */
} world_t;

typedef struct found_s {
  int64_t ends;
  int64_t by_trigger[MOST + 1]; /* number of ends with the trigger at this micro-batch; MOST: none */
  int64_t wrong;
} found_t;

static int32_t receiver(const world_t* w) {
  return w->stage[0].to_lower ? SLUICE_LAYER_MOVE_LOWER : SLUICE_LAYER_MOVE_UPPER;
}

/* The sum of the stage that L leaves is sent once. */
static void mark(world_t* w, int32_t s) {
  const sluice_layer_move_t* live = &w->stage[s];
  if (w->num_marked < 0 && sluice_layer_move_is_final(live)) w->num_marked = w->num_folded;
}

static void forward(world_t* w, int32_t s) {
  const int32_t i = w->forwards[s]++;
  sluice_layer_move_t* live = &w->stage[s];
  const int ran = sluice_layer_move_runs(live, i, s == SLUICE_LAYER_MOVE_LOWER ? w->activation_word[i] : 0);
  if (ran && s == receiver(w) && !w->is_here) w->without = 1;
  w->ran[s][i] = (int8_t)ran;
  if (s == SLUICE_LAYER_MOVE_UPPER) w->activation_word[i] = sluice_layer_move_activation_word(ran);
  mark(w, s);
}

static void backward(world_t* w, int32_t s) {
  const int32_t i = w->backwards[s]++;
  sluice_layer_move_t* live = &w->stage[s];
  if (s == SLUICE_LAYER_MOVE_UPPER) sluice_layer_move_heard(live, w->gradient_word[i]);
  const int runs = w->ran[s][i];
  if (runs && sluice_layer_move_receives(live) && !w->has_sum) {
    w->held[w->num_held++] = (int8_t)i;
  } else if (runs) {
    w->folded[w->num_folded++] = (int8_t)i;
  }
  if (runs) sluice_layer_move_ended(live);
  mark(w, s);
  if (s == SLUICE_LAYER_MOVE_LOWER) w->gradient_word[i] = sluice_layer_move_gradient_word(live);
}

static void arrive(world_t* w) {
  w->is_here = 1;
  sluice_layer_move_arrived(&w->stage[receiver(w)]);
}

static void fold_held(world_t* w) {
  for (int32_t k = 0; k < w->num_held; ++k) {
    w->folded[w->num_folded++] = w->held[k];
  }
  w->num_held = 0;
}

/* Gradients added to the sum after its mark are not in it. */
static void take_sum(world_t* w) {
  w->num_folded = w->num_marked;
  fold_held(w);
  w->has_sum = 1;
}

/* ---- the end ---- */

static int is_right(world_t* w) {
  fold_held(w);
  if (w->without || w->num_folded != w->m) return 0;
  for (int32_t i = 0; i < w->m; ++i) {
    if (w->ran[0][i] + w->ran[1][i] != 1 || w->folded[i] != i) return 0;
  }
  return 1;
}

/* Explores every possible next event. The parameters may also arrive after the batch. */
static void explore(const world_t* w, found_t* found) {
  if (w->backwards[SLUICE_LAYER_MOVE_UPPER] == w->m) {
    world_t end = *w;
    ++found->ends;
    ++found->by_trigger[w->stage[0].trigger < 0 ? MOST : w->stage[0].trigger];
    found->wrong += !is_right(&end);
    return;
  }
  for (int32_t s = 0; s < 2; ++s) {
    const int32_t limit =
        s == SLUICE_LAYER_MOVE_UPPER ? w->backwards[s] + w->window : w->forwards[SLUICE_LAYER_MOVE_UPPER];
    if (w->forwards[s] < w->m && w->forwards[s] < limit) {
      world_t next = *w;
      forward(&next, s);
      explore(&next, found);
    }
    const int32_t ready = s == SLUICE_LAYER_MOVE_UPPER ? w->backwards[SLUICE_LAYER_MOVE_LOWER] : w->forwards[s];
    if (w->backwards[s] < ready) {
      world_t next = *w;
      backward(&next, s);
      explore(&next, found);
    }
  }
  if (!w->is_here) {
    world_t next = *w;
    arrive(&next);
    explore(&next, found);
  }
  if (w->num_marked >= 0 && !w->has_sum) {
    world_t next = *w;
    take_sum(&next);
    explore(&next, found);
  }
}

static found_t explored(int32_t m, int32_t window, int32_t to_lower) {
  found_t found = {.ends = 0};
  world_t w = {.m = m, .window = window, .num_marked = -1};
  for (int32_t s = 0; s < 2; ++s) sluice_layer_move_begin(s, to_lower, &w.stage[s]);
  explore(&w, &found);
  return found;
}

TEST(Live_EveryOrderOfEvents_RunsTheLayerOnceForEachMicroBatch) {
  for (int32_t to_lower = 0; to_lower < 2; ++to_lower) {
    int64_t ends = 0, moved = 0;
    for (int32_t m = 1; m <= 4; ++m) {
      for (int32_t window = 1; window <= m; ++window) {
        const found_t found = explored(m, window, to_lower);
        if (found.wrong > 0)
          fail_msg("m %d, L %d: %lld of %lld ends are wrong", m, window, (long long)found.wrong, (long long)found.ends);
        ends += found.ends;
        moved += found.ends - found.by_trigger[MOST];
      }
    }
    print_message("to the %s stage: %lld orders, in %lld of them the layer moves in the batch\n",
                  to_lower ? "lower" : "upper", (long long)ends, (long long)moved);
    assert_true(moved > 0 && moved < ends);
  }
}

TEST(Live_EveryTrigger_Happens) {
  const found_t up = explored(4, 3, 0), down = explored(4, 2, 1);
  for (int32_t i = 0; i < 4; ++i) assert_true(up.by_trigger[i] > 0);
  /* The upper stage learns of the parameters with a gradient, so the first micro-batch is never the trigger. */
  assert_int_equal(down.by_trigger[0], 0);
  for (int32_t i = 1; i < 4; ++i) assert_true(down.by_trigger[i] > 0);
}
