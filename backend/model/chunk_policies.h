// SPDX-License-Identifier: Apache-2.0
/* Restore policies chunk by chunk, of a layer or a plan that treats chunks differently. Private to the backend.
 *
 * A tensor whose chunks differ has the policy SLUICE_RESTORE_BY_CHUNK, and its list says the rest; where all chunks are
 * the same there is no list. */
#ifndef SLUICE_BACKEND_MODEL_CHUNK_POLICIES_H_
#define SLUICE_BACKEND_MODEL_CHUNK_POLICIES_H_

#include <stdint.h>

#include "backend/base/status.h"
#include "backend/model/restore.h"
#include "backend/model/tensors.h"
#include "sluice/moe.h"

typedef struct sluice_chunk_policies_s {
  int32_t count; /* chunks that are named; 0: no tensor has a list. Chunks after them are sent and computed again */
  uint8_t di[SLUICE_MAX_CHUNKS], m[SLUICE_MAX_CHUNKS]; /* of a tensor with one policy: that policy */
} sluice_chunk_policies_t;

/* Of one chunk, given the policy of the whole. */
static inline int32_t sluice_policy_of_di(int32_t policy, const sluice_chunk_policies_t* by_chunk, int32_t chunk) {
  if (by_chunk->count == 0) return policy;
  return chunk < by_chunk->count ? by_chunk->di[chunk] : sluice_restore_least(SLUICE_T_DI);
}

static inline int32_t sluice_policy_of_m(int32_t policy, const sluice_chunk_policies_t* by_chunk, int32_t chunk) {
  if (by_chunk->count == 0) return policy;
  return chunk < by_chunk->count ? by_chunk->m[chunk] : sluice_restore_least(SLUICE_T_M);
}

/* Of so many chunks, those that restore so. */
static inline int32_t sluice_count_policy(const uint8_t* list, int32_t num_chunks, int32_t policy) {
  int32_t count = 0;
  for (int32_t i = 0; i < num_chunks; ++i) count += list[i] == policy;
  return count;
}

/* Reads the lists of a config: di, m [num_chunks] or NULL, and the policies for all chunks; a list of equal ones
 * becomes one. ADAPTIVE with a list is KEEP. what: "layer 3", for messages. Errors: INVALID_ARGUMENT naming chunk and
 * value, or that num_chunks is open; UNSUPPORTED: callback experts that cannot do a chunk's. */
sluice_status_t sluice_chunk_policies_read(const char* what, int32_t num_chunks, int32_t callback, const int32_t* di,
                                           const int32_t* m, int32_t* inout_di, int32_t* inout_m,
                                           sluice_chunk_policies_t* out);

#endif /* SLUICE_BACKEND_MODEL_CHUNK_POLICIES_H_ */
