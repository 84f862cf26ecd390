// SPDX-License-Identifier: Apache-2.0
/* Placements: the optimum for problems that can be enumerated, the bound on random workloads, and moved bytes compared
 * with a balancer that ignores the current placement; and whether a move pays. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/planner/placement/placing.h"
#include "backend/planner/placement/plan_placement.h"
#include "third_party/bazel/test.h"

enum { MOST = 512 };

/* ---- workloads ---- */

/* Random loads of experts from a seed, after the workloads W0 to W7 of Megatron-LM's pull request 7488, each of which
 * isolates one effect. That pull request defines them by row; these are sums of rows by expert, reimplemented from its
 * table. */
enum { ROWS = 4096, HEAT = 6 };

typedef struct random_s {
  uint64_t state;
} random_t;

static uint64_t next(random_t* random) { /* splitmix64 */
  uint64_t z = random->state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

static double random_unit(random_t* random) { return (double)(next(random) >> 11) / 9007199254740992.0; }
static int32_t random_below(random_t* random, int32_t count) { return (int32_t)(random_unit(random) * count); }

enum {
  W0_BALANCED,
  W1_HOT_EXPERT_SET,     /* some experts, on any ranks */
  W2_HOT_RANK,           /* all experts of one rank, at the heat of W1 */
  W3_SPREAD_HOT_EXPERTS, /* the same heat on one expert of each of several ranks */
  W4_SOURCE_RAGGED,      /* sources with many rows prefer their own experts */
  W5_ZERO_EXPERT_RANK,   /* experts and whole ranks without a row */
  W6_ROTATING_HOTSPOT,   /* the hot set moves with each step */
  W7_BURST,              /* balanced except for hot steps */
  NUM_WORKLOADS
};

/* Random choices made once for all steps. */
typedef struct draw_s {
  random_t of_run;
  int32_t step, num_experts, num_ranks, local;
  double* heat;
} draw_t;

static void heat_set(draw_t* d, int32_t count, int32_t first) {
  for (int32_t i = 0; i < count; ++i)
    d->heat[(first + random_below(&d->of_run, d->num_experts)) % d->num_experts] = HEAT;
}

static void balanced(draw_t* d) { (void)d; }
static void hot_set(draw_t* d) { heat_set(d, d->local, 0); }
static void rotating(draw_t* d) { heat_set(d, d->local, d->step * d->local); }

static void hot_rank(draw_t* d) {
  const int32_t rank = random_below(&d->of_run, d->num_ranks);
  for (int32_t i = 0; i < d->local; ++i) d->heat[rank * d->local + i] = HEAT;
}

static void spread(draw_t* d) {
  const int32_t first = random_below(&d->of_run, d->num_ranks);
  for (int32_t i = 0; i < d->local; ++i) d->heat[(first + i) % d->num_ranks * d->local] = HEAT;
}

/* Half of the rows of each source go to its own set of four experts, and source r has r + 1 shares of all rows. */
static void ragged(draw_t* d) {
  const double shares = 0.5 * d->num_ranks * (d->num_ranks + 1);
  for (int32_t r = 0; r < d->num_ranks; ++r) {
    for (int32_t i = 0; i < 4; ++i) {
      d->heat[random_below(&d->of_run, d->num_experts)] += 0.125 * d->num_experts * (r + 1) / shares;
    }
  }
}

static void zeros(draw_t* d) {
  for (int32_t r = 0; r < d->num_ranks; ++r) {
    const int is_rank = random_below(&d->of_run, 4) == 0;
    for (int32_t i = 0; i < d->local; ++i) {
      if (is_rank || random_below(&d->of_run, 8) == 0) d->heat[r * d->local + i] = 0;
    }
  }
}

static void burst(draw_t* d) {
  if (d->step % 8 == 5) hot_set(d);
}

/* out_loads [num_experts], num_experts / num_ranks of them on each rank, contiguous. */
static void workload_draw(int32_t workload, uint64_t seed, int32_t step, int32_t num_experts, int32_t num_ranks,
                          uint64_t* out_loads) {
  static void (*const heats[NUM_WORKLOADS])(draw_t*) = {balanced, hot_set, hot_rank, spread,
                                                        ragged,   zeros,   rotating, burst};
  double heat[4096];
  draw_t d = {{seed * NUM_WORKLOADS + (uint64_t)workload}, step, num_experts, num_ranks, num_experts / num_ranks, heat};
  for (int32_t e = 0; e < num_experts; ++e) heat[e] = 1;
  heats[workload](&d);
  random_t of_step = {(seed << 20) + ((uint64_t)step << 4) + (uint64_t)workload};
  for (int32_t e = 0; e < num_experts; ++e) {
    out_loads[e] = (uint64_t)(ROWS * heat[e] * (0.9 + 0.2 * random_unit(&of_step)));
  }
}

/* ---- a balancer ---- */

static int32_t heaviest(const uint64_t* loads, const int32_t* rank, int32_t num_experts) {
  int32_t best = -1;
  for (int32_t e = 0; e < num_experts; ++e) {
    if (rank[e] < 0 && (best < 0 || loads[e] > loads[best])) best = e;
  }
  return best;
}

static void pack(const uint64_t* loads, int32_t num_experts, int32_t num_ranks, int32_t* out_rank) {
  uint64_t load[MOST] = {0};
  int32_t count[MOST] = {0};
  for (int32_t e = 0; e < num_experts; ++e) out_rank[e] = -1;
  for (int32_t i = 0; i < num_experts; ++i) {
    const int32_t e = heaviest(loads, out_rank, num_experts);
    int32_t least = -1;
    for (int32_t r = 0; r < num_ranks; ++r) {
      if (count[r] < num_experts / num_ranks && (least < 0 || load[r] < load[least])) least = r;
    }
    out_rank[e] = least, load[least] += loads[e], ++count[least];
  }
}

/* The placement part of DeepSeek's EPLB without replicas, reimplemented from its published description: places experts
 * by load, heaviest first, each on the least loaded rank with a free place. It ignores the current placement. Here
 * ranks are then renamed so that the fewest experts move, which EPLB does not do.
 *
 * inout_rank: [num_experts] the current ranks, then the new ones; the same number on each rank. out_load: of the
 * fullest rank. Returns the number of experts that move. */
static int32_t balancer_place(const uint64_t* loads, int32_t num_experts, int32_t num_ranks, int32_t* inout_rank,
                              uint64_t* out_load) {
  uint64_t bytes[MOST];
  int32_t capacity[MOST], first[MOST + 1] = {0}, rank[MOST];
  for (int32_t e = 0; e < num_experts; ++e) bytes[e] = 1;
  for (int32_t r = 0; r < num_ranks; ++r) {
    capacity[r] = num_experts / num_ranks, first[r + 1] = first[r] + capacity[r];
  }
  const sluice_placing_problem_t problem = {loads, inout_rank, bytes, NULL,        capacity,
                                            first, 0,          0,     num_experts, num_ranks};
  sluice_placing_t placing;
  assert_int_equal(sluice_placing_make(&problem, sluice_process_allocator(), &placing), SLUICE_OK);
  pack(loads, num_experts, num_ranks, rank);
  sluice_placing_set(&placing, rank);
  assert_int_equal(sluice_relabel(&placing, sluice_process_allocator()), SLUICE_OK);
  const sluice_placing_score_t score = sluice_placing_score(&placing);
  memcpy(inout_rank, placing.rank, (size_t)num_experts * sizeof *inout_rank);
  sluice_placing_deinit(&placing, sluice_process_allocator());
  *out_load = score.load;
  return (int32_t)score.bytes;
}

/* ---- problems ---- */

/* A problem and its result. */
typedef struct scene_s {
  uint64_t loads[MOST], bytes[MOST];
  int32_t rank[MOST], slot[MOST], new_rank[MOST], new_slot[MOST];
  sluice_placement_problem_t problem;
  sluice_placement_result_t result;
} scene_t;

static void number_slots(scene_t* s) {
  int32_t count[MOST] = {0};
  for (int32_t e = 0; e < s->problem.num_experts; ++e) s->slot[e] = count[s->rank[e]]++;
}

static void open_scene(scene_t* s, int32_t num_experts, int32_t num_ranks, double target) {
  memset(s, 0, sizeof *s);
  s->problem = (sluice_placement_problem_t){.struct_size = sizeof s->problem,
                                            .loads = s->loads,
                                            .expert_rank = s->rank,
                                            .expert_slot = s->slot,
                                            .target = target,
                                            .num_experts = num_experts,
                                            .num_ranks = num_ranks};
  s->result.expert_rank = s->new_rank, s->result.expert_slot = s->new_slot;
  for (int32_t e = 0; e < num_experts; ++e) s->rank[e] = (int32_t)((int64_t)e * num_ranks / num_experts);
  number_slots(s);
}

static uint64_t fullest(const scene_t* s, const int32_t* rank) {
  uint64_t load[MOST] = {0}, most = 0;
  for (int32_t e = 0; e < s->problem.num_experts; ++e) load[rank[e]] += s->loads[e];
  for (int32_t r = 0; r < s->problem.num_ranks; ++r) most = load[r] > most ? load[r] : most;
  return most;
}

/* Checks that every rank keeps its number of experts, every slot is used once, experts that stay keep their slot, and
 * the reported numbers match the placement. */
static void expect_sound(const scene_t* s) {
  int32_t count[MOST] = {0}, before[MOST] = {0}, moves = 0;
  uint64_t bytes = 0;
  for (int32_t e = 0; e < s->problem.num_experts; ++e) ++before[s->rank[e]];
  for (int32_t e = 0; e < s->problem.num_experts; ++e) {
    const int32_t r = s->new_rank[e];
    ++count[r];
    if (r == s->rank[e]) assert_int_equal(s->new_slot[e], s->slot[e]);
    assert_in_range(s->new_slot[e], 0, before[r] - 1);
    for (int32_t f = 0; f < e; ++f) assert_false(s->new_rank[f] == r && s->new_slot[f] == s->new_slot[e]);
    moves += r != s->rank[e];
    bytes += r == s->rank[e] ? 0 : s->problem.expert_bytes == NULL ? 1 : s->bytes[e];
  }
  for (int32_t r = 0; r < s->problem.num_ranks; ++r) assert_int_equal(count[r], before[r]);
  assert_int_equal(s->result.num_moves, moves);
  assert_int_equal(s->result.moved_bytes, bytes);
  assert_int_equal(s->result.load, fullest(s, s->new_rank));
  assert_int_equal(s->result.load_before, fullest(s, s->rank));
  assert_true(s->result.bound_load <= s->result.load);
}

static void plan(scene_t* s) {
  assert_int_equal(sluice_placement_plan(&s->problem, sluice_process_allocator(), &s->result), SLUICE_OK);
  expect_sound(s);
}

/* ---- the best of all ---- */

typedef struct best_s {
  const scene_t* scene;
  uint64_t limit, excess, bytes, load, least;
  int32_t places[MOST], rank[MOST];
} best_t;

static void try_all(best_t* b, int32_t e) {
  const scene_t* s = b->scene;
  if (e == s->problem.num_experts) {
    uint64_t load = fullest(s, b->rank), bytes = 0;
    for (int32_t i = 0; i < e; ++i) bytes += b->rank[i] == s->rank[i] ? 0 : s->bytes[i];
    const uint64_t excess = load > b->limit ? load : b->limit;
    b->least = load < b->least ? load : b->least;
    if (excess > b->excess || (excess == b->excess && (bytes > b->bytes || (bytes == b->bytes && load >= b->load)))) {
      return;
    }
    b->excess = excess, b->bytes = bytes, b->load = load;
    return;
  }
  for (int32_t r = 0; r < s->problem.num_ranks; ++r) {
    if (b->places[r] == 0) continue;
    --b->places[r], b->rank[e] = r;
    try_all(b, e + 1);
    ++b->places[r];
  }
}

TEST(Placement_SmallCases_AreTheBestOfAll) {
  random_t random = {7};
  const int num_cases = getenv("SLUICE_FULL") != NULL ? 3000 : 400;
  for (int i = 0; i < num_cases; ++i) {
    scene_t s;
    const int32_t ranks = 1 + random_below(&random, 4), experts = 1 + random_below(&random, 8);
    open_scene(&s, experts, ranks, 1 + 0.1 * random_below(&random, 4));
    const int32_t range = random_below(&random, 2) == 0 ? 5 : 1000; /* ties, or none */
    for (int32_t e = 0; e < experts; ++e) {
      s.loads[e] = (uint64_t)random_below(&random, range), s.bytes[e] = (uint64_t)(1 + random_below(&random, 3));
      s.rank[e] = random_below(&random, ranks); /* some ranks have none */
    }
    number_slots(&s);
    s.problem.expert_bytes = s.bytes;
    plan(&s);
    assert_int_equal(s.result.is_optimal, 1);
    best_t best = {.scene = &s, .excess = UINT64_MAX, .least = UINT64_MAX};
    best.limit = (uint64_t)floor((double)s.result.bound_load * s.problem.target);
    if (best.limit < s.result.bound_load) best.limit = s.result.bound_load;
    for (int32_t e = 0; e < experts; ++e) ++best.places[s.rank[e]];
    try_all(&best, 0);
    assert_true(s.result.bound_load <= best.least);
    assert_int_equal(s.result.moved_bytes, best.bytes);
    assert_int_equal(s.result.load, best.load);
  }
}

/* ---- many experts ---- */

static const struct {
  int32_t experts, ranks;
} shapes[] = {{16, 4}, {32, 8}, {64, 8}, {64, 16}, {128, 32}, {256, 8}, {256, 32}, {256, 64}};

TEST(Placement_DrawnWorkloads_ReachTheBound) {
  const int seeds = getenv("SLUICE_FULL") != NULL ? 50 : 5;
  double worst = 1;
  for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; ++i) {
    for (int32_t w = 0; w < NUM_WORKLOADS; ++w) {
      double worst_here = 1, worst_cold = 1;
      for (int seed = 0; seed < seeds; ++seed) {
        scene_t s;
        open_scene(&s, shapes[i].experts, shapes[i].ranks, 1.05);
        for (int32_t step = 4; step < 6; ++step) {
          workload_draw(w, (uint64_t)seed, step, shapes[i].experts, shapes[i].ranks, s.loads);
          plan(&s);
          const double ratio = (double)s.result.load / (double)s.result.bound_load;
          worst_here = ratio > worst_here ? ratio : worst_here;
          const double before = (double)s.result.load_before / (double)s.result.bound_load;
          worst_cold = before > worst_cold ? before : worst_cold;
          memcpy(s.rank, s.new_rank, sizeof s.rank), memcpy(s.slot, s.new_slot, sizeof s.slot);
        }
      }
      if (worst_here > 1.05) {
        print_message("E %d, W %d, workload W%d: %.3f of the bound, from %.3f\n", shapes[i].experts, shapes[i].ranks, w,
                      worst_here, worst_cold);
      }
      worst = worst_here > worst ? worst_here : worst;
    }
  }
  print_message("the fullest rank has at most %.3f times the bound\n", worst);
  assert_true(worst <= 1.05);
}

