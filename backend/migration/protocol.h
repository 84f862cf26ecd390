// SPDX-License-Identifier: Apache-2.0
/* The protocol that moves state to another rank while training runs, as data: what a rank does on each event. The
 * executor (run) and a checker (test/check_test.c) read the same table.
 *
 * One move, of any number of experts, goes from an epoch to the next:
 *   announce  all ranks open a connection for the move, and say what they send and expect
 *   stream    state that does not change before the boundary is sent while the host trains
 *   flush     at the boundary: the rest is sent
 *   ready     a rank has received everything and its own sends are complete. It tells all ranks
 *   agree     it has received ready from all ranks, and tells them. From here on it cannot abort alone
 *   commit    it has received agree from all ranks: staged state is copied to its final place
 *
 * Nothing that the host owns is written before the commit, so to abort is to discard. A rank that loses another one
 * before it has agreed aborts: no rank can have committed. A rank that loses another one afterwards cannot know: it
 * keeps the staged state, and is *undecided* until it has settled with the remaining ranks. If one of them has
 * committed, all commit; else all commit if all have agreed; else all abort.
 *
 * Source: three-phase commit and its termination rule (Skeen, SIGMOD 1981), without a coordinator. */
#pragma once

#include "sluice/migration.h"

enum {
  SLUICE_MOVE_EVENT_BEGIN = 0,   /* of the host */
  SLUICE_MOVE_EVENT_BOUNDARY,    /* of the host: its step is the one at which the move takes effect */
  SLUICE_MOVE_EVENT_ALL_HERE,    /* everything to receive is staged, all sends are complete */
  SLUICE_MOVE_EVENT_ALL_READY,   /* all other ranks are ready */
  SLUICE_MOVE_EVENT_ALL_AGREED,  /* all other ranks have agreed */
  SLUICE_MOVE_EVENT_REFUSED,     /* this rank or another one refuses */
  SLUICE_MOVE_EVENT_LOST,        /* a rank is gone or late: no further messages are received */
  SLUICE_MOVE_EVENT_SETTLED_NEW, /* the remaining ranks settled on the new epoch */
  SLUICE_MOVE_EVENT_SETTLED_OLD,
  SLUICE_MOVE_NUM_EVENTS
};

/* The message that a rank sends to all others. */
enum { SLUICE_MOVE_SAY_NOTHING = 0, SLUICE_MOVE_SAY_READY, SLUICE_MOVE_SAY_AGREE, SLUICE_MOVE_SAY_REFUSE };

/* The action on staged state. */
enum {
  SLUICE_MOVE_DO_NOTHING = 0,
  SLUICE_MOVE_DO_STREAM,
  SLUICE_MOVE_DO_FLUSH,
  SLUICE_MOVE_DO_INSTALL,
  SLUICE_MOVE_DO_FORGET
};

typedef struct sluice_move_rule_s {
  int32_t from, event, to; /* SLUICE_MIGRATION_*, SLUICE_MOVE_EVENT_*, SLUICE_MIGRATION_* */
  int32_t say, act;        /* SLUICE_MOVE_SAY_*, SLUICE_MOVE_DO_* */
} sluice_move_rule_t;

/* Returns all rules; an event without a rule for a phase does not occur in it. */
const sluice_move_rule_t* sluice_move_rules(int32_t* out_count);
/* Returns NULL if there is none. */
const sluice_move_rule_t* sluice_move_find_rule(const sluice_move_rule_t* rules, int32_t count, int32_t from,
                                                int32_t event);

/* Returns the epoch of all remaining ranks. most_in_force: maximum of their epochs in force; least_agreed: minimum over
 * ranks of the epoch that an undecided rank has agreed to, or else its epoch in force. */
uint64_t sluice_move_settled_epoch(uint64_t most_in_force, uint64_t least_agreed);
