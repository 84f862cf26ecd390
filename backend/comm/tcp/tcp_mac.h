// SPDX-License-Identifier: Apache-2.0
/* SipHash-2-4 with 128 bits (Aumasson, Bernstein, "SipHash: a fast short-input PRF", 2012; the long form as in the
 * authors' reference code): who does not have the key cannot tell the code of bytes that it has not seen it for. */
#ifndef SLUICE_BACKEND_COMM_TCP_TCP_MAC_H_
#define SLUICE_BACKEND_COMM_TCP_TCP_MAC_H_

#include <stdint.h>

enum { SLUICE_TCP_MAC_BYTES = 16 };

/* bytes: a multiple of 8. */
void sluice_tcp_mac(const uint8_t key[SLUICE_TCP_MAC_BYTES], const void* data, uint64_t bytes,
                    uint8_t out[SLUICE_TCP_MAC_BYTES]);
/* 1: equal. Takes as long wherever they differ, so that nobody guesses one byte after the other. */
int sluice_tcp_mac_is_equal(const uint8_t a[SLUICE_TCP_MAC_BYTES], const uint8_t b[SLUICE_TCP_MAC_BYTES]);

#endif /* SLUICE_BACKEND_COMM_TCP_TCP_MAC_H_ */
