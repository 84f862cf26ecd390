#include "backend/device/cuda/cuda_device.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "backend/base/lanes.h"
#include "backend/base/math.h"
#include "backend/device/cuda/cuda_launch.h"

typedef struct cuda_device_s {
  sluice_device_t base;
  sluice_cuda_driver_t own_driver; /* when the device opened it itself */
  const sluice_cuda_driver_t* driver;
  int32_t ordinal;
  int device; /* the driver's handle */
  void* context;
  void* library;
  void* kernels[SLUICE_CUDA_NUM_KERNELS]; /* looked up on first launch */
  pid_t pid;
  /* Streams and events, kept between passes. */
  void* lanes[SLUICE_NUM_LANES]; /* [compute] is the host's of the running pass */
  void* entry;                   /* what the host's stream held at begin */
  void* exits[SLUICE_NUM_LANES];
  void* read_done;
  void** events; /* [num_events] event of op i */
  int32_t num_events;
  /* The running pass. */
  int32_t used[SLUICE_NUM_LANES];
  /* What a driver that failed at a join left open, for the next pass to make up for. */
  int32_t unjoined[SLUICE_NUM_LANES];
  int32_t unended; /* the end of the pass on lanes[compute] was not recorded */
  sluice_job_fn_t fn;
  void* user;
  int32_t failed; /* only run_on_failure jobs run */
  int32_t dead;   /* nothing runs */
  sluice_error_info_t error;
  /* Launches since enter. */
  int32_t depth;
  sluice_status_t launch_status;
  sluice_error_info_t launch_error;
  struct cuda_device_s* outer; /* what this thread had entered before */
  sluice_cuda_stats_t stats;
  sluice_cuda_far_state_t far;
} cuda_device_t;

/* The device whose kernels this thread launches. */
static _Thread_local cuda_device_t* entered;

static cuda_device_t* cast(sluice_device_t* device) { return (cuda_device_t*)device; }

/* Calls the driver; on failure records and returns. */
#define CU_TRY(device, call, ...)                                                        \
  do {                                                                                   \
    int cu_code_ = (device)->driver->call;                                               \
    if (cu_code_ != 0) return sluice_cuda_fail((device)->driver, cu_code_, __VA_ARGS__); \
  } while (0)

int sluice_cuda_is_inherited(const sluice_device_t* device) { return ((const cuda_device_t*)device)->pid != getpid(); }

static sluice_status_t check_process(const cuda_device_t* device) {
  if (!sluice_cuda_is_inherited(&device->base)) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_STATE,
                     "cuda: this device was made before fork, in process %d; CUDA does not survive a fork: make a new "
                     "one in the child, or start it by spawn",
                     (int)device->pid);
}

/* ---- entering and launching ------------------------------------------------------------------------------------ */

/* Devices nest: a communicator has its own device object on the same GPU as the context whose job calls it. */
sluice_status_t sluice_cuda_enter(sluice_device_t* base) {
  cuda_device_t* device = cast(base);
  SLUICE_TRY(check_process(device));
  CU_TRY(device, cuCtxPushCurrent_v2(device->context), "the context of device %d cannot be made current",
         device->ordinal);
  if (device->depth++ == 0) {
    device->launch_status = SLUICE_OK;
    device->outer = entered;
  }
  entered = device;
  return SLUICE_OK;
}

sluice_status_t sluice_cuda_leave(sluice_device_t* base) {
  cuda_device_t* device = cast(base);
  void* context = NULL;
  if (--device->depth == 0) entered = device->outer;
  int code = device->driver->cuCtxPopCurrent_v2(&context);
  if (device->launch_status != SLUICE_OK) {
    sluice_status_t status = sluice_error_adopt(&device->launch_error);
    device->launch_status = SLUICE_OK;
    return status;
  }
  return code == 0 ? SLUICE_OK : sluice_cuda_fail(device->driver, code, "the context cannot be given back");
}

static const char* const kernel_names[SLUICE_CUDA_NUM_KERNELS] = {
#define KERNEL(name, args) "sluice_" #name,
#define KERNEL_DTYPES(name, args) \
  "sluice_" #name "_f32", "sluice_" #name "_bf16", "sluice_" #name "_f16", "sluice_" #name "_f64",
#include "backend/device/cuda/kernels/kernel_list.inc"
#undef KERNEL
#undef KERNEL_DTYPES
};

