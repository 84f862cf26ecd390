// SPDX-License-Identifier: Apache-2.0
/* Calibration through the C ABI: one machine for all ranks, the cache and its handling of bad files. */
#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/base/test/refused.h"
#include "sluice/sluice.h"

#define MAX_RANKS  4
#define BY_DEFAULT 2 /* a value of own_folders: no folder is named */
#define MOST_ERROR 5 /* relative error of steps that calibration timed; a quiet machine has a few hundredths */

static char folders[MAX_RANKS][64];
static int32_t num_measured; /* log lines that report a measurement */
static const char* gemms = "ref";
static char last_warning[1300];
static pthread_mutex_t log_mutex = PTHREAD_MUTEX_INITIALIZER;

static void on_log(void* user, int32_t level, const char* message) {
  (void)user;
  pthread_mutex_lock(&log_mutex);
  if (strncmp(message, "calibrated:", 11) == 0) ++num_measured;
  if (level == SLUICE_LOG_WARN) snprintf(last_warning, sizeof last_warning, "%s", message);
  pthread_mutex_unlock(&log_mutex);
}

typedef struct rank_s {
  int32_t rank, world_size;
  sluice_local_group_t* group;
  const char* folder;
  int32_t refresh, dtype;
  sluice_status_t status;
  char message[1024];
  char machine[65536];
} rank_t;

static sluice_status_t calibrate(rank_t* r, sluice_context_t* context) {
  DEFAULTS(sluice_calibration_config, config);
  config.model_width = 64, config.hidden_width = 128, config.seconds = 0.1, config.dtype = r->dtype;
  config.cache_dir = r->folder, config.refresh = r->refresh;
  sluice_planner_t* planner = NULL;
  sluice_status_t status = sluice_planner_calibrate(context, &config, &planner);
  uint64_t bytes = sizeof r->machine;
  if (status == SLUICE_OK) status = sluice_planner_write_machine(planner, r->machine, &bytes);
  sluice_planner_destroy(planner);
  return status;
}

static void* run_rank(void* argument) {
  rank_t* r = argument;
  sluice_comm_t* comm = NULL;
  DEFAULTS(sluice_comm_config, comm_config);
  comm_config.rank = r->rank, comm_config.world_size = r->world_size, comm_config.timeout_ns = 60000000000u;
  r->status = r->world_size == 1 ? SLUICE_OK : sluice_comm_create_local(r->group, &comm_config, &comm);
  DEFAULTS(sluice_context_config, context_config);
  context_config.gemm = gemms;
  sluice_context_t* context = NULL;
  if (r->status == SLUICE_OK) r->status = sluice_context_create(&context_config, comm, &context);
  if (r->status == SLUICE_OK) r->status = calibrate(r, context);
  memcpy(r->message, last_message(), sizeof r->message);
  sluice_context_destroy(context);
  sluice_comm_destroy(comm);
  return NULL;
}

static rank_t ranks[MAX_RANKS];

static void run(int32_t world_size, int32_t refresh, int32_t own_folders, int32_t dtype) {
  pthread_t threads[MAX_RANKS];
  sluice_local_group_t* group = NULL;
  assert_int_equal(sluice_local_group_create(world_size, &group), SLUICE_OK);
  num_measured = 0;
  last_warning[0] = '\0';
  for (int32_t r = 0; r < world_size; ++r) {
    ranks[r] = (rank_t){.rank = r, .world_size = world_size, .group = group, .refresh = refresh, .dtype = dtype};
    ranks[r].folder = own_folders == BY_DEFAULT ? NULL : folders[own_folders ? r : 0];
    assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &ranks[r]), 0);
  }
  for (int32_t r = 0; r < world_size; ++r) pthread_join(threads[r], NULL);
  sluice_local_group_destroy(group);
  for (int32_t r = 0; r < world_size; ++r) {
    if (ranks[r].status != SLUICE_OK) fail_msg("rank %d: %s", r, ranks[r].message);
    assert_string_equal(ranks[r].machine, ranks[0].machine);
  }
}

