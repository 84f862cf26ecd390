// SPDX-License-Identifier: Apache-2.0
#include "backend/migration/protocol.h"

#include <stddef.h>

#define EVENT(name) SLUICE_MOVE_EVENT_##name
#define SAY(name)   SLUICE_MOVE_SAY_##name
#define DO(name)    SLUICE_MOVE_DO_##name

static const sluice_move_rule_t rules[] = {
    {SLUICE_MIGRATION_NONE, EVENT(BEGIN), SLUICE_MIGRATION_STREAMS, SAY(NOTHING), DO(STREAM)},
    {SLUICE_MIGRATION_NONE, EVENT(REFUSED), SLUICE_MIGRATION_ABORTED, SAY(REFUSE), DO(FORGET)},
    {SLUICE_MIGRATION_NONE, EVENT(LOST), SLUICE_MIGRATION_ABORTED, SAY(NOTHING), DO(FORGET)},
    {SLUICE_MIGRATION_STREAMS, EVENT(BOUNDARY), SLUICE_MIGRATION_FLUSHES, SAY(NOTHING), DO(FLUSH)},
    {SLUICE_MIGRATION_STREAMS, EVENT(REFUSED), SLUICE_MIGRATION_ABORTED, SAY(REFUSE), DO(FORGET)},
    {SLUICE_MIGRATION_STREAMS, EVENT(LOST), SLUICE_MIGRATION_ABORTED, SAY(NOTHING), DO(FORGET)},
    {SLUICE_MIGRATION_FLUSHES, EVENT(ALL_HERE), SLUICE_MIGRATION_READY, SAY(READY), DO(NOTHING)},
    {SLUICE_MIGRATION_FLUSHES, EVENT(REFUSED), SLUICE_MIGRATION_ABORTED, SAY(REFUSE), DO(FORGET)},
    {SLUICE_MIGRATION_FLUSHES, EVENT(LOST), SLUICE_MIGRATION_ABORTED, SAY(NOTHING), DO(FORGET)},
    {SLUICE_MIGRATION_READY, EVENT(ALL_READY), SLUICE_MIGRATION_AGREED, SAY(AGREE), DO(NOTHING)},
    {SLUICE_MIGRATION_READY, EVENT(REFUSED), SLUICE_MIGRATION_ABORTED, SAY(REFUSE), DO(FORGET)},
    {SLUICE_MIGRATION_READY, EVENT(LOST), SLUICE_MIGRATION_ABORTED, SAY(NOTHING), DO(FORGET)},
    {SLUICE_MIGRATION_AGREED, EVENT(ALL_AGREED), SLUICE_MIGRATION_COMMITTED, SAY(NOTHING), DO(INSTALL)},
    /* A rank that refuses has not agreed, and never will, so no rank can have committed. */
    {SLUICE_MIGRATION_AGREED, EVENT(REFUSED), SLUICE_MIGRATION_ABORTED, SAY(REFUSE), DO(FORGET)},
    {SLUICE_MIGRATION_AGREED, EVENT(LOST), SLUICE_MIGRATION_UNDECIDED, SAY(NOTHING), DO(NOTHING)},
    {SLUICE_MIGRATION_UNDECIDED, EVENT(SETTLED_NEW), SLUICE_MIGRATION_COMMITTED, SAY(NOTHING), DO(INSTALL)},
    {SLUICE_MIGRATION_UNDECIDED, EVENT(SETTLED_OLD), SLUICE_MIGRATION_ABORTED, SAY(NOTHING), DO(FORGET)},
};

const sluice_move_rule_t* sluice_move_rules(int32_t* out_count) {
  *out_count = (int32_t)(sizeof rules / sizeof rules[0]);
  return rules;
}

const sluice_move_rule_t* sluice_move_find_rule(const sluice_move_rule_t* of, int32_t count, int32_t from,
                                                int32_t event) {
  for (int32_t i = 0; i < count; ++i) {
    if (of[i].from == from && of[i].event == event) return &of[i];
  }
  return NULL;
}

uint64_t sluice_move_settled_epoch(uint64_t most_in_force, uint64_t least_agreed) {
  return most_in_force > least_agreed ? most_in_force : least_agreed;
}

const char* sluice_migration_phase_name(int32_t phase) {
  static const char* const names[] = {"none", "stream", "flush", "ready", "agree", "undecided", "committed", "aborted"};
  return phase >= 0 && phase <= SLUICE_MIGRATION_ABORTED ? names[phase] : "?";
}
