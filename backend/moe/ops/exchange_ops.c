#include "backend/moe/ops/exchange_ops.h"

#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/tensor.h"
#include "backend/moe/ops/travel.h"

/* ---- offsets of one chunk ---- */

static int32_t self_of(const sluice_pass_t* pass) { return pass->context->rank; }

static const int64_t* sent_of(const sluice_binding_t* b, int32_t chunk) {
  return b->sent_of_rank + (int64_t)chunk * (b->world_size + 1);
}

static const int64_t* received_of(const sluice_binding_t* b, int32_t chunk) {
  return b->recv_of_rank + (int64_t)chunk * (b->world_size + 1);
}

/* Sent order without own rows. */
static int64_t packed_row(const int64_t* sent, int32_t rank, int32_t self) {
  return sent[rank] - (rank > self ? sent[self + 1] - sent[self] : 0);
}

/* Describes expert `local`'s remote rows as runs between received order and expert order, and says where its own rows
 * start in expert order. Called for ascending experts; pass->cursor carries each source's place from one to the next.
 */
static int64_t expert_runs(sluice_pass_t* pass, int32_t chunk, int32_t local, int to_expert, int64_t* out_own_row) {
  const sluice_binding_t* b = &pass->binding;
  int64_t row = 0, num_runs = 0;
  for (int32_t r = 0; r < b->world_size; ++r) {
    int64_t count = sluice_recv_count(b, r, chunk, local);
    if (r == self_of(pass)) {
      *out_own_row = row;
    } else if (count > 0) {
      int64_t at = pass->cursor[r];
      pass->runs[num_runs++] = to_expert ? (sluice_row_run_t){at, row, count} : (sluice_row_run_t){row, at, count};
      pass->cursor[r] += count;
    }
    row += count;
  }
  return num_runs;
}

static void reset_cursor(sluice_pass_t* pass, int32_t chunk) {
  memcpy(pass->cursor, received_of(&pass->binding, chunk), (size_t)pass->binding.world_size * sizeof(int64_t));
}

/* Tokens' side -> experts' side: `out` is packed, `in` in received order. */
static sluice_status_t start_towards_experts(sluice_pass_t* pass, const sluice_op_t* op, const char* out, char* in,
                                             uint64_t row_bytes, sluice_transfer_t* out_transfer) {
  const int64_t* sent = sent_of(&pass->binding, op->chunk);
  const int64_t* received = received_of(&pass->binding, op->chunk);
  int32_t self = self_of(pass);
  for (int32_t r = 0; r < pass->binding.world_size; ++r) {
    int own = r == self;
    pass->send[r] = out + (uint64_t)packed_row(sent, r, self) * row_bytes;
    pass->send_bytes[r] = own ? 0 : (uint64_t)(sent[r + 1] - sent[r]) * row_bytes;
    pass->recv[r] = in + (uint64_t)received[r] * row_bytes;
    pass->recv_bytes[r] = (uint64_t)(received[r + 1] - received[r]) * row_bytes;
  }
  return sluice_transfer_start(pass, op, out_transfer);
}

/* Experts' side -> tokens' side: `out` is in received order, `in` in sent order. */
static sluice_status_t start_towards_tokens(sluice_pass_t* pass, const sluice_op_t* op, const char* out, char* in,
                                            uint64_t row_bytes, sluice_transfer_t* out_transfer) {
  const int64_t* sent = sent_of(&pass->binding, op->chunk);
  const int64_t* received = received_of(&pass->binding, op->chunk);
  for (int32_t r = 0; r < pass->binding.world_size; ++r) {
    int own = r == self_of(pass);
    pass->send[r] = out + (uint64_t)received[r] * row_bytes;
    pass->send_bytes[r] = (uint64_t)(received[r + 1] - received[r]) * row_bytes;
    pass->recv[r] = in + (uint64_t)sent[r] * row_bytes;
    pass->recv_bytes[r] = own ? 0 : (uint64_t)(sent[r + 1] - sent[r]) * row_bytes;
  }
  return sluice_transfer_start(pass, op, out_transfer);
}

/* ---- rows ---- */

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
  kernels->gather_rows(stream, c->dtype, own_first, c->model_width, src, stride, token, out);
  kernels->gather_rows(stream, c->dtype, end - own_end, c->model_width, src, stride, token + own_end,
                       out + (uint64_t)own_first * row_bytes);
  return start_towards_experts(pass, op, out, sluice_pass_chunk(pass, SLUICE_T_RECV, chunk), row_bytes, out_transfer);
}

