// SPDX-License-Identifier: Apache-2.0
/* One rank of a case through the public ABI: also rebuilt steps, split calls, rounds with other T, captured graphs. */
#include "capi/test/world/world_split.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/test/last_error.h"

#define DEFAULT_TIMEOUT_NS UINT64_C(300000000000)

/* Memory of a rank while it runs its case. */
typedef struct held_s {
  rank_t* r;
  const case_t* c;
  int32_t* ids;    /* [count], experts of this rank */
  int32_t* owners; /* [E] */
  int32_t* slots;  /* [E] */
  int32_t count, grad_dtype;
  sluice_comm_t* comm;
  sluice_context_t* context;
  sluice_moe_t* moe;
  array_t x, id, w, y, dy, dx, dw, factors;
  experts_t params, grads;
  toy_t toy;
  sluice_expert_callbacks_t callbacks;
  saved_t saved;
  sluice_step_t *step, *others[WORLD_MAX_OUTSTANDING];
} held_t;

enum { NUM_ARRAYS = 7 };

static array_t* array_of(held_t* h, int i) {
  array_t* all[NUM_ARRAYS] = {&h->x, &h->id, &h->w, &h->y, &h->dy, &h->dx, &h->dw};
  return all[i];
}

static int is_well(const held_t* h) { return h->r->out->status[h->r->rank] == SLUICE_OK; }

static void note(rank_t* r, sluice_status_t status) {
  if (status == SLUICE_OK || r->out->status[r->rank] != SLUICE_OK) return;
  r->out->status[r->rank] = status;
  snprintf(r->out->message[r->rank], sizeof r->out->message[r->rank], "%s", last_message());
}

/* ---- passes other than a plain forward and backward ---- */

/* On another machine, kept rows are in its memory; other buffers are in host memory. */
static int is_theirs(int32_t which) {
  return world_here.machine != NULL && (which == SLUICE_SAVED_INPUT || which == SLUICE_SAVED_PRE_ACTIVATION);
}
static void* take_saved(int32_t which, uint64_t bytes) {
  bytes = (bytes + 127) / 64 * 64;
  return is_theirs(which) ? world_take(bytes) : aligned_alloc(64, bytes);
}
static void give_saved(int32_t which, void* data) {
  if (is_theirs(which)) {
    world_give(data);
  } else {
    free(data);
  }
}

