// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/test/live_host.h"

#include <string.h>
#include <time.h>

enum { WIDTH = LIVE_WIDTH, M = LIVE_MICRO_BATCHES, SPANS = 3, MOST_SPANS = SPANS * LIVE_MOST_RUN, NUMBER_OF_L = 9 };

/* ---- the mathematics of both runs ---- */

static void init_layer(live_layer_t* layer, int32_t number) {
  for (int32_t e = 0; e < WIDTH; ++e) {
    layer->weight[e] = 0.7F + 0.013F * (float)((number * 7 + e) % 23);
    layer->moment[e] = layer->grad[e] = 0;
  }
}

static void input_of(int32_t batch, int32_t micro_batch, float x[WIDTH]) {
  for (int32_t e = 0; e < WIDTH; ++e) x[e] = 0.3F + 0.017F * (float)((batch * 5 + micro_batch * 3 + e) % 19);
}

static void forward_layer(const live_layer_t* layer, const float* x, float* y) {
  for (int32_t e = 0; e < WIDTH; ++e) y[e] = x[e] * layer->weight[e];
}

static void backward_layer(const live_layer_t* layer, const float* x, const float* dy, float* grad, float* dx) {
  for (int32_t e = 0; e < WIDTH; ++e) {
    grad[e] += dy[e] * x[e];
    dx[e] = dy[e] * layer->weight[e];
  }
}

static void update_layer(live_layer_t* layer) {
  for (int32_t e = 0; e < WIDTH; ++e) {
    layer->moment[e] = 0.9F * layer->moment[e] + layer->grad[e];
    layer->weight[e] -= 1e-3F * layer->moment[e];
    layer->grad[e] = 0;
  }
}

/* Layers in execution order: those of the stages up to `upper`, L, the others. The loss is half of y squared. */
void live_reference(int32_t p, int32_t upper, int32_t run, int32_t batches, live_layer_t own[LIVE_MOST_STAGES],
                    live_layer_t moving[LIVE_MOST_RUN]) {
  live_layer_t* chain[LIVE_MOST_STAGES + LIVE_MOST_RUN];
  int32_t count = 0;
  for (int32_t s = 0; s < p; ++s) {
    init_layer(&own[s], s);
    chain[count++] = &own[s];
    for (int32_t r = 0; r < run && s == upper; ++r) {
      init_layer(&moving[r], NUMBER_OF_L + r);
      chain[count++] = &moving[r];
    }
  }
  static float x[LIVE_MOST_STAGES + LIVE_MOST_RUN + 1][WIDTH], dy[WIDTH], dx[WIDTH];
  for (int32_t b = 0; b < batches; ++b) {
    for (int32_t i = 0; i < M; ++i) {
      input_of(b, i, x[0]);
      for (int32_t l = 0; l < count; ++l) forward_layer(chain[l], x[l], x[l + 1]);
      memcpy(dy, x[count], sizeof dy);
      for (int32_t l = count; l-- > 0;) {
        backward_layer(chain[l], x[l], dy, chain[l]->grad, dx);
        memcpy(dy, dx, sizeof dy);
      }
    }
    for (int32_t l = 0; l < count; ++l) update_layer(chain[l]);
  }
}

/* ---- a stage ---- */

void live_stage_init(live_stage_t* stage, int32_t upper, int32_t run, int32_t s) {
  memset(stage, 0, sizeof *stage);
  stage->upper = upper;
  stage->run = run;
  stage->stage = s;
  init_layer(&stage->own, s);
  for (int32_t r = 0; r < run; ++r) init_layer(&stage->moving[r], NUMBER_OF_L + r);
  stage->has_moving = s == upper;
  if (s != upper) memset(stage->moving, 0xff, sizeof stage->moving); /* NaN until L arrives at the lower stage */
}

static int32_t role_of(const live_stage_t* stage) { return stage->stage - stage->upper; }

int live_is_at_the_cut(const live_stage_t* stage) { return role_of(stage) == 0 || role_of(stage) == 1; }

static void rest(void) {
  const struct timespec time = {.tv_nsec = 300 * 1000};
  (void)nanosleep(&time, NULL);
}

static void give(float* data, sluice_tensor_t* tensor, live_stash_t* stash, sluice_stage_tensors_t* out_result) {
  stash->shape[0] = WIDTH;
  *tensor = (sluice_tensor_t){.data = data,
                              .device_type = SLUICE_DEVICE_CPU,
                              .ndim = 1,
                              .type_code = SLUICE_TYPE_FLOAT,
                              .type_bits = 32,
                              .type_lanes = 1,
                              .shape = stash->shape};
  out_result->tensors = tensor, out_result->num_tensors = 1;
}

/* Weights, then moments, then sums. Sums of the other stage have separate memory: the commit writes them again, when
 * those here may have grown. */
