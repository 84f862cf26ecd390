// SPDX-License-Identifier: Apache-2.0
#include "backend/base/structs.h"

#include <string.h>

/* Structs of the ABI are far smaller: a larger size means an uninitialised struct, whose tail must not be read. */
enum { MAX_STRUCT_BYTES = 65536 };

void sluice_struct_init(void* out, size_t struct_size, const void* defaults, size_t defaults_size) {
  if (out == NULL || struct_size < sizeof struct_size) return;
  memset(out, 0, struct_size);
  if (defaults != NULL) memcpy(out, defaults, struct_size < defaults_size ? struct_size : defaults_size);
  memcpy(out, &struct_size, sizeof struct_size);
}

/* Defined here because status.c must not depend on this file. */
void sluice_error_info_init(sluice_error_info_t* out_info, size_t struct_size) {
  sluice_struct_init(out_info, struct_size, NULL, 0);
}

sluice_status_t sluice_struct_copy(void* dst, size_t dst_size, const void* src, size_t min_size, const char* name) {
  if (src == NULL) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s is NULL; pass one prepared by its _init function", name);
  }
  size_t src_size;
  memcpy(&src_size, src, sizeof src_size);
  if (src_size < min_size || src_size > MAX_STRUCT_BYTES) {
    return SLUICE_FAIL(SLUICE_E_ABI,
                       "%s: struct_size is %zu, this library knows %zu bytes and needs at least %zu; prepare the "
                       "struct with its _init function and sizeof",
                       name, src_size, dst_size, min_size);
  }
  const unsigned char* bytes = src;
  for (size_t i = dst_size; i < src_size; ++i) {
    if (bytes[i] != 0) {
      return SLUICE_FAIL(SLUICE_E_ABI,
                         "%s: byte %zu of %zu is set, but this library knows only %zu bytes of the struct; the caller "
                         "was built against newer headers and uses a field that this library does not have",
                         name, i, src_size, dst_size);
    }
  }
  memcpy(dst, src, src_size < dst_size ? src_size : dst_size);
  memcpy(dst, &dst_size, sizeof dst_size);
  return SLUICE_OK;
}

sluice_status_t sluice_struct_check_next(const sluice_ext_header_t* next, const char* name) {
  if (next == NULL) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_ABI, "%s: extension of unknown type %d; set next to NULL, or use a newer library", name,
                     next->type);
}

sluice_status_t sluice_struct_check_size(const void* out, const char* name) {
  size_t size;
  memcpy(&size, out, sizeof size);
  if (size >= sizeof size && size <= MAX_STRUCT_BYTES) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_ABI, "%s: struct_size is %zu; set it to sizeof the struct", name, size);
}

void sluice_struct_give(void* out, const void* value, size_t value_size) {
  size_t size;
  memcpy(&size, out, sizeof size);
  sluice_struct_init(out, size, value, value_size);
}
