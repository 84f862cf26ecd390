// SPDX-License-Identifier: Apache-2.0
#include "capi/src/check_layer.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/structs.h"
#include "backend/model/words.h"
#include "backend/moe/context/row_memory.h"

/* Host tensors are trusted to be what they claim. A pointer to the wrong memory would cause a device fault, which ends
 * the process; therefore on a device every tensor of a call is looked up, but only the first of each array of expert
 * tensors. */
static sluice_status_t check_tensor(const sluice_moe_t* moe, const sluice_tensor_t* tensor, const char* name,
                                    int32_t dtype, int32_t ndim, const int64_t* shape, int is_looked_up) {
  sluice_context_t* context = moe->context;
  SLUICE_TRY(sluice_tensor_check_on(tensor, name, context->device_type, context->device_id, dtype, ndim, shape));
  if (!is_looked_up || sluice_tensor_elements(tensor) == 0) return SLUICE_OK;
  uint64_t element = sluice_dtype_bytes(sluice_tensor_dtype(tensor));
  return sluice_rows_check(context->rows, context, sluice_tensor_data(tensor), element, element, name);
}

sluice_status_t sluice_check_rows(const sluice_moe_t* moe, const sluice_tensor_t* tensor, const char* name,
                                  int64_t num_tokens) {
  const int64_t shape[] = {num_tokens, moe->shape.config.model_width};
  SLUICE_TRY(check_tensor(moe, tensor, name, moe->shape.config.dtype, 2, shape, 1));
  SLUICE_TRY(SLUICE_REQUIRE(tensor->shape[0] <= 0 || tensor->shape[1] <= 1 || sluice_tensor_stride(tensor, 1) == 1,
                            "%s: the stride of dim 1 is %lld; rows must be contiguous (stride 1)", name,
                            (long long)sluice_tensor_stride(tensor, 1)));
  return SLUICE_REQUIRE(tensor->shape[0] <= 1 || sluice_tensor_stride(tensor, 0) >= 0,
                        "%s: the stride of dim 0 is %lld; it may not be negative", name,
                        (long long)sluice_tensor_stride(tensor, 0));
}

sluice_status_t sluice_check_out_rows(const sluice_moe_t* moe, const sluice_tensor_t* tensor, const char* name,
                                      int64_t num_tokens) {
  SLUICE_TRY(sluice_check_rows(moe, tensor, name, num_tokens));
  return SLUICE_REQUIRE(tensor->shape[0] <= 1 || sluice_tensor_stride(tensor, 0) >= moe->shape.config.model_width,
                        "%s: the stride of dim 0 is %lld; rows that are written may not overlap (>= %lld)", name,
                        (long long)sluice_tensor_stride(tensor, 0), (long long)moe->shape.config.model_width);
}

sluice_status_t sluice_check_ids(const sluice_moe_t* moe, const sluice_tensor_t* tensor, int64_t num_tokens) {
  const int64_t shape[] = {num_tokens, moe->shape.config.top_k};
  SLUICE_TRY(check_tensor(moe, tensor, "expert_ids", 0, 2, shape, 1));
  int32_t dtype = sluice_tensor_dtype(tensor);
  return SLUICE_REQUIRE(dtype == SLUICE_DTYPE_I32 || dtype == SLUICE_DTYPE_I64,
                        "expert_ids: dtype is %s; ids are i32 or i64", sluice_dtype_name(dtype));
}

sluice_status_t sluice_check_route_weights(const sluice_moe_t* moe, const sluice_tensor_t* tensor, const char* name,
                                           int64_t num_tokens) {
  const int64_t shape[] = {num_tokens, moe->shape.config.top_k};
  return check_tensor(moe, tensor, name, SLUICE_DTYPE_F32, 2, shape, 1);
}

sluice_status_t sluice_check_out_route_weights(const sluice_moe_t* moe, const sluice_tensor_t* tensor, const char* name,
                                               int64_t num_tokens) {
  SLUICE_TRY(sluice_check_route_weights(moe, tensor, name, num_tokens));
  return sluice_tensor_check_written(tensor, name);
}

