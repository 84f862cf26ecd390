// SPDX-License-Identifier: Apache-2.0
/* Strangers who come to rank 0 before any rank does, and stay: the other ranks wait until all of them are there. */
#ifndef SLUICE_BACKEND_COMM_TEST_TCP_STRANGERS_H_
#define SLUICE_BACKEND_COMM_TEST_TCP_STRANGERS_H_

#include <netinet/in.h>

#include "backend/comm/test/tcp_ranks.h"

enum { MAX_STRANGERS = 256 };

typedef struct tcp_strangers_s {
  int32_t count;
  const void* words; /* said by each at once, or one byte a second */
  size_t num_words;
  int is_slow;
  /* Outcome. */
  struct sockaddr_in6 listeners[16]; /* rank 0's */
  int32_t num_listeners;
  size_t num_heard; /* by the first stranger until its connection ended; not of slow ones */
  char heard[256];
} tcp_strangers_t;

/* Runs the ranks among them. The longest that one of the ranks beside rank 0 took to create its communicator. */
uint64_t tcp_strangers_run(tcp_strangers_t* strangers, tcp_rank_t* ranks, int32_t world_size);

#endif /* SLUICE_BACKEND_COMM_TEST_TCP_STRANGERS_H_ */
