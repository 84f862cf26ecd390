#include "capi/test/world.h"

enum { MAX_OUTSTANDING = 8 };

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/dtype.h"

/* ---- data: every value is a function of what it is and where it stands, rounded to the layer's dtype ---- */

/* Numbers of SWIGLU in every case: the clamps cut off some values and leave most. */
static const float ALPHA = 1.75f, LIMIT = 0.625f, OFFSET = 1.0f;

enum { W1, W3, W2, B1, B3, B2, NUM_PARAMS, TOKENS, WEIGHTS, GRAD_OUT };

static double noise(uint64_t kind, uint64_t a, uint64_t b, uint64_t c) {
  uint64_t x = kind * 0x9e3779b97f4a7c15u ^ (a + 1) * 0xbf58476d1ce4e5b9u ^ (b + 1) * 0x94d049bb133111ebu ^
               (c + 1) * 0xd6e8feb86659fd93u;
  x ^= x >> 31, x *= 0x7fb5d329728ea185u, x ^= x >> 27, x *= 0x81dadef4bc2dd44du, x ^= x >> 33;
  return (double)(x >> 11) / 9007199254740992.0 * 2 - 1;
}

static double rounded(int32_t dtype, double x) {
  switch (dtype) {
    case SLUICE_DTYPE_F32: return (float)x;
    case SLUICE_DTYPE_BF16: return sluice_bf16_to_f32(sluice_f32_to_bf16((float)x));
    case SLUICE_DTYPE_F16: return sluice_f16_to_f32(sluice_f32_to_f16((float)x));
    default: return x;
  }
}

/* One input moved, for finite differences. */
static _Thread_local struct {
  int which;
  int64_t index;
  double delta;
} moved = {-1, 0, 0};

static double shifted(int which, int64_t index, double x) {
  return moved.which == which && moved.index == index ? x + moved.delta : x;
}

static int64_t tokens_before(const case_t* c, int32_t rank) {
  int64_t total = 0;
  for (int32_t r = 0; r < rank; ++r) total += c->tokens[r];
  return total;
}

static double token_value(const case_t* c, int32_t rank, int64_t t, int64_t m) {
  double x = rounded(c->dtype, noise(TOKENS, (uint64_t)rank, (uint64_t)t, (uint64_t)m));
  return shifted(0, (tokens_before(c, rank) + t) * c->model_width + m, x);
}

static float weight_value(const case_t* c, int32_t rank, int64_t t, int32_t k) {
  double x = 0.5 + 0.5 * noise(WEIGHTS, (uint64_t)rank, (uint64_t)t, (uint64_t)k);
  return (float)shifted(1, (tokens_before(c, rank) + t) * c->top_k + k, (float)x);
}

static double grad_value(const case_t* c, int32_t rank, int64_t t, int64_t m) {
  return rounded(c->dtype, noise(GRAD_OUT, (uint64_t)rank, (uint64_t)t, (uint64_t)m));
}

static int64_t param_rows(const case_t* c, int kind) {
  return kind == W2 || kind == B2 ? c->model_width : c->hidden_width;
}
static int64_t param_cols(const case_t* c, int kind) {
  return kind == B1 || kind == B2 || kind == B3 ? 1 : kind == W2 ? c->hidden_width : c->model_width;
}
static int64_t param_size(const case_t* c, int kind) { return param_rows(c, kind) * param_cols(c, kind); }

static int param_used(const case_t* c, int kind) {
  if (kind == W3) return c->gated;
  if (kind == B3) return c->gated && c->bias;
  return kind == B1 || kind == B2 ? c->bias : 1;
}

static double param_value(const case_t* c, int kind, int32_t e, int64_t i) {
  double scale = kind >= B1 ? 0.3 : 1.0 / sqrt((double)param_cols(c, kind));
  return shifted(2 + kind, (int64_t)e * param_size(c, kind) + i,
                 rounded(c->dtype, scale * noise((uint64_t)kind, (uint64_t)e, (uint64_t)i, 0)));
}

int64_t world_expert(const case_t* c, int32_t rank, int64_t t, int32_t k) {
  int64_t flat = t * c->top_k + k;
  if (c->drop_every > 0 && flat % c->drop_every == c->drop_every - 1) return -1;
  if (c->repeat_every > 0 && k > 0 && t % c->repeat_every == 0) k = 0;
  if (c->hot_expert >= 0 && k == 0) return c->hot_expert;
  int64_t first = (int64_t)((noise(99, (uint64_t)rank, (uint64_t)t, 0) + 1) / 2 * c->num_experts) % c->num_experts;
  int64_t id = (first + k) % c->num_experts;
  if (c->hot_expert >= 0 && k > 0 && id == c->hot_expert) id = (first + c->top_k) % c->num_experts;
  return id;
}

int32_t world_owner(const case_t* c, int32_t e) {
  if (!c->uneven_owners) return e / (c->num_experts / c->world_size);
  return e < c->world_size ? e : c->world_size - 1;
}

/* ---- typed memory ---- */

static void store(int32_t dtype, void* data, int64_t i, double x) {
  switch (dtype) {
    case SLUICE_DTYPE_F32: ((float*)data)[i] = (float)x; break;
    case SLUICE_DTYPE_BF16: ((uint16_t*)data)[i] = sluice_f32_to_bf16((float)x); break;
    case SLUICE_DTYPE_F16: ((uint16_t*)data)[i] = sluice_f32_to_f16((float)x); break;
    case SLUICE_DTYPE_I64: ((int64_t*)data)[i] = (int64_t)x; break;
    default: ((double*)data)[i] = x;
  }
}

static double load(int32_t dtype, const void* data, int64_t i) {
  switch (dtype) {
    case SLUICE_DTYPE_F32: return ((const float*)data)[i];
    case SLUICE_DTYPE_BF16: return sluice_bf16_to_f32(((const uint16_t*)data)[i]);
    case SLUICE_DTYPE_F16: return sluice_f16_to_f32(((const uint16_t*)data)[i]);
    default: return ((const double*)data)[i];
  }
}

/* Where this thread's rank lives. */
static _Thread_local struct {
  const world_machine_t* machine; /* NULL: this CPU */
  int32_t rank;
} here;

