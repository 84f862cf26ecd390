/* The records of a file: torn ones, foreign ones, and which of two steps is there. */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "backend/optim/file/state_file.h"

enum { COUNT = 3000 };

static char path[512];

static sluice_state_file_t* create(void) {
  const char* folder = getenv("TEST_TMPDIR");
  (void)snprintf(path, sizeof path, "%s/state_file_test.%d", folder != NULL ? folder : "/tmp", (int)getpid());
  sluice_state_file_t* file;
  assert_int_equal(sluice_state_file_create(path, COUNT, 1, sluice_process_allocator(), &file), SLUICE_OK);
  return file;
}

static sluice_status_t open_at(int64_t step, sluice_state_file_t** out_file) {
  return sluice_state_file_open(path, step, 1, sluice_process_allocator(), out_file);
}

static void write_step(sluice_state_file_t* file, int64_t step) {
  float data[COUNT];
  assert_int_equal(sluice_state_file_begin(file, step), SLUICE_OK);
  for (int32_t state = 0; state < SLUICE_NUM_STATES; ++state) {
    for (int i = 0; i < COUNT; ++i) data[i] = (float)(100000 * step + 10000 * state + i);
    assert_int_equal(sluice_state_file_write(file, state, 0, COUNT, data), SLUICE_OK);
  }
}

static void expect_step(const sluice_state_file_t* file, int64_t step) {
  assert_int_equal(sluice_state_file_info(file).step, step);
  for (int32_t state = 0; state < SLUICE_NUM_STATES; ++state) {
    float data[7];
    assert_int_equal(sluice_state_file_read(file, state, COUNT - 7, 7, data), SLUICE_OK);
    for (int i = 0; i < 7; ++i) assert_true(data[i] == (float)(100000 * step + 10000 * state + COUNT - 7 + i));
  }
}

static void overwrite(off_t at, const void* data, size_t bytes) {
  const int fd = open(path, O_RDWR);
  assert_true(fd >= 0);
  assert_int_equal(pwrite(fd, data, bytes, at), (ssize_t)bytes);
  (void)close(fd);
}

static void File_NeverFilled_HasNoStep(void** state) {
  (void)state;
  sluice_state_file_t* file = create();
  assert_int_equal(sluice_state_file_info(file).step, SLUICE_NO_STEP);
  assert_int_equal(sluice_state_file_end(file), SLUICE_E_STATE);
  sluice_state_file_close(file);
  assert_int_equal(open_at(SLUICE_NO_STEP, &file), SLUICE_E_FOREIGN);
  (void)unlink(path);
}

static void TwoSteps_LieBesideEachOther_AndTheThirdTakesTheFirstsRoom(void** state) {
  (void)state;
  sluice_state_file_t* file = create();
  for (int64_t step = 0; step <= 5; ++step) {
    write_step(file, step);
    if (step > 0) expect_step(file, step - 1); /* while the next one is there, not ended */
    assert_int_equal(sluice_state_file_end(file), SLUICE_OK);
    expect_step(file, step);
  }
  assert_int_equal(sluice_state_file_info(file).other_step, 4);
  sluice_state_file_close(file);
  assert_int_equal(open_at(4, &file), SLUICE_OK);
  expect_step(file, 4);
  assert_int_equal(sluice_state_file_info(file).other_step, 5);
  sluice_state_file_close(file);
  assert_int_equal(open_at(3, &file), SLUICE_E_NOT_FOUND);
  (void)unlink(path);
}

/* Any byte of the later step's record: it counts as begun, and the step before is there. */
static void Record_ThatIsTorn_LeavesTheStepBefore(void** state) {
  (void)state;
  for (int byte = 0; byte < 24; ++byte) {
    sluice_state_file_t* file = create();
    for (int64_t step = 0; step <= 1; ++step) {
      write_step(file, step);
      assert_int_equal(sluice_state_file_end(file), SLUICE_OK);
    }
    sluice_state_file_close(file);
    const unsigned char odd = 0xa5;
    overwrite(1024 + byte, &odd, 1);
    assert_int_equal(open_at(SLUICE_NO_STEP, &file), SLUICE_OK);
    expect_step(file, 0);
    assert_int_equal(sluice_state_file_info(file).other_step, SLUICE_NO_STEP);
    sluice_state_file_remove(file);
    assert_int_equal(access(path, F_OK), -1);
  }
}

static void Head_OfAnotherKind_IsRefused(void** state) {
  (void)state;
  for (int byte = 0; byte < 32; ++byte) {
    sluice_state_file_t* file = create();
    write_step(file, 0);
    assert_int_equal(sluice_state_file_end(file), SLUICE_OK);
    sluice_state_file_close(file);
    const unsigned char odd = 0xa5;
    overwrite(byte, &odd, 1);
    assert_int_equal(open_at(SLUICE_NO_STEP, &file), SLUICE_E_FOREIGN);
    assert_null(file);
    (void)unlink(path);
  }
}

static void Step_GivenUp_IsWrittenAgain(void** state) {
  (void)state;
  sluice_state_file_t* file = create();
  write_step(file, 0);
  assert_int_equal(sluice_state_file_end(file), SLUICE_OK);
  write_step(file, 1);
  sluice_state_file_give_up(file);
  assert_int_equal(sluice_state_file_end(file), SLUICE_E_STATE);
  expect_step(file, 0);
  write_step(file, 1);
  assert_int_equal(sluice_state_file_end(file), SLUICE_OK);
  expect_step(file, 1);
  sluice_state_file_remove(file);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(File_NeverFilled_HasNoStep),
      cmocka_unit_test(TwoSteps_LieBesideEachOther_AndTheThirdTakesTheFirstsRoom),
      cmocka_unit_test(Record_ThatIsTorn_LeavesTheStepBefore),
      cmocka_unit_test(Head_OfAnotherKind_IsRefused),
      cmocka_unit_test(Step_GivenUp_IsWrittenAgain),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
