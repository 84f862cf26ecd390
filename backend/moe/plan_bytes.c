/* Bytes of a plan at its ceilings, by category. */
#include "backend/moe/plan_sizes.h"

#include <string.h>

#include "backend/moe/pass.h"
#include "backend/moe/step.h"
#include "backend/moe/weight_grad.h"

static int is_stored(int32_t restore) { return restore == SLUICE_RESTORE_KEEP || restore == SLUICE_RESTORE_OFFLOAD; }

/* The two tensors that policies speak of, and how the plan restores each in a chunk. */
enum { DI, M, NUM_RESTORED };
static const int32_t restored_tensors[NUM_RESTORED] = {SLUICE_T_KEPT_DI, SLUICE_T_KEPT_M};

static int32_t policy_of(const sluice_plan_data_t* plan, int which, int32_t chunk) {
  return which == DI ? sluice_plan_di(plan, chunk) : sluice_plan_m(plan, chunk);
}

/* Chunks that restore the tensor so; where all are alike, as many as there may be. */
static int64_t chunks_with(const sluice_plan_data_t* plan, int which, int32_t restore) {
  const sluice_chunk_policies_t* p = &plan->inputs.policies;
  if (p->count == 0) return policy_of(plan, which, 0) == restore ? INT32_MAX : 0;
  return sluice_count_policy(which == DI ? p->di : p->m, p->count, restore);
}

/* So many chunks have at most, of the rows that are kept at all. */
static uint64_t rows_of_chunks(const sluice_plan_data_t* plan, int64_t chunks, int64_t kept_rows) {
  return (uint64_t)(chunks == INT32_MAX ? kept_rows : sluice_min_i64(kept_rows, chunks * plan->chunk_rows));
}

static uint64_t rows_with(const sluice_plan_data_t* plan, int which, int32_t restore, int64_t kept_rows) {
  return rows_of_chunks(plan, chunks_with(plan, which, restore), kept_rows);
}

/* Kept or offloaded. */
static uint64_t rows_stored(const sluice_plan_data_t* plan, int which) {
  int64_t chunks = chunks_with(plan, which, SLUICE_RESTORE_KEEP) + chunks_with(plan, which, SLUICE_RESTORE_OFFLOAD);
  return rows_of_chunks(plan, chunks, plan->kept_rows);
}

uint64_t sluice_plan_row_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan, int32_t restore) {
  uint64_t bytes = 0;
  for (int which = 0; which < NUM_RESTORED; ++which) {
    if (chunks_with(plan, which, restore) > 0) bytes += sluice_pass_row_bytes(moe, restored_tensors[which]);
  }
  return bytes;
}

uint64_t sluice_plan_stored_row_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  uint64_t bytes = 0;
  for (int which = 0; which < NUM_RESTORED; ++which) {
    int64_t chunks = chunks_with(plan, which, SLUICE_RESTORE_KEEP) + chunks_with(plan, which, SLUICE_RESTORE_OFFLOAD);
    if (chunks > 0) bytes += sluice_pass_row_bytes(moe, restored_tensors[which]);
  }
  return bytes;
}

/* Buffers of the pool are one per chunk and tensor, each rounded up. */
uint64_t sluice_plan_host_pool_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan, int64_t kept_rows) {
  uint64_t bytes = 0;
  if (sluice_plan_row_bytes(moe, plan, SLUICE_RESTORE_OFFLOAD) == 0) return 0;
  for (int which = 0; which < NUM_RESTORED; ++which) {
    bytes +=
        rows_with(plan, which, SLUICE_RESTORE_OFFLOAD, kept_rows) * sluice_pass_row_bytes(moe, restored_tensors[which]);
  }
  return (uint64_t)plan->inputs.max_outstanding * (bytes + (uint64_t)plan->max_chunks * 2 * SLUICE_ALIGNMENT);
}

