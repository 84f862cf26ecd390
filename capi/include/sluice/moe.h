/* The Mixture-of-Experts layer: dispatch -> experts -> combine, forward and backward.
 *
 * Symbols: T tokens on this rank, M model width, H expert hidden width, E experts, E_local experts on this rank,
 * K routes per token, W ranks, n chunks, R rows received. Ranks of one group call the same layers in the same order;
 * T may differ between ranks and may be 0.
 *
 * y[t] = sum over k of route_weight[t,k] * expert[id[t,k]](x[t]), summed in k order in f32 and rounded once.
 * expert(x)       = W2 act(W1 x + b1) + b2                     (gated = 0)
 * expert(x)       = W2 (act(W1 x + b1) * (W3 x + b3)) + b2     (gated; SWIGLU: see sluice_moe_config_t)
 */
#ifndef SLUICE_MOE_H_
#define SLUICE_MOE_H_

#include "sluice/base.h"
#include "sluice/comm.h"
#include "sluice/context.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sluice_moe_s sluice_moe_t;
typedef struct sluice_step_s sluice_step_t;

enum {
  SLUICE_ACTIVATION_IDENTITY = 0,
  SLUICE_ACTIVATION_RELU = 1,
  SLUICE_ACTIVATION_GELU = 2,      /* x * Phi(x), by erf */
  SLUICE_ACTIVATION_GELU_TANH = 3, /* the tanh form */
  SLUICE_ACTIVATION_SILU = 4,
  SLUICE_ACTIVATION_RELU2 = 5, /* max(x, 0)^2 */
  SLUICE_ACTIVATION_SWIGLU = 6 /* gated only: act = g sigmoid(alpha g), g = min(W1 x + b1, limit), and in place of
                                  W3 x + b3 = u stands max(-limit, min(u, limit)) + offset */
};

enum {
  SLUICE_GATED_NO = 0,
  SLUICE_GATED_HALVES = 1,     /* w1 and w3 are two matrices */
  SLUICE_GATED_INTERLEAVED = 2 /* w1 [2H, M] and b1 [2H] hold rows of gate and up in turn; w3 and b3 are absent */
};

/* When weight gradients are computed. Same values up to the order of sums; bit-identical at equal n, cut and mode. */
enum {
  /* Chosen under a memory budget. Without one, where rows are restored: the mode that holds fewer bytes, which is per
   * chunk but in 16 bits with few rows, whose sums are f32; where all is kept, by the tuner, else deferred. Ranks of
   * which one restores T_M and another keeps it name the mode (MISMATCH). */
  SLUICE_WGRAD_ADAPTIVE = -1,
  SLUICE_WGRAD_DEFERRED = 0, /* once, over all chunks, beside the last combines: fewest bytes moved */
  SLUICE_WGRAD_PER_CHUNK = 1 /* accumulated chunk by chunk: no gradient rows are kept */
};

/* How T_DI (dispatched rows) and T_M (pre-activations) reach the backward [MPipeMoE Table II]. Names of points in this
 * space: none = keep, keep; S1 = offload, offload; S2 = re-dispatch, offload; S3 = offload, recompute; S4 =
 * re-dispatch, recompute. */
enum {
  SLUICE_RESTORE_ADAPTIVE = -1,  /* chosen under a memory budget, or among S1 to S4 with `reuse`; else kept */
  SLUICE_RESTORE_KEEP = 0,       /* in buffers that the step keeps */
  SLUICE_RESTORE_OFFLOAD = 1,    /* in host memory, by the copy lanes */
  SLUICE_RESTORE_REDISPATCH = 2, /* T_DI: sent again from the tokens that backward gets */
  SLUICE_RESTORE_RECOMPUTE = 3,  /* T_M: computed again from T_DI. With callback experts: their forward runs again */
  SLUICE_RESTORE_BY_CHUNK = 255  /* in what plans and decisions report: the chunks' lists say it */
};

/* The library's table of these policies and of the named points as JSON, with a terminating zero. *inout_bytes is the
 * room and then the size, zero included; text may be NULL to ask.
 *   policies   in the order of their numbers: name, number; input, pre_activation: whether T_DI and T_M may have it;
 *              device_rows, host_rows: that outlive forward for each row of a chunk; exchanges, gemms: of the chunk,
 *              once more in backward
 *   sets       name; input, pre_activation: the names of its policies
 * Any thread. Errors: INVALID_ARGUMENT (too little room). */
