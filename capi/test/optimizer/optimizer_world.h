// SPDX-License-Identifier: Apache-2.0
/* A model of small tensors whose optimizers step together on several ranks, which are threads, and the reference: one
 * rank on gradients that the test sums. Failed checks fail the calling test. */
#pragma once

#include <stdint.h>

#include "backend/comm/test/tcp_place.h"
#include "sluice/optimizer.h"

enum { OW_MAX_RANKS = 4, OW_NUM_GROUPS = 3, OW_NUM_TENSORS = 7, OW_STEPS = 2, OW_ELEMENTS = 151308 };

/* Elements, group and dtype of each tensor. The second group holds experts: if a case sets `parts`, a part of the ranks
 * shares its tensors. */
extern const int64_t ow_counts[OW_NUM_TENSORS];
extern const int32_t ow_group_of[OW_NUM_TENSORS];
extern const int32_t ow_dtypes[OW_NUM_TENSORS];

typedef struct ow_states_s {
  float param[OW_ELEMENTS], master[OW_ELEMENTS], exp_avg[OW_ELEMENTS], exp_avg_sq[OW_ELEMENTS];
} ow_states_t;

typedef struct ow_model_s {
  ow_states_t s;
  float grad[OW_ELEMENTS]; /* in each tensor's dtype, from its first element on */
  sluice_optimizer_tensor_t tensors[OW_NUM_TENSORS];
  sluice_optimizer_group_t groups[OW_NUM_GROUPS];
  const sluice_optimizer_group_t* list[OW_NUM_GROUPS];
  sluice_optimizer_step_args_t args;
  sluice_optimizer_step_result_t result;
  sluice_optimizer_t* optimizer;
} ow_model_t;

typedef struct ow_world_s ow_world_t;

typedef struct ow_rank_s {
  ow_world_t* world;
  int32_t rank;
  ow_model_t* model;
  sluice_comm_t *parent, *comm, *own;
  sluice_status_t status;
  sluice_error_info_t error;
  int32_t step;
} ow_rank_t;

enum { OW_TCP = 1, OW_TCP_AT = 2 }; /* values of is_tcp: ranks connect through the local communicator, or an address */

struct ow_world_s {
  int32_t size, is_tcp, parts; /* parts: the second group is summed over ranks equal modulo parts; 0: over all ranks */
  void (*before)(ow_rank_t* me); /* called before each step, to modify a rank */
  ow_rank_t ranks[OW_MAX_RANKS];
  sluice_local_group_t *group, *groups[OW_MAX_RANKS];
  char place[TCP_PLACE_BYTES];
};

ow_model_t* ow_model_new(void);
void ow_model_free(ow_model_t* m);

/* Index of a tensor's first element in states and gradients. */
int64_t ow_first_of(int tensor);

void ow_write_element(void* data, int32_t dtype, int64_t i, float x);

/* size <= OW_MAX_RANKS; is_tcp: OW_TCP or OW_TCP_AT; parts: as in ow_world_t. */
ow_world_t* ow_world_new(int32_t size, int32_t is_tcp, int32_t parts);
void ow_world_free(ow_world_t* w);

/* Takes one step on all ranks. */
void ow_step(ow_world_t* w, int32_t number);

/* Sums gradients in rank order, over the ranks that share each tensor with `me`, into f32 gradients of `reference`. */
void ow_sum_gradients(const ow_world_t* w, const ow_rank_t* me, ow_model_t* reference);

/* Checks that steps have the bits of the reference. Returns the number of steps that decided before updating. */
int ow_check_steps(ow_world_t* w, int64_t bucket, int64_t chunk, double max_norm);
