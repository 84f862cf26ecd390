// SPDX-License-Identifier: Apache-2.0
/* A plan: capacities for every buffer of a layer's passes, and the rule that keeps chunks within them. It is made from
 * sizes alone and is the same on all ranks with the same inputs; nothing is allocated before there is a plan.
 *
 * Rule: tokens are divided into G blocks; consecutive blocks form a chunk as long as no rank receives more than
 * chunk_rows (with two levels, also forwards no more than that), and the chunk has at most blocks_per_chunk blocks.
 * Chunks are restored by restore_input and restore_pre_activation as long as the rows so far fit kept_rows on every
 * rank; the rest are fallback chunks, which are sent and computed again and keep nothing.
 *
 * With device memory, a budget bounds device memory: rows, routes and the memory of the GEMMs. The host's own memory is
 * not counted, and offloaded rows, which are in pinned host memory, are bounded only by the host budget. */
#pragma once

#include "backend/base/math.h"
#include "backend/model/tensors.h"
#include "backend/plan/problem.h"

/* Number of templates that a context keeps under a plan, and the bytes of their list. */
#define SLUICE_PLANNED_TEMPLATES   4
#define SLUICE_TEMPLATE_LIST_BYTES 128u

/* Bytes by category; see sluice_plan_info_t. */
typedef struct sluice_plan_bytes_s {
  uint64_t base;      /* already allocated: handles, tables, GEMMs */
  uint64_t slots;     /* temporaries of a pass */
  uint64_t routing;   /* boundaries, orders and counts of a pass */
  uint64_t schedules; /* templates, and what the device needs to run them */
  uint64_t headers;
  uint64_t gemms;                         /* memory that the GEMMs may borrow */
  uint64_t step;                          /* of one outstanding forward: kept rows, offloaded rows, counts */
  uint64_t deferred[SLUICE_NUM_DEFERRED]; /* part of step, with device memory: gradient rows between dgrad and wgrad */
  uint64_t total;                         /* everything, with max_outstanding steps */
  uint64_t host_pool;                     /* bytes of the host pool for offloaded rows of max_outstanding steps */
} sluice_plan_bytes_t;

typedef struct sluice_plan_query_data_s {
  int64_t max_tokens;      /* maximum T of all ranks */
  uint64_t budget;         /* 0: none */
  uint64_t host_budget;    /* for offloaded rows; 0: none */
  uint64_t base;           /* bytes that are allocated with any plan, the maximum of all ranks */
  int32_t max_outstanding; /* forwards without their backward, over all layers of the context */
  int32_t num_chunks;      /* 0: any */
  int32_t restore_input;   /* -1: any */
  int32_t restore_pre_activation;
  int32_t wgrad_mode;
  int32_t separate_wgrad; /* steps include the gradient rows between dgrad and wgrad */
  int32_t may_keep_part;  /* if a policy does not fit for all chunks, it may be used for only the first ones; only for
                             open policies */
  int32_t reuse;          /* open policies keep no rows on the device */
  sluice_chunk_policies_t policies; /* for BY_CHUNK: the policies of the num_chunks chunks */
} sluice_plan_inputs_t;

typedef struct sluice_plan_data_s {
  sluice_plan_inputs_t inputs;
  int32_t num_blocks;       /* G */
  int32_t num_chunks;       /* n under balanced routing */
  int32_t max_chunks;       /* maximum of n under any routing */
  int32_t blocks_per_chunk; /* at most */
  int64_t chunk_rows;
  int64_t kept_rows;
  int64_t worst_rows; /* maximum number of rows that a rank can receive: every route of every token, whatever the ids */
  int32_t kept_chunks; /* number of chunks of balanced routing, the first ones, that fit kept_rows: all, or as many as
                          the budget allows; the rest are sent and computed again */
  int32_t restore_input, restore_pre_activation;
  int32_t wgrad_mode;
  int32_t shares_act; /* if T_M is offloaded: T_ACT has no slot of its own, see sluice_template_spec_t. A budget with
                         space for one gets the overlap */
  int32_t two_levels; /* tokens are sent by node: as in the shape, or chosen if the shape leaves it open */
  sluice_plan_bytes_t bytes;
  double cost; /* seconds of forward and backward if the policy hook has a machine, else a relative time; only for
                  comparison */
} sluice_plan_data_t;

/* Plans for one batch size that fit a budget together (candidates.h). */
#define SLUICE_PLAN_CANDIDATES 4
typedef struct sluice_plan_set_s {
  int32_t count;
  sluice_plan_data_t plans[SLUICE_PLAN_CANDIDATES];
} sluice_plan_set_t;

