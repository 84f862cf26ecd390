// SPDX-License-Identifier: Apache-2.0
/* Tokens sent in two levels: builds the tables of binding.h from those of token copies. */
#include "backend/moe/routing/node_copies.h"

#include <stdio.h>
#include <string.h>

#include "backend/base/math.h"
#include "backend/comm/exchange_arrays.h"
#include "backend/moe/routing/copies.h"
#include "backend/moe/routing/token_copies.h"

/* The message of a rank to the rank with its local index on another node: the number of node copies of each chunk, and
 * for each the local ranks that it is for. All messages have the same size, so that no sizes are exchanged. */
typedef struct messages_s {
  uint64_t bytes, counts; /* of one message, and of its first part */
  char *out, *in;         /* by node */
  sluice_exchange_arrays_t arrays;
} messages_t;

static const int64_t* of_chunk(const int64_t* offsets, int32_t chunk, int32_t count) {
  return offsets + (int64_t)chunk * (count + 1);
}

static int32_t rank_at(const sluice_node_copies_t* p, int32_t node, int32_t local) {
  return node * p->ranks_per_node + local;
}

/* ---- allocation of the arrays ---- */

/* message: bytes of one message; 0 in a restored binding. */
static sluice_status_t take_tables(sluice_binding_t* b, int64_t arriving, uint64_t message, messages_t* out,
                                   int64_t** out_cursor) {
  sluice_node_copies_t* p = &b->node_copies;
  const sluice_shape_t* shape = &b->moe->shape;
  sluice_arena_t* arena = &b->memory->node_copies;
  const int64_t num_arrived = p->num_arrived;
  memset(p, 0, sizeof *p);
  p->num_arrived = num_arrived;
  p->ranks_per_node = shape->ranks_per_node;
  p->num_nodes = b->world_size / p->ranks_per_node;
  p->node = b->moe->context->rank / p->ranks_per_node;
  p->local = b->moe->context->rank % p->ranks_per_node;
  const uint64_t n = (uint64_t)b->num_chunks, w = (uint64_t)b->world_size, nodes = (uint64_t)p->num_nodes;
  const int64_t sent = sluice_min(b->num_sent, b->num_tokens * p->num_nodes);
  const int64_t forwards = arriving * sluice_min(p->ranks_per_node, b->top_k);
  const sluice_node_copies_size_t size = {b->num_chunks, b->num_tokens, sent, arriving, (int64_t)message};
  SLUICE_TRY(sluice_arena_reset(arena, sluice_node_copies_bytes(shape, &size), "node copies of a pass"));
  p->sent_of_node = sluice_arena_take(arena, n * (nodes + 1) * 8);
  p->arrived_of_node = sluice_arena_take(arena, n * (nodes + 1) * 8);
  p->forwards = sluice_arena_take(arena, n * (w + 1) * 8);
  p->recv_of_source = sluice_arena_take(arena, n * (w + 1) * 8);
  p->first_sent = sluice_arena_take(arena, (n + 1) * 8);
  p->first_arrived = sluice_arena_take(arena, (n + 1) * 8);
  p->first_forward = sluice_arena_take(arena, (n + 1) * 8);
  *out_cursor = sluice_arena_take(arena, w * 8);
  p->token = sluice_arena_take(arena, (uint64_t)sent * 4);
  p->ranks_sent = sluice_arena_take(arena, (uint64_t)sent * 8);
  p->position_of_token = sluice_arena_take(arena, (uint64_t)b->num_tokens * nodes * 4);
  p->ranks = sluice_arena_take(arena, (uint64_t)arriving * 8);
  p->part = sluice_arena_take(arena, (uint64_t)arriving * (uint64_t)p->ranks_per_node * 4);
  p->origin = sluice_arena_take(arena, (uint64_t)forwards * 4);
  memset(out, 0, sizeof *out);
  if (message == 0) return SLUICE_OK;
  out->bytes = message;
  out->out = sluice_arena_take(arena, nodes * message);
  out->in = sluice_arena_take(arena, nodes * message);
  out->arrays =
      sluice_exchange_arrays_in(sluice_arena_take(arena, sluice_exchange_arrays_bytes(b->world_size)), b->world_size);
  return SLUICE_OK;
}

/* ---- node copies that leave ---- */

