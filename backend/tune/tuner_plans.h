// SPDX-License-Identifier: Apache-2.0
/* Plans of a tuner under a budget: their prices, the choice from a layer's set, and their race. Implements entries of
 * sluice_policy_hook_vtable_t. Private to backend/tune. */
#pragma once

#include "backend/tune/tuner_state.h"

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