static void* take(uint64_t bytes) {
  return here.machine != NULL ? here.machine->allocate(here.rank, bytes) : malloc(bytes);
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
static void tell(int32_t direction, int32_t has_returned) {
  if (here.machine != NULL && here.machine->note != NULL) here.machine->note(here.rank, direction, has_returned);
}

typedef struct array_s {
  sluice_tensor_t tensor;
  void* host; /* what the test reads and writes; the tensor's own memory on this CPU */
  uint64_t bytes;
  int64_t shape[2];
  int64_t strides[2];
} array_t;

static void make(array_t* a, int32_t dtype, int32_t ndim, int64_t rows, int64_t cols, int64_t row_stride,
                 int64_t col_stride) {
  memset(a, 0, sizeof *a);
  int64_t elements =
      rows * (ndim == 2 ? (row_stride > cols ? row_stride : cols) : 1) + (col_stride > 1 ? cols * col_stride : 0);
  a->bytes = (uint64_t)(elements + 1) * sluice_dtype_bytes(dtype);
  a->host = malloc(a->bytes);
  memset(a->host, 0xff, a->bytes); /* NaN */
  a->tensor.data = here.machine != NULL ? take(a->bytes) : a->host;
  a->tensor.device_type = here.machine != NULL ? here.machine->device_type : SLUICE_DEVICE_CPU;
  a->tensor.device_id = here.machine != NULL ? here.machine->device_id(here.rank) : 0;
  a->tensor.ndim = ndim;
  a->tensor.type_code = dtype == SLUICE_DTYPE_I64    ? SLUICE_TYPE_INT
                        : dtype == SLUICE_DTYPE_BF16 ? SLUICE_TYPE_BFLOAT
                                                     : SLUICE_TYPE_FLOAT;
  a->tensor.type_bits = (uint8_t)(8 * sluice_dtype_bytes(dtype));
  a->tensor.type_lanes = 1;
  a->shape[0] = rows, a->shape[1] = cols;
  a->strides[0] = row_stride, a->strides[1] = col_stride;
}

static void push(const array_t* a) {
  if (here.machine != NULL) here.machine->send(here.rank, a->tensor.data, a->host, a->bytes);
}
static void pull(const array_t* a) {
  if (here.machine != NULL) here.machine->fetch(here.rank, a->host, a->tensor.data, a->bytes);
}
static void drop(array_t* a) {
  if (here.machine != NULL) give(a->tensor.data);
  free(a->host);
}

/* Shape pointers are set where the array finally lies. */
static const sluice_tensor_t* tensor_of(array_t* a) {
  a->tensor.shape = a->shape;
  a->tensor.strides = a->strides;
  return &a->tensor;
}

static void make_rows(array_t* a, int32_t dtype, int64_t rows, int64_t cols, int64_t pad) {
  make(a, dtype, 2, rows, cols, cols + pad, 1);
}

/* ---- one rank ---- */

typedef struct rank_s {
  const case_t* c;
  result_t* out;
  sluice_local_group_t* group;
  int32_t rank;
} rank_t;

typedef struct experts_s {
  array_t* arrays[NUM_PARAMS];
  sluice_tensor_t* tensors[NUM_PARAMS];
  sluice_expert_tensors_t table;
} experts_t;

static int32_t local_experts(const case_t* c, int32_t rank, int32_t* out_ids) {
  int32_t count = 0;
  for (int32_t e = 0; e < c->num_experts; ++e) {
    if (world_owner(c, e) == rank) out_ids[count++] = e;
  }
  return count;
}

static void make_experts(experts_t* x, const case_t* c, int32_t dtype, const int32_t* ids, int32_t count,
                         int gradients) {
  memset(x, 0, sizeof *x);
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    if (!param_used(c, kind) || count == 0) continue;
    x->arrays[kind] = calloc((size_t)count, sizeof(array_t));
    x->tensors[kind] = calloc((size_t)count, sizeof(sluice_tensor_t));
    for (int32_t l = 0; l < count; ++l) {
      array_t* a = &x->arrays[kind][l];
      int64_t rows = param_rows(c, kind), cols = param_cols(c, kind);
      int matrix = kind <= W2;
      make(a, dtype, matrix ? 2 : 1, rows, cols, matrix && c->transposed ? 1 : cols,
           matrix && c->transposed ? rows : 1);
      for (int64_t i = 0; i < rows * cols; ++i) {
        int64_t at = (i / cols) * a->strides[0] + (i % cols) * a->strides[1];
        if (gradients) {
          if (c->accumulate) store(dtype, a->host, at, 1);
        } else {
          store(dtype, a->host, at, param_value(c, kind, ids[l], i));
        }
      }
      push(a);
      x->tensors[kind][l] = *tensor_of(a);
    }
  }
  x->table = (sluice_expert_tensors_t){sizeof x->table, x->tensors[W1], x->tensors[W3], x->tensors[W2],
                                       x->tensors[B1],  x->tensors[B3], x->tensors[B2]};
}

static void free_experts(experts_t* x, int32_t count) {
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    for (int32_t l = 0; x->arrays[kind] != NULL && l < count; ++l) drop(&x->arrays[kind][l]);
    free(x->arrays[kind]);
    free(x->tensors[kind]);
  }
}

static void count_ready(void* user, int32_t local) {
  (void)local;
  ++*(int32_t*)user;
}

/* Callback experts of the tests: y = x * (e + 2) elementwise, so dx = dy * (e + 2). */
typedef struct toy_s {
  const case_t* c;
  const int32_t* ids;
  int32_t* calls;
  int64_t* most_rows;
  int64_t rows_of_chunk;
  int32_t chunk;
} toy_t;