/* In a stack, all descriptors may point to one shape: then the bytes between data and byte offset are equal. */
static inline int has_bytes_of(const sluice_tensor_t* a, const sluice_tensor_t* b) {
  const size_t first = offsetof(sluice_tensor_t, device_type), end = offsetof(sluice_tensor_t, byte_offset);
  return memcmp(&a->device_type, &b->device_type, end - first) == 0;
}

static inline int has_form_of(const sluice_tensor_t* a, const sluice_tensor_t* b) {
  return a->device_type == b->device_type && a->device_id == b->device_id && a->type_code == b->type_code &&
         a->type_bits == b->type_bits && a->type_lanes == b->type_lanes;
}

/* Returns whether a tensor equals the first of its array, which has passed every check. Hundreds are checked per call,
 * so this formats no message: if it fails, check_one checks again and does. */
static int is_like_first(const sluice_tensor_t* tensor, const sluice_tensor_t* first, int32_t ndim,
                         const int64_t* shape) {
  if (tensor->data != NULL && has_bytes_of(tensor, first)) return 1;
  if (tensor->strides != NULL && first->strides != NULL && tensor->shape != NULL && tensor->data != NULL &&
      has_form_of(tensor, first) && tensor->ndim == ndim && tensor->shape[0] == shape[0] &&
      tensor->strides[0] == first->strides[0] &&
      (ndim == 1 || (tensor->shape[1] == shape[1] && tensor->strides[1] == first->strides[1]))) {
    return 1; /* true for most, and found without a function call: generation passes one token */
  }
  if (tensor->device_type != first->device_type || tensor->device_id != first->device_id ||
      tensor->type_code != first->type_code || tensor->type_bits != first->type_bits ||
      tensor->type_lanes != first->type_lanes || tensor->ndim != ndim || tensor->shape == NULL ||
      tensor->data == NULL || tensor->shape[0] != shape[0]) {
    return 0;
  }
  if (ndim == 1) return shape[0] == 1 || sluice_tensor_stride(tensor, 0) == 1;
  return tensor->shape[1] == shape[1] &&
         sluice_is_matrix(shape, sluice_tensor_stride(tensor, 0), sluice_tensor_stride(tensor, 1));
}

static sluice_status_t check_one(const sluice_moe_t* moe, const sluice_tensor_t* tensors, int32_t e, const char* name,
                                 int32_t ndim, const int64_t* shape, int gradients) {
  char label[64];
  snprintf(label, sizeof label, "%s[%d]", name, e);
  SLUICE_TRY(check_tensor(moe, &tensors[e], label, gradients ? 0 : moe->shape.config.dtype, ndim, shape, e == 0));
  int32_t dtype = sluice_tensor_dtype(&tensors[e]);
  SLUICE_TRY(SLUICE_REQUIRE(dtype == moe->shape.config.dtype || dtype == SLUICE_DTYPE_F32,
                            "%s: dtype is %s; gradients are %s like the layer, or f32", label, sluice_dtype_name(dtype),
                            sluice_dtype_name(moe->shape.config.dtype)));
  SLUICE_TRY(SLUICE_REQUIRE(dtype == sluice_tensor_dtype(&tensors[0]),
                            "%s: dtype is %s, but that of %s[0] is %s; one dtype per kind", label,
                            sluice_dtype_name(dtype), name, sluice_dtype_name(sluice_tensor_dtype(&tensors[0]))));
  int64_t first = sluice_tensor_stride(&tensors[e], 0), second = ndim == 2 ? sluice_tensor_stride(&tensors[e], 1) : 1;
  SLUICE_TRY(SLUICE_REQUIRE(ndim != 1 || shape[0] <= 1 || first == 1, "%s: the stride is %lld; it must be 1", label,
                            (long long)first));
  return SLUICE_REQUIRE(
      ndim != 2 || sluice_is_matrix(shape, first, second),
      "%s: the strides of [%lld, %lld] are %lld, %lld; one must be 1 and the other at least the size of that "
      "dimension",
      label, (long long)shape[0], (long long)shape[1], (long long)first, (long long)second);
}

