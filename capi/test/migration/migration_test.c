// SPDX-License-Identifier: Apache-2.0
/* Experts that swap places while a toy host trains: parameters have the bits of a run without moves; errors leave
 * everything unchanged; staged bytes are bounded. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/base/test/refused.h"
#include "capi/test/migration/migration_world.h"

enum { STEPS = 24 };

struct run_s;
typedef void (*body_fn)(struct run_s* run, toy_rank_t* toy, sluice_migration_t* migration);

typedef struct run_s {
  int32_t world;
  int32_t is_tcp;
  uint64_t rate, staging_bytes;
  body_fn body;
  sluice_local_group_t* group;
  int32_t bad[TOY_MAX_RANKS]; /* the line of a failed check, by rank */
} run_t;

static void note(run_t* run, int32_t rank, int32_t line) {
  if (run->bad[rank] == 0) print_message("rank %d, line %d; its last failure: %s\n", rank, line, last_message());
  if (run->bad[rank] == 0) run->bad[rank] = line;
}

#define EXPECT(condition)                             \
  do {                                                \
    if (!(condition)) note(run, toy->rank, __LINE__); \
  } while (0)

typedef struct thread_s {
  run_t* run;
  int32_t rank;
  pthread_t id;
} thread_t;

static void* be_rank(void* data) {
  thread_t* me = data;
  run_t* run = me->run;
  toy_rank_t* toy = malloc(sizeof *toy);
  sluice_comm_t *local = NULL, *tcp = NULL;
  sluice_migration_t* migration = NULL;
  DEFAULTS(sluice_comm_config, config);
  DEFAULTS(sluice_migration_config, c);
  toy_init(toy, me->rank, run->world);
  config.rank = me->rank;
  config.world_size = run->world;
  c.bytes_per_second = run->rate;
  c.staging_bytes = run->staging_bytes;
  c.chunk_bytes = 4096;
  EXPECT(sluice_comm_create_local(run->group, &config, &local) == SLUICE_OK);
  if (run->is_tcp) EXPECT(sluice_comm_create_tcp(local, NULL, &tcp) == SLUICE_OK);
  EXPECT(sluice_migration_create(run->is_tcp ? tcp : local, &c, &migration) == SLUICE_OK);
  if (run->bad[me->rank] == 0) run->body(run, toy, migration);
  sluice_migration_destroy(migration);
  sluice_comm_destroy(tcp);
  sluice_comm_destroy(local);
  free(toy);
  return NULL;
}

static void run_ranks(run_t* run) {
  thread_t threads[TOY_MAX_RANKS];
  WORKS(sluice_local_group_create(run->world, &run->group));
  for (int32_t r = 0; r < run->world; ++r) {
    threads[r] = (thread_t){.run = run, .rank = r};
    assert_int_equal(pthread_create(&threads[r].id, NULL, be_rank, &threads[r]), 0);
  }
  for (int32_t r = 0; r < run->world; ++r) pthread_join(threads[r].id, NULL);
  sluice_local_group_destroy(run->group);
  for (int32_t r = 0; r < run->world; ++r) {
    if (run->bad[r] != 0) fail_msg("rank %d of %d: line %d does not hold", r, run->world, run->bad[r]);
  }
}

static sluice_status_t begin(toy_rank_t* toy, sluice_migration_t* migration, uint64_t epoch,
                             const toy_placement_t* next) {
  sluice_migration_item_t items[2 * TOY_SLOTS];
  sluice_migration_span_t spans[2 * TOY_SLOTS][TOY_NUM_PARTS + 1];
  const int32_t count = toy_items(toy, next, items, spans);
  return sluice_migration_begin(migration, epoch, items, count);
}

/* The refusal of another rank is reported by one of the two calls. */
static sluice_status_t begin_and_commit(toy_rank_t* toy, sluice_migration_t* migration, const toy_placement_t* next) {
  const sluice_status_t status = begin(toy, migration, 1, next);
  return status == SLUICE_OK ? sluice_migration_commit(migration, NULL) : status;
}

static sluice_migration_progress_t look(sluice_migration_t* migration) {
  sluice_migration_progress_t progress = {.struct_size = sizeof progress};
  if (sluice_migration_get_progress(migration, &progress) != SLUICE_OK) progress.phase = -1;
  return progress;
}

/* ---- the bits of a run without moves ---- */

