// SPDX-License-Identifier: Apache-2.0
/* The public context: checks the config, then creates an engine with a device and a gemm. */
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/base/structs.h"
#include "backend/comm/local/local_device.h"
#include "backend/moe/context/context.h"
#include "backend/moe/context/row_memory.h"
#include "backend/tune/tuner.h"
#include "capi/src/context_on_device.h"
#include "sluice/moe.h"

SLUICE_DEFINE_INIT(sluice_context_config, .device_type = SLUICE_DEVICE_CPU)

static sluice_status_t read_config(const sluice_context_config_t* config, sluice_context_config_t* out) {
  SLUICE_READ_INTO(sluice_context_config, out, config, offsetof(sluice_context_config_t, memory_budget));
  if (out->device_type != SLUICE_DEVICE_CPU && out->device_type != SLUICE_DEVICE_CUDA) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "context: device_type is %d; known are SLUICE_DEVICE_CPU (%d) and SLUICE_DEVICE_CUDA (%d)",
                       out->device_type, SLUICE_DEVICE_CPU, SLUICE_DEVICE_CUDA);
  }
  if (out->device_id < 0 || (out->device_id != 0 && out->device_type == SLUICE_DEVICE_CPU)) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "context: device_id is %d; %s", out->device_id,
                       out->device_type == SLUICE_DEVICE_CPU ? "the CPU has only device 0" : "devices count from 0");
  }
  if (out->max_outstanding < 0 || (out->separate_wgrad != 0 && out->separate_wgrad != 1)) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "context: max_outstanding is %d and separate_wgrad %d; use 0 or more, and 0 or 1",
                       out->max_outstanding, out->separate_wgrad);
  }
  SLUICE_TRY(SLUICE_REQUIRE(out->num_layers >= 0 && out->reserved == 0,
                            "context: num_layers is %d and reserved %d; use 0 or more, and 0", out->num_layers,
                            out->reserved));
  SLUICE_TRY(
      SLUICE_REQUIRE(out->ranks_per_node >= 0, "context: ranks_per_node is %d; use 0 or more", out->ranks_per_node));
  SLUICE_TRY(SLUICE_REQUIRE(out->wire_dtype >= SLUICE_WIRE_LAYER_DTYPE && out->wire_dtype <= SLUICE_WIRE_INT8,
                            "context: wire_dtype is %d; it must be 0 (the dtype of the rows), 1 (bf16) or 2 (int8)",
                            out->wire_dtype));
  if (out->wire_dtype != SLUICE_WIRE_LAYER_DTYPE && out->device_type == SLUICE_DEVICE_CUDA) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "context: wire_dtype is %d, but a CUDA context sends rows in their own dtype only: set it to 0",
                       out->wire_dtype);
  }
  const uint64_t budgets[] = {out->memory_budget, out->host_memory_budget};
  const uint64_t shared[] = {out->shared_memory_budget, out->shared_host_memory_budget};
  for (int i = 0; i < 2; ++i) {
    if (shared[i] == 0 || (budgets[i] > 0 && budgets[i] <= shared[i])) continue;
    return SLUICE_FAIL(
        SLUICE_E_INVALID_ARGUMENT,
        "context: %s is %llu, of which this context's share is %llu: it must be above 0 and at most the whole",
        i == 0 ? "shared_memory_budget" : "shared_host_memory_budget", (unsigned long long)shared[i],
        (unsigned long long)budgets[i]);
  }
  return SLUICE_REQUIRE((out->allocate == NULL) == (out->release == NULL),
                        "context: set allocate and release together, or neither");
}

static int is_tf32(const char* gemm) { return gemm != NULL && strcmp(gemm, "cublas-tf32") == 0; }

/* Rejects what a CUDA context does not support yet, and names it. */
static sluice_status_t check_cuda(const sluice_context_config_t* config, const sluice_comm_t* comm) {
  const char* gemm = config->gemm;
  if (gemm != NULL && strcmp(gemm, "auto") != 0 && strcmp(gemm, "cublas") != 0 && !is_tf32(gemm)) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "context: gemm is \"%s\", which multiplies on the CPU; a CUDA context takes \"cublas\", "
                       "\"cublas-tf32\" or \"auto\"",
                       gemm);
  }
  if (comm != NULL && comm->world_size > 1 && comm->vtable->exchange_enqueue == NULL) {
    return SLUICE_FAIL(SLUICE_E_UNSUPPORTED,
                       "context: a %s communicator moves host memory only; on CUDA use an nccl one, or a local one "
                       "where the ranks are threads of one process",
                       comm->name);
  }
  return SLUICE_OK;
}