static void toy_scale(const toy_t* toy, int32_t local, int64_t rows, const void* in, void* out) {
  for (int64_t i = 0; i < rows * toy->c->model_width; ++i) {
    store(toy->c->dtype, out, i, load(toy->c->dtype, in, i) * (toy->ids[local] + 2));
  }
}
static int32_t toy_forward(void* user, int32_t chunk, int32_t local, int64_t rows, const void* x, void* y) {
  toy_t* toy = user;
  toy->rows_of_chunk = (chunk == toy->chunk ? toy->rows_of_chunk : 0) + rows;
  toy->chunk = chunk;
  if (toy->rows_of_chunk > *toy->most_rows) *toy->most_rows = toy->rows_of_chunk;
  ++*toy->calls;
  toy_scale(toy, local, rows, x, y);
  return 0;
}
static int32_t toy_backward(void* user, int32_t chunk, int32_t local, int64_t rows, const void* x, const void* dy,
                            void* dx) {
  (void)chunk, (void)x;
  toy_scale(user, local, rows, dy, dx);
  return 0;
}

static void note(rank_t* r, sluice_status_t status) {
  if (status == SLUICE_OK || r->out->status[r->rank] != SLUICE_OK) return;
  sluice_error_info_t why;
  sluice_error_info_init(&why, sizeof why);
  sluice_error_last(&why);
  r->out->status[r->rank] = status;
  snprintf(r->out->message[r->rank], sizeof r->out->message[r->rank], "%s", why.message);
}

static double* copy_rows(const array_t* a, int32_t dtype) {
  pull(a);
  double* out = malloc((size_t)(a->shape[0] * a->shape[1] + 1) * sizeof(double));
  for (int64_t i = 0; i < a->shape[0]; ++i)
    for (int64_t j = 0; j < a->shape[1]; ++j)
      out[i * a->shape[1] + j] = load(dtype, a->host, i * a->strides[0] + j * a->strides[1]);
  return out;
}

typedef struct saved_s {
  void* data[SLUICE_SAVED_COUNT];
  uint64_t bytes[SLUICE_SAVED_COUNT];
} saved_t;

/* Of another machine, rows lie in its memory and the rest in the host's. */
static int is_theirs(int32_t which) {
  return here.machine != NULL && (which == SLUICE_SAVED_INPUT || which == SLUICE_SAVED_MIDDLE);
}
static void* take_saved(int32_t which, uint64_t bytes) {
  bytes = (bytes + 127) / 64 * 64;
  return is_theirs(which) ? take(bytes) : aligned_alloc(64, bytes);
}
static void give_saved(int32_t which, void* data) {
  if (is_theirs(which)) {
    give(data);
  } else {
    free(data);
  }
}

static void* save_host(void* user, int32_t which, uint64_t bytes) {
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
  here.machine->fetch(here.rank, between, from, bytes);
  here.machine->send(here.rank, to, between, bytes);
  memset(between, 0xff, bytes);
  here.machine->send(here.rank, from, between, bytes);
  free(between);
}

/* Moves the saved buffers elsewhere and rebuilds the step from them. */
static sluice_status_t rebuild(sluice_moe_t* moe, saved_t* saved, sluice_step_t** step) {
  settle();
  sluice_step_drop(*step);
  for (int i = 0; i < SLUICE_SAVED_COUNT; ++i) {
    void* copy = take_saved(i, saved->bytes[i]);
    move_saved(i, copy, saved->data[i], saved->bytes[i]);
    give_saved(i, saved->data[i]);
    saved->data[i] = copy;
  }
  return sluice_step_restore(moe, saved->data, saved->bytes, step);
}

typedef struct parts_s {
  const sluice_tensor_t *x, *id, *w, *y, *dy, *dx, *dw;
  const sluice_expert_tensors_t *params, *grads;
} parts_t;

/* The layer from its parts; the steps between are this host's. */
static void run_parts(rank_t* r, sluice_moe_t* moe, const parts_t* p) {
  const case_t* c = r->c;
  sluice_dispatch_t* dispatch = NULL;
  note(r, sluice_dispatch_forward(moe, p->x, p->id, NULL, &dispatch));
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
  note(r, sluice_experts_forward(moe, rows, counts, p->params, pre, out, NULL));
  note(r, sluice_dispatch_combine(dispatch, out, p->w, p->y, NULL));
  note(r, sluice_dispatch_combine_backward(dispatch, out, p->w, p->dy, grad, grad_weight, NULL));
  note(r, sluice_experts_backward(moe, rows, pre, counts, p->params, grad, grad_in, p->grads,
                                  c->accumulate ? SLUICE_GRAD_ACCUMULATE : SLUICE_GRAD_OVERWRITE, NULL));
  note(r, sluice_dispatch_backward(dispatch, grad_in, grad_weight, p->dx, p->dw, NULL));
  sluice_dispatch_destroy(dispatch);
  free(grad_weight);
  free(memory);
  free(counts);
}

/* Rounds in one context, as a training has them: T changes from one to the next, and comes back. */
typedef struct round_s {
  array_t* tensors[7]; /* x id w y dy dx dw */
  const sluice_expert_tensors_t *params, *grads;
} round_t;

static sluice_status_t run_round(sluice_moe_t* moe, const round_t* p) {
  const sluice_tensor_t* t[7];
  sluice_step_t* step = NULL;
  sluice_moe_forward_args_t f;
  sluice_moe_backward_args_t b;
  for (int i = 0; i < 7; ++i) t[i] = tensor_of(p->tensors[i]);
  sluice_moe_forward_args_init(&f, sizeof f);
  f.tokens = t[0], f.expert_ids = t[1], f.route_weights = t[2], f.out_tokens = t[3], f.params = p->params;
  f.needs_backward = 1;
  sluice_status_t status = sluice_moe_forward(moe, &f, stream_here(), &step);
  if (status != SLUICE_OK) return status;
  sluice_moe_backward_args_init(&b, sizeof b);
  b.tokens = t[0], b.route_weights = t[2], b.grad_out = t[4], b.grad_tokens = t[5], b.grad_route_weights = t[6];
  b.params = p->params, b.grad_params = p->grads, b.may_reuse_saved = 1;
  status = sluice_moe_backward(moe, step, &b, stream_here());
  sluice_step_drop(step);
  return status;
}

static uint64_t bytes_now(sluice_context_t* context) {
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  return sluice_context_get_stats(context, 0, &stats) == SLUICE_OK ? stats.current_bytes : 0;
}