/* The local ranks of `node` that receive token t. token_rows: [T][W] by token and rank. */
static uint64_t ranks_of(const sluice_binding_t* b, const int32_t* token_rows, int64_t t, int32_t node) {
  const int32_t per_node = b->node_copies.ranks_per_node;
  const int32_t* position = token_rows + t * b->world_size + (int64_t)node * per_node;
  uint64_t ranks = 0;
  for (int32_t j = 0; j < per_node; ++j) ranks |= (uint64_t)(position[j] >= 0) << j;
  return ranks;
}

static void order_chunk(sluice_binding_t* b, const int32_t* token_rows, int32_t chunk) {
  sluice_node_copies_t* p = &b->node_copies;
  int64_t* of_node = p->sent_of_node + (int64_t)chunk * (p->num_nodes + 1);
  int64_t row = 0;
  for (int32_t v = 0; v < p->num_nodes; ++v) {
    of_node[v] = row;
    for (int64_t t = b->first_token[chunk]; t < b->first_token[chunk + 1]; ++t) {
      const uint64_t ranks = ranks_of(b, token_rows, t, v);
      p->position_of_token[t * p->num_nodes + v] = ranks == 0 ? -1 : (int32_t)row;
      if (ranks == 0) continue;
      p->token[p->first_sent[chunk] + row] = (int32_t)t;
      p->ranks_sent[p->first_sent[chunk] + row++] = ranks;
    }
  }
  of_node[p->num_nodes] = row;
  p->first_sent[chunk + 1] = p->first_sent[chunk] + row;
}

static void order_all(sluice_binding_t* b, const int32_t* token_rows) {
  b->node_copies.first_sent[0] = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) order_chunk(b, token_rows, i);
}

/* ---- messages between ranks ---- */

static uint64_t counts_bytes(const sluice_binding_t* b) {
  return sluice_round_up_u64((uint64_t)b->num_chunks * sizeof(int32_t), sizeof(uint64_t));
}

/* Writes the message about this rank's tokens for node v, all chunks in sequence. */
static void write_message(const sluice_binding_t* b, int32_t v, char* message, uint64_t bytes) {
  const sluice_node_copies_t* p = &b->node_copies;
  int32_t* counts = (int32_t*)(void*)message;
  uint64_t* ranks = (uint64_t*)(void*)(message + counts_bytes(b));
  memset(message, 0, bytes);
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    const int64_t* of_node = of_chunk(p->sent_of_node, i, p->num_nodes);
    counts[i] = (int32_t)(of_node[v + 1] - of_node[v]);
    memcpy(ranks, p->ranks_sent + p->first_sent[i] + of_node[v], (size_t)counts[i] * sizeof *ranks);
    ranks += counts[i];
  }
}

static sluice_status_t exchange_messages(sluice_binding_t* b, const messages_t* m) {
  const sluice_node_copies_t* p = &b->node_copies;
  memset(m->arrays.send, 0, sluice_exchange_arrays_bytes(b->world_size)); /* all four */
  for (int32_t v = 0; v < p->num_nodes; ++v) {
    const int32_t r = rank_at(p, v, p->local);
    char* out = v == p->node ? m->in : m->out;
    write_message(b, v, out + (uint64_t)v * m->bytes, m->bytes);
    if (v == p->node) continue;
    m->arrays.send[r] = m->out + (uint64_t)v * m->bytes;
    m->arrays.recv[r] = m->in + (uint64_t)v * m->bytes;
    m->arrays.send_bytes[r] = m->arrays.recv_bytes[r] = m->bytes;
    b->token_copies.exchanged_bytes += m->bytes;
  }
  char phase[96];
  snprintf(phase, sizeof phase, "node copies of layer %d", b->moe->shape.config.layer_id);
  const sluice_exchange_t exchange = sluice_exchange_of(&m->arrays);
  return sluice_comm_exchange(b->moe->context->comm, &exchange, phase);
}

/* For numbers that do not fit: they become addresses, so none may be out of range. */
static sluice_status_t refuse(const sluice_binding_t* b, int32_t node) {
  return sluice_token_copies_refuse(b, rank_at(&b->node_copies, node, b->node_copies.local));
}

