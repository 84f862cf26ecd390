// SPDX-License-Identifier: Apache-2.0
/* GEMMs with cuBLAS on fake tables: opening, grouping, and every error path. backend/cts/gemm tests the arithmetic. */
#include <stdlib.h>
#include <string.h>

#include "backend/base/test/refused.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/gemm/cublas/fake/fake_cublas.h"

static sluice_allocator_t allocator, memory;
static sluice_device_t* device;

static int set_up(void** state) {
  (void)state;
  sluice_fake_cuda_reset();
  sluice_allocator_init(&allocator, NULL, NULL, NULL);
  sluice_allocator_init(&memory, NULL, NULL, NULL);
  sluice_fake_cublas_set_version(130002);
  return sluice_fake_cuda_device(&allocator, &device);
}
static int tear_down(void** state) {
  char text[200];
  (void)state;
  device->vtable->destroy(device);
  int64_t left = sluice_fake_cuda_live(text, sizeof text) + (int64_t)allocator.num_live + (int64_t)memory.num_live +
                 sluice_fake_cublas_handles() + sluice_fake_cublaslt_live();
  sluice_allocator_deinit(&allocator);
  sluice_allocator_deinit(&memory);
  return left == 0 ? 0 : -1;
}

static sluice_status_t create_lt(int32_t how, sluice_gemm_t** out_gemm) {
  sluice_cublas_symbols_t symbols = sluice_fake_cublas(1);
  sluice_cublaslt_symbols_t lt = sluice_fake_cublaslt();
  const sluice_gemm_cublas_options_t options = {
      .device = device, .memory = &memory, .symbols = &symbols, .lt_symbols = &lt, .how = how, .workspace_bytes = 4096};
  return sluice_gemm_cublas_create(&options, &allocator, out_gemm);
}

static sluice_status_t create(int with_groups, int32_t tf32, sluice_gemm_t** out_gemm) {
  sluice_cublas_symbols_t symbols = sluice_fake_cublas(with_groups);
  const sluice_gemm_cublas_options_t options = {.device = device,
                                                .memory = &memory,
                                                .symbols = &symbols,
                                                .how = SLUICE_CUBLAS_GROUPED,
                                                .workspace_bytes = 4096,
                                                .tf32 = tf32};
  return sluice_gemm_cublas_create(&options, &allocator, out_gemm);
}

enum { COUNT = 1100 }; /* more than fit into two grouped calls */

typedef struct lists_s {
  float a[COUNT][6], b[COUNT][6], c[COUNT][4];
  sluice_gemm_problem_t problems[COUNT];
} lists_t;

/* C [2, 2] = A [2, 3] B [3, 2]; every seventh GEMM has m = 0, every ninth k = 0. */
static void fill(lists_t* l) {
  for (int i = 0; i < COUNT; ++i) {
    for (int j = 0; j < 6; ++j) {
      l->a[i][j] = (float)((i + j) % 5);
      l->b[i][j] = (float)((i * j) % 7);
    }
    for (int j = 0; j < 4; ++j) l->c[i][j] = 99;
    l->problems[i] = (sluice_gemm_problem_t){
        i % 7 == 3 ? 0 : 2, 2, i % 9 == 4 ? 0 : 3, {l->a[i], 3, 1}, {l->b[i], 2, 1}, {l->c[i], 2, 1}};
  }
}
static void check(const lists_t* l) {
  for (int i = 0; i < COUNT; ++i) {
    for (int j = 0; j < 4; ++j) {
      float want = 0;
      for (int64_t k = 0; k < l->problems[i].k; ++k) want += l->a[i][j / 2 * 3 + k] * l->b[i][k * 2 + j % 2];
      assert_true(l->c[i][j] == (l->problems[i].m == 0 ? 99 : want));
    }
  }
}

