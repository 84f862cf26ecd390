// SPDX-License-Identifier: Apache-2.0
/* Token copies on a device with memory of its own: the device makes and keeps their tables, and the host reads only
 * their numbers. */
#include <string.h>

#include "backend/base/math.h"
#include "backend/comm/exchange_arrays.h"
#include "backend/moe/context/row_memory.h"
#include "backend/moe/routing/copies.h"
#include "backend/moe/routing/token_copies.h"

static uint64_t words(int64_t count) { return sluice_align_up((uint64_t)count * sizeof(int32_t)); }

uint64_t sluice_device_token_copies_kept_bytes(const sluice_binding_t* b) {
  const sluice_shape_t shape = sluice_binding_shape(b);
  return sluice_token_copies_kept_bytes_of(&shape, b->token_copies.first_arrived[b->num_chunks], b->num_rows);
}

static void place_kept(sluice_binding_t* b, void* kept) {
  sluice_token_copies_t* p = &b->token_copies;
  p->position = kept;
  p->origin = (int32_t*)(void*)((char*)kept + words(p->first_arrived[b->num_chunks] * b->top_k));
}

/* ---- numbers ---- */

typedef struct tables_s {
  int64_t* next_row;          /* [E_local] */
  int64_t* first_route_index; /* [W + 1] of received route indices, by source */
  sluice_exchange_arrays_t arrays;
  sluice_row_run_t* pack;               /* [n] */
  sluice_device_token_copy_run_t* runs; /* [W][n][E_local] */
} tables_t;

static sluice_status_t take_tables(sluice_binding_t* b, int is_restored, tables_t* out) {
  sluice_token_copies_t* p = &b->token_copies;
  sluice_arena_t* arena = &b->memory->token_copies;
  uint64_t n = (uint64_t)b->num_chunks, w = (uint64_t)b->world_size, l = (uint64_t)b->num_local;
  uint64_t offsets = n * (w + 1) * 8, firsts = (n + 1) * 8;
  uint64_t num_runs = w * n * l, bytes = 2 * sluice_align_up(offsets) + 2 * sluice_align_up(firsts);
  if (!is_restored) {
    bytes += sluice_align_up(l * 8) + sluice_align_up((w + 1) * 8) +
             sluice_align_up(sluice_exchange_arrays_bytes(b->world_size)) + sluice_align_up(n * sizeof *out->pack) +
             sluice_align_up(num_runs * sizeof *out->runs);
  }
  memset(out, 0, sizeof *out);
  SLUICE_TRY(sluice_arena_reset(arena, bytes, "token copies of a pass"));
  p->sent_of_rank = sluice_arena_take(arena, offsets);
  p->recv_of_rank = sluice_arena_take(arena, offsets);
  p->first_sent = sluice_arena_take(arena, firsts);
  p->first_arrived = sluice_arena_take(arena, firsts);
  if (is_restored) return SLUICE_OK;
  out->next_row = sluice_arena_take(arena, l * 8);
  out->first_route_index = sluice_arena_take(arena, (w + 1) * 8);
  out->arrays =
      sluice_exchange_arrays_in(sluice_arena_take(arena, sluice_exchange_arrays_bytes(b->world_size)), b->world_size);
  out->pack = sluice_arena_take(arena, n * sizeof *out->pack);
  out->runs = sluice_arena_take(arena, num_runs * sizeof *out->runs);
  return SLUICE_OK;
}

/* Checks numbers from a peer, which become sizes: from one token copy for K routes to one for each. */
static int fits(const sluice_binding_t* b, int32_t source, int32_t chunk) {
  int64_t routes = sluice_routes_from(b, source, chunk);
  int64_t token_copies = b->token_copies.recv_counts[(int64_t)source * b->num_chunks + chunk];
  return token_copies >= 0 && token_copies <= routes && token_copies * b->top_k >= routes;
}

