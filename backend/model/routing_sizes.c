// SPDX-License-Identifier: Apache-2.0
#include "backend/model/routing_sizes.h"

#include "backend/base/alloc.h"
#include "backend/base/math.h"

static uint64_t words(int64_t count) { return sluice_align_up((uint64_t)count * sizeof(int32_t)); }

/* ---- arrays of a pass in host memory ---- */

int64_t sluice_binding_room(const sluice_shape_t* shape, int32_t num_chunks, int64_t num_tokens) {
  int64_t capacity = sluice_shape_capacity(shape);
  return capacity > 0 ? num_chunks * capacity * shape->config.num_experts : num_tokens * shape->config.top_k;
}

uint64_t sluice_binding_bytes_of(const sluice_shape_t* shape, int32_t num_chunks, int64_t num_sent, int64_t num_routes,
                                 int with_orders) {
  uint64_t n = (uint64_t)num_chunks, w = (uint64_t)shape->world_size, l = (uint64_t)shape->num_local;
  uint64_t experts = (uint64_t)shape->config.num_experts;
  uint64_t bytes =
      4 * sluice_align_up((n + 1) * 8) + 2 * sluice_align_up(n * (w + 1) * 8) + 3 * sluice_align_up(n * l * 8);
  if (shape->on_device_memory) {
    bytes += sluice_align_up((n + 1) * 8); /* first_order */
    num_sent = num_routes = 0;
  }
  bytes += sluice_align_up((uint64_t)num_sent * 4); /* order_token */
  if (with_orders) {
    uint64_t token_copies = sluice_shape_has_device_token_copies(shape) ? w : 0; /* their numbers per chunk */
    if (token_copies > 0) bytes += 2 * sluice_align_up(n * w * 4) + sluice_align_up(w * n * (l + 1) * 4);
    bytes += sluice_align_up(n * experts * 4) + sluice_align_up(n * (experts + token_copies) * 4) +
             sluice_align_up(w * n * l * 4) + sluice_align_up((uint64_t)num_sent * 4) +
             sluice_align_up((uint64_t)num_routes * 4);
  }
  return bytes;
}

uint64_t sluice_binding_arena_bytes(const sluice_shape_t* shape, int32_t num_chunks, int64_t num_tokens) {
  const int64_t room = sluice_binding_room(shape, num_chunks, num_tokens);
  return sluice_binding_bytes_of(shape, num_chunks, room, num_tokens * shape->config.top_k, 1) +
         sluice_align_up((uint64_t)shape->config.num_experts * 8);
}

static uint64_t counts_in_meta(const sluice_shape_t* shape, int32_t num_chunks) {
  return (uint64_t)num_chunks *
         ((uint64_t)shape->config.num_experts + (uint64_t)shape->world_size * (uint64_t)shape->num_local);
}

uint64_t sluice_binding_meta_token_copies_bytes(const sluice_shape_t* shape, int32_t num_chunks, int64_t num_rows) {
  if (!sluice_shape_is_deduplicated(shape)) return 0;
  if (!shape->on_device_memory) return (uint64_t)num_rows * sizeof(int32_t);
  return 2 * (uint64_t)num_chunks * (uint64_t)shape->world_size * sizeof(int32_t);
}

uint64_t sluice_binding_meta_node_copies_bytes(const sluice_shape_t* shape, int32_t num_chunks, int64_t arrived) {
  if (arrived < 0) return 0;
  const uint64_t nodes = (uint64_t)(shape->world_size / shape->ranks_per_node);
  return nodes * (uint64_t)num_chunks * sizeof(int32_t) + (uint64_t)arrived * sizeof(uint64_t);
}

uint64_t sluice_binding_meta_bytes_of(const sluice_shape_t* shape, int32_t num_chunks, int64_t num_tokens,
                                      int64_t num_sent, int64_t num_rows) {
  uint64_t orders = shape->on_device_memory ? 0 : (uint64_t)num_sent + (uint64_t)(num_tokens * shape->config.top_k);
  return SLUICE_META_HEADER_BYTES + 4 * (counts_in_meta(shape, num_chunks) + orders + 2 * (uint64_t)num_chunks) +
         sluice_binding_meta_token_copies_bytes(shape, num_chunks, num_rows);
}