static sluice_status_t fill_cuda(sluice_context_t* context, const sluice_context_config_t* config,
                                 const sluice_cuda_sources_t* sources) {
  sluice_device_t* device = NULL;
  if (sources != NULL) {
    SLUICE_TRY(sluice_cuda_device_create_from(sources->driver, sources->image, config->device_id, &context->allocator,
                                              &device));
  } else {
    SLUICE_TRY(sluice_cuda_device_create(config->device_id, &context->allocator, &device));
  }
  sluice_engine_set_device_memory(context, device, config->allocate, config->release, config->allocate_user);
  context->device_type = SLUICE_DEVICE_CUDA;
  context->device_id = config->device_id;
  const sluice_gemm_cublas_options_t options = {
      .device = device,
      .memory = context->memory,
      .library = config->gemm_library,
      .symbols = sources != NULL ? sources->cublas : NULL,
      .lt_symbols = sources != NULL ? sources->cublaslt : NULL,
      .tf32 = is_tf32(config->gemm),
  };
  SLUICE_TRY(sluice_gemm_cublas_create(&options, &context->allocator, &context->gemm));
  return sluice_tuner_install(context);
}

static sluice_status_t fill_engine(sluice_context_t* context, const sluice_context_config_t* config) {
  const sluice_gemm_options_t gemm = {
      .name = config->gemm,
      .library = config->gemm_library,
      .host_gemm = config->host_gemm,
      .host_gemm_user = config->host_gemm_user,
  };
  SLUICE_TRY(sluice_cpu_device_create(&context->allocator, &context->device));
  SLUICE_TRY(sluice_gemm_create(&gemm, &context->allocator, &context->gemm));
  return sluice_tuner_install(context);
}

sluice_status_t sluice_context_create_from(const sluice_context_config_t* config, sluice_comm_t* comm,
                                           const sluice_cuda_sources_t* sources, sluice_context_t** out_context) {
  if (out_context == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_context_create: out_context is NULL");
  *out_context = NULL;
  sluice_context_config_t checked;
  SLUICE_TRY(read_config(config, &checked));
  int is_cuda = checked.device_type == SLUICE_DEVICE_CUDA;
  if (is_cuda) {
    SLUICE_TRY(check_cuda(&checked, comm));
    if (comm != NULL && comm->world_size > 1 && sluice_comm_is_local(comm)) {
      SLUICE_TRY(sluice_comm_local_use_cuda(comm, checked.device_id, sources));
    }
  }
  const int32_t world_size = comm != NULL ? comm->world_size : 1;
  SLUICE_TRY(
      SLUICE_REQUIRE(checked.ranks_per_node <= 0 || world_size % checked.ranks_per_node == 0,
                     "context: ranks_per_node is %d, which does not divide the %d ranks: every node must have the "
                     "same number of ranks; otherwise give 0",
                     checked.ranks_per_node, world_size));
  sluice_context_t* context = NULL;
  /* The host's callbacks allocate memory for rows, which on CUDA is device memory. */
  SLUICE_TRY(sluice_engine_create(comm, is_cuda ? NULL : checked.allocate, is_cuda ? NULL : checked.release,
                                  checked.allocate_user, &context));
  context->memory_budget = checked.memory_budget;
  context->host_memory_budget = checked.host_memory_budget;
  context->shared_memory_budget = checked.shared_memory_budget;
  context->shared_host_memory_budget = checked.shared_host_memory_budget;
  context->max_outstanding = checked.max_outstanding;
  context->expected_layers = checked.num_layers;
  context->ranks_per_node = checked.ranks_per_node;
  context->wire_dtype = checked.wire_dtype;
  context->separate_wgrad = checked.separate_wgrad;
  sluice_status_t status = is_cuda ? fill_cuda(context, &checked, sources) : fill_engine(context, &checked);
  if (status != SLUICE_OK) {
    sluice_error_info_t why;
    sluice_error_capture(&why);
    sluice_engine_release(context);
    return sluice_error_adopt(&why);
  }
  *out_context = context;
  return SLUICE_OK;
}

sluice_status_t sluice_context_create(const sluice_context_config_t* config, sluice_comm_t* comm,
                                      sluice_context_t** out_context) {
  return sluice_context_create_from(config, comm, NULL, out_context);
}

void sluice_context_destroy(sluice_context_t* context) { sluice_engine_release(context); }

static sluice_status_t set_share(sluice_context_t* context, uint64_t share, uint64_t whole) {
  SLUICE_TRY(SLUICE_REQUIRE(
      context->memory_budget != 0,
      "sluice_context_set_share: the context was created without memory_budget; set it when you create the context"));
  SLUICE_TRY(SLUICE_REQUIRE(
      share != 0 && share <= whole,
      "sluice_context_set_share: memory_budget is %llu of %llu: it must be above 0 and at most the whole",
      (unsigned long long)share, (unsigned long long)whole));
  if (context->memory->limit != 0) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "sluice_context_set_share: a plan of %llu bytes exists; set shares before the first forward",
                       (unsigned long long)context->memory->limit);
  }
  context->memory_budget = share;
  context->shared_memory_budget = whole;
  return SLUICE_OK;
}

