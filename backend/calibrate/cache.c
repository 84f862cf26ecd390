// SPDX-License-Identifier: Apache-2.0
#include "backend/calibrate/cache.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/hash.h"
#include "backend/base/log.h"
#include "backend/base/processors.h"
#include "backend/calibrate/layout.h"

/* Increment with every change of what is measured. */
#define FORM "sluice cache 6"

void sluice_cache_key(const sluice_context_t* context, const sluice_calibration_t* wanted, const char* layout,
                      char out_key[SLUICE_CACHE_KEY_BYTES]) {
  char processor[128], cores[64], device[192];
  const sluice_device_memory_t* memory = context->device->memory;
  sluice_machine_cache_processor(processor, sizeof processor);
  sluice_processors_describe(cores, sizeof cores);
  snprintf(device, sizeof device, "%s", context->device->name);
  if (memory != NULL) {
    int name = snprintf(device, sizeof device, "%s, ", context->device->name);
    memory->describe(context->device, device + name, (int32_t)sizeof device - name);
  }
  const char* threads = getenv("OMP_NUM_THREADS");
  snprintf(out_key, SLUICE_CACHE_KEY_BYTES,
           "version %d.%d.%d; device %s, %s, %s, %s threads; link %s, %d ranks on %s; GEMMs %s, %s, M %lld, H %lld",
           SLUICE_VERSION_MAJOR, SLUICE_VERSION_MINOR, SLUICE_VERSION_PATCH, device, processor, cores,
           threads != NULL ? threads : "all", context->comm != NULL ? context->comm->name : "none", context->world_size,
           layout, sluice_gemm_made_of(context->gemm), sluice_dtype_name(wanted->dtype), (long long)wanted->model_width,
           (long long)wanted->hidden_width);
}

int sluice_cache_path(const char* folder, const char* key, char out_path[SLUICE_FINDING_PATH_BYTES]) {
  return sluice_machine_cache_path(folder, "machine", key, out_path);
}

int sluice_cache_read(const char* path, const char* key, int must_be_ours, sluice_machine_t* out_machine) {
  size_t length = 0;
  char* memory = NULL;
  const char* reason = NULL;
  const char* body = sluice_machine_cache_read(path, FORM, key, must_be_ours, &memory, &length, &reason);
  if (body == NULL && reason == NULL) return 0;
  sluice_error_info_t why;
  if (body != NULL && sluice_machine_read(body, length, out_machine) != SLUICE_OK) {
    sluice_error_capture(&why);
    reason = why.message;
    body = NULL;
  }
  if (body == NULL) sluice_log(SLUICE_LOG_WARN, "%s cannot be used (%s): calibrating again", path, reason);
  free(memory);
  return body != NULL;
}

int sluice_cache_write(const char* path, const char* key, const sluice_machine_t* machine) {
  uint64_t length = sluice_machine_write(machine, NULL, 0);
  char* text = malloc(length + 1);
  if (text != NULL) sluice_machine_write(machine, text, length + 1);
  const int done = text != NULL && sluice_machine_cache_write(path, FORM, key, text);
  free(text);
  if (!done) {
    sluice_log(SLUICE_LOG_WARN, "%s cannot be written (%s): the next process calibrates again", path, strerror(errno));
  }
  return done;
}

/* ---- across all ranks ---- */

/* Whether every rank found the same machine. Logs it if only some ranks found one, or if they differ. */
static sluice_status_t all_have_it(sluice_context_t* context, const sluice_machine_t* machine, int found,
                                   int* out_all) {
  *out_all = found;
  if (context->comm == NULL) return SLUICE_OK;
  const uint64_t hash = found ? sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, machine, sizeof *machine) : 0;
  int64_t own = found ? (int64_t)(hash >> 2) : 0, range[] = {own, -own, found};
  SLUICE_TRY(sluice_comm_all_reduce_i64(context->comm, range, 3, SLUICE_REDUCE_MAX, "comparing calibrations"));
  *out_all = found && range[0] == -range[1];
  if (!*out_all && range[2] && context->rank == 0) {
    sluice_log(SLUICE_LOG_WARN,
               "ranks have different calibrations in their caches, or some have none: calibrating again");
  }
  return SLUICE_OK;
}

sluice_status_t sluice_calibrate_cached(sluice_context_t* context, const sluice_calibration_t* wanted,
                                        const char* folder, int32_t refresh, sluice_machine_t* out_machine) {
  char layout[SLUICE_LAYOUT_BYTES], key[SLUICE_CACHE_KEY_BYTES], path[SLUICE_FINDING_PATH_BYTES];
  sluice_machine_t machine;
  memset(&machine, 0, sizeof machine);
  SLUICE_TRY(sluice_layout_describe(context->comm, layout));
  sluice_cache_key(context, wanted, layout, key);
  int has_path = (folder == NULL || folder[0] != '\0') && sluice_cache_path(folder, key, path), all = 0;
  int found = has_path && !refresh && sluice_cache_read(path, key, sluice_machine_cache_is_default(folder), &machine);
  SLUICE_TRY(all_have_it(context, &machine, found, &all));
  if (!all) {
    SLUICE_TRY(sluice_calibrate(context, wanted, &machine));
    if (has_path) (void)sluice_cache_write(path, key, &machine);
  }
  *out_machine = machine;
  return SLUICE_OK;
}