/* With one rank, sent order is expert order: a chunk whose rows lie together is one run. */
static int is_one_run(const sluice_pass_t* pass, int32_t tensor) {
  const sluice_binding_t* b = &pass->binding;
  return b->world_size == 1 && b->num_local > 0 && (b->num_chunks == 1 || !sluice_pass_is_joined(pass, tensor));
}

static int64_t rows_of_chunk(const sluice_binding_t* b, int32_t chunk) {
  return b->first_of_chunk[chunk + 1] - b->first_of_chunk[chunk];
}

static void unpack_tokens(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens, int32_t tensor) {
  int32_t chunk = op->chunk;
  sluice_stream_t stream = sluice_pass_stream(pass, op);
  const sluice_binding_t* b = &pass->binding;
  const sluice_kernels_t* kernels = pass->context->device->kernels;
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  uint64_t row_bytes = pass->slots[tensor].row_bytes;
  int single = b->world_size == 1;
  const char* in = single ? NULL : sluice_pass_chunk(pass, SLUICE_T_RECV, chunk);
  const int32_t* token = b->order_token + b->first_order[chunk] + sent_of(b, chunk)[self_of(pass)];
  if (is_one_run(pass, tensor)) {
    kernels->gather_rows(stream, c->dtype, rows_of_chunk(b, chunk), c->model_width, sluice_tensor_data(tokens),
                         sluice_tensor_stride(tokens, 0), token, sluice_pass_rows(pass, tensor, chunk, 0));
    return;
  }
  reset_cursor(pass, chunk);
  for (int32_t e = 0; e < b->num_local; ++e) {
    char* rows = sluice_pass_rows(pass, tensor, chunk, e);
    int64_t own_row = 0;
    int64_t num_runs = expert_runs(pass, chunk, e, 1, &own_row);
    if (num_runs > 0) kernels->move_rows(stream, (int64_t)row_bytes, pass->runs, num_runs, in, rows);
    int64_t own = sluice_recv_count(b, self_of(pass), chunk, e);
    kernels->gather_rows(stream, c->dtype, own, c->model_width, sluice_tensor_data(tokens),
                         sluice_tensor_stride(tokens, 0), token, rows + (uint64_t)own_row * row_bytes);
    token += own;
  }
}

/* Expert order -> received order, remote rows only. */
static void pack_by_source(sluice_pass_t* pass, const sluice_op_t* op, int32_t tensor, char* out) {
  int32_t chunk = op->chunk;
  sluice_stream_t stream = sluice_pass_stream(pass, op);
  const sluice_kernels_t* kernels = pass->context->device->kernels;
  uint64_t row_bytes = pass->slots[tensor].row_bytes;
  reset_cursor(pass, chunk);
  for (int32_t e = 0; e < pass->binding.num_local; ++e) {
    int64_t own_row = 0;
    int64_t num_runs = expert_runs(pass, chunk, e, 0, &own_row);
    if (num_runs > 0) {
      kernels->move_rows(stream, (int64_t)row_bytes, pass->runs, num_runs, sluice_pass_rows(pass, tensor, chunk, e),
                         out);
    }
  }
}

/* Own rows, expert order -> sent order. */
static void copy_own(sluice_pass_t* pass, const sluice_op_t* op, int32_t tensor, char* in) {
  int32_t chunk = op->chunk;
  sluice_stream_t stream = sluice_pass_stream(pass, op);
  const sluice_binding_t* b = &pass->binding;
  const sluice_kernels_t* kernels = pass->context->device->kernels;
  uint64_t row_bytes = pass->slots[tensor].row_bytes;
  int64_t at = sent_of(b, chunk)[self_of(pass)];
  for (int32_t e = 0; e < b->num_local; ++e) {
    int64_t own_row = 0;
    for (int32_t r = 0; r < self_of(pass); ++r) own_row += sluice_recv_count(b, r, chunk, e);
    const sluice_row_run_t run = {own_row, at, sluice_recv_count(b, self_of(pass), chunk, e)};
    kernels->move_rows(stream, (int64_t)row_bytes, &run, 1, sluice_pass_rows(pass, tensor, chunk, e), in);
    at += run.rows;
  }
}