static void spans_of(live_stage_t* stage, int comes, sluice_migration_span_t spans[MOST_SPANS]) {
  for (int32_t r = 0; r < stage->run; ++r) {
    live_layer_t* layer = &stage->moving[r];
    spans[r] = (sluice_migration_span_t){.data = layer->weight, .bytes = sizeof layer->weight};
    spans[stage->run + r] = (sluice_migration_span_t){.data = layer->moment, .bytes = sizeof layer->moment};
    spans[2 * stage->run + r] = (sluice_migration_span_t){.data = comes ? stage->incoming[r] : layer->grad,
                                                          .bytes = sizeof layer->grad,
                                                          .when = SLUICE_MIGRATION_AT_COMMIT};
  }
}

/* Whether the kinds from `first` on have arrived for each layer of L. */
static int reads(live_stage_t* stage, int32_t first, int32_t end) {
  const int32_t peer = stage->upper + 1 - role_of(stage), run = stage->run;
  sluice_migration_span_t spans[MOST_SPANS];
  int32_t is_there = 0;
  spans_of(stage, 1, spans);
  for (int32_t s = 0; s < SPANS * run; ++s) spans[s].bytes = s < first * run || s >= end * run ? 0 : spans[s].bytes;
  const sluice_status_t status = sluice_migration_read_early(stage->migration, 1, peer, spans, SPANS * run, &is_there);
  if (status != SLUICE_OK) stage->early = status;
  return is_there;
}

/* Adds held gradients to the other stage's sums, in the order of micro-batches. */
static void fold(live_stage_t* stage) {
  for (int32_t r = 0; r < stage->run; ++r) {
    float* grad = stage->moving[r].grad;
    memcpy(grad, stage->incoming[r], sizeof stage->incoming[r]);
    for (int32_t i = 0; i < M; ++i)
      for (int32_t e = 0; e < WIDTH && stage->is_held[i]; ++e) grad[e] += stage->held[i][r][e];
  }
  memset(stage->is_held, 0, sizeof stage->is_held);
  stage->has_sum = 1;
}

/* On the stage that receives L: checks for its parameters, and then for the sum of the other stage. */
static void look(live_stage_t* stage) {
  if (!stage->is_moving || !sluice_layer_move_receives(&stage->live)) return;
  if (!stage->live.has && reads(stage, 0, 1)) sluice_layer_move_arrived(&stage->live);
  if (stage->live.has && !stage->has_sum && reads(stage, 2, SPANS)) fold(stage);
}

/* On the stage that L leaves: releases its sum when it is final. */
static void tell(live_stage_t* stage) {
  if (!stage->is_moving || stage->has_sum || !sluice_layer_move_is_final(&stage->live)) return;
  const sluice_status_t status = sluice_migration_mark_still(stage->migration, 1, stage->upper + 1 - role_of(stage));
  if (status != SLUICE_OK) stage->early = status;
  stage->has_sum = 1;
}

/* Runs before each callback. */
static void be_called(live_stage_t* stage) {
  rest();
  if (stage->at_callback != NULL) stage->at_callback();
  if (live_is_at_the_cut(stage)) look(stage);
}

static int runs_moving(live_stage_t* stage, const sluice_stage_call_t* op) {
  if (!live_is_at_the_cut(stage)) return 0;
  if (!stage->is_moving) return stage->has_moving;
  return sluice_layer_move_runs(&stage->live, op->micro_batch, op->is_first ? 0 : op->input->word);
}

/* Runs L's forward on x, in place. */
static void forward_moving(live_stage_t* stage, live_stash_t* stash, float* x) {
  for (int32_t r = 0; r < stage->run; ++r) {
    memcpy(stash->moving[r], x, sizeof stash->moving[r]);
    forward_layer(&stage->moving[r], stash->moving[r], x);
  }
}

static sluice_status_t forward(void* user, const sluice_stage_call_t* op, sluice_stage_tensors_t* out_result,
                               sluice_host_failure_t* out_failure) {
  live_stage_t* stage = user;
  live_stash_t* stash = &stage->stash[op->micro_batch];
  float x[WIDTH];
  (void)out_failure;
  be_called(stage);
  if (op->is_first) {
    input_of(stage->batch, op->micro_batch, x);
  } else {
    memcpy(x, op->input->tensors[0].data, sizeof x);
  }
  stash->ran = runs_moving(stage, op);
  if (live_is_at_the_cut(stage)) tell(stage);
  if (stash->ran && role_of(stage) == SLUICE_LAYER_MOVE_LOWER) forward_moving(stage, stash, x);
  memcpy(stash->own, x, sizeof x);
  forward_layer(&stage->own, stash->own, stash->y);
  if (stash->ran && role_of(stage) == SLUICE_LAYER_MOVE_UPPER) forward_moving(stage, stash, stash->y);
  if (op->is_last) return SLUICE_OK;
  give(stash->y, &stash->out, stash, out_result);
  if (role_of(stage) == SLUICE_LAYER_MOVE_UPPER) out_result->word = sluice_layer_move_activation_word(stash->ran);
  return SLUICE_OK;
}

