// SPDX-License-Identifier: Apache-2.0
/* Schedules through the public handle: their contents as JSON, predictions, and errors. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/test/refused.h"
#include "backend/cost/closed_forms.h"
#include "sluice/sluice.h"

static sluice_schedule_config_t config_of(int32_t direction, int32_t n, int32_t input, int32_t pre_activation) {
  DEFAULTS(sluice_schedule_config, config);
  config.direction = direction, config.num_chunks = n;
  config.restore_input = input, config.restore_pre_activation = pre_activation;
  return config;
}

static sluice_schedule_t* made(const sluice_schedule_config_t* config) {
  sluice_schedule_t* schedule = NULL;
  if (sluice_schedule_create(config, &schedule) != SLUICE_OK) {
    fail_msg("%s", last_message());
  }
  return schedule;
}

static char* json_of(const sluice_schedule_t* schedule) {
  uint64_t bytes = 0;
  WORKS(sluice_schedule_json(schedule, NULL, &bytes));
  char* text = malloc(bytes);
  WORKS(sluice_schedule_json(schedule, text, &bytes));
  assert_int_equal(strlen(text) + 1, bytes);
  return text;
}

/* Returns whether op `index` is of `kind`. The text has one op per line. */
static int is_kind(const char* text, int32_t index, const char* kind) {
  char wanted[96];
  snprintf(wanted, sizeof wanted, "{\"op\": %d, \"kind\": \"%s\"", index, kind);
  return strstr(text, wanted) != NULL;
}

static void expect(const sluice_schedule_config_t* config, sluice_status_t status, const char* text) {
  sluice_schedule_t* schedule = (sluice_schedule_t*)&schedule;
  assert_int_equal(sluice_schedule_create(config, &schedule), status);
  assert_null(schedule);
  if (strstr(last_message(), text) == NULL) fail_msg("\"%s\" lacks \"%s\"", last_message(), text);
}

TEST(Json_EveryPolicy_HasEachOpOnce) {
  for (int32_t direction = 0; direction < 2; ++direction) {
    for (int32_t policy = 0; policy < 9; ++policy) {
      const int32_t pre_activations[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE};
      sluice_schedule_config_t config = config_of(direction, 4, policy / 3, pre_activations[policy % 3]);
      sluice_schedule_t* schedule = made(&config);
      char* text = json_of(schedule);
      int32_t ops = 0;
      for (const char* at = text; (at = strstr(at, "{\"op\": ")) != NULL; ++at) ++ops;
      assert_int_equal(ops, sluice_schedule_num_ops(schedule));
      int offloads = policy / 3 == SLUICE_RESTORE_OFFLOAD || pre_activations[policy % 3] == SLUICE_RESTORE_OFFLOAD;
      assert_int_equal(strstr(text, direction ? "\"kind\": \"copy_in\"" : "\"kind\": \"copy_out\"") != NULL, offloads);
      assert_int_equal(direction == SLUICE_BACKWARD && policy / 3 == SLUICE_RESTORE_REDISPATCH,
                       strstr(text, "\"kind\": \"redispatch\"") != NULL);
      free(text);
      sluice_schedule_destroy(schedule);
    }
  }
}

TEST(Json_PoliciesByChunk_StandInTheText) {
  const int32_t input[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_REDISPATCH};
  const int32_t pre_activation[] = {SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE};
  sluice_schedule_config_t config = config_of(SLUICE_BACKWARD, 2, 0, 0);
  config.restore_input_of = input, config.restore_pre_activation_of = pre_activation;
  sluice_schedule_t* schedule = made(&config);
  char* text = json_of(schedule);
  assert_non_null(strstr(text, "\"restore_input\": [\"keep\", \"redispatch\"]"));
  assert_non_null(strstr(text, "\"restore_pre_activation\": [\"offload\", \"recompute\"]"));
  uint64_t small = 10;
  char room[10];
  assert_int_equal(sluice_schedule_json(schedule, room, &small), SLUICE_E_INVALID_ARGUMENT);
  free(text);
  sluice_schedule_destroy(schedule);
}

