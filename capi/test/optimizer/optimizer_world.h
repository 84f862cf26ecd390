// SPDX-License-Identifier: Apache-2.0
/* Models of filed_model.h whose optimizers step together on several ranks, which are threads, and the reference: one
 * rank on gradients that the test sums. Failed checks fail the calling test. */
#pragma once

#include "backend/comm/test/tcp_place.h"
#include "capi/test/optimizer/filed_model.h"

enum { OW_MAX_RANKS = 4, OW_STEPS = 2 };

typedef struct ow_world_s ow_world_t;

typedef struct ow_rank_s {
  ow_world_t* world;
  int32_t rank;
  model_t* model;
  sluice_comm_t *parent, *comm, *own;
  sluice_context_t* context; /* on a fake GPU; else NULL */
  sluice_status_t status;
  sluice_error_info_t error;
  int32_t step;
} ow_rank_t;

/* What connects the ranks: a local communicator, over which or through an address they may connect by TCP; or fake
 * GPUs, which have parameters and gradients: one for each rank with NCCL, or one for all with a local communicator. */
enum { OW_LOCAL, OW_TCP, OW_TCP_AT, OW_NCCL, OW_ONE_GPU };

struct ow_world_s {
  int32_t size, kind, parts; /* parts: the second group is summed over ranks equal modulo parts; 0: over all ranks */
  void (*before)(ow_rank_t* me); /* called before each step, to modify a rank */
  ow_rank_t ranks[OW_MAX_RANKS];
  sluice_local_group_t *group, *groups[OW_MAX_RANKS];
  char place[TCP_PLACE_BYTES];
};

/* size <= OW_MAX_RANKS; parts: as in ow_world_t, on GPUs 0 or `size`. Ranks on GPUs have no optimizer before ow_set. */
ow_world_t* ow_world_new(int32_t size, int32_t kind, int32_t parts);
/* Fails the test on a hazard or a leak of the fakes. */
void ow_world_free(ow_world_t* w);
int ow_is_on_gpus(const ow_world_t* w);
/* Sets the arguments of all ranks, and creates the optimizers of ranks on GPUs with this bucket. */
void ow_set(ow_world_t* w, int64_t bucket, int64_t sum_buckets, double max_norm);
/* Calls fn with each rank on a thread of its own. */
void ow_on_all(ow_world_t* w, void* (*fn)(void* rank));
/* Takes step `number`, from 1 on, on all ranks. */
void ow_step(ow_world_t* w, int32_t number);
/* The same; returns the number of ranks with an error. If there is none, checks that all have the bits of the reference
 * for the states before the step. */
int ow_checked_step(ow_world_t* w, int32_t number);
/* Sums gradients in rank order, over the ranks that share each tensor with `me`, into f32 gradients of `reference`. */
void ow_sum_gradients(const ow_world_t* w, const ow_rank_t* me, model_t* reference);
/* Checks steps of all ranks with these arguments. Returns the number of steps that decided before updating. */
int ow_check_steps(ow_world_t* w, int64_t bucket, int64_t chunk, double max_norm);
