#include "backend/model/tensors.h"

const int32_t sluice_deferred_tensors[SLUICE_NUM_DEFERRED] = {SLUICE_T_DI,    SLUICE_T_M,    SLUICE_T_DDO,
                                                              SLUICE_T_ROUTE, SLUICE_T_DACT, SLUICE_T_DM};
