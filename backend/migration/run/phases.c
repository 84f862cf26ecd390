// SPDX-License-Identifier: Apache-2.0
/* The public calls of migrations: the table of the protocol alone determines what a rank does next. */
#include <stdio.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/base/structs.h"
#include "backend/comm/comm.h"
#include "backend/migration/run/state.h"

static int is_under_way(const sluice_migration_t* m) {
  return m->phase >= SLUICE_MIGRATION_STREAMS && m->phase <= SLUICE_MIGRATION_AGREED;
}

static void note_refusal(sluice_migration_t* m, const sluice_error_info_t* why) {
  if (m->refusal.status == SLUICE_OK) m->refusal = *why;
}

/* ---- one event ---- */

static sluice_status_t act(sluice_migration_t* m, int32_t what) {
  switch (what) {
    case SLUICE_MOVE_DO_STREAM: return sluice_move_stream(m);
    case SLUICE_MOVE_DO_FLUSH: return sluice_move_flush(m);
    case SLUICE_MOVE_DO_INSTALL:
      sluice_move_list_install(&m->list);
      m->epoch = m->target;
      sluice_move_stop_access(m);
      sluice_move_close_endpoint(m, 0);
      return SLUICE_OK;
    case SLUICE_MOVE_DO_FORGET:
      sluice_move_stop_access(m);
      if (m->refusal.status == SLUICE_OK) sluice_move_close_endpoint(m, 0); /* otherwise the next move closes it */
      return SLUICE_OK;
    default: return SLUICE_OK;
  }
}

static sluice_status_t apply(sluice_migration_t* m, int32_t event) {
  int32_t count;
  const sluice_move_rule_t* rules = sluice_move_rules(&count);
  const sluice_move_rule_t* rule = sluice_move_find_rule(rules, count, m->phase, event);
  if (rule == NULL)
    return SLUICE_FAIL(SLUICE_E_INTERNAL, "migration: no rule for event %d in phase %d", event, m->phase);
  m->phase = rule->to;
  sluice_status_t status = SLUICE_OK;
  if (rule->say != SLUICE_MOVE_SAY_NOTHING) {
    /* Chunks that have not begun to be sent would only delay the refusal. */
    if (rule->say == SLUICE_MOVE_SAY_REFUSE) sluice_move_cancel_unsent(m);
    status = sluice_move_broadcast_vote(m, rule->say);
  }
  /* The end of a move takes effect whether or not the other ranks can be told. */
  if (status != SLUICE_OK && is_under_way(m)) return status;
  return act(m, rule->act);
}

/* ---- failures ---- */

/* Ends the move as a rule says; the status and its record are the reason. */
static sluice_status_t fail(sluice_migration_t* m, sluice_status_t status) {
  sluice_error_info_t why;
  sluice_error_capture(&why);
  const int32_t phase = m->phase;
  sluice_move_hear_the_rest(m); /* control messages that arrived before a loss say why it happened */
  /* A rank without memory refuses. After it has begun to agree, it can no longer refuse. */
  if (sluice_is_out_of_memory(status) && phase < SLUICE_MIGRATION_AGREED) note_refusal(m, &why);
  const int is_refused = m->refusal.status != SLUICE_OK;
  if (is_refused) why = m->refusal;
  (void)apply(m, is_refused ? SLUICE_MOVE_EVENT_REFUSED : SLUICE_MOVE_EVENT_LOST);
  if (is_refused) return sluice_error_adopt(&why);
  return sluice_error_record(status, m->comm->rank, why.peer, why.native_code,
                             "migration to epoch %llu, phase %s: %s%s", (unsigned long long)m->target,
                             phase == SLUICE_MIGRATION_NONE ? "announce" : sluice_migration_phase_name(phase),
                             why.message,
                             m->phase == SLUICE_MIGRATION_UNDECIDED
                                 ? " This rank had agreed: settle with all remaining ranks before the next step."
                                 : "");
}

