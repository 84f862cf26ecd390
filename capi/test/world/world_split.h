// SPDX-License-Identifier: Apache-2.0
/* Shared by the files of the world library; tests include only world.h. */
#pragma once

#include "backend/base/test/elements.h"
#include "capi/test/world/world.h"

enum { W1, W3, W2, B1, B3, B2, LA1, LB1, LA3, LB3, LA2, LB2, NUM_PARAMS };
enum { WORLD_MAX_OUTSTANDING = 8 };

/* Parameters of SWIGLU in every case. The clamps cut off some values, but not most of them. */
#define WORLD_ALPHA  1.75f
#define WORLD_LIMIT  0.625f
#define WORLD_OFFSET 1.0f

/* The machine of this thread's rank. */
typedef struct world_here_s {
  const world_machine_t* machine; /* NULL: this CPU */
  int32_t rank;
} world_here_t;
extern _Thread_local world_here_t world_here;

typedef struct array_s {
  sluice_tensor_t tensor;
  void* host; /* what tests access; on this CPU the tensor's own memory */
  uint64_t bytes;
  int32_t is_part; /* uses memory of another array, which frees it */
  int64_t shape[2];
  int64_t strides[2];
} array_t;

typedef struct rank_s {
  const case_t* c;
  result_t* out;
  sluice_local_group_t* group;
  int32_t rank;
} rank_t;

/* W1, W3 and W2 of the local experts in a case with packed weights. */
typedef struct world_packed_s {
  sluice_tensor_t *codes[3], *scales[3]; /* codes: decoded weights with weights_decoded */
  int64_t shapes[3][2][2];
  void** memory;
  int32_t num_memory;
} world_packed_t;

typedef struct experts_s {
  array_t* arrays[NUM_PARAMS];
  sluice_tensor_t* tensors[NUM_PARAMS];
  sluice_expert_tensors_t table;
  world_packed_t packed;
} experts_t;

/* Callback experts of the tests compute y = x * (e + 2) for each element, so dx = dy * (e + 2). */
typedef struct toy_s {
  const case_t* c;
  const int32_t* ids;
  int32_t* calls;
  int64_t* most_rows;
  int64_t rows_of_chunk;
  int32_t chunk;
  sluice_context_t* context; /* on another machine, whose scale_rows kernel computes the expert */
  const float* factors;      /* there, [local experts, most_factors]: e + 2 for each row */
  int64_t most_factors;
} toy_t;

typedef struct saved_s {
  void* data[SLUICE_SAVED_COUNT];
  uint64_t bytes[SLUICE_SAVED_COUNT];
} saved_t;

/* world_data.c */
/* Adds `delta` to one input on this thread, for finite differences; which -1: to none. */
void world_move(int which, int64_t index, double delta);
int64_t world_tokens_before(const case_t* c, int32_t rank);
double world_token_value(const case_t* c, int32_t rank, int64_t t, int64_t m);
float world_weight_value(const case_t* c, int32_t rank, int64_t t, int32_t k);
double world_grad_value(const case_t* c, int32_t rank, int64_t t, int64_t m);
int64_t world_param_rows(const case_t* c, int kind);
int64_t world_param_cols(const case_t* c, int kind);
int64_t world_param_size(const case_t* c, int kind);
int world_param_used(const case_t* c, int kind);
/* Returns whether the kind is trained; W is frozen if it has adapters. */
int world_param_trained(const case_t* c, int kind);
int32_t world_param_dtype(const case_t* c, int kind);
float world_lora_scale(int kind);
double world_param_value(const case_t* c, int kind, int32_t e, int64_t i);

/* world_array.c */
void* world_take(uint64_t bytes);
void world_give(void* data);
sluice_stream_t world_stream_here(void);
void world_settle(void);
void world_tell(const case_t* c, int32_t direction, int32_t has_returned);
void world_make_array(array_t* a, int32_t dtype, int32_t ndim, int64_t rows, int64_t cols, int64_t row_stride,
                      int64_t col_stride);
int32_t world_dtype_of(const array_t* a);
void world_push(const array_t* a);
void world_pull(const array_t* a);
void world_drop_array(array_t* a);
const sluice_tensor_t* world_tensor_of(array_t* a);
void world_make_rows(array_t* a, int32_t dtype, int64_t rows, int64_t cols, int64_t pad);

/* world_experts.c */
/* The kind of the array that holds the parameters of a kind, and the position of element i in it. */
int world_param_array(const case_t* c, int kind);
int64_t world_param_place(const case_t* c, const array_t* a, int kind, int64_t i);
void world_make_experts(experts_t* x, const case_t* c, int32_t dtype, const int32_t* ids, int32_t count, int gradients);
void world_free_experts(experts_t* x, int32_t count);
int32_t world_toy_forward(void* user, int32_t chunk, int32_t local, int64_t rows, const void* x, void* y);
int32_t world_toy_backward(void* user, int32_t chunk, int32_t local, int64_t rows, const void* x, const void* dy,
                           void* dx);
/* The owners and slots of experts after move number `move`, from 1. */
void world_place_experts(const case_t* c, int32_t move, int32_t* out_owner, int32_t* out_slot);
/* The experts of a rank in the order of slots. Returns their number. */
int32_t world_experts_of(const case_t* c, int32_t rank, const int32_t* owners, const int32_t* slots, int32_t* out_ids);
/* Subtracts a part of the gradients from the parameters, like an optimizer. */
void world_update(const case_t* c, experts_t* params, const experts_t* grads, int32_t count);
/* Copies all arrays of the experts `ids` to (is_put) or from a board, as f64 by expert. */
void world_copy_experts(const case_t* c, const experts_t* x, const int32_t* ids, int32_t count, double* const* board,
                        int is_put);

/* world_packed.c */
/* Writes the weights and their scales into `table`. */
void world_make_packed(world_packed_t* p, const case_t* c, const int32_t* ids, int32_t count,
                       sluice_expert_tensors_t* table);
void world_free_packed(world_packed_t* p);

/* world_case.c */
void world_make_result(const case_t* c, result_t* out);
sluice_status_t world_use_plan(rank_t* r, sluice_moe_t* moe);

/* world_rank.c */
void world_run_rank(rank_t* r);