/* Computes offsets of the chunk's node copies from their numbers by node; `stride` bytes lie between two nodes. */
static sluice_status_t take_counts_of(sluice_binding_t* b, int32_t chunk, const char* counts, uint64_t stride,
                                      int64_t most) {
  sluice_node_copies_t* p = &b->node_copies;
  int64_t* of_node = p->arrived_of_node + (int64_t)chunk * (p->num_nodes + 1);
  const int64_t* sent = of_chunk(p->sent_of_node, chunk, p->num_nodes);
  of_node[0] = 0;
  for (int32_t v = 0; v < p->num_nodes; ++v) {
    int32_t count = 0;
    memcpy(&count, counts + (uint64_t)v * stride + (uint64_t)chunk * sizeof count, sizeof count);
    of_node[v + 1] = of_node[v] + count;
    const int fits = count >= 0 && p->first_arrived[chunk] + of_node[v + 1] <= most;
    if (!fits || (v == p->node && count != sent[v + 1] - sent[v])) return refuse(b, v);
  }
  p->first_arrived[chunk + 1] = p->first_arrived[chunk] + of_node[p->num_nodes];
  return SLUICE_OK;
}

static sluice_status_t read_messages(sluice_binding_t* b, const messages_t* m, int64_t most, int64_t* cursor) {
  sluice_node_copies_t* p = &b->node_copies;
  p->first_arrived[0] = 0;
  memset(cursor, 0, (size_t)p->num_nodes * sizeof *cursor);
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    SLUICE_TRY(take_counts_of(b, i, m->in, m->bytes, most));
    const int64_t* of_node = of_chunk(p->arrived_of_node, i, p->num_nodes);
    for (int32_t v = 0; v < p->num_nodes; ++v) {
      const int64_t count = of_node[v + 1] - of_node[v];
      if (cursor[v] + count > b->max_tokens) return refuse(b, v);
      const char* ranks = m->in + (uint64_t)v * m->bytes + counts_bytes(b) + (uint64_t)cursor[v] * sizeof(uint64_t);
      memcpy(p->ranks + p->first_arrived[i] + of_node[v], ranks, (size_t)count * sizeof(uint64_t));
      cursor[v] += count;
    }
  }
  p->num_arrived = p->first_arrived[b->num_chunks];
  return SLUICE_OK;
}

/* ---- what this rank forwards ---- */

/* Counts forwards of the chunk by local rank and node, as offsets. */
static sluice_status_t count_forwards(sluice_binding_t* b, int32_t chunk) {
  sluice_node_copies_t* p = &b->node_copies;
  const int64_t* of_node = of_chunk(p->arrived_of_node, chunk, p->num_nodes);
  const uint64_t* ranks = p->ranks + p->first_arrived[chunk];
  int64_t* forwards = p->forwards + (int64_t)chunk * (b->world_size + 1);
  memset(forwards, 0, (size_t)(b->world_size + 1) * sizeof *forwards);
  for (int32_t v = 0; v < p->num_nodes; ++v) {
    for (int64_t c = of_node[v]; c < of_node[v + 1]; ++c) {
      const int is_none = ranks[c] == 0 || (p->ranks_per_node < 64 && ranks[c] >> p->ranks_per_node != 0);
      if (is_none || __builtin_popcountll(ranks[c]) > b->top_k) return refuse(b, v);
      for (uint64_t left = ranks[c]; left != 0; left &= left - 1) {
        ++forwards[(int64_t)__builtin_ctzll(left) * p->num_nodes + v + 1];
      }
    }
  }
  for (int32_t i = 0; i < b->world_size; ++i) forwards[i + 1] += forwards[i];
  p->first_forward[chunk + 1] = p->first_forward[chunk] + forwards[b->world_size];
  return SLUICE_OK;
}

/* Sets the source row of each forward, and the row of the sum that its rank returns. */
static void place_forwards(sluice_binding_t* b, int32_t chunk, int64_t* cursor) {
  sluice_node_copies_t* p = &b->node_copies;
  const int64_t* of_node = of_chunk(p->arrived_of_node, chunk, p->num_nodes);
  const int64_t own = of_node[p->node + 1] - of_node[p->node];
  const uint64_t* ranks = p->ranks + p->first_arrived[chunk];
  const int32_t* token = p->token + p->first_sent[chunk] + of_chunk(p->sent_of_node, chunk, p->num_nodes)[p->node];
  int32_t* part = p->part + p->first_arrived[chunk] * p->ranks_per_node;
  int32_t* origin = p->origin + p->first_forward[chunk];
  memcpy(cursor, of_chunk(p->forwards, chunk, b->world_size), (size_t)b->world_size * sizeof *cursor);
  memset(part, 0xff, (size_t)(of_node[p->num_nodes] * p->ranks_per_node) * sizeof *part);
  for (int32_t v = 0; v < p->num_nodes; ++v) {
    for (int64_t c = of_node[v]; c < of_node[v + 1]; ++c) {
      const int64_t row = v == p->node ? token[c - of_node[v]] : c - (v > p->node ? own : 0);
      for (uint64_t left = ranks[c]; left != 0; left &= left - 1) {
        const int32_t j = __builtin_ctzll(left);
        const int64_t at = cursor[(int64_t)j * p->num_nodes + v]++;
        origin[at] = (int32_t)row;
        part[c * p->ranks_per_node + j] = (int32_t)at;
      }
    }
  }
}

