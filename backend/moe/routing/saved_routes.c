// SPDX-License-Identifier: Apache-2.0
/* Saves and restores a binding: header, send_counts, recv_counts, the data of routes and copies, first token and
 * policies of chunks. */
#include "backend/moe/routing/saved_routes.h"

#include <assert.h>
#include <string.h>

#include "backend/moe/routing/binding_arrays.h"
#include "backend/moe/routing/copies.h"

#define META_MAGIC      0x51ce4d45u
#define META_MAGIC_USED 0x51ce5a5au

typedef struct meta_header_s {
  uint32_t magic;
  int32_t num_chunks;
  uint64_t fingerprint;
  int16_t chunks_by_experts;
  int16_t deduplicate;
  int32_t num_node_copies; /* received, own ones included; -1 with one level */
  int64_t num_tokens;
  int64_t num_sent;
  int64_t num_rows;
  uint64_t adapters;
  uint64_t saved_bytes[SLUICE_SAVED_COUNT]; /* least bytes of the other saved buffers */
  uint64_t checksum;                        /* of everything after the header, and of the header with this member 0 */
} meta_header_t;
static_assert(sizeof(meta_header_t) == SLUICE_META_HEADER_BYTES, "sizes of saved bindings go by it");

/* Positions and orders become addresses, so damaged bytes must be detected. Four independent sums of eight bytes each
 * keep up with memory. */
static uint64_t mix(uint64_t hash, uint64_t word) { return (hash ^ word) * 0x9e3779b97f4a7c15u; }

static uint64_t checksum_of(meta_header_t header, const char* body, uint64_t bytes) {
  uint64_t sums[4] = {1, 2, 3, 4}, words[4], head[sizeof header / sizeof(uint64_t)];
  uint64_t i = 0;
  for (; i + sizeof words <= bytes; i += sizeof words) {
    memcpy(words, body + i, sizeof words);
    for (int lane = 0; lane < 4; ++lane) sums[lane] = mix(sums[lane], words[lane]), sums[lane] ^= sums[lane] >> 29;
  }
  memset(words, 0, sizeof words);
  if (i < bytes) memcpy(words, body + i, bytes - i);
  for (int lane = 0; lane < 4; ++lane) sums[lane] = mix(sums[lane], words[lane]);
  header.checksum = 0;
  header.magic = META_MAGIC;
  memcpy(head, &header, sizeof head);
  uint64_t hash = mix(mix(mix(mix(bytes, sums[0]), sums[1]), sums[2]), sums[3]);
  for (size_t word = 0; word < sizeof head / sizeof head[0]; ++word) hash = mix(hash ^ (hash >> 31), head[word]);
  return hash ^ (hash >> 31);
}

static int64_t node_copies_of(const sluice_binding_t* b) { return b->two_levels ? b->node_copies.num_arrived : -1; }

uint64_t sluice_binding_meta_bytes(const sluice_binding_t* b) {
  const sluice_shape_t shape = sluice_binding_shape(b);
  return sluice_binding_meta_bytes_of(&shape, b->num_chunks, b->num_tokens, b->num_sent, b->num_rows) +
         sluice_binding_meta_node_copies_bytes(&shape, b->num_chunks, node_copies_of(b));
}

static char* put(char* at, const void* data, uint64_t bytes) {
  if (bytes > 0) memcpy(at, data, bytes);
  return at + bytes;
}

void sluice_binding_save(const sluice_binding_t* b, const uint64_t* saved_bytes, void* meta) {
  meta_header_t header;
  memset(&header, 0, sizeof header);
  header.magic = META_MAGIC;
  header.num_chunks = b->num_chunks;
  header.fingerprint = b->moe->fingerprint;
  header.chunks_by_experts = (int16_t)b->chunks_by_experts;
  header.deduplicate = b->deduplicate;
  header.num_node_copies = (int32_t)node_copies_of(b);
  header.num_tokens = b->num_tokens;
  header.num_sent = b->num_sent;
  header.num_rows = b->num_rows;
  header.adapters = b->adapters;
  memcpy(header.saved_bytes, saved_bytes, sizeof header.saved_bytes);
  uint64_t n = (uint64_t)b->num_chunks;
  char* const body = (char*)meta + sizeof header;
  char* at = body;
  at = put(at, b->send_counts, n * (uint64_t)b->moe->shape.config.num_experts * 4);
  at = put(at, b->recv_counts, n * (uint64_t)b->world_size * (uint64_t)b->num_local * 4);
  at = sluice_routes_save(b, at);
  at = sluice_copies_save(b, at);
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    const int32_t chunk[] = {(int32_t)b->first_token[i], b->restore_input[i] | b->restore_pre_activation[i] << 8 |
                                                             b->wgrad_mode << 16 | b->grouped << 22 |
                                                             b->shares_act << 23 | b->plan << 24};
    at = put(at, chunk, sizeof chunk);
  }
  header.checksum = checksum_of(header, body, sluice_binding_meta_bytes(b) - sizeof header);
  put(meta, &header, sizeof header);
}

