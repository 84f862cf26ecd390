/* Contexts of one process that share a budget: each stays within its share, and errors name the whole. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "capi/test/refusals.h"

/* A share of `whole` with room for so many parts of `parts`. */
static void open_share(rig_t* rig, uint64_t whole, uint64_t part, uint64_t parts) {
  memset(rig, 0, sizeof *rig);
  rig->world_size = 1;
  heap_init(&rig->heap);
  sluice_context_config_t context;
  sluice_context_config_init(&context, sizeof context);
  context.gemm = "ref", context.max_outstanding = 1;
  context.shared_memory_budget = whole, context.memory_budget = whole * part / parts;
  context.allocate = heap_allocate, context.release = heap_release, context.allocate_user = &rig->heap;
  WORKS(sluice_context_create(&context, NULL, &rig->context));
  sluice_moe_config_t config = rig_config();
  config.num_chunks = 0;
  WORKS(rig_open_layer(rig, &config));
}

static uint64_t peak_of(const rig_t* rig) {
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  WORKS(sluice_context_get_stats(rig->context, 0, &stats));
  return stats.peak_bytes;
}

static void Share_TooSmall_NamesTheWholeThatDoes(void** state) {
  (void)state;
  rig_t rig;
  sluice_step_t* step = NULL;
  unsigned long long whole = 0;
  open_share(&rig, 10000, 3, 7);
  REFUSED(rig_forward(&rig, &step), SLUICE_E_OVER_BUDGET,
          "no plan fits 4285 bytes, this context's share of the memory budget of 10000: the leanest");
  assert_int_equal(sscanf(strstr(last_message(), "raise memory_budget to "), "raise memory_budget to %llu", &whole), 1);
  rig_close(&rig);

  rig_t three, four; /* both at once, in the whole that the error named */
  sluice_step_t *first = NULL, *second = NULL;
  open_share(&three, whole, 3, 7);
  open_share(&four, whole, 4, 7);
  WORKS(rig_forward(&three, &first));
  WORKS(rig_forward(&four, &second));
  REFUSED(rig_forward(&three, &step), SLUICE_E_OVER_BUDGET, "this context's share of the memory budget of ");
  WORKS(rig_backward(&four, second));
  WORKS(rig_backward(&three, first));
  sluice_step_drop(first);
  sluice_step_drop(second);
  assert_true(peak_of(&three) <= whole * 3 / 7 && peak_of(&four) <= whole * 4 / 7);
  rig_close(&three);
  rig_close(&four);
}

static void Share_Bad_IsNamed(void** state) {
  (void)state;
  sluice_context_t* context = NULL;
  sluice_context_config_t config;
  sluice_context_config_init(&config, sizeof config);
  config.shared_memory_budget = 1000;
  REFUSED(sluice_context_create(&config, NULL, &context), SLUICE_E_INVALID_ARGUMENT,
          "shared_memory_budget is 1000, of which this context's share is 0");
  config.memory_budget = 1001;
  REFUSED(sluice_context_create(&config, NULL, &context), SLUICE_E_INVALID_ARGUMENT, "share is 1001");
  config.memory_budget = 1000, config.shared_host_memory_budget = 5;
  REFUSED(sluice_context_create(&config, NULL, &context), SLUICE_E_INVALID_ARGUMENT,
          "shared_host_memory_budget is 5, of which this context's share is 0");
  assert_null(context);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(Share_TooSmall_NamesTheWholeThatDoes),
      cmocka_unit_test(Share_Bad_IsNamed),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
