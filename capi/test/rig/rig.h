// SPDX-License-Identifier: Apache-2.0
/* One rank of a layer with valid arguments, which a test modifies one at a time. All members are public: change a
 * descriptor or an argument, make the call, check the error, call rig_reset, and check that the next call works. */
#pragma once

#include <stdatomic.h>

#include "backend/base/test/last_error.h"
#include "capi/test/world/world.h"

enum { RIG_MAX_EXPERTS = 8, RIG_NUM_PARAMS = 6, RIG_NUM_ADAPTERS = 6, RIG_NUM_KINDS = 12 };

/* An allocator for config callbacks: counts live bytes, and fails allocation number fail_at (from 0; -1: none). */
typedef struct heap_s {
  _Atomic int64_t live_bytes;
  _Atomic int64_t live_blocks;
  _Atomic int64_t calls;
  _Atomic int64_t fail_at;
} heap_t;

void heap_init(heap_t* heap);
void* heap_allocate(void* heap, uint64_t bytes);
void heap_release(void* heap, void* data, uint64_t bytes);

typedef struct rig_tensor_s {
  sluice_tensor_t tensor;
  int64_t shape[2];
  int64_t strides[2];
  void* memory; /* value of tensor.data before a test changes it */
  uint64_t bytes;
  uint64_t capacity;
} rig_tensor_t;

typedef struct rig_s {
  heap_t heap;
  int32_t rank;
  int32_t world_size;
  int64_t num_tokens;
  sluice_comm_t* comm; /* not owned */
  sluice_context_t* context;
  sluice_moe_t* moe;
  sluice_moe_config_t config;
  int32_t num_local;
  /* Arguments, valid after rig_open and rig_reset. */
  rig_tensor_t tokens, ids, weights, out, grad_out, grad_tokens, grad_weights;
  rig_tensor_t twos; /* factors of callback experts on another machine */
  /* w1 w3 w2 b1 b3 b2, and la1 lb1 la3 lb3 la2 lb2 of a layer with lora_rank, whose W has no gradients. */
  rig_tensor_t params[RIG_NUM_KINDS][RIG_MAX_EXPERTS], grads[RIG_NUM_KINDS][RIG_MAX_EXPERTS];
  sluice_tensor_t param_list[RIG_NUM_KINDS][RIG_MAX_EXPERTS], grad_list[RIG_NUM_KINDS][RIG_MAX_EXPERTS];
  sluice_expert_tensors_t param_table, grad_table;
  sluice_expert_callbacks_t callbacks;
  sluice_moe_forward_args_t forward;
  sluice_moe_backward_args_t backward;
  int32_t callback_failure; /* the value that callback experts return */
} rig_t;

/* Rigs that this thread opens from now on run on this machine (NULL: this CPU) as `rank`. */
void rig_use_machine(const world_machine_t* machine, int32_t rank);

/* Replaces the layer on the rig's context. */
sluice_status_t rig_swap_layer(rig_t* rig, const sluice_moe_config_t* config);
/* T = 6, M = 5, H = 7, E = 4, K = 2, n = 2, f32, gated, bias, layer 3. */
sluice_moe_config_t rig_config(void);
/* Opens a context with gemm "ref" and the rig's heap, a layer and tensors. After an error, all is released. */
sluice_status_t rig_open(rig_t* rig, sluice_comm_t* comm, const sluice_moe_config_t* config);
/* Opens the layer and its tensors on an existing context; the rig then owns the context. */
sluice_status_t rig_open_layer(rig_t* rig, const sluice_moe_config_t* config);
sluice_status_t rig_open_context(rig_t* rig, sluice_comm_t* comm);
/* Restores valid arguments, and sets outputs to NaN. */
void rig_reset(rig_t* rig);
sluice_status_t rig_forward(rig_t* rig, sluice_step_t** out_step);
sluice_status_t rig_backward(rig_t* rig, sluice_step_t* step);
/* Runs a forward and a backward with the current arguments. */
sluice_status_t rig_step(rig_t* rig);
/* Digests of all gradients, and of all outputs. */
uint64_t rig_digest_gradients(const rig_t* rig);
uint64_t rig_digest(const rig_t* rig);
/* Runs a training step with valid arguments. out_digest: digest of all outputs. */
sluice_status_t rig_round(rig_t* rig, uint64_t* out_digest);
/* Releases everything. The heap must then have no live bytes; rig->heap stays readable. */
void rig_close(rig_t* rig);
