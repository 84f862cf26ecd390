/* Plans: what a layer's passes may take, and by which rule they stay under it.
 *
 * A plan is capacities plus a rule. Tokens are cut into blocks; consecutive blocks form a chunk while no rank receives
 * more than chunk_rows, or in two levels (deduplicate NODES) passes on more. Chunks keep (or offload) their rows while
 * kept_rows lasts on every rank; the rest are sent and computed again in backward, which keeps nothing. So memory is
 * bounded under any routing, and no token is dropped.
 *
 * A context with a memory_budget makes plans by itself, at the first forward and whenever more tokens come than before.
 * The calls here are for hosts that want to ask first, to see why, or to run under a plan of their own. Under
 * SLUICE_EXCHANGE_CAPACITY all rows are known beforehand: nothing is cut, max_chunks is the config's num_chunks, and
 * step_bytes is exact.
 *
 * Source: MPipeMoE sections III-B to III-D (reuse, restore strategies S1 to S4); capacities and fallback are ours.
 */
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
  int64_t max_tokens;              /* T >= 1, the most of any rank */
  uint64_t memory_budget;          /* bytes over all layers of the context; 0: none */
  uint64_t base_bytes;     /* allocated besides what a plan sizes, the most of any rank; 0: as on this rank now */
  int32_t max_outstanding; /* >= 1: forwards without their backward, over all layers of the context */
  int32_t num_chunks;      /* n, or 0: any */
  int32_t restore_input;   /* SLUICE_RESTORE_*, ADAPTIVE: any */
  int32_t restore_pre_activation;
  int32_t wgrad_mode;              /* SLUICE_WGRAD_*, ADAPTIVE: any */
  int32_t separate_wgrad;          /* 1: step_bytes counts what SLUICE_BACKWARD_DGRAD alone leaves for wgrad; 0: such
                                    calls are UNSUPPORTED under the plan */
  uint64_t host_memory_budget;     /* bytes of offloaded rows over max_outstanding forwards; 0: no limit of their own */
  const int32_t* restore_input_of; /* [num_chunks], as in sluice_moe_config_t, or NULL; copied */
  const int32_t* restore_pre_activation_of; /* likewise */
} sluice_plan_config_t;

SLUICE_EXPORT void sluice_plan_config_init(sluice_plan_config_t* out_config, size_t struct_size);

/* Finds the fastest candidate (n, restore policy of all or of the first chunks, weight-gradient mode) that fits. Local,
 * allocates only the handle; ranks that give equal numbers get equal plans. out_plan: new, sluice_plan_destroy.
 * Context-exclusive. Errors: INVALID_ARGUMENT, ABI, NO_MEMORY; OVER_BUDGET naming the shortfall, the smallest budget
 * that would do, and the cheapest change; UNSUPPORTED (callback experts that cannot do the policy asked for). */
SLUICE_API sluice_status_t sluice_plan_create(sluice_moe_t* moe, const sluice_plan_config_t* config,
                                              sluice_plan_t** out_plan);
SLUICE_EXPORT void sluice_plan_destroy(sluice_plan_t* plan); /* accepts NULL */

typedef struct sluice_plan_info_s {
  size_t struct_size; /* set by the caller: sizeof */
  int64_t max_tokens;
  int64_t chunk_rows;                            /* capacity of received rows of a chunk, in two levels of forwards */
  int64_t kept_rows;                             /* capacity of rows kept or offloaded per step */
  int32_t num_blocks;                            /* G */
  int32_t num_chunks;                            /* n of balanced routing */
  int32_t max_chunks;                            /* n at most */
  int32_t restore_input, restore_pre_activation; /* or BY_CHUNK, as the config's list has it */
  int32_t wgrad_mode, max_outstanding;
  int32_t kept_chunks; /* of num_chunks, the first ones, that the policies speak of; the rest are sent and computed
                          again: fewer than num_chunks where policies were open and the budget has no room for all */
  /* Bytes on this rank. total = base + slots + routing + schedules + headers + GEMMs + max_outstanding * step */
  uint64_t base_bytes;
  uint64_t slot_bytes;     /* temporaries of a pass, shared by all layers of the context */
  uint64_t routing_bytes;  /* boundaries, orders, counts */
  uint64_t schedule_bytes; /* templates and the device's queues */
  uint64_t header_bytes;
  uint64_t gemm_bytes; /* what GEMMs may borrow; 0 with gemm "ref" */
  uint64_t step_bytes; /* of one outstanding forward; with separate_wgrad also between the halves of its backward */
  uint64_t total_bytes;
  double relative_time; /* of forward and backward, comparable between candidates only: seconds by the context's tuner
                           where it has a machine (sluice_context_tune), else by the papers' closed forms */
  uint64_t host_pool_bytes; /* of total_bytes, what offloaded rows of max_outstanding forwards take at most */
  uint64_t
      communication_bytes;  /* of slot_bytes, rows on their way to other ranks or just in; the rest are temporaries */
  uint64_t saved_bytes;     /* of step_bytes, kept and offloaded rows; offloaded ones not on CUDA */
  uint64_t deferred_bytes;  /* of step_bytes, with separate_wgrad: gradient rows between the halves; what is neither
                               this nor saved are routes and counts */
  uint64_t peak_slot_bytes; /* of slot_bytes, what holds rows at once where that is most, at the capacities and with
                               one op after the other; lanes beside each other use more of them */
  int32_t peak_direction;   /* where: SLUICE_FORWARD or _BACKWARD, whose slots are the larger, */
  char peak_op[28];         /* and at which op of it; as in a trace */
} sluice_plan_info_t;