static sluice_status_t launch(cuda_device_t* device, int32_t kernel, sluice_stream_t stream, const void* args,
                              int64_t units) {
  const int64_t warps_per_block = SLUICE_CUDA_BLOCK / SLUICE_CUDA_WARP, most = 1 << 20;
  if (units <= 0) return SLUICE_OK;
  if (device->kernels[kernel] == NULL) {
    CU_TRY(device, cuLibraryGetKernel(&device->kernels[kernel], device->library, kernel_names[kernel]),
           "the kernel %s is not in the image", kernel_names[kernel]);
  }
  int64_t blocks = sluice_min(sluice_ceil_div(units, warps_per_block), most); /* warps take several units then */
  void* parameters[1] = {(void*)(uintptr_t)args};
  ++device->stats.num_launches;
  CU_TRY(device,
         cuLaunchKernel(device->kernels[kernel], (unsigned)blocks, 1, 1, SLUICE_CUDA_BLOCK, 1, 1, 0, stream, parameters,
                        NULL),
         "launch of %s over %lld units", kernel_names[kernel], (long long)units);
  return SLUICE_OK;
}

void sluice_cuda_launch(int32_t kernel, sluice_stream_t stream, const void* args, int64_t units) {
  cuda_device_t* device = entered;
  if (device == NULL) {
    (void)SLUICE_FAIL(SLUICE_E_INTERNAL, "cuda: %s launched outside sluice_cuda_enter", kernel_names[kernel]);
    return;
  }
  if (device->launch_status != SLUICE_OK) return;
  device->launch_status = launch(device, kernel, stream, args, units);
  if (device->launch_status != SLUICE_OK) sluice_error_capture(&device->launch_error);
}

sluice_status_t sluice_cuda_launch_status(void) {
  if (entered == NULL || entered->launch_status == SLUICE_OK) return SLUICE_OK;
  return sluice_error_adopt(&entered->launch_error);
}

/* ---- a pass ---------------------------------------------------------------------------------------------------- */

static sluice_status_t create_event(cuda_device_t* device, void** event) {
  if (*event != NULL) return SLUICE_OK;
  CU_TRY(device, cuEventCreate(event, SLUICE_CU_EVENT_DISABLE_TIMING), "no event on device %d", device->ordinal);
  return SLUICE_OK;
}

static sluice_status_t reserve(cuda_device_t* device, int32_t num_events) {
  SLUICE_TRY(create_event(device, &device->entry));
  if (num_events > device->num_events) {
    void** events = sluice_alloc_zeroed(device->base.allocator, (uint64_t)num_events * sizeof *events, "cuda events");
    if (events == NULL) return SLUICE_E_NO_MEMORY;
    if (device->num_events > 0) memcpy(events, device->events, (size_t)device->num_events * sizeof *events);
    sluice_free(device->base.allocator, device->events, (uint64_t)device->num_events * sizeof *events);
    device->events = events;
    device->num_events = num_events;
  }
  for (int32_t i = 0; i < num_events; ++i) SLUICE_TRY(create_event(device, &device->events[i]));
  return SLUICE_OK;
}

static sluice_status_t begin_inside(cuda_device_t* device, int32_t num_events, sluice_stream_t stream) {
  SLUICE_TRY(sluice_cuda_check_stream(&device->base, stream));
  SLUICE_TRY(reserve(device, num_events));
  SLUICE_TRY(create_event(device, &device->far.end));
  CU_TRY(device, cuEventRecord(device->entry, stream), "the entry of a pass cannot be recorded on the host's stream %p",
         stream);
  return SLUICE_OK;
}

static sluice_status_t cuda_begin(sluice_device_t* base, int32_t num_events, sluice_job_fn_t fn, void* user,
                                  sluice_stream_t stream) {
  cuda_device_t* device = cast(base);
  SLUICE_TRY(sluice_cuda_enter(base));
  sluice_status_t status = begin_inside(device, num_events, stream);
  if (status != SLUICE_OK) {
    sluice_error_info_t why;
    sluice_error_capture(&why);
    (void)sluice_cuda_leave(base); /* the first error is reported */
    return sluice_error_adopt(&why);
  }
  sluice_cuda_times_begin(base, &device->far.times, device->far.captured ? 0 : num_events, stream);
  SLUICE_TRY(sluice_cuda_leave(base));
  memset(device->used, 0, sizeof device->used);
  device->lanes[SLUICE_LANE_COMPUTE] = stream;
  device->fn = fn;
  device->user = user;
  device->failed = device->dead = 0;
  return SLUICE_OK;
}

