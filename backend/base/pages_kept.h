/* What fresh memory has cost, kept with the machine: a process begins with what earlier ones have measured. */
#ifndef SLUICE_BACKEND_BASE_PAGES_KEPT_H_
#define SLUICE_BACKEND_BASE_PAGES_KEPT_H_

#include "backend/base/pages_rates.h"

/* Leaves the rates as they are where there is no file, or one that cannot be used. */
void sluice_pages_recall(sluice_pages_rates_t* rates);

/* In place of what was there. What cannot be written is measured again. */
void sluice_pages_keep(const sluice_pages_rates_t* rates);

#endif /* SLUICE_BACKEND_BASE_PAGES_KEPT_H_ */
