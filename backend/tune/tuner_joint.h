/* n and one of S1 to S4 together, where buffers are reused without a budget: a search of n for each strategy, and at
 * each size of a batch a comparison of their answers [MPMoE Algorithm 1 and the paragraph behind it]. Private to
 * backend/tune.
 *
 * The comparison is training too: the answers run in turns, a warm-up step and a few counted ones each on end, those
 * that are close more often, and the least time of a step decides. Mode MODEL compares predictions instead; with a
 * machine ADAPTIVE leaves out strategies whose best prediction is far from the best of all. */
#ifndef SLUICE_BACKEND_TUNE_TUNER_JOINT_H_
#define SLUICE_BACKEND_TUNE_TUNER_JOINT_H_

#include "backend/tune/tuner_state.h"

#define SLUICE_JOINT_STRATEGIES 4

/* Of a strategy at one size. */
typedef struct sluice_joint_step_s {
  float forward_ns_per_row; /* of a step whose backward is still to come; 0: none */
  float best_ns_per_row;    /* of the counted steps */
  uint8_t pick;             /* that they ran */
  uint8_t count;            /* steps, the warm-up among them */
} sluice_joint_step_t;

struct sluice_tuner_joint_s {
  int32_t count;
  sluice_tuner_table_t* tables[SLUICE_JOINT_STRATEGIES]; /* of each strategy that the layer can have */
  uint8_t tried[SLUICE_SEARCH_BUCKETS];                  /* strategies worth a try, a bit each; 0: not asked yet */
  uint8_t is_through[SLUICE_SEARCH_BUCKETS];             /* whether the comparison of their answers is */
  uint8_t told[SLUICE_SEARCH_BUCKETS];                   /* 1 + the strategy that the last decision named; 0: none */
  sluice_joint_step_t steps[SLUICE_SEARCH_BUCKETS][SLUICE_JOINT_STRATEGIES];
};

/* Whether the layer chooses so. */
int sluice_tuner_is_joint(const sluice_moe_t* moe);
/* Whether a layer of this config may have a strategy, an index into sluice_restore_sets. */
int sluice_tuner_allows(const sluice_moe_t* moe, int32_t restore_set);

/* What a pass of `rows` received rows does next; 0: not known yet. out_why: SLUICE_WHY_*. Returns the table of the
 * strategy; *out_pick is a candidate of its search. */
sluice_tuner_table_t* sluice_tuner_joint_next(sluice_tuner_joint_t* joint, int64_t rows, int32_t* out_pick,
                                              int32_t* out_why);
/* What a pass of that size would do next, and nothing changes; NULL: nothing is known of it. */
const sluice_tuner_table_t* sluice_tuner_joint_peek(const sluice_tuner_joint_t* joint, int64_t rows, int32_t* out_pick);
/* The table of a strategy; NULL where there is none. */
sluice_tuner_table_t* sluice_tuner_joint_table(const sluice_tuner_joint_t* joint, int32_t restore_set);
/* A pass that all ranks ran alike. */
void sluice_tuner_joint_observe(sluice_tuner_joint_t* joint, int32_t restore_set, int32_t direction, int32_t pick,
                                int64_t rows, uint64_t ns);

#endif /* SLUICE_BACKEND_TUNE_TUNER_JOINT_H_ */
