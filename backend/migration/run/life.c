// SPDX-License-Identifier: Apache-2.0
/* Creates and destroys migrations. */
#include <string.h>

#include "backend/base/clock.h"
#include "backend/comm/comm.h"
#include "backend/migration/run/state.h"

#define MAX_EPOCH (UINT64_C(1) << 62)

enum { MIN_CHUNK_BYTES = 4096, MAX_CHUNK_BYTES = 1 << 30 };

static uint64_t peer_bytes(const sluice_comm_t* comm) {
  return (uint64_t)comm->world_size * sizeof(sluice_move_peer_t);
}

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

sluice_status_t sluice_move_open(sluice_comm_t* comm, const sluice_migration_config_t* config,
                                 sluice_migration_t** out_migration) {
  SLUICE_TRY(SLUICE_REQUIRE(comm != NULL, "sluice_migration_create: comm is NULL"));
  SLUICE_TRY(check_config(config));
  sluice_migration_t* m = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *m, "migration");
  if (m == NULL) return sluice_alloc_status();
  m->peers = sluice_alloc_zeroed(sluice_process_allocator(), peer_bytes(comm), "migration: peers");
  if (m->peers == NULL) {
    sluice_free(sluice_process_allocator(), m, sizeof *m);
    return sluice_alloc_status();
  }
  m->config = *config;
  m->config.next = NULL;
  m->epoch = m->target = config->epoch;
  m->phase = SLUICE_MIGRATION_NONE;
  sluice_allocator_init(&m->memory, NULL, NULL, NULL);
  pthread_mutex_init(&m->mutex, NULL);
  sluice_cond_init(&m->changed);
  sluice_comm_retain(comm);
  m->comm = comm;
  *out_migration = m;
  return SLUICE_OK;
}

void sluice_move_close(sluice_migration_t* m) {
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

void sluice_move_read_progress(sluice_migration_t* m, sluice_migration_progress_t* out_progress) {
  pthread_mutex_lock(&m->memory.mutex);
  const uint64_t staged = m->memory.current_bytes, peak = m->memory.peak_bytes;
  pthread_mutex_unlock(&m->memory.mutex);
  *out_progress = (sluice_migration_progress_t){.struct_size = sizeof *out_progress,
                                                .epoch = m->epoch,
                                                .target = m->target,
                                                .leaving_bytes = m->list.leaving_bytes,
                                                .arriving_bytes = m->list.arriving_bytes,
                                                .hidden_bytes = m->hidden_bytes,
                                                .staged_bytes = staged,
                                                .peak_staged_bytes = peak,
                                                .commit_seconds = sluice_seconds(m->commit_ns),
                                                .phase = m->phase};
}
