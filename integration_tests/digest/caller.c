// SPDX-License-Identifier: Apache-2.0
/* Makes all calls of the digest to Sluice, by the C ABI of this tree. */
#include "caller.h"
#include "cuda_host.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sluice/sluice.h"

#define TIMEOUT_NS  UINT64_C(120000000000)
#define MUCH_MEMORY (UINT64_C(1) << 40)

enum { MAX_OUTSTANDING = 4, LAYER = 7 };

struct caller_group_s {
  sluice_local_group_t* local;     /* NULL: one rank, or NCCL's */
  char nccl[SLUICE_NCCL_ID_BYTES]; /* the id of that group */
};

/* Describes a block in the ABI's form. The shape is stored next to the tensor that points to it. */
typedef struct view_s {
  sluice_tensor_t tensor;
  int64_t shape[2], strides[2];
} view_t;

typedef struct saved_s {
  void* data[SLUICE_SAVED_COUNT];
  uint64_t bytes[SLUICE_SAVED_COUNT];
} saved_t;

typedef struct experts_s {
  view_t views[NUM_PARAMS][CALL_MAX_EXPERTS];
  sluice_tensor_t tensors[NUM_PARAMS][CALL_MAX_EXPERTS];
  sluice_expert_tensors_t table;
} experts_t;

struct caller_s {
  const call_t* call;
  rank_data_t* data;
  meet_t* meet;
  outcome_t* outcome;
  int32_t device_id; /* ranks share a GPU; with NCCL each has its own */
  cuda_host_t cuda;
  sluice_comm_t* comm;
  sluice_context_t* context;
  sluice_moe_t* moe;
  view_t x, ids, weights, y, dy, dx, dw;
  experts_t params, grads;
  sluice_expert_callbacks_t callbacks;
  saved_t saved;
};

/* ---- words ----------------------------------------------------------------------------------------------------- */

static const int32_t dtypes[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16, SLUICE_DTYPE_F64};
static const int32_t activations[] = {SLUICE_ACTIVATION_IDENTITY,  SLUICE_ACTIVATION_RELU, SLUICE_ACTIVATION_GELU,
                                      SLUICE_ACTIVATION_GELU_TANH, SLUICE_ACTIVATION_SILU, SLUICE_ACTIVATION_RELU2,
                                      SLUICE_ACTIVATION_SWIGLU};
static const int32_t gates[] = {SLUICE_GATED_NO, SLUICE_GATED_HALVES, SLUICE_GATED_INTERLEAVED};
static const int32_t cuts[] = {SLUICE_CHUNKING_TOKENS, SLUICE_CHUNKING_ADAPTIVE};
static const int32_t policies[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_REDISPATCH,
                                   SLUICE_RESTORE_RECOMPUTE, SLUICE_RESTORE_ADAPTIVE};
static const int32_t wgrads[] = {SLUICE_WGRAD_DEFERRED, SLUICE_WGRAD_PER_CHUNK};
static const char* const gemms[] = {"ref", "native"};

/* ---- failures -------------------------------------------------------------------------------------------------- */

static int is_well(const caller_t* h) { return h->outcome->refusal[0] == '\0'; }

static void note(caller_t* h, sluice_status_t status) {
  if (status == SLUICE_OK || !is_well(h)) return;
  sluice_error_info_t why;
  sluice_error_info_init(&why, sizeof why);
  sluice_error_last(&why);
  snprintf(h->outcome->refusal, sizeof h->outcome->refusal, "%s: %.500s", sluice_status_name(status), why.message);
}

static void note_cuda(caller_t* h, const char* what, int code) {
  if (code != 0 && is_well(h))
    snprintf(h->outcome->refusal, sizeof h->outcome->refusal, "CUDA: %s: the driver said %d", what, code);
}

static void settle(caller_t* h) { note_cuda(h, "the stream", cuda_host_settle(&h->cuda)); }

/* ---- tensors --------------------------------------------------------------------------------------------------- */