static void train(run_t* run, toy_rank_t* toy, sluice_migration_t* migration) {
  toy_placement_t next = toy->placement;
  int is_moving = 0;
  uint64_t epoch = 0, all_bytes = 0;
  for (int32_t step = 0; step < STEPS; ++step) {
    toy_backward(toy, step);
    if (is_moving) {
      EXPECT(sluice_migration_commit(migration, NULL) == SLUICE_OK);
      toy->placement = next;
      const sluice_migration_progress_t progress = look(migration);
      EXPECT(progress.phase == SLUICE_MIGRATION_COMMITTED && progress.epoch == epoch);
      EXPECT(progress.staged_bytes == 0);
      /* At most two experts arrive, so the staged bytes are those of both and the overhead of messages. */
      EXPECT(progress.peak_staged_bytes <= progress.arriving_bytes + progress.arriving_bytes / 2 + (1 << 20));
      EXPECT(progress.hidden_bytes <= progress.leaving_bytes);
      all_bytes += progress.arriving_bytes;
    }
    toy_update(toy);
    is_moving = step % 2 == 0;
    if (is_moving) {
      toy_plan(toy, (uint32_t)step, &next);
      EXPECT(begin(toy, migration, ++epoch, &next) == SLUICE_OK);
    }
  }
  EXPECT(toy_is_right(toy, STEPS));
  EXPECT(all_bytes > sizeof(toy_expert_t));
}

TEST(Experts_ThatMoveWhileTraining_KeepTheirBits) {
  for (int32_t world = 2; world <= TOY_MAX_RANKS; ++world) {
    for (int32_t what = 0; what < 4; ++what) {
      run_t run = {.world = world, .is_tcp = what & 1, .rate = what & 2 ? 40000000 : 0, .body = train};
      run_ranks(&run);
    }
  }
}

/* At this rate the first message would be due in hours. commit does not wait for it. */
TEST(Experts_AtARateOfAlmostNothing_MoveAtTheBoundary) {
  run_t run = {.world = 2, .is_tcp = 1, .rate = 1, .body = train};
  run_ranks(&run);
}

/* ---- during training: at a rate, over separate connections ---- */

static void leave_at_a_rate(run_t* run, toy_rank_t* toy, sluice_migration_t* migration) {
  const struct timespec step = {.tv_nsec = 50 * 1000 * 1000};
  toy_placement_t next;
  toy_plan(toy, 1, &next);
  const uint64_t start_ns = sluice_now_ns();
  EXPECT(begin(toy, migration, 1, &next) == SLUICE_OK);
  (void)nanosleep(&step, NULL);
  toy_backward(toy, 0);
  EXPECT(sluice_migration_commit(migration, NULL) == SLUICE_OK);
  const double took_s = (double)(sluice_now_ns() - start_ns) / 1e9;
  const sluice_migration_progress_t progress = look(migration);
  EXPECT((double)progress.hidden_bytes <= took_s * (double)run->rate);
  toy->placement = next;
  toy_update(toy);
  EXPECT(toy_is_right(toy, 1));
}

TEST(Experts_AtARate_LeaveNoFaster) {
  for (int32_t is_tcp = 0; is_tcp < 2; ++is_tcp) {
    run_t run = {.world = 2, .is_tcp = is_tcp, .rate = 200000, .body = leave_at_a_rate};
    run_ranks(&run);
  }
}

/* ---- items that need not wait for the boundary ---- */

/* The spans of an item, moved into `expert`. */
static void spans_in(toy_expert_t* expert, const sluice_migration_item_t* item, sluice_migration_span_t* out_spans) {
  const toy_expert_t* own = item->spans[0].data;
  for (int32_t s = 0; s < item->num_spans; ++s) {
    out_spans[s] = item->spans[s];
    out_spans[s].data = (char*)expert + ((const char*)item->spans[s].data - (const char*)own);
  }
}

