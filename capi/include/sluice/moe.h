// SPDX-License-Identifier: Apache-2.0
/* The Mixture-of-Experts layer: dispatch -> experts -> combine, forward and backward.
 *
 * Four calls suffice: sluice_context_create (context.h), then sluice_moe_create, sluice_moe_forward and
 * sluice_moe_backward in this header. sluice.h has a complete program. Every option has a default, which
 * sluice_moe_config_init writes: f32, top_k 1, GELU, experts that are not gated and have no bias, contiguous placement
 * of experts, one row for each route, no dropped route, and n, restore policies, weight-gradient mode, grouping and
 * chunking chosen by Sluice. A caller sets model_width, hidden_width and num_experts. The values of the options come
 * after the four calls.
 *
 * Symbols: T tokens on this rank, M model width, H expert hidden width, E experts, E_local experts on this rank, K
 * routes per token, W ranks, n chunks, R rows received. Ranks of one group call the same layers in the same order. T
 * may differ between ranks and may be 0.
 *
 *   y[t] = sum over k of route_weight[t,k] * expert[id[t,k]](x[t]), summed in k order in f32 and rounded once.
 *   expert(x)       = W2 act(W1 x + b1) + b2                     (gated = 0)
 *   expert(x)       = W2 (act(W1 x + b1) * (W3 x + b3)) + b2     (gated; SWIGLU: see SLUICE_ACTIVATION_SWIGLU) */
#ifndef SLUICE_MOE_H_
#define SLUICE_MOE_H_

#include "sluice/base.h"
#include "sluice/comm.h"
#include "sluice/context.h"
#include "sluice/weights.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sluice_moe_s sluice_moe_t;
typedef struct sluice_step_s sluice_step_t;

/* ---- the layer --------------------------------------------------------------------------------------------------- */

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
  int32_t num_chunks;              /* n >= 1, or 0: Sluice chooses n, the same on all ranks */
  int32_t wgrad_mode;              /* SLUICE_WGRAD_* */
  int32_t callback_experts;        /* 1: the host computes the experts through sluice_expert_callbacks_t */
  int32_t layer_id;                /* identifies the layer in messages and traces; equal on all ranks */
  const int32_t* expert_rank; /* [E] the rank that owns each expert, or NULL: contiguous, E divisible by W. A rank may
                                 own any number of experts, also none. Equal on all ranks */
  int32_t restore_input;      /* SLUICE_RESTORE_ADAPTIVE, _KEEP, _OFFLOAD or _REDISPATCH, equal on all ranks */
  int32_t restore_pre_activation; /* SLUICE_RESTORE_ADAPTIVE, _KEEP, _OFFLOAD or _RECOMPUTE */
  float swiglu_alpha;             /* SWIGLU: above 0; default 1 */
  float swiglu_limit;             /* SWIGLU: above 0; default FLT_MAX, which does not clamp */
  float swiglu_offset;            /* SWIGLU: default 0 */
  int32_t grouping;               /* SLUICE_GROUPING_*; default ADAPTIVE */
  int32_t exchange_mode;          /* SLUICE_EXCHANGE_*; default EXACT */
  int32_t chunking;               /* SLUICE_CHUNKING_*; default ADAPTIVE */
  int64_t capacity_rows;          /* CAPACITY: rows from one rank to one expert in one chunk, at least 1; EXACT: 0 */
  /* SLUICE_DEDUPLICATE_*; default NONE. Equal on all ranks. A single rank sends nothing in either case. UNSUPPORTED
   * with exchange_mode CAPACITY and for the split calls of a layer (split.h), except NONE and ANY. */
  int32_t deduplicate;
  /* 1: buffers are reused between chunks, without a bound in bytes [MPipeMoE IV-C, memory_reuse]. No rows are kept on
   * the device. Sluice chooses n (at least 2) and the policies that are left open among S1 to S4, for each batch size;
   * under a budget it chooses among the plans of these. A policy that is named must not be KEEP (INVALID_ARGUMENT).
   * With callback experts restore_pre_activation must be RECOMPUTE. Default 0. Equal on all ranks. */
  int32_t reuse;
  /* [num_chunks] or NULL: the policy of each chunk, used instead of restore_input (equal on all ranks) or
   * restore_pre_activation. num_chunks must then be given. ADAPTIVE for the other tensor then means KEEP. Copied. If a
   * budget makes more chunks than num_chunks, the additional chunks are sent and computed again, and so are chunks that
   * the budget cannot keep. If the policies of chunks differ, chunks are not cut by experts (`chunking`). */
  const int32_t* restore_input_of;
  const int32_t* restore_pre_activation_of;
  const int32_t* expert_slot; /* [E] the local index of each expert on its rank: 0, 1, .. without gaps, each once; or
                                 NULL: the order of ids among the experts of that rank. Equal on all ranks. Copied */
  /* The largest rank of the low-rank adapters of this layer's experts (LoRA, see sluice_expert_tensors_t), at most
   * 65535; 0: it takes none, which is the default. Above 0 the weights w1, w3 and w2 are frozen: backward refuses their
   * gradients and has no buffers for them, and an open wgrad_mode means PER_CHUNK unless the layer restores rows. Not
   * with callback experts (INVALID_ARGUMENT), nor on CUDA (UNSUPPORTED). Equal on all ranks. */
  int32_t lora_rank;
  /* SLUICE_WEIGHTS_* (weights.h) of w1, w3 and w2; default PLAIN. Packed weights are frozen: their gradients are
   * refused. Not with callback experts (INVALID_ARGUMENT). Equal on all ranks. */
  int16_t weight_format;
  int16_t weight_block; /* INT8, INT4: inputs that share a scale, a multiple of 32, or 0 for 128; of others 0. Equal on
                           all ranks */
} sluice_moe_config_t;

