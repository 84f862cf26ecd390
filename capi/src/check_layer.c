#include "capi/src/check_layer.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/structs.h"
#include "backend/moe/context/row_memory.h"

/* Host tensors are what they say. A pointer of the wrong memory would end in a fault of the device, and with it the
 * process: there every tensor of a call is looked up, of the experts' only the first of each array. */
static sluice_status_t check_tensor(const sluice_moe_t* moe, const sluice_tensor_t* tensor, const char* name,
                                    int32_t dtype, int32_t ndim, const int64_t* shape, int is_looked_up) {
  sluice_context_t* context = moe->context;
  SLUICE_TRY(sluice_tensor_check_on(tensor, name, context->device_type, context->device_id, dtype, ndim, shape));
  if (!is_looked_up || sluice_tensor_elements(tensor) == 0) return SLUICE_OK;
  uint64_t element = sluice_dtype_bytes(sluice_tensor_dtype(tensor));
  return context->rows->check(context, sluice_tensor_data(tensor), element, element, name);
}

sluice_status_t sluice_check_rows(const sluice_moe_t* moe, const sluice_tensor_t* tensor, const char* name,
                                  int64_t num_tokens) {
  const int64_t shape[] = {num_tokens, moe->shape.config.model_width};
  SLUICE_TRY(check_tensor(moe, tensor, name, moe->shape.config.dtype, 2, shape, 1));
  if (tensor->shape[0] > 0 && tensor->shape[1] > 1 && sluice_tensor_stride(tensor, 1) != 1) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: the stride of dim 1 is %lld; rows must be contiguous (stride 1)",
                       name, (long long)sluice_tensor_stride(tensor, 1));
  }
  if (tensor->shape[0] > 1 && sluice_tensor_stride(tensor, 0) < 0) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: the stride of dim 0 is %lld; it may not be negative", name,
                       (long long)sluice_tensor_stride(tensor, 0));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_check_out_rows(const sluice_moe_t* moe, const sluice_tensor_t* tensor, const char* name,
                                      int64_t num_tokens) {
  SLUICE_TRY(sluice_check_rows(moe, tensor, name, num_tokens));
  if (tensor->shape[0] > 1 && sluice_tensor_stride(tensor, 0) < moe->shape.config.model_width) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "%s: the stride of dim 0 is %lld; rows that are written may not overlap (>= %lld)", name,
                       (long long)sluice_tensor_stride(tensor, 0), (long long)moe->shape.config.model_width);
  }
  return SLUICE_OK;
}

sluice_status_t sluice_check_ids(const sluice_moe_t* moe, const sluice_tensor_t* tensor, int64_t num_tokens) {
  const int64_t shape[] = {num_tokens, moe->shape.config.top_k};
  SLUICE_TRY(check_tensor(moe, tensor, "expert_ids", 0, 2, shape, 1));
  int32_t dtype = sluice_tensor_dtype(tensor);
  if (dtype != SLUICE_DTYPE_I32 && dtype != SLUICE_DTYPE_I64) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "expert_ids: dtype is %s; ids are i32 or i64",
                       sluice_dtype_name(dtype));
  }
  return SLUICE_OK;
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

/* Row-major or column-major, perhaps with padding: no element lies on another. Sizes of 1 have any stride. */
static int is_matrix(const int64_t* shape, int64_t first, int64_t second) {
  if (second == 1 && (shape[0] == 1 || first >= shape[1])) return 1;
  return first == 1 && (shape[1] == 1 || second >= shape[0]);
}

/* Of a stack all descriptors may point to one shape: then what lies between data and byte offset has the same bytes. */
static inline int has_bytes_of(const sluice_tensor_t* a, const sluice_tensor_t* b) {
  const size_t first = offsetof(sluice_tensor_t, device_type), end = offsetof(sluice_tensor_t, byte_offset);
  return memcmp(&a->device_type, &b->device_type, end - first) == 0;
}

