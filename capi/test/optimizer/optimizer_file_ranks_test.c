// SPDX-License-Identifier: Apache-2.0
/* Ranks that each keep master weights and moments in a file: the bits of one rank, and a disk that fails on one rank.
 * */
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "capi/test/optimizer/failing_disk.h"
#include "capi/test/optimizer/filed_model.h"

enum { MAX_RANKS = 3 };

static int32_t num_ranks = 2;

static void* step_rank(void* data) {
  model_t* m = data;
  m->status = sluice_optimizer_step(m->optimizer, &m->args, &m->result);
  sluice_error_last(&m->error);
  return NULL;
}

static void on_all(model_t* const* ranks, void* (*call)(void*)) {
  pthread_t threads[MAX_RANKS];
  for (int r = 0; r < num_ranks; ++r) assert_int_equal(pthread_create(&threads[r], NULL, call, ranks[r]), 0);
  for (int r = 0; r < num_ranks; ++r) pthread_join(threads[r], NULL);
}

static void step_all(model_t* const* ranks, int number) {
  for (int r = 0; r < num_ranks; ++r) {
    set_gradients(ranks[r], number, r);
    ranks[r]->args.comm = ranks[r]->comm;
  }
  on_all(ranks, step_rank);
}

/* Takes a step of a model on one rank, on gradients summed in rank order. */
static void step_reference(model_t* m, model_t* const* ranks, int number) {
  float sums[ELEMENTS];
  for (int r = 0; r < num_ranks; ++r) set_gradients(ranks[r], number, r);
  for (int64_t t = 0, first = 0; t < NUM_TENSORS; first += counts[t++]) {
    m->tensors[t].step = number;
    m->tensors[t].grad_dtype = SLUICE_DTYPE_F32;
    for (int64_t i = 0; i < counts[t]; ++i) {
      sums[first + i] = read_element(ranks[0]->grad + first, dtypes[t], i);
      for (int r = 1; r < num_ranks; ++r) sums[first + i] += read_element(ranks[r]->grad + first, dtypes[t], i);
    }
  }
  memcpy(m->grad, sums, sizeof sums);
  WORKS(sluice_optimizer_step(m->optimizer, &m->args, &m->result));
}

static void join_all(model_t* const* ranks, sluice_local_group_t** out_group) {
  assert_int_equal(sluice_local_group_create(num_ranks, out_group), SLUICE_OK);
  for (int32_t r = 0; r < num_ranks; ++r) {
    DEFAULTS(sluice_comm_config, config);
    config.rank = r, config.world_size = num_ranks, config.timeout_ns = UINT64_C(60000000000);
    assert_int_equal(sluice_comm_create_local(*out_group, &config, &ranks[r]->comm), SLUICE_OK);
  }
}

TEST(Ranks_EachWithAFile_HaveTheBitsOfOne) {
  for (int clips = 0; clips < 2; ++clips) {
    model_t *ranks[MAX_RANKS] = {open_with_file(), open_with_file()}, *wanted = open_model();
    sluice_local_group_t* group;
    join_all(ranks, &group);
    wanted->args.max_norm = clips * 0.25;
    for (int number = 1; number <= 3; ++number) {
      for (int r = 0; r < num_ranks; ++r) {
        ranks[r]->args.max_norm = clips * 0.25;
        ranks[r]->args.sum_buckets = number == 3 ? INT64_MAX : number;
      }
      step_all(ranks, number);
      step_reference(wanted, ranks, number);
      for (int r = 0; r < num_ranks; ++r) {
        if (ranks[r]->status != SLUICE_OK) fail_msg("rank %d: %s", r, ranks[r]->error.message);
        assert_int_equal(ranks[r]->result.decided, clips);
        expect_states(ranks[r], wanted);
      }
    }
    for (int r = 0; r < num_ranks; ++r) sluice_comm_destroy(ranks[r]->comm);
    for (int r = 0; r < num_ranks; ++r) close_model(ranks[r]);
    close_model(wanted);
    sluice_local_group_destroy(group);
  }
}

