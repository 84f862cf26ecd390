/* Masters and moments in a file: the bits of states in memory, and what is left when the disk or the process fails. */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "backend/base/dtype.h"
#include "sluice/optimizer.h"

enum { NUM_TENSORS = 4, ELEMENTS = 10150, BUCKET = 1000, MAX_RANKS = 2 };

static const int64_t counts[NUM_TENSORS] = {7000, 0, 2150, 1000};
static const int32_t dtypes[NUM_TENSORS] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16};

/* ---- a disk that fails ---- */

enum { NEVER = -1 };
typedef enum { FAILS, KILLS } how_t;

static _Atomic int64_t calls_left[2] = {NEVER, NEVER}; /* of pread, pwrite */
static _Atomic int64_t calls[2];
static how_t how;
static _Atomic ino_t only_file; /* 0: any */
static _Atomic int32_t is_full;

static int strikes(int which, int fd) {
  struct stat file;
  if (only_file != 0 && (fstat(fd, &file) != 0 || file.st_ino != only_file)) return 0;
  atomic_fetch_add(&calls[which], 1);
  if (calls_left[which] == NEVER || atomic_fetch_sub(&calls_left[which], 1) != 0) return 0;
  if (how == KILLS) (void)raise(SIGKILL);
  errno = which == 0 ? EIO : ENOSPC;
  return 1;
}

ssize_t __real_pread(int fd, void* data, size_t bytes, off_t at);
ssize_t __wrap_pread(int fd, void* data, size_t bytes, off_t at);
ssize_t __wrap_pread(int fd, void* data, size_t bytes, off_t at) {
  return strikes(0, fd) ? -1
                        : __real_pread(fd, data, bytes > 1 ? (bytes + 1) / 2 : bytes, at); /* in two reads at least */
}

ssize_t __real_pwrite(int fd, const void* data, size_t bytes, off_t at);
ssize_t __wrap_pwrite(int fd, const void* data, size_t bytes, off_t at);
ssize_t __wrap_pwrite(int fd, const void* data, size_t bytes, off_t at) {
  return strikes(1, fd) ? -1 : __real_pwrite(fd, data, bytes, at);
}

int __real_posix_fallocate(int fd, off_t at, off_t bytes);
int __wrap_posix_fallocate(int fd, off_t at, off_t bytes);
int __wrap_posix_fallocate(int fd, off_t at, off_t bytes) {
  return is_full ? ENOSPC : __real_posix_fallocate(fd, at, bytes);
}

/* ---- a model ---- */

typedef struct states_s {
  float param[ELEMENTS], master[ELEMENTS], exp_avg[ELEMENTS], exp_avg_sq[ELEMENTS];
} states_t;

typedef struct model_s {
  states_t s;
  float grad[ELEMENTS];
  sluice_optimizer_tensor_t tensors[NUM_TENSORS];
  sluice_optimizer_group_t groups[2];
  const sluice_optimizer_group_t* list[2];
  sluice_optimizer_step_args_t args;
  sluice_optimizer_step_result_t result;
  sluice_optimizer_t* optimizer;
  sluice_optimizer_file_t* file;
  char path[512];
  sluice_comm_t* comm;
  sluice_status_t status;
  sluice_error_info_t error;
} model_t;

static float draw(uint64_t* seed, double scale) {
  *seed = *seed * 6364136223846793005u + 1442695040888963407u;
  return (float)(((double)(*seed >> 11) / 4503599627370496.0 - 1.0) * scale);
}

static void write_element(void* data, int32_t dtype, int64_t i, float x) {
  if (dtype == SLUICE_DTYPE_F32) ((float*)data)[i] = x;
  if (dtype == SLUICE_DTYPE_BF16) ((uint16_t*)data)[i] = sluice_f32_to_bf16(x);
  if (dtype == SLUICE_DTYPE_F16) ((uint16_t*)data)[i] = sluice_f32_to_f16(x);
}