static sluice_status_t finish_chunk(sluice_binding_t* b, int32_t chunk) {
  sluice_token_copies_t* p = &b->token_copies;
  int32_t w = b->world_size, self = b->moe->context->rank;
  int64_t* sent = p->sent_of_rank + (int64_t)chunk * (w + 1);
  int64_t* received = p->recv_of_rank + (int64_t)chunk * (w + 1);
  int64_t row = 0, travelling = 0, arrived = 0;
  for (int32_t r = 0; r < w; ++r) {
    if (!fits(b, r, chunk)) return sluice_token_copies_refuse(b, r);
    int64_t token_copies = p->recv_counts[(int64_t)r * b->num_chunks + chunk];
    sent[r] = row;
    received[r] = travelling;
    row += p->send_counts[(int64_t)chunk * w + r];
    if (r != self) travelling += token_copies;
    arrived += token_copies;
  }
  sent[w] = row;
  received[w] = travelling;
  p->first_sent[chunk] = b->first_token[chunk] * sluice_most_token_copies_of_token(&b->moe->shape);
  p->first_arrived[chunk + 1] = p->first_arrived[chunk] + arrived;
  p->max_chunk_remote = sluice_max(p->max_chunk_remote, sluice_max(row - (sent[self + 1] - sent[self]), travelling));
  p->max_chunk_sent = sluice_max(p->max_chunk_sent, row);
  return SLUICE_OK;
}

static sluice_status_t finish_numbers(sluice_binding_t* b) {
  sluice_token_copies_t* p = &b->token_copies;
  p->first_arrived[0] = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) SLUICE_TRY(finish_chunk(b, i));
  p->first_sent[b->num_chunks] = b->num_tokens * sluice_most_token_copies_of_token(&b->moe->shape);
  p->max_arriving = p->first_arrived[b->num_chunks];
  return SLUICE_OK;
}

/* ---- route indices ---- */

/* Describes the route indices for rank r, all chunks in sequence; returns their number. */
static int64_t pack_route_index(const sluice_binding_t* b, int32_t r, sluice_row_run_t* runs) {
  int64_t count = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    const int64_t* sent = b->sent_of_rank + (int64_t)i * (b->world_size + 1);
    runs[i] = (sluice_row_run_t){b->first_order[i] + sent[r], count, sent[r + 1] - sent[r]};
    count += runs[i].rows;
  }
  return count;
}

static sluice_status_t exchange_route_index(sluice_binding_t* b, sluice_stream_t stream, int32_t* out,
                                            tables_t* tables) {
  sluice_context_t* context = b->moe->context;
  sluice_token_copies_t* p = &b->token_copies;
  int32_t* in = p->route_index;
  for (int32_t r = 0; r < b->world_size; ++r) {
    int own = r == context->rank;
    int64_t sent = pack_route_index(b, r, tables->pack), received = 0;
    for (int32_t i = 0; i < b->num_chunks; ++i) received += sluice_routes_from(b, r, i);
    SLUICE_TRY(context->device->memory->routing->move_words(context->device, stream, tables->pack, b->num_chunks,
                                                            p->sent_route_index, own ? in : out));
    tables->arrays.send[r] = out;
    tables->arrays.recv[r] = in;
    tables->arrays.send_bytes[r] = own ? 0 : (uint64_t)sent * sizeof *out;
    tables->arrays.recv_bytes[r] = own ? 0 : (uint64_t)received * sizeof *in;
    tables->first_route_index[r] = in - p->route_index;
    p->exchanged_bytes += tables->arrays.send_bytes[r];
    out += own ? 0 : sent;
    in += received;
  }
  const sluice_exchange_t exchange = sluice_exchange_of(&tables->arrays);
  return sluice_comm_exchange_enqueue(context->comm, &exchange, stream);
}

/* ---- tables ---- */

/* The first received row of a source in the chunk: by source; with two levels by local index of the source, which is
 * that of the forwarding rank, then by node. */
