// SPDX-License-Identifier: Apache-2.0
/* Plans: upper bounds for the memory of a layer's passes, and the rule by which the passes stay within them.
 *
 * A plan has capacities and a rule. Tokens are divided into blocks. Consecutive blocks form a chunk as long as no rank
 * receives more than chunk_rows for it (in two levels, deduplicate NODES: forwards more). Chunks keep (or offload)
 * their rows while kept_rows lasts on every rank; the other chunks are sent and computed again in the backward, and
 * keep nothing. Memory is therefore bounded under any routing, and no token is dropped.
 *
 * A context with a memory_budget makes its own plans, at the first forward and whenever more tokens come than before.
 * The calls here are for hosts that want to query a plan first, to see the reasons, or to run under a plan of their
 * own. Under SLUICE_EXCHANGE_CAPACITY all row counts are known in advance: no chunk is divided, max_chunks is the
 * config's num_chunks, and step_bytes is exact.
 *
 * Source: MPipeMoE sections III-B to III-D (reuse, restore strategies S1 to S4); capacities and fallback are ours. */
#ifndef SLUICE_PLAN_H_
#define SLUICE_PLAN_H_

#include "sluice/moe.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sluice_plan_s sluice_plan_t;

typedef struct sluice_plan_config_s {
  size_t struct_size;              /* set by sluice_plan_config_init */
  const sluice_ext_header_t* next; /* NULL */
  int64_t max_tokens;              /* T >= 1, the maximum over all ranks */
  uint64_t memory_budget;          /* limit in bytes over all layers of the context; 0: none */
  uint64_t base_bytes;     /* allocated bytes that the plan does not size, the maximum over all ranks; 0: those of this
                              rank now */
  int32_t max_outstanding; /* >= 1: forwards without their backward, over all layers of the context */
  int32_t num_chunks;      /* n, or 0: any */
  int32_t restore_input;   /* SLUICE_RESTORE_*, ADAPTIVE: any */
  int32_t restore_pre_activation;
  int32_t wgrad_mode;              /* SLUICE_WGRAD_*, ADAPTIVE: any */
  int32_t separate_wgrad;          /* 1: step_bytes counts the data that SLUICE_BACKWARD_DGRAD alone keeps for wgrad; 0:
                                      such calls are UNSUPPORTED under the plan */
  uint64_t host_memory_budget;     /* limit in bytes of the offloaded rows of max_outstanding forwards; 0: no separate
                                      limit */
  const int32_t* restore_input_of; /* [num_chunks], as in sluice_moe_config_t, or NULL; copied */
  const int32_t* restore_pre_activation_of; /* likewise */
} sluice_plan_config_t;

SLUICE_EXPORT void sluice_plan_config_init(sluice_plan_config_t* out_config, size_t struct_size);

/* Finds the fastest candidate (n, restore policy of all or of the first chunks, weight-gradient mode) that fits. Local;
 * allocates only the handle. Ranks that give equal numbers get equal plans. out_plan: new, sluice_plan_destroy.
 * Context-exclusive. Errors: INVALID_ARGUMENT, ABI, NO_MEMORY; OVER_BUDGET (names the shortfall, the smallest budget
 * that would suffice, and the cheapest change); UNSUPPORTED (callback experts do not support the requested policy). */
SLUICE_API sluice_status_t sluice_plan_create(sluice_moe_t* moe, const sluice_plan_config_t* config,
                                              sluice_plan_t** out_plan);
SLUICE_EXPORT void sluice_plan_destroy(sluice_plan_t* plan); /* accepts NULL */

