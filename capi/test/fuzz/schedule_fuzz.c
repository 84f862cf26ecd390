// SPDX-License-Identifier: Apache-2.0
/* Schedules as bytes: raw, and with a matching checksum. A valid one writes back as the same bytes, and has a text
 * form. schedule_corpus.c makes the corpus. */
#include <string.h>

#include "backend/base/hash.h"
#include "backend/schedule/serial/serial.h"
#include "backend/schedule/template/template.h"
#include "third_party/fuzz/target.h"

enum { CHECKSUM_BYTES = 8 };

static void try_to_read(const uint8_t* data, size_t size) {
  sluice_template_t* t = NULL;
  if (sluice_schedule_read(data, size, sluice_process_allocator(), &t) != SLUICE_OK) {
    FUZZ_CHECK(t == NULL);
    return;
  }
  ++fuzz_num_taken;
  uint8_t* again = malloc(size);
  FUZZ_CHECK(again != NULL && sluice_schedule_write(t, again, size) == size && memcmp(again, data, size) == 0);
  const uint64_t length = sluice_schedule_write_json(t, NULL, 0);
  char* text = malloc(length + 1);
  FUZZ_CHECK(text != NULL && sluice_schedule_write_json(t, text, length + 1) == length && strlen(text) == length);
  free(again), free(text);
  sluice_template_destroy(t, sluice_process_allocator());
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try_to_read(data, size);
  if (size < CHECKSUM_BYTES) return 0;
  uint8_t* sealed = malloc(size);
  FUZZ_CHECK(sealed != NULL);
  memcpy(sealed, data, size);
  const uint64_t sum = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, sealed, size - CHECKSUM_BYTES);
  for (int i = 0; i < CHECKSUM_BYTES; ++i) sealed[size - CHECKSUM_BYTES + (size_t)i] = (uint8_t)(sum >> (8 * i));
  try_to_read(sealed, size);
  free(sealed);
  return 0;
}
