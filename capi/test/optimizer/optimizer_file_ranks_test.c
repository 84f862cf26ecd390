/* Ranks that have their masters and moments in a file each: the bits of one, and a disk that fails on one of them. */
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>

#include "capi/test/optimizer/failing_disk.h"
#include "capi/test/optimizer/filed_model.h"

enum { MAX_RANKS = 2 };

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
      disk_only_file = file.st_ino;
      disk_how = FAILS;
      disk_calls_left[which] = i / 2 * 6;
      step_both(ranks, 2);
      assert_true(disk_calls_left[which] < 0);
      disk_calls_left[which] = NEVER;
      disk_only_file = 0;
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

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(Ranks_EachWithAFile_HaveTheBitsOfOne),
      cmocka_unit_test(DiskOfOneRank_ThatFails_ChangesNothingOnAny),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
