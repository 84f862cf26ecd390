#include "backend/moe/binding.h"

#include <limits.h>
#include <string.h>

#include "backend/moe/cut_rows.h"
#include "backend/moe/plan.h"
#include "backend/moe/route_ids.h"

#define META_MAGIC      0x51ce4d45u
#define META_MAGIC_USED 0x51ce5a5au

typedef struct meta_header_s {
  uint32_t magic;
  int32_t num_chunks;
  uint64_t fingerprint;
  int64_t cut_rows;
  int64_t num_tokens;
  int64_t num_sent;
  int64_t num_rows;
  uint64_t saved_bytes[SLUICE_SAVED_COUNT]; /* what the other saved buffers must have at least */
  uint64_t checksum;                        /* of everything behind the header, and of the header with this member 0 */
} meta_header_t;

/* Positions and orders become addresses, so that damaged bytes must not pass. Four independent sums of eight bytes each
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

/* ---- where the arrays lie ---- */

/* num_sent: rows of the sent order, places that no route takes included. */
static uint64_t arena_bytes(const sluice_binding_t* b, int64_t num_sent, int64_t num_routes, int with_orders) {
  uint64_t n = (uint64_t)b->num_chunks, w = (uint64_t)b->world_size, l = (uint64_t)b->num_local;
  uint64_t experts = (uint64_t)b->moe->config.num_experts;
  uint64_t bytes =
      4 * sluice_align_up((n + 1) * 8) + 2 * sluice_align_up(n * (w + 1) * 8) + 3 * sluice_align_up(n * l * 8);
  if (sluice_is_far(b->moe)) {
    bytes += sluice_align_up((n + 1) * 8); /* first_order */
    num_sent = num_routes = 0;
  }
  bytes += sluice_align_up((uint64_t)num_sent * 4); /* order_token */
  if (with_orders) {
    bytes += 2 * sluice_align_up(n * experts * 4) + sluice_align_up(w * n * l * 4) +
             sluice_align_up((uint64_t)num_sent * 4) + sluice_align_up((uint64_t)num_routes * 4);
  }
  return bytes;
}

static void take_offsets(sluice_binding_t* b, int64_t num_sent) {
  sluice_arena_t* arena = &b->moe->context->binding;
  uint64_t n = (uint64_t)b->num_chunks, w = (uint64_t)b->world_size, l = (uint64_t)b->num_local;
  b->first_token = sluice_arena_take(arena, (n + 1) * 8);
  b->first_sent = sluice_arena_take(arena, (n + 1) * 8);
  b->first_of_chunk = sluice_arena_take(arena, (n + 1) * 8);
  b->first_returned = sluice_arena_take(arena, (n + 1) * 8);
  b->sent_of_rank = sluice_arena_take(arena, n * (w + 1) * 8);
  b->recv_of_rank = sluice_arena_take(arena, n * (w + 1) * 8);
  b->rows_of_expert = sluice_arena_take(arena, n * l * 8);
  b->first_in_chunk = sluice_arena_take(arena, n * l * 8);
  b->first_in_pass = sluice_arena_take(arena, n * l * 8);
  if (sluice_is_far(b->moe)) {
    b->first_order = sluice_arena_take(arena, (n + 1) * 8);
  } else {
    b->first_order = b->first_sent;
    b->order_token = sluice_arena_take(arena, (uint64_t)num_sent * 4);
  }
}

/* Rows that the sent orders of a pass have room for: at most one per route, under ceilings always the same. */
static int64_t room_of(const sluice_moe_t* moe, int32_t num_chunks, int64_t num_tokens) {
  int64_t ceiling = sluice_layer_ceiling(moe);
  return ceiling > 0 ? num_chunks * ceiling * moe->config.num_experts : num_tokens * moe->config.top_k;
}

static void init(sluice_binding_t* b, const sluice_moe_t* moe, int32_t num_chunks, int64_t num_tokens) {
  memset(b, 0, sizeof *b);
  b->moe = moe;
  b->num_chunks = num_chunks;
  b->world_size = moe->context->world_size;
  b->num_local = moe->num_local;
  b->top_k = moe->config.top_k;
  b->num_tokens = num_tokens;
}

static void cut_tokens(sluice_binding_t* b) {
  for (int32_t i = 0; i <= b->num_chunks; ++i) b->first_token[i] = b->num_tokens * i / b->num_chunks;
}

/* ---- routing ---- */

