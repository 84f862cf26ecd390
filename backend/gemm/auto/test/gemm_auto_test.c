// SPDX-License-Identifier: Apache-2.0
/* The selector: names, the environment, fallbacks, what is measured and how often. The host's callback replaces a
 * library, so that none must be installed. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "backend/base/dtype.h"
#include "backend/base/test/refused.h"
#include "backend/gemm/gemm.h"

#if defined(__SANITIZE_ADDRESS__)
/* gcc 12's leak checker crashes when it reads the thread-local data of libraries opened at run time (libgomp), so it
 * must not read any. The text that dlerror keeps there then looks like a leak, which is not printed. */
__attribute__((visibility("default"))) const char* __lsan_default_options(void);
const char* __lsan_default_options(void) { return "use_tls=0:print_suppressions=0"; }
__attribute__((visibility("default"))) const char* __lsan_default_suppressions(void);
const char* __lsan_default_suppressions(void) { return "leak:_dlerror_run\n"; }
#endif

enum { MOST_PLACES = 64 };
static int num_calls;
static int declined_call; /* the number of the call to decline; 0: none */
static float a[64 * 64], b[64 * 64], c[64 * 64];
static const float* own_c;
static int own_calls;      /* calls with this C; others are measurements */
static int in_place_calls; /* calls with a result anywhere in c */
/* The weights that measurements read. */
static const char* places[MOST_PLACES];
static int num_places;

static void multiply_f32(const sluice_host_gemm_args_t* args) {
  for (int64_t i = 0; i < args->m; ++i) {
    for (int64_t j = 0; j < args->n; ++j) {
      float* to = (float*)args->c + i * args->c_row_stride + j * args->c_col_stride;
      float sum = args->beta != 0 ? *to : 0;
      for (int64_t l = 0; l < args->k; ++l) {
        sum += ((const float*)args->a)[i * args->a_row_stride + l * args->a_col_stride] *
               ((const float*)args->b)[l * args->b_row_stride + j * args->b_col_stride];
      }
      *to = sum;
    }
  }
}

static void note_call(const sluice_host_gemm_args_t* args) {
  int at = 0;
  ++num_calls;
  own_calls += args->c == own_c;
  in_place_calls += (const float*)args->c >= c && (const float*)args->c < c + 64 * 64;
  while (at < num_places && places[at] != args->b) ++at;
  if (args->c != own_c && at == num_places && num_places < MOST_PLACES) places[num_places++] = args->b;
}

static int32_t host(void* user, const sluice_host_gemm_args_t* args) {
  (void)user;
  note_call(args);
  if (num_calls == declined_call) return 1;
  multiply_f32(args);
  return 0;
}

/* Computes nothing, so it is faster than any library: its tests check only the choice. */
static int32_t instant_host(void* user, const sluice_host_gemm_args_t* args) {
  (void)user;
  note_call(args);
  return 0;
}

static int32_t slow_host(void* user, const sluice_host_gemm_args_t* args) {
  const struct timespec pause = {0, 30 * 1000 * 1000};
  nanosleep(&pause, NULL);
  return host(user, args);
}

static int32_t declining_host(void* user, const sluice_host_gemm_args_t* args) {
  (void)user;
  note_call(args);
  return 1;
}

static char log_text[4096];
static void on_log(void* user, int32_t level, const char* message) {
  (void)user;
  if (level == SLUICE_LOG_INFO) strncat(log_text, message, sizeof log_text - strlen(log_text) - 1);
}

static sluice_allocator_t allocator;

static int set_up(void** state) {
  (void)state;
  unsetenv("SLUICE_GEMM");
  num_calls = own_calls = in_place_calls = num_places = declined_call = 0;
  log_text[0] = '\0';
  sluice_set_log(on_log, NULL, SLUICE_LOG_INFO);
  sluice_allocator_init(&allocator, NULL, NULL, NULL);
  return 0;
}

