/* A device in virtual time: lanes and events as of any device, but a job only takes the seconds that a cost function
 * says. Runs nothing, knows no tuner; what it is told is all it knows.
 *
 * Interference: while other lanes are busy, a lane runs at share[lane][set of busy lanes] of its speed, and the rest of
 * its job is stretched accordingly, moment by moment [MPMoE's alpha(y, lanes active beside it)]. What an exchange and a
 * GEMM do to each other depends on the size of the exchange, so a job of the communication lane may say it itself.
 *
 * A link that a token bucket shapes, as clouds and `tc tbf` do, sends at once what it could have sent in a pause
 * before, up to `bucket` seconds of line time: a job of the communication lane says how much of its time the line
 * takes.
 */
#ifndef SLUICE_BACKEND_DEVICE_SIM_SIM_DEVICE_H_
#define SLUICE_BACKEND_DEVICE_SIM_SIM_DEVICE_H_

#include "backend/base/lanes.h"
#include "backend/device/device.h"

/* Seconds of job `index` when nothing runs beside it; not negative. */
typedef double (*sluice_sim_cost_fn_t)(void* user, int32_t index);

/* A job of the communication lane beside one of the compute lane: what each keeps of its speed, in (0, 1]; 0: as
 * `share` says. */
typedef struct sluice_overlap_s {
  double own, compute;
} sluice_overlap_t;
typedef sluice_overlap_t (*sluice_sim_overlap_fn_t)(void* user, int32_t index);

typedef struct sluice_sim_model_s {
  sluice_sim_cost_fn_t cost;
  void* user;
  /* [lane][bit set of the lanes that are busy, this one included]: in (0, 1]; 0 stands for 1. */
  double share[SLUICE_NUM_LANES][1 << SLUICE_NUM_LANES];
  sluice_sim_overlap_fn_t overlap; /* of jobs of the communication lane, in place of the lanes' shares; may be NULL */
  double bucket;                   /* seconds of line time that a pause earns at most; 0: the link keeps nothing */
  sluice_sim_cost_fn_t line;       /* of the communication lane's job, those of its seconds that are line time */
} sluice_sim_model_t;

typedef struct sluice_sim_result_s {
  double total;                  /* when the last job ended */
  double busy[SLUICE_NUM_LANES]; /* seconds with a job on the lane */
  const double* begin;           /* [num_events] of the pass, by job index; valid until the next begin */
  const double* end;
} sluice_sim_result_t;

/* model is copied. out_device: new, device->vtable->destroy. join() is where time passes; it fails with INTERNAL when
 * jobs wait for each other for ever. Errors: INVALID_ARGUMENT (a share outside [0, 1]), NO_MEMORY. */
sluice_status_t sluice_sim_device_create(const sluice_sim_model_t* model, sluice_allocator_t* allocator,
                                         sluice_device_t** out_device);
/* Of the last pass that was joined. */
void sluice_sim_device_result(const sluice_device_t* device, sluice_sim_result_t* out_result);

#endif /* SLUICE_BACKEND_DEVICE_SIM_SIM_DEVICE_H_ */
