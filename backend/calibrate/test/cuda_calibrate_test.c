// SPDX-License-Identifier: Apache-2.0
/* Calibration of CUDA contexts on fakes: the whole path from the ranks' handshake to the cache, and the failure of each
 * driver call. The times are those of this CPU under the fakes, so no test checks them. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/base/test/refused.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/moe/context/context.h"
#include "capi/test/cuda/cuda_calibrate_suite.h"
#include "capi/test/cuda/fake_rigs.h"
#include "capi/test/cuda/fakes.h"

static calibrate_case_t small_case(int32_t world_size) {
  return (calibrate_case_t){.world_size = world_size,
                            .dtype = SLUICE_DTYPE_F32,
                            .model_width = 8,
                            .hidden_width = 16,
                            .seconds = 0.05,
                            .folder = ""};
}

TEST(CudaCalibrate_RanksOverNcclAndLocal_GetOneMachineThatPredicts) {
  for (int is_local = 0; is_local < 2; ++is_local) {
    for (int32_t w = 1; w <= 3; ++w) {
      calibrate_case_t c = small_case(w);
      c.dtype = w == 2 ? SLUICE_DTYPE_BF16 : SLUICE_DTYPE_F32;
      const char* problem = calibrate_run(fakes_layer_machine(is_local), &c, NULL, 0);
      if (problem != NULL) fail_msg("W %d, %s: %s", w, is_local ? "local" : "nccl", problem);
    }
  }
}

static char folder[64];

static int make_folder(void** state) {
  (void)state;
  snprintf(folder, sizeof folder, "/tmp/sluice-cuda-calibrate-XXXXXX");
  return mkdtemp(folder) == NULL ? -1 : 0;
}

/* Runs after a failed test, too. */
static int drop_folder(void** state) {
  (void)state;
  char path[512];
  DIR* dir = opendir(folder);
  for (struct dirent* entry = dir == NULL ? NULL : readdir(dir); entry != NULL; entry = readdir(dir)) {
    snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
    if (entry->d_name[0] != '.') (void)unlink(path);
  }
  if (dir != NULL) closedir(dir);
  return rmdir(folder);
}

/* The cache distinguishes GPUs by the name that the driver reports. */
TEST_FIXTURE(CudaCalibrate_SecondTime_ReadsTheCacheOfThisGpu, make_folder, drop_folder) {
  static char first[32768], second[32768];
  char path[512] = "", line[512] = "";
  calibrate_case_t c = small_case(1);
  c.folder = folder;
  const char* problem = calibrate_run(fakes_layer_machine(0), &c, first, sizeof first);
  if (problem != NULL) fail_msg("%s", problem);
  DIR* dir = opendir(folder);
  for (struct dirent* entry = readdir(dir); entry != NULL; entry = readdir(dir)) {
    if (entry->d_name[0] != '.') snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
  }
  closedir(dir);
  FILE* file = fopen(path, "r");
  assert_non_null(file);
  assert_non_null(fgets(line, sizeof line, file)); /* the form */
  assert_non_null(fgets(line, sizeof line, file));
  fclose(file);
  if (strstr(line, "device cuda, Fake GPU 0, ") == NULL) fail_msg("%s", line);
  problem = calibrate_run(fakes_layer_machine(0), &c, second, sizeof second);
  if (problem != NULL) fail_msg("%s", problem);
  assert_string_equal(first, second);
}

static sluice_status_t calibrate(rig_t* rig) {
  DEFAULTS(sluice_calibration_config, config);
  sluice_planner_t* planner = NULL;
  config.model_width = 4, config.hidden_width = 4, config.seconds = 0.05, config.cache_dir = "";
  sluice_status_t status = sluice_planner_calibrate(rig->context, &config, &planner);
  assert_int_equal(planner != NULL, status == SLUICE_OK);
  sluice_planner_destroy(planner);
  return status;
}

