// SPDX-License-Identifier: Apache-2.0
/* Ranks that each keep master weights and moments in a file: the bits of one rank, and a disk that fails on one rank.
 */
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "capi/test/optimizer/failing_disk.h"
#include "capi/test/optimizer/optimizer_world.h"

static void* create_rank(void* rank) {
  ow_rank_t* me = rank;
  model_t* m = me->model;
  m->comm = me->comm;
  sluice_optimizer_file_config_t config = config_of(m);
  config.durable = 1;
  me->status = sluice_optimizer_file_create(&config, m->list, 2, &m->file);
  sluice_error_last(&me->error);
  m->args.file = m->file;
  return NULL;
}

static void* reopen_rank(void* rank) {
  ow_rank_t* me = rank;
  model_t* m = me->model;
  const sluice_optimizer_file_config_t config = config_of(m);
  close_file(m);
  me->status = sluice_optimizer_file_open(&config, &m->file);
  sluice_error_last(&me->error);
  m->args.file = m->file;
  if (me->status == SLUICE_OK) me->status = sluice_optimizer_file_load(m->file, m->list, 2);
  return NULL;
}

static void all_work(const ow_world_t* w) {
  for (int r = 0; r < w->size; ++r) {
    if (w->ranks[r].status != SLUICE_OK) fail_msg("rank %d: %s", r, w->ranks[r].error.message);
  }
}

/* Ranks with files. A step that clips is decided before it updates. */
static ow_world_t* open_files(int32_t num_ranks, int clips) {
  ow_world_t* w = ow_world_new(num_ranks, 0, 0);
  ow_on_all(w, create_rank);
  all_work(w);
  for (int r = 0; r < num_ranks; ++r) {
    forget_states(w->ranks[r].model);
    w->ranks[r].model->args.max_norm = clips * 0.25, w->ranks[r].model->args.sum_buckets = 1;
  }
  return w;
}

/* A model after this many steps on one rank, on gradients summed in rank order. */
static model_t* reference_after(const ow_world_t* w, int steps) {
  model_t* m = open_model();
  m->args.max_norm = w->ranks[0].model->args.max_norm;
  for (int number = 1; number <= steps; ++number) {
    for (int r = 0; r < w->size; ++r) set_gradients(w->ranks[r].model, number, r);
    ow_sum_gradients(w, w->ranks, m);
    WORKS(sluice_optimizer_step(m->optimizer, &m->args, &m->result));
  }
  return m;
}

static void expect_all(const ow_world_t* w, int64_t step, const model_t* wanted) {
  for (int r = 0; r < w->size; ++r) {
    assert_int_equal(info_of(w->ranks[r].model).step, step);
    expect_states(w->ranks[r].model, wanted);
  }
}

static void end(ow_world_t* w, model_t* before, model_t* after) {
  ow_world_free(w);
  if (before != NULL) close_model(before);
  if (after != NULL) close_model(after);
}

TEST(Ranks_EachWithAFile_HaveTheBitsOfOne) {
  for (int clips = 0; clips < 2; ++clips) {
    ow_world_t* w = open_files(2, clips);
    for (int number = 1; number <= 3; ++number) {
      model_t* wanted = reference_after(w, number);
      for (int r = 0; r < 2; ++r) w->ranks[r].model->args.sum_buckets = number == 3 ? INT64_MAX : number;
      ow_step(w, number);
      all_work(w);
      for (int r = 0; r < 2; ++r) assert_int_equal(w->ranks[r].model->result.decided, clips);
      expect_all(w, number, wanted);
      close_model(wanted);
    }
    ow_world_free(w);
  }
}

/* Takes a step in which a call of one rank's disk fails, after `left` others. */
static void step_with_a_bad_disk(ow_world_t* w, int32_t of, int which, int64_t left) {
  struct stat file;
  assert_int_equal(stat(w->ranks[of].model->path, &file), 0);
  disk_only_file = file.st_ino;
  disk_how = FAILS;
  disk_calls_left[which] = left;
  ow_step(w, 2);
  assert_true(disk_calls_left[which] < 0);
  disk_calls_left[which] = NEVER;
  disk_only_file = 0;
  for (int r = 0; r < w->size; ++r) {
    assert_int_equal(w->ranks[r].status, r == of ? SLUICE_E_EXTERNAL : SLUICE_E_PEER_REFUSED);
    if (r == of) continue;
    assert_int_equal(w->ranks[r].error.peer, of);
    assert_non_null(strstr(w->ranks[r].error.message, w->ranks[of].model->path));
  }
}

