// SPDX-License-Identifier: Apache-2.0
#include "backend/plan/plan_rings.h"

#include <string.h>

#include "backend/schedule/template/template.h"

static const uint64_t memo_bytes = SLUICE_RINGS_KNOWN * sizeof(sluice_plan_rings_t);

static const sluice_plan_rings_t* find(const sluice_ring_memo_t* memo, const sluice_template_spec_t* spec) {
  for (int32_t i = 0; i < memo->count; ++i) {
    if (memcmp(&memo->items[i].spec, spec, sizeof *spec) == 0) return &memo->items[i];
  }
  return NULL;
}

static void put(sluice_ring_memo_t* memo, const sluice_plan_rings_t* rings) {
  if (memo->count < SLUICE_RINGS_KNOWN) {
    memo->items[memo->count++] = *rings;
    return;
  }
  memo->items[memo->next] = *rings;
  memo->next = (memo->next + 1) % SLUICE_RINGS_KNOWN;
}

sluice_status_t sluice_ring_memo_get(sluice_ring_memo_t* memo, const sluice_template_spec_t* spec,
                                     sluice_plan_rings_t* out_rings) {
  const sluice_plan_rings_t* known = find(memo, spec);
  if (known != NULL) {
    *out_rings = *known;
    return SLUICE_OK;
  }
  if (memo->items == NULL) {
    memo->items = sluice_alloc(sluice_process_allocator(), memo_bytes, "slots of templates by spec");
    if (memo->items == NULL) return sluice_alloc_status();
  }
  sluice_template_t* schedule = NULL;
  SLUICE_TRY(sluice_template_build(spec, sluice_process_allocator(), &schedule));
  out_rings->spec = *spec;
  memcpy(out_rings->ring, schedule->ring, sizeof out_rings->ring);
  sluice_template_destroy(schedule, sluice_process_allocator());
  put(memo, out_rings);
  return SLUICE_OK;
}

void sluice_ring_memo_deinit(sluice_ring_memo_t* memo) {
  if (memo->items != NULL) sluice_free(sluice_process_allocator(), memo->items, memo_bytes);
  memset(memo, 0, sizeof *memo);
}
