// SPDX-License-Identifier: Apache-2.0
/* The processors that this process may use: part of the keys of cached measurements. */
#pragma once

#include <stddef.h>

/* Returns the number of cores in its current affinity. */
int sluice_processors_count(void);

/* Writes "8 of 64 cores", by its current affinity, and ", 2.50 of them at a time" if its control groups allow no more
 * (cpu.max, cpu.cfs_quota_us). */
void sluice_processors_describe(char* out, size_t room);

/* Returns the limit in the `text` of a cpu.max, in cores; 0: no limit. */
double sluice_processors_quota(const char* text);
