// SPDX-License-Identifier: Apache-2.0
#include "capi/test/cuda/fakes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend/comm/nccl/fake/fake_nccl.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/gemm/cublas/fake/fake_cublas.h"
#include "backend/moe/context/context.h"
#include "capi/src/context_on_device.h"

const char fakes_machine_json[] =
    "{\"sluice_machine\": 2, \"name\": \"test\", "
    "\"gemm\": {\"f32\": {\"flops_per_second\": 1e12, \"half_rows\": 8}}, "
    "\"rows\": {\"bytes_per_second\": 5e11}, \"activation_seconds\": 1e-12, \"activation_grad_seconds\": 2e-12, "
    "\"exchange\": {\"bytes_per_second\": 1e9, \"startup_seconds\": 2e-5, \"per_peer_seconds\": 2e-6}, "
    "\"host_copy\": {\"bytes_per_second\": 2e10}, \"op_seconds\": 2e-6, \"pass_seconds\": 1e-5}";

enum { TIMEOUT_MS = 300000 }; /* detects hangs; long for sanitizers on busy machines */

typedef struct rank_machine_s {
  void* stream;
  sluice_comm_t* comm;
  sluice_context_t* context; /* of the running case */
  sluice_fake_graph_t* graph;
  fakes_waits_t before, sums[2]; /* by direction */
} rank_machine_t;

static struct {
  int32_t world_size;
  uint64_t timeout_ms;
  sluice_cublas_symbols_t cublas;
  sluice_cublaslt_symbols_t cublaslt;
  sluice_nccl_symbols_t nccl;
  sluice_nccl_id_t id;
  sluice_local_group_t* group; /* NULL: each rank has a device, and NCCL */
  rank_machine_t ranks[SLUICE_FAKE_CUDA_DEVICES];
} fakes;

static int32_t device_id(int32_t rank) { return fakes.group != NULL ? 0 : rank; }

static void open_ranks(int32_t world_size, int with_groups, int is_local) {
  memset(&fakes, 0, sizeof fakes);
  sluice_fake_cuda_reset();
  sluice_fake_cuda_fail_call(-1, 0);
  sluice_fake_cublas_fail_call(-1, 0);
  sluice_fake_nccl_fail_call(-1, 0);
  if (is_local && sluice_local_group_create(world_size, &fakes.group) != SLUICE_OK) abort();
  fakes.world_size = world_size;
  fakes.timeout_ms = TIMEOUT_MS;
  fakes.cublas = sluice_fake_cublas(with_groups);
  fakes.cublaslt = sluice_fake_cublaslt();
  fakes.nccl = sluice_fake_nccl();
  if (sluice_nccl_make_id(&fakes.nccl, &fakes.id) != SLUICE_OK) abort();
  for (int32_t r = 0; r < world_size; ++r) fakes.ranks[r].stream = sluice_fake_cuda_open_stream(device_id(r));
}

void fakes_open(int32_t world_size, int with_groups) { open_ranks(world_size, with_groups, 0); }
void fakes_open_local(int32_t world_size, int with_groups) { open_ranks(world_size, with_groups, 1); }

int64_t fakes_close(char* out, uint64_t out_bytes) {
  for (int32_t r = 0; r < fakes.world_size; ++r) sluice_fake_cuda_close_stream(fakes.ranks[r].stream);
  sluice_local_group_destroy(fakes.group);
  fakes.group = NULL;
  int64_t live = sluice_fake_cuda_live(out, out_bytes) + sluice_fake_cublas_handles() + sluice_fake_cublaslt_live() +
                 sluice_fake_nccl_live() + sluice_fake_nccl_registrations();
  return live != 0 ? live : sluice_fake_nccl_broken_rules(out, out_bytes);
}

sluice_stream_t fakes_stream(int32_t rank) { return fakes.ranks[rank].stream; }

static sluice_cuda_sources_t sources(void) {
  return (sluice_cuda_sources_t){sluice_fake_cuda_driver(), sluice_fake_cuda_image(), &fakes.cublas, &fakes.cublaslt,
                                 &fakes.nccl};
}

static sluice_status_t make_comm(int32_t rank, const sluice_comm_config_t* config, sluice_comm_t** out_comm) {
  const sluice_cuda_sources_t from = sources();
  sluice_nccl_group_t group;
  sluice_nccl_group_init(&group, sizeof group);
  group.device_id = rank;
  group.id = &fakes.id;
  const sluice_status_t status = fakes.group != NULL ? sluice_comm_create_local(fakes.group, config, out_comm)
                                                     : sluice_comm_create_nccl_from(config, &group, &from, out_comm);
  fakes.ranks[rank].comm = *out_comm;
  return status;
}

