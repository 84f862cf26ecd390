// SPDX-License-Identifier: Apache-2.0
/* Access to the rows of a context, in host memory or in a device's own memory, which the host cannot touch. The table
 * is chosen once, when the context gets its device, so that code that works on rows does not ask which memory it is.
 *
 * Work is enqueued on `stream`, the host's or a lane's (NULL in host memory), and is complete when the stream is; in
 * host memory at once. Errors: those of device/device_memory.h; host memory has none.
 *
 * Entries that may be NULL say what NULL means. Call these by the functions below the table. */
#pragma once

#include "backend/base/pages_prefault.h"
#include "backend/comm/comm.h"
#include "backend/device/device.h"
#include "backend/model/routing_sizes.h"
#include "backend/moe/context/pass_memory.h"
#include "sluice/context.h"

typedef struct sluice_row_memory_s {
  int32_t is_device;          /* for shapes and tensors, which hold it as data */
  int32_t counts_host_memory; /* a budget counts host memory */
  int32_t can_give_back;      /* slots that only trials needed can be freed without waiting */
  int32_t has_host_threads;   /* lanes are threads, so that their CPU time is meaningful */
  /* The first function of a call; also tells whether the stream is being captured into a graph. */
  sluice_status_t (*open)(sluice_context_t* context, sluice_stream_t stream, int32_t* out_captured);
  /* INVALID_ARGUMENT, naming the tensor, if `data` is not valid row memory. NULL: all memory is valid. */
  sluice_status_t (*check)(sluice_context_t* context, const void* data, uint64_t bytes, uint64_t alignment,
                           const char* name);
  sluice_status_t (*fill)(sluice_context_t* context, sluice_stream_t stream, void* to, int32_t value, uint64_t bytes);
  sluice_status_t (*copy)(sluice_context_t* context, sluice_stream_t stream, void* to, const void* from,
                          uint64_t bytes);
  /* Copies to host memory and waits for the copy. */
  sluice_status_t (*read)(sluice_context_t* context, sluice_stream_t stream, const void* data, void* out,
                          uint64_t bytes);
  /* Posts an exchange of rows. *out_request must be waited for; NULL: the exchange was enqueued on the stream. */
  sluice_status_t (*exchange)(sluice_context_t* context, const sluice_exchange_t* exchange, sluice_stream_t stream,
                              sluice_comm_request_t** out_request);
  /* With device memory, exchanges posted between the two functions are one operation of the stream. `status`: of the
   * calls in between, returned unless it is OK. Both NULL: there are no groups, and requests are independent. */
  void (*begin_group)(sluice_context_t* context);
  sluice_status_t (*end_group)(sluice_context_t* context, sluice_stream_t stream, sluice_status_t status);
  /* Called before fresh pages are written. Both NULL: rows lie in no pages of the host. */
  void (*advise)(const sluice_tensor_t* tensor);
  void (*advise_slices)(const sluice_tensor_t* const* lists, int32_t num_lists, int32_t count,
                        sluice_pages_prefault_t* ahead);
  /* Divides the scratch of a pass: `total` bytes, of which `scalars` always lie with rows. *out_host is reset for those
   * in host memory, *out_with_rows are the others. */
  sluice_status_t (*take_scratch)(sluice_pass_memory_t* memory, uint64_t total, uint64_t scalars,
                                  sluice_arena_t** out_host, uint64_t* out_with_rows);
  /* Bytes allocated now, except steps and the arenas that a plan sizes again. */
  uint64_t (*base_bytes)(sluice_context_t* context);
  /* Limits the bytes of offloaded rows from now on; 0: no limit. NULL: the ledger refuses what exceeds the limit. */
  void (*limit_pool)(sluice_context_t* context, uint64_t bytes);
  /* Additional scratch that ordering routes takes on the device. NULL: none. */
  sluice_device_scratch_t (*routing_scratch)(const sluice_device_t* device);
  void (*destroy_timer)(sluice_context_t* context, sluice_timer_t* timer); /* NULL: there are no timers */
  /* End of a context: end_lanes before objects of lanes are released, end_memory when nothing uses rows any more. */
  void (*end_lanes)(sluice_context_t* context);
  void (*end_memory)(sluice_context_t* context);
} sluice_row_memory_t;

static inline sluice_status_t sluice_rows_check(const sluice_row_memory_t* rows, sluice_context_t* context,
                                                const void* data, uint64_t bytes, uint64_t alignment,
                                                const char* name) {
  return rows->check == NULL ? SLUICE_OK : rows->check(context, data, bytes, alignment, name);
}
static inline void sluice_rows_begin_group(const sluice_row_memory_t* rows, sluice_context_t* context) {
  if (rows->begin_group != NULL) rows->begin_group(context);
}
static inline sluice_status_t sluice_rows_end_group(const sluice_row_memory_t* rows, sluice_context_t* context,
                                                    sluice_stream_t stream, sluice_status_t status) {
  return rows->end_group == NULL ? status : rows->end_group(context, stream, status);
}
static inline void sluice_rows_advise(const sluice_row_memory_t* rows, const sluice_tensor_t* tensor) {
  if (rows->advise != NULL) rows->advise(tensor);
}
static inline void sluice_rows_advise_slices(const sluice_row_memory_t* rows, const sluice_tensor_t* const* lists,
                                             int32_t num_lists, int32_t count, sluice_pages_prefault_t* ahead) {
  if (rows->advise_slices != NULL) rows->advise_slices(lists, num_lists, count, ahead);
}
static inline void sluice_rows_limit_pool(const sluice_row_memory_t* rows, sluice_context_t* context, uint64_t bytes) {
  if (rows->limit_pool != NULL) rows->limit_pool(context, bytes);
}
static inline sluice_device_scratch_t sluice_rows_routing_scratch(const sluice_row_memory_t* rows,
                                                                  const sluice_device_t* device) {
  return rows->routing_scratch == NULL ? (sluice_device_scratch_t){0} : rows->routing_scratch(device);
}
static inline void sluice_rows_destroy_timer(const sluice_row_memory_t* rows, sluice_context_t* context,
                                             sluice_timer_t* timer) {
  if (rows->destroy_timer != NULL) rows->destroy_timer(context, timer);
}

extern const sluice_row_memory_t sluice_rows_in_host_memory;
extern const sluice_row_memory_t sluice_rows_in_device_memory;

/* Takes a device with memory of its own (device.h), made with &context->allocator. From now on rows lie in its memory,
 * or in memory of the callbacks if they are not NULL. Call it before any layer is made. */
void sluice_engine_set_device_memory(sluice_context_t* context, sluice_device_t* device, sluice_allocate_fn_t allocate,
                                     sluice_free_fn_t release, void* allocate_user);
