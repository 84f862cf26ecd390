// SPDX-License-Identifier: Apache-2.0
/* Work on streams: copies, fills and kernels, which are linked in. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/device/cuda/fake/fake_world.h"

typedef struct copy_s {
  void* to;
  const void* from; /* NULL: fill */
  unsigned char value;
  size_t bytes;
} copy_t;

static void run_copy(void* user) {
  const copy_t* copy = user;
  if (!sluice_fake_is_copied(copy->bytes)) return;
  if (copy->from != NULL) {
    memmove(copy->to, copy->from, copy->bytes);
  } else {
    memset(copy->to, copy->value, copy->bytes);
  }
}

static void note_copy(void* user, const sluice_fake_moment_t* moment) {
  const copy_t* copy = user;
  sluice_fake_cuda_note_at(moment, copy->to, copy->bytes, 1);
  if (copy->from != NULL) sluice_fake_cuda_note_at(moment, copy->from, copy->bytes, 0);
}

static void* copy_again(const void* user) {
  copy_t* kept = malloc(sizeof *kept);
  *kept = *(const copy_t*)user;
  return kept;
}

/* Returns the direction of a copy; tensors of a dry host are in device memory. */
static const char* way_of(const copy_t* copy) {
  const int to_device = sluice_fake_is_on_device(copy->to), from_device = sluice_fake_is_on_device(copy->from);
  if (to_device && from_device) return "device";
  return to_device ? "to_device" : "to_host";
}

static void note_copy_event(const copy_t* copy, const fake_stream_t* stream) {
  const int is_fill = copy->from == NULL;
  (void)sluice_fake_note_event(&(sluice_fake_event_t){.kind = is_fill ? SLUICE_FAKE_FILL : SLUICE_FAKE_COPY,
                                                      .rank = stream->ordinal,
                                                      .stream = stream->index,
                                                      .name = is_fill ? NULL : way_of(copy),
                                                      .writes = copy->bytes},
                               NULL);
}

static int enqueue_copy(const copy_t* copy, void* stream) {
  sluice_fake_cuda_lock();
  int code = sluice_fake_planned();
  int is_pageable =
      sluice_fake_block_number(copy->to) == 0 || (copy->from != NULL && sluice_fake_block_number(copy->from) == 0);
  if (code == 0 && is_pageable && sluice_fake_spoils(sluice_fake_stream_of(stream))) code = CAPTURE_UNSUPPORTED;
  if (code == 0 && copy->bytes > 0) {
    note_copy_event(copy, sluice_fake_stream_of(stream));
    sluice_fake_cuda_enqueue(stream, &(sluice_fake_op_t){.name = "a copy",
                                                         .run = run_copy,
                                                         .drop = free,
                                                         .user = copy_again(copy),
                                                         .note = note_copy,
                                                         .again = copy_again});
  }
  return sluice_fake_end(code);
}
int sluice_fake_cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t bytes, void* stream) {
  const copy_t copy = {.to = (void*)(uintptr_t)to, .from = (const void*)(uintptr_t)from, .bytes = bytes};
  return enqueue_copy(&copy, stream);
}
int sluice_fake_cuMemsetD8Async(unsigned long long to, unsigned char value, size_t bytes, void* stream) {
  const copy_t copy = {.to = (void*)(uintptr_t)to, .value = value, .bytes = bytes};
  return enqueue_copy(&copy, stream);
}

int sluice_fake_cuMemsetD2D8Async(unsigned long long to, size_t pitch, unsigned char value, size_t width, size_t height,
                                  void* stream) {
  int code = height == 0 || width == 0 ? sluice_fake_simple() : 0;
  for (size_t row = 0; row < height && width > 0 && code == 0; ++row) {
    const copy_t copy = {.to = (void*)(uintptr_t)(to + row * pitch), .value = value, .bytes = width};
    code = enqueue_copy(&copy, stream);
  }
  return code;
}

int sluice_fake_cuLibraryLoadData(void** out_library, const void* image, int* jit_options, void** jit_values,
                                  unsigned int num_jit, int* library_options, void** library_values,
                                  unsigned int num_library) {
  (void)image, (void)jit_options, (void)jit_values, (void)library_options, (void)library_values;
  if (num_jit != 0 || num_library != 0) return INVALID_VALUE;
  sluice_fake_cuda_lock();
  int code = sluice_fake_planned();
  if (code == 0 && sluice_fake_spoils(NULL)) code = CAPTURE_UNSUPPORTED;
  if (code == 0) {
    fake_library_t* library = calloc(1, sizeof *library);
    library->is_live = 1;
    library->next = sluice_fake_world.libraries;
    *out_library = sluice_fake_world.libraries = library;
    ++sluice_fake_world.num_libraries;
  }
  return sluice_fake_end(code);
}
int sluice_fake_cuLibraryUnload(void* handle) {
  sluice_fake_cuda_lock();
  int code = sluice_fake_planned();
  ((fake_library_t*)handle)->is_live = 0;
  --sluice_fake_world.num_libraries;
  return sluice_fake_end(code);
}
int sluice_fake_cuLibraryGetKernel(void** out_kernel, void* handle, const char* name) {
  fake_library_t* library = handle;
  fake_kernel_t kernel = {.fn = NULL};
  snprintf(kernel.name, sizeof kernel.name, "%s", name);
  kernel.fn = sluice_emulated_kernel(name, &kernel.args_bytes);
  if (!library->is_live || kernel.fn == NULL) return NOT_FOUND;
  sluice_fake_cuda_lock();
  int code = sluice_fake_planned();
  int32_t i = 0;
  while (i < library->num_kernels && library->kernels[i].fn != kernel.fn) ++i;
  assert(i < MAX_KERNELS);
  if (i == library->num_kernels) library->kernels[library->num_kernels++] = kernel;
  if (code == 0 && sluice_fake_spoils(NULL)) code = CAPTURE_UNSUPPORTED;
  if (code == 0) *out_kernel = &library->kernels[i];
  return sluice_fake_end(code);
}

