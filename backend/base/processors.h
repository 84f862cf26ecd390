/* What of the machine's processors this process may use: for the keys of findings that depend on it. */
#ifndef SLUICE_BACKEND_BASE_PROCESSORS_H_
#define SLUICE_BACKEND_BASE_PROCESSORS_H_

#include <stddef.h>

/* Cores that it may use, by its affinity now. */
int sluice_processors_count(void);

/* "8 of 64 cores", by its affinity now, and ", 2.50 of them at a time" where its control groups allow no more
 * (cpu.max, cpu.cfs_quota_us). */
void sluice_processors_describe(char* out, size_t room);

/* What `text` of a cpu.max allows, in cores; 0: it sets no limit. */
double sluice_processors_quota(const char* text);

#endif /* SLUICE_BACKEND_BASE_PROCESSORS_H_ */
