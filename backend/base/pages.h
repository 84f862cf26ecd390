/* Large memory that is about to be written for the first time: ask the system for huge pages where they have been seen
 * to arrive faster. On a machine of its own they do, several times; on one whose host takes free memory back they can
 * take six times as long (pages_rates.h). So the first ranges are brought into memory half each way, and timed
 * (pages_measure.h). */
#ifndef SLUICE_BACKEND_BASE_PAGES_H_
#define SLUICE_BACKEND_BASE_PAGES_H_

#include <stdint.h>

#include "backend/base/pages_ahead.h"
#include "sluice/base.h"

/* A hint, never an error, and what the memory holds stays. Only whole huge pages within the range are affected; smaller
 * ranges, systems without madvise, and processes with SLUICE_HUGE_PAGES=0 are left alone; with 1 all are asked for.
 * The caller will write all of it, and nobody else touches it meanwhile. Any thread. */
void sluice_pages_advise(const void* data, uint64_t bytes);

/* The same where not all may come to be written: by what others have shown, never measured. */
void sluice_pages_advise_room(const void* data, uint64_t bytes);

/* The same of a host's tensor that a call overwrites, if it lies on the CPU and without gaps. NULL is allowed. */
void sluice_pages_advise_tensor(const sluice_tensor_t* tensor);

/* The same of lists of tensors that may be slices of one allocation: slice i of all lists, then slice i + 1, and so on;
 * what follows without a gap is one range. NULL lists are skipped. ahead: takes the fresh ones; may be NULL. */
void sluice_pages_advise_slices(const sluice_tensor_t* const* lists, int32_t num_lists, int32_t count,
                                sluice_pages_ahead_t* ahead);

#endif /* SLUICE_BACKEND_BASE_PAGES_H_ */
