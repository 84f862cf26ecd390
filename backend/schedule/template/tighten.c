// SPDX-License-Identifier: Apache-2.0
#include "backend/schedule/template/tighten.h"

#include <string.h>

#include "backend/schedule/check/check.h"
#include "backend/schedule/check/releases.h"

static void move_refs(sluice_slot_ref_t* refs, int32_t count, int32_t tensor) {
  for (int32_t i = 0; i < count; ++i) {
    if (refs[i].tensor == tensor && refs[i].slot == 1) refs[i].slot = 0;
  }
}

static void make_one(sluice_template_t* t, int32_t tensor) {
  for (int32_t i = 0; i < t->num_ops; ++i) {
    move_refs(t->ops[i].reads, t->ops[i].num_reads, tensor);
    move_refs(t->ops[i].writes, t->ops[i].num_writes, tensor);
  }
  move_refs(t->homes, SLUICE_T_COUNT * t->spec.num_chunks, tensor);
  t->ring[tensor] = 1;
}

/* Copies the template: all its pointers point into it. */
static sluice_template_t* copy_into(const sluice_template_t* t, void* memory) {
  sluice_template_t* copy = memory;
  memcpy(copy, t, t->bytes);
  copy->ops = (sluice_op_t*)(copy + 1);
  copy->deps = (int32_t*)(void*)((char*)copy + ((const char*)t->deps - (const char*)t));
  copy->homes = (sluice_slot_ref_t*)(void*)((char*)copy + ((const char*)t->homes - (const char*)t));
  return copy;
}

sluice_status_t sluice_template_tighten(sluice_template_t* schedule, int32_t tensor) {
  if (schedule->ring[tensor] != 2) return SLUICE_OK;
  sluice_allocator_t* memory = sluice_process_allocator();
  void* scratch = sluice_alloc(memory, schedule->bytes, "schedule template");
  if (scratch == NULL) return sluice_alloc_status();
  sluice_template_t* trial = copy_into(schedule, scratch);
  make_one(trial, tensor);
  sluice_finding_t finding = {.hazard = SLUICE_HAZARD_NONE};
  sluice_status_t status = sluice_template_mark_releases(trial);
  if (status == SLUICE_OK) status = sluice_schedule_check(trial, memory, &finding);
  sluice_free(memory, scratch, schedule->bytes);
  if (status == SLUICE_OK && finding.hazard == SLUICE_HAZARD_NONE) make_one(schedule, tensor);
  return status;
}
