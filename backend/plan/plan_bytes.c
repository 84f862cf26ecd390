// SPDX-License-Identifier: Apache-2.0
/* The bytes of a plan at its capacities, by category. */
#include "backend/plan/plan_sizes.h"

#include <string.h>

#include "backend/model/pass_sizes.h"
#include "backend/schedule/template/template.h"

/* ---- tables of node copies; 0 with one level ---- */

/* Returns the maximum number of node copies that a rank receives in a pass, for any ids: every token with its local
 * index. */
static int64_t any_node_copies(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  if (!sluice_shape_has_two_levels(&problem->shape)) return -1;
  return problem->shape.world_size / problem->shape.ranks_per_node * plan->inputs.max_tokens;
}

/* Returns the maximum number of bytes of the saved form of node copies, in this many chunks. */
static uint64_t node_copies_meta_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                       int32_t num_chunks) {
  return sluice_binding_meta_node_copies_bytes(&problem->shape, num_chunks, any_node_copies(problem, plan));
}

/* Returns the maximum number of node copies of a rank's own tokens: the number of routes, or one for each node. */
static int64_t any_sent(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  return sluice_min(plan->inputs.max_tokens * problem->shape.config.top_k, any_node_copies(problem, plan));
}

/* A message has counts by chunk, and a word for each token. */
static uint64_t node_copies_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  const int64_t arriving = any_node_copies(problem, plan), tokens = plan->inputs.max_tokens;
  const uint64_t word = sizeof(uint64_t), counts = (uint64_t)plan->max_chunks * sizeof(int32_t);
  if (arriving < 0) return 0;
  const sluice_node_copies_size_t size = {plan->max_chunks, tokens, any_sent(problem, plan), arriving,
                                          (int64_t)(sluice_round_up_u64(counts, word) + (uint64_t)tokens * word)};
  return sluice_align_up(sluice_node_copies_bytes(&problem->shape, &size));
}

static uint64_t device_node_copies_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  const int64_t arriving = any_node_copies(problem, plan);
  if (arriving < 0) return 0;
  const int64_t forwards = arriving * sluice_min(problem->shape.ranks_per_node, problem->shape.config.top_k);
  return sluice_align_up(sluice_node_copies_on_device_bytes(&problem->shape, plan->inputs.max_tokens,
                                                            any_sent(problem, plan), arriving, forwards));
}

/* ---- the bytes by category ---- */

/* The two tensors that policies apply to. */
enum { DI, M, NUM_RESTORED };
static const int32_t restored_tensors[NUM_RESTORED] = {SLUICE_T_KEPT_DI, SLUICE_T_KEPT_M};

static int32_t policy_of(const sluice_plan_data_t* plan, int which, int32_t chunk) {
  return which == DI ? sluice_plan_di(plan, chunk) : sluice_plan_m(plan, chunk);
}

/* Returns the number of chunks for whose policy `is_so` holds; INT32_MAX if all chunks have the same policy and it
 * holds. */
static int64_t chunks_with(const sluice_plan_data_t* plan, int which, sluice_restore_question_t is_so) {
  const int32_t listed = plan->inputs.policies.count;
  if (listed == 0) return is_so(policy_of(plan, which, 0)) ? INT32_MAX : 0;
  int64_t chunks = 0;
  for (int32_t i = 0; i < listed; ++i) chunks += is_so(policy_of(plan, which, i));
  return chunks;
}

/* Returns the maximum number of rows of `chunks` chunks, among the rows that are kept. */
static uint64_t rows_of_chunks(const sluice_plan_data_t* plan, int64_t chunks, int64_t kept_rows) {
  return (uint64_t)(chunks == INT32_MAX ? kept_rows : sluice_min(kept_rows, chunks * plan->chunk_rows));
}

static uint64_t rows_with(const sluice_plan_data_t* plan, int which, sluice_restore_question_t is_so,
                          int64_t kept_rows) {
  return rows_of_chunks(plan, chunks_with(plan, which, is_so), kept_rows);
}

uint64_t sluice_plan_row_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                               sluice_restore_question_t is_so) {
  uint64_t bytes = 0;
  for (int which = 0; which < NUM_RESTORED; ++which) {
    if (chunks_with(plan, which, is_so) > 0) bytes += sluice_row_bytes(&problem->shape, restored_tensors[which]);
  }
  return bytes;
}