TEST(Groups_ManyGemms_AreFewCallsInStreamOrder) {
  lists_t* l = malloc(sizeof *l);
  for (int with_groups = 0; with_groups < 2; ++with_groups) {
    sluice_gemm_t* gemm = NULL;
    void* stream = sluice_fake_cuda_open_stream(0);
    assert_int_equal(create(with_groups, 0, &gemm), SLUICE_OK);
    assert_string_equal(gemm->name, "cublas (13.0.2)");
    fill(l);
    int64_t single = sluice_fake_cublas_single_calls(), grouped = sluice_fake_cublas_grouped_calls();
    const sluice_grouped_gemm_t list = {l->problems, COUNT, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0, stream};
    assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
    assert_true(sluice_fake_cuda_idle(stream));
    check(l);
    single = sluice_fake_cublas_single_calls() - single;
    grouped = sluice_fake_cublas_grouped_calls() - grouped;
    assert_true(with_groups ? (single == 0 && grouped == 2) : (single > 500 && grouped == 0));
    sluice_gemm_destroy(gemm);
    sluice_fake_cuda_close_stream(stream);
  }
  free(l);
}

/* Packed weights on a device need a kernel that decodes them; these fakes have none. */
TEST(PackedWeights_AreRefused) {
  float a[32] = {0}, c[2];
  uint8_t codes[32] = {0}, scales[2] = {0};
  const sluice_packed_t packed = {SLUICE_PACKED_MXFP4, 32, 1, scales, 1, 0};
  const sluice_gemm_problem_t p = {1, 2, 32, {a, 32, 1}, {codes, 1, 32}, {c, 2, 1}};
  const sluice_grouped_gemm_t list = {&p, 1, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0, NULL, &packed};
  sluice_gemm_t* gemm = NULL;
  assert_int_equal(create(1, 0, &gemm), SLUICE_OK);
  REFUSED(sluice_gemm_run(gemm, &list), SLUICE_E_UNSUPPORTED, "no packed weights");
  sluice_gemm_destroy(gemm);
}

static void* allocate_apart(void* user, uint64_t bytes) {
  (void)user;
  char* block = aligned_alloc(256, (bytes + 2 * 256 - 1) / 256 * 256);
  return block + 64;
}
static void release_apart(void* user, void* data, uint64_t bytes) {
  (void)user, (void)bytes;
  free((char*)data - 64);
}

/* cuBLAS needs its workspace at a multiple of 256; callbacks of the host need only return multiples of 64. */
TEST(Workspace_OfMemoryThatIsAlignedTo64_IsTakenFromAMultipleOf256) {
  sluice_allocator_t own;
  sluice_allocator_init(&own, allocate_apart, release_apart, NULL);
  sluice_cublas_symbols_t symbols = sluice_fake_cublas(1);
  const sluice_gemm_cublas_options_t options = {
      .device = device, .memory = &own, .symbols = &symbols, .workspace_bytes = 4096};
  sluice_gemm_t* gemm = NULL;
  float a = 3, c = 0;
  const sluice_gemm_problem_t problem = {1, 1, 1, {&a, 1, 1}, {&a, 1, 1}, {&c, 1, 1}};
  const sluice_grouped_gemm_t list = {&problem, 1, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0, NULL};
  assert_int_equal(sluice_gemm_cublas_create(&options, &allocator, &gemm), SLUICE_OK);
  if (sluice_gemm_run(gemm, &list) != SLUICE_OK) fail_msg("%s", last_message());
  assert_true(c == 9);
  sluice_gemm_destroy(gemm);
  assert_int_equal(own.num_live, 0);
  sluice_allocator_deinit(&own);
}

/* In a grouped call, cuBLAS assumes aligned pointers for bf16 and TF32, so other GEMMs run as single GEMMs. Each sum is
 * added to C once, also if the library then declines the group. */
