/* Shared by tests under cmocka that run cases of the world. */
#ifndef SLUICE_CAPI_TEST_WORLD_CHECKS_H_
#define SLUICE_CAPI_TEST_WORLD_CHECKS_H_

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "capi/test/world/world.h"

/* Every rank ran, within its budget where there is one. */
static inline void must_work(const case_t* c, const result_t* got) {
  for (int32_t r = 0; r < c->world_size; ++r) {
    if (got->status[r] != SLUICE_OK) {
      fail_msg("budget %llu, rank %d: %d: %s", (unsigned long long)c->budget, r, got->status[r], got->message[r]);
    }
    if (c->budget > 0 && got->peak_bytes[r] > c->budget) {
      fail_msg("rank %d took %llu of %llu bytes", r, (unsigned long long)got->peak_bytes[r],
               (unsigned long long)c->budget);
    }
  }
}

#endif /* SLUICE_CAPI_TEST_WORLD_CHECKS_H_ */
