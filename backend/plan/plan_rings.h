// SPDX-License-Identifier: Apache-2.0
/* Slots per tensor of the small templates that plans are sized by. A search asks for the same few again and again, with
 * other rows; building one takes about a thousand times as long as looking it up. Private to backend/plan. */
#ifndef SLUICE_BACKEND_PLAN_PLAN_RINGS_H_
#define SLUICE_BACKEND_PLAN_PLAN_RINGS_H_

#include "backend/schedule/schedule.h"

#define SLUICE_RINGS_KNOWN 256 /* one search of all policies, modes and lengths fits */

typedef struct sluice_plan_rings_s {
  sluice_template_spec_t spec;
  int32_t ring[SLUICE_T_COUNT]; /* as in the template */
} sluice_plan_rings_t;

/* Those asked for last. All zero: empty. In the process's own memory, as templates that are built for sizing are. */
typedef struct sluice_ring_memo_s {
  sluice_plan_rings_t* items;
  int32_t count;
  int32_t next; /* to make room, once all are taken */
} sluice_ring_memo_t;

/* spec: every byte counts, those behind n chunks too. Errors: those of sluice_template_build. */
sluice_status_t sluice_ring_memo_get(sluice_ring_memo_t* memo, const sluice_template_spec_t* spec,
                                     sluice_plan_rings_t* out_rings);
void sluice_ring_memo_deinit(sluice_ring_memo_t* memo);

#endif /* SLUICE_BACKEND_PLAN_PLAN_RINGS_H_ */