static int64_t first_row_of(const sluice_binding_t* b, const int64_t* received, int32_t source) {
  if (!b->two_levels) return received[source];
  const int32_t per_node = b->moe->shape.ranks_per_node, local = source % per_node;
  int64_t row = 0;
  for (int32_t r = 0; r < b->world_size; ++r) {
    const int is_before = r % per_node < local || (r % per_node == local && r < source);
    if (is_before) row += received[r + 1] - received[r];
  }
  return row;
}

/* Describes the runs of one chunk; advances first_route_index. Weights arrive by source, then in the sender's order. */
static int64_t describe_chunk(const sluice_binding_t* b, int32_t chunk, tables_t* tables,
                              sluice_device_token_copy_run_t* runs) {
  const sluice_token_copies_t* p = &b->token_copies;
  int32_t w = b->world_size, self = b->moe->context->rank;
  const int64_t* received = p->recv_of_rank + (int64_t)chunk * (w + 1);
  int64_t own_from = p->first_sent[chunk] + p->sent_of_rank[(int64_t)chunk * (w + 1) + self];
  int64_t count = 0, token_copy = p->first_arrived[chunk], weight = 0;
  memcpy(tables->next_row, b->first_in_chunk + (int64_t)chunk * b->num_local, (size_t)b->num_local * sizeof(int64_t));
  for (int32_t r = 0; r < w; ++r) {
    int32_t token_copies = p->recv_counts[(int64_t)r * b->num_chunks + chunk];
    const int64_t first_row = r == self ? own_from : first_row_of(b, received, r);
    for (int32_t e = 0; e < b->num_local; ++e) {
      int32_t rows = sluice_recv_count(b, r, chunk, e);
      if (rows == 0) continue;
      runs[count++] = (sluice_device_token_copy_run_t){
          .rows = rows,
          .route_index = (int32_t)tables->first_route_index[r],
          .token_copies = token_copies,
          .token_copy = (int32_t)token_copy,
          .row = (int32_t)tables->next_row[e],
          .origin = (int32_t)(b->first_of_chunk[chunk] + tables->next_row[e]),
          .from = (int32_t)first_row,
          .weight = r == self ? -1 : (int32_t)weight,
      };
      tables->first_route_index[r] += rows;
      tables->next_row[e] += rows;
      if (r != self) weight += rows;
    }
    token_copy += token_copies;
  }
  return count;
}

static sluice_status_t place_token_copies(sluice_binding_t* b, sluice_stream_t stream, tables_t* tables) {
  const sluice_token_copies_t* p = &b->token_copies;
  sluice_device_t* device = b->moe->context->device;
  int64_t count = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) count += describe_chunk(b, i, tables, tables->runs + count);
  const sluice_device_arrivals_t arrivals = {
      .runs = tables->runs,
      .num_runs = count,
      .top_k = b->top_k,
      .token_copies = p->first_arrived[b->num_chunks],
      .route_index = p->route_index,
      .token = p->token,
      .position = p->position,
      .weight = p->weight,
      .origin = p->origin,
  };
  return device->memory->routing->place_token_copies(device, stream, &arrivals);
}

static sluice_status_t exchange(sluice_binding_t* b, sluice_stream_t stream) {
  sluice_token_copies_t* p = &b->token_copies;
  sluice_arena_t* arena = &b->memory->device_token_copies;
  tables_t tables;
  SLUICE_TRY(take_tables(b, 0, &tables));
  SLUICE_TRY(finish_numbers(b));
  uint64_t kept = sluice_device_token_copies_kept_bytes(b), weights = words(p->first_arrived[b->num_chunks] * b->top_k);
  SLUICE_TRY(sluice_arena_reset(arena, kept + weights + words(b->num_rows) + words(b->num_sent),
                                "token copies on the device"));
  place_kept(b, sluice_arena_take(arena, kept));
  p->weight = sluice_arena_take(arena, weights);
  p->route_index = sluice_arena_take(arena, (uint64_t)b->num_rows * sizeof *p->route_index);
  int32_t* out = sluice_arena_take(arena, (uint64_t)b->num_sent * sizeof *out);
  SLUICE_TRY(exchange_route_index(b, stream, out, &tables));
  return place_token_copies(b, stream, &tables);
}