static const sluice_tensor_t* show(view_t* view, const caller_t* h, const block_t* b) {
  const int is_integer = b->dtype == AS_I32 || b->dtype == AS_I64;
  sluice_tensor_t* t = &view->tensor;
  t->data = b->data;
  t->device_id = h->device_id;
  t->device_type = h->call->device == ON_CUDA ? SLUICE_DEVICE_CUDA : SLUICE_DEVICE_CPU;
  t->ndim = b->ndim;
  t->type_code = is_integer ? SLUICE_TYPE_INT : b->dtype == BF16 ? SLUICE_TYPE_BFLOAT : SLUICE_TYPE_FLOAT;
  t->type_bits = (uint8_t)(8 * data_element_bytes(b->dtype));
  t->type_lanes = 1;
  view->shape[0] = b->rows, view->shape[1] = b->cols;
  view->strides[0] = b->row_stride, view->strides[1] = b->col_stride;
  t->shape = view->shape, t->strides = view->strides;
  return t;
}

static void show_experts(experts_t* x, const caller_t* h, block_t blocks[NUM_PARAMS][CALL_MAX_EXPERTS],
                         const int32_t* is_wanted) {
  const sluice_tensor_t* members[NUM_PARAMS] = {NULL};
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    for (int32_t l = 0; l < h->data->num_local; ++l) {
      if (blocks[kind][l].data == NULL || !is_wanted[kind]) continue;
      x->tensors[kind][l] = *show(&x->views[kind][l], h, &blocks[kind][l]);
      members[kind] = x->tensors[kind];
    }
  }
  x->table = (sluice_expert_tensors_t){sizeof x->table, members[W1], members[W3], members[W2],
                                       members[B1],     members[B3], members[B2]};
}

/* ---- experts of the host: y = x * (2 + e + column mod 3) -------------------------------------------------------- */

static void scale_rows(const caller_t* h, int32_t local, int64_t rows, const void* in, void* out) {
  const call_t* c = h->call;
  for (int64_t i = 0; i < rows * c->width; ++i) {
    double factor = 2 + h->data->local[local] + (int)(i % c->width % 3);
    data_store(c->dtype, out, i, data_load(c->dtype, in, i) * factor);
  }
}

/* On CUDA the experts wait for the rows that the library has enqueued. */
static int32_t expert_forward(void* user, int32_t chunk, int32_t local, int64_t rows, const void* x, void* y) {
  caller_t* h = user;
  (void)chunk;
  int code = cuda_host_settle(&h->cuda);
  scale_rows(h, local, rows, x, y);
  return code;
}
static int32_t expert_backward(void* user, int32_t chunk, int32_t local, int64_t rows, const void* x, const void* dy,
                               void* dx) {
  (void)x;
  return expert_forward(user, chunk, local, rows, dy, dx);
}

/* ---- opening --------------------------------------------------------------------------------------------------- */

caller_group_t* caller_open_group(const call_t* call) {
  caller_group_t* group = calloc(1, sizeof *group);
  if (group == NULL) abort();
  sluice_status_t status = SLUICE_OK;
  if (call->comm == COMM_NCCL) {
    status = sluice_nccl_id_create(NULL, group->nccl);
  } else if (call->ranks > 1) {
    status = sluice_local_group_create(call->ranks, &group->local);
  }
  if (status != SLUICE_OK) abort();
  return group;
}

void caller_close_group(caller_group_t* group) {
  sluice_local_group_destroy(group->local);
  free(group);
}

static void open_comm(caller_t* h, const caller_group_t* group) {
  sluice_comm_config_t config;
  sluice_comm_config_init(&config, sizeof config);
  config.rank = h->data->rank, config.world_size = h->call->ranks, config.timeout_ns = TIMEOUT_NS;
  if (group->local != NULL) note(h, sluice_comm_create_local(group->local, &config, &h->comm));
  if (h->call->comm != COMM_NCCL) return;
  sluice_nccl_group_t nccl;
  sluice_nccl_group_init(&nccl, sizeof nccl);
  nccl.id = group->nccl, nccl.device_id = h->device_id;
  note(h, sluice_comm_create_nccl(&config, &nccl, &h->comm));
}