/* Runs L's backward on dy, in place; L's gradients are held separately if L has arrived in this batch. */
static void backward_moving(live_stage_t* stage, int32_t i, float* dy) {
  const int comes = stage->is_moving && sluice_layer_move_receives(&stage->live), holds = comes && !stage->has_sum;
  float dx[WIDTH];
  if (holds) memset(stage->held[i], 0, sizeof stage->held[i]);
  stage->is_held[i] = holds;
  for (int32_t r = stage->run; r-- > 0;) {
    live_layer_t* layer = &stage->moving[r];
    backward_layer(layer, stage->stash[i].moving[r], dy, holds ? stage->held[i][r] : layer->grad, dx);
    memcpy(dy, dx, sizeof dx);
  }
  if (!stage->is_moving) return;
  sluice_layer_move_ended(&stage->live);
  tell(stage);
}

static sluice_status_t backward(void* user, const sluice_stage_call_t* op, sluice_stage_tensors_t* out_result,
                                sluice_host_failure_t* out_failure) {
  live_stage_t* stage = user;
  live_stash_t* stash = &stage->stash[op->micro_batch];
  float dy[WIDTH], dx[WIDTH];
  (void)out_failure;
  be_called(stage);
  memcpy(dy, op->is_last ? stash->y : (const float*)op->output_grad->tensors[0].data, sizeof dy);
  if (stage->is_moving && role_of(stage) == SLUICE_LAYER_MOVE_UPPER && !op->is_last) {
    sluice_layer_move_heard(&stage->live, op->output_grad->word);
  }
  if (stash->ran && role_of(stage) == SLUICE_LAYER_MOVE_UPPER) backward_moving(stage, op->micro_batch, dy);
  backward_layer(&stage->own, stash->own, dy, stage->own.grad, dx);
  if (stash->ran && role_of(stage) == SLUICE_LAYER_MOVE_LOWER) backward_moving(stage, op->micro_batch, dx);
  memcpy(stash->dx, dx, sizeof dx);
  if (op->is_first) return SLUICE_OK;
  give(stash->dx, &stash->back, stash, out_result);
  if (stage->is_moving && role_of(stage) == SLUICE_LAYER_MOVE_LOWER)
    out_result->word = sluice_layer_move_gradient_word(&stage->live);
  return SLUICE_OK;
}

const sluice_pipeline_callbacks_t* live_callbacks(void) {
  static const sluice_pipeline_callbacks_t callbacks = {
      .struct_size = sizeof callbacks, .forward = forward, .backward = backward};
  return &callbacks;
}

/* ---- between batches ---- */

sluice_status_t live_set_out(live_stage_t* stage, int to_lower, uint64_t epoch) {
  const int32_t role = role_of(stage), from = to_lower ? SLUICE_LAYER_MOVE_UPPER : SLUICE_LAYER_MOVE_LOWER;
  sluice_migration_span_t spans[MOST_SPANS];
  spans_of(stage, role != from, spans);
  const sluice_migration_item_t item = {.id = 1,
                                        .peer = stage->upper + 1 - role,
                                        .direction = role == from ? SLUICE_MIGRATION_LEAVES : SLUICE_MIGRATION_ARRIVES,
                                        .spans = spans,
                                        .num_spans = SPANS * stage->run};
  sluice_layer_move_begin(role, to_lower, &stage->live);
  stage->is_moving = 1;
  stage->has_sum = 0;
  memset(stage->is_held, 0, sizeof stage->is_held);
  return sluice_migration_begin(stage->migration, epoch, &item, live_is_at_the_cut(stage));
}

static void forget_gradients(live_stage_t* stage) {
  for (int32_t r = 0; r < stage->run; ++r) memset(stage->moving[r].grad, 0, sizeof stage->moving[r].grad);
}

void live_arrive(live_stage_t* stage) {
  stage->is_moving = 0;
  if (!live_is_at_the_cut(stage)) return;
  stage->has_moving = sluice_layer_move_receives(&stage->live);
  if (!stage->has_moving) {
    forget_gradients(stage);
  } else if (!stage->has_sum) {
    fold(stage);
  }
}

void live_forget_batch(live_stage_t* stage) {
  stage->is_moving = 0;
  memset(stage->own.grad, 0, sizeof stage->own.grad);
  forget_gradients(stage);
}

void live_update(live_stage_t* stage) {
  update_layer(&stage->own);
  for (int32_t r = 0; r < stage->run && live_is_at_the_cut(stage) && stage->has_moving; ++r)
    update_layer(&stage->moving[r]);
}
