// SPDX-License-Identifier: Apache-2.0
#include "backend/device/cuda/fake/lane_orders.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/device/cuda/fake/fake_cuda.h"

enum {
  NUM_ORDERS = 4,
  ALL_LANES = -1,
  PAGE = 1024,
  NUM_BUCKETS = 1 << 14,
  NUM_KNOWN = 64,
  WIDEST = 16,
  MOST_OVERWRITES = WIDEST
};

/* The code of a unit that runs: a lane, or code that all lanes execute. */
typedef struct place_s {
  int32_t unit;
  int32_t lane : 8, phase : 24; /* phase: fences of the unit so far, from 1; 0: no place */
} place_t;

typedef struct cell_s { /* shadow of a byte */
  int64_t run;          /* that it belongs to */
  place_t write, read;  /* the last ones */
  place_t of_unit;      /* a read by another unit than `read` */
  place_t of_lane;      /* a read by another lane in the phase of `read` */
} cell_t;

typedef struct page_s {
  struct page_s* next;
  uintptr_t number;
  cell_t cells[PAGE];
} page_t;

typedef struct change_s {
  unsigned char* data;
  uint32_t bytes;
  unsigned char before[WIDEST], after[WIDEST];
} change_t;

typedef struct changes_s {
  change_t* list;
  int64_t count, room;
} changes_t;

/* Memory that a kernel may access, as kernel_accesses.c lists it. */
typedef struct listed_s {
  const unsigned char *begin, *end;
} listed_t;

typedef struct lists_s {
  listed_t* list;
  int64_t count, room, last; /* last: the most recently used */
} lists_t;

/* A second write of a byte: a race if it changes the value. */
typedef struct overwrite_s {
  const unsigned char* data;
  unsigned char before;
  place_t first;
} overwrite_t;

static struct {
  const char* kernel;
  const char* frame; /* of the caller: what is below on the stack is a kernel's own */
  int order, is_running;
  int64_t run, blocks, step, num_problems, told; /* told: the run of the last problem */
  place_t here;
  changes_t first, other, *changes; /* of the first order, of another one, of the current one */
  overwrite_t overwrites[MOST_OVERWRITES];
  int32_t num_overwrites;
  int is_listed;
  lists_t listed[2]; /* may be read; may be written */
  page_t* pages[NUM_BUCKETS];
  page_t* known[NUM_KNOWN]; /* some of them */
  char problem[400];
} state;

static const char* const order_names[NUM_ORDERS] = {"in sequence", "reversed", "rotated", "shuffled"};

/* ---- problems -------------------------------------------------------------------------------------------------- */

static const char* name_of(place_t place, char* text, size_t bytes) {
  if (place.lane == ALL_LANES) {
    snprintf(text, bytes, "unit %d", place.unit);
  } else {
    snprintf(text, bytes, "lane %d of unit %d", place.lane, place.unit);
  }
  return text;
}

/* Counts one problem per run, and describes the first of all. */
__attribute__((format(printf, 1, 2))) static void tell(const char* format, ...) {
  if (state.told == state.run) return;
  state.told = state.run;
  if (state.num_problems++ > 0) return;
  const int length =
      snprintf(state.problem, sizeof state.problem, "%s, lanes %s: ", state.kernel, order_names[state.order]);
  va_list values;
  va_start(values, format);
  vsnprintf(state.problem + length, sizeof state.problem - (size_t)length, format, values);
  va_end(values);
}

static void tell_of_here(const char* what) {
  char here[64];
  tell("%s %s", name_of(state.here, here, sizeof here), what);
}

static void tell_race(const void* data, const char* here, place_t other, const char* there) {
  char names[2][64];
  tell("a race at %p: %s %s, and %s %s", data, name_of(state.here, names[0], sizeof names[0]), here,
       name_of(other, names[1], sizeof names[1]), there);
}

/* ---- shadows --------------------------------------------------------------------------------------------------- */

static page_t* page_of(uintptr_t number) {
  page_t** bucket = &state.pages[number % NUM_BUCKETS];
  page_t* page = *bucket;
  while (page != NULL && page->number != number) page = page->next;
  if (page != NULL) return page;
  page = calloc(1, sizeof *page);
  assert(page != NULL);
  page->number = number;
  page->next = *bucket;
  *bucket = page;
  return page;
}

