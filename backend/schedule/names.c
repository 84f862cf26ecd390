#include "backend/schedule/schedule.h"

static const char* const op_names[SLUICE_OP_COUNT] = {
    [SLUICE_OP_DISPATCH] = "dispatch",
    [SLUICE_OP_UNPACK] = "unpack",
    [SLUICE_OP_GEMM1] = "gemm1",
    [SLUICE_OP_ACTIVATION] = "activation",
    [SLUICE_OP_GEMM2] = "gemm2",
    [SLUICE_OP_EXPERT] = "expert",
    [SLUICE_OP_COMBINE] = "combine",
    [SLUICE_OP_REDUCE] = "reduce",
    [SLUICE_OP_DISPATCH_GRAD] = "dispatch_grad",
    [SLUICE_OP_UNPACK_GRAD] = "unpack_grad",
    [SLUICE_OP_GEMM2_GRAD] = "gemm2_grad",
    [SLUICE_OP_ACTIVATION_GRAD] = "activation_grad",
    [SLUICE_OP_GEMM1_GRAD] = "gemm1_grad",
    [SLUICE_OP_EXPERT_GRAD] = "expert_grad",
    [SLUICE_OP_COMBINE_GRAD] = "combine_grad",
    [SLUICE_OP_REDUCE_GRAD] = "reduce_grad",
    [SLUICE_OP_WEIGHT_GRAD] = "weight_grad",
    [SLUICE_OP_COPY_OUT] = "copy_out",
    [SLUICE_OP_COPY_IN] = "copy_in",
    [SLUICE_OP_REDISPATCH] = "redispatch",
    [SLUICE_OP_RECOMPUTE] = "recompute",
};

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

const char* sluice_op_name(int32_t kind) { return kind >= 0 && kind < SLUICE_OP_COUNT ? op_names[kind] : "unknown"; }

const char* sluice_tensor_kind_name(int32_t tensor) {
  return tensor >= 0 && tensor < SLUICE_T_COUNT ? tensor_names[tensor] : "unknown";
}

int sluice_op_is_exchange(int32_t kind) {
  return kind == SLUICE_OP_DISPATCH || kind == SLUICE_OP_COMBINE || kind == SLUICE_OP_DISPATCH_GRAD ||
         kind == SLUICE_OP_COMBINE_GRAD || kind == SLUICE_OP_REDISPATCH;
}