SLUICE_EXPORT void sluice_moe_config_init(sluice_moe_config_t* out_config, size_t struct_size);

/* Checks the config and creates the layer. Does not communicate. config is copied; context is retained. out_moe: new,
 * sluice_moe_destroy. Context-exclusive. Errors: INVALID_ARGUMENT, ABI, NO_MEMORY, UNSUPPORTED. */
SLUICE_API sluice_status_t sluice_moe_create(sluice_context_t* context, const sluice_moe_config_t* config,
                                             sluice_moe_t** out_moe);
/* Destroys the layer. Its outstanding steps may still be dropped, but not run. The budgets of a plan that the host gave
 * (sluice_moe_use_plan) end with the layer; with such a plan the call is Context-exclusive. */
SLUICE_EXPORT void sluice_moe_destroy(sluice_moe_t* moe);
/* Returns E_local under the placement in force, and 0 for NULL. Any thread, unless a call replaces the placement at the
 * same time. */
SLUICE_EXPORT int32_t sluice_moe_num_local_experts(const sluice_moe_t* moe);

/* ---- experts ----------------------------------------------------------------------------------------------------- */

/* Parameters of the local experts, or their gradients: arrays of E_local tensors, borrowed for the call. One of the two
 * strides of a matrix is 1; nothing is copied. Absent members are NULL. With a weight_format w1, w3 and w2 are codes of
 * 8 bits, or bytes of two codes, and have the shapes that weights.h says.
 *
 * Adapters (LoRA): where la and lb are given, the layer computes with W + s lb la in place of W, without forming it:
 * y = W x + lb (s (la x)). Only a layer with lora_rank takes them. A pair may be given for each matrix, with its own
 * rank r in [1, lora_rank], which is the same for all experts; la without lb, or the reverse, is INVALID_ARGUMENT, and
 * so is a scale that is not finite or is 0. Adapters are f32 or of the layer's dtype, one dtype for each member, with
 * any strides that are not negative. In a layer of another dtype, f32 adapters are rounded to that dtype before use.
 * Products with adapters are rounded to the layer's dtype. Backward refuses adapters whose members, ranks or scales
 * differ from those of the forward (INVALID_ARGUMENT); their values must be those of the forward. Gradients of adapters
 * have the shapes of the adapters and are f32 or of the layer's dtype; one of their two strides is 1. [LoRA, Hu et al.
 * 2021, eq. 3] */
