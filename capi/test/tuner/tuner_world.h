// SPDX-License-Identifier: Apache-2.0
/* Ranks, which are threads, train small layers with a tuner; options and results. */
#pragma once

#include "sluice/sluice.h"

#define MAX_RANKS  4
#define MAX_LAYERS 2
#define M          16
#define H          32

/* The costs of an invented machine. */
extern const char* const tuner_machine;

typedef struct tuner_world_s {
  int32_t world_size, steps, layers;
  int32_t changes; /* T changes after this many steps; 0: never */
  int32_t uneven;  /* the smaller a batch, the more of its routes go to rank 0 */
  int32_t grows;   /* T is larger in the second half */
  /* steps continue, up to three times as many, until this many in a row are settled, since a race may take longer */
  int32_t waits;
  int32_t mode[MAX_RANKS]; /* of each rank's tuner */
  int32_t has_machine[MAX_RANKS];
  const char* machine[MAX_RANKS]; /* NULL: tuner_machine */
  int32_t num_chunks, wgrad_mode;
  const char* import[MAX_RANKS];  /* decisions to import */
  const char* refused[MAX_RANKS]; /* invalid decisions, imported before these */
  uint64_t budget;
  int32_t deduplicate;
  int32_t top_k;          /* 0: 1 */
  int32_t ranks_per_node; /* 0: not set */
  int32_t reuse;          /* buffers are reused, without a budget */
  /* This many forwards are outstanding, as in a pipeline, and each is replayed before its backward, as with activation
   * checkpointing. 0: no replays. */
  int32_t repeats;
  int32_t reverse;      /* the last forward is replayed first */
  int32_t same_routing; /* a rank (from 1) whose forwards all have the same routing */
  int32_t forgets;      /* a rank (from 1) that does not declare its replays */
  int32_t shapes;       /* 2: every other layer has half the hidden width */
  int32_t replaces;     /* the first layer is created again after this many steps; 0: never */
  int32_t evaluates;    /* forwards without gradients before each step, with half of the tokens */
  int32_t empty;        /* a rank (from 1) that has no tokens in every other step */
  sluice_local_group_t* group;
  /* results */
  sluice_status_t status[MAX_RANKS];
  char message[MAX_RANKS][1024];
  int32_t picks[MAX_RANKS][4096];
  int32_t num_picks[MAX_RANKS];
  uint64_t sent_bytes[MAX_RANKS];   /* bytes of the last layer's last step */
  int32_t settled[MAX_RANKS];       /* number of last passes with a settled answer */
  int32_t num_different[MAX_RANKS]; /* replayed forwards with another n or other saved bytes than the original */
  int32_t num_mixed[MAX_RANKS];     /* steps whose outstanding forwards had different n */
  sluice_tuner_decision_t decisions[MAX_RANKS][64];
  sluice_tuner_policy_t policies[MAX_RANKS][64];
  sluice_tuner_form_t forms[MAX_RANKS][64];
  int32_t last_deduplicate[MAX_RANKS];
  int32_t num_copied[MAX_RANKS]; /* steps with deduplicated rows */
  int32_t parts[MAX_RANKS][64];  /* chunks that the plan of each decision keeps */
  uint64_t peak_bytes[MAX_RANKS];
  uint64_t first_bytes[MAX_RANKS]; /* allocated between steps: after the first pass, and after the last */
  uint64_t last_bytes[MAX_RANKS];
  int32_t num_decisions[MAX_RANKS];
  sluice_tuner_stats_t stats[MAX_RANKS];
  char written[MAX_RANKS][65536];
  char refined[MAX_RANKS][65536]; /* the machine as refined by steps; "" without a machine */
} tuner_world_t;

/* 120 steps of two layers with adaptive weight gradients. The next call reuses the memory of the world. */
tuner_world_t* tuner_world(int32_t world_size, int32_t mode, int32_t has_machine);
void tuner_run(tuner_world_t* w);
/* Checks that all ranks ran, with the same n in every step and the same decisions. */
void must_agree(const tuner_world_t* w);
/* Both of these. */
void run_and_agree(tuner_world_t* w);