/* Counts per chunk and place; leaves each route's place in `position`. */
static sluice_status_t count_routes(sluice_binding_t* b, const sluice_tensor_t* expert_ids) {
  sluice_id_reader_t reader = sluice_id_reader(expert_ids);
  int32_t num_experts = b->moe->config.num_experts;
  memset(b->send_counts, 0, (size_t)b->num_chunks * (size_t)num_experts * sizeof(int32_t));
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    int32_t* counts = b->send_counts + (int64_t)i * num_experts;
    for (int64_t t = b->first_token[i]; t < b->first_token[i + 1]; ++t) {
      for (int32_t k = 0; k < b->top_k; ++k) {
        int32_t place = 0;
        SLUICE_TRY(sluice_place_of_route(b->moe, &reader, t, k, &place));
        b->position[t * b->top_k + k] = place;
        if (place >= 0) ++counts[place];
      }
    }
  }
  return SLUICE_OK;
}

/* Turns places into rows of the sent order: a counting sort that keeps (token, k) order within a place. */
static void order_routes(sluice_binding_t* b, int64_t* cursor) {
  int32_t num_experts = b->moe->config.num_experts;
  int64_t first = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    const int32_t* counts = b->send_counts + (int64_t)i * num_experts;
    b->first_sent[i] = first;
    int64_t row = 0;
    for (int32_t place = 0; place < num_experts; ++place) {
      cursor[place] = row;
      row += counts[place];
    }
    for (int64_t route = b->first_token[i] * b->top_k; route < b->first_token[i + 1] * b->top_k; ++route) {
      int32_t place = b->position[route];
      if (place < 0) continue;
      int64_t at = cursor[place]++;
      b->position[route] = (int32_t)at;
      b->order[first + at] = (int32_t)route;
    }
    first += row;
  }
  b->first_sent[b->num_chunks] = first;
  b->num_sent = first;
}

uint64_t sluice_binding_arena_bytes(const sluice_moe_t* moe, int32_t num_chunks, int64_t num_tokens) {
  sluice_binding_t b;
  init(&b, moe, num_chunks, num_tokens);
  return arena_bytes(&b, room_of(moe, num_chunks, num_tokens), num_tokens * moe->config.top_k, 1) +
         sluice_align_up((uint64_t)moe->config.num_experts * 8);
}

static sluice_status_t check_num_routes(const sluice_moe_t* moe, int64_t num_tokens) {
  int64_t num_routes = num_tokens * moe->config.top_k;
  if (num_routes <= INT32_MAX) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "layer %d: %lld tokens with %d routes each are more than 2^31 routes",
                     moe->config.layer_id, (long long)num_tokens, moe->config.top_k);
}

/* The arrays of a binding, and where its chunks begin. out_cursor: [E]. */
static sluice_status_t take_arrays(sluice_moe_t* moe, int64_t num_tokens, int32_t num_chunks,
                                   const int64_t* first_token, sluice_binding_t* b, int64_t** out_cursor) {
  int64_t num_routes = num_tokens * moe->config.top_k;
  init(b, moe, num_chunks, num_tokens);
  SLUICE_TRY(check_num_routes(moe, num_tokens));
  uint64_t num_experts = (uint64_t)moe->config.num_experts;
  uint64_t bytes = sluice_binding_arena_bytes(moe, num_chunks, num_tokens);
  SLUICE_TRY(sluice_arena_reset(&moe->context->binding, bytes, "routes and offsets of a pass"));
  sluice_arena_t* arena = &moe->context->binding;
  int64_t room = room_of(moe, num_chunks, num_tokens);
  take_offsets(b, room);
  b->send_counts = sluice_arena_take(arena, (uint64_t)num_chunks * num_experts * 4);
  b->recv_counts =
      sluice_arena_take(arena, (uint64_t)b->world_size * (uint64_t)num_chunks * (uint64_t)b->num_local * 4);
  b->counts_out = sluice_arena_take(arena, (uint64_t)num_chunks * num_experts * 4);
  if (!sluice_is_far(moe)) {
    b->order = sluice_arena_take(arena, (uint64_t)room * 4);
    b->position = sluice_arena_take(arena, (uint64_t)num_routes * 4);
  }
  *out_cursor = sluice_arena_take(arena, num_experts * 8);
  if (first_token == NULL) {
    cut_tokens(b);
  } else {
    memcpy(b->first_token, first_token, (size_t)(num_chunks + 1) * sizeof *first_token);
  }
  return SLUICE_OK;
}

/* What this rank sends to itself is known already. */
static void receive_own(sluice_binding_t* b) {
  const sluice_moe_t* moe = b->moe;
  const int32_t own = moe->first_place[moe->context->rank];
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    memcpy(b->recv_counts + ((int64_t)moe->context->rank * b->num_chunks + i) * b->num_local,
           b->send_counts + (int64_t)i * (int64_t)moe->config.num_experts + own,
           (size_t)b->num_local * sizeof(int32_t));
  }
}

