// SPDX-License-Identifier: Apache-2.0
/* Master weights and moments in a file: the bits of states in memory, less memory, errors, and the state after the disk
 * or the process fails. */
#include <math.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "capi/test/optimizer/failing_disk.h"
#include "capi/test/optimizer/filed_model.h"
#include "third_party/bazel/test.h"

static void ends_well(pid_t child) {
  int ended = 0;
  assert_int_equal(waitpid(child, &ended, 0), child);
  assert_true(WIFEXITED(ended));
  assert_int_equal(WEXITSTATUS(ended), 0);
}

/* ---- numbers ---- */

TEST(Steps_WithAFile_HaveTheBitsOfStatesInMemory) {
  static const int64_t buckets[] = {1, 999, 4096, 1 << 22};
  for (int i = 0; i < 8; ++i) {
    model_t *m = open_with_file(), *wanted = open_model();
    m->args.bucket = buckets[i % 4];
    m->args.max_norm = wanted->args.max_norm = i / 4 * 0.25;
    m->args.loss_scale = wanted->args.loss_scale = 8.0;
    for (int number = 1; number <= (buckets[i % 4] == 1 ? 1 : 3); ++number) {
      step_model(m, number);
      step_model(wanted, number);
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

TEST(File_OpenedAtTheStepBefore_GoesOnFromIt) {
  model_t *m = open_with_file(), *wanted = open_model();
  for (int number = 1; number <= 3; ++number) step_model(m, number);
  for (int number = 1; number <= 2; ++number) step_model(wanted, number);
  reopen(m, 2);
  WORKS(sluice_optimizer_file_load(m->file, m->list, 2));
  expect_states(m, wanted);
  step_model(m, 3);
  step_model(wanted, 3);
  expect_states(m, wanted);
  close_model(m);
  close_model(wanted);
}

TEST(Step_WithABadGradient_ChangesNoByteOfTheFile) {
  model_t *m = open_with_file(), *wanted = open_model();
  step_model(m, 1);
  step_model(wanted, 1);
  set_gradients(m, 2, 0);
  m->grad[6999] = (float)INFINITY;
  atomic_store(&disk_calls[1], 0);
  WORKS(sluice_optimizer_step(m->optimizer, &m->args, &m->result));
  assert_int_equal(m->result.skipped, 1);
  assert_int_equal(disk_calls[1], 0);
  expect_states(m, wanted);
  assert_int_equal(info_of(m).other_step, 0);
  close_model(m);
  close_model(wanted);
}

/* ---- parameters written by other code ---- */

/* Parameters are loaded, clamped or averaged between steps: the next step starts from the written values. */
TEST(Parameter_WrittenBetweenSteps_IsWhatTheStepUpdates) {
  model_t *m = open_with_file(), *wanted = open_model();
  for (int number = 1; number <= 6; ++number) {
    if (number != 4) write_params(m, wanted, number);
    if (number == 5) reopen(m, -1); /* the written parameter takes precedence over the loaded state */
    step_model(m, number);
    step_model(wanted, number);
    expect_states(m, wanted);
  }
  close_model(m);
  close_model(wanted);
}

/* ---- forks ---- */

/* Makes every call in a child process with a handle of its parent. */
static int call_in_child(model_t* m) {
  DEFAULTS(sluice_optimizer_file_info, info);
  if (sluice_optimizer_step(m->optimizer, &m->args, &m->result) != SLUICE_E_STATE) return 1;
  if (sluice_optimizer_file_info(m->file, &info) != SLUICE_E_STATE) return 2;
  if (sluice_optimizer_file_load(m->file, m->list, 2) != SLUICE_E_STATE) return 3;
  model_t* own = open_with_file();
  m->args.file = own->file;
  if (sluice_optimizer_step(m->optimizer, &m->args, &m->result) != SLUICE_E_STATE) return 4;
  own->args.file = m->file;
  if (sluice_optimizer_step(own->optimizer, &own->args, &own->result) != SLUICE_E_STATE) return 5;
  own->args.file = own->file;
  if (sluice_optimizer_step(own->optimizer, &own->args, &own->result) != SLUICE_OK) return 6;
  close_model(own);
  m->path[0] = '\0'; /* close_model must not remove the parent's file */
  close_model(m);
  return 0;
}

TEST(ForkedChild_HasNothingOfItsParents) {
  model_t *m = open_with_file(), *wanted = open_model();
  for (int number = 1; number <= 2; ++number) {
    const pid_t child = fork(); /* before the first step, and after it, when lanes have threads */
    if (child == 0) _exit(call_in_child(m));
    ends_well(child);
    step_model(m, number);
    step_model(wanted, number);
    expect_states(m, wanted);
  }
  close_model(m);
  close_model(wanted);
}

/* ---- memory ---- */

/* Under a memory limit of the process, the states of the model do not fit, but a step with a file runs. */
TEST(ProcessWhoseMemoryHoldsNoStates_MakesSteps) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  skip_because("a sanitizer's own memory does not fit");
#endif
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
    /* RLIMIT_DATA counts the stacks of the two copy lanes' threads, although they use little of them. */
    const struct rlimit limit = {now + BOUND + 2 * (8 << 20), now + BOUND + 2 * (8 << 20)};
    if (setrlimit(RLIMIT_DATA, &limit) != 0) _exit(3);
    void* volatile states = malloc(12UL * COUNT); /* must fail */
    if (states != NULL) _exit(4);
    const sluice_optimizer_file_config_t config = config_of(m);
    DEFAULTS(sluice_optimizer_config, own);
    if (sluice_optimizer_create(&own, &m->optimizer) != SLUICE_OK) _exit(5);
    if (sluice_optimizer_file_create(&config, m->list, 1, &m->file) != SLUICE_OK) _exit(5);
    m->args.file = m->file;
    if (sluice_optimizer_step(m->optimizer, &m->args, &m->result) != SLUICE_OK) _exit(6);
    (void)unlink(m->path);
    _exit(param[COUNT - 1] != 0 && param[0] == param[COUNT - 1] ? 0 : 7);
  }
  ends_well(child);
  free(param);
  free(grad);
  close_model(m);
}

/* ---- arguments ---- */

TEST(BadArguments_AreRefusedByName) {
  model_t *m = open_with_file(), *other = open_model();
  sluice_optimizer_file_config_t config = config_of(m);
  sluice_optimizer_file_t* none = NULL;
  REFUSED(sluice_optimizer_file_create(&config, other->list, 2, &none), SLUICE_E_EXTERNAL, "File exists");
  REFUSED(sluice_optimizer_file_open(&config, &none), SLUICE_E_BUSY, "has it open");
#define OPEN_REFUSED(field, value, status, text) \
  config = config_of(m), config.field = (value); \
  REFUSED(sluice_optimizer_file_open(&config, &none), status, text)
  OPEN_REFUSED(step, -2, BAD, "step is -2");
  OPEN_REFUSED(reserved, 1, BAD, "reserved is 1");
  OPEN_REFUSED(path, NULL, BAD, "path is NULL");
  OPEN_REFUSED(path, "/nowhere/at/all", SLUICE_E_NOT_FOUND, "there is no file /nowhere/at/all");
  REFUSED(sluice_optimizer_file_create(&config, other->list, 2, &none), SLUICE_E_EXTERNAL, "/nowhere/at/all");
  OPEN_REFUSED(path, "/proc/self/exe", SLUICE_E_EXTERNAL, "opening it");
  assert_null(none);
  REFUSED(sluice_optimizer_file_load(m->file, m->list, 1), SLUICE_E_MISMATCH,
          "the file has 4 tensors, the optimizer has 2");
  REFUSED(sluice_optimizer_file_load(NULL, m->list, 2), BAD, "file is NULL");
  set_gradients(m, 3, 0);
  REFUSED(sluice_optimizer_step(m->optimizer, &m->args, NULL), BAD,
          "tensor 0 of group 0 is at step 3, but the next step of the file is 1");
  set_gradients(m, 1, 0);
  m->tensors[2].exp_avg = m->s.exp_avg;
  REFUSED(sluice_optimizer_step(m->optimizer, &m->args, NULL), BAD, "exp_avg is given");
  m->tensors[2].exp_avg = NULL;
  m->args.num_groups = 1;
  REFUSED(sluice_optimizer_step(m->optimizer, &m->args, NULL), SLUICE_E_MISMATCH, "the optimizer has 2");
  m->args.num_groups = 2;
  --m->tensors[0].count;
  static const char shorter[] = "tensor 0: the file has f32 [7000], the optimizer has f32 [6999]";
  REFUSED(sluice_optimizer_step(m->optimizer, &m->args, NULL), SLUICE_E_MISMATCH, shorter);
  REFUSED(sluice_optimizer_file_load(m->file, m->list, 2), SLUICE_E_MISMATCH, shorter);
  ++m->tensors[0].count;
  step_model(m, 1);
  step_model(other, 1);
  expect_states(m, other);
  close_file(m);
  OPEN_REFUSED(step, 9, SLUICE_E_NOT_FOUND, "does not have step 9");
  sluice_optimizer_file_close(NULL);
  close_model(m);
  close_model(other);
}

/* The file belongs to another model, to a model with other shapes of the same numbers of elements, or to one with other
 * groups. */
TEST(FileOfAnotherModel_IsRefusedByItsFirstTensor) {
  static const int32_t num_dims[NUM_TENSORS] = {2, 1, 3, 0}, flat[NUM_TENSORS] = {1, 1, 1, 1};
  static const int64_t dims[] = {70, 100, 0, 2, 43, 25}, swapped[] = {100, 70, 0, 2, 43, 25}, wrong[] = {7, 1, 0, 1};
  model_t* m = open_with_file();
  sluice_optimizer_file_config_t config = config_of(m);
  sluice_optimizer_file_t* none = NULL;
  sluice_optimizer_tensor_t moved[NUM_TENSORS];
  close_file(m);
  config.groups = m->list, config.num_groups = 2;
  WORKS(sluice_optimizer_file_open(&config, &m->file));
  close_file(m);
  memcpy(moved, m->tensors, sizeof moved);
  m->tensors[0] = moved[2], m->tensors[2] = moved[0];
  REFUSED(sluice_optimizer_file_open(&config, &none), SLUICE_E_MISMATCH,
          "tensor 0: the file has f32 [7000], the optimizer has bf16 [2150]");
  memcpy(m->tensors, moved, sizeof moved);
  config.num_dims = flat, config.dims = wrong;
  REFUSED(sluice_optimizer_file_open(&config, &none), BAD,
          "tensor 0 of group 0 has 7000 elements, but its shape has another number");
  config.dims = NULL;
  REFUSED(sluice_optimizer_file_open(&config, &none), BAD, "give both or neither");
  config.num_dims = NULL, config.rank = 1, config.world_size = 2;
  REFUSED(sluice_optimizer_file_open(&config, &none), SLUICE_E_MISMATCH,
          "is the file of rank 0 of 1, and this is rank 1 of 2");
  config.rank = 0;
  REFUSED(sluice_optimizer_file_open(&config, &none), SLUICE_E_MISMATCH, "and this is rank 0 of 2");
  config.rank = 2;
  REFUSED(sluice_optimizer_file_open(&config, &none), BAD, "rank is 2 of 2");
  config.rank = 0, config.world_size = 1, config.num_dims = num_dims, config.dims = dims;
  m->tensors[3].count = 1; /* a scalar has no dimensions */
  config.replaces = 1;
  WORKS(sluice_optimizer_file_create(&config, m->list, 2, &m->file));
  close_file(m);
  WORKS(sluice_optimizer_file_open(&config, &m->file));
  WORKS(sluice_optimizer_file_load(m->file, m->list, 2)); /* gives no shapes, so numbers of elements count */
  close_file(m);
  config.dims = swapped;
  REFUSED(sluice_optimizer_file_open(&config, &none), SLUICE_E_MISMATCH,
          "tensor 0: the file has f32 [70, 100], the optimizer has f32 [100, 70]");
  config.num_dims = NULL, config.dims = NULL;
  REFUSED(sluice_optimizer_file_open(&config, &none), SLUICE_E_MISMATCH, "[70, 100], the optimizer has f32 [7000]");
  config.num_dims = num_dims, config.dims = dims, m->groups[0].num_tensors = 3, m->groups[1].tensors = m->tensors + 3,
  m->groups[1].num_tensors = 1;
  REFUSED(sluice_optimizer_file_open(&config, &none), SLUICE_E_MISMATCH,
          "tensor 2 is in group 1 in the file, and in group 0 in the optimizer");
  assert_null(none);
  close_model(m);
}

/* ---- a disk or a process that fails ---- */

/* Checks the bits of parameters, whatever the file holds. */
static void expect_params(const model_t* m, const states_t* wanted) {
  assert_memory_equal(m->s.param, wanted->param, sizeof m->s.param);
}

/* Each call of a step fails once: nothing changes, and the next step runs. Before the step, other code has changed
 * parameters, and the file does not contain these values. */
TEST(Step_WhoseNthReadOrWriteFails_ChangesNothing) {
  model_t *m = open_with_file(), *after = open_model();
  states_t* written = malloc(sizeof *written);
  assert_non_null(written);
  step_model(m, 1);
  step_model(after, 1);
  write_params(m, after, 3);
  *written = m->s;
  step_model(after, 2);
  for (int which = 0; which < 2; ++which) {
    int64_t nth = 0;
    for (;; ++nth) {
      set_gradients(m, 2, 0);
      disk_calls_left[which] = nth;
      const sluice_status_t status = sluice_optimizer_step(m->optimizer, &m->args, &m->result);
      disk_calls_left[which] = NEVER;
      if (status == SLUICE_OK) break; /* the step makes fewer calls than nth */
      REFUSED(status, SLUICE_E_EXTERNAL, which == 0 ? "reading" : "No space left on device");
      assert_int_equal(info_of(m).step, 1);
      expect_params(m, written);
    }
    assert_true(nth >= 3 * ((ELEMENTS + BUCKET - 1) / BUCKET));
    expect_states(m, after);
    reopen(m, which == 0 ? 1 : -1);
    m->s = *written;
  }
  free(written);
  close_model(m);
  close_model(after);
}

/* From its nth read on the disk returns errors, so parameters of two steps are mixed. No step runs until the states
 * have been loaded again. */
TEST(Disk_ThatDiesInAStep_KeepsTheNextFromParametersOfTwoSteps) {
  model_t *m = open_with_file(), *after = open_model();
  atomic_store(&disk_calls[0], 0);
  step_model(m, 1);
  for (int number = 1; number <= 2; ++number) step_model(after, number);
  set_gradients(m, 2, 0);
  disk_calls_left[0] = atomic_load(&disk_calls[0]) * 3 / 4; /* some buckets have been updated */
  disk_how = DIES;
  REFUSED(sluice_optimizer_step(m->optimizer, &m->args, &m->result), SLUICE_E_EXTERNAL, "reading");
  disk_how = FAILS;
  disk_calls_left[0] = NEVER;
  REFUSED(sluice_optimizer_step(m->optimizer, &m->args, &m->result), SLUICE_E_STATE, "could not be restored");
  assert_int_equal(info_of(m).step, 1);
  WORKS(sluice_optimizer_file_load(m->file, m->list, 2));
  step_model(m, 2);
  expect_states(m, after);
  close_model(m);
  close_model(after);
}

TEST(Process_KilledAtAnyWriteOfAStep_LeavesTheLastWholeOneAndSaysSo) {
  model_t *before = open_model(), *after = open_model();
  step_model(before, 1);
  for (int number = 1; number <= 2; ++number) step_model(after, number);
  for (int64_t nth = 0;; ++nth) {
    model_t* m = open_model();
    (void)config_of(m); /* sets the path of the file */
    const pid_t child = fork();
    if (child == 0) {
      model_t* own = open_with_file_at(m->path);
      step_model(own, 1);
      disk_how = KILLS;
      disk_calls_left[1] = nth;
      step_model(own, 2);
      _exit(0);
    }
    int ended = 0;
    forget_states(m);
    assert_int_equal(waitpid(child, &ended, 0), child);
    reopen(m, -1);
    WORKS(sluice_optimizer_file_load(m->file, m->list, 2));
    if (!WIFSIGNALED(ended)) { /* the step makes fewer writes than nth */
      assert_int_equal(WEXITSTATUS(ended), 0);
      assert_true(nth >= 3 * ((ELEMENTS + BUCKET - 1) / BUCKET) + 2);
      expect_states(m, after);
      close_model(m);
      break;
    }
    assert_int_equal(info_of(m).step, 1);
    if (nth > 0) assert_int_equal(info_of(m).unfinished_step, 2);
    expect_states(m, before);
    step_model(m, 2);
    expect_states(m, after);
    assert_int_equal(info_of(m).unfinished_step, -1);
    close_model(m);
  }
  close_model(before);
  close_model(after);
}

TEST(File_ThatIsCut_IsToldAndChangesNothing) {
  model_t* m = open_with_file();
  step_model(m, 1);
  const off_t bytes = (off_t)info_of(m).bytes;
  assert_int_equal(truncate(m->path, bytes / 2), 0); /* cuts off a part that a step reads */
  set_gradients(m, 2, 0);
  states_t* kept = malloc(sizeof *kept);
  assert_non_null(kept);
  *kept = m->s;
  REFUSED(sluice_optimizer_step(m->optimizer, &m->args, &m->result), SLUICE_E_EXTERNAL, "is truncated");
  assert_memory_equal(kept, &m->s, sizeof *kept);
  close_file(m);
  const sluice_optimizer_file_config_t config = config_of(m);
  REFUSED(sluice_optimizer_file_open(&config, &m->file), SLUICE_E_EXTERNAL, "is truncated");
  free(kept);
  close_model(m);
}

TEST(Disk_WithoutRoom_IsToldAndLeavesNoFile) {
  model_t* m = open_model();
  const sluice_optimizer_file_config_t config = config_of(m);
  char unfinished[sizeof m->path + 16];
  (void)snprintf(unfinished, sizeof unfinished, "%s.unfinished", m->path);
  disk_is_full = 1;
  REFUSED(sluice_optimizer_file_create(&config, m->list, 2, &m->file), SLUICE_E_EXTERNAL, "no room for");
  disk_is_full = 0;
  assert_null(m->file);
  assert_int_equal(access(m->path, F_OK), -1);
  disk_calls_left[1] = 1;
  REFUSED(sluice_optimizer_file_create(&config, m->list, 2, &m->file), SLUICE_E_EXTERNAL, "No space left on device");
  disk_calls_left[1] = NEVER;
  assert_int_equal(access(m->path, F_OK), -1);
  assert_int_equal(access(unfinished, F_OK), -1);
  close_model(m);
}
