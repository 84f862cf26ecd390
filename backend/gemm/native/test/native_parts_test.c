// SPDX-License-Identifier: Apache-2.0
/* The parts of "native": runs of panels, each of which one thread takes; the choice of kernels; prefetching; and the
 * arithmetic of AVX512-BF16. */
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "backend/base/dtype.h"
#include "backend/base/test/refused.h"
#include "backend/gemm/gemm.h"
#include "backend/gemm/native/gemm_native.h"
#include "backend/gemm/native/native_kernels.h"
#include "backend/gemm/native/native_prefetch.h"
#include "backend/gemm/native/native_runs.h"

enum { PROBLEMS = 7, PANELS = 400, MOST_RUNS = 4 };

static const int64_t panels_of[PROBLEMS] = {0, 128, 1, 0, 200, 71, 0};
static int64_t begins[PROBLEMS + 1], least[PROBLEMS];
static sluice_run_t room[MOST_RUNS];

static sluice_runs_t runs_of(int num_runs, int64_t least_of_all) {
  for (int i = 0; i < PROBLEMS; ++i) {
    begins[i + 1] = begins[i] + panels_of[i];
    least[i] = least_of_all;
  }
  assert_int_equal(begins[PROBLEMS], PANELS);
  const sluice_runs_t runs = {PROBLEMS, begins, least, num_runs, room};
  for (int i = 0; i < num_runs; ++i) {
    sluice_runs_set(&runs, i, (int64_t)PANELS * i / num_runs, (int64_t)PANELS * (i + 1) / num_runs);
  }
  return runs;
}

/* Counts how often each panel was taken. */
static void count(const sluice_piece_t* piece, int* taken) {
  for (int64_t panel = piece->first; panel < piece->last; ++panel) ++taken[begins[piece->problem] + panel];
}

static int is_within_its_gemm(const sluice_piece_t* piece) {
  return piece->first >= 0 && piece->first < piece->last && piece->last <= panels_of[piece->problem];
}

static void assert_each_once(const int* taken) {
  for (int i = 0; i < PANELS; ++i) {
    if (taken[i] != 1) fail_msg("panel %d taken %d times", i, taken[i]);
  }
}

/* The panel to prefetch is the next panel of the run, unless another thread takes it first. */
TEST(Take_OwnRun_SaysWhatComesNext) {
  const sluice_runs_t runs = runs_of(2, 1);
  sluice_piece_t piece, next;
  assert_true(sluice_runs_take(&runs, 0, &piece));
  for (int64_t left = PANELS / 2 - piece.last; left > 0; piece = next, left -= piece.last - piece.first) {
    assert_true(sluice_runs_take(&runs, 0, &next));
    assert_int_equal(piece.next_gemm, next.problem);
    assert_int_equal(piece.next_first, next.first);
  }
  assert_int_equal(piece.next_gemm, -1);
}

typedef struct taker_s {
  const sluice_runs_t* runs;
  int index;
  int outside; /* pieces that are not within one GEMM */
  int taken[PANELS];
} taker_t;

static void* take_all(void* data) {
  taker_t* taker = data;
  for (sluice_piece_t piece; sluice_runs_take(taker->runs, taker->index, &piece);) {
    taker->outside += !is_within_its_gemm(&piece);
    count(&piece, taker->taken);
  }
  return NULL;
}

TEST(Take_SeveralThreads_EachPanelOnce) {
  for (int round = 0; round < 200; ++round) {
    const sluice_runs_t runs = runs_of(MOST_RUNS, round % 2 ? 1 : 8);
    static taker_t takers[MOST_RUNS];
    pthread_t threads[MOST_RUNS];
    memset(takers, 0, sizeof takers);
    for (int i = 0; i < MOST_RUNS; ++i) {
      takers[i].runs = &runs;
      takers[i].index = i;
      assert_int_equal(pthread_create(&threads[i], NULL, take_all, &takers[i]), 0);
    }
    int taken[PANELS] = {0};
    for (int i = 0; i < MOST_RUNS; ++i) {
      pthread_join(threads[i], NULL);
      assert_int_equal(takers[i].outside, 0);
      for (int panel = 0; panel < PANELS; ++panel) taken[panel] += takers[i].taken[panel];
    }
    assert_each_once(taken);
  }
}

/* ---- the choice of kernels -------------------------------------------------------------------------------------- */

static sluice_status_t choose(const sluice_native_kernels_t* wide, const sluice_native_kernels_t* narrow,
                              const char* wanted, const char** out_name, char why[256]) {
  const sluice_native_set_t sets[] = {{"avx512", "AVX-512", wide}, {"avx2", "AVX2", narrow}};
  const sluice_native_kernels_t* kernels = NULL;
  why[0] = '\0';
  sluice_status_t status = sluice_native_choose(sets, 2, wanted, &kernels, why, 256);
  *out_name = kernels != NULL ? kernels->name : NULL;
  if (status != SLUICE_OK && status != SLUICE_E_NOT_FOUND) {
    DEFAULTS(sluice_error_info, info);
    sluice_error_last(&info);
    snprintf(why, 256, "%.255s", info.message);
  }
  return status;
}

