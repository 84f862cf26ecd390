/* The plans of a Mixture-of-Experts layer as options of the planner over layers: what each takes on its machine.
 *
 * What outlives a forward is held; the layer's handle and tables, its orders, counts and schedules are resident; slots,
 * headers and what GEMMs borrow are the context's, which layers of a stage share, and so are the arena. Orders, counts
 * and schedules are shared too, but the largest of each may come from different layers: counted by layer, their sum is
 * an upper bound. Offloaded rows are held, as under a memory_budget. */
#ifndef SLUICE_BACKEND_PLANNER_MOE_OPTIONS_H_
#define SLUICE_BACKEND_PLANNER_MOE_OPTIONS_H_

#include "backend/base/text.h"
#include "backend/planner/layer_planner.h"
#include "backend/planner/stages/problem/model.h"

/* What may be among them. */
typedef struct sluice_moe_allowed_s {
  int32_t recompute; /* policies that send or compute again */
  int32_t offload;   /* policies that copy */
} sluice_moe_allowed_t;

typedef struct sluice_moe_options_s {
  int32_t count;
  int32_t reserved;
  sluice_stages_option_t list[SLUICE_PLANNER_MOST_CANDIDATES]; /* tag: its place here */
  sluice_planner_choice_t choices[SLUICE_PLANNER_MOST_CANDIDATES];
} sluice_moe_options_t;

/* out: any memory of that size. workload, wanted: checked. Errors: those of sluice_planner_visit_choices;
 * INVALID_ARGUMENT where nothing is allowed of what is wanted. */
sluice_status_t sluice_moe_options_make(const sluice_machine_t* machine, const sluice_planner_workload_t* workload,
                                        const sluice_planner_asked_t* wanted, const sluice_moe_allowed_t* allowed,
                                        sluice_moe_options_t* out);

/* "n 4 (T_DI keep, T_M recompute, weight gradients per chunk)". */
void sluice_moe_options_name(const sluice_planner_choice_t* choice, sluice_text_t* text);

#endif /* SLUICE_BACKEND_PLANNER_MOE_OPTIONS_H_ */
