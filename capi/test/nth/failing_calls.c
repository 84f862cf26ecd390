// SPDX-License-Identifier: Apache-2.0
#include "capi/test/nth/failing_calls.h"

#include <dirent.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <locale.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/base/alloc.h"
#include "backend/base/hash.h"
#include "third_party/bazel/test.h"

enum { MOST_FRAMES = 24, SKIPPED_FRAMES = 2 };

extern const char __executable_start[];

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static call_place_t places[MAX_CALL_PLACES];
static int32_t num_places;
static _Atomic int32_t is_on;
static uint64_t failing_key;
static int64_t failing_nth; /* -1: none */
static int32_t has_failed;

static void begin(uint64_t key, int64_t nth) {
  void* frames[1];
  (void)backtrace(frames, 1); /* the first backtrace loads a library */
  pthread_mutex_lock(&mutex);
  for (int32_t i = 0; i < num_places; ++i) places[i].hits_now = 0;
  failing_key = key, failing_nth = nth, has_failed = 0;
  pthread_mutex_unlock(&mutex);
  atomic_store(&is_on, 1);
}

void calls_forget(void) { num_places = 0; }

void calls_count(void) { begin(0, -1); }

void calls_fail(const call_place_t* place, int64_t nth) { begin(place->key, nth); }

int32_t calls_end(void) {
  atomic_store(&is_on, 0);
  pthread_mutex_lock(&mutex);
  const int32_t failed = has_failed;
  pthread_mutex_unlock(&mutex);
  return failed;
}

const call_place_t* calls_places(int32_t* out_count) {
  *out_count = num_places;
  return places;
}

int32_t calls_count_entries(const char* folder) {
  DIR* entries = opendir(folder);
  int32_t count = 0;
  if (entries == NULL) return 0;
  while (readdir(entries) != NULL) ++count;
  closedir(entries);
  return count;
}

static call_place_t* find(const char* name, uint64_t key, const void* caller, int32_t is_allocation) {
  for (int32_t i = 0; i < num_places; ++i) {
    if (places[i].key == key) return &places[i];
  }
  if (num_places == MAX_CALL_PLACES) abort();
  call_place_t* p = &places[num_places++];
  *p = (call_place_t){.name = name, .key = key, .is_allocation = is_allocation};
  p->address = (uintptr_t)caller - (uintptr_t)__executable_start;
  return p;
}

static int32_t strike(const char* name, uint64_t key, const void* caller, int32_t is_allocation) {
  pthread_mutex_lock(&mutex);
  call_place_t* p = find(name, key, caller, is_allocation);
  const int32_t fails = failing_nth >= 0 && key == failing_key && p->hits_now == failing_nth;
  ++p->hits_now;
  if (p->num_hits < p->hits_now) p->num_hits = p->hits_now;
  has_failed |= fails;
  pthread_mutex_unlock(&mutex);
  return fails;
}

/* Counts a system call from this address; returns 1 if the call must fail. */
static int32_t fails_at(const char* name, const void* caller) {
  return atomic_load(&is_on) && strike(name, (uint64_t)(uintptr_t)caller, caller, 0);
}

static int32_t allocation_fails(const char* name, const void* caller) {
  if (!atomic_load(&is_on)) return 0;
  void* frames[MOST_FRAMES];
  const int count = backtrace(frames, MOST_FRAMES);
  const int way = count > SKIPPED_FRAMES ? count - SKIPPED_FRAMES : 0;
  const uint64_t key =
      sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, frames + SKIPPED_FRAMES, (size_t)way * sizeof frames[0]);
  return strike(name, key, caller, 1);
}

/* ---- system calls ------------------------------------------------------------------------------------------------ */

