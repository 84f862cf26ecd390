// SPDX-License-Identifier: Apache-2.0
/* Where the rows of a context lie: in host memory, or in a device's own, which the host cannot touch. Chosen once, when
 * the context gets its device; who works on rows goes through this table and does not ask which it is.
 *
 * Work goes to `stream`, the host's or a lane's (NULL in host memory), and is complete when the stream is; in host
 * memory at once. Errors: as device/device_memory.h names them; host memory has none. */
#ifndef SLUICE_BACKEND_MOE_CONTEXT_ROW_MEMORY_H_
#define SLUICE_BACKEND_MOE_CONTEXT_ROW_MEMORY_H_

#include "backend/base/pages_prefault.h"
#include "backend/comm/comm.h"
#include "backend/device/device.h"
#include "backend/model/routing_sizes.h"
#include "backend/moe/context/pass_memory.h"
#include "sluice/context.h"

typedef struct sluice_row_memory_s {
  int32_t is_device;          /* for shapes and tensors, which say it in data */
  int32_t counts_host_memory; /* a budget counts what lies in host memory */
  int32_t can_give_back;      /* slots that only trials needed go back without waiting for anything */
  int32_t has_host_threads;   /* lanes are threads, whose CPU time tells something */
  /* Before anything else of a call, and whether the stream is being captured into a graph. */
  sluice_status_t (*open)(sluice_context_t* context, sluice_stream_t stream, int32_t* out_captured);
  /* INVALID_ARGUMENT, naming the tensor, unless rows may lie at `data`. */
  sluice_status_t (*check)(sluice_context_t* context, const void* data, uint64_t bytes, uint64_t alignment,
                           const char* name);
  sluice_status_t (*fill)(sluice_context_t* context, sluice_stream_t stream, void* to, int32_t value, uint64_t bytes);
  sluice_status_t (*copy)(sluice_context_t* context, sluice_stream_t stream, void* to, const void* from,
                          uint64_t bytes);
  /* To host memory; waits for that copy. */
  sluice_status_t (*read)(sluice_context_t* context, sluice_stream_t stream, const void* data, void* out,
                          uint64_t bytes);
  /* Posts an exchange of rows. *out_request: to be waited for; NULL where it is in the stream. */
  sluice_status_t (*exchange)(sluice_context_t* context, const sluice_exchange_t* exchange, sluice_stream_t stream,
                              sluice_comm_request_t** out_request);
  /* Exchanges posted between the two are one operation of the stream, where rows lie in a device's memory. `status`: of
   * what happened in between, returned unless it is OK. */
  void (*begin_group)(sluice_context_t* context);
  sluice_status_t (*end_group)(sluice_context_t* context, sluice_stream_t stream, sluice_status_t status);
  /* Fresh pages are about to be written. */
  void (*advise)(const sluice_tensor_t* tensor);
  void (*advise_slices)(const sluice_tensor_t* const* lists, int32_t num_lists, int32_t count,
                        sluice_pages_prefault_t* ahead);
  /* Where the scratch of a pass lies, `total` bytes of which `scalars` lie with rows in any case: *out_host is reset
   * for what does not, *out_with_rows are the bytes of the rest. */
  sluice_status_t (*take_scratch)(sluice_pass_memory_t* memory, uint64_t total, uint64_t scalars,
                                  sluice_arena_t** out_host, uint64_t* out_with_rows);
  /* What is allocated now besides steps and the arenas that a plan sizes anew. */
  uint64_t (*base_bytes)(sluice_context_t* context);
  /* Offloaded rows are at most so many bytes from now on; 0: no limit. */
  void (*limit_pool)(sluice_context_t* context, uint64_t bytes);
  /* What ordering routes takes there beside what sizes name. */
  sluice_device_scratch_t (*routing_scratch)(const sluice_device_t* device);
  void (*destroy_timer)(sluice_context_t* context, sluice_timer_t* timer);
  /* The end of a context, before what its lanes use goes, and once nothing uses rows any more. */
  void (*end_lanes)(sluice_context_t* context);
  void (*end_memory)(sluice_context_t* context);
} sluice_row_memory_t;

extern const sluice_row_memory_t sluice_rows_in_host_memory;
extern const sluice_row_memory_t sluice_rows_in_device_memory;

#endif /* SLUICE_BACKEND_MOE_CONTEXT_ROW_MEMORY_H_ */