/* The pool has one buffer per chunk and tensor, each rounded up. */
uint64_t sluice_plan_host_pool_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                     int64_t kept_rows) {
  uint64_t bytes = 0;
  if (sluice_plan_row_bytes(problem, plan, sluice_restore_is_offloaded) == 0) return 0;
  for (int which = 0; which < NUM_RESTORED; ++which) {
    bytes += rows_with(plan, which, sluice_restore_is_offloaded, kept_rows) *
             sluice_row_bytes(&problem->shape, restored_tensors[which]);
  }
  return (uint64_t)plan->inputs.max_outstanding * (bytes + (uint64_t)plan->max_chunks * 2 * SLUICE_ALIGNMENT);
}

/* Returns the bytes of the slots of chunks for whose policy `is_so` holds, at most max_chunks slots, each rounded up to
 * whole cache lines. */
static uint64_t stored_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan, int which,
                             sluice_restore_question_t is_so) {
  if (chunks_with(plan, which, is_so) == 0) return 0;
  uint64_t bytes =
      rows_with(plan, which, is_so, plan->kept_rows) * sluice_row_bytes(&problem->shape, restored_tensors[which]) +
      (uint64_t)plan->max_chunks * SLUICE_ALIGNMENT;
  return bytes / SLUICE_ALIGNMENT * SLUICE_ALIGNMENT;
}

/* Returns the maximum number of token copies of a pass for any ids: one of each token for each rank. */
static int64_t any_token_copies(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  return sluice_min(sluice_plan_any_rows(problem, plan), problem->shape.world_size * plan->inputs.max_tokens);
}

static int32_t max_ops(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  return sluice_template_max_ops(plan->max_chunks, sluice_shape_has_two_levels(&problem->shape));
}

/* Returns the bytes of the block before a step's rows. */
static uint64_t kept_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  return sluice_binding_routes_bytes(&problem->shape, plan->inputs.max_tokens) +
         sluice_token_copies_kept_bytes_of(&problem->shape, any_token_copies(problem, plan),
                                           sluice_plan_any_rows(problem, plan));
}

static uint64_t device_token_copies_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  return sluice_align_up(sluice_token_copies_on_device_bytes(
      &problem->shape, plan->inputs.max_tokens, any_token_copies(problem, plan), sluice_plan_any_rows(problem, plan)));
}

uint64_t sluice_plan_block_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan, int32_t which) {
  switch (which) {
    case SLUICE_SAVED_INPUT: return kept_bytes(problem, plan) + stored_bytes(problem, plan, DI, sluice_restore_is_kept);
    case SLUICE_SAVED_PRE_ACTIVATION: return stored_bytes(problem, plan, M, sluice_restore_is_kept);
    case SLUICE_SAVED_HOST_INPUT: return stored_bytes(problem, plan, DI, sluice_restore_is_offloaded);
    case SLUICE_SAVED_HOST_PRE_ACTIVATION: return stored_bytes(problem, plan, M, sluice_restore_is_offloaded);
    default: return 0;
  }
}

static uint64_t device_step_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  return sluice_plan_block_bytes(problem, plan, SLUICE_SAVED_INPUT) +
         sluice_plan_block_bytes(problem, plan, SLUICE_SAVED_PRE_ACTIVATION);
}

/* Returns the step's buffer for chunks of a tensor for whose policy `is_so` holds; an empty block still takes one cache
 * line. */
static uint64_t stored_buffer(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan, int which,
                              sluice_restore_question_t is_so, int32_t num_chunks, const int64_t* kept_chunk_rows) {
  uint64_t row = sluice_row_bytes(&problem->shape, restored_tensors[which]), rows = 0, slots = 0;
  int32_t in_place = 0;
  for (int32_t i = 0; i < num_chunks; ++i) {
    const int32_t policy = policy_of(plan, which, i);
    if (kept_chunk_rows[i] < 0 || !is_so(policy)) continue;
    rows += (uint64_t)kept_chunk_rows[i];
    slots += sluice_align_up((uint64_t)kept_chunk_rows[i] * row);
    in_place += sluice_restore_is_kept(policy);
  }
  int joined = in_place == num_chunks && (which == DI || !problem->shape.config.callback_experts);
  return sluice_align_up((uint64_t)sluice_max(1, (int64_t)(joined ? rows * row : slots)));
}

