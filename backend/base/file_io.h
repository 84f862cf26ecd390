// SPDX-License-Identifier: Apache-2.0
/* Files that stay open: a descriptor that forked children close, and complete reads and writes at an offset. */
#pragma once

#include <stdint.h>

#include "backend/base/status.h"

/* A file lock lasts until its last descriptor is closed, in whichever process: a forked worker would hold it for its
 * parent, which may have ended long ago. Must not be moved between open and close. */
typedef struct sluice_descriptor_s {
  int fd; /* -1: not open, or inherited and therefore the parent's */
  struct sluice_descriptor_s *next, *previous;
} sluice_descriptor_t;

/* As open(), closed on exec. Returns -1 with errno; then nothing is open. Thread-safe. */
int sluice_descriptor_open(sluice_descriptor_t* descriptor, const char* path, int flags);
/* Releases its lock first, for children that have not closed their copies yet. Accepts one that is not open.
 * Thread-safe. */
void sluice_descriptor_close(sluice_descriptor_t* descriptor);

/* Read and write all bytes. owner, path: for messages, which begin with "OWNER: PATH". Errors: EXTERNAL with the
 * system's message, or that the file ends early. Any thread. */
sluice_status_t sluice_file_read_at(int fd, const char* owner, const char* path, uint64_t at, void* out,
                                    uint64_t bytes);
sluice_status_t sluice_file_write_at(int fd, const char* owner, const char* path, uint64_t at, const void* data,
                                     uint64_t bytes);
