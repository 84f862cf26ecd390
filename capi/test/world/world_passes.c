// SPDX-License-Identifier: Apache-2.0
/* Passes other than a plain forward and backward: rebuilt steps, split calls, rounds with other T, captured graphs. */
#include "capi/test/world/world_split.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "backend/base/dtype.h"

/* On another machine, kept rows are in its memory; other buffers are in host memory. */
static int is_theirs(int32_t which) {
  return world_here.machine != NULL && (which == SLUICE_SAVED_INPUT || which == SLUICE_SAVED_PRE_ACTIVATION);
}
static void* take_saved(int32_t which, uint64_t bytes) {
  bytes = (bytes + 127) / 64 * 64;
  return is_theirs(which) ? world_take(bytes) : aligned_alloc(64, bytes);
}
void world_give_saved(int32_t which, void* data) {
  if (is_theirs(which)) {
    world_give(data);
  } else {
    free(data);
  }
}

void* world_save(void* user, int32_t which, uint64_t bytes) {
  saved_t* saved = user;
  saved->bytes[which] = bytes;
  saved->data[which] = take_saved(which, bytes);
  return saved->data[which];
}

static void move_saved(int32_t which, void* to, void* from, uint64_t bytes) {
  if (!is_theirs(which)) {
    memcpy(to, from, bytes);
    memset(from, 0xff, bytes);
    return;
  }
  void* between = malloc(bytes + 1);
  world_here.machine->fetch(world_here.rank, between, from, bytes);
  world_here.machine->send(world_here.rank, to, between, bytes);
  memset(between, 0xff, bytes);
  world_here.machine->send(world_here.rank, from, between, bytes);
  free(between);
}

/* Copies the saved buffers to other memory and rebuilds the step from them. */
sluice_status_t world_rebuild(sluice_moe_t* moe, saved_t* saved, sluice_step_t** step) {
  world_settle();
  sluice_step_drop(*step);
  for (int i = 0; i < SLUICE_SAVED_COUNT; ++i) {
    void* copy = take_saved(i, saved->bytes[i]);
    move_saved(i, copy, saved->data[i], saved->bytes[i]);
    world_give_saved(i, saved->data[i]);
    saved->data[i] = copy;
  }
  return sluice_step_restore(moe, saved->data, saved->bytes, step);
}

/* Makes split calls in place of passes, with memory for rows between them. */
void world_run_split(rank_t* r, sluice_moe_t* moe, const parts_t* p) {
  const case_t* c = r->c;
  sluice_dispatch_t* dispatch = NULL;
  world_note(r, sluice_dispatch_forward(moe, p->x, p->id, NULL, &dispatch));
  if (dispatch == NULL) return;
  void* rows = NULL;
  int64_t num_rows = 0;
  int64_t* counts = calloc((size_t)c->num_experts + 1, sizeof(int64_t));
  world_note(r, sluice_dispatch_rows(dispatch, &rows, &num_rows, counts));
  uint64_t element = sluice_dtype_bytes(c->dtype);
  uint64_t row_bytes = (uint64_t)c->model_width * element,
           pre_bytes = (uint64_t)c->hidden_width * element * (c->gated ? 2 : 1);
  char* memory = malloc((size_t)num_rows * (3 * row_bytes + pre_bytes + 4) + 64);
  char *out = memory, *grad = out + (uint64_t)num_rows * row_bytes, *grad_in = grad + (uint64_t)num_rows * row_bytes;
  char* pre = grad_in + (uint64_t)num_rows * row_bytes;
  float* grad_weight = calloc((size_t)num_rows + 1, sizeof(float));
  world_note(r, sluice_experts_forward(moe, rows, counts, p->params, pre, out, NULL));
  world_note(r, sluice_dispatch_combine(dispatch, out, p->w, p->y, NULL));
  world_note(r, sluice_dispatch_combine_backward(dispatch, out, p->w, p->dy, grad, grad_weight, NULL));
  world_note(r, sluice_experts_backward(moe, rows, pre, counts, p->params, grad, grad_in, p->grads,
                                        c->accumulate ? SLUICE_GRAD_ACCUMULATE : SLUICE_GRAD_OVERWRITE, NULL));
  world_note(r, sluice_dispatch_backward(dispatch, grad_in, grad_weight, p->dx, p->dw, NULL));
  sluice_dispatch_destroy(dispatch);
  free(grad_weight);
  free(memory);
  free(counts);
}

