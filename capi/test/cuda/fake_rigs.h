// SPDX-License-Identifier: Apache-2.0
/* A rig on a fake GPU. capi/test/ranks/play.h runs rigs on several. */
#pragma once

#include "capi/test/rig/rig.h"
#include "sluice/sluice.h"

sluice_moe_config_t config_under(int64_t capacity);

/* Both fail the test if the rig cannot be opened or leaks. close_all returns the number of hazards. */
void open_all(rig_t* rig, const sluice_moe_config_t* config);
int64_t close_all(rig_t* rig);

/* Makes the rig's layer use a plan of config under a budget of exactly the plan's bytes, which is stored in config. */
sluice_plan_t* use_plan_in_its_bytes(rig_t* rig, sluice_plan_config_t* config, sluice_plan_info_t* out_info);
/* Three rounds of this many outstanding forwards, whose steps are dropped, and of one training step. */
void run_planned(rig_t* rig, int32_t outstanding);
/* Closes the plan and the rig. The device's peak must equal the planned bytes. */
void close_planned(rig_t* rig, sluice_plan_t* plan, const sluice_plan_info_t* info);
