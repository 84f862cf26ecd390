// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/context/context.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/model/pass_sizes.h"
#include "backend/moe/context/policy_hook.h"
#include "backend/moe/context/row_memory.h"
#include "backend/schedule/check/check.h"
#include "backend/schedule/template/template.h"
#include "sluice/moe.h"

/* ---- offloaded rows between steps ---- */

static void reclaim_pools(void* user) {
  sluice_context_t* context = user;
  for (int32_t i = 0; i < SLUICE_NUM_POOLS; ++i) {
    sluice_pool_reclaim(&context->own_pools[i]);
    sluice_pool_reclaim(&context->host_pools[i]);
  }
}

int32_t sluice_engine_pool_of(int32_t which) {
  if (which == SLUICE_SAVED_HOST_INPUT) return SLUICE_POOL_INPUT;
  return which == SLUICE_SAVED_HOST_PRE_ACTIVATION ? SLUICE_POOL_PRE_ACTIVATION : -1;
}

uint64_t sluice_engine_idle_bytes(sluice_context_t* context) {
  uint64_t bytes = 0;
  for (int32_t i = 0; i < SLUICE_NUM_POOLS; ++i) {
    bytes += sluice_pool_idle_bytes(&context->own_pools[i]) + sluice_pool_idle_bytes(&context->host_pools[i]);
  }
  return bytes;
}

uint64_t sluice_engine_pool_allocations(sluice_context_t* context) {
  uint64_t count = 0;
  for (int32_t i = 0; i < SLUICE_NUM_POOLS; ++i) {
    count += sluice_pool_num_allocations(&context->own_pools[i]) + sluice_pool_num_allocations(&context->host_pools[i]);
  }
  return count;
}

/* ---- making and destroying ---- */

sluice_status_t sluice_engine_create(sluice_comm_t* comm, sluice_allocate_fn_t allocate, sluice_free_fn_t release,
                                     void* allocate_user, sluice_context_t** out_context) {
  *out_context = NULL;
  sluice_context_t* context = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *context, "context");
  if (context == NULL) return sluice_alloc_status();
  atomic_init(&context->references, 1);
  atomic_init(&context->busy, 0);
  atomic_init(&context->step_bytes, 0);
  sluice_ledger_init(&context->ledger);
  sluice_live_steps_init(&context->live_steps);
  for (int32_t i = 0; i < SLUICE_NUM_POOLS; ++i) {
    sluice_pool_init(&context->own_pools[i], &context->allocator, 0);
    sluice_pool_init(&context->host_pools[i], &context->allocator, 1);
  }
  context->pid = getpid();
  sluice_allocator_init(&context->allocator, allocate, release, allocate_user);
  context->allocator.reclaim = reclaim_pools, context->allocator.reclaim_user = context;
  sluice_allocator_init(&context->device_allocator, NULL, NULL, NULL);
  context->memory = &context->allocator;
  context->rows = &sluice_rows_in_host_memory;
  context->world_size = 1;
  context->device_type = SLUICE_DEVICE_CPU;
  if (comm != NULL) {
    sluice_comm_retain(comm);
    context->comm = comm;
    context->rank = comm->rank;
    context->world_size = comm->world_size;
  }
  const char* poison = getenv("SLUICE_POISON");
  context->poison = poison != NULL && strcmp(poison, "1") == 0;
  sluice_pass_memory_init(&context->pass_memory, &context->allocator, &context->allocator);
  sluice_arena_init(&context->header, &context->allocator);
  *out_context = context;
  return SLUICE_OK;
}

void sluice_engine_retain(sluice_context_t* context) { atomic_fetch_add(&context->references, 1); }

static void drop_templates(sluice_context_t* context) {
  sluice_template_cache_t* cache = &context->templates;
  for (int32_t i = 0; i < cache->count && cache->block == NULL; ++i) {
    sluice_template_destroy(cache->items[i], &context->allocator);
  }
  sluice_free(&context->allocator, cache->items, (uint64_t)cache->capacity * sizeof(sluice_template_t*));
  sluice_free(&context->allocator, cache->block, cache->block_bytes);
  memset(cache, 0, sizeof *cache);
}

static void destroy(sluice_context_t* context) {
  /* In a forked child the lanes' threads do not exist: joining them would hang, so their memory is left alone. */
  if (context->pid != getpid()) return;
  context->rows->end_lanes(context);
  sluice_gemm_destroy(context->gemm);
  drop_templates(context);
  sluice_ring_memo_deinit(&context->rings);
  sluice_neighbours_deinit(&context->shapes);
  sluice_free(sluice_process_allocator(), context->trace.events,
              (uint64_t)context->trace.capacity * sizeof(sluice_trace_event_t));
  sluice_pass_memory_deinit(&context->pass_memory);
  sluice_arena_deinit(&context->header);
  if (context->policy_hook != NULL) context->policy_hook->vtable->destroy(context->policy_hook);
  sluice_comm_release(context->comm);
  context->rows->end_memory(context);
  sluice_ledger_deinit(&context->ledger);
  sluice_live_steps_deinit(&context->live_steps);
  for (int32_t i = 0; i < SLUICE_NUM_POOLS; ++i) {
    sluice_pool_deinit(&context->own_pools[i]);
    sluice_pool_deinit(&context->host_pools[i]);
  }
  sluice_allocator_deinit(&context->allocator);
  sluice_free(sluice_process_allocator(), context, sizeof *context);
}

void sluice_engine_release(sluice_context_t* context) {
  if (context != NULL && atomic_fetch_sub(&context->references, 1) == 1) destroy(context);
}

