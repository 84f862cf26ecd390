// SPDX-License-Identifier: Apache-2.0
/* From one token's logits to its scores and choices: what forward and backward of the gate share. */
#pragma once

#include "backend/base/alloc.h"
#include "sluice/gate.h"

/* Copies the caller's config over the defaults and checks everything that does not depend on tensors. */
sluice_status_t sluice_gate_config_read(const sluice_gate_config_t* config, sluice_gate_config_t* out_config);

/* Routes that one expert keeps of T tokens on this rank. */
int64_t sluice_gate_capacity(const sluice_gate_config_t* config, int64_t num_tokens);

/* scores[e] in f32: softmax or sigmoid of the logits. Returns logsumexp(logits). */
double sluice_gate_scores(const sluice_gate_config_t* config, const float* logits, float* scores);

/* Room for the choices of one token; made once per call. */
typedef struct {
  int64_t bytes;
  float* choosing; /* [E] scores plus bias */
  float* best;     /* values of the list being kept */
  int32_t* at;     /* their indices */
  float* group_score;
  char* allowed; /* [num_groups] */
} sluice_gate_room_t;

sluice_status_t sluice_gate_room_create(const sluice_gate_config_t* config, sluice_gate_room_t* out_room);
void sluice_gate_room_destroy(sluice_gate_room_t* room);

/* ids[0..K): the experts with the best scores plus bias inside the best groups, best first. A NaN is below every
 * number; ties go to the lower id, so that a row of NaN chooses 0, 1, ... */
void sluice_gate_choose(const sluice_gate_config_t* config, const float* scores, const float* bias, int64_t bias_stride,
                        sluice_gate_room_t* room, int32_t* ids);