sluice_status_t sluice_binding_route(sluice_moe_t* moe, const sluice_tensor_t* expert_ids, int32_t num_chunks,
                                     const int64_t* first_token, sluice_binding_t* b) {
  int64_t* cursor = NULL;
  SLUICE_TRY(take_arrays(moe, expert_ids->shape[0], num_chunks, first_token, b, &cursor));
  SLUICE_TRY(count_routes(b, expert_ids));
  order_routes(b, cursor);
  receive_own(b);
  return SLUICE_OK;
}

sluice_status_t sluice_binding_route_rows(sluice_moe_t* moe, const sluice_tensor_t* expert_ids, int32_t num_chunks,
                                          sluice_binding_t* b) {
  int64_t* counts = NULL;
  int64_t num_tokens = expert_ids->shape[0];
  SLUICE_TRY(take_arrays(moe, num_tokens, num_chunks, NULL, b, &counts));
  b->cut_rows = 1;
  for (int32_t i = 0; i < num_chunks; ++i) b->first_token[i] = 0;
  SLUICE_TRY(count_routes(b, expert_ids)); /* all of them in the last chunk, which has all tokens as yet */
  for (int32_t p = 0; p < moe->config.num_experts; ++p) counts[p] = sluice_send_count(b, num_chunks - 1, p);
  sluice_cut_rows_order(b, counts);
  receive_own(b);
  return SLUICE_OK;
}

/* ---- ceilings: every place has the same number of rows in each chunk, on all ranks ---- */

static void fill_counts(sluice_binding_t* b) {
  int32_t ceiling = (int32_t)sluice_layer_ceiling(b->moe);
  int64_t sent = (int64_t)b->num_chunks * b->moe->config.num_experts;
  int64_t received = (int64_t)b->world_size * b->num_chunks * b->num_local;
  for (int64_t i = 0; i < sent; ++i) b->send_counts[i] = ceiling;
  for (int64_t i = 0; i < received; ++i) b->recv_counts[i] = ceiling;
  b->num_sent = room_of(b->moe, b->num_chunks, b->num_tokens);
  for (int32_t i = 0; i <= b->num_chunks; ++i) b->first_sent[i] = b->num_sent / b->num_chunks * i;
}

/* As order_routes, on places of `ceiling` rows: the first routes of a place take them, the others are dropped. */
static void order_under_ceiling(sluice_binding_t* b, int64_t* cursor, int64_t* tally) {
  int64_t ceiling = sluice_layer_ceiling(b->moe);
  int32_t num_experts = b->moe->config.num_experts;
  memset(b->order, 0xff, (size_t)room_of(b->moe, b->num_chunks, b->num_tokens) * sizeof *b->order);
  ++tally[SLUICE_TALLY_FORWARDS];
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    int32_t* order = b->order + (int64_t)i * num_experts * ceiling;
    memset(cursor, 0, (size_t)num_experts * sizeof *cursor);
    for (int64_t route = b->first_token[i] * b->top_k; route < b->first_token[i + 1] * b->top_k; ++route) {
      int32_t place = b->position[route];
      if (place < 0) continue;
      int64_t at = cursor[place]++;
      b->position[route] = at < ceiling ? (int32_t)(place * ceiling + at) : -1;
      if (at < ceiling) order[place * ceiling + at] = (int32_t)route;
    }
    for (int32_t place = 0; place < num_experts; ++place) {
      int64_t most = (cursor[place] << 32) + place;
      tally[SLUICE_TALLY_ROUTES] += cursor[place];
      if (cursor[place] > ceiling) tally[SLUICE_TALLY_DROPPED] += cursor[place] - ceiling;
      if (most > tally[SLUICE_TALLY_MOST]) tally[SLUICE_TALLY_MOST] = most;
    }
  }
}

sluice_status_t sluice_binding_route_under_ceiling(sluice_moe_t* moe, const sluice_tensor_t* expert_ids,
                                                   int32_t num_chunks, int64_t* tally, sluice_binding_t* b) {
  int64_t* cursor = NULL;
  SLUICE_TRY(take_arrays(moe, expert_ids->shape[0], num_chunks, NULL, b, &cursor));
  SLUICE_TRY(count_routes(b, expert_ids));
  order_under_ceiling(b, cursor, tally);
  fill_counts(b);
  return SLUICE_OK;
}

/* ---- routing on a far device ---- */

/* Of an order: it has room for all rows of the pass. */
static uint64_t order_bytes(const sluice_moe_t* moe, int64_t num_tokens) {
  return sluice_align_up((uint64_t)room_of(moe, moe->config.num_chunks, num_tokens) * sizeof(int32_t));
}

uint64_t sluice_binding_routes_bytes(const sluice_moe_t* moe, int64_t num_tokens) {
  uint64_t position = sluice_align_up((uint64_t)(num_tokens * moe->config.top_k) * sizeof(int32_t));
  return sluice_is_far(moe) ? 2 * order_bytes(moe, num_tokens) + position : 0;
}

