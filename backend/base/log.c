// SPDX-License-Identifier: Apache-2.0
#include "backend/base/log.h"

#include <stdarg.h>
#include <stdio.h>

static sluice_log_fn_t log_fn;
static void* log_user;
static int32_t log_max_level = SLUICE_LOG_WARN;

void sluice_set_log(sluice_log_fn_t fn, void* user, int32_t max_level) {
  log_fn = fn;
  log_user = user;
  log_max_level = max_level;
}

void sluice_log(int32_t level, const char* format, ...) {
  if (log_fn == NULL || level > log_max_level) return;
  char message[1200];
  va_list args;
  va_start(args, format);
  vsnprintf(message, sizeof message, format, args);
  va_end(args);
  log_fn(log_user, level, message);
}
