// SPDX-License-Identifier: Apache-2.0
/* Wrong input of the tuner is refused by name, and no part of it is used. */
#include <stdint.h>
#include <string.h>

#include "backend/base/test/refused.h"
#include "sluice/sluice.h"

TEST(BadDecisions_AreRefusedByName) {
  static const char* const cases[][2] = {
      {"[]", "the outermost value must be an object"},
      {"{\"answers\": []}", "begin with \"sluice_decisions\": 3"},
      {"{\"sluice_decisions\": 4, \"answers\": []}", "format version 4; this library reads versions 1 and 3"},
      {"{\"sluice_decisions\": 2, \"answers\": []}", "format version 2; this library reads versions 1 and 3"},
      {"{\"sluice_decisions\": 1}", "must be \"answers\""},
#define ANSWER(text) "{\"sluice_decisions\": 1, \"answers\": [" text "]}"
      {ANSWER("3"), "answer 0 must be an object"},
      {ANSWER("{\"n\": 3}"), "unknown field \"n\" in answer 0"},
      {ANSWER("{\"layer\": \"12\", \"rows\": 1, \"num_chunks\": 1}"), "layer of answer 0"},
      {ANSWER("{\"layer\": \"zz23456789abcdef\", \"rows\": 1, \"num_chunks\": 1}"), "layer of answer 0"},
      {ANSWER("{\"layer\": \"0123456789abcdef\", \"rows\": 0, \"num_chunks\": 1}"), "rows of answer 0"},
      {ANSWER("{\"layer\": \"0123456789abcdef\", \"rows\": 9, \"num_chunks\": 2.5}"), "num_chunks of answer 0 is 2.5"},
      {ANSWER("{\"layer\": \"0123456789abcdef\", \"rows\": 9, \"num_chunks\": 4, \"wgrad_mode\": 1}"), "wgrad_mode"},
#define PLAN(rest) ANSWER("{\"layer\": \"0123456789abcdef\", \"rows\": 9, \"num_chunks\": " rest "}")
      {PLAN("4, \"restore_input\": \"keep\""), "restore_pre_activation of answer 0"},
      {PLAN("4, \"restore_input\": \"recompute\", \"restore_pre_activation\": \"keep\""), "restore_input of answer 0"},
      {PLAN("4, \"restore_input\": \"keep\", \"restore_pre_activation\": 3"), "restore_pre_activation of answer 0"},
      {PLAN("300, \"restore_input\": \"keep\", \"restore_pre_activation\": \"keep\""), "num_chunks of answer 0 is 300"},
      {PLAN("4, \"deduplicate\": \"any\""), "deduplicate of answer 0 must be \"none\", \"ranks\" or \"nodes\""},
      {PLAN("4, \"deduplicate\": 1"), "deduplicate of answer 0"},
      {PLAN("4, \"grouped\": true"), "grouped of answer 0"},
      {PLAN("4, \"deduplicate\": \"none\", \"grouped\": 1"), "grouped of answer 0"},
      {PLAN("4, \"restore_input\": \"keep\", \"restore_pre_activation\": \"keep\", \"deduplicate\": \"none\""),
       "answer 0 has deduplicate and policies"},
  };
  DEFAULTS(sluice_context_config, config);
  config.gemm = "ref";
  sluice_context_t* context = NULL;
  assert_int_equal(sluice_context_create(&config, NULL, &context), SLUICE_OK);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    assert_int_equal(sluice_context_read_decisions(context, cases[i][0], strlen(cases[i][0])),
                     SLUICE_E_INVALID_ARGUMENT);
    if (strstr(last_message(), cases[i][1]) == NULL) fail_msg("%s: says %s", cases[i][0], last_message());
  }
  char text[256];
  uint64_t bytes = sizeof text;
  assert_int_equal(sluice_context_write_decisions(context, text, &bytes), SLUICE_OK);
  assert_string_equal(text, "{\"sluice_decisions\": 3, \"answers\": []}\n"); /* no answer was imported */
  REFUSED(sluice_context_write_machine(context, text, &bytes), SLUICE_E_STATE, "has no machine; pass one");
  assert_int_equal(sluice_context_write_machine(context, text, NULL), SLUICE_E_INVALID_ARGUMENT);
  sluice_context_destroy(context);
}

TEST(BadConfig_IsRefusedByName) {
  DEFAULTS(sluice_context_config, context_config);
  sluice_context_t* context = NULL;
  assert_int_equal(sluice_context_create(&context_config, NULL, &context), SLUICE_OK);
  DEFAULTS(sluice_tuner_config, c);
  assert_int_equal(sluice_context_tune(context, &c), SLUICE_OK);
  c.mode = 3;
  REFUSED(sluice_context_tune(context, &c), BAD, "mode is 3");
  c.mode = SLUICE_TUNER_MODEL;
  REFUSED(sluice_context_tune(context, &c), BAD, "needs a machine");
  c.mode = 0, c.reserved = 1;
  REFUSED(sluice_context_tune(context, &c), BAD, "reserved");
  int32_t count = -1;
  assert_int_equal(sluice_context_decisions(context, NULL, 1, &count), SLUICE_E_INVALID_ARGUMENT);
  assert_int_equal(sluice_context_decisions(context, NULL, 0, &count), SLUICE_OK);
  assert_int_equal(count, 0);
  sluice_tuner_stats_t stats = {.struct_size = 0};
  assert_int_equal(sluice_context_tuner_stats(context, &stats), SLUICE_E_ABI);
  sluice_context_destroy(context);
}
