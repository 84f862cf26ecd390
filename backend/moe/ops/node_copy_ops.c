// SPDX-License-Identifier: Apache-2.0
/* The exchange ops of a pass in two levels, by node copies (binding.h). Between nodes a rank exchanges with
 * the ranks of its local index; within a node with all of its ranks. Both use the layer's communicator: pairs of ranks
 * that have nothing to send exchange no message. */
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/tensor.h"
#include "backend/moe/ops/exchange_ops.h"
#include "backend/moe/ops/travel.h"

/* The data that the ops of a chunk use. */
typedef struct scene_s {
  sluice_pass_t* pass;
  const sluice_op_t* op;
  const sluice_kernels_t* kernels;
  const sluice_node_copies_t* p;
  sluice_stream_t stream;
  int64_t width;
  int32_t dtype, self, nodes, first_rank; /* first_rank: of this node */
  uint64_t row_bytes;
  /* Offsets of the chunk (binding.h). */
  const int64_t *sent, *arrived, *forwards, *from;
  int64_t own; /* node copies of own tokens for this node */
} scene_t;

static scene_t scene_of(sluice_pass_t* pass, const sluice_op_t* op) {
  const sluice_binding_t* b = &pass->binding;
  const sluice_node_copies_t* p = &b->node_copies;
  const int64_t chunk = op->chunk;
  scene_t s = {.pass = pass,
               .op = op,
               .kernels = pass->context->device->kernels,
               .p = p,
               .stream = sluice_pass_stream(pass, op),
               .width = pass->moe->shape.config.model_width,
               .dtype = pass->moe->shape.config.dtype,
               .self = pass->context->rank,
               .nodes = p->num_nodes,
               .first_rank = p->node * p->ranks_per_node,
               .row_bytes = pass->slots[SLUICE_T_SEND].row_bytes,
               .sent = p->sent_of_node + chunk * (p->num_nodes + 1),
               .arrived = p->arrived_of_node + chunk * (p->num_nodes + 1),
               .forwards = p->forwards + chunk * (b->world_size + 1),
               .from = p->recv_of_source + chunk * (b->world_size + 1)};
  s.own = s.arrived[p->node + 1] - s.arrived[p->node];
  return s;
}

static char* chunk_of(const scene_t* s, int32_t tensor) { return sluice_pass_chunk(s->pass, tensor, s->op->chunk); }

/* Clears all messages; an op then sets those it needs. */
static void clear_transfer(const scene_t* s) {
  memset(s->pass->arrays.send, 0, sluice_exchange_arrays_bytes(s->pass->binding.world_size)); /* all four */
}

static void send_to(const scene_t* s, int32_t rank, const char* rows, int64_t count) {
  s->pass->arrays.send[rank] = rows;
  s->pass->arrays.send_bytes[rank] = (uint64_t)count * s->row_bytes;
}

static void receive_from(const scene_t* s, int32_t rank, char* rows, int64_t count) {
  s->pass->arrays.recv[rank] = rows;
  s->pass->arrays.recv_bytes[rank] = (uint64_t)count * s->row_bytes;
}

static void gather(const scene_t* s, int64_t count, const void* rows, int64_t stride, const int32_t* index, char* out) {
  s->kernels->gather_rows(s->stream, s->dtype, count, s->width, rows, stride, index, out);
}

/* ---- out ---- */

static sluice_status_t send_tokens_start(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens,
                                         sluice_transfer_t* out_transfer) {
  const scene_t s = scene_of(pass, op);
  const int32_t* token = s.p->token + s.p->first_sent[op->chunk];
  char *out = chunk_of(&s, SLUICE_T_SEND), *in = chunk_of(&s, SLUICE_T_NODE);
  clear_transfer(&s);
  for (int32_t v = 0; v < s.nodes; ++v) {
    if (v == s.p->node) continue;
    const int32_t rank = v * s.p->ranks_per_node + s.p->local;
    const int64_t leave = s.sent[v + 1] - s.sent[v], arrive = s.arrived[v + 1] - s.arrived[v];
    gather(&s, leave, sluice_tensor_data(tokens), sluice_tensor_stride(tokens, 0), token + s.sent[v], out);
    send_to(&s, rank, out, leave);
    receive_from(&s, rank, in, arrive);
    out += (uint64_t)leave * s.row_bytes;
    in += (uint64_t)arrive * s.row_bytes;
  }
  return sluice_transfer_start(pass, op, out_transfer);
}

