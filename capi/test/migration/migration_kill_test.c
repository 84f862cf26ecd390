// SPDX-License-Identifier: Apache-2.0
/* Migration over TCP between processes, one of which is killed or stopped at any message that it sends or waits for.
 * The survivors learn which rank is lost and in which phase, settle on one epoch, and their states are all old or all
 * new. */
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/base/test/refused.h"
#include "backend/comm/messages.h"
#include "capi/test/migration/mesh.h"
#include "capi/test/migration/migration_world.h"

#define SECOND_NS  UINT64_C(1000000000)
#define BOUNDED_NS (20 * SECOND_NS)

enum { FIRST_CUT = 120, FULL = 200, EVERY_DAY = 14, DEADLINE_S = 5, AT_SEND = 0, AT_WAIT = 1 };

/* ---- cuts ---- */

static uint32_t seed_of(int32_t cut) { return (uint32_t)(((uint64_t)cut + FIRST_CUT) * 0x9e3779b97f4a7c15u >> 44); }

typedef struct cut_s {
  int32_t world, victim, where, signal;
  int32_t place, is_late; /* message of the move at which the cut is; late: counted from the end, when ranks agree */
  uint32_t plan;
  uint64_t rate;
} cut_t;

static cut_t cut_of(uint32_t seed) {
  cut_t cut = {.world = 2 + (int32_t)(seed % 3)};
  cut.victim = (int32_t)(seed / 3 % (uint32_t)cut.world);
  cut.where = (int32_t)(seed / 16 % 2);
  cut.is_late = (int32_t)(seed / 32 % 2);
  cut.place = (int32_t)(seed / 64 % 64);
  cut.signal = seed / 4096 % 8 == 0 ? SIGSTOP : SIGKILL;
  cut.rate = seed / 32768 % 2 ? 60000000 : 0;
  cut.plan = seed / 65536;
  return cut;
}

/* ---- the call of the library at which the victim is cut ---- */

static cut_t present;
static _Atomic int32_t counted[2]; /* calls so far, by AT_SEND, AT_WAIT */
static int32_t last_one;           /* the victim is cut at this call; 0: it survives */
static _Atomic uint64_t* gone_ns;

static void count(int32_t where) {
  const int32_t now = atomic_fetch_add(&counted[where], 1) + 1;
  if (where != present.where || now != last_one) return;
  atomic_store(gone_ns, sluice_now_ns());
  raise(present.signal);
}

/* Chooses the call. An earlier move of as many experts, without a cut, has counted the calls. */
static void arm(void) {
  const int32_t all = atomic_load(&counted[present.where]), few = 3 * (present.world - 1);
  const int32_t from_end = present.place % (few < all ? few : all);
  last_one = present.is_late ? all - from_end : 1 + present.place % all;
  atomic_store(&counted[present.where], 0);
}

sluice_status_t __real_sluice_messages_send(sluice_messages_t* messages, const sluice_message_t* message, uint64_t user,
                                            sluice_message_request_t* out_request);
sluice_status_t __wrap_sluice_messages_send(sluice_messages_t* messages, const sluice_message_t* message, uint64_t user,
                                            sluice_message_request_t* out_request);
sluice_status_t __real_sluice_messages_wait(sluice_messages_t* messages, const char* phase,
                                            sluice_message_completion_t* out_completion);
sluice_status_t __wrap_sluice_messages_wait(sluice_messages_t* messages, const char* phase,
                                            sluice_message_completion_t* out_completion);

sluice_status_t __wrap_sluice_messages_send(sluice_messages_t* messages, const sluice_message_t* message, uint64_t user,
                                            sluice_message_request_t* out_request) {
  count(AT_SEND);
  return __real_sluice_messages_send(messages, message, user, out_request);
}

sluice_status_t __wrap_sluice_messages_wait(sluice_messages_t* messages, const char* phase,
                                            sluice_message_completion_t* out_completion) {
  count(AT_WAIT);
  return __real_sluice_messages_wait(messages, phase, out_completion);
}

/* ---- a rank ---- */

/* A rank's report to the parent process. */
typedef struct told_s {
  int32_t status, peer, phase, settled, is_whole;
  uint64_t epoch, took_ns;
  char message[400];
} told_t;

typedef struct note_s {
  _Atomic uint64_t gone_ns;
  _Atomic int32_t has_ended; /* the victim's move ended before the chosen call */
  told_t told[TOY_MAX_RANKS];
} note_t;

/* One step with a move in it. */
static sluice_status_t step(toy_rank_t* toy, sluice_migration_t* migration, uint64_t epoch, toy_placement_t* out_next,
                            int32_t number) {
  sluice_migration_item_t items[2 * TOY_SLOTS];
  sluice_migration_span_t spans[2 * TOY_SLOTS][TOY_NUM_PARTS + 1];
  toy_plan(toy, present.plan, out_next);
  const int32_t num_items = toy_items(toy, out_next, items, spans);
  const sluice_status_t status = sluice_migration_begin(migration, epoch, items, num_items);
  if (status != SLUICE_OK) return status;
  toy_backward(toy, number);
  return sluice_migration_commit(migration, NULL);
}

