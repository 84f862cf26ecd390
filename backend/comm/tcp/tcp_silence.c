/* TCP_USER_TIMEOUT would end connections with unconfirmed bytes too, but also those to a peer that computes while its
 * buffers are full: since Linux 5.11 it counts from the moment when the window closed, whether or not the peer's system
 * answers (measured on 6.18: 12.4 s with 12 s). A rank may compute, or write a checkpoint, for minutes. So the system's
 * counters are asked instead, by whoever waits: any answer counts, that there is no room among them. */
#include "backend/comm/tcp/tcp_silence.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <sys/socket.h>

/* SLUICE_TCP_SILENCE_S in all */
enum { IDLE_S = 6, INTERVAL_S = 2, NUM_PROBES = 3 };

/* Questions, on a connection that is not idle, of which one at least should have been answered. */
enum { NUM_QUESTIONS = 3 };

/* Linux 6.15; not in older headers. */
#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44
#endif

static void set(int fd, int level, int option, int value) {
  (void)setsockopt(fd, level, option, &value, sizeof value); /* refused: noticed later, in the end by the deadline */
}

void sluice_tcp_watch_over(int fd) {
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, IDLE_S);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, INTERVAL_S);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, NUM_PROBES);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  /* The pauses between questions double each time, up to two minutes, also while a peer answers that it has no room:
   * one that is lost after a minute of that would be asked next in a minute. Four of these are SLUICE_TCP_SILENCE_S. */
  set(fd, IPPROTO_TCP, TCP_RTO_MAX_MS, 1000 * SLUICE_TCP_SILENCE_S / (NUM_QUESTIONS + 1));
}

int sluice_tcp_is_silent(int fd) {
  struct tcp_info info;
  socklen_t size = sizeof info;
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
  if (size < offsetof(struct tcp_info, tcpi_last_ack_recv) + sizeof info.tcpi_last_ack_recv) return 0;
  /* Counted from the peer's last answer on. */
  if (info.tcpi_retransmits < NUM_QUESTIONS && info.tcpi_probes < NUM_QUESTIONS) return 0;
  const unsigned limit_ms = 1000 * SLUICE_TCP_SILENCE_S;
  return info.tcpi_last_ack_recv >= limit_ms && info.tcpi_last_data_recv >= limit_ms;
}
