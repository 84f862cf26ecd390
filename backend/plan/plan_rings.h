// SPDX-License-Identifier: Apache-2.0
/* Caches the slots per tensor of the small templates that determine the size of plans. A search needs the same few
 * templates again and again, with other numbers of rows; building one takes about a thousand times as long as a
 * look-up. Private to backend/plan. */
#pragma once

#include "backend/schedule/schedule.h"

#define SLUICE_RINGS_KNOWN 256 /* enough for one search of all policies, modes and lengths */

typedef struct sluice_plan_rings_s {
  sluice_template_spec_t spec;
  int32_t ring[SLUICE_T_COUNT]; /* as in the template */
} sluice_plan_rings_t;

/* The most recent ones. All zero: empty. Allocated by the process's allocator, like templates that are built for
 * sizing. */
typedef struct sluice_ring_memo_s {
  sluice_plan_rings_t* items;
  int32_t count;
  int32_t next; /* the entry to replace next if all are used */
} sluice_ring_memo_t;

/* Looks up the rings of a template, or builds it. spec: every byte counts, including those after n chunks. Errors:
 * those of sluice_template_build. */
sluice_status_t sluice_ring_memo_get(sluice_ring_memo_t* memo, const sluice_template_spec_t* spec,
                                     sluice_plan_rings_t* out_rings);
void sluice_ring_memo_deinit(sluice_ring_memo_t* memo);