static void run_cycles(rank_t* r, sluice_context_t* context, sluice_moe_t* moe, const round_t* p) {
  int64_t all = r->c->tokens[r->rank];
  uint64_t settled = 0;
  for (int32_t i = 0; i < r->c->cycles * WORLD_CYCLE && r->out->status[r->rank] == SLUICE_OK; ++i) {
    for (int t = 0; t < 7; ++t) p->tensors[t]->shape[0] = all * ((i * 3 + r->rank) % WORLD_CYCLE) / (WORLD_CYCLE - 1);
    note(r, run_round(moe, p));
    if (i + 1 == 2 * WORLD_CYCLE) settled = bytes_now(context);
  }
  for (int t = 0; t < 7; ++t) p->tensors[t]->shape[0] = all;
  settle();
  if (r->c->cycles > 2) r->out->growth[r->rank] = bytes_now(context) - settled;
}

/* Every route to the expert after its own (by = 1), or to its own (0). */
static void write_ids(const rank_t* r, array_t* id, int32_t by) {
  const case_t* c = r->c;
  for (int64_t t = 0; t < c->tokens[r->rank]; ++t) {
    for (int32_t k = 0; k < c->top_k; ++k) {
      int64_t e = world_expert(c, r->rank, t, k);
      store(SLUICE_DTYPE_I64, id->host, t * id->strides[0] + k * id->strides[1],
            (double)(e < 0 ? e : (e + by) % c->num_experts));
    }
  }
  push(id);
}

static sluice_moe_backward_args_t backward_args(array_t* x, array_t* w, array_t* dy, array_t* dx, array_t* dw,
                                                const sluice_expert_tensors_t* params,
                                                const sluice_expert_tensors_t* grads) {
  sluice_moe_backward_args_t b;
  sluice_moe_backward_args_init(&b, sizeof b);
  b.tokens = tensor_of(x), b.route_weights = tensor_of(w), b.grad_out = tensor_of(dy);
  b.grad_tokens = tensor_of(dx), b.grad_route_weights = tensor_of(dw);
  b.params = params, b.grad_params = grads;
  return b;
}

/* The end of a capture: outputs are NaN again, routes the case's own, then the launch. */
static void launch(rank_t* r, array_t* id, array_t* const* outputs, const experts_t* grads, int32_t count) {
  int code = here.machine->end_capture(r->rank);
  if (r->out->status[r->rank] != SLUICE_OK) return;
  if (code != 0) {
    r->out->status[r->rank] = SLUICE_E_FOREIGN;
    snprintf(r->out->message[r->rank], sizeof r->out->message[r->rank], "the capture ended with %d", code);
    return;
  }
  write_ids(r, id, 0);
  for (int i = 0; i < 3; ++i) push(outputs[i]);
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    for (int32_t l = 0; grads->arrays[kind] != NULL && l < count; ++l) push(&grads->arrays[kind][l]);
  }
  here.machine->launch(r->rank);
}

/* What a capture needs to have run before, on other routes than those that are launched. */
static void run_before_capture(rank_t* r, sluice_moe_t* moe, const sluice_moe_forward_args_t* f,
                               const sluice_moe_backward_args_t* b, array_t* id) {
  sluice_step_t* step = NULL;
  write_ids(r, id, 1);
  note(r, sluice_moe_forward(moe, f, stream_here(), &step));
  if (r->out->status[r->rank] == SLUICE_OK) note(r, sluice_moe_backward(moe, step, b, stream_here()));
  sluice_step_drop(step);
  settle();
}

/* ---- a plan ---- */

#define MOST_BLOCKS 64

/* Rows of all ranks' tokens by block and rank that receives them, as the plan's rule has blocks. */
static void count_blocks(const case_t* c, int32_t num_blocks, int64_t table[MOST_BLOCKS][WORLD_MAX_RANKS]) {
  memset(table, 0, MOST_BLOCKS * sizeof *table);
  for (int32_t from = 0; from < c->world_size; ++from) {
    for (int32_t g = 0; g < num_blocks; ++g) {
      for (int64_t t = c->tokens[from] * g / num_blocks; t < c->tokens[from] * (g + 1) / num_blocks; ++t) {
        for (int32_t k = 0; k < c->top_k; ++k) {
          int64_t e = world_expert(c, from, t, k);
          if (e >= 0) ++table[g][world_owner(c, (int32_t)e)];
        }
      }
    }
  }
}

/* The rule: blocks form a chunk while no rank receives more than chunk_rows. Rows of this rank by chunk; returns n. */
static int32_t rows_by_chunk(const case_t* c, const sluice_plan_info_t* info, int32_t rank, int64_t* rows,
                             int32_t* out_kept) {
  int64_t table[MOST_BLOCKS][WORLD_MAX_RANKS], so_far[WORLD_MAX_RANKS] = {0};
  int32_t most_blocks = (info->num_blocks + info->num_chunks - 1) / info->num_chunks, n = 0;
  count_blocks(c, info->num_blocks, table);
  *out_kept = 0;
  for (int32_t first = 0, end = 0; first < info->num_blocks; first = end, ++n) {
    int64_t sums[WORLD_MAX_RANKS] = {0}, most = 0;
    for (end = first; end < info->num_blocks && end - first < most_blocks; ++end) {
      most = 0;
      for (int32_t w = 0; w < c->world_size; ++w)
        most = sums[w] + table[end][w] > most ? sums[w] + table[end][w] : most;
      if (most > info->chunk_rows && end > first) break;
      for (int32_t w = 0; w < c->world_size; ++w) sums[w] += table[end][w];
    }
    rows[n] = sums[rank], most = 0;
    for (int32_t w = 0; w < c->world_size; ++w) {
      so_far[w] += sums[w];
      if (so_far[w] > most) most = so_far[w];
    }
    if (most <= info->kept_rows) *out_kept = n + 1;
  }
  return n;
}

