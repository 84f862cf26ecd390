// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/ops/exchange_ops.h"

#include "backend/base/dtype.h"
#include "backend/base/tensor.h"
#include "backend/moe/context/registered_buffers.h"
#include "backend/moe/ops/travel.h"

/* ---- offsets of one chunk ---- */

static int32_t self_of(const sluice_pass_t* pass) { return pass->context->rank; }

static const int64_t* sent_of(const sluice_binding_t* b, int32_t chunk) {
  return b->sent_of_rank + (int64_t)chunk * (b->world_size + 1);
}

static const int64_t* received_of(const sluice_binding_t* b, int32_t chunk) {
  return b->recv_of_rank + (int64_t)chunk * (b->world_size + 1);
}

/* ---- on a device: messages by expert ---- */

/* On a device whose communicator has groups, a message holds the rows of one expert for one rank, and all messages of
 * an op are one group. Rows are sent from where an expert wrote them and received where it reads them: no packing. */

static int go_by_expert(const sluice_pass_t* pass) {
  return pass->context->rows->is_device && pass->context->comm->vtable->group_begin != NULL;
}

/* Whether messages may begin or end in the tensor. If slots are the communicator's registered memory, both ends of an
 * exchange must lie in it (registered_buffers.h); kept and deferred tensors are the host's. */
static int may_travel(const sluice_pass_t* pass, int32_t tensor, int32_t chunk) {
  const sluice_arena_t* slots = &pass->memory->slots;
  const char* data = sluice_pass_rows_at(pass, tensor, chunk).data;
  if (pass->context->registered_buffers != SLUICE_REGISTRATION_OWN) return 1;
  return data >= slots->data && data < slots->data + slots->capacity;
}

/* Whether the exchange of `op`, which sends rows to experts, is left to the next op, which waits until the slot that
 * experts read is free. The lane's stream orders everything else. */
static int is_left(const sluice_pass_t* pass, const sluice_op_t* op) {
  const sluice_template_t* schedule = pass->schedule;
  const sluice_op_t* next = op + 1;
  if (!go_by_expert(pass) || pass->travel != &sluice_travel_of_rows) return 0;
  if (op->group != SLUICE_GROUP_NONE || next == schedule->ops + schedule->num_ops || next->chunk != op->chunk) return 0;
  if (next->kind == SLUICE_OP_UNPACK) return may_travel(pass, SLUICE_T_DI, op->chunk);
  return next->kind == SLUICE_OP_UNPACK_GRAD && may_travel(pass, SLUICE_T_DDO, op->chunk) &&
         may_travel(pass, SLUICE_T_ROUTE, op->chunk);
}

/* Whether the exchange of the previous op was left to this op, which unpacks. */
static int has_exchange(const sluice_pass_t* pass, const sluice_op_t* op) {
  if (op == pass->schedule->ops) return 0;
  const int32_t before = (op - 1)->kind;
  const int sends = before == SLUICE_OP_DISPATCH || before == SLUICE_OP_REDISPATCH || before == SLUICE_OP_DISPATCH_GRAD;
  return sends && is_left(pass, op - 1);
}

/* On a device own rows are copied while the exchange of the op runs, on a stream next to the lane's. */
static sluice_status_t fork_own(sluice_pass_t* pass, const sluice_op_t* op) {
  sluice_device_t* device = pass->context->device;
  if (!go_by_expert(pass) || op->group != SLUICE_GROUP_NONE || pass->own_stream != NULL) return SLUICE_OK;
  return device->memory->fork_stream(device, sluice_pass_stream(pass, op), &pass->own_stream);
}

sluice_status_t sluice_join_own(sluice_pass_t* pass, const sluice_op_t* op) {
  sluice_device_t* device = pass->context->device;
  if (pass->own_stream == NULL) return SLUICE_OK;
  pass->own_stream = NULL;
  return device->memory->join_stream(device, sluice_pass_stream(pass, op));
}

static sluice_stream_t own_stream(const sluice_pass_t* pass, const sluice_op_t* op) {
  return pass->own_stream != NULL ? pass->own_stream : sluice_pass_stream(pass, op);
}