SLUICE_API sluice_status_t sluice_restore_policies_json(char* text, uint64_t* inout_bytes);

/* What chunks are cut out of. Equal on all ranks; results do not depend on it. */
enum {
  /* Where the layer keeps all rows for a backward, on a CPU, without a plan, capacities or deduplication: what goes
   * from one rank to another, ordered by expert, in n pieces of about equal rows. Each chunk then needs the weights of
   * few experts. A token's rows return in several chunks and wait for the last. Elsewhere as TOKENS. */
  SLUICE_CHUNKING_ADAPTIVE = 0,
  SLUICE_CHUNKING_TOKENS = 1 /* n spans of tokens: the least memory where rows return */
};

/* Whether exchanges are grouped: the rows of one chunk return while those of a later one leave, so that both directions
 * of a link are in use where loads are not even. Takes a second slot of rows on their way, and from three chunks on.
 * Not under a memory budget or with `reuse`, whose plans have one slot. Equal on all ranks; results do not depend on
 * it. */
enum {
  SLUICE_GROUPING_ADAPTIVE = 0, /* by the tuner: predicted, then raced beside one exchange after the other */
  SLUICE_GROUPING_OFF = 1,
  SLUICE_GROUPING_ON = 2
};

/* How many rows travel. Equal on all ranks. */
enum {
  SLUICE_EXCHANGE_EXACT = 0, /* as many as there are: counts are exchanged first, and on CUDA read by the host */
  /* From each rank to each expert exactly capacity_rows in each chunk, zeros where a place is free: no counts, and no
   * header once the ranks have made a call of a kind together, so that passes on CUDA may be captured into a graph.
   * Routes beyond a capacity are dropped, and counted: sluice_moe_take_capacity_report. */
  SLUICE_EXCHANGE_CAPACITY = 1
};

/* What of a token travels between ranks. Equal on all ranks. */
enum {
  SLUICE_DEDUPLICATE_NONE = 0, /* a row for each route */
  /* A token's row travels once to each rank that owns experts of its routes, and one row comes back: their weighted
   * sum, in k order in f32, rounded to the layer's dtype; the sums of ranks are then added in rank order. Gradients
   * alike. 8 bytes for each route go along. */
  SLUICE_DEDUPLICATE_RANKS = 1,
  /* Two levels, where the context has several nodes of several ranks (ranks_per_node): a token's row travels once to
   * each node, to the rank with the same local index there, which passes it on once to each rank of the node that owns
   * experts of its routes. On the way back that rank adds the sums of its node's ranks in rank order, in f32, rounded
   * to the layer's dtype; the sums of nodes are then added in node order. Experts get the same bits as with RANKS;
   * outputs and input gradients differ by roundings of the sums. 8 bytes for each token and node go along. On CUDA
   * forward and backward read 4 bytes for each token and rank once more. With one node, nodes of one rank, or top_k 1:
   * as RANKS. */
  SLUICE_DEDUPLICATE_NODES = 2,
  /* As RANKS or as NODES, whichever takes a step less time: by RANKS at first, and where the context has one node,
   * nodes of one rank, a plan of the host's or CUDA, or the layer has top_k 1 or reuse. Where a machine is known, NODES
   * is tried where that is predicted to pay; both then run in turns as ordinary steps, and NODES stays where it is 1 %
   * faster. Under a budget the prediction alone decides, with the plan. All ranks take the same. Bits of a run change
   * with the choice. */
  SLUICE_DEDUPLICATE_ADAPTIVE = 3
};