static void place_routes(sluice_binding_t* b, void* routes) {
  uint64_t bytes = order_bytes(b->moe, b->num_tokens);
  b->order = routes;
  b->order_token = (int32_t*)(void*)((char*)routes + bytes);
  b->position = (int32_t*)(void*)((char*)routes + 2 * bytes);
  int64_t of_chunk = sluice_layer_ceiling(b->moe) * b->moe->config.num_experts;
  for (int32_t i = 0; i <= b->num_chunks; ++i) {
    b->first_order[i] = of_chunk > 0 ? i * of_chunk : b->first_token[i] * b->top_k;
  }
}

/* first_bad: of the device; INT32_MAX: all ids name an expert, or are -1. */
static sluice_status_t check_first_bad(const sluice_moe_t* moe, int32_t first_bad) {
  if (first_bad == INT32_MAX) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                     "layer %d: expert_ids[%d, %d] is out of range; ids lie in [0, %d), or -1 to drop the route",
                     moe->config.layer_id, first_bad / moe->config.top_k, first_bad % moe->config.top_k,
                     moe->config.num_experts);
}

/* send_counts are there. */
static void sum_sent(sluice_binding_t* b) {
  int32_t num_experts = b->moe->config.num_experts;
  b->first_sent[0] = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    b->first_sent[i + 1] = b->first_sent[i];
    for (int32_t place = 0; place < num_experts; ++place) b->first_sent[i + 1] += sluice_send_count(b, i, place);
  }
  b->num_sent = b->first_sent[b->num_chunks];
}

/* counts: [n][E + 1], as the device wrote them. */
static sluice_status_t take_counts(sluice_binding_t* b, const int32_t* counts) {
  int32_t num_experts = b->moe->config.num_experts;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    const int32_t* of_chunk = counts + (int64_t)i * (num_experts + 1);
    SLUICE_TRY(check_first_bad(b->moe, of_chunk[num_experts]));
    memcpy(b->send_counts + (int64_t)i * num_experts, of_chunk, (size_t)num_experts * sizeof *of_chunk);
  }
  sum_sent(b);
  return SLUICE_OK;
}

/* Bytes of the counts behind the routes. */
static uint64_t far_counts_bytes(const sluice_moe_t* moe, int32_t num_chunks) {
  return (uint64_t)num_chunks * ((uint64_t)moe->config.num_experts + 1) * sizeof(int32_t);
}

/* Orders the routes on the device. out_counts: there, [n][E + 1]. */
static sluice_status_t route_there(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                                   int64_t* tally, sluice_binding_t* b, int32_t** out_counts) {
  sluice_context_t* context = moe->context;
  const sluice_far_vtable_t* far = context->device->far;
  int32_t num_experts = moe->config.num_experts;
  uint64_t counts_bytes = far_counts_bytes(moe, b->num_chunks);
  uint64_t scratch_bytes = far->route_scratch_bytes(b->num_tokens * b->top_k, num_experts);
  uint64_t routes_bytes = sluice_binding_routes_bytes(moe, b->num_tokens);
  SLUICE_TRY(sluice_arena_reset(&context->routes, routes_bytes + sluice_align_up(counts_bytes) + scratch_bytes,
                                "routes on the device"));
  place_routes(b, sluice_arena_take(&context->routes, routes_bytes));
  sluice_far_routes_t routes = {
      .ids = sluice_tensor_data(expert_ids),
      .ids_t = sluice_tensor_stride(expert_ids, 0),
      .ids_k = sluice_tensor_stride(expert_ids, 1),
      .ids_64 = sluice_tensor_dtype(expert_ids) == SLUICE_DTYPE_I64,
      .num_chunks = b->num_chunks,
      .first_token = b->first_token,
      .place_of_expert = moe->place_of_expert,
      .top_k = b->top_k,
      .num_experts = num_experts,
      .counts = sluice_arena_take(&context->routes, counts_bytes),
      .order = b->order,
      .order_token = b->order_token,
      .position = b->position,
      .ceiling = sluice_layer_ceiling(moe),
      .tally = tally,
  };
  routes.scratch = sluice_arena_take(&context->routes, scratch_bytes);
  *out_counts = routes.counts;
  return far->route(context->device, stream, &routes);
}

sluice_status_t sluice_binding_route_far(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                                         int32_t num_chunks, sluice_binding_t* b) {
  sluice_context_t* context = moe->context;
  int64_t* cursor = NULL;
  int32_t* there = NULL;
  uint64_t bytes = far_counts_bytes(moe, num_chunks);
  SLUICE_TRY(take_arrays(moe, expert_ids->shape[0], num_chunks, NULL, b, &cursor));
  SLUICE_TRY(sluice_arena_reset(&context->scratch, bytes, "counts of a pass"));
  SLUICE_TRY(route_there(moe, stream, expert_ids, NULL, b, &there));
  int32_t* counts = sluice_arena_take(&context->scratch, bytes);
  SLUICE_TRY(context->device->far->read(context->device, stream, there, counts, bytes));
  SLUICE_TRY(take_counts(b, counts));
  receive_own(b);
  return SLUICE_OK;
}

