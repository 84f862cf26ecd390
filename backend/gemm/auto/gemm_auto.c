/* The selector behind sluice_gemm_create: which implementation does which GEMMs.
 *
 * Lists fall into classes (dtypes, layout, sizes, beta). The first list of a class makes the selector measure its
 * candidates on parts of that list's GEMMs (auto_parts.h): its own operands, since where and how they lie matters to
 * libraries more than their sizes. The order found is kept for
 * the whole process, so that every context, and a recomputation, repeats the same choice and the same bits. `ref`
 * stands last and takes what no other does; it is not measured.
 */
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
#include "backend/gemm/auto/auto_parts.h"
#include "backend/gemm/blas/gemm_blas.h"
#include "backend/gemm/gemm.h"
#include "backend/gemm/gemm_form.h"
#include "backend/gemm/host/gemm_host.h"
#include "backend/gemm/native/gemm_native.h"
#include "backend/gemm/onednn/gemm_onednn.h"

enum { NATIVE, BLAS, ONEDNN, HOST, REF, NUM_KINDS };
enum { NUM_DTYPES = 3, NUM_LAYOUTS = 4, NUM_ROWS = 9, NUM_NK = 3 };
enum { NUM_CLASSES = NUM_DTYPES * 2 * NUM_LAYOUTS * NUM_ROWS * NUM_NK * 2 };

/* Measuring one class: at most this much arithmetic per run and thread (about 8 ms at 130 GFLOP/s), this many bytes of
 * results and about this much time after a first round, which may also start threads and make code. A quarter of the
 * arithmetic was not enough: a library that packs the rows of a GEMM first does so for all columns of the whole
 * GEMM, but for few of a part, and lost races that it wins in a pass. */
#define MEASURE_FLOP  (1024.0 * 1024 * 1024)
#define MEASURE_BYTES (SLUICE_GEMM_SCRATCH_BYTES / 2) /* the other half is for the measured one's temporaries */
#define MEASURE_NS    ((uint64_t)128 * 1000 * 1000)
/* One run says nothing on a busy machine: nobody leaves, and nothing is chosen, before so many rounds count. */
enum { MEASURE_ROUNDS = 8, MEASURE_LEAST = 3 };
/* Within this factor of the fastest, the first in the order of kinds wins: noise should not choose, and "native" gives
 * the same bits for every n. */
#define MEASURE_MARGIN 1.03
/* Where some library is already in use, another counts as slower by this: its idle threads spin on the same cores.
 * "native" has no threads of its own. */
#define MEASURE_NEWCOMER 1.25

/* Candidates in the order in which they are tried: four bits each, kind + 1, the lowest first. 0: not known. */
typedef uint32_t order_t;

typedef struct sluice_gemm_auto_s {
  sluice_gemm_t base;
  sluice_gemm_t* kinds[NUM_KINDS]; /* NULL: not there; REF always is */
  int measures;                    /* 0: a named one, always tried before ref */
  int in_use;                      /* bit per kind: first choice of some class */
  order_t named;                   /* the order when nothing is measured */
  uint64_t signature;              /* of the candidates: choices are shared between equal sets */
  order_t classes[NUM_CLASSES];
} sluice_gemm_auto_t;

/* ---- the process's memory of choices --------------------------------------------------------------------------- */

static struct {
  pthread_mutex_t mutex; /* also held while measuring: two ranks in one process would disturb each other */
  int count;
  struct {
    uint64_t signature;
    int32_t class_id;
    order_t order;
  } entries[1024]; /* when it is full, further choices are kept by their gemm alone */
} known = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static order_t known_find(uint64_t signature, int32_t class_id) {
  for (int i = 0; i < known.count; ++i) {
    if (known.entries[i].signature == signature && known.entries[i].class_id == class_id) {
      return known.entries[i].order;
    }
  }
  return 0;
}

