// SPDX-License-Identifier: Apache-2.0
/* The tuner of a context chooses n (and when weight gradients are computed) while training. Every context has a tuner
 * (on CUDA two events on the host's stream time a pass: docs/cuda.md). The calls in this header are for hosts that want
 * another mode, want to give the tuner a machine for its predictions, or want to read, store and restore decisions.
 * docs/tuning.md describes how it decides.
 *
 * Under a memory budget the tuner predicts the time of plans (n, restore policy, weight gradients), with its machine if
 * it has one, and times the best few that fit in alternating steps. Without a budget and with several ranks it searches
 * for n.
 *
 * Candidates run as ordinary training steps, and results do not depend on them. All ranks decide the same from the same
 * numbers, which are sent in headers. Ranks with different configurations get MISMATCH in their first forward.
 *
 * SLUICE_LOG=decision in the environment prints one line per decision on rank 0 to stderr; each decision is also passed
 * to the log callback at SLUICE_LOG_INFO. */
#ifndef SLUICE_TUNER_H_
#define SLUICE_TUNER_H_

#include "sluice/context.h"
#include "sluice/planner.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  SLUICE_TUNER_ADAPTIVE = 0, /* the default: predictions select a few candidates, and timed steps decide among these and
                                correct the model. Without a machine the tuner derives one from the lane times of the
                                first steps */
  SLUICE_TUNER_PROFILE = 1,  /* timed steps alone decide. Under a budget they decide among at most four plans, the
                                fastest by the machine or, without one, by observed rates */
  SLUICE_TUNER_MODEL = 2     /* predictions alone decide; needs a machine */
};

typedef struct sluice_tuner_config_s {
  size_t struct_size;              /* set by sluice_tuner_config_init */
  const sluice_ext_header_t* next; /* NULL */
  int32_t mode;                    /* SLUICE_TUNER_* */
  int32_t reserved;                /* 0 */
  const sluice_planner_t* machine; /* copied; NULL: none */
} sluice_tuner_config_t;

SLUICE_EXPORT void sluice_tuner_config_init(sluice_tuner_config_t* out_config, size_t struct_size);

/* Configures the tuner, with an equal config on all ranks, before layers with an open choice are created. No
 * communication. Context-exclusive. Errors: INVALID_ARGUMENT (mode MODEL without a machine), ABI, STATE (layers have
 * begun to choose), BUSY. On a context without a tuner the call checks the config and does nothing. */
SLUICE_API sluice_status_t sluice_context_tune(sluice_context_t* context, const sluice_tuner_config_t* config);

/* The reason for a choice. */
enum {
  SLUICE_WHY_NOTHING_YET = 0,  /* no pass has been timed yet */
  SLUICE_WHY_ON_TRIAL = 1,     /* a candidate of a race */
  SLUICE_WHY_INSIDE_RANGE = 2, /* slightly smaller and slightly larger batches both use it */
  SLUICE_WHY_ONE_LEFT = 3,     /* no other candidate was open */
  SLUICE_WHY_RACED = 4,        /* fastest of the candidates that ran */
  SLUICE_WHY_PREDICTED = 5,    /* fastest by the model */
  SLUICE_WHY_QUESTIONED = 6,   /* timed again later, against its neighbours */
  SLUICE_WHY_IMPORTED = 7      /* from sluice_context_read_decisions */
};

typedef struct sluice_tuner_decision_s {
  int64_t model_width, hidden_width; /* widths of the layers that the decision is for */
  int32_t num_experts, top_k, dtype, gated;
  int64_t rows;             /* rows that the rank with the most rows receives: the size of the batch that the decision
                               is for */
  int32_t num_chunks;       /* the chosen n */
  int32_t wgrad_mode;       /* SLUICE_WGRAD_* */
  int32_t why;              /* SLUICE_WHY_* */
  int32_t num_raced;        /* candidates that ran */
  int64_t race_passes;      /* passes that these candidates ran */
  double seconds;           /* measured time of forward and backward on the slowest rank; 0: not measured */
  double predicted_seconds; /* 0: no model */
  double runner_up_seconds; /* 0: none */
  int32_t runner_up_chunks; /* 0: none */
  int32_t runner_up_wgrad_mode;
} sluice_tuner_decision_t;

/* Returns the newest decisions, oldest first. *out_count is how many there are (the last 64 are stored); at most
 * `capacity` are written. Context-exclusive. Errors: INVALID_ARGUMENT, BUSY. */
SLUICE_API sluice_status_t sluice_context_decisions(sluice_context_t* context, sluice_tuner_decision_t* out_decisions,
                                                    int32_t capacity, int32_t* out_count);

/* The parts of a decision under a memory budget that sluice_tuner_decision_t lacks: the choice is then a plan (n,
 * restore policies, weight gradients). */
typedef struct sluice_tuner_policy_s {
  int32_t restore_input, restore_pre_activation; /* SLUICE_RESTORE_*; ADAPTIVE: there is no plan, and the config of the
                                                    layer applies */
  int32_t runner_up_restore_input, runner_up_restore_pre_activation;
  uint64_t memory_budget; /* budget that the plan is for; 0: there is no plan, or it reuses buffers or only limits
                             offloaded rows */
  uint64_t total_bytes;   /* maximum bytes of the plan, or of one that it was timed against; 0: no plan */
} sluice_tuner_policy_t;

