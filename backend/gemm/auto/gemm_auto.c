// SPDX-License-Identifier: Apache-2.0
/* The selector, sluice_gemm_create: chooses which implementation runs a list of GEMMs.
 *
 * Lists are divided into classes (dtypes, layout, sizes, beta). Until a class is decided, its calls use the default
 * order of kinds, "native" first, and each call also measures the candidates a little (auto_race.h). Measurements use
 * parts of the list's GEMMs with their operands (auto_parts.h), since the speed of libraries depends more on where
 * operands are in memory than on their sizes. The order found is kept for the process, so that every context makes the
 * same choice, and in the machine cache for later processes (auto_cache.h). `ref` is always the last, for lists that no
 * other kind supports; it is not measured.
 */
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/dtype.h"
#include "backend/base/hash.h"
#include "backend/base/log.h"
#include "backend/base/threads.h"
#include "backend/gemm/auto/auto_cache.h"
#include "backend/gemm/auto/auto_parts.h"
#include "backend/gemm/auto/auto_race.h"
#include "backend/gemm/blas/gemm_blas.h"
#include "backend/gemm/gemm.h"
#include "backend/gemm/gemm_form.h"
#include "backend/gemm/host/gemm_host.h"
#include "backend/gemm/native/gemm_native.h"
#include "backend/gemm/onednn/gemm_onednn.h"

enum { NATIVE, BLAS, ONEDNN, HOST, REF, NUM_KINDS };
_Static_assert((int)REF == (int)SLUICE_RACE_KINDS, "all but ref race");
enum { NUM_DTYPES = 3, NUM_LAYOUTS = 4, NUM_ROWS = 9, NUM_NK = 3 };
enum { CANDIDATES_BYTES = 288 };
enum { NUM_CLASSES = NUM_DTYPES * 2 * NUM_LAYOUTS * NUM_ROWS * NUM_NK * 2 };

/* Limits of a run of a candidate: arithmetic for each thread (about 8 ms at 130 GFLOP/s) and bytes of results. A
 * quarter of the arithmetic was not enough: some libraries first pack the rows of a GEMM. In a pass this cost is spread
 * over all columns, in a part only over a few, so such libraries lost races that they would win in a pass. The first
 * run, which does not count, is shorter. */
#define MEASURE_FLOP       (1024.0 * 1024 * 1024)
#define MEASURE_FIRST_FLOP (MEASURE_FLOP / 8)
#define MEASURE_BYTES      (SLUICE_GEMM_SCRATCH_BYTES / 2) /* the other half is for temporaries of the candidate */
/* Among kinds within this factor of the fastest, the first in the order of kinds wins, so that noise does not decide.
 * "native", the first, gives the same bits for every n. */
#define MEASURE_MARGIN 1.03
/* If one library is already in use, the time of another counts this many times: its idle threads would spin on the same
 * cores. "native" has no threads of its own. */
#define MEASURE_NEWCOMER 1.25

/* Kinds in the order in which they are tried: four bits for each (kind + 1), the lowest bits first. 0: not known. */
typedef uint32_t order_t;

typedef struct sluice_gemm_auto_s {
  sluice_gemm_t base;
  sluice_gemm_t* kinds[NUM_KINDS]; /* NULL: not opened; REF always is */
  int measures;                    /* 0: the named kind is always tried before ref */
  int in_use;                      /* one bit for each kind that is the first choice of a class */
  order_t named;                   /* the order when nothing is measured */
  sluice_host_gemm_fn_t host_gemm; /* NULL: none */
  uint64_t signature;              /* of the candidates: selectors with the same candidates share choices */
  order_t classes[NUM_CLASSES];
} sluice_gemm_auto_t;

/* ---- choices of the process ------------------------------------------------------------------------------------ */

typedef struct known_s {
  uint64_t signature;
  int32_t class_id;
  order_t order;           /* 0: being measured */
  int64_t runs;            /* runs so far, which determine where the next one begins */
  sluice_gemm_race_t race; /* started with the first run */
} known_t;