static float read_element(const void* data, int32_t dtype, int64_t i) {
  if (dtype == SLUICE_DTYPE_F32) return ((const float*)data)[i];
  const uint16_t half = ((const uint16_t*)data)[i];
  return dtype == SLUICE_DTYPE_BF16 ? sluice_bf16_to_f32(half) : sluice_f16_to_f32(half);
}

static void set_gradients(model_t* m, int step, int rank) {
  uint64_t seed = (uint64_t)(100 * step + rank);
  for (int64_t t = 0, first = 0; t < NUM_TENSORS; first += counts[t++]) {
    m->tensors[t].step = step;
    m->tensors[t].grad_dtype = dtypes[t];
    for (int64_t i = 0; i < counts[t]; ++i) write_element(m->grad + first, dtypes[t], i, draw(&seed, 0.5));
  }
}

/* States lie in memory until has_file(). */
static model_t* open_model(void) {
  model_t* m = calloc(1, sizeof *m);
  assert_non_null(m);
  uint64_t seed = 7;
  for (int64_t t = 0, first = 0; t < NUM_TENSORS; first += counts[t++]) {
    m->tensors[t] = (sluice_optimizer_tensor_t){.count = counts[t],
                                                .param = m->s.param + first,
                                                .master = m->s.master + first,
                                                .grad = m->grad + first,
                                                .exp_avg = m->s.exp_avg + first,
                                                .exp_avg_sq = m->s.exp_avg_sq + first,
                                                .param_dtype = dtypes[t]};
    for (int64_t i = 0; i < counts[t]; ++i) {
      m->s.master[first + i] = draw(&seed, 1.0);
      write_element(m->s.param + first, dtypes[t], i, m->s.master[first + i]);
    }
  }
  for (int g = 0; g < 2; ++g) {
    sluice_optimizer_group_init(&m->groups[g], sizeof m->groups[g]);
    m->groups[g].tensors = m->tensors + 2 * g;
    m->groups[g].num_tensors = 2;
    m->groups[g].lr = 1e-2 * (g + 1);
    m->list[g] = &m->groups[g];
  }
  set_gradients(m, 1, 0);
  sluice_optimizer_step_args_init(&m->args, sizeof m->args);
  sluice_optimizer_step_result_init(&m->result, sizeof m->result);
  sluice_error_info_init(&m->error, sizeof m->error);
  m->args.groups = m->list, m->args.num_groups = 2, m->args.bucket = BUCKET;
  sluice_optimizer_config_t config;
  sluice_optimizer_config_init(&config, sizeof config);
  assert_int_equal(sluice_optimizer_create(&config, &m->optimizer), SLUICE_OK);
  return m;
}

static void close_model(model_t* m) {
  sluice_optimizer_destroy(m->optimizer);
  sluice_optimizer_file_close(m->file);
  if (m->path[0] != '\0') (void)unlink(m->path);
  free(m);
}

static sluice_optimizer_file_config_t config_of(model_t* m) {
  static _Atomic int number;
  const char* folder = getenv("TEST_TMPDIR");
  if (m->path[0] == '\0') {
    (void)snprintf(m->path, sizeof m->path, "%s/states%d.%d", folder != NULL ? folder : "/tmp", (int)getpid(),
                   number++);
  }
  sluice_optimizer_file_config_t config;
  sluice_optimizer_file_config_init(&config, sizeof config);
  config.path = m->path;
  return config;
}

static void forget_states(model_t* m) {
  for (int t = 0; t < NUM_TENSORS; ++t) {
    m->tensors[t].master = m->tensors[t].exp_avg = m->tensors[t].exp_avg_sq = NULL;
  }
}

static void works(sluice_status_t status) {
  if (status == SLUICE_OK) return;
  sluice_error_info_t info;
  sluice_error_info_init(&info, sizeof info);
  sluice_error_last(&info);
  fail_msg("%s", info.message);
}

static void refused(sluice_status_t status, sluice_status_t wanted, const char* text) {
  sluice_error_info_t info;
  sluice_error_info_init(&info, sizeof info);
  sluice_error_last(&info);
  if (status != wanted || strstr(info.message, text) == NULL) fail_msg("%d: %s lacks %s", status, info.message, text);
}

