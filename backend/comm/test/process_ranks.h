// SPDX-License-Identifier: Apache-2.0
/* Ranks that are processes, of any number: a communicator over memory that they share, enough to find each other over
 * tcp, with a store of notes that takes its time. */
#ifndef SLUICE_BACKEND_COMM_TEST_PROCESS_RANKS_H_
#define SLUICE_BACKEND_COMM_TEST_PROCESS_RANKS_H_

#include <sys/types.h>

#include "backend/comm/comm.h"

enum { PROCESS_MOST_RANKS = 256, PROCESS_MESSAGE_BYTES = 1024 };

typedef struct process_board_s process_board_t;

typedef struct process_rank_s {
  process_board_t* board; /* shared */
  int32_t rank, world_size;
  uint64_t timeout_ns;   /* of parent and tcp */
  sluice_comm_t* parent; /* over shared memory */
  sluice_comm_t* comm;   /* tcp */
} process_rank_t;

/* What a rank says of itself when it ends. */
typedef struct process_report_s {
  int32_t line; /* of what went wrong; 0: nothing. -1: it has not ended */
  sluice_status_t status;
  int32_t peer;
  uint64_t created_ns; /* what making its connections took */
  uint64_t took_ns;    /* what the rank likes to say */
  char message[256];
} process_report_t;

/* Called in the rank's process with all communicators made. Returns a line, 0: all is well. It may destroy them and set
 * them to NULL. */
typedef int32_t (*process_body_t)(process_rank_t* me, process_report_t* report);

/* The store answers after this time; for ranks that are started later. */
void process_ranks_answer_after(uint64_t answer_ns);
/* How often the ranks of the last run have asked the store. */
int64_t process_ranks_lookups(void);

/* Forks them all at once. children: [world_size]. */
void process_ranks_start(int32_t world_size, uint64_t timeout_ns, process_body_t body, pid_t* children);
/* Until a rank has stopped itself. */
void process_ranks_await_stop(pid_t child);
/* Waits for the end of one. */
void process_ranks_join(pid_t child);
const process_report_t* process_ranks_report(int32_t rank);
/* Gives the shared memory back. */
void process_ranks_end(void);

#endif /* SLUICE_BACKEND_COMM_TEST_PROCESS_RANKS_H_ */