static void empty_folder(const char* folder) {
  DIR* dir = opendir(folder);
  if (dir == NULL) return;
  char path[512];
  for (struct dirent* entry = readdir(dir); entry != NULL; entry = readdir(dir)) {
    snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
    if (entry->d_name[0] != '.') (void)unlink(path);
  }
  closedir(dir);
}

/* Returns the number of files in a folder, and the path of the last one. */
static int only_file(const char* folder, char* out_path, size_t room) {
  DIR* dir = opendir(folder);
  int count = 0;
  for (struct dirent* entry = dir == NULL ? NULL : readdir(dir); entry != NULL; entry = readdir(dir)) {
    if (entry->d_name[0] == '.') continue;
    snprintf(out_path, room, "%s/%s", folder, entry->d_name);
    ++count;
  }
  if (dir != NULL) closedir(dir);
  return count;
}

static int set_up(void** state) {
  (void)state;
  for (int r = 0; r < MAX_RANKS; ++r) {
    snprintf(folders[r], sizeof folders[r], "/tmp/sluice-calibrate-XXXXXX");
    if (mkdtemp(folders[r]) == NULL) return -1;
  }
  sluice_set_log(on_log, NULL, SLUICE_LOG_INFO);
  return 0;
}

static int tear_down(void** state) {
  (void)state;
  sluice_set_log(NULL, NULL, 0);
  for (int r = 0; r < MAX_RANKS; ++r) {
    empty_folder(folders[r]);
    (void)rmdir(folders[r]);
  }
  return 0;
}

/* The calibrated machine's prediction of a step of `w` ranks: the best of three tries, as the machine may be busy. */
static sluice_planner_prediction_t calibrated(int32_t w, int32_t dtype) {
  sluice_planner_prediction_t p = {.struct_size = sizeof p};
  for (int tries = 0; tries < 3 && (tries == 0 || p.machine_error_median >= MOST_ERROR); ++tries) {
    run(w, 1, 0, dtype);
    assert_int_equal(num_measured, w);
    sluice_planner_t* planner = NULL;
    assert_int_equal(sluice_planner_create(ranks[0].machine, strlen(ranks[0].machine), &planner), SLUICE_OK);
    DEFAULTS(sluice_planner_workload, work);
    work.model_width = 64, work.hidden_width = 128, work.num_tokens = 512, work.num_experts = 6, work.dtype = dtype;
    work.world_size = w;
    const sluice_planner_choice_t choice = {2, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_OFFLOAD, 0};
    assert_int_equal(sluice_planner_predict(planner, &work, &choice, &p, NULL, 0), SLUICE_OK);
    sluice_planner_destroy(planner);
  }
  return p;
}

TEST(Calibrate_SeveralRanks_GetOneMachineThatPredicts) {
  for (int32_t w = 1; w <= 3; ++w) {
    for (int32_t dtype = SLUICE_DTYPE_F32; dtype <= SLUICE_DTYPE_F16; ++dtype) {
      if (w == 3 && dtype != SLUICE_DTYPE_F32) continue;
      const sluice_planner_prediction_t p = calibrated(w, dtype);
      assert_true(p.forward_busy[SLUICE_LANE_COMPUTE] > 0 && p.backward_busy[SLUICE_LANE_COPY_IN] > 0);
      assert_true((p.forward_busy[SLUICE_LANE_COMM] > 0) == (w > 1));
      assert_true(p.machine_error_median > 0 && p.machine_error_median < MOST_ERROR);
      assert_non_null(strstr(ranks[0].machine, "\"provenance\": \"calibrated\""));
      const char* relu = strstr(ranks[0].machine, "\"relu_seconds\": ");
      assert_true(relu != NULL && strtod(strchr(relu, ':') + 1, NULL) > 0);
      if (w > 1) assert_non_null(strstr(ranks[0].machine, "{\"lane\": \"comm\", \"beside\": [\"compute\"]"));
      assert_non_null(strstr(ranks[0].machine, "\"exchange_skew_gain\": "));
      const char* copies = strstr(ranks[0].machine, "\"copy_share\": ["); /* two sizes, both directions */
      assert_true((copies != NULL) == (w > 1));
      const char* wanted[] = {"\"bytes\": 262144}", "\"bytes\": 4194304}", "\"compute\", \"beside\": [\"copy_out\"]",
                              "\"compute\", \"beside\": [\"copy_in\"]"};
      for (int32_t i = 0; i < 4 && copies != NULL; ++i) assert_non_null(strstr(copies, wanted[i]));
      assert_true((strstr(ranks[0].machine, "\"exchange_contention\": {\"points\": [[1024, ") != NULL) == (w > 1));
      assert_true((strstr(ranks[0].machine, "\"compute_contention\": {\"points\": [[1024, ") != NULL) == (w > 1));
    }
  }
}

