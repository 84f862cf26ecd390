// SPDX-License-Identifier: Apache-2.0
/* Strangers: connections from outside of the job. They reach rank 0 before other ranks, which start then, and stay. */
#pragma once

#include <netinet/in.h>

#include "backend/comm/test/tcp_ranks.h"

enum { MAX_STRANGERS = 256 };

typedef struct tcp_strangers_s {
  int32_t count;
  const void* words; /* each stranger sends them at once, or one byte per second */
  size_t num_words;
  int is_slow;
  /* Results. */
  struct sockaddr_in6 listeners[16]; /* rank 0's */
  int32_t num_listeners;
  size_t num_heard; /* received by the first stranger until its connection ended; not if is_slow */
  char heard[256];
} tcp_strangers_t;

/* Runs the ranks. Returns the longest time that a rank other than 0 took to create its communicator. */
uint64_t tcp_strangers_run(tcp_strangers_t* strangers, tcp_rank_t* ranks, int32_t world_size);
