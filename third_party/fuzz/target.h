// SPDX-License-Identifier: Apache-2.0
/* A fuzz target: one function that takes any bytes, and ends the program where something does not hold. libFuzzer's
 * name and types, so that the same file is linked with it or with replay.c. Inputs lie in blocks of exactly their size:
 * a sanitizer sees a read after the end. */
#ifndef SLUICE_THIRD_PARTY_FUZZ_TARGET_H_
#define SLUICE_THIRD_PARTY_FUZZ_TARGET_H_

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

/* Inputs that a target has taken, not refused: it adds to this. A corpus of which nothing is taken is of an older form
 * and tries nothing; replay.c says so. Weak: one for the whole program, with libFuzzer's main too. */
__attribute__((weak)) uint64_t fuzz_num_taken;

/* As assert, whatever NDEBUG. */
#define FUZZ_CHECK(condition)                                                        \
  do {                                                                               \
    if (!(condition)) {                                                              \
      fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      abort();                                                                       \
    }                                                                                \
  } while (0)

#endif /* SLUICE_THIRD_PARTY_FUZZ_TARGET_H_ */