/* The stream of a lane: made on first use; in each pass it starts after what the host's stream held at begin. */
static sluice_status_t use_lane(cuda_device_t* device, int32_t lane) {
  if (lane == SLUICE_LANE_COMPUTE || device->used[lane]) return SLUICE_OK;
  if (device->lanes[lane] == NULL) {
    int least = 0, greatest = 0;
    CU_TRY(device, cuCtxGetStreamPriorityRange(&least, &greatest), "no range of stream priorities");
    /* Exchanges first: a rank that sends late makes all others wait. */
    int priority = lane == SLUICE_LANE_COMM ? greatest : least;
    CU_TRY(device, cuStreamCreateWithPriority(&device->lanes[lane], SLUICE_CU_STREAM_NON_BLOCKING, priority),
           "no stream for lane %d on device %d", lane, device->ordinal);
  }
  SLUICE_TRY(create_event(device, &device->exits[lane]));
  CU_TRY(device, cuStreamWaitEvent(device->lanes[lane], device->entry, 0), "lane %d cannot wait for the host's stream",
         lane);
  device->used[lane] = 1;
  return SLUICE_OK;
}

/* The first failure is kept with its record. */
static void fail(cuda_device_t* device, int32_t is_final) {
  if (!device->failed) sluice_error_capture(&device->error);
  device->failed = 1;
  if (is_final) device->dead = 1;
}

static sluice_status_t wait_for_jobs(cuda_device_t* device, const sluice_job_t* job) {
  for (int32_t i = 0; i < job->num_waits; ++i) {
    CU_TRY(device, cuStreamWaitEvent(device->lanes[job->lane], device->events[job->waits[i]], 0),
           "job %d cannot wait for job %d", job->index, job->waits[i]);
  }
  return SLUICE_OK;
}

static sluice_status_t submit_inside(cuda_device_t* device, const sluice_job_t* job) {
  SLUICE_TRY(use_lane(device, job->lane));
  SLUICE_TRY(wait_for_jobs(device, job));
  if (!device->dead && (!device->failed || job->run_on_failure)) {
    sluice_cuda_times_mark(&device->base, &device->far.times, job->index, 0, device->lanes[job->lane]);
    sluice_status_t status = device->fn(device->user, job->index, device->lanes[job->lane]);
    sluice_cuda_times_mark(&device->base, &device->far.times, job->index, 1, device->lanes[job->lane]);
    if (status == SLUICE_OK && device->launch_status != SLUICE_OK) {
      (void)sluice_error_adopt(&device->launch_error);
      status = device->launch_status;
    }
    device->launch_status = SLUICE_OK;
    if (status != SLUICE_OK) fail(device, job->run_on_failure);
  }
  CU_TRY(device, cuEventRecord(device->events[job->index], device->lanes[job->lane]),
         "the end of job %d cannot be recorded", job->index);
  return SLUICE_OK;
}

/* A failed job is no failure of submit; a driver that refuses events is, and ends the pass. */
static sluice_status_t cuda_submit(sluice_device_t* base, const sluice_job_t* job) {
  cuda_device_t* device = cast(base);
  sluice_status_t status = sluice_cuda_enter(base);
  if (status == SLUICE_OK) {
    status = submit_inside(device, job);
    if (status != SLUICE_OK) fail(device, 1);
    sluice_status_t left = sluice_cuda_leave(base);
    if (status == SLUICE_OK) status = left;
  }
  if (status != SLUICE_OK) fail(device, 1);
  return status;
}

/* Every lane that was used is joined, whatever happens to the others. */
static void join_lane(cuda_device_t* device, int32_t lane) {
  int code = device->driver->cuEventRecord(device->exits[lane], device->lanes[lane]);
  if (code == 0) code = device->driver->cuStreamWaitEvent(device->lanes[SLUICE_LANE_COMPUTE], device->exits[lane], 0);
  if (code != 0) {
    (void)sluice_cuda_fail(device->driver, code, "lane %d cannot be joined to the host's stream", lane);
    fail(device, 1);
    device->unjoined[lane] = 1;
  }
}

/* Whoever uses the same memory next waits for this, on whatever stream. In a capture nothing ends: the event keeps the
 * pass before. */
