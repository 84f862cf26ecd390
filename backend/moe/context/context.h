// SPDX-License-Identifier: Apache-2.0
/* The context behind the public handle: what the layers of one model on one rank share. */
#ifndef SLUICE_BACKEND_MOE_CONTEXT_CONTEXT_H_
#define SLUICE_BACKEND_MOE_CONTEXT_CONTEXT_H_

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

#define SLUICE_SETTLED_PASSES 8 /* of each layer, until slots that only trials needed are given back */
/* Templates that passes have used. Under a plan they lie in a block of fixed size, and the oldest makes room. */
typedef struct sluice_template_cache_s {
  sluice_template_t** items;
  int32_t count;
  int32_t capacity;
  char* block; /* NULL: each by itself */
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
  pid_t pid;                              /* after a fork the child's handles are inert */
  sluice_allocator_t allocator;           /* of host memory */
  sluice_allocator_t device_allocator;    /* of the device's own, where it has some */
  sluice_allocator_t* memory;             /* of rows: one of the two */
  const struct sluice_row_memory_s* rows; /* the same as a table of functions (row_memory.h) */
  sluice_comm_t* comm;                    /* NULL: one rank */
  sluice_device_t* device;
  sluice_gemm_t* gemm;
  int32_t device_type; /* SLUICE_DEVICE_*, where tensors lie */
  int32_t device_id;
  int32_t rank;
  int32_t world_size;
  int32_t poison;          /* SLUICE_POISON=1: slots start as NaN in every pass, and are it when released */
  int32_t num_captured;    /* passes that graphs replay: slots and routes stay where they are */
  int32_t pending_failure; /* a pass failed here after its header: the next header tells the others */
  char failure_text[256];
  sluice_pass_memory_t pass_memory; /* of the running pass: one at a time */
  sluice_arena_t header;            /* headers to and from the other ranks */
  sluice_template_cache_t templates;
  sluice_ring_memo_t rings; /* of the templates that plans were sized by */
  sluice_trace_t trace;
  uint64_t reading_cpu_ns; /* of the thread's clock, when the trace began */
  sluice_context_stats_t stats;
  int32_t registered_buffers;       /* SLUICE_REGISTRATION_*: where slots that travel lie (registered_buffers.h) */
  const char* registration_refusal; /* not the communicator's, for this reason; NULL: there is none */
  uint64_t memory_budget;           /* 0: none */
  uint64_t host_memory_budget;      /* of offloaded rows; 0: none */
  uint64_t shared_memory_budget;    /* of which memory_budget is a share; 0: it is the whole */
  uint64_t shared_host_memory_budget;
  int32_t max_outstanding;     /* forwards without their backward; 0: one for each layer */
  int32_t ranks_per_node;      /* 0: not known */
  int32_t wire_dtype;          /* SLUICE_WIRE_* */
  int32_t expected_layers;     /* that there will be, as far as the host says; 0: it does not */
  int32_t separate_wgrad;      /* under a budget: what dgrad leaves is counted in steps */
  int32_t planned_outstanding; /* what the newest plan counts with; 0: there is none */
  int32_t num_given_plans;     /* layers that run under plans of the host's */
  int32_t num_layers;          /* of this context */
  sluice_neighbours_t shapes;  /* of these layers, under a budget */
  struct sluice_policy_hook_s*
      policy_hook;                /* NULL: layers without a configured n run one chunk; released with the context */
  sluice_live_steps_t live_steps; /* so that a dropped one is refused */
  _Atomic uint64_t step_bytes;    /* of the allocator's, what outstanding steps hold */
  sluice_ledger_t ledger;         /* how many there are; under plans, of that, the host pool and what they set aside */
  /* On a CPU, offloaded rows between steps: of the allocator's own memory, and of what a host takes through
   * sluice_context_allocate_saved; by SLUICE_POOL_*. */
  sluice_pool_t own_pools[SLUICE_NUM_POOLS], host_pools[SLUICE_NUM_POOLS];
};

/* The pool of a saved buffer (SLUICE_SAVED_*) among SLUICE_NUM_POOLS; -1: its rows are not offloaded. */
int32_t sluice_engine_pool_of(int32_t which);
/* Of all pools: bytes that no step holds, blocks allocated so far. */
uint64_t sluice_engine_idle_bytes(sluice_context_t* context);
uint64_t sluice_engine_pool_allocations(sluice_context_t* context);

/* Makes a context without device and gemm; the caller makes them with &context->allocator and puts them in (release
 * destroys them). Retains comm. The allocator functions may be NULL. */
sluice_status_t sluice_engine_create(sluice_comm_t* comm, sluice_allocate_fn_t allocate, sluice_free_fn_t release,
                                     void* allocate_user, sluice_context_t** out_context);
void sluice_engine_retain(sluice_context_t* context);
void sluice_engine_release(sluice_context_t* context);

/* STATE in a forked child, where the handles of the parent are inert. */
sluice_status_t sluice_engine_check_process(const sluice_context_t* context, const char* what);
/* BUSY for a second thread, STATE in a forked child. Every enter is paired with a leave. */
sluice_status_t sluice_engine_enter(sluice_context_t* context, const char* what);
void sluice_engine_leave(sluice_context_t* context);

/* Reserves what a header needs, when a layer is made: a rank that is out of memory must still be able to say so. */
sluice_status_t sluice_engine_reserve_headers(sluice_context_t* context);

/* The cached template of a spec. Borrowed until the pass ends. */
sluice_status_t sluice_engine_template(sluice_context_t* context, const sluice_template_spec_t* spec,
                                       const sluice_template_t** out_template);

/* From now on templates lie in one block with room for SLUICE_PLANNED_TEMPLATES of up to max_chunks chunks. */
sluice_status_t sluice_engine_reserve_templates(sluice_context_t* context, int32_t max_chunks, int32_t has_two_levels);

/* What passes have reserved goes back, but for what a captured graph uses, and schedules with it; passes take what they
 * need anew. Not after a pass has begun to bind. */
void sluice_engine_give_back(sluice_context_t* context);

void sluice_trace_add(sluice_trace_t* trace, const sluice_trace_event_t* event);

#endif /* SLUICE_BACKEND_MOE_CONTEXT_CONTEXT_H_ */
