// SPDX-License-Identifier: Apache-2.0
#include "backend/schedule/tensor_table.h"

enum { USE = SLUICE_LIVES_FOR_USE, PARTS = SLUICE_LIVES_FOR_SPLIT };
enum { WGRAD = SLUICE_LIVES_FOR_WGRAD, EVER = SLUICE_LIVES_FOR_EVER };

static const sluice_tensor_row_t rows[SLUICE_T_COUNT] = {
    [SLUICE_T_SEND] = {"T_SEND", USE},
    [SLUICE_T_NODE] = {"T_NODE", USE},
    [SLUICE_T_RECV] = {"T_RECV", USE},
    [SLUICE_T_DI] = {"T_DI", PARTS | WGRAD},
    [SLUICE_T_M] = {"T_M", WGRAD},
    [SLUICE_T_ACT] = {"T_ACT", USE},
    [SLUICE_T_DO] = {"T_DO", PARTS},
    [SLUICE_T_OUT] = {"T_OUT", EVER},
    [SLUICE_T_DDO] = {"dT_DO", PARTS | WGRAD},
    [SLUICE_T_ROUTE] = {"T_ROUTE", PARTS | WGRAD},
    [SLUICE_T_DACT] = {"dT_ACT", WGRAD},
    [SLUICE_T_DM] = {"dT_M", WGRAD},
    [SLUICE_T_DDI] = {"dT_DI", PARTS},
    [SLUICE_T_DGATE] = {"dGATE", PARTS},
    [SLUICE_T_DW] = {"dW", EVER},
    [SLUICE_T_KEPT_DI] = {"kept T_DI", EVER},
    [SLUICE_T_KEPT_M] = {"kept T_M", EVER},
    [SLUICE_T_HOST_DI] = {"host T_DI", EVER},
    [SLUICE_T_HOST_M] = {"host T_M", EVER},
    [SLUICE_T_COPY_WEIGHTS] = {"T_COPY_WEIGHTS", USE},
    [SLUICE_T_LOW] = {"T_LOW", USE},
};

const sluice_tensor_row_t* sluice_tensor_row(int32_t tensor) { return &rows[tensor]; }

const char* sluice_tensor_kind_name(int32_t tensor) {
  return tensor >= 0 && tensor < SLUICE_T_COUNT ? rows[tensor].name : "unknown";
}