/* Marks gradients once they exist, the last item first. All of them must arrive before any rank commits. */
static void mark_gradients(run_t* run, toy_rank_t* toy, sluice_migration_t* migration) {
  sluice_migration_item_t items[2 * TOY_SLOTS];
  sluice_migration_span_t spans[2 * TOY_SLOTS][TOY_NUM_PARTS + 1], to[TOY_NUM_PARTS + 1];
  toy_expert_t* early = calloc(2 * TOY_SLOTS, sizeof *early);
  toy_placement_t next;
  toy_plan(toy, 1, &next);
  const int32_t count = toy_items(toy, &next, items, spans);
  EXPECT(sluice_migration_mark_still(migration, 0, 0) == SLUICE_E_STATE);
  EXPECT(sluice_migration_begin(migration, 1, items, count) == SLUICE_OK);
  EXPECT(sluice_migration_mark_still(migration, 1000, 1 - toy->rank) == SLUICE_E_INVALID_ARGUMENT);
  toy_backward(toy, 0);
  for (int32_t i = count - 1; i >= 0; --i) {
    if (items[i].direction == SLUICE_MIGRATION_ARRIVES) continue;
    EXPECT(sluice_migration_mark_still(migration, items[i].id, items[i].peer) == SLUICE_OK);
    EXPECT(sluice_migration_mark_still(migration, items[i].id, items[i].peer) == SLUICE_OK);
  }
  const uint64_t deadline_ns = sluice_now_ns() + UINT64_C(20000000000);
  for (int32_t i = 0; i < count; ++i) {
    int32_t is_there = items[i].direction == SLUICE_MIGRATION_LEAVES;
    spans_in(&early[i], &items[i], to);
    while (!is_there && sluice_now_ns() < deadline_ns) {
      EXPECT(sluice_migration_read_early(migration, items[i].id, items[i].peer, to, TOY_NUM_PARTS + 1, &is_there) ==
             SLUICE_OK);
    }
    EXPECT(is_there);
  }
  EXPECT(sluice_migration_commit(migration, NULL) == SLUICE_OK);
  for (int32_t i = 0; i < count; ++i) {
    if (items[i].direction == SLUICE_MIGRATION_LEAVES) continue;
    EXPECT(memcmp(&early[i], items[i].spans[0].data, sizeof early[i]) == 0);
  }
  free(early);
  toy->placement = next;
  toy_update(toy);
  EXPECT(toy_is_right(toy, 1));
}

TEST(Gradients_ThatAreMarked_AreThereBeforeTheBoundary) {
  for (int32_t world = 2; world <= TOY_MAX_RANKS; world += 2) {
    for (int32_t what = 0; what < 4; ++what) {
      run_t run = {.world = world, .is_tcp = what & 1, .rate = what & 2 ? 4000000 : 0, .body = mark_gradients};
      run_ranks(&run);
    }
  }
}

static int32_t num_sockets(void) {
  char path[64], target[64];
  int32_t count = 0;
  for (int fd = 0; fd < 256; ++fd) {
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(path, target, sizeof target);
    count += length > 7 && memcmp(target, "socket:", 7) == 0;
  }
  return count;
}

static pthread_barrier_t all_ranks;

/* Ranks are threads of one process, so each connection counts twice. */
static void count_connections(run_t* run, toy_rank_t* toy, sluice_migration_t* migration) {
  toy_placement_t next;
  toy_plan(toy, 1, &next);
  pthread_barrier_wait(&all_ranks);
  const int32_t before = num_sockets();
  pthread_barrier_wait(&all_ranks);
  EXPECT(begin(toy, migration, 1, &next) == SLUICE_OK);
  pthread_barrier_wait(&all_ranks);
  EXPECT(num_sockets() == before + run->world * (run->world - 1));
  pthread_barrier_wait(&all_ranks);
  EXPECT(sluice_migration_commit(migration, NULL) == SLUICE_OK);
  pthread_barrier_wait(&all_ranks);
  EXPECT(num_sockets() == before);
}

TEST(Move_OverTcp_HasConnectionsOfItsOwnUntilItHasEnded) {
  run_t run = {.world = 3, .is_tcp = 1, .body = count_connections};
  assert_int_equal(pthread_barrier_init(&all_ranks, NULL, (unsigned)run.world), 0);
  run_ranks(&run);
  pthread_barrier_destroy(&all_ranks);
}

/* ---- errors: nothing has moved, and the next move works ---- */

static void check_old(run_t* run, toy_rank_t* toy, sluice_migration_t* migration) {
  const sluice_migration_progress_t progress = look(migration);
  EXPECT(progress.phase == SLUICE_MIGRATION_ABORTED && progress.epoch == 0);
  toy_update(toy);
  EXPECT(toy_is_right(toy, 1));
  toy_placement_t next;
  toy_plan(toy, 3, &next);
  EXPECT(begin(toy, migration, 9, &next) == SLUICE_OK);
  toy_backward(toy, 1);
  EXPECT(sluice_migration_commit(migration, NULL) == SLUICE_OK && look(migration).staged_bytes == 0);
  toy->placement = next;
  toy_update(toy);
  EXPECT(toy_is_right(toy, 2));
  uint64_t epoch = 0;
  EXPECT(sluice_migration_settle(migration, NULL, &epoch) == SLUICE_OK && epoch == 9);
}

