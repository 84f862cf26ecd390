// SPDX-License-Identifier: Apache-2.0
/* The model of moving.c: a layer whose experts have weights, momenta and gradients. */
#pragma once

#include "host.h"

enum { W = 4, E = 8, SLOTS = E / W, T = 64, M = 16, H = 32, STEPS = 30, LOOK = 8 };

/* The data of one expert: matrices, their momenta, the gradients of this step, and the number of updates. */
typedef struct {
  float up[H][M], down[M][H], up_speed[H][M], down_speed[M][H], up_grad[H][M], down_grad[M][H];
  int64_t updates;
} expert_t;

typedef struct {
  int rank, moves, bad;
  expert_t experts[SLOTS];
  float x[T][M], y[T][M], grad_y[T][M], weights[T][1];
  int32_t ids[T][1], owner[E], slot[E], next_owner[E], next_slot[E];
  double losses[STEPS];
} rank_t;

/* Sets the tokens, their routes, most of which go to the experts of rank 0, and the experts that begin on this rank. */
void layer_fill(rank_t* me);
/* Runs forward and backward of a step: computes the loss and the gradients. */
int layer_pass(rank_t* me, sluice_moe_t* moe, int step);
void layer_update(expert_t* expert);
