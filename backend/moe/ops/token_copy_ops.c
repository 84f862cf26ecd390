// SPDX-License-Identifier: Apache-2.0
/* The exchange ops of a deduplicated pass, by token copies (token_copies.h). */
#include "backend/moe/ops/exchange_ops.h"
#include "backend/moe/ops/travel.h"

#include "backend/base/dtype.h"
#include "backend/base/tensor.h"
#include "backend/moe/routing/token_copies.h"

static int32_t self_of(const sluice_pass_t* pass) { return pass->context->rank; }

static const int64_t* sent_of(const sluice_binding_t* b, int32_t chunk) {
  return b->token_copies.sent_of_rank + (int64_t)chunk * (b->world_size + 1);
}

static const int64_t* received_of(const sluice_binding_t* b, int32_t chunk) {
  return b->token_copies.recv_of_rank + (int64_t)chunk * (b->world_size + 1);
}

/* ---- out ---- */

/* Copies the rows of the chunk's tokens into send order, without the rank's own token copies. */
static void copy_tokens(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens, char* out) {
  const sluice_binding_t* b = &pass->binding;
  const sluice_kernels_t* kernels = pass->context->device->kernels;
  sluice_stream_t stream = sluice_pass_stream(pass, op);
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  const sluice_token_span_t span = sluice_tokens_of(b, op->chunk);
  const int64_t* sent = sent_of(b, op->chunk);
  const int64_t stride = sluice_tensor_stride(tokens, 0), own_first = sent[self_of(pass)],
                own_end = sent[self_of(pass) + 1];
  const char* src = sluice_tensor_data(tokens);
  if (kernels->scatter_rows != NULL) { /* reads the row of a token once for all ranks */
    kernels->scatter_rows(stream, c->dtype, span.count, b->world_size, c->model_width,
                          src + (uint64_t)(span.first * stride) * sluice_dtype_bytes(c->dtype), stride,
                          b->token_copies.position_of_token + span.first * b->world_size, own_first, own_end, out);
    return;
  }
  const int32_t* token = b->token_copies.token + b->token_copies.first_sent[op->chunk];
  kernels->gather_rows(stream, c->dtype, own_first, c->model_width, src, stride, token, out);
  kernels->gather_rows(stream, c->dtype, sent[b->world_size] - own_end, c->model_width, src, stride, token + own_end,
                       out + (uint64_t)own_first * pass->slots[SLUICE_T_SEND].row_bytes);
}

static sluice_status_t send_tokens_start(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens,
                                         sluice_transfer_t* out_transfer) {
  const sluice_binding_t* b = &pass->binding;
  const int64_t *sent = sent_of(b, op->chunk), *received = received_of(b, op->chunk);
  uint64_t row_bytes = pass->slots[SLUICE_T_SEND].row_bytes;
  char* out = sluice_pass_chunk(pass, SLUICE_T_SEND, op->chunk);
  char* in = sluice_pass_chunk(pass, SLUICE_T_RECV, op->chunk);
  copy_tokens(pass, op, tokens, out);
  sluice_transfer_rows(pass, 1, sent, received, out, in, row_bytes);
  return sluice_transfer_start(pass, op, out_transfer);
}

/* With tables in device memory: by one launch, or one for each expert if the chunk's rows are not contiguous. */
static void unpack_on_device(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens,
                             int32_t tensor) {
  const sluice_binding_t* b = &pass->binding;
  const int64_t width = pass->moe->shape.config.model_width;
  const int64_t* rows = b->rows_of_expert + (int64_t)op->chunk * b->num_local;
  const void* in = sluice_pass_chunk(pass, SLUICE_T_RECV, op->chunk);
  const int32_t* origin = b->token_copies.origin + b->first_of_chunk[op->chunk];
  const int is_apart = b->num_chunks > 1 && sluice_pass_is_joined(pass, tensor);
  int64_t count = 0;
  for (int32_t e = 0; e < b->num_local; ++e) {
    count += rows[e];
    if (!is_apart && e + 1 < b->num_local) continue;
    pass->context->device->kernels->gather_rows_of_two(sluice_pass_stream(pass, op), pass->moe->shape.config.dtype,
                                                       count, width, in, width, sluice_tensor_data(tokens),
                                                       sluice_tensor_stride(tokens, 0), origin,
                                                       sluice_pass_rows(pass, tensor, op->chunk, is_apart ? e : 0));
    origin += count;
    count = 0;
  }
}