static model_t* open_with_file(void) {
  model_t* m = open_model();
  const sluice_optimizer_file_config_t config = config_of(m);
  works(sluice_optimizer_file_create(&config, m->list, 2, &m->file));
  forget_states(m);
  m->args.file = m->file;
  return m;
}

static sluice_optimizer_file_info_t info_of(model_t* m) {
  sluice_optimizer_file_info_t info;
  sluice_optimizer_file_info_init(&info, sizeof info);
  works(sluice_optimizer_file_info(m->file, &info));
  return info;
}

static void step(model_t* m, int number) {
  set_gradients(m, number, 0);
  works(sluice_optimizer_step(m->optimizer, &m->args, &m->result));
}

/* The file's states and the parameters, as `wanted` has them in memory. */
static void expect_states(model_t* m, const model_t* wanted) {
  states_t* found = calloc(1, sizeof *found);
  assert_non_null(found);
  model_t copy = *m;
  for (int64_t t = 0, first = 0; t < NUM_TENSORS; first += counts[t++]) {
    copy.tensors[t].param = found->param + first;
    copy.tensors[t].master = found->master + first;
    copy.tensors[t].exp_avg = found->exp_avg + first;
    copy.tensors[t].exp_avg_sq = found->exp_avg_sq + first;
  }
  for (int g = 0; g < 2; ++g) copy.groups[g].tensors = copy.tensors + 2 * g, copy.list[g] = &copy.groups[g];
  works(sluice_optimizer_file_load(m->file, copy.list, 2));
  assert_memory_equal(found->master, wanted->s.master, sizeof found->master);
  assert_memory_equal(found->exp_avg, wanted->s.exp_avg, sizeof found->exp_avg);
  assert_memory_equal(found->exp_avg_sq, wanted->s.exp_avg_sq, sizeof found->exp_avg_sq);
  assert_memory_equal(found->param, wanted->s.param, sizeof found->param);
  assert_memory_equal(m->s.param, wanted->s.param, sizeof m->s.param);
  free(found);
}

static void reopen(model_t* m, int64_t at) {
  sluice_optimizer_file_close(m->file);
  m->args.file = m->file = NULL;
  sluice_optimizer_file_config_t config = config_of(m);
  config.step = at;
  works(sluice_optimizer_file_open(&config, &m->file));
  m->args.file = m->file;
}

/* ---- numbers ---- */

static void Steps_WithAFile_HaveTheBitsOfStatesInMemory(void** state) {
  (void)state;
  static const int64_t buckets[] = {1, 999, 4096, 1 << 22};
  for (int i = 0; i < 8; ++i) {
    model_t *m = open_with_file(), *wanted = open_model();
    m->args.bucket = buckets[i % 4];
    m->args.max_norm = wanted->args.max_norm = i / 4 * 0.25;
    m->args.loss_scale = wanted->args.loss_scale = 8.0;
    for (int number = 1; number <= (buckets[i % 4] == 1 ? 1 : 3); ++number) {
      step(m, number);
      step(wanted, number);
      assert_true(m->result.norm == wanted->result.norm);
      assert_int_equal(info_of(m).step, number);
      assert_int_equal(info_of(m).other_step, number - 1);
    }
    assert_true(m->result.read_ns > 0 && m->result.write_ns > 0);
    expect_states(m, wanted);
    close_model(m);
    close_model(wanted);
  }
}

static void File_OpenedAgain_GoesOnWithTheSameBits(void** state) {
  (void)state;
  model_t *m = open_with_file(), *wanted = open_model();
  for (int number = 1; number <= 6; ++number) {
    step(m, number);
    step(wanted, number);
    reopen(m, -1);
    for (int t = 0; t < NUM_TENSORS; ++t) {
      memset(m->tensors[t].param, 0xff, (size_t)counts[t] * (dtypes[t] == SLUICE_DTYPE_F32 ? 4 : 2));
    }
    works(sluice_optimizer_file_load(m->file, m->list, 2));
    expect_states(m, wanted);
    assert_int_equal(info_of(m).unfinished_step, -1);
  }
  close_model(m);
  close_model(wanted);
}

