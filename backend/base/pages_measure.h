/* What fresh memory costs in this process, small pages and huge ones: measured as the first ranges come in, kept with
 * the machine, and asked before later ones. Never an error, and what memory holds stays. Any thread. */
#ifndef SLUICE_BACKEND_BASE_PAGES_MEASURE_H_
#define SLUICE_BACKEND_BASE_PAGES_MEASURE_H_

#include <stdatomic.h>
#include <stdint.h>

typedef enum sluice_pages_next_e {
  SLUICE_PAGES_LEAVE,    /* small ones, as they are written */
  SLUICE_PAGES_ASK_HUGE, /* huge ones were faster, or are asked for always */
  SLUICE_PAGES_MEASURE   /* a fresh range, half of it each way */
} sluice_pages_next_t;

/* Whole huge pages, and what is to be done with them. */
typedef struct sluice_pages_range_s {
  sluice_pages_next_t next;
  uintptr_t begin, end;
} sluice_pages_range_t;

/* Of memory that is about to be written. may_measure: all of it will be, and nobody writes it yet. A range that is to
 * be measured counts as asked for. */
sluice_pages_range_t sluice_pages_next(const void* data, uint64_t bytes, int may_measure);

/* A hint: systems without huge pages refuse it. */
void sluice_pages_ask_huge(uintptr_t begin, uintptr_t end);

/* Brings a range in, half each way, and notes what that took. Does nothing where another thread measures: they would
 * disturb each other. is_over: of memory that others may write meanwhile, which then says nothing and is not counted;
 * once it is set nothing more is brought in, and nothing noted, after one piece at most. NULL: nobody else does. */
void sluice_pages_measure(const sluice_pages_range_t* range, const atomic_int* is_over);

#endif /* SLUICE_BACKEND_BASE_PAGES_MEASURE_H_ */
