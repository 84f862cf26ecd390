// SPDX-License-Identifier: Apache-2.0
/* Offers the plans of a Mixture-of-Experts layer as options to the planner over layers: bytes and seconds of each on
 * its machine.
 *
 * Tensors that outlive a forward count as held. The layer's handle, tables, orders, counts and schedules count as
 * resident. Slots, headers and borrowed GEMM memory belong to the context, which the layers of a stage share, as they
 * share the arena. Orders, counts and schedules are shared too, but the largest of each may come from different layers:
 * they are counted per layer, and the sum is an upper bound. Offloaded rows count as held, as under a memory_budget. */
#pragma once

#include "backend/base/text.h"
#include "backend/planner/layer_planner.h"
#include "backend/planner/stages/model.h"

/* The policies that options may use. */
typedef struct sluice_moe_allowed_s {
  int32_t recompute; /* policies that re-dispatch or recompute */
  int32_t offload;   /* policies that offload */
} sluice_moe_allowed_t;

typedef struct sluice_moe_options_s {
  int32_t count;
  int32_t reserved;
  sluice_stages_option_t list[SLUICE_PLANNER_MOST_CANDIDATES]; /* tag: index in this list */
  sluice_planner_choice_t choices[SLUICE_PLANNER_MOST_CANDIDATES];
} sluice_moe_options_t;

/* Makes the options of a layer. out: memory of that size. workload, wanted: checked. Errors: those of
 * sluice_planner_visit_choices; INVALID_ARGUMENT if none of the wanted choices is allowed. */
sluice_status_t sluice_moe_options_make(const sluice_machine_t* machine, const sluice_planner_workload_t* workload,
                                        const sluice_planner_asked_t* wanted, const sluice_moe_allowed_t* allowed,
                                        sluice_moe_options_t* out);

/* Writes the name of a choice: "n 4 (T_DI keep, T_M recompute, weight gradients per chunk)". */
void sluice_moe_options_name(const sluice_planner_choice_t* choice, sluice_text_t* text);