static void open_context(caller_t* h) {
  const call_t* c = h->call;
  sluice_context_config_t config;
  sluice_context_config_init(&config, sizeof config);
  if (c->device == ON_CUDA) {
    config.device_type = SLUICE_DEVICE_CUDA, config.device_id = h->device_id;
  } else {
    config.gemm = gemms[c->gemm];
  }
  if (c->plan == PLAN_BUDGET) config.memory_budget = MUCH_MEMORY;
  config.max_outstanding = c->outstanding;
  config.separate_wgrad = c->separate_wgrad;
  note(h, sluice_context_create(&config, h->comm, &h->context));
}

static int32_t policy_of(const policies_t* p, int32_t chunk) { return policies[p->of[p->count == 1 ? 0 : chunk]]; }

static const int32_t* policy_list(const policies_t* p, int32_t* room) {
  for (int32_t i = 0; i < p->count; ++i) room[i] = policy_of(p, i);
  return p->count > 1 ? room : NULL;
}

static void open_layer(caller_t* h) {
  const call_t* c = h->call;
  int32_t input[CALL_MAX_CHUNKS], middle[CALL_MAX_CHUNKS];
  sluice_moe_config_t config;
  sluice_moe_config_init(&config, sizeof config);
  config.model_width = c->width, config.hidden_width = c->hidden;
  config.num_experts = c->experts, config.top_k = c->topk, config.dtype = dtypes[c->dtype];
  config.activation = activations[c->activation], config.gated = gates[c->gated], config.bias = c->bias;
  config.num_chunks = c->chunks, config.chunking = cuts[c->cut], config.wgrad_mode = wgrads[c->wgrad];
  config.callback_experts = c->callback, config.layer_id = LAYER;
  config.expert_rank = c->owners == OWNERS_EVEN ? NULL : h->data->owner;
  config.swiglu_alpha = 1.75f, config.swiglu_limit = 0.625f, config.swiglu_offset = 1.0f;
  config.restore_input = policy_of(&c->input, 0), config.restore_pre_activation = policy_of(&c->middle, 0);
  config.restore_input_of = policy_list(&c->input, input),
  config.restore_pre_activation_of = policy_list(&c->middle, middle);
  config.deduplicate = c->deduplicate;
  if (c->ceiling > 0) config.exchange_mode = SLUICE_EXCHANGE_CAPACITY, config.capacity_rows = c->ceiling;
  note(h, sluice_moe_create(h->context, &config, &h->moe));
}

static int64_t most_tokens(const call_t* c) {
  int64_t most = 1;
  for (int32_t r = 0; r < c->ranks; ++r) most = c->tokens[r] > most ? c->tokens[r] : most;
  return most;
}

static uint64_t bytes_now(caller_t* h) {
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  note(h, sluice_context_get_stats(h->context, 0, &stats));
  return stats.current_bytes;
}

/* Makes a plan; if `use`, the layer uses it from then on. */
static sluice_plan_info_t make_plan(caller_t* h, const sluice_plan_config_t* config, int use) {
  sluice_plan_t* plan = NULL;
  sluice_plan_info_t info = {.struct_size = sizeof info};
  if (is_well(h)) note(h, sluice_plan_create(h->moe, config, &plan));
  if (is_well(h)) note(h, sluice_plan_get_info(plan, &info));
  if (is_well(h) && use) note(h, sluice_moe_use_plan(h->moe, plan));
  sluice_plan_destroy(plan);
  return info;
}

/* Makes a plan of the host. At 100 percent it has no budget; otherwise its budget is that share of the bytes that steps
 * keep without a budget. */
static void use_plan(caller_t* h) {
  const call_t* c = h->call;
  int32_t input[CALL_MAX_CHUNKS], middle[CALL_MAX_CHUNKS];
  sluice_plan_config_t config;
  sluice_plan_config_init(&config, sizeof config);
  config.max_tokens = most_tokens(c), config.max_outstanding = c->outstanding, config.num_chunks = c->chunks;
  config.restore_input = policy_of(&c->input, 0), config.restore_pre_activation = policy_of(&c->middle, 0);
  config.restore_input_of = policy_list(&c->input, input),
  config.restore_pre_activation_of = policy_list(&c->middle, middle);
  config.wgrad_mode = wgrads[c->wgrad], config.separate_wgrad = c->separate_wgrad;
  config.base_bytes = meet_most(h->meet, is_well(h) ? bytes_now(h) : 0);
  sluice_plan_info_t info = make_plan(h, &config, c->percent == 100);
  if (c->percent != 100) {
    const uint64_t kept = (uint64_t)c->outstanding * info.step_bytes;
    config.memory_budget = meet_most(h->meet, info.total_bytes - kept / 100 * (uint64_t)(100 - c->percent));
    info = make_plan(h, &config, 1);
  }
  h->outcome->planned = info.total_bytes;
}