/* The table of restore policies, whose contents the package tests, is complete or refused. */
TEST(RestorePolicies_AsJson_AreWholeOrRefused) {
  uint64_t bytes = 0;
  assert_int_equal(sluice_restore_policies_json(NULL, NULL), SLUICE_E_INVALID_ARGUMENT);
  WORKS(sluice_restore_policies_json(NULL, &bytes));
  char* text = malloc(bytes + 1);
  memset(text, '#', bytes + 1);
  uint64_t room = bytes - 1;
  assert_int_equal(sluice_restore_policies_json(text, &room), SLUICE_E_INVALID_ARGUMENT);
  assert_true(room == bytes && text[0] == '#');
  WORKS(sluice_restore_policies_json(text, &room));
  assert_true(strlen(text) + 1 == bytes && text[bytes] == '#');
  free(text);
}

/* S4 reuses slots and has no copies, so it follows MPMoE's paradigm 1, exactly for integer times. */
TEST(Predict_S4Forward_EqualsTheClosedForm) {
  const sluice_alphas_t alone = sluice_no_interference();
  for (int32_t n = 1; n <= 16; ++n) {
    sluice_schedule_config_t config = config_of(SLUICE_FORWARD, n, SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_RECOMPUTE);
    sluice_schedule_t* schedule = made(&config);
    char* text = json_of(schedule);
    const sluice_chunk_times_t times = {3 + n, 7, 5, 0};
    int32_t num_ops = sluice_schedule_num_ops(schedule);
    double* seconds = calloc((size_t)num_ops, sizeof *seconds);
    double* begin = calloc((size_t)num_ops, sizeof *begin);
    double* end = calloc((size_t)num_ops, sizeof *end);
    for (int32_t i = 0; i < num_ops; ++i) {
      if (is_kind(text, i, "dispatch")) seconds[i] = times.dispatch;
      if (is_kind(text, i, "gemm1")) seconds[i] = times.compute;
      if (is_kind(text, i, "combine")) seconds[i] = times.combine;
    }
    sluice_schedule_prediction_t p = {.struct_size = sizeof p};
    WORKS(sluice_schedule_predict(schedule, seconds, NULL, begin, end, &p));
    assert_true(p.seconds == sluice_mpmoe_pass(SLUICE_PARADIGM_NO_COPIES, n, times, &alone));
    assert_true(p.busy_seconds[SLUICE_LANE_COMPUTE] == n * times.compute);
    assert_true(p.busy_seconds[SLUICE_LANE_COMM] == n * (times.dispatch + times.combine));
    double last = 0;
    for (int32_t i = 0; i < num_ops; ++i) {
      assert_true(end[i] - begin[i] == seconds[i]);
      if (end[i] > last) last = end[i];
    }
    assert_true(last == p.seconds);
    free(seconds), free(begin), free(end), free(text);
    sluice_schedule_destroy(schedule);
  }
}

TEST(Predict_HalfSpeedDuringOthers_TakesLonger) {
  sluice_schedule_config_t config = config_of(SLUICE_FORWARD, 4, 0, 0);
  sluice_schedule_t* schedule = made(&config);
  int32_t num_ops = sluice_schedule_num_ops(schedule);
  double seconds[64], share[64];
  assert_true(num_ops <= 64);
  for (int32_t i = 0; i < 64; ++i) seconds[i] = 1, share[i] = 0.5;
  for (int32_t lane = 0; lane < 4; ++lane) share[lane * 16 + (1 << lane)] = 1; /* alone */
  sluice_schedule_prediction_t alone = {.struct_size = sizeof alone}, slowed = {.struct_size = sizeof slowed};
  WORKS(sluice_schedule_predict(schedule, seconds, NULL, NULL, NULL, &alone));
  WORKS(sluice_schedule_predict(schedule, seconds, share, NULL, NULL, &slowed));
  assert_true(slowed.seconds > 1.2 * alone.seconds);
  sluice_schedule_destroy(schedule);
}