/* Wraps `type name(parameters)`, called with `arguments`. A failing call sets errno to `error` and returns `value`. */
#define WRAP(type, name, parameters, arguments, error, value)                          \
  type __real_##name parameters;                                                       \
  type __wrap_##name parameters;                                                       \
  type __wrap_##name parameters {                                                      \
    if (!fails_at(#name, __builtin_return_address(0))) return __real_##name arguments; \
    errno = (error);                                                                   \
    return (value);                                                                    \
  }

WRAP(int, pthread_create,
     (pthread_t * thread, const pthread_attr_t* attributes, void* (*routine)(void*), void* argument),
     (thread, attributes, routine, argument), 0, EAGAIN)

WRAP(int, socket, (int domain, int type, int protocol), (domain, type, protocol), EMFILE, -1)
WRAP(int, accept4, (int fd, struct sockaddr* address, socklen_t* length, int flags), (fd, address, length, flags),
     ECONNABORTED, -1)
WRAP(int, bind, (int fd, const struct sockaddr* address, socklen_t length), (fd, address, length), EADDRINUSE, -1)
WRAP(int, listen, (int fd, int backlog), (fd, backlog), EADDRINUSE, -1)
WRAP(int, connect, (int fd, const struct sockaddr* address, socklen_t length), (fd, address, length), ENETUNREACH, -1)
WRAP(int, getsockname, (int fd, struct sockaddr* address, socklen_t* length), (fd, address, length), ENOBUFS, -1)
WRAP(int, setsockopt, (int fd, int level, int name, const void* value, socklen_t length),
     (fd, level, name, value, length), ENOBUFS, -1)
WRAP(int, getsockopt, (int fd, int level, int name, void* value, socklen_t* length), (fd, level, name, value, length),
     ENOBUFS, -1)
WRAP(ssize_t, send, (int fd, const void* data, size_t bytes, int flags), (fd, data, bytes, flags), ENOBUFS, -1)
WRAP(ssize_t, sendmsg, (int fd, const struct msghdr* message, int flags), (fd, message, flags), ENOBUFS, -1)
WRAP(ssize_t, recv, (int fd, void* data, size_t bytes, int flags), (fd, data, bytes, flags), ENOMEM, -1)
WRAP(int, shutdown, (int fd, int how), (fd, how), ENOTCONN, -1)
WRAP(int, getifaddrs, (struct ifaddrs * *out), (out), ENOMEM, -1)
WRAP(int, getaddrinfo, (const char* node, const char* service, const struct addrinfo* hints, struct addrinfo** out),
     (node, service, hints, out), 0, EAI_AGAIN)
WRAP(int, gethostname, (char* name, size_t room), (name, room), ENAMETOOLONG, -1)

WRAP(int, epoll_create1, (int flags), (flags), EMFILE, -1)
WRAP(int, epoll_ctl, (int epoll, int op, int fd, struct epoll_event* event), (epoll, op, fd, event), ENOSPC, -1)
WRAP(int, epoll_wait, (int epoll, struct epoll_event* events, int room, int ms), (epoll, events, room, ms), EINTR, -1)
WRAP(int, eventfd, (unsigned count, int flags), (count, flags), EMFILE, -1)
WRAP(int, poll, (struct pollfd * polls, nfds_t count, int ms), (polls, count, ms), ENOMEM, -1)

WRAP(int, madvise, (void* data, size_t bytes, int advice), (data, bytes, advice), ENOMEM, -1)
WRAP(int, mincore, (void* data, size_t bytes, unsigned char* out), (data, bytes, out), EAGAIN, -1)
WRAP(ssize_t, getrandom, (void* data, size_t bytes, unsigned flags), (data, bytes, flags), EAGAIN, -1)
WRAP(locale_t, newlocale, (int mask, const char* name, locale_t base), (mask, name, base), ENOMEM, (locale_t)0)

WRAP(FILE*, fopen, (const char* path, const char* mode), (path, mode), EMFILE, NULL)
WRAP(FILE*, fdopen, (int fd, const char* mode), (fd, mode), ENOMEM, NULL)
WRAP(char*, fgets, (char* text, int room, FILE* file), (text, room, file), EIO, NULL)
WRAP(size_t, fread, (void* data, size_t size, size_t count, FILE* file), (data, size, count, file), EIO, 0)
WRAP(int, fflush, (FILE * file), (file), ENOSPC, EOF)
WRAP(int, fsync, (int fd), (fd), EIO, -1)
WRAP(ssize_t, write, (int fd, const void* data, size_t bytes), (fd, data, bytes), EIO, -1)
WRAP(int, fdatasync, (int fd), (fd), EIO, -1)
WRAP(int, flock, (int fd, int operation), (fd, operation), ENOLCK, -1)
WRAP(ssize_t, pread, (int fd, void* data, size_t bytes, off_t at), (fd, data, bytes, at), EIO, -1)
WRAP(ssize_t, pwrite, (int fd, const void* data, size_t bytes, off_t at), (fd, data, bytes, at), ENOSPC, -1)
WRAP(int, posix_fallocate, (int fd, off_t at, off_t bytes), (fd, at, bytes), 0, ENOSPC)
WRAP(int, ftruncate, (int fd, off_t bytes), (fd, bytes), EIO, -1)
WRAP(char*, realpath, (const char* path, char* out), (path, out), EACCES, NULL)
WRAP(ssize_t, readlink, (const char* path, char* out, size_t bytes), (path, out, bytes), EIO, -1)
WRAP(int, stat, (const char* path, struct stat* out), (path, out), EACCES, -1)
WRAP(int, fstat, (int fd, struct stat* out), (fd, out), EIO, -1)
WRAP(int, rename, (const char* from, const char* to), (from, to), EIO, -1)
WRAP(int, unlink, (const char* path), (path), EIO, -1)
WRAP(int, mkdir, (const char* path, mode_t mode), (path, mode), ENOSPC, -1)
WRAP(int, ioctl, (int fd, unsigned long request, void* argument), (fd, request, argument), EINVAL, -1)
/* A library fails to load, as if it did not exist. */
WRAP(void*, dlopen, (const char* path, int flags), (path, flags), 0, NULL)

int __real_open(const char* path, int flags, ...);
int __wrap_open(const char* path, int flags, ...);
int __wrap_open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  if (!fails_at("open", __builtin_return_address(0))) return __real_open(path, flags, mode);
  errno = EMFILE;
  return -1;
}