static void* save_buffer(void* user, int32_t which, uint64_t bytes) {
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
static sluice_status_t rebuild(sluice_moe_t* moe, saved_t* saved, sluice_step_t** step) {
  world_settle();
  sluice_step_drop(*step);
  for (int i = 0; i < SLUICE_SAVED_COUNT; ++i) {
    void* copy = take_saved(i, saved->bytes[i]);
    move_saved(i, copy, saved->data[i], saved->bytes[i]);
    give_saved(i, saved->data[i]);
    saved->data[i] = copy;
  }
  return sluice_step_restore(moe, saved->data, saved->bytes, step);
}

/* Makes split calls in place of passes, with memory for rows between them. */
static void run_split(held_t* h) {
  rank_t* r = h->r;
  const case_t* c = h->c;
  sluice_moe_t* moe = h->moe;
  const sluice_expert_tensors_t* params = &h->params.table;
  const sluice_tensor_t *w = world_tensor_of(&h->w), *dy = world_tensor_of(&h->dy);
  sluice_dispatch_t* dispatch = NULL;
  note(r, sluice_dispatch_forward(moe, world_tensor_of(&h->x), world_tensor_of(&h->id), NULL, &dispatch));
  if (dispatch == NULL) return;
  void* rows = NULL;
  int64_t num_rows = 0;
  int64_t* counts = calloc((size_t)c->num_experts + 1, sizeof(int64_t));
  note(r, sluice_dispatch_rows(dispatch, &rows, &num_rows, counts));
  uint64_t element = sluice_dtype_bytes(c->dtype);
  uint64_t row_bytes = (uint64_t)c->model_width * element,
           pre_bytes = (uint64_t)c->hidden_width * element * (c->gated ? 2 : 1);
  char* memory = malloc((size_t)num_rows * (3 * row_bytes + pre_bytes + 4) + 64);
  char *out = memory, *grad = out + (uint64_t)num_rows * row_bytes, *grad_in = grad + (uint64_t)num_rows * row_bytes;
  char* pre = grad_in + (uint64_t)num_rows * row_bytes;
  float* grad_weight = calloc((size_t)num_rows + 1, sizeof(float));
  note(r, sluice_experts_forward(moe, rows, counts, params, pre, out, NULL));
  note(r, sluice_dispatch_combine(dispatch, out, w, world_tensor_of(&h->y), NULL));
  note(r, sluice_dispatch_combine_backward(dispatch, out, w, dy, grad, grad_weight, NULL));
  note(r, sluice_experts_backward(moe, rows, pre, counts, params, grad, grad_in, &h->grads.table,
                                  c->accumulate ? SLUICE_GRAD_ACCUMULATE : SLUICE_GRAD_OVERWRITE, NULL));
  note(r, sluice_dispatch_backward(dispatch, grad_in, grad_weight, world_tensor_of(&h->dx), world_tensor_of(&h->dw),
                                   NULL));
  sluice_dispatch_destroy(dispatch);
  free(grad_weight);
  free(memory);
  free(counts);
}

static sluice_moe_forward_args_t forward_args(held_t* h) {
  sluice_moe_forward_args_t f;
  sluice_moe_forward_args_init(&f, sizeof f);
  f.tokens = world_tensor_of(&h->x), f.expert_ids = world_tensor_of(&h->id), f.route_weights = world_tensor_of(&h->w),
  f.out_tokens = world_tensor_of(&h->y);
  f.params = h->c->callback_experts ? NULL : &h->params.table;
  f.callbacks = h->c->callback_experts ? &h->callbacks : NULL;
  f.needs_backward = 1;
  return f;
}

static sluice_moe_backward_args_t backward_args(held_t* h) {
  const int is_callback = h->c->callback_experts;
  sluice_moe_backward_args_t b;
  sluice_moe_backward_args_init(&b, sizeof b);
  b.tokens = world_tensor_of(&h->x), b.route_weights = world_tensor_of(&h->w), b.grad_out = world_tensor_of(&h->dy);
  b.grad_tokens = world_tensor_of(&h->dx), b.grad_route_weights = world_tensor_of(&h->dw);
  b.params = is_callback ? NULL : &h->params.table, b.callbacks = is_callback ? &h->callbacks : NULL;
  b.grad_params = is_callback || h->c->frozen ? NULL : &h->grads.table;
  return b;
}

/* Runs a step with the tensors as they are. */
static sluice_status_t run_round(held_t* h, int32_t may_reuse_saved) {
  sluice_step_t* step = NULL;
  const sluice_moe_forward_args_t f = forward_args(h);
  sluice_moe_backward_args_t b = backward_args(h);
  b.may_reuse_saved = may_reuse_saved;
  sluice_status_t status = sluice_moe_forward(h->moe, &f, world_stream_here(), &step);
  if (status == SLUICE_OK) status = sluice_moe_backward(h->moe, step, &b, world_stream_here());
  sluice_step_drop(step);
  return status;
}

/* Zeros without a context. */
static sluice_context_stats_t stats_now(const held_t* h) {
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  const int is_read = h->context != NULL && sluice_context_get_stats(h->context, 0, &stats) == SLUICE_OK;
  return is_read ? stats : (sluice_context_stats_t){0};
}

/* Rounds in one context, as in training: T changes between rounds and returns to its first value. */
static void run_cycles(held_t* h) {
  rank_t* r = h->r;
  int64_t all = r->c->tokens[r->rank];
  uint64_t settled = 0;
  for (int32_t i = 0; i < r->c->cycles * WORLD_CYCLE && is_well(h); ++i) {
    const int64_t part = all * ((i * 3 + r->rank) % WORLD_CYCLE) / (WORLD_CYCLE - 1);
    for (int t = 0; t < NUM_ARRAYS; ++t) array_of(h, t)->shape[0] = part;
    note(r, run_round(h, 1));
    if (i + 1 == 2 * WORLD_CYCLE) settled = stats_now(h).current_bytes;
  }
  for (int t = 0; t < NUM_ARRAYS; ++t) array_of(h, t)->shape[0] = all;
  world_settle();
  if (r->c->cycles > 2) r->out->growth[r->rank] = stats_now(h).current_bytes - settled;
}

/* Writes the routes: to their own experts (by = 0), or to the next experts (by = 1). */
static void write_ids(held_t* h, int32_t by) {
  const case_t* c = h->c;
  array_t* id = &h->id;
  for (int64_t t = 0; t < c->tokens[h->r->rank]; ++t) {
    for (int32_t k = 0; k < c->top_k; ++k) {
      int64_t e = world_expert(c, h->r->rank, t, k);
      set_element(id->host, t * id->strides[0] + k * id->strides[1], SLUICE_DTYPE_I64,
                  (double)(e < 0 ? e : (e + by) % c->num_experts));
    }
  }
  world_push(id);
}

/* Ends the capture, sets outputs to NaN, writes the case's routes, and launches the graph. */
static void launch_graph(held_t* h) {
  rank_t* r = h->r;
  const experts_t* grads = &h->grads;
  int code = world_here.machine->end_capture(r->rank);
  if (!is_well(h)) return;
  if (code != 0) {
    r->out->status[r->rank] = SLUICE_E_EXTERNAL;
    snprintf(r->out->message[r->rank], sizeof r->out->message[r->rank], "the capture ended with %d", code);
    return;
  }
  write_ids(h, 0);
  world_push(&h->y), world_push(&h->dx), world_push(&h->dw);
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    for (int32_t l = 0; grads->arrays[kind] != NULL && l < h->count; ++l) world_push(&grads->arrays[kind][l]);
  }
  world_here.machine->launch(r->rank);
}

