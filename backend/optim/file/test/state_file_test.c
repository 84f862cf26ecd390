// SPDX-License-Identifier: Apache-2.0
/* Files of states: steps that were not written out, damage at any byte, files of others, forks. */
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/base/test/refused.h"
#include "backend/optim/file/state_file.h"

enum { COUNT = 3000, ROOMS_AT = 8192, ARRAY_BYTES = 12288 };
enum { FILE_BYTES = ROOMS_AT + 2 * SLUICE_NUM_STATES * ARRAY_BYTES };

static char path[512], unfinished[540];

static const sluice_adam_tensor_t tensors[2] = {{.count = 1000, .param_dtype = SLUICE_DTYPE_F32},
                                                {.count = 2000, .param_dtype = SLUICE_DTYPE_BF16}};
static const sluice_adam_group_t group = {.tensors = tensors, .num_tensors = 2};

static sluice_state_place_t place_of(const char* at) {
  return (sluice_state_place_t){.path = at, .is_durable = 1, .rank = 1, .world_size = 2};
}

static sluice_status_t create_at(const char* at, int32_t replaces, sluice_state_file_t** out_file) {
  sluice_state_model_t model;
  const sluice_state_place_t place = place_of(at);
  assert_int_equal(
      sluice_state_model_make(&group, 1, (sluice_state_shapes_t){NULL, NULL}, sluice_process_allocator(), &model),
      SLUICE_OK);
  const sluice_status_t status =
      sluice_state_file_create(&place, &model, replaces, sluice_process_allocator(), out_file);
  sluice_state_model_free(&model, sluice_process_allocator());
  return status;
}

static sluice_state_file_t* create(void) {
  sluice_state_file_t* file;
  assert_int_equal(create_at(path, 0, &file), SLUICE_OK);
  return file;
}

static sluice_status_t open_at(int64_t step, sluice_state_file_t** out_file) {
  const sluice_state_place_t place = place_of(path);
  return sluice_state_file_open(&place, step, sluice_process_allocator(), out_file);
}

static float element(int64_t step, int32_t state, int64_t i) { return (float)(100000 * step + 10000 * state + i); }

/* Writes the states in parts whose sizes vary with the step. */
static void write_step(sluice_state_file_t* file, int64_t step) {
  float data[COUNT];
  assert_int_equal(sluice_state_file_begin(file, step), SLUICE_OK);
  for (int32_t state = 0; state < SLUICE_NUM_STATES; ++state) {
    for (int i = 0; i < COUNT; ++i) data[i] = element(step, state, i);
    for (int64_t first = 0, part = 1 + step; first < COUNT; first += part, part = 3 * part + state) {
      const int64_t count = first + part < COUNT ? part : COUNT - first;
      assert_int_equal(sluice_state_file_write(file, state, first, count, data + first), SLUICE_OK);
    }
  }
}

/* Makes a file with the steps 0 to `last`, and closes it. */
static void make_steps(int64_t last) {
  sluice_state_file_t* file = create();
  for (int64_t step = 0; step <= last; ++step) {
    write_step(file, step);
    assert_int_equal(sluice_state_file_end(file), SLUICE_OK);
  }
  assert_int_equal(sluice_state_file_publish(file), SLUICE_OK);
  sluice_state_file_close(file);
}

static int has_step(const sluice_state_file_t* file, int64_t step) {
  float data[COUNT];
  int is_there = sluice_state_file_info(file).step == step;
  for (int32_t state = 0; state < SLUICE_NUM_STATES; ++state) {
    assert_int_equal(sluice_state_file_read(file, state, 0, COUNT, data, NULL), SLUICE_OK);
    for (int i = 0; i < COUNT; ++i) is_there &= data[i] == element(step, state, i);
  }
  return is_there;
}

static void overwrite(off_t at, const void* data, size_t bytes) {
  const int fd = open(path, O_RDWR);
  assert_true(fd >= 0);
  assert_int_equal(pwrite(fd, data, bytes, at), (ssize_t)bytes);
  (void)close(fd);
}

static void expect_message(const char* text) {
  if (strstr(last_message(), text) == NULL) fail_msg("%s lacks %s", last_message(), text);
}

/* ---- life ---- */

TEST(File_BeforeItsFirstStep_HasNoName) {
  sluice_state_file_t *file = create(), *second;
  assert_int_equal(sluice_state_file_info(file).step, SLUICE_NO_STEP);
  assert_int_equal(sluice_state_file_end(file), SLUICE_E_STATE);
  assert_int_equal(access(path, F_OK), -1);
  assert_int_equal(create_at(path, 0, &second), SLUICE_E_BUSY);
  assert_int_equal(access(unfinished, F_OK), 0);
  sluice_state_file_close(file);
  assert_int_equal(access(unfinished, F_OK), -1);
  assert_int_equal(open_at(SLUICE_NO_STEP, &file), SLUICE_E_NOT_FOUND);
}

