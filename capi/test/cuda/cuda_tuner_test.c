/* Choosing while training on CUDA contexts, on fakes: times of passes come from events on the host's stream, travel in
 * later headers, and all ranks choose alike, with no host wait beyond the one read of a forward. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/cuda/fakes.h"
#include "capi/test/rig.h"
#include "sluice/tuner.h"

enum { RANKS = 2, ROUNDS = 120 };

typedef struct rank_s {
  int32_t rank;
  sluice_status_t status;
  char why[512];
  int32_t num_chunks[ROUNDS];
  fakes_waits_t forward, backward;
  sluice_tuner_stats_t tuned;
  sluice_tuner_decision_t decisions[16];
  int32_t num_decisions;
} rank_t;

static void note(rank_t* r, sluice_status_t status) {
  if (status == SLUICE_OK || r->status != SLUICE_OK) return;
  r->status = status;
  snprintf(r->why, sizeof r->why, "%s", last_message());
}

static void train(rank_t* r, rig_t* rig) {
  const world_machine_t* machine = fakes_machine();
  for (int i = 0; i < ROUNDS && r->status == SLUICE_OK; ++i) {
    sluice_step_t* step = NULL;
    rig_reset(rig);
    machine->note(r->rank, SLUICE_FORWARD, 0);
    note(r, rig_forward(rig, &step));
    machine->note(r->rank, SLUICE_FORWARD, 1);
    machine->note(r->rank, SLUICE_BACKWARD, 0);
    if (r->status == SLUICE_OK) note(r, rig_backward(rig, step));
    machine->note(r->rank, SLUICE_BACKWARD, 1);
    sluice_step_drop(step);
    sluice_context_stats_t stats = {.struct_size = sizeof stats};
    note(r, sluice_context_get_stats(rig->context, 0, &stats));
    r->num_chunks[i] = stats.last_num_chunks;
  }
}

static void* rank_main(void* argument) {
  rank_t* r = argument;
  const world_machine_t* machine = fakes_machine();
  sluice_comm_config_t config;
  sluice_comm_config_init(&config, sizeof config);
  config.rank = r->rank, config.world_size = RANKS, config.timeout_ns = 60000000000u;
  rig_use_machine(machine, r->rank);
  rig_t rig;
  sluice_moe_config_t layer = rig_config();
  layer.num_chunks = 0, layer.wgrad_mode = SLUICE_WGRAD_ADAPTIVE;
  sluice_comm_t* comm = NULL;
  note(r, machine->make_comm(r->rank, &config, &comm));
  if (r->status == SLUICE_OK) note(r, rig_open(&rig, comm, &layer));
  if (r->status == SLUICE_OK) {
    train(r, &rig);
    machine->settle(r->rank);
    r->forward = fakes_waits(r->rank, SLUICE_FORWARD), r->backward = fakes_waits(r->rank, SLUICE_BACKWARD);
    r->tuned.struct_size = sizeof r->tuned;
    note(r, sluice_context_tuner_stats(rig.context, &r->tuned));
    note(r, sluice_context_decisions(rig.context, r->decisions, 16, &r->num_decisions));
    rig_close(&rig);
  }
  sluice_comm_destroy(comm);
  return NULL;
}

static void CudaTuner_ChoosesAlikeOnAllRanksByTimesOfEvents(void** state) {
  (void)state;
  static rank_t ranks[RANKS];
  pthread_t threads[RANKS];
  char text[200], live[200];
  fakes_open(RANKS, 1);
  for (int32_t r = 0; r < RANKS; ++r) {
    ranks[r] = (rank_t){.rank = r};
    pthread_create(&threads[r], NULL, rank_main, &ranks[r]);
  }
  for (int r = 0; r < RANKS; ++r) pthread_join(threads[r], NULL);
  if (sluice_fake_cuda_hazards(text, sizeof text) != 0) fail_msg("hazard: %s", text);
  if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
  int32_t least = ranks[0].num_chunks[0], most = least;
  for (int r = 0; r < RANKS; ++r) {
    if (ranks[r].status != SLUICE_OK) fail_msg("rank %d: %s", r, ranks[r].why);
    assert_memory_equal(ranks[r].num_chunks, ranks[0].num_chunks, sizeof ranks[0].num_chunks);
    assert_int_equal(ranks[r].forward.reads, ROUNDS); /* the counts, and nothing for the tuner */
    assert_int_equal(ranks[r].backward.reads, 0);
    assert_true(ranks[r].tuned.timed_passes > 20);
    assert_true(ranks[r].tuned.num_switches > 0 && ranks[r].tuned.total_seconds > 0);
    assert_int_equal(ranks[r].num_decisions, ranks[0].num_decisions);
    assert_true(ranks[r].num_decisions > 0);
    for (int i = 0; i < ranks[r].num_decisions && i < 16; ++i) {
      assert_int_equal(ranks[r].decisions[i].num_chunks, ranks[0].decisions[i].num_chunks);
      assert_int_equal(ranks[r].decisions[i].rows, ranks[0].decisions[i].rows);
    }
  }
  for (int i = 0; i < ROUNDS; ++i) {
    if (ranks[0].num_chunks[i] < least) least = ranks[0].num_chunks[i];
    if (ranks[0].num_chunks[i] > most) most = ranks[0].num_chunks[i];
  }
  assert_true(most > least); /* candidates were tried as ordinary steps */
  printf("%lld timed passes, %lld decisions, n from %d to %d, chosen %d\n", (long long)ranks[0].tuned.timed_passes,
         (long long)ranks[0].tuned.num_decisions, least, most, ranks[0].decisions[0].num_chunks);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(CudaTuner_ChoosesAlikeOnAllRanksByTimesOfEvents)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