static void File_OpenedAtTheStepBefore_GoesOnFromIt(void** state) {
  (void)state;
  model_t *m = open_with_file(), *wanted = open_model();
  for (int number = 1; number <= 3; ++number) step(m, number);
  for (int number = 1; number <= 2; ++number) step(wanted, number);
  reopen(m, 2);
  works(sluice_optimizer_file_load(m->file, m->list, 2));
  expect_states(m, wanted);
  step(m, 3);
  step(wanted, 3);
  expect_states(m, wanted);
  close_model(m);
  close_model(wanted);
}

static void Step_WithABadGradient_ChangesNoByteOfTheFile(void** state) {
  (void)state;
  model_t *m = open_with_file(), *wanted = open_model();
  step(m, 1);
  step(wanted, 1);
  set_gradients(m, 2, 0);
  m->grad[6999] = (float)INFINITY;
  atomic_store(&calls[1], 0);
  works(sluice_optimizer_step(m->optimizer, &m->args, &m->result));
  assert_int_equal(m->result.skipped, 1);
  assert_int_equal(calls[1], 0);
  expect_states(m, wanted);
  assert_int_equal(info_of(m).other_step, 0);
  close_model(m);
  close_model(wanted);
}

/* ---- what fails ---- */

/* Each call of a step fails once: nothing is changed, and the step that follows runs. */
static void Step_WhoseNthReadOrWriteFails_ChangesNothing(void** state) {
  (void)state;
  model_t *m = open_with_file(), *before = open_model(), *after = open_model();
  step(m, 1);
  step(before, 1);
  for (int number = 1; number <= 2; ++number) step(after, number);
  for (int which = 0; which < 2; ++which) {
    int64_t nth = 0;
    for (;; ++nth) {
      set_gradients(m, 2, 0);
      calls_left[which] = nth;
      const sluice_status_t status = sluice_optimizer_step(m->optimizer, &m->args, &m->result);
      calls_left[which] = NEVER;
      if (status == SLUICE_OK) break; /* it takes no more of them */
      refused(status, SLUICE_E_FOREIGN, which == 0 ? "reading" : "No space left on device");
      assert_int_equal(info_of(m).step, 1);
      expect_states(m, before);
    }
    assert_true(nth >= 3 * ((ELEMENTS + BUCKET - 1) / BUCKET));
    expect_states(m, after);
    reopen(m, which == 0 ? 1 : -1);
    works(sluice_optimizer_file_load(m->file, m->list, 2));
  }
  close_model(m);
  close_model(before);
  close_model(after);
}

static void Process_KilledAtAnyWriteOfAStep_LeavesTheLastWholeOneAndSaysSo(void** state) {
  (void)state;
  model_t *before = open_model(), *after = open_model();
  step(before, 1);
  for (int number = 1; number <= 2; ++number) step(after, number);
  for (int64_t nth = 0;; ++nth) {
    model_t* m = open_with_file();
    const pid_t child = fork();
    if (child == 0) {
      step(m, 1);
      how = KILLS;
      calls_left[1] = nth;
      step(m, 2);
      _exit(0);
    }
    int ended = 0;
    assert_int_equal(waitpid(child, &ended, 0), child);
    reopen(m, -1);
    works(sluice_optimizer_file_load(m->file, m->list, 2));
    if (!WIFSIGNALED(ended)) { /* a step takes no more writes */
      assert_int_equal(WEXITSTATUS(ended), 0);
      assert_true(nth >= 3 * ((ELEMENTS + BUCKET - 1) / BUCKET) + 2);
      expect_states(m, after);
      close_model(m);
      break;
    }
    assert_int_equal(info_of(m).step, 1);
    if (nth > 0) assert_int_equal(info_of(m).unfinished_step, 2);
    expect_states(m, before);
    step(m, 2);
    expect_states(m, after);
    assert_int_equal(info_of(m).unfinished_step, -1);
    close_model(m);
  }
  close_model(before);
  close_model(after);
}

