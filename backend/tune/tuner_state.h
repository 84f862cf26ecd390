// SPDX-License-Identifier: Apache-2.0
/* The state of a tuner: tables of layers of the same kind, races of plans, decisions, imported answers, and their
 * digest, which headers compare. */
#pragma once

#include "backend/cost/cost.h"
#include "backend/cost/refined_machine.h"
#include "backend/moe/context/policy_hook.h"
#include "backend/moe/context/context.h"
#include "backend/plan/plan.h"
#include "backend/tune/search/grouping.h"
#include "backend/tune/race/plan_race.h"
#include "backend/tune/search/search_state.h"
#include "backend/tune/observed_rates.h"

#define SLUICE_TUNER_DECISIONS 64 /* the newest ones are kept */
#define SLUICE_TUNER_RACES     12 /* sets of plans kept per kind of layer: those of all sizes, and a few more */

/* Forms of exchanges that a layer may leave open in addition to the plain one. */
enum { SLUICE_FORM_PLAIN = 0, SLUICE_FORM_GROUPED = 1, SLUICE_FORM_TWO_LEVELS = 2, SLUICE_FORM_COPIES = 3 };

/* A decision with its input. */
typedef struct sluice_decision_s {
  uint64_t layer;                /* layers of this kind */
  sluice_workload_t work;        /* num_tokens and skew at that time */
  sluice_search_decision_t what; /* its picks are valid only without a plan */
  sluice_racing_plan_t chosen;   /* policies -1: without a plan, as the layer's config says */
  sluice_racing_plan_t second;   /* num_chunks 0: none */
  uint64_t budget, total_bytes;  /* of the plan, and of the largest plan in the race; 0: without a plan */
  int32_t kept_chunks;           /* of the plan (backend/plan/plan.h); 0: without a plan */
  uint8_t chose_deduplication;   /* the layer leaves it open, and it was chosen */
  uint8_t form, second_form;     /* SLUICE_FORM_*: of exchanges, if the layer leaves it open */
  float second_predicted;        /* seconds of `second`; 0: no model */
} sluice_decision_t;

/* The race of one set of plans, for all layers with the same set. Part of the struct, not allocated on demand, since a
 * budget counts it. */
typedef struct sluice_tuner_race_s {
  uint64_t key;      /* of the set; 0: free */
  int64_t size_rows; /* balanced, of the largest batches of the set */
  sluice_plan_race_t race;
} sluice_tuner_race_t;

/* Rows of the fullest rank over those of balanced routing, for batches of one size. */
typedef struct sluice_tuner_skew_s {
  float held; /* used to look up answers; 0: no such batch was seen */
  float mean; /* of the last batches */
} sluice_tuner_skew_t;

typedef struct sluice_tuner_table_s {
  uint64_t layer; /* kind of layer */
  struct sluice_tuner_s* tuner;
  sluice_workload_t work;
  int64_t num_switches; /* of n or the mode, between consecutive passes of a layer */
  int64_t num_plan_decisions;
  int32_t next_race;    /* slot of the next set */
  int64_t rated_tokens; /* tokens of the last rates that layers of the kind received: */
  int32_t is_rated;     /* later layers get the same, so that their sets and races agree; 0: too little was known */
  sluice_plan_rates_t rates;
  sluice_tuner_race_t races[SLUICE_TUNER_RACES];
  int32_t
      restore_set; /* index into sluice_restore_sets of a set that reuses buffers without a budget; 0: as configured */
  struct sluice_tuner_strategy_s*
      joint; /* in the first table of a layer that reuses buffers: its strategies; NULL: only n is open */
  sluice_tuner_skew_t skews[SLUICE_SEARCH_BUCKETS]; /* by routes of the fullest rank; in the first table */
  int32_t groups_always;                            /* configured: all passes with enough chunks are grouped */
  sluice_grouping_t grouping;
  sluice_search_t search;
  struct sluice_tuner_table_s* next;
} sluice_tuner_table_t;
typedef struct sluice_tuner_strategy_s sluice_tuner_strategy_t;

/* An answer from a file, for a table that may be created later. */
typedef struct sluice_import_s {
  uint64_t layer;
  int64_t rows;
  int32_t pick, num_chunks;  /* without a plan */
  sluice_racing_plan_t plan; /* num_chunks 0: without one */
  int32_t deduplicate;       /* SLUICE_DEDUPLICATE_*; -1: not given, so that the form of exchanges stays open */
  int32_t is_grouped;
} sluice_import_t;