/* Loads that drift from epoch to epoch: moved bytes, compared with a balancer that ignores the current placement and
 * reaches the same balance. */
TEST(Placement_DriftingLoads_MoveAFifthOfABalancersBytes) {
  enum { EXPERTS = 256, RANKS = 64, EPOCHS = 20 };
  for (uint64_t seed = 0; seed < 3; ++seed) {
    scene_t s;
    open_scene(&s, EXPERTS, RANKS, 1.05);
    int32_t theirs[EXPERTS];
    random_t random = {seed};
    int64_t our_moves = 0, their_moves = 0;
    workload_draw(W1_HOT_EXPERT_SET, seed, 0, EXPERTS, RANKS, s.loads);
    memcpy(theirs, s.rank, sizeof theirs);
    for (int epoch = 0; epoch < EPOCHS; ++epoch) {
      uint64_t load = 0;
      const int32_t moves = balancer_place(s.loads, EXPERTS, RANKS, theirs, &load);
      s.problem.target = 1;
      plan(&s);
      s.problem.target = (double)load / (double)s.result.bound_load;
      plan(&s);
      assert_true(s.result.load <= load);
      if (epoch == 0) {
        print_message("cold start: %d of %d experts move, with the balancer %d\n", s.result.num_moves, EXPERTS, moves);
      } else {
        our_moves += s.result.num_moves, their_moves += moves;
      }
      memcpy(s.rank, s.new_rank, sizeof s.rank), memcpy(s.slot, s.new_slot, sizeof s.slot);
      for (int32_t e = 0; e < EXPERTS; ++e) {
        s.loads[e] = (uint64_t)((double)s.loads[e] * (0.97 + 0.06 * random_unit(&random)));
      }
    }
    print_message("epochs 1 to %d: %lld experts move, with the balancer %lld\n", EPOCHS - 1, (long long)our_moves,
                  (long long)their_moves);
    assert_true(our_moves * 5 <= their_moves);
  }
}

