// SPDX-License-Identifier: Apache-2.0
/* Tuning during training on CUDA contexts, on fakes. Events on the host's stream time passes, and events around ops
 * time the lanes of the first passes. Later headers carry the times, so that all ranks make the same choices. The host
 * waits only for the one read of a forward and for the ends of the first passes. */

#include "capi/test/cuda/fakes.h"
#include "capi/test/ranks/play.h"
#include "sluice/planner.h"
#include "sluice/tuner.h"
#include "third_party/bazel/test.h"

enum { RANKS = 2, ROUNDS = 120, TEXT = 16384 };

typedef struct found_s {
  int32_t num_chunks[ROUNDS];
  fakes_waits_t forward, backward;
  sluice_tuner_stats_t tuned;
  sluice_tuner_decision_t decisions[16];
  int32_t num_decisions;
  char refined[TEXT]; /* the machine that a context was given, refined by its steps */
} found_t;

static found_t found[RANKS];

static sluice_moe_config_t layer_config(void) {
  sluice_moe_config_t layer = rig_config();
  layer.num_chunks = 0, layer.wgrad_mode = SLUICE_WGRAD_ADAPTIVE;
  layer.grouping = SLUICE_GROUPING_OFF; /* this test counts timed passes, and grouped passes are not timed */
  return layer;
}

static void rounds(part_t* me) {
  const world_machine_t* machine = fakes_machine();
  found_t* f = &found[me->rank];
  for (int i = 0; i < ROUNDS && me->failure[0] == '\0'; ++i) {
    sluice_step_t* step = NULL;
    rig_reset(&me->rig);
    machine->note(me->rank, SLUICE_FORWARD, 0);
    WORKS(rig_forward(&me->rig, &step));
    machine->note(me->rank, SLUICE_FORWARD, 1);
    machine->note(me->rank, SLUICE_BACKWARD, 0);
    WORKS(rig_backward(&me->rig, step));
    machine->note(me->rank, SLUICE_BACKWARD, 1);
    sluice_step_drop(step);
    sluice_context_stats_t stats = {.struct_size = sizeof stats};
    WORKS(sluice_context_get_stats(me->rig.context, 0, &stats));
    f->num_chunks[i] = stats.last_num_chunks;
  }
  machine->settle(me->rank);
  f->forward = fakes_waits(me->rank, SLUICE_FORWARD), f->backward = fakes_waits(me->rank, SLUICE_BACKWARD);
  f->tuned.struct_size = sizeof f->tuned;
  WORKS(sluice_context_tuner_stats(me->rig.context, &f->tuned));
  WORKS(sluice_context_decisions(me->rig.context, f->decisions, 16, &f->num_decisions));
}

static void train(part_t* me) {
  const sluice_moe_config_t layer = layer_config();
  WORKS(rig_open(&me->rig, me->comm, &layer));
  rounds(me);
}

static void train_with_a_machine(part_t* me) {
  const sluice_moe_config_t layer = layer_config();
  sluice_planner_t* planner = NULL;
  DEFAULTS(sluice_tuner_config, config);
  WORKS(rig_open_context(&me->rig, me->comm));
  WORKS(sluice_planner_create(fakes_machine_json, strlen(fakes_machine_json), &planner));
  config.mode = SLUICE_TUNER_MODEL, config.machine = planner;
  WORKS(sluice_context_tune(me->rig.context, &config));
  sluice_planner_destroy(planner);
  WORKS(rig_open_layer(&me->rig, &layer));
  rounds(me);
  uint64_t bytes = sizeof found->refined;
  WORKS(sluice_context_write_machine(me->rig.context, found[me->rank].refined, &bytes));
}

static void run(void (*body)(part_t*)) {
  memset(found, 0, sizeof found);
  perform(&(play_t){.run = body, .world_size = RANKS, .machine = fakes_layer_machine(0)});
}

TEST(CudaTuner_AllRanksChooseTheSameByTimesOfEvents) {
  /* Times are real. On a loaded machine those of the first passes may rule out all candidates but one. */
  found[0].tuned.num_switches = 0;
  for (int tries = 0; tries < 4 && found[0].tuned.num_switches == 0; ++tries) run(train);
  int32_t least = found[0].num_chunks[0], most = least;
  for (int r = 0; r < RANKS; ++r) {
    assert_memory_equal(found[r].num_chunks, found[0].num_chunks, sizeof found->num_chunks);
    assert_int_equal(found[r].forward.reads, ROUNDS); /* the counts, and no reads for the tuner */
    assert_int_equal(found[r].backward.reads, 0);
    assert_true(found[r].tuned.timed_passes > 20);
    assert_true(found[r].tuned.num_switches > 0 && found[r].tuned.total_seconds > 0);
    assert_int_equal(found[r].num_decisions, found[0].num_decisions);
    assert_true(found[r].num_decisions > 0);
    for (int i = 0; i < found[r].num_decisions && i < 16; ++i) {
      assert_int_equal(found[r].decisions[i].num_chunks, found[0].decisions[i].num_chunks);
      assert_int_equal(found[r].decisions[i].rows, found[0].decisions[i].rows);
    }
  }
  for (int i = 0; i < ROUNDS; ++i) {
    if (found[0].num_chunks[i] < least) least = found[0].num_chunks[i];
    if (found[0].num_chunks[i] > most) most = found[0].num_chunks[i];
  }
  assert_true(most > least); /* candidates ran as ordinary steps */
  printf("%lld timed passes, %lld decisions, n from %d to %d, chosen %d\n", (long long)found[0].tuned.timed_passes,
         (long long)found[0].tuned.num_decisions, least, most, found[0].decisions[0].num_chunks);
}

/* The tuner takes the machine's prediction without a race, and the device's lane times refine the machine. */
TEST(CudaTuner_WithAMachine_PredictsAndIsRefinedByTheLanesOfTheFirstPasses) {
  run(train_with_a_machine);
  for (int r = 0; r < RANKS; ++r) {
    assert_int_equal(found[r].num_decisions, 1);
    const sluice_tuner_decision_t* d = &found[r].decisions[0];
    assert_int_equal(d->num_raced, 0);
    assert_true(d->predicted_seconds > 0);
    assert_int_equal(d->num_chunks, found[0].decisions[0].num_chunks);
    for (int i = 2; i < ROUNDS; ++i) assert_int_equal(found[r].num_chunks[i], d->num_chunks);
    assert_int_equal(found[r].forward.reads, ROUNDS);
    assert_non_null(strstr(found[r].refined, "\"refined\""));
    assert_string_equal(found[r].refined, found[0].refined);
  }
}