/* Returns the step's buffers of kept and offloaded rows. */
static uint64_t stored_buffers(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan, int32_t num_chunks,
                               const int64_t* kept_chunk_rows) {
  uint64_t bytes = 0;
  for (int which = 0; which < NUM_RESTORED; ++which) {
    bytes += stored_buffer(problem, plan, which, sluice_restore_is_kept, num_chunks, kept_chunk_rows) +
             stored_buffer(problem, plan, which, sluice_restore_is_offloaded, num_chunks, kept_chunk_rows);
  }
  return bytes;
}

/* Returns the maximum of the same for any routing, without the rounding of each chunk. */
static uint64_t most_stored(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  uint64_t bytes = 0;
  for (int which = 0; which < NUM_RESTORED; ++which) {
    uint64_t rows = rows_with(plan, which, sluice_restore_is_stored, plan->kept_rows) *
                    sluice_row_bytes(&problem->shape, restored_tensors[which]);
    bytes += sluice_align_up(rows == 0 ? 1 : rows) + SLUICE_ALIGNMENT;
  }
  return bytes;
}

uint64_t sluice_plan_step_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                int32_t num_chunks, const int64_t* kept_chunk_rows, int64_t num_tokens,
                                int64_t num_sent, int64_t num_rows) {
  if (problem->shape.on_device_memory) return device_step_bytes(problem, plan); /* the same for any routing */
  uint64_t bytes =
      sluice_align_up(SLUICE_STEP_BYTES) +
      sluice_align_up(sluice_binding_meta_bytes_of(&problem->shape, num_chunks, num_tokens, num_sent, num_rows) +
                      node_copies_meta_bytes(problem, plan, num_chunks));
  return bytes + stored_buffers(problem, plan, num_chunks, kept_chunk_rows);
}

/* Returns whether all chunks are restored in the same way for any routing. */
static int is_uniform(const sluice_plan_data_t* plan) {
  if (plan->inputs.policies.count > 0) return 0;
  return plan->kept_rows >= plan->worst_rows ||
         !(sluice_restore_is_stored(plan->restore_input) || sluice_restore_is_stored(plan->restore_pre_activation));
}

/* behind_list: number of the template's chunks after the list. */
static void fill_policies(const sluice_plan_data_t* plan, int32_t behind_list, sluice_template_spec_t* spec) {
  int32_t most = is_uniform(plan) ? spec->num_chunks : spec->num_chunks / 2;
  if (plan->inputs.policies.count > 0) most = spec->num_chunks - behind_list;
  for (int32_t i = 0; i < spec->num_chunks; ++i) {
    int stored = i < most;
    spec->restore_input[i] = (uint8_t)(stored ? sluice_plan_di(plan, i) : sluice_restore_least(SLUICE_T_DI));
    spec->restore_pre_activation[i] = (uint8_t)(stored ? sluice_plan_m(plan, i) : sluice_restore_least(SLUICE_T_M));
  }
}

#define BEHIND_LIST 2 /* consecutive chunks, like those that no longer fit */

/* Returns a number of chunks that suffices for every ring. */
static int32_t small_chunks(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  const int32_t listed = plan->inputs.policies.count;
  if (sluice_shape_capacity(&problem->shape) > 0) return plan->num_chunks;
  if (listed > 0) return (int32_t)sluice_min(listed, SLUICE_PLAN_BLOCKS) + BEHIND_LIST;
  return (int32_t)sluice_min(plan->max_chunks, 4);
}