/* Calls of rank 1's disk fail: no rank takes the step, both ranks report the error, and the next step runs. */
TEST(DiskOfOneRank_ThatFails_ChangesNothingOnAny) {
  for (int clips = 0; clips < 2; ++clips) {
    model_t *ranks[MAX_RANKS] = {open_with_file(), open_with_file()}, *before = open_model(), *after = open_model();
    sluice_local_group_t* group;
    join_all(ranks, &group);
    for (int r = 0; r < num_ranks; ++r) ranks[r]->args.max_norm = clips * 0.25, ranks[r]->args.sum_buckets = 1;
    before->args.max_norm = after->args.max_norm = clips * 0.25;
    step_all(ranks, 1);
    step_reference(before, ranks, 1);
    for (int number = 1; number <= 2; ++number) step_reference(after, ranks, number);
    struct stat file;
    assert_int_equal(stat(ranks[1]->path, &file), 0);
    for (int i = 0; i < 12; ++i) {
      const int which = i % 2;
      disk_only_file = file.st_ino;
      disk_how = FAILS;
      disk_calls_left[which] = i / 2 * 6;
      step_all(ranks, 2);
      assert_true(disk_calls_left[which] < 0);
      disk_calls_left[which] = NEVER;
      disk_only_file = 0;
      assert_int_equal(ranks[1]->status, SLUICE_E_EXTERNAL);
      assert_int_equal(ranks[0]->status, SLUICE_E_PEER_REFUSED);
      assert_int_equal(ranks[0]->error.peer, 1);
      assert_non_null(strstr(ranks[0]->error.message, ranks[1]->path));
      for (int r = 0; r < num_ranks; ++r) {
        assert_int_equal(info_of(ranks[r]).step, 1);
        expect_states(ranks[r], before);
      }
    }
    step_all(ranks, 2);
    for (int r = 0; r < num_ranks; ++r) {
      assert_int_equal(ranks[r]->status, SLUICE_OK);
      expect_states(ranks[r], after);
      sluice_comm_destroy(ranks[r]->comm);
    }
    for (int r = 0; r < num_ranks; ++r) close_model(ranks[r]);
    close_model(before);
    close_model(after);
    sluice_local_group_destroy(group);
  }
}

/* ---- a disk that fails after all ranks have agreed ---- */

/* Fails one rank's disk at the end of a step: its last write, which is the record, or its last sync. */
static void fail_at_the_end(model_t* const* ranks, int32_t of, int which) {
  struct stat file;
  assert_int_equal(stat(ranks[of]->path, &file), 0);
  disk_only_file = file.st_ino;
  atomic_store(&disk_calls[which], 0);
  step_all(ranks, 1); /* one whole step, to count calls */
  disk_calls_left[which] = atomic_load(&disk_calls[which]) - 1;
  step_all(ranks, 2);
  assert_true(disk_calls_left[which] < 0);
  disk_calls_left[which] = NEVER;
  disk_only_file = 0;
}

static void* reopen_rank(void* data) {
  model_t* m = data;
  sluice_optimizer_file_config_t config = config_of(m);
  sluice_optimizer_file_close(m->file);
  m->args.file = m->file = NULL;
  m->status = sluice_optimizer_file_open(&config, &m->file);
  sluice_error_last(&m->error);
  m->args.file = m->file;
  if (m->status == SLUICE_OK) m->status = sluice_optimizer_file_load(m->file, m->list, 2);
  return NULL;
}

static void expect_step_one(model_t* const* ranks, model_t* before) {
  for (int r = 0; r < num_ranks; ++r) {
    assert_int_equal(info_of(ranks[r]).step, 1);
    expect_states(ranks[r], before);
  }
}

static void* create_rank(void* data) {
  model_t* m = data;
  sluice_optimizer_file_config_t config = config_of(m);
  config.durable = 1;
  m->status = sluice_optimizer_file_create(&config, m->list, 2, &m->file);
  sluice_error_last(&m->error);
  m->args.file = m->file;
  return NULL;
}

static void open_all(model_t** ranks, sluice_local_group_t** out_group) {
  for (int r = 0; r < num_ranks; ++r) ranks[r] = open_model();
  join_all(ranks, out_group);
  on_all(ranks, create_rank);
  for (int r = 0; r < num_ranks; ++r) {
    if (ranks[r]->status != SLUICE_OK) fail_msg("rank %d: %s", r, ranks[r]->error.message);
    forget_states(ranks[r]);
  }
}

static void close_all(model_t** ranks, sluice_local_group_t* group) {
  for (int r = 0; r < num_ranks; ++r) sluice_comm_destroy(ranks[r]->comm);
  for (int r = 0; r < num_ranks; ++r) close_model(ranks[r]);
  sluice_local_group_destroy(group);
}

