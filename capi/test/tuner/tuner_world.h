// SPDX-License-Identifier: Apache-2.0
/* Ranks as threads that train small layers with a tuner, and their results. */
#ifndef SLUICE_CAPI_TEST_TUNER_TUNER_WORLD_H_
#define SLUICE_CAPI_TEST_TUNER_TUNER_WORLD_H_

#include "sluice/sluice.h"

#define MAX_RANKS  4
#define MAX_LAYERS 96
#define M          16
#define H          32

/* The costs of an invented machine. */
extern const char* const tuner_machine;

typedef struct tuner_world_s {
  int32_t world_size, steps, layers;
  int32_t changes; /* T changes after this many steps; 0: never */
  int32_t uneven;  /* the smaller a batch is, the more of its routes go to the first rank */
  int32_t grows;   /* T is larger in the second half */
  /* steps continue, up to three times as many, until this many in a row are settled: a race may be late */
  int32_t waits;
  int32_t mode[MAX_RANKS]; /* of each rank's tuner */
  int32_t has_machine[MAX_RANKS];
  const char* machine[MAX_RANKS]; /* NULL: tuner_machine */
  int32_t num_chunks, wgrad_mode;
  const char* import[MAX_RANKS];  /* decisions to begin with */
  const char* refused[MAX_RANKS]; /* decisions that are imported before, and are invalid */
  uint64_t budget;
  int32_t deduplicate;
  int32_t top_k;          /* 0: 1 */
  int32_t ranks_per_node; /* 0: not said */
  int32_t reuse;          /* without a budget */
  /* This many forwards are outstanding, as in a pipeline, and each is replayed before its backward, as with activation
   * checkpointing. 0: none is replayed. */
  int32_t repeats;
  int32_t reverse;      /* the last one first */
  int32_t same_routing; /* a rank (from 1) whose forwards all have the same routing */
  int32_t forgets;      /* a rank (from 1) that does not declare its replays */
  int32_t shapes;       /* 2: every other layer has half the hidden width */
  int32_t replaces;     /* the first layer is destroyed and created again after this many steps; 0: never */
  int32_t evaluates;    /* forwards without gradients before each step, of half its tokens */
  int32_t empty;        /* a rank (from 1) that has no tokens in every other step */
  sluice_local_group_t* group;
  /* found */
  sluice_status_t status[MAX_RANKS];
  char message[MAX_RANKS][1024];
  int32_t picks[MAX_RANKS][4096];
  int32_t num_picks[MAX_RANKS];
  uint64_t sent_bytes[MAX_RANKS];   /* by the last layer's last step */
  int32_t settled[MAX_RANKS];       /* the number of last passes with a settled answer */
  int32_t num_different[MAX_RANKS]; /* replayed forwards that left another n or other bytes than the original */
  int32_t num_mixed[MAX_RANKS];     /* steps whose outstanding forwards had not all the same n */
  sluice_tuner_decision_t decisions[MAX_RANKS][64];
  sluice_tuner_policy_t policies[MAX_RANKS][64];
  sluice_tuner_form_t forms[MAX_RANKS][64];
  int32_t last_deduplicate[MAX_RANKS];
  int32_t num_copied[MAX_RANKS]; /* steps that sent copies of tokens */
  int32_t parts[MAX_RANKS][64];  /* chunks that each decision's plan keeps */
  uint64_t peak_bytes[MAX_RANKS];
  uint64_t first_bytes[MAX_RANKS]; /* between steps: allocated after the first pass, and after the last */
  uint64_t last_bytes[MAX_RANKS];
  int32_t num_decisions[MAX_RANKS];
  sluice_tuner_stats_t stats[MAX_RANKS];
  char written[MAX_RANKS][65536];
  char refined[MAX_RANKS][65536]; /* the machine as steps corrected it; "" without one */
} tuner_world_t;

/* 120 steps of two layers, weight gradients left open. One at a time: the next call reuses the same memory. */
tuner_world_t* tuner_world(int32_t world_size, int32_t mode, int32_t has_machine);
void tuner_run(tuner_world_t* w);
/* All ranks ran, with the same n in every step and the same decisions. */
void must_agree(const tuner_world_t* w);

#endif /* SLUICE_CAPI_TEST_TUNER_TUNER_WORLD_H_ */