typedef struct sluice_expert_tensors_s {
  size_t struct_size;         /* sizeof, set by the caller */
  const sluice_tensor_t* w1;  /* [H, M], interleaved [2H, M] */
  const sluice_tensor_t* w3;  /* [H, M], with SLUICE_GATED_HALVES */
  const sluice_tensor_t* w2;  /* [M, H] */
  const sluice_tensor_t* b1;  /* [H], with bias; [2H] with SLUICE_GATED_INTERLEAVED */
  const sluice_tensor_t* b3;  /* [H], with SLUICE_GATED_HALVES and bias */
  const sluice_tensor_t* b2;  /* [M], with bias */
  const sluice_tensor_t* la1; /* [r, M] of w1, or NULL */
  const sluice_tensor_t* lb1; /* [H, r], interleaved [2H, r] */
  const sluice_tensor_t* la3; /* [r, M] of w3; NULL where lb3 is given: w3 shares la1, its rank and lora_scale1 */
  const sluice_tensor_t* lb3; /* [H, r], with SLUICE_GATED_HALVES, or NULL */
  const sluice_tensor_t* la2; /* [r, H] of w2, or NULL */
  const sluice_tensor_t* lb2; /* [M, r] */
  float lora_scale1;          /* s of la1 and lb1, usually alpha / r; in gradients the scales are not read */
  float lora_scale3;          /* scale of la3 and lb3 */
  float lora_scale2;          /* scale of la2 and lb2 */
  int32_t reserved;           /* 0 */
  const sluice_tensor_t* s1;  /* scales of w1, with a weight_format (weights.h has their shapes); not for gradients */
  const sluice_tensor_t* s3;  /* scales of w3 */
  const sluice_tensor_t* s2;  /* scales of w2 */
} sluice_expert_tensors_t;

/* Experts that the host computes. They are called on the calling thread, once per chunk and local expert that has rows,
 * in order. Rows are row-major [rows, M] in the layer's dtype and borrowed for the call.
 *
 * forward writes y. backward gets the rows x again and dy, already multiplied by the route weights, and writes dx; the
 * host accumulates the parameter gradients itself. A non-zero return fails the pass with EXTERNAL after its exchanges
 * have completed: the other ranks finish that pass, with undefined values in the rows that this rank should have
 * computed, and get PEER_REFUSED from the next call.
 *
 * On CUDA x, y, dy and dx are device memory, and the device's primary context is current. A callback enqueues its work
 * on the stream that the forward or backward was called with (`user` can carry it), or makes that stream wait for work
 * enqueued elsewhere before it returns. Rows are ready, and may be overwritten, in that stream's order. A callback need
 * not wait for its work, and must not do so during a capture. During a capture its work becomes part of the graph, and
 * launches do not call the callback.
 *
 * `rows` counts the rows that have a route. Under a capacity it counts all places of the expert, and free places are
 * zeros in x and dy; so y and dx of zeros must be finite, and dy of zeros must add nothing to the host's gradients. */
typedef struct sluice_expert_callbacks_s {
  size_t struct_size; /* sizeof, set by the caller */
  void* user;
  int32_t (*forward)(void* user, int32_t chunk, int32_t local_expert, int64_t rows, const void* x, void* y);
  int32_t (*backward)(void* user, int32_t chunk, int32_t local_expert, int64_t rows, const void* x, const void* dy,
                      void* dx);
} sluice_expert_callbacks_t;

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* Returns memory of `bytes` bytes for saved buffer `which`, 64-byte aligned; NULL refuses. If bytes is 0, any result is
 * accepted, including NULL. Called on the calling thread after counts are known and before any payload is sent. The
 * host frees the memory after the backward. */
typedef void* (*sluice_save_fn_t)(void* user, int32_t which, uint64_t bytes);

typedef struct sluice_moe_forward_args_s {
  size_t struct_size;                /* set by sluice_moe_forward_args_init */
  const sluice_ext_header_t* next;   /* NULL */
  const sluice_tensor_t* tokens;     /* [T, M] with unit column stride */
  const sluice_tensor_t* expert_ids; /* [T, K] i32 or i64, any strides. Each is in [0, num_experts), or -1: the route is
                                        dropped, adds nothing, and its weight's gradient is 0. Other values are
                                        INVALID_ARGUMENT; on CUDA under a capacity they count as -1 and are reported
                                        (bad_route) */
  const sluice_tensor_t* route_weights; /* [T, K] f32, any strides; NaN and infinities propagate: a weight of 0 times an
                                           infinite output is NaN. An id of -1 adds nothing */
  const sluice_expert_tensors_t* params;      /* NULL with callbacks */
  const sluice_expert_callbacks_t* callbacks; /* NULL without */
  const sluice_tensor_t* out_tokens;          /* [T, M] with unit column stride, written */
  sluice_save_fn_t save;                      /* NULL: the library allocates, and the step owns the memory */
  void* save_user;
  int32_t needs_backward;    /* 0: nothing is saved and out_step may be NULL */
  int32_t local_status;      /* not 0: the host refuses its input with this status, and the header tells all ranks */
  const char* local_message; /* the host's reason, or NULL */
  int32_t save_is_counted;   /* 1: `save` takes its memory from sluice_context_allocate, which already counts it */
  int32_t repeats; /* 1: this forward repeats an earlier one, for activation checkpointing. It uses the n and the plan
                      of that forward, if that one needed a backward, even if a tuner would choose others by now. The
                      earlier forward is the one of the last 32 with the same expert_ids; if there is none, and on CUDA,
                      the last one. Equal on all ranks */
} sluice_moe_forward_args_t;

