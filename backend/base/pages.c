#include "backend/base/pages.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/base/pages_kept.h"
#include "backend/base/pages_rates.h"
#include "backend/base/pages_there.h"
#include "backend/base/tensor.h"

#define HUGE_PAGE ((uintptr_t)2 << 20)
/* Of a measured range, each way: more says nothing new. */
#define MOST_MEASURED ((uintptr_t)256 << 20)
#define PIECE         ((uintptr_t)8 << 20)

#ifdef MADV_HUGEPAGE

typedef enum setting_e { NEVER = 0, ALWAYS, WHERE_FASTER } setting_t;

static setting_t setting;
static pthread_once_t asked = PTHREAD_ONCE_INIT;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static sluice_pages_rates_t rates;

/* Another thread may hold the mutex at the moment of a fork. */
static void reset_in_child(void) { pthread_mutex_init(&mutex, NULL); }

static void ask(void) {
  const char* text = getenv("SLUICE_HUGE_PAGES");
  setting = text == NULL || text[0] == '\0' ? WHERE_FASTER : strcmp(text, "0") == 0 ? NEVER : ALWAYS;
  pthread_atfork(NULL, NULL, reset_in_child);
  if (setting == WHERE_FASTER) sluice_pages_recall(&rates);
}

static void advise(uintptr_t begin, uintptr_t end) {
  (void)madvise((void*)begin, end - begin, MADV_HUGEPAGE); /* a system without huge pages refuses: nothing is lost */
}

/* Has each page brought into memory; what they hold stays. Seconds. */
static double bring(uintptr_t begin, uintptr_t end, uintptr_t page) {
  const uint64_t start = sluice_now_ns();
  for (uintptr_t at = begin; at < end; at += page) __atomic_fetch_or((unsigned char*)at, 0, __ATOMIC_RELAXED);
  return sluice_seconds(sluice_now_ns() - start);
}

/* Half of the range each way. Huge pages that take twice as long as small ones are not waited for any longer. */
static void measure(sluice_pages_rate_t* rate, uintptr_t begin, uintptr_t end, uintptr_t page) {
  uintptr_t each = ((end - begin) / 2) & ~(HUGE_PAGE - 1);
  if (each > MOST_MEASURED) each = MOST_MEASURED;
  const double plain = bring(begin, begin + each, page);
  begin += each;
  double huge = 0;
  uintptr_t done = 0;
  while (done < each && huge <= 2 * plain) {
    const uintptr_t next = each - done < PIECE ? each - done : PIECE;
    advise(begin + done, begin + done + next);
    huge += bring(begin + done, begin + done + next, page);
    done += next;
  }
  const double took[SLUICE_PAGES_WAYS] = {plain / (double)each, huge / (double)done};
  sluice_pages_add(rate, took);
  if (rate->measured >= SLUICE_PAGES_FIRST) sluice_pages_keep(&rates);
  if (sluice_pages_are_better_huge(rate) && begin + done < end) advise(begin + done, end);
}

/* may_measure: all of the range will be written. Where another thread measures nothing is asked for. */
static void choose(uintptr_t begin, uintptr_t end, int may_measure) {
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  if (pthread_mutex_trylock(&mutex) != 0) return;
  sluice_pages_rate_t* rate = sluice_pages_rate_of(&rates, end - begin);
  if (may_measure && end - begin >= 2 * HUGE_PAGE && !sluice_pages_are_there(begin, end) && sluice_pages_is_due(rate)) {
    measure(rate, begin, end, page);
  } else if (sluice_pages_are_better_huge(rate)) {
    advise(begin, end);
  }
  pthread_mutex_unlock(&mutex);
}

static void advise_range(const void* data, uint64_t bytes, int may_measure) {
  if (data == NULL || bytes < SLUICE_PAGES_LARGE) return;
  pthread_once(&asked, ask);
  uintptr_t begin = ((uintptr_t)data + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
  uintptr_t end = ((uintptr_t)data + (uintptr_t)bytes) & ~(HUGE_PAGE - 1);
  if (setting == NEVER || end <= begin) return;
  int before = errno;
  if (setting == ALWAYS) {
    advise(begin, end);
  } else {
    choose(begin, end, may_measure);
  }
  errno = before;
}

#else

static void advise_range(const void* data, uint64_t bytes, int may_measure) {
  (void)data, (void)bytes, (void)may_measure;
}

#endif

void sluice_pages_advise(const void* data, uint64_t bytes) { advise_range(data, bytes, 1); }

void sluice_pages_advise_room(const void* data, uint64_t bytes) { advise_range(data, bytes, 0); }

typedef struct range_s {
  const char* begin;
  const char* end;
} range_t;

/* Where the tensor's elements lie; empty for tensors with gaps, with overlaps, or not on the CPU. */
static range_t range_of(const sluice_tensor_t* t) {
  const range_t none = {NULL, NULL};
  if (t == NULL || t->data == NULL || t->device_type != SLUICE_DEVICE_CPU) return none;
  int64_t last = 0, elements = sluice_tensor_elements(t), size = t->type_bits / 8;
  for (int32_t d = 0; d < t->ndim; ++d) {
    int64_t stride = sluice_tensor_stride(t, d);
    if (stride < 0) return none;
    last += (t->shape[d] - 1) * stride;
  }
  if (elements <= 0 || last + 1 != elements) return none;
  const char* data = sluice_tensor_data(t);
  return (range_t){data, data + elements * size};
}

void sluice_pages_advise_tensor(const sluice_tensor_t* tensor) {
  range_t range = range_of(tensor);
  sluice_pages_advise(range.begin, (uint64_t)(range.end - range.begin));
}

/* Whether it is fresh shows before it is measured, which brings some of it in. */
static void advise_run(range_t run, sluice_pages_ahead_t* ahead) {
  const uint64_t bytes = (uint64_t)(run.end - run.begin);
  if (ahead != NULL) sluice_pages_ahead_add(ahead, run.begin, bytes);
  sluice_pages_advise(run.begin, bytes);
}

void sluice_pages_advise_slices(const sluice_tensor_t* const* lists, int32_t num_lists, int32_t count,
                                sluice_pages_ahead_t* ahead) {
  range_t run = {NULL, NULL};
  for (int32_t i = 0; i < count; ++i) {
    for (int32_t k = 0; k < num_lists; ++k) {
      range_t next = range_of(lists[k] == NULL ? NULL : &lists[k][i]);
      if (next.begin == NULL) continue;
      if (next.begin == run.end) {
        run.end = next.end;
        continue;
      }
      advise_run(run, ahead);
      run = next;
    }
  }
  advise_run(run, ahead);
}