enum { IN_ORDER = -1 }; /* no tensor: on the experts' side rows lie in received order */

/* pass->arrays hold the first row of each rank. tensor: on the experts' side, or IN_ORDER. */
static sluice_status_t start_by_expert(sluice_pass_t* pass, const sluice_op_t* op, int to_experts, int32_t tensor,
                                       uint64_t row_bytes, sluice_transfer_t* out_transfer) {
  const sluice_binding_t* b = &pass->binding;
  const sluice_moe_t* moe = pass->moe;
  uint64_t bytes = 0;
  for (int32_t e = 0; e < moe->shape.most_local; ++e) {
    char* rows = tensor != IN_ORDER && e < b->num_local ? sluice_pass_rows(pass, tensor, op->chunk, e) : NULL;
    for (int32_t r = 0; r < b->world_size; ++r) {
      const int own = r == self_of(pass), is_theirs = e < sluice_layer_experts_of(moe, r);
      const uint64_t theirs =
          own || !is_theirs ? 0 : (uint64_t)sluice_send_count(b, op->chunk, moe->first_position[r] + e) * row_bytes;
      const uint64_t here = e < b->num_local ? (uint64_t)sluice_recv_count(b, r, op->chunk, e) * row_bytes : 0;
      if (rows != NULL && to_experts) pass->arrays.recv[r] = rows;
      if (rows != NULL && !to_experts) pass->arrays.send[r] = rows;
      pass->arrays.send_bytes[r] = to_experts ? theirs : own ? 0 : here;
      pass->arrays.recv_bytes[r] = to_experts ? own ? 0 : here : theirs;
      if (rows != NULL) rows += here; /* own rows lie between them */
    }
    SLUICE_TRY(sluice_transfer_start(pass, op, out_transfer));
    bytes += out_transfer->bytes;
    for (int32_t r = 0; r < b->world_size; ++r) {
      pass->arrays.send[r] = (const char*)pass->arrays.send[r] + pass->arrays.send_bytes[r];
      pass->arrays.recv[r] = (char*)pass->arrays.recv[r] + pass->arrays.recv_bytes[r];
    }
  }
  out_transfer->bytes = bytes;
  return SLUICE_OK;
}

/* ---- exchanges of one chunk ---- */

/* `out` and `in` as of sluice_transfer_rows; on a device `tensor`, unless IN_ORDER, replaces those on the experts'
 * side. */
static sluice_status_t start(sluice_pass_t* pass, const sluice_op_t* op, int to_experts, const char* out, char* in,
                             int32_t tensor, uint64_t row_bytes, sluice_transfer_t* out_transfer) {
  sluice_transfer_rows(pass, to_experts, sent_of(&pass->binding, op->chunk), received_of(&pass->binding, op->chunk),
                       out, in, row_bytes);
  if (go_by_expert(pass)) return start_by_expert(pass, op, to_experts, tensor, row_bytes, out_transfer);
  return sluice_transfer_start(pass, op, out_transfer);
}

/* Leaves an exchange towards experts to the next op; here its bytes are only counted. */
static void leave(sluice_pass_t* pass, const sluice_op_t* op, uint64_t row_bytes, sluice_transfer_t* out_transfer) {
  const int64_t *sent = sent_of(&pass->binding, op->chunk), *own = sent + self_of(pass);
  pass->exchange_left = SLUICE_EXCHANGE_LEFT;
  out_transfer->bytes = (uint64_t)(sent[pass->binding.world_size] - (own[1] - own[0])) * row_bytes;
}

/* ---- rows of all experts, moved together ---- */

enum { MOST_RUNS = 128 };

/* Copies runs of rows between two buffers with few calls of the kernel. */
typedef struct mover_s {
  sluice_pass_t* pass;
  sluice_stream_t stream;
  uint64_t row_bytes;
  const void* src;
  void* dst;
  int64_t count;
  sluice_row_run_t runs[MOST_RUNS];
} mover_t;