static int tear_down(void** state) {
  (void)state;
  sluice_set_log(NULL, NULL, 0);
  int leaked = allocator.num_live != 0;
  sluice_allocator_deinit(&allocator);
  return leaked;
}

static sluice_status_t create(const char* name, sluice_host_gemm_fn_t fn, sluice_gemm_t** out_gemm) {
  sluice_gemm_options_t options = {.name = name, .host_gemm = fn};
  return sluice_gemm_create(&options, &allocator, out_gemm);
}

/* C = ones [m, k] * ones [k, n] (+ C). */
static sluice_status_t multiply(sluice_gemm_t* gemm, int64_t m, int64_t n, int64_t k, float beta) {
  for (int i = 0; i < 64 * 64; ++i) a[i] = b[i] = 1;
  own_c = c;
  sluice_gemm_problem_t p = {m, n, k, {a, k, 1}, {b, n, 1}, {c, n, 1}};
  sluice_grouped_gemm_t list = {&p, 1, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, beta};
  return sluice_gemm_run(gemm, &list);
}

/* Calls until a choice is made. On a busy machine many small calls are needed to pay for a slow run. */
static int settle(sluice_gemm_t* gemm, const sluice_grouped_gemm_t* list) {
  enum { MOST_CALLS = 3000000 };
  for (int calls = 1; calls <= MOST_CALLS; ++calls) {
    if (sluice_gemm_run(gemm, list) != SLUICE_OK) return 0;
    if (strcmp(gemm->name, "auto") != 0) return calls;
  }
  return 0;
}

TEST(GemmCreate_UnknownName_InvalidArgumentListsNames) {
  sluice_gemm_t* gemm = NULL;
  REFUSED(create("cublas", NULL, &gemm), SLUICE_E_INVALID_ARGUMENT, "auto, native, ref, onednn, blas or host");
  assert_null(gemm);
}

TEST(GemmCreate_HostWithoutFunction_InvalidArgument) {
  sluice_gemm_t* gemm = NULL;
  assert_int_equal(create("host", NULL, &gemm), SLUICE_E_INVALID_ARGUMENT);
}

TEST(GemmCreate_AutoWithMissingLibrary_NotFound) {
  sluice_gemm_t* gemm = NULL;
  sluice_gemm_options_t options = {.library = "/nowhere/lib.so"};
  REFUSED(sluice_gemm_create(&options, &allocator, &gemm), SLUICE_E_NOT_FOUND, "/nowhere/lib.so");
  assert_non_null(strstr(last_message(), "apt-get install"));
}

TEST(GemmCreate_Environment_ReplacesNameAndItsLibrary) {
  sluice_gemm_t* gemm = NULL;
  sluice_gemm_options_t options = {.name = "onednn", .library = "/nowhere/lib.so"};
  setenv("SLUICE_GEMM", "ref", 1);
  assert_int_equal(sluice_gemm_create(&options, &allocator, &gemm), SLUICE_OK);
  assert_string_equal(gemm->name, "ref");
  assert_non_null(strstr(log_text, "SLUICE_GEMM"));
  sluice_gemm_destroy(gemm);
  setenv("SLUICE_GEMM", "", 1);
  assert_int_equal(create("host", host, &gemm), SLUICE_OK);
  assert_string_equal(gemm->name, "host");
  sluice_gemm_destroy(gemm);
}

/* A calibration is cached under made_of, which has versions and does not depend on choices. */
TEST(MadeOf_NamesAllAndStaysTheSame) {
  sluice_gemm_t* gemm = NULL;
  float x[1] = {3}, y[1] = {5}, z[1] = {0};
  sluice_gemm_problem_t p = {1, 1, 1, {x, 1, 1}, {y, 1, 1}, {z, 1, 1}};
  sluice_grouped_gemm_t list = {&p, 1, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0};
  assert_int_equal(create("auto", instant_host, &gemm), SLUICE_OK);
  char before[192];
  memcpy(before, sluice_gemm_made_of(gemm), sizeof before);
  assert_ptr_equal(strstr(before, "auto of "), before);
  assert_non_null(strstr(before, "host"));
  assert_non_null(strstr(before, "ref"));
  assert_true(settle(gemm, &list) > 1);
  assert_string_equal(sluice_gemm_made_of(gemm), before);
  sluice_gemm_destroy(gemm);
  assert_int_equal(create("host", host, &gemm), SLUICE_OK);
  assert_string_equal(sluice_gemm_made_of(gemm), "host");
  sluice_gemm_destroy(gemm);
}

