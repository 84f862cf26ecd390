// SPDX-License-Identifier: Apache-2.0
/* The table of restore policies through the public function. */

#include "sluice/sluice.h"
#include "third_party/bazel/test.h"

/* backend/model tests the contents of the table. This test checks that it is complete and fits the given buffer. */
TEST(RestorePolicies_AsJson_AreWholeOrRefused) {
  uint64_t bytes = 0;
  assert_int_equal(sluice_restore_policies_json(NULL, NULL), SLUICE_E_INVALID_ARGUMENT);
  assert_int_equal(sluice_restore_policies_json(NULL, &bytes), SLUICE_OK);
  char* text = malloc(bytes + 1);
  memset(text, '#', bytes + 1);
  uint64_t room = bytes - 1;
  assert_int_equal(sluice_restore_policies_json(text, &room), SLUICE_E_INVALID_ARGUMENT);
  assert_true(room == bytes && text[0] == '#');
  assert_int_equal(sluice_restore_policies_json(text, &room), SLUICE_OK);
  assert_true(strlen(text) + 1 == bytes && text[bytes] == '#');
  assert_non_null(strstr(text,
                         "{\"name\": \"redispatch\", \"number\": 2, \"input\": true, \"pre_activation\": false, "
                         "\"device_rows\": 0, \"host_rows\": 0, \"exchanges\": 1, \"gemms\": 0}"));
  assert_non_null(strstr(text, "{\"name\": \"S3\", \"input\": \"offload\", \"pre_activation\": \"recompute\"}"));
  free(text);
}
