// SPDX-License-Identifier: Apache-2.0
/* The candidates for the number of chunks n. With predictions, which cost no step, the search during training considers
 * each n from 1 to SLUICE_MOST_CHOSEN_CHUNKS. Plans under a budget, and races that no prediction guides, take the few
 * counts of a list. */
#ifndef SLUICE_BACKEND_MODEL_CHUNK_COUNTS_H_
#define SLUICE_BACKEND_MODEL_CHUNK_COUNTS_H_

#include <stdint.h>

#define SLUICE_MOST_CHOSEN_CHUNKS 16
#define SLUICE_NUM_CHUNK_COUNTS   8

/* 1, 2, 3, 4, 6, 8, 12, 16. */
extern const int32_t sluice_chunk_counts[SLUICE_NUM_CHUNK_COUNTS];

/* Exchanges are grouped: the combine of chunk i and the dispatch of chunk i + SLUICE_GROUPED_CHUNKS. */
#define SLUICE_GROUPED_CHUNKS 2

#endif /* SLUICE_BACKEND_MODEL_CHUNK_COUNTS_H_ */