typedef struct sluice_tuner_s {
  sluice_policy_hook_t base;
  sluice_allocator_t* allocator;
  int32_t mode; /* SLUICE_TUNER_* */
  int32_t rank;
  int32_t has_machine;
  int32_t is_loud; /* SLUICE_LOG=decision */
  sluice_machine_t machine;
  sluice_observed_rates_t observed;
  /* passes that refine the machine; NULL: none yet. Not counted in a budget */
  sluice_timed_passes_t* timed_passes;
  sluice_tuner_table_t* tables;
  sluice_import_t* imports;
  int32_t num_imports, max_imports;
  int64_t num_decisions;                               /* since the start */
  sluice_decision_t decisions[SLUICE_TUNER_DECISIONS]; /* a ring, by number */
} sluice_tuner_t;

static inline sluice_tuner_t* sluice_tuner_of_hook(sluice_policy_hook_t* policy_hook) {
  return (sluice_tuner_t*)policy_hook;
}

/* Call after a change of imports, mode or machine: updates the digest that headers compare. */
void sluice_tuner_update_state(sluice_tuner_t* tuner);

/* ---- a layer as the work that a machine prices ---- */

/* The work of a layer, without tokens; skew 1. */
sluice_workload_t sluice_tuner_work_of(const sluice_moe_t* moe);
/* Whether a machine is known that has the rates that this layer needs. */
int sluice_tuner_may_predict(const sluice_tuner_t* tuner, const sluice_moe_t* moe);

/* The SLUICE_DEDUPLICATE_* of passes in a form, and the form of passes with this deduplication. The plain form has that
 * of `work`. */
int32_t sluice_tuner_deduplication_of(const sluice_workload_t* work, int32_t form);
int32_t sluice_tuner_form_of(const sluice_workload_t* work, int32_t deduplicate, int32_t is_grouped);

/* ---- tuner_decisions.c: the record of decisions ---- */

/* Keeps a decision, and logs it if requested. */
void sluice_tuner_record(sluice_tuner_t* tuner, const sluice_decision_t* decision);

/* ---- the reports in a header about passes that all ranks ran with the same choice ---- */

void sluice_tuner_note_switch(sluice_tuner_table_t* table, sluice_decision_state_t* decision);
/* Whether the received report is of a first pass after a switch; true once. */
int sluice_tuner_is_first(sluice_decision_state_t* decision, int32_t direction);
/* The time in ns, on the slowest rank, of the pass that all ranks ran with the same choice; 0: none. out_rows: of the
 * fullest rank. out_lanes: a rank that waits for another counts the wait as communication, so the rank with the least
 * communication shows the cost of exchanges. */
uint64_t sluice_tuner_slowest(const sluice_step_report_t* const* reports, int32_t world_size, int32_t direction,
                              int64_t* out_rows, sluice_lanes_t* out_lanes);
/* Bytes per second on the slowest rank that measured them; 0: no rank did. */
void sluice_tuner_slowest_bytes(const sluice_step_report_t* const* reports, int32_t world_size, double* out_memory,
                                double* out_copies);
/* Whether any rank ran a training pass since the last forward. */
int sluice_tuner_has_trained(const sluice_step_report_t* const* reports, int32_t world_size);

/* ---- tuner_plans.c: plans under a budget: their prices, the choice from a layer's set, and their race ---- */

int32_t sluice_tuner_num_candidates(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe);
int32_t sluice_tuner_is_pinned(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe,
                               const sluice_plan_data_t* plan);
int32_t sluice_tuner_choose_plan(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, int32_t size,
                                 sluice_decision_state_t* decision);
double sluice_tuner_price(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, const sluice_plan_data_t* plan);
int32_t sluice_tuner_rates(sluice_policy_hook_t* policy_hook, const sluice_moe_t* moe, int64_t max_tokens,
                           sluice_plan_rates_t* out_rates);
/* The part of `agree` that races plans. */
void sluice_tuner_agree_on_plan(const sluice_moe_t* moe, sluice_decision_state_t* decision,
                                const sluice_step_report_t* const* reports, int32_t world_size);