sluice_status_t sluice_engine_check_process(const sluice_context_t* context, const char* what) {
  if (context->pid == getpid()) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_STATE, "%s: this context was made before fork(); make a new one in the child process",
                     what);
}

sluice_status_t sluice_engine_enter(sluice_context_t* context, const char* what) {
  SLUICE_TRY(sluice_engine_check_process(context, what));
  int32_t expected = 0;
  if (!atomic_compare_exchange_strong(&context->busy, &expected, 1)) {
    return SLUICE_FAIL(SLUICE_E_BUSY, "%s: another thread is inside this context; give each thread its own context",
                       what);
  }
  return SLUICE_OK;
}

sluice_status_t sluice_engine_reserve_headers(sluice_context_t* context) {
  if (context->world_size == 1) return SLUICE_OK;
  return sluice_arena_reset(&context->header, sluice_headers_bytes(context->world_size), "headers");
}

void sluice_engine_leave(sluice_context_t* context) { atomic_store(&context->busy, 0); }

static sluice_status_t cache_grow(sluice_context_t* context) {
  sluice_template_cache_t* cache = &context->templates;
  int32_t capacity = cache->capacity == 0 ? 16 : 2 * cache->capacity;
  sluice_template_t** items = sluice_alloc(&context->allocator, (uint64_t)capacity * sizeof *items, "template cache");
  if (items == NULL) return sluice_alloc_status();
  if (cache->count > 0) memcpy(items, cache->items, (size_t)cache->count * sizeof *items);
  sluice_free(&context->allocator, cache->items, (uint64_t)cache->capacity * sizeof *items);
  cache->items = items;
  cache->capacity = capacity;
  return SLUICE_OK;
}

sluice_status_t sluice_engine_reserve_templates(sluice_context_t* context, int32_t max_chunks, int32_t has_two_levels) {
  sluice_template_cache_t* cache = &context->templates;
  uint64_t bytes = SLUICE_PLANNED_TEMPLATES * sluice_align_up(sluice_template_bytes(max_chunks, has_two_levels));
  if (cache->block_bytes >= bytes) return SLUICE_OK;
  drop_templates(context);
  SLUICE_TRY(cache_grow(context));
  cache->block = sluice_alloc(&context->allocator, bytes, "schedule templates of a plan");
  if (cache->block == NULL) return sluice_alloc_status();
  cache->block_bytes = bytes;
  return SLUICE_OK;
}

void sluice_engine_give_back(sluice_context_t* context) {
  sluice_pass_memory_give_back(&context->pass_memory);
  if (context->templates.block != NULL) drop_templates(context);
}

/* With assertions, every template is checked for hazards before it runs. */
static sluice_status_t prove(const sluice_template_t* schedule) {
#ifdef NDEBUG
  (void)schedule;
  return SLUICE_OK;
#else
  return sluice_schedule_check_or_fail(schedule, sluice_process_allocator());
#endif
}

/* A free place, or that of the least recently used template. */
static int32_t place_in_block(const sluice_template_cache_t* cache) {
  if (cache->count < SLUICE_PLANNED_TEMPLATES) return cache->count;
  int32_t oldest = 0;
  for (int32_t i = 1; i < SLUICE_PLANNED_TEMPLATES; ++i) {
    if (cache->last_use[i] < cache->last_use[oldest]) oldest = i;
  }
  return oldest;
}

/* Grows the block if needed: only schedules of a plan are sure to fit. */
static sluice_status_t build_in_block(sluice_context_t* context, const sluice_template_spec_t* spec,
                                      const sluice_template_t** out_template) {
  SLUICE_TRY(sluice_engine_reserve_templates(context, spec->num_chunks, sluice_has_two_levels(spec)));
  sluice_template_cache_t* cache = &context->templates;
  int32_t place = place_in_block(cache);
  uint64_t room = cache->block_bytes / SLUICE_PLANNED_TEMPLATES;
  sluice_template_t* made = NULL;
  sluice_status_t status = sluice_template_build_into(spec, cache->block + (uint64_t)place * room, &made);
  if (status == SLUICE_OK) status = prove(made);
  if (status != SLUICE_OK) { /* the template that lay there was overwritten */
    cache->count = 0;
    return status;
  }
  cache->items[place] = made;
  cache->last_use[place] = ++cache->num_uses;
  if (place == cache->count) ++cache->count;
  *out_template = made;
  return SLUICE_OK;
}

sluice_status_t sluice_engine_template(sluice_context_t* context, const sluice_template_spec_t* spec,
                                       const sluice_template_t** out_template) {
  sluice_template_cache_t* cache = &context->templates;
  for (int32_t i = 0; i < cache->count; ++i) {
    if (memcmp(&cache->items[i]->spec, spec, sizeof *spec) != 0) continue;
    if (cache->block != NULL) cache->last_use[i] = ++cache->num_uses;
    *out_template = cache->items[i];
    return SLUICE_OK;
  }
  if (cache->block != NULL) return build_in_block(context, spec, out_template);
  if (cache->count == cache->capacity) SLUICE_TRY(cache_grow(context));
  sluice_template_t* made = NULL;
  SLUICE_TRY(sluice_template_build(spec, &context->allocator, &made));
  sluice_status_t proved = prove(made);
  if (proved != SLUICE_OK) {
    sluice_template_destroy(made, &context->allocator);
    return proved;
  }
  cache->items[cache->count++] = made;
  *out_template = made;
  return SLUICE_OK;
}

void sluice_trace_add(sluice_trace_t* trace, const sluice_trace_event_t* event) {
  if (trace->capacity == 0) return;
  trace->events[trace->next] = *event;
  trace->next = (trace->next + 1) % trace->capacity;
  if (trace->count < trace->capacity) ++trace->count;
}