static void record_end(cuda_device_t* device) {
  if (device->far.captured) return;
  int code = device->driver->cuEventRecord(device->far.end, device->lanes[SLUICE_LANE_COMPUTE]);
  device->unended = code != 0;
  if (code == 0) {
    device->far.has_end = 1;
    return;
  }
  (void)sluice_cuda_fail(device->driver, code, "the end of a pass cannot be recorded");
  fail(device, 1);
}

static sluice_status_t cuda_join(sluice_device_t* base) {
  cuda_device_t* device = cast(base);
  sluice_status_t status = sluice_cuda_enter(base);
  if (status == SLUICE_OK) {
    for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) {
      if (device->used[lane]) join_lane(device, lane);
    }
    record_end(device);
    status = sluice_cuda_leave(base);
  } else {
    memcpy(device->unjoined, device->used, sizeof device->unjoined);
    device->unended = 1;
  }
  if (status != SLUICE_OK) fail(device, 1);
  return device->failed ? sluice_error_adopt(&device->error) : SLUICE_OK;
}

/* Memory that a lane may still use must not be given to the next pass. */
sluice_status_t sluice_cuda_rejoin(sluice_device_t* base, sluice_stream_t stream) {
  cuda_device_t* device = cast(base);
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) {
    if (!device->unjoined[lane]) continue;
    CU_TRY(device, cuEventRecord(device->exits[lane], device->lanes[lane]), "lane %d of a failed pass cannot be joined",
           lane);
    CU_TRY(device, cuStreamWaitEvent(stream, device->exits[lane], 0), "lane %d of a failed pass cannot be joined",
           lane);
    device->unjoined[lane] = 0;
  }
  if (device->unended) {
    CU_TRY(device, cuEventRecord(device->far.end, device->lanes[SLUICE_LANE_COMPUTE]),
           "the end of a failed pass cannot be recorded");
    device->unended = 0;
    device->far.has_end = 1;
  }
  return SLUICE_OK;
}

sluice_status_t sluice_cuda_check_joined(sluice_device_t* base) {
  const cuda_device_t* device = cast(base);
  int32_t open = device->unended;
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) open |= device->unjoined[lane];
  if (!open) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_STATE,
                     "cuda: an earlier pass failed and its lanes may still run: make one call outside the capture "
                     "before it");
}

/* ---- reading and checking -------------------------------------------------------------------------------------- */

static sluice_status_t read_inside(cuda_device_t* device, sluice_stream_t stream, const void* data, void* out,
                                   uint64_t bytes) {
  int capturing = SLUICE_CU_CAPTURE_NONE;
  CU_TRY(device, cuStreamIsCapturing(stream, &capturing), "the state of stream %p is unknown", stream);
  if (capturing != SLUICE_CU_CAPTURE_NONE) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "cuda: the stream is being captured into a graph, which cannot wait for counts: use graph mode");
  }
  SLUICE_TRY(create_event(device, &device->read_done));
  CU_TRY(device, cuMemcpyAsync((unsigned long long)(uintptr_t)out, (unsigned long long)(uintptr_t)data, bytes, stream),
         "copy of %llu bytes to the host", (unsigned long long)bytes);
  CU_TRY(device, cuEventRecord(device->read_done, stream), "the copy's end cannot be recorded");
  ++device->stats.num_host_waits;
  device->stats.bytes_read += bytes;
  CU_TRY(device, cuEventSynchronize(device->read_done), "wait for %llu bytes from the device",
         (unsigned long long)bytes);
  return SLUICE_OK;
}

sluice_status_t sluice_cuda_read(sluice_device_t* base, sluice_stream_t stream, const void* data, void* out,
                                 uint64_t bytes) {
  SLUICE_TRY(sluice_cuda_enter(base));
  sluice_status_t status = read_inside(cast(base), stream, data, out, bytes);
  sluice_error_info_t why;
  if (status != SLUICE_OK) sluice_error_capture(&why);
  sluice_status_t left = sluice_cuda_leave(base);
  return status == SLUICE_OK ? left : sluice_error_adopt(&why);
}

sluice_status_t sluice_cuda_check_stream(sluice_device_t* base, sluice_stream_t stream) {
  cuda_device_t* device = cast(base);
  void* context = NULL;
  if (stream == NULL) return SLUICE_OK; /* the default stream of whatever context is current: ours */
  CU_TRY(device, cuStreamGetCtx(stream, &context), "the stream %p is no stream of this process", stream);
  if (context == device->context) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                     "cuda: the stream %p belongs to another context or device than device %d: pass a stream of the "
                     "device that holds the tensors",
                     stream, device->ordinal);
}

