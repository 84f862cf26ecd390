// SPDX-License-Identifier: Apache-2.0
/* How a peer is noticed whose machine says nothing any more: no power, or no network in between. */
#ifndef SLUICE_BACKEND_COMM_TCP_TCP_KEEPALIVE_H_
#define SLUICE_BACKEND_COMM_TCP_TCP_KEEPALIVE_H_

#include <stdint.h>

enum { SLUICE_TCP_KEEPALIVE_S = 12 };

/* On an idle connection the system itself asks the peer's after a while, and ends it when nothing is answered for
 * SLUICE_TCP_KEEPALIVE_S: whoever waits wakes with ETIMEDOUT, or with what the network said instead. Before the socket
 * connects or listens. */
void sluice_tcp_enable_keepalive(int fd);

/* What has been seen of one connection; zeroed at first. */
typedef struct sluice_tcp_keepalive_s {
  uint32_t num_heard;  /* segments that had come from the peer at the last look */
  uint32_t num_asked;  /* segments that had gone to it at the first look since then */
  uint64_t looked_ns;  /* 0: never */
  uint64_t watched_ns; /* since the peer's last segment */
  int32_t is_silent;
} sluice_tcp_keepalive_t;

/* One look of whoever waits, as often as it likes: 1 (and is_silent) where the peer's system has said nothing during
 * SLUICE_TCP_KEEPALIVE_S of looks at most a second apart, and has been asked several times in vain. For connections
 * that are not idle, on which the system itself gives up late. now_ns: of sluice_now_ns. */
int sluice_tcp_check_keepalive(int fd, sluice_tcp_keepalive_t* silence, uint64_t now_ns);

#endif /* SLUICE_BACKEND_COMM_TCP_TCP_KEEPALIVE_H_ */