sluice_status_t sluice_context_set_share(sluice_context_t* context, uint64_t memory_budget, uint64_t whole) {
  SLUICE_TRY(SLUICE_REQUIRE(context != NULL, "sluice_context_set_share: context is NULL"));
  SLUICE_TRY(sluice_engine_enter(context, "sluice_context_set_share"));
  sluice_status_t status = set_share(context, memory_budget, whole);
  sluice_engine_leave(context);
  return status;
}

static sluice_status_t open_allocate(sluice_context_t* context, void** out_data, const char* what) {
  SLUICE_TRY(SLUICE_REQUIRE(context != NULL && out_data != NULL, "%s: %s is NULL", what,
                            context == NULL ? "context" : "out_data"));
  *out_data = NULL;
  return sluice_engine_check_process(context, what);
}

sluice_status_t sluice_context_allocate_saved(sluice_context_t* context, int32_t which, uint64_t bytes,
                                              void** out_data) {
  SLUICE_TRY(open_allocate(context, out_data, "sluice_context_allocate_saved"));
  SLUICE_TRY(SLUICE_REQUIRE(which >= 0 && which < SLUICE_SAVED_COUNT,
                            "sluice_context_allocate_saved: which is %d; it is the SLUICE_SAVED_* of the buffer",
                            which));
  const int32_t pool = context->rows->counts_host_memory ? sluice_engine_pool_of(which) : -1;
  if (pool < 0 || bytes == 0) return sluice_context_allocate(context, bytes, out_data);
  uint64_t counted = 0;
  SLUICE_TRY(sluice_pool_take(&context->host_pools[pool], bytes, "saved buffer", out_data, &counted));
  atomic_fetch_add(&context->step_bytes, counted);
  return SLUICE_OK;
}

sluice_status_t sluice_context_allocate(sluice_context_t* context, uint64_t bytes, void** out_data) {
  SLUICE_TRY(open_allocate(context, out_data, "sluice_context_allocate"));
  uint64_t counted = sluice_align_up(bytes == 0 ? 1 : bytes);
  SLUICE_TRY(sluice_allocator_charge(&context->allocator, counted, "saved buffer"));
  void* data = sluice_alloc(sluice_process_allocator(), bytes, "saved buffer");
  if (data == NULL) {
    sluice_allocator_discharge(&context->allocator, counted);
    return sluice_alloc_status();
  }
  if (context->rows->counts_host_memory) atomic_fetch_add(&context->step_bytes, counted);
  *out_data = data;
  return SLUICE_OK;
}

void sluice_context_free(sluice_context_t* context, void* data, uint64_t bytes) {
  if (data == NULL) return;
  int is_counted = context != NULL && context->pid == getpid();
  if (is_counted) sluice_ledger_remove(&context->ledger, data); /* before another buffer may have this address */
  for (int32_t i = 0; i < SLUICE_NUM_POOLS && is_counted; ++i) {
    const uint64_t pooled = sluice_pool_give(&context->host_pools[i], data);
    atomic_fetch_sub(&context->step_bytes, pooled);
    if (pooled > 0) return;
  }
  sluice_free(sluice_process_allocator(), data, bytes);
  if (!is_counted) return;
  uint64_t counted = sluice_align_up(bytes == 0 ? 1 : bytes);
  sluice_allocator_discharge(&context->allocator, counted);
  if (context->rows->counts_host_memory) atomic_fetch_sub(&context->step_bytes, counted);
}

