// SPDX-License-Identifier: Apache-2.0
/* Declares a fuzz target: one function that takes any bytes, and ends the program if a property does not hold. Name and
 * types are libFuzzer's, so that the same file is linked with it or with replay.c. Inputs are in blocks of exactly
 * their size, so that a sanitizer finds reads after the end. */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

/* The number of inputs that the target has accepted; the target counts them. A corpus without accepted inputs has an
 * older format and tests nothing; replay.c reports that. Weak: one for the whole program, with libFuzzer's main too. */
__attribute__((weak)) uint64_t fuzz_num_taken;

/* Like assert, also with NDEBUG. */
#define FUZZ_CHECK(condition)                                                        \
  do {                                                                               \
    if (!(condition)) {                                                              \
      fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      abort();                                                                       \
    }                                                                                \
  } while (0)