static void File_ThatIsCut_IsToldAndChangesNothing(void** state) {
  (void)state;
  model_t *m = open_with_file(), *before = open_model();
  step(m, 1);
  step(before, 1);
  const off_t bytes = (off_t)info_of(m).bytes;
  assert_int_equal(truncate(m->path, bytes / 2), 0); /* in the room that is read */
  set_gradients(m, 2, 0);
  states_t* kept = malloc(sizeof *kept);
  assert_non_null(kept);
  *kept = m->s;
  m->args.bucket = 1 << 22; /* nothing is updated before the read that fails */
  refused(sluice_optimizer_step(m->optimizer, &m->args, &m->result), SLUICE_E_FOREIGN, "something has cut it");
  assert_memory_equal(kept, &m->s, sizeof *kept);
  sluice_optimizer_file_close(m->file);
  m->file = NULL;
  const sluice_optimizer_file_config_t config = config_of(m);
  refused(sluice_optimizer_file_open(&config, &m->file), SLUICE_E_FOREIGN, "something has cut it");
  free(kept);
  close_model(m);
  close_model(before);
}

static void Disk_WithoutRoom_IsToldAndLeavesNoFile(void** state) {
  (void)state;
  model_t* m = open_model();
  const sluice_optimizer_file_config_t config = config_of(m);
  is_full = 1;
  refused(sluice_optimizer_file_create(&config, m->list, 2, &m->file), SLUICE_E_FOREIGN, "no room for");
  is_full = 0;
  assert_null(m->file);
  assert_int_equal(access(m->path, F_OK), -1);
  for (int64_t nth = 0;; ++nth) {
    calls_left[1] = nth;
    const sluice_status_t status = sluice_optimizer_file_create(&config, m->list, 2, &m->file);
    calls_left[1] = NEVER;
    if (status == SLUICE_OK) break;
    refused(status, SLUICE_E_FOREIGN, "No space left on device");
    assert_int_equal(access(m->path, F_OK), -1);
  }
  close_model(m);
}

/* A file system of 128 KiB, where mounting one is allowed. It goes with its test, also where that fails. */
static char small_folder[] = "/tmp/sluice_full_XXXXXX";
static int32_t is_mounted;

static int mount_small(void** state) {
  (void)state;
  if (mkdtemp(small_folder) == NULL) return 1;
  is_mounted = mount("tmpfs", small_folder, "tmpfs", 0, "size=128k") == 0;
  return 0;
}

static int unmount_small(void** state) {
  (void)state;
  if (is_mounted && umount2(small_folder, MNT_DETACH) != 0) return 1;
  return rmdir(small_folder);
}

static void SmallTmpfs_IsFull_IsTold(void** state) {
  (void)state;
  if (!is_mounted) skip();
  model_t* m = open_model();
  (void)snprintf(m->path, sizeof m->path, "%s/states", small_folder);
  const sluice_optimizer_file_config_t config = config_of(m);
  const sluice_status_t status = sluice_optimizer_file_create(&config, m->list, 2, &m->file);
  const int left = access(m->path, F_OK);
  refused(status, SLUICE_E_FOREIGN, "No space left on device");
  close_model(m);
  assert_int_equal(left, -1);
}

/* ---- memory ---- */

