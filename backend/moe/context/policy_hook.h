// SPDX-License-Identifier: Apache-2.0
/* The interface of the policy that chooses n and other open options of a layer's next pass. The context holds the
 * implementation, because the tuner (backend/tune) is above moe in the layering.
 *
 * Candidates run as ordinary training steps (results do not depend on n). Later headers carry the pass times, so every
 * rank sees the same numbers of all ranks and decides the same, without an exchange of its own. */
#pragma once

#include "backend/base/status.h"
#include "sluice/moe.h"

/* The options of a pass that the layer's config leaves open: chosen before the pass, remembered for a repetition, and
 * reported after it. Copied and compared as a whole. It is small because every header carries reports of it. */
typedef struct sluice_pass_choice_s {
  int16_t num_chunks;
  uint8_t wgrad_mode;  /* SLUICE_WGRAD_DEFERRED or _PER_CHUNK; a forward has the mode of its backward */
  uint8_t restore_set; /* index into sluice_restore_sets if the layer reuses buffers without a plan; else 0 */
  uint8_t grouped;     /* exchanges of several chunks are grouped */
  uint8_t deduplicate; /* SLUICE_DEDUPLICATE_*, if the layer leaves that open */
} sluice_pass_choice_t;

static inline int sluice_pass_choice_is(const sluice_pass_choice_t* a, const sluice_pass_choice_t* b) {
  return a->num_chunks == b->num_chunks && a->wgrad_mode == b->wgrad_mode && a->restore_set == b->restore_set &&
         a->grouped == b->grouped && a->deduplicate == b->deduplicate;
}

/* The last training pass of one direction on one rank since its last report. */
typedef struct sluice_pass_report_s {
  uint64_t pass_ns;            /* from the handshake to the end; 0: there was no pass */
  int64_t rows;                /* rows that the rank received */
  sluice_pass_choice_t choice; /* options of the pass */
  int16_t plan;                /* number of its plan in the layer's set, from 1; 0: it had no plan */
  /* Nanoseconds, in four bytes each because every header carries them. */
  float compute_ns, comm_ns; /* of its ops, by lane; exchanges include waiting for other ranks */
  float comm_cpu_ns;         /* CPU time of the communication lane */
  float header_ns;           /* of the header exchange, which carries almost no bytes; 0: unknown */
} sluice_pass_report_t;

/* What one rank reports in the header of a forward. */
typedef struct sluice_step_report_s {
  sluice_pass_report_t pass[2]; /* by direction */
  int64_t rows;                 /* of the last training forward, even if an earlier header reported it */
  int32_t num_tokens;           /* of the same forward */
  /* Bytes per nanosecond as bf16, since headers are full: the slowest rate since the last report; 0: not measured. */
  uint16_t memory_rate; /* of reads and writes while returned rows are summed */
  uint16_t copy_rate;   /* of copies of offloaded rows */
} sluice_step_report_t;

/* The choice for a layer's next pass, written by the policy hook after each forward's header, and this rank's next
 * report. */
typedef struct sluice_decision_state_s {
  sluice_pass_choice_t choice;
  uint8_t is_settled; /* 0: the choice is a candidate on trial */
  uint8_t bucket;     /* of the policy hook: the size for which this was decided */
  int32_t plan;       /* under a budget: the number of the plan that the last forward took */
  uint32_t switched;  /* of the policy hook: directions whose next report is of a first pass after a switch */
  uint8_t timed[2];   /* with device memory, by direction: number of passes whose lanes the device timed */
  void* table;        /* of the policy hook; NULL: no option is open, and the hook is not called */
  sluice_step_report_t own;
  /* With device memory, by direction: the last enqueued pass, and its timer, which is read once the pass has run. */
  sluice_pass_report_t enqueued[2];
  struct sluice_timer_s* timers[2];
} sluice_decision_state_t;

struct sluice_plan_data_s; /* plan.h */
struct sluice_plan_rates_s;
typedef struct sluice_policy_hook_s sluice_policy_hook_t;
typedef struct sluice_policy_hook_vtable_s {
  void (*destroy)(sluice_policy_hook_t* policy_hook);
  /* For a new layer with an open choice: sets decision->table and the first choice. On failure table stays NULL. */
  sluice_status_t (*attach)(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe,
                            sluice_decision_state_t* decision);
  /* Predicted seconds of forward and backward under a plan, the same on all ranks; negative if no machine is known. */
  double (*price)(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, const struct sluice_plan_data_s* plan);
  /* For plans of max_tokens if no machine is known: rates measured in passes so far, after `agree` the same on all
   * ranks and for layers of one kind. Returns 0 if too little was measured. */
  int32_t (*rates)(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, int64_t max_tokens,
                   struct sluice_plan_rates_s* out_rates);
  /* After a forward's header: the reports of all ranks, in rank order. */
  void (*agree)(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, sluice_decision_state_t* decision,
                const sluice_step_report_t* const* reports, int32_t world_size);
  /* Optional. The choice for a forward without a plan whose largest T of any rank is num_tokens. Depends only on
   * num_tokens and on the state that `agree` left, and changes nothing: ranks that expect the same T choose the same
   * before headers. */
  void (*of_size)(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, int64_t num_tokens,
                  sluice_pass_choice_t* out_choice);
  /* Called before `attach` for a layer with SLUICE_DEDUPLICATE_ANY: whether the hook can choose between rows
   * and token copies; the same on all ranks. 0: the layer sends rows. */
  int32_t (*chooses_copies)(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe);
  /* Under a budget, with the same result on all ranks: the number of plans that may race; whether a plan is fixed
   * already; and, after `agree`, the plan in moe->plans for batches of this size that this forward takes. */
  int32_t (*num_candidates)(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe);
  int32_t (*is_pinned)(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe,
                       const struct sluice_plan_data_s* plan);
  int32_t (*choose_plan)(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, int32_t size,
                         sluice_decision_state_t* decision);
} sluice_policy_hook_vtable_t;

#define SLUICE_POLICY_HOOK_WORDS 136

/* Owned by its context. */
struct sluice_policy_hook_s {
  const sluice_policy_hook_vtable_t* vtable;
  uint64_t state;                       /* hash of all state that affects decisions, except reports; in each header */
  char words[SLUICE_POLICY_HOOK_WORDS]; /* the same as text, for the message if ranks differ */
};