sluice_status_t sluice_cuda_check_memory(sluice_device_t* base, const void* data, uint64_t bytes, uint64_t alignment,
                                         const char* name) {
  cuda_device_t* device = cast(base);
  unsigned long long at = (unsigned long long)(uintptr_t)data;
  unsigned int type = 0;
  int ordinal = -1;
  if (bytes == 0) return SLUICE_OK;
  if (at % alignment != 0) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s lies at %p: want an address that %llu divides", name, data,
                       (unsigned long long)alignment);
  }
  if (device->driver->cuPointerGetAttribute(&type, SLUICE_CU_POINTER_MEMORY_TYPE, at) != 0 ||
      type != SLUICE_CU_MEMORY_DEVICE) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s lies at %p in host memory: want memory of CUDA device %d", name,
                       data, device->ordinal);
  }
  CU_TRY(device, cuPointerGetAttribute(&ordinal, SLUICE_CU_POINTER_DEVICE_ORDINAL, at), "the device of %s", name);
  if (ordinal == device->ordinal) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                     "%s lies on CUDA device %d: want device %d, where the other tensors of this context are", name,
                     ordinal, device->ordinal);
}

const sluice_cuda_driver_t* sluice_cuda_device_driver(const sluice_device_t* device) {
  return ((const cuda_device_t*)device)->driver;
}
int32_t sluice_cuda_device_ordinal(const sluice_device_t* device) { return ((const cuda_device_t*)device)->ordinal; }
sluice_cuda_numa_t sluice_cuda_device_numa(const sluice_device_t* device) {
  return sluice_cuda_numa_of(((const cuda_device_t*)device)->driver, ((const cuda_device_t*)device)->device);
}
void sluice_cuda_device_name(const sluice_device_t* base, char* out_name, int32_t bytes) {
  const cuda_device_t* device = (const cuda_device_t*)base;
  if (device->driver->cuDeviceGetName(out_name, bytes, device->device) == 0 && out_name[0] != '\0') return;
  snprintf(out_name, (size_t)bytes, "unknown GPU");
}
sluice_cuda_stats_t sluice_cuda_device_stats(const sluice_device_t* device) {
  return ((const cuda_device_t*)device)->stats;
}

sluice_cuda_far_state_t* sluice_cuda_far_state(sluice_device_t* device) { return &cast(device)->far; }
sluice_stream_t sluice_cuda_own_stream(const sluice_device_t* device) {
  return ((const cuda_device_t*)device)->lanes[SLUICE_LANE_COPY_OUT];
}

/* ---- create and destroy ---------------------------------------------------------------------------------------- */

static void destroy_event(cuda_device_t* device, void* event) {
  if (event != NULL) (void)device->driver->cuEventDestroy_v2(event);
}

/* Handles know their context: they are given back even where it cannot be made current. */
static void release_driver_objects(cuda_device_t* device) {
  void* context = NULL;
  int is_current = device->driver->cuCtxPushCurrent_v2(device->context) == 0;
  sluice_cuda_far_release(&device->base);
  sluice_cuda_times_release(&device->base, &device->far.times);
  destroy_event(device, device->far.end);
  destroy_event(device, device->entry);
  destroy_event(device, device->read_done);
  for (int32_t i = 0; i < device->num_events; ++i) destroy_event(device, device->events[i]);
  for (int32_t lane = 0; lane < SLUICE_NUM_LANES; ++lane) {
    destroy_event(device, device->exits[lane]);
    if (lane == SLUICE_LANE_COMPUTE || device->lanes[lane] == NULL) continue;
    (void)device->driver->cuStreamDestroy_v2(device->lanes[lane]);
  }
  if (device->library != NULL) (void)device->driver->cuLibraryUnload(device->library);
  if (is_current) (void)device->driver->cuCtxPopCurrent_v2(&context);
  (void)device->driver->cuDevicePrimaryCtxRelease_v2(device->device);
}

static void cuda_destroy(sluice_device_t* base) {
  cuda_device_t* device = cast(base);
  if (!sluice_cuda_is_inherited(base)) release_driver_objects(device);
  sluice_free(base->allocator, device->events, (uint64_t)device->num_events * sizeof *device->events);
  sluice_free(base->allocator, device, sizeof *device);
}

