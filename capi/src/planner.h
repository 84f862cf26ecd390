// SPDX-License-Identifier: Apache-2.0
/* Functions of the planner for other public calls. */
#pragma once

#include "backend/cost/machine.h"
#include "backend/planner/layer_planner.h"
#include "sluice/planner.h"

const sluice_machine_t* sluice_planner_machine(const sluice_planner_t* planner);
/* out_planner: new, with a checked machine. Errors: NO_MEMORY. */
sluice_status_t sluice_planner_of_machine(const sluice_machine_t* machine, sluice_planner_t** out_planner);

/* Reads and checks a caller's workload. Errors: INVALID_ARGUMENT naming the field, ABI. */
sluice_status_t sluice_planner_read_workload(const sluice_planner_workload_t* given, sluice_planner_workload_t* out);
/* Reads a caller's choice for a checked workload. open: fields may be open, and NULL leaves all of them open. Errors:
 * INVALID_ARGUMENT naming the field; UNSUPPORTED. */
sluice_status_t sluice_planner_read_choice(const sluice_planner_workload_t* workload,
                                           const sluice_planner_choice_t* given, int open, sluice_planner_asked_t* out);
