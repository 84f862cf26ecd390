/* Calls of the system, and allocations, that fail when a test says so. The library's calls end here by the linker's
 * --wrap (capi/test/BUILD lists the same names): each place in the code that calls is told from the others by its
 * address, of an allocation by the whole way to it. */
#ifndef SLUICE_CAPI_TEST_NTH_FAILING_CALLS_H_
#define SLUICE_CAPI_TEST_NTH_FAILING_CALLS_H_

#include <stdint.h>

enum { MAX_CALL_PLACES = 2048 };

typedef struct call_place_s {
  const char* name;  /* of what is called */
  uint64_t key;      /* address, or hash of the way there */
  uintptr_t address; /* of the caller, from the program's beginning on: as addr2line takes it */
  int64_t num_hits;  /* most between two of the calls below */
  int64_t hits_now;
  int32_t is_allocation;
} call_place_t;

/* Forgets all places. */
void calls_forget(void);
/* From here to calls_end all calls of all threads are counted, and none fails. Places found before stay. */
void calls_count(void);
/* The same, and hit `nth` (from 0) of that place fails. */
void calls_fail(const call_place_t* place, int64_t nth);
/* 1: the call that was to fail has come and failed. */
int32_t calls_end(void);
const call_place_t* calls_places(int32_t* out_count);

#endif /* SLUICE_CAPI_TEST_NTH_FAILING_CALLS_H_ */