/* ---- a device with memory of its own ---- */

int64_t sluice_most_token_copies_of_token(const sluice_shape_t* shape) {
  return shape->config.top_k < shape->world_size ? shape->config.top_k : shape->world_size;
}

uint64_t sluice_device_order_bytes(const sluice_shape_t* shape, int64_t num_tokens) {
  return words(sluice_binding_room(shape, shape->config.num_chunks, num_tokens));
}

uint64_t sluice_device_token_copy_tokens_bytes(const sluice_shape_t* shape, int64_t num_tokens) {
  if (!sluice_shape_has_device_token_copies(shape)) return 0;
  return words(num_tokens * sluice_most_token_copies_of_token(shape));
}

uint64_t sluice_device_token_copy_table_bytes(const sluice_shape_t* shape, int64_t num_tokens) {
  if (!sluice_shape_has_device_token_copies(shape)) return 0;
  return words(num_tokens * shape->world_size);
}

uint64_t sluice_binding_routes_bytes(const sluice_shape_t* shape, int64_t num_tokens) {
  if (!shape->on_device_memory) return 0;
  return 2 * sluice_device_order_bytes(shape, num_tokens) + words(num_tokens * shape->config.top_k) +
         sluice_device_token_copy_tokens_bytes(shape, num_tokens) +
         sluice_device_token_copy_table_bytes(shape, num_tokens);
}

uint64_t sluice_device_counts_bytes(const sluice_shape_t* shape, int32_t num_chunks) {
  uint64_t count = (uint64_t)shape->config.num_experts + 1;
  if (sluice_shape_has_device_token_copies(shape)) count += (uint64_t)shape->world_size + 1;
  return (uint64_t)num_chunks * count * sizeof(int32_t);
}

uint64_t sluice_device_route_index_bytes(const sluice_shape_t* shape, int64_t num_tokens) {
  if (!sluice_shape_has_device_token_copies(shape)) return 0;
  return words(num_tokens * shape->config.top_k);
}

uint64_t sluice_device_token_copy_scratch_bytes(const sluice_shape_t* shape, const sluice_device_scratch_t* scratch,
                                                int64_t num_tokens) {
  if (!sluice_shape_has_device_token_copies(shape)) return 0;
  return scratch->token_copy_bytes(num_tokens * shape->config.top_k, shape->config.num_experts, shape->world_size);
}

int64_t sluice_device_block_routes(const sluice_shape_t* shape, int32_t num_blocks) {
  return (int64_t)num_blocks * (shape->config.num_experts + 1);
}

uint64_t sluice_device_block_counts_bytes(const sluice_shape_t* shape, int32_t num_blocks) {
  int64_t token_copies =
      sluice_shape_has_device_token_copies(shape) ? (int64_t)num_blocks * (shape->world_size + 1) : 0;
  return (uint64_t)(sluice_device_block_routes(shape, num_blocks) + token_copies) * sizeof(int32_t);
}

uint64_t sluice_binding_device_bytes(const sluice_shape_t* shape, const sluice_device_scratch_t* scratch,
                                     int32_t num_chunks, int64_t num_tokens) {
  int32_t num_experts = shape->config.num_experts;
  uint64_t token_copy_scratch = sluice_device_token_copy_scratch_bytes(shape, scratch, num_tokens);
  uint64_t counting = sluice_align_up(sluice_device_block_counts_bytes(shape, SLUICE_PLAN_BLOCKS)) +
                      sluice_align_up(scratch->route_bytes(0, num_experts)) + token_copy_scratch;
  uint64_t routing = sluice_binding_routes_bytes(shape, num_tokens) +
                     sluice_align_up(sluice_device_counts_bytes(shape, num_chunks)) +
                     sluice_align_up(scratch->route_bytes(num_tokens * shape->config.top_k, num_experts)) +
                     sluice_device_route_index_bytes(shape, num_tokens) + token_copy_scratch;
  if (sluice_shape_capacity(shape) > 0) return sluice_align_up(routing); /* no counts are read */
  return sluice_align_up(counting > routing ? counting : routing);
}

