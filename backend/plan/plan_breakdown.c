// SPDX-License-Identifier: Apache-2.0
/* Explains the bytes of a plan, and the op and direction at which most slot bytes contain rows. */
#include <string.h>

#include "backend/plan/plan_sizes.h"
#include "backend/schedule/check/releases.h"
#include "backend/schedule/template/template.h"

/* Adds the slot's bytes to every op of each of its uses: from the write that begins the use to the last op that
 * releases it, or to the end of the pass if none does. */
static void add_slot(const sluice_template_t* t, int32_t tensor, int32_t slot, uint64_t bytes, uint64_t* live) {
  int32_t since = 0, is_held = 0;
  for (int32_t i = 0; i < t->num_ops; ++i) {
    const sluice_op_t* op = &t->ops[i];
    int reads = sluice_slot_is_among(op->reads, op->num_reads, tensor, slot);
    int writes = sluice_slot_is_among(op->writes, op->num_writes, tensor, slot);
    if (!reads && !writes) continue;
    if (!reads) since = i;
    is_held = 1;
    if (!sluice_op_releases(op, tensor, slot)) continue;
    for (int32_t k = since; k <= i; ++k) live[k] += bytes;
    since = i + 1, is_held = 0; /* another op that releases it may follow */
  }
  for (int32_t k = since; k < t->num_ops && is_held; ++k) live[k] += bytes;
}

static sluice_status_t find_peak(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                 const sluice_plan_rings_t* rings, const sluice_template_t* t,
                                 sluice_plan_breakdown_t* out) {
  const uint64_t bytes = ((uint64_t)t->num_ops + 1) * sizeof(uint64_t);
  uint64_t* live = sluice_alloc_zeroed(sluice_process_allocator(), bytes, "slots of a plan over its ops");
  if (live == NULL) return sluice_alloc_status();
  for (int32_t tensor = 0; tensor < SLUICE_T_COUNT; ++tensor) {
    const uint64_t all = sluice_plan_tensor_bytes(problem, plan, rings, tensor);
    for (int32_t slot = 0; all > 0 && slot < t->ring[tensor]; ++slot) {
      add_slot(t, tensor, slot, all / (uint64_t)t->ring[tensor], live);
    }
  }
  int32_t peak = 0;
  for (int32_t i = 1; i < t->num_ops; ++i) {
    if (live[i] > live[peak]) peak = i;
  }
  out->peak_slots = live[peak], out->peak_op = t->ops[peak].kind;
  sluice_free(sluice_process_allocator(), live, bytes);
  return SLUICE_OK;
}

sluice_status_t sluice_plan_break_down(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                       sluice_plan_breakdown_t* out) {
  uint64_t forward = 0, backward = 0, deferred[SLUICE_NUM_DEFERRED];
  memset(out, 0, sizeof *out);
  const sluice_plan_problem_t widest = sluice_plan_problem_widest(problem); /* as in sluice_plan_measure */
  SLUICE_TRY(sluice_plan_slot_bytes(&widest, plan, SLUICE_FORWARD, &forward));
  SLUICE_TRY(sluice_plan_slot_bytes(&widest, plan, SLUICE_BACKWARD, &backward));
  out->saved = sluice_plan_saved_bytes(&widest, plan);
  if (plan->inputs.separate_wgrad) {
    SLUICE_TRY(sluice_plan_deferred_bytes(problem, plan, deferred));
    for (int32_t i = 0; i < SLUICE_NUM_DEFERRED; ++i) out->deferred += deferred[i];
  }
  out->peak_direction = backward > forward ? SLUICE_BACKWARD : SLUICE_FORWARD;
  sluice_plan_rings_t rings;
  SLUICE_TRY(sluice_plan_small_rings(&widest, plan, out->peak_direction, SLUICE_WGRAD_CALL_NOW, &rings));
  static const int32_t travelling[] = {SLUICE_T_SEND, SLUICE_T_RECV, SLUICE_T_NODE, SLUICE_T_COPY_WEIGHTS};
  for (size_t i = 0; i < sizeof travelling / sizeof travelling[0]; ++i) {
    out->communication += sluice_plan_tensor_bytes(&widest, plan, &rings, travelling[i]);
  }
  sluice_template_t* schedule = NULL;
  SLUICE_TRY(sluice_plan_small_template(&widest, plan, out->peak_direction, SLUICE_WGRAD_CALL_NOW, &schedule));
  sluice_status_t status = find_peak(&widest, plan, &rings, schedule, out);
  sluice_template_destroy(schedule, sluice_process_allocator());
  return status;
}