/* Copies between `rows` and the tensor. */
static mover_t mover_of(sluice_pass_t* pass, const sluice_op_t* op, int to_experts, int32_t tensor, void* rows) {
  void* experts = sluice_pass_rows_at(pass, tensor, op->chunk).data;
  return (mover_t){.pass = pass,
                   .stream = sluice_pass_stream(pass, op),
                   .row_bytes = pass->slots[tensor].row_bytes,
                   .src = to_experts ? rows : experts,
                   .dst = to_experts ? experts : rows};
}

static void flush(mover_t* m) {
  const sluice_kernels_t* kernels = m->pass->context->device->kernels;
  if (m->count > 0) kernels->move_rows(m->stream, (int64_t)m->row_bytes, m->runs, m->count, m->src, m->dst);
  m->count = 0;
}

static void add_run(mover_t* m, int64_t src_row, int64_t dst_row, int64_t rows) {
  if (rows == 0) return;
  if (m->count == MOST_RUNS) flush(m);
  m->runs[m->count++] = (sluice_row_run_t){src_row, dst_row, rows};
}

/* The row of sluice_pass_rows_at's data where the expert's rows from rank r begin. */
static int64_t row_from(const sluice_pass_t* pass, int32_t tensor, int32_t chunk, int32_t local, int32_t rank) {
  const sluice_binding_t* b = &pass->binding;
  const int64_t at = (int64_t)chunk * b->num_local + local;
  int64_t row = sluice_pass_rows_at(pass, tensor, chunk).is_of_pass ? b->first_in_pass[at] : b->first_in_chunk[at];
  for (int32_t r = 0; r < rank; ++r) row += sluice_recv_count(b, r, chunk, local);
  return row;
}

/* Where the expert's own rows begin. */
static void* own_rows(const sluice_pass_t* pass, int32_t tensor, int32_t chunk, int32_t local) {
  char* rows = sluice_pass_rows_at(pass, tensor, chunk).data;
  return rows + (uint64_t)row_from(pass, tensor, chunk, local, self_of(pass)) * pass->slots[tensor].row_bytes;
}

/* Copies other ranks' rows between received order, in `rows`, and expert order. */
static void move_remote(sluice_pass_t* pass, const sluice_op_t* op, int to_experts, int32_t tensor, void* rows) {
  const sluice_binding_t* b = &pass->binding;
  mover_t m = mover_of(pass, op, to_experts, tensor, rows);
  int64_t at = 0;
  for (int32_t r = 0; r < b->world_size; ++r) {
    for (int32_t e = 0; e < b->num_local && r != self_of(pass); ++e) {
      const int64_t row = row_from(pass, tensor, op->chunk, e, r), count = sluice_recv_count(b, r, op->chunk, e);
      add_run(&m, to_experts ? at : row, to_experts ? row : at, count);
      at += count;
    }
  }
  flush(&m);
}

/* Copies own rows between sent order and expert order; `rows`: the first of them in sent order. */
static void move_own(sluice_pass_t* pass, const sluice_op_t* op, int to_experts, int32_t tensor, void* rows) {
  const sluice_binding_t* b = &pass->binding;
  mover_t m = mover_of(pass, op, to_experts, tensor, rows);
  m.stream = own_stream(pass, op);
  int64_t at = 0;
  for (int32_t e = 0; e < b->num_local; ++e) {
    const int64_t row = row_from(pass, tensor, op->chunk, e, self_of(pass));
    const int64_t count = sluice_recv_count(b, self_of(pass), op->chunk, e);
    add_run(&m, to_experts ? at : row, to_experts ? row : at, count);
    at += count;
  }
  flush(&m);
}

/* ---- rows ---- */

/* Copies the rows of the chunk's tokens into send order, without the rank's own rows. Returns 0, with nothing copied,
 * if the device has no such kernel, a chunk is not a span of tokens, or a row may have no token. */
static int scatter_tokens(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens, int64_t own_first,
                          int64_t own_end, void* out) {
  const sluice_binding_t* b = &pass->binding;
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  const sluice_kernels_t* kernels = pass->context->device->kernels;
  const sluice_token_span_t span = sluice_tokens_of(b, op->chunk);
  const int64_t stride = sluice_tensor_stride(tokens, 0);
  if (kernels->scatter_rows == NULL || b->chunks_by_experts || c->exchange_mode != SLUICE_EXCHANGE_EXACT) return 0;
  const char* src = sluice_tensor_data(tokens);
  kernels->scatter_rows(sluice_pass_stream(pass, op), c->dtype, span.count, b->top_k, c->model_width,
                        src + (uint64_t)(span.first * stride) * sluice_dtype_bytes(c->dtype), stride,
                        b->position + span.first * b->top_k, own_first, own_end, out);
  return 1;
}

