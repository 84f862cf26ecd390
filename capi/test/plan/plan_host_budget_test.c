// SPDX-License-Identifier: Apache-2.0
/* Counters of a context. Outstanding forwards are counted, and the rows that they offload take pool blocks that steps
 * reuse, within the host budget, whether Sluice or the host holds the rows. */
#include "capi/test/rig/refusals.h"
#include "capi/test/world/budget_suite.h"
#include "capi/test/world/checks.h"
#include "third_party/bazel/test.h"

enum { STEPS = 4, ROUNDS = 20 };

static void open_rig(rig_t* rig, uint64_t budget, int32_t max_outstanding, int32_t policy) {
  const sluice_context_config_t context = own_rig_context(budget, max_outstanding);
  sluice_moe_config_t config = rig_config();
  config.restore_input = config.restore_pre_activation = policy;
  own_rig_open(rig, &context, &config);
}

/* ---- counters ---- */

static void check_counts(const rig_t* rig, uint64_t now, uint64_t most, uint64_t planned) {
  const sluice_context_stats_t stats = own_rig_stats(rig);
  assert_int_equal(stats.num_outstanding, now);
  assert_int_equal(stats.most_outstanding, most);
  assert_int_equal(stats.planned_outstanding, planned);
}

static void take_back(rig_t* rig, sluice_step_t* step) {
  WORKS(rig_backward(rig, step));
  sluice_step_drop(step);
}

TEST(Stats_Outstanding_CountsTheMostAtOneTime) {
  rig_t rig;
  sluice_step_t* steps[STEPS];
  open_rig(&rig, 0, 0, SLUICE_RESTORE_KEEP);
  check_counts(&rig, 0, 0, 0);
  for (int i = 0; i < STEPS; ++i) WORKS(rig_forward(&rig, &steps[i]));
  check_counts(&rig, STEPS, STEPS, 0);
  for (int i = 0; i < STEPS - 1; ++i) take_back(&rig, steps[i]);
  check_counts(&rig, 1, STEPS, 0);
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  WORKS(sluice_context_get_stats(rig.context, 1, &stats)); /* also resets this peak */
  check_counts(&rig, 1, 1, 0);
  rig.forward.needs_backward = 0;
  WORKS(sluice_moe_forward(rig.moe, &rig.forward, NULL, NULL)); /* without a step */
  check_counts(&rig, 1, 1, 0);
  take_back(&rig, steps[STEPS - 1]);
  check_counts(&rig, 0, 1, 0);
  own_rig_close(&rig);
}

/* If a host keeps the saved buffers and drops the step, the forward stays outstanding until it frees them. */
TEST(Stats_StepDroppedAndBuffersKept_IsOutstandingStill) {
  rig_t rig;
  sluice_step_t* step = NULL;
  open_rig(&rig, 0, 0, SLUICE_RESTORE_KEEP);
  held_saved_t held = {.context = rig.context};
  hold_saved(&rig, &held);
  WORKS(rig_forward(&rig, &step));
  sluice_step_drop(step);
  check_counts(&rig, 1, 1, 0);
  give_saved_back(&held, rig.context);
  check_counts(&rig, 0, 1, 0);
  own_rig_close(&rig);
}