/* A process may be killed at any moment of creating a file: the next creator reuses the leftover. */
TEST(LeftoverOfAKill_IsTakenByTheNext) {
  for (int how = 0; how < 3; ++how) {
    const pid_t child = fork();
    if (child == 0) {
      sluice_state_file_t* file;
      if (how == 0) _exit(open(unfinished, O_CREAT | O_RDWR, 0600) < 0);
      if (create_at(path, 0, &file) != SLUICE_OK) _exit(1);
      if (how == 2) write_step(file, 0);
      _exit(0);
    }
    int ended = 0;
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_int_equal(ended, 0);
    assert_int_equal(access(unfinished, F_OK), 0);
    make_steps(0);
    sluice_state_file_t* file;
    assert_int_equal(open_at(SLUICE_NO_STEP, &file), SLUICE_OK);
    assert_true(has_step(file, 0));
    sluice_state_file_close(file);
    assert_int_equal(access(unfinished, F_OK), -1);
    (void)unlink(path);
  }
}

TEST(SomebodysFile_InTheWay_IsNotWrittenOver) {
  sluice_state_file_t* file;
  FILE* own = fopen(unfinished, "w");
  assert_non_null(own);
  assert_true(fputs("a letter", own) > 0);
  assert_int_equal(fclose(own), 0);
  assert_int_equal(create_at(path, 0, &file), SLUICE_E_EXTERNAL);
  expect_message("exists and is not a state file");
  struct stat kept;
  assert_int_equal(stat(unfinished, &kept), 0);
  assert_int_equal(kept.st_size, 8);
  (void)unlink(unfinished);
}

TEST(Create_OverAFile_TakesItsPlaceWhenItIsWhole) {
  sluice_state_file_t *old, *file;
  make_steps(3);
  assert_int_equal(create_at(path, 0, &file), SLUICE_E_EXTERNAL);
  expect_message("File exists");
  assert_int_equal(open_at(SLUICE_NO_STEP, &old), SLUICE_OK);
  assert_int_equal(create_at(path, 1, &file), SLUICE_OK);
  write_step(file, 7);
  sluice_state_file_close(file); /* closed before the step has ended */
  assert_true(has_step(old, 3));
  assert_int_equal(create_at(path, 1, &file), SLUICE_OK);
  write_step(file, 7);
  assert_int_equal(sluice_state_file_end(file), SLUICE_OK);
  assert_int_equal(sluice_state_file_publish(file), SLUICE_OK);
  sluice_state_file_close(old);
  assert_int_equal(open_at(SLUICE_NO_STEP, &old), SLUICE_E_BUSY);
  sluice_state_file_close(file);
  assert_int_equal(open_at(SLUICE_NO_STEP, &file), SLUICE_OK);
  assert_true(has_step(file, 7));
  sluice_state_file_close(file);
  (void)unlink(path);
}

/* The link points into another folder: first to no file, then to an existing one. */
TEST(Link_MeansWhatItLeadsTo) {
  char folder[540], target[560];
  (void)snprintf(folder, sizeof folder, "%s.d", path);
  (void)snprintf(target, sizeof target, "%s/there", folder);
  assert_int_equal(mkdir(folder, 0700), 0);
  assert_int_equal(symlink(target, path), 0);
  for (int is_there = 0; is_there < 2; ++is_there) {
    sluice_state_file_t* file;
    struct stat named;
    assert_int_equal(create_at(path, 1, &file), SLUICE_OK);
    write_step(file, 4 + is_there);
    assert_int_equal(sluice_state_file_end(file), SLUICE_OK);
    assert_int_equal(sluice_state_file_publish(file), SLUICE_OK);
    sluice_state_file_close(file);
    assert_int_equal(lstat(path, &named), 0);
    assert_true(S_ISLNK(named.st_mode));
    assert_int_equal(lstat(target, &named), 0);
    assert_int_equal(named.st_size, FILE_BYTES);
    assert_int_equal(open_at(SLUICE_NO_STEP, &file), SLUICE_OK);
    assert_true(has_step(file, 4 + is_there));
    sluice_state_file_close(file);
  }
  (void)unlink(path);
  (void)unlink(target);
  assert_int_equal(rmdir(folder), 0);
}

static int is_locked(void) {
  const int fd = open(path, O_RDWR);
  const int is = flock(fd, LOCK_EX | LOCK_NB) != 0;
  (void)close(fd);
  return is;
}