static struct {
  pthread_mutex_t mutex; /* also held while measuring: two ranks in one process would disturb each other */
  int count;
  known_t entries[1024]; /* when it is full, no more classes are measured */
} known = {.mutex = PTHREAD_MUTEX_INITIALIZER};

/* Returns the entry, and adds one if there is none; NULL if the table is full. */
static known_t* known_of(uint64_t signature, int32_t class_id) {
  for (int i = 0; i < known.count; ++i) {
    known_t* entry = &known.entries[i];
    if (entry->signature == signature && entry->class_id == class_id) return entry;
  }
  if (known.count == (int)(sizeof known.entries / sizeof known.entries[0])) return NULL;
  known_t* entry = &known.entries[known.count++];
  *entry = (known_t){.signature = signature, .class_id = class_id};
  return entry;
}

static uint64_t signature_with(uint64_t signature, const void* data, size_t bytes) {
  return sluice_hash_bytes(signature ^ SLUICE_HASH_OF_NOTHING, data, bytes);
}

/* ---- classes --------------------------------------------------------------------------------------------------- */

typedef struct sluice_gemm_class_s {
  int32_t id;
  int32_t layout, rows, nk; /* parts of the id */
  sluice_gemm_form_t form;  /* of the largest GEMM */
} sluice_gemm_class_t;

static const int64_t row_limits[NUM_ROWS - 1] = {4, 12, 24, 48, 96, 192, 384, 768};

static double volume(const sluice_gemm_problem_t* p) { return (double)p->m * (double)p->n * (double)p->k; }

/* Returns 0 if the list has no class: it has nothing to compute, dtypes or strides that only ref supports, or packed
 * weights, which "native" reads in place and all other kinds need decoded. */
static int classify(const sluice_grouped_gemm_t* list, sluice_gemm_class_t* out) {
  int dtype;
  if (list->packed != NULL) return 0;
  switch (list->dtype_ab) {
    case SLUICE_DTYPE_F32: dtype = 0; break;
    case SLUICE_DTYPE_BF16: dtype = 1; break;
    case SLUICE_DTYPE_F16: dtype = 2; break;
    default: return 0;
  }
  const sluice_gemm_problem_t* largest = NULL;
  int64_t rows = 0; /* of an expert: m, or k in a weight gradient */
  int64_t depths = 0;
  int64_t busy = 0;
  for (int64_t i = 0; i < list->count; ++i) {
    const sluice_gemm_problem_t* p = &list->problems[i];
    if (volume(p) == 0) continue;
    rows += p->m;
    depths += p->k;
    ++busy;
    if (largest == NULL || volume(p) > volume(largest)) largest = p;
  }
  if (largest == NULL || !sluice_gemm_form(largest, &out->form)) return 0;

  static const double nk_limits[NUM_NK - 1] = {1 << 18, 1 << 21};
  int layout = out->form.trans_a * 2 + out->form.trans_b;
  int mixed = list->dtype_c != list->dtype_ab;
  int row_class = 0;
  rows = (out->form.trans_a ? depths : rows) / busy;
  while (row_class < NUM_ROWS - 1 && rows > row_limits[row_class]) ++row_class;
  int nk_class = 0;
  const double weights = (double)out->form.n * (double)(out->form.trans_a ? out->form.m : out->form.k);
  while (nk_class < NUM_NK - 1 && weights > nk_limits[nk_class]) ++nk_class;

  out->id = dtype;
  out->id = out->id * 2 + mixed;
  out->id = out->id * NUM_LAYOUTS + layout;
  out->id = out->id * NUM_ROWS + row_class;
  out->id = out->id * NUM_NK + nk_class;
  out->id = out->id * 2 + (list->beta != 0.0f);
  out->layout = layout, out->rows = row_class, out->nk = nk_class;
  /* Measure with the rows of an expert of average size. */
  int64_t* own = out->form.trans_a ? &out->form.k : &out->form.m;
  if (out->form.m == largest->m && rows < *own) *own = rows;
  return 1;
}