TEST(Groups_PointersThatAreNotAligned_RunByThemselves) {
  enum { PROBLEMS = 5, ODD = 2 };
  static const int32_t dtypes[] = {SLUICE_DTYPE_BF16, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32};
  for (int variant = 0; variant < 6; ++variant) {
    int tf32 = variant == 1, declines = variant >= 3; /* as not supported, not on this architecture, invalid */
    int32_t dtype = dtypes[declines ? 0 : variant];
    _Alignas(16) float a[PROBLEMS][8], c[PROBLEMS][8];
    sluice_gemm_problem_t problems[PROBLEMS];
    for (int i = 0; i < PROBLEMS; ++i) {
      int at = i == ODD ? 1 : 0; /* elements after an aligned address */
      char *pa = (char*)a[i] + at * (dtype == SLUICE_DTYPE_BF16 ? 2 : 4), *pc = (char*)c[i];
      const float two = 2, one = 1;
      const uint16_t two16 = 0x4000, one16 = 0x3f80;
      memcpy(pa, dtype == SLUICE_DTYPE_BF16 ? (const void*)&two16 : &two, dtype == SLUICE_DTYPE_BF16 ? 2 : 4);
      memcpy(pc, dtype == SLUICE_DTYPE_BF16 ? (const void*)&one16 : &one, dtype == SLUICE_DTYPE_BF16 ? 2 : 4);
      problems[i] = (sluice_gemm_problem_t){1, 1, 1, {pa, 1, 1}, {pa, 1, 1}, {pc, 1, 1}};
    }
    const sluice_grouped_gemm_t list = {problems, PROBLEMS, dtype, dtype, 1, NULL};
    sluice_gemm_t* gemm = NULL;
    assert_int_equal(create(declines ? variant - 1 : 1, tf32, &gemm), SLUICE_OK);
    int64_t grouped = sluice_fake_cublas_grouped_calls(), single = sluice_fake_cublas_single_calls();
    assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
    int own = variant != 2; /* f32 without TF32 needs no alignment */
    assert_int_equal(sluice_fake_cublas_grouped_calls() - grouped, !declines);
    assert_int_equal(sluice_fake_cublas_single_calls() - single, declines ? PROBLEMS : own);
    for (int i = 0; i < PROBLEMS; ++i) {
      float got;
      uint16_t half;
      memcpy(&half, c[i], sizeof half);
      memcpy(&got, c[i], sizeof got);
      if (dtype == SLUICE_DTYPE_BF16 ? half != 0x40a0 : got != 5) fail_msg("variant %d: GEMM %d", variant, i);
    }
    sluice_gemm_destroy(gemm);
  }
}

/* One search for an algorithm per shape and alignment; its result is used again. */
TEST(Lt_WhereChosen_MultipliesWithOneSearchPerShape) {
  lists_t* l = malloc(sizeof *l);
  static const char* const names[] = {NULL, "grouped", "single", "lt", "streams"};
  for (int32_t how = SLUICE_CUBLAS_BY_RULE; how <= SLUICE_CUBLAS_STREAMS; ++how) {
    sluice_gemm_t* gemm = NULL;
    assert_int_equal(sluice_cublas_how_named(names[how]), how);
    assert_int_equal(create_lt(how, &gemm), SLUICE_OK);
    const sluice_grouped_gemm_t list = {l->problems, COUNT, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0, NULL};
    for (int round = 0; round < 2; ++round) {
      int64_t searches = sluice_fake_cublaslt_searches(), problems = sluice_fake_cublaslt_gemms();
      int64_t single = sluice_fake_cublas_single_calls(), grouped = sluice_fake_cublas_grouped_calls();
      fill(l);
      assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
      check(l);
      searches = sluice_fake_cublaslt_searches() - searches, problems = sluice_fake_cublaslt_gemms() - problems;
      assert_true((problems > 500) == (how == SLUICE_CUBLAS_LT));
      const int is_single = how == SLUICE_CUBLAS_BY_RULE || how == SLUICE_CUBLAS_SINGLE || how == SLUICE_CUBLAS_STREAMS;
      assert_true((sluice_fake_cublas_single_calls() - single > 500) == is_single);
      assert_true((sluice_fake_cublas_grouped_calls() > grouped) == (how == SLUICE_CUBLAS_GROUPED));
      /* the operands have only a few different alignments */
      if (how == SLUICE_CUBLAS_LT) assert_true(round == 0 ? searches > 0 && searches < 200 : searches < 100);
    }
    sluice_gemm_destroy(gemm);
    assert_int_equal(sluice_fake_cublaslt_live(), 0);
  }
  free(l);
}

