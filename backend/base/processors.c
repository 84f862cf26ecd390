// SPDX-License-Identifier: Apache-2.0
/* Counts the processors that this process may use, from its affinity and the CPU quota of its cgroups. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* sched_getaffinity */
#endif
#include "backend/base/processors.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GROUPS "/sys/fs/cgroup"
enum { PATH_BYTES = 1024, TEXT_BYTES = 128 };

double sluice_processors_quota(const char* text) {
  double quota = 0, period = 0;
  if (sscanf(text, "%lf %lf", &quota, &period) != 2 || quota <= 0 || period <= 0) return 0; /* "max 100000" */
  return quota / period;
}

/* Reads the first line; empty if there is none. */
static void read_line(const char* path, char text[TEXT_BYTES]) {
  text[0] = '\0';
  FILE* file = fopen(path, "r");
  if (file == NULL) return;
  if (fgets(text, TEXT_BYTES, file) == NULL) text[0] = '\0';
  fclose(file);
}

/* Finds this process's group in the unified hierarchy; "" at the root, as in a container with its own namespace. */
static void find_group(char out[PATH_BYTES]) {
  char line[PATH_BYTES];
  out[0] = '\0';
  FILE* file = fopen("/proc/self/cgroup", "r");
  if (file == NULL) return;
  while (fgets(line, sizeof line, file) != NULL) {
    if (strncmp(line, "0::/", 4) != 0) continue;
    line[strcspn(line, "\n")] = '\0';
    snprintf(out, PATH_BYTES, "%s", line[4] == '\0' ? "" : line + 3);
  }
  fclose(file);
}

/* Returns the smallest quota of the group and its ancestors. */
static double find_quota(void) {
  char group[PATH_BYTES], path[PATH_BYTES + 32], text[TEXT_BYTES], period[TEXT_BYTES];
  double least = 0;
  find_group(group);
  for (;;) {
    snprintf(path, sizeof path, GROUPS "%s/cpu.max", group);
    read_line(path, text);
    const double quota = sluice_processors_quota(text);
    if (quota > 0 && (least == 0 || quota < least)) least = quota;
    char* slash = strrchr(group, '/');
    if (slash == NULL) break;
    *slash = '\0';
  }
  if (least > 0) return least;
  read_line(GROUPS "/cpu/cpu.cfs_quota_us", text);
  read_line(GROUPS "/cpu/cpu.cfs_period_us", period);
  text[strcspn(text, "\n")] = '\0';
  snprintf(path, sizeof path, "%s %s", text, period);
  return sluice_processors_quota(path);
}

int sluice_processors_count(void) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
  return (int)sysconf(_SC_NPROCESSORS_ONLN); /* a machine with more than a thousand cores */
}

void sluice_processors_describe(char* out, size_t room) {
  const long num_cores = sysconf(_SC_NPROCESSORS_ONLN);
  const double quota = find_quota();
  const int used = snprintf(out, room, "%d of %ld cores", sluice_processors_count(), num_cores);
  if (quota > 0 && used > 0 && (size_t)used < room) {
    snprintf(out + used, room - (size_t)used, ", %.2f of them at a time", quota);
  }
}