/* Describes the class in words, for the log. */
static void describe(const sluice_gemm_class_t* class, const sluice_grouped_gemm_t* list, char* text, size_t bytes) {
  static const char* const layouts[NUM_LAYOUTS] = {"NN", "NT", "TN", "TT"};
  static const char* const nk_texts[NUM_NK] = {"nk <= 2^18", "nk <= 2^21", "nk > 2^21"};
  int last = class->rows == NUM_ROWS - 1;
  snprintf(text, bytes, "%s -> %s %s, rows %s %lld, %s, beta %d", sluice_dtype_name(list->dtype_ab),
           sluice_dtype_name(list->dtype_c), layouts[class->layout],
           last ? ">" : "<=", (long long)row_limits[last ? class->rows - 1 : class->rows], nk_texts[class->nk],
           (int)list->beta);
}

/* ---- measuring ------------------------------------------------------------------------------------------------- */

static order_t order_append(order_t order, int kind) {
  int shift = 0;
  while ((order >> shift) & 0xf) shift += 4;
  return order | (order_t)(kind + 1) << shift;
}

/* Runs GEMMs through "host". A GEMM that the host declines, without touching C, goes to the next kind that supports it.
 */
static sluice_status_t run_host(sluice_gemm_auto_t* selector, const sluice_grouped_gemm_t* list) {
  for (int64_t i = 0; i < list->count; ++i) {
    if (sluice_gemm_host_call(selector->kinds[HOST], list, i) == 0) continue;
    sluice_grouped_gemm_t one = *list;
    one.problems = &list->problems[i];
    one.count = 1;
    sluice_gemm_t* next = selector->kinds[REF];
    for (int kind = 0; kind < HOST; ++kind) {
      sluice_gemm_t* gemm = selector->kinds[kind];
      if (gemm != NULL && gemm->vtable->supports(gemm, &one)) {
        next = gemm;
        break;
      }
    }
    SLUICE_TRY(next->vtable->run(next, &one));
  }
  return SLUICE_OK;
}

/* Returns the seconds of one run; INFINITY if the kind fails or declines. */
static double time_run(sluice_gemm_auto_t* selector, int kind, const sluice_grouped_gemm_t* list) {
  sluice_gemm_t* gemm = selector->kinds[kind];
  uint64_t begin = sluice_now_ns();
  sluice_status_t status = SLUICE_OK;
  if (kind != HOST) status = gemm->vtable->run(gemm, list);
  for (int64_t i = 0; kind == HOST && status == SLUICE_OK && i < list->count; ++i) {
    if (sluice_gemm_host_call(gemm, list, i) != 0) status = SLUICE_E_UNSUPPORTED;
  }
  return status == SLUICE_OK ? sluice_seconds(sluice_now_ns() - begin) : INFINITY;
}

static order_t sort(const double* measured, int in_use) {
  order_t order = 0;
  double times[NUM_KINDS];
  for (int kind = 0; kind < REF; ++kind) {
    times[kind] = measured[kind];
    if (kind != NATIVE && in_use != 0 && (in_use & 1 << kind) == 0) times[kind] *= MEASURE_NEWCOMER;
  }
  int taken[NUM_KINDS] = {0};
  for (;;) {
    double best = INFINITY;
    for (int kind = 0; kind < REF; ++kind) {
      if (!taken[kind] && times[kind] < best) best = times[kind];
    }
    if (best == INFINITY) return order_append(order, REF);
    for (int kind = 0; kind < REF; ++kind) {
      if (taken[kind] || times[kind] > MEASURE_MARGIN * best) continue;
      taken[kind] = 1;
      order = order_append(order, kind);
      break;
    }
  }
}

/* Returns one bit for each kind that supports the run. */
static uint32_t takers_of(const sluice_gemm_auto_t* selector, const sluice_grouped_gemm_t* run) {
  uint32_t takers = 0;
  for (int kind = 0; kind < REF; ++kind) {
    const sluice_gemm_t* gemm = selector->kinds[kind];
    if (gemm != NULL && gemm->vtable->supports(gemm, run)) takers |= 1u << kind;
  }
  return takers;
}

