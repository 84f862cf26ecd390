// SPDX-License-Identifier: Apache-2.0
#include "capi/test/rig/rig.h"

#include <stdlib.h>
#include <string.h>

#include "backend/base/hash.h"
#include "backend/moe/context/context.h"

void heap_init(heap_t* heap) {
  atomic_init(&heap->live_bytes, 0);
  atomic_init(&heap->live_blocks, 0);
  atomic_init(&heap->calls, 0);
  atomic_init(&heap->fail_at, -1);
}

void* heap_allocate(void* user, uint64_t bytes) {
  heap_t* heap = user;
  int64_t call = atomic_fetch_add(&heap->calls, 1);
  if (call == atomic_load(&heap->fail_at)) return NULL;
  void* data = aligned_alloc(64, bytes);
  if (data == NULL) return NULL;
  memset(data, 0xff, bytes); /* NaN, and an invalid index */
  atomic_fetch_add(&heap->live_bytes, (int64_t)bytes);
  atomic_fetch_add(&heap->live_blocks, 1);
  return data;
}

void heap_release(void* user, void* data, uint64_t bytes) {
  heap_t* heap = user;
  atomic_fetch_sub(&heap->live_bytes, (int64_t)bytes);
  atomic_fetch_sub(&heap->live_blocks, 1);
  free(data);
}

sluice_moe_config_t rig_config(void) {
  sluice_moe_config_t config;
  sluice_moe_config_init(&config, sizeof config);
  config.model_width = 5, config.hidden_width = 7, config.num_experts = 4, config.top_k = 2, config.num_chunks = 2;
  config.gated = 1, config.bias = 1, config.layer_id = 3;
  return config;
}

static int32_t owner_of(const sluice_moe_config_t* c, int32_t world_size, int32_t e) {
  return c->expert_rank != NULL ? c->expert_rank[e] : e / (c->num_experts / world_size);
}

static _Thread_local struct {
  const world_machine_t* machine;
  int32_t rank;
} here;

void rig_use_machine(const world_machine_t* machine, int32_t rank) { here.machine = machine, here.rank = rank; }

static void* take(uint64_t bytes) {
  void* data = NULL;
  if (here.machine != NULL) return here.machine->allocate(here.rank, bytes);
  /* Not aligned_alloc, which tests may make fail (failing_calls.h). */
  return posix_memalign(&data, 64, bytes) == 0 ? data : NULL;
}
static void give(void* data) {
  if (here.machine != NULL && data != NULL) {
    here.machine->release(data);
  } else {
    free(data);
  }
}
static sluice_stream_t stream_here(void) { return here.machine != NULL ? here.machine->stream(here.rank) : NULL; }
static void settle(void) {
  if (here.machine != NULL) here.machine->settle(here.rank);
}

static void point(rig_tensor_t* t) {
  t->tensor.shape = t->shape;
  t->tensor.strides = t->strides;
}

/* A small value that depends on kind and index and is exact in bf16. */
static float value(int kind, int64_t i) { return (float)((i * 7 + kind * 5) % 13 - 6) / 8.0f; }

static uint8_t code_of(int32_t dtype) {
  if (dtype == SLUICE_DTYPE_I32 || dtype == SLUICE_DTYPE_I64) return SLUICE_TYPE_INT;
  return dtype == SLUICE_DTYPE_BF16 ? SLUICE_TYPE_BFLOAT : SLUICE_TYPE_FLOAT;
}
static uint8_t bits_of(int32_t dtype) {
  if (dtype == SLUICE_DTYPE_BF16 || dtype == SLUICE_DTYPE_F16) return 16;
  return dtype == SLUICE_DTYPE_F64 || dtype == SLUICE_DTYPE_I64 ? 64 : 32;
}

