/* Whether memory is there, or still to come from the system; and having it come. */
#ifndef SLUICE_BACKEND_BASE_PAGES_THERE_H_
#define SLUICE_BACKEND_BASE_PAGES_THERE_H_

#include <stdint.h>

/* Whether most of a range of at least a page is in memory already, by some places: then it is not fresh, and nobody
 * waits for it. */
int sluice_pages_are_there(uintptr_t begin, uintptr_t end);

/* Brings whole pages in; what they hold stays, and others may write them meanwhile. 0: the system cannot (Linux before
 * 5.14), or has no more: pages come as they are written. */
int sluice_pages_bring(uintptr_t begin, uintptr_t end);

#endif /* SLUICE_BACKEND_BASE_PAGES_THERE_H_ */
