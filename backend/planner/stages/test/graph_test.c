// SPDX-License-Identifier: Apache-2.0
/* Partitions of graphs that are not chains. More of them with SLUICE_FULL set. */
#include <stdint.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/planner/stages/partition.h"
#include "backend/planner/stages/plan_stages.h"
#include "backend/planner/stages/test/reference.h"
#include "third_party/bazel/test.h"

static int32_t times(int32_t daily, int32_t full) { return getenv("SLUICE_FULL") != NULL ? full : daily; }

static sluice_status_t plan_by(random_problem_t* r, int32_t method) {
  r->problem.method = method;
  return sluice_stages_plan(&r->problem, sluice_process_allocator(), &r->plan);
}

static int leads_forward(const sluice_stages_problem_t* p, const int32_t* stage_of) {
  for (int32_t e = 0; e < p->num_edges; ++e) {
    if (stage_of[p->edges[e].from] > stage_of[p->edges[e].to]) return 0;
  }
  return 1;
}

static int fills_all(const sluice_stages_problem_t* p, const int32_t* stage_of) {
  for (int32_t s = 0, i; s < p->num_stages; ++s) {
    for (i = 0; i < p->num_layers && stage_of[i] != s; ++i) {
    }
    if (i == p->num_layers) return 0;
  }
  return 1;
}

static void check_plan(const random_problem_t* r, sluice_status_t status) {
  int32_t* stage_of = calloc((size_t)r->problem.num_layers, sizeof *stage_of);
  for (int32_t i = 0; i < r->problem.num_layers; ++i) stage_of[i] = r->plan.choices[i].stage;
  assert_true(leads_forward(&r->problem, stage_of) && fills_all(&r->problem, stage_of));
  int all_fit = 1;
  for (int32_t s = 0; s < r->problem.num_stages; ++s) {
    const sluice_stages_stage_t* stage = &r->plan.stages[s];
    all_fit &= stage->budget_bytes == 0 || stage->bytes <= stage->budget_bytes;
    assert_true(stage->seconds <= r->plan.slowest_seconds);
  }
  assert_int_equal(status, all_fit ? SLUICE_OK : SLUICE_E_OVER_BUDGET);
  free(stage_of);
}

TEST(Plans_OfAnyGraph_FollowEdgesFillStagesAndKeepBudgets) {
  random_t random = {21};
  for (int32_t c = 0; c < times(60, 600); ++c) {
    const int32_t stages = 1 + random_index(&random, 6), layers = stages + random_index(&random, 50);
    random_problem_t r = c % 2 == 0 ? random_graph(&random, layers, stages) : random_nests(&random, layers, stages);
    const sluice_status_t status = plan_by(&r, SLUICE_STAGES_AUTO);
    check_plan(&r, status);
    for (int32_t method = SLUICE_STAGES_HEURISTIC; method <= SLUICE_STAGES_UNCOARSENED; ++method) {
      check_plan(&r, plan_by(&r, method));
    }
    random_problem_free(&r);
  }
}

/* ---- small graphs: all partitions ---- */

/* The best of all partitions, each with the best options of its stages, which local_test checks. */
static sluice_partition_score_t best_of_all(sluice_partition_t* part) {
  const sluice_stages_problem_t* p = part->tables->problem;
  sluice_partition_score_t best = {INFINITY, INFINITY, INFINITY};
  memset(part->stage_of, 0, (size_t)p->num_layers * sizeof *part->stage_of);
  for (;;) {
    if (leads_forward(p, part->stage_of) && fills_all(p, part->stage_of)) {
      sluice_partition_settle(part);
      const sluice_partition_score_t score = sluice_partition_score(part->judged, p->num_stages);
      if (sluice_partition_is_better(&score, &best)) best = score;
    }
    int32_t i = 0;
    while (i < p->num_layers && ++part->stage_of[i] == p->num_stages) part->stage_of[i++] = 0;
    if (i == p->num_layers) return best;
  }
}

TEST(Plans_OfSmallGraphs_AreNearTheBestOfAllPartitions) {
  random_t random = {22};
  double sum = 0, worst = 0;
  int32_t count = 0, num_missed = 0;
  for (int32_t c = 0; c < times(60, 400); ++c) {
    const int32_t stages = 2 + random_index(&random, 2);
    random_problem_t r = random_graph(&random, stages + random_index(&random, 8 - stages), stages);
    sluice_stages_tables_t tables;
    sluice_partition_t part;
    assert_int_equal(sluice_stages_tables_make(&r.problem, sluice_process_allocator(), &tables), SLUICE_OK);
    assert_int_equal(sluice_partition_make(&tables, UINT64_MAX, &part), SLUICE_OK);
    const sluice_partition_score_t best = best_of_all(&part);
    const sluice_status_t status = plan_by(&r, SLUICE_STAGES_AUTO);
    if (best.short_bytes == 0 && status == SLUICE_OK) {
      const double excess = r.plan.slowest_seconds / best.slowest - 1;
      assert_true(excess > -1e-9);
      sum += excess, worst = fmax(worst, excess), ++count;
    }
    num_missed += best.short_bytes == 0 && status != SLUICE_OK;
    assert_true(best.short_bytes == 0 || status == SLUICE_E_OVER_BUDGET);
    sluice_partition_deinit(&part);
    sluice_stages_tables_deinit(&tables);
    random_problem_free(&r);
  }
  printf("graphs of at most 8 layers over the best, %d: mean %.4f, worst %.4f; no plan found for %d\n", count,
         sum / count, worst, num_missed);
  assert_true(sum / count <= 0.02 && num_missed * 50 <= count);
}

