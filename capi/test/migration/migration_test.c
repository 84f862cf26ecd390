// SPDX-License-Identifier: Apache-2.0
/* Experts that swap places while a toy host trains: parameters have the bits of a run without moves; errors leave
 * everything unchanged; staged bytes are bounded. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "capi/test/migration/migration_world.h"
#include "capi/test/ranks/play.h"

enum { STEPS = 24 };

typedef void (*body_fn)(part_t* me, toy_rank_t* toy, sluice_migration_t* migration);

typedef struct scene_s {
  body_fn body;
  int32_t is_tcp;
  uint64_t rate, staging_bytes;
} scene_t;

static void be_rank(part_t* me) {
  const scene_t* scene = me->play->scene;
  toy_rank_t* toy = malloc(sizeof *toy);
  sluice_comm_t* tcp = NULL;
  sluice_migration_t* migration = NULL;
  DEFAULTS(sluice_migration_config, c);
  toy_init(toy, me->rank, me->world_size);
  c.bytes_per_second = scene->rate, c.staging_bytes = scene->staging_bytes, c.chunk_bytes = 4096;
  if (scene->is_tcp) WORKS(sluice_comm_create_tcp(me->comm, NULL, &tcp));
  WORKS(sluice_migration_create(scene->is_tcp ? tcp : me->comm, &c, &migration));
  if (migration != NULL) scene->body(me, toy, migration);
  sluice_migration_destroy(migration);
  sluice_comm_destroy(tcp);
  free(toy);
}

static void run_ranks(int32_t world_size, scene_t scene) {
  perform(&(play_t){.run = be_rank, .scene = &scene, .world_size = world_size});
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

static void train(part_t* me, toy_rank_t* toy, sluice_migration_t* migration) {
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
      run_ranks(world, (scene_t){train, what & 1, .rate = what & 2 ? 40000000 : 0});
    }
  }
}

/* At this rate the first message would be due in hours. commit does not wait for it. */
TEST(Experts_AtARateOfAlmostNothing_MoveAtTheBoundary) { run_ranks(2, (scene_t){train, .is_tcp = 1, .rate = 1}); }

/* ---- during training: at a rate, over separate connections ---- */

enum { SLOW = 200000 };

static void leave_at_a_rate(part_t* me, toy_rank_t* toy, sluice_migration_t* migration) {
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
  EXPECT((double)progress.hidden_bytes <= took_s * SLOW);
  toy->placement = next;
  toy_update(toy);
  EXPECT(toy_is_right(toy, 1));
}

