// SPDX-License-Identifier: Apache-2.0
/* Predicts a plan: the formulas of sluice/stages.h, computed from the choices only. */
#pragma once

#include "backend/planner/stages/problem/tables.h"

/* Computes from stage and option of plan->choices: all of plan->stages except the reasons, slowest_seconds,
 * slowest_stage and step_seconds. stage_of: [num_layers], the same stages. */
void sluice_stages_predict(const sluice_stages_tables_t* tables, const int32_t* stage_of, sluice_stages_plan_t* plan);
