// SPDX-License-Identifier: Apache-2.0
/* CUDA graphs, for the programs that run on a GPU: frameworks capture streams, the library never calls these functions.
 * They are loaded from the driver, or are those of the fake (-DSLUICE_GPU_SUITE_FAKE). */
#pragma once

#include <dlfcn.h>
#include <stddef.h>

#ifdef SLUICE_GPU_SUITE_FAKE
#include "backend/device/cuda/fake/fake_cuda.h"
#endif

typedef struct gpu_graph_s {
  void *graph, *exec;
} gpu_graph_t;

#ifndef SLUICE_GPU_SUITE_FAKE

static struct {
  int (*begin)(void* stream, int mode);
  int (*end)(void* stream, void** out_graph);
  int (*instantiate)(void** out_exec, void* graph, unsigned long long flags);
  int (*launch)(void* exec, void* stream);
  int (*destroy_exec)(void* exec);
  int (*destroy_graph)(void* graph);
} gpu_graphs;
enum { GPU_CAPTURE_THREAD_LOCAL = 1 }; /* ranks are threads */

/* Call it once, before the functions below; returns 0 if the driver has no graphs. All need a current context. */
static int gpu_graphs_open(void) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == NULL) return 0;
  *(void**)&gpu_graphs.begin = dlsym(library, "cuStreamBeginCapture_v2");
  *(void**)&gpu_graphs.end = dlsym(library, "cuStreamEndCapture");
  *(void**)&gpu_graphs.instantiate = dlsym(library, "cuGraphInstantiateWithFlags");
  *(void**)&gpu_graphs.launch = dlsym(library, "cuGraphLaunch");
  *(void**)&gpu_graphs.destroy_exec = dlsym(library, "cuGraphExecDestroy");
  *(void**)&gpu_graphs.destroy_graph = dlsym(library, "cuGraphDestroy");
  return gpu_graphs.begin != NULL && gpu_graphs.end != NULL && gpu_graphs.instantiate != NULL &&
         gpu_graphs.launch != NULL && gpu_graphs.destroy_exec != NULL && gpu_graphs.destroy_graph != NULL;
}

/* These return the driver's codes. */
static int gpu_graph_begin(void* stream) { return gpu_graphs.begin(stream, GPU_CAPTURE_THREAD_LOCAL); }
static int gpu_graph_end(void* stream, gpu_graph_t* out) {
  int code = gpu_graphs.end(stream, &out->graph);
  return code == 0 ? gpu_graphs.instantiate(&out->exec, out->graph, 0) : code;
}
static int gpu_graph_launch(const gpu_graph_t* g, void* stream) { return gpu_graphs.launch(g->exec, stream); }
static void gpu_graph_drop(gpu_graph_t* g) {
  if (g->exec != NULL) (void)gpu_graphs.destroy_exec(g->exec);
  if (g->graph != NULL) (void)gpu_graphs.destroy_graph(g->graph);
  g->graph = g->exec = NULL;
}

#else

static int gpu_graphs_open(void) { return 1; }
static int gpu_graph_begin(void* stream) {
  sluice_fake_cuda_begin_capture(stream);
  return 0;
}
static int gpu_graph_end(void* stream, gpu_graph_t* out) {
  sluice_fake_graph_t* graph = NULL;
  int code = sluice_fake_cuda_end_capture(stream, &graph);
  out->graph = graph;
  return code;
}
static int gpu_graph_launch(const gpu_graph_t* g, void* stream) {
  sluice_fake_cuda_launch_graph(g->graph, stream);
  return 0;
}
static void gpu_graph_drop(gpu_graph_t* g) {
  sluice_fake_cuda_destroy_graph(g->graph);
  g->graph = NULL;
}

#endif
