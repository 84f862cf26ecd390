// SPDX-License-Identifier: Apache-2.0
/* A file descriptor that forked children close. A file lock lasts until its last descriptor is closed, in whichever
 * process: a forked worker would hold it for its parent, which may have ended long ago. */
#pragma once

/* Must not be moved between open and close. */
typedef struct sluice_descriptor_s {
  int fd; /* -1: not open, or inherited and therefore the parent's */
  struct sluice_descriptor_s *next, *previous;
} sluice_descriptor_t;

/* As open(), closed on exec. Returns -1 with errno; then nothing is open. Thread-safe. */
int sluice_descriptor_open(sluice_descriptor_t* descriptor, const char* path, int flags);
/* Releases its lock first, for children that have not closed their copies yet. Accepts one that is not open.
 * Thread-safe. */
void sluice_descriptor_close(sluice_descriptor_t* descriptor);
