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

#include "backend/pipeline/program.h"

typedef enum sluice_pipeline_fault_e {
  SLUICE_PIPELINE_FAULT_NONE = 0,
  SLUICE_PIPELINE_FAULT_FORM,    /* an index, kind or count out of range; an op repeated or missing */
  SLUICE_PIPELINE_FAULT_ACCESS,  /* an op that does not declare the accesses of its kind, at its micro-batch's slot */
  SLUICE_PIPELINE_FAULT_MESSAGE, /* a send without a receive at that stage, or vice versa */
  SLUICE_PIPELINE_FAULT_OVERWRITTEN,  /* a slot is overwritten before its last reader or writer has ended */
  SLUICE_PIPELINE_FAULT_UNDEFINED,    /* a slot is read before its writer has written it */
  SLUICE_PIPELINE_FAULT_IN_FLIGHT,    /* more micro-batches in flight, or held, than the limit */
  SLUICE_PIPELINE_FAULT_COLUMN_ORDER, /* replicas of a stage wait in collectives of different ops */
  SLUICE_PIPELINE_FAULT_DEADLOCK,     /* no op can run and some have not ended */
  SLUICE_PIPELINE_FAULT_COUNT
} sluice_pipeline_fault_t;

typedef struct sluice_pipeline_finding_s {
  int32_t fault; /* SLUICE_PIPELINE_FAULT_* */
  int32_t op;    /* of the program, at fault or the first that waits; -1 if there is none */
  int32_t other; /* the conflicting op; -1: none */
  int32_t replica;
  int64_t events; /* before the fault, in the order of the checker */
} sluice_pipeline_finding_t;

/* Describes the fault with its ops. Returns the length, as snprintf. */
int sluice_pipeline_finding_describe(const sluice_pipeline_program_t* program, const sluice_pipeline_finding_t* finding,
                                     char* text, size_t room);

/* Returns the fault to report if the later of two ops of a stage, in the order of the list, begins before the earlier
 * has ended; NONE if it may. The flush waits for all ops. */
static inline int32_t sluice_stage_conflict(const sluice_stage_op_t* earlier, const sluice_stage_op_t* later) {
  if (later->kind == SLUICE_STAGE_FLUSH) return SLUICE_PIPELINE_FAULT_OVERWRITTEN;
  for (int32_t w = 0; w < later->num_writes; ++w) {
    for (int32_t a = 0; a < earlier->num_reads + earlier->num_writes; ++a) {
      const sluice_stage_slot_t* other =
          a < earlier->num_reads ? &earlier->reads[a] : &earlier->writes[a - earlier->num_reads];
      if (other->tensor == later->writes[w].tensor && other->virtual_stage == later->writes[w].virtual_stage &&
          other->slot == later->writes[w].slot) {
        return SLUICE_PIPELINE_FAULT_OVERWRITTEN;
      }
    }
  }
  for (int32_t r = 0; r < later->num_reads; ++r) {
    for (int32_t w = 0; w < earlier->num_writes; ++w) {
      const sluice_stage_slot_t* other = &earlier->writes[w];
      if (other->tensor == later->reads[r].tensor && other->virtual_stage == later->reads[r].virtual_stage &&
          other->slot == later->reads[r].slot) {
        return SLUICE_PIPELINE_FAULT_UNDEFINED;
      }
    }
  }
  return SLUICE_PIPELINE_FAULT_NONE;
}

/* ---- the checks ---- */

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