/* Spends the credit of the class on runs of candidates. This comes before the call, which overwrites their results. */
static void measure(sluice_gemm_auto_t* selector, const sluice_grouped_gemm_t* list, const sluice_gemm_class_t* class,
                    known_t* entry) {
  sluice_gemm_race_t* race = &entry->race;
  if (race->own == 0) return; /* the first call: there is no credit yet */
  const double most_flop = race->round == 0 ? MEASURE_FIRST_FLOP : MEASURE_FLOP;
  sluice_gemm_parts_t parts;
  const sluice_threads_t pool = sluice_threads_find();
  sluice_gemm_parts_begin(&parts, list, &class->form, sluice_threads_available(&pool), most_flop, MEASURE_BYTES);
  parts.problem = entry->runs * parts.in_run % list->count;
  const double flop = 2 * volume(&parts.part) * (double)parts.in_run;
  if (entry->runs > 0 && sluice_gemm_race_next(race, flop) < 0) return;
  const uint64_t bytes = sluice_gemm_parts_result_bytes(&parts);
  void* scratch = NULL;
  if (bytes > 0) {
    scratch = sluice_alloc_zeroed(selector->base.allocator, bytes, "gemm auto: a result to measure with");
    if (scratch == NULL) return; /* the call may need less memory; a later call measures */
  }
  sluice_grouped_gemm_t run = *list;
  run.count = parts.in_run;
  run.problems = sluice_gemm_parts_next(&parts, scratch);
  if (entry->runs == 0) sluice_gemm_race_start(race, takers_of(selector, &run));
  const int round = race->round; /* the next round may have parts of another size */
  for (int kind, first = 1; race->round == round && (kind = sluice_gemm_race_next(race, flop)) >= 0; first = 0) {
    if (!first) run.problems = sluice_gemm_parts_next(&parts, scratch);
    sluice_gemm_race_ran(race, kind, time_run(selector, kind, &run), flop);
    ++entry->runs;
  }
  sluice_free(selector->base.allocator, scratch, bytes);
}

static void decide(sluice_gemm_auto_t* selector, const sluice_grouped_gemm_t* list, const sluice_gemm_class_t* class,
                   known_t* entry) {
  entry->order = sort(entry->race.best, selector->in_use);
  char text[256] = "ref: nothing else takes it";
  int length = 0;
  for (int kind = 0; kind < REF; ++kind) {
    const double best = entry->race.best[kind];
    if (!isfinite(best) || length >= (int)sizeof text) continue;
    length += snprintf(text + length, sizeof text - (size_t)length, "%s%s %.1f", length == 0 ? "" : ", ",
                       selector->kinds[kind]->name, 1e-9 / fmax(best, 1e-18));
  }
  char words[96];
  describe(class, list, words, sizeof words);
  sluice_log(SLUICE_LOG_INFO, "gemm auto: %s: %s (GFLOP/s of %s in %lld runs)", words,
             selector->kinds[(entry->order & 0xf) - 1]->name, text, (long long)entry->runs);
}

/* Marks a kind as the first choice of a class, and adds it to the name that contexts show. */
static void note_choice(sluice_gemm_auto_t* selector, int kind) {
  if (kind != REF && kind != NATIVE) selector->in_use |= 1 << kind;
  char* name = selector->base.name;
  const char* choice = selector->kinds[kind]->name;
  if (strcmp(name, "auto") == 0) name[0] = '\0';
  if (strstr(name, choice) != NULL) return;
  size_t used = strlen(name);
  snprintf(name + used, sizeof selector->base.name - used, "%s%s", used == 0 ? "" : " + ", choice);
}

/* Writes the key of the choices in the machine cache: the candidates, and the file that has the host's function. */
static void candidates_of(const sluice_gemm_auto_t* selector, char text[CANDIDATES_BYTES]) {
  const char* file = "";
  Dl_info info;
  if (selector->host_gemm != NULL && dladdr(*(void* const*)&selector->host_gemm, &info) != 0) {
    const char* slash = strrchr(info.dli_fname, '/');
    file = slash != NULL ? slash + 1 : info.dli_fname;
  }
  snprintf(text, CANDIDATES_BYTES, "%s, host of %.64s", selector->base.made_of, file);
}

