/* Reading the growing structs of the ABI (style.md, "Structs that can grow"). */
#ifndef SLUICE_BACKEND_BASE_STRUCTS_H_
#define SLUICE_BACKEND_BASE_STRUCTS_H_

#include "backend/base/status.h"

/* Copies a caller's struct, whose first member is its size_t struct_size, over `dst`.
 *
 * dst       in/out  dst_size bytes, holding the defaults; fields that the caller does not know keep them.
 *                   On success dst's struct_size is dst_size; on failure dst is untouched
 * src       in      the caller's struct; borrowed for the call
 * min_size          bytes of the oldest layout that is still understood
 * name              of the struct, for the message ("sluice_comm_config_t")
 *
 * Errors: INVALID_ARGUMENT (src is NULL), ABI (shorter than min_size, or longer than dst_size with a non-zero tail; the
 * message names the struct and the sizes). */
sluice_status_t sluice_struct_copy(void* dst, size_t dst_size, const void* src, size_t min_size, const char* name);

#endif /* SLUICE_BACKEND_BASE_STRUCTS_H_ */
