/* Logs every allocation of a process while asked to; preloaded into rank processes by memory.py.
 *
 * torch, gloo, MKL and libsluice all end in malloc, so this sees both sides of a comparison alike, whoever asked for
 * the memory and however briefly it lived. The log keeps addresses, because memory.py must tell parameter gradients
 * (which a backward pass leaves behind) from activations. Blocks below 4 KiB are left out: together they are noise.
 * Asked for sites, it keeps the callers of every block as well (memory_blocks.py), which takes time.
 */
#include <errno.h>
#include <execinfo.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define EXPORT     __attribute__((visibility("default")))
#define LOG_EVENTS (1u << 21)
#define SMALLEST   4096u
#define FRAMES     32 /* from an operator of torch to malloc there are twenty */

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
static void* log_sites[LOG_EVENTS][FRAMES];  /* the same; ends with NULL */
static atomic_uint_fast64_t log_used;
static atomic_int log_on, sites_on;
static __thread int in_backtrace; /* what it allocates has no site */

static void note(void* address, int sign) {
  if (address == NULL || atomic_load_explicit(&log_on, memory_order_relaxed) == 0) return;
  size_t bytes = malloc_usable_size(address);
  if (bytes < SMALLEST) return;
  uint64_t index = atomic_fetch_add(&log_used, 1);
  if (index >= LOG_EVENTS) return; /* alloc_watch_used then tells the reader that the log overflowed */
  log_events[index].address = (uint64_t)(uintptr_t)address;
  log_events[index].bytes = sign * (int64_t)bytes;
  int count = 0;
  if (sign > 0 && !in_backtrace && atomic_load_explicit(&sites_on, memory_order_relaxed)) {
    in_backtrace = 1;
    count = backtrace(log_sites[index], FRAMES);
    in_backtrace = 0;
  }
  if (count < FRAMES && atomic_load_explicit(&sites_on, memory_order_relaxed)) log_sites[index][count] = NULL;
}

EXPORT void alloc_watch_start(int with_sites) {
  void* frame;
  if (with_sites) (void)backtrace(&frame, 1); /* loads what it needs */
  atomic_store(&sites_on, with_sites);
  atomic_store(&log_used, 0);
  atomic_store(&log_on, 1);
}

EXPORT void alloc_watch_stop(void) { atomic_store(&log_on, 0); }
EXPORT uint64_t alloc_watch_used(void) { return atomic_load(&log_used); }
EXPORT uint64_t alloc_watch_capacity(void) { return LOG_EVENTS; }
EXPORT const alloc_event_t* alloc_watch_log(void) { return log_events; }
EXPORT int alloc_watch_frames(void) { return FRAMES; }
EXPORT void* const* alloc_watch_sites(void) { return log_sites[0]; }

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
  note(address, -1); /* before, while the block is still ours */
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