/* Calls of rank 1's disk fail: no rank takes the step, all ranks report the error, and the next step runs. */
TEST(DiskOfOneRank_ThatFails_ChangesNothingOnAny) {
  for (int clips = 0; clips < 2; ++clips) {
    ow_world_t* w = open_files(2, clips);
    model_t *before = reference_after(w, 1), *after = reference_after(w, 2);
    ow_step(w, 1);
    for (int i = 0; i < 12; ++i) {
      step_with_a_bad_disk(w, 1, i % 2, i / 2 * 6);
      expect_all(w, 1, before);
    }
    ow_step(w, 2);
    all_work(w);
    expect_all(w, 2, after);
    end(w, before, after);
  }
}

/* After all ranks have agreed, the last write of a step, which is the record, or its last sync fails. */
TEST(DiskOfOneRank_ThatFailsAfterTheHandshake_LeavesAllAtOneStep) {
  for (int i = 0; i < 8; ++i) {
    ow_world_t* w = open_files(2 + i % 2, 0);
    const int which = 1 + i / 4; /* a write, a sync */
    const int32_t of = i / 2 % 2 == 0 ? 0 : w->size - 1;
    model_t *before = reference_after(w, 1), *after = reference_after(w, 2);
    struct stat file;
    assert_int_equal(stat(w->ranks[of].model->path, &file), 0);
    disk_only_file = file.st_ino;
    atomic_store(&disk_calls[which], 0);
    ow_step(w, 1); /* a whole step, to count calls */
    step_with_a_bad_disk(w, of, which, atomic_load(&disk_calls[which]) - 1);
    expect_all(w, 1, before);
    ow_on_all(w, reopen_rank);
    all_work(w);
    expect_all(w, 1, before);
    ow_step(w, 2);
    expect_all(w, 2, after);
    end(w, before, after);
  }
}

/* ---- files of different steps ---- */

/* Takes a step of one rank only, on other gradients, so that no rank may keep it. */
static void step_alone(model_t* m, int number) {
  m->args.comm = NULL;
  step_model(m, number);
}

/* One rank's file is a step ahead, as a kill between the two handshakes leaves it. */
TEST(Files_OneStepAhead_ContinueFromTheStepThatAllHave) {
  ow_world_t* w = open_files(2, 0);
  model_t *before = reference_after(w, 2), *after = reference_after(w, 3);
  for (int number = 1; number <= 2; ++number) ow_step(w, number);
  step_alone(w->ranks[1].model, 3);
  ow_on_all(w, reopen_rank);
  all_work(w);
  expect_all(w, 2, before);
  ow_step(w, 3);
  expect_all(w, 3, after);
  for (int number = 4; number <= 5; ++number) step_alone(w->ranks[1].model, number);
  ow_on_all(w, reopen_rank);
  for (int r = 0; r < 2; ++r) {
    assert_int_equal(w->ranks[r].status, SLUICE_E_MISMATCH);
    assert_non_null(strstr(w->ranks[r].error.message, "rank 1 has 5 and 4, rank 0 has 3 and 2"));
    assert_null(w->ranks[r].model->file);
  }
  end(w, before, after);
}

/* One rank has lost its file, or has another rank's file: no rank continues, and no rank creates a file. */
TEST(Files_ThatNotAllRanksHave_AreRefusedOnAll) {
  ow_world_t* w = open_files(2, 0);
  ow_rank_t* ranks = w->ranks;
  char paths[2][sizeof ranks->model->path];
  pthread_t thread;
  for (int r = 0; r < 2; ++r) {
    memcpy(paths[r], ranks[r].model->path, sizeof paths[r]);
    close_file(ranks[r].model); /* before another rank opens the file */
  }
  for (int r = 0; r < 2; ++r) memcpy(ranks[r].model->path, paths[1 - r], sizeof paths[r]);
  ow_on_all(w, reopen_rank);
  for (int r = 0; r < 2; ++r) {
    assert_int_equal(ranks[r].status, SLUICE_E_MISMATCH);
    assert_non_null(strstr(ranks[r].error.message, r == 0 ? "rank 1 of 2, and this is rank 0" : "rank 0 of 2, and"));
  }
  for (int r = 0; r < 2; ++r) memcpy(ranks[r].model->path, paths[r], sizeof paths[r]);
  assert_int_equal(unlink(paths[1]), 0);
  assert_int_equal(pthread_create(&thread, NULL, reopen_rank, &ranks[0]), 0);
  create_rank(&ranks[1]);
  pthread_join(thread, NULL);
  for (int r = 0; r < 2; ++r) {
    assert_int_equal(ranks[r].status, SLUICE_E_MISMATCH);
    assert_non_null(strstr(ranks[r].error.message, "rank 1 creates a state file, but rank 0 opens a state file"));
  }
  assert_int_equal(access(paths[1], F_OK), -1);
  ow_on_all(w, reopen_rank);
  assert_int_equal(ranks[1].status, SLUICE_E_NOT_FOUND);
  assert_int_equal(ranks[0].status, SLUICE_E_PEER_REFUSED);
  assert_non_null(strstr(ranks[0].error.message, "there is no file"));
  ow_world_free(w);
}