static inline int has_form_of(const sluice_tensor_t* a, const sluice_tensor_t* b) {
  return a->device_type == b->device_type && a->device_id == b->device_id && a->type_code == b->type_code &&
         a->type_bits == b->type_bits && a->type_lanes == b->type_lanes;
}

/* Whether a tensor is as the first of its array, which has passed every check. Hundreds are asked per call, so this
 * words no message: what fails here is looked at again by check_one, which does. */
static int is_like_first(const sluice_tensor_t* tensor, const sluice_tensor_t* first, int32_t ndim,
                         const int64_t* shape) {
  if (tensor->data != NULL && has_bytes_of(tensor, first)) return 1;
  if (tensor->strides != NULL && first->strides != NULL && tensor->shape != NULL && tensor->data != NULL &&
      has_form_of(tensor, first) && tensor->ndim == ndim && tensor->shape[0] == shape[0] &&
      tensor->strides[0] == first->strides[0] &&
      (ndim == 1 || (tensor->shape[1] == shape[1] && tensor->strides[1] == first->strides[1]))) {
    return 1; /* what most are, told without a call: generation asks for one token */
  }
  if (tensor->device_type != first->device_type || tensor->device_id != first->device_id ||
      tensor->type_code != first->type_code || tensor->type_bits != first->type_bits ||
      tensor->type_lanes != first->type_lanes || tensor->ndim != ndim || tensor->shape == NULL ||
      tensor->data == NULL || tensor->shape[0] != shape[0]) {
    return 0;
  }
  if (ndim == 1) return shape[0] == 1 || sluice_tensor_stride(tensor, 0) == 1;
  return tensor->shape[1] == shape[1] &&
         is_matrix(shape, sluice_tensor_stride(tensor, 0), sluice_tensor_stride(tensor, 1));
}

static sluice_status_t check_one(const sluice_moe_t* moe, const sluice_tensor_t* tensors, int32_t e, const char* name,
                                 int32_t ndim, const int64_t* shape, int gradients) {
  char label[64];
  snprintf(label, sizeof label, "%s[%d]", name, e);
  SLUICE_TRY(check_tensor(moe, &tensors[e], label, gradients ? 0 : moe->shape.config.dtype, ndim, shape, e == 0));
  int32_t dtype = sluice_tensor_dtype(&tensors[e]);
  if (dtype != moe->shape.config.dtype && dtype != SLUICE_DTYPE_F32) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: dtype is %s; gradients are %s like the layer, or f32", label,
                       sluice_dtype_name(dtype), sluice_dtype_name(moe->shape.config.dtype));
  }
  if (dtype != sluice_tensor_dtype(&tensors[0])) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: dtype is %s, but that of %s[0] is %s; one dtype per kind", label,
                       sluice_dtype_name(dtype), name, sluice_dtype_name(sluice_tensor_dtype(&tensors[0])));
  }
  int64_t first = sluice_tensor_stride(&tensors[e], 0), second = ndim == 2 ? sluice_tensor_stride(&tensors[e], 1) : 1;
  if (ndim == 1 && shape[0] > 1 && first != 1) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: the stride is %lld; it must be 1", label, (long long)first);
  }
  if (ndim == 2 && !is_matrix(shape, first, second)) {
    return SLUICE_FAIL(
        SLUICE_E_INVALID_ARGUMENT,
        "%s: the strides of [%lld, %lld] are %lld, %lld; one must be 1 and the other at least the size of that "
        "dimension",
        label, (long long)shape[0], (long long)shape[1], (long long)first, (long long)second);
  }
  return SLUICE_OK;
}

