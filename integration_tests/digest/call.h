// SPDX-License-Identifier: Apache-2.0
/* Defines a call of the list: a layer, its inputs, and how the layer runs. The field names are independent of the ABI,
 * so that a list fits commits whose ABI has other names. calls.py writes the list and the defaults; README.md documents
 * the fields. */
#pragma once

#include <stdint.h>

enum { CALL_MAX_RANKS = 4, CALL_MAX_CHUNKS = 16, CALL_MAX_EXPERTS = 64, CALL_NAME = 48 };

/* Words of the list, with the prefixes in calls.py. */
enum { F32, BF16, F16, F64 };
enum { IDENTITY, RELU, GELU, GELU_TANH, SILU, RELU2, SWIGLU };
enum { GATE_NONE, GATE_HALVES, GATE_INTERLEAVED };
enum { ON_CPU, ON_CUDA };
enum { GEMM_REF, GEMM_NATIVE };
enum { COMM_LOCAL, COMM_NCCL };
enum { CUT_TOKENS, CUT_ROWS };
enum { KEEP, OFFLOAD, REDISPATCH, RECOMPUTE, OPEN };
enum { WGRAD_DEFERRED, WGRAD_PER_CHUNK };
enum { PLAN_NONE, PLAN_OWN, PLAN_BUDGET };
enum { API_LAYER, API_PARTS };
enum { OWNERS_EVEN, OWNERS_UNEVEN, OWNERS_SCATTERED };

/* One policy for all chunks, or one for each. */
typedef struct policies_s {
  int32_t count; /* 1, or the number of chunks */
  int32_t of[CALL_MAX_CHUNKS];
} policies_t;

/* Gradients that the host wants. */
typedef struct wanted_s {
  int32_t x, routes, w1, w3, w2, b1, b3, b2;
} wanted_t;

typedef struct call_s {
  char id[CALL_NAME], family[CALL_NAME];
  int32_t ranks;
  int64_t tokens[CALL_MAX_RANKS];
  int64_t width, hidden;
  int32_t experts, topk, dtype, activation, gated, bias, device, gemm, comm, threads;
  int32_t chunks, cut;
  policies_t input, middle;
  int32_t wgrad;
  int64_t ceiling; /* most rows of one rank for one expert in one chunk; 0: no limit */
  int32_t deduplicate, api, callback;
  int32_t plan, percent, separate_wgrad, outstanding, steps, repeat, restore, reuse, eval, capture;
  char frozen[CALL_NAME];
  int32_t accumulate, grad_f32, transposed, ids32;
  int32_t owners, drop_every, hot, same_every, seed;
} call_t;

wanted_t call_wanted(const call_t* call);
int32_t call_owner(const call_t* call, int32_t expert);
