// SPDX-License-Identifier: Apache-2.0
/* A device in virtual time: lanes and events as on any device, but a job only takes the seconds of a cost function. It
 * runs nothing and does not depend on the tuner; its input is the model.
 *
 * Interference: while other lanes are busy, a lane runs at share[lane][set of busy lanes] of its speed, and the rest of
 * its job is stretched accordingly, moment by moment [MPMoE's alpha(y, all active lanes)]. The interference of an
 * exchange and a GEMM depends on the size of the exchange, so a job of the communication lane may define it itself.
 *
 * A link that a token bucket shapes, as in clouds and `tc tbf`, sends at once what it could have sent in the preceding
 * pause, up to `bucket` seconds of line time: a job of the communication lane reports how much of its time the line
 * takes. */
#pragma once

#include "backend/base/lanes.h"
#include "backend/device/device.h"

/* Seconds of job `index` when it runs alone; not negative. */
typedef double (*sluice_sim_cost_fn_t)(void* user, int32_t index);

/* The share of its speed, in (0, 1], that a job of the communication lane keeps while the compute lane is busy, and
 * vice versa; 0: `share` applies. */
typedef struct sluice_overlap_s {
  double own, compute;
} sluice_overlap_t;
typedef sluice_overlap_t (*sluice_sim_overlap_fn_t)(void* user, int32_t index);

/* The shares while a job of a copy lane runs, in place of those of the model where they are not 0; NULL: none. */
typedef const double (*(*sluice_sim_share_fn_t)(void* user, int32_t index))[1 << SLUICE_NUM_LANES];

typedef struct sluice_sim_model_s {
  sluice_sim_cost_fn_t cost;
  void* user;
  /* [lane][bit set of the busy lanes, including this one]: in (0, 1]; 0 means 1. */
  double share[SLUICE_NUM_LANES][1 << SLUICE_NUM_LANES];
  sluice_sim_overlap_fn_t overlap;  /* of jobs of the communication lane, instead of the lanes' shares; may be NULL */
  sluice_sim_share_fn_t copy_share; /* of jobs of a copy lane, whose effect depends on their size; may be NULL */
  double bucket;                    /* seconds of line time that a pause earns at most; 0: the link has no bucket */
  sluice_sim_cost_fn_t line;        /* of a job of the communication lane, its seconds of line time */
} sluice_sim_model_t;

typedef struct sluice_sim_result_s {
  double total;                  /* when the last job ended */
  double busy[SLUICE_NUM_LANES]; /* seconds with a job on the lane */
  const double* begin;           /* [num_events] of the pass, by job index; valid until the next begin */
  const double* end;
} sluice_sim_result_t;

/* model is copied. out_device: new, release with device->vtable->destroy. Time advances in join(); it fails with
 * INTERNAL if jobs wait for each other for ever. Errors: INVALID_ARGUMENT (a share outside [0, 1]), NO_MEMORY. */
sluice_status_t sluice_sim_device_create(const sluice_sim_model_t* model, sluice_allocator_t* allocator,
                                         sluice_device_t** out_device);
/* Returns the result of the last joined pass. */
void sluice_sim_device_result(const sluice_device_t* device, sluice_sim_result_t* out_result);