/* ---- time ---- */

TEST(Placement_NthAllocationFails_LeavesNothing) {
  sluice_allocator_t allocator;
  sluice_allocator_init(&allocator, NULL, NULL, NULL);
  scene_t s;
  open_scene(&s, 16, 4, 1.0);
  workload_draw(W2_HOT_RANK, 1, 0, 16, 4, s.loads);
  int n = 0;
  for (;; ++n) {
    allocator.fail_after = n;
    const sluice_status_t status = sluice_placement_plan(&s.problem, &allocator, &s.result);
    assert_int_equal(allocator.current_bytes, 0);
    if (status == SLUICE_OK) break;
    assert_int_equal(status, SLUICE_E_NO_MEMORY);
  }
  assert_true(n >= 2);
  sluice_allocator_deinit(&allocator);
}

/* ---- verdicts ---- */

/* A step of 10 s becomes one of 9 s; the move takes 50 s, and the horizon is 100 steps. */
static const sluice_planner_move_t a_good_move = {.struct_size = sizeof(sluice_planner_move_t),
                                                  .step_seconds = 10,
                                                  .planned_step_seconds = 9,
                                                  .move_seconds = 50,
                                                  .horizon_steps = 100,
                                                  .least_gain = 0.05,
                                                  .steps_since_move = -1,
                                                  .least_steps = 10};

