/* A disk that fails: the process's pread, pwrite and posix_fallocate, in programs that link with these. */
#ifndef SLUICE_CAPI_TEST_OPTIMIZER_FAILING_DISK_H_
#define SLUICE_CAPI_TEST_OPTIMIZER_FAILING_DISK_H_

#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

enum { NEVER = -1 };
typedef enum { FAILS, KILLS } how_t;

extern _Atomic int64_t disk_calls_left[2]; /* of pread, pwrite */
extern _Atomic int64_t disk_calls[2];
extern how_t disk_how;
extern _Atomic ino_t disk_only_file; /* 0: any */
extern _Atomic int32_t disk_is_full;

#endif /* SLUICE_CAPI_TEST_OPTIMIZER_FAILING_DISK_H_ */