/* ---- a rank ---- */

static double* copy_rows(const array_t* a, int32_t dtype) {
  world_pull(a);
  double* out = malloc((size_t)(a->shape[0] * a->shape[1] + 1) * sizeof(double));
  for (int64_t i = 0; i < a->shape[0]; ++i)
    for (int64_t j = 0; j < a->shape[1]; ++j)
      out[i * a->shape[1] + j] = get_element(a->host, i * a->strides[0] + j * a->strides[1], dtype);
  return out;
}

static void count_slots(const held_t* h) {
  const sluice_context_stats_t stats = stats_now(h);
  uint64_t* most = &h->r->out->slot_bytes[h->r->rank];
  if (stats.slot_bytes > *most) *most = stats.slot_bytes;
  h->r->out->saved_bytes[h->r->rank] = stats.saved_bytes;
}

static void count_ready(void* user, int32_t local) {
  (void)local;
  ++*(int32_t*)user;
}

static void find_experts(held_t* h) {
  const case_t* c = h->c;
  h->ids = calloc((size_t)c->num_experts, sizeof(int32_t));
  h->owners = calloc((size_t)c->num_experts, sizeof(int32_t));
  h->slots = calloc((size_t)c->num_experts, sizeof(int32_t));
  int32_t counts[WORLD_MAX_RANKS] = {0};
  for (int32_t e = 0; e < c->num_experts; ++e) {
    h->owners[e] = world_owner(c, e);
    h->slots[e] = counts[h->owners[e]]++;
  }
  if (c->placed) world_place_experts(c, 3, h->owners, h->slots);
  h->count = world_experts_of(c, h->r->rank, h->owners, h->slots, h->ids);
  h->grad_dtype = c->grad_f32 && c->dtype != SLUICE_DTYPE_F64 ? SLUICE_DTYPE_F32 : c->dtype;
}

static void make_comm(held_t* h) {
  rank_t* r = h->r;
  const case_t* c = h->c;
  sluice_comm_config_t config;
  sluice_comm_config_init(&config, sizeof config);
  config.rank = r->rank;
  config.world_size = c->world_size;
  config.timeout_ns = c->machine != NULL && c->machine->timeout_ns > 0 ? c->machine->timeout_ns : DEFAULT_TIMEOUT_NS;
  if (r->group == NULL) return;
  if (c->make_comm != NULL) {
    note(r, c->make_comm(r->rank, &config, &h->comm));
  } else if (c->machine != NULL && c->machine->make_comm != NULL) {
    note(r, c->machine->make_comm(r->rank, &config, &h->comm));
  } else {
    note(r, sluice_comm_create_local(r->group, &config, &h->comm));
  }
}