typedef struct sluice_plan_info_s {
  size_t struct_size; /* set by the caller: sizeof */
  int64_t max_tokens;
  int64_t chunk_rows;                            /* maximum of the received rows of a chunk, in two levels of the
                                                    forwarded rows */
  int64_t kept_rows;                             /* maximum of the rows that a step keeps or offloads */
  int32_t num_blocks;                            /* G */
  int32_t num_chunks;                            /* n under balanced routing */
  int32_t max_chunks;                            /* the largest possible n */
  int32_t restore_input, restore_pre_activation; /* or BY_CHUNK: as in the config's list */
  int32_t wgrad_mode, max_outstanding;
  int32_t kept_chunks; /* the first of num_chunks, to which the policies apply; the others are sent and computed again.
                          Fewer than num_chunks if policies were open and the budget has no room for all chunks */
  /* Bytes on this rank. total = base + slots + routing + schedules + headers + GEMMs + max_outstanding * step */
  uint64_t base_bytes;
  uint64_t slot_bytes;     /* temporaries of a pass, shared by all layers of the context */
  uint64_t routing_bytes;  /* boundaries, orders, counts */
  uint64_t schedule_bytes; /* templates and the device's queues */
  uint64_t header_bytes;
  uint64_t gemm_bytes; /* scratch memory of GEMMs; 0 with gemm "ref" */
  uint64_t step_bytes; /* bytes of one outstanding forward; with separate_wgrad also between its dgrad and its wgrad */
  uint64_t total_bytes;
  double relative_time; /* time of forward and backward, comparable between candidates only: seconds by the context's
                           tuner if it has a machine (sluice_context_tune), else by the papers' closed forms */
  uint64_t host_pool_bytes;     /* part of total_bytes: the maximum of the offloaded rows of max_outstanding forwards */
  uint64_t communication_bytes; /* part of slot_bytes: rows that are being sent to other ranks or were just received;
                                   the rest are temporaries */
  uint64_t saved_bytes;     /* part of step_bytes: kept rows and offloaded rows; on CUDA without the offloaded ones */
  uint64_t deferred_bytes;  /* part of step_bytes with separate_wgrad: gradient rows between dgrad and wgrad; bytes that
                               are neither these nor saved are routes and counts */
  uint64_t peak_slot_bytes; /* maximum of the slot_bytes that hold rows at the same time, at the capacities
                               and with one op after another; lanes that run in parallel use more */
  int32_t peak_direction;   /* direction of that peak: SLUICE_FORWARD or _BACKWARD, whichever has the larger slots */
  char peak_op[28];         /* op of that peak; as in a trace */
} sluice_plan_info_t;

/* Returns the sizes of the plan. Any thread. Errors: INVALID_ARGUMENT, ABI, NO_MEMORY. */
SLUICE_API sluice_status_t sluice_plan_get_info(const sluice_plan_t* plan, sluice_plan_info_t* out_info);

typedef struct sluice_plan_candidate_s {
  int32_t num_chunks, restore_input, restore_pre_activation, wgrad_mode;
  uint64_t total_bytes;
  double relative_time;
  int32_t fits;
  int32_t kept_chunks; /* as in sluice_plan_info_t */
} sluice_plan_candidate_t;

/* Returns all candidates that were considered, in order. *out_count is how many there are; at most `capacity` are
 * written. A plan that was read with sluice_plan_read has none. Any thread. Errors: INVALID_ARGUMENT. */
SLUICE_API sluice_status_t sluice_plan_candidates(const sluice_plan_t* plan, sluice_plan_candidate_t* out_candidates,
                                                  int32_t capacity, int32_t* out_count);

/* Predicts the bytes of one step whose n chunks receive rows_per_chunk [n] rows on this rank, in a pass of num_tokens
 * tokens with num_sent routes that are not dropped. The result is exactly the number of bytes that the allocator will
 * count; in two levels (deduplicate NODES) it is an upper bound, with a few bytes for each token of any rank that may
 * be forwarded by this one. The first kept_chunks chunks are kept as the plan says; with a list the chunks after them
 * are not kept. Any thread. Errors: INVALID_ARGUMENT. */
SLUICE_API sluice_status_t sluice_plan_predict_step(const sluice_plan_t* plan, int32_t num_chunks,
                                                    const int64_t* rows_per_chunk, int32_t kept_chunks,
                                                    int64_t num_tokens, int64_t num_sent, uint64_t* out_bytes);

/* Runs the layer under the plan from now on; NULL: without a plan. Allocates the memory that the plan fixes; with the
 * first plan of a context without a budget, memory that passes without a plan have left is freed. Every rank uses an
 * equal plan, which the next header checks. Not while steps of another plan are outstanding. Context-exclusive. Errors:
 * INVALID_ARGUMENT (a plan of another layer), OVER_BUDGET, NO_MEMORY: the layer keeps its former plan. The plan's
 * budgets hold for all layers of the context, until the last layer that was given a plan has none any more or is
 * destroyed. */
SLUICE_API sluice_status_t sluice_moe_use_plan(sluice_moe_t* moe, const sluice_plan_t* plan);

/* Returns the smallest memory_budget of the layer's context under which the layer's forwards of num_tokens would have a
 * plan. The result is based on the bytes that this rank has allocated now, with room for the context's layers of other
 * shapes, and on the other settings of the context, including host_memory_budget. If several contexts share a budget,
 * each needs the maximum over its layers and ranks. Context-exclusive, not collective. Errors: INVALID_ARGUMENT;
 * OVER_BUDGET (nothing fits host_memory_budget); UNSUPPORTED (callback experts do not support a policy). */
