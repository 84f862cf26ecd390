// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/routing/token_copies.h"

#include <stdio.h>
#include <string.h>

#include "backend/base/math.h"
#include "backend/comm/exchange_arrays.h"
#include "backend/moe/routing/copies.h"

/* ---- allocation of the arrays ---- */

typedef struct tables_s {
  int32_t* route_index_out; /* [kept routes] by destination, then chunk, then sent order; NULL in a restored binding */
  int64_t* next_row;        /* [E_local] */
  const int32_t** from;     /* [W] route indices of each source */
  sluice_exchange_arrays_t arrays;
} tables_t;

/* route_index: of a restored binding, else NULL. */
static sluice_status_t take_tables(sluice_binding_t* b, int32_t* route_index, int64_t arriving, tables_t* out) {
  sluice_token_copies_t* p = &b->token_copies;
  sluice_arena_t* arena = &b->memory->token_copies;
  uint64_t n = (uint64_t)b->num_chunks, w = (uint64_t)b->world_size, rows = (uint64_t)b->num_rows;
  uint64_t sent = (uint64_t)b->num_sent, offsets = n * (w + 1) * 8, firsts = (n + 1) * 8;
  const sluice_token_copies_size_t size = {b->num_chunks, b->num_tokens, b->num_sent, b->num_rows, arriving};
  SLUICE_TRY(sluice_arena_reset(arena, sluice_token_copies_bytes(&b->moe->shape, &size, route_index != NULL),
                                "token copies of a pass"));
  memset(out, 0, sizeof *out);
  memset(p, 0, sizeof *p);
  p->sent_of_rank = sluice_arena_take(arena, offsets);
  p->recv_of_rank = sluice_arena_take(arena, offsets);
  p->first_sent = sluice_arena_take(arena, firsts);
  p->first_arrived = sluice_arena_take(arena, firsts);
  p->token = sluice_arena_take(arena, sent * 4);
  p->position_of_token = sluice_arena_take(arena, (uint64_t)b->num_tokens * w * 4);
  p->position = sluice_arena_take(arena, (uint64_t)arriving * (uint64_t)b->top_k * 4);
  p->max_arriving = arriving;
  p->origin = sluice_arena_take(arena, rows * 4);
  out->next_row = sluice_arena_take(arena, (uint64_t)b->num_local * 8);
  out->from = sluice_arena_take(arena, w * 8);
  p->route_index = route_index;
  if (route_index != NULL) return SLUICE_OK;
  p->route_index = sluice_arena_take(arena, rows * 4);
  out->route_index_out = sluice_arena_take(arena, sent * 4);
  out->arrays =
      sluice_exchange_arrays_in(sluice_arena_take(arena, sluice_exchange_arrays_bytes(b->world_size)), b->world_size);
  return SLUICE_OK;
}

static const int64_t* routes_of_rank(const sluice_binding_t* b, int32_t chunk) {
  return b->sent_of_rank + (int64_t)chunk * (b->world_size + 1);
}

/* ---- token copies that leave ---- */

/* Marks the ranks that receive each token of the chunk, then numbers the token copies by (destination, token). */
static void order_token_copies(sluice_binding_t* b, int32_t chunk) {
  sluice_token_copies_t* p = &b->token_copies;
  int32_t w = b->world_size;
  const int64_t* routes = routes_of_rank(b, chunk);
  const int32_t* token = b->order_token + b->first_order[chunk];
  int64_t* of_rank = p->sent_of_rank + (int64_t)chunk * (w + 1);
  for (int32_t r = 0; r < w; ++r) {
    for (int64_t row = routes[r]; row < routes[r + 1]; ++row) p->position_of_token[(int64_t)token[row] * w + r] = 0;
  }
  int64_t token_copy = 0;
  for (int32_t r = 0; r < w; ++r) {
    of_rank[r] = token_copy;
    for (int64_t t = b->first_token[chunk]; t < b->first_token[chunk + 1]; ++t) {
      int32_t* position = &p->position_of_token[t * w + r];
      if (*position < 0) continue;
      *position = (int32_t)token_copy;
      p->token[p->first_sent[chunk] + token_copy++] = (int32_t)t;
    }
  }
  of_rank[w] = token_copy;
  p->first_sent[chunk + 1] = p->first_sent[chunk] + token_copy;
}

static void order_all(sluice_binding_t* b) {
  sluice_token_copies_t* p = &b->token_copies;
  memset(p->position_of_token, 0xff, (size_t)b->num_tokens * (size_t)b->world_size * sizeof(int32_t));
  p->first_sent[0] = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) order_token_copies(b, i);
}

