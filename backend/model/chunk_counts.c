// SPDX-License-Identifier: Apache-2.0
#include "backend/model/chunk_counts.h"

const int32_t sluice_chunk_counts[SLUICE_NUM_CHUNK_COUNTS] = {1, 2, 3, 4, 6, 8, 12, 16};
