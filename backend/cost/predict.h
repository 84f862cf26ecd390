// SPDX-License-Identifier: Apache-2.0
/* Predicts the time of a schedule: the real template, walked on the sim device. */
#pragma once

#include "backend/device/sim/sim_device.h"
#include "backend/schedule/schedule.h"

/* Seconds of one op that runs alone. */
typedef double (*sluice_op_cost_fn_t)(void* user, const sluice_op_t* op);

/* The speeds that an op of the communication lane and concurrent computation keep. */
typedef sluice_overlap_t (*sluice_op_overlap_fn_t)(void* user, const sluice_op_t* op);

/* The shares while a copy runs, by its size and direction; NULL: those of all copies. */
typedef const double (*(*sluice_op_share_fn_t)(void* user, const sluice_op_t* op))[1 << SLUICE_NUM_LANES];

/* The costs of a schedule's ops, alone and with other lanes busy. */
typedef struct sluice_op_costs_s {
  sluice_op_cost_fn_t seconds;
  sluice_op_overlap_fn_t overlap;               /* NULL: `share` applies */
  sluice_op_share_fn_t copy_share;              /* of copies; NULL: `share` applies */
  sluice_op_cost_fn_t line;                     /* the part of an exchange that is line time; may be NULL */
  double bucket;                                /* as in sluice_sim_model_t */
  void* user;                                   /* of all callbacks */
  const double (*share)[1 << SLUICE_NUM_LANES]; /* as in sluice_sim_model_t, or NULL for no interference */
} sluice_op_costs_t;

typedef struct sluice_prediction_s {
  double total;
  double busy[SLUICE_NUM_LANES];
} sluice_prediction_t;

/* out_begin, out_end: [num_ops] seconds, or NULL. Errors: NO_MEMORY, INVALID_ARGUMENT (a share), INTERNAL (a template
 * that the checker would reject). */
sluice_status_t sluice_predict(const sluice_template_t* schedule, const sluice_op_costs_t* costs,
                               sluice_allocator_t* allocator, sluice_prediction_t* out_prediction, double* out_begin,
                               double* out_end);