/* Calibration between the passes of a layer, with steps outstanding: the steps end with the same bits. */
TEST(CudaCalibrate_WithAStepOutstanding_LeavesItsBitsAlone) {
  rig_t rig;
  uint64_t want = 0, got = 0;
  sluice_step_t* step = NULL;
  sluice_moe_config_t config = rig_config();
  config.restore_input = config.restore_pre_activation = SLUICE_RESTORE_OFFLOAD;
  open_all(&rig, &config);
  assert_int_equal(rig_round(&rig, &want), SLUICE_OK);
  rig_reset(&rig);
  assert_int_equal(rig_forward(&rig, &step), SLUICE_OK);
  if (calibrate(&rig) != SLUICE_OK) fail_msg("%s", last_message());
  assert_int_equal(rig_backward(&rig, step), SLUICE_OK);
  sluice_step_drop(step);
  assert_int_equal(rig_round(&rig, &got), SLUICE_OK);
  assert_true(got == want);
  assert_int_equal(close_all(&rig), 0);
}

static void count_passes(void* user, int32_t level, const char* message) {
  (void)level;
  *(int32_t*)user += strstr(message, "calibrating: a pass takes ") != NULL;
}

static sluice_context_stats_t stats_of(const rig_t* rig) {
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  assert_int_equal(sluice_context_get_stats(rig->context, 0, &stats), SLUICE_OK);
  return stats;
}

/* Whole passes run on the context itself and do not appear in its statistics; under a budget none run. */
TEST(CudaCalibrate_WholePasses_AreMeasuredAndNotCounted) {
  rig_t rig;
  int32_t measured = 0;
  int64_t count = 0;
  sluice_trace_event_t events[64];
  const sluice_moe_config_t config = rig_config();
  open_all(&rig, &config);
  assert_int_equal(sluice_context_trace(rig.context, 64), SLUICE_OK);
  assert_int_equal(rig_round(&rig, NULL), SLUICE_OK);
  const sluice_context_stats_t before = stats_of(&rig);
  sluice_set_log(count_passes, &measured, SLUICE_LOG_INFO);
  if (calibrate(&rig) != SLUICE_OK) fail_msg("%s", last_message());
  assert_int_equal(measured, 1);
  const sluice_context_stats_t after = stats_of(&rig);
  assert_int_equal(after.num_passes, before.num_passes);
  assert_int_equal(after.compute_ns, before.compute_ns);
  assert_int_equal(sluice_context_take_trace(rig.context, events, 64, &count), SLUICE_OK);
  for (int64_t i = 0; i < count; ++i) assert_int_equal(events[i].layer, config.layer_id);
  assert_true(count > 0);
  rig.context->memory_budget = (uint64_t)1 << 30;
  if (calibrate(&rig) != SLUICE_OK) fail_msg("%s", last_message());
  assert_int_equal(measured, 1);
  rig.context->memory_budget = 0;
  sluice_set_log(NULL, NULL, SLUICE_LOG_ERROR);
  assert_int_equal(rig_round(&rig, NULL), SLUICE_OK);
  assert_int_equal(close_all(&rig), 0);
}

/* Each of the first calls fails once, since they create everything; then every 701st call. Each failure is reported or
 * harmless, nothing leaks, and the context continues to work. */
TEST(CudaCalibrate_NthDriverCallFails_ContextWorksOn) {
  int64_t told = 0, tried = 0;
  for (int64_t nth = 0;; nth += nth < 60 ? 1 : 701, ++tried) {
    rig_t rig;
    const sluice_moe_config_t config = rig_config();
    open_all(&rig, &config);
    sluice_fake_cuda_fail_call(nth, 719);
    sluice_status_t status = calibrate(&rig);
    int failed = sluice_fake_cuda_failed();
    sluice_fake_cuda_fail_call(-1, 0);
    told += status != SLUICE_OK;
    if (!failed && status != SLUICE_OK) fail_msg("nothing failed, but: %s", last_message());
    if (rig_round(&rig, NULL) != SLUICE_OK) fail_msg("after call %lld: %s", (long long)nth, last_message());
    close_all(&rig);
    if (!failed || tried > 120) break;
  }
  print_message("%lld calls failed, %lld told\n", (long long)tried, (long long)told);
  assert_true(told > 40);
}

TEST(CudaCalibrate_OutOfMemory_SaysHowMuch) {
  rig_t rig;
  const sluice_moe_config_t config = rig_config();
  open_all(&rig, &config);
  sluice_fake_cuda_set_memory((uint64_t)1 << 20);
  REFUSED(calibrate(&rig), SLUICE_E_NO_MEMORY, "bytes");
  sluice_fake_cuda_set_memory((uint64_t)1 << 30);
  assert_int_equal(calibrate(&rig), SLUICE_OK);
  close_all(&rig);
}