/* Slots of the chunks that restore so, at most max_chunks, each rounded up: a whole number of lines. */
static uint64_t stored_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan, int which, int32_t restore) {
  if (chunks_with(plan, which, restore) == 0) return 0;
  uint64_t bytes =
      rows_with(plan, which, restore, plan->kept_rows) * sluice_pass_row_bytes(moe, restored_tensors[which]) +
      (uint64_t)plan->max_chunks * SLUICE_ALIGNMENT;
  return bytes / SLUICE_ALIGNMENT * SLUICE_ALIGNMENT;
}

/* Parcels of a pass whatever the ids: at most one of each token for each rank. */
static int64_t any_parcels(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  return sluice_min_i64(sluice_plan_any_rows(moe, plan), moe->context->world_size * plan->inputs.max_tokens);
}

/* Of the block in front of a step's rows. */
static uint64_t kept_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  return sluice_binding_routes_bytes(moe, plan->inputs.max_tokens) +
         sluice_parcels_kept_bytes_of(moe, any_parcels(moe, plan), sluice_plan_any_rows(moe, plan));
}

uint64_t sluice_plan_far_parcels_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  return sluice_align_up(
      sluice_parcels_far_bytes(moe, plan->inputs.max_tokens, any_parcels(moe, plan), sluice_plan_any_rows(moe, plan)));
}

uint64_t sluice_plan_block_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan, int32_t which) {
  switch (which) {
    case SLUICE_SAVED_INPUT: return kept_bytes(moe, plan) + stored_bytes(moe, plan, DI, SLUICE_RESTORE_KEEP);
    case SLUICE_SAVED_MIDDLE: return stored_bytes(moe, plan, M, SLUICE_RESTORE_KEEP);
    case SLUICE_SAVED_HOST_INPUT: return stored_bytes(moe, plan, DI, SLUICE_RESTORE_OFFLOAD);
    case SLUICE_SAVED_HOST_MIDDLE: return stored_bytes(moe, plan, M, SLUICE_RESTORE_OFFLOAD);
    default: return 0;
  }
}

static uint64_t far_step_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  return sluice_plan_block_bytes(moe, plan, SLUICE_SAVED_INPUT) +
         sluice_plan_block_bytes(moe, plan, SLUICE_SAVED_MIDDLE);
}

/* The step's buffer of a tensor's chunks that restore so; an empty block still takes one line. */
static uint64_t stored_buffer(const sluice_moe_t* moe, const sluice_plan_data_t* plan, int which, int32_t restore,
                              int32_t num_chunks, const int64_t* kept_chunk_rows) {
  uint64_t row = sluice_pass_row_bytes(moe, restored_tensors[which]), rows = 0, slots = 0;
  int32_t chunks = 0;
  for (int32_t i = 0; i < num_chunks; ++i) {
    if (kept_chunk_rows[i] < 0 || policy_of(plan, which, i) != restore) continue;
    rows += (uint64_t)kept_chunk_rows[i];
    slots += sluice_align_up((uint64_t)kept_chunk_rows[i] * row);
    ++chunks;
  }
  int joined = chunks == num_chunks && restore == SLUICE_RESTORE_KEEP && (which == DI || !moe->config.callback_experts);
  return sluice_align_up((uint64_t)sluice_max_i64(1, (int64_t)(joined ? rows * row : slots)));
}

/* The step's buffers of kept and offloaded rows. */
static uint64_t stored_buffers(const sluice_moe_t* moe, const sluice_plan_data_t* plan, int32_t num_chunks,
                               const int64_t* kept_chunk_rows) {
  uint64_t bytes = 0;
  for (int which = 0; which < NUM_RESTORED; ++which) {
    bytes += stored_buffer(moe, plan, which, SLUICE_RESTORE_KEEP, num_chunks, kept_chunk_rows) +
             stored_buffer(moe, plan, which, SLUICE_RESTORE_OFFLOAD, num_chunks, kept_chunk_rows);
  }
  return bytes;
}

