// SPDX-License-Identifier: Apache-2.0
#include "capi/test/world/checks.h"

case_run_t case_run = world_run;

int case_run_there(void** state) {
  case_run = (case_run_t)(uintptr_t)*state;
  return 0;
}

int case_run_here(void** state) {
  (void)state;
  case_run = world_run;
  return 0;
}
