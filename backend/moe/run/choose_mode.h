// SPDX-License-Identifier: Apache-2.0
/* Chooses the mode of a layer's passes (mode.h). */
#pragma once

#include "backend/moe/layer/layer.h"

/* Called for a new layer, and whenever a plan has been installed or removed. */
void sluice_layer_choose_mode(sluice_moe_t* moe);