static sluice_status_t run_round(sluice_moe_t* moe, const round_t* p) {
  const sluice_tensor_t* t[7];
  sluice_step_t* step = NULL;
  sluice_moe_forward_args_t f;
  sluice_moe_backward_args_t b;
  for (int i = 0; i < 7; ++i) t[i] = world_tensor_of(p->tensors[i]);
  sluice_moe_forward_args_init(&f, sizeof f);
  f.tokens = t[0], f.expert_ids = t[1], f.route_weights = t[2], f.out_tokens = t[3], f.params = p->params;
  f.needs_backward = 1;
  sluice_status_t status = sluice_moe_forward(moe, &f, world_stream_here(), &step);
  if (status != SLUICE_OK) return status;
  sluice_moe_backward_args_init(&b, sizeof b);
  b.tokens = t[0], b.route_weights = t[2], b.grad_out = t[4], b.grad_tokens = t[5], b.grad_route_weights = t[6];
  b.params = p->params, b.grad_params = p->grads, b.may_reuse_saved = 1;
  status = sluice_moe_backward(moe, step, &b, world_stream_here());
  sluice_step_drop(step);
  return status;
}

static uint64_t bytes_now(sluice_context_t* context) {
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  return sluice_context_get_stats(context, 0, &stats) == SLUICE_OK ? stats.current_bytes : 0;
}

void world_run_cycles(rank_t* r, sluice_context_t* context, sluice_moe_t* moe, const round_t* p) {
  int64_t all = r->c->tokens[r->rank];
  uint64_t settled = 0;
  for (int32_t i = 0; i < r->c->cycles * WORLD_CYCLE && r->out->status[r->rank] == SLUICE_OK; ++i) {
    for (int t = 0; t < 7; ++t) p->tensors[t]->shape[0] = all * ((i * 3 + r->rank) % WORLD_CYCLE) / (WORLD_CYCLE - 1);
    world_note(r, run_round(moe, p));
    if (i + 1 == 2 * WORLD_CYCLE) settled = bytes_now(context);
  }
  for (int t = 0; t < 7; ++t) p->tensors[t]->shape[0] = all;
  world_settle();
  if (r->c->cycles > 2) r->out->growth[r->rank] = bytes_now(context) - settled;
}

/* Writes the routes: to their own experts (by = 0), or to the next experts (by = 1). */
void world_write_ids(const rank_t* r, array_t* id, int32_t by) {
  const case_t* c = r->c;
  for (int64_t t = 0; t < c->tokens[r->rank]; ++t) {
    for (int32_t k = 0; k < c->top_k; ++k) {
      int64_t e = world_expert(c, r->rank, t, k);
      world_store(SLUICE_DTYPE_I64, id->host, t * id->strides[0] + k * id->strides[1],
                  (double)(e < 0 ? e : (e + by) % c->num_experts));
    }
  }
  world_push(id);
}

sluice_moe_backward_args_t world_backward_args(array_t* x, array_t* w, array_t* dy, array_t* dx, array_t* dw,
                                               const sluice_expert_tensors_t* params,
                                               const sluice_expert_tensors_t* grads) {
  sluice_moe_backward_args_t b;
  sluice_moe_backward_args_init(&b, sizeof b);
  b.tokens = world_tensor_of(x), b.route_weights = world_tensor_of(w), b.grad_out = world_tensor_of(dy);
  b.grad_tokens = world_tensor_of(dx), b.grad_route_weights = world_tensor_of(dw);
  b.params = params, b.grad_params = grads;
  return b;
}

/* Ends the capture, sets outputs to NaN, writes the case's routes, and launches the graph. */
void world_launch_graph(rank_t* r, array_t* id, array_t* const* outputs, const experts_t* grads, int32_t count) {
  int code = world_here.machine->end_capture(r->rank);
  if (r->out->status[r->rank] != SLUICE_OK) return;
  if (code != 0) {
    r->out->status[r->rank] = SLUICE_E_EXTERNAL;
    snprintf(r->out->message[r->rank], sizeof r->out->message[r->rank], "the capture ended with %d", code);
    return;
  }
  world_write_ids(r, id, 0);
  for (int i = 0; i < 3; ++i) world_push(outputs[i]);
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    for (int32_t l = 0; grads->arrays[kind] != NULL && l < count; ++l) world_push(&grads->arrays[kind][l]);
  }
  world_here.machine->launch(r->rank);
}

/* Runs a forward and a backward with other routes than the launch, since a capture requires both to have run. */
void world_run_before_capture(rank_t* r, sluice_moe_t* moe, const sluice_moe_forward_args_t* f,
                              const sluice_moe_backward_args_t* b, array_t* id) {
  sluice_step_t* step = NULL;
  world_write_ids(r, id, 1);
  world_note(r, sluice_moe_forward(moe, f, world_stream_here(), &step));
  if (r->out->status[r->rank] == SLUICE_OK) world_note(r, sluice_moe_backward(moe, step, b, world_stream_here()));
  sluice_step_drop(step);
  world_settle();
}