/* ---- begin ---- */

static void clear(sluice_migration_t* m, uint64_t epoch) {
  memset(m->peers, 0, (size_t)m->comm->world_size * sizeof *m->peers);
  m->target = epoch;
  m->phase = SLUICE_MIGRATION_NONE;
  m->next_chunk = m->num_out = m->num_missing = m->num_said = 0;
  m->hidden_bytes = m->commit_ns = 0;
  memset(&m->refusal, 0, sizeof m->refusal);
  sluice_allocator_reset_peak(&m->memory);
}

/* The bound on unexpected bytes: peers send only what is expected, and control messages. */
static sluice_status_t connect(sluice_migration_t* m) {
  const sluice_messages_config_t config = {
      .fingerprint = m->target,
      .max_unexpected_bytes = m->list.arriving_bytes + (UINT64_C(1) << 20),
      .max_message_bytes = sluice_max_u64(m->config.chunk_bytes, UINT64_C(1) << 20),
      .allocator = &m->memory,
  };
  const sluice_status_t status = sluice_messages_open(m->comm, &config, &m->messages);
  if (status == SLUICE_OK) {
    if (m->config.gives_way) sluice_messages_set_gives_way(m->messages, 1);
    return SLUICE_OK;
  }
  sluice_error_info_t why;
  sluice_error_capture(&why);
  m->phase = SLUICE_MIGRATION_ABORTED;
  if (status == SLUICE_E_MISMATCH) {
    return SLUICE_FAIL_PEER(
        status, m->comm->rank, why.peer,
        "migration: rank %d begins another epoch than rank 0 (%llu on this rank): use the same epochs on all ranks",
        why.peer, (unsigned long long)m->target);
  }
  return sluice_error_record(status, m->comm->rank, why.peer, why.native_code,
                             "migration to epoch %llu, phase announce: %s", (unsigned long long)m->target, why.message);
}

static sluice_status_t start(sluice_migration_t* m, sluice_status_t mine) {
  SLUICE_TRY(connect(m));
  SLUICE_TRY(sluice_move_listen(m));
  SLUICE_TRY(mine);
  SLUICE_TRY(sluice_move_announce(m));
  return apply(m, SLUICE_MOVE_EVENT_BEGIN);
}

sluice_status_t sluice_migration_begin(sluice_migration_t* m, uint64_t epoch, const sluice_migration_item_t* items,
                                       int32_t num_items) {
  SLUICE_TRY(SLUICE_REQUIRE(m != NULL, "sluice_migration_begin: migration is NULL"));
  if (is_under_way(m) || m->phase == SLUICE_MIGRATION_UNDECIDED) {
    return SLUICE_FAIL(SLUICE_E_STATE, "sluice_migration_begin: the move to epoch %llu is %s; %s it first",
                       (unsigned long long)m->target, sluice_migration_phase_name(m->phase),
                       is_under_way(m) ? "commit or abort" : "settle");
  }
  /* All ranks come here, so all have ended the previous move. */
  if (m->messages != NULL) sluice_move_close_endpoint(m, sluice_add_saturating(sluice_now_ns(), m->comm->timeout_ns));
  clear(m, epoch);
  sluice_status_t mine = sluice_move_list_make(m, items, num_items, &m->list);
  if (mine == SLUICE_OK && (epoch <= m->epoch || epoch > UINT64_C(1) << 62)) {
    mine = SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "sluice_migration_begin: epoch is %llu, and %llu is in force: number each move above it",
                       (unsigned long long)epoch, (unsigned long long)m->epoch);
  }
  sluice_error_info_t why;
  sluice_error_capture(&why);
  if (mine != SLUICE_OK) sluice_move_list_free(&m->list);
  const sluice_status_t status = start(m, mine);
  if (status == SLUICE_OK) return SLUICE_OK;
  if (m->messages == NULL) { /* no rank has an endpoint */
    sluice_move_list_free(&m->list);
    return mine != SLUICE_OK ? sluice_error_adopt(&why) : status;
  }
  sluice_move_stop_stream(m);
  if (mine == SLUICE_OK) return fail(m, status);
  note_refusal(m, &why);
  (void)apply(m, SLUICE_MOVE_EVENT_REFUSED);
  return sluice_error_adopt(&why);
}