TEST(Predict_BadNumbers_AreNamed) {
  sluice_schedule_config_t config = config_of(SLUICE_FORWARD, 1, 0, 0);
  sluice_schedule_t* schedule = made(&config);
  double seconds[16] = {0}, share[64] = {0};
  sluice_schedule_prediction_t p = {.struct_size = sizeof p};
  seconds[2] = -1;
  REFUSED(sluice_schedule_predict(schedule, seconds, NULL, NULL, NULL, &p), BAD,
          "op_seconds[2] (gemm1 of chunk 0) is -1");
  seconds[2] = 0, share[17] = 1.5;
  REFUSED(sluice_schedule_predict(schedule, seconds, share, NULL, NULL, &p), BAD, "share[1][1] is 1.5");
  p.struct_size = 0;
  assert_int_equal(sluice_schedule_predict(schedule, seconds, NULL, NULL, NULL, &p), SLUICE_E_ABI);
  sluice_schedule_destroy(schedule);
}

/* Route weights arrive with a chunk's rows and are kept until its combine. */
TEST(Json_Deduplicated_HasASlotOfWeightsForEachChunkOnItsWay) {
  for (int32_t direction = 0; direction < 2; ++direction) {
    sluice_schedule_config_t config = config_of(direction, 4, SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_RECOMPUTE);
    config.deduplicate = 1;
    sluice_schedule_t* schedule = made(&config);
    char* text = json_of(schedule);
    assert_non_null(strstr(text, "\"dedup\": 1"));
    assert_int_equal(strstr(text, "\"T_COPY_WEIGHTS\": 2") != NULL, direction == SLUICE_FORWARD);
    free(text);
    sluice_schedule_destroy(schedule);
  }
}

TEST(Create_BadConfig_IsNamed) {
  sluice_schedule_config_t good = config_of(SLUICE_FORWARD, 4, 0, 0), bad;
  bad = good, bad.num_chunks = 257, expect(&bad, SLUICE_E_INVALID_ARGUMENT, "num_chunks is 257");
  bad = good, bad.direction = 2, expect(&bad, SLUICE_E_INVALID_ARGUMENT, "direction is 2");
  bad = good, bad.gated = 2, expect(&bad, SLUICE_E_INVALID_ARGUMENT, "gated is 2");
  bad = good, bad.wgrad_mode = -1, expect(&bad, SLUICE_E_INVALID_ARGUMENT, "wgrad_mode is -1");
  bad = good, bad.restore_input = 3, expect(&bad, SLUICE_E_INVALID_ARGUMENT, "restore_input of chunk 0 is 3");
  bad = good, bad.restore_pre_activation = 2,
  expect(&bad, SLUICE_E_INVALID_ARGUMENT, "restore_pre_activation of chunk 0 is 2");
  bad = good, bad.grouped = 2, expect(&bad, SLUICE_E_INVALID_ARGUMENT, "grouped is 2");
  bad = good, bad.grouped = bad.single_rank = 1, expect(&bad, SLUICE_E_UNSUPPORTED, "grouped is 1; only whole passes");
  bad = good, bad.grouped = 1, bad.deduplicate = SLUICE_DEDUPLICATE_NODES,
  expect(&bad, SLUICE_E_UNSUPPORTED, "grouped is 1; only whole passes of several ranks and one level");
  bad = good, bad.chunks_by_experts = 2, expect(&bad, SLUICE_E_INVALID_ARGUMENT, "chunks_by_experts is 2");
  bad = good, bad.chunks_by_experts = bad.under_plan = 1,
  expect(&bad, SLUICE_E_UNSUPPORTED, "chunks_by_experts is for whole passes");
  bad = good, bad.deduplicate = 3, expect(&bad, SLUICE_E_INVALID_ARGUMENT, "deduplicate is 3");
  bad = good, bad.deduplicate = bad.single_rank = 1, expect(&bad, SLUICE_E_UNSUPPORTED, "dedup is 1");
  bad = good, bad.struct_size = 8, expect(&bad, SLUICE_E_ABI, "sluice_schedule_config_t");
  bad = good, bad.callback_experts = 1, bad.restore_pre_activation = SLUICE_RESTORE_OFFLOAD;
  expect(&bad, SLUICE_E_UNSUPPORTED, "callback experts");
  bad = config_of(SLUICE_BACKWARD, 4, 0, 0), bad.dgrad = 0, bad.wgrad = 0;
  expect(&bad, SLUICE_E_INVALID_ARGUMENT, "dgrad, wgrad or both");
  expect(NULL, SLUICE_E_INVALID_ARGUMENT, "sluice_schedule_config_t");
}
