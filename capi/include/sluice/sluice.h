/* Sluice: the expert-parallel engine that a training framework swaps in. Includes the whole C ABI. */
#ifndef SLUICE_SLUICE_H_
#define SLUICE_SLUICE_H_

#include "sluice/base.h"
#include "sluice/comm.h"
#include "sluice/context.h"
#include "sluice/gate.h"
#include "sluice/migration.h"
#include "sluice/moe.h"
#include "sluice/optimizer.h"
#include "sluice/pipeline.h"
#include "sluice/split.h"
#include "sluice/placement.h"
#include "sluice/plan.h"
#include "sluice/planner.h"
#include "sluice/schedule.h"
#include "sluice/stages.h"
#include "sluice/tuner.h"

#endif /* SLUICE_SLUICE_H_ */