/* The rule of cublas_choice.h on 132 SMs. */
TEST(Choice_ByWavesAndDepth_StreamsWhereSmsWouldIdle) {
  static const struct {
    int64_t count, m, n, k;
    int32_t how;
  } cases[] = {
      {128, 1024, 1536, 2048, SLUICE_CUBLAS_STREAMS}, /* Qwen3, up: 48 tiles */
      {128, 1536, 2048, 1024, SLUICE_CUBLAS_STREAMS}, /* Qwen3, weight gradients: 96 tiles */
      {8, 4096, 28672, 4096, SLUICE_CUBLAS_SINGLE},   /* Mixtral, up: 27 waves */
      {1, 32768, 28672, 4096, SLUICE_CUBLAS_SINGLE},
      {32, 4096, 4096, 7168, SLUICE_CUBLAS_SINGLE},  /* DeepSeek on one rank of eight: four waves */
      {256, 512, 4096, 7168, SLUICE_CUBLAS_STREAMS}, /* DeepSeek on one GPU: 64 tiles */
      {256, 7168, 2048, 512, SLUICE_CUBLAS_STREAMS}, /* its weight gradients: 448 tiles, 52 in the last wave */
      {1, 128, 256, 4096, SLUICE_CUBLAS_SINGLE},     /* a single GEMM */
      {2, 128, 256, 64, SLUICE_CUBLAS_SINGLE},       /* too short to pay for a join */
      {2, 128, 256, 2048, SLUICE_CUBLAS_STREAMS},
      {2, 128, 0, 2048, SLUICE_CUBLAS_SINGLE}, /* empty */
  };
  float x[1] = {0};
  sluice_gemm_problem_t* problems = calloc(256, sizeof *problems);
  for (size_t c = 0; c < sizeof cases / sizeof cases[0]; ++c) {
    for (int64_t i = 0; i < cases[c].count; ++i) {
      problems[i] = (sluice_gemm_problem_t){cases[c].m,         cases[c].n,         cases[c].k,
                                            {x, cases[c].k, 1}, {x, cases[c].n, 1}, {x, cases[c].n, 1}};
    }
    const sluice_grouped_gemm_t list = {problems, cases[c].count, SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16, 0, NULL};
    const int32_t how = sluice_cublas_choose(&list, 132);
    if (how != cases[c].how) fail_msg("case %d: %d, not %d", (int)c, how, cases[c].how);
  }
  free(problems);
}

/* If cuBLAS were told all SMs, it would choose small tiles for a GEMM that does not fill them. */
TEST(Streams_EachGemm_HasTheSmsThatItsTilesFill) {
  static const struct {
    int64_t m, n;
    int32_t sms;
  } cases[] = {{512, 4096, 64}, {600, 4096, 80}, {512, 2048, 33}, {1, 1, 33}, {7168, 2048, 112}, {4096, 28672, 128}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    assert_int_equal(sluice_cublas_sms_of(cases[i].m, cases[i].n, 132), cases[i].sms);
    assert_int_equal(sluice_cublas_sms_of(cases[i].n, cases[i].m, 132), cases[i].sms);
  }
  float a[2] = {3, 3}, c[2];
  sluice_gemm_problem_t problems[2];
  for (int i = 0; i < 2; ++i) problems[i] = (sluice_gemm_problem_t){1, 1, 1, {a, 1, 1}, {a, 1, 1}, {&c[i], 1, 1}};
  sluice_grouped_gemm_t list = {problems, 2, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0, NULL};
  sluice_gemm_t* gemm = NULL;
  assert_int_equal(create_lt(SLUICE_CUBLAS_STREAMS, &gemm), SLUICE_OK);
  for (list.count = 2; list.count > 0; --list.count) {
    assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
    assert_int_equal(sluice_fake_cublas_last_sms(), list.count == 2 ? 33 : 0); /* a single GEMM has all SMs */
  }
  sluice_gemm_destroy(gemm);
  setenv("SLUICE_CUBLAS_SMS", "116", 1);
  assert_int_equal(create_lt(SLUICE_CUBLAS_STREAMS, &gemm), SLUICE_OK);
  for (list.count = 2; list.count > 0; --list.count) {
    assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
    assert_int_equal(sluice_fake_cublas_last_sms(), list.count == 2 ? 29 : 116);
  }
  sluice_gemm_destroy(gemm);
  static const char* const wrong[] = {"0", "133", "many", "16 SMs"};
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; ++i) {
    setenv("SLUICE_CUBLAS_SMS", wrong[i], 1);
    REFUSED(create_lt(SLUICE_CUBLAS_STREAMS, &gemm), SLUICE_E_INVALID_ARGUMENT, "SLUICE_CUBLAS_SMS");
  }
  unsetenv("SLUICE_CUBLAS_SMS");
}