SLUICE_EXPORT void sluice_moe_forward_args_init(sluice_moe_forward_args_t* out_args, size_t struct_size);

/* Runs the layer forward. Collective over the context's communicator, also when an argument is wrong: the other ranks
 * then get PEER_REFUSED. Host-complete on a CPU, where stream must be NULL. Stream-complete on CUDA, on `stream`, which
 * belongs to the context's device (NULL: the default stream); the host waits for the counts, and under a capacity for
 * nothing. Under a capacity the stream may be capturing a graph if the same call has run outside a capture before (else
 * STATE): then nothing is allocated, and each launch of the graph uses the arguments, the context's slots and the
 * step's buffers. Allocates slots on first use.
 *
 *   out_step   new, sluice_step_drop (no call consumes it); NULL when needs_backward is 0
 *   Owns       all arguments are borrowed for the call
 *   Threads    context-exclusive
 *   Errors     INVALID_ARGUMENT, ABI, BUSY, NO_MEMORY, STATE, UNSUPPORTED, OVER_BUDGET, MISMATCH, PEER_REFUSED,
 *              EXTERNAL: there is no step, and the comm stays usable (docs/c-abi.md, Errors, describes what a failure
 *              within a pass does to the group). PEER_LOST, TIMED_OUT, ABORTED: the comm takes only abort and destroy.
 *   Numerics   bit-identical for every n with gemm "ref" or "native"
 *   Source     MPipeMoE section III-A (pipeline S, C, R); chunking by experts is ours (SLUICE_CHUNKING_*) */
SLUICE_API sluice_status_t sluice_moe_forward(sluice_moe_t* moe, const sluice_moe_forward_args_t* args,
                                              sluice_stream_t stream, sluice_step_t** out_step);

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* Called on the calling thread when all gradients of a local expert are final; on CUDA, when they have been
 * enqueued. */
typedef void (*sluice_expert_ready_fn_t)(void* user, int32_t local_expert);

typedef struct sluice_moe_backward_args_s {
  size_t struct_size;                         /* set by sluice_moe_backward_args_init */
  const sluice_ext_header_t* next;            /* NULL */
  const sluice_tensor_t* tokens;              /* as in forward: the same values, possibly at another address */
  const sluice_tensor_t* route_weights;       /* as in forward */
  const sluice_expert_tensors_t* params;      /* as in forward */
  const sluice_expert_callbacks_t* callbacks; /* as in forward */
  const sluice_tensor_t* grad_out;            /* [T, M] in the layer's dtype, with unit column stride */
  const sluice_tensor_t* grad_tokens;         /* [T, M] written, or NULL if not wanted (then NULL on all ranks) */
  const sluice_tensor_t* grad_route_weights; /* [T, K] f32, any strides without overlap, written (0 for dropped routes),
                                                or NULL */
  const sluice_expert_tensors_t* grad_params; /* in the layer's dtype or f32; NULL, or a NULL member: not wanted. Ranks
                                                 may differ in what they want */
  int32_t grad_mode;                          /* SLUICE_GRAD_* of grad_params; default OVERWRITE */
  int32_t parts; /* SLUICE_BACKWARD_*; default BOTH. A call with WGRAD alone follows one with DGRAD alone and has no
                    grad_out */
  sluice_expert_ready_fn_t expert_ready; /* may be NULL */
  void* expert_ready_user;
  int32_t local_status;    /* as in forward */
  int32_t may_reuse_saved; /* 1: gradients may overwrite the saved buffers, which takes the least memory. No other
                              backward is then possible from the same buffers, nor after a failure within a pass */
  const char* local_message;
} sluice_moe_backward_args_t;

SLUICE_EXPORT void sluice_moe_backward_args_init(sluice_moe_backward_args_t* out_args, size_t struct_size);

