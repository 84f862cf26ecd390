// SPDX-License-Identifier: Apache-2.0
/* Checks the protocol: explores every order of events of a few ranks. Each rank trains a step and sends the contents of
 * its place to the next rank, while messages are in flight, ranks are killed, are late, and refuse.
 *
 * For each place the checker knows the parts that must move together, the expert of each part, and the number of
 * updates of each part. */
#pragma once

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
  SLUICE_MOVE_FAULT_TABLE,   /* the table of slots names another expert than the one in the place */
  SLUICE_MOVE_FAULT_DEADLOCK /* a live rank waits for ever */
};

typedef struct sluice_move_check_options_s {
  const sluice_move_rule_t* rules;
  int32_t num_rules;
  int32_t num_ranks;    /* [2, SLUICE_MOVE_CHECK_MAX_RANKS] */
  int32_t max_killed;   /* maximum number of ranks that are killed, at any time */
  int32_t max_late;     /* maximum number of times that a waiting rank gives up although no rank is gone */
  int32_t max_refusals; /* maximum number of ranks that refuse, at any time before they are ready */
  /* The behaviour of the host and the executor; tests inject errors here. */
  int32_t parts;         /* SLUICE_MOVE_PART_*: the parts that are sent */
  int32_t updates_first; /* the host updates streamed state, and only then reaches the boundary */
  int32_t keeps_table;   /* the host does not replace the table of slots */
} sluice_move_check_options_t;

/* Sets the real protocol, num_ranks 2, and no failures. */
void sluice_move_check_options_init(sluice_move_check_options_t* options);

/* out_fault: SLUICE_MOVE_FAULT_*, the first one found, on a shortest path; out_rank: its rank. out_states: number of
 * states visited. Errors: INVALID_ARGUMENT, NO_MEMORY. */
sluice_status_t sluice_move_check(const sluice_move_check_options_t* options, sluice_allocator_t* allocator,
                                  int32_t* out_fault, int32_t* out_rank, int64_t* out_states);