static int says(int32_t peer, const char* text) {
  return (peer == -2 || last_error()->peer == peer) && strstr(last_message(), text) != NULL;
}

static void refuse_at_commit(run_t* run, toy_rank_t* toy, sluice_migration_t* migration) {
  toy_placement_t next;
  toy_plan(toy, 1, &next);
  toy_backward(toy, 0);
  if (toy->rank == 1) {
    EXPECT(begin(toy, migration, 1, &next) == SLUICE_OK);
    EXPECT(sluice_migration_commit(migration, "gradients are missing") == SLUICE_E_INVALID_ARGUMENT);
  } else {
    EXPECT(begin_and_commit(toy, migration, &next) == SLUICE_E_PEER_REFUSED);
  }
  EXPECT(says(1, "gradients are missing"));
  check_old(run, toy, migration);
}

static void give_up_before(run_t* run, toy_rank_t* toy, sluice_migration_t* migration) {
  toy_placement_t next;
  toy_plan(toy, 1, &next);
  toy_backward(toy, 0);
  if (toy->rank == 0) {
    EXPECT(begin(toy, migration, 1, &next) == SLUICE_OK);
    sluice_migration_abort(migration, "loads have changed");
  } else {
    EXPECT(begin_and_commit(toy, migration, &next) == SLUICE_E_PEER_REFUSED);
    EXPECT(says(0, "loads have changed"));
  }
  check_old(run, toy, migration);
}

static void differ_in_bytes(run_t* run, toy_rank_t* toy, sluice_migration_t* migration) {
  sluice_migration_span_t span = {toy->slots[0].part[0], 64, SLUICE_MIGRATION_STILL, 0};
  if (toy->rank == 1) span.bytes = 128;
  const sluice_migration_item_t items[2] = {{4, 1 - toy->rank, SLUICE_MIGRATION_LEAVES, &span, 1, 0},
                                            {4, 1 - toy->rank, SLUICE_MIGRATION_ARRIVES, &span, 1, 0}};
  toy_backward(toy, 0);
  sluice_status_t status = sluice_migration_begin(migration, 1, items, 2);
  if (status == SLUICE_OK) status = sluice_migration_commit(migration, NULL);
  EXPECT(status == SLUICE_E_MISMATCH && says(-2, "what moves between them"));
  check_old(run, toy, migration);
}

static void bad_item(run_t* run, toy_rank_t* toy, sluice_migration_t* migration) {
  toy_placement_t next;
  toy_plan(toy, 1, &next);
  toy_backward(toy, 0);
  const sluice_migration_item_t item = {7, 0, SLUICE_MIGRATION_LEAVES, NULL, 1, 0};
  if (toy->rank == 1) {
    EXPECT(sluice_migration_begin(migration, 1, &item, 1) == SLUICE_E_INVALID_ARGUMENT);
    EXPECT(says(-1, "item 7"));
    EXPECT(sluice_migration_commit(migration, NULL) == SLUICE_E_STATE);
  } else {
    EXPECT(begin_and_commit(toy, migration, &next) == SLUICE_E_PEER_REFUSED);
    EXPECT(says(1, "item 7"));
  }
  check_old(run, toy, migration);
}

static void differ_in_epoch(run_t* run, toy_rank_t* toy, sluice_migration_t* migration) {
  toy_backward(toy, 0);
  EXPECT(sluice_migration_begin(migration, toy->rank == 1 ? 3 : 2, NULL, 0) == SLUICE_E_MISMATCH);
  EXPECT(says(1, "another epoch"));
  check_old(run, toy, migration);
}

static void take_too_much(run_t* run, toy_rank_t* toy, sluice_migration_t* migration) {
  sluice_migration_item_t items[2];
  static char nothing[1 << 16];
  const sluice_migration_span_t spans[2] = {{nothing, 5000, SLUICE_MIGRATION_STILL, 0},
                                            {nothing, sizeof nothing, SLUICE_MIGRATION_STILL, 0}};
  toy_backward(toy, 0);
  items[0] = (sluice_migration_item_t){1, 1 - toy->rank, toy->rank, &spans[1], 1, 0};
  sluice_status_t status = sluice_migration_begin(migration, 1, items, 1);
  if (toy->rank == SLUICE_MIGRATION_ARRIVES) {
    EXPECT(status == SLUICE_E_OVER_BUDGET && says(-1, "staging_bytes"));
  } else {
    if (status == SLUICE_OK) status = sluice_migration_commit(migration, NULL);
    EXPECT(status == SLUICE_E_PEER_REFUSED);
  }
  EXPECT(look(migration).phase == SLUICE_MIGRATION_ABORTED && look(migration).epoch == 0);
}