/* ---- commit ---- */

static int all(const sluice_migration_t* m, const int8_t* of_first) {
  for (int32_t r = 0; r < m->comm->world_size; ++r) {
    const int8_t* of = of_first + (size_t)r * sizeof *m->peers;
    if (r != m->comm->rank && !*of) return 0;
  }
  return 1;
}

static int is_over(const sluice_migration_t* m, int32_t* out_event) {
  switch (m->phase) {
    case SLUICE_MIGRATION_FLUSHES:
      *out_event = SLUICE_MOVE_EVENT_ALL_HERE;
      return m->num_missing == 0 && m->num_out == 0 && all(m, &m->peers[0].is_alike);
    case SLUICE_MIGRATION_READY: *out_event = SLUICE_MOVE_EVENT_ALL_READY; return all(m, &m->peers[0].is_ready);
    default: *out_event = SLUICE_MOVE_EVENT_ALL_AGREED; return all(m, &m->peers[0].has_agreed);
  }
}

/* Waits for the next event of a phase. */
static sluice_status_t await(sluice_migration_t* m, int32_t* out_event) {
  char phase[96];
  (void)snprintf(phase, sizeof phase, "a message of the migration to epoch %llu (%s)", (unsigned long long)m->target,
                 sluice_migration_phase_name(m->phase));
  for (;;) {
    int32_t is_taken;
    if (m->refusal.status != SLUICE_OK) {
      *out_event = SLUICE_MOVE_EVENT_REFUSED;
      return SLUICE_OK;
    }
    if (is_over(m, out_event)) return SLUICE_OK;
    SLUICE_TRY(sluice_move_hear(m, phase, &is_taken));
  }
}

static sluice_status_t drive(sluice_migration_t* m) {
  SLUICE_TRY(apply(m, SLUICE_MOVE_EVENT_BOUNDARY));
  while (is_under_way(m)) {
    int32_t event;
    SLUICE_TRY(await(m, &event));
    const sluice_error_info_t refusal = m->refusal;
    SLUICE_TRY(apply(m, event));
    if (event == SLUICE_MOVE_EVENT_REFUSED) return sluice_error_adopt(&refusal);
  }
  return SLUICE_OK;
}

static void count_hidden(sluice_migration_t* m) {
  sluice_move_hear_the_rest(m);
  for (int32_t i = 0; i < m->list.num_chunks; ++i) {
    const sluice_move_chunk_t* chunk = &m->list.chunks[i];
    const int leaves = m->list.items[chunk->item].direction == SLUICE_MIGRATION_LEAVES;
    if (leaves && chunk->is_through) m->hidden_bytes += chunk->bytes;
  }
}

static sluice_status_t refuse_own(sluice_migration_t* m, const char* refusal) {
  const sluice_status_t status = SLUICE_FAIL_PEER(SLUICE_E_INVALID_ARGUMENT, m->comm->rank, m->comm->rank,
                                                  "migration to epoch %llu: rank %d refused: %s",
                                                  (unsigned long long)m->target, m->comm->rank, refusal);
  sluice_error_info_t why;
  sluice_error_capture(&why);
  memset(&m->refusal, 0, sizeof m->refusal); /* only this rank's own refusal counts here */
  note_refusal(m, &why);
  (void)snprintf(m->refusal.message, sizeof m->refusal.message, "%s", refusal);
  (void)apply(m, SLUICE_MOVE_EVENT_REFUSED);
  (void)status;
  return sluice_error_adopt(&why);
}