/* The same at most, whatever the routing, without what rounding each chunk up takes. */
static uint64_t most_stored(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  uint64_t bytes = 0;
  for (int which = 0; which < NUM_RESTORED; ++which) {
    uint64_t rows = rows_stored(plan, which) * sluice_pass_row_bytes(moe, restored_tensors[which]);
    bytes += sluice_align_up(rows == 0 ? 1 : rows) + SLUICE_ALIGNMENT;
  }
  return bytes;
}

uint64_t sluice_plan_step_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan, int32_t num_chunks,
                                const int64_t* kept_chunk_rows, int64_t num_tokens, int64_t num_sent,
                                int64_t num_rows) {
  if (sluice_is_far(moe)) return far_step_bytes(moe, plan); /* whatever the routing */
  uint64_t bytes = sluice_align_up(sizeof(sluice_step_t)) +
                   sluice_align_up(sluice_binding_meta_bytes_of(moe, num_chunks, num_tokens, num_sent, num_rows));
  return bytes + stored_buffers(moe, plan, num_chunks, kept_chunk_rows);
}

/* Whether all chunks restore alike whatever the routing. */
static int is_uniform(const sluice_plan_data_t* plan) {
  if (plan->inputs.policies.count > 0) return 0;
  return plan->kept_rows >= plan->worst_rows || !(is_stored(plan->restore_di) || is_stored(plan->restore_m));
}

/* behind_list: chunks of the template that a list says nothing of. */
static void fill_policies(const sluice_plan_data_t* plan, int32_t behind_list, sluice_template_spec_t* spec) {
  int32_t most = is_uniform(plan) ? spec->num_chunks : spec->num_chunks / 2;
  if (plan->inputs.policies.count > 0) most = spec->num_chunks - behind_list;
  for (int32_t i = 0; i < spec->num_chunks; ++i) {
    int stored = i < most;
    spec->restore_di[i] = (uint8_t)(stored ? sluice_plan_di(plan, i) : SLUICE_RESTORE_REDISPATCH);
    spec->restore_m[i] = (uint8_t)(stored ? sluice_plan_m(plan, i) : SLUICE_RESTORE_RECOMPUTE);
  }
}

#define BEHIND_LIST 2 /* chunks that follow each other, as those do that no longer fit */

/* Enough for every ring. */
static int32_t small_chunks(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  const int32_t listed = plan->inputs.policies.count;
  if (sluice_layer_ceiling(moe) > 0) return plan->num_chunks;
  if (listed > 0) return (int32_t)sluice_min_i64(listed, SLUICE_PLAN_BLOCKS) + BEHIND_LIST;
  return (int32_t)sluice_min_i64(plan->max_chunks, 4);
}

static sluice_template_spec_t small_spec(const sluice_moe_t* moe, const sluice_plan_data_t* plan, int32_t direction,
                                         int32_t weights) {
  sluice_template_spec_t spec = {
      .direction = direction,
      .num_chunks = small_chunks(moe, plan),
      .single_rank = moe->context->world_size == 1,
      .keep = direction == SLUICE_FORWARD,
      .callback = moe->config.callback_experts,
      .gated = moe->config.gated != SLUICE_GATED_NO,
      .bounded = 1,
      .dedup = sluice_layer_is_deduplicated(moe),
      .input_half = direction == SLUICE_BACKWARD,
      .weight_half = direction == SLUICE_BACKWARD ? weights : SLUICE_WEIGHTS_NONE,
      .wgrad_mode = plan->wgrad_mode,
  };
  fill_policies(plan, sluice_layer_ceiling(moe) > 0 ? 0 : BEHIND_LIST, &spec);
  return spec;
}

sluice_status_t sluice_plan_small_template(const sluice_moe_t* moe, const sluice_plan_data_t* plan, int32_t direction,
                                           int32_t weights, sluice_template_t** out_schedule) {
  const sluice_template_spec_t spec = small_spec(moe, plan, direction, weights);
  return sluice_template_build(&spec, sluice_process_allocator(), out_schedule);
}

