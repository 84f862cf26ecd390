// SPDX-License-Identifier: Apache-2.0
/* One system call or allocation fails (nth_ranks.h) while ranks take three steps of the optimizer: bucket by bucket,
 * with all sums before the first update, and bucket by bucket again. The first group of parameters is summed over a
 * communicator of its own. Afterwards each word of the state is old or new; after the second kind of step, all words
 * are old or all are new. A step that failed without ending a communicator is repeated, and must succeed. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/hash.h"
#include "backend/base/test/refused.h"
#include "capi/test/nth/nth_ranks.h"
#include "sluice/optimizer.h"

enum { NUM_TENSORS = 4, NUM_GROUPS = 2, STEPS = 3, BUCKET = 1000, ELEMENTS = 4704, WORDS = 4 * ELEMENTS };

/* Even numbers, so that buckets end at whole words. */
static const int64_t counts[NUM_TENSORS] = {1200, 2500, 4, 1000};
static const int32_t dtypes[NUM_TENSORS] = {SLUICE_DTYPE_F16, SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_BF16};

typedef struct states_s {
  uint32_t param[ELEMENTS];
  float master[ELEMENTS], exp_avg[ELEMENTS], exp_avg_sq[ELEMENTS];
} states_t;

typedef struct model_s {
  states_t states;
  uint32_t grad[ELEMENTS];
  sluice_optimizer_tensor_t tensors[NUM_TENSORS];
  sluice_optimizer_group_t groups[NUM_GROUPS];
  const sluice_optimizer_group_t* list[NUM_GROUPS];
  sluice_optimizer_t* optimizer;
} model_t;

static model_t models[NTH_MOST_RANKS];
static states_t after[NTH_MOST_RANKS][STEPS + 1]; /* states after each step without a failure */
static int32_t is_known[NTH_MOST_RANKS];

static void set_gradients(model_t* m, int32_t rank, int32_t step) {
  for (int64_t i = 0; i < ELEMENTS; ++i) {
    /* A small number both as f32 and as two numbers of bf16 or f16. */
    m->grad[i] = UINT32_C(0x30003000) + (uint32_t)((i * 7 + rank * 31 + step * 5) % 251) * UINT32_C(0x00010001);
  }
  for (int t = 0; t < NUM_TENSORS; ++t) m->tensors[t].step = step + 1;
}

static void fill(model_t* m, sluice_comm_t* own) {
  int64_t first = 0;
  memset(m, 0, sizeof *m);
  for (int t = 0; t < NUM_TENSORS; ++t) {
    m->tensors[t] =
        (sluice_optimizer_tensor_t){.count = counts[t],
                                    .param = m->states.param + first,
                                    .master = dtypes[t] == SLUICE_DTYPE_F32 ? NULL : m->states.master + first,
                                    .grad = m->grad + first,
                                    .exp_avg = m->states.exp_avg + first,
                                    .exp_avg_sq = m->states.exp_avg_sq + first,
                                    .param_dtype = dtypes[t],
                                    .grad_dtype = dtypes[t]};
    first += counts[t];
  }
  for (int g = 0; g < NUM_GROUPS; ++g) {
    sluice_optimizer_group_init(&m->groups[g], sizeof m->groups[g]);
    m->list[g] = &m->groups[g];
  }
  m->groups[0].tensors = m->tensors, m->groups[0].num_tensors = 1, m->groups[0].comm = own;
  m->groups[1].tensors = m->tensors + 1, m->groups[1].num_tensors = NUM_TENSORS - 1;
}

static sluice_status_t take_step(model_t* m, sluice_comm_t* comm, int32_t is_decided) {
  DEFAULTS(sluice_optimizer_step_args, args);
  args.groups = m->list, args.num_groups = NUM_GROUPS, args.comm = comm;
  args.bucket = BUCKET, args.sum_buckets = 1, args.max_norm = is_decided ? 0.25 : 0.0;
  return sluice_optimizer_step(m->optimizer, &args, NULL);
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
  for (int32_t step = 0; step < STEPS; ++step) {
    const int32_t is_decided = step == 1;
    set_gradients(m, me->rank, step);
    const sluice_status_t status = nth_said(me, take_step(m, comm, is_decided));
    if (!is_known[me->rank]) after[me->rank][step + 1] = m->states;
    if (status == SLUICE_OK) continue;
    me->is_torn |= !is_either(&m->states, &after[me->rank][step], &after[me->rank][step + 1], is_decided);
    if (ends_a_communicator(status)) return status;
    /* Other ranks repeat the step too, unless a communicator has ended for them. */
    const sluice_status_t again = take_step(m, comm, is_decided);
    if (again != SLUICE_OK && !ends_a_communicator(again)) me->is_torn = 1;
    if (again == SLUICE_OK) me->is_torn |= memcmp(&m->states, &after[me->rank][step + 1], sizeof m->states) != 0;
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
  fill(m, parent != NULL ? parent : pair);
  status = nth_said(me, sluice_optimizer_create(&config, &m->optimizer));
  if (status == SLUICE_OK) status = train(me, m, comm);
  sluice_optimizer_destroy(m->optimizer);
  sluice_comm_destroy(pair);
  me->digest = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, &m->states, sizeof m->states);
  return status;
}

static void check(int32_t num_ranks, nth_way_t way) {
  memset(is_known, 0, sizeof is_known);
  nth_call(num_ranks, way, run);
}

TEST(TwoRanks_NthCallOfAStepFails_HaveStatusesAndLeaveOldOrNew) { check(2, NTH_OVER_TCP); }
TEST(TwoPairs_NthCallOfAStepFails_HaveStatusesAndLeaveOldOrNew) { check(4, NTH_WITHIN); }