TEST(Cache_SecondTime_IsReadAndNotMeasured) {
  char path[512];
  empty_folder(folders[0]);
  run(2, 0, 0, SLUICE_DTYPE_F32);
  assert_int_equal(num_measured, 2);
  assert_int_equal(only_file(folders[0], path, sizeof path), 1); /* no partial file remains */
  char before[65536];
  memcpy(before, ranks[0].machine, sizeof before);
  run(2, 0, 0, SLUICE_DTYPE_F32);
  assert_int_equal(num_measured, 0);
  assert_string_equal(before, ranks[0].machine);
  run(2, 0, 0, SLUICE_DTYPE_BF16); /* another key */
  assert_int_equal(num_measured, 2);
  assert_int_equal(only_file(folders[0], path, sizeof path), 2);
}

/* Another library, or another version of a library, may be faster, so it needs a calibration of its own. */
TEST(Cache_OtherGemms_AreMeasured) {
  char path[512], text[1024];
  empty_folder(folders[0]);
  gemms = "auto";
  run(1, 0, 0, SLUICE_DTYPE_F32);
  assert_int_equal(only_file(folders[0], path, sizeof path), 1);
  FILE* file = fopen(path, "rb");
  text[fread(text, 1, sizeof text - 1, file)] = '\0';
  fclose(file);
  assert_non_null(strstr(text, "; GEMMs auto of "));
  gemms = "ref";
  run(1, 0, 0, SLUICE_DTYPE_F32);
  assert_int_equal(num_measured, 1);
  assert_int_equal(only_file(folders[0], path, sizeof path), 2);
}

static void put(const char* path, const char* text, size_t length) {
  FILE* file = fopen(path, "wb");
  assert_non_null(file);
  assert_int_equal(fwrite(text, 1, length, file), length);
  fclose(file);
}

TEST(Cache_BadFile_IsMeasuredAgainWithAWord) {
  char path[512], text[65536];
  empty_folder(folders[0]);
  run(2, 0, 0, SLUICE_DTYPE_F32);
  assert_int_equal(only_file(folders[0], path, sizeof path), 1);
  FILE* file = fopen(path, "rb");
  size_t length = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[length] = '\0';
  for (int which = 0; which < 5; ++which) {
    char* bad = strdup(text);
    size_t bytes = length;
    const char* says = "cannot be used (it was written by another version";
    if (which == 0) bytes = length / 2, says = "cannot be used (machine profile: line";
    if (which == 1) memcpy(bad, "sluice cache 9", 14);
    if (which == 2) *strstr(bad, "version 0") = 'V', says = "it was written for another machine or library";
    if (which == 3) bytes = 0;
    if (which == 4) memcpy(bad, "sluice cache 1", 14); /* before exchanges were measured during GEMMs */
    put(path, bad, bytes);
    free(bad);
    run(2, 0, 0, SLUICE_DTYPE_F32);
    assert_int_equal(num_measured, 2);
    if (strstr(last_warning, says) == NULL && strstr(last_warning, "ranks have different") == NULL) {
      fail_msg("warned \"%s\", wanted \"%s\"", last_warning, says);
    }
    run(2, 0, 0, SLUICE_DTYPE_F32);
    assert_int_equal(num_measured, 0);
  }
}

