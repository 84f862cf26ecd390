// SPDX-License-Identifier: Apache-2.0
/* A checker of the protocol: every order of events of a few ranks, each of which trains a step and gives what is in its
 * place to the next one, while messages are under way, ranks are killed, come too late, and refuse.
 *
 * Of what is in a place it knows the parts that have to travel together, whose they are, and how many updates they
 * have had. */
#ifndef SLUICE_BACKEND_MIGRATION_CHECK_H_
#define SLUICE_BACKEND_MIGRATION_CHECK_H_

#include "backend/base/alloc.h"
#include "backend/migration/protocol.h"

enum { SLUICE_MOVE_CHECK_MAX_RANKS = 4 };

enum {
  SLUICE_MOVE_PART_WEIGHTS = 1,
  SLUICE_MOVE_PART_STATE = 2, /* masters, moments, step counts */
  SLUICE_MOVE_PART_GRADIENTS = 4,
  SLUICE_MOVE_PARTS_ALL = 7
};

enum {
  SLUICE_MOVE_FAULT_NONE = 0,
  SLUICE_MOVE_FAULT_EPOCHS,  /* one rank has committed, another has aborted */
  SLUICE_MOVE_FAULT_MIXED,   /* parts of different experts in one place */
  SLUICE_MOVE_FAULT_STEP,    /* a part has missed an update */
  SLUICE_MOVE_FAULT_TABLE,   /* the table of slots names another expert than that which is there */
  SLUICE_MOVE_FAULT_DEADLOCK /* a rank that lives waits for ever */
};

typedef struct sluice_move_check_options_s {
  const sluice_move_rule_t* rules;
  int32_t num_rules;
  int32_t num_ranks;    /* [2, SLUICE_MOVE_CHECK_MAX_RANKS] */
  int32_t max_killed;   /* ranks, at any time */
  int32_t max_late;     /* times that a rank which waits gives up although nobody is gone */
  int32_t max_refusals; /* ranks that will not, at any time before they are ready */
  /* What the host and the executor do; tests plant errors here. */
  int32_t parts;         /* SLUICE_MOVE_PART_*: what travels */
  int32_t updates_first; /* the host updates what has been streamed, then comes to the boundary */
  int32_t keeps_table;   /* and does not replace the table of slots */
  int64_t max_states;    /* 0: no limit */
} sluice_move_check_options_t;

/* The protocol as it is, num_ranks 2, nothing goes wrong. */
void sluice_move_check_options_init(sluice_move_check_options_t* options);

/* out_fault: SLUICE_MOVE_FAULT_*, the first that was found, along a shortest way; out_rank: where. out_states: how many
 * were seen. Errors: INVALID_ARGUMENT, NO_MEMORY, OVER_BUDGET (more than max_states). */
sluice_status_t sluice_move_check(const sluice_move_check_options_t* options, sluice_allocator_t* allocator,
                                  int32_t* out_fault, int32_t* out_rank, int64_t* out_states);

#endif /* SLUICE_BACKEND_MIGRATION_CHECK_H_ */