/* A forked child holds no lock, whether its parent closes the file or is killed, and cannot use the file. */
TEST(ForkedChild_HoldsNoLock) {
  sluice_state_file_t* file;
  int ready[2], go[2];
  char byte = 0;
  make_steps(1);
  for (int closes = 0; closes < 2; ++closes) {
    assert_int_equal(pipe(ready), 0);
    assert_int_equal(pipe(go), 0);
    const pid_t owner = fork();
    if (owner == 0) {
      if (open_at(SLUICE_NO_STEP, &file) != SLUICE_OK || !is_locked()) _exit(1);
      if (fork() == 0) { /* the child outlives its parent and ends when the test closes the pipe */
        const int is_refused = sluice_state_file_check_process(file) == SLUICE_E_STATE;
        sluice_state_file_close(file);
        byte = is_refused ? 'r' : 'x';
        if (write(ready[1], &byte, 1) != 1) _exit(1);
        (void)close(go[1]);
        _exit(read(go[0], &byte, 1) != 0);
      }
      (void)close(go[1]);
      if (closes) sluice_state_file_close(file);
      (void)read(go[0], &byte, 1);
      if (closes) _exit(0);
      (void)raise(SIGKILL);
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_int_equal(byte, 'r');
    int ended = 0;
    if (!closes) {
      assert_int_equal(kill(owner, SIGKILL), 0);
      assert_int_equal(waitpid(owner, &ended, 0), owner);
    }
    while (closes && is_locked()) usleep(1000); /* wait for the owner to close it; else the deadline ends the test */
    assert_false(is_locked());
    assert_int_equal(open_at(SLUICE_NO_STEP, &file), SLUICE_OK);
    assert_true(has_step(file, 1));
    sluice_state_file_close(file);
    for (int i = 0; i < 2; ++i) (void)close(go[i]), (void)close(ready[i]);
    if (closes) assert_int_equal(waitpid(owner, &ended, 0), owner);
  }
  (void)unlink(path);
}

/* ---- steps ---- */

TEST(Step_WrittenInPart_DoesNotEnd) {
  const float data[2] = {1.0F, 2.0F};
  sluice_state_file_t* file = create();
  assert_int_equal(sluice_state_file_begin(file, 0), SLUICE_OK);
  assert_int_equal(sluice_state_file_write(file, SLUICE_STATE_MASTER, 0, 2, data), SLUICE_OK);
  assert_int_equal(sluice_state_file_write(file, SLUICE_STATE_MASTER, 3, 2, data), SLUICE_E_INTERNAL);
  assert_int_equal(sluice_state_file_end(file), SLUICE_E_STATE);
  expect_message("2 elements of 3000");
  sluice_state_file_close(file);
}

/* ---- sums ---- */

/* The sum does not depend on the parts; each changed, moved or lost element changes the sum. */
TEST(Sum_InAnyParts_IsTheSameAndTellsEachChange) {
  enum { LENGTH = 133 };
  float data[LENGTH], copy[LENGTH];
  for (int i = 0; i < LENGTH; ++i) data[i] = (float)i / 7.0F - 5.0F;
  sluice_state_sum_t whole;
  sluice_state_sum_begin(&whole);
  sluice_state_sum_add(&whole, data, LENGTH);
  const uint64_t wanted = sluice_state_sum_end(&whole);
  for (int first = 0; first <= LENGTH; ++first) {
    for (int part = 1; part < 40; part += 3) {
      sluice_state_sum_t sum;
      sluice_state_sum_begin(&sum);
      sluice_state_sum_add(&sum, data, first);
      for (int at = first; at < LENGTH; at += part)
        sluice_state_sum_add(&sum, data + at, at + part < LENGTH ? part : LENGTH - at);
      assert_true(sluice_state_sum_end(&sum) == wanted);
    }
  }
  for (int i = 0; i < LENGTH; ++i) {
    for (int how = 0; how < 4; ++how) {
      const int other = how == 3 ? (i + 32) % LENGTH : (i + 1) % LENGTH;
      memcpy(copy, data, sizeof copy);
      if (how == 0) copy[i] = -copy[i];
      if (how == 1) copy[i] = 0.0F;
      if (how > 1) copy[i] = data[other], copy[other] = data[i];
      if (memcmp(copy, data, sizeof copy) == 0) continue;
      sluice_state_sum_t sum;
      sluice_state_sum_begin(&sum);
      sluice_state_sum_add(&sum, copy, LENGTH);
      assert_false(sluice_state_sum_end(&sum) == wanted);
    }
  }
}

/* ---- damage ---- */

TEST(File_OfTheFirstForm_IsRefusedWithAWayOut) {
  sluice_state_file_t* file;
  make_steps(0);
  const int64_t form = 1;
  overwrite(8, &form, sizeof form);
  assert_int_equal(open_at(SLUICE_NO_STEP, &file), SLUICE_E_EXTERNAL);
  expect_message("save its state_dict, and load that into a new file");
  (void)unlink(path);
}

/* Pages of the last step that a crash of the machine left unwritten: zeros. The previous step is read. */
TEST(PagesThatWereNotWritten_LeaveTheStepBefore) {
  static const char zeros[4096];
  for (int page = 0; page < SLUICE_NUM_STATES * ARRAY_BYTES / 4096; ++page) {
    sluice_state_file_t* file;
    make_steps(1);
    overwrite(ROOMS_AT + SLUICE_NUM_STATES * ARRAY_BYTES + 4096 * page, zeros, page % 3 == 2 ? 3000 : 4096);
    assert_int_equal(open_at(SLUICE_NO_STEP, &file), SLUICE_OK);
    assert_true(has_step(file, 0));
    assert_int_equal(sluice_state_file_info(file).other_step, SLUICE_NO_STEP);
    sluice_state_file_close(file);
    assert_int_equal(open_at(1, &file), SLUICE_E_NOT_FOUND);
    overwrite(ROOMS_AT + 4096 * page, zeros, 3000);
    assert_int_equal(open_at(SLUICE_NO_STEP, &file), SLUICE_E_EXTERNAL);
    expect_message("neither of its two steps is complete");
    (void)unlink(path);
  }
}

static uint32_t draw(uint64_t* seed, uint32_t below) {
  *seed = *seed * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)((*seed >> 33) % below);
}