static void make_context(held_t* h) {
  rank_t* r = h->r;
  const case_t* c = h->c;
  sluice_context_config_t config;
  sluice_context_config_init(&config, sizeof config);
  config.ranks_per_node = c->ranks_per_node, config.wire_dtype = c->wire_dtype;
  config.gemm = c->gemm != NULL ? c->gemm : "ref";
  config.memory_budget = c->budget,
  config.max_outstanding = c->max_outstanding > 0 ? c->max_outstanding : c->outstanding;
  config.host_memory_budget = c->host_budget;
  config.separate_wgrad = c->separate_wgrad && !c->halves_unsaid;
  if (c->machine != NULL) {
    config.gemm = c->gemm;
    config.device_type = c->machine->device_type, config.device_id = c->machine->device_id(r->rank);
    note(r, c->machine->make_context(r->rank, &config, h->comm, &h->context));
  } else {
    note(r, sluice_context_create(&config, h->comm, &h->context));
  }
}

static void make_layer(held_t* h) {
  rank_t* r = h->r;
  const case_t* c = h->c;
  sluice_moe_config_t config;
  sluice_moe_config_init(&config, sizeof config);
  config.model_width = c->model_width, config.hidden_width = c->hidden_width, config.num_experts = c->num_experts;
  config.top_k = c->top_k, config.dtype = c->dtype, config.activation = c->activation, config.gated = c->gated;
  config.bias = c->bias, config.num_chunks = c->num_chunks, config.wgrad_mode = c->wgrad_mode;
  config.callback_experts = c->callback_experts, config.layer_id = 7;
  config.expert_rank = c->uneven_owners || c->placed ? h->owners : NULL;
  config.expert_slot = c->placed ? h->slots : NULL;
  config.swiglu_alpha = WORLD_ALPHA, config.swiglu_limit = WORLD_LIMIT, config.swiglu_offset = WORLD_OFFSET;
  config.restore_input = c->restore_input, config.restore_pre_activation = c->restore_pre_activation;
  config.restore_input_of = c->restore_input_of, config.restore_pre_activation_of = c->restore_pre_activation_of;
  config.lora_rank = c->lora_rank;
  config.deduplicate = c->deduplicate, config.reuse = c->reuse;
  config.chunking = c->chunking, config.grouping = c->grouping;
  if (!c->weights_decoded) config.weight_format = (int16_t)c->weights, config.weight_block = (int16_t)c->weight_block;
  if (c->weight_block_of_1 > 0 && r->rank == 1) config.weight_block = (int16_t)c->weight_block_of_1;
  if (c->capacity > 0) config.exchange_mode = SLUICE_EXCHANGE_CAPACITY, config.capacity_rows = c->capacity;
  note(r, sluice_moe_create(h->context, &config, &h->moe));
  if (c->plan != NULL && h->moe != NULL) note(r, world_use_plan(r, h->moe));
}

static void make_tensors(held_t* h) {
  const case_t* c = h->c;
  const int32_t rank = h->r->rank;
  const int64_t T = c->tokens[rank];
  world_make_rows(&h->x, c->dtype, T, c->model_width, 3);
  world_make_array(&h->id, SLUICE_DTYPE_I64, 2, T, c->top_k, 1, T > 0 ? T : 1); /* K-major, as DeepSpeed's routes are */
  world_make_rows(&h->w, SLUICE_DTYPE_F32, T, c->top_k, 1);
  world_make_rows(&h->y, c->dtype, T, c->model_width, 2);
  world_make_rows(&h->dy, c->dtype, T, c->model_width, 0);
  world_make_rows(&h->dx, c->dtype, T, c->model_width, 1);
  world_make_rows(&h->dw, SLUICE_DTYPE_F32, T, c->top_k, 0);
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t m = 0; m < c->model_width; ++m) {
      set_element(h->x.host, t * h->x.strides[0] + m, c->dtype, world_token_value(c, rank, t, m));
      set_element(h->dy.host, t * h->dy.strides[0] + m, c->dtype, world_grad_value(c, rank, t, m));
    }
    for (int32_t k = 0; k < c->top_k; ++k) {
      set_element(h->w.host, t * h->w.strides[0] + k, SLUICE_DTYPE_F32, world_weight_value(c, rank, t, k));
    }
  }
  write_ids(h, 0);
  for (int i = 0; i < NUM_ARRAYS; ++i) world_push(array_of(h, i));
}