static sluice_status_t check_array(const sluice_moe_t* moe, const sluice_tensor_t* tensors, const char* name,
                                   int32_t ndim, const int64_t* shape, int gradients) {
  if (tensors == NULL && gradients) return SLUICE_OK; /* not wanted */
  SLUICE_TRY(SLUICE_REQUIRE(tensors != NULL || moe->shape.num_local == 0,
                            "layer %d: %s is NULL; this layer's config needs it (%d tensors)",
                            moe->shape.config.layer_id, name, moe->shape.num_local));
  for (int32_t e = 0; e < moe->shape.num_local; ++e) {
    if (e > 0 && is_like_first(&tensors[e], &tensors[0], ndim, shape)) continue;
    SLUICE_TRY(check_one(moe, tensors, e, name, ndim, shape, gradients));
  }
  return SLUICE_OK;
}

static sluice_status_t read_experts(const sluice_moe_t* moe, const sluice_expert_tensors_t* experts, const char* name,
                                    sluice_expert_tensors_t* out) {
  SLUICE_TRY(SLUICE_REQUIRE(experts != NULL, "layer %d: %s is NULL", moe->shape.config.layer_id, name));
  memset(out, 0, sizeof *out);
  return sluice_struct_copy(out, sizeof *out, experts, offsetof(sluice_expert_tensors_t, la1),
                            "sluice_expert_tensors_t");
}

/* Checks a packed weight, or rejects its gradient, which does not exist. */
static sluice_status_t check_weight(const sluice_moe_t* moe, const sluice_tensor_t* codes,
                                    const sluice_tensor_t* scales, const char* table, const char* name,
                                    const char* scales_name, const int64_t* shape, int gradients) {
  const sluice_moe_config_t* c = &moe->shape.config;
  if (gradients && (codes != NULL || scales != NULL)) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "layer %d: %s.%s is given, but weights in %s are frozen and have no gradient: leave it NULL, or "
                       "train plain weights",
                       c->layer_id, table, codes != NULL ? name : scales_name, sluice_weights_word(c->weight_format));
  }
  if (gradients) return SLUICE_OK;
  char label[64], scales_label[64];
  snprintf(label, sizeof label, "%s.%s", table, name);
  snprintf(scales_label, sizeof scales_label, "%s.%s", table, scales_name);
  return sluice_check_packed(moe, codes, scales, label, scales_label, shape);
}