TEST(Gemm_F64_GoesToRefUnmeasured) {
  sluice_gemm_t* gemm = NULL;
  double x[1] = {3}, y[1] = {5}, z[1] = {0};
  sluice_gemm_problem_t p = {1, 1, 1, {x, 1, 1}, {y, 1, 1}, {z, 1, 1}};
  sluice_grouped_gemm_t list = {&p, 1, SLUICE_DTYPE_F64, SLUICE_DTYPE_F64, 0};
  assert_int_equal(create("auto", instant_host, &gemm), SLUICE_OK);
  assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
  assert_true(z[0] == 15);
  assert_int_equal(num_calls, 0);
  assert_string_equal(gemm->name, "auto");
  sluice_gemm_destroy(gemm);
}

/* GEMMs before the declined one must not be added twice, and those after it must not be lost. */
TEST(Gemm_HostDeclinesOneOfMany_EachAddedOnce) {
  sluice_gemm_t* gemm = NULL;
  sluice_gemm_problem_t problems[5];
  assert_int_equal(create("host", host, &gemm), SLUICE_OK);
  for (int i = 0; i < 4; ++i) a[i] = b[i] = 1;
  for (int i = 0; i < 5; ++i) {
    c[i] = (float)i;
    problems[i] = (sluice_gemm_problem_t){1, 1, 4, {a, 4, 1}, {b, 1, 1}, {&c[i], 1, 1}};
  }
  sluice_grouped_gemm_t list = {problems, 5, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 1};
  declined_call = 3;
  assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
  for (int i = 0; i < 5; ++i) assert_true(c[i] == (float)i + 4);
  assert_int_equal(num_calls, 5);
  sluice_gemm_destroy(gemm);
}

TEST(Gemm_AutoNewClass_FirstCallMeasuresNothingLaterOnesOncePerProcess) {
  sluice_gemm_t* gemm = NULL;
  assert_int_equal(create(NULL, instant_host, &gemm), SLUICE_OK);
  assert_string_equal(gemm->name, "auto");
  uint64_t before = allocator.current_bytes;
  sluice_allocator_reset_peak(&allocator);
  assert_int_equal(multiply(gemm, 20, 16, 24, 0), SLUICE_OK);
  assert_int_equal(num_calls, own_calls); /* no measurements; the call itself, if there is no other kind */
  for (int i = 0; i < 20 * 16 && own_calls == 0; ++i) assert_true(c[i] == 24);
  sluice_gemm_problem_t p = {20, 16, 24, {a, 24, 1}, {b, 16, 1}, {c, 16, 1}};
  sluice_grouped_gemm_t list = {&p, 1, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0};
  assert_true(settle(gemm, &list) > 1);
  assert_int_equal(allocator.current_bytes, before);
  assert_true(allocator.peak_bytes - before <= SLUICE_GEMM_SCRATCH_BYTES);
  assert_string_equal(gemm->name, "host");
  assert_non_null(strstr(log_text, "f32 -> f32 NN, rows <= 24"));
  assert_non_null(strstr(log_text, "host"));
  assert_true(num_calls > own_calls);

  num_calls = own_calls = 0;
  assert_int_equal(multiply(gemm, 15, 10, 12, 0), SLUICE_OK);
  assert_int_equal(num_calls, 1);
  sluice_gemm_destroy(gemm);

  num_calls = own_calls = 0;
  assert_int_equal(create(NULL, instant_host, &gemm), SLUICE_OK);
  assert_int_equal(multiply(gemm, 15, 10, 12, 0), SLUICE_OK);
  assert_int_equal(num_calls, 1);
  assert_string_equal(gemm->name, "host");

  /* Another class is measured by itself. */
  log_text[0] = '\0';
  p.m = 8;
  for (int i = 0; i < 3000000 && log_text[0] == '\0'; ++i) assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
  assert_non_null(strstr(log_text, "f32 -> f32 NN, rows <= 12"));
  sluice_gemm_destroy(gemm);
}

