// SPDX-License-Identifier: Apache-2.0
/* The layer on a CUDA context, executed by the fake driver, cuBLAS and NCCL. Ranks have a device each and use NCCL, or
 * share one device and use a local communicator. Nothing here measures the speed of a GPU. */

#include "backend/comm/nccl/fake/fake_nccl.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/gemm/cublas/fake/fake_cublas.h"
#include "capi/test/cuda/cuda_layer_suite.h"
#include "capi/test/cuda/fakes_checks.h"
#include "third_party/bazel/test.h"

typedef struct entry_s {
  const layer_case_t* c;
  const layer_machine_t* machine;
  int32_t world_size;
  char name[128];
} entry_t;

static void run_entry(void** state) {
  const entry_t* entry = *state;
  const char* why = entry->c->run(entry->machine, entry->world_size);
  if (why != NULL) fail_msg("%s", why);
}

static void CudaLayer_SoakOfTwoSeconds_MatchesReferenceAndCpu(void** state) {
  int64_t cases = 0;
  const char* why = layer_soak(*state, 4, 1, 2, &cases);
  printf("%lld random cases\n", (long long)cases);
  if (why != NULL) fail_msg("case %lld: %s", (long long)cases, why);
  assert_true(cases > 0);
}

/* All fakes multiply in the same way, so the cases differ in the called library, its stream and its workspace. */
static void CudaLayer_EveryWayOfTheLibrary_GivesTheSameBits(void** state) {
  (void)state;
  static const char* const hows[] = {"grouped", "single", "lt"};
  case_t c = world_small_case();
  result_t want, got;
  c.num_chunks = 3, c.bias = 1, c.gated = 1, c.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
  for (int how = 0; how < 3; ++how) {
    int64_t gemms = sluice_fake_cublaslt_gemms();
    assert_int_equal(setenv("SLUICE_CUBLAS", hows[how], 1), 0);
    run_on_fakes(&c, how == 0 ? &want : &got);
    unsetenv("SLUICE_CUBLAS");
    assert_true((sluice_fake_cublaslt_gemms() > gemms) == (how == 2));
    if (how == 0) continue;
    must_be_same(&c, &got, &want, 1);
    world_free(&got);
  }
  world_free(&want);
}

/* f32 layers round their operands to TF32 only if the host requests it by name. */
static void CudaLayer_Tf32_IsByNameAlone(void** state) {
  (void)state;
  static const char* const names[] = {NULL, "auto", "cublas", "cublas-tf32"};
  for (int i = 0; i < 4; ++i) {
    case_t c = world_small_case();
    result_t out;
    c.num_chunks = 2, c.machine = fakes_machine(), c.gemm = names[i];
    fakes_open(1, 1);
    world_run(&c, &out);
    assert_int_equal(out.status[0], SLUICE_OK);
    int want = i == 3 ? SLUICE_CUBLAS_COMPUTE_TF32 : SLUICE_CUBLAS_COMPUTE_32F;
    assert_int_equal(sluice_fake_cublas_last_compute(), want);
    fakes_must_be_clean();
    world_free(&out);
  }
}

/* Runs the case without each wait of `rank` in turn; returns the number of runs with a hazard. In one rank's forward
 * and backward with offload, these waits may be missing: two of a lane for the host's stream (later waits imply them),
 * two of the host's stream for a lane (the test's reads are not recorded), that of the second pass for the first (both
 * use one stream), and those of three saved buffers that are returned and not used again. */
static int64_t runs_with_hazards(const layer_machine_t* machine, const case_t* c, int32_t rank, int64_t* out_runs) {
  char text[200], live[200];
  int64_t found = 0, waits = 1;
  for (int64_t nth = -1; nth < waits; ++nth) {
    case_t there = *c;
    result_t out;
    machine->open(c->world_size, 1);
    sluice_fake_cuda_drop_wait_of(rank, nth);
    there.machine = machine->world();
    world_run(&there, &out);
    if (nth < 0) waits = sluice_fake_cuda_waits_of(rank);
    int64_t hazards = sluice_fake_cuda_hazards(text, sizeof text);
    if (nth < 0) assert_int_equal(hazards, 0);
    if (nth < 0) assert_int_equal(out.status[rank], SLUICE_OK);
    found += hazards > 0;
    assert_int_equal(fakes_close(live, sizeof live), 0);
    world_free(&out);
  }
  *out_runs = waits;
  return found;
}