/* ---- what arrives ---- */

/* The number of received token copies of a source in the chunk; 0 for this rank. */
static int64_t arrivals_from(const sluice_binding_t* b, int32_t chunk, int32_t source) {
  const int64_t* received = of_chunk(b->token_copies.recv_of_rank, chunk, b->world_size);
  return received[source + 1] - received[source];
}

/* Computes recv_of_source: rows arrive by forwarding rank. */
static void order_arrivals(sluice_binding_t* b, int32_t chunk) {
  sluice_node_copies_t* p = &b->node_copies;
  int64_t* from = p->recv_of_source + (int64_t)chunk * (b->world_size + 1);
  from[0] = 0;
  for (int32_t i = 0; i < p->ranks_per_node; ++i) {
    for (int32_t v = 0; v < p->num_nodes; ++v, ++from) from[1] = from[0] + arrivals_from(b, chunk, rank_at(p, v, i));
  }
}

/* Reorders origins, which the tables of token copies have by source. */
static void move_origins(sluice_binding_t* b, int32_t chunk) {
  const sluice_node_copies_t* p = &b->node_copies;
  const int64_t* from = of_chunk(p->recv_of_source, chunk, b->world_size);
  const int64_t* received = of_chunk(b->token_copies.recv_of_rank, chunk, b->world_size);
  int32_t* origin = b->token_copies.origin + b->first_of_chunk[chunk];
  for (int32_t e = 0; e < b->num_local; ++e) {
    for (int32_t r = 0; r < b->world_size; ++r) {
      const int64_t moved = from[(int64_t)(r % p->ranks_per_node) * p->num_nodes + r / p->ranks_per_node] - received[r];
      const int32_t rows = sluice_recv_count(b, r, chunk, e);
      for (int32_t i = 0; i < rows && r != b->moe->context->rank; ++i) origin[i] += (int32_t)moved;
      origin += rows;
    }
  }
}

/* Checks the copies that this rank forwards to itself against its route indices. */
static sluice_status_t check_own(const sluice_binding_t* b, int32_t chunk) {
  const sluice_node_copies_t* p = &b->node_copies;
  const int64_t* forwards = of_chunk(p->forwards, chunk, b->world_size) + (int64_t)p->local * p->num_nodes;
  for (int32_t v = 0; v < p->num_nodes; ++v) {
    if (v != p->node && forwards[v + 1] - forwards[v] != arrivals_from(b, chunk, rank_at(p, v, p->local)))
      return refuse(b, v);
  }
  return SLUICE_OK;
}

static void note_most(sluice_binding_t* b, int32_t chunk) {
  sluice_node_copies_t* p = &b->node_copies;
  const int32_t nodes = p->num_nodes, w = b->world_size;
  const int64_t *sent = of_chunk(p->sent_of_node, chunk, nodes), *arrived = of_chunk(p->arrived_of_node, chunk, nodes);
  const int64_t *forwards = of_chunk(p->forwards, chunk, w), *from = of_chunk(p->recv_of_source, chunk, w);
  const int64_t own_sent = sent[p->node + 1] - sent[p->node], others = arrived[nodes] - own_sent;
  const int64_t first = (int64_t)p->local * nodes, kept = forwards[first + nodes] - forwards[first];
  int64_t out = sluice_max(sent[nodes] - own_sent, forwards[w] - kept);
  out = sluice_max(out, sluice_max(others, from[w]));
  p->max_chunk_remote = sluice_max(p->max_chunk_remote, out);
  p->max_chunk_sent = sluice_max(p->max_chunk_sent, sent[nodes]);
  p->max_chunk_node = sluice_max(p->max_chunk_node, sluice_max(others, forwards[w]));
}