/* The system bounds what a process may have of its own: states of the model do not fit, a step with a file does. */
static void ProcessWhoseMemoryHoldsNoStates_MakesSteps(void** state) {
  (void)state;
  enum { COUNT = 4 << 20, BOUND = 8 << 20 };
  model_t* m = open_model();
  uint16_t *param = calloc(COUNT, sizeof *param), *grad = calloc(COUNT, sizeof *grad);
  assert_non_null(param);
  assert_non_null(grad);
  for (int64_t i = 0; i < COUNT; ++i) grad[i] = 0x3c00;
  sluice_optimizer_tensor_t tensor = {.count = COUNT,
                                      .param = param,
                                      .grad = grad,
                                      .step = 1,
                                      .param_dtype = SLUICE_DTYPE_BF16,
                                      .grad_dtype = SLUICE_DTYPE_BF16};
  m->groups[0].tensors = &tensor;
  m->groups[0].num_tensors = 1;
  m->args.num_groups = 1;
  m->args.bucket = 1 << 15;
  const pid_t child = fork();
  if (child == 0) {
    FILE* status = fopen("/proc/self/statm", "r");
    unsigned long total = 0, resident = 0, shared = 0, text = 0, library = 0, data = 0;
    if (status == NULL ||
        fscanf(status, "%lu %lu %lu %lu %lu %lu", &total, &resident, &shared, &text, &library, &data) != 6)
      _exit(2);
    (void)fclose(status);
    const rlim_t now = data * (rlim_t)sysconf(_SC_PAGESIZE);
    /* Threads of the two lanes of copies have stacks that count, of which they touch little. */
    const struct rlimit limit = {now + BOUND + 2 * (8 << 20), now + BOUND + 2 * (8 << 20)};
    if (setrlimit(RLIMIT_DATA, &limit) != 0) _exit(3);
    void* volatile states = malloc(12UL * COUNT); /* they do not fit */
    if (states != NULL) _exit(4);
    const sluice_optimizer_file_config_t config = config_of(m);
    if (sluice_optimizer_file_create(&config, m->list, 1, &m->file) != SLUICE_OK) _exit(5);
    m->args.file = m->file;
    if (sluice_optimizer_step(m->optimizer, &m->args, &m->result) != SLUICE_OK) _exit(6);
    (void)unlink(m->path);
    _exit(param[COUNT - 1] != 0 && param[0] == param[COUNT - 1] ? 0 : 7);
  }
  int ended = 0;
  assert_int_equal(waitpid(child, &ended, 0), child);
  assert_true(WIFEXITED(ended));
  assert_int_equal(WEXITSTATUS(ended), 0);
  free(param);
  free(grad);
  close_model(m);
}

/* ---- ranks ---- */

static void* step_rank(void* data) {
  model_t* m = data;
  m->status = sluice_optimizer_step(m->optimizer, &m->args, &m->result);
  sluice_error_last(&m->error);
  return NULL;
}

static void step_both(model_t* const* ranks, int number) {
  pthread_t threads[MAX_RANKS];
  for (int r = 0; r < MAX_RANKS; ++r) {
    set_gradients(ranks[r], number, r);
    ranks[r]->args.comm = ranks[r]->comm;
    assert_int_equal(pthread_create(&threads[r], NULL, step_rank, ranks[r]), 0);
  }
  for (int r = 0; r < MAX_RANKS; ++r) pthread_join(threads[r], NULL);
}

/* The sum in rank order, for a model on one rank. */
static void step_reference(model_t* m, model_t* const* ranks, int number) {
  float sums[ELEMENTS];
  for (int r = 0; r < MAX_RANKS; ++r) set_gradients(ranks[r], number, r);
  for (int64_t t = 0, first = 0; t < NUM_TENSORS; first += counts[t++]) {
    m->tensors[t].step = number;
    m->tensors[t].grad_dtype = SLUICE_DTYPE_F32;
    for (int64_t i = 0; i < counts[t]; ++i) {
      sums[first + i] =
          read_element(ranks[0]->grad + first, dtypes[t], i) + read_element(ranks[1]->grad + first, dtypes[t], i);
    }
  }
  memcpy(m->grad, sums, sizeof sums);
  works(sluice_optimizer_step(m->optimizer, &m->args, &m->result));
}

static void join_both(model_t* const* ranks, sluice_local_group_t** out_group) {
  assert_int_equal(sluice_local_group_create(MAX_RANKS, out_group), SLUICE_OK);
  for (int32_t r = 0; r < MAX_RANKS; ++r) {
    sluice_comm_config_t config;
    sluice_comm_config_init(&config, sizeof config);
    config.rank = r, config.world_size = MAX_RANKS, config.timeout_ns = UINT64_C(60000000000);
    assert_int_equal(sluice_comm_create_local(*out_group, &config, &ranks[r]->comm), SLUICE_OK);
  }
}

