// SPDX-License-Identifier: Apache-2.0
/* Initialises and reads the extensible structs of the ABI, whose first member is size_t struct_size. */
#pragma once

#include "backend/base/status.h"

/* Implements a public _init function: all bytes of the caller's struct, known here or not, become 0, then `defaults`
 * (borrowed; NULL with 0 bytes: none) are copied as far as they fit, then struct_size is set. No effect if out is NULL
 * or struct_size has no space for itself. */
void sluice_struct_init(void* out, size_t struct_size, const void* defaults, size_t defaults_size);
/* Defines the _init function of a struct with these members as its defaults; a single 0: none. */
#define SLUICE_DEFINE_INIT(type, ...)                                 \
  void type##_init(type##_t* out, size_t struct_size) {               \
    static const type##_t defaults = {__VA_ARGS__};                   \
    sluice_struct_init(out, struct_size, &defaults, sizeof defaults); \
  }

/* Copies a caller's struct over `dst`.
 *
 *   dst       in/out  dst_size bytes with the defaults; fields that the caller does not know keep them. On success
 *                     dst's struct_size is dst_size; on failure dst is unchanged
 *   src       in      the caller's struct; borrowed for the call
 *   min_size          bytes of the oldest supported layout
 *   name              of the struct, for the message ("sluice_comm_config_t")
 *
 * Errors: INVALID_ARGUMENT (src is NULL), ABI (shorter than min_size, or longer than dst_size with a non-zero tail; the
 * message names the struct and the sizes). */
sluice_status_t sluice_struct_copy(void* dst, size_t dst_size, const void* src, size_t min_size, const char* name);

/* Refuses an extension. next: the member `next` of a struct of the ABI, or of its last known extension. Errors: ABI if
 * next is not NULL; the message names the struct and the extension's type. */
sluice_status_t sluice_struct_check_next(const sluice_ext_header_t* next, const char* name);

/* Declares `name`, a copy of the caller's struct with defaults where the caller has no field. Returns early on an
 * error, so for functions that hold no resources. oldest: bytes of the oldest supported layout. */
#define SLUICE_READ_STRUCT(type, name, given, oldest) \
  type##_t name;                                      \
  type##_init(&(name), sizeof(name));                 \
  SLUICE_TRY(sluice_struct_copy(&(name), sizeof(name), (given), (oldest), #type "_t"))
/* The same into *out, for a struct with a member `next`; refuses extensions. */
#define SLUICE_READ_INTO(type, out, given, oldest)                                     \
  type##_init((out), sizeof *(out));                                                   \
  SLUICE_TRY(sluice_struct_copy((out), sizeof *(out), (given), (oldest), #type "_t")); \
  SLUICE_TRY(sluice_struct_check_next((out)->next, #type "_t"))
#define SLUICE_READ_EXTENSIBLE(type, name, given, oldest) \
  type##_t name;                                          \
  SLUICE_READ_INTO(type, &(name), given, oldest)

/* Write results into a caller's struct, up to the caller's struct_size. _check_size first verifies that size, since it
 * may be uninitialised; _give then writes `value`, followed by zeros for fields unknown here. out: not NULL. Errors:
 * ABI naming the struct. */
sluice_status_t sluice_struct_check_size(const void* out, const char* name);
void sluice_struct_give(void* out, const void* value, size_t value_size);