/* Wraps `int name(parameter)`, which closes even when it fails: Linux has then released the descriptor. */
#define WRAP_CLOSE(name, parameter, argument, error, value)             \
  int __real_##name parameter;                                          \
  int __wrap_##name parameter;                                          \
  int __wrap_##name parameter {                                         \
    const int32_t fails = fails_at(#name, __builtin_return_address(0)); \
    const int result = __real_##name(argument);                         \
    if (!fails) return result;                                          \
    errno = (error);                                                    \
    return (value);                                                     \
  }

WRAP_CLOSE(close, (int fd), fd, EIO, -1)
WRAP_CLOSE(fclose, (FILE * file), file, ENOSPC, EOF)

/* ---- allocations ------------------------------------------------------------------------------------------------- */

/* Fails like an allocator's limit, so that the test finds a caller that returns NO_MEMORY without asking. */
static void* refuse(const char* what, uint64_t bytes) {
  (void)SLUICE_FAIL(SLUICE_E_OVER_BUDGET, "%s: %llu bytes refused by the test", what, (unsigned long long)bytes);
  return NULL;
}

/* Wraps `void* name(parameters)`. A failing allocation returns `failure`. */
#define WRAP_ALLOCATION(name, parameters, arguments, failure)                   \
  void* __real_##name parameters;                                               \
  void* __wrap_##name parameters;                                               \
  void* __wrap_##name parameters {                                              \
    if (allocation_fails(#name, __builtin_return_address(0))) return (failure); \
    return __real_##name arguments;                                             \
  }

WRAP_ALLOCATION(malloc, (size_t bytes), (bytes), NULL)
WRAP_ALLOCATION(aligned_alloc, (size_t alignment, size_t bytes), (alignment, bytes), NULL)
WRAP_ALLOCATION(sluice_alloc, (sluice_allocator_t * allocator, uint64_t bytes, const char* what),
                (allocator, bytes, what), refuse(what, bytes))
WRAP_ALLOCATION(sluice_alloc_zeroed, (sluice_allocator_t * allocator, uint64_t bytes, const char* what),
                (allocator, bytes, what), refuse(what, bytes))