sluice_status_t sluice_migration_commit(sluice_migration_t* m, const char* refusal) {
  SLUICE_TRY(SLUICE_REQUIRE(m != NULL, "sluice_migration_commit: migration is NULL"));
  if (m->phase != SLUICE_MIGRATION_STREAMS) {
    return SLUICE_FAIL(SLUICE_E_STATE, "sluice_migration_commit: no migration is in progress (%s); begin one first",
                       sluice_migration_phase_name(m->phase));
  }
  const uint64_t start_ns = sluice_now_ns();
  sluice_move_stop_stream(m);
  count_hidden(m);
  if (m->config.gives_way) sluice_messages_set_gives_way(m->messages, 0); /* training waits for the move now */
  sluice_status_t status;
  if (refusal != NULL) {
    status = refuse_own(m, refusal);
  } else {
    status = drive(m);
    if (status != SLUICE_OK && is_under_way(m)) status = fail(m, status);
  }
  m->commit_ns = sluice_now_ns() - start_ns;
  return status;
}

void sluice_migration_abort(sluice_migration_t* m, const char* reason) {
  if (m == NULL || m->phase != SLUICE_MIGRATION_STREAMS) return;
  sluice_error_info_t before;
  sluice_error_capture(&before);
  sluice_move_stop_stream(m);
  (void)refuse_own(m, reason != NULL ? reason : "the host aborted it");
  (void)sluice_error_adopt(&before);
}

/* ---- settle ---- */

sluice_status_t sluice_migration_settle(sluice_migration_t* m, sluice_comm_t* comm, uint64_t* out_epoch) {
  SLUICE_TRY(SLUICE_REQUIRE(m != NULL, "sluice_migration_settle: migration is NULL"));
  if (is_under_way(m)) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "sluice_migration_settle: the move to epoch %llu is in progress; commit or abort it",
                       (unsigned long long)m->target);
  }
  const int is_undecided = m->phase == SLUICE_MIGRATION_UNDECIDED;
  const uint64_t agreed = is_undecided ? m->target : m->epoch;
  int64_t most[2] = {(int64_t)m->epoch, -(int64_t)agreed}; /* the minimum of what was agreed, as a maximum */
  if (comm != NULL && comm->world_size > 1)
    SLUICE_TRY(sluice_comm_all_reduce_i64(comm, most, 2, SLUICE_REDUCE_MAX, "the settling of a migration"));
  const uint64_t settled = sluice_move_settled_epoch((uint64_t)most[0], (uint64_t)-most[1]);
  if (is_undecided) {
    SLUICE_TRY(apply(m, settled == m->target ? SLUICE_MOVE_EVENT_SETTLED_NEW : SLUICE_MOVE_EVENT_SETTLED_OLD));
  }
  if (out_epoch != NULL) *out_epoch = m->epoch;
  if (m->epoch == settled) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INTERNAL,
                     "sluice_migration_settle: epoch %llu is in force here, and %llu among the remaining ranks: a rank "
                     "was left out when they settled before; restore all of them from one checkpoint",
                     (unsigned long long)m->epoch, (unsigned long long)settled);
}

/* ---- migrations: created and destroyed ---- */

#define MAX_EPOCH (UINT64_C(1) << 62)

enum { MIN_CHUNK_BYTES = 4096, MAX_CHUNK_BYTES = 1 << 30 };

static uint64_t peer_bytes(const sluice_comm_t* comm) {
  return (uint64_t)comm->world_size * sizeof(sluice_move_peer_t);
}

SLUICE_DEFINE_INIT(sluice_migration_config, .chunk_bytes = 256 << 10, .gives_way = 1)