/* Time of a pass outside of its ops counts only while a trace is kept. */
TEST(WalkStats_WhileATraceIsKept_CountBindingAndWalking) {
  rig_t rig;
  const sluice_moe_config_t config = rig_config();
  WORKS(rig_open(&rig, NULL, &config));
  WORKS(rig_round(&rig, NULL));
  sluice_context_stats_t stats = own_rig_stats(&rig);
  assert_true(stats.num_passes == 2 && stats.num_walks == 0);
  assert_true(stats.bind_cpu_ns == 0 && stats.walk_cpu_ns == 0 && stats.num_wakes == 0 && stats.wait_ns == 0);
  assert_true(stats.num_readings == 0 && stats.readings_cpu_ns == 0);
  WORKS(sluice_context_trace(rig.context, 64));
  for (int i = 0; i < 20; ++i) WORKS(rig_round(&rig, NULL));
  stats = own_rig_stats(&rig);
  assert_int_equal(stats.num_walks, 40);
  assert_true(stats.bind_cpu_ns > 0 && stats.walk_cpu_ns > 0);
  /* Clock readings cover parts of the binding, the ops and the whole pass; no part exceeds the whole. */
  assert_true(stats.num_readings > stats.num_walks && stats.readings_cpu_ns >= stats.num_readings);
  assert_true(stats.readings_cpu_ns < stats.bind_cpu_ns + stats.walk_cpu_ns);
  /* With one rank no op waits, so the clock is read once around all ops, whatever the number of chunks. */
  assert_true(stats.last_num_chunks > 1 && stats.num_readings <= 5 * stats.num_walks);
  /* With one rank all ops run on the calling thread, so there is no lane to wait for. */
  assert_true(stats.num_wakes == 0 && stats.wait_ns == 0 && stats.wake_cpu_ns == 0);
  WORKS(sluice_context_trace(rig.context, 0));
  WORKS(rig_round(&rig, NULL));
  assert_int_equal(own_rig_stats(&rig).num_walks, 40);
  rig_close(&rig);
}

/* ---- blocks of the pool ---- */

/* Runs `outstanding` forwards and then their backwards. Gradients must have the bits of the first round. */
static void run_round(rig_t* rig, held_saved_t* held, int32_t outstanding, float* want, int is_first) {
  sluice_step_t* steps[STEPS] = {NULL};
  for (int32_t i = 0; i < outstanding; ++i) {
    rig_reset(rig);
    if (held != NULL) hold_saved(rig, &held[i]);
    WORKS(rig_forward(rig, &steps[i]));
  }
  for (int32_t i = outstanding; i-- > 0;) {
    WORKS(rig_backward(rig, steps[i]));
    sluice_step_drop(steps[i]);
    if (held != NULL) give_saved_back(&held[i], rig->context);
  }
  if (is_first) memcpy(want, rig->grad_tokens.tensor.data, rig->grad_tokens.bytes);
  assert_memory_equal(rig->grad_tokens.tensor.data, want, rig->grad_tokens.bytes);
}

TEST(Offload_TwentySteps_AllocateTheBlocksOfOne) {
  for (int by_host = 0; by_host < 2; ++by_host) {
    for (int32_t outstanding = 1; outstanding <= 3; ++outstanding) {
      rig_t rig;
      held_saved_t held[STEPS];
      float want[64];
      memset(held, 0, sizeof held);
      open_rig(&rig, 0, outstanding, SLUICE_RESTORE_OFFLOAD);
      for (int i = 0; i < STEPS; ++i) held[i].context = rig.context;
      uint64_t idle = 0, peak = 0;
      for (int i = 0; i < ROUNDS; ++i) {
        run_round(&rig, by_host ? held : NULL, outstanding, want, i == 0);
        const sluice_context_stats_t stats = own_rig_stats(&rig);
        if (i == 0) idle = stats.idle_pool_bytes, peak = stats.peak_bytes;
        assert_int_equal(stats.num_pool_allocations, 2 * outstanding); /* T_DI and T_M of each forward */
        assert_true(stats.idle_pool_bytes == idle && stats.peak_bytes == peak && idle > 0);
      }
      own_rig_close(&rig);
    }
  }
}

/* Under the smallest budget of the plan, with backwards in reverse order. Afterwards another allocation uses the bytes
 * of idle blocks. */