/* Runs the layer backward. Collective as forward is (WGRAD alone is local). Experts without rows get zero gradients. A
 * step takes one backward, or one DGRAD and then one WGRAD; a further call is STATE. So is a call with a step that was
 * dropped, unless a new step has the same address. Threads, errors: as forward. Host-complete on a CPU. Stream-complete
 * on CUDA, without a wait for the device. */
SLUICE_API sluice_status_t sluice_moe_backward(sluice_moe_t* moe, sluice_step_t* step,
                                               const sluice_moe_backward_args_t* args, sluice_stream_t stream);

/* Releases a step, whether or not its backward has run. Saved buffers that the host allocated remain the host's.
 * Accepts NULL. Any thread, after all other calls that use the step have returned. */
SLUICE_EXPORT void sluice_step_drop(sluice_step_t* step);

/* ---- values of options ------------------------------------------------------------------------------------------- */

enum {
  SLUICE_ACTIVATION_IDENTITY = 0,
  SLUICE_ACTIVATION_RELU = 1,
  SLUICE_ACTIVATION_GELU = 2,      /* x * Phi(x), by erf */
  SLUICE_ACTIVATION_GELU_TANH = 3, /* the tanh form */
  SLUICE_ACTIVATION_SILU = 4,
  SLUICE_ACTIVATION_RELU2 = 5, /* max(x, 0)^2 */
  SLUICE_ACTIVATION_SWIGLU = 6 /* gated only: act = g sigmoid(alpha g) with g = min(W1 x + b1, limit); the factor W3 x +
                                  b3 = u is replaced by max(-limit, min(u, limit)) + offset */
};

enum {
  SLUICE_GATED_NO = 0,
  SLUICE_GATED_HALVES = 1,     /* w1 and w3 are two matrices */
  SLUICE_GATED_INTERLEAVED = 2 /* w1 [2H, M] and b1 [2H] hold the rows of gate and up alternately; w3 and b3 are
                                  absent */
};

/* SLUICE_WGRAD_* say when weight gradients are computed. The values are the same up to the order of sums, and
 * bit-identical at equal n, chunking and mode. */
enum {
  /* Under a memory budget the plan chooses the mode. Without a budget: where rows are restored, the mode that holds
   * fewer bytes (PER_CHUNK, except in 16 bits with few rows, because the sums are f32); where all rows are kept, the
   * tuner chooses, and DEFERRED is used if there is no tuner. If one rank restores T_M and another keeps it, the ranks
   * must name the mode (else MISMATCH). */
  SLUICE_WGRAD_ADAPTIVE = -1,
  SLUICE_WGRAD_DEFERRED = 0, /* computed once over all chunks, in parallel with the last combines: moves the fewest
                                bytes */
  SLUICE_WGRAD_PER_CHUNK = 1 /* accumulated chunk by chunk: no gradient rows are kept */
};

/* SLUICE_RESTORE_* say how T_DI (dispatched rows) and T_M (pre-activations) are made available to the backward
 * [MPipeMoE Table II]. Named pairs (T_DI, T_M): none = keep, keep; S1 = offload, offload; S2 = re-dispatch, offload; S3
 * = offload, recompute; S4 = re-dispatch, recompute. */
enum {
  SLUICE_RESTORE_ADAPTIVE = -1,  /* chosen under a memory budget, or among S1 to S4 with `reuse`; otherwise KEEP */
  SLUICE_RESTORE_KEEP = 0,       /* the step keeps the rows in buffers */
  SLUICE_RESTORE_OFFLOAD = 1,    /* the copy lanes move the rows to host memory and back */
  SLUICE_RESTORE_REDISPATCH = 2, /* T_DI only: the rows are sent again from the tokens that the backward gets */
  SLUICE_RESTORE_RECOMPUTE = 3, /* T_M only: computed again from T_DI. With callback experts their forward runs again */
  SLUICE_RESTORE_BY_CHUNK = 255 /* only in reports of plans and decisions: the policy differs between chunks, see the
                                   lists */
};

/* Returns the library's table of these policies and of the named pairs as JSON, with a terminating zero. On entry
 * *inout_bytes is the room in `text`; on return it is the size, zero included. text may be NULL to ask for the size.
 *   policies   in the order of their numbers: name, number; input, pre_activation: whether T_DI and T_M may have the
 *              policy; device_rows, host_rows: rows that outlive the forward for each row of a chunk; exchanges, gemms:
 *              those of the chunk that run once more in the backward
 *   sets       name; input, pre_activation: the names of its policies
 * Any thread. Errors: INVALID_ARGUMENT (too little room). */
