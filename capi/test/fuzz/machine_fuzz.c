// SPDX-License-Identifier: Apache-2.0
/* Machine profiles: a valid one writes back and reads as the same. */
#include <string.h>

#include "backend/cost/machine.h"
#include "third_party/fuzz/target.h"

static char* written(const sluice_machine_t* machine, uint64_t* out_length) {
  *out_length = sluice_machine_write(machine, NULL, 0);
  char* text = malloc(*out_length + 1);
  FUZZ_CHECK(text != NULL && sluice_machine_write(machine, text, *out_length + 1) == *out_length);
  return text;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  sluice_machine_t machine, again;
  uint64_t length = 0, length_again = 0;
  if (sluice_machine_read((const char*)data, size, &machine) != SLUICE_OK) return 0;
  ++fuzz_num_taken;
  char* text = written(&machine, &length);
  FUZZ_CHECK(sluice_machine_read(text, length, &again) == SLUICE_OK);
  char* text_again = written(&again, &length_again);
  FUZZ_CHECK(length == length_again && memcmp(text, text_again, length) == 0);
  free(text), free(text_again);
  return 0;
}