sluice_status_t sluice_plan_small_rings(const sluice_moe_t* moe, const sluice_plan_data_t* plan, int32_t direction,
                                        int32_t weights, sluice_plan_rings_t* out_rings) {
  const sluice_template_spec_t spec = small_spec(moe, plan, direction, weights);
  return sluice_ring_memo_get(&moe->context->rings, &spec, out_rings);
}

uint64_t sluice_plan_tensor_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan,
                                  const sluice_plan_rings_t* rings, int32_t t) {
  const sluice_template_spec_t* spec = &rings->spec;
  int given = t == SLUICE_T_KEPT_DI || t == SLUICE_T_KEPT_M || t == SLUICE_T_HOST_DI || t == SLUICE_T_HOST_M;
  uint64_t row = sluice_pass_row_bytes(moe, t), ring = (uint64_t)rings->ring[t];
  if (given || row == 0 || ring == 0) return 0;
  uint64_t rows = (uint64_t)plan->chunk_rows;
  if (t == SLUICE_T_SEND || t == SLUICE_T_RECV) rows = (uint64_t)sluice_plan_travelling_rows(moe, plan);
  if (t == SLUICE_T_PARCELS) rows = (uint64_t)sluice_plan_arriving_parcels(moe, plan);
  int one_per_chunk = ring == (uint64_t)spec->num_chunks && spec->num_chunks > 2;
  if (spec->direction == SLUICE_BACKWARD &&
      (plan->wgrad_mode == SLUICE_WGRAD_DEFERRED || spec->weight_half == SLUICE_WEIGHTS_LATER)) {
    one_per_chunk |= t == SLUICE_T_DI || t == SLUICE_T_M; /* all that were not kept, until the last product */
  }
  if (one_per_chunk && sluice_layer_ceiling(moe) == 0) {
    return sluice_align_up((uint64_t)plan->worst_rows * row + (uint64_t)plan->max_chunks * SLUICE_ALIGNMENT);
  }
  return ring * sluice_align_up(rows * row);
}

sluice_status_t sluice_plan_slot_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan, int32_t direction,
                                       uint64_t* out_bytes) {
  sluice_plan_rings_t rings;
  SLUICE_TRY(sluice_plan_small_rings(moe, plan, direction, SLUICE_WEIGHTS_NOW, &rings));
  uint64_t tensors = 0;
  for (int32_t t = 0; t < SLUICE_T_COUNT; ++t) tensors += sluice_plan_tensor_bytes(moe, plan, &rings, t);
  if (direction == SLUICE_BACKWARD) {
    tensors += sluice_align_up(sluice_weight_sum_ceiling(moe, plan->wgrad_mode, plan->max_chunks, !is_uniform(plan)));
  }
  int64_t scalars = sluice_max_i64(plan->chunk_rows, sluice_plan_sent_rows(moe, plan));
  if (sluice_is_far(moe)) {
    *out_bytes = tensors + sluice_pass_far_scratch_bytes((uint64_t)scalars * sizeof(float));
    return SLUICE_OK;
  }
  *out_bytes = tensors + sluice_pass_scratch_bytes(moe, (uint64_t)scalars * sizeof(float),
                                                   sluice_template_max_ops(plan->max_chunks));
  return SLUICE_OK;
}

sluice_status_t sluice_plan_deferred_bytes(const sluice_moe_t* layer, const sluice_plan_data_t* plan,
                                           uint64_t* out_bytes) {
  sluice_moe_t widest = *layer;
  widest.num_local = sluice_plan_most_local(layer);
  sluice_plan_rings_t rings;
  SLUICE_TRY(sluice_plan_small_rings(&widest, plan, SLUICE_BACKWARD, SLUICE_WEIGHTS_LATER, &rings));
  for (int32_t i = 0; i < SLUICE_NUM_DEFERRED; ++i) {
    out_bytes[i] = sluice_plan_tensor_bytes(&widest, plan, &rings, sluice_deferred_tensors[i]);
  }
  return SLUICE_OK;
}

