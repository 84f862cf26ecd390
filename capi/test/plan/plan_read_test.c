// SPDX-License-Identifier: Apache-2.0
/* Plans as bytes with a changed word or length and a matching checksum. Each is refused with the name of a field, or is
 * a valid plan: the layer runs with the same results, or exceeds its budget. */
#include "backend/base/hash.h"
#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

#define MOST_BYTES      1024
#define RUN_UP_TO_BYTES (1u << 24) /* larger plans are not run */

static int64_t num_refused, num_run;

/* Runs the layer under a plan that was read. */
static void run_under(rig_t* rig, const sluice_plan_t* plan, const float* want) {
  sluice_plan_info_t info = {.struct_size = sizeof info};
  WORKS(sluice_plan_get_info(plan, &info));
  assert_int_equal(info.total_bytes, info.base_bytes + info.slot_bytes + info.routing_bytes + info.schedule_bytes +
                                         info.header_bytes + info.gemm_bytes +
                                         (uint64_t)info.max_outstanding * info.step_bytes);
  if (info.total_bytes > RUN_UP_TO_BYTES || info.max_tokens < rig->num_tokens) return;
  sluice_status_t status = sluice_moe_use_plan(rig->moe, plan);
  if (status == SLUICE_OK) status = rig_round(rig, NULL);
  if (status == SLUICE_OK) {
    ++num_run;
    assert_memory_equal(rig->out.tensor.data, want, rig->out.bytes);
  } else if (status != SLUICE_E_OVER_BUDGET) {
    fail_msg("%d: %s", status, last_message());
  }
  WORKS(sluice_moe_use_plan(rig->moe, NULL));
}

static void read_bent(rig_t* rig, const unsigned char* bent, uint64_t bytes, const float* want) {
  unsigned char* exact = malloc(bytes + 1); /* one byte more than given, so that an empty plan has an address */
  const uint64_t sealed = bytes < 8 ? 0 : bytes - 8, sum = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, bent, sealed);
  sluice_plan_t* plan = NULL;
  memcpy(exact, bent, bytes);
  if (bytes >= 8) memcpy(exact + sealed, &sum, 8);
  const sluice_status_t status = sluice_plan_read(rig->moe, exact, bytes, &plan);
  free(exact);
  if (status == SLUICE_OK) {
    run_under(rig, plan, want);
    sluice_plan_destroy(plan);
    return;
  }
  ++num_refused;
  assert_null(plan);
  const char* says = last_message(); /* "FIELD is VALUE", or the number of bytes */
  if (strstr(says, " is ") == NULL && strstr(says, "a plan has") == NULL && strstr(says, "restore_") == NULL)
    fail_msg("%d, no field named: %s", status, says);
}

static void damage(const sluice_moe_config_t* layer, const sluice_plan_config_t* config) {
  unsigned char plain[MOST_BYTES + 64] = {0}, bent[sizeof plain];
  float want[64];
  uint64_t bytes = MOST_BYTES;
  rig_t rig;
  sluice_plan_t* plan = NULL;
  WORKS(rig_open(&rig, NULL, layer));
  WORKS(rig_round(&rig, NULL));
  assert_true(rig.out.bytes <= sizeof want);
  memcpy(want, rig.out.tensor.data, rig.out.bytes);
  WORKS(sluice_plan_create(rig.moe, config, &plan));
  WORKS(sluice_plan_write(plan, plain, &bytes));
  sluice_plan_destroy(plan);
  for (uint64_t length = 0; length < bytes + 64; ++length) read_bent(&rig, plain, length, want);
  for (uint64_t at = 0; at + 12 <= bytes; at += 4) {
    uint32_t word = 0;
    memcpy(&word, plain + at, 4);
    const uint32_t values[] = {word ^ 1, word ^ 2, word + 4, word ^ 1u << 16, word ^ 1u << 31, 0, 1, 2, 3,
                               6,        1u << 12, 1u << 20, UINT32_MAX,      UINT32_MAX - 6};
    for (int i = 0; i < COUNT(values); ++i) {
      memcpy(bent, plain, sizeof bent);
      memcpy(bent + at, &values[i], 4);
      read_bent(&rig, bent, bytes, want);
    }
  }
  rig_close(&rig);
  assert_int_equal(atomic_load(&rig.heap.live_blocks), 0);
}

