// SPDX-License-Identifier: Apache-2.0
/* The cost of fresh memory on this machine with huge pages and without, and the choice for the next range.
 *
 * A huge page is allocated and cleared at once, which is several times as fast as 512 small ones. But a host that
 * reclaims free memory from its guest takes whole huge pages; the guest then waits for each of them to be returned,
 * while small pages come from the memory that it still has. Which of the two happens depends on the size of a range, so
 * sizes are separate. Plain data without a clock or a lock. */
#pragma once

#include <stdint.h>

/* Smallest range for which advice pays. */
#define SLUICE_PAGES_LARGE (UINT64_C(4) << 20)

enum { SLUICE_PAGES_SMALL = 0, SLUICE_PAGES_HUGE = 1, SLUICE_PAGES_WAYS = 2 };
/* Sizes: ranges from 4, 16, 64 and 256 MiB on. */
enum { SLUICE_PAGES_SIZES = 4 };
/* Number of ranges of a size that are measured at first. */
enum { SLUICE_PAGES_FIRST = 4 };

typedef struct sluice_pages_rate_s {
  double seconds_per_byte[SLUICE_PAGES_WAYS]; /* of the last few measurements, the newest weighted most */
  uint32_t measured;                          /* number of ranges */
  uint32_t asked;                             /* ranges since the last measured one */
} sluice_pages_rate_t;

typedef struct sluice_pages_rates_s {
  sluice_pages_rate_t sizes[SLUICE_PAGES_SIZES];
} sluice_pages_rates_t;

/* Returns the rate for a range of this size, at least SLUICE_PAGES_LARGE. */
sluice_pages_rate_t* sluice_pages_rate_of(sluice_pages_rates_t* rates, uint64_t bytes);

/* Returns whether to measure the next range, half with each kind of page: the first four are measured, then one of
 * sixteen, since machines change. Counts the range. */
int sluice_pages_is_due(sluice_pages_rate_t* rate);

/* Records the times of a measured range. */
void sluice_pages_add(sluice_pages_rate_t* rate, const double seconds_per_byte[SLUICE_PAGES_WAYS]);

/* Returns 1 if huge pages were measured to be faster, by a tenth at least; 0 if they were not, or nothing has been
 * measured. */
int sluice_pages_are_better_huge(const sluice_pages_rate_t* rate);

/* Rates are cached in a file, so that a process starts with the measurements of earlier ones. Leaves them unchanged if
 * there is no file, or one that cannot be used. */
void sluice_pages_cache_read(sluice_pages_rates_t* rates);

/* Replaces the file. If it cannot be written, later processes measure again. */
void sluice_pages_cache_write(const sluice_pages_rates_t* rates);
