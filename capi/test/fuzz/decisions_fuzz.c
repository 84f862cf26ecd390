// SPDX-License-Identifier: Apache-2.0
/* Fuzzes decisions of a tuner: they are accepted completely or not at all, and accepted ones write back the same. */
#include <string.h>

#include "backend/tune/decisions_json.h"
#include "third_party/fuzz/target.h"

static void begin(sluice_tuner_t* tuner) {
  memset(tuner, 0, sizeof *tuner);
  tuner->allocator = sluice_process_allocator();
}

static void end(sluice_tuner_t* tuner) {
  sluice_free(tuner->allocator, tuner->imports, (uint64_t)tuner->max_imports * sizeof *tuner->imports);
}

static char* written(const sluice_tuner_t* tuner, uint64_t* out_length) {
  *out_length = sluice_tuner_write(tuner, NULL, 0);
  char* text = malloc(*out_length + 1);
  FUZZ_CHECK(text != NULL && sluice_tuner_write(tuner, text, *out_length + 1) == *out_length);
  return text;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static sluice_tuner_t tuner, again;
  uint64_t length = 0, length_again = 0;
  begin(&tuner);
  if (sluice_tuner_read(&tuner, (const char*)data, size) != SLUICE_OK) {
    FUZZ_CHECK(tuner.num_imports == 0);
    end(&tuner);
    return 0;
  }
  ++fuzz_num_taken;
  begin(&again);
  char* text = written(&tuner, &length);
  FUZZ_CHECK(sluice_tuner_read(&again, text, length) == SLUICE_OK);
  FUZZ_CHECK(again.num_imports == tuner.num_imports);
  char* text_again = written(&again, &length_again);
  FUZZ_CHECK(length == length_again && memcmp(text, text_again, length) == 0);
  /* Decisions that are read again are added to the existing ones. */
  FUZZ_CHECK(sluice_tuner_read(&again, text, length) == SLUICE_OK);
  FUZZ_CHECK(again.num_imports == 2 * tuner.num_imports);
  free(text), free(text_again);
  end(&tuner), end(&again);
  return 0;
}