static cell_t* cell_of(const unsigned char* data) {
  const uintptr_t number = (uintptr_t)data / PAGE;
  page_t** known = &state.known[number % NUM_KNOWN];
  if (*known == NULL || (*known)->number != number) *known = page_of(number);
  cell_t* cell = &(*known)->cells[(uintptr_t)data % PAGE];
  if (cell->run != state.run) *cell = (cell_t){.run = state.run};
  return cell;
}

/* Whether nothing orders that access before one here. */
static int is_unordered(place_t other) {
  if (other.phase == 0) return 0;
  if (other.unit != state.here.unit) return 1;
  return other.phase == state.here.phase && other.lane != state.here.lane;
}

static void check_read(cell_t* cell, const unsigned char* data) {
  if (is_unordered(cell->write)) tell_race(data, "reads", cell->write, "writes");
  if (is_unordered(cell->read)) *(cell->read.unit != state.here.unit ? &cell->of_unit : &cell->of_lane) = cell->read;
  cell->read = state.here;
}

static void check_write(cell_t* cell, const unsigned char* data) {
  const place_t reads[] = {cell->read, cell->of_unit, cell->of_lane};
  for (int i = 0; i < 3; ++i) {
    if (is_unordered(reads[i])) tell_race(data, "writes", reads[i], "reads");
  }
  if (is_unordered(cell->write)) {
    assert(state.num_overwrites < MOST_OVERWRITES);
    state.overwrites[state.num_overwrites++] = (overwrite_t){data, *data, cell->write};
  }
  cell->write = state.here;
}

/* Called before the next write of a lane, and after its last one. */
static void settle_overwrites(void) {
  for (int32_t i = 0; i < state.num_overwrites; ++i) {
    const overwrite_t* o = &state.overwrites[i];
    if (*o->data != o->before) tell_race(o->data, "writes", o->first, "writes another value");
  }
  state.num_overwrites = 0;
}

static void keep(unsigned char* data, uint32_t bytes) {
  changes_t* c = state.changes;
  if (c->count == c->room) {
    c->room = 2 * c->room + 1024;
    c->list = realloc(c->list, (size_t)c->room * sizeof *c->list);
    assert(c->list != NULL);
  }
  c->list[c->count] = (change_t){.data = data, .bytes = bytes};
  memcpy(c->list[c->count++].before, data, bytes);
}

/* ---- the list of accesses that hazards are computed from -------------------------------------------------------- */

static void add_listed(lists_t* l, const void* data, uint64_t bytes) {
  if (l->count == l->room) {
    l->room = 2 * l->room + 256;
    l->list = realloc(l->list, (size_t)l->room * sizeof *l->list);
    assert(l->list != NULL);
  }
  l->list[l->count++] = (listed_t){data, (const unsigned char*)data + bytes};
}

/* What a kernel writes it may also read. */
static void collect(const void* data, uint64_t bytes, int is_write) {
  add_listed(&state.listed[0], data, bytes);
  if (is_write) add_listed(&state.listed[1], data, bytes);
}

static int by_begin(const void* x, const void* y) {
  const listed_t *a = x, *b = y;
  return (a->begin > b->begin) - (a->begin < b->begin);
}

static void sort_and_merge(lists_t* l) {
  int64_t kept = 0;
  if (l->count > 0) qsort(l->list, (size_t)l->count, sizeof *l->list, by_begin);
  for (int64_t i = 0; i < l->count; ++i) {
    listed_t* last = kept > 0 ? &l->list[kept - 1] : NULL;
    if (last == NULL || l->list[i].begin > last->end) {
      l->list[kept++] = l->list[i];
    } else if (l->list[i].end > last->end) {
      last->end = l->list[i].end;
    }
  }
  l->count = kept;
  l->last = 0;
}

static int is_within(const listed_t* l, const unsigned char* data, size_t bytes) {
  return data >= l->begin && data + bytes <= l->end;
}

