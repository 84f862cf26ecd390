// SPDX-License-Identifier: Apache-2.0
/* How state changes its owner while training runs, as data: what a rank does on each event. The executor (run) and the
 * checker (check.h) read one table.
 *
 * One move, of any number of experts, goes from an epoch to the next:
 *
 *   announce  all ranks open a connection of their own, and say what they send and expect
 *   stream    what does not change before the boundary travels while the host trains
 *   flush     at the boundary: the rest travels
 *   ready     a rank has all that comes to it, and its own is out. It says so to all
 *   agree     it has heard that from all, and says so. From here on it cannot go back alone
 *   commit    it has heard *that* from all: what is staged goes to its place
 *
 * Nothing that the host owns is written before the commit, so to abort is to forget. A rank that loses another one
 * before it has agreed aborts: nobody can have committed. One that loses it afterwards cannot know, keeps what it has
 * staged, and is *undecided* until it has settled with all who are left: one that has committed decides for all, else
 * all commit where all have agreed, else all abort.
 *
 * Source: three-phase commit and its termination rule (Skeen, SIGMOD 1981), without a coordinator. */
#ifndef SLUICE_BACKEND_MIGRATION_PROTOCOL_H_
#define SLUICE_BACKEND_MIGRATION_PROTOCOL_H_

#include "sluice/migration.h"

enum {
  SLUICE_MOVE_EVENT_BEGIN = 0,   /* of the host */
  SLUICE_MOVE_EVENT_BOUNDARY,    /* of the host: its step is where the move takes effect */
  SLUICE_MOVE_EVENT_ALL_HERE,    /* all that comes is staged, all that goes is out */
  SLUICE_MOVE_EVENT_ALL_READY,   /* said by all others */
  SLUICE_MOVE_EVENT_ALL_AGREED,  /* said by all others */
  SLUICE_MOVE_EVENT_REFUSED,     /* this rank or another one will not */
  SLUICE_MOVE_EVENT_LOST,        /* a rank is gone or late: nothing is heard any more */
  SLUICE_MOVE_EVENT_SETTLED_NEW, /* with all who are left */
  SLUICE_MOVE_EVENT_SETTLED_OLD,
  SLUICE_MOVE_NUM_EVENTS
};

/* What a rank says to all others. */
enum { SLUICE_MOVE_SAY_NOTHING = 0, SLUICE_MOVE_SAY_READY, SLUICE_MOVE_SAY_AGREE, SLUICE_MOVE_SAY_REFUSE };

/* What it does with what is staged. */
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

/* All rules; an event that a phase has no rule for does not occur in it. */
const sluice_move_rule_t* sluice_move_rules(int32_t* out_count);
/* NULL: there is none. */
const sluice_move_rule_t* sluice_move_find_rule(const sluice_move_rule_t* rules, int32_t count, int32_t from,
                                                int32_t event);

/* The epoch of all who are left. most_in_force: of the epochs in force among them; least_agreed: of what each would
 * come to, the epoch that an undecided one has agreed to, or that which is in force. */
uint64_t sluice_move_settled_epoch(uint64_t most_in_force, uint64_t least_agreed);

#endif /* SLUICE_BACKEND_MIGRATION_PROTOCOL_H_ */