sluice_status_t sluice_token_copies_restore_on_device(sluice_binding_t* b, void* kept) {
  tables_t tables;
  SLUICE_TRY(take_tables(b, 1, &tables));
  SLUICE_TRY(finish_numbers(b));
  place_kept(b, kept);
  return SLUICE_OK;
}

/* ---- the rest of the table ---- */

void sluice_device_token_copies_take_counts(sluice_binding_t* b) {
  sluice_arena_t* arena = &b->memory->binding;
  const uint64_t numbers = (uint64_t)b->num_chunks * (uint64_t)b->world_size;
  b->token_copies.send_counts = sluice_arena_take(arena, numbers * 4);
  b->token_copies.recv_counts = sluice_arena_take(arena, numbers * 4);
  b->counts_in = sluice_arena_take(arena, numbers * ((uint64_t)b->num_local + 1) * 4);
}

int32_t* sluice_device_token_copies_pack(const sluice_binding_t* b, int32_t r, int32_t* out) {
  for (int32_t i = 0; i < b->num_chunks; ++i) *out++ = b->token_copies.send_counts[(int64_t)i * b->world_size + r];
  return out;
}

/* Reads the received words; own counts are set already, the numbers of own token copies are not. */
void sluice_device_token_copies_unpack(sluice_binding_t* b) {
  const int32_t n = b->num_chunks, self = b->moe->context->rank;
  const int64_t words_of_rank = (int64_t)n * (b->num_local + 1);
  for (int32_t r = 0; r < b->world_size; ++r) {
    const int32_t* words = b->counts_in + words_of_rank * r;
    if (r == self) words = b->counts_out + (int64_t)n * (b->moe->first_position[r] + r);
    memcpy(b->token_copies.recv_counts + (int64_t)r * n, words, (size_t)n * sizeof *words);
    memcpy(b->recv_counts + (int64_t)r * n * b->num_local, words + n, (size_t)n * (size_t)b->num_local * sizeof *words);
  }
}

static char* save(const sluice_binding_t* b, char* at) {
  const uint64_t bytes = (uint64_t)b->num_chunks * (uint64_t)b->world_size * 4;
  memcpy(at, b->token_copies.send_counts, bytes);
  memcpy(at + bytes, b->token_copies.recv_counts, bytes);
  return at + 2 * bytes;
}

static void* behind_routes(const sluice_binding_t* b, void* kept) { return (char*)kept + sluice_routes_kept_bytes(b); }

sluice_status_t sluice_device_token_copies_keep(const sluice_binding_t* b, sluice_stream_t stream, void* kept) {
  sluice_context_t* context = b->moe->context;
  const uint64_t bytes = sluice_device_token_copies_kept_bytes(b);
  if (bytes == 0) return SLUICE_OK;
  return context->rows->copy(context, stream, behind_routes(b, kept), b->token_copies.position, bytes);
}

static sluice_status_t restore(sluice_binding_t* b, sluice_stream_t stream, int32_t* saved, void* kept) {
  (void)stream;
  b->token_copies.send_counts = saved;
  b->token_copies.recv_counts = saved + (int64_t)b->num_chunks * b->world_size;
  return sluice_token_copies_restore_on_device(b, behind_routes(b, kept));
}

const sluice_copies_t sluice_copies_in_device_memory = {.header_words = 1,
                                                        .take_counts = sluice_device_token_copies_take_counts,
                                                        .pack = sluice_device_token_copies_pack,
                                                        .unpack = sluice_device_token_copies_unpack,
                                                        .exchange = exchange,
                                                        .max_chunk_remote = sluice_token_copies_max_chunk_remote,
                                                        .max_chunk_sent = sluice_token_copies_max_chunk_sent,
                                                        .num_weighted = sluice_token_copies_num_weighted,
                                                        .save = save,
                                                        .kept_bytes = sluice_device_token_copies_kept_bytes,
                                                        .keep = sluice_device_token_copies_keep,
                                                        .restore = restore};
