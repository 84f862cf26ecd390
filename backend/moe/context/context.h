// SPDX-License-Identifier: Apache-2.0
/* The context that a public handle points to: the state that the layers of one model share on one rank. */
#pragma once

#include <stdatomic.h>
#include <sys/types.h>

#include "backend/base/alloc.h"
#include "backend/comm/comm.h"
#include "backend/device/device.h"
#include "backend/gemm/gemm.h"
#include "backend/memory/arena.h"
#include "backend/memory/ledger.h"
#include "backend/memory/pool.h"
#include "backend/moe/context/live_steps.h"
#include "backend/moe/context/pass_memory.h"
#include "backend/plan/neighbours.h"
#include "backend/plan/plan.h"
#include "backend/schedule/schedule.h"
#include "sluice/context.h"

#define SLUICE_SETTLED_PASSES 8 /* passes of each layer before slots that only trials needed are freed */
/* Cached templates. Under a plan they lie in a block of fixed size, and a new template evicts the oldest one. */
typedef struct sluice_template_cache_s {
  sluice_template_t** items;
  int32_t count;
  int32_t capacity;
  char* block; /* NULL: each template is allocated separately */
  uint64_t block_bytes;
  uint64_t last_use[SLUICE_PLANNED_TEMPLATES];
  uint64_t num_uses;
} sluice_template_cache_t;

enum { SLUICE_POOL_INPUT = 0, SLUICE_POOL_PRE_ACTIVATION, SLUICE_NUM_POOLS };

typedef struct sluice_trace_s {
  sluice_trace_event_t* events; /* a ring */
  int64_t capacity;
  int64_t count;
  int64_t next;
} sluice_trace_t;

struct sluice_context_s {
  _Atomic int32_t references;
  _Atomic int32_t busy;
  pid_t pid;                              /* after fork() the child's handles are inert */
  sluice_allocator_t allocator;           /* of host memory */
  sluice_allocator_t device_allocator;    /* of device memory, if the device has its own */
  sluice_allocator_t* memory;             /* for rows: one of the two above */
  const struct sluice_row_memory_s* rows; /* the same choice as a table of functions (row_memory.h) */
  sluice_comm_t* comm;                    /* NULL: one rank */
  sluice_device_t* device;
  sluice_gemm_t* gemm;
  int32_t device_type; /* SLUICE_DEVICE_*, where tensors lie */
  int32_t device_id;
  int32_t rank;
  int32_t world_size;
  int32_t poison;          /* SLUICE_POISON=1: slots are filled with NaN at the start of a pass and on release */
  int32_t num_captured;    /* passes that graphs replay: their slots and routes must not move */
  int32_t pending_failure; /* a pass failed here after its header: the next header reports it */
  char failure_text[256];
  sluice_pass_memory_t pass_memory; /* of the running pass; at most one pass runs */
  sluice_arena_t header;            /* headers sent and received */
  sluice_template_cache_t templates;
  sluice_ring_memo_t rings; /* rings of the templates that plans were sized by */
  sluice_trace_t trace;
  uint64_t reading_cpu_ns; /* CPU time of one reading of the thread's clock, measured when the trace began */
  sluice_context_stats_t stats;
  int32_t registered_buffers;       /* SLUICE_REGISTRATION_*: memory of exchanged slots (registered_buffers.h) */
  const char* registration_refusal; /* why the communicator does not provide that memory; NULL: it may */
  uint64_t memory_budget;           /* 0: none */
  uint64_t host_memory_budget;      /* of offloaded rows; 0: none */
  uint64_t shared_memory_budget;    /* memory_budget is a share of it; 0: not shared */
  uint64_t shared_host_memory_budget;
  int32_t max_outstanding;     /* forwards without their backward; 0: one for each layer */
  int32_t ranks_per_node;      /* 0: not known */
  int32_t wire_dtype;          /* SLUICE_WIRE_* */
  int32_t expected_layers;     /* number of layers that the host announced; 0: none announced */
  int32_t separate_wgrad;      /* under a budget: rows that dgrad leaves for wgrad count in steps */
  int32_t planned_outstanding; /* outstanding forwards that the newest plan counts; 0: no plan */
  int32_t num_given_plans;     /* layers that run under a plan that the host gave */
  int32_t num_layers;          /* layers of this context */
  sluice_neighbours_t shapes;  /* shapes of these layers, under a budget */
  struct sluice_policy_hook_s*
      policy_hook;                /* NULL: layers without a configured n run one chunk; owned by the context */
  sluice_live_steps_t live_steps; /* so that a dropped step is refused */
  _Atomic uint64_t step_bytes;    /* bytes of the allocator that outstanding steps hold */
  sluice_ledger_t ledger;         /* outstanding steps; under plans also bytes of the host pool and bytes set aside */
  /* On a CPU: pools of offloaded rows between steps, by SLUICE_POOL_*. own_pools take from the allocator, host_pools
   * serve sluice_context_allocate_saved. */
  sluice_pool_t own_pools[SLUICE_NUM_POOLS], host_pools[SLUICE_NUM_POOLS];
};

/* The pool (below SLUICE_NUM_POOLS) of a saved buffer (SLUICE_SAVED_*); -1: its rows are not offloaded. */
int32_t sluice_engine_pool_of(int32_t which);
/* Over all pools: bytes that no step holds, and the number of blocks allocated so far. */
uint64_t sluice_engine_idle_bytes(sluice_context_t* context);
uint64_t sluice_engine_pool_allocations(sluice_context_t* context);

/* Makes a context without device and gemm; the caller makes both with &context->allocator and stores them in it,
 * release destroys them. Retains comm. The allocator functions may be NULL. */
sluice_status_t sluice_engine_create(sluice_comm_t* comm, sluice_allocate_fn_t allocate, sluice_free_fn_t release,
                                     void* allocate_user, sluice_context_t** out_context);
void sluice_engine_retain(sluice_context_t* context);
void sluice_engine_release(sluice_context_t* context);

/* Returns STATE in a forked child, where the parent's handles are inert. */
sluice_status_t sluice_engine_check_process(const sluice_context_t* context, const char* what);
/* Returns BUSY to a second thread, STATE in a forked child. Every successful enter is paired with a leave. */
sluice_status_t sluice_engine_enter(sluice_context_t* context, const char* what);
void sluice_engine_leave(sluice_context_t* context);

/* Reserves the memory of headers when a layer is made, so that a rank that is out of memory can still report it. */
sluice_status_t sluice_engine_reserve_headers(sluice_context_t* context);

/* The cached template of a spec. Borrowed until the pass ends. */
sluice_status_t sluice_engine_template(sluice_context_t* context, const sluice_template_spec_t* spec,
                                       const sluice_template_t** out_template);

/* From now on templates lie in one block with room for SLUICE_PLANNED_TEMPLATES of them, of at most max_chunks chunks.
 */
sluice_status_t sluice_engine_reserve_templates(sluice_context_t* context, int32_t max_chunks, int32_t has_two_levels);

/* Frees the memory that passes reserved, except what captured graphs use, and the templates in the block. Later passes
 * allocate again. Must not be called after a pass has begun to bind. */
void sluice_engine_give_back(sluice_context_t* context);

void sluice_trace_add(sluice_trace_t* trace, const sluice_trace_event_t* event);
