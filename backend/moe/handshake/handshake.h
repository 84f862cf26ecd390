// SPDX-License-Identifier: Apache-2.0
/* The header that opens every collective call: the ranks agree on the call, or all of them refuse it.
 *
 * Each rank sends every other rank a message of fixed size: the header, and the first counts for that peer. The size is
 * fixed because ranks that disagree about anything (another layer, another n) would otherwise disagree about sizes, for
 * which some transports kill the process. The remaining counts follow in a second exchange, once the headers agree. */
#pragma once

#include "backend/moe/routing/binding.h"

/* A direction besides SLUICE_FORWARD and _BACKWARD, without a pass. comm_hash is the hash of a placement. Ranks whose
 * hashes differ see that in is_alike, and exchange the placements to find the entry. */
enum { SLUICE_REPLACE_EXPERTS = 2 };

enum { SLUICE_WISH_WGRAD = 1 };

typedef struct sluice_proposal_s {
  int32_t direction; /* SLUICE_FORWARD, SLUICE_BACKWARD, SLUICE_REPLACE_EXPERTS */
  int32_t repeats;   /* a forward that runs again while n or the plan is open: the ranks find out which one */
  uint32_t like;     /* the forwards that it may repeat on this rank: sluice_replay_like */
  int32_t is_sized;  /* a forward whose n is open: bound for this rank's T; the ranks then agree on n */
  int32_t num_chunks;
  int32_t deduplicate; /* forward: SLUICE_DEDUPLICATE_* of its pass */
  uint64_t comm_hash;
  /* The part of the call that a message about a difference can name. Forward: whether a backward follows. Backward: bit
   * 0: input gradients; the bits from SLUICE_WISH_WGRAD on: SLUICE_WGRAD_CALL_*, where _NONE and _NOW may meet:
   * `wants_wgrad`. */
  int32_t wishes;
  int64_t num_tokens;
  uint64_t base_bytes;      /* under a budget: bytes that this rank has allocated outside of the plan */
  uint64_t held_bytes;      /* bytes that its outstanding forwards hold */
  uint64_t held_pool_bytes; /* of these, bytes in the host pool */
  int32_t local_status;     /* not SLUICE_OK: this rank refuses */
  const char* local_message;
} sluice_proposal_t;

/* What ranks learn from each other's headers. */
typedef struct sluice_handshake_s {
  uint64_t agreed_ns;  /* when the header exchange had ended */
  uint64_t header_ns;  /* duration of that exchange */
  int64_t max_tokens;  /* largest T of any rank */
  uint64_t base_bytes; /* the most of any rank, as the next two */
  uint64_t held_bytes;
  uint64_t held_pool_bytes;
  uint32_t like;    /* of a repeated forward: the earlier forwards that it is like on all ranks */
  int32_t is_sized; /* of a forward proposed with is_sized: `sized` is the choice of all ranks for max_tokens */
  sluice_pass_choice_t sized;
  int32_t num_chunks;   /* of such a repeated or sized forward */
  int32_t is_uncounted; /* some rank had bound another number of chunks, or another deduplication: all bind again and
                           exchange counts */
  int32_t wants_wgrad;  /* backward: some rank wants weight gradients, now or later */
  int32_t is_alike;     /* all ranks have the same comm_hash; otherwise calls fail, except for placements */
} sluice_handshake_t;

/* The result for a rank that exchanges no header: its own values. */
sluice_handshake_t sluice_handshake_alone(const sluice_proposal_t* proposal);

/* Exchanges headers, and with `binding` (forward) also the counts, into its recv_counts. binding may be NULL if this
 * rank refuses, or if the counts are exchanged later. Errors: the local refusal itself; PEER_REFUSED, MISMATCH naming
 * ranks and values; what the communicator reports. */
sluice_status_t sluice_handshake(sluice_moe_t* moe, const sluice_proposal_t* proposal, sluice_binding_t* binding,
                                 sluice_handshake_t* out_handshake);

/* Exchanges the counts alone, after a handshake without them: a plan needs an all-reduce in between to cut chunks. */
sluice_status_t sluice_exchange_counts(sluice_binding_t* binding);

/* Checks that all ranks give the same placement of experts; otherwise all refuse it (placement_handshake.c). Exchanges
 * one header. If placements differ, the ranks exchange the lists in pieces of fixed size, up to the first entry that
 * differs. placement: has been checked if refusal is OK. text: the refusal for the other ranks.
 * Errors: the refusal with its record; PEER_REFUSED; MISMATCH naming ranks and entry; what the communicator reports. */
sluice_status_t sluice_placement_agree(sluice_moe_t* moe, const sluice_expert_placement_t* placement,
                                       sluice_status_t refusal, const char* text);

/* ---- refusals and failures ---- */

/* Returns the failure of an earlier pass that the other ranks have not been told about, else `refusal`. */
sluice_status_t sluice_take_refusal(sluice_context_t* context, sluice_status_t refusal, char* text,
                                    uint64_t text_bytes);
/* Called after a pass that failed beyond its header; returns `status` with its record. If its exchanges all ran
 * (in_step), the next header tells the other ranks. A rank that could not take part in the payload (no memory, no
 * thread) aborts its communicator, so that the others do not wait for it. */
sluice_status_t sluice_fail_pass(sluice_context_t* context, sluice_status_t status, int in_step);