static sluice_status_t use_plan(rank_t* r, sluice_moe_t* moe) {
  const case_t* c = r->c;
  sluice_plan_t* plan = NULL;
  sluice_plan_info_t info = {.struct_size = sizeof info};
  int64_t rows[256], sent = 0;
  int32_t kept = 0;
  uint64_t step = 0, outstanding = (uint64_t)c->plan->max_outstanding;
  sluice_status_t status = sluice_plan_create(moe, c->plan, &plan);
  if (status == SLUICE_OK) status = sluice_moe_use_plan(moe, plan);
  if (status == SLUICE_OK) status = sluice_plan_get_info(plan, &info);
  if (status == SLUICE_OK) {
    int32_t n = rows_by_chunk(c, &info, r->rank, rows, &kept);
    for (int64_t t = 0; t < c->tokens[r->rank]; ++t) {
      for (int32_t k = 0; k < c->top_k; ++k) sent += world_expert(c, r->rank, t, k) >= 0;
    }
    status = sluice_plan_predict_step(plan, n, rows, kept, c->tokens[r->rank], sent, &step);
  }
  r->out->planned_bytes[r->rank] = info.total_bytes;
  r->out->predicted_bytes[r->rank] = info.total_bytes - outstanding * info.step_bytes + outstanding * step;
  sluice_plan_destroy(plan);
  return status;
}

