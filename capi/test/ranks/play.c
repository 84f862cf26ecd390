// SPDX-License-Identifier: Apache-2.0
#include "capi/test/ranks/play.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void note(part_t* me, int line, const char* format, ...) {
  if (me->failure[0] != '\0') return;
  int used = snprintf(me->failure, sizeof me->failure, "rank %d, line %d: ", me->rank, line);
  va_list args;
  va_start(args, format);
  vsnprintf(me->failure + used, sizeof me->failure - (size_t)used, format, args);
  va_end(args);
}

void expect_status(part_t* me, int line, const char* call, sluice_status_t got, sluice_status_t want,
                   const char* text) {
  const char* message = got == SLUICE_OK ? "" : last_message();
  if (got == want && (want == SLUICE_OK || strstr(message, text) != NULL)) return;
  note(me, line, "%s gave %s \"%s\", want %s naming \"%s\"", call, sluice_status_name(got), message,
       sluice_status_name(want), text);
}

static sluice_comm_t* make_comm(part_t* me, sluice_local_group_t* group, uint64_t timeout_ns) {
  const layer_machine_t* machine = me->play->machine;
  DEFAULTS(sluice_comm_config, config);
  config.rank = me->rank, config.world_size = me->world_size, config.timeout_ns = timeout_ns;
  sluice_comm_t* comm = NULL;
  if (machine == NULL) {
    WORKS(sluice_comm_create_local(group, &config, &comm));
  } else if (me->world_size > 1) {
    WORKS(machine->world()->make_comm(me->rank, &config, &comm));
  }
  return comm;
}

static void* part_main(void* argument) {
  part_t* me = argument;
  const layer_machine_t* machine = me->play->machine;
  if (machine != NULL) rig_use_machine(machine->world(), me->rank);
  me->comm = make_comm(me, me->play->group, me->play->timeout_ns);
  if (me->play->with_fakes) {
    sluice_comm_t* inner = me->comm;
    WORKS(sluice_fake_comm_create(inner, &me->fake));
    sluice_comm_destroy(inner);
    me->comm = me->fake;
  }
  me->play->run(me);
  if (machine != NULL) meet(me); /* other ranks may still read this rank's memory */
  if (me->rig.context != NULL) rig_close(&me->rig);
  EXPECT(atomic_load(&me->rig.heap.live_bytes) == 0);
  EXPECT(atomic_load(&me->rig.heap.live_blocks) == 0);
  sluice_comm_destroy(me->comm);
  return NULL;
}

void perform(play_t* play) {
  pthread_t threads[MAX_RANKS];
  const layer_machine_t* machine = play->machine;
  setenv("SLUICE_POISON", "1", 1); /* slots start as NaN in every pass */
  alarm(880);                      /* a hang ends the program */
  if (play->timeout_ns == 0) play->timeout_ns = machine != NULL ? 10 * PATIENT_NS : PATIENT_NS;
  if (machine != NULL) machine->open(play->world_size, 1);
  assert_int_equal(sluice_local_group_create(play->world_size, &play->group), SLUICE_OK);
  assert_int_equal(sluice_local_group_create(play->world_size, &play->second), SLUICE_OK);
  pthread_barrier_init(&play->barrier, NULL, (unsigned)play->world_size);
  for (int32_t r = 0; r < play->world_size; ++r) {
    memset(&play->parts[r], 0, sizeof play->parts[r]);
    play->parts[r].play = play, play->parts[r].rank = r, play->parts[r].world_size = play->world_size;
    assert_int_equal(pthread_create(&threads[r], NULL, part_main, &play->parts[r]), 0);
  }
  for (int32_t r = 0; r < play->world_size; ++r) pthread_join(threads[r], NULL);
  pthread_barrier_destroy(&play->barrier);
  sluice_local_group_destroy(play->group);
  sluice_local_group_destroy(play->second);
  const char* left = machine != NULL ? machine->close() : NULL;
  for (int32_t r = 0; r < play->world_size; ++r) {
    if (play->parts[r].failure[0] != '\0') fail_msg("W = %d: %s", play->world_size, play->parts[r].failure);
  }
  if (left != NULL) fail_msg("W = %d: %s", play->world_size, left); /* a rank that failed may also leak */
}

void meet(part_t* me) { pthread_barrier_wait(&me->play->barrier); }

sluice_moe_config_t config_for(int32_t world_size) {
  sluice_moe_config_t config = rig_config();
  config.num_experts = 2 * world_size;
  return config;
}

uint64_t good_round(part_t* me, int line) {
  uint64_t digest = 0;
  expect_status(me, line, "a good round", rig_round(&me->rig, &digest), SLUICE_OK, "");
  return digest;
}

void check_new_comm(part_t* me, int line) {
  sluice_moe_config_t config = me->rig.config;
  sluice_comm_abort(me->comm);
  sluice_comm_abort(me->comm);
  rig_close(&me->rig);
  EXPECT(atomic_load(&me->rig.heap.live_bytes) == 0);
  sluice_comm_destroy(me->comm);
  me->comm = make_comm(me, me->play->second, PATIENT_NS);
  expect_status(me, line, "opening on a new communicator", rig_open(&me->rig, me->comm, &config), SLUICE_OK, "");
  if (me->rig.moe != NULL) (void)good_round(me, line);
}