static void keep(const sluice_gemm_auto_t* selector) {
  char candidates[CANDIDATES_BYTES];
  candidates_of(selector, candidates);
  sluice_gemm_choice_t choices[NUM_CLASSES];
  int count = 0;
  for (int i = 0; i < known.count && count < NUM_CLASSES; ++i) {
    const known_t* entry = &known.entries[i];
    if (entry->signature != selector->signature || entry->order == 0) continue;
    choices[count++] = (sluice_gemm_choice_t){entry->class_id, entry->order};
  }
  sluice_gemm_choices_write(candidates, choices, count);
}

/* Whether an order from the cache is valid: opened kinds, each once, ref the last. */
static int is_order(const sluice_gemm_auto_t* selector, order_t order) {
  uint32_t met = 0;
  for (; order != 0; order >>= 4) {
    const int kind = (int)(order & 0xf) - 1;
    if (kind < 0 || kind >= NUM_KINDS || selector->kinds[kind] == NULL || (met >> kind & 1) != 0) return 0;
    met |= 1u << kind;
    if (kind == REF) return order >> 4 == 0;
  }
  return 0;
}

/* Reads the choices of earlier processes, once for each set of candidates. */
static void recall(const sluice_gemm_auto_t* selector) {
  pthread_mutex_lock(&known.mutex);
  int is_new = 1;
  for (int i = 0; i < known.count; ++i) is_new = is_new && known.entries[i].signature != selector->signature;
  sluice_gemm_choice_t choices[NUM_CLASSES];
  char candidates[CANDIDATES_BYTES];
  candidates_of(selector, candidates);
  const int count = is_new ? sluice_gemm_choices_read(candidates, choices, NUM_CLASSES) : 0;
  for (int i = 0; i < count; ++i) {
    if (choices[i].class_id >= NUM_CLASSES || !is_order(selector, choices[i].order)) continue;
    known_t* entry = known_of(selector->signature, choices[i].class_id);
    if (entry != NULL) entry->order = choices[i].order;
  }
  pthread_mutex_unlock(&known.mutex);
}

/* Returns the order for a list. out_entry: the entry whose race gets credit for the time of the call, or NULL. */
static order_t order_of(sluice_gemm_auto_t* selector, const sluice_grouped_gemm_t* list, known_t** out_entry) {
  sluice_gemm_class_t class;
  *out_entry = NULL;
  if (!selector->measures || !classify(list, &class)) return selector->named;
  if (selector->classes[class.id] != 0) return selector->classes[class.id];
  if (pthread_mutex_trylock(&known.mutex) != 0) return selector->named; /* another rank of this process measures */
  known_t* entry = known_of(selector->signature, class.id);
  if (entry != NULL && entry->order == 0) {
    measure(selector, list, &class, entry);
    if (entry->runs > 0 && sluice_gemm_race_is_over(&entry->race)) {
      decide(selector, list, &class, entry);
      keep(selector);
    }
  }
  const order_t order = entry == NULL ? selector->named : entry->order;
  pthread_mutex_unlock(&known.mutex);
  if (order == 0) {
    *out_entry = entry;
    return selector->named;
  }
  selector->classes[class.id] = order;
  note_choice(selector, (int)(order & 0xf) - 1);
  return order;
}

static void earn(known_t* entry, const sluice_grouped_gemm_t* list, double seconds) {
  double flop = 0;
  for (int64_t i = 0; i < list->count; ++i) flop += 2 * volume(&list->problems[i]);
  if (pthread_mutex_trylock(&known.mutex) != 0) return;
  sluice_gemm_race_earn(&entry->race, seconds, flop);
  pthread_mutex_unlock(&known.mutex);
}

/* ---- the gemm -------------------------------------------------------------------------------------------------- */