typedef struct sluice_moe_config_s {
  size_t struct_size;              /* set by sluice_moe_config_init */
  const sluice_ext_header_t* next; /* NULL */
  int64_t model_width;             /* M >= 1 */
  int64_t hidden_width;            /* H >= 1; ignored with callbacks */
  int32_t num_experts;             /* E >= 1 */
  int32_t top_k;                   /* K in [1, E] */
  int32_t dtype;                   /* SLUICE_DTYPE_* of tokens and parameters */
  int32_t activation;              /* SLUICE_ACTIVATION_* */
  int32_t gated;                   /* SLUICE_GATED_* */
  int32_t bias;                    /* 0 or 1 */
  int32_t num_chunks;              /* n >= 1, or 0: chosen by Sluice, the same on all ranks */
  int32_t wgrad_mode;              /* SLUICE_WGRAD_* */
  int32_t callback_experts;        /* 1: the host computes experts through sluice_expert_callbacks_t */
  int32_t layer_id;                /* names the layer in messages and traces; equal on all ranks */
  const int32_t* expert_rank;      /* [E] the rank that owns each expert, or NULL: contiguous, E divisible by W.
                                      A rank may own any number, 0 too. Equal on all ranks */
  int32_t restore_input;           /* SLUICE_RESTORE_ADAPTIVE, _KEEP, _OFFLOAD or _REDISPATCH, equal on all ranks */
  int32_t restore_pre_activation;  /* SLUICE_RESTORE_ADAPTIVE, _KEEP, _OFFLOAD or _RECOMPUTE */
  float swiglu_alpha;              /* SWIGLU: above 0; default 1 */
  float swiglu_limit;              /* SWIGLU: above 0; default FLT_MAX, no clamp */
  float swiglu_offset;             /* SWIGLU: default 0 */
  int32_t grouping;                /* SLUICE_GROUPING_*; default ADAPTIVE */
  int32_t exchange_mode;           /* SLUICE_EXCHANGE_*; default EXACT */
  int32_t chunking;                /* SLUICE_CHUNKING_*; default ADAPTIVE */
  int64_t capacity_rows;           /* CAPACITY: rows of one rank for one expert in one chunk, at least 1; EXACT: 0 */
  /* SLUICE_DEDUPLICATE_*; default NONE. Equal on all ranks; one rank alone sends nothing either way. Not with
   * exchange_mode CAPACITY or for the split calls of a layer (UNSUPPORTED). */
  int32_t deduplicate;
  /* 1: buffers are reused between chunks, without a bound in bytes [MPipeMoE IV-C, memory_reuse]: no rows are kept on
   * the device, and n (from 2 on) and the policies that are left open are chosen among S1 to S4, for each size of a
   * batch; under a budget, among plans of these. A policy that is named must not keep (INVALID_ARGUMENT). Callback
   * experts: restore_pre_activation RECOMPUTE. Default 0. Equal on all ranks. */
  int32_t reuse;
  /* [num_chunks], which must be given, or NULL: the policy of each chunk in place of restore_input (equal on all ranks)
   * or restore_pre_activation. ADAPTIVE for the other tensor is KEEP then. Copied. Chunks that a budget makes beyond
   * num_chunks are sent and computed again, and so are those that it cannot keep. Rows are not chunked by expert
   * (chunking) where chunks differ. */
  const int32_t* restore_input_of;
  const int32_t* restore_pre_activation_of;
  const int32_t* expert_slot; /* [E] the local index of each expert on its rank: 0, 1, .. without holes, each once; or
                                 NULL: the order of ids among the experts of that rank. Equal on all ranks. Copied */
} sluice_moe_config_t;

SLUICE_EXPORT void sluice_moe_config_init(sluice_moe_config_t* out_config, size_t struct_size);

/* Checks the config and makes the layer; no communication. config is copied; context is retained.
 * out_moe: new, sluice_moe_destroy. Context-exclusive. Errors: INVALID_ARGUMENT, ABI, NO_MEMORY, UNSUPPORTED. */
SLUICE_API sluice_status_t sluice_moe_create(sluice_context_t* context, const sluice_moe_config_t* config,
                                             sluice_moe_t** out_moe);
/* Outstanding steps may still be dropped, not run. Budgets of a plan that the host gave (sluice_moe_use_plan) hold no
 * longer; with such a plan the call is Context-exclusive. */
SLUICE_EXPORT void sluice_moe_destroy(sluice_moe_t* moe);
/* E_local by the placement in force. 0 for NULL. Any thread, while none replaces it. */
SLUICE_EXPORT int32_t sluice_moe_num_local_experts(const sluice_moe_t* moe);

/* ---- where experts live --------------------------------------------------------------------------------------- */

