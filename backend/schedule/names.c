#include "backend/schedule/schedule.h"

static const char* const tensor_names[SLUICE_T_COUNT] = {
    [SLUICE_T_SEND] = "T_SEND",       [SLUICE_T_RECV] = "T_RECV",
    [SLUICE_T_DI] = "T_DI",           [SLUICE_T_M] = "T_M",
    [SLUICE_T_ACT] = "T_ACT",         [SLUICE_T_DO] = "T_DO",
    [SLUICE_T_OUT] = "T_OUT",         [SLUICE_T_DDO] = "dT_DO",
    [SLUICE_T_ROUTE] = "T_ROUTE",     [SLUICE_T_DACT] = "dT_ACT",
    [SLUICE_T_DM] = "dT_M",           [SLUICE_T_DDI] = "dT_DI",
    [SLUICE_T_DGATE] = "dGATE",       [SLUICE_T_DW] = "dW",
    [SLUICE_T_KEPT_DI] = "kept T_DI", [SLUICE_T_KEPT_M] = "kept T_M",
    [SLUICE_T_HOST_DI] = "host T_DI", [SLUICE_T_HOST_M] = "host T_M",
    [SLUICE_T_PARCELS] = "T_PARCELS",
};

const char* sluice_tensor_kind_name(int32_t tensor) {
  return tensor >= 0 && tensor < SLUICE_T_COUNT ? tensor_names[tensor] : "unknown";
}