static sluice_status_t check_own(const sluice_moe_t* moe, const sluice_expert_tensors_t* experts, const char* name,
                                 int gradients) {
  const sluice_moe_config_t* c = &moe->shape.config;
  int in_turn = c->gated == SLUICE_GATED_INTERLEAVED;
  const int64_t up[] = {in_turn ? 2 * c->hidden_width : c->hidden_width, c->model_width};
  const int64_t down[] = {c->model_width, c->hidden_width};
  char label[64];
#define ARRAY(member, ndim, shape)                       \
  snprintf(label, sizeof label, "%s.%s", name, #member); \
  SLUICE_TRY(check_array(moe, experts->member, label, ndim, shape, gradients))
#define WEIGHT(member, scales, shape)                                                                          \
  if (c->weight_format == SLUICE_WEIGHTS_PLAIN) {                                                              \
    ARRAY(member, 2, shape);                                                                                   \
  } else {                                                                                                     \
    SLUICE_TRY(check_weight(moe, experts->member, experts->scales, name, #member, #scales, shape, gradients)); \
  }
  WEIGHT(w1, s1, up);
  WEIGHT(w2, s2, down);
  if (c->gated == SLUICE_GATED_HALVES) {
    WEIGHT(w3, s3, up);
  }
#undef WEIGHT
  if (c->bias) {
    ARRAY(b1, 1, up);
    ARRAY(b2, 1, down);
    if (c->gated == SLUICE_GATED_HALVES) {
      ARRAY(b3, 1, up);
    }
  }
#undef ARRAY
  return SLUICE_OK;
}

/* ---- adapters ---- */

/* One pair of factors. `shares`: `a` is that of another pair. */
typedef struct adapter_s {
  const char *a_name, *b_name, *scale_name;
  const sluice_tensor_t *a, *b, *grad_a, *grad_b;
  int64_t columns, rows; /* of W */
  float scale;
  int shares; /* a is NULL, and is that of the previous pair */
} adapter_t;

#define NUM_ADAPTERS 3

static void adapters_of(const sluice_moe_t* moe, const sluice_expert_tensors_t* p, const sluice_expert_tensors_t* grads,
                        adapter_t out[NUM_ADAPTERS]) {
  static const sluice_expert_tensors_t none = {0};
  const sluice_expert_tensors_t* g = grads == NULL ? &none : grads;
  const sluice_moe_config_t* c = &moe->shape.config;
  const int64_t hidden = c->hidden_width, up = c->gated == SLUICE_GATED_INTERLEAVED ? 2 * hidden : hidden;
  const int shares = p->la1 != NULL && p->la3 == NULL && p->lb3 != NULL;
  out[0] =
      (adapter_t){"la1", "lb1", "lora_scale1", p->la1, p->lb1, g->la1, g->lb1, c->model_width, up, p->lora_scale1, 0};
  out[1] = (adapter_t){"la3",  "lb3",          "lora_scale3", p->la3,         p->lb3, g->la3,
                       g->lb3, c->model_width, hidden,        p->lora_scale3, shares};
  out[2] = (adapter_t){"la2",  "lb2",  "lora_scale2",  p->la2,         p->lb2, g->la2,
                       g->lb2, hidden, c->model_width, p->lora_scale2, 0};
}

/* A factor is f32 or the layer's dtype, with one dtype and shape for all experts. */
static sluice_status_t check_factor(const sluice_moe_t* moe, const sluice_tensor_t* tensors, const char* name,
                                    const int64_t* shape) {
  const sluice_moe_config_t* c = &moe->shape.config;
  for (int32_t e = 0; e < moe->shape.num_local; ++e) {
    char label[64];
    snprintf(label, sizeof label, "params.%s[%d]", name, e);
    SLUICE_TRY(check_tensor(moe, &tensors[e], label, e == 0 ? 0 : sluice_tensor_dtype(&tensors[0]), 2, shape, 0));
    const int32_t dtype = sluice_tensor_dtype(&tensors[e]);
    SLUICE_TRY(SLUICE_REQUIRE(dtype == c->dtype || dtype == SLUICE_DTYPE_F32,
                              "%s: dtype is %s; adapters are %s like the layer, or f32", label,
                              sluice_dtype_name(dtype), sluice_dtype_name(c->dtype)));
    SLUICE_TRY(SLUICE_REQUIRE(sluice_tensor_stride(&tensors[e], 0) >= 0 && sluice_tensor_stride(&tensors[e], 1) >= 0,
                              "%s: the strides are %lld, %lld; none may be negative", label,
                              (long long)sluice_tensor_stride(&tensors[e], 0),
                              (long long)sluice_tensor_stride(&tensors[e], 1)));
  }
  return SLUICE_OK;
}

static sluice_status_t check_rank(const sluice_moe_t* moe, const char* name, int64_t rank) {
  const sluice_moe_config_t* c = &moe->shape.config;
  if (rank >= 1 && rank <= c->lora_rank) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                     "layer %d: params.%s has rank %lld; it must be in [1, lora_rank = %d]: the config names the "
                     "largest rank",
                     c->layer_id, name, (long long)rank, c->lora_rank);
}

/* before: the pair whose `a` it may share. */
static sluice_status_t check_adapter(const sluice_moe_t* moe, const adapter_t* it, const adapter_t* before) {
  const sluice_moe_config_t* c = &moe->shape.config;
  if (it->a == NULL && it->b == NULL) return SLUICE_OK;
  SLUICE_TRY(
      SLUICE_REQUIRE(c->lora_rank != 0,
                     "layer %d: params.%s is given, but lora_rank is 0: create the layer with the largest rank of its "
                     "adapters",
                     c->layer_id, it->a != NULL ? it->a_name : it->b_name));
  const sluice_tensor_t* a = it->shares ? before->a : it->a;
  SLUICE_TRY(SLUICE_REQUIRE(a != NULL && it->b != NULL,
                            "layer %d: params.%s is given, but %s is NULL: an adapter has both factors", c->layer_id,
                            it->a != NULL ? it->a_name : it->b_name, it->a != NULL ? it->b_name : it->a_name));
  SLUICE_TRY(
      SLUICE_REQUIRE(it->shares || (isfinite(it->scale) && it->scale != 0),
                     "layer %d: params.%s is %g; it must be finite and not 0: pass NULL for an adapter that adds "
                     "nothing",
                     c->layer_id, it->scale_name, (double)it->scale));
  if (moe->shape.num_local == 0) return SLUICE_OK;
  const int64_t any[] = {-1, it->columns};
  if (!it->shares) {
    SLUICE_TRY(sluice_tensor_check_on(a, it->a_name, moe->context->device_type, moe->context->device_id, 0, 2, any));
    SLUICE_TRY(check_rank(moe, it->a_name, a->shape[0]));
    const int64_t shape[] = {a->shape[0], it->columns};
    SLUICE_TRY(check_factor(moe, a, it->a_name, shape));
  }
  const int64_t shape[] = {it->rows, a->shape[0]};
  SLUICE_TRY(check_factor(moe, it->b, it->b_name, shape));
  if (!it->shares || sluice_tensor_dtype(&it->b[0]) == sluice_tensor_dtype(&before->b[0])) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "layer %d: params.lb3 is %s and lb1 is %s; with one la1 they share one",
                     c->layer_id, sluice_dtype_name(sluice_tensor_dtype(&it->b[0])),
                     sluice_dtype_name(sluice_tensor_dtype(&before->b[0])));
}

static sluice_status_t check_adapters(const sluice_moe_t* moe, const sluice_expert_tensors_t* params) {
  const sluice_moe_config_t* c = &moe->shape.config;
  SLUICE_TRY(SLUICE_REQUIRE(c->gated == SLUICE_GATED_HALVES || (params->la3 == NULL && params->lb3 == NULL),
                            "layer %d: params.%s is given, but only a layer with gated halves has a w3", c->layer_id,
                            params->la3 != NULL ? "la3" : "lb3"));
  adapter_t adapters[NUM_ADAPTERS];
  adapters_of(moe, params, NULL, adapters);
  for (int i = 0; i < NUM_ADAPTERS; ++i) SLUICE_TRY(check_adapter(moe, &adapters[i], &adapters[0]));
  return SLUICE_OK;
}

static sluice_status_t check_frozen(const sluice_moe_t* moe, const sluice_expert_tensors_t* gradients) {
  const sluice_moe_config_t* c = &moe->shape.config;
  const char* name = gradients->w1 != NULL ? "w1" : gradients->w3 != NULL ? "w3" : gradients->w2 != NULL ? "w2" : NULL;
  if (c->lora_rank == 0 || name == NULL) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                     "layer %d: grad_params.%s is given, but with lora_rank %d the weights are frozen: pass NULL, or "
                     "create the layer with lora_rank 0 to train them",
                     c->layer_id, name, c->lora_rank);
}

