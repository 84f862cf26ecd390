/* What fresh memory has cost here, asked for in huge pages and not, and which is to be asked for next.
 *
 * A huge page is found and cleared in one go, which is several times as fast as 512 small ones. But a host that takes
 * free memory back from its guest takes whole huge pages; the guest then waits for each of them to be given again,
 * while small pages come out of what it still has. Which of the two a range meets depends on its size, so sizes are
 * told apart. Plain data without a clock or a lock. */
#ifndef SLUICE_BACKEND_BASE_PAGES_RATES_H_
#define SLUICE_BACKEND_BASE_PAGES_RATES_H_

#include <stdint.h>

/* Bytes from which asking pays. */
#define SLUICE_PAGES_LARGE (UINT64_C(4) << 20)

enum { SLUICE_PAGES_SMALL = 0, SLUICE_PAGES_HUGE = 1, SLUICE_PAGES_WAYS = 2 };
/* Ranges from 4, 16, 64 and 256 MiB on. */
enum { SLUICE_PAGES_SIZES = 4 };
/* Ranges of a size that are measured at first. */
enum { SLUICE_PAGES_FIRST = 4 };

typedef struct sluice_pages_rate_s {
  double seconds_per_byte[SLUICE_PAGES_WAYS]; /* of the last few that were measured, the newest counting most */
  uint32_t measured;                          /* ranges */
  uint32_t asked;                             /* ranges since one was measured */
} sluice_pages_rate_t;

typedef struct sluice_pages_rates_s {
  sluice_pages_rate_t sizes[SLUICE_PAGES_SIZES];
} sluice_pages_rates_t;

/* Of a range of so many bytes, at least SLUICE_PAGES_LARGE. */
sluice_pages_rate_t* sluice_pages_rate_of(sluice_pages_rates_t* rates, uint64_t bytes);

/* Whether the next range is to be measured, half of it each way: the first four are, then one of sixteen, since what
 * a machine does changes. Counts it. */
int sluice_pages_is_due(sluice_pages_rate_t* rate);

/* What a measured range has taken. */
void sluice_pages_add(sluice_pages_rate_t* rate, const double seconds_per_byte[SLUICE_PAGES_WAYS]);

/* 1: huge pages have been seen to be faster, by a tenth at least. 0: not so, or nothing has been measured. */
int sluice_pages_are_better_huge(const sluice_pages_rate_t* rate);

#endif /* SLUICE_BACKEND_BASE_PAGES_RATES_H_ */