/* Any thread. Errors: INVALID_ARGUMENT, ABI, NO_MEMORY. */
SLUICE_API sluice_status_t sluice_plan_get_info(const sluice_plan_t* plan, sluice_plan_info_t* out_info);

typedef struct sluice_plan_candidate_s {
  int32_t num_chunks, restore_input, restore_pre_activation, wgrad_mode;
  uint64_t total_bytes;
  double relative_time;
  int32_t fits;
  int32_t kept_chunks; /* as in sluice_plan_info_t */
} sluice_plan_candidate_t;

/* Everything that was looked at, in order; *out_count is how many there are, at most `capacity` are written. A plan
 * that was read has none. Any thread. Errors: INVALID_ARGUMENT. */
SLUICE_API sluice_status_t sluice_plan_candidates(const sluice_plan_t* plan, sluice_plan_candidate_t* out_candidates,
                                                  int32_t capacity, int32_t* out_count);

/* Bytes of one step whose n chunks receive rows_per_chunk [n] rows on this rank, in a pass of num_tokens tokens with
 * num_sent kept routes: what the allocator will count, to the byte; in two levels (deduplicate NODES) at most, with a
 * few bytes for each token of any rank that may pass through this one. kept_chunks of the chunks, the first ones, are
 * kept as the plan says; by a list, those behind it are not. Any thread. Errors: INVALID_ARGUMENT. */
SLUICE_API sluice_status_t sluice_plan_predict_step(const sluice_plan_t* plan, int32_t num_chunks,
                                                    const int64_t* rows_per_chunk, int32_t kept_chunks,
                                                    int64_t num_tokens, int64_t num_sent, uint64_t* out_bytes);

/* Runs the layer under the plan from now on; NULL: without. Allocates what the plan fixes. Every rank uses an equal
 * plan; the next header checks. Not with steps outstanding of another plan. Context-exclusive. Errors: INVALID_ARGUMENT
 * (a plan of another layer), OVER_BUDGET, NO_MEMORY: the layer keeps the plan it had. The plan's budgets hold for all
 * layers of the context, until the last one that was given a plan is without, or is destroyed. */
SLUICE_API sluice_status_t sluice_moe_use_plan(sluice_moe_t* moe, const sluice_plan_t* plan);

/* The smallest memory_budget of the layer's context under which its forwards of num_tokens would have a plan, by what
 * this rank has allocated now, with room for the context's layers of other shapes; the context's other settings, its
 * host_memory_budget among them, are as they are. Where several contexts share a budget, what each of them must have:
 * the most of its layers, and of its ranks.
 * Context-exclusive, not collective. Errors: INVALID_ARGUMENT; OVER_BUDGET (nothing fits host_memory_budget);
 * UNSUPPORTED (a policy that callback experts cannot do). */
SLUICE_API sluice_status_t sluice_moe_smallest_budget(sluice_moe_t* moe, int64_t num_tokens, uint64_t* out_bytes);

/* Plans as bytes, for a file or another process with the same layer. write: *inout_bytes is the room and then the size;
 * data may be NULL to ask. read: out_plan new, sluice_plan_destroy; its choices are checked and its bytes found anew;
 * context-exclusive. Errors: INVALID_ARGUMENT naming the field; of read also OVER_BUDGET (it takes more with this
 * context's GEMMs than its own budget), UNSUPPORTED (a list that callback experts cannot do), NO_MEMORY. */
SLUICE_API sluice_status_t sluice_plan_write(const sluice_plan_t* plan, void* data, uint64_t* inout_bytes);
SLUICE_API sluice_status_t sluice_plan_read(sluice_moe_t* moe, const void* data, uint64_t bytes,
                                            sluice_plan_t** out_plan);

/* The paper's own footprint, in elements, as printed: one expert per rank, experts of two matrices. */
typedef struct sluice_paper_footprint_s {
  double states;                /* [MPipeMoE eq. 1] */
  double activations;           /* [eq. 2] */
  double temporaries;           /* [eq. 3], without a pipeline */
  double pipelined_temporaries; /* [eq. 4] */
  double saving;                /* [eq. 5, its second line]: delta, in activations and again in temporaries */
  double saved_share;           /* [eq. 6]: phi */
} sluice_paper_footprint_t;

/* rows: B routed rows of a rank. out_footprint must not be NULL. Thread-safe. */
SLUICE_EXPORT void sluice_paper_footprint(int64_t rows, int64_t model_width, int64_t hidden_width, int32_t num_experts,
                                          int32_t num_chunks, sluice_paper_footprint_t* out_footprint);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_PLAN_H_ */
