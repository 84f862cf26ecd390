/* Tuning during training on CUDA contexts, on fakes: times of passes come from events on the host's stream, lane times
 * of the first passes from events around ops. They travel in later headers, and all ranks make the same choices, with
 * no host waits beyond the one read of a forward and the ends of the first passes. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/device/cuda/fake/fake_cuda.h"
#include "capi/test/cuda/fakes.h"
#include "capi/test/rig/rig.h"
#include "sluice/planner.h"
#include "sluice/tuner.h"

enum { RANKS = 2, ROUNDS = 120, TEXT = 16384 };

typedef struct rank_s {
  int32_t rank;
  sluice_status_t status;
  char why[512];
  int32_t num_chunks[ROUNDS];
  fakes_waits_t forward, backward;
  sluice_tuner_stats_t tuned;
  sluice_tuner_decision_t decisions[16];
  int32_t num_decisions;
  int32_t has_machine; /* mode model was requested, by fakes_machine_json */
  char refined[TEXT];  /* the machine after its steps have refined it */
} rank_t;

static void note(rank_t* r, sluice_status_t status) {
  if (status == SLUICE_OK || r->status != SLUICE_OK) return;
  r->status = status;
  snprintf(r->why, sizeof r->why, "%s", last_message());
}

/* Before the first layer. */
static void use_machine(rank_t* r, sluice_context_t* context) {
  sluice_planner_t* planner = NULL;
  sluice_tuner_config_t config;
  sluice_tuner_config_init(&config, sizeof config);
  note(r, sluice_planner_create(fakes_machine_json, strlen(fakes_machine_json), &planner));
  config.mode = SLUICE_TUNER_MODEL, config.machine = planner;
  if (r->status == SLUICE_OK) note(r, sluice_context_tune(context, &config));
  sluice_planner_destroy(planner);
}

static void open_layer(rank_t* r, rig_t* rig, sluice_comm_t* comm, const sluice_moe_config_t* layer) {
  if (!r->has_machine) {
    note(r, rig_open(rig, comm, layer));
    return;
  }
  note(r, rig_open_context(rig, comm));
  if (r->status != SLUICE_OK) return;
  use_machine(r, rig->context);
  note(r, rig_open_layer(rig, layer));
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
  layer.grouping = SLUICE_GROUPING_OFF; /* grouped passes do not count among those that are timed here */
  sluice_comm_t* comm = NULL;
  note(r, machine->make_comm(r->rank, &config, &comm));
  if (r->status == SLUICE_OK) open_layer(r, &rig, comm, &layer);
  if (r->status == SLUICE_OK) {
    train(r, &rig);
    machine->settle(r->rank);
    r->forward = fakes_waits(r->rank, SLUICE_FORWARD), r->backward = fakes_waits(r->rank, SLUICE_BACKWARD);
    r->tuned.struct_size = sizeof r->tuned;
    note(r, sluice_context_tuner_stats(rig.context, &r->tuned));
    note(r, sluice_context_decisions(rig.context, r->decisions, 16, &r->num_decisions));
    uint64_t bytes = sizeof r->refined;
    if (r->has_machine) note(r, sluice_context_write_machine(rig.context, r->refined, &bytes));
    rig_close(&rig);
  }
  sluice_comm_destroy(comm);
  return NULL;
}

static void run(rank_t* ranks, int32_t has_machine) {
  pthread_t threads[RANKS];
  char text[200], live[200];
  fakes_open(RANKS, 1);
  for (int32_t r = 0; r < RANKS; ++r) {
    memset(&ranks[r], 0, sizeof ranks[r]);
    ranks[r].rank = r, ranks[r].has_machine = has_machine;
    pthread_create(&threads[r], NULL, rank_main, &ranks[r]);
  }
  for (int r = 0; r < RANKS; ++r) pthread_join(threads[r], NULL);
  if (sluice_fake_cuda_hazards(text, sizeof text) != 0) fail_msg("hazard: %s", text);
  if (fakes_close(live, sizeof live) != 0) fail_msg("left: %s", live);
}

static rank_t ranks[RANKS];

static void CudaTuner_AllRanksChooseTheSameByTimesOfEvents(void** state) {
  (void)state;
  run(ranks, 0);
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

/* The machine's own answer, without a race; the lane times of the device correct the machine. */
static void CudaTuner_WithAMachine_PredictsAndIsRefinedByTheLanesOfTheFirstPasses(void** state) {
  (void)state;
  run(ranks, 1);
  for (int r = 0; r < RANKS; ++r) {
    if (ranks[r].status != SLUICE_OK) fail_msg("rank %d: %s", r, ranks[r].why);
    assert_int_equal(ranks[r].num_decisions, 1);
    const sluice_tuner_decision_t* d = &ranks[r].decisions[0];
    assert_int_equal(d->num_raced, 0);
    assert_true(d->predicted_seconds > 0);
    assert_int_equal(d->num_chunks, ranks[0].decisions[0].num_chunks);
    for (int i = 2; i < ROUNDS; ++i) assert_int_equal(ranks[r].num_chunks[i], d->num_chunks);
    assert_int_equal(ranks[r].forward.reads, ROUNDS);
    assert_non_null(strstr(ranks[r].refined, "\"refined\""));
    assert_string_equal(ranks[r].refined, ranks[0].refined);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(CudaTuner_AllRanksChooseTheSameByTimesOfEvents),
      cmocka_unit_test(CudaTuner_WithAMachine_PredictsAndIsRefinedByTheLanesOfTheFirstPasses),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