static sluice_template_spec_t small_spec(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                         int32_t direction, int32_t weights) {
  sluice_template_spec_t spec = {
      .direction = direction,
      .num_chunks = small_chunks(problem, plan),
      .single_rank = problem->shape.world_size == 1,
      .keep = direction == SLUICE_FORWARD,
      .callback = problem->shape.config.callback_experts,
      .gated = problem->shape.config.gated != SLUICE_GATED_NO,
      .bounded = 1,
      .low_rank = problem->shape.config.lora_rank > 0,
      .dedup = sluice_shape_deduplication(&problem->shape),
      .dgrad = direction == SLUICE_BACKWARD,
      .wgrad = direction == SLUICE_BACKWARD ? weights : SLUICE_WGRAD_CALL_NONE,
      .wgrad_mode = plan->wgrad_mode,
  };
  fill_policies(plan, sluice_shape_capacity(&problem->shape) > 0 ? 0 : BEHIND_LIST, &spec);
  spec.shares_act = plan->shares_act && sluice_spec_offloads_m(&spec);
  return spec;
}

sluice_status_t sluice_plan_small_template(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                           int32_t direction, int32_t weights, sluice_template_t** out_schedule) {
  const sluice_template_spec_t spec = small_spec(problem, plan, direction, weights);
  return sluice_template_build(&spec, sluice_process_allocator(), out_schedule);
}

sluice_status_t sluice_plan_small_rings(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                        int32_t direction, int32_t weights, sluice_plan_rings_t* out_rings) {
  const sluice_template_spec_t spec = small_spec(problem, plan, direction, weights);
  return sluice_ring_memo_get(problem->rings, &spec, out_rings);
}

uint64_t sluice_plan_tensor_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                  const sluice_plan_rings_t* rings, int32_t t) {
  const sluice_template_spec_t* spec = &rings->spec;
  int given = t == SLUICE_T_KEPT_DI || t == SLUICE_T_KEPT_M || t == SLUICE_T_HOST_DI || t == SLUICE_T_HOST_M;
  uint64_t row = sluice_row_bytes(&problem->shape, t), ring = (uint64_t)rings->ring[t];
  if (given || row == 0 || ring == 0) return 0;
  uint64_t rows = (uint64_t)plan->chunk_rows;
  if (t == SLUICE_T_SEND || t == SLUICE_T_RECV) rows = (uint64_t)sluice_plan_travelling_rows(problem, plan);
  if (t == SLUICE_T_NODE) rows = (uint64_t)sluice_plan_forwards(problem, plan);
  if (t == SLUICE_T_COPY_WEIGHTS) rows = (uint64_t)sluice_plan_arriving_token_copies(problem, plan);
  int one_per_chunk = ring == (uint64_t)spec->num_chunks && spec->num_chunks > 2;
  if (spec->direction == SLUICE_BACKWARD &&
      (plan->wgrad_mode == SLUICE_WGRAD_DEFERRED || spec->wgrad == SLUICE_WGRAD_CALL_LATER)) {
    one_per_chunk |= t == SLUICE_T_DI || t == SLUICE_T_M; /* all chunks that were not kept, until the last GEMM */
  }
  if (one_per_chunk && sluice_shape_capacity(&problem->shape) == 0) {
    return sluice_align_up((uint64_t)plan->worst_rows * row + (uint64_t)plan->max_chunks * SLUICE_ALIGNMENT);
  }
  return ring * sluice_align_up(rows * row);
}

sluice_status_t sluice_plan_slot_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                       int32_t direction, uint64_t* out_bytes) {
  sluice_plan_rings_t rings;
  SLUICE_TRY(sluice_plan_small_rings(problem, plan, direction, SLUICE_WGRAD_CALL_NOW, &rings));
  uint64_t tensors = 0;
  for (int32_t t = 0; t < SLUICE_T_COUNT; ++t) tensors += sluice_plan_tensor_bytes(problem, plan, &rings, t);
  if (direction == SLUICE_BACKWARD) {
    tensors +=
        sluice_align_up(sluice_weight_sum_most(&problem->shape, plan->wgrad_mode, plan->max_chunks, !is_uniform(plan)));
  }
  int64_t scalars = sluice_max(plan->chunk_rows, sluice_plan_sent_rows(problem, plan));
  if (problem->shape.on_device_memory) {
    *out_bytes = tensors + sluice_pass_device_scratch_bytes(&problem->shape, (uint64_t)scalars * sizeof(float));
    return SLUICE_OK;
  }
  *out_bytes =
      tensors + sluice_pass_scratch_bytes(&problem->shape, (uint64_t)scalars * sizeof(float), max_ops(problem, plan));
  return SLUICE_OK;
}

