// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/run/choose_mode.h"

#include "backend/moe/run/mode.h"

void sluice_layer_choose_mode(sluice_moe_t* moe) {
  static const sluice_mode_t* const modes[2][2] = {{&sluice_mode_exact, &sluice_mode_under_plan},
                                                   {&sluice_mode_capacity, &sluice_mode_capacity_under_plan}};
  moe->mode = modes[moe->capacity != NULL][sluice_is_planned(moe)];
}
