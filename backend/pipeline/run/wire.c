// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/run/wire.h"

#include <string.h>

/* The payload: a table of descriptors, whose pointers are 0 in the message and set by the receiver, then the shapes,
 * then the data of each tensor. Each part is aligned. */
#define SPANS_OF_TABLE  1
#define SPANS_OF_TENSOR 2 /* its data, and the padding after it */
#define MAX_TENSORS     ((SLUICE_MESSAGE_MAX_SPANS - SPANS_OF_TABLE) / SPANS_OF_TENSOR)
#define MAX_DIMENSIONS  64
#define MAX_BYTES       (UINT64_C(1) << 56)

_Static_assert(sizeof(sluice_tensor_t) == 48, "tables of tensors travel as they are");

static const char gap[SLUICE_ALIGNMENT];

uint64_t sluice_stage_tag(uint64_t batch, const sluice_stage_op_t* op) {
  int is_activation = op->kind == SLUICE_STAGE_SEND_ACTIVATION || op->kind == SLUICE_STAGE_RECEIVE_ACTIVATION;
  int is_upstream_end = op->kind == SLUICE_STAGE_SEND_ACTIVATION || op->kind == SLUICE_STAGE_RECEIVE_GRADIENT;
  uint64_t edge = (uint64_t)(is_upstream_end ? op->virtual_stage : op->virtual_stage - 1);
  return (batch & 0x7fffffffu) << 32 | (uint64_t)is_activation << 31 | edge << 16 | (uint64_t)op->micro_batch;
}

/* ---- packing ---- */

/* Returns the bytes of the elements; UINT64_MAX if the number is not plausible. */
static uint64_t bytes_of(const sluice_tensor_t* t) {
  uint64_t element = ((uint64_t)t->type_bits * t->type_lanes + 7) / 8, count = 1;
  int is_empty = 0;
  for (int32_t d = 0; d < t->ndim; ++d) {
    if (t->shape[d] < 0) return UINT64_MAX;
    is_empty |= t->shape[d] == 0;
  }
  if (is_empty) return 0;
  for (int32_t d = 0; d < t->ndim; ++d) {
    if ((uint64_t)t->shape[d] > MAX_BYTES / count) return UINT64_MAX;
    count *= (uint64_t)t->shape[d];
  }
  return element != 0 && count > MAX_BYTES / element ? UINT64_MAX : count * element;
}

static int is_dense(const sluice_tensor_t* t) {
  if (t->strides == NULL) return 1;
  int64_t expected = 1;
  for (int32_t d = t->ndim - 1; d >= 0; --d) {
    if (t->shape[d] != 1 && t->strides[d] != expected) return 0;
    expected *= t->shape[d];
  }
  return 1;
}

static const char* refusal(const sluice_tensor_t* t) {
  if (t->ndim < 0 || t->ndim > MAX_DIMENSIONS) return "has a number of dimensions that is not in [0, 64]";
  if (t->ndim > 0 && t->shape == NULL) return "has dimensions and no shape";
  if (t->type_lanes == 0 || t->type_bits == 0) return "has elements of 0 bits";
  uint64_t bytes = bytes_of(t);
  if (bytes == UINT64_MAX) return "has an invalid shape";
  if (t->device_type != SLUICE_DEVICE_CPU) return "is not in host memory; copy it there first";
  if (bytes > 0 && t->data == NULL) return "has no data";
  if (bytes > 0 && !is_dense(t)) return "is not row-major without gaps; make it contiguous";
  return NULL;
}

static sluice_status_t check(const sluice_stage_tensors_t* given, const char* where) {
  if (given->num_tensors < 0 || given->num_tensors > MAX_TENSORS) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "pipeline: %s has %d tensors; 0 to %d can be sent in one message",
                       where, given->num_tensors, MAX_TENSORS);
  }
  if (given->num_tensors > 0 && given->tensors == NULL) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "pipeline: %s has %d tensors and its array is NULL", where,
                       given->num_tensors);
  }
  for (int32_t i = 0; i < given->num_tensors; ++i) {
    const char* why = refusal(&given->tensors[i]);
    if (why != NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "pipeline: tensor %d of %s %s", i, where, why);
  }
  return SLUICE_OK;
}