static void Ranks_EachWithAFile_HaveTheBitsOfOne(void** state) {
  (void)state;
  for (int clips = 0; clips < 2; ++clips) {
    model_t *ranks[MAX_RANKS] = {open_with_file(), open_with_file()}, *wanted = open_model();
    sluice_local_group_t* group;
    join_both(ranks, &group);
    wanted->args.max_norm = clips * 0.25;
    for (int number = 1; number <= 3; ++number) {
      for (int r = 0; r < MAX_RANKS; ++r) {
        ranks[r]->args.max_norm = clips * 0.25;
        ranks[r]->args.sum_buckets = number == 3 ? INT64_MAX : number;
      }
      step_both(ranks, number);
      step_reference(wanted, ranks, number);
      for (int r = 0; r < MAX_RANKS; ++r) {
        if (ranks[r]->status != SLUICE_OK) fail_msg("rank %d: %s", r, ranks[r]->error.message);
        assert_int_equal(ranks[r]->result.decided, clips);
        expect_states(ranks[r], wanted);
      }
    }
    for (int r = 0; r < MAX_RANKS; ++r) sluice_comm_destroy(ranks[r]->comm);
    for (int r = 0; r < MAX_RANKS; ++r) close_model(ranks[r]);
    close_model(wanted);
    sluice_local_group_destroy(group);
  }
}

/* The disk of rank 1 fails at any call: no rank takes the step, both are told, and the next step runs. */
static void DiskOfOneRank_ThatFails_ChangesNothingOnAny(void** state) {
  (void)state;
  for (int clips = 0; clips < 2; ++clips) {
    model_t *ranks[MAX_RANKS] = {open_with_file(), open_with_file()}, *before = open_model(), *after = open_model();
    sluice_local_group_t* group;
    join_both(ranks, &group);
    for (int r = 0; r < MAX_RANKS; ++r) ranks[r]->args.max_norm = clips * 0.25, ranks[r]->args.sum_buckets = 1;
    before->args.max_norm = after->args.max_norm = clips * 0.25;
    step_both(ranks, 1);
    step_reference(before, ranks, 1);
    for (int number = 1; number <= 2; ++number) step_reference(after, ranks, number);
    struct stat file;
    assert_int_equal(stat(ranks[1]->path, &file), 0);
    for (int i = 0; i < 12; ++i) {
      const int which = i % 2;
      only_file = file.st_ino;
      how = FAILS;
      calls_left[which] = i / 2 * 6;
      step_both(ranks, 2);
      assert_true(calls_left[which] < 0);
      calls_left[which] = NEVER;
      only_file = 0;
      assert_int_equal(ranks[1]->status, SLUICE_E_FOREIGN);
      assert_int_equal(ranks[0]->status, SLUICE_E_PEER_REFUSED);
      assert_int_equal(ranks[0]->error.peer, 1);
      assert_non_null(strstr(ranks[0]->error.message, ranks[1]->path));
      for (int r = 0; r < MAX_RANKS; ++r) {
        assert_int_equal(info_of(ranks[r]).step, 1);
        expect_states(ranks[r], before);
      }
    }
    step_both(ranks, 2);
    for (int r = 0; r < MAX_RANKS; ++r) {
      assert_int_equal(ranks[r]->status, SLUICE_OK);
      expect_states(ranks[r], after);
      sluice_comm_destroy(ranks[r]->comm);
    }
    for (int r = 0; r < MAX_RANKS; ++r) close_model(ranks[r]);
    close_model(before);
    close_model(after);
    sluice_local_group_destroy(group);
  }
}

/* ---- arguments ---- */

