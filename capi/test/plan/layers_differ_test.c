// SPDX-License-Identifier: Apache-2.0
/* Layers of several shapes under one budget, on a CPU and on a fake GPU. */

#include "capi/test/cuda/fakes_checks.h"
#include "capi/test/rig/layers_suite.h"
#include "capi/test/rig/own_rig.h"
#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

static void open_cpu(rig_t* rig, uint64_t budget, int32_t num_layers, const sluice_moe_config_t* layer) {
  sluice_context_config_t context = own_rig_context(budget, num_layers);
  context.num_layers = num_layers;
  own_rig_open(rig, &context, layer);
}

static void open_fake(rig_t* rig, uint64_t budget, int32_t num_layers, const sluice_moe_config_t* layer) {
  const world_machine_t* machine = fakes_machine();
  fakes_open(1, 1);
  rig_use_machine(machine, 0);
  WORKS(rig_open_context(rig, NULL));
  sluice_context_destroy(rig->context);
  DEFAULTS(sluice_context_config, config);
  config.device_type = machine->device_type, config.device_id = machine->device_id(0);
  config.memory_budget = budget, config.max_outstanding = num_layers, config.num_layers = num_layers;
  WORKS(machine->make_context(0, &config, NULL, &rig->context));
  WORKS(rig_open_layer(rig, layer));
}

static void close_fake(rig_t* rig) {
  rig_close(rig);
  fakes_must_be_clean();
  rig_use_machine(NULL, 0);
}

static layers_suite_t on_cpu = {.open = open_cpu, .close = own_rig_close};
static layers_suite_t on_fakes = {.open = open_fake, .close = close_fake, .is_slow = 1};

static void Budget_LayersOfSeveralShapes_AllHaveTheirRoom(void** state) { layers_all_have_their_room(*state); }
static void Budget_LayersOfSeveralShapes_BatchesMayGrow(void** state) { layers_batches_may_grow(*state); }

/* The smallest budget of a layer includes memory of layers with other shapes. */
TEST(SmallestBudget_WithAnotherShape_IsLarger) {
  enum { TOKENS = 256 };
  sluice_moe_config_t wide = rig_config(), narrow = rig_config();
  wide.num_chunks = narrow.num_chunks = 0, wide.hidden_width = 96;
  sluice_context_config_t context = own_rig_context(1 << 24, 3);
  uint64_t alone = 0, with_its_like = 0, with_another = 0;
  rig_t rig;
  sluice_moe_t *like = NULL, *other = NULL;
  context.num_layers = 3;
  own_rig_open(&rig, &context, &narrow);
  WORKS(sluice_moe_smallest_budget(rig.moe, TOKENS, &alone));
  WORKS(sluice_moe_create(rig.context, &narrow, &like));
  WORKS(sluice_moe_smallest_budget(rig.moe, TOKENS, &with_its_like));
  assert_int_equal(with_its_like, alone);
  WORKS(sluice_moe_create(rig.context, &wide, &other));
  WORKS(sluice_moe_smallest_budget(rig.moe, TOKENS, &with_another));
  assert_true(with_another > alone);
  sluice_moe_destroy(other);
  sluice_moe_destroy(like);
  own_rig_close(&rig);
}

int main(void) {
  const struct CMUnitTest rows[] = {
      TEST_OF(on_cpu, Budget_LayersOfSeveralShapes_AllHaveTheirRoom),
      TEST_OF(on_cpu, Budget_LayersOfSeveralShapes_BatchesMayGrow),
      TEST_OF(on_fakes, Budget_LayersOfSeveralShapes_AllHaveTheirRoom),
      TEST_OF(on_fakes, Budget_LayersOfSeveralShapes_BatchesMayGrow),
  };
  return RUN_CASES_AFTER(rows);
}
