// SPDX-License-Identifier: Apache-2.0
/* A plan: capacities for every buffer of a layer's passes, and the rule by which chunks stay under them.
 * Made from sizes alone, the same on all ranks that put in the same numbers; nothing is allocated
 * before it stands.
 *
 * Rule: tokens are cut into G blocks; consecutive blocks form a chunk while no rank receives more than chunk_rows, in
 * two levels also passes on no more, and the chunk has at most blocks_per_chunk blocks. Chunks are kept as
 * restore_input and restore_pre_activation say while the rows so far fit kept_rows on every rank; the rest are sent and
 * computed again, which keeps nothing.
 *
 * With device memory a budget is of its memory: rows, routes and what the GEMMs hold. What the host keeps for itself is
 * not counted, and offloaded rows, which are its pinned memory, are bounded by the host budget alone.
 */
#ifndef SLUICE_BACKEND_PLAN_PLAN_H_
#define SLUICE_BACKEND_PLAN_PLAN_H_

#include "backend/base/math.h"
#include "backend/model/tensors.h"
#include "backend/plan/problem.h"

/* Templates that a context holds under a plan, and the bytes of their list. */
#define SLUICE_PLANNED_TEMPLATES   4
#define SLUICE_TEMPLATE_LIST_BYTES 128u

/* Bytes by category; see sluice_plan_info_t. */
typedef struct sluice_plan_bytes_s {
  uint64_t base;      /* allocated already: handles, tables, GEMMs */
  uint64_t slots;     /* temporaries of a pass */
  uint64_t routing;   /* boundaries, orders and counts of a pass */
  uint64_t schedules; /* templates, and what the device needs to run them */
  uint64_t headers;
  uint64_t gemms;                         /* what the GEMMs may borrow */
  uint64_t step;                          /* of one outstanding forward: kept rows, offloaded rows, counts */
  uint64_t deferred[SLUICE_NUM_DEFERRED]; /* of the step, in a device's memory: gradient rows between the halves */
  uint64_t total;                         /* all of it, with max_outstanding steps */
  uint64_t host_pool;                     /* of the total, what offloaded rows of max_outstanding steps take */
} sluice_plan_bytes_t;

typedef struct sluice_plan_query_data_s {
  int64_t max_tokens;      /* T of any rank */
  uint64_t budget;         /* 0: none */
  uint64_t host_budget;    /* of offloaded rows; 0: none */
  uint64_t base;           /* bytes that are allocated whatever the plan, the most of all ranks */
  int32_t max_outstanding; /* forwards without their backward, over all layers of the context */
  int32_t num_chunks;      /* 0: any */
  int32_t restore_input;   /* -1: any */
  int32_t restore_pre_activation;
  int32_t wgrad_mode;
  int32_t separate_wgrad; /* steps count the gradient rows between the halves of a backward */
  int32_t
      may_keep_part; /* where a policy does not fit for all chunks, it may be that of the first ones; policies open */
  int32_t reuse;     /* policies that are open keep no rows on the device */
  sluice_chunk_policies_t policies; /* what BY_CHUNK says of the num_chunks chunks */
} sluice_plan_inputs_t;

typedef struct sluice_plan_data_s {
  sluice_plan_inputs_t inputs;
  int32_t num_blocks;       /* G */
  int32_t num_chunks;       /* n of balanced routing */
  int32_t max_chunks;       /* n at most, whatever the routing */
  int32_t blocks_per_chunk; /* at most */
  int64_t chunk_rows;
  int64_t kept_rows;
  int64_t worst_rows;  /* that a rank can receive at all: every route of every token, whatever the ids */
  int32_t kept_chunks; /* of balanced routing's, the first ones, that fit kept_rows: all, or as many as the budget has
                          room for; the rest are sent and computed again */
  int32_t restore_input, restore_pre_activation;
  int32_t wgrad_mode;
  int32_t shares_act; /* where T_M is offloaded: T_ACT has no slot of its own, see sluice_template_spec_t. A budget that
                         has room for one gets the overlap */
  int32_t two_levels; /* tokens travel by node: as the shape has it, or chosen where that leaves it open */
  sluice_plan_bytes_t bytes;
  double
      cost; /* seconds of forward and backward where the policy hook has a machine, else a relative time; to compare */
} sluice_plan_data_t;

