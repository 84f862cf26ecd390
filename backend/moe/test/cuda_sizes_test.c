// SPDX-License-Identifier: Apache-2.0
/* Batches of several sizes under a budget of device memory, on the fakes: each size has its own plan, and all steps use
 * the same blocks. */

#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/moe/step/step.h"
#include "capi/test/cuda/fakes.h"
#include "capi/test/rig/rig.h"
#include "sluice/planner.h"
#include "sluice/tuner.h"
#include "third_party/bazel/test.h"

enum { MORE_BYTES = 24000 }; /* a twelfth of the rows of the largest batches */
enum { MOST = 256, SIZES = 3, ROUNDS = 8 * SIZES, WARM = 2 * SIZES };
static const int64_t sizes[SIZES] = {MOST, MOST / 8, MOST / 2};

static void open_rig(rig_t* rig, uint64_t budget, uint64_t host_budget, int32_t separate_wgrad) {
  const world_machine_t* machine = fakes_machine();
  sluice_moe_config_t layer = rig_config();
  layer.model_width = 16, layer.hidden_width = 64, layer.num_chunks = 0;
  layer.restore_input = layer.restore_pre_activation = SLUICE_RESTORE_ADAPTIVE;
  layer.wgrad_mode = SLUICE_WGRAD_ADAPTIVE;
  fakes_open(1, 1);
  rig_use_machine(machine, 0);
  assert_int_equal(rig_open_context(rig, NULL), SLUICE_OK);
  sluice_context_destroy(rig->context);
  DEFAULTS(sluice_context_config, config);
  config.device_type = machine->device_type, config.device_id = machine->device_id(0);
  config.memory_budget = budget, config.host_memory_budget = host_budget, config.max_outstanding = 1;
  config.separate_wgrad = separate_wgrad;
  assert_int_equal(machine->make_context(0, &config, NULL, &rig->context), SLUICE_OK);
  DEFAULTS(sluice_tuner_config, tuner);
  sluice_planner_t* planner = NULL;
  assert_int_equal(sluice_planner_create(fakes_machine_json, strlen(fakes_machine_json), &planner), SLUICE_OK);
  tuner.mode = SLUICE_TUNER_MODEL, tuner.machine = planner; /* takes the cheapest plan of each size at once */
  assert_int_equal(sluice_context_tune(rig->context, &tuner), SLUICE_OK);
  sluice_planner_destroy(planner);
  if (rig_open_layer(rig, &layer) != SLUICE_OK) fail_msg("%s", last_message());
}

static void close_rig(rig_t* rig) {
  char live[200], hazard[200];
  rig_close(rig);
  if (sluice_fake_cuda_hazards(hazard, sizeof hazard) != 0) fail_msg("hazard: %s", hazard);
  if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
  rig_use_machine(NULL, 0);
}

/* Addresses of what a step holds. */
typedef struct places_s {
  const void *rows, *pool; /* on the device, and in the host pool */
  const void* deferred[SLUICE_NUM_DEFERRED];
} places_t;

static sluice_status_t run_halves(rig_t* rig, sluice_step_t* step, places_t* out_places) {
  rig->backward.parts = SLUICE_BACKWARD_DGRAD;
  sluice_status_t status = rig_backward(rig, step);
  for (int i = 0; i < SLUICE_NUM_DEFERRED; ++i) out_places->deferred[i] = step->deferred[sluice_deferred_tensors[i]];
  rig->backward.parts = SLUICE_BACKWARD_WGRAD;
  return status == SLUICE_OK ? rig_backward(rig, step) : status;
}

/* Runs a step with this number of tokens. */
static sluice_status_t run_step(rig_t* rig, int64_t tokens, int32_t separate_wgrad, places_t* out_places) {
  sluice_step_t* step = NULL;
  rig->num_tokens = tokens;
  rig_reset(rig);
  memset(out_places, 0, sizeof *out_places);
  sluice_status_t status = rig_forward(rig, &step);
  if (status != SLUICE_OK) return status;
  out_places->rows = step->saved[SLUICE_SAVED_INPUT];
  out_places->pool = step->saved[SLUICE_SAVED_HOST_INPUT] != NULL ? step->saved[SLUICE_SAVED_HOST_INPUT]
                                                                  : step->saved[SLUICE_SAVED_HOST_PRE_ACTIVATION];
  status = separate_wgrad ? run_halves(rig, step, out_places) : rig_backward(rig, step);
  sluice_step_drop(step);
  fakes_machine()->settle(0);
  sluice_fake_cuda_forget_accesses();
  return status;
}