void sluice_binding_use_up(void* meta) {
  const uint32_t magic = META_MAGIC_USED;
  memcpy(meta, &magic, sizeof magic);
}

int sluice_binding_is_used_up(const void* meta) {
  uint32_t magic = 0;
  memcpy(&magic, meta, sizeof magic);
  return magic == META_MAGIC_USED;
}

/* The size that a header describes; its numbers have been checked. */
static uint64_t meta_bytes_behind(const sluice_moe_t* moe, const meta_header_t* header) {
  sluice_shape_t shape = moe->shape;
  sluice_shape_take_deduplication(&shape, header->deduplicate);
  return sluice_binding_meta_bytes_of(&shape, header->num_chunks, header->num_tokens, header->num_sent,
                                      header->num_rows) +
         sluice_binding_meta_node_copies_bytes(&shape, header->num_chunks, header->num_node_copies);
}

/* Whether a pass of the layer can have this SLUICE_DEDUPLICATE_* and this number of node copies (-1: none). */
static int may_have_copies(const sluice_shape_t* shape, int32_t deduplicate, int32_t num_node_copies) {
  const int by_node = deduplicate == SLUICE_DEDUPLICATE_NODES;
  if (by_node ? num_node_copies < 0 : num_node_copies != -1) return 0;
  if (!sluice_shape_travel_is_open(shape)) return deduplicate == sluice_shape_deduplication(shape);
  if (deduplicate == SLUICE_DEDUPLICATE_NONE) return sluice_shape_copies_are_open(shape);
  return by_node ? shape->ranks_per_node > 0 : deduplicate == SLUICE_DEDUPLICATE_RANKS;
}

static sluice_status_t read_header(const sluice_moe_t* moe, const void* meta, uint64_t meta_bytes,
                                   meta_header_t* header) {
  int whole = meta != NULL && meta_bytes >= sizeof *header;
  if (whole) memcpy(header, meta, sizeof *header);
  if (!whole || (header->magic != META_MAGIC && header->magic != META_MAGIC_USED) ||
      header->fingerprint != moe->fingerprint || header->num_chunks < 1 || header->num_chunks > SLUICE_MAX_CHUNKS ||
      header->num_tokens < 0 || header->num_tokens > INT32_MAX / moe->shape.config.top_k || header->num_sent < 0 ||
      header->num_sent > sluice_binding_room(&moe->shape, header->num_chunks, header->num_tokens) ||
      header->num_rows < 0 || header->num_rows > INT32_MAX ||
      !may_have_copies(&moe->shape, header->deduplicate, header->num_node_copies) ||
      (moe->capacity != NULL && header->num_chunks != moe->shape.config.num_chunks) ||
      meta_bytes < meta_bytes_behind(moe, header)) {
    return SLUICE_FAIL(
        SLUICE_E_INVALID_ARGUMENT,
        "layer %d: the saved buffer META (%llu bytes) was not written by a forward of this layer with the present "
        "placement of experts; pass the buffers of the step unchanged and in order, before experts are replaced",
        moe->shape.config.layer_id, (unsigned long long)meta_bytes);
  }
  uint64_t body_bytes = meta_bytes_behind(moe, header) - sizeof *header;
  if (header->checksum != checksum_of(*header, (const char*)meta + sizeof *header, body_bytes)) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "layer %d: the saved buffer META is damaged: it changed after the forward that wrote it",
                       moe->shape.config.layer_id);
  }
  return SLUICE_OK;
}

