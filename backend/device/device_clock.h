// SPDX-License-Identifier: Apache-2.0
/* Times of passes and their ops on a device with its own memory, on which the host only enqueues work. */
#pragma once

#include "backend/base/status.h"
#include "sluice/context.h"

struct sluice_device_s; /* device.h */
typedef struct sluice_timer_s sluice_timer_t;

enum { SLUICE_OP_TIMES_NONE = 0, SLUICE_OP_TIMES_TAKEN = 1, SLUICE_OP_TIMES_LATER = 2 };

typedef struct sluice_device_clock_s {
  /* Two marks on a stream, and the time between them on the device. ns returns 0 until the second has passed; nothing
   * waits. Not in a capture. destroy accepts NULL. */
  sluice_status_t (*timer_create)(struct sluice_device_s* device, sluice_timer_t** out_timer);
  sluice_status_t (*timer_mark)(struct sluice_device_s* device, sluice_timer_t* timer, int32_t is_end,
                                sluice_stream_t stream);
  sluice_status_t (*timer_ns)(struct sluice_device_s* device, const sluice_timer_t* timer, uint64_t* out_ns);
  void (*timer_destroy)(struct sluice_device_s* device, sluice_timer_t* timer);
  /* time_ops: whether later passes record when each op ran on the device; not in a capture. op_times, after a join: the
   * times of the ops of the last pass, in ns from its begin, once the pass has ended (TAKEN); otherwise LATER, since it
   * does not wait. NONE: this pass has no times, which is not an error. begin_ns, end_ns: [num_ops]. */
  void (*time_ops)(struct sluice_device_s* device, int32_t wanted);
  int32_t (*op_times)(struct sluice_device_s* device, int32_t num_ops, uint64_t* begin_ns, uint64_t* end_ns);
} sluice_device_clock_t;
