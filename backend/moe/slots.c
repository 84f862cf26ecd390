/* Where the slots of a pass lie: sizes from the binding, one arena, nothing allocated once the pass runs. */
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/moe/pass.h"

uint64_t sluice_pass_row_bytes(const sluice_moe_t* moe, int32_t tensor) {
  uint64_t element = sluice_dtype_bytes(moe->config.dtype);
  uint64_t width = (uint64_t)moe->config.model_width, hidden = (uint64_t)moe->config.hidden_width;
  switch (tensor) {
    case SLUICE_T_SEND:
    case SLUICE_T_RECV:
    case SLUICE_T_DI:
    case SLUICE_T_DO:
    case SLUICE_T_DDO:
    case SLUICE_T_DDI: return width * element;
    case SLUICE_T_M:
    case SLUICE_T_DM: return hidden * (uint64_t)moe->gate_factor * element;
    case SLUICE_T_ACT:
    case SLUICE_T_DACT:
    case SLUICE_T_WACT: return hidden * element;
    case SLUICE_T_ROUTE:
    case SLUICE_T_DGATE: return sizeof(float);
    default: return 0; /* the host's own tensors */
  }
}

/* What leaves the rank is packed chunk by chunk; what products read over all chunks lies by expert. */
static int32_t layout_of(const sluice_pass_t* pass, int32_t tensor) {
  if (pass->schedule->ring[tensor] < pass->binding.num_chunks) return SLUICE_LAYOUT_RING;
  switch (tensor) {
    case SLUICE_T_SEND:
    case SLUICE_T_RECV: return SLUICE_LAYOUT_RING;
    case SLUICE_T_DO:
    case SLUICE_T_DDI:
    case SLUICE_T_DGATE: return SLUICE_LAYOUT_CHUNK_MAJOR;
    default: return SLUICE_LAYOUT_EXPERT_MAJOR;
  }
}

static uint64_t max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

static uint64_t rows_per_slot(const sluice_binding_t* b, int32_t tensor) {
  if (tensor == SLUICE_T_SEND) return (uint64_t)b->max_chunk_remote;
  /* T_RECV also takes the returned rows, this rank's own among them. */
  if (tensor == SLUICE_T_RECV) return max_u64((uint64_t)b->max_chunk_remote, (uint64_t)b->max_chunk_sent);
  return (uint64_t)b->max_chunk_rows;
}

/* Sets layout and sizes; returns the bytes of all slots together. */
static uint64_t measure(sluice_pass_t* pass, int32_t tensor) {
  sluice_slots_t* slots = &pass->slots[tensor];
  int32_t ring = pass->schedule->ring[tensor];
  slots->row_bytes = sluice_pass_row_bytes(pass->moe, tensor);
  if (ring == 0 || slots->row_bytes == 0) return 0;
  slots->layout = layout_of(pass, tensor);
  if (slots->layout != SLUICE_LAYOUT_RING) return (uint64_t)pass->binding.num_rows * slots->row_bytes;
  slots->slot_bytes = sluice_align_up(rows_per_slot(&pass->binding, tensor) * slots->row_bytes);
  return (uint64_t)ring * slots->slot_bytes;
}

sluice_status_t sluice_pass_prepare(sluice_pass_t* pass, void* const* given) {
  const sluice_binding_t* b = &pass->binding;
  uint64_t w = (uint64_t)b->world_size;
  uint64_t scalars = max_u64((uint64_t)b->max_chunk_rows, (uint64_t)b->max_chunk_sent) * sizeof(float);
  uint64_t runs = w * sizeof(sluice_row_run_t);
  uint64_t products = 2 * (uint64_t)b->num_local * sizeof(sluice_product_t);
  uint64_t times = (uint64_t)pass->schedule->num_ops * sizeof(sluice_op_times_t);
  uint64_t total = 5 * sluice_align_up(w * 8) + 3 * sluice_align_up(scalars) + sluice_align_up(runs) +
                   sluice_align_up(products) + sluice_align_up(times);
  uint64_t bytes[SLUICE_T_COUNT];
  uint64_t tensors = 0;
  for (int32_t t = 0; t < SLUICE_T_COUNT; ++t) {
    bytes[t] = measure(pass, t);
    if (given[t] == NULL) tensors += sluice_align_up(bytes[t]);
  }
  sluice_arena_t* arena = &pass->context->slots;
  SLUICE_TRY(sluice_arena_reset(arena, total + tensors, "slots of a pass"));
  if (pass->context->poison) memset(arena->data, 0xff, arena->capacity);
  for (int32_t t = 0; t < SLUICE_T_COUNT; ++t) {
    if (given[t] != NULL) {
      pass->slots[t].data = given[t];
    } else if (bytes[t] > 0) {
      pass->slots[t].data = sluice_arena_take(arena, bytes[t]);
    }
  }
  pass->context->stats.slot_bytes = tensors;
  pass->send = sluice_arena_take(arena, w * 8);
  pass->recv = sluice_arena_take(arena, w * 8);
  pass->send_bytes = sluice_arena_take(arena, w * 8);
  pass->recv_bytes = sluice_arena_take(arena, w * 8);
  pass->cursor = sluice_arena_take(arena, w * 8);
  pass->route_send = sluice_arena_take(arena, scalars);
  pass->gate_recv = sluice_arena_take(arena, scalars);
  pass->scalar_recv = sluice_arena_take(arena, scalars);
  pass->runs = sluice_arena_take(arena, runs);
  pass->products = sluice_arena_take(arena, products);
  pass->times = sluice_arena_take(arena, times);
  memset(pass->times, 0, times);
  return SLUICE_OK;
}

void* sluice_pass_chunk(const sluice_pass_t* pass, int32_t tensor, int32_t chunk) {
  const sluice_slots_t* slots = &pass->slots[tensor];
  if (slots->layout == SLUICE_LAYOUT_RING) {
    return slots->data + (uint64_t)(chunk % pass->schedule->ring[tensor]) * slots->slot_bytes;
  }
  return slots->data + (uint64_t)pass->binding.first_of_chunk[chunk] * slots->row_bytes;
}

void* sluice_pass_rows(const sluice_pass_t* pass, int32_t tensor, int32_t chunk, int32_t local) {
  const sluice_slots_t* slots = &pass->slots[tensor];
  int64_t at = (int64_t)chunk * pass->binding.num_local + local;
  if (slots->layout == SLUICE_LAYOUT_EXPERT_MAJOR) {
    return slots->data + (uint64_t)pass->binding.first_in_pass[at] * slots->row_bytes;
  }
  return (char*)sluice_pass_chunk(pass, tensor, chunk) + (uint64_t)pass->binding.first_in_chunk[at] * slots->row_bytes;
}
