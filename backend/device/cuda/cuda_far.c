#include "backend/device/cuda/cuda_far.h"

#include <string.h>

#include "backend/device/cuda/cuda_parcels.h"
#include "backend/device/cuda/cuda_pass.h"
#include "backend/device/cuda/cuda_routing.h"
#include "backend/device/cuda/cuda_state.h"

static sluice_status_t wait_for_end(sluice_device_t* device, sluice_stream_t stream) {
  const sluice_cuda_far_state_t* far = sluice_cuda_far_state(device);
  const sluice_cuda_driver_t* driver = sluice_cuda_device_driver(device);
  if (!far->has_end) return SLUICE_OK;
  int code = driver->cuStreamWaitEvent(stream, far->end, 0);
  return code == 0 ? SLUICE_OK : sluice_cuda_fail(driver, code, "a stream cannot wait for the pass before");
}

/* Events of before a capture may not be waited for in it: the graph's launch comes after them, where the host orders
 * it. */
static sluice_status_t open_inside(sluice_device_t* device, sluice_stream_t stream) {
  sluice_cuda_far_state_t* far = sluice_cuda_far_state(device);
  const sluice_cuda_driver_t* driver = sluice_cuda_device_driver(device);
  int state = SLUICE_CU_CAPTURE_NONE;
  far->captured = 0;
  SLUICE_TRY(sluice_cuda_check_stream(device, stream));
  int code = driver->cuStreamIsCapturing(stream, &state);
  if (code != 0) return sluice_cuda_fail(driver, code, "the state of stream %p is unknown", stream);
  far->captured = state != SLUICE_CU_CAPTURE_NONE;
  if (far->captured) return sluice_cuda_check_joined(device);
  SLUICE_TRY(sluice_cuda_rejoin(device, stream));
  return wait_for_end(device, stream);
}

static sluice_status_t far_open(sluice_device_t* device, sluice_stream_t stream, int32_t* out_captured) {
  *out_captured = 0;
  SLUICE_TRY(sluice_cuda_enter(device));
  SLUICE_TRY(sluice_cuda_leave_with(device, open_inside(device, stream)));
  *out_captured = sluice_cuda_far_state(device)->captured;
  return SLUICE_OK;
}

static void far_init_memory(sluice_device_t* device, sluice_allocate_fn_t allocate, sluice_free_fn_t release,
                            void* user, sluice_allocator_t* out_memory) {
  if (allocate != NULL) {
    sluice_allocator_init(out_memory, allocate, release, user);
  } else {
    sluice_cuda_allocator_init(device, out_memory);
  }
}

static sluice_status_t far_fill(sluice_device_t* device, sluice_stream_t stream, void* to, int32_t value,
                                uint64_t bytes) {
  if (bytes == 0) return SLUICE_OK;
  const sluice_cuda_driver_t* driver = sluice_cuda_device_driver(device);
  SLUICE_TRY(sluice_cuda_enter(device));
  int code = driver->cuMemsetD8Async((unsigned long long)(uintptr_t)to, (unsigned char)value, bytes, stream);
  return sluice_cuda_leave_with(
      device,
      code == 0 ? SLUICE_OK : sluice_cuda_fail(driver, code, "%llu bytes cannot be filled", (unsigned long long)bytes));
}

/* ---- reading --------------------------------------------------------------------------------------------------- */

/* Copies into pageable memory would go through the driver's own staging, with a wait for every stream before it. */
static sluice_status_t reserve_pinned(sluice_device_t* device, uint64_t bytes) {
  sluice_cuda_far_state_t* far = sluice_cuda_far_state(device);
  const sluice_cuda_driver_t* driver = sluice_cuda_device_driver(device);
  if (bytes <= far->pinned_bytes) return SLUICE_OK;
  bytes = sluice_align_up(bytes);
  if (far->pinned != NULL) (void)driver->cuMemFreeHost(far->pinned);
  far->pinned = NULL;
  far->pinned_bytes = 0;
  int code = driver->cuMemHostAlloc(&far->pinned, bytes, SLUICE_CU_MEMHOSTALLOC_PORTABLE);
  if (code != 0) {
    far->pinned = NULL;
    return sluice_cuda_fail(driver, code, "%llu bytes of pinned host memory for counts", (unsigned long long)bytes);
  }
  far->pinned_bytes = bytes;
  return SLUICE_OK;
}

