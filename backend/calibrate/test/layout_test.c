// SPDX-License-Identifier: Apache-2.0
/* The layout of ranks as each rank receives it. */
#include <pthread.h>

#include "backend/calibrate/layout.h"
#include "third_party/bazel/test.h"

enum { MOST_RANKS = 70 }; /* more than one block */

typedef struct rank_s {
  sluice_local_group_t* group;
  int32_t rank, world_size;
  int64_t host; /* -1: its own */
  sluice_status_t status;
  char text[SLUICE_LAYOUT_BYTES];
} rank_t;

static void* describe(void* argument) {
  rank_t* me = argument;
  DEFAULTS(sluice_comm_config, config);
  sluice_comm_t* comm = NULL;
  config.rank = me->rank, config.world_size = me->world_size;
  me->status = sluice_comm_create_local(me->group, &config, &comm);
  if (me->status != SLUICE_OK) return NULL;
  me->status = me->host < 0 ? sluice_layout_describe(comm, me->text) : sluice_layout_of(comm, me->host, me->text);
  sluice_comm_destroy(comm);
  return NULL;
}

/* hosts: by rank; NULL: the real ones. */
static void run(int32_t world_size, const int64_t* hosts, char out[SLUICE_LAYOUT_BYTES]) {
  static rank_t ranks[MOST_RANKS];
  pthread_t threads[MOST_RANKS];
  sluice_local_group_t* group;
  assert_int_equal(sluice_local_group_create(world_size, &group), SLUICE_OK);
  for (int32_t r = 0; r < world_size; ++r) {
    ranks[r] = (rank_t){.group = group, .rank = r, .world_size = world_size, .host = hosts != NULL ? hosts[r] : -1};
    assert_int_equal(pthread_create(&threads[r], NULL, describe, &ranks[r]), 0);
  }
  for (int32_t r = 0; r < world_size; ++r) pthread_join(threads[r], NULL);
  sluice_local_group_destroy(group);
  for (int32_t r = 0; r < world_size; ++r) {
    assert_int_equal(ranks[r].status, SLUICE_OK);
    assert_string_equal(ranks[r].text, ranks[0].text);
  }
  snprintf(out, SLUICE_LAYOUT_BYTES, "%s", ranks[0].text);
}

TEST(Layout_RanksOfOneSystem_AreOneHost) {
  char text[SLUICE_LAYOUT_BYTES];
  assert_int_equal(sluice_layout_describe(NULL, text), SLUICE_OK);
  assert_string_equal(text, "1 host");
  run(4, NULL, text);
  assert_string_equal(text, "1 host");
}

TEST(Layout_RanksOnSeveral_SaysWhichShareOne) {
  static const int64_t pairs[] = {7, 7, INT64_MAX, INT64_MAX}, others[] = {0, 0, 5, 5}, turns[] = {7, 9, 7, 9},
                       each[] = {4, 3, 2, 1};
  char by_pairs[SLUICE_LAYOUT_BYTES], text[SLUICE_LAYOUT_BYTES];
  run(4, pairs, by_pairs);
  assert_int_equal(strncmp(by_pairs, "2 hosts (", 9), 0);
  run(4, others, text);
  assert_string_equal(text, by_pairs); /* other machines with the same layout */
  run(4, turns, text);
  assert_int_equal(strncmp(text, "2 hosts (", 9), 0);
  assert_string_not_equal(text, by_pairs);
  run(4, each, text);
  assert_int_equal(strncmp(text, "4 hosts (", 9), 0);
}

TEST(Layout_MoreThanABlock_SaysWhichShareOne) {
  int64_t hosts[MOST_RANKS];
  char text[SLUICE_LAYOUT_BYTES], other[SLUICE_LAYOUT_BYTES];
  for (int32_t r = 0; r < MOST_RANKS; ++r) hosts[r] = r / 10;
  run(MOST_RANKS, hosts, text);
  assert_int_equal(strncmp(text, "7 hosts (", 9), 0);
  hosts[MOST_RANKS - 1] = 0; /* in the second block, on the host of the first */
  run(MOST_RANKS, hosts, other);
  assert_int_equal(strncmp(other, "7 hosts (", 9), 0);
  assert_string_not_equal(text, other);
}