TEST(Experts_AtARate_LeaveNoFaster) {
  for (int32_t is_tcp = 0; is_tcp < 2; ++is_tcp) {
    run_ranks(2, (scene_t){leave_at_a_rate, is_tcp, .rate = SLOW});
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
static void mark_gradients(part_t* me, toy_rank_t* toy, sluice_migration_t* migration) {
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
    if (items[i].direction == SLUICE_MIGRATION_LEAVES) continue;
    --to[1].bytes; /* a span is read as a whole or not at all */
    EXPECT(sluice_migration_read_early(migration, items[i].id, items[i].peer, to, TOY_NUM_PARTS + 1, &is_there) ==
           SLUICE_E_INVALID_ARGUMENT);
    to[1].bytes = 0, to[1].data = NULL;
    EXPECT(sluice_migration_read_early(migration, items[i].id, items[i].peer, to, TOY_NUM_PARTS + 1, &is_there) ==
           SLUICE_OK);
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
      run_ranks(world, (scene_t){mark_gradients, what & 1, .rate = what & 2 ? 4000000 : 0});
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

/* Ranks are threads of one process, so each connection counts twice. */
static void count_connections(part_t* me, toy_rank_t* toy, sluice_migration_t* migration) {
  toy_placement_t next;
  toy_plan(toy, 1, &next);
  meet(me);
  const int32_t before = num_sockets();
  meet(me);
  EXPECT(begin(toy, migration, 1, &next) == SLUICE_OK);
  meet(me);
  EXPECT(num_sockets() == before + me->world_size * (me->world_size - 1));
  meet(me);
  EXPECT(sluice_migration_commit(migration, NULL) == SLUICE_OK);
  meet(me);
  EXPECT(num_sockets() == before);
}

TEST(Move_OverTcp_HasConnectionsOfItsOwnUntilItHasEnded) { run_ranks(3, (scene_t){count_connections, .is_tcp = 1}); }

/* ---- errors: nothing has moved, and the next move works ---- */

static void check_old(part_t* me, toy_rank_t* toy, sluice_migration_t* migration) {
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

static void refuse_at_commit(part_t* me, toy_rank_t* toy, sluice_migration_t* migration) {
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
  check_old(me, toy, migration);
}

static void give_up_before(part_t* me, toy_rank_t* toy, sluice_migration_t* migration) {
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
  check_old(me, toy, migration);
}

static void differ_in_bytes(part_t* me, toy_rank_t* toy, sluice_migration_t* migration) {
  sluice_migration_span_t span = {toy->slots[0].part[0], 64, SLUICE_MIGRATION_STILL, 0};
  if (toy->rank == 1) span.bytes = 128;
  const sluice_migration_item_t items[2] = {{4, 1 - toy->rank, SLUICE_MIGRATION_LEAVES, &span, 1, 0},
                                            {4, 1 - toy->rank, SLUICE_MIGRATION_ARRIVES, &span, 1, 0}};
  toy_backward(toy, 0);
  sluice_status_t status = sluice_migration_begin(migration, 1, items, 2);
  if (status == SLUICE_OK) status = sluice_migration_commit(migration, NULL);
  EXPECT(status == SLUICE_E_MISMATCH && says(-2, "what moves between them"));
  check_old(me, toy, migration);
}

static void bad_item(part_t* me, toy_rank_t* toy, sluice_migration_t* migration) {
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
  check_old(me, toy, migration);
}

static void differ_in_epoch(part_t* me, toy_rank_t* toy, sluice_migration_t* migration) {
  toy_backward(toy, 0);
  EXPECT(sluice_migration_begin(migration, toy->rank == 1 ? 3 : 2, NULL, 0) == SLUICE_E_MISMATCH);
  EXPECT(says(1, "another epoch"));
  check_old(me, toy, migration);
}

static void take_too_much(part_t* me, toy_rank_t* toy, sluice_migration_t* migration) {
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
  for (int32_t is_tcp = 0; is_tcp < 2; ++is_tcp) {
    run_ranks(3, (scene_t){refuse_at_commit, is_tcp});
    run_ranks(3, (scene_t){give_up_before, is_tcp});
    run_ranks(3, (scene_t){bad_item, is_tcp});
    run_ranks(3, (scene_t){differ_in_epoch, is_tcp});
    run_ranks(2, (scene_t){differ_in_bytes, is_tcp});
    run_ranks(2, (scene_t){take_too_much, is_tcp, .staging_bytes = 6000});
  }
}

/* ---- arguments ---- */

static void call_wrongly(part_t* me) {
  sluice_comm_t* comm = me->comm;
  sluice_migration_t* migration = NULL;
  DEFAULTS(sluice_migration_config, c);
  STATUS(sluice_migration_create(NULL, &c, &migration), BAD, "comm is NULL");
  STATUS(sluice_migration_create(comm, NULL, &migration), BAD, "sluice_migration_config_t");
  STATUS(sluice_migration_create(comm, &c, NULL), BAD, "out_migration is NULL");
  c.chunk_bytes = 100;
  STATUS(sluice_migration_create(comm, &c, &migration), BAD, "chunk_bytes");
  c.chunk_bytes = 4096, c.gives_way = 2;
  STATUS(sluice_migration_create(comm, &c, &migration), BAD, "gives_way");
  c.gives_way = 1, c.epoch = UINT64_MAX;
  STATUS(sluice_migration_create(comm, &c, &migration), BAD, "epoch");
  c.epoch = 5;
  WORKS(sluice_migration_create(comm, &c, &migration));
  STATUS(sluice_migration_begin(NULL, 6, NULL, 0), BAD, "NULL");
  STATUS(sluice_migration_begin(migration, 5, NULL, 0), BAD, "number each move above it");
  STATUS(sluice_migration_begin(migration, 6, NULL, 2), BAD, "items is NULL; give the list of the 2 items");
  STATUS(sluice_migration_begin(migration, 6, NULL, -1), BAD, "num_items is -1");
  STATUS(sluice_migration_commit(NULL, NULL), BAD, "NULL");
  STATUS(sluice_migration_commit(migration, NULL), SLUICE_E_STATE, "");
  STATUS(sluice_migration_settle(NULL, NULL, NULL), BAD, "NULL");
  STATUS(sluice_migration_get_progress(migration, NULL), BAD, "NULL");
  sluice_migration_progress_t unset = {.struct_size = 3};
  STATUS(sluice_migration_get_progress(migration, &unset), SLUICE_E_ABI, "sluice_migration_progress_t");
  /* A single rank moves nothing, and commits. */
  WORKS(sluice_migration_begin(migration, 6, NULL, 0));
  EXPECT(sluice_migration_begin(migration, 7, NULL, 0) == SLUICE_E_STATE);
  uint64_t epoch = 0;
  EXPECT(sluice_migration_settle(migration, NULL, &epoch) == SLUICE_E_STATE);
  WORKS(sluice_migration_commit(migration, NULL));
  EXPECT(look(migration).epoch == 6);
  sluice_migration_abort(migration, NULL); /* no effect after the commit */
  EXPECT(look(migration).phase == SLUICE_MIGRATION_COMMITTED);
  EXPECT(strcmp(sluice_migration_phase_name(SLUICE_MIGRATION_AGREED), "agree") == 0);
  sluice_migration_abort(NULL, NULL);
  sluice_migration_destroy(NULL);
  sluice_migration_destroy(migration);
}

TEST(Calls_GivenSomethingWrong_SayWhat) { perform(&(play_t){.run = call_wrongly, .world_size = 1}); }