static void run_rank(rank_t* r) {
  const case_t* c = r->c;
  here.machine = c->machine, here.rank = r->rank;
  int64_t T = c->tokens[r->rank];
  int32_t* ids = calloc((size_t)c->num_experts, sizeof(int32_t));
  int32_t* owners = calloc((size_t)c->num_experts, sizeof(int32_t));
  int32_t count = local_experts(c, r->rank, ids);
  for (int32_t e = 0; e < c->num_experts; ++e) owners[e] = world_owner(c, e);
  int32_t grad_dtype = c->grad_f32 && c->dtype != SLUICE_DTYPE_F64 ? SLUICE_DTYPE_F32 : c->dtype;

  sluice_comm_t* comm = NULL;
  sluice_comm_config_t comm_config;
  sluice_comm_config_init(&comm_config, sizeof comm_config);
  comm_config.rank = r->rank;
  comm_config.world_size = c->world_size;
  comm_config.timeout_ns = 20000000000u;
  int own = c->machine != NULL && c->machine->make_comm != NULL;
  if (r->group != NULL && own) note(r, c->machine->make_comm(r->rank, &comm_config, &comm));
  if (r->group != NULL && !own) note(r, sluice_comm_create_local(r->group, &comm_config, &comm));
  sluice_context_config_t context_config;
  sluice_context_config_init(&context_config, sizeof context_config);
  context_config.gemm = c->gemm != NULL ? c->gemm : "ref";
  context_config.memory_budget = c->budget,
  context_config.max_outstanding = c->max_outstanding > 0 ? c->max_outstanding : c->outstanding;
  context_config.host_memory_budget = c->host_budget;
  context_config.halves_apart = c->halves_apart && !c->halves_unsaid;
  sluice_context_t* context = NULL;
  if (c->machine != NULL) {
    context_config.gemm = c->gemm;
    context_config.device_type = c->machine->device_type, context_config.device_id = c->machine->device_id(r->rank);
    note(r, c->machine->make_context(r->rank, &context_config, comm, &context));
  } else {
    note(r, sluice_context_create(&context_config, comm, &context));
  }
  sluice_moe_config_t config;
  sluice_moe_config_init(&config, sizeof config);
  config.model_width = c->model_width, config.hidden_width = c->hidden_width, config.num_experts = c->num_experts;
  config.top_k = c->top_k, config.dtype = c->dtype, config.activation = c->activation, config.gated = c->gated;
  config.bias = c->bias, config.num_chunks = c->num_chunks, config.wgrad_mode = c->wgrad_mode;
  config.callback_experts = c->callback_experts, config.layer_id = 7;
  config.expert_rank = c->uneven_owners ? owners : NULL;
  config.swiglu_alpha = ALPHA, config.swiglu_limit = LIMIT, config.swiglu_offset = OFFSET;
  config.restore_input = c->restore_input, config.restore_middle = c->restore_middle;
  config.deduplicate = c->deduplicate;
  config.chunk_cut = c->chunk_cut;
  if (c->ceiling > 0) config.exchange_mode = SLUICE_EXCHANGE_CEILING, config.ceiling_rows = c->ceiling;
  sluice_moe_t* moe = NULL;
  note(r, sluice_moe_create(context, &config, &moe));
  if (c->plan != NULL && moe != NULL) note(r, use_plan(r, moe));

  array_t x, id, w, y, dy, dx, dw;
  make_rows(&x, c->dtype, T, c->model_width, 3);
  make(&id, SLUICE_DTYPE_I64, 2, T, c->top_k, 1, T > 0 ? T : 1); /* K-major, as DeepSpeed gives them */
  make_rows(&w, SLUICE_DTYPE_F32, T, c->top_k, 1);
  make_rows(&y, c->dtype, T, c->model_width, 2);
  make_rows(&dy, c->dtype, T, c->model_width, 0);
  make_rows(&dx, c->dtype, T, c->model_width, 1);
  make_rows(&dw, SLUICE_DTYPE_F32, T, c->top_k, 0);
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t m = 0; m < c->model_width; ++m) {
      store(c->dtype, x.host, t * x.strides[0] + m, token_value(c, r->rank, t, m));
      store(c->dtype, dy.host, t * dy.strides[0] + m, grad_value(c, r->rank, t, m));
    }
    for (int32_t k = 0; k < c->top_k; ++k) {
      store(SLUICE_DTYPE_I64, id.host, t * id.strides[0] + k * id.strides[1], (double)world_expert(c, r->rank, t, k));
      store(SLUICE_DTYPE_F32, w.host, t * w.strides[0] + k, weight_value(c, r->rank, t, k));
    }
  }
  array_t* all[] = {&x, &id, &w, &y, &dy, &dx, &dw};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) push(all[i]);
  experts_t params, grads;
  make_experts(&params, c, c->dtype, ids, count, 0);
  make_experts(&grads, c, grad_dtype, ids, count, 1);
  toy_t toy = {c, ids, &r->out->calls[r->rank], &r->out->most_rows[r->rank], 0, -1};
  sluice_expert_callbacks_t callbacks = {sizeof callbacks, &toy, toy_forward, toy_backward};
  saved_t saved = {{NULL}, {0}};

  if (c->parts && r->out->status[r->rank] == SLUICE_OK) {
    run_parts(r, moe,
              &(parts_t){tensor_of(&x), tensor_of(&id), tensor_of(&w), tensor_of(&y), tensor_of(&dy), tensor_of(&dx),
                         tensor_of(&dw), &params.table, &grads.table});
  }
  if (c->cycles > 0 && r->out->status[r->rank] == SLUICE_OK) {
    run_cycles(r, context, moe,
               &(round_t){.tensors = {&x, &id, &w, &y, &dy, &dx, &dw}, .params = &params.table, .grads = &grads.table});
  }
  sluice_step_t *step = NULL, *others[MAX_OUTSTANDING] = {NULL};
  if (r->out->status[r->rank] == SLUICE_OK && !c->parts) {
    sluice_moe_forward_args_t f;
    sluice_moe_forward_args_init(&f, sizeof f);
    f.tokens = tensor_of(&x), f.expert_ids = tensor_of(&id), f.route_weights = tensor_of(&w),
    f.out_tokens = tensor_of(&y);
    f.params = c->callback_experts ? NULL : &params.table;
    f.callbacks = c->callback_experts ? &callbacks : NULL;
    f.needs_backward = 1;
    if (c->restore) f.save = save_host, f.save_user = &saved;
    if (c->captured) {
      const sluice_moe_backward_args_t before = backward_args(&x, &w, &dy, &dx, &dw, &params.table, &grads.table);
      run_before_capture(r, moe, &f, &before, &id);
      here.machine->begin_capture(r->rank);
    }
    tell(SLUICE_FORWARD, 0);
    note(r, sluice_moe_forward(moe, &f, stream_here(), &step));
    tell(SLUICE_FORWARD, 1);
    for (int32_t i = 1; i < c->outstanding && r->out->status[r->rank] == SLUICE_OK; ++i) {
      note(r, sluice_moe_forward(moe, &f, stream_here(), &others[i]));
    }
  }
  if (r->out->status[r->rank] == SLUICE_OK && c->restore) note(r, rebuild(moe, &saved, &step));
  if (r->out->status[r->rank] == SLUICE_OK && !c->parts) {
    sluice_moe_backward_args_t b;
    sluice_moe_backward_args_init(&b, sizeof b);
    b.tokens = tensor_of(&x), b.route_weights = tensor_of(&w), b.grad_out = tensor_of(&dy);
    b.grad_tokens = tensor_of(&dx), b.grad_route_weights = tensor_of(&dw);
    b.params = c->callback_experts ? NULL : &params.table;
    b.callbacks = c->callback_experts ? &callbacks : NULL;
    b.grad_params = c->callback_experts ? NULL : &grads.table;
    b.grad_mode = c->accumulate ? SLUICE_GRAD_ACCUMULATE : SLUICE_GRAD_OVERWRITE;
    b.may_reuse_saved = c->reuse_saved;
    b.expert_ready = count_ready, b.expert_ready_user = &r->out->ready[r->rank];
    tell(SLUICE_BACKWARD, 0);
    if (c->halves_apart) {
      b.halves = SLUICE_HALF_INPUT;
      note(r, sluice_moe_backward(moe, step, &b, stream_here()));
      b.halves = SLUICE_HALF_WEIGHT;
      b.may_reuse_saved = !c->reuse_saved; /* what the input half did counts */
      b.grad_out = NULL;
    }
    note(r, sluice_moe_backward(moe, step, &b, stream_here()));
    tell(SLUICE_BACKWARD, 1);
  }
  if (c->captured) launch(r, &id, (array_t* const[]){&y, &dx, &dw}, &grads, count);
  settle();
  r->out->out[r->rank] = copy_rows(&y, c->dtype);
  r->out->grad_tokens[r->rank] = copy_rows(&dx, c->dtype);
  r->out->grad_weights[r->rank] = copy_rows(&dw, SLUICE_DTYPE_F32);
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    for (int32_t l = 0; grads.arrays[kind] != NULL && l < count; ++l) {
      const array_t* a = &grads.arrays[kind][l];
      pull(a);
      int64_t cols = param_cols(c, kind);
      for (int64_t i = 0; i < param_size(c, kind); ++i) {
        r->out->grad_params[kind][(int64_t)ids[l] * param_size(c, kind) + i] =
            load(grad_dtype, a->host, (i / cols) * a->strides[0] + (i % cols) * a->strides[1]);
      }
    }
  }
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  if (context != NULL && sluice_context_get_stats(context, 0, &stats) == SLUICE_OK) {
    r->out->peak_bytes[r->rank] = stats.peak_bytes;
    r->out->bytes_sent[r->rank] = stats.bytes_sent;
    r->out->num_chunks[r->rank] = stats.last_num_chunks;
  }
  if (c->ceiling > 0 && moe != NULL) {
    sluice_ceiling_report_t* report = &r->out->report[r->rank];
    sluice_ceiling_report_init(report, sizeof *report);
    r->out->report_status[r->rank] = sluice_moe_take_ceiling_report(moe, stream_here(), report);
  }
  if (c->captured) here.machine->drop_graph(r->rank);
  for (int i = 0; i < MAX_OUTSTANDING; ++i) sluice_step_drop(others[i]);
  sluice_step_drop(step);
  for (int i = 0; i < SLUICE_SAVED_COUNT; ++i) give_saved(i, saved.data[i]);
  sluice_moe_destroy(moe);
  sluice_context_destroy(context);
  sluice_comm_destroy(comm);
  free_experts(&params, count);
  free_experts(&grads, count);
  for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) drop(all[i]);
  free(ids);
  free(owners);
}

static void* rank_main(void* argument) {
  run_rank(argument);
  return NULL;
}

static void make_result(const case_t* c, result_t* out) {
  memset(out, 0, sizeof *out);
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    int64_t size = c->num_experts * param_size(c, kind);
    out->grad_params[kind] = calloc((size_t)size + 1, sizeof(double));
  }
}

