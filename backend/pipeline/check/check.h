// SPDX-License-Identifier: Apache-2.0
/* Checks what may go wrong when stages run a program, for any timing of messages.
 *
 * sluice_pipeline_check explores every interleaving of a small program: any ready op may be next on its stage (under a
 * plan: the next of its order), and every message takes any time. So it covers all policies that run only ready ops. It
 * finds a deadlock, a slot that is used too early or overwritten before its last reader, a limit that is exceeded.
 * Forms and matches are checked first, so that each op occurs once.
 *
 * If a stage has several replicas (dp), replica 0 leads: it chooses among the ready ops, and the others run a
 * collective op when replica 0 has begun it, as told by a small message that is sent ahead. Replicas that are in
 * different collectives are found. Other messages of replicas move independently.
 *
 * A state is the set of ended ops of each rank, which determines the future. `is_reduced` omits interleavings that
 * differ only in the order of moves which no policy chooses and which never disable another: a message that can arrive,
 * a replica that follows, the next op of a plan. Every deadlock and every mismatch of collectives is still found, since
 * such moves stay possible until they are made; an overwritten slot may be missed, so programs with one replica are
 * explored in full.
 *
 * Thread-safe: nothing is shared. */
#pragma once

#include "backend/pipeline/check/finding.h"

#define SLUICE_PIPELINE_CHECK_MAX_OPS      64 /* of one stage */
#define SLUICE_PIPELINE_CHECK_MAX_RANKS    8  /* p · replicas */
#define SLUICE_PIPELINE_CHECK_MAX_REPLICAS 4

typedef struct sluice_pipeline_check_options_s {
  int32_t replicas;         /* of each stage; 1 for a single pipeline */
  int32_t is_buffered;      /* a send may end before its receive is posted; else they end together */
  int32_t is_reduced;       /* see above */
  int32_t followers_choose; /* injected fault: replicas do not follow the first */
} sluice_pipeline_check_options_t;

/* One replica and rendezvous sends, in full. */
void sluice_pipeline_check_options_init(sluice_pipeline_check_options_t* options);

/* Checks forms, accesses, matches, order. out_finding->fault is NONE if there is no fault. */
void sluice_pipeline_check_form(const sluice_pipeline_program_t* program, sluice_pipeline_finding_t* out_finding);

/* Explores every interleaving of a program that passes sluice_pipeline_check_form, or at least has indices in range.
 * out_states: the number of states, or NULL. Errors: INVALID_ARGUMENT (too large, options out of range), NO_MEMORY. */
sluice_status_t sluice_pipeline_explore(const sluice_pipeline_program_t* program,
                                        const sluice_pipeline_check_options_t* options, sluice_allocator_t* allocator,
                                        sluice_pipeline_finding_t* out_finding, int64_t* out_states);

/* Checks the form, then every interleaving. Errors: as explore. */
sluice_status_t sluice_pipeline_check(const sluice_pipeline_program_t* program,
                                      const sluice_pipeline_check_options_t* options, sluice_allocator_t* allocator,
                                      sluice_pipeline_finding_t* out_finding, int64_t* out_states);