static void BadArguments_AreRefusedByName(void** state) {
  (void)state;
  model_t *m = open_with_file(), *other = open_model();
  sluice_optimizer_file_config_t config = config_of(m);
  sluice_optimizer_file_t* none = NULL;
  refused(sluice_optimizer_file_create(&config, other->list, 2, &none), SLUICE_E_FOREIGN, "File exists");
  refused(sluice_optimizer_file_open(&config, &none), SLUICE_E_BUSY, "has it open");
  config.step = -2;
  refused(sluice_optimizer_file_open(&config, &none), SLUICE_E_INVALID_ARGUMENT, "step is -2");
  config.step = -1, config.reserved = 1;
  refused(sluice_optimizer_file_open(&config, &none), SLUICE_E_INVALID_ARGUMENT, "reserved is 1");
  config.reserved = 0, config.path = NULL;
  refused(sluice_optimizer_file_open(&config, &none), SLUICE_E_INVALID_ARGUMENT, "path is NULL");
  config.path = "/nowhere/at/all";
  refused(sluice_optimizer_file_open(&config, &none), SLUICE_E_NOT_FOUND, "there is no file /nowhere/at/all");
  refused(sluice_optimizer_file_create(&config, other->list, 2, &none), SLUICE_E_FOREIGN, "/nowhere/at/all");
  config.path = "/proc/self/exe";
  refused(sluice_optimizer_file_open(&config, &none), SLUICE_E_FOREIGN, "/proc/self/exe");
  assert_null(none);
  refused(sluice_optimizer_file_load(m->file, m->list, 1), SLUICE_E_INVALID_ARGUMENT,
          "7000 elements, and the file 10150");
  refused(sluice_optimizer_file_load(NULL, m->list, 2), SLUICE_E_INVALID_ARGUMENT, "file is NULL");
  set_gradients(m, 3, 0);
  refused(sluice_optimizer_step(m->optimizer, &m->args, NULL), SLUICE_E_INVALID_ARGUMENT,
          "tensor 0 of group 0 is at step 3, and the file goes on with step 1");
  set_gradients(m, 1, 0);
  m->tensors[2].exp_avg = m->s.exp_avg;
  refused(sluice_optimizer_step(m->optimizer, &m->args, NULL), SLUICE_E_INVALID_ARGUMENT, "exp_avg is given");
  m->tensors[2].exp_avg = NULL;
  m->args.num_groups = 1;
  refused(sluice_optimizer_step(m->optimizer, &m->args, NULL), SLUICE_E_INVALID_ARGUMENT, "7000 elements");
  m->args.num_groups = 2;
  step(m, 1);
  step(other, 1);
  expect_states(m, other);
  config.path = m->path, config.step = 9;
  sluice_optimizer_file_close(m->file);
  m->file = NULL;
  refused(sluice_optimizer_file_open(&config, &none), SLUICE_E_NOT_FOUND, "does not hold step 9");
  sluice_optimizer_file_close(NULL);
  close_model(m);
  close_model(other);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(Steps_WithAFile_HaveTheBitsOfStatesInMemory),
      cmocka_unit_test(File_OpenedAgain_GoesOnWithTheSameBits),
      cmocka_unit_test(File_OpenedAtTheStepBefore_GoesOnFromIt),
      cmocka_unit_test(Step_WithABadGradient_ChangesNoByteOfTheFile),
      cmocka_unit_test(Step_WhoseNthReadOrWriteFails_ChangesNothing),
      cmocka_unit_test(Process_KilledAtAnyWriteOfAStep_LeavesTheLastWholeOneAndSaysSo),
      cmocka_unit_test(File_ThatIsCut_IsToldAndChangesNothing),
      cmocka_unit_test(Disk_WithoutRoom_IsToldAndLeavesNoFile),
      cmocka_unit_test_setup_teardown(SmallTmpfs_IsFull_IsTold, mount_small, unmount_small),
      cmocka_unit_test(ProcessWhoseMemoryHoldsNoStates_MakesSteps),
      cmocka_unit_test(Ranks_EachWithAFile_HaveTheBitsOfOne),
      cmocka_unit_test(DiskOfOneRank_ThatFails_ChangesNothingOnAny),
      cmocka_unit_test(BadArguments_AreRefusedByName),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
