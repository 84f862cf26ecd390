// SPDX-License-Identifier: Apache-2.0
/* Experts that move to other ranks during training: the program measures loads, plans a placement, and sends the state
 * of the experts that move while forward and backward run. The new placement takes effect before an update. The ranks
 * are threads.
 *
 *   examples/c/build.sh /tmp/out && /tmp/out/moving [0: nothing moves; 1: the default] */
#define _POSIX_C_SOURCE 200112L /* barriers */
#include <pthread.h>
#include <stdlib.h>

#include "moving_layer.h"

static rank_t ranks[W];
static int64_t rows[W][E]; /* rows by rank and expert: every rank makes its plan from all of them */
static pthread_barrier_t all;
static sluice_local_group_t* group;

/* Plans a placement from the loads of all ranks, and begins the move. Returns whether anything moves; -1: an error. */
static int begin(rank_t* me, sluice_moe_t* moe, sluice_migration_t* migration, uint64_t epoch) {
  uint64_t loads[E] = {0};
  sluice_placement_problem_t problem;
  sluice_placement_result_t result;
  sluice_migration_item_t items[2 * SLOTS];
  sluice_migration_span_t spans[2 * SLOTS][2];
  int n = 0;
  if (failed(me->rank, sluice_moe_get_loads(moe, rows[me->rank], NULL, NULL))) return -1;
  pthread_barrier_wait(&all);
  for (int i = 0; i < W * E; ++i) loads[i % E] += (uint64_t)rows[i / E][i % E];
  sluice_placement_problem_init(&problem, sizeof problem), sluice_placement_result_init(&result, sizeof result);
  problem.loads = loads, problem.expert_rank = me->owner, problem.expert_slot = me->slot;
  problem.num_experts = E, problem.num_ranks = W;
  result.expert_rank = me->next_owner, result.expert_slot = me->next_slot;
  if (failed(me->rank, sluice_planner_placement(&problem, &result))) return -1;
  if (me->rank == 0 && result.num_moves > 0)
    printf("epoch %d: %d experts move, fullest rank %d rows -> %d\n", (int)epoch, result.num_moves,
           (int)result.load_before, (int)result.load);
  for (int e = 0; e < E; ++e) {
    const int leaves = me->owner[e] == me->rank, arrives = me->next_owner[e] == me->rank;
    if (leaves == arrives) continue;
    expert_t* at = &me->experts[leaves ? me->slot[e] : me->next_slot[e]];
    memset(spans[n], 0, sizeof spans[n]), memset(&items[n], 0, sizeof items[n]);
    spans[n][0].data = at->up, spans[n][0].bytes = 4 * sizeof at->up; /* matrices, momenta: constant until the update */
    spans[n][1].data = at->up_grad, spans[n][1].bytes = sizeof *at - 4 * sizeof at->up; /* gradients; the count too */
    spans[n][1].when = SLUICE_MIGRATION_AT_COMMIT;
    items[n].id = (uint64_t)e, items[n].spans = spans[n], items[n].num_spans = 2;
    items[n].peer = leaves ? me->next_owner[e] : me->owner[e];
    items[n++].direction = leaves ? SLUICE_MIGRATION_LEAVES : SLUICE_MIGRATION_ARRIVES;
  }
  if (result.num_moves == 0) return 0;
  return failed(me->rank, sluice_migration_begin(migration, epoch, items, n)) ? -1 : 1;
}

static int commit(rank_t* me, sluice_moe_t* moe, sluice_migration_t* migration, uint64_t epoch) {
  sluice_expert_placement_t next;
  if (failed(me->rank, sluice_migration_commit(migration, NULL))) return 1;
  memcpy(me->owner, me->next_owner, sizeof me->owner), memcpy(me->slot, me->next_slot, sizeof me->slot);
  sluice_expert_placement_init(&next, sizeof next);
  next.expert_rank = me->owner, next.expert_slot = me->slot, next.epoch = epoch;
  return failed(me->rank, sluice_moe_replace_experts(moe, &next));
}

static int train(rank_t* me, sluice_moe_t* moe, sluice_migration_t* migration) {
  int is_moving = 0;
  uint64_t epoch = 0;
  for (int step = 0; step < STEPS; ++step) {
    if (layer_pass(me, moe, step)) return 1;
    if (is_moving && commit(me, moe, migration, epoch)) return 1;
    for (int s = 0; s < SLOTS; ++s) layer_update(&me->experts[s]);
    is_moving = me->moves && step % LOOK == LOOK - 1 ? begin(me, moe, migration, epoch + 1) : 0;
    if (is_moving < 0) return 1;
    epoch += (uint64_t)is_moving;
  }
  return 0;
}

static void* rank_main(void* argument) {
  rank_t* me = argument;
  sluice_comm_t* comm = NULL;
  sluice_context_t* context = NULL;
  sluice_moe_t* moe = NULL;
  sluice_migration_t* migration = NULL;
  sluice_comm_config_t comm_config;
  sluice_context_config_t context_config;
  sluice_moe_config_t config;
  sluice_migration_config_t moving;
  sluice_comm_config_init(&comm_config, sizeof comm_config), sluice_moe_config_init(&config, sizeof config);
  sluice_context_config_init(&context_config, sizeof context_config);
  sluice_migration_config_init(&moving, sizeof moving);
  comm_config.rank = me->rank, comm_config.world_size = W;
  context_config.gemm = "native"; /* with chunks of tokens, results have the same bits for any placement */
  config.model_width = M, config.hidden_width = H, config.num_experts = E, config.top_k = 1;
  config.num_chunks = 2, config.chunking = SLUICE_CHUNKING_TOKENS;
  moving.bytes_per_second = 50 * 1000 * 1000, moving.staging_bytes = SLOTS * sizeof(expert_t);
  me->bad = failed(me->rank, sluice_comm_create_local(group, &comm_config, &comm)) ||
            failed(me->rank, sluice_context_create(&context_config, comm, &context)) ||
            failed(me->rank, sluice_moe_create(context, &config, &moe)) ||
            failed(me->rank, sluice_migration_create(comm, &moving, &migration));
  layer_fill(me);
  me->bad = me->bad || train(me, moe, migration);
  sluice_migration_destroy(migration), sluice_moe_destroy(moe), sluice_context_destroy(context);
  sluice_comm_destroy(comm);
  return NULL;
}

int main(int argc, char** argv) {
  pthread_t threads[W];
  int bad = 0;
  if (sluice_local_group_create(W, &group) != SLUICE_OK || pthread_barrier_init(&all, NULL, W) != 0) return 2;
  for (int r = 0; r < W; ++r) {
    ranks[r].rank = r, ranks[r].moves = argc > 1 ? atoi(argv[1]) : 1;
    if (pthread_create(&threads[r], NULL, rank_main, &ranks[r]) != 0) return 2;
  }
  for (int r = 0; r < W; ++r) pthread_join(threads[r], NULL), bad |= ranks[r].bad;
  sluice_local_group_destroy(group);
  for (int step = 0; step < STEPS && !bad; ++step) {
    double loss = 0;
    for (int r = 0; r < W; ++r) loss += ranks[r].losses[step];
    if (step % 5 == 0 || step == STEPS - 1) printf("step %2d loss %.15g\n", step, loss);
  }
  return bad;
}