static void auto_destroy(sluice_gemm_t* gemm) {
  sluice_gemm_auto_t* selector = (sluice_gemm_auto_t*)gemm;
  for (int kind = 0; kind < NUM_KINDS; ++kind) sluice_gemm_destroy(selector->kinds[kind]);
  sluice_free(gemm->allocator, selector, sizeof *selector);
}

static int auto_supports(const sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  return sluice_gemm_supports(((const sluice_gemm_auto_t*)gemm)->kinds[REF], list);
}

static sluice_status_t run_by(sluice_gemm_auto_t* selector, const sluice_grouped_gemm_t* list, order_t order) {
  for (; order != 0; order >>= 4) {
    int kind = (int)(order & 0xf) - 1;
    sluice_gemm_t* next = selector->kinds[kind];
    if (!next->vtable->supports(next, list)) continue;
    if (kind != HOST) return sluice_gemm_run_decoded(next, list);
    if (list->packed != NULL) continue; /* the host could decline after a part of C has been written */
    return run_host(selector, list);
  }
  return SLUICE_FAIL(SLUICE_E_INTERNAL, "gemm %s: no implementation supports this list of GEMMs", selector->base.name);
}

static sluice_status_t auto_run(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  sluice_gemm_auto_t* selector = (sluice_gemm_auto_t*)gemm;
  known_t* entry;
  const order_t order = order_of(selector, list, &entry);
  if (entry == NULL) return run_by(selector, list, order);
  const uint64_t begin = sluice_now_ns();
  SLUICE_TRY(run_by(selector, list, order));
  earn(entry, list, sluice_seconds(sluice_now_ns() - begin));
  return SLUICE_OK;
}

static const sluice_gemm_vtable_t auto_vtable = {
    .destroy = auto_destroy,
    .supports = auto_supports,
    .run = auto_run,
    .decodes = 1, /* run_by decodes packed weights for kinds that do not read them */
};

/* Fills selector->kinds for `name`. "auto" does not need all libraries, but fails if options->library is missing. */
static sluice_status_t open_kinds(sluice_gemm_auto_t* selector, const char* name, const char* library,
                                  const sluice_gemm_options_t* options) {
  sluice_allocator_t* allocator = selector->base.allocator;
  if (strcmp(name, "native") == 0) return sluice_gemm_native_create(allocator, &selector->kinds[NATIVE]);
  if (strcmp(name, "blas") == 0) return sluice_gemm_blas_create(library, allocator, &selector->kinds[BLAS]);
  if (strcmp(name, "onednn") == 0) return sluice_gemm_onednn_create(library, allocator, &selector->kinds[ONEDNN]);
  if (strcmp(name, "host") == 0) {
    return sluice_gemm_host_create(options->host_gemm, options->host_gemm_user, allocator, &selector->kinds[HOST]);
  }
  if (strcmp(name, "ref") == 0) return SLUICE_OK;
  if (strcmp(name, "auto") != 0) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "gemm \"%.64s\" is unknown: auto, native, ref, onednn, blas or host",
                       name);
  }

  /* The symbols of a library given with "auto" tell whether it is a BLAS or a oneDNN. The other is found as usual. */
  char why_native[256] = "";
  char why_blas[512] = "";
  char why_onednn[512] = "";
  sluice_status_t status = sluice_gemm_native_open(allocator, &selector->kinds[NATIVE], why_native, sizeof why_native);
  if (status != SLUICE_OK && status != SLUICE_E_NOT_FOUND) return status;
  status = sluice_gemm_blas_open(library, allocator, &selector->kinds[BLAS], why_blas, sizeof why_blas);
  if (sluice_is_out_of_memory(status)) return status;
  status = sluice_gemm_onednn_open(library, allocator, &selector->kinds[ONEDNN], why_onednn, sizeof why_onednn);
  if (sluice_is_out_of_memory(status)) return status;
  if (library != NULL && selector->kinds[BLAS] == NULL && selector->kinds[ONEDNN] == NULL) {
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND, "gemm_library is neither a BLAS nor a oneDNN: %s; %s", why_blas, why_onednn);
  }
  if (library != NULL && selector->kinds[BLAS] == NULL) {
    status = sluice_gemm_blas_open(NULL, allocator, &selector->kinds[BLAS], why_blas, sizeof why_blas);
  } else if (library != NULL && selector->kinds[ONEDNN] == NULL) {
    status = sluice_gemm_onednn_open(NULL, allocator, &selector->kinds[ONEDNN], why_onednn, sizeof why_onednn);
  }
  if (sluice_is_out_of_memory(status)) return status;
  if (selector->kinds[NATIVE] == NULL) sluice_log(SLUICE_LOG_INFO, "gemm auto, without native: %s", why_native);
  if (selector->kinds[BLAS] == NULL) sluice_log(SLUICE_LOG_INFO, "gemm auto, without blas: %s", why_blas);
  if (selector->kinds[ONEDNN] == NULL) sluice_log(SLUICE_LOG_INFO, "gemm auto, without onednn: %s", why_onednn);
  if (options->host_gemm == NULL) return SLUICE_OK;
  return sluice_gemm_host_create(options->host_gemm, options->host_gemm_user, allocator, &selector->kinds[HOST]);
}

