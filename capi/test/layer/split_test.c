// SPDX-License-Identifier: Apache-2.0
/* Loads by expert and by rank, from the counts of forwards before and after experts have moved; and split calls when
 * some ranks have no rows: they still receive the values of the other ranks. */

#include "capi/test/ranks/play.h"
#include "third_party/bazel/test.h"

enum { MOST = 8 };

/* The loads of each rank. All ranks compare them after a barrier. */
typedef struct seen_s {
  int64_t routes[MAX_RANKS][MOST]; /* routes of one round */
  int64_t expert_rows[MAX_RANKS][MOST];
  int64_t rank_rows[MAX_RANKS][MAX_RANKS];
  int64_t forwards[MAX_RANKS];
} seen_t;
static seen_t seen;

static void look(part_t* me) {
  const int32_t* ids = me->rig.ids.memory;
  int64_t* routes = seen.routes[me->rank];
  memset(routes, 0, MOST * sizeof *routes);
  for (int64_t i = 0; i < me->rig.num_tokens * me->rig.config.top_k; ++i) {
    if (ids[i] >= 0) ++routes[ids[i]];
  }
  WORKS(sluice_moe_get_loads(me->rig.moe, seen.expert_rows[me->rank], seen.rank_rows[me->rank],
                             &seen.forwards[me->rank]));
  meet(me);
}

/* Rows that `rank` receives in one round. */
static int64_t rows_of(const part_t* me, const int32_t* owner, int32_t rank) {
  int64_t rows = 0;
  for (int32_t r = 0; r < me->world_size; ++r) {
    for (int32_t e = 0; e < 2 * me->world_size; ++e) rows += owner[e] == rank ? seen.routes[r][e] : 0;
  }
  return rows;
}

/* Checks the loads of `before` rounds, a swap of experts 0 and 2, and `after` rounds. Headers report the last round. */
static void expect_loads(part_t* me, int line, const int32_t* home, const int32_t* moved, int before, int after) {
  look(me);
  const int reported_before = after > 0 ? before : before - 1, reported_after = after > 0 ? after - 1 : 0;
  for (int32_t e = 0; e < 2 * me->world_size; ++e) {
    if (seen.expert_rows[me->rank][e] != seen.routes[me->rank][e] * (before + after)) note(me, line, "expert %d", e);
  }
  for (int32_t r = 0; r < me->world_size; ++r) {
    const int64_t want = rows_of(me, home, r) * reported_before + rows_of(me, moved, r) * reported_after;
    const int64_t got = seen.rank_rows[me->rank][r];
    if (got != want) note(me, line, "rank %d: %lld rows, not %lld", r, (long long)got, (long long)want);
  }
  if (seen.forwards[me->rank] != reported_before + reported_after) note(me, line, "wrong number of forwards");
  meet(me);
}

static void run(part_t* me) {
  int32_t home[MOST], moved[MOST], slot[MOST];
  for (int32_t e = 0; e < 2 * me->world_size; ++e) home[e] = moved[e] = e / 2, slot[e] = e % 2;
  moved[0] = 1, moved[2] = 0;
  const sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  for (int i = 0; i < 3; ++i) (void)good_round(me, __LINE__);
  expect_loads(me, __LINE__, home, moved, 3, 0);
  DEFAULTS(sluice_expert_placement, placement);
  placement.expert_rank = moved, placement.expert_slot = slot, placement.epoch = 1;
  WORKS(sluice_moe_replace_experts(me->rig.moe, &placement));
  for (int i = 0; i < 2; ++i) (void)good_round(me, __LINE__);
  expect_loads(me, __LINE__, home, moved, 3, 2);
  WORKS(sluice_moe_get_loads(me->rig.moe, NULL, NULL, NULL));
  STATUS(sluice_moe_get_loads(NULL, NULL, NULL, NULL), BAD, "moe is NULL");
}

TEST(Loads_OfRounds_AreThoseOfTheRoutes) {
  for (int32_t w = 2; w <= 3; ++w) perform(&(play_t){.run = run, .world_size = w});
}

/* ---- split calls ---- */

enum { MAX_ROWS = 24, WIDTH = 5, HIDDEN = 7, ROUTES = 12 };

