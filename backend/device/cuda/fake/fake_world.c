// SPDX-License-Identifier: Apache-2.0
#include "backend/device/cuda/fake/fake_world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_CONTEXT_DEPTH = 16, LOOK_AGAIN_NS = 1000000 };

sluice_fake_world_t sluice_fake_world;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
static char contexts[SLUICE_FAKE_CUDA_DEVICES];
static _Thread_local void* current[MAX_CONTEXT_DEPTH];
static _Thread_local int depth;

void sluice_fake_cuda_lock(void) { pthread_mutex_lock(&mutex); }

void sluice_fake_cuda_unlock(void) {
  pthread_cond_broadcast(&progress);
  pthread_mutex_unlock(&mutex);
}

int sluice_fake_planned(void) {
  int64_t number = sluice_fake_world.calls++;
  if (sluice_fake_world.faulted) return ILLEGAL_ADDRESS;
  if (sluice_fake_world.deadlock[0] != '\0') return LAUNCH_TIMEOUT;
  if (number != sluice_fake_world.fail_at) return 0;
  sluice_fake_world.failed = 1;
  return sluice_fake_world.fail_code;
}

int sluice_fake_planned_once(const char* name) {
  const int32_t rank = sluice_fake_current_device() < 0 ? 0 : sluice_fake_current_device();
  (void)sluice_fake_note_event(&(sluice_fake_event_t){.kind = SLUICE_FAKE_HOST_CALL, .rank = rank, .name = name}, NULL);
  return sluice_fake_planned();
}

int sluice_fake_begin(const char* name) {
  sluice_fake_cuda_lock();
  const int code = sluice_fake_planned_once(name);
  return code == 0 && sluice_fake_spoils(NULL) ? CAPTURE_UNSUPPORTED : code;
}

int sluice_fake_end(int code) {
  sluice_fake_cuda_unlock();
  return code;
}

int sluice_fake_simple(void) {
  sluice_fake_cuda_lock();
  return sluice_fake_end(sluice_fake_planned());
}

static int looks_again;
void sluice_fake_cuda_look_again(void) { looks_again = 1; }

void sluice_fake_sleep(void) {
  struct timespec until;
  if (!looks_again) {
    pthread_cond_wait(&progress, &mutex);
    return;
  }
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_nsec += LOOK_AGAIN_NS;
  if (until.tv_nsec >= 1000000000) ++until.tv_sec, until.tv_nsec -= 1000000000;
  pthread_cond_timedwait(&progress, &mutex, &until);
}

int32_t sluice_fake_current_device(void) { return depth == 0 ? -1 : (int32_t)((char*)current[depth - 1] - contexts); }
void* sluice_fake_context_of(int32_t ordinal) { return &contexts[ordinal]; }

/* ---- driver calls: start, devices, contexts -------------------------------------------------------------------- */

int sluice_fake_cuInit(unsigned int flags) {
  (void)flags;
  return sluice_fake_simple();
}
int sluice_fake_cuDriverGetVersion(int* out_version) {
  *out_version = sluice_fake_world.version;
  return sluice_fake_simple();
}
int sluice_fake_cuGetErrorName(int error, const char** out_name) {
  static const char* const names[] = {"CUDA_SUCCESS", "CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_OUT_OF_MEMORY"};
  *out_name = error >= 0 && error < 3 ? names[error] : "CUDA_ERROR_FAKE";
  if (error == ILLEGAL_ADDRESS) *out_name = "CUDA_ERROR_ILLEGAL_ADDRESS";
  if (error == LAUNCH_TIMEOUT) *out_name = "CUDA_ERROR_LAUNCH_TIMEOUT";
  return 0;
}
int sluice_fake_cuGetErrorString(int error, const char** out_text) {
  *out_text = error == 2 ? "out of memory" : "an error on command";
  return 0;
}
int sluice_fake_cuDeviceGetCount(int* out_count) {
  *out_count = SLUICE_FAKE_CUDA_DEVICES;
  return sluice_fake_simple();
}
int sluice_fake_cuDeviceGet(int* out_device, int ordinal) {
  *out_device = 100 + ordinal;
  return sluice_fake_simple();
}
int sluice_fake_cuDeviceGetAttribute(int* out_value, int attribute, int device) {
  *out_value = attribute == SLUICE_CU_ATTRIBUTE_MAJOR ? 9 : 0;
  if (attribute == SLUICE_CU_ATTRIBUTE_SMS) *out_value = SLUICE_FAKE_SMS;
  if (attribute == SLUICE_CU_ATTRIBUTE_PCI_BUS) *out_value = 0x1a + device - 100;
  if (attribute != SLUICE_CU_ATTRIBUTE_HOST_NUMA_ID) return sluice_fake_simple();
  *out_value = sluice_fake_world.numa_node;
  return sluice_fake_world.numa_node < 0 ? INVALID_VALUE : sluice_fake_simple();
}
int sluice_fake_cuDeviceGetName(char* out_name, int bytes, int device) {
  snprintf(out_name, (size_t)bytes, "Fake GPU %d", device - 100);
  return sluice_fake_simple();
}
int sluice_fake_cuDevicePrimaryCtxRetain(void** out_context, int device) {
  sluice_fake_cuda_lock();
  int code = sluice_fake_planned();
  if (code == 0) {
    *out_context = sluice_fake_context_of(device - 100);
    ++sluice_fake_world.num_contexts;
  }
  return sluice_fake_end(code);
}
int sluice_fake_cuDevicePrimaryCtxRelease_v2(int device) {
  (void)device;
  sluice_fake_cuda_lock();
  int code = sluice_fake_planned();
  --sluice_fake_world.num_contexts;
  return sluice_fake_end(code);
}
int sluice_fake_cuCtxPushCurrent_v2(void* context) {
  int code = sluice_fake_simple();
  if (code != 0) return code;
  if (depth == MAX_CONTEXT_DEPTH) return INVALID_CONTEXT;
  current[depth++] = context;
  return 0;
}
int sluice_fake_cuCtxPopCurrent_v2(void** out_context) {
  int code = sluice_fake_simple();
  if (depth == 0) return INVALID_CONTEXT;
  *out_context = current[--depth];
  return code;
}
int sluice_fake_cuCtxGetStreamPriorityRange(int* out_least, int* out_greatest) {
  *out_least = 0;
  *out_greatest = -5;
  return sluice_fake_current_device() < 0 ? INVALID_CONTEXT : sluice_fake_simple();
}

