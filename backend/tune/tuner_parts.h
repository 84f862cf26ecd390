/* What the files of the tuner share. Private to backend/tune.
 *
 * tuner.c is the context's chooser: n and mode by searches; tuner_plans.c what it does under a budget, where there are
 * plans.
 */
#ifndef SLUICE_BACKEND_TUNE_TUNER_PARTS_H_
#define SLUICE_BACKEND_TUNE_TUNER_PARTS_H_

#include "backend/plan/plan.h"
#include "backend/tune/tuner.h"

static inline sluice_tuner_t* sluice_tuner_of_chooser(sluice_chooser_t* chooser) { return (sluice_tuner_t*)chooser; }

/* ---- tuner.c ---- */

/* A layer's work, without tokens; skew 1. */
sluice_workload_t sluice_tuner_work_of(const sluice_moe_t* moe);
/* Whether a machine is known that has what such a layer needs. */
int sluice_tuner_may_predict(const sluice_tuner_t* tuner, const sluice_moe_t* moe);
/* Keeps a decision, and tells it where that is asked for. */
void sluice_tuner_record(sluice_tuner_t* tuner, const sluice_decision_t* decision);
void sluice_tuner_note_switch(sluice_tuner_table_t* table, sluice_seat_t* seat);
/* Whether the report that has come is of a first pass after a switch; true once. */
int sluice_tuner_is_first(sluice_seat_t* seat, int32_t direction);
/* The pass that all ranks ran alike, if they did: ns of the slowest and rows of the fullest. Lanes: a rank that waits
 * for another counts the wait as communication, so the rank that communicates least shows what exchanges take. */
uint64_t sluice_tuner_slowest(const sluice_step_report_t* const* reports, int32_t world_size, int32_t direction,
                              int64_t* out_rows, sluice_lanes_t* out_lanes);
/* Whether any rank ran a training pass since the last forward. */
int sluice_tuner_has_trained(const sluice_step_report_t* const* reports, int32_t world_size);

/* ---- tuner_plans.c: as sluice_chooser_vtable_t has them ---- */

int32_t sluice_tuner_num_rivals(sluice_chooser_t* chooser, const sluice_moe_t* moe);
int32_t sluice_tuner_is_pinned(sluice_chooser_t* chooser, const sluice_moe_t* moe, const sluice_plan_data_t* plan);
int32_t sluice_tuner_choose_plan(sluice_chooser_t* chooser, const sluice_moe_t* moe, sluice_seat_t* seat);
double sluice_tuner_price(sluice_chooser_t* chooser, const sluice_moe_t* moe, const sluice_plan_data_t* plan);
int32_t sluice_tuner_rates(sluice_chooser_t* chooser, const sluice_moe_t* moe, int64_t max_tokens,
                           sluice_plan_rates_t* out_rates);
/* The part of `agree` that races plans. */
void sluice_tuner_agree_on_plan(const sluice_moe_t* moe, sluice_seat_t* seat,
                                const sluice_step_report_t* const* reports, int32_t world_size);

#endif /* SLUICE_BACKEND_TUNE_TUNER_PARTS_H_ */
