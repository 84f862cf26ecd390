// SPDX-License-Identifier: Apache-2.0
/* The pool of offloaded rows under a budget: plans reserve a part of it for each forward, and no forward takes more,
 * whether Sluice or the host holds the rows. */

#include "capi/test/rig/own_rig.h"
#include "capi/test/rig/refusals.h"
#include "capi/test/world/budget_suite.h"
#include "capi/test/world/checks.h"
#include "third_party/bazel/test.h"

static budget_suite_t suite_of(void) {
  return (budget_suite_t){.base = budget_base_case(), .run = world_run, .least_ranks = 1};
}

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
  sluice_plan_t* plan = NULL;
  sluice_plan_info_t info = {.struct_size = sizeof info};
  assert_int_equal(sluice_plan_create(l.moe, &config, &plan), SLUICE_OK);
  assert_int_equal(sluice_plan_get_info(plan, &info), SLUICE_OK);
  uint64_t all = info.host_pool_bytes;
  assert_true(all >= 3u * 4096u * (8 + 16) * sizeof(float) && all < info.total_bytes);
  sluice_plan_destroy(plan);
  config.host_memory_budget = all;
  assert_int_equal(sluice_plan_create(l.moe, &config, &plan), SLUICE_OK);
  assert_int_equal(sluice_plan_get_info(plan, &info), SLUICE_OK);
  assert_true(info.host_pool_bytes <= all && info.kept_rows == 4096);
  sluice_plan_destroy(plan);
  config.host_memory_budget = all / 2; /* one rank receives all rows that it sends, so it cannot keep fewer rows */
  REFUSED(sluice_plan_create(l.moe, &config, &plan), SLUICE_E_OVER_BUDGET, "host_memory_budget to that");
  config.restore_input = config.restore_pre_activation = SLUICE_RESTORE_ADAPTIVE;
  assert_int_equal(sluice_plan_create(l.moe, &config, &plan), SLUICE_OK);
  assert_int_equal(sluice_plan_get_info(plan, &info), SLUICE_OK);
  assert_true(info.host_pool_bytes <= all / 2);
  sluice_plan_candidate_t lines[512];
  int32_t count = 0, refused = 0;
  assert_int_equal(sluice_plan_candidates(plan, lines, 512, &count), SLUICE_OK);
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

/* The host's own count of the pool: offloaded rows live from the callback that allocates them until their release. */
typedef struct pool_s {
  sluice_context_t* context; /* NULL: the test allocates; Sluice counts these bytes until the step is dropped */
  uint64_t live, most;
  void* data[16];
  uint64_t bytes[16];
  int32_t count;
} pool_t;

static void* save_to_pool(void* user, int32_t which, uint64_t bytes) {
  pool_t* pool = user;
  void* data = NULL;
  assert_true(pool->count < 16);
  if (pool->context == NULL) data = test_malloc(bytes + 1);
  if (pool->context != NULL) assert_int_equal(sluice_context_allocate(pool->context, bytes, &data), SLUICE_OK);
  if (which == SLUICE_SAVED_HOST_INPUT || which == SLUICE_SAVED_HOST_PRE_ACTIVATION) pool->live += bytes;
  if (pool->live > pool->most) pool->most = pool->live;
  pool->data[pool->count] = data, pool->bytes[pool->count++] = bytes;
  return data;
}

static void empty_pool(pool_t* pool) {
  for (int32_t i = 0; i < pool->count; ++i) {
    if (pool->context == NULL) test_free(pool->data[i]);
    if (pool->context != NULL) sluice_context_free(pool->context, pool->data[i], pool->bytes[i]);
  }
  pool->count = 0, pool->live = 0;
}

/* Runs forwards until one is refused. Returns their number, or -1 after another error. `drops`: each step is dropped at
 * once and its buffers stay, as in hosts with their own autograd. */
static int32_t forwards_until_refused(rig_t* rig, pool_t* pool, int drops) {
  rig->forward.save = save_to_pool, rig->forward.save_user = pool;
  rig->forward.save_is_counted = pool->context != NULL;
  sluice_step_t* steps[4] = {NULL};
  int32_t count = 0;
  sluice_status_t status = SLUICE_OK;
  while (count < 4 && status == SLUICE_OK) {
    status = rig_forward(rig, &steps[count]);
    if (drops) sluice_step_drop(steps[count]), steps[count] = NULL;
    count += status == SLUICE_OK;
  }
  if (status != SLUICE_OK && strstr(last_message(), "host_memory_budget") == NULL) fail_msg("%s", last_message());
  for (int32_t i = 0; i < 4; ++i) sluice_step_drop(steps[i]);
  empty_pool(pool);
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
      pool_t pool = {.context = drops ? rig.context : NULL};
      assert_int_equal(forwards_until_refused(&rig, &pool, drops), 2);
      assert_true(pool.most > 0 && pool.most <= context.host_memory_budget);
      printf("two forwards hold %llu bytes of offloaded rows of %llu\n", (unsigned long long)pool.most,
             (unsigned long long)context.host_memory_budget);
    }
  }
  rig_close(&rig);
}

int main(void) {
  const struct CMUnitTest rows[] = {
      BUDGET_TEST(HostBudget_OneHotExpert_ResultsAreTheSame, suite_of(), host_budget_one_hot_expert),
  };
  return RUN_CASES_AFTER(rows);
}
