// SPDX-License-Identifier: Apache-2.0
#include "backend/base/test/last_error.h"

const sluice_error_info_t* last_error(void) {
  static _Thread_local sluice_error_info_t info;
  sluice_error_info_init(&info, sizeof info);
  sluice_error_last(&info);
  return &info;
}

const char* last_message(void) { return last_error()->message; }
