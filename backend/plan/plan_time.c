// SPDX-License-Identifier: Apache-2.0
/* A relative time of a plan by the closed forms, for machines that are not calibrated. */
#include "backend/plan/plan_sizes.h"

#include <math.h>

#include "backend/base/dtype.h"
#include "backend/model/pass_sizes.h"

/* Round figures of a core, a network and a memory; they only determine the order of candidates. */
static const sluice_plan_rates_t round_figures = {
    .flops = 1e11, .link_bytes = 5e8, .startup_seconds = 2e-5, .memory_bytes = 5e9, .copy_bytes = 5e9};

static double pass_time(double comm, double compute, double copy, int32_t n, double startup) {
  double longest = fmax(comm, fmax(compute, copy));
  return longest + (comm + compute + copy - longest) / n + startup * n;
}

/* Returns the mean over the chunks of balanced routing. */
static sluice_restore_mean_t restore_mean(const sluice_plan_data_t* plan, int32_t tensor) {
  uint8_t policies[SLUICE_MAX_CHUNKS];
  const int32_t kept = plan->kept_chunks > 0 ? plan->kept_chunks : plan->num_chunks; /* 0: not sized yet */
  for (int32_t i = 0; i < plan->num_chunks; ++i) {
    const int32_t policy = tensor == SLUICE_T_DI ? sluice_plan_di(plan, i) : sluice_plan_m(plan, i);
    policies[i] = (uint8_t)(i < kept ? policy : sluice_restore_least(tensor));
  }
  return sluice_restore_mean(policies, plan->num_chunks);
}

/* Computes MPipeMoE Table II's work per chunk, in seconds over all chunks, and simplifies MPMoE's phases to "the
 * longest lane, plus what one chunk leaves uncovered". */
double sluice_plan_relative_time(const sluice_plan_problem_t* problem, const sluice_plan_data_t* plan,
                                 const sluice_plan_rates_t* rates) {
  if (rates == NULL) rates = &round_figures;
  const double startup = rates->startup_seconds > 0 ? rates->startup_seconds : round_figures.startup_seconds;
  const double memory_bytes = rates->memory_bytes > 0 ? rates->memory_bytes : round_figures.memory_bytes;
  const double copy_bytes = rates->copy_bytes > 0 ? rates->copy_bytes : round_figures.copy_bytes;
  const sluice_moe_config_t* c = &problem->shape.config;
  double rows = (double)sluice_plan_balanced_rows(problem, plan->inputs.max_tokens), w = problem->shape.world_size;
  if (sluice_shape_capacity(&problem->shape) > 0)
    rows = (double)plan->worst_rows; /* padding is sent and computed like rows */
  double row_bytes = (double)c->model_width * (double)sluice_dtype_bytes(c->dtype);
  double gemm = rows * 2.0 * (double)c->model_width * (double)c->hidden_width / rates->flops;
  double exchange = rows * row_bytes * (w - 1) / w / rates->link_bytes;
  if (sluice_shape_is_deduplicated(&problem->shape)) {
    const int two_levels = sluice_shape_has_two_levels(&problem->shape); /* the part between nodes is the longer one */
    const int32_t places = two_levels ? problem->shape.world_size / problem->shape.ranks_per_node : (int32_t)w;
    exchange *= sluice_token_copies_share(c->num_experts, places, c->top_k);
  }
  double copy = rows * row_bytes / copy_bytes;
  double wide = (double)sluice_row_bytes(&problem->shape, SLUICE_T_KEPT_M) / row_bytes;
  const sluice_restore_mean_t di = restore_mean(plan, SLUICE_T_DI), m = restore_mean(plan, SLUICE_T_M);
  double copies = di.copies * copy + m.copies * wide * copy;
  double g = problem->shape.gate_factor, weights = 0;
  if (plan->wgrad_mode == SLUICE_WGRAD_PER_CHUNK) {
    /* Uses the rank with the most experts: all ranks must order candidates in the same way. */
    double element = fmax(4, (double)sluice_dtype_bytes(c->dtype)); /* sums of 16-bit gradients are f32 */
    weights = (plan->num_chunks - 1) * 2.0 * (double)problem->shape.most_local * (g + 1) * (double)c->hidden_width *
              (double)c->model_width * element / memory_bytes;
  }
  double forward = (g + 1) * gemm;
  double backward = 2 * forward + weights + m.gemms * g * gemm;
  double backward_comm = (2 + di.exchanges) * exchange;
  return pass_time(2 * exchange, forward, copies, plan->num_chunks, startup) +
         pass_time(backward_comm, backward, copies, plan->num_chunks, startup);
}