/* Between the halves of one backward; 0 where the host never leaves it there. */
static sluice_status_t between_halves(const sluice_moe_t* moe, const sluice_plan_data_t* plan, uint64_t* out_bytes) {
  uint64_t bytes[SLUICE_NUM_DEFERRED];
  *out_bytes = 0;
  if (!plan->inputs.halves_apart) return SLUICE_OK;
  SLUICE_TRY(sluice_plan_deferred_bytes(moe, plan, bytes));
  for (int32_t i = 0; i < SLUICE_NUM_DEFERRED; ++i) *out_bytes += bytes[i];
  return SLUICE_OK;
}

static uint64_t far_base_bytes(const sluice_context_t* context) {
  sluice_device_t* device = context->device;
  return context->far_allocator.current_bytes - context->slots.capacity - context->routes.capacity -
         context->far_parcels.capacity - device->far->idle_bytes(device) - context->step_bytes;
}

uint64_t sluice_plan_base_bytes(sluice_context_t* context) {
  if (context->device->far != NULL) return far_base_bytes(context);
  const uint64_t idle = sluice_engine_idle_bytes(context); /* steps take these first, or they make way */
  const sluice_arena_t* arenas[] = {&context->slots,  &context->binding, &context->parcels,
                                    &context->layout, &context->cut,     &context->envelope};
  uint64_t sized = 0;
  for (size_t i = 0; i < sizeof arenas / sizeof arenas[0]; ++i) sized += arenas[i]->capacity;
  const sluice_template_cache_t* cache = &context->templates;
  for (int32_t i = 0; i < cache->count && cache->block == NULL; ++i) sized += sluice_align_up(cache->items[i]->bytes);
  sized += sluice_align_up(cache->block_bytes);
  if (cache->capacity > 0) sized += sluice_align_up((uint64_t)cache->capacity * sizeof(sluice_template_t*));
  if (context->device->vtable->events_bytes != NULL) {
    sized += context->device->vtable->events_bytes(context->device, -1);
  }
  return context->allocator.current_bytes - sized - context->step_bytes - idle;
}

static uint64_t events_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  const sluice_device_t* device = moe->context->device;
  return device->vtable->events_bytes == NULL
             ? 0
             : device->vtable->events_bytes(device, sluice_template_max_ops(plan->max_chunks));
}

uint64_t sluice_plan_layout_bytes(const sluice_plan_data_t* plan) {
  return SLUICE_T_COUNT * sluice_align_up((uint64_t)plan->max_chunks * sizeof(uint64_t));
}

uint64_t sluice_plan_cut_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  if (sluice_layer_ceiling(moe) > 0) return 0; /* nothing is cut */
  return sluice_align_up((uint64_t)plan->num_blocks * (uint64_t)moe->context->world_size * 8) +
         sluice_align_up(((uint64_t)plan->num_blocks + 1) * 8);
}

uint64_t sluice_plan_routing_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  return sluice_align_up(sluice_binding_arena_bytes(moe, plan->max_chunks, plan->inputs.max_tokens));
}

uint64_t sluice_plan_parcels_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  if (!sluice_layer_is_deduplicated(moe)) return 0;
  int64_t tokens = plan->inputs.max_tokens, rows = sluice_plan_any_rows(moe, plan);
  const sluice_parcels_size_t size = {plan->max_chunks, tokens, tokens * moe->config.top_k, rows,
                                      any_parcels(moe, plan)};
  return sluice_align_up(sluice_parcels_bytes(moe, &size, 0));
}