/* Which rank owns each expert, and in which slot: the local index under which its parameters are passed. */
typedef struct sluice_expert_placement_s {
  size_t struct_size;              /* set by sluice_expert_placement_init */
  const sluice_ext_header_t* next; /* NULL */
  const int32_t* expert_rank;      /* [E] as in sluice_moe_config_t; neither may be NULL */
  const int32_t* expert_slot;      /* [E] */
  uint64_t epoch;                  /* number of this placement, above that of the one in force; at create it is 0 */
} sluice_expert_placement_t;

SLUICE_EXPORT void sluice_expert_placement_init(sluice_expert_placement_t* out_placement, size_t struct_size);

/* Replaces the placement in force, between steps. The host moves what belongs to an expert (parameters, gradients,
 * moments, master copies); from the next call on it passes the parameters of the experts that a rank owns now, in the
 * order of their slots. Numbers of experts may change, and a rank may own none.
 *
 * Collective over the context's communicator as a forward is: all ranks give the same placement, or all refuse and keep
 * the old one. Allocates nothing. Outputs and gradients do not depend on the placement: the same bits with a
 * configured n, chunks of tokens (SLUICE_CHUNKING_TOKENS), gemm "ref" or "native", without a budget or a plan and
 * without deduplicate; else within the distance that another n, another cut or another order of sums has.
 *
 * What was made for the old placement is gone: saved buffers of earlier forwards cannot be restored
 * (sluice_step_restore refuses them), repetitions of earlier forwards are bound to nothing, calls under a capacity open
 * a header again. A graph captured before must not be launched any more. Plans stay where every rank keeps its number
 * of experts, else the layer makes its own anew; decisions of the tuner stay, since they are kept by numbers of rows.
 *
 * placement  borrowed for the call
 * Owns       nothing
 * Threads    context-exclusive
 * Errors     INVALID_ARGUMENT (an entry, or an epoch that is not above the one in force), ABI, BUSY, STATE: steps of
 * this layer are not dropped, or buffers that the library counts for one live on; numbers of experts change while a
 *            plan of the host's is in force, or graphs of this context exist. MISMATCH: placements differ; the message
 *            names ranks and the entry. PEER_REFUSED. All as before then. PEER_LOST, TIMED_OUT, ABORTED: the comm takes
 *            only abort and destroy, and a rank may have replaced its own. */
SLUICE_API sluice_status_t sluice_moe_replace_experts(sluice_moe_t* moe, const sluice_expert_placement_t* placement);

/* The placement in force: out_expert_rank [E], out_expert_slot [E], out_epoch; each may be NULL. Local. Any thread,
 * while none replaces it. Errors: INVALID_ARGUMENT. */
SLUICE_API sluice_status_t sluice_moe_get_placement(const sluice_moe_t* moe, int32_t* out_expert_rank,
                                                    int32_t* out_expert_slot, uint64_t* out_epoch);

/* Rows of the layer's forwards since it was made: what a new placement is planned from. Nothing travels for it.
 *
 * out_expert_rows [E]  of this rank's own tokens, by expert; what all ranks have is the sum of theirs
 * out_rank_rows [W]    received by each rank, as the headers of forwards report of the training forward before: the
 *                      same numbers on all ranks, so that all see alike whether their loads are even
 * out_num_forwards     that reported some
 * Each may be NULL. 0 in a group of one rank, and of calls without a header (under a capacity).
 * Local. Threads: context-exclusive. Errors: INVALID_ARGUMENT, BUSY. */
SLUICE_API sluice_status_t sluice_moe_get_loads(const sluice_moe_t* moe, int64_t* out_expert_rows,
                                                int64_t* out_rank_rows, int64_t* out_num_forwards);

/* ---- experts -------------------------------------------------------------------------------------------------- */

/* Parameters of the local experts, or gradients towards them: arrays of E_local tensors, borrowed for the call.
 * One of the two strides of a matrix is 1; nothing is copied. Absent members are NULL. */