TEST(Offload_UnderItsLeastBudget_StaysWithin) {
  rig_t rig;
  float want[64];
  open_rig(&rig, 1 << 20, 2, SLUICE_RESTORE_OFFLOAD);
  const uint64_t needs = own_rig_smallest_budget(&rig);
  own_rig_close(&rig);

  open_rig(&rig, needs, 2, SLUICE_RESTORE_OFFLOAD);
  for (int i = 0; i < ROUNDS; ++i) run_round(&rig, NULL, 2, want, i == 0);
  sluice_context_stats_t stats = own_rig_stats(&rig);
  assert_true(stats.peak_bytes <= needs && stats.num_pool_allocations == 4);
  /* An allocation that needs the bytes of idle blocks frees them, and the next step allocates its blocks again. */
  void* data = NULL;
  const uint64_t room = (needs - stats.current_bytes + stats.idle_pool_bytes) / 64 * 64;
  assert_true(stats.idle_pool_bytes > 0);
  WORKS(sluice_context_allocate(rig.context, room, &data));
  assert_int_equal(own_rig_stats(&rig).idle_pool_bytes, 0);
  sluice_context_free(rig.context, data, room);
  run_round(&rig, NULL, 2, want, 0);
  stats = own_rig_stats(&rig);
  assert_true(stats.peak_bytes <= needs && stats.num_pool_allocations == 8);
  own_rig_close(&rig);
}

/* A buffer may outlive its context; then the host frees it with NULL. */
TEST(Saved_OutlivesTheContext_IsFreedWithoutIt) {
  rig_t rig;
  held_saved_t held = {0};
  void* data = NULL;
  open_rig(&rig, 0, 1, SLUICE_RESTORE_OFFLOAD);
  held.context = rig.context;
  for (int32_t which = 0; which < SLUICE_SAVED_COUNT; ++which) (void)save_held(&held, which, 100 + (uint64_t)which);
  REFUSED(sluice_context_allocate_saved(rig.context, SLUICE_SAVED_COUNT, 1, &data), BAD, "which is 5");
  REFUSED(sluice_context_allocate_saved(NULL, 0, 1, &data), BAD, "context is NULL");
  own_rig_close(&rig);
  give_saved_back(&held, NULL);
}

/* ---- the host budget ---- */

/* With more outstanding forwards than declared, the pool is full; all ranks report this before any row is sent. */
TEST(HostBudget_MoreOutstandingThanSaid_RefusedOnAllRanks) {
  for (int32_t w = 1; w <= 4; ++w) {
    case_t c = budget_base_case();
    c.world_size = w, c.top_k = 1, c.hot_expert = 1, c.outstanding = c.max_outstanding = 2;
    c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_OFFLOAD;
    c.host_budget = 1000;
    result_t got;
    world_run(&c, &got);
    unsigned long long needs = 0;
    assert_int_equal(sscanf(strstr(got.message[0], "takes "), "takes %llu", &needs), 1);
    world_free(&got);
    c.host_budget = needs;
    budget_check(&(budget_suite_t){.run = world_run}, c);
    c.outstanding = 4;
    world_run(&c, &got);
    for (int32_t r = 0; r < w; ++r) {
      assert_int_equal(got.status[r], SLUICE_E_OVER_BUDGET);
      if (strstr(got.message[r], "bytes of offloaded rows on one of the ranks") == NULL ||
          strstr(got.message[r], "raise max_outstanding, or raise host_memory_budget") == NULL) {
        fail_msg("rank %d: %s", r, got.message[r]);
      }
    }
    world_free(&got);
  }
}

