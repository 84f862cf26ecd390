/* A plan as a handle: bad input is named, and what is written is read again; the footprint that a paper prints. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "capi/test/plan_layer.h"
#include "capi/test/refusals.h"

static void Plan_BadInput_IsNamed(void** state) {
  (void)state;
  layer_t l = {.tokens = 64, .width = 8, .hidden = 16, .experts = 4, .top_k = 1};
  open_layer(&l, 0);
  sluice_plan_t* plan = NULL;
  sluice_plan_config_t config;
  sluice_plan_config_init(&config, sizeof config);
  REFUSED(sluice_plan_create(l.moe, &config, &plan), SLUICE_E_INVALID_ARGUMENT, "max_tokens is 0");
  config.max_tokens = 64, config.max_outstanding = 0;
  REFUSED(sluice_plan_create(l.moe, &config, &plan), SLUICE_E_INVALID_ARGUMENT, "max_outstanding is 0");
  config.max_outstanding = 4, config.num_chunks = 300;
  REFUSED(sluice_plan_create(l.moe, &config, &plan), SLUICE_E_INVALID_ARGUMENT, "num_chunks is 300");
  config.num_chunks = 0, config.restore_middle = SLUICE_RESTORE_REDISPATCH;
  REFUSED(sluice_plan_create(l.moe, &config, &plan), SLUICE_E_INVALID_ARGUMENT, "restore_middle is 2");
  config.restore_middle = SLUICE_RESTORE_ADAPTIVE;
  REFUSED(sluice_plan_create(NULL, &config, &plan), SLUICE_E_INVALID_ARGUMENT, "moe is NULL");
  REFUSED(sluice_plan_create(l.moe, &config, NULL), SLUICE_E_INVALID_ARGUMENT, "out_plan is NULL");
  config.memory_budget = 1000;
  REFUSED(sluice_plan_create(l.moe, &config, &plan), SLUICE_E_OVER_BUDGET,
          "no plan fits the memory budget of 1000 bytes");
  assert_null(plan);

  config.memory_budget = 0;
  assert_int_equal(sluice_plan_create(l.moe, &config, &plan), SLUICE_OK);
  int32_t count = 0;
  sluice_plan_candidate_t lines[512];
  assert_int_equal(sluice_plan_candidates(plan, lines, 512, &count), SLUICE_OK);
  assert_int_equal(count, 8 * 9 * 2); /* n, policies, weight-gradient modes */
  for (int32_t i = 0; i < count; ++i) assert_true(lines[i].fits && lines[i].total_bytes > 0);

  char bytes[1024];
  uint64_t size = 0;
  assert_int_equal(sluice_plan_write(plan, NULL, &size), SLUICE_OK);
  assert_true(size < sizeof bytes);
  assert_int_equal(sluice_plan_write(plan, bytes, &size), SLUICE_OK);
  sluice_plan_t* again = NULL;
  for (uint64_t at = 0; at < size; ++at) {
    bytes[at] ^= 1;
    assert_int_equal(sluice_plan_read(l.moe, bytes, size, &again), SLUICE_E_INVALID_ARGUMENT);
    bytes[at] ^= 1;
  }
  REFUSED(sluice_plan_read(l.moe, bytes, size - 1, &again), SLUICE_E_INVALID_ARGUMENT, "bytes; a plan has");
  assert_int_equal(sluice_plan_read(l.moe, bytes, size, &again), SLUICE_OK);
  sluice_plan_info_t a = {.struct_size = sizeof a}, b = {.struct_size = sizeof b};
  assert_int_equal(sluice_plan_get_info(plan, &a), SLUICE_OK);
  assert_int_equal(sluice_plan_get_info(again, &b), SLUICE_OK);
  assert_memory_equal(&a, &b, sizeof a);

  layer_t other = {.tokens = 64, .width = 9, .hidden = 16, .experts = 4, .top_k = 1};
  open_layer(&other, 0);
  REFUSED(sluice_moe_use_plan(other.moe, plan), SLUICE_E_INVALID_ARGUMENT, "not alike");
  REFUSED(sluice_plan_read(other.moe, bytes, size, &again), SLUICE_E_INVALID_ARGUMENT, "another layer");
  close_layer(&other);
  assert_int_equal(sluice_moe_use_plan(l.moe, plan), SLUICE_OK);
  assert_int_equal(sluice_moe_use_plan(l.moe, NULL), SLUICE_OK);
  sluice_plan_destroy(plan);
  sluice_plan_destroy(again);
  sluice_plan_destroy(NULL);
  close_layer(&l);
}

static void PaperFootprint_IsAsPrinted(void** state) {
  (void)state;
  sluice_paper_footprint_t f;
  sluice_paper_footprint(1024, 768, 3072, 64, 4, &f);
  assert_true(f.states == 4.0 * (64 * 768.0 + 2.0 * 3072 * 768));
  assert_true(f.activations == 4.0 * 1024 * 768 + 1024.0 * 3072);
  assert_true(f.temporaries == 1024.0 * 768 + 1024.0 * 3072);
  assert_true(f.pipelined_temporaries == 4.0 * 1024 * 768 + 1024.0 * 3072);
  assert_true(f.saving == 1024 * (2 * 768.0 * 2 / 4 + 3072.0 * 3 / 4));
  assert_true(f.saved_share == 2 * f.saving / (f.states + 2 * f.activations));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(Plan_BadInput_IsNamed),
      cmocka_unit_test(PaperFootprint_IsAsPrinted),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
