// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/tcp/tcp_mac.h"

#include <string.h>

static uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static void mix(uint64_t v[4], int rounds) {
  for (int i = 0; i < rounds; ++i) {
    v[0] += v[1], v[1] = rotate(v[1], 13) ^ v[0], v[0] = rotate(v[0], 32);
    v[2] += v[3], v[3] = rotate(v[3], 16) ^ v[2];
    v[0] += v[3], v[3] = rotate(v[3], 21) ^ v[0];
    v[2] += v[1], v[1] = rotate(v[1], 17) ^ v[2], v[2] = rotate(v[2], 32);
  }
}

static void absorb(uint64_t v[4], uint64_t word) {
  v[3] ^= word;
  mix(v, 2);
  v[0] ^= word;
}

void sluice_tcp_mac(const uint8_t key[SLUICE_TCP_MAC_BYTES], const void* data, uint64_t bytes,
                    uint8_t out[SLUICE_TCP_MAC_BYTES]) {
  uint64_t k[2], word;
  memcpy(k, key, sizeof k);
  uint64_t v[4] = {k[0] ^ UINT64_C(0x736f6d6570736575), k[1] ^ UINT64_C(0x646f72616e646f6d) ^ 0xee,
                   k[0] ^ UINT64_C(0x6c7967656e657261), k[1] ^ UINT64_C(0x7465646279746573)};
  for (uint64_t at = 0; at < bytes; at += sizeof word) {
    memcpy(&word, (const char*)data + at, sizeof word);
    absorb(v, word);
  }
  absorb(v, bytes << 56);
  v[2] ^= 0xee;
  mix(v, 4);
  word = v[0] ^ v[1] ^ v[2] ^ v[3];
  memcpy(out, &word, sizeof word);
  v[1] ^= 0xdd;
  mix(v, 4);
  word = v[0] ^ v[1] ^ v[2] ^ v[3];
  memcpy(out + sizeof word, &word, sizeof word);
}

int sluice_tcp_mac_is_equal(const uint8_t a[SLUICE_TCP_MAC_BYTES], const uint8_t b[SLUICE_TCP_MAC_BYTES]) {
  unsigned differs = 0;
  for (int i = 0; i < SLUICE_TCP_MAC_BYTES; ++i) differs |= (unsigned)(a[i] ^ b[i]);
  return differs == 0;
}