TEST(Cache_RanksDiffer_AllMeasureAgain) {
  for (int r = 0; r < 3; ++r) empty_folder(folders[r]);
  run(3, 0, 1, SLUICE_DTYPE_F32);
  run(3, 0, 1, SLUICE_DTYPE_F32);
  assert_int_equal(num_measured, 0);
  empty_folder(folders[1]); /* rank 1 has no file */
  run(3, 0, 1, SLUICE_DTYPE_F32);
  assert_int_equal(num_measured, 3);
  assert_non_null(strstr(last_warning, "ranks have different calibrations"));
  run(3, 1, 1, SLUICE_DTYPE_F32); /* refresh is set */
  assert_int_equal(num_measured, 3);
}

/* In the default folder, a file is read only if no user but this one and root can have written it. */
TEST(Cache_FileThatOthersCanWrite_IsMeasuredAgain) {
  char path[512], kept[80], deep[96];
  struct stat info;
  unsetenv("SLUICE_CACHE_DIR");
  snprintf(kept, sizeof kept, "%s/xdg", folders[2]);
  snprintf(deep, sizeof deep, "%s/sluice", kept);
  setenv("XDG_CACHE_HOME", kept, 1);
  mode_t before = umask(0);
  run(1, 0, BY_DEFAULT, SLUICE_DTYPE_F32);
  umask(before);
  assert_true(stat(deep, &info) == 0 && (info.st_mode & 0777) == 0700);
  assert_int_equal(only_file(deep, path, sizeof path), 1);
  run(1, 0, BY_DEFAULT, SLUICE_DTYPE_F32);
  assert_int_equal(num_measured, 0);
  assert_int_equal(chmod(path, 0666), 0);
  run(1, 0, BY_DEFAULT, SLUICE_DTYPE_F32);
  assert_int_equal(num_measured, 1);
  assert_non_null(strstr(last_warning, "is not read: every user can write it"));
  run(1, 0, BY_DEFAULT, SLUICE_DTYPE_F32); /* the last run has replaced the file */
  assert_int_equal(num_measured, 0);
  /* If the user names the folder, the file is used, with a warning. */
  assert_int_equal(chmod(path, 0666), 0);
  setenv("SLUICE_CACHE_DIR", deep, 1);
  run(1, 0, BY_DEFAULT, SLUICE_DTYPE_F32);
  assert_int_equal(num_measured, 0);
  assert_non_null(strstr(last_warning, "is used although every user can write it"));
  unsetenv("SLUICE_CACHE_DIR");
  empty_folder(deep);
  assert_true(rmdir(deep) == 0 && rmdir(kept) == 0);
}

TEST(Cache_NoPlaceToWrite_CalibratesAllTheSame) {
  char kept[64];
  memcpy(kept, folders[0], sizeof kept);
  snprintf(folders[0], sizeof folders[0], "/proc/no/such/place");
  run(2, 0, 0, SLUICE_DTYPE_F32);
  assert_int_equal(num_measured, 2);
  assert_non_null(strstr(last_warning, "cannot be written"));
  folders[0][0] = '\0'; /* no cache requested: no warning either */
  run(2, 0, 0, SLUICE_DTYPE_F32);
  assert_string_equal(last_warning, "");
  memcpy(folders[0], kept, sizeof kept);
}

