// SPDX-License-Identifier: Apache-2.0
/* Logs every allocation of a process on request; memory.py preloads it into rank processes.
 *
 * torch, gloo, MKL and libsluice all call malloc, so both sides of a comparison are measured in the same way, including
 * blocks that live briefly. The log contains addresses, because memory.py must distinguish parameter gradients (which
 * remain after a backward) from activations. Blocks below 4 KiB are ignored, because their total is small.
 */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define EXPORT     __attribute__((visibility("default")))
#define LOG_EVENTS (1u << 21)
#define SMALLEST   4096u

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);
extern void __libc_free(void*);

typedef struct alloc_event_s {
  uint64_t address;
  int64_t bytes; /* negative when freed */
} alloc_event_t;

static alloc_event_t log_events[LOG_EVENTS]; /* in .bss: costs nothing until used */
static atomic_uint_fast64_t log_used;
static atomic_int log_on;

static void note(void* address, int sign) {
  if (address == NULL || atomic_load_explicit(&log_on, memory_order_relaxed) == 0) return;
  size_t bytes = malloc_usable_size(address);
  if (bytes < SMALLEST) return;
  uint64_t index = atomic_fetch_add(&log_used, 1);
  if (index >= LOG_EVENTS) return; /* alloc_watch_used then tells the reader that the log overflowed */
  log_events[index].address = (uint64_t)(uintptr_t)address;
  log_events[index].bytes = sign * (int64_t)bytes;
}

EXPORT void alloc_watch_start(void) {
  atomic_store(&log_used, 0);
  atomic_store(&log_on, 1);
}

EXPORT void alloc_watch_stop(void) { atomic_store(&log_on, 0); }
EXPORT uint64_t alloc_watch_used(void) { return atomic_load(&log_used); }
EXPORT uint64_t alloc_watch_capacity(void) { return LOG_EVENTS; }
EXPORT const alloc_event_t* alloc_watch_log(void) { return log_events; }

EXPORT void* malloc(size_t bytes) {
  void* address = __libc_malloc(bytes);
  note(address, 1);
  return address;
}

EXPORT void* calloc(size_t count, size_t bytes) {
  void* address = __libc_calloc(count, bytes);
  note(address, 1);
  return address;
}

EXPORT void* realloc(void* old, size_t bytes) {
  note(old, -1);
  void* address = __libc_realloc(old, bytes);
  note(address != NULL || bytes == 0 ? address : old, 1);
  return address;
}

EXPORT void free(void* address) {
  note(address, -1); /* before the free, while the size of the block can be read */
  __libc_free(address);
}

EXPORT void* memalign(size_t alignment, size_t bytes) {
  void* address = __libc_memalign(alignment, bytes);
  note(address, 1);
  return address;
}

EXPORT void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }

EXPORT int posix_memalign(void** out_address, size_t alignment, size_t bytes) {
  if (alignment % sizeof(void*) != 0 || (alignment & (alignment - 1)) != 0 || alignment == 0) return EINVAL;
  void* address = memalign(alignment, bytes);
  if (address == NULL) return ENOMEM;
  *out_address = address;
  return 0;
}
