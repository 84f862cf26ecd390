// SPDX-License-Identifier: Apache-2.0
/* Plans a model over the stages of a pipeline before it runs: the stage of each layer, and whether its activations are
 * kept, recomputed or offloaded, so that the slowest stage is as fast as a budget allows.
 *
 *   examples/c/build.sh /tmp/out && /tmp/out/stages [budget of a stage in MiB] */
#include <stdlib.h>

#include "host.h"

enum { LAYERS = 12, STAGES = 4, MICRO_BATCHES = 16, TEXT_BYTES = 8192, MIB = 1 << 20 };

/* An embedding, alternating attention and MLP blocks, and a head: seconds and bytes of one micro-batch. */
static void describe_layer(sluice_planner_layer_t* layer, int index) {
  const int is_end = index == 0 || index == LAYERS - 1, is_mlp = index % 2 == 0;
  sluice_planner_layer_init(layer, sizeof *layer);
  layer->forward_seconds = is_end ? 1e-3 : is_mlp ? 4e-3 : 3e-3;
  layer->backward_seconds = 2 * layer->forward_seconds;
  layer->recompute_seconds = layer->forward_seconds;
  layer->parameter_bytes = (is_end ? 96u : is_mlp ? 64u : 32u) * MIB;
  layer->state_bytes = 3u * layer->parameter_bytes;
  layer->output_bytes = 16 * MIB;
  layer->checkpoint_bytes = 16 * MIB;
  layer->activation_bytes = (is_end ? 32u : is_mlp ? 144u : 112u) * MIB;
}

int main(int argc, char** argv) {
  static sluice_planner_layer_t layers[LAYERS];
  static const sluice_planner_layer_t* list[LAYERS];
  static sluice_stages_choice_t choices[LAYERS];
  static sluice_stages_stage_t stages[STAGES];
  static char text[TEXT_BYTES];
  sluice_stages_link_t links[STAGES - 1];
  uint64_t budgets[STAGES];
  const uint64_t budget = (uint64_t)(argc > 1 ? atoi(argv[1]) : 1200) * MIB;

  for (int i = 0; i < LAYERS; ++i) describe_layer(&layers[i], i), list[i] = &layers[i];
  for (int s = 0; s < STAGES; ++s) budgets[s] = budget;
  for (int s = 0; s < STAGES - 1; ++s) {
    links[s].bytes_per_second = 10e9, links[s].latency_seconds = 1e-5;
    links[s].full_duplex = 1, links[s].reserved = 0;
  }

  sluice_planner_problem_t problem;
  sluice_planner_problem_init(&problem, sizeof problem);
  problem.layers = list, problem.num_layers = LAYERS;
  problem.links = links, problem.num_stages = STAGES;
  problem.budget_bytes = budgets;
  problem.schedule = SLUICE_STAGES_1F1B, problem.num_micro_batches = MICRO_BATCHES;
  problem.copy_bytes_per_second = 12e9;

  sluice_planner_result_t result;
  sluice_planner_result_init(&result, sizeof result);
  result.choices = choices, result.stages = stages;
  result.text = text, result.text_room = sizeof text;

  const sluice_status_t status = sluice_planner_stages(&problem, &result);
  if (status == SLUICE_E_OVER_BUDGET) {
    printf("stage %d does not fit: it needs %.0f MiB\n", (int)result.blocking_stage,
           (double)result.smallest_budget_bytes / MIB);
  }
  if (failed(0, status)) return 1;
  printf("a step takes %.1f ms\n%s", 1e3 * result.step_seconds, text);
  return 0;
}
