// SPDX-License-Identifier: Apache-2.0
/* SipHash-2-4 with 128 bits (Aumasson, Bernstein, "SipHash: a fast short-input PRF", 2012; the long form as in the
 * authors' reference code). Without the key, the code of new bytes cannot be predicted. */
#pragma once

#include <stdint.h>

enum { SLUICE_TCP_MAC_BYTES = 16 };

/* bytes: a multiple of 8. */
void sluice_tcp_mac(const uint8_t key[SLUICE_TCP_MAC_BYTES], const void* data, uint64_t bytes,
                    uint8_t out[SLUICE_TCP_MAC_BYTES]);
/* Returns 1 if equal. Constant time, so that the bytes cannot be guessed one by one. */
int sluice_tcp_mac_is_equal(const uint8_t a[SLUICE_TCP_MAC_BYTES], const uint8_t b[SLUICE_TCP_MAC_BYTES]);