static void describe(rig_tensor_t* t, int32_t dtype, int32_t ndim, int64_t rows, int64_t cols) {
  memset(&t->tensor, 0, sizeof t->tensor);
  t->tensor.device_type = here.machine != NULL ? here.machine->device_type : SLUICE_DEVICE_CPU;
  t->tensor.device_id = here.machine != NULL ? here.machine->device_id(here.rank) : 0;
  t->tensor.ndim = ndim;
  t->tensor.type_code = code_of(dtype);
  t->tensor.type_bits = bits_of(dtype);
  t->tensor.type_lanes = 1;
  t->shape[0] = rows, t->shape[1] = cols;
  t->strides[0] = ndim == 2 ? cols : 1, t->strides[1] = 1;
  t->bytes = (uint64_t)(rows * (ndim == 2 ? cols : 1)) * bits_of(dtype) / 8;
  if (t->memory == NULL || t->capacity < t->bytes) {
    give(t->memory);
    t->capacity = (t->bytes + 127) / 64 * 64;
    t->memory = take(t->capacity);
  }
  t->tensor.data = t->memory;
  point(t);
}

static void fill(rig_tensor_t* t, int kind) {
  int64_t count = (int64_t)(t->bytes * 8 / t->tensor.type_bits);
  for (int64_t i = 0; i < count; ++i) {
    float x = value(kind, i);
    if (t->tensor.type_bits == 32) {
      ((float*)t->tensor.data)[i] = x;
    } else if (t->tensor.type_bits == 64) {
      ((double*)t->tensor.data)[i] = x;
    } else { /* bf16 is the upper half of an f32 */
      uint32_t word;
      memcpy(&word, &x, sizeof word);
      ((uint16_t*)t->tensor.data)[i] = (uint16_t)(word >> 16);
    }
  }
}

static void poison(rig_tensor_t* t) { memset(t->tensor.data, 0xff, t->bytes); }

static int num_kinds(const rig_t* rig) { return rig->config.lora_rank > 0 ? RIG_NUM_KINDS : RIG_NUM_PARAMS; }

static void describe_params(rig_t* rig) {
  const sluice_moe_config_t* c = &rig->config;
  const int64_t M = c->model_width, H = c->hidden_width, r = c->lora_rank;
  const int64_t rows[] = {H, H, M, H, H, M, r, H, r, H, r, M}, cols[] = {M, M, H, 1, 1, 1, M, r, M, r, H, r};
  for (int kind = 0; kind < num_kinds(rig); ++kind) {
    const int is_bias = kind >= 3 && kind < RIG_NUM_PARAMS;
    for (int32_t e = 0; e < rig->num_local; ++e) {
      rig_tensor_t *p = &rig->params[kind][e], *g = &rig->grads[kind][e];
      describe(p, c->dtype, is_bias ? 1 : 2, rows[kind], cols[kind]);
      describe(g, c->dtype, is_bias ? 1 : 2, rows[kind], cols[kind]);
      fill(p, kind + 10 * e);
      poison(g);
      rig->param_list[kind][e] = p->tensor;
      rig->grad_list[kind][e] = g->tensor;
    }
  }
  sluice_tensor_t(*p)[RIG_MAX_EXPERTS] = rig->param_list;
  sluice_tensor_t(*g)[RIG_MAX_EXPERTS] = rig->grad_list;
  sluice_expert_tensors_t *params = &rig->param_table, *grads = &rig->grad_table;
  *params = (sluice_expert_tensors_t){sizeof *params, p[0], p[1], p[2], p[3], p[4], p[5]};
  *grads = (sluice_expert_tensors_t){sizeof *grads, g[0], g[1], g[2], g[3], g[4], g[5]};
  if (r == 0) return;
  params->la1 = p[6], params->lb1 = p[7], params->la3 = p[8], params->lb3 = p[9], params->la2 = p[10];
  params->lb2 = p[11], params->lora_scale1 = 2, params->lora_scale3 = 0.5f, params->lora_scale2 = 1;
  grads->la1 = g[6], grads->lb1 = g[7], grads->la3 = g[8], grads->lb3 = g[9], grads->la2 = g[10], grads->lb2 = g[11];
  grads->w1 = grads->w3 = grads->w2 = NULL;
}

