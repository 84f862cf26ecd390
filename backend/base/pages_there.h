/* Whether memory is there, or still to come from the system. */
#ifndef SLUICE_BACKEND_BASE_PAGES_THERE_H_
#define SLUICE_BACKEND_BASE_PAGES_THERE_H_

#include <stdint.h>

/* Whether most of a range of at least a page is in memory already, by some places: then it is not fresh, and nobody
 * waits for it. */
int sluice_pages_are_there(uintptr_t begin, uintptr_t end);

#endif /* SLUICE_BACKEND_BASE_PAGES_THERE_H_ */
