/* An address on loopback for rank 0 that no other test of this machine uses. */
#ifndef SLUICE_BACKEND_COMM_TEST_TCP_PLACE_H_
#define SLUICE_BACKEND_COMM_TEST_TCP_PLACE_H_

#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

enum { TCP_PLACE_BYTES = 32 };

static const char tcp_place_secret[] = "a secret of the tests";

/* "host:port"; another one at each call. */
static inline void tcp_place_init(char out[TCP_PLACE_BYTES]) {
  static _Atomic int32_t num_places;
  const int32_t pid = (int32_t)getpid();
  snprintf(out, TCP_PLACE_BYTES, "127.%d.%d.%d:%d", 1 + (pid >> 14 & 63), pid >> 6 & 255, 1 + (pid & 63),
           20000 + num_places++ % 10000);
}

#endif /* SLUICE_BACKEND_COMM_TEST_TCP_PLACE_H_ */
