// SPDX-License-Identifier: Apache-2.0
/* FNV-1a, 64 bits, over bytes in memory order: the same on all ranks of a machine type, and the checksum of files. Not
 * secure against forgery. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define SLUICE_HASH_OF_NOTHING 0xcbf29ce484222325u

static inline uint64_t sluice_hash_bytes(uint64_t hash, const void* data, size_t bytes) {
  const unsigned char* p = data;
  for (size_t i = 0; i < bytes; ++i) {
    /* The analyzer tracks a number as a whole and takes its second byte for garbage. */
    /* NOLINTNEXTLINE(clang-analyzer-core.UndefinedBinaryOperatorResult) */
    hash = (hash ^ p[i]) * 0x100000001b3u;
  }
  return hash;
}