/* Returns these parts for the decisions of sluice_context_decisions, in the same order and number. Context-exclusive.
 * Errors: as there. */
SLUICE_API sluice_status_t sluice_context_decided_policies(sluice_context_t* context,
                                                           sluice_tuner_policy_t* out_policies, int32_t capacity,
                                                           int32_t* out_count);

/* Returns for each of these plans the number of chunks, from the first on, to which its policies apply; the others are
 * sent and computed again (kept_chunks of sluice_plan_info_t, sluice/plan.h). All n if the budget has room; 0: no plan.
 * Context-exclusive. Errors: as there. */
SLUICE_API sluice_status_t sluice_context_decided_parts(sluice_context_t* context, int32_t* out_kept_chunks,
                                                        int32_t capacity, int32_t* out_count);

/* The deduplication of a decision, and whether its exchanges are grouped. */
typedef struct sluice_tuner_form_s {
  int32_t chose_deduplication;        /* 1: the layer leaves its deduplication open, and the decision chose it */
  int32_t deduplicate, grouped;       /* chosen: SLUICE_DEDUPLICATE_NONE, _RANKS or _NODES; 0 or 1 */
  int32_t runner_up_deduplicate;      /* deduplication of the runner-up; 0 if there is none */
  int32_t runner_up_grouped;          /* grouping of the runner-up; 0 if there is none */
  int32_t reserved;                   /* 0 */
  double runner_up_predicted_seconds; /* 0: no model */
} sluice_tuner_form_t;

/* Returns these parts for the decisions of sluice_context_decisions, in the same order and number. Context-exclusive.
 * Errors: as there. */
SLUICE_API sluice_status_t sluice_context_decided_forms(sluice_context_t* context, sluice_tuner_form_t* out_forms,
                                                        int32_t capacity, int32_t* out_count);

typedef struct sluice_tuner_stats_s {
  size_t struct_size;   /* set by the caller: sizeof */
  int64_t timed_passes; /* passes that all ranks ran in the same way and reported */
  int64_t race_passes;  /* part of timed_passes: those with a candidate on trial */
  int64_t num_decisions;
  int64_t num_switches;   /* changes of n or of the mode from one pass of a layer to its next */
  int64_t num_questioned; /* choices that were timed again */
  int64_t num_changed;    /* choices that changed as a result */
  int64_t monotonic;      /* timed choices that agree with the papers' "the best n grows with the batch" */
  int64_t not_monotonic;  /* timed choices that do not agree with it */
  double total_seconds;   /* time of timed passes */
  double excess_seconds;  /* time of passes on trial minus that of the best known candidate: the cost of tuning */
  double switch_seconds;  /* time of first passes after a switch minus the usual time of the same choice (that of trials
                             is also in excess_seconds) */
  int64_t one_valley;     /* trials of three n or more that agree with the papers' "time over n has one valley" */
  int64_t not_one_valley; /* trials that do not agree with it */
} sluice_tuner_stats_t;

/* Returns the statistics of the tuner over all kinds of layers of the context. Context-exclusive. Errors:
 * INVALID_ARGUMENT, ABI, BUSY. */
SLUICE_API sluice_status_t sluice_context_tuner_stats(sluice_context_t* context, sluice_tuner_stats_t* out_stats);

/* Writes decisions as JSON, for a file or the next run: for each kind of layer, size of the batch, n and mode, the
 * policies of plans, and the deduplication if the layer leaves that open. On entry *inout_bytes is the room in `text`;
 * on return it is the length with the terminating 0; text may be NULL to ask for it. Context-exclusive. Errors:
 * INVALID_ARGUMENT (too little room), BUSY. */
SLUICE_API sluice_status_t sluice_context_write_decisions(sluice_context_t* context, char* text, uint64_t* inout_bytes);
/* Reads decisions from the same JSON. They are final (SLUICE_WHY_IMPORTED) and are not timed again, so a file can also
 * fix a choice. Decisions for kinds of layers that do not exist yet are stored for layers that are created later. Equal
 * on all ranks and at the same call, which the next header checks. Context-exclusive. Errors: INVALID_ARGUMENT (names
 * the line or field, what was found and the remedy; then no decision is used); NO_MEMORY. */
SLUICE_API sluice_status_t sluice_context_read_decisions(sluice_context_t* context, const char* text, uint64_t length);

/* Writes the tuner's machine with the corrections from steps that ran (provenance "refined"). Its GEMMs, exchanges and
 * pass_seconds are fitted to the newest 48 passes without a budget; its error is measured on every third of them, which
 * the fit does not use. JSON as sluice_planner_create reads it. On entry *inout_bytes is the room in `text`; on return
 * it is the length with the terminating 0; text may be NULL to ask for it. The same on all ranks; no communication.
 * Context-exclusive. Errors: INVALID_ARGUMENT, BUSY, STATE: the tuner has no machine, or too few passes have run. */
SLUICE_API sluice_status_t sluice_context_write_machine(sluice_context_t* context, char* text, uint64_t* inout_bytes);

/* Returns the name of a SLUICE_WHY_* value; immutable. */
SLUICE_EXPORT const char* sluice_tuner_why_name(int32_t why);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_TUNER_H_ */