case_t world_small_case(void) {
  return (case_t){.world_size = 1,
                  .tokens = {13, 9, 17, 5},
                  .model_width = 11,
                  .hidden_width = 19,
                  .num_experts = 12,
                  .top_k = 2,
                  .num_chunks = 1,
                  .dtype = SLUICE_DTYPE_F32,
                  .activation = SLUICE_ACTIVATION_GELU,
                  .restore_input = SLUICE_RESTORE_KEEP,
                  .restore_middle = SLUICE_RESTORE_KEEP,
                  .hot_expert = -1};
}

double world_tolerance(const case_t* c) {
  switch (c->dtype) {
    case SLUICE_DTYPE_F64: return 3e-7;
    case SLUICE_DTYPE_F32: return 5e-6;
    case SLUICE_DTYPE_F16: return 1e-2;
    default: return 6e-2;
  }
}

void world_run(const case_t* c, result_t* out) {
  make_result(c, out);
  sluice_local_group_t* group = NULL;
  if (c->world_size > 1 && sluice_local_group_create(c->world_size, &group) != SLUICE_OK) abort();
  pthread_t threads[WORLD_MAX_RANKS];
  rank_t ranks[WORLD_MAX_RANKS];
  for (int32_t r = 0; r < c->world_size; ++r) {
    ranks[r] = (rank_t){c, out, group, r};
    pthread_create(&threads[r], NULL, rank_main, &ranks[r]);
  }
  for (int32_t r = 0; r < c->world_size; ++r) pthread_join(threads[r], NULL);
  sluice_local_group_destroy(group);
}

/* ---- the reference: y[t] = sum over k of w * expert(x), and its gradients by hand, all in f64 ---- */

static double act(int32_t kind, double x) {
  switch (kind) {
    case SLUICE_ACTIVATION_RELU: return x > 0 ? x : 0;
    case SLUICE_ACTIVATION_GELU: return 0.5 * x * (1 + erf(x / sqrt(2)));
    case SLUICE_ACTIVATION_GELU_TANH: return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case SLUICE_ACTIVATION_SILU: return x / (1 + exp(-x));
    case SLUICE_ACTIVATION_RELU2: return x > 0 ? x * x : 0;
    case SLUICE_ACTIVATION_SWIGLU: x = fmin(x, (double)LIMIT); return x / (1 + exp(-(double)ALPHA * x));
    default: return x;
  }
}

static double act_slope(int32_t kind, double x) {
  double u, s;
  switch (kind) {
    case SLUICE_ACTIVATION_RELU: return x > 0;
    case SLUICE_ACTIVATION_GELU: return 0.5 * (1 + erf(x / sqrt(2))) + x * exp(-x * x / 2) / sqrt(2 * M_PI);
    case SLUICE_ACTIVATION_GELU_TANH:
      u = tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
      return 0.5 * (1 + u) + 0.5 * x * (1 - u * u) * sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
    case SLUICE_ACTIVATION_SILU: s = 1 / (1 + exp(-x)); return s * (1 + x * (1 - s));
    case SLUICE_ACTIVATION_RELU2: return x > 0 ? 2 * x : 0;
    case SLUICE_ACTIVATION_SWIGLU:
      s = 1 / (1 + exp(-(double)ALPHA * x));
      return x > (double)LIMIT ? 0 : s * (1 + (double)ALPHA * x * (1 - s));
    default: return 1;
  }
}

/* What stands in place of W3 x + b3, and its slope. */
static double up_value(int32_t kind, double u) {
  if (kind != SLUICE_ACTIVATION_SWIGLU) return u;
  return fmax(-(double)LIMIT, fmin(u, (double)LIMIT)) + (double)OFFSET;
}
static double up_slope(int32_t kind, double u) {
  return kind == SLUICE_ACTIVATION_SWIGLU && fabs(u) > (double)LIMIT ? 0 : 1;
}

typedef struct scratch_s {
  double *x, *pre, *gate, *a, *y, *dy, *da;
} scratch_t;

/* One row through one expert; backward adds to dx and the parameter gradients and returns dy . y. */
static double reference_row(const case_t* c, const scratch_t* s, int32_t e, double weight, double* dx, result_t* out) {
  int64_t M = c->model_width, H = c->hidden_width;
  for (int64_t h = 0; h < H; ++h) {
    double pre = c->bias ? param_value(c, B1, e, h) : 0, gate = c->gated && c->bias ? param_value(c, B3, e, h) : 0;
    for (int64_t m = 0; m < M; ++m) {
      pre += param_value(c, W1, e, h * M + m) * s->x[m];
      if (c->gated) gate += param_value(c, W3, e, h * M + m) * s->x[m];
    }
    s->pre[h] = pre, s->gate[h] = gate,
    s->a[h] = act(c->activation, pre) * (c->gated ? up_value(c->activation, gate) : 1), s->da[h] = 0;
  }
  double dot = 0;
  for (int64_t m = 0; m < M; ++m) {
    double y = c->bias ? param_value(c, B2, e, m) : 0;
    for (int64_t h = 0; h < H; ++h) {
      double w2 = param_value(c, W2, e, m * H + h);
      y += w2 * s->a[h];
      s->da[h] += s->dy[m] * w2;
      out->grad_params[W2][(int64_t)e * M * H + m * H + h] += weight * s->dy[m] * s->a[h];
    }
    s->y[m] = y;
    dot += s->dy[m] * y;
    if (c->bias) out->grad_params[B2][(int64_t)e * M + m] += weight * s->dy[m];
  }
  for (int64_t h = 0; h < H; ++h) {
    double dpre =
        weight * s->da[h] * act_slope(c->activation, s->pre[h]) * (c->gated ? up_value(c->activation, s->gate[h]) : 1);
    double dgate =
        c->gated ? weight * s->da[h] * act(c->activation, s->pre[h]) * up_slope(c->activation, s->gate[h]) : 0;
    for (int64_t m = 0; m < M; ++m) {
      dx[m] += dpre * param_value(c, W1, e, h * M + m);
      out->grad_params[W1][((int64_t)e * H + h) * M + m] += dpre * s->x[m];
      if (!c->gated) continue;
      dx[m] += dgate * param_value(c, W3, e, h * M + m);
      out->grad_params[W3][((int64_t)e * H + h) * M + m] += dgate * s->x[m];
    }
    if (c->bias) out->grad_params[B1][(int64_t)e * H + h] += dpre;
    if (c->bias && c->gated) out->grad_params[B3][(int64_t)e * H + h] += dgate;
  }
  return dot;
}

