// SPDX-License-Identifier: Apache-2.0
/* Tokens sent in two levels on a device with memory of its own. The device makes the tables of token copies; the host
 * reads the rows of tokens by rank from it, makes the tables of node copies, and copies the part that kernels read to
 * the device. */
#include "backend/moe/context/row_memory.h"
#include "backend/moe/routing/copies.h"
#include "backend/moe/routing/node_copies.h"
#include "backend/moe/routing/token_copies.h"

static sluice_status_t read_token_rows(sluice_binding_t* b, sluice_stream_t stream, int32_t** out_rows) {
  sluice_context_t* context = b->moe->context;
  sluice_arena_t* arena = &b->memory->scratch; /* free: counts have been taken, and the pass is not prepared yet */
  const uint64_t bytes = (uint64_t)b->num_tokens * (uint64_t)b->world_size * sizeof **out_rows;
  SLUICE_TRY(sluice_arena_reset(arena, bytes, "tokens by rank"));
  *out_rows = sluice_arena_take(arena, bytes);
  return context->rows->read(context, stream, b->token_copies.position_of_token, *out_rows, bytes);
}

/* Copies a table of `count` words into the device arena. The host's arena keeps its own until the next pass. */
static sluice_status_t send(sluice_binding_t* b, sluice_stream_t stream, int64_t count, int32_t** table) {
  sluice_context_t* context = b->moe->context;
  const uint64_t bytes = (uint64_t)count * sizeof **table;
  int32_t* there = sluice_arena_take(&b->memory->device_node_copies, bytes);
  SLUICE_TRY(context->rows->copy(context, stream, there, *table, bytes));
  *table = there;
  return SLUICE_OK;
}

static sluice_status_t send_tables(sluice_binding_t* b, sluice_stream_t stream) {
  sluice_node_copies_t* p = &b->node_copies;
  const int32_t n = b->num_chunks;
  const int64_t sent = p->first_sent[n], forwards = p->first_forward[n];
  const uint64_t bytes =
      sluice_node_copies_on_device_bytes(&b->moe->shape, b->num_tokens, sent, p->num_arrived, forwards);
  SLUICE_TRY(sluice_arena_reset(&b->memory->device_node_copies, bytes, "node copies on the device"));
  SLUICE_TRY(send(b, stream, sent, &p->token));
  SLUICE_TRY(send(b, stream, b->num_tokens * p->num_nodes, &p->position_of_token));
  SLUICE_TRY(send(b, stream, p->num_arrived * p->ranks_per_node, &p->part));
  return send(b, stream, forwards, &p->origin);
}

/* ---- the table ---- */

static sluice_status_t exchange(sluice_binding_t* b, sluice_stream_t stream) {
  int32_t* token_rows = NULL;
  SLUICE_TRY(read_token_rows(b, stream, &token_rows)); /* before work is enqueued that waits for other ranks */
  SLUICE_TRY(sluice_copies_in_device_memory.exchange(b, stream));
  SLUICE_TRY(sluice_node_copies_exchange(b, token_rows));
  return send_tables(b, stream);
}

static char* save(const sluice_binding_t* b, char* at) {
  return sluice_node_copies_save(b, sluice_copies_in_device_memory.save(b, at));
}

static sluice_status_t restore(sluice_binding_t* b, sluice_stream_t stream, int32_t* saved, void* kept) {
  int32_t* token_rows = NULL;
  SLUICE_TRY(sluice_copies_in_device_memory.restore(b, stream, saved, kept));
  SLUICE_TRY(read_token_rows(b, stream, &token_rows));
  SLUICE_TRY(sluice_node_copies_restore(b, saved, token_rows));
  return send_tables(b, stream);
}

const sluice_copies_t sluice_copies_by_node_on_device = {.header_words = 1,
                                                         .take_counts = sluice_device_token_copies_take_counts,
                                                         .pack = sluice_device_token_copies_pack,
                                                         .unpack = sluice_device_token_copies_unpack,
                                                         .exchange = exchange,
                                                         .max_chunk_remote = sluice_node_copies_max_chunk_remote,
                                                         .max_chunk_sent = sluice_node_copies_max_chunk_sent,
                                                         .max_chunk_node = sluice_node_copies_max_chunk_node,
                                                         .num_weighted = sluice_token_copies_num_weighted,
                                                         .save = save,
                                                         .kept_bytes = sluice_device_token_copies_kept_bytes,
                                                         .keep = sluice_device_token_copies_keep,
                                                         .restore = restore};