TEST(Gemm_LargeGemm_MeasuredWithinBounds) {
  sluice_gemm_t* gemm = NULL;
  assert_int_equal(create(NULL, instant_host, &gemm), SLUICE_OK);
  uint64_t before = allocator.current_bytes;
  sluice_allocator_reset_peak(&allocator);
  enum { M = 1000, N = 2000, K = 1500 };
  const size_t bytes = (size_t)M * N * sizeof(float);
  float* zeros = calloc((size_t)N * K, sizeof(float));
  float* result = calloc(1, bytes);
  assert_true(zeros != NULL && result != NULL);
  sluice_gemm_problem_t p = {M, N, K, {zeros, K, 1}, {zeros, 1, K}, {result, N, 1}};
  sluice_grouped_gemm_t list = {
      .problems = &p, .count = 1, .dtype_ab = SLUICE_DTYPE_F32, .dtype_c = SLUICE_DTYPE_F32, .beta = 0};
  assert_true(settle(gemm, &list) > 1);
  assert_true(allocator.peak_bytes - before <= SLUICE_GEMM_SCRATCH_BYTES);
  assert_string_equal(gemm->name, "host");
  sluice_gemm_destroy(gemm);
  free(zeros);
  free(result);
}

/* A weight that is measured twice in a row is in a cache; in a pass it is in memory. The place of the result tells
 * measurements of the host from its calls. */
TEST(Gemm_Measures_OnAllOfTheWeights) {
  sluice_gemm_t* gemm = NULL;
  assert_int_equal(create(NULL, instant_host, &gemm), SLUICE_OK);
  enum { M = 64, N = 256, K = 512, EXPERTS = 5 }; /* 5: coprime to any number of candidates */
  static float results[M * N], others[N * K];
  const size_t bytes = (size_t)EXPERTS * N * K * sizeof(float);
  char* zeros = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  assert_true((void*)zeros != MAP_FAILED);
  sluice_gemm_problem_t problems[EXPERTS + 1];
  for (int e = 0; e < EXPERTS; ++e) {
    problems[e] = (sluice_gemm_problem_t){M, N, K, {zeros, K, 1}, {zeros + bytes / EXPERTS * e, 1, K}, {results, N, 1}};
  }
  problems[EXPERTS] = problems[0]; /* an expert with too few rows is not measured */
  problems[EXPERTS].m = 1;
  problems[EXPERTS].b.data = others;
  own_c = results;
  sluice_grouped_gemm_t list = {problems, EXPERTS + 1, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0};
  assert_true(settle(gemm, &list) > 1);
  assert_string_equal(gemm->name, "host");
  /* At least four rounds, and nine if the machine is fast enough; a call may include a part of a round. */
  int of_expert[EXPERTS] = {0}, met = 0;
  for (int i = 0; i < num_places; ++i) {
    assert_true(places[i] >= zeros && places[i] < zeros + bytes);
    assert_int_equal((places[i] - zeros) % (K * (int64_t)sizeof(float)), 0);
    met += of_expert[(size_t)(places[i] - zeros) / (bytes / EXPERTS)]++ == 0;
  }
  const int measured = num_calls - own_calls;
  assert_true(measured >= 4);
  if (met < 3) fail_msg("%d experts met in %d runs", met, measured);
  sluice_gemm_destroy(gemm);
  munmap(zeros, bytes);
}