/* ---- control of the fake --------------------------------------------------------------------------------------- */

const sluice_cuda_driver_t* sluice_fake_cuda_driver(void) {
  static const sluice_cuda_driver_t driver = {
#define SYMBOL(name, parameters) .name = sluice_fake_##name,
#include "backend/device/cuda/cuda_symbols.inc"
#undef SYMBOL
      .version = 13000,
  };
  return &driver;
}

sluice_cuda_image_t sluice_fake_cuda_image(void) {
  static const char image[] = "kernels that are linked in";
  return (sluice_cuda_image_t){image, sizeof image};
}

void sluice_fake_cuda_reset(void) {
  sluice_fake_cuda_lock();
  for (int i = 0; i < MAX_STREAMS; ++i) sluice_fake_end_stream(&sluice_fake_world.streams[i]);
  for (int i = 0; i < sluice_fake_world.num_places; ++i) {
    sluice_fake_release_block(&sluice_fake_world.blocks[i]);
  }
  sluice_fake_forget_record();
  for (fake_library_t *library = sluice_fake_world.libraries, *next; library != NULL; library = next) {
    next = library->next;
    free(library);
  }
  free(sluice_fake_world.accesses);
  free(sluice_fake_world.clocks);
  memset(&sluice_fake_world, 0, sizeof sluice_fake_world);
  sluice_fake_world.version = 13000;
  sluice_fake_world.numa_node = -1;
  sluice_fake_world.fail_at = sluice_fake_world.drop_at = sluice_fake_world.drop_rank = -1;
  sluice_fake_world.refuse_at = sluice_fake_world.fault_at = -1;
  sluice_fake_world.memory = (uint64_t)1 << 30;
  for (int32_t i = 0; i < SLUICE_FAKE_CUDA_DEVICES; ++i) {
    sluice_fake_world.streams[i] = (fake_stream_t){.live = 1, .index = i, .ordinal = i, .is_hosts = 1};
  }
  for (int i = 0; i < MAX_STREAMS; ++i) sluice_fake_world.streams[i].tail = &sluice_fake_world.streams[i].head;
  sluice_fake_cuda_unlock();
}

void sluice_fake_cuda_fail_call(int64_t nth, int code) {
  sluice_fake_cuda_lock();
  sluice_fake_world.calls = 0;
  sluice_fake_world.fail_at = nth;
  sluice_fake_world.fail_code = code;
  sluice_fake_world.failed = 0;
  sluice_fake_cuda_unlock();
}

void sluice_fake_cuda_fault(int64_t nth_launch) {
  sluice_fake_cuda_lock();
  sluice_fake_world.fault_at = nth_launch < 0 ? -1 : sluice_fake_world.launches + nth_launch;
  sluice_fake_world.faulted = 0;
  sluice_fake_cuda_unlock();
}

int sluice_fake_cuda_faulted(void) { return sluice_fake_world.faulted; }

int64_t sluice_fake_locked_count(const int64_t* counter) {
  sluice_fake_cuda_lock();
  int64_t value = *counter;
  sluice_fake_cuda_unlock();
  return value;
}

int64_t sluice_fake_cuda_calls(void) { return sluice_fake_locked_count(&sluice_fake_world.calls); }

int sluice_fake_cuda_failed(void) { return sluice_fake_world.failed; }

int64_t sluice_fake_cuda_host_waits(void) { return sluice_fake_locked_count(&sluice_fake_world.host_waits); }

int64_t sluice_fake_cuda_queries(void) { return sluice_fake_locked_count(&sluice_fake_world.queries); }

int64_t sluice_fake_cuda_launches(void) { return sluice_fake_locked_count(&sluice_fake_world.launches); }

void sluice_fake_cuda_set_version(int version) { sluice_fake_world.version = version; }

void sluice_fake_cuda_set_numa_node(int32_t node) { sluice_fake_world.numa_node = node; }

void sluice_fake_cuda_set_memory(uint64_t device_bytes) { sluice_fake_world.memory = device_bytes; }

int64_t sluice_fake_cuda_live(char* out, size_t out_bytes) {
  int64_t streams = 0, blocks = 0;
  sluice_fake_cuda_lock();
  for (int i = 0; i < MAX_STREAMS; ++i)
    streams += sluice_fake_world.streams[i].live && !sluice_fake_world.streams[i].is_hosts;
  for (int i = 0; i < sluice_fake_world.num_places; ++i)
    blocks += sluice_fake_world.blocks[i].data != NULL && !sluice_fake_world.blocks[i].is_hosts;
  snprintf(out, out_bytes, "%lld streams, %lld events, %lld libraries, %lld contexts, %lld blocks, depth %d",
           (long long)streams, (long long)sluice_fake_world.num_events, (long long)sluice_fake_world.num_libraries,
           (long long)sluice_fake_world.num_contexts, (long long)blocks, depth);
  int64_t live = streams + blocks + sluice_fake_world.num_events + sluice_fake_world.num_libraries +
                 sluice_fake_world.num_contexts + depth;
  sluice_fake_cuda_unlock();
  return live;
}