/* Damages one to four bytes: the file is refused, or a step is read as it was written. SLUICE_FULL: 20,000 tries. */
TEST(Damage_Anywhere_IsNeverReadAsAStep) {
  static unsigned char good[FILE_BYTES];
  const int tries = getenv("SLUICE_FULL") != NULL ? 20000 : 1500;
  int num_refused = 0, num_before = 0, num_last = 0;
  uint64_t seed = 48;
  make_steps(5);
  const int fd = open(path, O_RDWR);
  assert_true(fd >= 0);
  assert_int_equal(pread(fd, good, FILE_BYTES, 0), FILE_BYTES);
  for (int i = 0; i < tries; ++i) {
    sluice_state_file_t* file;
    off_t at[4];
    const int bytes = 1 + i % 4;
    /* A third of the tries damages the first pages, which are mostly zeros that are never read. */
    for (int b = 0; b < bytes; ++b) at[b] = (off_t)draw(&seed, i % 3 == 0 ? 1100 : i % 3 == 1 ? ROOMS_AT : FILE_BYTES);
    for (int b = 0; b < bytes; ++b) {
      const unsigned char odd = (unsigned char)(good[at[b]] ^ (1 + draw(&seed, 255)));
      assert_int_equal(pwrite(fd, &odd, 1, at[b]), 1);
    }
    if (open_at(SLUICE_NO_STEP, &file) == SLUICE_OK) {
      const int is_last = has_step(file, 5);
      if (!is_last && !has_step(file, 4)) fail_msg("try %d: a damaged step was read", i);
      num_last += is_last, num_before += !is_last;
      sluice_state_file_close(file);
    } else {
      ++num_refused;
    }
    for (int b = 0; b < bytes; ++b) assert_int_equal(pwrite(fd, good + at[b], 1, at[b]), 1);
  }
  (void)close(fd);
  (void)unlink(path);
  print_message("%d damaged: %d refused, %d at the previous step, %d as it was\n", tries, num_refused, num_before,
                num_last);
  assert_true(num_refused > tries / 30 && num_before > tries / 10 && num_last > tries / 10);
}

/* A reader of all elements finds damage that occurs while the file is open. */
TEST(Damage_WhileItIsOpen_IsFoundByItsSums) {
  sluice_state_file_t* file;
  sluice_state_sum_t sums[SLUICE_NUM_STATES];
  float data[COUNT];
  make_steps(0);
  assert_int_equal(open_at(SLUICE_NO_STEP, &file), SLUICE_OK);
  for (int is_damaged = 0; is_damaged < 2; ++is_damaged) {
    for (int32_t s = 0; s < SLUICE_NUM_STATES; ++s) {
      sluice_state_sum_begin(sums + s);
      assert_int_equal(sluice_state_file_read(file, s, 0, COUNT, data, sums + s), SLUICE_OK);
    }
    assert_int_equal(sluice_state_file_check_sums(file, sums), is_damaged ? SLUICE_E_EXTERNAL : SLUICE_OK);
    const float odd = 1.0F;
    overwrite(ROOMS_AT + ARRAY_BYTES, &odd, sizeof odd);
  }
  expect_message("exp_avg of step 0 differ from what was written");
  sluice_state_file_close(file);
  (void)unlink(path);
}

static int set_up(void** state) {
  (void)state;
  const char* folder = getenv("TEST_TMPDIR");
  (void)snprintf(path, sizeof path, "%s/state_file_test.%d", folder != NULL ? folder : "/tmp", (int)getpid());
  (void)snprintf(unfinished, sizeof unfinished, "%s.unfinished", path);
  return 0;
}

int main(void) { return run_cases(set_up, NULL); }