/* dW = dY^T X: measured in place if the call overwrites dW; not touched by measurements if the call adds to it. */
TEST(Gemm_WeightGradient_MeasuredInPlaceOnlyIfOverwritten) {
  enum { M = 48, N = 64, K = 4 };
  own_c = c;
  sluice_gemm_problem_t p = {M, N, K, {a, 1, M}, {b, N, 1}, {c, N, 1}};
  for (int adds = 0; adds < 2; ++adds) {
    sluice_gemm_t* gemm = NULL;
    assert_int_equal(create(NULL, instant_host, &gemm), SLUICE_OK);
    num_calls = in_place_calls = 0;
    sluice_grouped_gemm_t list = {&p, 1, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, (float)adds};
    const int calls = settle(gemm, &list);
    assert_true(calls > 1);
    assert_string_equal(gemm->name, "host");
    if (adds) {
      assert_true(in_place_calls <= calls); /* the calls that "host" ran */
      assert_true(num_calls > in_place_calls);
    } else {
      assert_true(in_place_calls > 1);
      assert_int_equal(num_calls, in_place_calls);
    }
    sluice_gemm_destroy(gemm);
  }
}

TEST(Gemm_SlowHost_NotChosenWhereAnotherIs) {
  sluice_gemm_t* gemm = NULL;
  assert_int_equal(create(NULL, slow_host, &gemm), SLUICE_OK);
  assert_int_equal(multiply(gemm, 20, 16, 24, 0), SLUICE_OK);
  for (int i = 0; i < 20 * 16; ++i) assert_true(c[i] == 24);
  int others = strstr(log_text, "without native") == NULL || strstr(log_text, "without blas") == NULL ||
               strstr(log_text, "without onednn") == NULL;
  assert_int_equal(own_calls, others ? 0 : 1);
  if (!others) print_message("no library installed: the slow host is the only one\n");
  sluice_gemm_destroy(gemm);
}

TEST(Gemm_DecliningHost_OthersDoIt) {
  sluice_gemm_t* gemm = NULL;
  assert_int_equal(create(NULL, declining_host, &gemm), SLUICE_OK);
  assert_int_equal(multiply(gemm, 20, 16, 24, 0), SLUICE_OK);
  for (int i = 0; i < 20 * 16; ++i) assert_true(c[i] == 24);
  num_calls = 0;
  assert_int_equal(multiply(gemm, 20, 16, 24, 0), SLUICE_OK);
  assert_int_equal(num_calls, 0);
  assert_null(strstr(gemm->name, "host"));
  sluice_gemm_destroy(gemm);
}

/* If there is no memory to measure, the call still runs, and the class is measured later. */
TEST(Gemm_NoMemoryToMeasure_CalledAllTheSameAndMeasuredLater) {
  sluice_gemm_t* gemm = NULL;
  assert_int_equal(create(NULL, instant_host, &gemm), SLUICE_OK);
  sluice_gemm_problem_t p = {64, 64, 1, {a, 1, 1}, {b, 64, 1}, {c, 64, 1}};
  sluice_grouped_gemm_t list = {&p, 1, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 1};
  assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
  int refused = 0;
  for (int i = 0; i < 1000; ++i) {
    allocator.fail_after = 0; /* measuring allocates first, then the GEMM */
    refused += sluice_gemm_run(gemm, &list) != SLUICE_OK;
    assert_string_equal(gemm->name, "auto");
  }
  allocator.fail_after = -1;
  assert_true(refused < 1000);
  assert_true(settle(gemm, &list) > 0);
  assert_string_equal(gemm->name, "host");
  sluice_gemm_destroy(gemm);
}

/* ---- the machine cache ------------------------------------------------------------------------------------------- */

static const char* program;
static char folder[] = "/tmp/sluice_gemm_XXXXXX"; /* only for this test */