static uint64_t smallest_budget(int32_t separate_wgrad) {
  rig_t rig;
  places_t places;
  unsigned long long needs = 0;
  open_rig(&rig, 1, 0, separate_wgrad);
  assert_int_equal(run_step(&rig, MOST, separate_wgrad, &places), SLUICE_E_OVER_BUDGET);
  const char* text = strstr(last_message(), ") needs ");
  assert_non_null(text);
  assert_int_equal(sscanf(text, ") needs %llu", &needs), 1);
  close_rig(&rig);
  return needs;
}

typedef struct answer_s {
  int32_t num_chunks;
  sluice_tuner_policy_t policy;
} answer_t;

/* The newest decision for batches of this number of tokens. */
static answer_t answer_for(const rig_t* rig, int64_t tokens) {
  sluice_tuner_decision_t decisions[32];
  sluice_tuner_policy_t policies[32];
  int32_t count = 0;
  assert_int_equal(sluice_context_decisions(rig->context, decisions, 32, &count), SLUICE_OK);
  assert_int_equal(sluice_context_decided_policies(rig->context, policies, 32, &count), SLUICE_OK);
  for (int32_t i = count - 1; i >= 0; --i) {
    const int64_t rows = tokens * rig->config.top_k;
    if (decisions[i].rows > rows * 3 / 4 && decisions[i].rows <= rows * 3 / 2) {
      return (answer_t){decisions[i].num_chunks, policies[i]};
    }
  }
  fail_msg("no decision for batches of %lld tokens", (long long)tokens);
  return (answer_t){0};
}

static int keeps_input(const answer_t* a) { return a->policy.restore_input == SLUICE_RESTORE_KEEP; }

/* Small batches keep rows that the largest cannot, in fewer chunks, and in the same blocks. With separate weight
 * gradients the largest batches' rows fit too. */
static void check_sizes(int32_t separate_wgrad) {
  const uint64_t least = smallest_budget(separate_wgrad);
  int32_t num_unlike = 0;
  for (uint64_t more = 0; more < 5; ++more) {
    rig_t rig;
    places_t places, before = {0};
    open_rig(&rig, least + more * MORE_BYTES, more == 4 ? least : 0, separate_wgrad);
    int32_t num_moved = 0;
    for (int32_t i = 0; i < ROUNDS; ++i) {
      if (run_step(&rig, sizes[i % SIZES], separate_wgrad, &places) != SLUICE_OK) fail_msg("%s", last_message());
      if (i >= WARM) {
        num_moved += places.rows != before.rows;
        num_moved += memcmp(places.deferred, before.deferred, sizeof places.deferred) != 0;
      }
      before = places;
    }
    sluice_context_stats_t stats = {.struct_size = sizeof stats};
    assert_int_equal(sluice_context_get_stats(rig.context, 0, &stats), SLUICE_OK);
    assert_true(stats.peak_bytes <= least + more * MORE_BYTES);
    const answer_t large = answer_for(&rig, sizes[0]), small = answer_for(&rig, sizes[1]);
    printf(
        "%llu bytes over the least: n %d, T_DI %d, T_M %d of %d tokens; n %d, T_DI %d, T_M %d of %d; blocks moved "
        "%d times\n",
        (unsigned long long)more * MORE_BYTES, large.num_chunks, large.policy.restore_input,
        large.policy.restore_pre_activation, MOST, small.num_chunks, small.policy.restore_input,
        small.policy.restore_pre_activation, MOST / 8, num_moved);
    assert_int_equal(num_moved, 0);
    num_unlike += keeps_input(&small) && keeps_input(&large) == separate_wgrad && small.num_chunks < large.num_chunks;
    close_rig(&rig);
  }
  assert_true(num_unlike > 0);
}

TEST(CudaSizes_UnderABudget_EachHasItsPlanInTheSameBlock) { check_sizes(0); }

/* Gradient rows between dgrad and wgrad also lie in blocks that serve the plans of all sizes. */
TEST(CudaSizes_SeparateWgrad_EachHasItsPlanInTheSameBlocks) { check_sizes(1); }
