// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/layer/layer_life.h"

#include <assert.h>
#include <unistd.h>

#include "backend/base/hash.h"
#include "backend/model/pass_sizes.h"
#include "backend/moe/context/row_memory.h"
#include "backend/moe/layer/placement.h"
#include "backend/plan/plans_by_size.h"

static_assert(sizeof(struct sluice_moe_s) == SLUICE_LAYER_BYTES, "planners count it");

/* Hash of the config without the placement: a layer whose experts move keeps its decisions. */
static uint64_t kind_of(const sluice_moe_t* moe, int32_t world_size) {
  const sluice_moe_config_t* c = &moe->shape.config;
  const int64_t numbers[] = {c->model_width,      c->hidden_width, c->num_experts,  c->top_k,      c->dtype,
                             c->activation,       c->gated,        c->bias,         c->num_chunks, c->wgrad_mode,
                             c->callback_experts, world_size,      c->restore_input};
  const int64_t exchange[] = {c->exchange_mode, c->capacity_rows};
  const float swiglu[] = {c->swiglu_alpha, c->swiglu_limit, c->swiglu_offset};
  uint64_t hash = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, numbers, sizeof numbers);
  hash = sluice_hash_bytes(hash, swiglu, sizeof swiglu);
  if (c->exchange_mode != SLUICE_EXCHANGE_EXACT) hash = sluice_hash_bytes(hash, exchange, sizeof exchange);
  const int is_any = sluice_shape_copies_are_open(&moe->shape);
  const int has_nodes = sluice_shape_has_two_levels(&moe->shape) || sluice_shape_levels_are_open(&moe->shape) ||
                        (is_any && moe->shape.ranks_per_node > 0);
  const int asks_nodes = c->deduplicate >= SLUICE_DEDUPLICATE_NODES && !is_any;
  const int32_t deduplication = asks_nodes && !has_nodes ? sluice_shape_deduplication(&moe->shape) : c->deduplicate;
  if (deduplication) hash = sluice_hash_bytes(hash, &deduplication, sizeof deduplication);
  if (has_nodes) hash = sluice_hash_bytes(hash, &moe->shape.ranks_per_node, sizeof moe->shape.ranks_per_node);
  const int32_t weights[] = {c->weight_format, c->weight_block};
  if (c->weight_format != SLUICE_WEIGHTS_PLAIN) hash = sluice_hash_bytes(hash, weights, sizeof weights);
  if (c->reuse) hash = sluice_hash_bytes(hash, "reuse", 5);
  const int32_t wire = sluice_layer_wire(moe);
  if (wire != SLUICE_WIRE_LAYER_DTYPE) hash = sluice_hash_bytes(hash, &wire, sizeof wire);
  if (c->chunking != SLUICE_CHUNKING_ADAPTIVE) hash = sluice_hash_bytes(hash, &c->chunking, sizeof c->chunking);
  if (c->lora_rank > 0) hash = sluice_hash_bytes(hash, &c->lora_rank, sizeof c->lora_rank);
  if (c->grouping != SLUICE_GROUPING_ADAPTIVE) hash = sluice_hash_bytes(hash, &c->grouping, sizeof c->grouping);
  if (moe->shape.policies.count > 0)
    hash = sluice_hash_bytes(hash, moe->shape.policies.di, (size_t)moe->shape.policies.count);
  return hash;
}

static uint64_t hash_numbers(const sluice_moe_t* moe) {
  return sluice_hash_bytes(moe->kind, moe->first_position,
                           (size_t)(moe->context->world_size + 1) * sizeof *moe->first_position);
}

uint64_t sluice_layer_bytes_kind(const sluice_moe_t* moe) {
  const sluice_shape_t* shape = &moe->shape;
  const int32_t policy = shape->config.restore_pre_activation;
  const uint64_t hash = sluice_hash_bytes(moe->kind, &policy, sizeof policy);
  return sluice_hash_bytes(hash, shape->policies.m, (size_t)shape->policies.count);
}

uint64_t sluice_layer_plan_key(const sluice_moe_t* moe) { return hash_numbers(moe); }

