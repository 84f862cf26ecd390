/* What other public calls need of a planner. */
#ifndef SLUICE_CAPI_SRC_PLANNER_H_
#define SLUICE_CAPI_SRC_PLANNER_H_

#include "backend/cost/machine.h"
#include "sluice/planner.h"

const sluice_machine_t* sluice_planner_machine(const sluice_planner_t* planner);
/* out_planner: new, of a checked machine. Errors: NO_MEMORY. */
sluice_status_t sluice_planner_of_machine(const sluice_machine_t* machine, sluice_planner_t** out_planner);

#endif /* SLUICE_CAPI_SRC_PLANNER_H_ */
