// SPDX-License-Identifier: Apache-2.0
/* Checks that all ranks give the same placement of experts. */

#include <stdio.h>
#include <string.h>

#include "backend/base/hash.h"
#include "backend/model/pass_sizes.h"
#include "backend/moe/handshake/handshake.h"
#include "backend/moe/handshake/header_buffers.h"

/* What ranks compare for one expert; the first record of a placement is its epoch. */
typedef struct record_s {
  int32_t rank;
  int32_t slot;
} record_t;

enum { RECORDS_IN_PIECE = SLUICE_HEADER_BYTES / sizeof(record_t) };

typedef struct lists_s {
  const sluice_moe_t* moe;
  const sluice_expert_placement_t* placement;
} lists_t;

static record_t record_of(const lists_t* lists, int64_t at) {
  const sluice_expert_placement_t* p = lists->placement;
  record_t record;
  if (at == 0) {
    memcpy(&record, &p->epoch, sizeof record);
    return record;
  }
  return (record_t){p->expert_rank[at - 1], p->expert_slot[at - 1]};
}

static int64_t num_records(const lists_t* lists) { return 1 + (int64_t)lists->moe->shape.config.num_experts; }

static uint64_t hash_of(const lists_t* lists) {
  uint64_t hash = SLUICE_HASH_OF_NOTHING;
  for (int64_t i = 0; i < num_records(lists); ++i) {
    const record_t record = record_of(lists, i);
    hash = sluice_hash_bytes(hash, &record, sizeof record);
  }
  return hash;
}

/* ---- the entry that differs ---- */

static sluice_status_t name(const lists_t* lists, int64_t at, int32_t peer, const record_t* theirs) {
  const int32_t id = lists->moe->shape.config.layer_id, self = lists->moe->context->rank;
  const record_t own = record_of(lists, at);
  if (at == 0) {
    uint64_t epoch = 0;
    memcpy(&epoch, theirs, sizeof epoch);
    return SLUICE_FAIL_PEER(SLUICE_E_MISMATCH, self, peer,
                            "layer %d: epoch is %llu on rank %d and %llu on rank %d: replace experts by the same "
                            "placement on all ranks",
                            id, (unsigned long long)epoch, peer, (unsigned long long)lists->placement->epoch, self);
  }
  const int32_t e = (int32_t)at - 1;
  return SLUICE_FAIL_PEER(
      SLUICE_E_MISMATCH, self, peer,
      "layer %d: (expert_rank[%d], expert_slot[%d]) is (%d, %d) on rank %d and (%d, %d) on rank %d: "
      "replace experts by the same placement on all ranks",
      id, e, e, theirs->rank, theirs->slot, peer, own.rank, own.slot, self);
}

/* Finds the first entry of a piece in which any rank differs from this one. All ranks stop at the same piece: if any
 * two ranks differ in a piece, each rank differs from some other. */
static sluice_status_t compare(const lists_t* lists, const char* received, int64_t first, int64_t count) {
  const sluice_context_t* context = lists->moe->context;
  for (int64_t i = 0; i < count; ++i) {
    const record_t own = record_of(lists, first + i);
    for (int32_t r = 0; r < context->world_size; ++r) {
      if (r == context->rank) continue;
      record_t theirs;
      memcpy(&theirs, received + (size_t)r * SLUICE_HEADER_BYTES + (size_t)i * sizeof theirs, sizeof theirs);
      if (memcmp(&theirs, &own, sizeof own) != 0) return name(lists, first + i, r, &theirs);
    }
  }
  return SLUICE_OK;
}

static sluice_status_t find_difference(const lists_t* lists) {
  sluice_context_t* context = lists->moe->context;
  char phase[96];
  snprintf(phase, sizeof phase, "placements of layer %d", lists->moe->shape.config.layer_id);
  for (int64_t first = 0; first < num_records(lists); first += RECORDS_IN_PIECE) {
    const int64_t left = num_records(lists) - first, count = left < RECORDS_IN_PIECE ? left : RECORDS_IN_PIECE;
    sluice_header_buffers_t buffers;
    SLUICE_TRY(sluice_header_buffers_take(context, &buffers));
    memset(buffers.send, 0, SLUICE_HEADER_BYTES);
    for (int64_t i = 0; i < count; ++i) {
      const record_t record = record_of(lists, first + i);
      memcpy(buffers.send + (size_t)i * sizeof record, &record, sizeof record);
    }
    for (int32_t r = 0; r < context->world_size; ++r) buffers.arrays.send[r] = buffers.send; /* the same to all */
    SLUICE_TRY(sluice_header_exchange(context->comm, &buffers.arrays, phase));
    SLUICE_TRY(compare(lists, buffers.recv, first, count));
  }
  return SLUICE_FAIL(SLUICE_E_INTERNAL,
                     "layer %d: the placements of ranks are equal, but their hashes differ; please report it",
                     lists->moe->shape.config.layer_id);
}

sluice_status_t sluice_placement_agree(sluice_moe_t* moe, const sluice_expert_placement_t* placement,
                                       sluice_status_t refusal, const char* text) {
  const lists_t lists = {moe, placement};
  const sluice_proposal_t proposal = {
      .direction = SLUICE_REPLACE_EXPERTS,
      .comm_hash = refusal == SLUICE_OK ? hash_of(&lists) : 0,
      .local_status = refusal,
      .local_message = text,
  };
  sluice_handshake_t handshake;
  SLUICE_TRY(sluice_handshake(moe, &proposal, NULL, &handshake));
  return handshake.is_alike ? SLUICE_OK : find_difference(&lists);
}