/* Sets the context's budget: a share of the smallest sufficient budget, over all ranks. */
static void use_budget(caller_t* h) {
  uint64_t smallest = 0;
  if (is_well(h)) note(h, sluice_moe_smallest_budget(h->moe, most_tokens(h->call), &smallest));
  smallest = meet_most(h->meet, smallest);
  const uint64_t share = smallest / 100 * (uint64_t)h->call->percent + smallest % 100;
  if (is_well(h)) note(h, sluice_context_set_share(h->context, share, MUCH_MEMORY));
  h->outcome->planned = share;
}

caller_t* caller_open(caller_group_t* group, rank_data_t* data, meet_t* meet, outcome_t* outcome) {
  caller_t* h = calloc(1, sizeof *h);
  if (h == NULL) abort();
  h->call = data->call, h->data = data, h->meet = meet, h->outcome = outcome;
  h->device_id = h->call->comm == COMM_NCCL ? data->rank : 0;
  h->callbacks = (sluice_expert_callbacks_t){sizeof h->callbacks, h, expert_forward, expert_backward};
  if (h->call->device == ON_CUDA) note_cuda(h, "opening", cuda_host_open(&h->cuda, h->device_id));
  if (is_well(h)) open_comm(h, group);
  if (is_well(h)) open_context(h);
  if (is_well(h)) open_layer(h);
  if (h->call->plan == PLAN_OWN) use_plan(h);
  if (h->call->plan == PLAN_BUDGET) use_budget(h);
  return h;
}

void caller_close(caller_t* h) {
  for (int i = 0; i < SLUICE_SAVED_COUNT; ++i) free(h->saved.data[i]);
  sluice_moe_destroy(h->moe);
  sluice_context_destroy(h->context);
  sluice_comm_destroy(h->comm);
  cuda_host_close(&h->cuda);
  free(h);
}

/* ---- a step ---------------------------------------------------------------------------------------------------- */

static void* save(void* user, int32_t which, uint64_t bytes) {
  saved_t* saved = user;
  free(saved->data[which]);
  saved->bytes[which] = bytes;
  saved->data[which] = aligned_alloc(64, (bytes + 127) / 64 * 64);
  return saved->data[which];
}

/* Drops the step and makes it again from its saved buffers, at other addresses. */
static void rebuild(caller_t* h, sluice_step_t** step) {
  settle(h);
  sluice_step_drop(*step);
  *step = NULL;
  for (int i = 0; i < SLUICE_SAVED_COUNT; ++i) {
    void* copy = aligned_alloc(64, (h->saved.bytes[i] + 127) / 64 * 64);
    if (copy == NULL || h->saved.data[i] == NULL) abort();
    memcpy(copy, h->saved.data[i], h->saved.bytes[i]);
    memset(h->saved.data[i], 0xff, h->saved.bytes[i]);
    free(h->saved.data[i]);
    h->saved.data[i] = copy;
  }
  note(h, sluice_step_restore(h->moe, h->saved.data, h->saved.bytes, step));
}

static sluice_step_t* run_forward(caller_t* h, int32_t repeats) {
  const call_t* c = h->call;
  sluice_step_t* step = NULL;
  sluice_moe_forward_args_t f;
  sluice_moe_forward_args_init(&f, sizeof f);
  f.tokens = &h->x.tensor, f.expert_ids = &h->ids.tensor, f.route_weights = &h->weights.tensor;
  f.out_tokens = &h->y.tensor;
  f.params = c->callback ? NULL : &h->params.table, f.callbacks = c->callback ? &h->callbacks : NULL;
  f.needs_backward = !c->eval, f.repeats = repeats;
  if (c->restore) f.save = save, f.save_user = &h->saved;
  if (is_well(h)) note(h, sluice_moe_forward(h->moe, &f, h->cuda.stream, c->eval ? NULL : &step));
  return step;
}

