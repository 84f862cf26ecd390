// SPDX-License-Identifier: Apache-2.0
/* Master weights and moments in a file: the state after the disk or the process fails. */
#include <sys/wait.h>
#include <unistd.h>

#include "capi/test/optimizer/failing_disk.h"
#include "capi/test/optimizer/filed_model.h"
#include "third_party/bazel/test.h"

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
  model_t *m = open_with_file(), *before = open_model();
  step_model(m, 1);
  step_model(before, 1);
  const off_t bytes = (off_t)info_of(m).bytes;
  assert_int_equal(truncate(m->path, bytes / 2), 0); /* cuts off a part that a step reads */
  set_gradients(m, 2, 0);
  states_t* kept = malloc(sizeof *kept);
  assert_non_null(kept);
  *kept = m->s;
  REFUSED(sluice_optimizer_step(m->optimizer, &m->args, &m->result), SLUICE_E_EXTERNAL, "is truncated");
  assert_memory_equal(kept, &m->s, sizeof *kept);
  sluice_optimizer_file_close(m->file);
  m->file = NULL;
  const sluice_optimizer_file_config_t config = config_of(m);
  REFUSED(sluice_optimizer_file_open(&config, &m->file), SLUICE_E_EXTERNAL, "is truncated");
  free(kept);
  close_model(m);
  close_model(before);
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
