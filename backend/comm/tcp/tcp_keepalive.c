// SPDX-License-Identifier: Apache-2.0
/* Detects silent peers by the system's counters, in which any answer counts, including a zero window. TCP_USER_TIMEOUT
 * would also end connections to a peer that computes while its buffers are full: since Linux 5.11 it counts from the
 * moment at which the window closed, even if the peer's system answers (measured on 6.18: 12.4 s with 12 s). A rank may
 * compute, or write a checkpoint, for minutes. */
#include "backend/comm/tcp/tcp_keepalive.h"

#include <linux/tcp.h> /* netinet/tcp.h has an older tcp_info */
#include <netinet/in.h>
#include <stddef.h>
#include <sys/socket.h>

#include "backend/base/math.h"

/* the sum is SLUICE_TCP_KEEPALIVE_S */
enum { IDLE_S = 6, INTERVAL_S = 2, NUM_PROBES = 3 };

#define SECOND_NS UINT64_C(1000000000)

/* On a connection that is not idle, at least one of this many probes should have been answered. */
enum { NUM_QUESTIONS = 3 };

/* The most that counts between two checks: a virtual machine may have been paused, this process stopped, or no thread
 * may have waited. The system's own times do not count either: they continue while the system sends and answers
 * nothing. */
#define MAX_LOOK_NS SECOND_NS

/* Linux 6.15; missing in older headers. */
#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44
#endif

static void set(int fd, int level, int option, int value) {
  (void)setsockopt(fd, level, option, &value,
                   sizeof value); /* on an error a loss is noticed later, at the latest at the deadline */
}

void sluice_tcp_enable_keepalive(int fd) {
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, IDLE_S);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, INTERVAL_S);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, NUM_PROBES);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  /* The pauses between probes double each time, up to two minutes, even while a peer answers with a zero window: a peer
   * lost after a minute of that would be probed only a minute later. Three of these are SLUICE_TCP_KEEPALIVE_S; with a
   * zero window the system itself ends the connection after more than two missing answers. */
  set(fd, IPPROTO_TCP, TCP_RTO_MAX_MS, 1000 * SLUICE_TCP_KEEPALIVE_S / NUM_QUESTIONS);
}

int sluice_tcp_check_keepalive(int fd, sluice_tcp_keepalive_t* s, uint64_t now_ns) {
  struct tcp_info info;
  socklen_t size = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
  if (size < offsetof(struct tcp_info, tcpi_segs_in) + sizeof info.tcpi_segs_in) return 0;
  if (s->looked_ns == 0 || info.tcpi_segs_in != s->num_heard) {
    *s = (sluice_tcp_keepalive_t){.num_heard = info.tcpi_segs_in, .num_asked = info.tcpi_segs_out, .looked_ns = now_ns};
    return 0;
  }
  s->watched_ns += sluice_min_u64(now_ns - s->looked_ns, MAX_LOOK_NS);
  s->looked_ns = now_ns;
  s->is_silent =
      s->watched_ns >= SLUICE_TCP_KEEPALIVE_S * SECOND_NS && info.tcpi_segs_out - s->num_asked >= NUM_QUESTIONS;
  return s->is_silent;
}