/* Finds the file of choices. */
static const char* kept_file(char path[512]) {
  DIR* entries = opendir(folder);
  assert_non_null(entries);
  path[0] = '\0';
  for (struct dirent* entry; (entry = readdir(entries)) != NULL;) {
    if (strncmp(entry->d_name, "gemm-", 5) != 0) continue;
    snprintf(path, 512, "%s/%s", folder, entry->d_name);
  }
  closedir(entries);
  return path[0] == '\0' ? NULL : path;
}

/* Returns 1 if, in a new process, which knows only the file, the first call already goes to the host. */
static int begins_with_host(void) {
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    execl("/proc/self/exe", program, "first call", (char*)NULL); /* argv[0] is part of the key */
    _exit(9);
  }
  int status = 0;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status) && WEXITSTATUS(status) < 2);
  return WEXITSTATUS(status);
}

static int first_call(void) {
  sluice_gemm_t* gemm = NULL;
  sluice_allocator_init(&allocator, NULL, NULL, NULL);
  if (create(NULL, instant_host, &gemm) != SLUICE_OK || multiply(gemm, 20, 16, 24, 0) != SLUICE_OK) return 9;
  const int is_host = strcmp(gemm->name, "host") == 0;
  sluice_gemm_destroy(gemm);
  sluice_allocator_deinit(&allocator);
  return is_host;
}

TEST(Choices_OfEarlierProcess_AreWhatTheNextBeginsWith) {
  char path[512];
  sluice_gemm_t* gemm = NULL;
  setenv("SLUICE_CACHE_DIR", folder, 1);
  assert_int_equal(create(NULL, instant_host, &gemm), SLUICE_OK);
  sluice_gemm_problem_t p = {40, 16, 24, {a, 24, 1}, {b, 16, 1}, {c, 16, 1}};
  sluice_grouped_gemm_t list = {&p, 1, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0};
  assert_true(settle(gemm, &list) > 1); /* stored with the classes that earlier tests have measured */
  sluice_gemm_destroy(gemm);
  assert_non_null(kept_file(path));
  assert_int_equal(begins_with_host(), 1);
  static const char* const damaged[] = {"", "not a cache file", "sluice gemm choices 2\nanother machine\n{}"};
  FILE* file = fopen(path, "r");
  assert_non_null(file);
  static char text[1 << 16], key[1024];
  const size_t length = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  for (int i = 0; i < 3; ++i) {
    file = fopen(path, "w");
    fputs(damaged[i], file);
    fclose(file);
    assert_int_equal(begins_with_host(), 0);
  }
  /* Files with the right form and key but invalid choices: nothing, an unknown kind, the same kind twice, no ref at the
   * end. */
  const char* body = strchr(strchr(text, '\n') + 1, '\n') + 1;
  snprintf(key, sizeof key, "%.*s", (int)(body - text), text);
  static const unsigned orders[] = {0, 0x54444, 0xf, 0x4, 0x56, 0x45};
  for (size_t i = 0; i < sizeof orders / sizeof orders[0]; ++i) {
    file = fopen(path, "w");
    fprintf(file, "%s{\"choices\": [", key);
    for (int id = 0; id < 1296; ++id) fprintf(file, "%s[%d, %u]", id > 0 ? ", " : "", id, orders[i]);
    fprintf(file, "]}");
    fclose(file);
    assert_int_equal(begins_with_host(), 0);
  }
  file = fopen(path, "w");
  fwrite(text, 1, length, file);
  fclose(file);
  assert_int_equal(begins_with_host(), 1);
}

int main(int argc, char** argv) {
  program = argv[0];
  if (argc > 1 && strcmp(argv[1], "first call") == 0) return first_call();
  if (mkdtemp(folder) == NULL) return 1;
  setenv("SLUICE_CACHE_DIR", "/dev/null", 1); /* tests share no file */
  const int failed = run_cases_each(set_up, tear_down);
  char path[512];
  if (kept_file(path) != NULL) unlink(path);
  rmdir(folder);
  return failed;
}