static void run_backward(caller_t* h, sluice_step_t* step) {
  const call_t* c = h->call;
  const wanted_t wanted = call_wanted(c);
  sluice_moe_backward_args_t b;
  sluice_moe_backward_args_init(&b, sizeof b);
  b.tokens = &h->x.tensor, b.route_weights = &h->weights.tensor, b.grad_out = &h->dy.tensor;
  b.grad_tokens = wanted.x ? &h->dx.tensor : NULL, b.grad_route_weights = wanted.routes ? &h->dw.tensor : NULL;
  b.params = c->callback ? NULL : &h->params.table, b.callbacks = c->callback ? &h->callbacks : NULL;
  const sluice_expert_tensors_t* g = &h->grads.table;
  const int any = g->w1 != NULL || g->w3 != NULL || g->w2 != NULL || g->b1 != NULL || g->b3 != NULL || g->b2 != NULL;
  b.grad_params = c->callback || (!any && strcmp(c->frozen, "params") == 0) ? NULL : g;
  b.grad_mode = c->accumulate ? SLUICE_GRAD_ACCUMULATE : SLUICE_GRAD_OVERWRITE;
  b.may_reuse_saved = c->reuse;
  if (c->separate_wgrad) {
    b.parts = SLUICE_BACKWARD_DGRAD;
    if (is_well(h)) note(h, sluice_moe_backward(h->moe, step, &b, h->cuda.stream));
    b.parts = SLUICE_BACKWARD_WGRAD, b.grad_out = NULL;
  }
  if (is_well(h)) note(h, sluice_moe_backward(h->moe, step, &b, h->cuda.stream));
}

static void run_layer(caller_t* h) {
  const call_t* c = h->call;
  sluice_step_t* steps[MAX_OUTSTANDING] = {NULL};
  for (int32_t i = 0; i < c->outstanding; ++i) steps[i] = run_forward(h, 0);
  if (c->repeat) {
    for (int32_t i = 0; i < c->outstanding; ++i) {
      sluice_step_drop(steps[i]);
      steps[i] = run_forward(h, 1);
    }
  }
  if (c->restore && is_well(h)) rebuild(h, &steps[0]);
  int64_t rows[CALL_MAX_EXPERTS] = {0};
  if (is_well(h) && !c->eval && c->device == ON_CPU) {
    note(h, sluice_step_info(steps[0], NULL, rows));
    h->outcome->rows_hash = (int64_t)data_hash(DATA_HASH, rows, (uint64_t)h->data->num_local * sizeof rows[0]);
  }
  for (int32_t i = c->outstanding - 1; i >= 0 && !c->eval; --i) {
    run_backward(h, steps[i]);
    settle(h);
    sluice_step_drop(steps[i]);
  }
  settle(h);
}

/* Runs once with other routes, as a capture needs an earlier run; then launches a graph with the call's routes. */
static void run_captured(caller_t* h) {
  const int64_t tokens = h->data->x.rows;
  data_begin(h->data, 0, tokens, 1);
  sluice_step_t* before = run_forward(h, 0);
  run_backward(h, before);
  settle(h);
  sluice_step_drop(before);
  if (is_well(h)) note_cuda(h, "the beginning of a capture", cuda_host_begin_capture(&h->cuda));
  sluice_step_t* step = run_forward(h, 0);
  run_backward(h, step);
  if (is_well(h)) note_cuda(h, "the end of a capture", cuda_host_end_capture(&h->cuda));
  data_begin(h->data, 0, tokens, 0);
  if (is_well(h)) note_cuda(h, "the launch", cuda_host_launch(&h->cuda));
  settle(h);
  sluice_step_drop(step);
}