/* Writes the route indices for rank r, all chunks in sequence; returns their number. */
static int64_t write_route_index(const sluice_binding_t* b, int32_t r, int32_t* out) {
  const sluice_token_copies_t* p = &b->token_copies;
  int64_t count = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    const int64_t* routes = routes_of_rank(b, i);
    const int32_t* route = b->order + b->first_order[i];
    int64_t first = p->sent_of_rank[(int64_t)i * (b->world_size + 1) + r];
    for (int64_t row = routes[r]; row < routes[r + 1]; ++row) {
      int64_t t = route[row] / b->top_k, k = route[row] % b->top_k;
      out[count++] = (int32_t)((p->position_of_token[t * b->world_size + r] - first) * b->top_k + k);
    }
  }
  return count;
}

/* ---- route indices ---- */

static sluice_status_t exchange_route_index(sluice_binding_t* b, const tables_t* tables) {
  sluice_context_t* context = b->moe->context;
  sluice_token_copies_t* p = &b->token_copies;
  int32_t *out = tables->route_index_out, *in = p->route_index;
  for (int32_t r = 0; r < b->world_size; ++r) {
    int64_t sent = write_route_index(b, r, out), received = 0;
    for (int32_t i = 0; i < b->num_chunks; ++i) received += sluice_routes_from(b, r, i);
    int own = r == context->rank;
    if (own && received > 0) memcpy(in, out, (size_t)received * sizeof *in);
    tables->arrays.send[r] = out;
    tables->arrays.recv[r] = in;
    tables->arrays.send_bytes[r] = own ? 0 : (uint64_t)sent * sizeof *out;
    tables->arrays.recv_bytes[r] = own ? 0 : (uint64_t)received * sizeof *in;
    p->exchanged_bytes += tables->arrays.send_bytes[r];
    out += sent;
    in += received;
  }
  char phase[96];
  snprintf(phase, sizeof phase, "token copies of layer %d", b->moe->shape.config.layer_id);
  const sluice_exchange_t exchange = sluice_exchange_of(&tables->arrays);
  return sluice_comm_exchange(context->comm, &exchange, phase);
}

/* ---- token copies that arrive ---- */

/* For route indices that do not fit: they become addresses, so none may be out of range or occur twice. */
sluice_status_t sluice_token_copies_refuse(const sluice_binding_t* b, int32_t source) {
  return SLUICE_FAIL_PEER(SLUICE_E_MISMATCH, b->moe->context->rank, source,
                          "layer %d: the token copies that rank %d announced do not fit its rows",
                          b->moe->shape.config.layer_id, source);
}

/* The number of token copies that `count` route indices describe; -1: an index is out of range. */
static int64_t count_token_copies(const int32_t* route_index, int64_t count, int32_t top_k) {
  int64_t token_copies = 0;
  for (int64_t s = 0; s < count; ++s) {
    if (route_index[s] < 0 || route_index[s] >= count * top_k) return -1;
    token_copies = sluice_max(token_copies, route_index[s] / top_k + 1);
  }
  return token_copies;
}

/* Places the token copies of one source in a chunk: the rows of their routes, and the origin of each row. `row`: index
 * of the first token copy among the received ones. */
static int place_token_copies(sluice_binding_t* b, int32_t chunk, int32_t source, const int32_t* route_index,
                              int64_t row, int32_t* position, int64_t* next_row) {
  sluice_token_copies_t* p = &b->token_copies;
  int own = source == b->moe->context->rank;
  const int32_t* token =
      p->token + p->first_sent[chunk] + p->sent_of_rank[(int64_t)chunk * (b->world_size + 1) + source];
  int32_t* origin = p->origin + b->first_of_chunk[chunk];
  for (int32_t e = 0; e < b->num_local; ++e) {
    for (int32_t c = sluice_recv_count(b, source, chunk, e); c > 0; --c, ++route_index) {
      if (position[*route_index] >= 0) return 0;
      position[*route_index] = (int32_t)next_row[e];
      int64_t token_copy = *route_index / b->top_k;
      origin[next_row[e]++] = own ? token[token_copy] : (int32_t)(row + token_copy);
    }
  }
  return 1;
}