/* Of the counts by block on the device, and of what counting them takes beside. */
static uint64_t block_counts_bytes(const sluice_moe_t* moe, int32_t num_blocks) {
  return (uint64_t)num_blocks * ((uint64_t)moe->config.num_experts + 1) * sizeof(int32_t);
}

uint64_t sluice_binding_far_bytes(const sluice_moe_t* moe, int32_t num_chunks, int64_t num_tokens) {
  const sluice_far_vtable_t* far = moe->context->device->far;
  int32_t num_experts = moe->config.num_experts;
  uint64_t counting =
      sluice_align_up(block_counts_bytes(moe, SLUICE_PLAN_BLOCKS)) + far->route_scratch_bytes(0, num_experts);
  uint64_t routing = sluice_binding_routes_bytes(moe, num_tokens) + sluice_align_up(far_counts_bytes(moe, num_chunks)) +
                     far->route_scratch_bytes(num_tokens * moe->config.top_k, num_experts);
  return sluice_align_up(counting > routing ? counting : routing);
}

sluice_status_t sluice_binding_count_far(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                                         int32_t num_blocks, int32_t** out_counts) {
  sluice_context_t* context = moe->context;
  const sluice_far_vtable_t* far = context->device->far;
  int32_t num_experts = moe->config.num_experts;
  uint64_t bytes = block_counts_bytes(moe, num_blocks), scratch = far->route_scratch_bytes(0, num_experts);
  SLUICE_TRY(check_num_routes(moe, expert_ids->shape[0]));
  SLUICE_TRY(sluice_arena_reset(&context->scratch, bytes, "counts of a pass"));
  SLUICE_TRY(sluice_arena_reset(&context->routes, sluice_align_up(bytes) + scratch, "routes on the device"));
  int32_t* there = sluice_arena_take(&context->routes, bytes);
  const sluice_far_blocks_t blocks = {
      .ids = sluice_tensor_data(expert_ids),
      .ids_t = sluice_tensor_stride(expert_ids, 0),
      .ids_k = sluice_tensor_stride(expert_ids, 1),
      .ids_64 = sluice_tensor_dtype(expert_ids) == SLUICE_DTYPE_I64,
      .num_blocks = num_blocks,
      .num_tokens = expert_ids->shape[0],
      .place_of_expert = moe->place_of_expert,
      .top_k = moe->config.top_k,
      .num_experts = num_experts,
      .counts = there,
      .scratch = sluice_arena_take(&context->routes, scratch),
  };
  SLUICE_TRY(far->count_blocks(context->device, stream, &blocks));
  int32_t* counts = sluice_arena_take(&context->scratch, bytes);
  SLUICE_TRY(far->read(context->device, stream, there, counts, bytes));
  for (int32_t g = 0; g < num_blocks; ++g) {
    const int32_t* of_block = counts + (int64_t)g * (num_experts + 1);
    SLUICE_TRY(check_first_bad(moe, of_block[num_experts]));
    memmove(counts + (int64_t)g * num_experts, of_block, (size_t)num_experts * sizeof *counts);
  }
  *out_counts = counts;
  return SLUICE_OK;
}

sluice_status_t sluice_binding_route_far_blocks(sluice_moe_t* moe, sluice_stream_t stream,
                                                const sluice_tensor_t* expert_ids, int32_t num_chunks,
                                                const int64_t* first_token, const int32_t* first_block,
                                                const int32_t* counts, sluice_binding_t* b) {
  int64_t* cursor = NULL;
  int32_t* there = NULL;
  int32_t num_experts = moe->config.num_experts;
  SLUICE_TRY(take_arrays(moe, expert_ids->shape[0], num_chunks, first_token, b, &cursor));
  SLUICE_TRY(route_there(moe, stream, expert_ids, NULL, b, &there));
  memset(b->send_counts, 0, (size_t)num_chunks * (size_t)num_experts * sizeof *b->send_counts);
  for (int32_t i = 0; i < num_chunks; ++i) {
    int32_t* of_chunk = b->send_counts + (int64_t)i * num_experts;
    for (int32_t g = first_block[i]; g < first_block[i + 1]; ++g) {
      for (int32_t place = 0; place < num_experts; ++place) of_chunk[place] += counts[(int64_t)g * num_experts + place];
    }
  }
  sum_sent(b);
  receive_own(b);
  return SLUICE_OK;
}

