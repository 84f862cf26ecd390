/* Rings of mixed policies: no slot that the dependencies make superfluous.
 *
 * Where policies differ between chunks, two chunks that share a ring may be far apart, or be ordered by what lies
 * between them; then one slot does for both, without a single wait more. Which is the case, the hazard checker says.
 */
#ifndef SLUICE_BACKEND_SCHEDULE_TEMPLATE_TIGHTEN_H_
#define SLUICE_BACKEND_SCHEDULE_TEMPLATE_TIGHTEN_H_

#include "backend/schedule/schedule.h"

/* Gives `tensor` a ring of one slot instead of two if the template is as free of hazards with its present dependencies;
 * leaves it alone otherwise. Errors: NO_MEMORY. */
sluice_status_t sluice_template_tighten(sluice_template_t* schedule, int32_t tensor);

#endif /* SLUICE_BACKEND_SCHEDULE_TEMPLATE_TIGHTEN_H_ */