typedef struct sluice_expert_tensors_s {
  size_t struct_size;        /* sizeof, set by the caller */
  const sluice_tensor_t* w1; /* [H, M], interleaved [2H, M] */
  const sluice_tensor_t* w3; /* [H, M], gated in halves */
  const sluice_tensor_t* w2; /* [M, H] */
  const sluice_tensor_t* b1; /* [H], bias; interleaved [2H] */
  const sluice_tensor_t* b3; /* [H], gated in halves and bias */
  const sluice_tensor_t* b2; /* [M], bias */
} sluice_expert_tensors_t;

/* The host's own experts, called on the calling thread once per chunk and local expert that has rows, in order.
 * Rows are row-major [rows, M] in the layer's dtype, borrowed for the call.
 * forward writes y. backward gets the rows x again, dy already multiplied by the route weights, and writes dx; it keeps
 * parameter gradients itself. A non-zero return fails the pass with EXTERNAL, once its exchanges are through: the other
 * ranks finish that pass, with rows undefined that this rank should have computed, and get PEER_REFUSED from the next
 * call.
 * On CUDA x, y, dy, dx are device memory, the device's primary context is current, and a callback enqueues its work on
 * the stream that the forward or backward was called with (`user` can carry it), or joins what it enqueued elsewhere to
 * that stream before it returns: rows are there, and may be overwritten, in that stream's order. It need not wait for
 * its work; it may, outside a capture. In one its work becomes part of the graph, and no launch calls it.
 * `rows` are those with a route; under a capacity all places of the expert, of which free ones are zeros in x and dy.
 * So y and dx of zeros must be finite, and dy of zeros must add nothing to the host's gradients. */
typedef struct sluice_expert_callbacks_s {
  size_t struct_size; /* sizeof, set by the caller */
  void* user;
  int32_t (*forward)(void* user, int32_t chunk, int32_t local_expert, int64_t rows, const void* x, void* y);
  int32_t (*backward)(void* user, int32_t chunk, int32_t local_expert, int64_t rows, const void* x, const void* dy,
                      void* dx);
} sluice_expert_callbacks_t;

/* ---- forward -------------------------------------------------------------------------------------------------- */

/* What a forward leaves for its backward, each a plain run of bytes. On CUDA INPUT and PRE_ACTIVATION are device
 * memory, the others the host's. */
enum {
  SLUICE_SAVED_META = 0,  /* counts and permutation; on CUDA counts alone */
  SLUICE_SAVED_INPUT = 1, /* T_DI [R, M]: dispatched rows, of the chunks that are kept; on CUDA after the permutation */
  SLUICE_SAVED_PRE_ACTIVATION = 2, /* T_M [R, g*H]: pre-activations; with callbacks their outputs [R, M] */
  SLUICE_SAVED_HOST_INPUT = 3,     /* the same of offloaded chunks: host memory, pinned where the device has it */
  SLUICE_SAVED_HOST_PRE_ACTIVATION = 4,
  SLUICE_SAVED_COUNT = 5
};

/* Gives `bytes` (may be 0: any pointer, NULL too) for saved buffer `which`, 64-byte aligned; NULL refuses. Called on
 * the calling thread once counts are known and before any payload. The host frees the bytes, after the backward. */
typedef void* (*sluice_save_fn_t)(void* user, int32_t which, uint64_t bytes);

typedef struct sluice_moe_forward_args_s {
  size_t struct_size;                         /* set by sluice_moe_forward_args_init */
  const sluice_ext_header_t* next;            /* NULL */
  const sluice_tensor_t* tokens;              /* [T, M] unit column stride */
  const sluice_tensor_t* expert_ids;          /* [T, K] i32 or i64, any strides. Each is in [0, num_experts), or -1:
                                                 the route is dropped, nothing is added for it and its weight's gradient
                                                 is 0. Any other is INVALID_ARGUMENT; on CUDA under a capacity it counts
                                                 as -1 and is reported (bad_route) */
  const sluice_tensor_t* route_weights;       /* [T, K] f32, any strides; NaN and infinities pass through: a weight of 0
                                                 times an infinite output is NaN; an id of -1 adds nothing */
  const sluice_expert_tensors_t* params;      /* NULL with callbacks */
  const sluice_expert_callbacks_t* callbacks; /* NULL without */
  const sluice_tensor_t* out_tokens;          /* [T, M] unit column stride, written */
  sluice_save_fn_t save;                      /* NULL: the library allocates, and the step owns the bytes */
  void* save_user;
  int32_t needs_backward;    /* 0: nothing is saved and out_step may be NULL */
  int32_t local_status;      /* not 0: the host refuses its input with this status; the header tells all ranks */
  const char* local_message; /* the host's reason, or NULL */
  int32_t save_is_counted;   /* 1: `save` takes memory from sluice_context_allocate, which counts it already */
  int32_t repeats; /* 1: again, for activation checkpointing: n and plan of the forward that it repeats, where that
                      one needed a backward; a tuner may want others by now. Of the last 32 it is the one with the
                      same expert_ids; else, and on CUDA, the last. The same on all ranks */
} sluice_moe_forward_args_t;

