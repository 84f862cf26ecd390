// SPDX-License-Identifier: Apache-2.0
/* Stores machines on disk, so that a calibration runs once.
 *
 * One small file per key (backend/base/machine_cache.h). A file that cannot be used is measured again, with a log line.
 */
#pragma once

#include "backend/base/machine_cache.h"
#include "backend/calibrate/calibrate.h"
#include "backend/moe/context/context.h"

#define SLUICE_CACHE_KEY_BYTES 768

/* The inputs of a machine's costs: processor, usable cores, communicator, ranks and their layout, GEMMs, dtype, sizes,
 * library version. layout: of sluice_layout_describe. */
void sluice_cache_key(const sluice_context_t* context, const sluice_calibration_t* wanted, const char* layout,
                      char out_key[SLUICE_CACHE_KEY_BYTES]);
/* See sluice_machine_cache_path. */
int sluice_cache_path(const char* folder, const char* key, char out_path[SLUICE_FINDING_PATH_BYTES]);
/* 1: read. 0: there is no file, or it cannot be used, which is logged (WARN) with the reason. must_be_ours: only this
 * user and root may be able to change it. */
int sluice_cache_read(const char* path, const char* key, int must_be_ours, sluice_machine_t* out_machine);
/* Creates the folder with access for this user only. A failure is logged (WARN) and otherwise ignored. 1: written. */
int sluice_cache_write(const char* path, const char* key, const sluice_machine_t* machine);
