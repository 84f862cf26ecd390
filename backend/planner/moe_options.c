// SPDX-License-Identifier: Apache-2.0
/* Makes options for the planner over layers from the plans of an MoE layer. */
#include "backend/model/words.h"
#include "backend/planner/moe_options.h"

#include <string.h>

#include "backend/model/pass_sizes.h"
#include "backend/model/restore.h"

typedef struct filling_s {
  const sluice_moe_allowed_t* allowed;
  sluice_moe_options_t* options;
  uint64_t layer_bytes; /* handle and tables */
} filling_t;

static int is_allowed(const sluice_moe_allowed_t* allowed, int32_t restore) {
  const sluice_restore_t* row = sluice_restore(restore);
  const int again = row->exchanges > 0 || row->gemms > 0;
  return (allowed->recompute || !again) && (allowed->offload || row->host_rows == 0);
}

static int32_t kind_of(const sluice_plan_data_t* plan) {
  const int is_kept =
      sluice_restore_is_kept(plan->restore_input) && sluice_restore_is_kept(plan->restore_pre_activation);
  return is_kept ? SLUICE_STAGES_KEEP : SLUICE_STAGES_MIXED;
}

static void add_option(void* user, const sluice_plan_data_t* plan, const sluice_step_prediction_t* prediction) {
  filling_t* f = user;
  sluice_moe_options_t* o = f->options;
  if (!is_allowed(f->allowed, plan->restore_input) || !is_allowed(f->allowed, plan->restore_pre_activation)) return;
  if (o->count == SLUICE_PLANNER_MOST_CANDIDATES) return;
  const sluice_plan_bytes_t* b = &plan->bytes;
  o->list[o->count] = (sluice_stages_option_t){
      .forward_seconds = prediction->seconds[SLUICE_FORWARD],
      .backward_seconds = prediction->seconds[SLUICE_BACKWARD],
      .resident_bytes = f->layer_bytes + b->routing + b->schedules,
      .held_bytes = b->step,
      .arena_bytes = SLUICE_CPU_CONTEXT_BYTES + b->slots + b->headers + b->gemms,
      .kind = kind_of(plan),
      .tag = o->count,
  };
  o->choices[o->count] =
      (sluice_planner_choice_t){plan->num_chunks, plan->restore_input, plan->restore_pre_activation, plan->wgrad_mode};
  ++o->count;
}

sluice_status_t sluice_moe_options_make(const sluice_machine_t* machine, const sluice_planner_workload_t* workload,
                                        const sluice_planner_asked_t* wanted, const sluice_moe_allowed_t* allowed,
                                        sluice_moe_options_t* out) {
  memset(out, 0, sizeof *out);
  sluice_ring_memo_t rings = {0};
  const sluice_plan_problem_t problem = sluice_planner_problem(machine, workload, wanted, &rings);
  filling_t filling = {.allowed = allowed,
                       .options = out,
                       .layer_bytes = sluice_planner_base_bytes(&problem.shape) - SLUICE_CPU_CONTEXT_BYTES};
  sluice_ring_memo_deinit(&rings);
  SLUICE_TRY(sluice_planner_visit_choices(machine, workload, wanted, add_option, &filling));
  return SLUICE_REQUIRE(out->count > 0,
                        "no choice of what is wanted remains: may_recompute is %d and may_offload %d; set one of them "
                        "to 1, or leave restore_input and restore_pre_activation open",
                        allowed->recompute, allowed->offload);
}

void sluice_moe_options_name(const sluice_planner_choice_t* choice, sluice_text_t* text) {
  sluice_text_add(text, "n %d (T_DI %s, T_M %s, weight gradients %s)", choice->num_chunks,
                  sluice_restore_name(choice->restore_input), sluice_restore_name(choice->restore_pre_activation),
                  sluice_wgrad_word(choice->wgrad_mode));
}
