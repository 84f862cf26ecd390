/* The tuner of a context: who decides n (and when weight gradients are computed) while training, by what, and what was
 * decided. Every context has one (on CUDA two events on the host's stream time a pass: docs/cuda.md); these calls are
 * for hosts that want another mode, a machine for its predictions, or to see, keep and bring back decisions.
 * How it decides: docs/tuning.md.
 *
 * Under a memory budget it prices plans (n, restore policy, weight gradients), by its machine where it has one, and the
 * best few that fit beside each other run as ordinary steps; without a budget and with several ranks it searches for n.
 *
 * Candidates run as ordinary training steps: results do not depend on them. All ranks decide the same from the same
 * numbers, which travel in headers; ranks that were configured differently get MISMATCH in their first forward.
 *
 * SLUICE_LOG=decision in the environment prints one line per decision on rank 0 to stderr; each also goes to the log
 * callback at SLUICE_LOG_INFO.
 */
#ifndef SLUICE_TUNER_H_
#define SLUICE_TUNER_H_

#include "sluice/context.h"
#include "sluice/planner.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  SLUICE_TUNER_ADAPTIVE = 0, /* the model first, its best few confirmed by steps, the model corrected by what was seen;
                                without a machine one is bootstrapped from the first steps' lane times. The default */
  SLUICE_TUNER_PROFILE = 1,  /* by steps alone */
  SLUICE_TUNER_MODEL = 2     /* by predictions alone: needs a machine */
};

typedef struct sluice_tuner_config_s {
  size_t struct_size;              /* set by sluice_tuner_config_init */
  const sluice_ext_header_t* next; /* NULL */
  int32_t mode;                    /* SLUICE_TUNER_* */
  int32_t reserved;                /* 0 */
  const sluice_planner_t* machine; /* copied; NULL: none */
} sluice_tuner_config_t;

SLUICE_EXPORT void sluice_tuner_config_init(sluice_tuner_config_t* out_config, size_t struct_size);

/* Alike on all ranks, before layers with an open choice are made. No communication. Context-exclusive. Errors:
 * INVALID_ARGUMENT (mode MODEL without a machine), ABI, STATE (layers have begun to choose), BUSY. On a context without
 * a tuner it checks and does nothing. */
SLUICE_API sluice_status_t sluice_context_tune(sluice_context_t* context, const sluice_tuner_config_t* config);

/* Why a choice was made. */
enum {
  SLUICE_WHY_NOTHING_YET = 0,  /* no pass was timed so far */
  SLUICE_WHY_ON_TRIAL = 1,     /* a candidate of a race */
  SLUICE_WHY_INSIDE_RANGE = 2, /* batches a little smaller and a little larger both take it */
  SLUICE_WHY_ONE_LEFT = 3,     /* no other candidate was open */
  SLUICE_WHY_RACED = 4,        /* fastest of the candidates that ran */
  SLUICE_WHY_PREDICTED = 5,    /* fastest by the model */
  SLUICE_WHY_QUESTIONED = 6,   /* raced again later, against its neighbours */
  SLUICE_WHY_IMPORTED = 7      /* from sluice_context_read_decisions */
};

typedef struct sluice_tuner_decision_s {
  int64_t model_width, hidden_width; /* of the layers that it is for */
  int32_t num_experts, top_k, dtype, gated;
  int64_t rows;             /* received by the fullest rank: the size of the batch that it is for */
  int32_t num_chunks;       /* what was chosen */
  int32_t wgrad_mode;       /* SLUICE_WGRAD_* */
  int32_t why;              /* SLUICE_WHY_* */
  int32_t num_raced;        /* candidates that ran */
  int64_t race_passes;      /* passes that they ran */
  double seconds;           /* forward and backward of the slowest rank, measured; 0: not measured */
  double predicted_seconds; /* 0: no model */
  double runner_up_seconds; /* 0: none */
  int32_t runner_up_chunks; /* 0: none */
  int32_t runner_up_wgrad_mode;
} sluice_tuner_decision_t;

/* The newest decisions, oldest first; *out_count is how many there are (the last 64 are kept), at most `capacity` are
 * written. Context-exclusive. Errors: INVALID_ARGUMENT, BUSY. */
SLUICE_API sluice_status_t sluice_context_decisions(sluice_context_t* context, sluice_tuner_decision_t* out_decisions,
                                                    int32_t capacity, int32_t* out_count);