static sluice_status_t build(sluice_binding_t* b, int64_t* cursor) {
  b->node_copies.first_forward[0] = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    SLUICE_TRY(count_forwards(b, i));
    SLUICE_TRY(check_own(b, i));
    place_forwards(b, i, cursor);
    order_arrivals(b, i);
    note_most(b, i);
  }
  return SLUICE_OK;
}

/* ---- on the host, wherever rows lie ---- */

sluice_status_t sluice_node_copies_exchange(sluice_binding_t* b, const int32_t* token_rows) {
  messages_t messages;
  int64_t* cursor = NULL;
  const int64_t most = b->max_tokens * (b->world_size / b->moe->shape.ranks_per_node);
  SLUICE_TRY(take_tables(b, most, counts_bytes(b) + (uint64_t)b->max_tokens * sizeof(uint64_t), &messages, &cursor));
  order_all(b, token_rows);
  SLUICE_TRY(exchange_messages(b, &messages));
  SLUICE_TRY(read_messages(b, &messages, most, cursor));
  return build(b, cursor);
}

char* sluice_node_copies_save(const sluice_binding_t* b, char* at) {
  const sluice_node_copies_t* p = &b->node_copies;
  for (int32_t v = 0; v < p->num_nodes; ++v) {
    for (int32_t i = 0; i < b->num_chunks; ++i, at += sizeof(int32_t)) {
      const int64_t* of_node = of_chunk(p->arrived_of_node, i, p->num_nodes);
      const int32_t count = (int32_t)(of_node[v + 1] - of_node[v]);
      memcpy(at, &count, sizeof count);
    }
  }
  const uint64_t bytes = (uint64_t)p->num_arrived * sizeof *p->ranks;
  if (bytes > 0) memcpy(at, p->ranks, bytes);
  return at + bytes;
}

sluice_status_t sluice_node_copies_restore(sluice_binding_t* b, const int32_t* saved, const int32_t* token_rows) {
  messages_t none;
  int64_t* cursor = NULL;
  SLUICE_TRY(take_tables(b, b->node_copies.num_arrived, 0, &none, &cursor));
  sluice_node_copies_t* p = &b->node_copies;
  const sluice_shape_t shape = sluice_binding_shape(b);
  const char* counts = (const char*)saved + sluice_binding_meta_token_copies_bytes(&shape, b->num_chunks, b->num_rows);
  const uint64_t stride = (uint64_t)b->num_chunks * sizeof(int32_t);
  order_all(b, token_rows);
  p->first_arrived[0] = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) SLUICE_TRY(take_counts_of(b, i, counts, stride, p->num_arrived));
  if (p->first_arrived[b->num_chunks] != p->num_arrived) return refuse(b, p->node);
  if (p->num_arrived > 0) {
    memcpy(p->ranks, counts + (uint64_t)p->num_nodes * stride, (uint64_t)p->num_arrived * sizeof *p->ranks);
  }
  return build(b, cursor);
}

/* ---- the table, with all of it in host memory ---- */

static sluice_status_t exchange(sluice_binding_t* b, sluice_stream_t stream) {
  SLUICE_TRY(sluice_copies_in_host_memory.exchange(b, stream));
  SLUICE_TRY(sluice_node_copies_exchange(b, b->token_copies.position_of_token));
  for (int32_t i = 0; i < b->num_chunks; ++i) move_origins(b, i);
  return SLUICE_OK;
}

static char* save(const sluice_binding_t* b, char* at) {
  return sluice_node_copies_save(b, sluice_copies_in_host_memory.save(b, at));
}

static sluice_status_t restore(sluice_binding_t* b, sluice_stream_t stream, int32_t* saved, void* kept) {
  SLUICE_TRY(sluice_copies_in_host_memory.restore(b, stream, saved, kept));
  SLUICE_TRY(sluice_node_copies_restore(b, saved, b->token_copies.position_of_token));
  for (int32_t i = 0; i < b->num_chunks; ++i) move_origins(b, i);
  return SLUICE_OK;
}

const sluice_copies_t sluice_copies_by_node = {.exchange = exchange,
                                               .max_chunk_remote = sluice_node_copies_max_chunk_remote,
                                               .max_chunk_sent = sluice_node_copies_max_chunk_sent,
                                               .max_chunk_node = sluice_node_copies_max_chunk_node,
                                               .num_weighted = sluice_token_copies_num_weighted,
                                               .save = save,
                                               .restore = restore};