sluice_status_t sluice_binding_route_far_under_ceiling(sluice_moe_t* moe, sluice_stream_t stream,
                                                       const sluice_tensor_t* expert_ids, int32_t num_chunks,
                                                       int64_t* tally, sluice_binding_t* b) {
  int64_t* cursor = NULL;
  int32_t* there = NULL;
  SLUICE_TRY(take_arrays(moe, expert_ids->shape[0], num_chunks, NULL, b, &cursor));
  SLUICE_TRY(route_there(moe, stream, expert_ids, tally, b, &there));
  fill_counts(b);
  return SLUICE_OK;
}

/* ---- offsets ---- */

static int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

static void finish_sent(sluice_binding_t* b, int32_t i) {
  const sluice_moe_t* moe = b->moe;
  int64_t* of_rank = b->sent_of_rank + (int64_t)i * (b->world_size + 1);
  int64_t row = 0;
  for (int32_t r = 0; r < b->world_size; ++r) {
    of_rank[r] = row;
    for (int32_t p = moe->first_place[r]; p < moe->first_place[r + 1]; ++p) row += sluice_send_count(b, i, p);
  }
  of_rank[b->world_size] = row;
}

static void finish_received(sluice_binding_t* b, int32_t i) {
  int64_t* of_rank = b->recv_of_rank + (int64_t)i * (b->world_size + 1);
  int64_t* rows = b->rows_of_expert + (int64_t)i * b->num_local;
  int64_t remote = 0;
  for (int32_t e = 0; e < b->num_local; ++e) rows[e] = 0;
  for (int32_t r = 0; r < b->world_size; ++r) {
    of_rank[r] = remote;
    for (int32_t e = 0; e < b->num_local; ++e) {
      int64_t count = sluice_recv_count(b, r, i, e);
      rows[e] += count;
      if (r != b->moe->context->rank) remote += count;
    }
  }
  of_rank[b->world_size] = remote;
  int64_t row = 0;
  for (int32_t e = 0; e < b->num_local; ++e) {
    b->first_in_chunk[(int64_t)i * b->num_local + e] = row;
    row += rows[e];
  }
  b->first_of_chunk[i + 1] = b->first_of_chunk[i] + row;
}

sluice_status_t sluice_binding_finish(sluice_binding_t* b) {
  int32_t self = b->moe->context->rank;
  b->first_of_chunk[0] = b->first_returned[0] = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    finish_sent(b, i);
    finish_received(b, i);
    const int64_t* sent = b->sent_of_rank + (int64_t)i * (b->world_size + 1);
    int64_t remote_sent = sent[b->world_size] - (sent[self + 1] - sent[self]);
    int64_t remote_received = b->recv_of_rank[(int64_t)i * (b->world_size + 1) + b->world_size];
    b->first_returned[i + 1] = b->first_returned[i] + max_i64(remote_received, sent[b->world_size]);
    b->max_chunk_remote = max_i64(b->max_chunk_remote, max_i64(remote_sent, remote_received));
    b->max_chunk_sent = max_i64(b->max_chunk_sent, sent[b->world_size]);
    b->max_chunk_rows = max_i64(b->max_chunk_rows, b->first_of_chunk[i + 1] - b->first_of_chunk[i]);
  }
  b->num_rows = b->first_of_chunk[b->num_chunks];
  int64_t row = 0;
  for (int32_t e = 0; e < b->num_local; ++e) {
    for (int32_t i = 0; i < b->num_chunks; ++i) {
      b->first_in_pass[(int64_t)i * b->num_local + e] = row;
      row += b->rows_of_expert[(int64_t)i * b->num_local + e];
    }
  }
  if (b->cut_rows && b->counts_out != NULL) sluice_cut_rows_place(b); /* a restored binding has them */
  for (int64_t s = 0; s < b->num_sent && !sluice_is_far(b->moe); ++s) {
    b->order_token[s] = b->order[s] < 0 ? -1 : b->order[s] / b->top_k;
  }
  int64_t returned = b->cut_rows ? b->first_returned[b->num_chunks] : 0; /* positions count them in 32 bits */
  if (max_i64(b->num_rows, returned) > INT32_MAX) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "layer %d: this rank would receive %lld rows; at most 2^31 are possible",
                       b->moe->config.layer_id, (long long)b->num_rows);
  }
  return SLUICE_OK;
}

sluice_status_t sluice_binding_of_rows(sluice_moe_t* moe, const int64_t* rows_per_expert, sluice_binding_t* b) {
  init(b, moe, 1, 0);
  SLUICE_TRY(sluice_arena_reset(&moe->context->binding, arena_bytes(b, 0, 0, 0), "offsets of a pass"));
  take_offsets(b, 0);
  int64_t row = 0;
  for (int32_t e = 0; e < b->num_local; ++e) {
    if (rows_per_expert[e] < 0 || rows_per_expert[e] > INT32_MAX - row) {
      return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                         "layer %d: rows_per_expert[%d] is %lld; counts are not negative and sum to less "
                         "than 2^31",
                         moe->config.layer_id, e, (long long)rows_per_expert[e]);
    }
    b->rows_of_expert[e] = rows_per_expert[e];
    b->first_in_chunk[e] = b->first_in_pass[e] = row;
    row += rows_per_expert[e];
  }
  b->first_of_chunk[0] = 0;
  b->first_of_chunk[1] = b->num_rows = b->max_chunk_rows = row;
  return SLUICE_OK;
}

