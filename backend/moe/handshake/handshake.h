// SPDX-License-Identifier: Apache-2.0
/* The header that opens every collective call: the ranks agree on what they are about to do, or all refuse alike.
 *
 * Each rank sends every other a fixed-size header: the header, and as many of the counts for that peer as fit. Fixed,
 * because ranks that disagree about anything (another layer, another n) would otherwise disagree about sizes, which
 * some transports answer by killing the process. Counts that do not fit follow in a second exchange, once the headers
 * agree.
 */
#ifndef SLUICE_BACKEND_MOE_HANDSHAKE_HANDSHAKE_H_
#define SLUICE_BACKEND_MOE_HANDSHAKE_HANDSHAKE_H_

#include "backend/moe/routing/binding.h"

/* Beside SLUICE_FORWARD and _BACKWARD: no pass. comm_hash is that of a placement, and ranks whose hashes differ learn
 * it by is_alike: only they can say in which entry. */
enum { SLUICE_REPLACE_EXPERTS = 2 };

enum { SLUICE_WISH_WGRAD = 1 };

typedef struct sluice_proposal_s {
  int32_t direction; /* SLUICE_FORWARD, SLUICE_BACKWARD, SLUICE_REPLACE_EXPERTS */
  int32_t repeats;   /* a forward that is run again, where n or the plan is open: of which is found by all ranks */
  uint32_t like;     /* what this rank takes it for: sluice_replay_like */
  int32_t is_sized;  /* a forward whose n is open: bound as for this rank's own T, and found by all ranks */
  int32_t num_chunks;
  int32_t deduplicate; /* of a forward: SLUICE_DEDUPLICATE_* of its pass */
  uint64_t comm_hash;
  /* What of it the message about a difference can name. Forward: whether a backward follows. Backward: bit 0: input
   * gradients; from SLUICE_WISH_WGRAD on SLUICE_WGRAD_CALL_*, where _NONE and _NOW go together: `wants_wgrad`. */
  int32_t wishes;
  int64_t num_tokens;
  uint64_t base_bytes;      /* under a budget: what this rank has allocated besides the plan's own */
  uint64_t held_bytes;      /* and what its outstanding forwards hold */
  uint64_t held_pool_bytes; /* of that, in the host pool */
  int32_t local_status;     /* not 0: this rank refuses */
  const char* local_message;
} sluice_proposal_t;

/* What ranks learn from each other's headers. */
typedef struct sluice_handshake_s {
  uint64_t agreed_ns;  /* when the first exchange had ended */
  uint64_t header_ns;  /* that it took */
  int64_t max_tokens;  /* T of any rank */
  uint64_t base_bytes; /* the most of any rank; the next two as well */
  uint64_t held_bytes;
  uint64_t held_pool_bytes;
  uint32_t like;    /* of a repeated forward: what it is like on all ranks */
  int32_t is_sized; /* of a forward that was proposed so: `sized` says what all ranks do, by max_tokens */
  sluice_pass_choice_t sized;
  int32_t num_chunks;   /* that either then has */
  int32_t is_uncounted; /* some rank had bound another number of them, or other copies of tokens: all bind these and
                           exchange counts */
  int32_t wants_wgrad;  /* of a backward: some rank wants weight gradients, now or later */
  int32_t is_alike;     /* the comm_hash of all ranks is the same; else they fail, but for placements */
} sluice_handshake_t;

/* What a rank knows without a header: its own. */
sluice_handshake_t sluice_handshake_alone(const sluice_proposal_t* proposal);

/* Exchanges headers, and with `binding` (forward) also the counts: its recv_counts are filled in. binding may be NULL
 * when this rank refuses, or when counts follow later by themselves.
 * Errors: the local refusal itself; PEER_REFUSED, MISMATCH naming ranks and values; what the communicator reports. */
sluice_status_t sluice_handshake(sluice_moe_t* moe, const sluice_proposal_t* proposal, sluice_binding_t* binding,
                                 sluice_handshake_t* out_handshake);

/* The counts alone, after an handshake without them: under a plan the cut needs an all-reduce in between. */
sluice_status_t sluice_exchange_counts(sluice_binding_t* binding);

#endif /* SLUICE_BACKEND_MOE_HANDSHAKE_HANDSHAKE_H_ */