sluice_status_t sluice_context_get_stats(sluice_context_t* context, int32_t reset_peak,
                                         sluice_context_stats_t* out_stats) {
  SLUICE_TRY(SLUICE_REQUIRE(context != NULL && out_stats != NULL, "sluice_context_get_stats: %s is NULL",
                            context == NULL ? "context" : "out_stats"));
  SLUICE_TRY(sluice_struct_check_size(out_stats, "sluice_context_stats_t"));
  SLUICE_TRY(sluice_engine_enter(context, "sluice_context_get_stats"));
  sluice_context_stats_t stats = context->stats;
  stats.current_bytes = context->memory->current_bytes;
  stats.peak_bytes = context->memory->peak_bytes;
  stats.num_pool_allocations = sluice_engine_pool_allocations(context);
  stats.idle_pool_bytes = sluice_engine_idle_bytes(context);
  stats.num_outstanding = sluice_ledger_sums(&context->ledger).steps;
  stats.most_outstanding = sluice_ledger_most_steps(&context->ledger, reset_peak != 0);
  stats.planned_outstanding = (uint64_t)context->planned_outstanding;
  memcpy(stats.gemm, context->gemm->name,
         sizeof stats.gemm < sizeof context->gemm->name ? sizeof stats.gemm : sizeof context->gemm->name);
  sluice_struct_give(out_stats, &stats, sizeof stats);
  if (reset_peak != 0) {
    sluice_allocator_reset_peak(&context->allocator);
    sluice_allocator_reset_peak(&context->device_allocator);
  }
  sluice_engine_leave(context);
  return SLUICE_OK;
}

/* A budget does not count events: tracing does not change a run. */
static sluice_status_t set_trace(sluice_context_t* context, int64_t capacity) {
  sluice_trace_event_t* events = NULL;
  if (capacity > 0) {
    events = sluice_alloc(sluice_process_allocator(), (uint64_t)capacity * sizeof *events, "trace");
    if (events == NULL) return sluice_alloc_status();
  }
  sluice_free(sluice_process_allocator(), context->trace.events, (uint64_t)context->trace.capacity * sizeof *events);
  context->trace = (sluice_trace_t){.events = events, .capacity = capacity};
  if (capacity > 0 && context->rows->has_host_threads) context->reading_cpu_ns = sluice_thread_cpu_reading_ns();
  return SLUICE_OK;
}

sluice_status_t sluice_context_trace(sluice_context_t* context, int64_t capacity) {
  if (context == NULL) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_context_trace: context is NULL");
  if (capacity < 0 || capacity > ((int64_t)1 << 32)) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_context_trace: capacity is %lld; it must be in [0, 2^32]",
                       (long long)capacity);
  }
  SLUICE_TRY(sluice_engine_enter(context, "sluice_context_trace"));
  sluice_status_t status = set_trace(context, capacity);
  sluice_engine_leave(context);
  return status;
}

sluice_status_t sluice_context_take_trace(sluice_context_t* context, sluice_trace_event_t* out_events, int64_t capacity,
                                          int64_t* out_count) {
  SLUICE_TRY(
      SLUICE_REQUIRE(context != NULL && out_count != NULL && capacity >= 0 && (out_events != NULL || capacity == 0),
                     "sluice_context_take_trace: context, out_events or out_count is NULL, or the "
                     "capacity is negative"));
  *out_count = 0;
  SLUICE_TRY(sluice_engine_enter(context, "sluice_context_take_trace"));
  sluice_trace_t* trace = &context->trace;
  int64_t count = trace->count < capacity ? trace->count : capacity;
  for (int64_t i = 0; i < count; ++i) {
    out_events[i] = trace->events[(trace->next - trace->count + i + trace->capacity) % trace->capacity];
  }
  *out_count = count;
  trace->count = trace->next = 0;
  sluice_engine_leave(context);
  return SLUICE_OK;
}