/* Bytes that plans for the largest batches have reserved. A plan for smaller batches must fit in them. All except the
 * slots grow with tokens and max_chunks. */
typedef struct sluice_plan_room_s {
  sluice_plan_bytes_t shared; /* slots, routing, schedules, gemms, deferred */
  int32_t max_chunks;         /* their maximum */
} sluice_plan_room_t;

/* Returns what plans of a layer share because they run at different times: the maximum of each. */
static inline sluice_plan_bytes_t sluice_plan_bytes_shared(const sluice_plan_bytes_t* a, const sluice_plan_bytes_t* b) {
  sluice_plan_bytes_t most = {.slots = sluice_max_u64(a->slots, b->slots),
                              .routing = sluice_max_u64(a->routing, b->routing),
                              .schedules = sluice_max_u64(a->schedules, b->schedules),
                              .gemms = sluice_max_u64(a->gemms, b->gemms)};
  for (int32_t i = 0; i < SLUICE_NUM_DEFERRED; ++i) most.deferred[i] = sluice_max_u64(a->deferred[i], b->deferred[i]);
  return most;
}

/* Takes the open choices and the requirements from the shape. */
static inline void sluice_plan_inputs_take_shape(sluice_plan_inputs_t* inputs, const sluice_shape_t* shape) {
  inputs->num_chunks = shape->config.num_chunks;
  inputs->restore_input = shape->config.restore_input;
  inputs->restore_pre_activation = shape->config.restore_pre_activation;
  inputs->reuse = shape->config.reuse;
  inputs->policies = shape->policies;
  inputs->wgrad_mode = shape->config.wgrad_mode;
}

/* Returns how chunk `chunk` restores while its rows fit. */
static inline int32_t sluice_plan_di(const sluice_plan_data_t* plan, int32_t chunk) {
  return sluice_policy_of_di(plan->restore_input, &plan->inputs.policies, chunk);
}

static inline int32_t sluice_plan_m(const sluice_plan_data_t* plan, int32_t chunk) {
  return sluice_policy_of_m(plan->restore_pre_activation, &plan->inputs.policies, chunk);
}

/* Returns the part of the host pool that one outstanding forward may use. */
static inline uint64_t sluice_plan_pool_of_step(const sluice_plan_data_t* plan) {
  return plan->bytes.host_pool / (uint64_t)plan->inputs.max_outstanding;
}

/* Receives a candidate with its bytes and relative time. */
typedef void (*sluice_plan_visit_fn_t)(void* user, const sluice_plan_data_t* candidate, int32_t fits);

/* The basis of a plan's relative time if no machine is known. */
typedef struct sluice_plan_rates_s {
  double flops;           /* per second */
  double link_bytes;      /* per second */
  double startup_seconds; /* of each exchange with its overhead; 0: unknown */
  double memory_bytes;    /* per second, read and written; 0: unknown */
  double copy_bytes;      /* per second, for offloaded rows; 0: unknown */
} sluice_plan_rates_t;

/* Returns a relative time of forward and backward, to order candidates; it is no prediction for any machine. rates
 * NULL: round figures. */
double sluice_plan_relative_time(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                 const sluice_plan_rates_t* rates);

/* Finds the cheapest candidate that fits. visit (may be NULL) receives every candidate. rates: for candidates that the
 * policy hook does not price, the same on all ranks; may be NULL. Errors: OVER_BUDGET naming the shortfall, the
 * smallest sufficient budget, and the cheapest change; NO_MEMORY. */
sluice_status_t sluice_plan_make(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                 const sluice_plan_rates_t* rates, sluice_plan_visit_fn_t visit, void* user,
                                 sluice_plan_data_t* out_plan);

/* Returns the fewest bytes of any candidate that the inputs allow and that fits their host budget: with this budget
 * instead of theirs, there is a plan. Errors: UNSUPPORTED, OVER_BUDGET (of the host budget). */
sluice_status_t sluice_plan_least_bytes(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                        uint64_t* out_bytes);

/* Visits every candidate that the inputs allow, whatever their budget is, with as few rows kept as possible: those of
 * balanced routing and a quarter more. Errors: UNSUPPORTED, NO_MEMORY. */
sluice_status_t sluice_plan_visit_leanest(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                          sluice_plan_visit_fn_t visit, void* user);