void sluice_layer_place(sluice_moe_t* moe, const sluice_expert_placement_t* placement) {
  const int32_t num_experts = moe->shape.config.num_experts;
  sluice_placement_fill(placement, num_experts, moe->context->world_size, moe->expert_position, moe->first_position);
  sluice_shape_set_experts(&moe->shape, moe->first_position);
  moe->placement_epoch = placement->epoch;
  uint64_t hash = sluice_hash_bytes(hash_numbers(moe), &placement->epoch, sizeof placement->epoch);
  moe->fingerprint = sluice_hash_bytes(hash, moe->expert_position, (size_t)num_experts * sizeof(int32_t));
}

/* Whether the layer has a choice. It has none on one rank, which has nothing to overlap, or if n, the mode of several
 * chunks and the deduplication are configured. A layer that makes plans chooses between plans. */
static int is_open(const sluice_moe_t* moe) {
  const sluice_moe_config_t* c = &moe->shape.config;
  if (sluice_makes_plans(moe)) return 1;
  if (c->reuse || sluice_shape_travel_is_open(&moe->shape)) return 1;
  if (moe->context->world_size == 1) return 0;
  return c->num_chunks == 0 || (c->num_chunks > 1 && c->wgrad_mode == SLUICE_WGRAD_ADAPTIVE);
}

/* The number of ranks of a node if tokens may be sent by node. 0 for a layer that leaves this open and cannot have two
 * levels. */
static int32_t ranks_per_node_of(const sluice_context_t* context, const sluice_moe_config_t* c) {
  enum { MOST = 64 }; /* a bit for each rank of a node */
  const int has_one_level = context->rows->is_device || c->reuse || context->ranks_per_node > MOST;
  return c->deduplicate >= SLUICE_DEDUPLICATE_ADAPTIVE && has_one_level ? 0 : context->ranks_per_node;
}

/* Replaces ANY with NONE if the layer cannot be deduplicated, or if the policy hook cannot choose. Such a layer sends
 * rows without a race, and has the kind and the decisions of a layer that was configured with NONE. */
static void settle_copies(sluice_moe_t* moe) {
  if (!sluice_shape_copies_are_open(&moe->shape)) return;
  sluice_moe_config_t* c = &moe->shape.config;
  const sluice_context_t* context = moe->context;
  sluice_policy_hook_t* hook = context->policy_hook;
  const int has_copies = context->world_size > 1 && c->top_k > 1 && !c->reuse &&
                         c->exchange_mode == SLUICE_EXCHANGE_EXACT && !sluice_makes_plans(moe);
  moe->kind = kind_of(moe, context->world_size); /* the kind that imported decisions have, if the layer stays open */
  const int is_chosen = hook != NULL && hook->vtable->chooses_copies(hook, moe);
  if (!has_copies || !is_chosen) c->deduplicate = SLUICE_DEDUPLICATE_NONE;
}

static sluice_status_t take_decision(sluice_moe_t* moe) {
  const sluice_moe_config_t* c = &moe->shape.config;
  sluice_policy_hook_t* policy_hook = moe->context->policy_hook;
  moe->decision = (sluice_decision_state_t){.choice.num_chunks = (int16_t)(c->num_chunks > 0 ? c->num_chunks : 1),
                                            .choice.deduplicate = (uint8_t)sluice_shape_deduplication(&moe->shape),
                                            .is_settled = 1};
  if (c->reuse && !sluice_makes_plans(moe)) { /* the initial choice: the set that stores nothing */
    moe->decision.choice.restore_set = SLUICE_NUM_RESTORE_SETS - 1;
    if (c->num_chunks == 0) moe->decision.choice.num_chunks = 2;
  }
  if (policy_hook == NULL || sluice_shape_capacity(&moe->shape) > 0)
    return SLUICE_OK; /* no headers: no reports to choose by */
  if (!is_open(moe)) return SLUICE_OK;
  return policy_hook->vtable->attach(policy_hook, moe, &moe->decision);
}

/* Gradients of adapters take few GEMMs: chunk by chunk they hold no rows of other chunks. */
static void choose_wgrad_of_adapters(sluice_shape_t* shape) {
  sluice_moe_config_t* c = &shape->config;
  const int is_open = c->wgrad_mode == SLUICE_WGRAD_ADAPTIVE && !sluice_shape_is_lean(shape);
  if (c->lora_rank > 0 && is_open) c->wgrad_mode = SLUICE_WGRAD_PER_CHUNK;
}