SLUICE_API sluice_status_t sluice_restore_policies_json(char* text, uint64_t* inout_bytes);

/* SLUICE_CHUNKING_* say how a pass is cut into chunks. The value is equal on all ranks; results do not depend on it. */
enum {
  /* By experts, if the layer keeps all rows for a backward, on a CPU, without a plan, a capacity or deduplication: the
   * rows that one rank sends to another are ordered by expert and cut into n pieces of about equal size. Each chunk
   * then needs the weights of few experts. A token's rows return in several chunks, and the token waits for the last.
   * Otherwise as TOKENS. */
  SLUICE_CHUNKING_ADAPTIVE = 0,
  SLUICE_CHUNKING_TOKENS = 1 /* n ranges of tokens: needs the least memory for rows that return */
};

/* SLUICE_GROUPING_* say whether exchanges are grouped: the rows of one chunk return while those of a later chunk leave,
 * so that both directions of a link are in use when loads are uneven. Grouping takes a second slot for rows in transit,
 * and at least three chunks. It is not used under a memory budget or with `reuse`, whose plans have one slot. The value
 * is equal on all ranks; results do not depend on it. */
enum {
  SLUICE_GROUPING_ADAPTIVE = 0, /* chosen by the tuner: predicted, then timed against ungrouped exchanges */
  SLUICE_GROUPING_OFF = 1,
  SLUICE_GROUPING_ON = 2
};

/* SLUICE_EXCHANGE_* say how many rows are exchanged. The value is equal on all ranks. */
enum {
  SLUICE_EXCHANGE_EXACT = 0, /* as many as there are routes: the ranks exchange counts first, and on CUDA the host reads
                                them */
  /* Each rank sends each expert exactly capacity_rows rows in each chunk, and free places hold zeros. No counts are
   * exchanged, and no header once the ranks have made a call of the same kind together, so passes on CUDA may be
   * captured into a graph. Routes beyond the capacity are dropped and counted: see sluice_moe_take_capacity_report. */
  SLUICE_EXCHANGE_CAPACITY = 1
};

/* SLUICE_DEDUPLICATE_* say which rows of a token are sent between ranks. The value is equal on all ranks. */
enum {
  SLUICE_DEDUPLICATE_NONE = 0, /* one row for each route */
  /* A token's row is sent once to each rank that owns experts of its routes, and one row comes back: the weighted sum
   * of the experts' outputs, in k order in f32, rounded to the layer's dtype. The sums of the ranks are then added in
   * rank order. Gradients are exchanged in the same way. Each route also sends 8 bytes. */
  SLUICE_DEDUPLICATE_RANKS = 1,
  /* Two levels, where the context has several nodes of several ranks (ranks_per_node). A token's row is sent once to
   * each node, to the rank with the same local index there; that rank forwards it once to each rank of the node that
   * owns experts of its routes. On the way back the same rank adds the sums of its node's ranks in rank order, in f32,
   * rounded to the layer's dtype. The sums of the nodes are then added in node order. Experts get the same bits as with
   * RANKS; outputs and input gradients differ by the rounding of the sums. Each token also sends 8 bytes to each node.
   * On CUDA forward and backward read 4 bytes more for each token and rank. With one node, nodes of one rank, or top_k
   * 1: as RANKS. */
  SLUICE_DEDUPLICATE_NODES = 2,
  /* RANKS or NODES, whichever makes a step faster. The layer starts with RANKS. It stays with RANKS if the context has
   * one node, nodes of one rank, a plan of the host's or CUDA, or if the layer has top_k 1 or reuse. If a machine is
   * known and the prediction favours NODES, both run alternately as ordinary steps, and NODES is used if it is 1 %
   * faster. Under a budget the prediction alone decides, together with the plan. All ranks make the same choice. The
   * bits of a run depend on the choice. */
  SLUICE_DEDUPLICATE_ADAPTIVE = 3,
  /* NONE, RANKS or, where the context has several nodes of several ranks, NODES: whichever makes a step faster. The
   * layer starts with NONE. A value that is predicted to be 1 % faster runs alternately with NONE as ordinary steps,
   * and is used if it is also 1 % faster in these steps. In mode MODEL the prediction alone decides. The layer stays
   * with NONE on a single rank, with top_k 1, with callback experts, under a budget or a plan, with `reuse`, with
   * exchange_mode CAPACITY, for the split calls, and where the tuner has no machine for the layer or measures without
   * one (mode PROFILE). On CUDA it does not choose NODES. All ranks make the same choice. The last bits of a run depend
   * on the choice; a forward that is repeated uses the choice of the first. */
  SLUICE_DEDUPLICATE_ANY = 4
};