static sluice_status_t return_rows_start(sluice_pass_t* pass, const sluice_op_t* op, int32_t tensor,
                                         sluice_transfer_t* out_transfer) {
  int32_t chunk = op->chunk;
  char* out = sluice_pass_chunk(pass, SLUICE_T_SEND, chunk);
  char* in = sluice_pass_chunk(pass, SLUICE_T_RECV, chunk);
  pack_by_source(pass, op, tensor, out);
  SLUICE_TRY(start_towards_tokens(pass, op, out, in, pass->slots[tensor].row_bytes, out_transfer));
  copy_own(pass, op, tensor, in);
  return SLUICE_OK;
}

/* ---- scalars ---- */

/* dst[i] = the route weight of route[i] */
static void gather_weights(const sluice_pass_t* pass, const sluice_op_t* op, int64_t count, const int32_t* route,
                           float* dst) {
  const sluice_tensor_t* w = pass->route_weights;
  pass->context->device->kernels->gather_scalars(sluice_pass_stream(pass, op), count, pass->binding.top_k,
                                                 sluice_tensor_data(w), sluice_tensor_stride(w, 0),
                                                 sluice_tensor_stride(w, 1), route, dst);
}

sluice_status_t sluice_send_route_start(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer) {
  const sluice_binding_t* b = &pass->binding;
  const int64_t* sent = sent_of(b, op->chunk);
  const int32_t* route = b->order + b->first_order[op->chunk];
  int64_t own_first = sent[self_of(pass)], own_end = sent[self_of(pass) + 1];
  gather_weights(pass, op, own_first, route, pass->route_send);
  gather_weights(pass, op, sent[b->world_size] - own_end, route + own_end, pass->route_send + own_first);
  return start_towards_experts(pass, op, (const char*)pass->route_send, (char*)pass->scalar_recv, sizeof(float),
                               out_transfer);
}

void sluice_unpack_route(sluice_pass_t* pass, const sluice_op_t* op) {
  const sluice_binding_t* b = &pass->binding;
  int32_t chunk = op->chunk;
  const int32_t* route = b->order + b->first_order[chunk] + sent_of(b, chunk)[self_of(pass)];
  if (is_one_run(pass, SLUICE_T_ROUTE)) {
    gather_weights(pass, op, rows_of_chunk(b, chunk), route, sluice_pass_rows(pass, SLUICE_T_ROUTE, chunk, 0));
    return;
  }
  reset_cursor(pass, chunk);
  for (int32_t e = 0; e < b->num_local; ++e) {
    float* rows = sluice_pass_rows(pass, SLUICE_T_ROUTE, chunk, e);
    int64_t own_row = 0;
    int64_t num_runs = expert_runs(pass, chunk, e, 1, &own_row);
    if (num_runs > 0) {
      pass->context->device->kernels->move_rows(sluice_pass_stream(pass, op), sizeof(float), pass->runs, num_runs,
                                                pass->scalar_recv, rows);
    }
    int64_t own = sluice_recv_count(b, self_of(pass), chunk, e);
    gather_weights(pass, op, own, route, rows + own_row);
    route += own;
  }
}

sluice_status_t sluice_return_gate_start(sluice_pass_t* pass, const sluice_op_t* op, sluice_transfer_t* out_transfer) {
  const sluice_binding_t* b = &pass->binding;
  float* in = pass->gate_recv + b->first_returned[op->chunk];
  pack_by_source(pass, op, SLUICE_T_DGATE, (char*)pass->gate_send);
  SLUICE_TRY(start_towards_tokens(pass, op, (const char*)pass->gate_send, (char*)in, sizeof(float), out_transfer));
  copy_own(pass, op, SLUICE_T_DGATE, (char*)in);
  return SLUICE_OK;
}

/* ---- rows as they are ---- */

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
  /* One rank: rows of a chunk lie in sent order already. */
  const void* rows = sluice_pass_chunk(pass, b->world_size == 1 ? tensor : SLUICE_T_RECV, tokens.chunk);
  pass->context->device->kernels->combine_rows(
      sluice_pass_stream(pass, op), c->dtype, tokens.count, b->top_k, c->model_width, rows, b->position + t * b->top_k,
      weights, weight_t, weight_k, out + (uint64_t)(t * stride) * sluice_dtype_bytes(c->dtype), stride);
}

const sluice_travel_t sluice_travel_of_rows = {.send_tokens_start = send_tokens_start,
                                               .unpack_tokens = unpack_tokens,
                                               .return_rows_start = return_rows_start,
                                               .reduce = reduce};