sluice_status_t sluice_plan_deferred_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                           uint64_t* out_bytes) {
  const sluice_plan_problem_t widest = sluice_plan_problem_widest(problem);
  sluice_plan_rings_t rings;
  SLUICE_TRY(sluice_plan_small_rings(&widest, plan, SLUICE_BACKWARD, SLUICE_WGRAD_CALL_LATER, &rings));
  for (int32_t i = 0; i < SLUICE_NUM_DEFERRED; ++i) {
    out_bytes[i] = sluice_plan_tensor_bytes(&widest, plan, &rings, sluice_deferred_tensors[i]);
  }
  return SLUICE_OK;
}

/* Computes the bytes between dgrad and wgrad of one backward; 0 if the host never separates them. */
static sluice_status_t between_halves(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                      uint64_t out_bytes[SLUICE_NUM_DEFERRED], uint64_t* out_sum) {
  memset(out_bytes, 0, SLUICE_NUM_DEFERRED * sizeof *out_bytes);
  *out_sum = 0;
  if (!plan->inputs.separate_wgrad) return SLUICE_OK;
  SLUICE_TRY(sluice_plan_deferred_bytes(problem, plan, out_bytes));
  for (int32_t i = 0; i < SLUICE_NUM_DEFERRED; ++i) *out_sum += out_bytes[i];
  return SLUICE_OK;
}

static uint64_t events_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  return problem->events_bytes == NULL ? 0 : problem->events_bytes(problem->device, max_ops(problem, plan));
}

static uint64_t layout_bytes(const sluice_plan_data_t* plan) {
  return SLUICE_T_COUNT * sluice_align_up((uint64_t)plan->max_chunks * sizeof(uint64_t));
}

static uint64_t chunking_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  if (sluice_shape_capacity(&problem->shape) > 0) return 0;                     /* there are no blocks */
  const uint64_t tables = sluice_shape_has_two_levels(&problem->shape) ? 2 : 1; /* rows to forward as well */
  return sluice_align_up(tables * (uint64_t)plan->num_blocks * (uint64_t)problem->shape.world_size * 8) +
         sluice_align_up(((uint64_t)plan->num_blocks + 1) * 8);
}

static uint64_t routing_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  return sluice_align_up(sluice_binding_arena_bytes(&problem->shape, plan->max_chunks, plan->inputs.max_tokens));
}

static uint64_t token_copies_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  if (!sluice_shape_is_deduplicated(&problem->shape)) return 0;
  int64_t tokens = plan->inputs.max_tokens, rows = sluice_plan_any_rows(problem, plan);
  const sluice_token_copies_size_t size = {plan->max_chunks, tokens, tokens * problem->shape.config.top_k, rows,
                                           any_token_copies(problem, plan)};
  return sluice_align_up(sluice_token_copies_bytes(&problem->shape, &size, 0));
}

/* Returns the maximum for one outstanding forward; with a capacity the exact bytes, on the rank with the most tokens
 * and experts. */
static uint64_t step_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  int64_t tokens = plan->inputs.max_tokens, rows[SLUICE_MAX_CHUNKS];
  if (sluice_shape_capacity(&problem->shape) > 0) {
    for (int32_t i = 0; i < plan->num_chunks; ++i) rows[i] = plan->chunk_rows;
    return sluice_plan_step_bytes(problem, plan, plan->num_chunks, rows, tokens,
                                  plan->num_chunks * sluice_plan_sent_rows(problem, plan), plan->worst_rows);
  }
  return sluice_align_up(SLUICE_STEP_BYTES) +
         sluice_align_up(sluice_binding_meta_bytes_of(&problem->shape, 1, tokens, tokens * problem->shape.config.top_k,
                                                      sluice_plan_any_rows(problem, plan))) +
         most_stored(problem, plan) + (uint64_t)plan->max_chunks * 3 * SLUICE_ALIGNMENT +
         sluice_binding_meta_bytes_of(&problem->shape, plan->max_chunks, 0, 0, 0) +
         node_copies_meta_bytes(problem, plan, plan->max_chunks);
}