static const sluice_device_vtable_t cuda_vtable = {
    .destroy = cuda_destroy,
    .begin = cuda_begin,
    .submit = cuda_submit,
    .join = cuda_join,
};

static sluice_status_t load_image(cuda_device_t* device, sluice_cuda_image_t image) {
  if (image.bytes == 0) {
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND,
                       "cuda: this libsluice was built without nvcc and has no CUDA kernels: build it where nvcc is");
  }
  int major = 0, minor = 0;
  CU_TRY(device, cuDeviceGetAttribute(&major, SLUICE_CU_ATTRIBUTE_MAJOR, device->device), "compute capability");
  CU_TRY(device, cuDeviceGetAttribute(&minor, SLUICE_CU_ATTRIBUTE_MINOR, device->device), "compute capability");
  CU_TRY(
      device, cuLibraryLoadData(&device->library, image.data, NULL, NULL, 0, NULL, NULL, 0),
      "device %d (sm_%d%d) and a driver of CUDA %d.%d do not take the kernels, built for sm_80, sm_90, sm_100 and as "
      "PTX by CUDA 13: update the driver (R580), or build with this machine's nvcc",
      device->ordinal, major, minor, device->driver->version / 1000, device->driver->version % 1000 / 10);
  return SLUICE_OK;
}

static sluice_status_t take_context(cuda_device_t* device) {
  int count = 0;
  CU_TRY(device, cuDeviceGetCount(&count), "the driver does not tell how many devices there are");
  if (device->ordinal < 0 || device->ordinal >= count) {
    return SLUICE_FAIL(SLUICE_E_NOT_FOUND, "cuda: there is no device %d, this process sees %d", device->ordinal, count);
  }
  CU_TRY(device, cuDeviceGet(&device->device, device->ordinal), "device %d", device->ordinal);
  CU_TRY(device, cuDevicePrimaryCtxRetain(&device->context, device->device), "the primary context of device %d",
         device->ordinal);
  return SLUICE_OK;
}

static sluice_status_t create(cuda_device_t* device, sluice_cuda_image_t image, int32_t ordinal,
                              sluice_allocator_t* allocator, sluice_device_t** out_device) {
  device->base = (sluice_device_t){.vtable = &cuda_vtable,
                                   .kernels = sluice_cuda_kernels(),
                                   .allocator = allocator,
                                   .name = "cuda",
                                   .far = &sluice_cuda_far_vtable};
  device->ordinal = ordinal;
  device->pid = getpid();
  sluice_status_t status = take_context(device);
  if (status != SLUICE_OK) goto err_free;
  status = sluice_cuda_enter(&device->base);
  if (status != SLUICE_OK) goto err_release;
  status = load_image(device, image);
  if (status == SLUICE_OK) {
    status = sluice_cuda_leave(&device->base);
  } else {
    sluice_error_capture(&device->error);
    (void)sluice_cuda_leave(&device->base);
    (void)sluice_error_adopt(&device->error);
  }
  if (status != SLUICE_OK) goto err_release;
  *out_device = &device->base;
  return SLUICE_OK;

err_release:
  release_driver_objects(device);
err_free:
  sluice_free(allocator, device, sizeof *device);
  return status;
}

sluice_status_t sluice_cuda_device_create_from(const sluice_cuda_driver_t* driver, sluice_cuda_image_t image,
                                               int32_t ordinal, sluice_allocator_t* allocator,
                                               sluice_device_t** out_device) {
  *out_device = NULL;
  cuda_device_t* device = sluice_alloc_zeroed(allocator, sizeof *device, "cuda device");
  if (device == NULL) return SLUICE_E_NO_MEMORY;
  device->driver = driver;
  return create(device, image, ordinal, allocator, out_device);
}

sluice_status_t sluice_cuda_device_create(int32_t ordinal, sluice_allocator_t* allocator,
                                          sluice_device_t** out_device) {
  *out_device = NULL;
  cuda_device_t* device = sluice_alloc_zeroed(allocator, sizeof *device, "cuda device");
  if (device == NULL) return SLUICE_E_NO_MEMORY;
  sluice_status_t status = sluice_cuda_driver_open(NULL, &device->own_driver);
  if (status != SLUICE_OK) {
    sluice_free(allocator, device, sizeof *device);
    return status;
  }
  device->driver = &device->own_driver;
  return create(device, sluice_cuda_image(), ordinal, allocator, out_device);
}
