/* The numbers of chunks n that are tried where n is open: by plans under a budget, and by the search while training. */
#ifndef SLUICE_BACKEND_MODEL_CHUNK_COUNTS_H_
#define SLUICE_BACKEND_MODEL_CHUNK_COUNTS_H_

#include <stdint.h>

#define SLUICE_NUM_CHUNK_COUNTS 8

/* 1, 2, 3, 4, 6, 8, 12, 16. */
extern const int32_t sluice_chunk_counts[SLUICE_NUM_CHUNK_COUNTS];

/* Exchanges are grouped: a chunk returns while the one that follows it by so many leaves. */
#define SLUICE_GROUPED_CHUNKS 2

#endif /* SLUICE_BACKEND_MODEL_CHUNK_COUNTS_H_ */