TEST(DiskOfOneRank_ThatFailsAfterTheHandshake_LeavesAllAtOneStep) {
  for (int i = 0; i < 8; ++i) {
    num_ranks = 2 + i % 2;
    const int which = 1 + i / 4; /* a write, a sync */
    const int32_t of = i / 2 % 2 == 0 ? 0 : num_ranks - 1;
    model_t *ranks[MAX_RANKS], *before = open_model(), *after = open_model();
    sluice_local_group_t* group;
    open_all(ranks, &group);
    step_reference(before, ranks, 1);
    for (int number = 1; number <= 2; ++number) step_reference(after, ranks, number);
    fail_at_the_end(ranks, of, which);
    for (int r = 0; r < num_ranks; ++r) {
      assert_int_equal(ranks[r]->status, r == of ? SLUICE_E_EXTERNAL : SLUICE_E_PEER_REFUSED);
      assert_true(r == of || ranks[r]->error.peer == of);
    }
    expect_step_one(ranks, before);
    on_all(ranks, reopen_rank);
    for (int r = 0; r < num_ranks; ++r) {
      if (ranks[r]->status != SLUICE_OK) fail_msg("rank %d: %s", r, ranks[r]->error.message);
    }
    expect_step_one(ranks, before);
    step_all(ranks, 2);
    for (int r = 0; r < num_ranks; ++r) expect_states(ranks[r], after);
    close_all(ranks, group);
    close_model(before);
    close_model(after);
  }
  num_ranks = 2;
}

/* ---- files of different steps ---- */

/* Takes a step of one rank only, on other gradients, so that no rank may keep it. */
static void step_alone(model_t* m, int number) {
  m->args.comm = NULL;
  step_model(m, number);
}

/* One rank's file is a step ahead, as a kill between the two handshakes leaves it. */
TEST(Files_OneStepAhead_ContinueFromTheStepThatAllHave) {
  model_t *ranks[MAX_RANKS], *before = open_model(), *after = open_model();
  sluice_local_group_t* group;
  open_all(ranks, &group);
  for (int number = 1; number <= 2; ++number) step_reference(before, ranks, number);
  for (int number = 1; number <= 3; ++number) step_reference(after, ranks, number);
  for (int number = 1; number <= 2; ++number) step_all(ranks, number);
  step_alone(ranks[1], 3);
  on_all(ranks, reopen_rank);
  for (int r = 0; r < num_ranks; ++r) {
    if (ranks[r]->status != SLUICE_OK) fail_msg("rank %d: %s", r, ranks[r]->error.message);
    assert_int_equal(info_of(ranks[r]).step, 2);
    expect_states(ranks[r], before);
  }
  step_all(ranks, 3);
  for (int r = 0; r < num_ranks; ++r) expect_states(ranks[r], after);
  for (int number = 4; number <= 5; ++number) step_alone(ranks[1], number);
  on_all(ranks, reopen_rank);
  for (int r = 0; r < num_ranks; ++r) {
    assert_int_equal(ranks[r]->status, SLUICE_E_MISMATCH);
    assert_non_null(strstr(ranks[r]->error.message, "rank 1 has 5 and 4, rank 0 has 3 and 2"));
    assert_null(ranks[r]->file);
  }
  close_all(ranks, group);
  close_model(before);
  close_model(after);
}

/* One rank has lost its file, or has another rank's file: no rank continues, and no rank creates a file. */
TEST(Files_ThatNotAllRanksHave_AreRefusedOnAll) {
  model_t* ranks[MAX_RANKS];
  sluice_local_group_t* group;
  char paths[2][sizeof ranks[0]->path];
  pthread_t thread;
  open_all(ranks, &group);
  for (int r = 0; r < num_ranks; ++r) {
    memcpy(paths[r], ranks[r]->path, sizeof paths[r]);
    sluice_optimizer_file_close(ranks[r]->file); /* before another rank opens the file */
    ranks[r]->file = NULL;
  }
  for (int r = 0; r < num_ranks; ++r) memcpy(ranks[r]->path, paths[1 - r], sizeof paths[r]);
  on_all(ranks, reopen_rank);
  for (int r = 0; r < num_ranks; ++r) {
    assert_int_equal(ranks[r]->status, SLUICE_E_MISMATCH);
    assert_non_null(strstr(ranks[r]->error.message, r == 0 ? "rank 1 of 2, and this is rank 0" : "rank 0 of 2, and"));
  }
  for (int r = 0; r < num_ranks; ++r) memcpy(ranks[r]->path, paths[r], sizeof paths[r]);
  assert_int_equal(unlink(ranks[1]->path), 0);
  assert_int_equal(pthread_create(&thread, NULL, reopen_rank, ranks[0]), 0);
  create_rank(ranks[1]);
  pthread_join(thread, NULL);
  for (int r = 0; r < num_ranks; ++r) {
    assert_int_equal(ranks[r]->status, SLUICE_E_MISMATCH);
    assert_non_null(strstr(ranks[r]->error.message, "rank 1 creates a state file, but rank 0 opens a state file"));
  }
  assert_int_equal(access(ranks[1]->path, F_OK), -1);
  on_all(ranks, reopen_rank);
  assert_int_equal(ranks[1]->status, SLUICE_E_NOT_FOUND);
  assert_int_equal(ranks[0]->status, SLUICE_E_PEER_REFUSED);
  assert_non_null(strstr(ranks[0]->error.message, "there is no file"));
  close_all(ranks, group);
}