int sluice_fake_cuda_has_kernel(const char* name) {
  int found = 0;
  sluice_fake_cuda_lock();
  for (const fake_library_t* library = sluice_fake_world.libraries; library != NULL; library = library->next) {
    for (int32_t i = 0; i < library->num_kernels; ++i) found |= strcmp(library->kernels[i].name, name) == 0;
  }
  sluice_fake_cuda_unlock();
  return found;
}

static int load_waits;
void sluice_fake_cuda_set_load_waits(int waits) { load_waits = waits; }

/* Loads a kernel before its first launch on a device, as with CUDA_MODULE_LOADING=LAZY. */
static int load(fake_kernel_t* kernel, const fake_stream_t* stream) {
  if (kernel->is_loaded[stream->ordinal]) return 0;
  if (sluice_fake_spoils(stream)) return CAPTURE_UNSUPPORTED;
  const int code = load_waits ? sluice_fake_wait_until(sluice_fake_is_idle, &stream->ordinal) : 0;
  kernel->is_loaded[stream->ordinal] = code == 0;
  return code;
}

typedef struct launch_s {
  const fake_kernel_t* kernel;
  sluice_fake_moment_t moment;
  int64_t event; /* in the record */
  int faults;
  sluice_emulated_kernel_fn_t fn;
  int64_t warps;
  char args[4096]; /* limit of a kernel's parameters */
} launch_t;

static void (*run_by)(const char* name, int64_t warps, const void* args);

void sluice_fake_cuda_run_kernels_by(void (*run)(const char* name, int64_t warps, const void* args)) {
  sluice_fake_cuda_lock();
  run_by = run;
  sluice_fake_cuda_unlock();
}

static void run_launch(void* user) {
  const launch_t* launch = user;
  if (launch->faults) sluice_fake_world.faulted = 1;
  if (launch->event >= 0 || !sluice_fake_is_dry()) {
    sluice_fake_count_bytes_for(launch->event);
    sluice_fake_note_kernel(launch->kernel->name, launch->args, &launch->moment); /* before it writes */
    sluice_fake_count_bytes_for(-1);
  }
  if (!sluice_fake_is_executed(launch->kernel->name)) return;
  if (run_by != NULL) {
    run_by(launch->kernel->name, launch->warps, launch->args);
  } else {
    launch->fn(launch->warps, launch->args);
  }
}

static void note_launch(void* user, const sluice_fake_moment_t* moment) { ((launch_t*)user)->moment = *moment; }

static void* launch_again(const void* user) {
  launch_t* launch = malloc(sizeof *launch);
  memcpy(launch, user, sizeof *launch);
  launch->event = -1;
  return launch;
}

static int64_t note_launch_event(const launch_t* launch, const fake_stream_t* stream) {
  if (!sluice_fake_is_recorded()) return -1;
  sluice_fake_event_t event = {
      .kind = SLUICE_FAKE_LAUNCH, .rank = stream->ordinal, .stream = stream->index, .name = launch->kernel->name};
  const int is_known = sluice_fake_kernel_work(event.name, launch->args, &event.units, &event.length);
  assert(is_known && "a kernel that kernel_work.c does not know");
  (void)is_known;
  return sluice_fake_note_event(&event, NULL);
}

int sluice_fake_cuLaunchKernel(void* function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                               unsigned int block_x, unsigned int block_y, unsigned int block_z,
                               unsigned int shared_bytes, void* stream, void** parameters, void** extra) {
  fake_kernel_t* kernel = function;
  if (sluice_fake_current_device() < 0) return INVALID_CONTEXT;
  if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x % 32 != 0 || block_x > 1024 || block_y != 1 ||
      block_z != 1 || shared_bytes != 0 || extra != NULL || kernel->args_bytes > 4096) {
    return INVALID_VALUE;
  }
  if (sluice_fake_stream_of(stream)->ordinal != sluice_fake_current_device()) return INVALID_HANDLE;
  sluice_fake_cuda_lock();
  int code = sluice_fake_planned();
  if (code == 0) code = load(kernel, sluice_fake_stream_of(stream));
  if (code == 0) {
    launch_t* launch = calloc(1, sizeof *launch);
    launch->fn = kernel->fn;
    launch->warps = (int64_t)grid_x * block_x / 32;
    memcpy(launch->args, parameters[0], kernel->args_bytes);
    launch->faults = sluice_fake_world.launches++ == sluice_fake_world.fault_at;
    launch->kernel = kernel;
    launch->event = note_launch_event(launch, sluice_fake_stream_of(stream));
    sluice_fake_cuda_enqueue(stream, &(sluice_fake_op_t){.name = kernel->name,
                                                         .run = run_launch,
                                                         .drop = free,
                                                         .user = launch,
                                                         .note = note_launch,
                                                         .again = launch_again});
  }
  return sluice_fake_end(code);
}
