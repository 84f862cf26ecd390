// SPDX-License-Identifier: Apache-2.0
/* Which routes an expert keeps when more than its capacity choose it. */
#pragma once

#include "backend/gate/gate_choice.h"

/* capacity == num_tokens: nothing can be dropped, and nothing is allocated. */
typedef struct {
  int32_t policy, top_k, num_experts;
  int64_t num_tokens, capacity, bytes;
  int64_t* first; /* [E] SCORE: where an expert's routes begin; POSITION: how many it keeps so far */
  int64_t* order; /* [T K] SCORE: routes by expert */
  int32_t* expert;
  float* score;
  char* keep;
} sluice_gate_drop_t;

sluice_status_t sluice_gate_drop_create(const sluice_gate_config_t* config, int64_t num_tokens,
                                        sluice_gate_drop_t* out_drop);
void sluice_gate_drop_destroy(sluice_gate_drop_t* drop);
/* Notes a route; every route once, tokens in order. */
void sluice_gate_drop_offer(sluice_gate_drop_t* drop, int64_t t, int64_t k, int32_t expert, float score);
/* Decides about all of them. counts[e]: routes that chose e. */
void sluice_gate_drop_decide(sluice_gate_drop_t* drop, const int64_t* counts);
int sluice_gate_drop_keeps(const sluice_gate_drop_t* drop, int64_t t, int64_t k);
