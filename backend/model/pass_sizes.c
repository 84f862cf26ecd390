// SPDX-License-Identifier: Apache-2.0
#include "backend/model/pass_sizes.h"

#include "backend/base/alloc.h"
#include "backend/base/dtype.h"
#include "backend/base/math.h"
#include "backend/model/routing_sizes.h"

uint64_t sluice_headers_bytes(int32_t world_size) {
  const uint64_t w = (uint64_t)world_size;
  return w == 1 ? 0 : 2 * sluice_align_up(w * SLUICE_HEADER_BYTES) + sluice_align_up(w * SLUICE_EXCHANGE_ARRAYS_BYTES);
}

uint64_t sluice_layer_loads_offset(int32_t num_experts, int32_t world_size) {
  return sluice_round_up_u64((uint64_t)(num_experts + world_size + 1) * sizeof(int32_t), sizeof(int64_t));
}

/* Rows by expert and by rank, and the number of forwards. */
uint64_t sluice_layer_tables_bytes(int32_t num_experts, int32_t world_size) {
  return sluice_layer_loads_offset(num_experts, world_size) +
         (uint64_t)(num_experts + world_size + 1) * sizeof(int64_t);
}

uint64_t sluice_row_bytes(const sluice_shape_t* shape, int32_t tensor) {
  const sluice_moe_config_t* c = &shape->config;
  uint64_t element = sluice_dtype_bytes(c->dtype);
  uint64_t width = (uint64_t)c->model_width, hidden = (uint64_t)c->hidden_width;
  switch (tensor) {
    case SLUICE_T_SEND:
    case SLUICE_T_RECV:
    case SLUICE_T_NODE:
    case SLUICE_T_DI:
    case SLUICE_T_KEPT_DI:
    case SLUICE_T_HOST_DI:
    case SLUICE_T_DO:
    case SLUICE_T_DDO:
    case SLUICE_T_DDI: return width * element;
    case SLUICE_T_KEPT_M:
    case SLUICE_T_HOST_M: return sluice_row_bytes(shape, c->callback_experts ? SLUICE_T_DO : SLUICE_T_M);
    case SLUICE_T_M:
    case SLUICE_T_DM: return hidden * (uint64_t)shape->gate_factor * element;
    case SLUICE_T_ACT:
    case SLUICE_T_DACT: return hidden * element;
    case SLUICE_T_ROUTE:
    case SLUICE_T_DGATE: return sizeof(float);
    case SLUICE_T_LOW: return 2 * (uint64_t)c->lora_rank * element;
    case SLUICE_T_COPY_WEIGHTS: return (uint64_t)c->top_k * sizeof(float);
    default: return 0; /* the host's own tensors */
  }
}

/* The largest factor of an adapter, or the most that a list of GEMMs takes: enough for several experts. */
static uint64_t adapters_bytes(const sluice_shape_t* shape) {
  enum { MOST = 1 << 20 };
  const sluice_moe_config_t* c = &shape->config;
  const int64_t widest = sluice_max(c->model_width, shape->gate_factor * c->hidden_width);
  const uint64_t one = sluice_align_up((uint64_t)c->lora_rank * (uint64_t)widest * sluice_dtype_bytes(c->dtype));
  const uint64_t all = 2 * (uint64_t)shape->num_local * one;
  return sluice_min_u64(all, sluice_max_u64(one, MOST));
}

/* Enough to keep a GPU busy between two launches that decode. The largest weight is W1 with W3, contiguous or not. */
static uint64_t decoded_bytes(const sluice_shape_t* shape) {
  enum { MOST = 1 << 26 };
  const sluice_moe_config_t* c = &shape->config;
  if (c->weight_format == SLUICE_WEIGHTS_PLAIN || !shape->on_device_memory) return 0;
  const uint64_t half = (uint64_t)c->hidden_width * (uint64_t)c->model_width * sluice_dtype_bytes(c->dtype);
  const uint64_t one = (uint64_t)shape->gate_factor * sluice_align_up(half);
  return sluice_min_u64((uint64_t)shape->num_local * one, sluice_max_u64(one, MOST));
}

int64_t sluice_pass_gemms(const sluice_shape_t* shape) { return 2 * (int64_t)shape->num_local; }

uint64_t sluice_pass_device_scratch_bytes(const sluice_shape_t* shape, uint64_t scalar_bytes) {
  return 3 * sluice_align_up(scalar_bytes) + sluice_align_up(adapters_bytes(shape)) +
         sluice_align_up(decoded_bytes(shape));
}