static sluice_status_t send_tokens_start(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens,
                                         sluice_transfer_t* out_transfer) {
  int32_t chunk = op->chunk;
  sluice_stream_t stream = sluice_pass_stream(pass, op);
  const sluice_binding_t* b = &pass->binding;
  const sluice_kernels_t* kernels = pass->context->device->kernels;
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  const int64_t* sent = sent_of(b, chunk);
  const int32_t* token = b->order_token + b->first_order[chunk];
  int64_t own_first = sent[self_of(pass)], own_end = sent[self_of(pass) + 1], end = sent[b->world_size];
  uint64_t row_bytes = pass->slots[SLUICE_T_SEND].row_bytes;
  char* out = sluice_pass_chunk(pass, SLUICE_T_SEND, chunk);
  const void* src = sluice_tensor_data(tokens);
  int64_t stride = sluice_tensor_stride(tokens, 0);
  if (!scatter_tokens(pass, op, tokens, own_first, own_end, out)) {
    kernels->gather_rows(stream, c->dtype, own_first, c->model_width, src, stride, token, out);
    kernels->gather_rows(stream, c->dtype, end - own_end, c->model_width, src, stride, token + own_end,
                         out + (uint64_t)own_first * row_bytes);
  }
  if (is_left(pass, op)) {
    leave(pass, op, row_bytes, out_transfer);
    return SLUICE_OK;
  }
  return start(pass, op, 1, out, sluice_pass_chunk(pass, SLUICE_T_RECV, chunk), IN_ORDER, row_bytes, out_transfer);
}

/* With one rank, sent order is expert order: a chunk whose rows are contiguous is one run. */
static int is_one_run(const sluice_pass_t* pass, int32_t tensor) {
  const sluice_binding_t* b = &pass->binding;
  return b->world_size == 1 && b->num_local > 0 && (b->num_chunks == 1 || !sluice_pass_is_joined(pass, tensor));
}

static int64_t rows_of_chunk(const sluice_binding_t* b, int32_t chunk) {
  return b->first_of_chunk[chunk + 1] - b->first_of_chunk[chunk];
}

/* The chunk's rows lie by expert. On a device own rows are gathered into T_RECV, which no exchange writes or whose rows
 * are copied out already, then moved for all experts together. */
static void unpack_tokens(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens, int32_t tensor) {
  const sluice_binding_t* b = &pass->binding;
  const sluice_kernels_t* kernels = pass->context->device->kernels;
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  const int32_t chunk = op->chunk, self = self_of(pass), is_single = b->world_size == 1;
  const int64_t* sent = sent_of(b, chunk);
  const int32_t* token = b->order_token + b->first_order[chunk] + sent[self];
  const int64_t own = sent[self + 1] - sent[self], stride = sluice_tensor_stride(tokens, 0);
  const void* src = sluice_tensor_data(tokens);
  char* in = is_single ? NULL : sluice_pass_chunk(pass, SLUICE_T_RECV, chunk);
  if (is_one_run(pass, tensor)) {
    char* out = sluice_pass_rows(pass, tensor, chunk, 0);
    if (scatter_tokens(pass, op, tokens, 0, 0, out)) return;
    kernels->gather_rows(sluice_pass_stream(pass, op), c->dtype, rows_of_chunk(b, chunk), c->model_width, src, stride,
                         token, out);
    return;
  }
  if (!is_single && !has_exchange(pass, op)) move_remote(pass, op, 1, tensor, in);
  if (own == 0) return;
  if (pass->context->rows->is_device && !is_single) {
    kernels->gather_rows(own_stream(pass, op), c->dtype, own, c->model_width, src, stride, token, in);
    move_own(pass, op, 1, tensor, in);
    return;
  }
  for (int32_t e = 0; e < b->num_local; ++e) {
    const int64_t count = sluice_recv_count(b, self, chunk, e);
    kernels->gather_rows(sluice_pass_stream(pass, op), c->dtype, count, c->model_width, src, stride, token,
                         own_rows(pass, tensor, chunk, e));
    token += count;
  }
}

