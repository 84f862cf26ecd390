// SPDX-License-Identifier: Apache-2.0
/* System calls and allocations that a test makes fail. The linker's --wrap redirects the library's calls here
 * (capi/test/BUILD lists the same names). The place of a system call is its address in the code; the place of an
 * allocation is its call stack. */
#pragma once

#include <stdint.h>

enum { MAX_CALL_PLACES = 2048 };

typedef struct call_place_s {
  const char* name;  /* name of the called function */
  uint64_t key;      /* address, or hash of the call stack */
  uintptr_t address; /* address of the caller relative to the start of the program, as addr2line takes it */
  int64_t num_hits;  /* most hits in one counted run */
  int64_t hits_now;
  int32_t is_allocation;
} call_place_t;

/* Forgets all places. */
void calls_forget(void);
/* Starts to count the calls of all threads, until calls_end; no call fails. Keeps the known places. */
void calls_count(void);
/* The same, but hit `nth` (from 0) of `place` fails. */
void calls_fail(const call_place_t* place, int64_t nth);
/* Returns 1 if the planned failure has occurred. */
int32_t calls_end(void);
const call_place_t* calls_places(int32_t* out_count);

/* Calls `run` on a new thread, so that the call stacks of allocations begin the same. place NULL: no call fails.
 * Returns whether the planned failure has occurred. */
int32_t calls_run(void (*run)(void* user), void* user, const call_place_t* place, int64_t nth);

/* Calls `attempt` without a failure, then once for each hit of each place that this call has found. `attempt` returns
 * whether the planned failure has occurred; num_descriptors were open before. Fails the test if there are fewer than
 * `fewest` places, or if fewer than `fewest_failures` have occurred. */
void calls_fail_each(int32_t (*attempt)(const call_place_t* place, int64_t nth, int32_t num_descriptors),
                     int32_t fewest, int32_t fewest_failures);

/* Returns the number of entries of a folder, `.` and `..` included; 0 if the folder does not exist. */
int32_t calls_count_entries(const char* folder);