/* Runs dispatch, experts and combine as separate calls; the rows between them are this host's. */
static void run_parts(caller_t* h) {
  const call_t* c = h->call;
  const wanted_t wanted = call_wanted(c);
  sluice_dispatch_t* dispatch = NULL;
  void* rows = NULL;
  int64_t R = 0, counts[CALL_MAX_EXPERTS] = {0};
  if (is_well(h)) note(h, sluice_dispatch_forward(h->moe, &h->x.tensor, &h->ids.tensor, NULL, &dispatch));
  if (is_well(h)) note(h, sluice_dispatch_rows(dispatch, &rows, &R, counts));
  if (!is_well(h)) return;
  const uint64_t element = data_element_bytes(c->dtype), row = (uint64_t)(R * c->width) * element;
  const uint64_t pre_bytes = (uint64_t)(R * c->hidden) * element * (c->gated != GATE_NONE ? 2 : 1);
  uint64_t hash = data_hash(DATA_HASH, rows, row);
  hash = data_hash(hash, counts, (uint64_t)h->data->num_local * sizeof counts[0]);
  char *out = malloc(row + 1), *grad = malloc(row + 1), *grad_in = malloc(row + 1), *pre = malloc(pre_bytes + 1);
  float* grad_weight = calloc((size_t)R + 1, sizeof(float));
  if (out == NULL || grad == NULL || grad_in == NULL || pre == NULL || grad_weight == NULL) abort();
  float* scalars = wanted.routes ? grad_weight : NULL;
  const int32_t mode = c->accumulate ? SLUICE_GRAD_ACCUMULATE : SLUICE_GRAD_OVERWRITE;
  note(h, sluice_experts_forward(h->moe, rows, counts, &h->params.table, pre, out, NULL));
  hash = data_hash(hash, out, row);
  if (is_well(h)) note(h, sluice_dispatch_combine(dispatch, out, &h->weights.tensor, &h->y.tensor, NULL));
  if (is_well(h))
    note(h, sluice_dispatch_combine_backward(dispatch, out, &h->weights.tensor, &h->dy.tensor, grad, scalars, NULL));
  if (is_well(h))
    note(h, sluice_experts_backward(h->moe, rows, pre, counts, &h->params.table, grad, wanted.x ? grad_in : NULL,
                                    &h->grads.table, mode, NULL));
  if (is_well(h))
    note(h, sluice_dispatch_backward(dispatch, wanted.x ? grad_in : NULL, scalars, wanted.x ? &h->dx.tensor : NULL,
                                     wanted.routes ? &h->dw.tensor : NULL, NULL));
  h->outcome->rows_hash = (int64_t)hash;
  sluice_dispatch_destroy(dispatch);
  free(out), free(grad), free(grad_in), free(pre), free(grad_weight);
}

void caller_step(caller_t* h) {
  const call_t* c = h->call;
  rank_data_t* d = h->data;
  static const int32_t all[NUM_PARAMS] = {1, 1, 1, 1, 1, 1};
  const wanted_t w = call_wanted(c);
  const int32_t some[NUM_PARAMS] = {w.w1, w.w3, w.w2, w.b1, w.b3, w.b2};
  (void)show(&h->x, h, &d->x), (void)show(&h->ids, h, &d->ids), (void)show(&h->weights, h, &d->weights);
  (void)show(&h->y, h, &d->y), (void)show(&h->dy, h, &d->dy), (void)show(&h->dx, h, &d->dx);
  (void)show(&h->dw, h, &d->dw);
  show_experts(&h->params, h, d->params, all);
  show_experts(&h->grads, h, d->grads, some);
  if (!is_well(h)) return;
  if (c->api == API_PARTS) {
    run_parts(h);
  } else if (c->capture) {
    run_captured(h);
  } else {
    run_layer(h);
  }
}

void caller_report(caller_t* h) {
  outcome_t* o = h->outcome;
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  if (!is_well(h)) return;
  note(h, sluice_context_get_stats(h->context, 0, &stats));
  o->chunks = stats.last_num_chunks, o->sent = stats.bytes_sent, o->saved = stats.saved_bytes;
  o->fallback = stats.num_fallback_chunks;
  if (h->call->ceiling == 0) return;
  sluice_capacity_report_t report;
  sluice_capacity_report_init(&report, sizeof report);
  sluice_status_t status = sluice_moe_take_capacity_report(h->moe, h->cuda.stream, &report);
  if (status != SLUICE_E_CAPACITY) note(h, status);
  o->most_rows = report.most_rows, o->num_dropped = report.num_dropped;
}