sluice_pass_scratch_t sluice_pass_scratch(const sluice_shape_t* shape, uint64_t scalar_bytes, int32_t num_ops) {
  const uint64_t w = (uint64_t)shape->world_size;
  const int is_packed = shape->config.weight_format != SLUICE_WEIGHTS_PLAIN;
  const uint64_t each = SLUICE_GEMM_BYTES + (is_packed ? SLUICE_PACKED_BYTES : 0);
  return (sluice_pass_scratch_t){
      w * SLUICE_EXCHANGE_ARRAYS_BYTES,          scalar_bytes,          (uint64_t)sluice_pass_gemms(shape) * each,
      (uint64_t)num_ops * SLUICE_OP_TIMES_BYTES, adapters_bytes(shape), decoded_bytes(shape)};
}

uint64_t sluice_pass_scratch_bytes(const sluice_shape_t* shape, uint64_t scalar_bytes, int32_t num_ops) {
  const sluice_pass_scratch_t s = sluice_pass_scratch(shape, scalar_bytes, num_ops);
  return sluice_align_up(s.exchange) + 3 * sluice_align_up(s.scalars) + sluice_align_up(s.gemms) +
         sluice_align_up(s.times) + sluice_align_up(s.adapters) + sluice_align_up(s.decoded);
}

uint64_t sluice_parameter_elements(const sluice_shape_t* shape, int32_t parameter) {
  const sluice_moe_config_t* c = &shape->config;
  uint64_t hidden = (uint64_t)c->hidden_width * (c->gated == SLUICE_GATED_INTERLEAVED ? 2 : 1);
  uint64_t width = (uint64_t)c->model_width;
  const uint64_t rank = (uint64_t)c->lora_rank;
  const int halves = c->gated == SLUICE_GATED_HALVES, is_frozen = rank > 0 || c->weight_format != 0;
  switch (parameter) {
    case SLUICE_W1: return is_frozen ? 0 : hidden * width;
    case SLUICE_W3: return halves && !is_frozen ? hidden * width : 0;
    case SLUICE_W2: return is_frozen ? 0 : (uint64_t)c->hidden_width * width;
    case SLUICE_B1: return c->bias ? hidden : 0;
    case SLUICE_B3: return c->bias && halves ? hidden : 0;
    case SLUICE_B2: return c->bias ? width : 0;
    case SLUICE_LA1: return rank * width;
    case SLUICE_LB1: return rank * hidden;
    case SLUICE_LA3: return halves ? rank * width : 0;
    case SLUICE_LB3: return halves ? rank * hidden : 0;
    case SLUICE_LA2: return rank * (uint64_t)c->hidden_width;
    default: return rank * width;
  }
}

uint64_t sluice_weight_sum_offset(const sluice_shape_t* shape, int32_t parameter) {
  uint64_t bytes = 0;
  for (int32_t p = 0; p < parameter; ++p) bytes += sluice_align_up(sluice_parameter_elements(shape, p) * sizeof(float));
  return bytes;
}

uint64_t sluice_weight_sum_most(const sluice_shape_t* shape, int32_t wgrad_mode, int32_t num_chunks, int is_mixed) {
  const sluice_moe_config_t* c = &shape->config;
  const int is_short = c->dtype == SLUICE_DTYPE_BF16 || c->dtype == SLUICE_DTYPE_F16;
  if (c->callback_experts || num_chunks == 1 || !is_short) return 0;
  uint64_t block = sluice_weight_sum_offset(shape, SLUICE_NUM_PARAMETERS);
  if (wgrad_mode == SLUICE_WGRAD_PER_CHUNK) return (uint64_t)shape->num_local * block;
  return is_mixed ? block : 0;
}

int32_t sluice_leanest_wgrad_mode(const sluice_shape_t* shape, int restores_input, int restores_pre_activation,
                                  int32_t num_chunks, int64_t rows) {
  if (num_chunks == 1) return SLUICE_WGRAD_DEFERRED; /* both are the same */
  const sluice_shape_t widest = sluice_shape_widest(shape);
  uint64_t row = sluice_row_bytes(shape, SLUICE_T_DDO) + sluice_row_bytes(shape, SLUICE_T_DACT);
  if (restores_input) row += sluice_row_bytes(shape, SLUICE_T_DI);
  if (restores_pre_activation) row += sluice_row_bytes(shape, SLUICE_T_M);
  const double of_others = (double)rows * (double)row * (num_chunks - 1) / num_chunks; /* in both modes: one chunk's */
  const uint64_t sums = sluice_weight_sum_most(&widest, SLUICE_WGRAD_PER_CHUNK, num_chunks, 0);
  return (double)sums <= of_others ? SLUICE_WGRAD_PER_CHUNK : SLUICE_WGRAD_DEFERRED;
}
