// SPDX-License-Identifier: Apache-2.0
/* A disk that fails on command: wraps pread, pwrite, fdatasync and posix_fallocate of the programs that link it. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

enum { NEVER = -1 };
typedef enum { FAILS, KILLS, DIES } how_t; /* one call fails; it kills the process; it and all later calls fail */

enum { NUM_DISK_CALLS = 3 };
extern _Atomic int64_t disk_calls_left[NUM_DISK_CALLS]; /* calls of pread, pwrite, fdatasync before the failing one */
extern _Atomic int64_t disk_calls[NUM_DISK_CALLS];
extern how_t disk_how;
extern _Atomic ino_t disk_only_file; /* only calls on this file count; 0: any */
extern _Atomic int32_t disk_is_full;