static void check_listed(lists_t* l, const unsigned char* data, size_t bytes, const char* what) {
  if (l->last < l->count && is_within(&l->list[l->last], data, bytes)) return;
  int64_t low = 0, high = l->count; /* the first that begins after data */
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (l->list[middle].begin > data) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  l->last = low > 0 ? low - 1 : 0;
  if (low == 0 || !is_within(&l->list[low - 1], data, bytes)) {
    char here[64];
    tell("%s %s %zu bytes at %p, which kernel_accesses.c does not list", name_of(state.here, here, sizeof here), what,
         bytes, (const void*)data);
  }
}

__attribute__((unused)) static void note(void* address, size_t bytes, int is_write) {
  unsigned char* data = address;
  if (!state.is_running || (!is_write && state.order > 0)) return;
  if ((const char*)data < state.frame && (const char*)data > (const char*)__builtin_frame_address(0)) return;
  for (; bytes > WIDEST; bytes -= WIDEST, data += WIDEST) note(data, WIDEST, is_write);
  if (is_write) settle_overwrites();
  if (is_write) keep(data, (uint32_t)bytes);
  if (state.order > 0) return; /* races and accesses are the same in every order */
  if (state.is_listed) check_listed(&state.listed[is_write], data, bytes, is_write ? "writes" : "reads");
  for (size_t i = 0; i < bytes; ++i) (is_write ? check_write : check_read)(cell_of(data + i), data + i);
}

/* ---- hooks of the compiler ------------------------------------------------------------------------------------- */

#if !defined(__SANITIZE_THREAD__)
#define HOOK(name, bytes)                                      \
  void __tsan_read##name(void* data);                          \
  void __tsan_read##name(void* data) { note(data, bytes, 0); } \
  void __tsan_write##name(void* data);                         \
  void __tsan_write##name(void* data) { note(data, bytes, 1); }
#define UNALIGNED_HOOK(bytes)                                             \
  void __tsan_unaligned_read##bytes(void* data);                          \
  void __tsan_unaligned_read##bytes(void* data) { note(data, bytes, 0); } \
  void __tsan_unaligned_write##bytes(void* data);                         \
  void __tsan_unaligned_write##bytes(void* data) { note(data, bytes, 1); }
HOOK(1, 1)
HOOK(2, 2)
HOOK(4, 4)
HOOK(8, 8)
HOOK(16, 16)
UNALIGNED_HOOK(2)
UNALIGNED_HOOK(4)
UNALIGNED_HOOK(8)
UNALIGNED_HOOK(16)
void __tsan_read_range(void* data, size_t bytes);
void __tsan_read_range(void* data, size_t bytes) { note(data, bytes, 0); }
void __tsan_write_range(void* data, size_t bytes);
void __tsan_write_range(void* data, size_t bytes) { note(data, bytes, 1); }
void __tsan_func_entry(void* caller);
void __tsan_func_entry(void* caller) { (void)caller; }
void __tsan_func_exit(void);
void __tsan_func_exit(void) {}
void __tsan_init(void);
void __tsan_init(void) {}
#endif

/* ---- hooks of lanes.cu.h --------------------------------------------------------------------------------------- */

static int lane_of(int at) {
  const uint64_t random = ((uint64_t)state.blocks * 2654435761u + 97) * UINT64_C(6364136223846793005) >> 32;
  switch (state.order) {
    case 0: return at;
    case 1: return 31 - at;
    case 2: return (int)((at + 5 * state.blocks + 1) % 32);
    default: return (int)(((at ^ (random & 31)) * (random >> 5 | 1) + (random >> 16)) % 32);
  }
}

int sluice_fake_lane_at(int at) {
  settle_overwrites();
  if (at == 0) sluice_fake_at_warp_op();
  if (at == 0) ++state.blocks;
  state.here.lane = at < 32 ? lane_of(at) : ALL_LANES;
  return state.here.lane;
}

int64_t sluice_fake_warp_at(int64_t at, int64_t warps) {
  switch (state.order) {
    case 0: return warps - 1 - at;
    case 1: return at;
    case 2: return (at + warps / 2) % warps;
    default: return (at * state.step + 1) % warps;
  }
}

void sluice_fake_at_unit(int64_t unit) {
  settle_overwrites();
  state.here = (place_t){(int32_t)unit, ALL_LANES, 1};
}

void sluice_fake_at_lane(int lane) {
  if (state.here.lane != lane) tell_of_here("uses a register of another lane");
}