/* ---- saved form: header, send_counts, recv_counts, order, position, slots of parcels, first token and policies of
 * chunks; without order and position on a far device, slots only where the layer is deduplicated ---- */

static uint64_t counts_in_meta(const sluice_moe_t* moe, int32_t num_chunks) {
  return (uint64_t)num_chunks *
         ((uint64_t)moe->config.num_experts + (uint64_t)moe->context->world_size * (uint64_t)moe->num_local);
}

static uint64_t meta_bytes_of(const sluice_moe_t* moe, int32_t num_chunks, int64_t num_tokens, int64_t num_sent) {
  uint64_t orders = sluice_is_far(moe) ? 0 : (uint64_t)num_sent + (uint64_t)(num_tokens * moe->config.top_k);
  return sizeof(meta_header_t) + 4 * (counts_in_meta(moe, num_chunks) + orders + 2 * (uint64_t)num_chunks);
}

static uint64_t slots_bytes(const sluice_moe_t* moe, int64_t num_rows) {
  return sluice_layer_is_deduplicated(moe) ? (uint64_t)num_rows * sizeof(int32_t) : 0;
}

uint64_t sluice_binding_meta_bytes(const sluice_binding_t* b) {
  return meta_bytes_of(b->moe, b->num_chunks, b->num_tokens, b->num_sent) + slots_bytes(b->moe, b->num_rows);
}

uint64_t sluice_binding_meta_bytes_of(const sluice_moe_t* moe, int32_t num_chunks, int64_t num_tokens,
                                      int64_t num_sent) {
  return meta_bytes_of(moe, num_chunks, num_tokens, num_sent);
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
  header.cut_rows = b->cut_rows;
  header.num_tokens = b->num_tokens;
  header.num_sent = b->num_sent;
  header.num_rows = b->num_rows;
  memcpy(header.saved_bytes, saved_bytes, sizeof header.saved_bytes);
  uint64_t n = (uint64_t)b->num_chunks;
  char* const body = (char*)meta + sizeof header;
  char* at = body;
  at = put(at, b->send_counts, n * (uint64_t)b->moe->config.num_experts * 4);
  at = put(at, b->recv_counts, n * (uint64_t)b->world_size * (uint64_t)b->num_local * 4);
  if (!sluice_is_far(b->moe)) {
    at = put(at, b->order, (uint64_t)b->num_sent * 4);
    at = put(at, b->position, (uint64_t)(b->num_tokens * b->top_k) * 4);
  }
  at = put(at, b->parcels.slots, slots_bytes(b->moe, b->num_rows));
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    const int32_t chunk[] = {(int32_t)b->first_token[i],
                             b->restore_di[i] | b->restore_m[i] << 8 | b->wgrad_mode << 16 | b->plan << 24};
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

/* Of a header whose numbers are in range. */
static uint64_t meta_bytes_behind(const sluice_moe_t* moe, const meta_header_t* header) {
  return meta_bytes_of(moe, header->num_chunks, header->num_tokens, header->num_sent) +
         slots_bytes(moe, header->num_rows);
}

static sluice_status_t read_header(const sluice_moe_t* moe, const void* meta, uint64_t meta_bytes,
                                   meta_header_t* header) {
  int whole = meta != NULL && meta_bytes >= sizeof *header;
  if (whole) memcpy(header, meta, sizeof *header);
  if (!whole || (header->magic != META_MAGIC && header->magic != META_MAGIC_USED) ||
      header->fingerprint != moe->fingerprint || header->num_chunks < 1 || header->num_chunks > SLUICE_MAX_CHUNKS ||
      header->num_tokens < 0 || header->num_tokens > INT32_MAX / moe->config.top_k || header->num_sent < 0 ||
      header->num_sent > room_of(moe, header->num_chunks, header->num_tokens) || header->num_rows < 0 ||
      header->num_rows > INT32_MAX || (moe->ceiling != NULL && header->num_chunks != moe->config.num_chunks) ||
      meta_bytes < meta_bytes_behind(moe, header)) {
    return SLUICE_FAIL(
        SLUICE_E_INVALID_ARGUMENT,
        "layer %d: the saved buffer META (%llu bytes) is not one that a forward of this layer wrote; pass the "
        "buffers of the step unchanged and in order",
        moe->config.layer_id, (unsigned long long)meta_bytes);
  }
  uint64_t body_bytes = meta_bytes_behind(moe, header) - sizeof *header;
  if (header->checksum != checksum_of(*header, (const char*)meta + sizeof *header, body_bytes)) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "layer %d: the saved buffer META is damaged: it changed after the forward that wrote it",
                       moe->config.layer_id);
  }
  return SLUICE_OK;
}