static void tell(told_t* told, sluice_status_t status, sluice_migration_t* migration) {
  sluice_migration_progress_t progress = {.struct_size = sizeof progress};
  told->status = status;
  told->peer = last_error()->peer;
  (void)snprintf(told->message, sizeof told->message, "%.399s", status == SLUICE_OK ? "" : last_message());
  if (sluice_migration_get_progress(migration, &progress) == SLUICE_OK) told->phase = progress.phase;
}

static void be_cut(mesh_end_t* end, toy_rank_t* toy, sluice_migration_t* migration, note_t* note) {
  told_t* told = &note->told[end->rank];
  const int is_victim = end->rank == present.victim;
  toy_placement_t next;
  if (is_victim) arm();
  const sluice_status_t status = step(toy, migration, 2, &next, 1);
  if (is_victim) { /* this move needed fewer calls */
    atomic_store(&note->has_ended, 1);
    atomic_store(&note->gone_ns, sluice_now_ns());
    raise(SIGKILL);
  }
  told->took_ns = sluice_now_ns();
  tell(told, status, migration);
  /* The survivors settle, whatever they know about the move. */
  mesh_end_t left;
  sluice_comm_t* comm = NULL;
  mesh_leave_out(end, present.victim, &left);
  if (left.world > 1 && mesh_comm(&left, BOUNDED_NS, &comm) != SLUICE_OK) _exit(5);
  told->settled = sluice_migration_settle(migration, comm, &told->epoch);
  if (told->epoch == 2) toy->placement = next;
  toy_backward(toy, 1); /* repeats the interrupted step on the current owners of the experts */
  toy_update(toy);
  told->is_whole = toy_is_right(toy, 2);
  sluice_comm_destroy(comm);
}

static int be_rank(mesh_end_t* end, void* shared) {
  note_t* note = shared;
  static toy_rank_t toy;
  toy_placement_t next;
  sluice_comm_t *parent = NULL, *comm = NULL;
  sluice_migration_t* migration = NULL;
  DEFAULTS(sluice_migration_config, config);
  config.chunk_bytes = 4096;
  config.bytes_per_second = present.rate;
  toy_init(&toy, end->rank, end->world);
  gone_ns = &note->gone_ns;
  const uint64_t timeout_ns = present.signal == SIGSTOP ? DEADLINE_S * SECOND_NS : 10 * BOUNDED_NS;
  if (mesh_comm(end, timeout_ns, &parent) != SLUICE_OK) return 1;
  if (sluice_comm_create_tcp(parent, NULL, &comm) != SLUICE_OK) return 2;
  if (sluice_migration_create(comm, &config, &migration) != SLUICE_OK) return 3;
  if (step(&toy, migration, 1, &next, 0) != SLUICE_OK) return 4;
  toy.placement = next;
  toy_update(&toy);
  if (!mesh_meet(end)) return 6;
  be_cut(end, &toy, migration, note);
  sluice_migration_destroy(migration);
  sluice_comm_destroy(comm);
  sluice_comm_destroy(parent);
  return 0;
}

/* ---- a cut ---- */

static void check(const note_t* note, int32_t world, int32_t* phases) {
  uint64_t epoch = 0;
  for (int32_t r = 0; r < world; ++r) {
    const told_t* told = &note->told[r];
    if (r == present.victim) continue;
    const uint64_t gone = atomic_load(&note->gone_ns);
    assert_int_equal(told->settled, SLUICE_OK);
    assert_true(told->is_whole);
    if (epoch == 0) epoch = told->epoch;
    assert_true(told->epoch == epoch && (epoch == 1 || epoch == 2));
    ++phases[told->phase];
    if (told->status == SLUICE_OK) continue;
    assert_false(atomic_load(&note->has_ended));
    assert_true(told->status == SLUICE_E_PEER_LOST || told->status == SLUICE_E_TIMED_OUT);
    if (told->peer != present.victim || strstr(told->message, "phase ") == NULL)
      fail_msg("rank %d of %d, victim %d: peer %d: %s", r, world, present.victim, told->peer, told->message);
    assert_true(told->took_ns < gone || told->took_ns - gone < BOUNDED_NS);
  }
}

static void try_seed(uint32_t seed, int32_t* phases) {
  present = cut_of(seed);
  note_t* note = mesh_share(sizeof *note);
  if (!mesh_run(present.world, present.victim, be_rank, note)) fail_msg("seed %u", seed);
  check(note, present.world, phases);
  mesh_unshare(note, sizeof *note);
}

TEST(Ranks_CutAtAnyMessage_LeaveOneEpochAndWholeStates) {
  int32_t phases[SLUICE_MIGRATION_ABORTED + 1] = {0};
  const int is_full = getenv("SLUICE_FULL") != NULL;
  for (int32_t i = 0; i < (is_full ? FULL : EVERY_DAY); ++i) try_seed(seed_of(i), phases);
  print_message("survivors: %d committed, %d aborted, %d undecided\n", phases[SLUICE_MIGRATION_COMMITTED],
                phases[SLUICE_MIGRATION_ABORTED], phases[SLUICE_MIGRATION_UNDECIDED]);
  /* The seeds cover all three phases, also in the daily run. */
  assert_true(phases[SLUICE_MIGRATION_COMMITTED] > 0 && phases[SLUICE_MIGRATION_ABORTED] > 0 &&
              phases[SLUICE_MIGRATION_UNDECIDED] > 0);
}