/* Writes the names of all opened kinds if the selector measures; else its name alone, without `ref`. */
static void list_kinds(const sluice_gemm_auto_t* selector, char* text, size_t room) {
  const char* between = "auto of ";
  size_t used = 0;
  for (int kind = 0; kind < NUM_KINDS && selector->measures && used < room; ++kind) {
    if (selector->kinds[kind] == NULL) continue;
    used += (size_t)snprintf(text + used, room - used, "%s%s", between, selector->kinds[kind]->name);
    between = " + ";
  }
  if (!selector->measures) snprintf(text, room, "%s", selector->base.name);
}

sluice_status_t sluice_gemm_create(const sluice_gemm_options_t* options, sluice_allocator_t* allocator,
                                   sluice_gemm_t** out_gemm) {
  *out_gemm = NULL;
  const char* asked = options->name != NULL ? options->name : "auto";
  const char* library = options->library;
  const char* name = asked;
  const char* environment = getenv("SLUICE_GEMM");
  if (environment != NULL && environment[0] != '\0' && strcmp(environment, asked) != 0) {
    name = environment;
    if (strcmp(asked, "auto") != 0) library = NULL; /* it belongs to the name that was replaced */
    sluice_log(SLUICE_LOG_INFO, "gemm %.64s: SLUICE_GEMM replaces \"%.64s\"", name, asked);
  }

  sluice_gemm_auto_t* selector = sluice_alloc_zeroed(allocator, sizeof *selector, "gemm selector");
  if (selector == NULL) return sluice_alloc_status();
  selector->base.vtable = &auto_vtable;
  selector->base.allocator = allocator;
  selector->measures = strcmp(name, "auto") == 0;
  selector->host_gemm = options->host_gemm;
  sluice_status_t status = sluice_gemm_ref_create(allocator, &selector->kinds[REF]);
  if (status == SLUICE_OK) status = open_kinds(selector, name, library, options);
  if (status != SLUICE_OK) {
    auto_destroy(&selector->base);
    return status;
  }
  for (int kind = 0; kind < NUM_KINDS; ++kind) {
    const sluice_gemm_t* gemm = selector->kinds[kind];
    if (gemm == NULL) continue;
    selector->named = order_append(selector->named, kind);
    selector->signature = signature_with(selector->signature, gemm->name, strlen(gemm->name) + 1);
  }
  selector->signature = signature_with(selector->signature, &options->host_gemm, sizeof options->host_gemm);
  const char* shown = selector->measures ? "auto" : selector->kinds[(selector->named & 0xf) - 1]->name;
  snprintf(selector->base.name, sizeof selector->base.name, "%s", shown);
  list_kinds(selector, selector->base.made_of, sizeof selector->base.made_of);
  if (selector->measures) recall(selector);
  *out_gemm = &selector->base;
  return SLUICE_OK;
}
