// SPDX-License-Identifier: Apache-2.0
/* Complete reads and writes at an offset of a file. */
#pragma once

#include <stdint.h>

#include "backend/base/status.h"

/* Read and write all bytes. owner, path: for messages, which begin with "OWNER: PATH". Errors: EXTERNAL with the
 * system's message, or that the file ends early. Any thread. */
sluice_status_t sluice_file_read_at(int fd, const char* owner, const char* path, uint64_t at, void* out,
                                    uint64_t bytes);
sluice_status_t sluice_file_write_at(int fd, const char* owner, const char* path, uint64_t at, const void* data,
                                     uint64_t bytes);
