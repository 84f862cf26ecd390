// SPDX-License-Identifier: Apache-2.0
/* The candidates for the number of chunks n. Predictions cost no step, so with them the search during training
 * considers each n from 1 to SLUICE_MOST_CHOSEN_CHUNKS. Plans under a budget, and races without predictions, use a
 * short list. */
#pragma once

#include <stdint.h>

#define SLUICE_MOST_CHOSEN_CHUNKS 16
#define SLUICE_NUM_CHUNK_COUNTS   8

/* 1, 2, 3, 4, 6, 8, 12, 16. */
extern const int32_t sluice_chunk_counts[SLUICE_NUM_CHUNK_COUNTS];

/* In grouped exchanges the combine of chunk i and the dispatch of chunk i + SLUICE_GROUPED_CHUNKS form a group. */
#define SLUICE_GROUPED_CHUNKS 2