TEST(Plan_ChangedBytes_AreRefusedByNameOrPlansLikeOthers) {
  static const int32_t inputs[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_REDISPATCH};
  static const int32_t pre_activations[] = {SLUICE_RESTORE_RECOMPUTE, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD};
  sluice_moe_config_t own = rig_config(), capacity = rig_config(), host = rig_config();
  own.num_chunks = 0;
  capacity.exchange_mode = SLUICE_EXCHANGE_CAPACITY, capacity.capacity_rows = 6;
  host.callback_experts = 1, host.gated = host.bias = 0, host.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
  DEFAULTS(sluice_plan_config, config);
  config.max_tokens = 40, config.max_outstanding = 2;
  damage(&own, &config);
  damage(&capacity, &config);
  damage(&host, &config);
  config.memory_budget = 1u << 22, config.separate_wgrad = 1, config.num_chunks = 3;
  config.restore_input_of = inputs, config.restore_pre_activation_of = pre_activations;
  damage(&own, &config);
  printf("changed plans: %lld refused by a field, %lld run with the same results\n", (long long)num_refused,
         (long long)num_run);
  assert_true(num_refused > 2000 && num_run > 100);
}

/* The plan limits the allocator only while the plan is in use. */
TEST(UsePlan_TakenBack_ItsLimitsAreTooAndLayersRunOn) {
  sluice_moe_config_t layer = rig_config();
  rig_t rig;
  WORKS(rig_open(&rig, NULL, &layer));
  DEFAULTS(sluice_plan_config, config);
  config.max_tokens = rig.num_tokens, config.memory_budget = 1u << 20;
  sluice_plan_info_t info;
  sluice_plan_t* plan = own_rig_plan(&rig, &config, &info);
  sluice_plan_destroy(plan);
  config.memory_budget = info.total_bytes;
  WORKS(sluice_plan_create(rig.moe, &config, &plan));
  WORKS(sluice_moe_use_plan(rig.moe, plan));
  WORKS(rig_round(&rig, NULL));
  assert_int_equal(own_rig_stats(&rig).planned_outstanding, 1);

  /* A second plan that cannot be used leaves the first in place. */
  sluice_plan_t* wider = NULL;
  config.max_tokens = 4096, config.memory_budget = 0, config.max_outstanding = 3;
  WORKS(sluice_plan_create(rig.moe, &config, &wider));
  atomic_store(&rig.heap.fail_at, atomic_load(&rig.heap.calls));
  assert_int_equal(sluice_moe_use_plan(rig.moe, wider), SLUICE_E_NO_MEMORY);
  atomic_store(&rig.heap.fail_at, -1);
  assert_int_equal(own_rig_stats(&rig).planned_outstanding, 1);
  rig.num_tokens = 4096;
  REFUSED(rig_round(&rig, NULL), SLUICE_E_OVER_BUDGET, "this layer's plan is for at most 6");

  WORKS(sluice_moe_use_plan(rig.moe, NULL));
  WORKS(rig_round(&rig, NULL));
  assert_int_equal(own_rig_stats(&rig).planned_outstanding, 0);
  assert_true(own_rig_stats(&rig).peak_bytes > info.total_bytes);
  sluice_plan_destroy(plan);
  sluice_plan_destroy(wider);
  rig_close(&rig);
}

/* Destroying a layer removes the limits of its plan, even if a step is dropped later. */
TEST(UsePlan_LayerDestroyed_ItsLimitsGoToo) {
  sluice_moe_config_t layer = rig_config();
  sluice_plan_t* plan = NULL;
  sluice_step_t* step = NULL;
  rig_t rig;
  WORKS(rig_open(&rig, NULL, &layer));
  DEFAULTS(sluice_plan_config, config);
  config.max_tokens = rig.num_tokens, config.memory_budget = 1u << 20;
  WORKS(sluice_plan_create(rig.moe, &config, &plan));
  WORKS(sluice_moe_use_plan(rig.moe, plan));
  sluice_plan_destroy(plan);
  WORKS(rig_forward(&rig, &step));
  assert_int_equal(own_rig_stats(&rig).planned_outstanding, 1);
  sluice_moe_destroy(rig.moe);
  assert_int_equal(own_rig_stats(&rig).planned_outstanding, 0);
  sluice_step_drop(step);
  WORKS(sluice_moe_create(rig.context, &layer, &rig.moe));
  WORKS(rig_round(&rig, NULL));
  WORKS(rig_forward(&rig, &step));
  sluice_step_t* second = NULL;
  WORKS(rig_forward(&rig, &second)); /* the old plan allowed one outstanding step */
  sluice_step_drop(second);
  sluice_step_drop(step);
  rig_close(&rig);
}
