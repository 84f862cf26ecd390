// SPDX-License-Identifier: Apache-2.0
/* Untrusted JSON texts: text and object sizes are limited, and member names are compared completely. */
#include "backend/base/json.h"

#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>

#include "backend/base/test/refused.h"

#define GIB (UINT64_C(1) << 30)

static void refuses(const char* text, uint64_t length, const char* why) {
  sluice_json_tree_t tree;
  REFUSED(sluice_json_parse(text, length, "a test", &tree), SLUICE_E_INVALID_ARGUMENT, why);
  assert_null(tree.nodes);
}

/* Writes {"0":0,"1":0, ...} with `count` members. Returns its length. */
static uint64_t write_members(char* out, uint64_t room, int count) {
  uint64_t used = (uint64_t)snprintf(out, room, "{");
  for (int i = 0; i < count; ++i) used += (uint64_t)snprintf(out + used, room - used, "%s\"%d\":0", i ? "," : "", i);
  return used + (uint64_t)snprintf(out + used, room - used, "}");
}

TEST(Json_ObjectOfManyMembers_IsReadUpToALimit) {
  char text[8192];
  sluice_json_tree_t tree;
  const uint64_t most = write_members(text, sizeof text, 256);
  assert_int_equal(sluice_json_parse(text, most, "a test", &tree), SLUICE_OK);
  assert_int_equal(tree.nodes[0].count, 256);
  assert_non_null(sluice_json_member(&tree.nodes[0], "255"));
  sluice_json_free(&tree);
  refuses(text, write_members(text, sizeof text, 257), "this object has too many members");
}

/* A longer text could hold a string whose length overflows int32_t. */
TEST(Json_LongText_IsRefusedUnread) {
  char* text = mmap(NULL, 3 * GIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  assert_true(text != MAP_FAILED);
  text[0] = '"';
  refuses(text, 3 * GIB, "the text has 3221225472 bytes; at most 16777216 are read");
  munmap(text, 3 * GIB);
}

TEST(Json_MembersOfOneName_AreRefused) {
  static const char twice[] = "{\"ab\": 1, \"a\": 2, \"ab\": 3}", once[] = "{\"ab\": 1, \"a\": 2, \"abc\": 3}";
  sluice_json_tree_t tree;
  refuses(twice, sizeof twice - 1, "two members of this name");
  assert_int_equal(sluice_json_parse(once, sizeof once - 1, "a test", &tree), SLUICE_OK);
  assert_true(sluice_json_member(&tree.nodes[0], "abc")->number == 3);
  sluice_json_free(&tree);
}