/* ---- token copies ---- */

uint64_t sluice_token_copies_bytes(const sluice_shape_t* shape, const sluice_token_copies_size_t* size,
                                   int is_restored) {
  uint64_t n = (uint64_t)size->num_chunks, w = (uint64_t)shape->world_size, k = (uint64_t)shape->config.top_k;
  uint64_t sent = (uint64_t)size->sent, rows = (uint64_t)size->rows;
  uint64_t bytes = 2 * sluice_align_up(n * (w + 1) * 8) + 2 * sluice_align_up((n + 1) * 8) + sluice_align_up(sent * 4) +
                   sluice_align_up((uint64_t)size->tokens * w * 4) + sluice_align_up((uint64_t)size->arriving * k * 4) +
                   sluice_align_up(rows * 4) + sluice_align_up((uint64_t)shape->num_local * 8) + sluice_align_up(w * 8);
  if (is_restored) return bytes;
  return bytes + sluice_align_up(sent * 4) + sluice_align_up(rows * 4) +
         sluice_align_up(w * SLUICE_EXCHANGE_ARRAYS_BYTES);
}

/* In the order of take_tables in backend/moe/routing/node_copies.c. */
uint64_t sluice_node_copies_bytes(const sluice_shape_t* shape, const sluice_node_copies_size_t* size) {
  const uint64_t n = (uint64_t)size->num_chunks, w = (uint64_t)shape->world_size;
  const uint64_t per_node = (uint64_t)shape->ranks_per_node, nodes = w / per_node;
  const uint64_t forwards = (uint64_t)size->arriving * sluice_min_u64(per_node, (uint64_t)shape->config.top_k);
  uint64_t bytes = 2 * sluice_align_up(n * (nodes + 1) * 8) + 2 * sluice_align_up(n * (w + 1) * 8) +
                   3 * sluice_align_up((n + 1) * 8) + sluice_align_up(w * 8);
  bytes += sluice_align_up((uint64_t)size->sent * 4) + sluice_align_up((uint64_t)size->sent * 8) +
           sluice_align_up((uint64_t)size->tokens * nodes * 4);
  bytes += sluice_align_up((uint64_t)size->arriving * 8) + sluice_align_up((uint64_t)size->arriving * per_node * 4) +
           sluice_align_up(forwards * 4);
  if (size->message == 0) return bytes;
  return bytes + 2 * sluice_align_up(nodes * (uint64_t)size->message) +
         sluice_align_up(w * SLUICE_EXCHANGE_ARRAYS_BYTES);
}

uint64_t sluice_node_copies_on_device_bytes(const sluice_shape_t* shape, int64_t tokens, int64_t sent, int64_t arrived,
                                            int64_t forwards) {
  const int64_t nodes = shape->world_size / shape->ranks_per_node;
  return words(sent) + words(tokens * nodes) + words(arrived * shape->ranks_per_node) + words(forwards);
}

/* Position, then origin. */
uint64_t sluice_token_copies_kept_bytes_of(const sluice_shape_t* shape, int64_t arriving, int64_t rows) {
  if (!sluice_shape_has_device_token_copies(shape)) return 0;
  return words(arriving * shape->config.top_k) + words(rows);
}

/* Position and origin, indices of weights, and route indices received and sent. */
uint64_t sluice_token_copies_on_device_bytes(const sluice_shape_t* shape, int64_t tokens, int64_t arriving,
                                             int64_t rows) {
  if (!sluice_shape_has_device_token_copies(shape)) return 0;
  return sluice_token_copies_kept_bytes_of(shape, arriving, rows) + words(arriving * shape->config.top_k) +
         words(rows) + words(tokens * shape->config.top_k);
}