/* Experts with y = 2 x and dx = 2 dy; on another machine a kernel on the host's stream computes them. */
static int32_t twice(void* user, int32_t chunk, int32_t expert, int64_t rows, const void* x, void* y) {
  const rig_t* rig = user;
  (void)chunk, (void)expert;
  if (here.machine != NULL) {
    rig->context->device->kernels->scale_rows(stream_here(), rig->config.dtype, rows, rig->config.model_width, x,
                                              rig->twos.tensor.data, y);
    return rig->callback_failure;
  }
  for (int64_t i = 0; i < rows * rig->config.model_width; ++i) ((float*)y)[i] = 2 * ((const float*)x)[i];
  return rig->callback_failure;
}
static int32_t twice_backward(void* user, int32_t chunk, int32_t expert, int64_t rows, const void* x, const void* dy,
                              void* dx) {
  (void)x;
  return twice(user, chunk, expert, rows, dy, dx);
}

void rig_reset(rig_t* rig) {
  settle();
  const sluice_moe_config_t* c = &rig->config;
  int64_t T = rig->num_tokens, M = c->model_width, K = c->top_k;
  describe(&rig->tokens, c->dtype, 2, T, M);
  describe(&rig->ids, SLUICE_DTYPE_I32, 2, T, K);
  describe(&rig->weights, SLUICE_DTYPE_F32, 2, T, K);
  describe(&rig->out, c->dtype, 2, T, M);
  describe(&rig->grad_out, c->dtype, 2, T, M);
  describe(&rig->grad_tokens, c->dtype, 2, T, M);
  describe(&rig->grad_weights, SLUICE_DTYPE_F32, 2, T, K);
  fill(&rig->tokens, 40 + rig->rank);
  fill(&rig->weights, 50 + rig->rank);
  fill(&rig->grad_out, 60 + rig->rank);
  poison(&rig->out), poison(&rig->grad_tokens), poison(&rig->grad_weights);
  for (int64_t i = 0; i < T * K; ++i) {
    ((int32_t*)rig->ids.tensor.data)[i] = (int32_t)((i + i / K + rig->rank) % c->num_experts);
  }
  describe_params(rig);
  describe(&rig->twos, SLUICE_DTYPE_F32, 1, rig->world_size * T * K, 1);
  for (int64_t i = 0; i < rig->world_size * T * K; ++i) ((float*)rig->twos.tensor.data)[i] = 2;
  rig->callback_failure = 0;
  rig->callbacks = (sluice_expert_callbacks_t){sizeof rig->callbacks, rig, twice, twice_backward};
  int host = c->callback_experts;

  sluice_moe_forward_args_t* f = &rig->forward;
  sluice_moe_forward_args_init(f, sizeof *f);
  f->tokens = &rig->tokens.tensor, f->expert_ids = &rig->ids.tensor, f->route_weights = &rig->weights.tensor;
  f->out_tokens = &rig->out.tensor;
  f->params = host ? NULL : &rig->param_table;
  f->callbacks = host ? &rig->callbacks : NULL;
  f->needs_backward = 1;

  sluice_moe_backward_args_t* b = &rig->backward;
  sluice_moe_backward_args_init(b, sizeof *b);
  b->tokens = f->tokens, b->route_weights = f->route_weights, b->params = f->params, b->callbacks = f->callbacks;
  b->grad_out = &rig->grad_out.tensor, b->grad_tokens = &rig->grad_tokens.tensor;
  b->grad_route_weights = &rig->grad_weights.tensor;
  b->grad_params = host ? NULL : &rig->grad_table;
}

