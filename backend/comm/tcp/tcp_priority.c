// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/tcp/tcp_priority.h"

#include <linux/pkt_sched.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "backend/comm/tcp/tcp_descriptors.h"

/* The system doubles these, for its own bookkeeping. */
enum { FEW_BYTES = 32 << 10, MANY_BYTES = 4 << 20 };

/* One piece in this time is 0.65 % of 1 Gbit/s, 6.5 % of 0.1 Gbit/s. */
#define MOST_NS UINT64_C(20000000)

/* Ignored bytes of other traffic: peers confirm the last packets of a message only about 40 ms later if they have
 * nothing to answer. */
enum { UNCONFIRMED_BYTES = 32 << 10 };

/* The socket priority also serves as the mark of connections that give way. Queues with classes (pfifo_fast, prio)
 * respect it. */
void sluice_tcp_set_gives_way(int fd, int gives_way) {
  const int priority = gives_way ? TC_PRIO_BULK : TC_PRIO_BESTEFFORT;
  const int bytes = gives_way ? FEW_BYTES : MANY_BYTES;
  (void)setsockopt(fd, SOL_SOCKET, SO_PRIORITY, &priority, sizeof priority);
  (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes); /* as many as the system allows */
}

static int gives_way(int fd) {
  int priority = TC_PRIO_BESTEFFORT;
  socklen_t size = sizeof priority;
  return getsockopt(fd, SOL_SOCKET, SO_PRIORITY, &priority, &size) == 0 && priority == TC_PRIO_BULK;
}

/* Descriptors without such a queue (listeners, eventfds) fail the ioctl. */
static int goes_first(int fd) {
  int bytes = 0;
  return ioctl(fd, SIOCOUTQ, &bytes) == 0 && bytes > UNCONFIRMED_BYTES && !gives_way(fd);
}

int sluice_tcp_is_its_turn(uint64_t* waits_ns, uint64_t now_ns) {
  if (*waits_ns == 0) *waits_ns = now_ns;
  if (now_ns - *waits_ns < MOST_NS && sluice_tcp_has_descriptor(goes_first)) return 0;
  *waits_ns = 0;
  return 1;
}