static double toy_row(const case_t* c, const scratch_t* s, int32_t e, double weight, double* dx) {
  double dot = 0;
  for (int64_t m = 0; m < c->model_width; ++m) {
    s->y[m] = s->x[m] * (e + 2);
    dot += s->dy[m] * s->y[m];
    dx[m] += weight * s->dy[m] * (e + 2);
  }
  return dot;
}

void world_reference(const case_t* c, result_t* out) {
  make_result(c, out);
  int64_t M = c->model_width, H = c->hidden_width > 0 ? c->hidden_width : 1;
  double* memory = calloc((size_t)(3 * M + 4 * H), sizeof(double));
  scratch_t s = {memory,
                 memory + M,
                 memory + M + H,
                 memory + M + 2 * H,
                 memory + M + 3 * H,
                 memory + 2 * M + 3 * H,
                 memory + 3 * M + 3 * H};
  for (int kind = 0; kind < NUM_PARAMS && c->accumulate; ++kind) {
    for (int64_t i = 0; i < c->num_experts * param_size(c, kind); ++i)
      out->grad_params[kind][i] = param_used(c, kind) ? 1 : 0;
  }
  for (int32_t r = 0; r < c->world_size; ++r) {
    int64_t T = c->tokens[r];
    out->out[r] = calloc((size_t)(T * M) + 1, sizeof(double));
    out->grad_tokens[r] = calloc((size_t)(T * M) + 1, sizeof(double));
    out->grad_weights[r] = calloc((size_t)(T * c->top_k) + 1, sizeof(double));
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t m = 0; m < M; ++m) s.x[m] = token_value(c, r, t, m), s.dy[m] = grad_value(c, r, t, m);
      for (int32_t k = 0; k < c->top_k; ++k) {
        int64_t e = world_expert(c, r, t, k);
        if (e < 0) continue;
        double weight = weight_value(c, r, t, k);
        double* dx = out->grad_tokens[r] + t * M;
        double dot = c->callback_experts ? toy_row(c, &s, (int32_t)e, weight, dx)
                                         : reference_row(c, &s, (int32_t)e, weight, dx, out);
        for (int64_t m = 0; m < M; ++m) out->out[r][t * M + m] += weight * s.y[m];
        out->grad_weights[r][t * c->top_k + k] = dot;
      }
    }
  }
  free(memory);
}

void world_free(result_t* result) {
  for (int r = 0; r < WORLD_MAX_RANKS; ++r) {
    free(result->out[r]);
    free(result->grad_tokens[r]);
    free(result->grad_weights[r]);
  }
  for (int kind = 0; kind < NUM_PARAMS; ++kind) free(result->grad_params[kind]);
}

/* ---- comparing ---- */

static double distance(const double* a, const double* b, int64_t count) {
  double worst = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (isnan(a[i]) && !isnan(b[i])) return -1;
    double d = fabs(a[i] - b[i]) / (1 + fabs(b[i]));
    if (d > worst) worst = d;
  }
  return worst;
}

double world_distance(const case_t* c, const result_t* a, const result_t* b) {
  double worst = 0;
  for (int32_t r = 0; r < c->world_size; ++r) {
    const double d[] = {distance(a->out[r], b->out[r], c->tokens[r] * c->model_width),
                        distance(a->grad_tokens[r], b->grad_tokens[r], c->tokens[r] * c->model_width),
                        distance(a->grad_weights[r], b->grad_weights[r], c->tokens[r] * c->top_k)};
    for (int i = 0; i < 3; ++i) {
      if (d[i] < 0) return -1;
      if (d[i] > worst) worst = d[i];
    }
  }
  for (int kind = 0; kind < NUM_PARAMS && !c->callback_experts; ++kind) {
    double d = distance(a->grad_params[kind], b->grad_params[kind], c->num_experts * param_size(c, kind));
    if (d < 0) return -1;
    if (d > worst) worst = d;
  }
  return worst;
}

int world_identical(const case_t* c, const result_t* a, const result_t* b, int params) {
  for (int32_t r = 0; r < c->world_size; ++r) {
    size_t bytes = (size_t)(c->tokens[r] * c->model_width) * sizeof(double);
    if (memcmp(a->out[r], b->out[r], bytes) != 0 || memcmp(a->grad_tokens[r], b->grad_tokens[r], bytes) != 0) return 0;
    if (memcmp(a->grad_weights[r], b->grad_weights[r], (size_t)(c->tokens[r] * c->top_k) * sizeof(double)) != 0)
      return 0;
  }
  for (int kind = 0; params && kind < NUM_PARAMS; ++kind) {
    size_t bytes = (size_t)(c->num_experts * param_size(c, kind)) * sizeof(double);
    if (memcmp(a->grad_params[kind], b->grad_params[kind], bytes) != 0) return 0;
  }
  return 1;
}

int64_t world_count(const case_t* c, int which) {
  if (which == 0) return tokens_before(c, c->world_size) * c->model_width;
  if (which == 1) return tokens_before(c, c->world_size) * c->top_k;
  return param_used(c, which - 2) ? c->num_experts * param_size(c, which - 2) : 0;
}

/* One rank only, on this thread, so that the moved input is seen. */
double world_objective(const case_t* c, int which, int64_t index, double delta) {
  moved.which = which, moved.index = index, moved.delta = delta;
  result_t result;
  make_result(c, &result);
  rank_t rank = {c, &result, NULL, 0};
  run_rank(&rank);
  moved.which = -1;
  double sum = 0;
  for (int64_t t = 0; t < c->tokens[0]; ++t) {
    for (int64_t m = 0; m < c->model_width; ++m) sum += result.out[0][t * c->model_width + m] * grad_value(c, 0, t, m);
  }
  world_free(&result);
  return sum;
}
