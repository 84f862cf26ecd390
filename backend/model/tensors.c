// SPDX-License-Identifier: Apache-2.0
#include "backend/model/tensors.h"

const int32_t sluice_chunk_counts[SLUICE_NUM_CHUNK_COUNTS] = {1, 2, 3, 4, 6, 8, 12, 16};

const int32_t sluice_deferred_tensors[SLUICE_NUM_DEFERRED] = {SLUICE_T_DI,    SLUICE_T_M,    SLUICE_T_DDO,
                                                              SLUICE_T_ROUTE, SLUICE_T_DACT, SLUICE_T_DM};

const int32_t sluice_saved_tensors[SLUICE_SAVED_COUNT] = {
    [SLUICE_SAVED_META] = -1,
    [SLUICE_SAVED_INPUT] = SLUICE_T_KEPT_DI,
    [SLUICE_SAVED_PRE_ACTIVATION] = SLUICE_T_KEPT_M,
    [SLUICE_SAVED_HOST_INPUT] = SLUICE_T_HOST_DI,
    [SLUICE_SAVED_HOST_PRE_ACTIVATION] = SLUICE_T_HOST_M,
};
