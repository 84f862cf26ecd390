// SPDX-License-Identifier: Apache-2.0
/* Explains plans in sentences. */
#include <inttypes.h>

#include "backend/planner/stages/plan_stages.h"

const char* sluice_stages_kind_name(int32_t kind) {
  static const char* const NAMES[] = {"keep", "recompute", "offload", "mixed"};
  return kind >= SLUICE_STAGES_KEEP && kind <= SLUICE_STAGES_MIXED ? NAMES[kind] : "?";
}

/* ---- stages ---- */

static void explain_cut(const sluice_stages_other_cut_t* cut, const char* where, sluice_text_t* text) {
  if (cut->layer < 0) {
    sluice_text_add(text, "; %s: no layer may move", where);
  } else if (cut->short_bytes > 0) {
    sluice_text_add(text, "; %s by layer %d: %" PRIu64 " bytes over a budget", where, cut->layer, cut->short_bytes);
  } else {
    sluice_text_add(text, "; %s by layer %d: the slowest stage takes %.6g s", where, cut->layer, cut->slowest_seconds);
  }
}

static void explain_stage(const sluice_stages_plan_t* plan, int32_t stage, sluice_text_t* text) {
  const sluice_stages_stage_t* s = &plan->stages[stage];
  sluice_text_add(text, "stage %d: %d layers, %.6g s%s (compute %.6g, messages %.6g, copies %.6g), %" PRIu64 " bytes",
                  stage, s->num_layers, s->seconds, stage == plan->slowest_stage ? ", the slowest" : "",
                  s->compute_seconds, s->message_seconds, s->copy_seconds, s->bytes);
  if (s->budget_bytes > 0) sluice_text_add(text, " of %" PRIu64, s->budget_bytes);
  if (stage > 0) {
    explain_cut(&s->begins_earlier, "earlier", text);
    explain_cut(&s->begins_later, "later", text);
  }
  sluice_text_add(text, "\n");
}

/* ---- layers ---- */

static void add_kind_and_number(void* user, int32_t layer, int32_t option, sluice_text_t* text) {
  const sluice_stages_problem_t* problem = user;
  sluice_text_add(text, "%s (option %d)", sluice_stages_kind_name(problem->layers[layer].options[option].kind), option);
}

static void explain_layer(const sluice_stages_plan_t* plan, int32_t layer, const sluice_stages_names_t* names,
                          sluice_text_t* text) {
  const sluice_stages_choice_t* choice = &plan->choices[layer];
  sluice_text_add(text, "  layer %d: ", layer);
  names->add(names->user, layer, choice->option, text);
  if (choice->reason == SLUICE_STAGES_FASTEST) {
    sluice_text_add(text, ": nothing is faster, and it fits\n");
    return;
  }
  if (choice->reason == SLUICE_STAGES_OVER_BUDGET) {
    sluice_text_add(text, ": the stage does not fit; its options take the fewest bytes together\n");
    return;
  }
  sluice_text_add(text, choice->reason == SLUICE_STAGES_NO_TIME ? ": the copies of " : ": with ");
  names->add(names->user, layer, choice->fastest, text);
  switch (choice->reason) {
    case SLUICE_STAGES_FREE:
      sluice_text_add(text, " the stage is %" PRIu64 " bytes over its budget; this costs no time",
                      choice->reason_bytes);
      break;
    case SLUICE_STAGES_SAVES:
      sluice_text_add(text, " the stage is %" PRIu64 " bytes over its budget; this costs %.6g s", choice->reason_bytes,
                      choice->reason_seconds);
      break;
    case SLUICE_STAGES_UNBURDENS:
      sluice_text_add(text, " copies make the stage %.6g s slower", choice->reason_seconds);
      break;
    default: sluice_text_add(text, " do not finish before the backward"); break;
  }
  sluice_text_add(text, "\n");
}

void sluice_stages_explain(const sluice_stages_problem_t* problem, const sluice_stages_plan_t* plan,
                           const sluice_stages_names_t* names, sluice_text_t* text) {
  const sluice_stages_names_t by_kind = {add_kind_and_number, (void*)problem};
  for (int32_t s = 0; s < problem->num_stages; ++s) {
    explain_stage(plan, s, text);
    for (int32_t i = 0; i < problem->num_layers; ++i) {
      if (plan->choices[i].stage == s) explain_layer(plan, i, names != NULL ? names : &by_kind, text);
    }
  }
}