/* Reads boundaries and policies of chunks; the checksum has passed, so only another layer's bytes can be wrong. */
static sluice_status_t read_chunks(sluice_binding_t* b, const int32_t* chunks) {
  int64_t last = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    int64_t first = chunks[(size_t)i * 2];
    if (first < last || first > b->num_tokens || (i == 0 && first != 0)) {
      return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                         "layer %d: the saved buffer META is damaged: its chunks are not in order",
                         b->moe->shape.config.layer_id);
    }
    b->first_token[i] = last = first;
    b->restore_input[i] = (uint8_t)(chunks[(size_t)i * 2 + 1] & 0xff);
    b->restore_pre_activation[i] = (uint8_t)(chunks[(size_t)i * 2 + 1] >> 8 & 0xff);
    b->wgrad_mode = (uint8_t)(chunks[(size_t)i * 2 + 1] >> 16 & 0x3f);
    b->grouped = (uint8_t)(chunks[(size_t)i * 2 + 1] >> 22 & 1);
    b->shares_act = (uint8_t)(chunks[(size_t)i * 2 + 1] >> 23 & 1);
    b->plan = (uint8_t)(chunks[(size_t)i * 2 + 1] >> 24 & 0xff);
  }
  b->first_token[b->num_chunks] = b->num_tokens;
  return SLUICE_OK;
}

sluice_status_t sluice_binding_restore(sluice_moe_t* moe, sluice_stream_t stream, const void* meta, uint64_t meta_bytes,
                                       void* kept, sluice_binding_t* b) {
  meta_header_t header;
  SLUICE_TRY(read_header(moe, meta, meta_bytes, &header));
  b->deduplicate = (uint8_t)header.deduplicate;
  sluice_binding_init(b, moe, header.num_chunks, header.num_tokens);
  b->chunks_by_experts = header.chunks_by_experts != 0;
  b->num_sent = header.num_sent;
  b->adapters = header.adapters;
  if (b->two_levels) b->node_copies.num_arrived = header.num_node_copies;
  SLUICE_TRY(sluice_arena_reset(&b->memory->binding,
                                sluice_binding_bytes_of(&moe->shape, header.num_chunks, header.num_sent, 0, 0),
                                "offsets of a pass"));
  sluice_binding_take_offsets(b, header.num_sent);
  /* Counts and orders are read in META, without a copy. */
  b->send_counts = (int32_t*)((const char*)meta + sizeof header);
  b->recv_counts = b->send_counts + (int64_t)b->num_chunks * moe->shape.config.num_experts;
  const int32_t* chunks = sluice_routes_find(b, b->recv_counts + (int64_t)b->world_size * b->num_chunks * b->num_local);
  int32_t* copies = (int32_t*)(uintptr_t)chunks;
  const sluice_shape_t shape = sluice_binding_shape(b);
  chunks += sluice_binding_meta_token_copies_bytes(&shape, header.num_chunks, header.num_rows) / sizeof *chunks;
  chunks += sluice_binding_meta_node_copies_bytes(&shape, header.num_chunks, header.num_node_copies) / sizeof *chunks;
  SLUICE_TRY(read_chunks(b, chunks));
  sluice_routes_place(b, kept);
  int64_t first = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    b->first_sent[i] = first;
    for (int32_t place = 0; place < moe->shape.config.num_experts; ++place) first += sluice_send_count(b, i, place);
  }
  b->first_sent[b->num_chunks] = first;
  if (first == b->num_sent) SLUICE_TRY(sluice_binding_finish(b));
  if (first != b->num_sent || b->num_rows != header.num_rows) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "layer %d: the saved buffer META is damaged: its counts do not add up",
                       moe->shape.config.layer_id);
  }
  return sluice_copies_restore(b, stream, copies, kept);
}

sluice_status_t sluice_binding_peek(const sluice_moe_t* moe, const void* meta, uint64_t meta_bytes,
                                    int32_t* out_num_chunks, uint64_t* out_saved_bytes, int64_t* out_rows_per_expert) {
  meta_header_t header;
  SLUICE_TRY(read_header(moe, meta, meta_bytes, &header));
  if (out_num_chunks != NULL) *out_num_chunks = header.num_chunks;
  if (out_saved_bytes != NULL) memcpy(out_saved_bytes, header.saved_bytes, sizeof header.saved_bytes);
  if (out_rows_per_expert == NULL) return SLUICE_OK;
  const int32_t* counts =
      (const int32_t*)((const char*)meta + sizeof header) + (int64_t)header.num_chunks * moe->shape.config.num_experts;
  memset(out_rows_per_expert, 0, (size_t)moe->shape.num_local * sizeof *out_rows_per_expert);
  for (int64_t s = 0; s < (int64_t)moe->context->world_size * header.num_chunks; ++s) {
    for (int32_t e = 0; e < moe->shape.num_local; ++e) out_rows_per_expert[e] += counts[s * moe->shape.num_local + e];
  }
  return SLUICE_OK;
}
