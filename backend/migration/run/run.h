// SPDX-License-Identifier: Apache-2.0
/* The executor of the protocol (backend/migration/protocol.h): a rank's moves, over an endpoint of messages that exists
 * only during a move. The public header sluice/migration.h documents each call. */
#pragma once

#include "backend/base/status.h"
#include "sluice/migration.h"

/* config: validated, with defaults filled in. Errors: INVALID_ARGUMENT, NO_MEMORY. */
sluice_status_t sluice_move_open(sluice_comm_t* comm, const sluice_migration_config_t* config,
                                 sluice_migration_t** out_migration);
void sluice_move_close(sluice_migration_t* migration); /* accepts NULL */

sluice_status_t sluice_move_begin(sluice_migration_t* migration, uint64_t epoch, const sluice_migration_item_t* items,
                                  int32_t num_items);
sluice_status_t sluice_move_commit(sluice_migration_t* migration, const char* refusal);
sluice_status_t sluice_move_settle(sluice_migration_t* migration, sluice_comm_t* comm, uint64_t* out_epoch);
sluice_status_t sluice_move_read_early(sluice_migration_t* migration, uint64_t id, int32_t peer,
                                       const sluice_migration_span_t* to, int32_t num_spans, int32_t* out_is_there);
sluice_status_t sluice_move_mark_still(sluice_migration_t* migration, uint64_t id, int32_t peer);
void sluice_move_abort(sluice_migration_t* migration, const char* reason);
void sluice_move_read_progress(sluice_migration_t* migration, sluice_migration_progress_t* out_progress);
