// SPDX-License-Identifier: Apache-2.0
/* Converts a caller's layers to lists of options, the only form that the solver of stages reads. */
#pragma once

#include "backend/planner/layer_planner.h"
#include "backend/planner/stages/model.h"
#include "sluice/stages.h"

/* The source of a layer's options. */
typedef struct sluice_stage_layer_s {
  sluice_planner_layer_t given;
  const sluice_moe_options_t* moe;   /* NULL: the layer has none */
  sluice_moe_options_t* owned;       /* the same, if no earlier layer has these options; else NULL */
  sluice_stages_option_t* with_host; /* [moe->count]: with the host's contribution */
  sluice_stages_option_t profile[SLUICE_STAGES_PROFILE_OPTIONS];
} sluice_stage_layer_t;

typedef struct sluice_stage_layers_s {
  int32_t count;
  int32_t reserved;
  sluice_stage_layer_t* of;    /* [count] */
  sluice_stages_layer_t* list; /* [count], in the solver's form */
} sluice_stage_layers_t;

/* Reads and checks the layers; MoE layers are priced. Errors: INVALID_ARGUMENT, ABI, UNSUPPORTED, naming the layer;
 * NO_MEMORY. After an error nothing is left. */
sluice_status_t sluice_stage_layers_make(const sluice_planner_problem_t* problem, sluice_stage_layers_t* out_layers);
void sluice_stage_layers_deinit(sluice_stage_layers_t* layers);

/* Returns the option's number as the caller counts; for a layer without options of its own, its kind. */
int32_t sluice_stage_layer_option(const sluice_stage_layers_t* layers, int32_t layer, int32_t option);
/* Returns the option that the caller calls `number` (the inverse); num_options of the layer if there is none. */
int32_t sluice_stage_layer_place(const sluice_stage_layers_t* layers, int32_t layer, int32_t number);
/* For sluice_stages_names_t. user: layers. */
void sluice_stage_layers_name(void* user, int32_t layer, int32_t option, sluice_text_t* text);