sluice_status_t rig_open_context(rig_t* rig, sluice_comm_t* comm) {
  memset(rig, 0, sizeof *rig);
  heap_init(&rig->heap);
  rig->comm = comm;
  rig->rank = comm == NULL ? 0 : sluice_comm_rank(comm);
  rig->world_size = comm == NULL ? 1 : sluice_comm_world_size(comm);
  sluice_context_config_t config;
  sluice_context_config_init(&config, sizeof config);
  config.gemm = "ref";
  config.ranks_per_node = rig->world_size == 4 ? 2 : 0; /* for layers that need nodes */
  config.allocate = heap_allocate, config.release = heap_release, config.allocate_user = &rig->heap;
  if (here.machine != NULL) {
    config.gemm = NULL, config.allocate = NULL, config.release = NULL; /* the device has its own */
    config.device_type = here.machine->device_type, config.device_id = here.machine->device_id(here.rank);
    return here.machine->make_context(here.rank, &config, comm, &rig->context);
  }
  return sluice_context_create(&config, comm, &rig->context);
}

sluice_status_t rig_open_layer(rig_t* rig, const sluice_moe_config_t* config) {
  rig->config = *config;
  rig->num_tokens = 6;
  sluice_status_t status = sluice_moe_create(rig->context, config, &rig->moe);
  if (status != SLUICE_OK) return status;
  rig->num_local = 0;
  for (int32_t e = 0; e < config->num_experts; ++e) rig->num_local += owner_of(config, rig->world_size, e) == rig->rank;
  rig_reset(rig);
  return SLUICE_OK;
}

sluice_status_t rig_swap_layer(rig_t* rig, const sluice_moe_config_t* config) {
  sluice_moe_destroy(rig->moe);
  rig->moe = NULL;
  return rig_open_layer(rig, config);
}

sluice_status_t rig_open(rig_t* rig, sluice_comm_t* comm, const sluice_moe_config_t* config) {
  sluice_status_t status = rig_open_context(rig, comm);
  if (status == SLUICE_OK) status = rig_open_layer(rig, config);
  return status;
}

sluice_status_t rig_forward(rig_t* rig, sluice_step_t** out_step) {
  return sluice_moe_forward(rig->moe, &rig->forward, stream_here(), out_step);
}

sluice_status_t rig_backward(rig_t* rig, sluice_step_t* step) {
  return sluice_moe_backward(rig->moe, step, &rig->backward, stream_here());
}

static uint64_t hash(uint64_t h, const rig_tensor_t* t) { return sluice_hash_bytes(h, t->tensor.data, t->bytes); }

sluice_status_t rig_step(rig_t* rig) {
  sluice_step_t* step = NULL;
  sluice_status_t status = rig_forward(rig, &step);
  if (status == SLUICE_OK) status = rig_backward(rig, step);
  sluice_step_drop(step);
  return status;
}

uint64_t rig_digest_gradients(const rig_t* rig) {
  uint64_t h = hash(hash(SLUICE_HASH_OF_NOTHING, &rig->grad_tokens), &rig->grad_weights);
  for (int kind = 0; kind < num_kinds(rig); ++kind) {
    for (int32_t e = 0; e < rig->num_local; ++e) h = hash(h, &rig->grads[kind][e]);
  }
  return h;
}

uint64_t rig_digest(const rig_t* rig) { return hash(rig_digest_gradients(rig), &rig->out); }

sluice_status_t rig_round(rig_t* rig, uint64_t* out_digest) {
  rig_reset(rig);
  const sluice_status_t status = rig_step(rig);
  settle();
  if (status == SLUICE_OK && out_digest != NULL) *out_digest = rig_digest(rig);
  return status;
}

static void release(rig_tensor_t* t) {
  give(t->memory);
  t->memory = NULL;
}

void rig_close(rig_t* rig) {
  settle();
  sluice_moe_destroy(rig->moe);
  sluice_context_destroy(rig->context);
  rig->moe = NULL, rig->context = NULL;
  rig_tensor_t* all[] = {&rig->tokens,   &rig->ids,         &rig->weights,      &rig->out,
                         &rig->grad_out, &rig->grad_tokens, &rig->grad_weights, &rig->twos};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) release(all[i]);
  for (int kind = 0; kind < RIG_NUM_KINDS; ++kind) {
    for (int32_t e = 0; e < RIG_MAX_EXPERTS; ++e) {
      release(&rig->params[kind][e]);
      release(&rig->grads[kind][e]);
    }
  }
}
