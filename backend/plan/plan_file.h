// SPDX-License-Identifier: Apache-2.0
/* A plan as bytes, for files and for other processes with the same layer. */
#pragma once

#include "backend/plan/plan.h"

/* The size of every plan. */
#define SLUICE_PLAN_FILE_BYTES (sizeof(sluice_plan_data_t) + 24)

/* Writes a plan. fingerprint: of its layer. data: SLUICE_PLAN_FILE_BYTES. */
void sluice_plan_file_write(const sluice_plan_data_t* plan, uint64_t fingerprint, void* data);

/* Reads bytes of _write; the result must be checked by sluice_plan_reread. layer_id: for messages. Errors:
 * INVALID_ARGUMENT naming what is wrong with the bytes. */
sluice_status_t sluice_plan_file_read(const void* data, uint64_t bytes, uint64_t fingerprint, int32_t layer_id,
                                      sluice_plan_data_t* out_plan);