static sluice_status_t check_grad_factor(const sluice_moe_t* moe, const sluice_tensor_t* of,
                                         const sluice_tensor_t* gradient, const char* name) {
  const sluice_moe_config_t* c = &moe->shape.config;
  if (gradient == NULL) return SLUICE_OK;
  SLUICE_TRY(SLUICE_REQUIRE(
      of != NULL, "layer %d: grad_params.%s is given, but params.%s is NULL: there is nothing to differentiate",
      c->layer_id, name, name));
  if (moe->shape.num_local == 0) return SLUICE_OK;
  char label[64];
  snprintf(label, sizeof label, "grad_params.%s", name);
  return check_array(moe, gradient, label, 2, of[0].shape, 1);
}

sluice_status_t sluice_check_experts(const sluice_moe_t* moe, const sluice_expert_tensors_t* experts,
                                     sluice_expert_tensors_t* out_params) {
  SLUICE_TRY(read_experts(moe, experts, "params", out_params));
  SLUICE_TRY(check_own(moe, out_params, "params", 0));
  return check_adapters(moe, out_params);
}

sluice_status_t sluice_check_gradients(const sluice_moe_t* moe, const sluice_expert_tensors_t* params,
                                       const sluice_expert_tensors_t* gradients, sluice_expert_tensors_t* out_grads) {
  SLUICE_TRY(read_experts(moe, gradients, "grad_params", out_grads));
  const sluice_expert_tensors_t* g = out_grads;
  SLUICE_TRY(check_frozen(moe, g));
  SLUICE_TRY(check_own(moe, g, "grad_params", 1));
  adapter_t adapters[NUM_ADAPTERS];
  adapters_of(moe, params, g, adapters);
  for (int i = 0; i < NUM_ADAPTERS; ++i) {
    SLUICE_TRY(check_grad_factor(moe, adapters[i].a, adapters[i].grad_a, adapters[i].a_name));
    SLUICE_TRY(check_grad_factor(moe, adapters[i].b, adapters[i].grad_b, adapters[i].b_name));
  }
  if (g->w1 == NULL || g->w2 == NULL || moe->shape.num_local == 0) return SLUICE_OK;
  if (sluice_tensor_dtype(&g->w1[0]) == sluice_tensor_dtype(&g->w2[0])) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "grad_params: w1 is %s and w2 is %s; weight gradients share one dtype",
                     sluice_dtype_name(sluice_tensor_dtype(&g->w1[0])),
                     sluice_dtype_name(sluice_tensor_dtype(&g->w2[0])));
}