/* The block contains the table and its shapes as they are sent, the host's descriptors, and spans. */
sluice_status_t sluice_stage_pack(const sluice_stage_tensors_t* given, const char* where,
                                  sluice_stage_packed_t* out_packed) {
  *out_packed = (sluice_stage_packed_t){.num_spans = 0};
  SLUICE_TRY(check(given, where));
  const int32_t n = given->num_tensors;
  if (n == 0) return SLUICE_OK;
  uint64_t dimensions = 0;
  for (int32_t i = 0; i < n; ++i) dimensions += (uint64_t)given->tensors[i].ndim;
  const uint64_t descriptors = (uint64_t)n * sizeof(sluice_tensor_t);
  const uint64_t table = sluice_align_up(descriptors + dimensions * sizeof(int64_t));
  const uint64_t max_spans = SPANS_OF_TABLE + (uint64_t)n * SPANS_OF_TENSOR;
  const uint64_t bytes = table + descriptors + max_spans * sizeof(sluice_message_span_t);
  char* block = sluice_alloc_zeroed(sluice_process_allocator(), bytes, "pipeline: the tensors of a message");
  if (block == NULL) return sluice_alloc_status();
  sluice_tensor_t* wire = (sluice_tensor_t*)(void*)block;
  int64_t* shapes = (int64_t*)(void*)(block + descriptors);
  sluice_tensor_t* own = (sluice_tensor_t*)(void*)(block + table);
  sluice_message_span_t* spans = (sluice_message_span_t*)(void*)(block + table + descriptors);
  spans[out_packed->num_spans++] = (sluice_message_span_t){block, table};
  for (int32_t i = 0; i < n; ++i) {
    const sluice_tensor_t* t = &given->tensors[i];
    own[i] = *t;
    own[i].strides = NULL;
    own[i].shape = shapes;
    if (t->ndim > 0) memcpy(shapes, t->shape, (size_t)t->ndim * sizeof(int64_t));
    shapes += t->ndim;
    wire[i] = own[i];
    wire[i].data = NULL;
    wire[i].shape = NULL;
    wire[i].byte_offset = 0;
    wire[i].device_id = 0;
    const uint64_t data_bytes = bytes_of(t), room = sluice_align_up(data_bytes);
    out_packed->tensor_bytes += data_bytes;
    if (data_bytes == 0) continue;
    spans[out_packed->num_spans++] = (sluice_message_span_t){(const char*)t->data + t->byte_offset, data_bytes};
    if (room > data_bytes) spans[out_packed->num_spans++] = (sluice_message_span_t){gap, room - data_bytes};
  }
  out_packed->tensors = own;
  out_packed->spans = spans;
  out_packed->block = block;
  out_packed->block_bytes = bytes;
  return SLUICE_OK;
}

void sluice_stage_packed_free(sluice_stage_packed_t* packed) {
  sluice_free(sluice_process_allocator(), packed->block, packed->block_bytes);
  *packed = (sluice_stage_packed_t){.num_spans = 0};
}

/* ---- unpacking ---- */

static sluice_status_t fail_unpack(const char* where, const char* what) {
  return SLUICE_FAIL(SLUICE_E_INTERNAL, "pipeline: %s arrived with %s; run the same build on all ranks, or report it",
                     where, what);
}

sluice_status_t sluice_stage_unpack(void* payload, uint64_t bytes, int32_t num_tensors, const char* where,
                                    sluice_tensor_t** out_tensors, uint64_t* out_bytes) {
  *out_tensors = NULL;
  *out_bytes = 0;
  if (num_tensors < 0 || num_tensors > MAX_TENSORS) return fail_unpack(where, "an invalid number of tensors");
  if (num_tensors == 0) return bytes == 0 ? SLUICE_OK : fail_unpack(where, "bytes that belong to no tensor");
  const uint64_t descriptors = (uint64_t)num_tensors * sizeof(sluice_tensor_t);
  if (bytes < descriptors) return fail_unpack(where, "too few bytes");
  sluice_tensor_t* tensors = payload;
  uint64_t dimensions = 0;
  for (int32_t i = 0; i < num_tensors; ++i) {
    if (tensors[i].ndim < 0 || tensors[i].ndim > MAX_DIMENSIONS) return fail_unpack(where, "invalid dimensions");
    dimensions += (uint64_t)tensors[i].ndim;
  }
  uint64_t at = sluice_align_up(descriptors + dimensions * sizeof(int64_t));
  if (at > bytes) return fail_unpack(where, "too few bytes");
  int64_t* shapes = (int64_t*)(void*)((char*)payload + descriptors);
  for (int32_t i = 0; i < num_tensors; ++i) {
    sluice_tensor_t* t = &tensors[i];
    t->shape = shapes;
    t->strides = NULL;
    t->byte_offset = 0;
    shapes += t->ndim;
    const uint64_t data_bytes = bytes_of(t);
    if (data_bytes > bytes - at || sluice_align_up(data_bytes) > bytes - at) return fail_unpack(where, "too few bytes");
    t->data = data_bytes > 0 ? (char*)payload + at : NULL;
    at += sluice_align_up(data_bytes);
    *out_bytes += data_bytes;
  }
  if (at != bytes) return fail_unpack(where, "too many bytes");
  *out_tensors = tensors;
  return SLUICE_OK;
}
