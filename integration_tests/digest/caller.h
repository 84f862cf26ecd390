// SPDX-License-Identifier: Apache-2.0
/* The program's interface to the library. caller.c implements it with the C ABI of this tree. A comparison with an
 * older commit builds this program with that commit's caller.c, so keep this header as it is. */
#pragma once

#include "data.h"

/* Returns the maximum of a number over the ranks of a call, without the library. Waits for all ranks. */
typedef struct meet_s meet_t;
uint64_t meet_most(meet_t* meet, uint64_t mine);

/* The report of a rank, in addition to the blocks. */
typedef struct outcome_s {
  char refusal[640];   /* "STATUS: message" of the first call that failed; "" when none has */
  int64_t chunks;      /* n of the last pass */
  uint64_t sent;       /* payload bytes to other ranks, all passes */
  uint64_t saved;      /* bytes of saved buffers of the last forward */
  uint64_t planned;    /* under a plan of the host's: bytes in all */
  uint64_t fallback;   /* under a budget: chunks that did not fit */
  int64_t rows_hash;   /* received rows by local expert, of a step or of a dispatch */
  int64_t most_rows;   /* under a ceiling: rows for one expert in one chunk at most, */
  int64_t num_dropped; /* and routes beyond it */
} outcome_t;

typedef struct caller_group_s caller_group_t; /* of all ranks of a call */
typedef struct caller_s caller_t;             /* of one rank: communicator, context, layer */

caller_group_t* caller_open_group(const call_t* call);
void caller_close_group(caller_group_t* group);
/* Each rank has its own thread, which makes all further calls. Both functions accept the result of a failed open. */
caller_t* caller_open(caller_group_t* group, rank_data_t* data, meet_t* meet, outcome_t* outcome);
void caller_close(caller_t* caller);
/* Runs forward and backward of the call on the data's blocks; results are complete on return. */
void caller_step(caller_t* caller);
/* Fills in the outcome of all steps. */
void caller_report(caller_t* caller);