/* The streams are forked and joined even if a call in between fails, so that the next list can use them. */
TEST(Streams_WhereACallFails_JoinAndWorkOn) {
  enum { PROBLEMS = 6 };
  float a = 3, c[PROBLEMS];
  sluice_gemm_problem_t problems[PROBLEMS];
  for (int i = 0; i < PROBLEMS; ++i) {
    problems[i] = (sluice_gemm_problem_t){1, 1, 1, {&a, 1, 1}, {&a, 1, 1}, {&c[i], 1, 1}};
  }
  const sluice_grouped_gemm_t list = {problems, PROBLEMS, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0, NULL};
  sluice_gemm_t* gemm = NULL;
  assert_int_equal(create_lt(SLUICE_CUBLAS_STREAMS, &gemm), SLUICE_OK);
  for (int n = 0, failed = 1; failed; ++n) { /* one record, three waits; then three records and three waits */
    sluice_fake_cuda_fail_call(n, 719);
    const sluice_status_t status = sluice_gemm_run(gemm, &list);
    failed = sluice_fake_cuda_failed();
    sluice_fake_cuda_fail_call(-1, 0);
    assert_int_equal(status, failed ? SLUICE_E_EXTERNAL : SLUICE_OK);
    assert_true(failed || n >= 10);
    memset(c, 0, sizeof c);
    assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
    for (int i = 0; i < PROBLEMS; ++i) assert_true(c[i] == 9);
  }
  sluice_gemm_destroy(gemm);
}

/* Numbers of rows that are rounded to the same multiple share a search, in forwards, input and weight gradients. If
 * the algorithm cannot run one of them, it is searched for again. */
TEST(Lt_RowsThatDiffer_ShareASearch) {
  enum { LEAST = 129, MOST = 160, WIDTH = 4 };
  static float x[MOST * WIDTH], w[WIDTH * WIDTH], y[MOST * WIDTH];
  for (int i = 0; i < MOST * WIDTH; ++i) x[i] = (float)(i % 7);
  for (int i = 0; i < WIDTH * WIDTH; ++i) w[i] = (float)(i % 3);
  for (int most = 0; most < 2; ++most) {
    sluice_gemm_t* gemm = NULL;
    int64_t searches = sluice_fake_cublaslt_searches();
    assert_int_equal(create_lt(SLUICE_CUBLAS_LT, &gemm), SLUICE_OK);
    if (most) sluice_fake_cublaslt_set_most_columns(LEAST);
    for (int64_t rows = LEAST; rows <= MOST; ++rows) {
      const sluice_gemm_problem_t forward = {rows, WIDTH, WIDTH, {x, WIDTH, 1}, {w, WIDTH, 1}, {y, WIDTH, 1}};
      const sluice_gemm_problem_t wgrad = {WIDTH, WIDTH, rows, {x, 1, WIDTH}, {x, WIDTH, 1}, {y, WIDTH, 1}};
      const sluice_gemm_problem_t* const problems[] = {&forward, &wgrad};
      for (int i = 0; i < 2; ++i) {
        const sluice_grouped_gemm_t list = {problems[i], 1, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0, NULL};
        assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
        float sum = 0;
        for (int64_t k = 0; k < (i == 0 ? WIDTH : rows); ++k)
          sum += x[k * WIDTH * i + k * !i] * (i == 0 ? w : x)[k * WIDTH];
        assert_true(y[0] == sum);
      }
    }
    assert_int_equal(sluice_fake_cublaslt_searches() - searches, most ? 2 + MOST - LEAST : 2);
    sluice_fake_cublaslt_set_most_columns(0);
    sluice_gemm_destroy(gemm);
  }
}

/* If cuBLASLt is missing, too old, or has no algorithm, cuBLAS runs the GEMM. */
TEST(Lt_MissingOldOrDeclining_LeavesItToCublas) {
  float x[1] = {3}, y[1];
  const sluice_gemm_problem_t p = {1, 1, 1, {x, 1, 1}, {x, 1, 1}, {y, 1, 1}};
  const sluice_grouped_gemm_t list = {&p, 1, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0, NULL};
  for (int kind = 0; kind < 3; ++kind) {
    sluice_gemm_t* gemm = NULL;
    int64_t single = sluice_fake_cublas_single_calls(), problems = sluice_fake_cublaslt_gemms();
    if (kind == 1) sluice_fake_cublaslt_set(110901, 0);
    if (kind == 2) sluice_fake_cublaslt_set(130002, 1);
    if (kind == 0) assert_int_equal(setenv("SLUICE_CUBLAS", "lt", 1), 0);
    assert_int_equal(kind == 0 ? create(1, 0, &gemm) : create_lt(SLUICE_CUBLAS_LT, &gemm), SLUICE_OK);
    unsetenv("SLUICE_CUBLAS");
    y[0] = 0;
    assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
    assert_true(y[0] == 9);
    assert_int_equal(sluice_fake_cublas_single_calls(), single + 1);
    assert_int_equal(sluice_fake_cublaslt_gemms(), problems);
    sluice_gemm_destroy(gemm);
    sluice_fake_cublaslt_set(130002, 0);
  }
}