void sluice_fake_at_warp_op(void) {
  if (state.here.lane != ALL_LANES) tell_of_here("reaches a warp operation without the other lanes");
}

void sluice_fake_at_fence(void) {
  settle_overwrites();
  sluice_fake_at_warp_op();
  ++state.here.phase;
}

/* ---- runs ------------------------------------------------------------------------------------------------------ */

/* Returns a number without a common divisor with `warps`, near its golden section. */
static int64_t step_of(int64_t warps) {
  for (int64_t step = (int64_t)((double)warps * 0.618) + 1;; ++step) {
    int64_t a = warps, b = step;
    while (b != 0) {
      const int64_t rest = a % b;
      a = b;
      b = rest;
    }
    if (a == 1) return step;
  }
}

static void run_once(int order, sluice_ordered_kernel_fn_t fn, int64_t warps, const void* args, changes_t* changes) {
  state.order = order;
  state.changes = changes;
  state.changes->count = 0;
  ++state.run;
  state.blocks = 0;
  state.is_running = 1;
  fn(warps, args);
  settle_overwrites();
  state.is_running = 0;
  for (int64_t i = 0; i < changes->count; ++i) {
    memcpy(changes->list[i].after, changes->list[i].data, changes->list[i].bytes);
  }
}

static void undo(const changes_t* c) {
  for (int64_t i = c->count - 1; i >= 0; --i) memcpy(c->list[i].data, c->list[i].before, c->list[i].bytes);
}
static void redo(const changes_t* c) {
  for (int64_t i = 0; i < c->count; ++i) memcpy(c->list[i].data, c->list[i].after, c->list[i].bytes);
}
static void compare(const changes_t* c) {
  for (int64_t i = 0; i < c->count; ++i) {
    const change_t* change = &c->list[i];
    if (memcmp(change->data, change->after, change->bytes) != 0) tell("other bits at %p", (void*)change->data);
  }
}

void sluice_fake_run_in_orders(const char* name, sluice_ordered_kernel_fn_t fn, int64_t warps, const void* args) {
  changes_t *first = &state.first, *other = &state.other;
  state.kernel = name;
  state.frame = __builtin_frame_address(0);
  state.step = step_of(warps);
  run_once(0, fn, warps, args, first);
  for (int order = 1; order < NUM_ORDERS; ++order) {
    undo(first);
    run_once(order, fn, warps, args, other);
    compare(first);
    undo(other);
    redo(first);
    compare(other);
  }
}

/* The kernels of the image in the second build. (emulated_kernels.cc) */
sluice_emulated_kernel_fn_t sluice_ordered_kernel(const char* name, size_t* out_bytes);

static void run_launch(const char* name, int64_t warps, const void* args) {
  size_t bytes;
  state.listed[0].count = state.listed[1].count = 0;
  sluice_fake_list_accesses(name, args, collect);
  for (int i = 0; i < 2; ++i) sort_and_merge(&state.listed[i]);
  state.is_listed = 1;
  sluice_fake_run_in_orders(name, sluice_ordered_kernel(name, &bytes), warps, args);
  state.is_listed = 0;
}

int sluice_fake_orders_begin(void) {
#if defined(__SANITIZE_THREAD__)
  return 0;
#else
  sluice_fake_cuda_run_kernels_by(run_launch);
  return 1;
#endif
}

int64_t sluice_fake_orders_end(char* out, size_t out_bytes) {
  const int64_t found = state.num_problems;
  sluice_fake_cuda_run_kernels_by(NULL);
  snprintf(out, out_bytes, "%s", state.problem);
  state.num_problems = 0;
  memset(state.known, 0, sizeof state.known);
  for (int i = 0; i < 2; ++i) {
    free(state.listed[i].list);
    state.listed[i] = (lists_t){NULL, 0, 0, 0};
  }
  free(state.first.list);
  free(state.other.list);
  state.first = state.other = (changes_t){NULL, 0, 0};
  state.problem[0] = '\0';
  for (size_t i = 0; i < NUM_BUCKETS; ++i) {
    for (page_t *page = state.pages[i], *next; page != NULL; page = next) {
      next = page->next;
      free(page);
    }
    state.pages[i] = NULL;
  }
  return found;
}
