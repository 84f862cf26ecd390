// SPDX-License-Identifier: Apache-2.0
#include "backend/schedule/op_table.h"

#define FORWARD       SLUICE_OP_IN_FORWARD
#define BACKWARD      SLUICE_OP_IN_BACKWARD
#define BOTH          (FORWARD | BACKWARD)
#define ON(lane)      (SLUICE_LANE_##lane + 1)
#define PRICE(name)   SLUICE_PRICE_##name
#define SCALARS(when) SLUICE_SCALARS_##when
#define T(name)       SLUICE_T_##name
#define COUNT(...)    ((int32_t)(sizeof((int16_t[]){__VA_ARGS__}) / sizeof(int16_t)))
#define READS(...)    .reads = {__VA_ARGS__}, .num_reads = COUNT(__VA_ARGS__)
#define WRITES(...)   .writes = {__VA_ARGS__}, .num_writes = COUNT(__VA_ARGS__)

/* A row describes the op, then its accesses. */
/* clang-format off */
static const sluice_op_row_t rows[SLUICE_OP_COUNT] = {
    [SLUICE_OP_DISPATCH] = {.name = "dispatch", .letter = "S", .passes = FORWARD,
        .lane = ON(COMM), .price = PRICE(SEND), .is_exchange = 1, .scalars = SCALARS(WHERE_DEDUP),
        WRITES(T(SEND), T(RECV))},
    [SLUICE_OP_UNPACK] = {.name = "unpack", .letter = "u", .passes = BOTH,
        .lane = ON(COMM), .price = PRICE(PLACE),
        READS(T(RECV)), WRITES(T(DI))},
    [SLUICE_OP_GEMM1] = {.name = "gemm1", .letter = "G1", .passes = FORWARD,
        .lane = ON(COMPUTE), .price = PRICE(FIRST_GEMM),
        READS(T(DI)), WRITES(T(M))},
    [SLUICE_OP_ACTIVATION] = {.name = "activation", .letter = "a", .passes = FORWARD,
        .lane = ON(COMPUTE), .price = PRICE(ACTIVATION),
        READS(T(M)), WRITES(T(M), T(ACT))},
    [SLUICE_OP_GEMM2] = {.name = "gemm2", .letter = "G2", .passes = FORWARD,
        .lane = ON(COMPUTE), .price = PRICE(SECOND_GEMM),
        READS(T(ACT)), WRITES(T(DO))},
    [SLUICE_OP_EXPERT] = {.name = "expert", .letter = "E", .passes = BOTH,
        .lane = ON(COMPUTE), .price = PRICE(EXPERT),
        READS(T(DI)), WRITES(T(DO))},
    [SLUICE_OP_COMBINE] = {.name = "combine", .letter = "R", .passes = FORWARD,
        .lane = ON(COMM), .price = PRICE(RETURN), .is_exchange = 1,
        READS(T(DO)), WRITES(T(SEND), T(RECV))},
    [SLUICE_OP_REDUCE] = {.name = "reduce", .letter = "y", .passes = FORWARD,
        .lane = ON(COMM), .price = PRICE(SUM),
        READS(T(RECV)), WRITES(T(OUT))},
    [SLUICE_OP_DISPATCH_GRAD] = {.name = "dispatch_grad", .letter = "S'", .passes = BACKWARD,
        .lane = ON(COMM), .price = PRICE(SEND), .is_exchange = 1, .scalars = SCALARS(ALWAYS),
        WRITES(T(SEND), T(RECV))},
    [SLUICE_OP_UNPACK_GRAD] = {.name = "unpack_grad", .letter = "u'", .passes = BACKWARD,
        .lane = ON(COMM), .price = PRICE(PLACE),
        READS(T(RECV)), WRITES(T(DDO), T(ROUTE))},
    [SLUICE_OP_GEMM2_GRAD] = {.name = "gemm2_grad", .letter = "G2'", .passes = BACKWARD,
        .lane = ON(COMPUTE), .price = PRICE(SECOND_GRAD),
        READS(T(DDO)), WRITES(T(DACT))},
    [SLUICE_OP_ACTIVATION_GRAD] = {.name = "activation_grad", .letter = "a'", .passes = BACKWARD,
        .lane = ON(COMPUTE), .price = PRICE(ACTIVATION_GRAD),
        READS(T(M), T(DACT), T(ROUTE), T(DDO)), WRITES(T(DM), T(DGATE))},
    [SLUICE_OP_GEMM1_GRAD] = {.name = "gemm1_grad", .letter = "G1'", .passes = BACKWARD,
        .lane = ON(COMPUTE), .price = PRICE(FIRST_GRAD),
        READS(T(DM)), WRITES(T(DDI))},
    [SLUICE_OP_EXPERT_GRAD] = {.name = "expert_grad", .letter = "E'", .passes = BACKWARD,
        .lane = ON(COMPUTE), .price = PRICE(EXPERT_GRAD),
        READS(T(DI), T(DO), T(ROUTE), T(DDO)), WRITES(T(DDO), T(DDI), T(DGATE))},
    [SLUICE_OP_COMBINE_GRAD] = {.name = "combine_grad", .letter = "R'", .passes = BACKWARD,
        .lane = ON(COMM), .price = PRICE(RETURN), .is_exchange = 1, .scalars = SCALARS(ALWAYS),
        READS(T(DDI), T(DGATE)), WRITES(T(SEND), T(RECV))},
    [SLUICE_OP_REDUCE_GRAD] = {.name = "reduce_grad", .letter = "y'", .passes = BACKWARD,
        .lane = ON(COMM), .price = PRICE(SUM),
        READS(T(RECV)), WRITES(T(OUT))},
    [SLUICE_OP_WEIGHT_GRAD] = {.name = "weight_grad", .letter = "dW", .passes = BACKWARD,
        .lane = ON(COMPUTE), .price = PRICE(WEIGHT_GRAD),
        READS(T(DI), T(DDO), T(ROUTE), T(DM), T(DACT)), WRITES(T(DW))},
    [SLUICE_OP_COPY_OUT] = {.name = "copy_out", .letter = "out", .passes = FORWARD,
        .lane = ON(COPY_OUT), .price = PRICE(COPY), .is_copy = 1},
    [SLUICE_OP_COPY_IN] = {.name = "copy_in", .letter = "in", .passes = BACKWARD,
        .lane = ON(COPY_IN), .price = PRICE(COPY), .is_copy = 1},
    [SLUICE_OP_REDISPATCH] = {.name = "redispatch", .letter = "S again", .passes = BACKWARD,
        .lane = ON(COMM), .price = PRICE(SEND), .is_exchange = 1,
        WRITES(T(SEND), T(RECV))},
    [SLUICE_OP_RECOMPUTE] = {.name = "recompute", .letter = "re", .passes = BACKWARD,
        .lane = ON(COMPUTE), .price = PRICE(FIRST_GEMM),
        READS(T(DI)), WRITES(T(M))},
    [SLUICE_OP_NODE_DISPATCH] = {.name = "node_dispatch", .letter = "Sn", .passes = BOTH,
        .lane = ON(COMM), .price = PRICE(NODE_SEND), .is_exchange = 1,
        READS(T(NODE)), WRITES(T(SEND), T(RECV))},
    [SLUICE_OP_NODE_COMBINE] = {.name = "node_combine", .letter = "Rn", .passes = FORWARD,
        .lane = ON(COMM), .price = PRICE(NODE_RETURN), .is_exchange = 1,
        READS(T(DO), T(COPY_WEIGHTS)), WRITES(T(SEND), T(NODE))},
    [SLUICE_OP_NODE_DISPATCH_GRAD] = {.name = "node_dispatch_grad", .letter = "Sn'", .passes = BACKWARD,
        .lane = ON(COMM), .price = PRICE(NODE_SEND), .is_exchange = 1,
        READS(T(NODE)), WRITES(T(SEND), T(RECV))},
    [SLUICE_OP_NODE_COMBINE_GRAD] = {.name = "node_combine_grad", .letter = "Rn'", .passes = BACKWARD,
        .lane = ON(COMM), .price = PRICE(NODE_RETURN), .is_exchange = 1,
        READS(T(DDI)), WRITES(T(SEND), T(NODE))},
};
/* clang-format on */

const sluice_op_row_t* sluice_op_row(int32_t kind) { return &rows[kind]; }

int32_t sluice_op_lane(int32_t kind) { return rows[kind].lane - 1; }

static int is_known(int32_t kind) { return kind >= 0 && kind < SLUICE_OP_COUNT; }

const char* sluice_op_name(int32_t kind) { return is_known(kind) ? rows[kind].name : "unknown"; }

int sluice_op_is_exchange(int32_t kind) { return is_known(kind) && rows[kind].is_exchange; }
