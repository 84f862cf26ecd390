// SPDX-License-Identifier: Apache-2.0
/* One system call or allocation fails (nth_ranks.h) while ranks take three steps of the optimizer: bucket by bucket,
 * with all sums before the first update, and bucket by bucket again. The first group of parameters is summed over a
 * communicator of its own. Afterwards each word of the state is old or new; after the second kind of step, all words
 * are old or all are new. A step that failed without ending a communicator is repeated, and must succeed. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/hash.h"
#include "capi/test/nth/nth_ranks.h"
#include "capi/test/optimizer/filed_model.h"

enum { STEPS = 3, WORDS = sizeof(states_t) / sizeof(uint32_t) }; /* buckets end at whole words */

static model_t models[NTH_MOST_RANKS];
static states_t after[NTH_MOST_RANKS][STEPS + 1]; /* initial states, and those after each step without a failure */
static int32_t is_known[NTH_MOST_RANKS];

static sluice_status_t take_step(model_t* m, sluice_comm_t* comm, int32_t is_decided) {
  m->args.comm = comm, m->args.sum_buckets = 1, m->args.max_norm = is_decided ? 0.25 : 0.0;
  return sluice_optimizer_step(m->optimizer, &m->args, NULL);
}

/* ---- state after a failure --------------------------------------------------------------------------------------- */

static int is_either(const states_t* found, const states_t* old, const states_t* new, int32_t is_whole) {
  uint32_t words[3][WORDS];
  if (is_whole) return memcmp(found, old, sizeof *found) == 0 || memcmp(found, new, sizeof *found) == 0;
  memcpy(words[0], found, sizeof *found), memcpy(words[1], old, sizeof *old), memcpy(words[2], new, sizeof *new);
  for (int i = 0; i < WORDS; ++i) {
    if (words[0][i] != words[1][i] && words[0][i] != words[2][i]) return 0;
  }
  return 1;
}

/* Judges by the last error of this thread, which belongs to `status`. */
static int ends_a_communicator(sluice_status_t status) {
  if (status == SLUICE_E_PEER_LOST || status == SLUICE_E_TIMED_OUT || status == SLUICE_E_ABORTED) return 1;
  return strstr(last_message(), "is no longer usable") != NULL;
}

static sluice_status_t train(nth_rank_t* me, model_t* m, sluice_comm_t* comm) {
  after[me->rank][0] = m->s;
  for (int32_t step = 0; step < STEPS; ++step) {
    const int32_t is_decided = step == 1;
    set_gradients(m, step + 1, me->rank);
    const sluice_status_t status = nth_said(me, take_step(m, comm, is_decided));
    if (!is_known[me->rank]) after[me->rank][step + 1] = m->s;
    if (status == SLUICE_OK) continue;
    me->is_torn |= !is_either(&m->s, &after[me->rank][step], &after[me->rank][step + 1], is_decided);
    if (ends_a_communicator(status)) return status;
    /* Other ranks repeat the step too, unless a communicator has ended for them. */
    const sluice_status_t again = take_step(m, comm, is_decided);
    if (again != SLUICE_OK && !ends_a_communicator(again)) me->is_torn = 1;
    if (again == SLUICE_OK) me->is_torn |= memcmp(&m->s, &after[me->rank][step + 1], sizeof m->s) != 0;
    return status;
  }
  is_known[me->rank] = 1;
  return SLUICE_OK;
}

/* ---- ranks ------------------------------------------------------------------------------------------------------- */

/* The first group is summed over the parent communicator, or over that of a pair. */
static sluice_status_t run(nth_rank_t* me, sluice_comm_t* comm, sluice_comm_t* parent) {
  model_t* m = &models[me->rank];
  sluice_comm_t* pair = NULL;
  sluice_status_t status = parent != NULL ? SLUICE_OK : nth_pair(me, &pair);
  if (status != SLUICE_OK) return status;
  DEFAULTS(sluice_optimizer_config, config);
  init_model(m);
  m->groups[0].comm = parent != NULL ? parent : pair;
  status = nth_said(me, sluice_optimizer_create(&config, &m->optimizer));
  if (status == SLUICE_OK) status = train(me, m, comm);
  sluice_optimizer_destroy(m->optimizer);
  sluice_comm_destroy(pair);
  me->digest = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, &m->s, sizeof m->s);
  return status;
}

static void check(int32_t num_ranks, nth_way_t way) {
  memset(is_known, 0, sizeof is_known);
  nth_call(num_ranks, way, run);
}

TEST(TwoRanks_NthCallOfAStepFails_HaveStatusesAndLeaveOldOrNew) { check(2, NTH_OVER_TCP); }
TEST(TwoPairs_NthCallOfAStepFails_HaveStatusesAndLeaveOldOrNew) { check(4, NTH_WITHIN); }