/* Returns rows of `tensor` to `in`, in sent order. out: where rows are packed, unless they are sent from where they
 * lie. */
static sluice_status_t return_start(sluice_pass_t* pass, const sluice_op_t* op, int32_t tensor, char* out, char* in,
                                    sluice_transfer_t* out_transfer) {
  const uint64_t row_bytes = pass->slots[tensor].row_bytes;
  const int is_packed = !go_by_expert(pass) || !may_travel(pass, tensor, op->chunk);
  if (is_packed) move_remote(pass, op, 0, tensor, out);
  SLUICE_TRY(start(pass, op, 0, out, in, is_packed ? IN_ORDER : tensor, row_bytes, out_transfer));
  SLUICE_TRY(fork_own(pass, op));
  move_own(pass, op, 0, tensor, in + (uint64_t)sent_of(&pass->binding, op->chunk)[self_of(pass)] * row_bytes);
  return SLUICE_OK;
}

static sluice_status_t return_rows_start(sluice_pass_t* pass, const sluice_op_t* op, int32_t tensor,
                                         sluice_transfer_t* out_transfer) {
  return return_start(pass, op, tensor, sluice_pass_chunk(pass, SLUICE_T_SEND, op->chunk),
                      sluice_pass_chunk(pass, SLUICE_T_RECV, op->chunk), out_transfer);
}

/* ---- scalars ---- */

/* dst[i] = the route weight of route[i] */
static void gather_weights(const sluice_pass_t* pass, sluice_stream_t stream, int64_t count, const int32_t* route,
                           float* dst) {
  const sluice_tensor_t* w = pass->route_weights;
  pass->context->device->kernels->gather_scalars(stream, count, pass->binding.top_k, sluice_tensor_data(w),
                                                 sluice_tensor_stride(w, 0), sluice_tensor_stride(w, 1), route, dst);
}

sluice_status_t sluice_send_route_start(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer) {
  const sluice_binding_t* b = &pass->binding;
  const int64_t* sent = sent_of(b, op->chunk);
  const int32_t* route = b->order + b->first_order[op->chunk];
  int64_t own_first = sent[self_of(pass)], own_end = sent[self_of(pass) + 1];
  const sluice_stream_t stream = sluice_pass_stream(pass, op);
  gather_weights(pass, stream, own_first, route, pass->route_send);
  gather_weights(pass, stream, sent[b->world_size] - own_end, route + own_end, pass->route_send + own_first);
  if (is_left(pass, op)) {
    leave(pass, op, sizeof(float), out_transfer);
    return SLUICE_OK;
  }
  return start(pass, op, 1, (const char*)pass->route_send, (char*)pass->scalar_recv, IN_ORDER, sizeof(float),
               out_transfer);
}

/* Runs the exchange that the previous op left to this one. */
static sluice_status_t land(sluice_pass_t* pass, const sluice_op_t* op) {
  const sluice_row_memory_t* memory = pass->context->rows;
  const int is_grad = op->kind == SLUICE_OP_UNPACK_GRAD;
  sluice_transfer_t rows = {0}, scalars = {0};
  pass->exchange_left = SLUICE_EXCHANGE_TAKEN;
  char* in = sluice_pass_chunk(pass, SLUICE_T_RECV, op->chunk); /* not written: rows arrive in the tensor */
  sluice_rows_begin_group(memory, pass->context);
  sluice_status_t status = start(pass, op, 1, sluice_pass_chunk(pass, SLUICE_T_SEND, op->chunk), in,
                                 is_grad ? SLUICE_T_DDO : SLUICE_T_DI, pass->slots[SLUICE_T_SEND].row_bytes, &rows);
  if (status == SLUICE_OK && is_grad) {
    status = start(pass, op, 1, (const char*)pass->route_send, (char*)pass->scalar_recv, SLUICE_T_ROUTE, sizeof(float),
                   &scalars);
  }
  return sluice_rows_end_group(memory, pass->context, sluice_pass_stream(pass, op), status);
}