static void known_add(uint64_t signature, int32_t class_id, order_t order) {
  if (known.count == (int)(sizeof known.entries / sizeof known.entries[0])) return;
  known.entries[known.count].signature = signature;
  known.entries[known.count].class_id = class_id;
  known.entries[known.count].order = order;
  ++known.count;
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

/* 0 when the list has no class: nothing to compute, or dtypes or strides that only ref takes. */
static int classify(const sluice_grouped_gemm_t* list, sluice_gemm_class_t* out) {
  int dtype;
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
  /* Measured with the rows of an expert of average size, not of the largest. */
  int64_t* own = out->form.trans_a ? &out->form.k : &out->form.m;
  if (out->form.m == largest->m && rows < *own) *own = rows;
  return 1;
}

/* The class in words. Classes are looked up in every call, words only where one is measured. */
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

/* What host declines, without touching C, goes to the next that takes it, one GEMM at a time. */
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

/* One run, its time into out_ns; UINT64_MAX when this one fails or declines. NO_MEMORY is passed on: it says nothing
 * about the candidate. */
static sluice_status_t time_run(sluice_gemm_auto_t* selector, int kind, const sluice_grouped_gemm_t* list,
                                uint64_t* out_ns) {
  sluice_gemm_t* gemm = selector->kinds[kind];
  uint64_t begin = sluice_now_ns();
  sluice_status_t status = SLUICE_OK;
  if (kind != HOST) status = gemm->vtable->run(gemm, list);
  for (int64_t i = 0; kind == HOST && status == SLUICE_OK && i < list->count; ++i) {
    if (sluice_gemm_host_call(gemm, list, i) != 0) status = SLUICE_E_UNSUPPORTED;
  }
  *out_ns = status == SLUICE_OK ? sluice_now_ns() - begin : UINT64_MAX;
  return status == SLUICE_E_NO_MEMORY ? status : SLUICE_OK;
}

/* The shortest run of each kind that is not UINT64_MAX in `times`. They take turns, so that a disturbance of the
 * machine meets them alike; the first round, which may also start threads and make code, does not count. A kind that is
 * slower by a factor leaves early. */
static sluice_status_t time_kinds(sluice_gemm_auto_t* selector, sluice_gemm_parts_t* parts, void* scratch,
                                  uint64_t* times) {
  sluice_grouped_gemm_t list = *parts->list;
  list.count = parts->in_run;
  int was_candidate[REF];
  for (int kind = 0; kind < REF; ++kind) was_candidate[kind] = times[kind] != UINT64_MAX;
  uint64_t begin = sluice_now_ns();
  for (int round = 0; round <= MEASURE_ROUNDS; ++round) {
    uint64_t fastest = UINT64_MAX;
    for (int kind = 0; kind < REF; ++kind) {
      if (times[kind] == UINT64_MAX) continue;
      if (times[kind] < fastest) fastest = times[kind];
    }
    for (int kind = 0; kind < REF; ++kind) {
      if (!was_candidate[kind]) continue;
      list.problems = sluice_gemm_parts_next(parts, scratch); /* kept in turns by those that left too */
      if (times[kind] == UINT64_MAX || (round > MEASURE_LEAST && times[kind] / 2 > fastest)) continue;
      uint64_t ns;
      SLUICE_TRY(time_run(selector, kind, &list, &ns));
      if (ns == UINT64_MAX || round <= 1 || ns < times[kind]) times[kind] = ns;
    }
    if (round == 0) begin = sluice_now_ns();
    if (round >= MEASURE_LEAST && sluice_now_ns() - begin > MEASURE_NS) break;
  }
  return SLUICE_OK;
}

static order_t sort(const uint64_t* measured, int in_use) {
  order_t order = 0;
  double times[NUM_KINDS];
  for (int kind = 0; kind < REF; ++kind) {
    times[kind] = measured[kind] == UINT64_MAX ? INFINITY : (double)measured[kind];
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

static sluice_status_t measure(sluice_gemm_auto_t* selector, const sluice_grouped_gemm_t* list,
                               const sluice_gemm_class_t* class, order_t* out_order) {
  sluice_gemm_parts_t parts;
  const sluice_threads_t pool = sluice_threads_find();
  sluice_gemm_parts_begin(&parts, list, &class->form, sluice_threads_available(&pool), MEASURE_FLOP, MEASURE_BYTES);
  const uint64_t bytes = sluice_gemm_parts_result_bytes(&parts);
  void* scratch = NULL;
  if (bytes > 0) {
    scratch = sluice_alloc_zeroed(selector->base.allocator, bytes, "gemm auto: a result to measure with");
    if (scratch == NULL) return SLUICE_E_NO_MEMORY;
  }
  sluice_grouped_gemm_t run = *list;
  run.problems = sluice_gemm_parts_next(&parts, scratch);
  run.count = parts.in_run;

  uint64_t times[NUM_KINDS];
  for (int kind = 0; kind < NUM_KINDS; ++kind) {
    sluice_gemm_t* gemm = selector->kinds[kind];
    int takes = kind != REF && gemm != NULL && gemm->vtable->supports(gemm, &run);
    times[kind] = takes ? 0 : UINT64_MAX;
  }
  sluice_status_t status = time_kinds(selector, &parts, scratch, times);
  const sluice_gemm_problem_t p = parts.part;
  const double flop = 2 * volume(&p) * (double)parts.in_run;
  char text[256] = "ref: nothing else takes it";
  int length = 0;
  for (int kind = 0; kind < REF; ++kind) {
    if (times[kind] == UINT64_MAX || length >= (int)sizeof text) continue;
    length += snprintf(text + length, sizeof text - (size_t)length, "%s%s %.1f", length == 0 ? "" : ", ",
                       selector->kinds[kind]->name, flop / (double)(times[kind] == 0 ? 1 : times[kind]));
  }
  sluice_free(selector->base.allocator, scratch, bytes);
  if (status != SLUICE_OK) return status;
  *out_order = sort(times, selector->in_use);
  char words[96];
  describe(class, list, words, sizeof words);
  sluice_log(SLUICE_LOG_INFO, "gemm auto: %s: %s (GFLOP/s of %s at %lld times [%lld, %lld, %lld])", words,
             selector->kinds[(*out_order & 0xf) - 1]->name, text, (long long)parts.in_run, (long long)p.m,
             (long long)p.n, (long long)p.k);
  return SLUICE_OK;
}

/* Marks a first choice, and adds it to the name that contexts show. */
static void note_choice(sluice_gemm_auto_t* selector, int kind) {
  if (kind != REF && kind != NATIVE) selector->in_use |= 1 << kind;
  char* name = selector->base.name;
  const char* choice = selector->kinds[kind]->name;
  if (strcmp(name, "auto") == 0) name[0] = '\0';
  if (strstr(name, choice) != NULL) return;
  size_t used = strlen(name);
  snprintf(name + used, sizeof selector->base.name - used, "%s%s", used == 0 ? "" : " + ", choice);
}

static sluice_status_t order_of(sluice_gemm_auto_t* selector, const sluice_grouped_gemm_t* list, order_t* out_order) {
  sluice_gemm_class_t class;
  *out_order = selector->named;
  if (!selector->measures || !classify(list, &class)) return SLUICE_OK;
  if (selector->classes[class.id] == 0) {
    order_t order;
    sluice_status_t status = SLUICE_OK;
    pthread_mutex_lock(&known.mutex);
    order = known_find(selector->signature, class.id);
    if (order == 0) {
      status = measure(selector, list, &class, &order);
      if (status == SLUICE_OK) known_add(selector->signature, class.id, order);
    }
    pthread_mutex_unlock(&known.mutex);
    if (status != SLUICE_OK) return status;
    selector->classes[class.id] = order;
    note_choice(selector, (order & 0xf) - 1);
  }
  *out_order = selector->classes[class.id];
  return SLUICE_OK;
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

static sluice_status_t auto_run(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  sluice_gemm_auto_t* selector = (sluice_gemm_auto_t*)gemm;
  order_t order;
  SLUICE_TRY(order_of(selector, list, &order));
  for (; order != 0; order >>= 4) {
    int kind = (order & 0xf) - 1;
    sluice_gemm_t* next = selector->kinds[kind];
    if (!next->vtable->supports(next, list)) continue;
    if (kind != HOST) return next->vtable->run(next, list);
    return run_host(selector, list);
  }
  return SLUICE_FAIL(SLUICE_E_INTERNAL, "gemm %s: no implementation takes this list", gemm->name);
}

static const sluice_gemm_vtable_t auto_vtable = {
    .destroy = auto_destroy,
    .supports = auto_supports,
    .run = auto_run,
};

/* Fills selector->kinds for `name`. "auto" goes on without what is missing, unless options->library is what is. */
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

  /* A library given with "auto" is a BLAS or a oneDNN, as its symbols tell; the other is looked for as usual. */
  char why_native[256] = "";
  char why_blas[512] = "";
  char why_onednn[512] = "";
  sluice_status_t status = sluice_gemm_native_open(allocator, &selector->kinds[NATIVE], why_native, sizeof why_native);
  if (status != SLUICE_OK && status != SLUICE_E_NOT_FOUND) return status;
  status = sluice_gemm_blas_open(library, allocator, &selector->kinds[BLAS], why_blas, sizeof why_blas);
  if (status == SLUICE_E_NO_MEMORY) return status;
  status = sluice_gemm_onednn_open(library, allocator, &selector->kinds[ONEDNN], why_onednn, sizeof why_onednn);
  if (status == SLUICE_E_NO_MEMORY) return status;
  if (library != NULL && selector->kinds[BLAS] == NULL && selector->kinds[ONEDNN] == NULL) {
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND, "gemm_library is neither a BLAS nor a oneDNN: %s; %s", why_blas, why_onednn);
  }
  if (library != NULL && selector->kinds[BLAS] == NULL) {
    status = sluice_gemm_blas_open(NULL, allocator, &selector->kinds[BLAS], why_blas, sizeof why_blas);
  } else if (library != NULL && selector->kinds[ONEDNN] == NULL) {
    status = sluice_gemm_onednn_open(NULL, allocator, &selector->kinds[ONEDNN], why_onednn, sizeof why_onednn);
  }
  if (status == SLUICE_E_NO_MEMORY) return status;
  if (selector->kinds[NATIVE] == NULL) sluice_log(SLUICE_LOG_INFO, "gemm auto, without native: %s", why_native);
  if (selector->kinds[BLAS] == NULL) sluice_log(SLUICE_LOG_INFO, "gemm auto, without blas: %s", why_blas);
  if (selector->kinds[ONEDNN] == NULL) sluice_log(SLUICE_LOG_INFO, "gemm auto, without onednn: %s", why_onednn);
  if (options->host_gemm == NULL) return SLUICE_OK;
  return sluice_gemm_host_create(options->host_gemm, options->host_gemm_user, allocator, &selector->kinds[HOST]);
}

/* All that it chooses among; of a name the one it stands for, since `ref` is always there. */
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
  if (selector == NULL) return SLUICE_E_NO_MEMORY;
  selector->base.vtable = &auto_vtable;
  selector->base.allocator = allocator;
  selector->measures = strcmp(name, "auto") == 0;
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
  *out_gemm = &selector->base;
  return SLUICE_OK;
}