TEST(HostBudget_Plans_KeepWhatThePoolHolds) {
  rig_t l;
  sluice_moe_config_t layer = rig_config();
  layer.model_width = 8, layer.hidden_width = 16, layer.top_k = 1, layer.num_chunks = layer.gated = 0;
  WORKS(rig_open(&l, NULL, &layer));
  DEFAULTS(sluice_plan_config, config);
  config.max_tokens = 4096, config.max_outstanding = 3;
  config.restore_input = config.restore_pre_activation = SLUICE_RESTORE_OFFLOAD;
  sluice_plan_info_t info;
  sluice_plan_t* plan = own_rig_plan(&l, &config, &info);
  uint64_t all = info.host_pool_bytes;
  assert_true(all >= 3u * 4096u * (8 + 16) * sizeof(float) && all < info.total_bytes);
  sluice_plan_destroy(plan);
  config.host_memory_budget = all;
  plan = own_rig_plan(&l, &config, &info);
  assert_true(info.host_pool_bytes <= all && info.kept_rows == 4096);
  sluice_plan_destroy(plan);
  config.host_memory_budget = all / 2; /* one rank receives all rows that it sends, so it cannot keep fewer rows */
  REFUSED(sluice_plan_create(l.moe, &config, &plan), SLUICE_E_OVER_BUDGET, "host_memory_budget to that");
  config.restore_input = config.restore_pre_activation = SLUICE_RESTORE_ADAPTIVE;
  plan = own_rig_plan(&l, &config, &info);
  assert_true(info.host_pool_bytes <= all / 2);
  sluice_plan_candidate_t lines[512];
  int32_t count = 0, refused = 0;
  WORKS(sluice_plan_candidates(plan, lines, 512, &count));
  for (int32_t i = 0; i < count; ++i) {
    int both =
        lines[i].restore_input == SLUICE_RESTORE_OFFLOAD && lines[i].restore_pre_activation == SLUICE_RESTORE_OFFLOAD;
    assert_false(both && lines[i].fits && lines[i].kept_chunks == lines[i].num_chunks);
    refused += !lines[i].fits;
  }
  assert_true(refused > 0 && refused < count);
  sluice_plan_destroy(plan);
  rig_close(&l);
}

/* Runs forwards until one is refused. Returns their number, or -1 after another error. `drops`: each step is dropped at
 * once and its buffers stay, as in hosts with their own autograd. */
static int32_t forwards_until_refused(rig_t* rig, held_saved_t* held, int drops) {
  hold_saved(rig, held);
  sluice_step_t* steps[STEPS] = {NULL};
  int32_t count = 0;
  sluice_status_t status = SLUICE_OK;
  while (count < STEPS && status == SLUICE_OK) {
    status = rig_forward(rig, &steps[count]);
    if (drops) sluice_step_drop(steps[count]), steps[count] = NULL;
    count += status == SLUICE_OK;
  }
  if (status != SLUICE_OK && strstr(last_message(), "host_memory_budget") == NULL) fail_msg("%s", last_message());
  for (int32_t i = 0; i < STEPS; ++i) sluice_step_drop(steps[i]);
  give_saved_back(held, held->context);
  return status == SLUICE_E_OVER_BUDGET ? count : -1;
}

TEST(HostBudget_WhoeverHoldsTheRows_ThePoolStaysWithinIt) {
  rig_t rig;
  sluice_context_config_t context = own_rig_context(0, 2);
  context.host_memory_budget = 3400;
  sluice_moe_config_t config = rig_config();
  config.restore_input = config.restore_pre_activation = SLUICE_RESTORE_OFFLOAD;
  own_rig_open(&rig, &context, &config);
  for (int drops = 0; drops < 2; ++drops) {
    for (int again = 0; again < 2; ++again) { /* the second time, released memory is used again */
      held_saved_t held = {.context = drops ? rig.context : NULL};
      assert_int_equal(forwards_until_refused(&rig, &held, drops), 2);
      assert_true(held.most > 0 && held.most <= context.host_memory_budget);
      printf("two forwards hold %llu bytes of offloaded rows of %llu\n", (unsigned long long)held.most,
             (unsigned long long)context.host_memory_budget);
    }
  }
  rig_close(&rig);
}

int main(void) {
  const struct CMUnitTest rows[] = {
      BUDGET_TEST(HostBudget_OneHotExpert_ResultsAreTheSame, cpu_budget_suite(), host_budget_one_hot_expert),
  };
  return RUN_CASES_AFTER(rows);
}
