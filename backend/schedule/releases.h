/* Releases, derived and proved. Private to backend/schedule.
 *
 * The ops of a use that no other op of it comes after are exactly those that must release it: one too few and the slot
 * is taken again while nobody has freed it, one too many and it is freed twice, or freed and then used.
 */
#ifndef SLUICE_BACKEND_SCHEDULE_RELEASES_H_
#define SLUICE_BACKEND_SCHEDULE_RELEASES_H_

#include "backend/schedule/finding.h"
#include "backend/schedule/order.h"

/* Sets every op's releases, from accesses and dependencies. Errors: NO_MEMORY, INTERNAL. */
sluice_status_t sluice_template_mark_releases(sluice_template_t* schedule);

/* The first hazard of releases, of a template without any other; leaves out_finding alone where there is none.
 * Errors: NO_MEMORY. */
sluice_status_t sluice_releases_check(const sluice_template_t* schedule, const sluice_before_t* before,
                                      sluice_allocator_t* memory, sluice_finding_t* out_finding);

/* Slots that the reads and writes of all ops touch, each access counted by itself: room for lists of them. */
uint64_t sluice_template_count_touches(const sluice_template_t* schedule);

#endif /* SLUICE_BACKEND_SCHEDULE_RELEASES_H_ */