/* ---- coarsening ---- */

/* By Kernighan and Lin and refinement only, without the other starts of a plan. */
static sluice_partition_score_t score_of_nodes(sluice_partition_t* part, const int32_t* first, int32_t count) {
  const sluice_stages_tables_t* t = part->tables;
  double* seconds = calloc((size_t)t->num_layers, sizeof *seconds);
  for (int32_t i = 0; i < t->num_layers; ++i) seconds[i] = sluice_stages_run_fastest(t, i, i + 1);
  assert_int_equal(sluice_stages_kernighan_lin(t, first, count, seconds, part->stage_of), SLUICE_OK);
  assert_true(leads_forward(t->problem, part->stage_of) && fills_all(t->problem, part->stage_of));
  sluice_partition_settle(part);
  assert_int_equal(sluice_partition_refine(part), SLUICE_OK);
  free(seconds);
  return sluice_partition_score(part->judged, t->num_stages);
}

TEST(Coarsened_ThousandLayers_AreNearTheUncoarsened) {
  random_t random = {25};
  static int32_t coarse[1001], fine[1001], scratch[1001];
  for (int32_t c = 0; c < times(3, 20); ++c) {
    random_problem_t r = random_nests(&random, 1000, 8);
    sluice_stages_tables_t tables;
    sluice_partition_t part;
    assert_int_equal(sluice_stages_tables_make(&r.problem, sluice_process_allocator(), &tables), SLUICE_OK);
    assert_int_equal(sluice_partition_make(&tables, 100, &part), SLUICE_OK);
    const int32_t count = sluice_stages_coarsen(&tables, coarse, scratch);
    const sluice_partition_score_t a = score_of_nodes(&part, coarse, count);
    const sluice_partition_score_t b = score_of_nodes(&part, fine, sluice_stages_leave_fine(&tables, fine));
    printf("%d nodes for 1000 layers: %.4f of the uncoarsened slowest stage\n", count, a.slowest / b.slowest);
    assert_true(a.short_bytes > 0 || b.short_bytes > 0 || a.slowest <= 1.05 * b.slowest);
    assert_true(a.short_bytes == 0 || b.short_bytes > 0);
    sluice_partition_deinit(&part);
    sluice_stages_tables_deinit(&tables);
    random_problem_free(&r);
  }
}

/* ---- partitions that no cut of the order has ---- */

/* Two branches whose layers alternate and that join at the end. Any cut of the order sends two tensors over a link so
 * slow that messages dominate; one branch per stage sends one. */
TEST(KernighanLin_OfTwoBranchesInTurns_BeatsTheBestCutOfTheOrder) {
  enum { N = 17 };
  const sluice_stages_option_t option = {.forward_seconds = 1, .backward_seconds = 2};
  sluice_stages_layer_t layers[N];
  sluice_stages_edge_t edges[N];
  int32_t num_edges = 0;
  for (int32_t i = 0; i < N; ++i) layers[i] = (sluice_stages_layer_t){&option, 0, 0, 100, 1, 0};
  for (int32_t i = 0; i + 2 < N - 1; ++i) edges[num_edges++] = (sluice_stages_edge_t){i, i + 2};
  for (int32_t i = N - 3; i < N - 1; ++i) edges[num_edges++] = (sluice_stages_edge_t){i, N - 1};
  const sluice_stages_link_t link = {.bytes_per_second = 4, .full_duplex = 1};
  sluice_stages_problem_t problem = {.layers = layers, .edges = edges, .links = &link, .num_layers = N};
  problem.num_edges = num_edges, problem.num_stages = 2, problem.num_micro_batches = 4;
  sluice_stages_tables_t tables;
  sluice_partition_t part;
  int32_t first[N + 1], exists, is_optimal;
  assert_int_equal(sluice_stages_tables_make(&problem, sluice_process_allocator(), &tables), SLUICE_OK);
  assert_int_equal(sluice_partition_make(&tables, 100, &part), SLUICE_OK);
  assert_int_equal(sluice_cut_order_fastest(&part, &exists, &is_optimal), SLUICE_OK);
  assert_true(exists && sluice_partition_score(part.judged, 2).slowest == 48); /* all but one layer on one stage */
  const sluice_partition_score_t score = score_of_nodes(&part, first, sluice_stages_leave_fine(&tables, first));
  assert_true(score.slowest == 27); /* nine layers on one stage, eight on the other, and 25 s of messages */
  sluice_partition_deinit(&part);
  sluice_stages_tables_deinit(&tables);
}