/* tables->from: the route indices of each source not yet used. */
static sluice_status_t receive_chunk(sluice_binding_t* b, int32_t chunk, const tables_t* tables) {
  sluice_token_copies_t* p = &b->token_copies;
  int32_t self = b->moe->context->rank;
  int64_t* of_rank = p->recv_of_rank + (int64_t)chunk * (b->world_size + 1);
  int64_t row = 0, arrived = p->first_arrived[chunk];
  memcpy(tables->next_row, b->first_in_chunk + (int64_t)chunk * b->num_local, (size_t)b->num_local * sizeof(int64_t));
  for (int32_t r = 0; r < b->world_size; ++r) {
    int64_t routes = sluice_routes_from(b, r, chunk),
            token_copies = count_token_copies(tables->from[r], routes, b->top_k);
    if (token_copies < 0 || arrived + token_copies > p->max_arriving) return sluice_token_copies_refuse(b, r);
    of_rank[r] = row;
    int32_t* position = p->position + arrived * b->top_k;
    memset(position, 0xff, (size_t)token_copies * (size_t)b->top_k * sizeof *position);
    if (!place_token_copies(b, chunk, r, tables->from[r], row, position, tables->next_row))
      return sluice_token_copies_refuse(b, r);
    if (r != self) row += token_copies;
    arrived += token_copies;
    tables->from[r] += routes;
  }
  of_rank[b->world_size] = row;
  p->first_arrived[chunk + 1] = arrived;
  return SLUICE_OK;
}

static sluice_status_t receive_all(sluice_binding_t* b, const tables_t* tables) {
  sluice_token_copies_t* p = &b->token_copies;
  int32_t self = b->moe->context->rank, w = b->world_size;
  const int32_t* at = p->route_index;
  for (int32_t r = 0; r < w; ++r) {
    tables->from[r] = at;
    for (int32_t i = 0; i < b->num_chunks; ++i) at += sluice_routes_from(b, r, i);
  }
  p->first_arrived[0] = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    SLUICE_TRY(receive_chunk(b, i, tables));
    const int64_t* sent = p->sent_of_rank + (int64_t)i * (w + 1);
    int64_t remote_sent = sent[w] - (sent[self + 1] - sent[self]);
    int64_t remote_received = p->recv_of_rank[(int64_t)i * (w + 1) + w];
    p->max_chunk_remote = sluice_max(p->max_chunk_remote, sluice_max(remote_sent, remote_received));
    p->max_chunk_sent = sluice_max(p->max_chunk_sent, sent[w]);
  }
  return SLUICE_OK;
}

/* Under a plan one for each token of each rank; in any case at most one for each route. */
static int64_t most_arriving(const sluice_binding_t* b) {
  const sluice_plan_data_t* plan = b->moe->plan;
  int64_t most = plan != NULL ? b->world_size * plan->inputs.max_tokens : b->num_rows;
  return most < b->num_rows ? most : b->num_rows;
}

static sluice_status_t exchange(sluice_binding_t* b, sluice_stream_t stream) {
  (void)stream;
  tables_t tables;
  SLUICE_TRY(take_tables(b, NULL, most_arriving(b), &tables));
  order_all(b);
  SLUICE_TRY(exchange_route_index(b, &tables));
  return receive_all(b, &tables);
}

sluice_status_t sluice_token_copies_restore(sluice_binding_t* b, int32_t* route_index) {
  const int32_t* at = route_index;
  int64_t arriving = 0;
  for (int32_t r = 0; r < b->world_size; ++r) {
    for (int32_t i = 0; i < b->num_chunks; ++i) {
      int64_t routes = sluice_routes_from(b, r, i), token_copies = count_token_copies(at, routes, b->top_k);
      if (token_copies < 0) return sluice_token_copies_refuse(b, r);
      arriving += token_copies;
      at += routes;
    }
  }
  tables_t tables;
  SLUICE_TRY(take_tables(b, route_index, arriving, &tables));
  order_all(b);
  return receive_all(b, &tables);
}

/* ---- the rest of the table ---- */

static char* save(const sluice_binding_t* b, char* at) {
  const sluice_shape_t shape = sluice_binding_shape(b);
  const uint64_t bytes = sluice_binding_meta_token_copies_bytes(&shape, b->num_chunks, b->num_rows);
  if (bytes > 0) memcpy(at, b->token_copies.route_index, bytes);
  return at + bytes;
}

static sluice_status_t restore(sluice_binding_t* b, sluice_stream_t stream, int32_t* saved, void* kept) {
  (void)stream, (void)kept;
  return sluice_token_copies_restore(b, saved);
}

/* Numbers of token copies follow from the route indices, so headers hold none. META holds all that a step keeps. */
const sluice_copies_t sluice_copies_in_host_memory = {.exchange = exchange,
                                                      .max_chunk_remote = sluice_token_copies_max_chunk_remote,
                                                      .max_chunk_sent = sluice_token_copies_max_chunk_sent,
                                                      .num_weighted = sluice_token_copies_num_weighted,
                                                      .save = save,
                                                      .restore = restore};
