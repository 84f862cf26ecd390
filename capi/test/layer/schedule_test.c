// SPDX-License-Identifier: Apache-2.0
/* Schedules through the public handle: their contents as JSON, predictions, and errors. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/test/refused.h"
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

/* Ops take their seconds, and the prediction ends with the last one. */
TEST(Predict_HalfSpeedDuringOthers_TakesLonger) {
  sluice_schedule_config_t config = config_of(SLUICE_FORWARD, 4, 0, 0);
  sluice_schedule_t* schedule = made(&config);
  int32_t num_ops = sluice_schedule_num_ops(schedule);
  double seconds[64], share[64], begin[64], end[64], last = 0;
  assert_true(num_ops <= 64);
  for (int32_t i = 0; i < 64; ++i) seconds[i] = 1, share[i] = 0.5;
  for (int32_t lane = 0; lane < 4; ++lane) share[lane * 16 + (1 << lane)] = 1; /* alone */
  sluice_schedule_prediction_t alone = {.struct_size = sizeof alone}, slowed = {.struct_size = sizeof slowed};
  WORKS(sluice_schedule_predict(schedule, seconds, NULL, begin, end, &alone));
  for (int32_t i = 0; i < num_ops; ++i) {
    assert_true(end[i] - begin[i] == seconds[i]);
    last = end[i] > last ? end[i] : last;
  }
  double busy = 0;
  for (int32_t lane = 0; lane < SLUICE_SCHEDULE_LANES; ++lane) busy += alone.busy_seconds[lane];
  assert_true(last == alone.seconds && busy == num_ops);
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
#define REFUSES(change, status, text) \
  bad = good, change;                 \
  expect(&bad, status, text)
  REFUSES(bad.num_chunks = 257, BAD, "num_chunks is 257");
  REFUSES(bad.direction = 2, BAD, "direction is 2");
  REFUSES(bad.gated = 2, BAD, "gated is 2");
  REFUSES(bad.wgrad_mode = -1, BAD, "wgrad_mode is -1");
  REFUSES(bad.restore_input = 3, BAD, "restore_input of chunk 0 is 3");
  REFUSES(bad.restore_pre_activation = 2, BAD, "restore_pre_activation of chunk 0 is 2");
  REFUSES(bad.grouped = 2, BAD, "grouped is 2");
  REFUSES(bad.grouped = bad.single_rank = 1, SLUICE_E_UNSUPPORTED, "grouped is 1; only whole passes");
  REFUSES((bad.grouped = 1, bad.deduplicate = SLUICE_DEDUPLICATE_NODES), SLUICE_E_UNSUPPORTED,
          "grouped is 1; only whole passes of several ranks and one level");
  REFUSES(bad.chunks_by_experts = 2, BAD, "chunks_by_experts is 2");
  REFUSES(bad.chunks_by_experts = bad.under_plan = 1, SLUICE_E_UNSUPPORTED, "chunks_by_experts is for whole passes");
  REFUSES(bad.deduplicate = 3, BAD, "deduplicate is 3");
  REFUSES(bad.deduplicate = bad.single_rank = 1, SLUICE_E_UNSUPPORTED, "dedup is 1");
  REFUSES(bad.struct_size = 8, SLUICE_E_ABI, "sluice_schedule_config_t");
  REFUSES((bad.callback_experts = 1, bad.restore_pre_activation = SLUICE_RESTORE_OFFLOAD), SLUICE_E_UNSUPPORTED,
          "callback experts");
  REFUSES((bad.direction = SLUICE_BACKWARD, bad.dgrad = 0, bad.wgrad = 0), BAD, "dgrad, wgrad or both");
  expect(NULL, BAD, "sluice_schedule_config_t");
}