static sluice_status_t far_read(sluice_device_t* device, sluice_stream_t stream, const void* data, void* out,
                                uint64_t bytes) {
  if (bytes == 0) return SLUICE_OK;
  SLUICE_TRY(sluice_cuda_enter(device));
  SLUICE_TRY(sluice_cuda_leave_with(device, reserve_pinned(device, bytes)));
  void* pinned = sluice_cuda_far_state(device)->pinned;
  SLUICE_TRY(sluice_cuda_read(device, stream, data, pinned, bytes));
  memcpy(out, pinned, bytes);
  return SLUICE_OK;
}

/* ---- routing --------------------------------------------------------------------------------------------------- */

/* The scratch: the table of places, padded to whole words; the offsets of one chunk; its tiles. */
static uint64_t offsets_bytes(int32_t num_experts) {
  return sluice_align_up(((uint64_t)num_experts + 1) * sizeof(int32_t));
}

static uint64_t far_route_scratch_bytes(int64_t num_routes, int32_t num_experts) {
  return sluice_cuda_table_bytes(num_experts) + offsets_bytes(num_experts) +
         sluice_align_up(sluice_cuda_route_scratch_bytes(num_routes, num_experts));
}

static sluice_status_t route_inside(sluice_device_t* device, sluice_stream_t stream, const sluice_far_routes_t* r) {
  char* scratch = r->scratch;
  int32_t* table = NULL;
  SLUICE_TRY(sluice_cuda_write_table(stream, r->place_of_expert, r->num_experts, scratch, &table));
  if (r->ceiling > 0) {
    uint64_t bytes = (uint64_t)r->num_chunks * (uint64_t)r->num_experts * (uint64_t)r->ceiling * sizeof(int32_t);
    SLUICE_TRY(far_fill(device, stream, r->order, 0xff, bytes));
    SLUICE_TRY(far_fill(device, stream, r->order_token, 0xff, bytes));
  }
  for (int32_t i = 0; i < r->num_chunks; ++i) {
    int64_t first = r->first_token[i], tokens = r->first_token[i + 1] - first;
    int64_t at = r->ceiling > 0 ? (int64_t)i * r->num_experts * r->ceiling : first * r->top_k;
    int32_t* counts = r->counts + (int64_t)i * (r->num_experts + 1);
    const sluice_route_args_t args = {
        .ids = (const char*)r->ids + first * r->ids_t * (r->ids_64 ? 8 : 4),
        .slot_of = table,
        .tile_counts =
            (int32_t*)(void*)(scratch + sluice_cuda_table_bytes(r->num_experts) + offsets_bytes(r->num_experts)),
        .counts = counts,
        .offsets = (int32_t*)(void*)(scratch + sluice_cuda_table_bytes(r->num_experts)),
        .token_of = r->order_token + at,
        .route_of = r->order + at,
        .first_bad = counts + r->num_experts,
        .position = r->position + first * r->top_k,
        .num_routes = tokens * r->top_k,
        .top_k = r->top_k,
        .num_experts = r->num_experts,
        .ids_t = r->ids_t,
        .ids_k = r->ids_k,
        .ids_64 = r->ids_64,
        .first_token = first,
        .ceiling = r->ceiling,
        .tally = r->tally,
        .begins = i == 0,
    };
    sluice_cuda_route(stream, &args);
  }
  return SLUICE_OK;
}

static sluice_status_t far_route(sluice_device_t* device, sluice_stream_t stream, const sluice_far_routes_t* routes) {
  SLUICE_TRY(sluice_cuda_enter(device));
  return sluice_cuda_leave_with(device, route_inside(device, stream, routes));
}

