/* What a schedule would take: the real template, walked on the sim device. */
#ifndef SLUICE_BACKEND_TUNE_PREDICT_H_
#define SLUICE_BACKEND_TUNE_PREDICT_H_

#include "backend/device/sim/sim_device.h"
#include "backend/schedule/schedule.h"

/* Seconds of one op by itself. */
typedef double (*sluice_op_cost_fn_t)(void* user, const sluice_op_t* op);

typedef struct sluice_prediction_s {
  double total;
  double busy[SLUICE_NUM_LANES];
} sluice_prediction_t;

/* share: as in sluice_sim_model_t, or NULL for no interference. out_begin, out_end: [num_ops] seconds, or NULL.
 * Errors: NO_MEMORY, INVALID_ARGUMENT (a share), INTERNAL (a template that the checker would refuse). */
sluice_status_t sluice_predict(const sluice_template_t* schedule, sluice_op_cost_fn_t cost, void* user,
                               const double (*share)[1 << SLUICE_NUM_LANES], sluice_allocator_t* allocator,
                               sluice_prediction_t* out_prediction, double* out_begin, double* out_end);

#endif /* SLUICE_BACKEND_TUNE_PREDICT_H_ */
