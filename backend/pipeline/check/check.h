/* The checker: what may go wrong when stages run a program, whatever arrives when.
 *
 * sluice_pipeline_check explores every interleaving of a small program: any op that is ready may be next on its stage
 * (under a plan: the next of its order), and every message takes as long as it likes. So it speaks of all policies that
 * run what is ready at once. It finds a deadlock, a slot that is used too early or written before its last reader, a
 * limit that is passed. Forms and matches are checked first, so that each op is there once.
 *
 * In a column of several replicas of a stage (dp), replica 0 leads: it chooses among what is ready, and the others run
 * a collective op when it has begun it, as told by a small message that travels ahead. Replicas that meet in different
 * ops are found. Their own messages move independently.
 *
 * States are kept by what has ended on each rank, which is all that the future depends on. `is_reduced` leaves out
 * interleavings that differ in the order of moves which nobody chooses and which never disable another: a message that
 * can arrive, a replica that follows, the next op of a plan. Every deadlock and every mismatch of collectives is still
 * found, since such moves stay possible until they are made; an overwritten slot may be missed, so programs are
 * explored with one replica in full.
 *
 * sluice_pipeline_sample takes random walks through programs of any size, with the runner and its policy.
 *
 * Thread-safe: nothing is shared. */
#ifndef SLUICE_BACKEND_PIPELINE_CHECK_CHECK_H_
#define SLUICE_BACKEND_PIPELINE_CHECK_CHECK_H_

#include "backend/pipeline/check/finding.h"

#define SLUICE_PIPELINE_CHECK_MAX_OPS      64 /* of one stage */
#define SLUICE_PIPELINE_CHECK_MAX_RANKS    8  /* p · replicas */
#define SLUICE_PIPELINE_CHECK_MAX_REPLICAS 4  /* of sampling too */

typedef struct sluice_pipeline_check_options_s {
  int32_t replicas;         /* of each stage; 1 for a single pipeline */
  int32_t is_buffered;      /* a send may end before its receive is posted; else they end together */
  int32_t is_reduced;       /* see above */
  int32_t followers_choose; /* what would happen if replicas did not follow the first: a fault to be found */
  int64_t max_states;       /* 0: as many as there are */
} sluice_pipeline_check_options_t;

/* Of one replica and rendezvous sends, in full. */
void sluice_pipeline_check_options_init(sluice_pipeline_check_options_t* options);

/* Forms, accesses, matches, order. out_finding->fault is NONE when all is well. */
void sluice_pipeline_check_form(const sluice_pipeline_program_t* program, sluice_pipeline_finding_t* out_finding);

/* Every interleaving of a program that sluice_pipeline_check_form has passed, or that it would refuse but whose indices
 * are in range. out_states: how many were seen, or NULL. Errors: INVALID_ARGUMENT (too large, options out of range),
 * NO_MEMORY, OVER_BUDGET (max_states). */
sluice_status_t sluice_pipeline_explore(const sluice_pipeline_program_t* program,
                                        const sluice_pipeline_check_options_t* options, sluice_allocator_t* allocator,
                                        sluice_pipeline_finding_t* out_finding, int64_t* out_states);

/* Form, then every interleaving. Errors: as explore. */
sluice_status_t sluice_pipeline_check(const sluice_pipeline_program_t* program,
                                      const sluice_pipeline_check_options_t* options, sluice_allocator_t* allocator,
                                      sluice_pipeline_finding_t* out_finding, int64_t* out_states);

/* Form, then `walks` random walks; the same seed gives the same walks. Errors: INVALID_ARGUMENT (options out of range),
 * NO_MEMORY. */
sluice_status_t sluice_pipeline_sample(const sluice_pipeline_program_t* program,
                                       const sluice_pipeline_check_options_t* options, int64_t walks, uint64_t seed,
                                       sluice_allocator_t* allocator, sluice_pipeline_finding_t* out_finding);

#endif /* SLUICE_BACKEND_PIPELINE_CHECK_CHECK_H_ */