enum { SLUICE_GRAD_OVERWRITE = 0, SLUICE_GRAD_ACCUMULATE = 1 };
/* SLUICE_BACKWARD_* say which gradients one backward call computes: those of the inputs (tokens and route weights),
 * those of the weights, or both. */
enum { SLUICE_BACKWARD_DGRAD = 1, SLUICE_BACKWARD_WGRAD = 2, SLUICE_BACKWARD_BOTH = 3 };

/* ---- saved buffers ----------------------------------------------------------------------------------------------- */

/* Buffers that a forward saves for its backward, each a contiguous range of bytes. On CUDA INPUT and PRE_ACTIVATION are
 * device memory, and the others host memory. */
enum {
  SLUICE_SAVED_META = 0,           /* counts and permutation; on CUDA only counts */
  SLUICE_SAVED_INPUT = 1,          /* T_DI [R, M]: dispatched rows of the chunks that are kept; on CUDA followed by the
                                      permutation */
  SLUICE_SAVED_PRE_ACTIVATION = 2, /* T_M [R, g*H]: pre-activations; with callback experts their outputs [R, M] */
  SLUICE_SAVED_HOST_INPUT = 3,     /* T_DI of offloaded chunks, in host memory, pinned where the device supports it */
  SLUICE_SAVED_HOST_PRE_ACTIVATION = 4,
  SLUICE_SAVED_COUNT = 5
};

/* Recreates a step from its saved buffers, which may be at other addresses (activation checkpointing, saved-tensor
 * hooks). saved, saved_bytes: [SLUICE_SAVED_COUNT]; borrowed until the step is dropped. out_step: new,
 * sluice_step_drop. Local. Threads: context-exclusive. Errors: INVALID_ARGUMENT (not a step of this layer, or damaged),
 * STATE (a backward has overwritten the buffers, or a fork), NO_MEMORY. */
SLUICE_API sluice_status_t sluice_step_restore(sluice_moe_t* moe, void* const* saved, const uint64_t* saved_bytes,
                                               sluice_step_t** out_step);
/* Returns the number of chunks of this step and its received rows per local expert, [E_local]; either may be NULL.
 * Local. Any thread, while no other call uses the step. Errors: INVALID_ARGUMENT (META is damaged), STATE (a fork). */
SLUICE_API sluice_status_t sluice_step_info(const sluice_step_t* step, int32_t* out_num_chunks,
                                            int64_t* out_rows_per_expert);

/* ---- expert placement -------------------------------------------------------------------------------------------- */

/* The rank that owns each expert, and the expert's slot on it: the local index under which its parameters are
 * passed. */
typedef struct sluice_expert_placement_s {
  size_t struct_size;              /* set by sluice_expert_placement_init */
  const sluice_ext_header_t* next; /* NULL */
  const int32_t* expert_rank;      /* [E] as in sluice_moe_config_t; neither array may be NULL */
  const int32_t* expert_slot;      /* [E] */
  uint64_t epoch; /* number of this placement, larger than that of the placement in force; 0 at create */
} sluice_expert_placement_t;

SLUICE_EXPORT void sluice_expert_placement_init(sluice_expert_placement_t* out_placement, size_t struct_size);

