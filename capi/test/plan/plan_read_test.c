// SPDX-License-Identifier: Apache-2.0
/* Plans as bytes with random changes and a matching checksum. Each is refused with the name of a field, or is a valid
 * plan: the layer runs with the same results, or exceeds its budget. */

#include "backend/base/hash.h"
#include "capi/test/rig/refusals.h"
#include "capi/test/rig/rig.h"
#include "third_party/bazel/test.h"

#define MOST_BYTES      1024
#define RUN_UP_TO_BYTES (1u << 24) /* larger plans are not run */

static uint32_t next_random(uint32_t* state) { return (*state = *state * 1664525u + 1013904223u) >> 8; }

static void reseal(unsigned char* data, uint64_t bytes) {
  if (bytes < 8) return;
  const uint64_t sum = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, data, bytes - 8);
  memcpy(data + bytes - 8, &sum, 8);
}

/* Writes a plan with random policies, for all chunks or for each chunk. */
static uint64_t random_plan(const rig_t* rig, uint32_t* seed, unsigned char* out) {
  static const int32_t chunks[] = {0, 1, 2, 3, 8},
                       pre_activation[] = {SLUICE_RESTORE_ADAPTIVE, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD,
                                           SLUICE_RESTORE_RECOMPUTE};
  int32_t inputs[8], pre_activations[8];
  DEFAULTS(sluice_plan_config, config);
  config.max_tokens = 6 + next_random(seed) % 40, config.max_outstanding = 1 + (int32_t)(next_random(seed) % 3);
  config.num_chunks = rig->config.capacity_rows > 0 ? rig->config.num_chunks : chunks[next_random(seed) % 5];
  config.separate_wgrad = (int32_t)(next_random(seed) % 2) && !rig->config.callback_experts;
  if (!rig->config.callback_experts) {
    config.restore_input = (int32_t)(next_random(seed) % 4) - 1;
    config.restore_pre_activation = pre_activation[next_random(seed) % 4];
  }
  for (int32_t i = 0; i < config.num_chunks; ++i) {
    inputs[i] = (int32_t)(next_random(seed) % 3), pre_activations[i] = pre_activation[1 + next_random(seed) % 3];
    if (rig->config.callback_experts) pre_activations[i] = SLUICE_RESTORE_RECOMPUTE;
  }
  if (config.num_chunks > 0 && next_random(seed) % 3 == 0) {
    config.restore_input_of = inputs, config.restore_pre_activation_of = pre_activations;
  }
  if (next_random(seed) % 2) config.memory_budget = 1u << 22;
  sluice_plan_t* plan = NULL;
  uint64_t bytes = MOST_BYTES;
  WORKS(sluice_plan_create(rig->moe, &config, &plan));
  WORKS(sluice_plan_write(plan, out, &bytes));
  sluice_plan_destroy(plan);
  return bytes;
}

static void change(unsigned char* data, uint64_t bytes, uint32_t* seed) {
  const uint32_t times = 1 + next_random(seed) % 3;
  for (uint32_t i = 0; i < times; ++i) {
    const uint64_t at = next_random(seed) % ((bytes - 8) / 4) * 4;
    uint32_t value = 0;
    memcpy(&value, data + at, 4);
    switch (next_random(seed) % 4) {
      case 0: value ^= 1u << next_random(seed) % 32; break;
      case 1: value = next_random(seed) % 8; break;
      case 2: value = (uint32_t)0 - next_random(seed) % 8; break;
      default: value = next_random(seed) << 8; break;
    }
    memcpy(data + at, &value, 4);
  }
}

/* In one of eight cases, truncates or extends the bytes. */
static uint64_t change_length(unsigned char* data, uint64_t bytes, uint32_t* seed) {
  const uint64_t more = 1 + next_random(seed) % 64;
  switch (next_random(seed) % 16) {
    case 0: return next_random(seed) % bytes;
    case 1:
      if (bytes + more > MOST_BYTES) return bytes;
      memset(data + bytes, (int)(next_random(seed) & 255), more);
      return bytes + more;
    default: return bytes;
  }
}

typedef struct outcome_s {
  int64_t refused, ran, over_budget;
} outcome_t;

/* Runs the layer under a plan that was read. */
static void run_under(rig_t* rig, const sluice_plan_t* plan, const float* want, outcome_t* outcome) {
  sluice_plan_info_t info = {.struct_size = sizeof info};
  WORKS(sluice_plan_get_info(plan, &info));
  assert_int_equal(info.total_bytes, info.base_bytes + info.slot_bytes + info.routing_bytes + info.schedule_bytes +
                                         info.header_bytes + info.gemm_bytes +
                                         (uint64_t)info.max_outstanding * info.step_bytes);
  if (info.total_bytes > RUN_UP_TO_BYTES || info.max_tokens < rig->num_tokens) return;
  sluice_status_t status = sluice_moe_use_plan(rig->moe, plan);
  if (status == SLUICE_OK) status = rig_round(rig, NULL);
  if (status == SLUICE_OK) {
    ++outcome->ran;
    assert_memory_equal(rig->out.tensor.data, want, rig->out.bytes);
  } else {
    if (status != SLUICE_E_OVER_BUDGET) fail_msg("%d: %s", status, last_message());
    ++outcome->over_budget;
  }
  WORKS(sluice_moe_use_plan(rig->moe, NULL));
}

