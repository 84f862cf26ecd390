// SPDX-License-Identifier: Apache-2.0
/* Restore policies: how rows reach the backward [MPipeMoE Table II]. Each policy is one row of the table in restore.c.
 *
 * A policy is for one of two tensors: T_DI, the dispatched rows, or T_M, the pre-activations (for callback experts
 * their output T_DO). Every device, exchange mode and cut supports every policy and every pair of them, except for
 * callback experts, see sluice_restore_fits_callback. All ranks have the same policy for T_DI, since it may exchange
 * rows; policies for T_M may differ.
 *
 * The costs of a policy say what it adds to the passes (backend/schedule), for each chunk that has it:
 *   host_rows    forward: copy_out; backward: copy_in
 *   exchanges    backward: redispatch (with several ranks), then unpack
 *   gemms        backward: recompute, or the host's expert once more */
#pragma once

#include "backend/model/tensors.h"
#include "sluice/moe.h"

/* Number of policies that a chunk can have, numbered from 0. */
#define SLUICE_NUM_RESTORES 4

/* Bits of the tensors that a policy is for. */
enum { SLUICE_RESTORES_DI = 1, SLUICE_RESTORES_M = 2 };

typedef struct sluice_restore_s {
  const char* name;    /* in configs, files, plans and decisions */
  const char* word;    /* in messages, next to its number */
  int32_t tensors;     /* SLUICE_RESTORES_*; 0: not a policy */
  int32_t device_rows; /* rows kept in the step's buffers, per row of the chunk */
  int32_t host_rows;   /* rows kept in host memory, copied out and in again */
  int32_t exchanges;   /* exchanges of the chunk's rows that backward repeats */
  int32_t gemms;       /* first GEMMs of the chunk that backward repeats */
} sluice_restore_t;

/* For a number that is no chunk's policy (ADAPTIVE, BY_CHUNK, others): a row without costs and tensors. */
const sluice_restore_t* sluice_restore(int32_t policy);

/* The policy of a layer for which no other is chosen. */
static inline int32_t sluice_restore_of(int32_t policy) {
  return policy == SLUICE_RESTORE_ADAPTIVE ? SLUICE_RESTORE_KEEP : policy;
}

static inline int sluice_restore_is_kept(int32_t policy) { return sluice_restore(policy)->device_rows > 0; }
static inline int sluice_restore_is_offloaded(int32_t policy) { return sluice_restore(policy)->host_rows > 0; }
/* Whether rows of the chunk are stored until the backward, in any memory. */
static inline int sluice_restore_is_stored(int32_t policy) {
  return sluice_restore_is_kept(policy) || sluice_restore_is_offloaded(policy);
}
static inline int sluice_restore_is_sent_again(int32_t policy) { return sluice_restore(policy)->exchanges > 0; }
static inline int sluice_restore_is_computed_again(int32_t policy) { return sluice_restore(policy)->gemms > 0; }

/* The mean costs of a tensor's policies over its chunks, by columns of the table. */
typedef struct sluice_restore_mean_s {
  double copies, exchanges, gemms;
} sluice_restore_mean_t;
sluice_restore_mean_t sluice_restore_mean(const uint8_t* policies, int32_t num_chunks);

/* One of the predicates above, for functions that count chunks. */
typedef int (*sluice_restore_question_t)(int32_t policy);

/* The table's name, "by chunk" for SLUICE_RESTORE_BY_CHUNK. */
const char* sluice_restore_name(int32_t policy);

/* Whether chunks of `tensor`, SLUICE_T_DI or SLUICE_T_M, may have the policy. */
int sluice_restore_is_for(int32_t policy, int32_t tensor);

/* Whether callback experts can have the pair: the autograd graph of a host's expert holds its input, so either both
 * tensors are kept, or the expert runs again, and its input may be restored in any way. */
int sluice_restore_fits_callback(int32_t restore_input, int32_t restore_pre_activation);

/* The policy of `tensor` that stores nothing, for chunks that do not fit. */
int32_t sluice_restore_least(int32_t tensor);

/* The number of the policy for `tensor` with this name; -1: none. */
int32_t sluice_restore_find(const char* name, size_t length, int32_t tensor);

/* For messages; each writes and returns text. */
#define SLUICE_RESTORE_TEXT_BYTES 256
/* The policies for `tensor` with their numbers: "keep (0), offload (1) and re-dispatch (2)". */
const char* sluice_restore_choices(int32_t tensor, char text[SLUICE_RESTORE_TEXT_BYTES]);
/* The same with names in quotes, as in files. */
const char* sluice_restore_names(int32_t tensor, char text[SLUICE_RESTORE_TEXT_BYTES]);
/* The pairs that callback experts can have, one policy for all chunks. */
const char* sluice_restore_callback_choices(char text[SLUICE_RESTORE_TEXT_BYTES]);

/* The names of pairs in the papers: none, S1 to S4. */
#define SLUICE_NUM_RESTORE_SETS 5
typedef struct sluice_restore_set_s {
  const char* name;
  int32_t restore_input, restore_pre_activation;
} sluice_restore_set_t;

extern const sluice_restore_set_t sluice_restore_sets[SLUICE_NUM_RESTORE_SETS];
/* NULL: the pair has no name. */
const char* sluice_restore_set_name(int32_t restore_input, int32_t restore_pre_activation);

/* Writes the table as JSON, for readers outside of C: at most `room` bytes to data (NULL: none), terminated. Returns
 * the full length without the terminator. */
uint64_t sluice_restore_write_json(char* data, uint64_t room);