typedef struct rows_s {
  float pre[MAX_ROWS * 2 * HIDDEN], out[MAX_ROWS * WIDTH], grad[MAX_ROWS * WIDTH], grad_in[MAX_ROWS * WIDTH];
  float grad_weight[MAX_ROWS];
} rows_t;

/* Makes all split calls. A rank without rows passes an empty buffer or NULL. out_grads: those of the route weights. */
static void run_parts(part_t* me, int gives_null, float* out_grads) {
  rig_t* rig = &me->rig;
  rig_reset(rig);
  for (int i = 0; i < ROUTES; ++i) ((int32_t*)rig->ids.tensor.data)[i] = i % 2; /* all routes go to rank 0 */
  static _Thread_local rows_t memory;
  sluice_dispatch_t* dispatch = NULL;
  void* received = NULL;
  int64_t num = -1, counts[RIG_MAX_EXPERTS];
  WORKS(sluice_dispatch_forward(rig->moe, &rig->tokens.tensor, &rig->ids.tensor, NULL, &dispatch));
  if (dispatch == NULL) return;
  WORKS(sluice_dispatch_rows(dispatch, &received, &num, counts));
  EXPECT(num == (me->rank == 0 ? MAX_ROWS : 0));
  rows_t* r = num == 0 && gives_null ? NULL : &memory;
#define AT(member) (r == NULL ? NULL : r->member)
  WORKS(sluice_experts_forward(rig->moe, received, counts, &rig->param_table, AT(pre), AT(out), NULL));
  WORKS(sluice_dispatch_combine(dispatch, AT(out), &rig->weights.tensor, &rig->out.tensor, NULL));
  WORKS(sluice_dispatch_combine_backward(dispatch, AT(out), &rig->weights.tensor, &rig->grad_out.tensor, AT(grad),
                                         AT(grad_weight), NULL));
  WORKS(sluice_experts_backward(rig->moe, received, AT(pre), counts, &rig->param_table, AT(grad), AT(grad_in),
                                &rig->grad_table, SLUICE_GRAD_OVERWRITE, NULL));
  WORKS(sluice_dispatch_backward(dispatch, AT(grad_in), AT(grad_weight), &rig->grad_tokens.tensor,
                                 &rig->grad_weights.tensor, NULL));
  sluice_dispatch_destroy(dispatch);
  memcpy(out_grads, rig->grad_weights.tensor.data, ROUTES * sizeof(float));
}

static void nothing_received_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  float with_room[ROUTES], with_null[ROUTES];
  run_parts(me, 0, with_room);
  run_parts(me, 1, with_null);
  EXPECT(memcmp(with_room, with_null, sizeof with_room) == 0);
  for (int i = 0; i < ROUTES; ++i) EXPECT(with_null[i] == with_null[i]); /* written, since outputs begin as NaN */
}

TEST(Parts_RankWithoutRows_GetsItsRouteGradients) { perform(&(play_t){.run = nothing_received_run, .world_size = 2}); }

/* The documented way to skip gradients of route weights: all ranks pass NULL in both calls. */
static void unwanted_run(part_t* me) {
  sluice_moe_config_t config = config_for(me->world_size);
  WORKS(rig_open(&me->rig, me->comm, &config));
  rig_t* rig = &me->rig;
  static _Thread_local float rows[MAX_ROWS * WIDTH];
  sluice_dispatch_t* dispatch = NULL;
  WORKS(sluice_dispatch_forward(rig->moe, &rig->tokens.tensor, &rig->ids.tensor, NULL, &dispatch));
  WORKS(
      sluice_dispatch_combine_backward(dispatch, NULL, &rig->weights.tensor, &rig->grad_out.tensor, rows, NULL, NULL));
  WORKS(sluice_dispatch_backward(dispatch, rows, NULL, &rig->grad_tokens.tensor, NULL, NULL));
  sluice_dispatch_destroy(dispatch);
  const float* grads = rig->grad_tokens.tensor.data;
  for (int i = 0; i < 6 * WIDTH; ++i) EXPECT(grads[i] == grads[i]);
  EXPECT(((float*)rig->grad_weights.tensor.data)[0] != ((float*)rig->grad_weights.tensor.data)[0]); /* not written */
}

TEST(Parts_RouteGradientsUnwanted_AreLeftAlone) { perform(&(play_t){.run = unwanted_run, .world_size = 2}); }
