/* A relative time of a plan by the closed forms, for machines that nobody has calibrated. */
#include "backend/moe/plan_sizes.h"

#include <math.h>

#include "backend/base/dtype.h"
#include "backend/moe/pass.h"

/* Round figures of a core, a network and a memory; only the order of candidates comes from them. */
static const sluice_plan_rates_t round_figures = {.flops = 1e11, .link_bytes = 5e8, .startup_seconds = 2e-5};
#define COPY_BYTES 5e9

static double pass_time(double comm, double compute, double copy, int32_t n, double startup) {
  double longest = fmax(comm, fmax(compute, copy));
  return longest + (comm + compute + copy - longest) / n + startup * n;
}

/* MPipeMoE Table II's work per chunk, in seconds over all chunks; MPMoE's phases folded into "the longest lane, plus
 * what one chunk leaves uncovered". */
double sluice_plan_relative_time(const sluice_moe_t* moe, const sluice_plan_data_t* plan,
                                 const sluice_plan_rates_t* rates) {
  if (rates == NULL) rates = &round_figures;
  const sluice_moe_config_t* c = &moe->config;
  double rows = (double)sluice_plan_balanced_rows(moe, plan->inputs.max_tokens), w = moe->context->world_size;
  if (sluice_layer_ceiling(moe) > 0) rows = (double)plan->worst_rows; /* padding travels and is computed as rows are */
  double row_bytes = (double)c->model_width * (double)sluice_dtype_bytes(c->dtype);
  double product = rows * 2.0 * (double)c->model_width * (double)c->hidden_width / rates->flops;
  double exchange = rows * row_bytes * (w - 1) / w / rates->link_bytes;
  if (sluice_layer_is_deduplicated(moe)) {
    exchange *= sluice_parcels_share(c->num_experts, moe->context->world_size, c->top_k);
  }
  double copy = rows * row_bytes / COPY_BYTES;
  double wide = (double)sluice_pass_row_bytes(moe, SLUICE_T_KEPT_M) / row_bytes;
  double copies = (plan->restore_di == SLUICE_RESTORE_OFFLOAD ? copy : 0) +
                  (plan->restore_m == SLUICE_RESTORE_OFFLOAD ? wide * copy : 0);
  double g = moe->gate_factor, weights = 0;
  if (plan->wgrad_mode == SLUICE_WGRAD_PER_CHUNK) {
    double element = fmax(4, (double)sluice_dtype_bytes(c->dtype)); /* sums of 16-bit gradients are f32 */
    weights = (plan->num_chunks - 1) * 2.0 * (double)moe->num_local * (g + 1) * (double)c->hidden_width *
              (double)c->model_width * element / COPY_BYTES;
  }
  double forward = (g + 1) * product;
  double backward = 2 * forward + weights + (plan->restore_m == SLUICE_RESTORE_RECOMPUTE ? g * product : 0);
  double backward_comm = (plan->restore_di == SLUICE_RESTORE_REDISPATCH ? 3 : 2) * exchange;
  return pass_time(2 * exchange, forward, copies, plan->num_chunks, rates->startup_seconds) +
         pass_time(backward_comm, backward, copies, plan->num_chunks, rates->startup_seconds);
}
