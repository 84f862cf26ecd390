// SPDX-License-Identifier: Apache-2.0
/* The public calls of migrations: read the structs, then call backend/migration/run. */
#include "sluice/migration.h"

#include "backend/base/structs.h"
#include "backend/migration/protocol.h"
#include "backend/migration/run/run.h"

SLUICE_DEFINE_INIT(sluice_migration_config, .chunk_bytes = 256 << 10, .gives_way = 1)

sluice_status_t sluice_migration_create(sluice_comm_t* comm, const sluice_migration_config_t* config,
                                        sluice_migration_t** out_migration) {
  SLUICE_TRY(SLUICE_REQUIRE(out_migration != NULL, "sluice_migration_create: out_migration is NULL"));
  *out_migration = NULL;
  SLUICE_READ_EXTENSIBLE(sluice_migration_config, c, config, sizeof c);
  return sluice_move_open(comm, &c, out_migration);
}

void sluice_migration_destroy(sluice_migration_t* migration) { sluice_move_close(migration); }

sluice_status_t sluice_migration_begin(sluice_migration_t* migration, uint64_t epoch,
                                       const sluice_migration_item_t* items, int32_t num_items) {
  SLUICE_TRY(SLUICE_REQUIRE(migration != NULL, "sluice_migration_begin: migration is NULL"));
  return sluice_move_begin(migration, epoch, items, num_items);
}

sluice_status_t sluice_migration_commit(sluice_migration_t* migration, const char* refusal) {
  SLUICE_TRY(SLUICE_REQUIRE(migration != NULL, "sluice_migration_commit: migration is NULL"));
  return sluice_move_commit(migration, refusal);
}

sluice_status_t sluice_migration_read_early(sluice_migration_t* migration, uint64_t id, int32_t peer,
                                            const sluice_migration_span_t* to, int32_t num_spans,
                                            int32_t* out_is_there) {
  SLUICE_TRY(SLUICE_REQUIRE(migration != NULL && out_is_there != NULL,
                            "sluice_migration_read_early: migration and out_is_there may not be NULL"));
  *out_is_there = 0;
  return sluice_move_read_early(migration, id, peer, to, num_spans, out_is_there);
}

sluice_status_t sluice_migration_mark_still(sluice_migration_t* migration, uint64_t id, int32_t peer) {
  SLUICE_TRY(SLUICE_REQUIRE(migration != NULL, "sluice_migration_mark_still: migration is NULL"));
  return sluice_move_mark_still(migration, id, peer);
}

sluice_status_t sluice_migration_settle(sluice_migration_t* migration, sluice_comm_t* comm, uint64_t* out_epoch) {
  SLUICE_TRY(SLUICE_REQUIRE(migration != NULL, "sluice_migration_settle: migration is NULL"));
  return sluice_move_settle(migration, comm, out_epoch);
}

void sluice_migration_abort(sluice_migration_t* migration, const char* reason) {
  if (migration != NULL) sluice_move_abort(migration, reason);
}

sluice_status_t sluice_migration_get_progress(sluice_migration_t* migration,
                                              sluice_migration_progress_t* out_progress) {
  SLUICE_TRY(SLUICE_REQUIRE(migration != NULL && out_progress != NULL,
                            "sluice_migration_get_progress: migration and out_progress may not be NULL"));
  SLUICE_TRY(sluice_struct_check_size(out_progress, "sluice_migration_progress_t"));
  sluice_migration_progress_t progress;
  sluice_move_read_progress(migration, &progress);
  sluice_struct_give(out_progress, &progress, sizeof progress);
  return SLUICE_OK;
}