static void make_experts(held_t* h) {
  const case_t* c = h->c;
  world_make_experts(&h->params, c, c->dtype, h->ids, h->count, 0);
  world_make_experts(&h->grads, c, h->grad_dtype, h->ids, h->count, 1);
  int64_t most = world_tokens_before(c, c->world_size) * c->top_k;
  if (most < c->world_size * c->capacity) most = c->world_size * c->capacity; /* including unused slots */
  if (!c->callback_experts) most = 0;
  world_make_array(&h->factors, SLUICE_DTYPE_F32, 2, h->count, most, most, 1);
  for (int64_t i = 0; i < h->count * most; ++i) ((float*)h->factors.host)[i] = (float)(h->ids[i / most] + 2);
  world_push(&h->factors);
  h->toy = (toy_t){.c = c,
                   .ids = h->ids,
                   .calls = &h->r->out->calls[h->r->rank],
                   .most_rows = &h->r->out->most_rows[h->r->rank],
                   .chunk = -1,
                   .context = h->context,
                   .factors = world_tensor_of(&h->factors)->data,
                   .most_factors = most};
  h->callbacks = (sluice_expert_callbacks_t){sizeof h->callbacks, &h->toy, world_toy_forward, world_toy_backward};
}

static void run_forward(held_t* h) {
  rank_t* r = h->r;
  const case_t* c = h->c;
  sluice_moe_forward_args_t f = forward_args(h);
  if (c->restore) f.save = save_buffer, f.save_user = &h->saved;
  if (c->captured) {
    write_ids(h, 1);
    note(r, run_round(h, 0)); /* with other routes than the launch; a capture requires both passes to have run */
    world_settle();
    world_here.machine->begin_capture(r->rank);
  }
  world_tell(c, SLUICE_FORWARD, 0);
  note(r, sluice_moe_forward(h->moe, &f, world_stream_here(), &h->step));
  world_tell(c, SLUICE_FORWARD, 1);
  count_slots(h);
  f.save = NULL, f.save_user = NULL; /* `saved` belongs to the first step; later steps use memory of Sluice */
  for (int32_t i = 1; i < c->outstanding && is_well(h); ++i) {
    note(r, sluice_moe_forward(h->moe, &f, world_stream_here(), &h->others[i]));
  }
}

static void run_backward(held_t* h) {
  rank_t* r = h->r;
  const case_t* c = h->c;
  sluice_moe_backward_args_t b = backward_args(h);
  b.grad_mode = c->accumulate ? SLUICE_GRAD_ACCUMULATE : SLUICE_GRAD_OVERWRITE;
  b.may_reuse_saved = c->reuse_saved;
  b.expert_ready = count_ready, b.expert_ready_user = &r->out->ready[r->rank];
  world_tell(c, SLUICE_BACKWARD, 0);
  if (c->separate_wgrad) {
    b.parts = SLUICE_BACKWARD_DGRAD;
    note(r, sluice_moe_backward(h->moe, h->step, &b, world_stream_here()));
    b.parts = SLUICE_BACKWARD_WGRAD;
    b.may_reuse_saved = !c->reuse_saved; /* only dgrad's setting counts */
    b.grad_out = NULL;
  }
  note(r, sluice_moe_backward(h->moe, h->step, &b, world_stream_here()));
  world_tell(c, SLUICE_BACKWARD, 1);
}

static void collect_gradients(held_t* h) {
  const case_t* c = h->c;
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    const int of = world_param_array(c, kind);
    for (int32_t l = 0; world_param_trained(c, kind) && h->grads.arrays[of] != NULL && l < h->count; ++l) {
      const array_t* a = &h->grads.arrays[of][l];
      world_pull(a);
      for (int64_t i = 0; i < world_param_size(c, kind); ++i) {
        h->r->out->grad_params[kind][(int64_t)h->ids[l] * world_param_size(c, kind) + i] =
            get_element(a->host, world_param_place(c, a, kind, i), world_dtype_of(a));
      }
    }
  }
}