/* Of one outstanding forward, at most; under ceilings exactly, on the rank with most tokens and experts. */
static uint64_t step_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  int64_t tokens = plan->inputs.max_tokens, rows[SLUICE_MAX_CHUNKS];
  if (sluice_layer_ceiling(moe) > 0) {
    for (int32_t i = 0; i < plan->num_chunks; ++i) rows[i] = plan->chunk_rows;
    return sluice_plan_step_bytes(moe, plan, plan->num_chunks, rows, tokens,
                                  plan->num_chunks * sluice_plan_sent_rows(moe, plan), plan->worst_rows);
  }
  return sluice_align_up(sizeof(sluice_step_t)) +
         sluice_align_up(sluice_binding_meta_bytes_of(moe, 1, tokens, tokens * moe->config.top_k,
                                                      sluice_plan_any_rows(moe, plan))) +
         most_stored(moe, plan) + (uint64_t)plan->max_chunks * 3 * SLUICE_ALIGNMENT +
         sluice_binding_meta_bytes_of(moe, plan->max_chunks, 0, 0, 0);
}

uint64_t sluice_plan_saved_bytes(const sluice_moe_t* moe, const sluice_plan_data_t* plan) {
  int64_t rows[SLUICE_MAX_CHUNKS];
  if (sluice_is_far(moe)) {
    return sluice_plan_block_bytes(moe, plan, SLUICE_SAVED_INPUT) +
           sluice_plan_block_bytes(moe, plan, SLUICE_SAVED_MIDDLE) - kept_bytes(moe, plan);
  }
  if (sluice_layer_ceiling(moe) == 0) {
    return most_stored(moe, plan) + (uint64_t)plan->max_chunks * 2 * SLUICE_ALIGNMENT;
  }
  for (int32_t i = 0; i < plan->num_chunks; ++i) rows[i] = plan->chunk_rows;
  return stored_buffers(moe, plan, plan->num_chunks, rows);
}

sluice_status_t sluice_plan_measure(sluice_moe_t* layer, sluice_plan_data_t* plan) {
  uint64_t forward = 0, backward = 0, between = 0;
  /* Ceilings are those of the rank with the most experts, so that all ranks find the same plan. */
  sluice_moe_t widest = *layer;
  widest.num_local = sluice_plan_most_local(layer);
  sluice_moe_t* moe = &widest;
  SLUICE_TRY(sluice_plan_slot_bytes(moe, plan, SLUICE_FORWARD, &forward));
  SLUICE_TRY(sluice_plan_slot_bytes(moe, plan, SLUICE_BACKWARD, &backward));
  SLUICE_TRY(between_halves(moe, plan, &between));
  sluice_plan_bytes_t* b = &plan->bytes;
  memset(b, 0, sizeof *b);
  b->base = plan->inputs.base;
  b->slots = sluice_align_up(forward > backward ? forward : backward);
  if (sluice_is_far(moe)) {
    b->routing = sluice_binding_far_bytes(moe, plan->max_chunks, plan->inputs.max_tokens) +
                 sluice_plan_far_parcels_bytes(moe, plan);
    b->step = far_step_bytes(moe, plan) + between;
    b->host_pool = sluice_plan_host_pool_bytes(moe, plan, plan->kept_rows);
    b->total = b->base + b->slots + b->routing + (uint64_t)plan->inputs.max_outstanding * b->step;
    return SLUICE_OK;
  }
  b->routing = sluice_plan_routing_bytes(moe, plan) + sluice_plan_layout_bytes(plan) +
               sluice_plan_cut_bytes(moe, plan) + sluice_plan_parcels_bytes(moe, plan);
  b->schedules = SLUICE_PLANNED_TEMPLATES * sluice_align_up(sluice_template_bytes(plan->max_chunks)) +
                 SLUICE_TEMPLATE_LIST_BYTES + events_bytes(moe, plan);
  b->headers = moe->context->envelope.capacity;
  b->products = strcmp(moe->context->gemm->name, "ref") == 0 ? 0 : SLUICE_GEMM_SCRATCH_BYTES;
  b->step = step_bytes(moe, plan) + between;
  b->host_pool = sluice_plan_host_pool_bytes(moe, plan, plan->kept_rows);
  b->total = b->base + b->slots + b->routing + b->schedules + b->headers + b->products +
             (uint64_t)plan->inputs.max_outstanding * b->step;
  return SLUICE_OK;
}