SLUICE_API sluice_status_t sluice_moe_smallest_budget(sluice_moe_t* moe, int64_t num_tokens, uint64_t* out_bytes);

/* One budget for several contexts. A model has several contexts on a device if its layers have expert-parallel groups
 * of different ranks. Each context has a share of the budget as memory_budget: plans cannot draw on one sum, because
 * the first plan would take all of it. Before the first forward:
 *
 *   1. sluice_moe_smallest_budgets asks what each context needs, for the tokens of this forward and for more.
 *   2. The ranks of a context exchange these lists, and take the largest number of each size that all lists have.
 *   3. sluice_budget_divide computes the shares.
 *   4. The ranks of a context take the smallest share of any, since a rank may be in other contexts than its peers.
 *   5. sluice_context_set_share. */
enum { SLUICE_BUDGET_SIZES = 8 }; /* sizes of batches: 1, 1.25, 1.5, 2, 3, 4, 6 and 8 times the first */

/* Returns the smallest budgets of one context, as sluice_moe_smallest_budget, over the given layers, which all belong
 * to this context: out_bytes[i] for batches of size i, not decreasing. out_bytes has room for SLUICE_BUDGET_SIZES
 * numbers; *out_count is how many there are. The list ends after the first size that needs more than `most`, and before
 * the first size that has no plan. Context-exclusive, not collective. Errors: as sluice_moe_smallest_budget for the
 * first size; then *out_count is 0. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_moe_smallest_budgets(sluice_moe_t* const* layers,
                                                                           int32_t num_layers, int64_t num_tokens,
                                                                           uint64_t most, int32_t* out_count,
                                                                           uint64_t* out_bytes);

/* Divides a budget of `total` bytes among contexts of one device. Each context gets the bytes that it needs for the
 * largest size that fits for all contexts, and a part of the rest: in proportion to the additional bytes of the next
 * size, or to `weights` if all sizes fit. The sum of the shares is at most `total`, except that no share is 0.
 *
 * weights   [num_contexts] in [1, 2^53]: bytes of one token's rows in all layers of the context, plus those in its
 *           largest layer, for the slots that layers share
 * needs     [num_contexts * num_sizes] the list of sluice_moe_smallest_budgets of each context, each entry at most
 *           2^53, not decreasing. num_sizes 0: not known yet; `total` is divided by weights
 *
 * num_contexts is in [1, 512]. Pure, any thread. Errors: INVALID_ARGUMENT; OVER_BUDGET (the needs of the first size do
 * not fit): no share is written. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_budget_divide(uint64_t total, int32_t num_contexts,
                                                                    const uint64_t* weights, int32_t num_sizes,
                                                                    const uint64_t* needs, uint64_t* out_shares);

/* Convert plans to and from bytes, for a file or another process with the same layer. write: on entry *inout_bytes is
 * the room in `data`; on return it is the size; data may be NULL to ask for the size. read: out_plan new,
 * sluice_plan_destroy; it checks the plan's choices and computes its bytes again; context-exclusive. Errors:
 * INVALID_ARGUMENT (names the field); of read also OVER_BUDGET (with the GEMMs of this context the plan exceeds its own
 * budget), UNSUPPORTED (callback experts do not support a list), NO_MEMORY. Threads: write any thread. */
SLUICE_API sluice_status_t sluice_plan_write(const sluice_plan_t* plan, void* data, uint64_t* inout_bytes);
SLUICE_API sluice_status_t sluice_plan_read(sluice_moe_t* moe, const void* data, uint64_t bytes,
                                            sluice_plan_t** out_plan);

/* The footprint of the paper, in elements, as printed: one expert per rank, experts of two matrices. */
typedef struct sluice_paper_footprint_s {
  double states;                /* [MPipeMoE eq. 1] */
  double activations;           /* [eq. 2] */
  double temporaries;           /* [eq. 3], without a pipeline */
  double pipelined_temporaries; /* [eq. 4] */
  double saving;                /* [eq. 5, its second line]: delta, in activations and again in temporaries */
  double saved_share;           /* [eq. 6]: phi */
} sluice_paper_footprint_t;

/* Computes the paper's footprint. rows: B routed rows of a rank. out_footprint must not be NULL. Thread-safe. */
SLUICE_EXPORT void sluice_paper_footprint(int64_t rows, int64_t model_width, int64_t hidden_width, int32_t num_experts,
                                          int32_t num_chunks, sluice_paper_footprint_t* out_footprint);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_PLAN_H_ */