/* Replaces the placement in force, between steps. The host moves the data that belong to an expert (parameters,
 * gradients, moments, master copies). From the next call on it passes the parameters of the experts that a rank then
 * owns, in the order of their slots. The number of experts of a rank may change, and a rank may own none.
 *
 * Collective over the context's communicator, as a forward is: either all ranks give the same placement, or all refuse
 * and keep the old one. Allocates nothing. Outputs and gradients do not depend on the placement. They have the same
 * bits with a configured n, chunks of tokens (SLUICE_CHUNKING_TOKENS), gemm "ref" or "native", no budget, no plan and
 * no deduplication; otherwise they differ by as much as they do for another n, another chunking or another order of
 * sums.
 *
 * State that was made for the old placement becomes invalid. Saved buffers of earlier forwards cannot be restored
 * (sluice_step_restore refuses them), repetitions of earlier forwards (`repeats`) find none of them, and calls under a
 * capacity exchange a header again. A graph that was captured before must not be launched any more. Plans stay valid if
 * every rank keeps its number of experts; otherwise the layer makes new plans of its own. Decisions of the tuner stay
 * valid, because they are stored by numbers of rows.
 *
 *   placement  borrowed for the call
 *   Owns       nothing
 *   Threads    context-exclusive
 *   Errors     INVALID_ARGUMENT (an entry, or an epoch that is not larger than the one in force), ABI, BUSY. STATE:
 *              steps of this layer have not been dropped, or buffers that the library counts for one still exist;
 *              numbers of experts change while a plan of the host's is in force, or graphs of this context exist.
 *              MISMATCH: placements differ; the message names the ranks and the entry. PEER_REFUSED. After all of these
 *              the old placement is in force. PEER_LOST, TIMED_OUT, ABORTED: the comm takes only abort and destroy, and
 *              a rank may have replaced its placement. */
SLUICE_API sluice_status_t sluice_moe_replace_experts(sluice_moe_t* moe, const sluice_expert_placement_t* placement);

/* Copies the placement in force: out_expert_rank [E], out_expert_slot [E], out_epoch; each may be NULL. Local. Any
 * thread, unless a call replaces the placement at the same time. Errors: INVALID_ARGUMENT. */
SLUICE_API sluice_status_t sluice_moe_get_placement(const sluice_moe_t* moe, int32_t* out_expert_rank,
                                                    int32_t* out_expert_slot, uint64_t* out_epoch);

/* Returns the rows of the layer's forwards since the layer was created, from which a new placement can be planned. The
 * call does not communicate.
 *
 *   out_expert_rows [E]  rows of this rank's own tokens, by expert; the total is the sum over all ranks
 *   out_rank_rows [W]    rows received by each rank. The header of a forward reports them for the training forward
 *                        before it, so all ranks have the same numbers and come to the same result on whether their
 *                        loads are even
 *   out_num_forwards     the number of forwards that reported rows
 *
 * Each may be NULL. 0 in a group of one rank, and for calls without a header (under a capacity). Local. Threads:
 * context-exclusive. Errors: INVALID_ARGUMENT, BUSY. */
SLUICE_API sluice_status_t sluice_moe_get_loads(const sluice_moe_t* moe, int64_t* out_expert_rows,
                                                int64_t* out_rank_rows, int64_t* out_num_forwards);

/* ---- capacities -------------------------------------------------------------------------------------------------- */

/* Counts of the forwards under SLUICE_EXCHANGE_CAPACITY on this rank, including replays of graphs. */
typedef struct sluice_capacity_report_s {
  size_t struct_size; /* set by sluice_capacity_report_init */
  int64_t num_forwards;
  int64_t num_routes;  /* routes with an expert */
  int64_t num_dropped; /* routes beyond a capacity: their expert's output is missing from the sum, and their gradients
                          are 0 */
  int64_t most_rows;   /* most rows for one expert in one chunk: the smallest capacity that drops nothing */
  int64_t bad_route;   /* CUDA: the last t * K + k whose id is no expert's and counted as -1; -1: none */
  int32_t most_expert; /* the expert with most_rows; -1 before any route */
  int32_t reserved;
} sluice_capacity_report_t;

SLUICE_EXPORT void sluice_capacity_report_init(sluice_capacity_report_t* out_report, size_t struct_size);

/* Returns the counts since the last call and resets them. Not collective. On CUDA the call waits for the work on
 * `stream`, including the forwards and replays to be reported; on a CPU stream is NULL.
 *   out_report  written, also where the status is CAPACITY, or INVALID_ARGUMENT because of what was counted
 *   Errors      CAPACITY: routes were dropped (the message has the rank, the counts and the capacity that would
 *               suffice); INVALID_ARGUMENT: an id named no expert; STATE: the layer is not under a capacity, or the
 *               stream is being captured; ABI, BUSY, EXTERNAL.
 *   Threads     context-exclusive */
SLUICE_API sluice_status_t sluice_moe_take_capacity_report(sluice_moe_t* moe, sluice_stream_t stream,
                                                           sluice_capacity_report_t* out_report);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_MOE_H_ */
