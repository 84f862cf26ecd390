// SPDX-License-Identifier: Apache-2.0
#include "backend/calibrate/layout.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "backend/base/hash.h"

enum { AT_ONCE = 64 };

/* Identifies the running system: containers of one machine share it, while containers of several machines may have the
 * same name. */
static int64_t this_host(void) {
  char text[256] = "";
  FILE* file = fopen("/proc/sys/kernel/random/boot_id", "r");
  if (file != NULL) {
    if (fgets(text, sizeof text, file) == NULL) text[0] = '\0';
    fclose(file);
  }
  if (text[0] == '\0') (void)gethostname(text, sizeof text - 1);
  return (int64_t)(sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, text, strlen(text)) >> 2);
}

/* Gathers the numbers of all ranks. Allocates nothing, since a failure on one rank would leave the others waiting. */
static sluice_status_t gather(sluice_comm_t* comm, int32_t first, int64_t mine, int64_t block[AT_ONCE],
                              int32_t* out_count) {
  const int32_t left = comm->world_size - first;
  *out_count = left < AT_ONCE ? left : AT_ONCE;
  memset(block, 0, AT_ONCE * sizeof *block);
  if (comm->rank >= first && comm->rank < first + *out_count) block[comm->rank - first] = mine;
  return sluice_comm_all_reduce_i64(comm, block, *out_count, SLUICE_REDUCE_SUM, "comparing the hosts of ranks");
}

sluice_status_t sluice_layout_of(sluice_comm_t* comm, int64_t host, char out[SLUICE_LAYOUT_BYTES]) {
  int64_t block[AT_ONCE], leader = -1;
  int32_t count = 0, num_hosts = 0;
  uint64_t hash = SLUICE_HASH_OF_NOTHING;
  snprintf(out, SLUICE_LAYOUT_BYTES, "1 host");
  if (comm == NULL) return SLUICE_OK;
  for (int32_t first = 0; first < comm->world_size; first += count) {
    SLUICE_TRY(gather(comm, first, host, block, &count));
    for (int32_t i = 0; i < count && leader < 0; ++i) {
      if (block[i] == host) leader = first + i; /* the lowest rank of this host */
    }
  }
  for (int32_t first = 0; first < comm->world_size; first += count) {
    SLUICE_TRY(gather(comm, first, leader, block, &count));
    for (int32_t i = 0; i < count; ++i) num_hosts += block[i] == first + i;
    hash = sluice_hash_bytes(hash, block, (size_t)count * sizeof *block);
  }
  if (num_hosts > 1) snprintf(out, SLUICE_LAYOUT_BYTES, "%d hosts (%016llx)", num_hosts, (unsigned long long)hash);
  return SLUICE_OK;
}

sluice_status_t sluice_layout_describe(sluice_comm_t* comm, char out[SLUICE_LAYOUT_BYTES]) {
  return sluice_layout_of(comm, this_host(), out);
}