static sluice_status_t make_context(int32_t rank, const sluice_context_config_t* config, sluice_comm_t* comm,
                                    sluice_context_t** out_context) {
  const sluice_cuda_sources_t from = sources();
  sluice_fake_cuda_this_is(rank); /* the thread that makes this rank's calls */
  sluice_status_t status = sluice_context_create_from(config, comm, &from, out_context);
  fakes.ranks[rank].context = *out_context;
  return status;
}

static void begin_capture(int32_t rank) { sluice_fake_cuda_begin_capture(fakes.ranks[rank].stream); }
static int end_capture(int32_t rank) {
  return sluice_fake_cuda_end_capture(fakes.ranks[rank].stream, &fakes.ranks[rank].graph);
}
static void launch(int32_t rank) { sluice_fake_cuda_launch_graph(fakes.ranks[rank].graph, fakes.ranks[rank].stream); }
static void drop_graph(int32_t rank) {
  sluice_fake_cuda_destroy_graph(fakes.ranks[rank].graph);
  fakes.ranks[rank].graph = NULL;
}

/* A host that waits for its stream would wait for ever if a peer is gone. After the timeout it aborts its communicator,
 * like a watchdog. The data is then not the layer's result, and a test that expects no loss prints a line. */
static void settle(int32_t rank) {
  enum { NAPS_PER_MS = 5 };
  const struct timespec nap = {.tv_nsec = 1000000 / NAPS_PER_MS};
  uint64_t naps = 0; /* not time: on a loaded machine, naps and the work of peers take longer */
  int has_aborted = 0;
  char why[400];
  while (!sluice_fake_cuda_idle(fakes.ranks[rank].stream)) {
    nanosleep(&nap, NULL);
    ++naps;
    const int is_deadlock = sluice_fake_cuda_deadlocked(why, sizeof why);
    if (has_aborted || (naps <= NAPS_PER_MS * fakes.timeout_ms && !is_deadlock)) continue;
    if (is_deadlock) {
      fprintf(stderr, "rank %d: %s\n", rank, why);
    } else if (fakes.timeout_ms == TIMEOUT_MS) {
      fprintf(stderr, "rank %d: its stream was not idle after %d s: its communicator was aborted\n", rank,
              TIMEOUT_MS / 1000);
    }
    sluice_comm_abort(fakes.ranks[rank].comm);
    has_aborted = 1;
  }
}

void fakes_be_patient(uint64_t milliseconds) { fakes.timeout_ms = milliseconds; }

static fakes_waits_t waits_now(int32_t rank) {
  const sluice_context_t* context = fakes.ranks[rank].context;
  return (fakes_waits_t){sluice_fake_cuda_host_waits(), sluice_cuda_device_stats(context->device).num_host_waits};
}

static void note(int32_t rank, int32_t direction, int32_t has_returned) {
  rank_machine_t* r = &fakes.ranks[rank];
  if (r->context == NULL) return;
  fakes_waits_t now = waits_now(rank);
  if (has_returned) {
    r->sums[direction].of_driver += now.of_driver - r->before.of_driver;
    r->sums[direction].reads += now.reads - r->before.reads;
  }
  r->before = now;
}

fakes_waits_t fakes_waits(int32_t rank, int32_t direction) { return fakes.ranks[rank].sums[direction]; }

static void* allocate(int32_t rank, uint64_t bytes) { return sluice_fake_cuda_take(device_id(rank), bytes); }
static void copy_over(int32_t rank, void* to, const void* from, uint64_t bytes) {
  (void)rank;
  memcpy(to, from, bytes);
}

const world_machine_t* fakes_machine(void) {
  static const world_machine_t machine = {
      .device_type = SLUICE_DEVICE_CUDA,
      .device_id = device_id,
      .allocate = allocate,
      .send = copy_over,
      .fetch = copy_over,
      .release = sluice_fake_cuda_give,
      .make_comm = make_comm,
      .make_context = make_context,
      .stream = fakes_stream,
      .settle = settle,
      .note = note,
      .begin_capture = begin_capture,
      .end_capture = end_capture,
      .launch = launch,
      .drop_graph = drop_graph,
  };
  return &machine;
}

/* ---- for the suite --------------------------------------------------------------------------------------------- */

static const char* close_quietly(void) {
  static char text[480];
  char live[200], hazard[200];
  int64_t hazards = sluice_fake_cuda_hazards(hazard, sizeof hazard), left = fakes_close(live, sizeof live);
  if (hazards == 0 && left == 0) return NULL;
  snprintf(text, sizeof text, "%lld hazards: %s; %lld left: %s", (long long)hazards, hazard, (long long)left, live);
  return text;
}
static uint64_t reads(int32_t rank, int32_t direction) { return fakes_waits(rank, direction).reads; }

const layer_machine_t* fakes_layer_machine(int is_local) {
  static const layer_machine_t machines[] = {{"nccl", 1, fakes_open, fakes_machine, close_quietly, reads},
                                             {"local", 1, fakes_open_local, fakes_machine, close_quietly, reads}};
  return &machines[is_local];
}