sluice_status_t sluice_check_callbacks(const sluice_moe_t* moe, const sluice_expert_callbacks_t* callbacks) {
  sluice_expert_callbacks_t known;
  SLUICE_TRY(sluice_struct_copy(&known, sizeof known, callbacks, sizeof known, "sluice_expert_callbacks_t"));
  return SLUICE_REQUIRE(known.forward != NULL && known.backward != NULL,
                        "layer %d: callback experts need both callbacks, %s is NULL", moe->shape.config.layer_id,
                        known.forward == NULL ? "forward" : "backward");
}

sluice_status_t sluice_check_stream(const sluice_moe_t* moe, sluice_stream_t stream) {
  if (stream == NULL || moe->context->rows->is_device) return SLUICE_OK; /* checked when it is opened */
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "layer %d: stream must be NULL on a CPU", moe->shape.config.layer_id);
}

sluice_status_t sluice_check_is_near(const sluice_context_t* context, const char* what) {
  if (!context->rows->is_device) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_UNSUPPORTED, "%s: device %s is not supported yet; use a CPU context", what,
                     context->device->name);
}

sluice_status_t sluice_check_is_exact(const sluice_moe_t* moe, const char* what) {
  if (moe->shape.config.exchange_mode == SLUICE_EXCHANGE_EXACT) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                     "%s: layer %d has exchange_mode capacity, which this call does not support yet", what,
                     moe->shape.config.layer_id);
}

sluice_status_t sluice_check_sends_rows(const sluice_moe_t* moe, const char* what) {
  const int32_t deduplicate = moe->shape.config.deduplicate;
  if (deduplicate == SLUICE_DEDUPLICATE_NONE || deduplicate == SLUICE_DEDUPLICATE_ANY) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                     "%s: layer %d has deduplicate 1, but parts of a layer exchange rows: set it to 0, or call the "
                     "whole layer (sluice_moe_forward)",
                     what, moe->shape.config.layer_id);
}