#if defined(__x86_64__) && defined(__linux__)
/* Linux refuses the tiles because of an alternative signal stack that cannot hold them; "native" then uses AVX-512.
 * Runs in its own process, and before all other tests, since Linux never withdraws a permission. */
TEST(NativeChoice_KernelRefusesTiles_WidestOtherSet) {
  enum { AMX = 1 << 24, REFUSED = 40, GRANTED, NO_TILES };
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & AMX) == 0) skip_because("this processor has no amx");
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    static char small[8192];
    const stack_t stack = {.ss_sp = small, .ss_size = sizeof small};
    if (sigaltstack(&stack, NULL) != 0) _exit(NO_TILES);
    sluice_native_set_t sets[SLUICE_NATIVE_SETS];
    sluice_native_sets(sets);
    if (syscall(SYS_arch_prctl, 0x1023, 18) == 0) _exit(NO_TILES); /* Linux did not refuse */
    const sluice_native_kernels_t* kernels = NULL;
    char why[256];
    sluice_status_t status = sluice_native_choose(sets, SLUICE_NATIVE_SETS, NULL, &kernels, why, sizeof why);
    const int other = status == SLUICE_OK && kernels != NULL && strcmp(kernels->name, "amx") != 0;
    _exit(sets[0].kernels == NULL && other ? REFUSED : GRANTED);
  }
  int status = 0;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  if (WEXITSTATUS(status) == NO_TILES) skip_because("this kernel looks at no signal stack");
  assert_int_equal(WEXITSTATUS(status), REFUSED);
}
#endif

TEST(NativeChoice_ByProcessorAndName_WidestNamedOrRefused) {
  static const sluice_native_kernels_t wide = {.name = "wide"}, narrow = {.name = "narrow"};
  const char* name = NULL;
  char why[256];
  assert_int_equal(choose(&wide, &narrow, NULL, &name, why), SLUICE_OK);
  assert_string_equal(name, "wide");
  assert_int_equal(choose(&wide, &narrow, "", &name, why), SLUICE_OK);
  assert_string_equal(name, "wide");
  assert_int_equal(choose(NULL, &narrow, NULL, &name, why), SLUICE_OK);
  assert_string_equal(name, "narrow");
  assert_int_equal(choose(&wide, &narrow, "avx2", &name, why), SLUICE_OK);
  assert_string_equal(name, "narrow");
  assert_int_equal(choose(&wide, &narrow, "avx512", &name, why), SLUICE_OK);
  assert_string_equal(name, "wide");
  assert_int_equal(choose(NULL, NULL, NULL, &name, why), SLUICE_E_NOT_FOUND);
  assert_non_null(strstr(why, "neither AVX-512 nor AVX2"));
  assert_int_equal(choose(NULL, &narrow, "avx512", &name, why), SLUICE_E_UNSUPPORTED);
  assert_null(name);
  assert_non_null(strstr(why, "this processor has no AVX-512; it has AVX2"));
  assert_int_equal(choose(NULL, NULL, "avx2", &name, why), SLUICE_E_UNSUPPORTED);
  assert_non_null(strstr(why, "this processor has no AVX2"));
  assert_int_equal(choose(&wide, &narrow, "sse2", &name, why), SLUICE_E_INVALID_ARGUMENT);
  assert_non_null(strstr(why, "SLUICE_NATIVE is \"sse2\": set it to avx512 or avx2"));
}

/* Neither "native" nor "auto" opens without the requested kernels. */
TEST(NativeChoice_UnknownWordInTheEnvironment_CreateFails) {
  sluice_allocator_t allocator;
  sluice_allocator_init(&allocator, NULL, NULL, NULL);
  setenv("SLUICE_NATIVE", "sse2", 1);
  unsetenv("SLUICE_GEMM");
  sluice_gemm_t* none = NULL;
  assert_int_equal(sluice_gemm_native_create(&allocator, &none), SLUICE_E_INVALID_ARGUMENT);
  assert_null(none);
  const sluice_gemm_options_t options = {.name = "auto"};
  assert_int_equal(sluice_gemm_create(&options, &allocator, &none), SLUICE_E_INVALID_ARGUMENT);
  assert_null(none);
  unsetenv("SLUICE_NATIVE");
  assert_int_equal(allocator.num_live, 0);
  sluice_allocator_deinit(&allocator);
}

/* ---- prefetch --------------------------------------------------------------------------------------------------- */