static sluice_status_t check_array(const sluice_moe_t* moe, const sluice_tensor_t* tensors, const char* name,
                                   int32_t ndim, const int64_t* shape, int gradients) {
  if (tensors == NULL && gradients) return SLUICE_OK; /* not wanted */
  if (tensors == NULL && moe->shape.num_local > 0) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "layer %d: %s is NULL; this layer's config needs it (%d tensors)",
                       moe->shape.config.layer_id, name, moe->shape.num_local);
  }
  for (int32_t e = 0; e < moe->shape.num_local; ++e) {
    if (e > 0 && is_like_first(&tensors[e], &tensors[0], ndim, shape)) continue;
    SLUICE_TRY(check_one(moe, tensors, e, name, ndim, shape, gradients));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_check_experts(const sluice_moe_t* moe, const sluice_expert_tensors_t* experts, const char* name,
                                     int gradients) {
  const sluice_moe_config_t* c = &moe->shape.config;
  if (experts == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "layer %d: %s is NULL", c->layer_id, name);
  sluice_expert_tensors_t known;
  SLUICE_TRY(sluice_struct_copy(&known, sizeof known, experts, sizeof known, "sluice_expert_tensors_t"));
  int in_turn = c->gated == SLUICE_GATED_INTERLEAVED;
  const int64_t up[] = {in_turn ? 2 * c->hidden_width : c->hidden_width, c->model_width};
  const int64_t down[] = {c->model_width, c->hidden_width};
  char label[64];
#define ARRAY(member, ndim, shape)                       \
  snprintf(label, sizeof label, "%s.%s", name, #member); \
  SLUICE_TRY(check_array(moe, experts->member, label, ndim, shape, gradients))
  ARRAY(w1, 2, up);
  ARRAY(w2, 2, down);
  if (c->gated == SLUICE_GATED_HALVES) {
    ARRAY(w3, 2, up);
  }
  if (c->bias) {
    ARRAY(b1, 1, up);
    ARRAY(b2, 1, down);
    if (c->gated == SLUICE_GATED_HALVES) {
      ARRAY(b3, 1, up);
    }
  }
#undef ARRAY
  const int has_both = experts->w1 != NULL && experts->w2 != NULL && moe->shape.num_local > 0;
  if (gradients && has_both && sluice_tensor_dtype(&experts->w1[0]) != sluice_tensor_dtype(&experts->w2[0])) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: w1 is %s and w2 is %s; weight gradients share one dtype", name,
                       sluice_dtype_name(sluice_tensor_dtype(&experts->w1[0])),
                       sluice_dtype_name(sluice_tensor_dtype(&experts->w2[0])));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_check_callbacks(const sluice_moe_t* moe, const sluice_expert_callbacks_t* callbacks) {
  sluice_expert_callbacks_t known;
  SLUICE_TRY(sluice_struct_copy(&known, sizeof known, callbacks, sizeof known, "sluice_expert_callbacks_t"));
  if (known.forward == NULL || known.backward == NULL) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "layer %d: callback experts need both callbacks, %s is NULL",
                       moe->shape.config.layer_id, known.forward == NULL ? "forward" : "backward");
  }
  return SLUICE_OK;
}

sluice_status_t sluice_check_stream(const sluice_moe_t* moe, sluice_stream_t stream) {
  if (stream == NULL || moe->context->rows->is_device) return SLUICE_OK; /* looked at when it is opened */
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "layer %d: stream must be NULL on a CPU", moe->shape.config.layer_id);
}

sluice_status_t sluice_check_is_near(const sluice_context_t* context, const char* what) {
  if (!context->rows->is_device) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_UNSUPPORTED, "%s: not on device %s yet; use a CPU context", what, context->device->name);
}

sluice_status_t sluice_check_is_exact(const sluice_moe_t* moe, const char* what) {
  if (moe->shape.config.exchange_mode == SLUICE_EXCHANGE_EXACT) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_UNSUPPORTED, "%s: layer %d has exchange_mode capacity; not for such layers yet", what,
                     moe->shape.config.layer_id);
}

sluice_status_t sluice_check_sends_rows(const sluice_moe_t* moe, const char* what) {
  if (!moe->shape.config.deduplicate) return SLUICE_OK;
  return SLUICE_FAIL(
      SLUICE_E_UNSUPPORTED,
      "%s: layer %d has deduplicate 1, and its parts exchange rows: set it to 0, or call the whole layer "
      "(sluice_moe_forward)",
      what, moe->shape.config.layer_id);
}
