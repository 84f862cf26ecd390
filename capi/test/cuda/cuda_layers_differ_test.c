/* Layers of several shapes under one budget of a device's memory, on fakes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/cuda/fakes.h"
#include "capi/test/rig/layers_suite.h"
#include "capi/test/rig/refusals.h"

static void open_fake(rig_t* rig, uint64_t budget, int32_t num_layers, const sluice_moe_config_t* layer) {
  const world_machine_t* machine = fakes_machine();
  fakes_open(1, 1);
  rig_use_machine(machine, 0);
  WORKS(rig_open_context(rig, NULL));
  sluice_context_destroy(rig->context);
  sluice_context_config_t config;
  sluice_context_config_init(&config, sizeof config);
  config.device_type = machine->device_type, config.device_id = machine->device_id(0);
  config.memory_budget = budget, config.max_outstanding = num_layers, config.num_layers = num_layers;
  WORKS(machine->make_context(0, &config, NULL, &rig->context));
  WORKS(rig_open_layer(rig, layer));
}

static void close_fake(rig_t* rig) {
  char live[200], hazard[200];
  rig_close(rig);
  if (sluice_fake_cuda_hazards(hazard, sizeof hazard) != 0) fail_msg("hazard: %s", hazard);
  if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
  rig_use_machine(NULL, 0);
}

static const layers_suite_t suite = {.open = open_fake, .close = close_fake, .is_slow = 1};

static void CudaBudget_LayersOfSeveralShapes_AllHaveTheirRoom(void** state) {
  (void)state;
  layers_all_have_their_room(&suite);
}

static void CudaBudget_LayersOfSeveralShapes_BatchesMayGrow(void** state) {
  (void)state;
  layers_batches_may_grow(&suite);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(CudaBudget_LayersOfSeveralShapes_AllHaveTheirRoom),
      cmocka_unit_test(CudaBudget_LayersOfSeveralShapes_BatchesMayGrow),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
