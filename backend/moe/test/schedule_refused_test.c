// SPDX-License-Identifier: Apache-2.0
/* Builds with assertions check a template before they run it. Here the engine gets templates that lack a dependency.
 * The linker replaces the builder's functions with this file's (see BUILD). */
#include <math.h>

#include "backend/schedule/schedule.h"
#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

static int breaks; /* templates that are built from now on lack a dependency */
static int num_broken;

static sluice_status_t bend(sluice_status_t status, sluice_template_t** built) {
  sluice_template_t* made = *built;
  for (int32_t i = 0; breaks && status == SLUICE_OK && i < made->num_ops; ++i) {
    if (made->ops[i].num_deps == 0) continue;
    --made->ops[i].num_deps;
    ++num_broken;
    return SLUICE_OK;
  }
  return status;
}

sluice_status_t __real_sluice_template_build(const sluice_template_spec_t* spec, sluice_allocator_t* allocator,
                                             sluice_template_t** out_template);
sluice_status_t __wrap_sluice_template_build(const sluice_template_spec_t* spec, sluice_allocator_t* allocator,
                                             sluice_template_t** out_template);
sluice_status_t __wrap_sluice_template_build(const sluice_template_spec_t* spec, sluice_allocator_t* allocator,
                                             sluice_template_t** out_template) {
  return bend(__real_sluice_template_build(spec, allocator, out_template), out_template);
}

sluice_status_t __real_sluice_template_build_into(const sluice_template_spec_t* spec, void* memory,
                                                  sluice_template_t** out_template);
sluice_status_t __wrap_sluice_template_build_into(const sluice_template_spec_t* spec, void* memory,
                                                  sluice_template_t** out_template);
sluice_status_t __wrap_sluice_template_build_into(const sluice_template_spec_t* spec, void* memory,
                                                  sluice_template_t** out_template) {
  return bend(__real_sluice_template_build_into(spec, memory, out_template), out_template);
}

/* With offloading, copies wait for GEMMs and GEMMs for copies, even on one rank. */
static void open_rig(rig_t* rig, uint64_t budget) {
  memset(rig, 0, sizeof *rig);
  rig->world_size = 1;
  heap_init(&rig->heap);
  DEFAULTS(sluice_context_config, context);
  context.gemm = "ref", context.memory_budget = budget;
  WORKS(sluice_context_create(&context, NULL, &rig->context));
  sluice_moe_config_t config = rig_config();
  config.num_chunks = 3, config.restore_input = config.restore_pre_activation = SLUICE_RESTORE_OFFLOAD;
  WORKS(rig_open_layer(rig, &config));
}

static int is_untouched(const rig_tensor_t* t) {
  const float* data = t->tensor.data;
  for (uint64_t i = 0; i < t->bytes / sizeof *data; ++i) {
    if (!isnan(data[i])) return 0;
  }
  return 1;
}

/* budget 0: templates are allocated separately; else in the block of a plan. */
static void check_refused(uint64_t budget) {
  rig_t rig;
  uint64_t want = 0, got = 0;
  sluice_step_t* step = NULL;
  breaks = 0;
  open_rig(&rig, budget);
  WORKS(rig_round(&rig, &want));
  rig_close(&rig);

  open_rig(&rig, budget);
  breaks = 1, num_broken = 0;
  REFUSED(rig_forward(&rig, &step), SLUICE_E_INVALID_ARGUMENT, "schedule refused: ");
  assert_non_null(strstr(last_message(), "; the edge from the second to the first is missing"));
  assert_null(step);
  assert_true(num_broken > 0 && is_untouched(&rig.out));
  breaks = 0;
  WORKS(rig_forward(&rig, &step));
  breaks = 1;
  REFUSED(rig_backward(&rig, step), SLUICE_E_INVALID_ARGUMENT, "schedule refused: ");
  assert_true(is_untouched(&rig.grad_tokens) && is_untouched(&rig.grad_weights));
  breaks = 0;
  sluice_step_drop(step);
  WORKS(rig_round(&rig, &got)); /* the refused template was not cached */
  assert_true(got == want);
  breaks = 1;
  WORKS(rig_round(&rig, &got)); /* checked once, and then reused */
  assert_true(got == want);
  breaks = 0;
  rig_close(&rig);
}

TEST(Engine_TemplateWithoutAnEdge_IsRefusedBeforeItRuns) {
#ifdef NDEBUG
  skip_because("built without assertions");
#endif
  check_refused(0);
  check_refused(1 << 20);
}
