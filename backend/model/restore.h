// SPDX-License-Identifier: Apache-2.0
/* How rows reach the backward, as data: one row per restore policy in restore.c, and nowhere else [MPipeMoE Table II].
 *
 * A policy is for one of two tensors: T_DI, the dispatched rows, or T_M, the pre-activations (of callback experts,
 * their output T_DO). Every device, exchange mode and cut takes every policy and every pair of them; callback experts
 * do not, see sluice_restore_fits_callback. T_DI's is the same on all ranks, since an exchange is; T_M's may differ.
 *
 * What a policy costs says what it adds to the passes (backend/schedule), for each chunk that has it:
 *   host_rows    forward: copy_out; backward: copy_in
 *   exchanges    backward: redispatch (with several ranks), then unpack
 *   GEMMs     backward: recompute, or the host's expert once more
 */
#ifndef SLUICE_BACKEND_MODEL_RESTORE_H_
#define SLUICE_BACKEND_MODEL_RESTORE_H_

#include "backend/model/tensors.h"
#include "sluice/moe.h"

/* Policies that a chunk can have: numbers from 0 on, without a hole. */
#define SLUICE_NUM_RESTORES 4

/* Bits of the tensors that a policy is for. */
enum { SLUICE_RESTORES_DI = 1, SLUICE_RESTORES_M = 2 };

typedef struct sluice_restore_s {
  const char* name;    /* in configs, files and what plans and decisions say */
  const char* word;    /* in messages about a number */
  int32_t tensors;     /* SLUICE_RESTORES_*; 0: no policy */
  int32_t device_rows; /* that outlive forward in the step's buffers, for each row of the chunk */
  int32_t host_rows;   /* that outlive it in host memory, and cross to it and back */
  int32_t exchanges;   /* of the chunk's rows, once more in backward */
  int32_t gemms;       /* first GEMMs of the chunk, once more in backward */
} sluice_restore_t;

/* Of a number that is no chunk's policy (ADAPTIVE, BY_CHUNK, others): a row that costs nothing and is for no tensor. */
const sluice_restore_t* sluice_restore(int32_t policy);

/* What a layer does where nobody chooses for it. */
static inline int32_t sluice_restore_of(int32_t policy) {
  return policy == SLUICE_RESTORE_ADAPTIVE ? SLUICE_RESTORE_KEEP : policy;
}

static inline int sluice_restore_is_kept(int32_t policy) { return sluice_restore(policy)->device_rows > 0; }
static inline int sluice_restore_is_offloaded(int32_t policy) { return sluice_restore(policy)->host_rows > 0; }
/* Whether rows of the chunk outlive forward, wherever. */
static inline int sluice_restore_is_stored(int32_t policy) {
  return sluice_restore_is_kept(policy) || sluice_restore_is_offloaded(policy);
}
static inline int sluice_restore_is_sent_again(int32_t policy) { return sluice_restore(policy)->exchanges > 0; }
static inline int sluice_restore_is_computed_again(int32_t policy) { return sluice_restore(policy)->gemms > 0; }

/* What policies of a tensor take in the mean of its chunks, by the columns of the table. */
typedef struct sluice_restore_mean_s {
  double copies, exchanges, gemms;
} sluice_restore_mean_t;
sluice_restore_mean_t sluice_restore_mean(const uint8_t* policies, int32_t num_chunks);

/* One of these questions, for those who count chunks by the answer. */
typedef int (*sluice_restore_question_t)(int32_t policy);

/* The table's name, "by chunk" for SLUICE_RESTORE_BY_CHUNK. */
const char* sluice_restore_name(int32_t policy);

/* Whether chunks of `tensor`, SLUICE_T_DI or SLUICE_T_M, may have the policy. */
int sluice_restore_is_for(int32_t policy, int32_t tensor);

/* Callback experts: the graph of a host's expert holds its input, so both are kept, or the expert runs again; then its
 * input may come back in any way. */
int sluice_restore_fits_callback(int32_t restore_input, int32_t restore_pre_activation);

/* The policy of `tensor` that stores nothing: of chunks that no longer fit. */
int32_t sluice_restore_least(int32_t tensor);

/* The number of the policy for `tensor` that has this name; -1 where none has. */
int32_t sluice_restore_find(const char* name, size_t length, int32_t tensor);

/* For messages; each writes and returns text. */
#define SLUICE_RESTORE_TEXT_BYTES 256
/* The policies for `tensor` with their numbers: "keep (0), offload (1) and re-dispatch (2)". */
const char* sluice_restore_choices(int32_t tensor, char text[SLUICE_RESTORE_TEXT_BYTES]);
/* Likewise their names in quotes, as files have them. */
const char* sluice_restore_names(int32_t tensor, char text[SLUICE_RESTORE_TEXT_BYTES]);
/* The pairs that fit callback experts, one policy for all chunks. */
const char* sluice_restore_callback_choices(char text[SLUICE_RESTORE_TEXT_BYTES]);

/* The papers' names of pairs: none, S1 to S4. */
#define SLUICE_NUM_RESTORE_SETS 5
typedef struct sluice_restore_set_s {
  const char* name;
  int32_t restore_input, restore_pre_activation;
} sluice_restore_set_t;

extern const sluice_restore_set_t sluice_restore_sets[SLUICE_NUM_RESTORE_SETS];
/* NULL where the pair has none. */
const char* sluice_restore_set_name(int32_t restore_input, int32_t restore_pre_activation);

#endif /* SLUICE_BACKEND_MODEL_RESTORE_H_ */