static void CudaLayer_AnyWaitLeftOut_LeavesAHazard(void** state) {
  const layer_machine_t* machine = *state;
  if (!sluice_fake_cuda_may_drop_waits()) skip_because("ThreadSanitizer: a dropped wait is a race");
  static const struct {
    const char* name;
    int32_t ranks, deduplicate, callback_experts, most_unseen; /* most_unseen: waits that may be missing */
    int64_t capacity;
  } kinds[] = {{"plain", 1, 0, 0, 8, 0},
               {"under a capacity", 1, 0, 0, 9, 18}, /* one more: the wait of the backward for the report */
               {"plain", 2, 0, 0, 0, 0},
               {"deduplicated", 2, 1, 0, 0, 0},
               {"callback experts", 2, 0, 1, 0, 0}};
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; ++i) {
    case_t c = world_small_case();
    const int32_t w = kinds[i].ranks;
    c.world_size = w, c.num_chunks = w == 1 ? 3 : 2, c.bias = !kinds[i].callback_experts;
    c.deduplicate = kinds[i].deduplicate, c.capacity = kinds[i].capacity;
    c.callback_experts = kinds[i].callback_experts;
    c.restore_input = w == 1 ? SLUICE_RESTORE_OFFLOAD : SLUICE_RESTORE_KEEP;
    c.restore_pre_activation = w == 1 ? SLUICE_RESTORE_OFFLOAD : SLUICE_RESTORE_RECOMPUTE;
    for (int32_t rank = 0; rank < w; ++rank) {
      int64_t runs = 0;
      int64_t found = runs_with_hazards(machine, &c, rank, &runs);
      printf("%s, W %d, rank %d, %s: %lld of %lld waits are needed\n", machine->name, w, rank, kinds[i].name,
             (long long)found, (long long)runs);
      if (w == 1) assert_true(runs - found <= kinds[i].most_unseen);
      assert_true(runs >= 8 && 2 * found > runs);
    }
  }
}

/* Runs after the other tests: with NCCL, ranks exchanged registered buffers and obeyed NCCL's rules. */
static void CudaLayer_ExchangesBefore_WereBetweenRegisteredBuffers(void** state) {
  (void)state;
  char rule[128];
  if (sluice_fake_nccl_broken_rules(rule, sizeof rule) != 0) fail_msg("%s", rule);
  assert_true(sluice_fake_nccl_registered() > 100);
}

int main(void) {
  static entry_t entries[96];
  static struct CMUnitTest tests[112];
  static const int32_t world_sizes[] = {1, 2, 4};
  const layer_machine_t *nccl = fakes_layer_machine(0), *local = fakes_layer_machine(1);
  size_t count = 0;
  for (const layer_case_t* c = layer_cases; c->name != NULL; ++c) {
    for (int i = 0; i < 6; ++i) {
      const layer_machine_t* machine = i < 3 ? nccl : local;
      entry_t* entry = &entries[count];
      if (i == 3) continue; /* one rank has no communicator */
      *entry = (entry_t){.c = c, .machine = machine, .world_size = world_sizes[i % 3]};
      snprintf(entry->name, sizeof entry->name, "CudaLayer_%s_%s_%d", c->name, machine->name, entry->world_size);
      tests[count++] = (struct CMUnitTest){.name = entry->name, .test_func = run_entry, .initial_state = entry};
    }
  }
  tests[count++] = (struct CMUnitTest)cmocka_unit_test(CudaLayer_EveryWayOfTheLibrary_GivesTheSameBits);
  tests[count++] = (struct CMUnitTest)cmocka_unit_test(CudaLayer_Tf32_IsByNameAlone);
  for (int i = 0; i < 2; ++i) {
    void* machine = (void*)(uintptr_t)(i == 0 ? nccl : local);
    tests[count++] = (struct CMUnitTest){.name = "CudaLayer_AnyWaitLeftOut_LeavesAHazard",
                                         .test_func = CudaLayer_AnyWaitLeftOut_LeavesAHazard,
                                         .initial_state = machine};
    tests[count++] = (struct CMUnitTest){.name = "CudaLayer_SoakOfTwoSeconds_MatchesReferenceAndCpu",
                                         .test_func = CudaLayer_SoakOfTwoSeconds_MatchesReferenceAndCpu,
                                         .initial_state = machine};
  }
  tests[count++] = (struct CMUnitTest)cmocka_unit_test(CudaLayer_ExchangesBefore_WereBetweenRegisteredBuffers);
  return _cmocka_run_group_tests("cuda_layer", tests, count, NULL, NULL);
}