/* Plans for batches of one size that fit a budget beside each other (candidates.h). */
#define SLUICE_PLAN_CANDIDATES 4
typedef struct sluice_plan_set_s {
  int32_t count;
  sluice_plan_data_t plans[SLUICE_PLAN_CANDIDATES];
} sluice_plan_set_t;

/* What plans for the largest batches have reserved, in which one for smaller batches must do. All but the slots grows
 * with tokens and max_chunks. */
typedef struct sluice_plan_room_s {
  sluice_plan_bytes_t shared; /* slots, routing, schedules, gemms, deferred */
  int32_t max_chunks;         /* the most of them */
} sluice_plan_room_t;

/* What plans of a layer share that run in turns: as much of each as the one that needs most of it. */
static inline sluice_plan_bytes_t sluice_plan_bytes_shared(const sluice_plan_bytes_t* a, const sluice_plan_bytes_t* b) {
  sluice_plan_bytes_t most = {.slots = sluice_max_u64(a->slots, b->slots),
                              .routing = sluice_max_u64(a->routing, b->routing),
                              .schedules = sluice_max_u64(a->schedules, b->schedules),
                              .gemms = sluice_max_u64(a->gemms, b->gemms)};
  for (int32_t i = 0; i < SLUICE_NUM_DEFERRED; ++i) most.deferred[i] = sluice_max_u64(a->deferred[i], b->deferred[i]);
  return most;
}

/* What the shape leaves open, and what it asks for. */
static inline void sluice_plan_inputs_take_shape(sluice_plan_inputs_t* inputs, const sluice_shape_t* shape) {
  inputs->num_chunks = shape->config.num_chunks;
  inputs->restore_input = shape->config.restore_input;
  inputs->restore_pre_activation = shape->config.restore_pre_activation;
  inputs->reuse = shape->config.reuse;
  inputs->policies = shape->policies;
  inputs->wgrad_mode = shape->config.wgrad_mode;
}

/* How chunk `chunk` restores while its rows fit. */
static inline int32_t sluice_plan_di(const sluice_plan_data_t* plan, int32_t chunk) {
  return sluice_policy_of_di(plan->restore_input, &plan->inputs.policies, chunk);
}

static inline int32_t sluice_plan_m(const sluice_plan_data_t* plan, int32_t chunk) {
  return sluice_policy_of_m(plan->restore_pre_activation, &plan->inputs.policies, chunk);
}

/* Of the host pool, what one outstanding forward may take. */
static inline uint64_t sluice_plan_pool_of_step(const sluice_plan_data_t* plan) {
  return plan->bytes.host_pool / (uint64_t)plan->inputs.max_outstanding;
}

/* Sees a candidate with its bytes and relative time. */
typedef void (*sluice_plan_visit_fn_t)(void* user, const sluice_plan_data_t* candidate, int32_t fits);

/* What the relative time of a plan goes by where no machine is known. */
typedef struct sluice_plan_rates_s {
  double flops;           /* a second */
  double link_bytes;      /* a second */
  double startup_seconds; /* of each exchange and what goes with it; 0: not known */
  double memory_bytes;    /* a second, read and written; 0: not known */
  double copy_bytes;      /* a second, of offloaded rows; 0: not known */
} sluice_plan_rates_t;

/* Of forward and backward, to order candidates by; no promise about any machine. rates NULL: round figures. */
double sluice_plan_relative_time(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                 const sluice_plan_rates_t* rates);

/* The cheapest candidate that fits. visit (may be NULL) sees every candidate. rates: of
 * candidates that the policy hook does not price, alike on all ranks; may be NULL.
 * Errors: OVER_BUDGET naming the shortfall, the smallest budget that would do, and the cheapest change; NO_MEMORY. */
sluice_status_t sluice_plan_make(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                 const sluice_plan_rates_t* rates, sluice_plan_visit_fn_t visit, void* user,
                                 sluice_plan_data_t* out_plan);

/* The fewest bytes of any candidate that the inputs allow and that fits their host budget: with so many as its budget,
 * whatever theirs is, a plan stands. Errors: UNSUPPORTED, OVER_BUDGET (of the host budget). */
sluice_status_t sluice_plan_least_bytes(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                        uint64_t* out_bytes);

