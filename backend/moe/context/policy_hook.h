// SPDX-License-Identifier: Apache-2.0
/* Who decides how many chunks a layer's next pass has: injected into the context, since what decides (backend/tune)
 * stands above moe.
 *
 * Candidates run as ordinary training steps (results do not depend on n). Pass times travel in later headers, so that
 * every rank sees the same numbers of all ranks and decides the same, without an exchange of its own.
 */
#ifndef SLUICE_BACKEND_MOE_CONTEXT_POLICY_HOOK_H_
#define SLUICE_BACKEND_MOE_CONTEXT_POLICY_HOOK_H_

#include "backend/base/status.h"
#include "sluice/moe.h"

/* What a pass runs, as far as the layer's config leaves it open: chosen before it, kept for a repetition of it, and
 * reported of it. Copied and compared as a whole, and small: reports of it travel in every header. */
typedef struct sluice_pass_choice_s {
  int16_t num_chunks;
  uint8_t wgrad_mode;  /* SLUICE_WGRAD_DEFERRED or _PER_CHUNK: of a forward, that of its backward */
  uint8_t restore_set; /* index into sluice_restore_sets: of a layer that reuses buffers without a plan; else 0 */
  uint8_t grouped;     /* exchanges of several chunks are grouped */
  uint8_t deduplicate; /* SLUICE_DEDUPLICATE_*, where the layer leaves that open */
} sluice_pass_choice_t;

static inline int sluice_pass_choice_is(const sluice_pass_choice_t* a, const sluice_pass_choice_t* b) {
  return a->num_chunks == b->num_chunks && a->wgrad_mode == b->wgrad_mode && a->restore_set == b->restore_set &&
         a->grouped == b->grouped && a->deduplicate == b->deduplicate;
}

/* One rank's last training pass of a direction since its last report. */
typedef struct sluice_pass_report_s {
  uint64_t pass_ns;            /* from the handshake to the end; 0: there was none */
  int64_t rows;                /* that it received */
  sluice_pass_choice_t choice; /* that it ran with */
  int16_t plan;                /* its number among the layer's, from 1; 0: it ran without */
  /* Nanoseconds; in four bytes each, since they travel in every header. */
  float compute_ns, comm_ns; /* of its ops by lane; exchanges include waiting for other ranks */
  float comm_cpu_ns;         /* processor time of the communication lane */
  float header_ns;           /* of an exchange of next to no bytes, that of headers; 0: not known */
} sluice_pass_report_t;

/* What one rank reports in the header of a forward. */
typedef struct sluice_step_report_s {
  sluice_pass_report_t pass[2]; /* by direction */
  int64_t rows;                 /* of its last training forward, however long ago */
  int32_t num_tokens;           /* of the same */
  /* Bytes per nanosecond as bf16, since headers are full: the slowest since the last report; 0: no pass showed it. */
  uint16_t memory_rate; /* that the sums of returned rows read and write */
  uint16_t copy_rate;   /* of offloaded rows */
} sluice_step_report_t;

/* What a layer does next, written by the policy hook after each forward's header, and what this rank will report. */
typedef struct sluice_decision_state_s {
  sluice_pass_choice_t choice;
  uint8_t is_settled; /* 0: a candidate on trial */
  uint8_t bucket;     /* the policy hook's: of the size that this was decided for */
  int32_t plan;       /* under a budget: the number of the one that it took last */
  uint32_t switched;  /* the policy hook's: directions whose next report is of a first pass after a switch */
  uint8_t timed[2];   /* with device memory, by direction: passes so far whose lanes the device timed */
  void* table;        /* the policy hook's; NULL: nothing is open, nobody is asked */
  sluice_step_report_t own;
  /* With device memory, by direction: the pass that was enqueued last, and its time, which is known once it has run. */
  sluice_pass_report_t enqueued[2];
  struct sluice_timer_s* timers[2];
} sluice_decision_state_t;

struct sluice_plan_data_s; /* plan.h */
struct sluice_plan_rates_s;
typedef struct sluice_policy_hook_s sluice_policy_hook_t;
typedef struct sluice_policy_hook_vtable_s {
  void (*destroy)(sluice_policy_hook_t* policy_hook);
  /* A new layer with an open choice: sets decision state->table and what it does first. Failing leaves table NULL. */
  sluice_status_t (*attach)(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe,
                            sluice_decision_state_t* decision);
  /* Seconds of forward and backward under a plan, on all ranks alike; negative where no machine is known. */
  double (*price)(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, const struct sluice_plan_data_s* plan);
  /* For plans of max_tokens, where no machine is known: what passes have shown so far, alike on all ranks after `agree`
   * and for layers of one kind; 0: too little. */
  int32_t (*rates)(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, int64_t max_tokens,
                   struct sluice_plan_rates_s* out_rates);
  /* After a forward's header: the reports of all ranks, in rank order. */
  void (*agree)(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, sluice_decision_state_t* decision,
                const sluice_step_report_t* const* reports, int32_t world_size);
  /* Optional. Without a plan: what a forward does whose largest T of any rank is num_tokens. Of that and of what
   * `agree` has left alone, and nothing changes: so ranks that expect the same T choose the same before their header.
   */
  void (*of_size)(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, int64_t num_tokens,
                  sluice_pass_choice_t* out_choice);
  /* Optional. Called before `attach` for a layer with SLUICE_DEDUPLICATE_ANY: whether the hook can choose between rows
   * and token copies. Returns the same on all ranks. 0, or no function: the layer sends rows. */
  int32_t (*chooses_copies)(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe);
  /* Under a budget, on all ranks alike: how many plans may race; whether one is fixed already; then, after `agree`, the
   * one of moe->plans for batches of this size that this forward takes. */
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
  uint64_t state;                       /* of all that decides besides reports; ranks compare it in the header */
  char words[SLUICE_POLICY_HOOK_WORDS]; /* the same for a person, who is told where ranks differ */
};

#endif /* SLUICE_BACKEND_MOE_CONTEXT_POLICY_HOOK_H_ */
