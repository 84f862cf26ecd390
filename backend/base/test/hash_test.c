// SPDX-License-Identifier: Apache-2.0
/* The hash equals the published values of FNV-1a, in one piece and in several. */
#include "backend/base/hash.h"

#include "third_party/bazel/test.h"

/* Files (plans, schedules, machines) contain this hash: the values are FNV-1a's own test vectors. */
TEST(Hash_OfKnownTexts_IsFnv1a) {
  const struct {
    const char* text;
    uint64_t hash;
  } known[] = {
      {"", 0xcbf29ce484222325u},
      {"a", 0xaf63dc4c8601ec8cu},
      {"foobar", 0x85944171f73967e8u},
      {"chongo was here!\n", 0x46810940eff5f915u},
  };
  for (size_t i = 0; i < sizeof known / sizeof known[0]; ++i) {
    uint64_t hash = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, known[i].text, strlen(known[i].text));
    assert_true(hash == known[i].hash);
  }
}

TEST(Hash_InPieces_IsThatOfTheWhole) {
  const char* text = "foobar";
  for (size_t cut = 0; cut <= 6; ++cut) {
    uint64_t hash = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, text, cut);
    assert_true(sluice_hash_bytes(hash, text + cut, 6 - cut) == 0x85944171f73967e8u);
  }
}