TEST(Verdict_EachReason_IsSaid) {
  static const struct {
    double planned_step_seconds, horizon_steps;
    int64_t steps_since_move;
    int32_t verdict;
  } moves[] = {{9, 100, -1, SLUICE_MOVE_PAYS},    {10, 100, -1, SLUICE_MOVE_NO_GAIN},
               {9.6, 100, -1, SLUICE_MOVE_SMALL}, {9, 100, 9, SLUICE_MOVE_TOO_SOON},
               {9, 100, 10, SLUICE_MOVE_PAYS},    {9, 50, -1, SLUICE_MOVE_COSTS_MORE}, /* gains 50 s, costs 50 s */
               {9, 51, -1, SLUICE_MOVE_PAYS}};
  for (size_t i = 0; i < sizeof moves / sizeof moves[0]; ++i) {
    sluice_planner_move_t m = a_good_move;
    int32_t verdict = -1;
    m.planned_step_seconds = moves[i].planned_step_seconds, m.horizon_steps = moves[i].horizon_steps;
    m.steps_since_move = moves[i].steps_since_move;
    assert_int_equal(sluice_move_verdict(&m, &verdict), SLUICE_OK);
    assert_int_equal(verdict, moves[i].verdict);
  }
}

TEST(Verdict_WhatIsNoNumber_IsRefused) {
  int32_t verdict = -1;
  sluice_planner_move_t bad[4] = {a_good_move, a_good_move, a_good_move, a_good_move};
  bad[0].step_seconds = NAN, bad[1].move_seconds = -1, bad[2].least_gain = 1, bad[3].least_steps = -1;
  for (int i = 0; i < 4; ++i) assert_int_equal(sluice_move_verdict(&bad[i], &verdict), SLUICE_E_INVALID_ARGUMENT);
  assert_int_equal(verdict, -1);
}