static sluice_status_t check_config(const sluice_migration_config_t* c) {
  SLUICE_TRY(SLUICE_REQUIRE(c->epoch <= MAX_EPOCH, "migration: epoch is %llu; it may be at most 2^62",
                            (unsigned long long)c->epoch));
  SLUICE_TRY(SLUICE_REQUIRE(c->chunk_bytes >= MIN_CHUNK_BYTES && c->chunk_bytes <= MAX_CHUNK_BYTES,
                            "migration: chunk_bytes is %llu; give %d to %d", (unsigned long long)c->chunk_bytes,
                            MIN_CHUNK_BYTES, MAX_CHUNK_BYTES));
  SLUICE_TRY(
      SLUICE_REQUIRE(c->gives_way == 0 || c->gives_way == 1, "migration: gives_way is %d; give 0 or 1", c->gives_way));
  return SLUICE_REQUIRE(c->reserved == 0, "migration: reserved is %d; set it to 0", c->reserved);
}

sluice_status_t sluice_migration_create(sluice_comm_t* comm, const sluice_migration_config_t* config,
                                        sluice_migration_t** out_migration) {
  SLUICE_TRY(SLUICE_REQUIRE(out_migration != NULL, "sluice_migration_create: out_migration is NULL"));
  *out_migration = NULL;
  SLUICE_READ_EXTENSIBLE(sluice_migration_config, c, config, sizeof c);
  SLUICE_TRY(SLUICE_REQUIRE(comm != NULL, "sluice_migration_create: comm is NULL"));
  SLUICE_TRY(check_config(&c));
  sluice_migration_t* m = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *m, "migration");
  if (m == NULL) return sluice_alloc_status();
  m->peers = sluice_alloc_zeroed(sluice_process_allocator(), peer_bytes(comm), "migration: peers");
  if (m->peers == NULL) {
    sluice_free(sluice_process_allocator(), m, sizeof *m);
    return sluice_alloc_status();
  }
  m->config = c;
  m->epoch = m->target = c.epoch;
  m->phase = SLUICE_MIGRATION_NONE;
  sluice_allocator_init(&m->memory, NULL, NULL, NULL);
  pthread_mutex_init(&m->mutex, NULL);
  sluice_cond_init(&m->changed);
  sluice_comm_retain(comm);
  m->comm = comm;
  *out_migration = m;
  return SLUICE_OK;
}

void sluice_migration_destroy(sluice_migration_t* m) {
  if (m == NULL) return;
  if (m->messages != NULL) {
    sluice_move_stop_stream(m);
    /* Half of a message may have been sent, so an abort is the only way to tell the other ranks. */
    if (m->phase != SLUICE_MIGRATION_ABORTED) sluice_messages_abort(m->messages);
    sluice_move_stop_access(m);
    sluice_move_close_endpoint(m, 0);
  }
  sluice_free(sluice_process_allocator(), m->peers, peer_bytes(m->comm));
  sluice_comm_release(m->comm);
  pthread_cond_destroy(&m->changed);
  pthread_mutex_destroy(&m->mutex);
  sluice_allocator_deinit(&m->memory);
  sluice_free(sluice_process_allocator(), m, sizeof *m);
}

sluice_status_t sluice_migration_get_progress(sluice_migration_t* m, sluice_migration_progress_t* out_progress) {
  SLUICE_TRY(SLUICE_REQUIRE(m != NULL && out_progress != NULL,
                            "sluice_migration_get_progress: migration and out_progress may not be NULL"));
  SLUICE_TRY(sluice_struct_check_size(out_progress, "sluice_migration_progress_t"));
  pthread_mutex_lock(&m->memory.mutex);
  const uint64_t staged = m->memory.current_bytes, peak = m->memory.peak_bytes;
  pthread_mutex_unlock(&m->memory.mutex);
  const sluice_migration_progress_t progress = {.epoch = m->epoch,
                                                .target = m->target,
                                                .leaving_bytes = m->list.leaving_bytes,
                                                .arriving_bytes = m->list.arriving_bytes,
                                                .hidden_bytes = m->hidden_bytes,
                                                .staged_bytes = staged,
                                                .peak_staged_bytes = peak,
                                                .commit_seconds = sluice_seconds(m->commit_ns),
                                                .phase = m->phase};
  sluice_struct_give(out_progress, &progress, sizeof progress);
  return SLUICE_OK;
}
