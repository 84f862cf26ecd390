// SPDX-License-Identifier: Apache-2.0
/* System calls and allocations that fail on a test's command. The linker's --wrap redirects the library's calls here
 * (capi/test/BUILD lists the same names): each calling place in the code is identified by its address, and for an
 * allocation by its call stack. */
#ifndef SLUICE_CAPI_TEST_NTH_FAILING_CALLS_H_
#define SLUICE_CAPI_TEST_NTH_FAILING_CALLS_H_

#include <stdint.h>

enum { MAX_CALL_PLACES = 2048 };

typedef struct call_place_s {
  const char* name;  /* of the function called */
  uint64_t key;      /* address, or hash of the call stack */
  uintptr_t address; /* of the caller, relative to the start of the program: as addr2line takes it */
  int64_t num_hits;  /* most between two of the calls below */
  int64_t hits_now;
  int32_t is_allocation;
} call_place_t;

/* Forgets all places. */
void calls_forget(void);
/* From here to calls_end all calls of all threads are counted, and none fails. Known places stay. */
void calls_count(void);
/* The same, and hit `nth` (from 0) of that place fails. */
void calls_fail(const call_place_t* place, int64_t nth);
/* 1: the planned failure has occurred. */
int32_t calls_end(void);
const call_place_t* calls_places(int32_t* out_count);

/* Runs on a thread of its own, so that the call stacks of allocations begin the same. place NULL: no call fails.
 * Returns whether the planned failure has occurred. */
int32_t calls_run(void (*run)(void* user), void* user, const call_place_t* place, int64_t nth);

/* Calls `attempt` without a failure, then once for each hit of each place that this has found; it returns whether the
 * planned failure has occurred. num_descriptors: open before. Fails the test if there are fewer than `fewest` places,
 * or if fewer than `fewest_failures` have occurred. */
void calls_fail_each(int32_t (*attempt)(const call_place_t* place, int64_t nth, int32_t num_descriptors),
                     int32_t fewest, int32_t fewest_failures);

/* The entries of a folder, `.` and `..` included; 0 if there is none. */
int32_t calls_count_entries(const char* folder);

#endif /* SLUICE_CAPI_TEST_NTH_FAILING_CALLS_H_ */