static void collect(held_t* h) {
  rank_t* r = h->r;
  const case_t* c = h->c;
  r->out->out[r->rank] = copy_rows(&h->y, c->dtype);
  r->out->grad_tokens[r->rank] = copy_rows(&h->dx, c->dtype);
  r->out->grad_weights[r->rank] = copy_rows(&h->dw, SLUICE_DTYPE_F32);
  collect_gradients(h);
  const sluice_context_stats_t stats = stats_now(h);
  r->out->peak_bytes[r->rank] = stats.peak_bytes;
  r->out->fallback_chunks[r->rank] = stats.num_fallback_chunks;
  count_slots(h);
  r->out->bytes_sent[r->rank] = stats.bytes_sent;
  r->out->num_chunks[r->rank] = stats.last_num_chunks;
  if (c->capacity <= 0 || h->moe == NULL) return;
  sluice_capacity_report_t* report = &r->out->report[r->rank];
  sluice_capacity_report_init(report, sizeof *report);
  r->out->report_status[r->rank] = sluice_moe_take_capacity_report(h->moe, world_stream_here(), report);
}

static void drop_steps(held_t* h) {
  for (int i = 0; i < WORLD_MAX_OUTSTANDING; ++i) sluice_step_drop(h->others[i]);
  sluice_step_drop(h->step);
  for (int i = 0; i < SLUICE_SAVED_COUNT; ++i) give_saved(i, h->saved.data[i]);
  h->step = NULL;
  memset(h->others, 0, sizeof h->others);
  memset(&h->saved, 0, sizeof h->saved);
}

static void drop_experts(held_t* h) {
  world_free_experts(&h->params, h->count);
  world_free_experts(&h->grads, h->count);
  world_drop_array(&h->factors);
}

static void run_step(held_t* h) {
  if (is_well(h)) run_forward(h);
  if (is_well(h) && h->c->restore) note(h->r, rebuild(h->moe, &h->saved, &h->step));
  if (is_well(h)) run_backward(h);
}

/* Each rank puts its experts on the board, agrees on the next placement, and takes its new experts from the board. */
static void move_experts(held_t* h, int32_t move) {
  const case_t* c = h->c;
  result_t* out = h->r->out;
  world_copy_experts(c, &h->params, h->ids, h->count, out->board[0], 1);
  world_copy_experts(c, &h->grads, h->ids, h->count, out->board[1], 1);
  world_place_experts(c, move, h->owners, h->slots);
  sluice_expert_placement_t placement;
  sluice_expert_placement_init(&placement, sizeof placement);
  placement.expert_rank = h->owners, placement.expert_slot = h->slots, placement.epoch = 10 + (uint64_t)move;
  note(h->r, sluice_moe_replace_experts(h->moe, &placement));
  if (!is_well(h)) return;
  drop_experts(h);
  h->count = world_experts_of(c, h->r->rank, h->owners, h->slots, h->ids);
  make_experts(h);
  world_copy_experts(c, &h->params, h->ids, h->count, out->board[0], 0);
  world_copy_experts(c, &h->grads, h->ids, h->count, out->board[1], 0);
}

static void run_rounds(held_t* h) {
  const case_t* c = h->c;
  for (int32_t i = 1; i <= c->rounds && is_well(h); ++i) {
    run_step(h);
    world_settle();
    drop_steps(h);
    if (!is_well(h)) return;
    world_update(c, &h->params, &h->grads, h->count);
    if (c->moves) move_experts(h, i);
  }
}

static void release(held_t* h) {
  if (h->c->captured) world_here.machine->drop_graph(h->r->rank);
  drop_steps(h);
  sluice_moe_destroy(h->moe);
  sluice_context_destroy(h->context);
  sluice_comm_destroy(h->comm);
  drop_experts(h);
  for (int i = 0; i < NUM_ARRAYS; ++i) world_drop_array(array_of(h, i));
  free(h->ids);
  free(h->owners);
  free(h->slots);
}

void world_run_rank(rank_t* r) {
  held_t h = {.r = r, .c = r->c};
  world_here.machine = h.c->machine, world_here.rank = r->rank;
  find_experts(&h);
  make_comm(&h);
  make_context(&h);
  make_layer(&h);
  make_tensors(&h);
  make_experts(&h);
  if (h.c->parts && is_well(&h)) run_split(&h);
  if (h.c->cycles > 0 && is_well(&h)) run_cycles(&h);
  run_rounds(&h);
  if (!h.c->parts) run_step(&h);
  if (h.c->captured) launch_graph(&h);
  world_settle();
  collect(&h);
  release(&h);
}