/* Boundaries and policies of the chunks; the checksum has passed, so only another layer's bytes can be wrong. */
static sluice_status_t read_chunks(sluice_binding_t* b, const int32_t* chunks) {
  int64_t last = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    int64_t first = chunks[(size_t)i * 2];
    if (first < last || first > b->num_tokens || (i == 0 && first != 0)) {
      return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                         "layer %d: the saved buffer META is damaged: its chunks are not in order",
                         b->moe->config.layer_id);
    }
    b->first_token[i] = last = first;
    b->restore_di[i] = (uint8_t)(chunks[(size_t)i * 2 + 1] & 0xff);
    b->restore_m[i] = (uint8_t)(chunks[(size_t)i * 2 + 1] >> 8 & 0xff);
    b->wgrad_mode = (uint8_t)(chunks[(size_t)i * 2 + 1] >> 16 & 0xff);
    b->plan = (uint8_t)(chunks[(size_t)i * 2 + 1] >> 24 & 0xff);
  }
  b->first_token[b->num_chunks] = b->num_tokens;
  return SLUICE_OK;
}

sluice_status_t sluice_binding_restore(sluice_moe_t* moe, const void* meta, uint64_t meta_bytes, void* routes,
                                       sluice_binding_t* b) {
  meta_header_t header;
  SLUICE_TRY(read_header(moe, meta, meta_bytes, &header));
  init(b, moe, header.num_chunks, header.num_tokens);
  b->cut_rows = header.cut_rows != 0;
  b->num_sent = header.num_sent;
  SLUICE_TRY(sluice_arena_reset(&moe->context->binding, arena_bytes(b, header.num_sent, 0, 0), "offsets of a pass"));
  take_offsets(b, header.num_sent);
  /* The counts and orders are read where the host keeps them. */
  b->send_counts = (int32_t*)((const char*)meta + sizeof header);
  b->recv_counts = b->send_counts + (int64_t)b->num_chunks * moe->config.num_experts;
  const int32_t* chunks = b->recv_counts + (int64_t)b->world_size * b->num_chunks * b->num_local;
  if (!sluice_is_far(moe)) {
    b->order = b->recv_counts + (int64_t)b->world_size * b->num_chunks * b->num_local;
    b->position = b->order + b->num_sent;
    chunks = b->position + b->num_tokens * b->top_k;
  }
  int32_t* slots = (int32_t*)chunks;
  chunks += slots_bytes(moe, header.num_rows) / sizeof *chunks;
  SLUICE_TRY(read_chunks(b, chunks));
  if (sluice_is_far(moe)) place_routes(b, routes);
  int64_t first = 0;
  for (int32_t i = 0; i < b->num_chunks; ++i) {
    b->first_sent[i] = first;
    for (int32_t place = 0; place < moe->config.num_experts; ++place) first += sluice_send_count(b, i, place);
  }
  b->first_sent[b->num_chunks] = first;
  if (first == b->num_sent) SLUICE_TRY(sluice_binding_finish(b));
  if (first != b->num_sent || b->num_rows != header.num_rows) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "layer %d: the saved buffer META is damaged: its counts do not add up", moe->config.layer_id);
  }
  return sluice_layer_is_deduplicated(moe) ? sluice_parcels_restore(b, slots) : SLUICE_OK;
}

sluice_status_t sluice_binding_peek(const sluice_moe_t* moe, const void* meta, uint64_t meta_bytes,
                                    int32_t* out_num_chunks, uint64_t* out_saved_bytes, int64_t* out_rows_per_expert) {
  meta_header_t header;
  SLUICE_TRY(read_header(moe, meta, meta_bytes, &header));
  if (out_num_chunks != NULL) *out_num_chunks = header.num_chunks;
  if (out_saved_bytes != NULL) memcpy(out_saved_bytes, header.saved_bytes, sizeof header.saved_bytes);
  if (out_rows_per_expert == NULL) return SLUICE_OK;
  const int32_t* counts =
      (const int32_t*)((const char*)meta + sizeof header) + (int64_t)header.num_chunks * moe->config.num_experts;
  memset(out_rows_per_expert, 0, (size_t)moe->num_local * sizeof *out_rows_per_expert);
  for (int64_t s = 0; s < (int64_t)moe->context->world_size * header.num_chunks; ++s) {
    for (int32_t e = 0; e < moe->num_local; ++e) out_rows_per_expert[e] += counts[s * moe->num_local + e];
  }
  return SLUICE_OK;
}
