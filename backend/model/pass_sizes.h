// SPDX-License-Identifier: Apache-2.0
/* Bytes that a pass holds, from a layer's shape alone: rows of its tensors, scratch, sums of weight gradients. Plans
 * and allocations both use these functions. */
#pragma once

#include "backend/model/shape.h"
#include "backend/model/tensors.h"

/* Sizes of records that folders above define; each folder asserts its own. */
#define SLUICE_STEP_BYTES     496u  /* sluice_step_t */
#define SLUICE_LAYER_BYTES    1800u /* sluice_moe_t */
#define SLUICE_GEMM_BYTES     96u   /* sluice_gemm_problem_t */
#define SLUICE_PACKED_BYTES   40u   /* sluice_packed_t, one for each GEMM of a layer whose weights are packed */
#define SLUICE_OP_TIMES_BYTES 24u   /* sluice_op_times_t */
#define SLUICE_HEADER_BYTES   1024u /* the header of a call to one rank, followed by the counts that fit */
#define SLUICE_CPU_JOB_BYTES  28u   /* record of an op on a CPU while a pass runs */
/* Handles of a CPU's device and GEMMs. */
#define SLUICE_CPU_CONTEXT_BYTES 2048u

/* Memory that GEMMs without memory of their own may borrow. */
#define SLUICE_BORROWED_GEMM_BYTES ((uint64_t)8 << 20)

/* Bytes of the headers to and from all ranks; 0 for one rank. */
uint64_t sluice_headers_bytes(int32_t world_size);
/* Bytes of a layer's placement tables and counters of rows; the offset of the counters. */
uint64_t sluice_layer_tables_bytes(int32_t num_experts, int32_t world_size);
uint64_t sluice_layer_loads_offset(int32_t num_experts, int32_t world_size);

/* Bytes of one row of a tensor in expert order; 0 for the host's own tensors. */
uint64_t sluice_row_bytes(const sluice_shape_t* shape, int32_t tensor);

/* The most GEMMs of one list. */
int64_t sluice_pass_gemms(const sluice_shape_t* shape);
/* The scratch of a pass, which follows its slots, in separate blocks: three of scalars, one of each other.
 * scalar_bytes: of one f32 for each row of the largest chunk.
 * adapters: factors of adapters in the layer's dtype, as many at a time as fit.
 * decoded: packed weights that a device with memory of its own decodes, of several experts or at least of one; 0: a
 * CPU's GEMMs borrow theirs. */
typedef struct sluice_pass_scratch_s {
  uint64_t exchange, scalars, gemms, times, adapters, decoded;
} sluice_pass_scratch_t;
sluice_pass_scratch_t sluice_pass_scratch(const sluice_shape_t* shape, uint64_t scalar_bytes, int32_t num_ops);
/* Bytes of all blocks in an arena. */
uint64_t sluice_pass_scratch_bytes(const sluice_shape_t* shape, uint64_t scalar_bytes, int32_t num_ops);
/* Bytes of the blocks in row memory, with a device with memory of its own. */
uint64_t sluice_pass_device_scratch_bytes(const sluice_shape_t* shape, uint64_t scalar_bytes);

/* Elements of one expert's gradient of a parameter; 0: the layer has no such parameter, or it is frozen. */
typedef enum sluice_parameter_e {
  SLUICE_W1 = 0,
  SLUICE_W3,
  SLUICE_W2,
  SLUICE_B1,
  SLUICE_B3,
  SLUICE_B2,
  SLUICE_LA1, /* adapters, with lora_rank */
  SLUICE_LB1,
  SLUICE_LA3,
  SLUICE_LB3,
  SLUICE_LA2,
  SLUICE_LB2,
  SLUICE_NUM_PARAMETERS
} sluice_parameter_t;
uint64_t sluice_parameter_elements(const sluice_shape_t* shape, int32_t parameter);
/* The offset of a parameter's f32 sum in the block of its expert; SLUICE_NUM_PARAMETERS: the size of a block. */
uint64_t sluice_weight_sum_offset(const sluice_shape_t* shape, int32_t parameter);
/* The most bytes of a backward's sums of weight gradients if gradients have the layer's dtype. is_mixed: restore
 * policies may differ between chunks, so that an expert's rows are not contiguous. */
uint64_t sluice_weight_sum_most(const sluice_shape_t* shape, int32_t wgrad_mode, int32_t num_chunks, int is_mixed);

/* The weight-gradient mode, SLUICE_WGRAD_DEFERRED or _PER_CHUNK, in which a backward of n chunks over `rows` received
 * rows holds fewer bytes if these tensors are restored. Deferred weight gradients hold dT_DO and dT_ACT of all chunks,
 * and the restored rows of T_DI and T_M; 16-bit ones per chunk hold f32 sums of all gradients. The same on all ranks
 * that restore the same tensors. */
int32_t sluice_leanest_wgrad_mode(const sluice_shape_t* shape, int restores_input, int restores_pre_activation,
                                  int32_t num_chunks, int64_t rows);