/* Gathers the forwards to local rank j: of nodes before this one, own tokens, of nodes after it. own_too 0 leaves out
 * own tokens, which are read where they lie. Returns the end of the written rows. */
static char* gather_forwards(const scene_t* s, const sluice_tensor_t* tokens, int32_t j, int own_too, char* out) {
  const int64_t *at = s->forwards + (int64_t)j * s->nodes, node = s->p->node;
  const int32_t* origin = s->p->origin + s->p->first_forward[s->op->chunk];
  const char* in = chunk_of(s, SLUICE_T_NODE);
  const int64_t before = at[node] - at[0], own = at[node + 1] - at[node], after = at[s->nodes] - at[node + 1];
  gather(s, before, in, s->width, origin + at[0], out);
  out += (uint64_t)before * s->row_bytes;
  if (own_too) {
    gather(s, own, sluice_tensor_data(tokens), sluice_tensor_stride(tokens, 0), origin + at[node], out);
    out += (uint64_t)own * s->row_bytes;
  }
  gather(s, after, in, s->width, origin + at[node + 1], out);
  return out + (uint64_t)after * s->row_bytes;
}

static sluice_status_t pass_on_start(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* tokens,
                                     sluice_transfer_t* out_transfer) {
  const scene_t s = scene_of(pass, op);
  char *out = chunk_of(&s, SLUICE_T_SEND), *in = chunk_of(&s, SLUICE_T_RECV);
  clear_transfer(&s);
  for (int32_t j = 0; j < s.p->ranks_per_node; ++j) {
    const int32_t rank = s.first_rank + j;
    if (rank == s.self) continue;
    const int64_t *leave = s.forwards + (int64_t)j * s.nodes, *arrive = s.from + (int64_t)j * s.nodes;
    char* end = gather_forwards(&s, tokens, j, 1, out);
    send_to(&s, rank, out, leave[s.nodes] - leave[0]);
    receive_from(&s, rank, in + (uint64_t)arrive[0] * s.row_bytes, arrive[s.nodes] - arrive[0]);
    out = end;
  }
  SLUICE_TRY(sluice_transfer_start(pass, op, out_transfer));
  /* Rows that this rank forwards to itself are copied while the exchange is in flight. */
  (void)gather_forwards(&s, tokens, s.p->local, 0, in + (uint64_t)s.from[(int64_t)s.p->local * s.nodes] * s.row_bytes);
  return SLUICE_OK;
}

/* ---- back ---- */

/* The first token copy of a source among all that arrive, own ones included, and their number. */
static int64_t arrivals_of(const scene_t* s, int32_t source, int64_t* out_count) {
  const sluice_binding_t* b = &s->pass->binding;
  const int64_t* received = b->token_copies.recv_of_rank + (int64_t)s->op->chunk * (b->world_size + 1);
  const int64_t* sent = b->token_copies.sent_of_rank + (int64_t)s->op->chunk * (b->world_size + 1);
  const int64_t own = sent[s->self + 1] - sent[s->self];
  *out_count = source == s->self ? own : received[source + 1] - received[source];
  return received[source] + (source > s->self ? own : 0);
}

/* Writes p of every token copy that local rank i forwarded to this rank to `out`; returns their number. */
static int64_t sum_token_copies(const scene_t* s, int32_t i, int32_t tensor, char* out) {
  const sluice_binding_t* b = &s->pass->binding;
  const void* rows = chunk_of(s, tensor);
  const int32_t* position = b->token_copies.position + b->token_copies.first_arrived[s->op->chunk] * b->top_k;
  const int is_weighted = s->pass->schedule->spec.direction == SLUICE_FORWARD;
  const float* weight = is_weighted ? (const float*)(const void*)chunk_of(s, SLUICE_T_COPY_WEIGHTS) : NULL;
  int64_t sums = 0;
  for (int32_t v = 0; v < s->nodes; ++v) {
    int64_t count = 0;
    const int64_t first = arrivals_of(s, v * s->p->ranks_per_node + i, &count) * b->top_k;
    s->kernels->combine_rows(s->stream, s->dtype, count, b->top_k, s->width, rows, position + first,
                             weight == NULL ? NULL : weight + first, b->top_k, 1, out + (uint64_t)sums * s->row_bytes,
                             s->width);
    sums += count;
  }
  return sums;
}

