// SPDX-License-Identifier: Apache-2.0
/* Schedules: the ops of a pass with their order and lanes, as JSON, and the predicted time of the pass.
 *
 * A schedule is built from the same inputs as the schedule that a layer runs, and is the same: equal inputs give equal
 * hashes. It contains no counts. A prediction executes it in virtual time, given the duration of each op alone.
 *
 * Source: MPipeMoE Fig. 4(b) and 7 (order of S, C, R), Table II (restore strategies); the simulation replaces its eq.
 * 10. */
#ifndef SLUICE_SCHEDULE_H_
#define SLUICE_SCHEDULE_H_

#include "sluice/moe.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sluice_schedule_s sluice_schedule_t;

/* SLUICE_WGRAD_CALL_* say when the weight gradients of a backward are computed: not at all, in this call, or in a later
 * call of SLUICE_BACKWARD_WGRAD alone, for which the step keeps the inputs. */
enum { SLUICE_WGRAD_CALL_NONE = 0, SLUICE_WGRAD_CALL_NOW = 1, SLUICE_WGRAD_CALL_LATER = 2 };

typedef struct sluice_schedule_config_s {
  size_t struct_size;              /* set by sluice_schedule_config_init */
  const sluice_ext_header_t* next; /* NULL */
  int32_t direction;               /* SLUICE_FORWARD or SLUICE_BACKWARD */
  int32_t num_chunks;              /* n in [1, 256] */
  int32_t single_rank;             /* 1: W = 1, no exchanges */
  int32_t needs_backward;          /* forward: 1: a backward follows; default 1 */
  int32_t callback_experts;        /* 0 or 1 */
  int32_t gated;                   /* 0 or 1 */
  int32_t dgrad;                   /* backward: input gradients are computed; default 1 */
  int32_t wgrad;                   /* backward: SLUICE_WGRAD_CALL_*; default NOW */
  int32_t wgrad_mode;              /* SLUICE_WGRAD_DEFERRED or _PER_CHUNK */
  int32_t may_reuse_saved;         /* backward: as in sluice_moe_backward_args_t */
  int32_t under_plan; /* 1: the number of slots does not grow with n, and T_ACT has its own slot in addition to those of
                         an offloaded T_M, as under a plan with room for it; 0: T_ACT and T_M share those slots in
                         turns, as without a plan */
  int32_t restore_input;           /* SLUICE_RESTORE_KEEP, _OFFLOAD or _REDISPATCH, of all chunks */
  int32_t restore_pre_activation;  /* SLUICE_RESTORE_KEEP, _OFFLOAD or _RECOMPUTE, of all chunks */
  int32_t grouped;                 /* 1: as sluice_moe_config_t.grouping; only for whole passes of several ranks;
                                      default 0 */
  const int32_t* restore_input_of; /* [n] the policy of each chunk, used instead of restore_input, or NULL; borrowed for
                                      the call */
  const int32_t* restore_pre_activation_of; /* [n] likewise */
  int32_t deduplicate;                      /* SLUICE_DEDUPLICATE_*; not with single_rank */
  int32_t chunks_by_experts; /* 1: chunks are cut by experts (SLUICE_CHUNKING_ADAPTIVE says when layers do so): one
                                reduce adds all of them. For whole passes of several ranks that keep T_DI; default 0 */
  int32_t low_rank;          /* 1: as a layer with lora_rank; not with callback experts; default 0 */
  int32_t reserved;          /* 0 */
} sluice_schedule_config_t;

SLUICE_EXPORT void sluice_schedule_config_init(sluice_schedule_config_t* out_config, size_t struct_size);

/* Builds a schedule and verifies it. out_schedule: new, sluice_schedule_destroy. Local; allocates from the process.
 * Threads: thread-safe; the schedule is immutable. Errors: INVALID_ARGUMENT (names the field), ABI, UNSUPPORTED
 * (callback experts do not support the policies), NO_MEMORY. */
SLUICE_API sluice_status_t sluice_schedule_create(const sluice_schedule_config_t* config,
                                                  sluice_schedule_t** out_schedule);
SLUICE_EXPORT void sluice_schedule_destroy(sluice_schedule_t* schedule); /* accepts NULL */

/* Returns the number of ops. Immutable. 0 for NULL. */
SLUICE_EXPORT int32_t sluice_schedule_num_ops(const sluice_schedule_t* schedule);

/* Returns the schedule as JSON (docs/schedule.md), with a terminating zero. On entry *inout_bytes is the room in
 * `text`; on return it is the size, zero included; text may be NULL to ask for it. Any thread. Errors: INVALID_ARGUMENT
 * (too little room). */
SLUICE_API sluice_status_t sluice_schedule_json(const sluice_schedule_t* schedule, char* text, uint64_t* inout_bytes);

enum { SLUICE_SCHEDULE_LANES = 4 }; /* compute, comm, copy-out, copy-in: SLUICE_LANE_* */

typedef struct sluice_schedule_prediction_s {
  size_t struct_size;                         /* set by the caller: sizeof */
  double seconds;                             /* time of the pass */
  double busy_seconds[SLUICE_SCHEDULE_LANES]; /* time with an op on the lane */
} sluice_schedule_prediction_t;

/* Executes the schedule in virtual time.
 *
 *   op_seconds    in   [num_ops] duration of each op when no other op runs; finite, not negative
 *   share         in   [4][16] or NULL: the fraction of its speed, in (0, 1], that a lane keeps while the lanes of the
 *                 bit set are busy (its own included); 0 stands for 1
 *   out_begin     out  [num_ops] seconds from the start of the pass, or NULL
 *   out_end       out  as out_begin
 *
 * Threads: thread-safe. Errors: INVALID_ARGUMENT (names the op or the share), ABI, NO_MEMORY. */
SLUICE_API sluice_status_t sluice_schedule_predict(const sluice_schedule_t* schedule, const double* op_seconds,
                                                   const double* share, double* out_begin, double* out_end,
                                                   sluice_schedule_prediction_t* out_prediction);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_SCHEDULE_H_ */
