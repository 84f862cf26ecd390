// SPDX-License-Identifier: Apache-2.0
/* Outstanding micro-batches: those whose forward a stage has run and whose backward it has not. */
#pragma once

#include "backend/planner/stages/problem/model.h"

/* Returns the maximum on a stage, by the problem's own numbers or by its schedule. >= 1. */
int32_t sluice_stages_in_flight(const sluice_stages_problem_t* problem, int32_t stage);