/* Rows of an expert are ordered by source: lower ranks, own rows, higher ranks. */
void sluice_unpack_token_copies(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens,
                                int32_t tensor) {
  const sluice_binding_t* b = &pass->binding;
  const sluice_kernels_t* kernels = pass->context->device->kernels;
  sluice_stream_t stream = sluice_pass_stream(pass, op);
  int64_t width = pass->moe->shape.config.model_width;
  int32_t chunk = op->chunk, dtype = pass->moe->shape.config.dtype;
  uint64_t row_bytes = pass->slots[tensor].row_bytes;
  const void* in = sluice_pass_chunk(pass, SLUICE_T_RECV, chunk);
  const int32_t* origin = b->token_copies.origin + b->first_of_chunk[chunk];
  if (kernels->gather_rows_of_two != NULL) {
    unpack_on_device(pass, op, tokens, tensor);
    return;
  }
  for (int32_t e = 0; e < b->num_local; ++e) {
    int64_t rows = b->rows_of_expert[(int64_t)chunk * b->num_local + e], own_row = 0;
    for (int32_t r = 0; r < self_of(pass); ++r) own_row += sluice_recv_count(b, r, chunk, e);
    int64_t own_end = own_row + sluice_recv_count(b, self_of(pass), chunk, e);
    char* out = sluice_pass_rows(pass, tensor, chunk, e);
    kernels->gather_rows(stream, dtype, own_row, width, in, width, origin, out);
    kernels->gather_rows(stream, dtype, own_end - own_row, width, sluice_tensor_data(tokens),
                         sluice_tensor_stride(tokens, 0), origin + own_row, out + (uint64_t)own_row * row_bytes);
    kernels->gather_rows(stream, dtype, rows - own_end, width, in, width, origin + own_end,
                         out + (uint64_t)own_end * row_bytes);
    origin += rows;
  }
}

/* Writes the weights of a source's routes, in the order of its route_index; returns where the next token copies begin.
 */
static float* spread_weights(const sluice_binding_t* b, const int32_t* route_index, int64_t routes, const float* weight,
                             float* out) {
  int64_t token_copies = 0;
  for (int64_t i = 0; i < routes; ++i) {
    out[route_index[i]] = weight[i];
    if (route_index[i] / b->top_k >= token_copies) token_copies = route_index[i] / b->top_k + 1;
  }
  return out + token_copies * b->top_k;
}

/* On a device every entry of T_COPY_WEIGHTS gathers its weight; own token copies lie between those of other ranks. */
static void gather_copy_weights(sluice_pass_t* pass, const sluice_op_t* op) {
  const sluice_binding_t* b = &pass->binding;
  const sluice_kernels_t* kernels = pass->context->device->kernels;
  sluice_stream_t stream = sluice_pass_stream(pass, op);
  const sluice_tensor_t* w = pass->route_weights;
  const int64_t *sent = sent_of(b, op->chunk), *received = received_of(b, op->chunk);
  int64_t k = b->top_k, before = received[self_of(pass)] * k, behind = received[b->world_size] * k - before;
  int64_t own = (sent[self_of(pass) + 1] - sent[self_of(pass)]) * k;
  const int32_t* index = b->token_copies.weight + b->token_copies.first_arrived[op->chunk] * k;
  float* out = sluice_pass_chunk(pass, SLUICE_T_COPY_WEIGHTS, op->chunk);
  kernels->gather_scalars(stream, before, 1, pass->scalar_recv, 1, 0, index, out);
  kernels->gather_scalars(stream, own, k, sluice_tensor_data(w), sluice_tensor_stride(w, 0), sluice_tensor_stride(w, 1),
                          index + before, out + before);
  kernels->gather_scalars(stream, behind, 1, pass->scalar_recv, 1, 0, index + before + own, out + before + own);
}

