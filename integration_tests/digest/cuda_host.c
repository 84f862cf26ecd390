// SPDX-License-Identifier: Apache-2.0
#include "cuda_host.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>

enum { NON_BLOCKING = 1, THREAD_LOCAL = 1, NO_DRIVER = -1 };

static struct {
  int (*init)(unsigned int flags);
  int (*device)(int* out_device, int ordinal);
  int (*retain)(void** out_context, int device);
  int (*release)(int device);
  int (*push)(void* context);
  int (*pop)(void** out_context);
  int (*stream_create)(void** out_stream, unsigned int flags, int priority);
  int (*stream_destroy)(void* stream);
  int (*synchronize)(void* stream);
  int (*begin)(void* stream, int mode);
  int (*end)(void* stream, void** out_graph);
  int (*instantiate)(void** out_launchable, void* graph, unsigned long long flags);
  int (*launch)(void* launchable, void* stream);
  int (*destroy_launchable)(void* launchable);
  int (*destroy_graph)(void* graph);
  int is_there;
} cuda;

static void* find(void* library, const char* name) {
  void* found = dlsym(library, name);
  cuda.is_there &= found != NULL;
  return found;
}

static void open_driver(void) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == NULL) return;
  cuda.is_there = 1;
  *(void**)&cuda.init = find(library, "cuInit");
  *(void**)&cuda.device = find(library, "cuDeviceGet");
  *(void**)&cuda.retain = find(library, "cuDevicePrimaryCtxRetain");
  *(void**)&cuda.release = find(library, "cuDevicePrimaryCtxRelease_v2");
  *(void**)&cuda.push = find(library, "cuCtxPushCurrent_v2");
  *(void**)&cuda.pop = find(library, "cuCtxPopCurrent_v2");
  *(void**)&cuda.stream_create = find(library, "cuStreamCreateWithPriority");
  *(void**)&cuda.stream_destroy = find(library, "cuStreamDestroy_v2");
  *(void**)&cuda.synchronize = find(library, "cuStreamSynchronize");
  *(void**)&cuda.begin = find(library, "cuStreamBeginCapture_v2");
  *(void**)&cuda.end = find(library, "cuStreamEndCapture");
  *(void**)&cuda.instantiate = find(library, "cuGraphInstantiateWithFlags");
  *(void**)&cuda.launch = find(library, "cuGraphLaunch");
  *(void**)&cuda.destroy_launchable = find(library, "cuGraphExecDestroy");
  *(void**)&cuda.destroy_graph = find(library, "cuGraphDestroy");
}

int cuda_host_open(cuda_host_t* out, int ordinal) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  *out = (cuda_host_t){NULL, NULL, NULL, NULL, 0};
  (void)pthread_once(&once, open_driver);
  if (!cuda.is_there) return NO_DRIVER;
  int code = cuda.init(0);
  if (code == 0) code = cuda.device(&out->device, ordinal);
  if (code == 0) code = cuda.retain(&out->context, out->device);
  if (code == 0) code = cuda.push(out->context);
  if (code == 0) code = cuda.stream_create(&out->stream, NON_BLOCKING, 0);
  return code;
}

void cuda_host_close(cuda_host_t* host) {
  if (host->launchable != NULL) (void)cuda.destroy_launchable(host->launchable);
  if (host->graph != NULL) (void)cuda.destroy_graph(host->graph);
  if (host->stream == NULL) return;
  void* context = NULL;
  (void)cuda.stream_destroy(host->stream);
  (void)cuda.pop(&context);
  (void)cuda.release(host->device);
}

int cuda_host_settle(const cuda_host_t* host) { return host->stream != NULL ? cuda.synchronize(host->stream) : 0; }
int cuda_host_begin_capture(cuda_host_t* host) { return cuda.begin(host->stream, THREAD_LOCAL); }
int cuda_host_end_capture(cuda_host_t* host) {
  int code = cuda.end(host->stream, &host->graph);
  return code == 0 ? cuda.instantiate(&host->launchable, host->graph, 0) : code;
}
int cuda_host_launch(const cuda_host_t* host) { return cuda.launch(host->launchable, host->stream); }