static sluice_status_t count_inside(sluice_stream_t stream, const sluice_far_blocks_t* b) {
  int32_t* table = NULL;
  SLUICE_TRY(sluice_cuda_write_table(stream, b->place_of_expert, b->num_experts, b->scratch, &table));
  sluice_cuda_count_blocks(stream, &(sluice_block_args_t){.ids = b->ids,
                                                          .slot_of = table,
                                                          .counts = b->counts,
                                                          .units = b->num_blocks,
                                                          .num_tokens = b->num_tokens,
                                                          .top_k = b->top_k,
                                                          .num_experts = b->num_experts,
                                                          .ids_t = b->ids_t,
                                                          .ids_k = b->ids_k,
                                                          .ids_64 = b->ids_64});
  return sluice_cuda_count_parcels(stream, b);
}

static sluice_status_t far_count_blocks(sluice_device_t* device, sluice_stream_t stream,
                                        const sluice_far_blocks_t* blocks) {
  SLUICE_TRY(sluice_cuda_enter(device));
  return sluice_cuda_leave_with(device, count_inside(stream, blocks));
}

/* ---- times ----------------------------------------------------------------------------------------------------- */

struct sluice_timer_s {
  void* marks[2]; /* events */
};

static void destroy_marks(sluice_device_t* device, sluice_timer_t* timer) {
  for (int i = 0; i < 2; ++i) {
    if (timer->marks[i] != NULL) (void)sluice_cuda_device_driver(device)->cuEventDestroy_v2(timer->marks[i]);
  }
}