TEST(BadConfig_EveryField_IsRefusedByName) {
  DEFAULTS(sluice_context_config, context_config);
  context_config.gemm = "ref";
  sluice_context_t* context = NULL;
  assert_int_equal(sluice_context_create(&context_config, NULL, &context), SLUICE_OK);
  sluice_calibration_config_t config;
  sluice_planner_t* planner = NULL;
#define REFUSE(change, says)                                                                     \
  sluice_calibration_config_init(&config, sizeof config);                                        \
  config.model_width = 8, config.hidden_width = 8, config.cache_dir = "", config.seconds = 0.05; \
  change;                                                                                        \
  REFUSED(sluice_planner_calibrate(context, &config, &planner), BAD, says);
  REFUSE(config.model_width = 0, "model_width is 0")
  REFUSE(config.hidden_width = -3, "hidden_width is -3")
  REFUSE(config.seconds = 0, "seconds is 0")
  REFUSE(config.dtype = SLUICE_DTYPE_F64, "dtype is f64 (4)")
  REFUSE(config.refresh = 2, "refresh is 2")
  assert_null(planner);
  sluice_context_destroy(context);
}

/* ---- a fake communicator records the order of the exchanges ---- */

enum {
  MOST_EXCHANGES = 1 << 16,
  BARRIER = sizeof(int64_t), /* a barrier is an all-reduce of one number, by exchanges */
  SIZE = 3 << 15             /* used by one probe only */
};

static uint64_t bytes_of[MOST_EXCHANGES]; /* bytes that each exchange sends to rank 1 */
static int64_t num_exchanges;

/* Rank 1 sends zeros at once. */
static sluice_status_t start(void* user, const sluice_exchange_t* exchange, void** out_request,
                             sluice_host_failure_t* out_failure) {
  (void)user, (void)out_failure;
  if (exchange->recv_bytes[1] > 0) memset(exchange->recv[1], 0, exchange->recv_bytes[1]);
  if (num_exchanges < MOST_EXCHANGES) bytes_of[num_exchanges++] = exchange->send_bytes[1];
  *out_request = bytes_of;
  return SLUICE_OK;
}

static sluice_status_t wait_for(void* user, void* request, uint64_t timeout_ns, sluice_host_failure_t* out_failure) {
  (void)user, (void)request, (void)timeout_ns, (void)out_failure;
  return SLUICE_OK;
}

/* Without the barrier, the first exchange after the GEMMs would include the time that the faster rank waits. */
TEST(Exchanges_OfEachSize_BeginAfterABarrier) {
  DEFAULTS(sluice_comm_config, comm_config);
  comm_config.rank = 0, comm_config.world_size = 2;
  const sluice_host_comm_vtable_t vtable = {
      .struct_size = sizeof vtable, .exchange_start = start, .exchange_wait = wait_for};
  sluice_comm_t* comm = NULL;
  assert_int_equal(sluice_comm_create_host(&comm_config, &vtable, NULL, &comm), SLUICE_OK);
  DEFAULTS(sluice_context_config, context_config);
  context_config.gemm = "ref";
  sluice_context_t* context = NULL;
  assert_int_equal(sluice_context_create(&context_config, comm, &context), SLUICE_OK);
  DEFAULTS(sluice_calibration_config, config);
  config.model_width = 64, config.hidden_width = 128, config.seconds = 0.1, config.refresh = 1;
  sluice_planner_t* planner = NULL;
  const int64_t before = num_exchanges;
  /* The passes of calibration fail, since rank 1 sends no headers. This test reads the measurements before them. */
  assert_true(sluice_planner_calibrate(context, &config, &planner) != SLUICE_OK);
  int32_t num_samples = 0;
  for (int64_t i = before + 1; i < num_exchanges; ++i) {
    if (bytes_of[i] != SIZE || bytes_of[i - 1] == SIZE) continue; /* the first of several of this size */
    ++num_samples;
    assert_int_equal(bytes_of[i - 1], BARRIER);
  }
  printf("%d samples of an exchange of %d bytes in %lld exchanges\n", num_samples, SIZE,
         (long long)(num_exchanges - before));
  assert_true(num_samples >= 5);
  sluice_planner_destroy(planner);
  sluice_context_destroy(context);
  sluice_comm_destroy(comm);
}

int main(void) { return run_cases(set_up, tear_down); }
