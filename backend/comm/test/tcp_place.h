// SPDX-License-Identifier: Apache-2.0
/* An address on loopback for rank 0 that no other test of this machine uses. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

enum { TCP_PLACE_BYTES = 32 };

static const char tcp_place_secret[] = "a secret of the tests";

/* Writes a new "host:port" at each call. Each process draws its host at random, since tests that run at the same time
 * share a network, and in namespaces of their own may have the same process ids. */
static inline void tcp_place_init(char out[TCP_PLACE_BYTES]) {
  static _Atomic uint32_t drawn;
  static _Atomic int32_t num_places;
  uint32_t host = drawn, none = 0;
  while (host == 0 && getentropy(&host, sizeof host) == 0) host |= 1;
  if (!atomic_compare_exchange_strong(&drawn, &none, host)) host = none;
  snprintf(out, TCP_PLACE_BYTES, "127.%u.%u.%u:%d", 1 + (host >> 24) % 254, host >> 16 & 255,
           1 + (host >> 8 & 255) % 254, 20000 + num_places++ % 10000);
}