/* Both kinds of walk visit every line of the rows once. With in_turns, successive lines are in different pages. */
TEST(NativePrefetch_RowsOfAnyLength_EveryLineOnce) {
  enum { MOST_LINES = 1 << 14 };
  static const int64_t blocks[][3] = {/* rows, bytes to prefetch of each, bytes from one row to the next */
                                      {16, 4096, 4096}, {64, 2048, 2048}, {32, 1536, 1536}, {16, 1024, 1024},
                                      {128, 256, 7168}, {16, 128, 128},   {1, 8192, 8192},  {32, 4096, 14336},
                                      {48, 512, 4096},  {256, 1024, 8192}};
  static char met[MOST_LINES];
  static _Alignas(64) char lines[1]; /* the address of the rows, which are never read */
  for (size_t i = 0; i < sizeof blocks / sizeof blocks[0]; ++i) {
    const int64_t rows = blocks[i][0], bytes = blocks[i][1], ld = blocks[i][2];
    for (int in_turns = 0; in_turns < 2; ++in_turns) {
      sluice_native_prefetch_t p = sluice_native_aim(lines, rows, bytes, ld, 7, in_turns);
      assert_true(p.per_step * 7 >= p.left && p.per_step * 7 < p.left + 7);
      assert_int_equal(p.left, rows * (bytes / 64));
      memset(met, 0, sizeof met);
      int64_t before = -1;
      for (int64_t left = p.left; left > 0; --left) {
        const int64_t at = p.at - lines, line = at % ld / 64, row = at / ld;
        assert_true(row < rows && line < bytes / 64);
        assert_int_equal(met[row * (bytes / 64) + line]++, 0);
        if (in_turns && before >= 0 && rows > 1 && rows * ld >= 2 * 4096) assert_true(before / 4096 != at / 4096);
        before = at;
        p.at = sluice_native_next_line(&p, p.at, &p.inner);
      }
    }
  }
}

/* With a number of rows that does not divide evenly, some are left out. Nothing outside of the rows is prefetched. */
TEST(NativePrefetch_OddNumbersOfRows_StaysInside) {
  static _Alignas(64) char lines[1];
  for (int64_t rows = 0; rows < 70; ++rows) {
    for (int64_t ld = 64; ld <= 8192; ld *= 2) {
      sluice_native_prefetch_t p = sluice_native_aim(lines, rows, ld, ld, 1, 1);
      assert_true(p.left <= rows * (ld / 64) && 3 * p.left >= rows * (ld / 64));
      for (int64_t left = p.left; left > 0; --left) {
        assert_true(p.at >= lines && p.at - lines < rows * ld);
        p.at = sluice_native_next_line(&p, p.at, &p.inner);
      }
    }
  }
}

/* ---- pairs ------------------------------------------------------------------------------------------------------- */

/* The steps of a pair: which product is first, that each is rounded, and what is flushed between them. */
TEST(Native_PairsOfBf16_OddFirstEachRoundedAndFlushed) {
  sluice_gemm_t* gemm = NULL;
  setenv("SLUICE_NATIVE", "avx512_bf16", 1);
  const sluice_status_t status = sluice_gemm_native_create(sluice_process_allocator(), &gemm);
  unsetenv("SLUICE_NATIVE");
  if (status == SLUICE_E_UNSUPPORTED) skip_because("this processor has no avx512_bf16");
  assert_int_equal(status, SLUICE_OK);
  static const struct {
    float c, x[2], y[2], wanted;
  } cases[] = {
      {0x1p24f, {1, 1}, {1, 1}, 0x1p24f},                 /* each 1 is rounded away; their sum would not be */
      {0, {1, 0x1p24f}, {1, 1}, 0x1p24f},                 /* the even 1 comes after the odd 2^24 */
      {0, {0x1p24f, 1}, {1, 1}, 0x1p24f},                 /* 1 + 2^24 rounds to even */
      {0x1p24f, {1, -0x1p24f}, {1, 1}, 1},                /* the odd k first; with the even k first it would be 0 */
      {0, {0x1p-70f, 0x1p-70f}, {0x1p-57f, 0x1p-57f}, 0}, /* 2^-127 twice: each becomes 0 */
      {0x1p-126f,
       {0x1p-126f, 0x1p-126f},
       {0.5f, -0.5f},
       0x1p-127f * 0},                                       /* 2^-127 becomes 0, and so does the next sum */
      {0x1p-130f, {0, 0}, {0, 0}, 0},                        /* a subnormal C */
      {0x1p-126f, {0x1p-130f, 0}, {0x1p100f, 0}, 0x1p-126f}, /* a subnormal operand */
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    for (int64_t m = 1; m <= 20; m += 19) { /* kernels without packing, and tiles */
      uint16_t a[40], b[2];
      float c[20];
      for (int j = 0; j < 40; ++j) a[j] = sluice_f32_to_bf16(cases[i].x[j % 2]);
      for (int j = 0; j < 2; ++j) b[j] = sluice_f32_to_bf16(cases[i].y[j]);
      for (int j = 0; j < 20; ++j) c[j] = cases[i].c;
      sluice_gemm_problem_t p = {m, 1, 2, {a, 2, 1}, {b, 1, 2}, {c, 1, 1}};
      sluice_grouped_gemm_t list = {&p, 1, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F32, 1};
      assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
      for (int j = 0; j < m; ++j) {
        if (c[j] != cases[i].wanted) fail_msg("case %d, row %d: %g, expected %g", (int)i, j, c[j], cases[i].wanted);
      }
    }
  }
  sluice_gemm_destroy(gemm);
}
