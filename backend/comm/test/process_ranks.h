// SPDX-License-Identifier: Apache-2.0
/* Ranks that are processes, up to 256. They connect over tcp at an address; their communicator has a store of notes in
 * shared memory, which may be slow. */
#pragma once

#include <sys/types.h>

#include "backend/comm/comm.h"

enum { PROCESS_MOST_RANKS = 256 };

typedef struct process_rank_s {
  int32_t rank, world_size;
  uint64_t timeout_ns;
  sluice_comm_t* tcp;  /* owned by: */
  sluice_comm_t* comm; /* its exchanges with the notes of the board */
} process_rank_t;

/* The report of a rank when it ends. */
typedef struct process_report_s {
  int32_t line; /* line that failed; 0: no failure; -1: the rank has not ended */
  sluice_status_t status;
  int32_t peer;
  uint64_t created_ns; /* time to connect */
  uint64_t took_ns;    /* a time of the body's choice */
  char message[256];
} process_report_t;

/* Runs in the rank's process. Returns the line of a failure, or 0. The body may destroy `comm` and set it to NULL. */
typedef int32_t (*process_body_t)(process_rank_t* me, process_report_t* report);

/* Sets the time of a lookup in the store, for ranks that are started later. */
void process_ranks_answer_after(uint64_t answer_ns);
/* The number of lookups that the ranks of the last run have made. */
int64_t process_ranks_lookups(void);

/* Forks all ranks at once. children: [world_size]. */
void process_ranks_start(int32_t world_size, uint64_t timeout_ns, process_body_t body, pid_t* children);
/* Waits until a rank has stopped itself. */
void process_ranks_await_stop(pid_t child);
/* Waits for the end of a rank. */
void process_ranks_join(pid_t child);
const process_report_t* process_ranks_report(int32_t rank);
/* Releases the shared memory. */
void process_ranks_end(void);