TEST(Library_MissingOldOrWrong_IsNotFound) {
  sluice_gemm_t* gemm = NULL;
  sluice_gemm_cublas_options_t options = {.device = device, .memory = &memory, .library = "libcublas_not_there.so.1"};
  REFUSED(sluice_gemm_cublas_create(&options, &allocator, &gemm), SLUICE_E_NOT_FOUND, "12.0");
  options.library = "libm.so.6";
  REFUSED(sluice_gemm_cublas_create(&options, &allocator, &gemm), SLUICE_E_NOT_FOUND, "cublasCreate_v2");
  sluice_fake_cublas_set_version(110901);
  REFUSED(create(1, 0, &gemm), SLUICE_E_NOT_FOUND, "110901");
  assert_null(gemm);
}

static void fail_no_call(void) {
  sluice_fake_cuda_fail_call(-1, 0);
  sluice_fake_cublas_fail_call(-1, 0);
}

/* A call of cuBLAS, cuBLASLt or the driver fails: the error says so, nothing leaks, and the gemm still works. */
TEST(Calls_NthFails_LeaksNothingAndSaysSo) {
  enum { WITHOUT_GROUPS, WITH_GROUPS, LT, NUM_WAYS };
  static const int codes[][2] = {{3, SLUICE_E_NO_MEMORY}, {13, SLUICE_E_EXTERNAL}}, driver_codes[] = {2, 719};
  float a[2][1] = {{1}, {2}}, c[2][1];
  sluice_gemm_problem_t problems[2];
  for (int i = 0; i < 2; ++i) problems[i] = (sluice_gemm_problem_t){1, 1, 1, {a[i], 1, 1}, {a[i], 1, 1}, {c[i], 1, 1}};
  const sluice_grouped_gemm_t list = {problems, 2, SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, 0, NULL};
  for (int i = 0; i < 4 * NUM_WAYS; ++i) {
    const int way = i / 4, of_driver = i / 2 % 2, kind = i % 2;
    int64_t told = 0, nth = 0;
    for (int done = 0; !done; ++nth) {
      sluice_gemm_t* gemm = NULL;
      if (of_driver) sluice_fake_cuda_fail_call(nth, driver_codes[kind]);
      if (!of_driver) sluice_fake_cublas_fail_call(nth, codes[kind][0]);
      sluice_status_t status = way == LT ? create_lt(SLUICE_CUBLAS_LT, &gemm) : create(way, 0, &gemm);
      const int was_made = status == SLUICE_OK;
      if (was_made) status = sluice_gemm_run(gemm, &list);
      if (status != SLUICE_OK) assert_int_equal(status, codes[kind][1]);
      told += status != SLUICE_OK;
      const int has_failed = sluice_fake_cuda_failed() || sluice_fake_cublas_failed();
      if (has_failed) fail_no_call();
      c[0][0] = c[1][0] = 0;
      if (has_failed && was_made) assert_int_equal(sluice_gemm_run(gemm, &list), SLUICE_OK);
      if (has_failed && was_made) assert_true(c[0][0] == 1 && c[1][0] == 4);
      sluice_gemm_destroy(gemm);
      done = !has_failed && !sluice_fake_cuda_failed() && !sluice_fake_cublas_failed();
      fail_no_call();
      assert_int_equal(sluice_fake_cublas_handles() + sluice_fake_cublaslt_live(), 0);
      assert_int_equal(memory.num_live, 0);
      assert_true(nth < 200);
    }
    assert_in_range(told, 3, nth);
  }
}

int main(void) { return run_cases_each(set_up, tear_down); }