SLUICE_EXPORT void sluice_moe_forward_args_init(sluice_moe_forward_args_t* out_args, size_t struct_size);

/* Runs the layer forward. Collective over the context's communicator, also when an argument is wrong: the other ranks
 * then get PEER_REFUSED. Host-complete on a CPU; stream must be NULL there. On CUDA stream-complete on `stream`, which
 * belongs to the context's device (NULL: the default one); the host waits for the counts, under a capacity for nothing.
 * There the stream may be being captured into a graph, once the same call has run outside a capture (else STATE): then
 * nothing is allocated, and the graph uses the arguments, the context's slots and the step's buffers in each launch.
 * Allocates slots on first use.
 *
 * out_step   new, sluice_step_drop (no call consumes it); NULL when needs_backward is 0
 * Owns       all arguments are borrowed for the call
 * Threads    context-exclusive
 * Errors     INVALID_ARGUMENT, ABI, BUSY, NO_MEMORY, STATE, UNSUPPORTED, OVER_BUDGET, MISMATCH, PEER_REFUSED, EXTERNAL:
 *            no step, the comm stays usable (docs/c-abi.md, Errors, says what a failure in mid-pass does to the group).
 *            PEER_LOST, TIMED_OUT, ABORTED: the comm takes only abort and destroy.
 * Numerics   bit-identical for every n with gemm "ref" or "native"
 * Source     MPipeMoE section III-A (pipeline S, C, R); what chunks are cut out of is ours (SLUICE_CHUNKING_*)
 */
SLUICE_API sluice_status_t sluice_moe_forward(sluice_moe_t* moe, const sluice_moe_forward_args_t* args,
                                              sluice_stream_t stream, sluice_step_t** out_step);

/* ---- steps ---------------------------------------------------------------------------------------------------- */

/* Releases a step, with or without a backward. Host-allocated saved buffers stay the host's. Accepts NULL. Any thread,
 * once no other call uses the step. */
SLUICE_EXPORT void sluice_step_drop(sluice_step_t* step);
/* Rebuilds a step from its saved buffers, perhaps at other addresses (activation checkpointing, saved-tensor hooks).
 * saved, saved_bytes: [SLUICE_SAVED_COUNT]; borrowed until the step is dropped. out_step: new, sluice_step_drop.
 * Local. Threads: context-exclusive. Errors: INVALID_ARGUMENT (not a step of this layer, or damaged), STATE (a backward
 * has used the buffers up, a fork), NO_MEMORY. */
SLUICE_API sluice_status_t sluice_step_restore(sluice_moe_t* moe, void* const* saved, const uint64_t* saved_bytes,
                                               sluice_step_t** out_step);
/* The number of chunks of this step and its received rows per local expert, [E_local]; either may be NULL. Local. Any
 * thread, while no other call uses the step. Errors: INVALID_ARGUMENT (META is damaged), STATE (a fork). */
SLUICE_API sluice_status_t sluice_step_info(const sluice_step_t* step, int32_t* out_num_chunks,
                                            int64_t* out_rows_per_expert);

/* ---- backward ------------------------------------------------------------------------------------------------- */

enum { SLUICE_GRAD_OVERWRITE = 0, SLUICE_GRAD_ACCUMULATE = 1 };
/* What one call computes: the gradients of inputs (tokens and route weights), of weights, or both. */
enum { SLUICE_BACKWARD_DGRAD = 1, SLUICE_BACKWARD_WGRAD = 2, SLUICE_BACKWARD_BOTH = 3 };