static void far_timer_destroy(sluice_device_t* device, sluice_timer_t* timer) {
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

static sluice_status_t far_timer_create(sluice_device_t* device, sluice_timer_t** out_timer) {
  *out_timer = NULL;
  SLUICE_TRY(sluice_cuda_enter(device));
  sluice_timer_t* timer = sluice_alloc_zeroed(device->allocator, sizeof *timer, "timer");
  sluice_status_t status =
      sluice_cuda_leave_with(device, timer != NULL ? make_marks(device, timer) : (sluice_status_t)SLUICE_E_NO_MEMORY);
  if (status != SLUICE_OK) {
    sluice_error_info_t why;
    sluice_error_capture(&why);
    far_timer_destroy(device, timer);
    return sluice_error_adopt(&why);
  }
  *out_timer = timer;
  return SLUICE_OK;
}

static sluice_status_t far_timer_mark(sluice_device_t* device, sluice_timer_t* timer, int32_t is_end,
                                      sluice_stream_t stream) {
  const sluice_cuda_driver_t* driver = sluice_cuda_device_driver(device);
  SLUICE_TRY(sluice_cuda_enter(device));
  int code = driver->cuEventRecord(timer->marks[is_end != 0], stream);
  return sluice_cuda_leave_with(
      device, code == 0 ? SLUICE_OK : sluice_cuda_fail(driver, code, "the time of a pass cannot be recorded"));
}

static sluice_status_t far_timer_ns(sluice_device_t* device, const sluice_timer_t* timer, uint64_t* out_ns) {
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

static void far_time_ops(sluice_device_t* device, int32_t wanted) {
  sluice_cuda_far_state(device)->times.wanted = wanted;
}

static int32_t far_op_times(sluice_device_t* device, int32_t num_ops, uint64_t* begin_ns, uint64_t* end_ns) {
  const sluice_cuda_far_state_t* far = sluice_cuda_far_state(device);
  if (far->times.num_jobs != num_ops || sluice_cuda_enter(device) != SLUICE_OK) return SLUICE_OP_TIMES_NONE;
  int code = sluice_cuda_device_driver(device)->cuEventQuery(far->end);
  int found = code == 0 && sluice_cuda_times_read(device, &far->times, num_ops, begin_ns, end_ns);
  if (sluice_cuda_leave(device) != SLUICE_OK) return SLUICE_OP_TIMES_NONE;
  if (code == SLUICE_CU_NOT_READY) return SLUICE_OP_TIMES_LATER;
  return found ? SLUICE_OP_TIMES_TAKEN : SLUICE_OP_TIMES_NONE;
}

/* ---- blocks ---------------------------------------------------------------------------------------------------- */

static sluice_status_t far_take(sluice_device_t* device, sluice_stream_t stream, sluice_allocator_t* memory,
                                int32_t pinned, uint64_t bytes, uint64_t most_bytes, void** out_data) {
  sluice_cuda_far_state_t* state = sluice_cuda_far_state(device);
  sluice_pinned_pool_t** pool = &state->pools[pinned != 0];
  sluice_pinned_block_t block;
  *out_data = NULL;
  if (*pool == NULL && state->captured) {
    return SLUICE_FAIL(SLUICE_E_STATE, "cuda: no block of %llu bytes was ever used outside a capture",
                       (unsigned long long)bytes);
  }
  if (*pool == NULL) {
    const uint64_t limit = state->pinned_limit > 0 ? state->pinned_limit : UINT64_MAX;
    SLUICE_TRY(pinned ? sluice_pinned_pool_create(device, limit, pool)
                      : sluice_device_pool_create(device, memory, pool));
  }
  SLUICE_TRY(state->captured ? sluice_pinned_pool_take_idle(*pool, bytes, &block)
                             : sluice_pinned_pool_take_within(*pool, bytes, most_bytes, stream, &block));
  *out_data = block.data;
  return SLUICE_OK;
}

/* The host's stream may be gone: a stream of ours waits for the last pass in its place. */
static void far_give(sluice_device_t* device, int32_t pinned, void* data) {
  sluice_pinned_pool_t* pool = sluice_cuda_far_state(device)->pools[pinned != 0];
  if (data == NULL || pool == NULL || sluice_cuda_is_inherited(device)) return;
  if (sluice_cuda_far_state(device)->captured) return; /* the graph uses it whenever it is launched */
  sluice_stream_t own = sluice_cuda_cast(device)->lanes[SLUICE_LANE_COPY_OUT];
  if (sluice_cuda_enter(device) == SLUICE_OK) {
    (void)wait_for_end(device, own); /* a driver that refuses this refuses the record below, which then waits */
    (void)sluice_cuda_leave(device);
  }
  (void)sluice_pinned_pool_give_at(pool, data, own);
}

static uint64_t far_idle_bytes(const sluice_device_t* device) {
  const sluice_pinned_pool_t* pool = sluice_cuda_far_state((sluice_device_t*)device)->pools[0];
  return pool == NULL ? 0 : sluice_pinned_pool_idle_bytes(pool);
}

static void far_limit_pinned(sluice_device_t* device, uint64_t bytes) {
  sluice_cuda_far_state_t* state = sluice_cuda_far_state(device);
  state->pinned_limit = bytes;
  if (state->pools[1] != NULL) sluice_pinned_pool_set_limit(state->pools[1], bytes > 0 ? bytes : UINT64_MAX);
}

static void far_drop_pools(sluice_device_t* device) {
  sluice_cuda_far_state_t* far = sluice_cuda_far_state(device);
  for (int i = 0; i < 2; ++i) {
    sluice_pinned_pool_destroy(far->pools[i]);
    far->pools[i] = NULL;
  }
}

void sluice_cuda_far_release(sluice_device_t* device) {
  sluice_cuda_far_state_t* far = sluice_cuda_far_state(device);
  far_drop_pools(device);
  if (far->pinned != NULL) (void)sluice_cuda_device_driver(device)->cuMemFreeHost(far->pinned);
  far->pinned = NULL;
}

const sluice_far_vtable_t sluice_cuda_far_vtable = {
    .open = far_open,
    .check_memory = sluice_cuda_check_memory,
    .init_memory = far_init_memory,
    .fill = far_fill,
    .copy = sluice_cuda_copy,
    .read = far_read,
    .route_scratch_bytes = far_route_scratch_bytes,
    .route = far_route,
    .count_blocks = far_count_blocks,
    .parcel_scratch_bytes = sluice_cuda_parcel_scratch_bytes,
    .number_parcels = sluice_cuda_number_parcels,
    .move_words = sluice_cuda_move_words,
    .place_parcels = sluice_cuda_place_parcels,
    .take = far_take,
    .give = far_give,
    .timer_create = far_timer_create,
    .timer_mark = far_timer_mark,
    .timer_ns = far_timer_ns,
    .timer_destroy = far_timer_destroy,
    .time_ops = far_time_ops,
    .op_times = far_op_times,
    .idle_bytes = far_idle_bytes,
    .limit_pinned = far_limit_pinned,
    .describe = sluice_cuda_device_name,
    .release = far_drop_pools,
};
