// SPDX-License-Identifier: Apache-2.0
/* System calls and allocations that a test makes fail. The linker's --wrap redirects the library's calls here
 * (capi/test/nth/BUILD lists the same names). The place of a system call is its address in the code; the place of an
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

/* Returns the number of entries of a folder, `.` and `..` included; 0 if the folder does not exist. */
int32_t calls_count_entries(const char* folder);