/* route_index is ordered by source, then chunk. */
void sluice_unpack_copy_weights(sluice_pass_t* pass, const sluice_op_t* op) {
  const sluice_binding_t* b = &pass->binding;
  const sluice_tensor_t* w = pass->route_weights;
  const int32_t* route_index = b->token_copies.route_index;
  const float* arrived = pass->scalar_recv;
  float* out = sluice_pass_chunk(pass, SLUICE_T_COPY_WEIGHTS, op->chunk);
  if (pass->context->rows->is_device) {
    gather_copy_weights(pass, op);
    return;
  }
  for (int32_t r = 0; r < b->world_size; ++r) {
    for (int32_t i = 0; i < op->chunk; ++i) route_index += sluice_routes_from(b, r, i);
    int64_t routes = sluice_routes_from(b, r, op->chunk);
    if (r == self_of(pass)) {
      const int32_t* route =
          b->order + b->first_order[op->chunk] + b->sent_of_rank[(int64_t)op->chunk * (b->world_size + 1) + r];
      pass->context->device->kernels->gather_scalars(NULL, routes, b->top_k, sluice_tensor_data(w),
                                                     sluice_tensor_stride(w, 0), sluice_tensor_stride(w, 1), route,
                                                     pass->route_send);
      out = spread_weights(b, route_index, routes, pass->route_send, out);
    } else {
      out = spread_weights(b, route_index, routes, arrived, out);
      arrived += routes;
    }
    for (int32_t i = op->chunk; i < b->num_chunks; ++i) route_index += sluice_routes_from(b, r, i);
  }
}

/* ---- back ---- */

static sluice_status_t return_rows_start(sluice_pass_t* pass, const sluice_op_t* op, int32_t tensor,
                                         sluice_transfer_t* out_transfer) {
  const sluice_binding_t* b = &pass->binding;
  const sluice_kernels_t* kernels = pass->context->device->kernels;
  sluice_stream_t stream = sluice_pass_stream(pass, op);
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  int32_t self = self_of(pass);
  const int64_t *sent = sent_of(b, op->chunk), *received = received_of(b, op->chunk);
  int64_t own = sent[self + 1] - sent[self], before = received[self], behind = received[b->world_size] - before;
  uint64_t row_bytes = pass->slots[SLUICE_T_SEND].row_bytes;
  char* out = sluice_pass_chunk(pass, SLUICE_T_SEND, op->chunk);
  char* in = sluice_pass_chunk(pass, SLUICE_T_RECV, op->chunk);
  const void* rows = sluice_pass_chunk(pass, tensor, op->chunk);
  const int32_t* position = b->token_copies.position + b->token_copies.first_arrived[op->chunk] * b->top_k;
  const float* weight = NULL;
  if (pass->schedule->spec.direction == SLUICE_FORWARD)
    weight = sluice_pass_chunk(pass, SLUICE_T_COPY_WEIGHTS, op->chunk);
#define SUM(first, count, to)                                                                                 \
  kernels->combine_rows(stream, c->dtype, count, b->top_k, c->model_width, rows, position + (first)*b->top_k, \
                        weight == NULL ? NULL : weight + (first)*b->top_k, b->top_k, 1, to, c->model_width)
  SUM(0, before, out);
  SUM(before + own, behind, out + (uint64_t)before * row_bytes);
  sluice_transfer_rows(pass, 0, sent, received, out, in, row_bytes);
  SLUICE_TRY(sluice_transfer_start(pass, op, out_transfer));
  SUM(before, own, in + (uint64_t)sent[self] * row_bytes);
#undef SUM
  return SLUICE_OK;
}

static void reduce(sluice_pass_t* pass, const sluice_op_t* op, int32_t tensor) {
  const sluice_binding_t* b = &pass->binding;
  (void)tensor; /* one rank has no copies */
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  int64_t t = b->first_token[op->chunk], stride = sluice_tensor_stride(pass->out_rows, 0);
  char* out = sluice_tensor_data(pass->out_rows);
  pass->context->device->kernels->combine_rows(
      sluice_pass_stream(pass, op), c->dtype, sluice_tokens_of(b, op->chunk).count, b->world_size, c->model_width,
      sluice_pass_chunk(pass, SLUICE_T_RECV, op->chunk), b->token_copies.position_of_token + t * b->world_size, NULL, 0,
      0, out + (uint64_t)(t * stride) * sluice_dtype_bytes(c->dtype), stride);
}

const sluice_travel_t sluice_travel_of_token_copies = {.send_tokens_start = send_tokens_start,
                                                       .unpack_tokens = sluice_unpack_token_copies,
                                                       .send_weights_start = sluice_send_route_start,
                                                       .unpack_weights = sluice_unpack_copy_weights,
                                                       .return_rows_start = return_rows_start,
                                                       .reduce = reduce};