/* moe->capacity stays NULL for layers without a capacity. */
static sluice_status_t create_capacity(sluice_moe_t* moe) {
  sluice_context_t* context = moe->context;
  if (sluice_shape_capacity(&moe->shape) == 0) return SLUICE_OK;
  moe->capacity = sluice_alloc_zeroed(&context->allocator, sizeof *moe->capacity, "state of a layer under a capacity");
  if (moe->capacity == NULL) return sluice_alloc_status();
  moe->capacity->drop_counters =
      sluice_alloc(context->memory, SLUICE_DROP_COUNTERS_BYTES, "drop counters of a layer under a capacity");
  return moe->capacity->drop_counters != NULL ? SLUICE_OK : sluice_alloc_status();
}

sluice_status_t sluice_layer_begin(sluice_context_t* context, const sluice_moe_config_t* config,
                                   const sluice_chunk_policies_t* policies, sluice_moe_t** out_moe) {
  *out_moe = NULL;
  SLUICE_TRY(sluice_engine_reserve_headers(context));
  sluice_moe_t* moe = sluice_alloc_zeroed(&context->allocator, sizeof *moe, "layer");
  if (moe == NULL) return sluice_alloc_status();
  const uint64_t tables = sluice_layer_tables_bytes(config->num_experts, context->world_size);
  moe->expert_position = sluice_alloc_zeroed(&context->allocator, tables, "layer tables");
  if (moe->expert_position == NULL) {
    sluice_free(&context->allocator, moe, sizeof *moe);
    return sluice_alloc_status();
  }
  moe->first_position = moe->expert_position + config->num_experts;
  atomic_init(&moe->references, 1);
  sluice_engine_retain(context);
  moe->context = context;
  sluice_shape_init(&moe->shape, config, policies, context->rank, context->world_size, NULL, context->rows->is_device);
  sluice_shape_set_nodes(&moe->shape, ranks_per_node_of(context, config));
  settle_copies(moe);
  choose_wgrad_of_adapters(&moe->shape);
  moe->kind = kind_of(moe, context->world_size);
  const sluice_expert_placement_t placement = {.expert_rank = config->expert_rank, .expert_slot = config->expert_slot};
  sluice_layer_place(moe, &placement);
  sluice_status_t status = take_decision(moe);
  if (status == SLUICE_OK) status = create_capacity(moe);
  if (status == SLUICE_OK && context->memory_budget > 0) {
    status = sluice_neighbours_add(&context->shapes, sluice_layer_bytes_kind(moe), &moe->shape);
  }
  if (status != SLUICE_OK) {
    sluice_layer_release(moe);
    return status;
  }
  ++context->num_layers;
  *out_moe = moe;
  return SLUICE_OK;
}

static uint64_t tables_bytes(const sluice_moe_t* moe) {
  return sluice_layer_tables_bytes(moe->shape.config.num_experts, moe->context->world_size);
}

uint64_t sluice_layer_bytes(const sluice_moe_t* moe) {
  return sluice_align_up(sizeof *moe) + sluice_align_up(tables_bytes(moe));
}

void sluice_layer_retain(sluice_moe_t* moe) { atomic_fetch_add(&moe->references, 1); }

static void drop_timers(sluice_moe_t* moe) {
  for (int i = 0; i < 2; ++i) {
    sluice_rows_destroy_timer(moe->context->rows, moe->context, moe->decision.timers[i]);
    moe->decision.timers[i] = NULL;
  }
}

static void destroy_capacity(sluice_moe_t* moe) {
  if (moe->capacity == NULL) return;
  sluice_free(moe->context->memory, moe->capacity->drop_counters, SLUICE_DROP_COUNTERS_BYTES);
  sluice_free(&moe->context->allocator, moe->capacity, sizeof *moe->capacity);
  moe->capacity = NULL;
}

void sluice_layer_release(sluice_moe_t* moe) {
  if (moe == NULL || moe->context->pid != getpid()) return; /* in a forked child: the parent owns the memory */
  if (atomic_fetch_sub(&moe->references, 1) != 1) return;
  sluice_context_t* context = moe->context;
  destroy_capacity(moe);
  drop_timers(moe);
  sluice_ledger_disown(&context->ledger, moe);
  sluice_free(&context->allocator, moe->expert_position, tables_bytes(moe));
  sluice_plans_by_size_free(moe->plans);
  sluice_free(&context->allocator, moe, sizeof *moe);
  sluice_engine_release(context);
}
