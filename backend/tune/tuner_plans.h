/* A tuner's plans under a budget: what they are priced by, which of a layer's set runs, and their race. As
 * sluice_chooser_vtable_t has them. Private to backend/tune. */
#ifndef SLUICE_BACKEND_TUNE_TUNER_PLANS_H_
#define SLUICE_BACKEND_TUNE_TUNER_PLANS_H_

#include "backend/tune/tuner_state.h"

int32_t sluice_tuner_num_candidates(sluice_chooser_t* chooser, const sluice_moe_t* moe);
int32_t sluice_tuner_is_pinned(sluice_chooser_t* chooser, const sluice_moe_t* moe, const sluice_plan_data_t* plan);
int32_t sluice_tuner_choose_plan(sluice_chooser_t* chooser, const sluice_moe_t* moe, sluice_seat_t* seat);
double sluice_tuner_price(sluice_chooser_t* chooser, const sluice_moe_t* moe, const sluice_plan_data_t* plan);
int32_t sluice_tuner_rates(sluice_chooser_t* chooser, const sluice_moe_t* moe, int64_t max_tokens,
                           sluice_plan_rates_t* out_rates);
/* The part of `agree` that races plans. */
void sluice_tuner_agree_on_plan(const sluice_moe_t* moe, sluice_seat_t* seat,
                                const sluice_step_report_t* const* reports, int32_t world_size);

#endif /* SLUICE_BACKEND_TUNE_TUNER_PLANS_H_ */
