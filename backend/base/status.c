// SPDX-License-Identifier: Apache-2.0
#include "backend/base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/log.h"

static _Thread_local sluice_error_info_t last_error;

static void copy_out(sluice_error_info_t* out_info) {
  if (out_info == NULL) return;
  size_t size = out_info->struct_size;
  if (size < sizeof(size_t)) return;
  if (size > sizeof last_error) size = sizeof last_error;
  size_t caller_size = out_info->struct_size;
  memcpy(out_info, &last_error, size);
  out_info->struct_size = caller_size;
  /* A caller with a shorter struct still gets a terminated text. */
  if (size < sizeof last_error && size > offsetof(sluice_error_info_t, message)) ((char*)out_info)[size - 1] = '\0';
}

sluice_status_t sluice_error_record(sluice_status_t status, int32_t rank, int32_t peer, int32_t native_code,
                                    const char* format, ...) {
  last_error.struct_size = sizeof last_error;
  last_error.status = status;
  last_error.rank = rank;
  last_error.peer = peer;
  last_error.native_code = native_code;
  va_list args;
  va_start(args, format);
  vsnprintf(last_error.message, sizeof last_error.message, format, args);
  va_end(args);
  sluice_log(SLUICE_LOG_ERROR, "%s: %s", sluice_status_name(status), last_error.message);
  return status;
}

void sluice_error_capture(sluice_error_info_t* out_info) { *out_info = last_error; }

sluice_status_t sluice_error_adopt(const sluice_error_info_t* info) {
  last_error = *info;
  return info->status;
}

void sluice_error_last(sluice_error_info_t* out_info) { copy_out(out_info); }

const char* sluice_status_name(sluice_status_t status) {
  static const char* const names[] = {"OK",          "INVALID_ARGUMENT", "ABI",     "NO_MEMORY", "BUSY",
                                      "UNSUPPORTED", "NOT_FOUND",        "STATE",   "MISMATCH",  "PEER_REFUSED",
                                      "PEER_LOST",   "TIMED_OUT",        "ABORTED", "EXTERNAL",  "OVER_BUDGET",
                                      "INTERNAL",    "CAPACITY"};
  int64_t index = -(int64_t)status; /* any value may be passed, including INT32_MIN */
  if (index < 0 || index >= (int64_t)(sizeof names / sizeof names[0])) return "UNKNOWN";
  return names[index];
}