/* What else was decided under a memory budget, where the choice is a plan (n, restore policies, weight gradients). */
typedef struct sluice_tuner_policy_s {
  int32_t restore_input, restore_pre_activation; /* SLUICE_RESTORE_*; ADAPTIVE: no plan, the layer's config says it */
  int32_t runner_up_restore_input, runner_up_restore_pre_activation;
  uint64_t memory_budget; /* that the plan is for; 0: no plan, or it reuses buffers or bounds offloaded rows alone */
  uint64_t total_bytes;   /* that the plan, or one that it raced, takes at most; 0: no plan */
} sluice_tuner_policy_t;

/* For the decisions of sluice_context_decisions, in their order and number. Context-exclusive. Errors: as there. */
SLUICE_API sluice_status_t sluice_context_decided_policies(sluice_context_t* context,
                                                           sluice_tuner_policy_t* out_policies, int32_t capacity,
                                                           int32_t* out_count);

/* How many chunks each of these plans keeps as its policies say, the first ones: the rest are sent and computed again
 * (kept_chunks of sluice_plan_info_t, sluice/plan.h). All n where the budget has room; 0: no plan. Context-exclusive.
 * Errors: as there. */
SLUICE_API sluice_status_t sluice_context_decided_parts(sluice_context_t* context, int32_t* out_kept_chunks,
                                                        int32_t capacity, int32_t* out_count);

typedef struct sluice_tuner_stats_s {
  size_t struct_size;   /* set by the caller: sizeof */
  int64_t timed_passes; /* that all ranks ran alike and reported */
  int64_t race_passes;  /* of those, with a candidate on trial */
  int64_t num_decisions;
  int64_t num_switches;   /* of n or the mode from one pass of a layer to its next */
  int64_t num_questioned; /* answers that were raced again ... */
  int64_t num_changed;    /* ... and changed */
  int64_t monotonic;      /* raced answers for which the papers' "the best n grows with the batch" held ... */
  int64_t not_monotonic;  /* ... or not */
  double total_seconds;   /* of timed passes */
  double excess_seconds;  /* of raced passes beyond what the best known candidate took: what tuning has cost */
  double switch_seconds;  /* of first passes after a switch beyond what the same choice takes otherwise (that of races
                             is in excess_seconds too) */
  int64_t one_valley;     /* races of three n or more for which the papers' "time over n has one valley" held ... */
  int64_t not_one_valley; /* ... or not */
} sluice_tuner_stats_t;

/* Over all kinds of layers of the context. Context-exclusive. Errors: INVALID_ARGUMENT, ABI, BUSY. */
SLUICE_API sluice_status_t sluice_context_tuner_stats(sluice_context_t* context, sluice_tuner_stats_t* out_stats);

/* Decisions as JSON, for a file or the next run: for each kind of layer, size of the batch, n and mode, and the
 * policies of plans. *inout_bytes is the room and then the length with the terminating 0; text may be NULL to ask.
 * Context-exclusive. Errors: INVALID_ARGUMENT (too little room), BUSY. */
SLUICE_API sluice_status_t sluice_context_write_decisions(sluice_context_t* context, char* text, uint64_t* inout_bytes);
/* Takes decisions of the same JSON: they stand (SLUICE_WHY_IMPORTED) and are not questioned, so that a file also pins a
 * choice. Layers of other kinds than those at hand are kept for layers made later. Alike on all ranks and at the same
 * call, which the next header checks. Context-exclusive. Errors: INVALID_ARGUMENT naming line or field, what was found
 * and the remedy: nothing is taken then; NO_MEMORY. */
SLUICE_API sluice_status_t sluice_context_read_decisions(sluice_context_t* context, const char* text, uint64_t length);

/* The tuner's machine as the steps that ran have corrected it (provenance "refined"): its GEMMs, exchanges and
 * pass_seconds by what the newest 48 passes without a budget took, its error by every third of them, which the fit did
 * not see. JSON as sluice_planner_create reads it; *inout_bytes is the room and then the length with the terminating 0;
 * text may be NULL to ask. The same on all ranks; no communication. Context-exclusive. Errors: INVALID_ARGUMENT, BUSY,
 * STATE: the tuner has no machine, or too few passes have run. */
SLUICE_API sluice_status_t sluice_context_write_machine(sluice_context_t* context, char* text, uint64_t* inout_bytes);

/* Immutable words for SLUICE_WHY_*. */
SLUICE_EXPORT const char* sluice_tuner_why_name(int32_t why);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_TUNER_H_ */