uint64_t sluice_plan_saved_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  int64_t rows[SLUICE_MAX_CHUNKS];
  if (problem->shape.on_device_memory) {
    return sluice_plan_block_bytes(problem, plan, SLUICE_SAVED_INPUT) +
           sluice_plan_block_bytes(problem, plan, SLUICE_SAVED_PRE_ACTIVATION) - kept_bytes(problem, plan);
  }
  if (sluice_shape_capacity(&problem->shape) == 0) {
    return most_stored(problem, plan) + (uint64_t)plan->max_chunks * 2 * SLUICE_ALIGNMENT;
  }
  for (int32_t i = 0; i < plan->num_chunks; ++i) rows[i] = plan->chunk_rows;
  return stored_buffers(problem, plan, plan->num_chunks, rows);
}

/* Returns all arenas except that of slots. problem: of the widest rank. */
static sluice_plan_arenas_t arenas_of(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  sluice_plan_arenas_t arenas = {
      .binding = routing_bytes(problem, plan), .layout = layout_bytes(plan), .cut = chunking_bytes(problem, plan)};
  if (problem->shape.on_device_memory) {
    arenas.device_token_copies = device_token_copies_bytes(problem, plan);
    arenas.device_node_copies = device_node_copies_bytes(problem, plan);
    arenas.routes = sluice_binding_device_bytes(&problem->shape, &problem->device_scratch, plan->max_chunks,
                                                plan->inputs.max_tokens);
  } else {
    arenas.token_copies = token_copies_bytes(problem, plan);
    arenas.node_copies = node_copies_bytes(problem, plan);
  }
  return arenas;
}

sluice_plan_arenas_t sluice_plan_arenas(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan) {
  const sluice_plan_problem_t widest = sluice_plan_problem_widest(problem);
  sluice_plan_arenas_t arenas = arenas_of(&widest, plan);
  arenas.slots = plan->bytes.slots;
  if (problem->shape.on_device_memory) { /* other plans may have raised the bytes of routing */
    arenas.routes = plan->bytes.routing - arenas.device_token_copies - arenas.device_node_copies;
  }
  return arenas;
}

sluice_status_t sluice_plan_measure(const sluice_plan_problem_t* own, sluice_plan_data_t* plan) {
  uint64_t forward = 0, backward = 0, deferred[SLUICE_NUM_DEFERRED], between = 0;
  /* Capacities are those of the rank with the most experts, so that all ranks compute the same plan. */
  const sluice_plan_problem_t widest = sluice_plan_problem_widest(own);
  const sluice_plan_problem_t* problem = &widest;
  SLUICE_TRY(sluice_plan_slot_bytes(problem, plan, SLUICE_FORWARD, &forward));
  SLUICE_TRY(sluice_plan_slot_bytes(problem, plan, SLUICE_BACKWARD, &backward));
  SLUICE_TRY(between_halves(problem, plan, deferred, &between));
  const sluice_plan_arenas_t arenas = arenas_of(problem, plan);
  sluice_plan_bytes_t* b = &plan->bytes;
  memset(b, 0, sizeof *b);
  b->base = plan->inputs.base;
  b->slots = sluice_align_up(forward > backward ? forward : backward);
  if (problem->shape.on_device_memory) {
    b->routing = arenas.routes + arenas.device_token_copies + arenas.device_node_copies;
    b->step = device_step_bytes(problem, plan) + between;
    memcpy(b->deferred, deferred, sizeof deferred);
  } else {
    b->routing = arenas.binding + arenas.layout + arenas.cut + arenas.token_copies + arenas.node_copies;
    b->schedules = SLUICE_PLANNED_TEMPLATES * sluice_align_up(sluice_template_bytes(
                                                  plan->max_chunks, sluice_shape_has_two_levels(&problem->shape))) +
                   SLUICE_TEMPLATE_LIST_BYTES + events_bytes(problem, plan);
    b->headers = problem->header_bytes;
    b->gemms = problem->gemm_bytes;
    b->step = step_bytes(problem, plan) + between;
  }
  b->host_pool = sluice_plan_host_pool_bytes(problem, plan, plan->kept_rows);
  b->total = b->base + b->slots + b->routing + b->schedules + b->headers + b->gemms +
             (uint64_t)plan->inputs.max_outstanding * b->step;
  return SLUICE_OK;
}