/* Shows every candidate that the inputs allow, whatever their budget is, with no more rows kept than it must: those of
 * balanced routing and a quarter more. Errors: UNSUPPORTED, NO_MEMORY. */
sluice_status_t sluice_plan_visit_leanest(const sluice_plan_problem_t* problem, const sluice_plan_inputs_t* inputs,
                                          sluice_plan_visit_fn_t visit, void* user);

/* What a plan's categories hold, and where its slots are fullest. */
typedef struct sluice_plan_breakdown_s {
  uint64_t communication; /* of slots: rows on their way out or just in, token copies */
  uint64_t saved;         /* of step: kept and offloaded rows */
  uint64_t deferred;      /* of step: gradient rows between the halves of a backward */
  uint64_t peak_slots;    /* of slots, what holds rows at once at the op below */
  int32_t peak_direction; /* whose slots are the larger: SLUICE_FORWARD, _BACKWARD */
  int32_t peak_op;        /* sluice_op_kind_t */
} sluice_plan_breakdown_t;

sluice_status_t sluice_plan_break_down(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                       sluice_plan_breakdown_t* out);

/* Bytes at the plan's capacities. */
sluice_status_t sluice_plan_measure(const sluice_plan_problem_t* problem, sluice_plan_data_t* plan);
/* The same where the policies speak of the first kept_chunks of balanced routing's chunks alone, in [1, num_chunks],
 * and the rest are sent and computed again. Errors: UNSUPPORTED (callback experts that cannot). */
sluice_status_t sluice_plan_keep_chunks(const sluice_plan_problem_t* problem, int32_t kept_chunks,
                                        sluice_plan_data_t* plan);
/* Sizes the candidate of `plan` (its inputs, n, policies and mode) anew where it shares `least` bytes of slots,
 * routing, schedules and GEMMs with others; *out_fits says whether it is in its budgets then. */
sluice_status_t sluice_plan_size_beside(const sluice_plan_problem_t* problem, const sluice_plan_bytes_t* least,
                                        sluice_plan_data_t* plan, int32_t* out_fits);
/* Bytes that one step takes whose kept chunks have kept_chunk_rows [n] rows (-1: not kept) of num_rows received; in two
 * levels at most, since the node copies that it passes on are another number. */
uint64_t sluice_plan_step_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                int32_t num_chunks, const int64_t* kept_chunk_rows, int64_t num_tokens,
                                int64_t num_sent, int64_t num_rows);

/* With device memory: the block of a saved buffer (SLUICE_SAVED_*) that steps of this plan take, the same for each; 0
 * where the policies store nothing there. */
uint64_t sluice_plan_block_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan, int32_t which);

/* What a context allocates ahead for a plan, by arena, on the rank with most experts; 0: the arena is not used. */
typedef struct sluice_plan_arenas_s {
  uint64_t slots;
  uint64_t binding;      /* routes and offsets */
  uint64_t layout;       /* places of slots */
  uint64_t cut;          /* rows by block */
  uint64_t token_copies; /* of a CPU */
  uint64_t node_copies;  /* in two levels */
  uint64_t routes;       /* in the device's memory, and the next */
  uint64_t device_token_copies, device_node_copies;
} sluice_plan_arenas_t;
sluice_plan_arenas_t sluice_plan_arenas(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan);

/* What dgrad of a backward leaves for wgrad at the plan's capacities, by sluice_deferred_tensors:
 * out_bytes [SLUICE_NUM_DEFERRED]. */
sluice_status_t sluice_plan_deferred_bytes(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                           uint64_t* out_bytes);

/* Of a plan from a file: its choices (inputs, n, policies, mode, rows that are kept) are checked, its capacities too,
 * and its bytes found anew. Errors: INVALID_ARGUMENT naming the field; OVER_BUDGET, UNSUPPORTED, NO_MEMORY. */
sluice_status_t sluice_plan_reread(const sluice_plan_problem_t* problem, sluice_plan_data_t* plan);

/* Of the sizes above, those that all ranks must have in common. */
uint64_t sluice_plan_hash(const sluice_plan_data_t* plan);
/* The same for a person, whole in 104 bytes. */
void sluice_plan_message(const sluice_plan_data_t* plan, char* text, size_t room);

#endif /* SLUICE_BACKEND_PLAN_PLAN_H_ */