/* As unpack_tokens: on a device own weights go through the scratch for received weights. */
static void unpack_route(sluice_pass_t* pass, const sluice_op_t* op) {
  const sluice_binding_t* b = &pass->binding;
  const int32_t chunk = op->chunk, self = self_of(pass), is_single = b->world_size == 1;
  const int64_t* sent = sent_of(b, chunk);
  const int32_t* route = b->order + b->first_order[chunk] + sent[self];
  const int64_t own = sent[self + 1] - sent[self];
  if (is_one_run(pass, SLUICE_T_ROUTE)) {
    gather_weights(pass, sluice_pass_stream(pass, op), rows_of_chunk(b, chunk), route,
                   sluice_pass_rows(pass, SLUICE_T_ROUTE, chunk, 0));
    return;
  }
  if (!is_single && !has_exchange(pass, op)) move_remote(pass, op, 1, SLUICE_T_ROUTE, pass->scalar_recv);
  if (own == 0) return;
  if (pass->context->rows->is_device && !is_single) {
    gather_weights(pass, own_stream(pass, op), own, route, pass->scalar_recv);
    move_own(pass, op, 1, SLUICE_T_ROUTE, pass->scalar_recv);
    return;
  }
  for (int32_t e = 0; e < b->num_local; ++e) {
    const int64_t count = sluice_recv_count(b, self, chunk, e);
    gather_weights(pass, sluice_pass_stream(pass, op), count, route, own_rows(pass, SLUICE_T_ROUTE, chunk, e));
    route += count;
  }
}

sluice_status_t sluice_unpack(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens,
                              int32_t tensor) {
  const int lands = has_exchange(pass, op);
  if (lands) {
    SLUICE_TRY(fork_own(pass, op));
    SLUICE_TRY(land(pass, op));
  }
  pass->travel->unpack_tokens(pass, op, tokens, tensor);
  if (op->kind == SLUICE_OP_UNPACK_GRAD) unpack_route(pass, op);
  return sluice_join_own(pass, op);
}

sluice_status_t sluice_return_gate_start(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer) {
  return return_start(pass, op, SLUICE_T_DGATE, (char*)pass->gate_send,
                      (char*)(pass->gate_recv + pass->binding.first_returned[op->chunk]), out_transfer);
}

/* ---- the table for rows without deduplication ---- */

static void reduce(sluice_pass_t* pass, const sluice_op_t* op, int32_t tensor) {
  const sluice_binding_t* b = &pass->binding;
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  const sluice_token_span_t tokens = sluice_tokens_of(b, op->chunk);
  const int is_weighted = pass->schedule->spec.direction == SLUICE_FORWARD;
  int64_t t = tokens.first, stride = sluice_tensor_stride(pass->out_rows, 0), weight_t = 0, weight_k = 0;
  const float* weights = NULL;
  if (is_weighted) {
    weight_t = sluice_tensor_stride(pass->route_weights, 0), weight_k = sluice_tensor_stride(pass->route_weights, 1);
    weights = (const float*)sluice_tensor_data(pass->route_weights) + t * weight_t;
  }
  char* out = sluice_tensor_data(pass->out_rows);
  /* With one rank, rows of a chunk are in sent order already. */
  const void* rows = sluice_pass_chunk(pass, b->world_size == 1 ? tensor : SLUICE_T_RECV, tokens.chunk);
  pass->context->device->kernels->combine_rows(
      sluice_pass_stream(pass, op), c->dtype, tokens.count, b->top_k, c->model_width, rows, b->position + t * b->top_k,
      weights, weight_t, weight_k, out + (uint64_t)(t * stride) * sluice_dtype_bytes(c->dtype), stride);
}

const sluice_travel_t sluice_travel_of_rows = {.send_tokens_start = send_tokens_start,
                                               .unpack_tokens = unpack_tokens,
                                               .return_rows_start = return_rows_start,
                                               .reduce = reduce};