TEST(Moves_ThatARankRefuses_LeaveAllAsItWas) {
  static const body_fn bodies[] = {refuse_at_commit, give_up_before,  bad_item,
                                   differ_in_epoch,  differ_in_bytes, take_too_much};
  for (size_t i = 0; i < sizeof bodies / sizeof bodies[0]; ++i) {
    for (int32_t is_tcp = 0; is_tcp < 2; ++is_tcp) {
      const int is_of_two = bodies[i] == differ_in_bytes || bodies[i] == take_too_much;
      run_t run = {.world = is_of_two ? 2 : 3, .is_tcp = is_tcp, .body = bodies[i]};
      if (bodies[i] == take_too_much) run.staging_bytes = 6000;
      print_message("refusal %d over %s\n", (int)i, is_tcp ? "tcp" : "local");
      run_ranks(&run);
    }
  }
}

/* ---- arguments ---- */

TEST(Calls_GivenSomethingWrong_SayWhat) {
  sluice_local_group_t* group = NULL;
  sluice_comm_t* comm = NULL;
  DEFAULTS(sluice_comm_config, config);
  config.world_size = 1;
  WORKS(sluice_local_group_create(1, &group));
  WORKS(sluice_comm_create_local(group, &config, &comm));
  sluice_migration_t* migration = NULL;
  DEFAULTS(sluice_migration_config, c);
  REFUSED(sluice_migration_create(NULL, &c, &migration), BAD, "comm is NULL");
  REFUSED(sluice_migration_create(comm, NULL, &migration), BAD, "sluice_migration_config_t");
  REFUSED(sluice_migration_create(comm, &c, NULL), BAD, "out_migration is NULL");
  c.chunk_bytes = 100;
  REFUSED(sluice_migration_create(comm, &c, &migration), BAD, "chunk_bytes");
  c.chunk_bytes = 4096, c.gives_way = 2;
  REFUSED(sluice_migration_create(comm, &c, &migration), BAD, "gives_way");
  c.gives_way = 1, c.epoch = UINT64_MAX;
  REFUSED(sluice_migration_create(comm, &c, &migration), BAD, "epoch");
  c.epoch = 5;
  WORKS(sluice_migration_create(comm, &c, &migration));
  REFUSED(sluice_migration_begin(NULL, 6, NULL, 0), BAD, "NULL");
  REFUSED(sluice_migration_begin(migration, 5, NULL, 0), BAD, "number each move above it");
  REFUSED(sluice_migration_begin(migration, 6, NULL, 2), BAD, "2 items at (nil)");
  REFUSED(sluice_migration_commit(NULL, NULL), BAD, "NULL");
  REFUSED(sluice_migration_commit(migration, NULL), SLUICE_E_STATE, "");
  REFUSED(sluice_migration_settle(NULL, NULL, NULL), BAD, "NULL");
  REFUSED(sluice_migration_get_progress(migration, NULL), BAD, "NULL");
  sluice_migration_progress_t unset = {.struct_size = 3};
  REFUSED(sluice_migration_get_progress(migration, &unset), SLUICE_E_ABI, "sluice_migration_progress_t");
  /* A single rank moves nothing, and commits. */
  WORKS(sluice_migration_begin(migration, 6, NULL, 0));
  assert_int_equal(sluice_migration_begin(migration, 7, NULL, 0), SLUICE_E_STATE);
  uint64_t epoch = 0;
  assert_int_equal(sluice_migration_settle(migration, NULL, &epoch), SLUICE_E_STATE);
  WORKS(sluice_migration_commit(migration, NULL));
  assert_int_equal(look(migration).epoch, 6);
  sluice_migration_abort(migration, NULL); /* no effect after the commit */
  assert_int_equal(look(migration).phase, SLUICE_MIGRATION_COMMITTED);
  assert_string_equal(sluice_migration_phase_name(SLUICE_MIGRATION_AGREED), "agree");
  sluice_migration_abort(NULL, NULL);
  sluice_migration_destroy(NULL);
  sluice_migration_destroy(migration);
  sluice_comm_destroy(comm);
  sluice_local_group_destroy(group);
}