/* The parts of a plan's categories, and the op at which its slots are fullest. */
typedef struct sluice_plan_breakdown_s {
  uint64_t communication; /* part of slots: rows to send or just received, token copies */
  uint64_t saved;         /* part of step: kept and offloaded rows */
  uint64_t deferred;      /* part of step: gradient rows between dgrad and wgrad */
  uint64_t peak_slots;    /* part of slots: those that contain rows at the op below */
  int32_t peak_direction; /* the one with the larger slots: SLUICE_FORWARD, _BACKWARD */
  int32_t peak_op;        /* sluice_op_kind_t */
} sluice_plan_breakdown_t;

sluice_status_t sluice_plan_break_down(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                       sluice_plan_breakdown_t* out);

/* Computes the bytes at the plan's capacities. */
sluice_status_t sluice_plan_measure(const sluice_plan_problem_t* problem, sluice_plan_data_t* plan);
/* The same if the policies apply only to the first kept_chunks of balanced routing's chunks, in [1, num_chunks], and
 * the rest are sent and computed again. Errors: UNSUPPORTED (callback experts without recomputation). */
sluice_status_t sluice_plan_keep_chunks(const sluice_plan_problem_t* problem, int32_t kept_chunks,
                                        sluice_plan_data_t* plan);
/* Sizes the candidate of `plan` (its inputs, n, policies and mode) again, if it shares `least` bytes of slots, routing,
 * schedules and GEMMs with other plans; *out_fits: whether it is then within its budgets. */
sluice_status_t sluice_plan_size_beside(const sluice_plan_problem_t* problem, const sluice_plan_bytes_t* least,
                                        sluice_plan_data_t* plan, int32_t* out_fits);
/* Returns the bytes of one step whose kept chunks have kept_chunk_rows [n] rows (-1: not kept) of num_rows received.
 * With two levels this is an upper bound, because the number of forwarded node copies differs. */
uint64_t sluice_plan_step_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                int32_t num_chunks, const int64_t* kept_chunk_rows, int64_t num_tokens,
                                int64_t num_sent, int64_t num_rows);

/* With device memory: returns the size of the block for a saved buffer (SLUICE_SAVED_*), the same for each step of this
 * plan; 0 if the policies store nothing there. */
uint64_t sluice_plan_block_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan, int32_t which);

/* The bytes that a context allocates in advance for a plan, by arena, on the rank with the most experts; 0: the arena
 * is not used. */
typedef struct sluice_plan_arenas_s {
  uint64_t slots;
  uint64_t binding;      /* routes and offsets */
  uint64_t layout;       /* offsets of slots */
  uint64_t cut;          /* rows by block */
  uint64_t token_copies; /* on a CPU */
  uint64_t node_copies;  /* with two levels */
  uint64_t routes;       /* in device memory, as the following two */
  uint64_t device_token_copies, device_node_copies;
} sluice_plan_arenas_t;
sluice_plan_arenas_t sluice_plan_arenas(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);

/* Computes what dgrad leaves for wgrad at the plan's capacities, by sluice_deferred_tensors: out_bytes
 * [SLUICE_NUM_DEFERRED]. */
sluice_status_t sluice_plan_deferred_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                           uint64_t* out_bytes);

/* For a plan from a file: checks its choices (inputs, n, policies, mode, kept rows) and its capacities, and computes
 * its bytes again. Errors: INVALID_ARGUMENT naming the field; OVER_BUDGET, UNSUPPORTED, NO_MEMORY. */
sluice_status_t sluice_plan_reread(const sluice_plan_problem_t* problem, sluice_plan_data_t* plan);

/* Hashes the members that must be the same on all ranks. */
uint64_t sluice_plan_hash(const sluice_plan_data_t* plan);
/* Describes the plan for messages, in at most 104 bytes. */
void sluice_plan_message(const sluice_plan_data_t* plan, char* text, size_t room);

/* ---- a plan as bytes, for files and for other processes with the same layer ---- */

/* The size of every plan. */
#define SLUICE_PLAN_FILE_BYTES (sizeof(sluice_plan_data_t) + 24)

/* Writes a plan. fingerprint: of its layer. data: SLUICE_PLAN_FILE_BYTES. */
void sluice_plan_file_write(const sluice_plan_data_t* plan, uint64_t fingerprint, void* data);

/* Reads bytes of _write; the result must be checked by sluice_plan_reread. layer_id: for messages. Errors:
 * INVALID_ARGUMENT naming what is wrong with the bytes. */
sluice_status_t sluice_plan_file_read(const void* data, uint64_t bytes, uint64_t fingerprint, int32_t layer_id,
                                      sluice_plan_data_t* out_plan);