static void damage(const sluice_moe_config_t* layer, int64_t inputs, uint32_t seed, outcome_t* outcome) {
  unsigned char plain[MOST_BYTES], bent[MOST_BYTES];
  float want[64];
  uint64_t bytes = 0;
  rig_t rig;
  WORKS(rig_open(&rig, NULL, layer));
  WORKS(rig_round(&rig, NULL));
  assert_true(rig.out.bytes <= sizeof want);
  memcpy(want, rig.out.tensor.data, rig.out.bytes);
  for (int64_t i = 0; i < inputs; ++i) {
    if (i % 50 == 0) bytes = random_plan(&rig, &seed, plain);
    memcpy(bent, plain, bytes);
    change(bent, bytes, &seed);
    const uint64_t length = change_length(bent, bytes, &seed);
    reseal(bent, length);
    unsigned char* exact = malloc(length); /* exact size, so that a sanitizer sees reads beyond it */
    memcpy(exact, bent, length);
    sluice_plan_t* plan = NULL;
    sluice_status_t status = sluice_plan_read(rig.moe, exact, length, &plan);
    free(exact);
    if (status == SLUICE_OK) {
      run_under(&rig, plan, want, outcome);
      sluice_plan_destroy(plan);
      continue;
    }
    ++outcome->refused;
    assert_null(plan);
    const char* says = last_message(); /* "FIELD is VALUE", or the number of bytes */
    if (strstr(says, " is ") == NULL && strstr(says, "a plan has") == NULL && strstr(says, "restore_") == NULL)
      fail_msg("%d, no field named: %s", status, says);
  }
  rig_close(&rig);
  assert_int_equal(atomic_load(&rig.heap.live_blocks), 0);
}

TEST(Plan_ChangedBytes_AreRefusedByNameOrPlansLikeOthers) {
  const int64_t inputs = getenv("SLUICE_FULL") != NULL ? 1000000 : 20000;
  outcome_t outcome = {0};
  sluice_moe_config_t own = rig_config(), capacity = rig_config(), host = rig_config();
  own.num_chunks = 0;
  capacity.exchange_mode = SLUICE_EXCHANGE_CAPACITY, capacity.capacity_rows = 6;
  host.callback_experts = 1, host.gated = host.bias = 0, host.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
  damage(&own, inputs / 2, 3, &outcome);
  damage(&capacity, inputs / 4, 5, &outcome);
  damage(&host, inputs / 4, 7, &outcome);
  printf("changed plans: %lld, refused by a field: %lld, run with the same results: %lld, over their budget: %lld\n",
         (long long)inputs, (long long)outcome.refused, (long long)outcome.ran, (long long)outcome.over_budget);
  assert_true(outcome.refused > inputs / 4 && outcome.ran > inputs / 100);
}

/* The plan limits the allocator only while the plan is in use. */
TEST(UsePlan_TakenBack_ItsLimitsAreTooAndLayersRunOn) {
  sluice_moe_config_t layer = rig_config();
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  sluice_plan_t* plan = NULL;
  rig_t rig;
  WORKS(rig_open(&rig, NULL, &layer));
  DEFAULTS(sluice_plan_config, config);
  config.max_tokens = rig.num_tokens, config.memory_budget = 1u << 20;
  WORKS(sluice_plan_create(rig.moe, &config, &plan));
  sluice_plan_info_t info = {.struct_size = sizeof info};
  WORKS(sluice_plan_get_info(plan, &info));
  sluice_plan_destroy(plan);
  config.memory_budget = info.total_bytes;
  WORKS(sluice_plan_create(rig.moe, &config, &plan));
  WORKS(sluice_moe_use_plan(rig.moe, plan));
  WORKS(rig_round(&rig, NULL));
  WORKS(sluice_context_get_stats(rig.context, 0, &stats));
  assert_int_equal(stats.planned_outstanding, 1);

  /* A second plan that cannot be used leaves the first in place. */
  sluice_plan_t* wider = NULL;
  config.max_tokens = 4096, config.memory_budget = 0, config.max_outstanding = 3;
  WORKS(sluice_plan_create(rig.moe, &config, &wider));
  atomic_store(&rig.heap.fail_at, atomic_load(&rig.heap.calls));
  assert_int_equal(sluice_moe_use_plan(rig.moe, wider), SLUICE_E_NO_MEMORY);
  atomic_store(&rig.heap.fail_at, -1);
  WORKS(sluice_context_get_stats(rig.context, 0, &stats));
  assert_int_equal(stats.planned_outstanding, 1);
  rig.num_tokens = 4096;
  REFUSED(rig_round(&rig, NULL), SLUICE_E_OVER_BUDGET, "this layer's plan is for at most 6");

  WORKS(sluice_moe_use_plan(rig.moe, NULL));
  WORKS(rig_round(&rig, NULL));
  WORKS(sluice_context_get_stats(rig.context, 0, &stats));
  assert_int_equal(stats.planned_outstanding, 0);
  assert_true(stats.peak_bytes > info.total_bytes);
  sluice_plan_destroy(plan);
  sluice_plan_destroy(wider);
  rig_close(&rig);
}

/* Destroying a layer removes the limits of its plan, even if a step is dropped later. */
TEST(UsePlan_LayerDestroyed_ItsLimitsGoToo) {
  sluice_moe_config_t layer = rig_config();
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
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
  WORKS(sluice_context_get_stats(rig.context, 0, &stats));
  assert_int_equal(stats.planned_outstanding, 1);
  sluice_moe_destroy(rig.moe);
  WORKS(sluice_context_get_stats(rig.context, 0, &stats));
  assert_int_equal(stats.planned_outstanding, 0);
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
