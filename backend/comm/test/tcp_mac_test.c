// SPDX-License-Identifier: Apache-2.0
/* Test vectors of SipHash: the first two of the reference implementation for whole words, and one for the transport's
 * length from another implementation (`openssl mac -macopt size:16 SIPHASH`). */
#include "backend/comm/tcp/tcp_mac.h"

#include "third_party/bazel/test.h"

TEST(TcpMac_VectorsOfTheAuthors_AreMet) {
  static const uint8_t of_0[] = {0xa3, 0x81, 0x7f, 0x04, 0xba, 0x25, 0xa8, 0xe6,
                                 0x6d, 0xf6, 0x72, 0x14, 0xc7, 0x55, 0x02, 0x93};
  static const uint8_t of_8[] = {0x3b, 0x62, 0xa9, 0xba, 0x62, 0x58, 0xf5, 0x61,
                                 0x0f, 0x83, 0xe2, 0x64, 0xf3, 0x14, 0x97, 0xb4};
  static const uint8_t of_56[] = {0x19, 0x38, 0xf2, 0xcf, 0x72, 0xd5, 0x4e, 0xe9,
                                  0x7e, 0x94, 0x16, 0x6f, 0xa9, 0x1d, 0x2a, 0x36};
  uint8_t key[16], data[56], out[16];
  for (int i = 0; i < 16; ++i) key[i] = (uint8_t)i;
  for (int i = 0; i < 56; ++i) data[i] = (uint8_t)i;
  sluice_tcp_mac(key, data, 0, out);
  assert_memory_equal(out, of_0, sizeof of_0);
  sluice_tcp_mac(key, data, 8, out);
  assert_memory_equal(out, of_8, sizeof of_8);
  sluice_tcp_mac(key, data, 56, out);
  assert_memory_equal(out, of_56, sizeof of_56);
}

TEST(TcpMac_OneByteDiffers_IsNotEqual) {
  uint8_t a[SLUICE_TCP_MAC_BYTES] = {0}, b[SLUICE_TCP_MAC_BYTES] = {0};
  assert_true(sluice_tcp_mac_is_equal(a, b));
  for (int i = 0; i < SLUICE_TCP_MAC_BYTES; ++i) {
    b[i] = 0x80;
    assert_false(sluice_tcp_mac_is_equal(a, b));
    b[i] = 0;
  }
}