static sluice_status_t collect_start(sluice_pass_t* pass, const sluice_op_t* op, int32_t tensor,
                                     sluice_transfer_t* out_transfer) {
  const scene_t s = scene_of(pass, op);
  char *out = chunk_of(&s, SLUICE_T_SEND), *in = chunk_of(&s, SLUICE_T_NODE);
  clear_transfer(&s);
  for (int32_t j = 0; j < s.p->ranks_per_node; ++j) {
    const int32_t rank = s.first_rank + j;
    if (rank == s.self) continue;
    const int64_t* arrive = s.forwards + (int64_t)j * s.nodes;
    const int64_t leave = sum_token_copies(&s, j, tensor, out);
    send_to(&s, rank, out, leave);
    receive_from(&s, rank, in + (uint64_t)arrive[0] * s.row_bytes, arrive[s.nodes] - arrive[0]);
    out += (uint64_t)leave * s.row_bytes;
  }
  SLUICE_TRY(sluice_transfer_start(pass, op, out_transfer));
  (void)sum_token_copies(&s, s.p->local, tensor,
                         in + (uint64_t)s.forwards[(int64_t)s.p->local * s.nodes] * s.row_bytes);
  return SLUICE_OK;
}

/* Computes q of the node copies of one node. */
static void sum_node_copies(const scene_t* s, int32_t node, char* out) {
  const int32_t per_node = s->p->ranks_per_node;
  const int32_t* part = s->p->part + (s->p->first_arrived[s->op->chunk] + s->arrived[node]) * per_node;
  s->kernels->combine_rows(s->stream, s->dtype, s->arrived[node + 1] - s->arrived[node], per_node, s->width,
                           chunk_of(s, SLUICE_T_NODE), part, NULL, 0, 0, out, s->width);
}

static sluice_status_t return_rows_start(sluice_pass_t* pass, const sluice_op_t* op, int32_t tensor,
                                         sluice_transfer_t* out_transfer) {
  (void)tensor; /* the sums within the node have arrived in T_NODE */
  const scene_t s = scene_of(pass, op);
  char *out = chunk_of(&s, SLUICE_T_SEND), *in = chunk_of(&s, SLUICE_T_RECV);
  clear_transfer(&s);
  for (int32_t v = 0; v < s.nodes; ++v) {
    if (v == s.p->node) continue;
    const int32_t rank = v * s.p->ranks_per_node + s.p->local;
    const int64_t leave = s.arrived[v + 1] - s.arrived[v];
    sum_node_copies(&s, v, out);
    send_to(&s, rank, out, leave);
    receive_from(&s, rank, in + (uint64_t)s.sent[v] * s.row_bytes, s.sent[v + 1] - s.sent[v]);
    out += (uint64_t)leave * s.row_bytes;
  }
  SLUICE_TRY(sluice_transfer_start(pass, op, out_transfer));
  sum_node_copies(&s, s.p->node, in + (uint64_t)s.sent[s.p->node] * s.row_bytes);
  return SLUICE_OK;
}

static void reduce(sluice_pass_t* pass, const sluice_op_t* op, int32_t tensor) {
  (void)tensor;
  const scene_t s = scene_of(pass, op);
  const sluice_binding_t* b = &pass->binding;
  const int64_t t = b->first_token[op->chunk], stride = sluice_tensor_stride(pass->out_rows, 0);
  char* out = sluice_tensor_data(pass->out_rows);
  s.kernels->combine_rows(s.stream, s.dtype, sluice_tokens_of(b, op->chunk).count, s.nodes, s.width,
                          chunk_of(&s, SLUICE_T_RECV), s.p->position_of_token + t * s.nodes, NULL, 0, 0,
                          out + (uint64_t)(t * stride) * sluice_dtype_bytes(s.dtype), stride);
}

const sluice_travel_t sluice_travel_of_node_copies = {.send_tokens_start = send_tokens_start,
                                                      .unpack_tokens = sluice_unpack_token_copies,
                                                      .send_weights_start = sluice_send_route_start,
                                                      .unpack_weights = sluice_unpack_copy_weights,
                                                      .return_rows_start = return_rows_start,
                                                      .pass_on_start = pass_on_start,
                                                      .collect_start = collect_start,
                                                      .reduce = reduce};