/* Called on the calling thread when all gradients of a local expert are final; on CUDA, when they are enqueued. */
typedef void (*sluice_expert_ready_fn_t)(void* user, int32_t local_expert);

typedef struct sluice_moe_backward_args_s {
  size_t struct_size;                         /* set by sluice_moe_backward_args_init */
  const sluice_ext_header_t* next;            /* NULL */
  const sluice_tensor_t* tokens;              /* as in forward: same values, perhaps another address */
  const sluice_tensor_t* route_weights;       /* as in forward */
  const sluice_expert_tensors_t* params;      /* as in forward */
  const sluice_expert_callbacks_t* callbacks; /* as in forward */
  const sluice_tensor_t* grad_out;            /* [T, M] dtype of the layer, unit column stride */
  const sluice_tensor_t* grad_tokens;         /* [T, M] written, or NULL: not wanted (then NULL on all ranks) */
  const sluice_tensor_t* grad_route_weights;  /* [T, K] f32, any strides without overlap, written (0 for dropped
                                                 routes), or NULL */
  const sluice_expert_tensors_t* grad_params; /* dtype of the layer or f32, or NULL: not wanted, so is a NULL member;
                                                 other ranks may want some, whatever this one does */
  int32_t grad_mode;                          /* SLUICE_GRAD_*, for grad_params */
  int32_t parts;                              /* SLUICE_BACKWARD_*; WGRAD alone follows DGRAD alone, without grad_out */
  sluice_expert_ready_fn_t expert_ready;      /* may be NULL */
  void* expert_ready_user;
  int32_t local_status;    /* as in forward */
  int32_t may_reuse_saved; /* 1: gradients may be written over the saved buffers, which costs the least memory; after a
                              failure in mid-pass, and from the same buffers, no other backward is possible then */
  const char* local_message;
} sluice_moe_backward_args_t;

SLUICE_EXPORT void sluice_moe_backward_args_init(sluice_moe_backward_args_t* out_args, size_t struct_size);

/* Runs the layer backward. Collective as forward is (WGRAD alone is local). Idle experts get zero gradients.
 * A step takes one backward, or one DGRAD and then one WGRAD; more is STATE, and so is a step that was
 * dropped, as long as no other one has taken its address.
 * Threads, errors: as forward. Host-complete on a CPU, stream-complete on CUDA without a wait for the device. */
SLUICE_API sluice_status_t sluice_moe_backward(sluice_moe_t* moe, sluice_step_t* step,
                                               const sluice_moe_backward_args_t* args, sluice_stream_t stream);

/* ---- capacities ------------------------------------------------------------------------------------------------- */

/* What forwards under SLUICE_EXCHANGE_CAPACITY did on this rank, replays of graphs included. */
typedef struct sluice_capacity_report_s {
  size_t struct_size; /* set by sluice_capacity_report_init */
  int64_t num_forwards;
  int64_t num_routes; /* with an expert */
  int64_t
      num_dropped; /* of them, beyond a capacity: their expert's output is missing in the sum, their gradients are 0 */
  int64_t most_rows;   /* for one expert in one chunk: the capacity that drops nothing */
  int64_t bad_route;   /* CUDA: t * K + k whose id was no expert's and counted as -1, the last found; -1: none */
  int32_t most_expert; /* that would have had most_rows; -1 before any route */
  int32_t reserved;
} sluice_capacity_report_t;

SLUICE_EXPORT void sluice_capacity_report_init(sluice_capacity_report_t* out_report, size_t struct_size);

/* Takes the counts since the last take, and starts anew. Not collective. On CUDA it waits for what `stream` holds, the
 * forwards and replays to be reported among it; on a CPU stream is NULL.
 * out_report  written, also where the status is CAPACITY or INVALID_ARGUMENT for what was counted
 * Errors      CAPACITY: routes were dropped (rank, counts and the capacity that would do); INVALID_ARGUMENT: an id
 * named no expert; STATE: the layer is not under a capacity, or the stream is being captured; ABI, BUSY, EXTERNAL.
 * Threads     context-exclusive */
SLUICE_API sluice_status_t sluice_moe_take_capacity_report(sluice_moe_t* moe, sluice_stream_t stream,
                                                           sluice_capacity_report_t* out_report);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_MOE_H_ */
