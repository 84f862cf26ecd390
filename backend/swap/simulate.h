// SPDX-License-Identifier: Apache-2.0
/* Simulates swapping in virtual time: the rules of order.h, the given seconds of layers, and one link. */
#pragma once

#include "backend/base/alloc.h"
#include "sluice/swap.h"

/* workload: checked here. Errors: INVALID_ARGUMENT naming the field, NO_MEMORY. */
sluice_status_t sluice_swap_simulate(const sluice_swap_workload_t* workload, sluice_allocator_t* allocator,
                                     sluice_swap_prediction_t* out_prediction);
