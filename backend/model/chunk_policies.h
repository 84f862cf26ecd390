// SPDX-License-Identifier: Apache-2.0
/* Restore policies by chunk, for a layer or a plan whose chunks differ. Private to the backend.
 *
 * A tensor whose chunks differ has the policy SLUICE_RESTORE_BY_CHUNK and a list. If all chunks of both tensors have
 * the same policy there are no lists. */
#pragma once

#include <stdint.h>

#include "backend/base/status.h"
#include "backend/model/restore.h"
#include "backend/model/tensors.h"
#include "sluice/moe.h"

typedef struct sluice_chunk_policies_s {
  int32_t count; /* length of the lists; 0: no list. Chunks after it are sent and computed again */
  uint8_t di[SLUICE_MAX_CHUNKS], m[SLUICE_MAX_CHUNKS]; /* a tensor with one policy repeats it */
} sluice_chunk_policies_t;

/* The policy of one chunk, given the policy of the whole tensor. */
static inline int32_t sluice_policy_of_di(int32_t policy, const sluice_chunk_policies_t* by_chunk, int32_t chunk) {
  if (by_chunk->count == 0) return policy;
  return chunk < by_chunk->count ? by_chunk->di[chunk] : sluice_restore_least(SLUICE_T_DI);
}

static inline int32_t sluice_policy_of_m(int32_t policy, const sluice_chunk_policies_t* by_chunk, int32_t chunk) {
  if (by_chunk->count == 0) return policy;
  return chunk < by_chunk->count ? by_chunk->m[chunk] : sluice_restore_least(SLUICE_T_M);
}

/* The number of chunks in `list` that have the policy. */
static inline int32_t sluice_count_policy(const uint8_t* list, int32_t num_chunks, int32_t policy) {
  int32_t count = 0;
  for (int32_t i = 0; i < num_chunks; ++i) count += list[i] == policy;
  return count;
}

/* Reads the lists of a config: di, m [num_chunks] or NULL, and the policies for all chunks; a list of equal policies
 * becomes one policy. ADAPTIVE with a list is KEEP. what: "layer 3", for messages. Errors: INVALID_ARGUMENT naming
 * chunk and value, or if num_chunks is open; UNSUPPORTED for a chunk's policies that callback experts cannot have. */
sluice_status_t sluice_chunk_policies_read(const char* what, int32_t num_chunks, int32_t callback, const int32_t* di,
                                           const int32_t* m, int32_t* inout_di, int32_t* inout_m,
                                           sluice_chunk_policies_t* out);
