// SPDX-License-Identifier: Apache-2.0
/* Sluice: Mixture-of-Experts layers with expert parallelism, for training frameworks. This header includes the whole C
 * ABI. A complete program comes first: one layer on one rank, forward and backward. Three tokens of width 2 go to two
 * experts, W2 relu(W1 x), and the loss is the sum of the output.
 *
 *   #include <stdio.h>
 *   #include <stdlib.h>
 *   #include "sluice/sluice.h"
 *   static void check(sluice_status_t status) {
 *     if (status != SLUICE_OK) puts(sluice_status_name(status)), exit(1);
 *   }
 *   static sluice_tensor_t matrix(void* data, uint8_t type_code, int64_t* shape) {
 *     return (sluice_tensor_t){data, SLUICE_DEVICE_CPU, 0, 2, type_code, 32, 1, shape, NULL, 0};
 *   }
 *   int main(void) {
 *     float x[3][2] = {{1, 0}, {0, 1}, {1, 1}}, y[3][2], dy[3][2] = {{1, 1}, {1, 1}, {1, 1}}, dx[3][2];
 *     float w[4][2][2] = {{{1, 0}, {0, 1}}, {{1, 1}, {0, 1}}, {{1, 0}, {0, 1}}, {{1, 0}, {1, 1}}}, dw[4][2][2];
 *     float weights[3] = {1, 1, 0.5f};
 *     int32_t ids[3] = {0, 1, 0};
 *     int64_t rows[2] = {3, 2}, routes[2] = {3, 1}, square[2] = {2, 2};
 *     sluice_tensor_t tx = matrix(x, SLUICE_TYPE_FLOAT, rows), ty = matrix(y, SLUICE_TYPE_FLOAT, rows), m[8];
 *     sluice_tensor_t tdy = matrix(dy, SLUICE_TYPE_FLOAT, rows), tdx = matrix(dx, SLUICE_TYPE_FLOAT, rows);
 *     sluice_tensor_t tids = matrix(ids, SLUICE_TYPE_INT, routes), tw = matrix(weights, SLUICE_TYPE_FLOAT, routes);
 *     for (int i = 0; i < 8; ++i) m[i] = matrix(i < 4 ? w[i] : dw[i - 4], SLUICE_TYPE_FLOAT, square);
 *     sluice_expert_tensors_t params = {.struct_size = sizeof params, .w1 = m, .w2 = m + 2};
 *     sluice_expert_tensors_t grads = {.struct_size = sizeof grads, .w1 = m + 4, .w2 = m + 6};
 *     sluice_context_t* context; sluice_moe_t* moe; sluice_step_t* step;
 *     sluice_context_config_t context_config; sluice_moe_config_t c;
 *     sluice_moe_forward_args_t f; sluice_moe_backward_args_t b;
 *     sluice_context_config_init(&context_config, sizeof context_config);
 *     check(sluice_context_create(&context_config, NULL, &context));
 *     sluice_moe_config_init(&c, sizeof c);
 *     c.model_width = 2, c.hidden_width = 2, c.num_experts = 2, c.activation = SLUICE_ACTIVATION_RELU;
 *     check(sluice_moe_create(context, &c, &moe));
 *     sluice_moe_forward_args_init(&f, sizeof f);
 *     f.tokens = &tx, f.expert_ids = &tids, f.route_weights = &tw, f.params = &params, f.out_tokens = &ty;
 *     f.needs_backward = 1;
 *     check(sluice_moe_forward(moe, &f, NULL, &step));
 *     sluice_moe_backward_args_init(&b, sizeof b);
 *     b.tokens = &tx, b.route_weights = &tw, b.params = &params;
 *     b.grad_out = &tdy, b.grad_tokens = &tdx, b.grad_params = &grads;
 *     check(sluice_moe_backward(moe, step, &b, NULL));
 *     for (int t = 0; t < 3; ++t) printf("y %g %g  dx %g %g\n", y[t][0], y[t][1], dx[t][0], dx[t][1]);
 *     sluice_step_drop(step), sluice_moe_destroy(moe), sluice_context_destroy(context);
 *   }
 *
 * The _init functions write the defaults, which the comments of the configs list. For several ranks, pass a
 * communicator to sluice_context_create. sluice_error_last returns the message of the last failed call. docs/c-abi.md
 * describes handles, threads and errors.
 *
 *   base.h       status codes, errors, tensors and logging
 *   comm.h       communicators
 *   context.h    the context, which the layers of one model on one rank share
 *   moe.h        the layer: the four calls of the program, then the values of their options
 *   weights.h    formats of frozen expert weights in 4 and 8 bits
 *   gate.h       a gate, for hosts that have none
 *   split.h      dispatch, experts and combine as separate calls
 *   plan.h       memory plans of a layer
 *   tuner.h      choice of the number of chunks and of plans while training
 *   schedule.h   the ops of a pass, as data
 *   pipeline.h   pipelines of stages
 *   optimizer.h  Adam and AdamW with states in host memory or in a file
 *   planner.h    predictions of time and memory on a machine (experimental)
 *   placement.h  placement of experts on ranks (experimental)
 *   stages.h     assignment of layers to the stages of a pipeline (experimental)
 *   migration.h  experts and layers that move between ranks while training runs (experimental)
 *   swap.h       activations that are copied out of device memory until the backward (experimental)
 */
#ifndef SLUICE_SLUICE_H_
#define SLUICE_SLUICE_H_

#include "sluice/base.h"
#include "sluice/comm.h"
#include "sluice/context.h"
#include "sluice/gate.h"
#include "sluice/migration.h"
#include "sluice/moe.h"
#include "sluice/optimizer.h"
#include "sluice/pipeline.h"
#include "sluice/split.h"
#include "sluice/placement.h"
#include "sluice/plan.h"
#include "sluice/planner.h"
#include "sluice/schedule.h"
#include "sluice/stages.h"
#include "sluice/swap.h"
#include "sluice/tuner.h"
#include "sluice/weights.h"

#endif /* SLUICE_SLUICE_H_ */
