// SPDX-License-Identifier: Apache-2.0
/* Times of passes and their ops, implementing device/device_clock.h. */
#include "backend/device/cuda/cuda_state.h"

struct sluice_timer_s {
  void* marks[2]; /* events */
};

static void destroy_marks(sluice_device_t* device, sluice_timer_t* timer) {
  for (int i = 0; i < 2; ++i) {
    if (timer->marks[i] != NULL) (void)sluice_cuda_device_driver(device)->cuEventDestroy_v2(timer->marks[i]);
  }
}

static void destroy_timer(sluice_device_t* device, sluice_timer_t* timer) {
  if (timer == NULL) return;
  if (!sluice_cuda_is_inherited(device)) {
    int is_current = sluice_cuda_enter(device) == SLUICE_OK;
    destroy_marks(device, timer);
    if (is_current) (void)sluice_cuda_leave(device);
  }
  sluice_free(device->allocator, timer, sizeof *timer);
}

static sluice_status_t make_marks(sluice_device_t* device, sluice_timer_t* timer) {
  const sluice_cuda_driver_t* driver = sluice_cuda_device_driver(device);
  for (int i = 0; i < 2; ++i) {
    int code = driver->cuEventCreate(&timer->marks[i], SLUICE_CU_EVENT_DEFAULT);
    if (code == 0) continue;
    timer->marks[i] = NULL;
    return sluice_cuda_fail(driver, code, "no event to take times with");
  }
  return SLUICE_OK;
}

static sluice_status_t make_timer(sluice_device_t* device, sluice_timer_t** out_timer) {
  *out_timer = NULL;
  SLUICE_TRY(sluice_cuda_enter(device));
  sluice_timer_t* timer = sluice_alloc_zeroed(device->allocator, sizeof *timer, "timer");
  sluice_status_t status =
      sluice_cuda_leave_with(device, timer != NULL ? make_marks(device, timer) : sluice_alloc_status());
  if (status != SLUICE_OK) {
    sluice_error_info_t why;
    sluice_error_capture(&why);
    destroy_timer(device, timer);
    return sluice_error_adopt(&why);
  }
  *out_timer = timer;
  return SLUICE_OK;
}

static sluice_status_t mark_timer(sluice_device_t* device, sluice_timer_t* timer, int32_t is_end,
                                  sluice_stream_t stream) {
  const sluice_cuda_driver_t* driver = sluice_cuda_device_driver(device);
  SLUICE_TRY(sluice_cuda_enter(device));
  int code = driver->cuEventRecord(timer->marks[is_end != 0], stream);
  return sluice_cuda_leave_with(
      device, code == 0 ? SLUICE_OK : sluice_cuda_fail(driver, code, "the time of a pass cannot be recorded"));
}

static sluice_status_t read_timer(sluice_device_t* device, const sluice_timer_t* timer, uint64_t* out_ns) {
  const sluice_cuda_driver_t* driver = sluice_cuda_device_driver(device);
  float milliseconds = 0;
  *out_ns = 0;
  SLUICE_TRY(sluice_cuda_enter(device));
  int code = driver->cuEventElapsedTime(&milliseconds, timer->marks[0], timer->marks[1]);
  SLUICE_TRY(
      sluice_cuda_leave_with(device, code == 0 || code == SLUICE_CU_NOT_READY
                                         ? SLUICE_OK
                                         : sluice_cuda_fail(driver, code, "the time of a pass cannot be taken")));
  if (code == 0) *out_ns = milliseconds > 0 ? (uint64_t)((double)milliseconds * 1e6) + 1 : 1;
  return SLUICE_OK;
}

static void time_ops(sluice_device_t* device, int32_t wanted) {
  sluice_cuda_memory_state(device)->times.wanted = wanted;
}

static int32_t op_times(sluice_device_t* device, int32_t num_ops, uint64_t* begin_ns, uint64_t* end_ns) {
  const sluice_cuda_memory_state_t* device_memory = sluice_cuda_memory_state(device);
  if (device_memory->times.num_jobs != num_ops || sluice_cuda_enter(device) != SLUICE_OK) return SLUICE_OP_TIMES_NONE;
  int code = sluice_cuda_device_driver(device)->cuEventQuery(device_memory->end);
  int found = code == 0 && sluice_cuda_times_read(device, &device_memory->times, num_ops, begin_ns, end_ns);
  if (sluice_cuda_leave(device) != SLUICE_OK) return SLUICE_OP_TIMES_NONE;
  if (code == SLUICE_CU_NOT_READY) return SLUICE_OP_TIMES_LATER;
  return found ? SLUICE_OP_TIMES_TAKEN : SLUICE_OP_TIMES_NONE;
}

const sluice_device_clock_t sluice_cuda_clock = {
    .timer_create = make_timer,
    .timer_mark = mark_timer,
    .timer_ns = read_timer,
    .timer_destroy = destroy_timer,
    .time_ops = time_ops,
    .op_times = op_times,
};
