// SPDX-License-Identifier: Apache-2.0
/* Places the slots of a pass in one arena, with sizes from the binding. A running pass allocates nothing. */
#include <assert.h>
#include <string.h>

#include "backend/base/math.h"
#include "backend/model/restore.h"
#include "backend/moe/pass/pass.h"
#include "backend/moe/pass/weight_sums.h"
#include "backend/moe/routing/copies.h"

static_assert(sizeof(sluice_gemm_problem_t) == SLUICE_GEMM_BYTES && sizeof(sluice_packed_t) == SLUICE_PACKED_BYTES &&
                  sizeof(sluice_op_times_t) == SLUICE_OP_TIMES_BYTES &&
                  2 * sizeof(void*) + 2 * sizeof(uint64_t) == SLUICE_EXCHANGE_ARRAYS_BYTES,
              "plans count them");

/* Buffers of the host pool have no ops that compute in them, hence no home in the template: chunk i has slot i. */
static sluice_slot_ref_t home_of(const sluice_pass_t* pass, int32_t tensor, int32_t chunk) {
  return sluice_template_home(pass->schedule, tensor, chunk);
}

/* Tensors that GEMMs read over all chunks are ordered by expert if each chunk has its own slot; sent tensors are packed
 * chunk by chunk. */
static int may_join(const sluice_moe_t* moe, int32_t tensor) {
  switch (tensor) {
    case SLUICE_T_KEPT_M: return !moe->shape.config.callback_experts;
    case SLUICE_T_DI:
    case SLUICE_T_KEPT_DI:
    case SLUICE_T_M:
    case SLUICE_T_DM:
    case SLUICE_T_DDO:
    case SLUICE_T_DACT:
    case SLUICE_T_LOW:
    case SLUICE_T_ROUTE: return 1;
    default: return 0;
  }
}

static uint64_t rows_of(const sluice_binding_t* b, int32_t tensor, int32_t chunk) {
  switch (tensor) {
    case SLUICE_T_SEND: return (uint64_t)sluice_copies_max_chunk_remote(b);
    case SLUICE_T_RECV: /* also holds the returned rows, own rows included */
      return (uint64_t)sluice_max(sluice_copies_max_chunk_remote(b), sluice_copies_max_chunk_sent(b));
    case SLUICE_T_NODE: return (uint64_t)sluice_copies_max_chunk_node(b);
    case SLUICE_T_COPY_WEIGHTS: return (uint64_t)sluice_copies_num_weighted(b, chunk);
    default: return (uint64_t)(b->first_of_chunk[chunk + 1] - b->first_of_chunk[chunk]);
  }
}

/* A chunk uses a host buffer if its policy offloads; it uses every other slot that is its home. */
static int uses_host_slot(const sluice_template_spec_t* spec, int32_t tensor, int32_t chunk) {
  const uint8_t* restore = tensor == SLUICE_T_HOST_DI ? spec->restore_input : spec->restore_pre_activation;
  return sluice_restore_is_offloaded(restore[chunk]);
}

static int has_slots(const sluice_pass_t* pass, int32_t tensor) {
  return pass->schedule->ring[tensor] > 0 && pass->slots[tensor].row_bytes > 0;
}

/* If a backward does not read T_DI of a chunk, its template gives it a home among the kept ones (needed_di in
 * template_backward.c), but the step's buffer holds only rows that were kept. */
static int is_left_out(const sluice_template_spec_t* spec, int32_t tensor, int32_t chunk) {
  return tensor == SLUICE_T_KEPT_DI && !sluice_restore_is_kept(spec->restore_input[chunk]);
}

/* Stores the largest chunk of each slot, in bytes, in first[slot]; chunks[tensor]: how many chunks have a home there.
 */
static void collect_homes(sluice_pass_t* pass, int32_t* chunks) {
  int32_t last[SLUICE_T_COUNT]; /* last chunk that was counted */
  for (int32_t t = 0; t < SLUICE_T_COUNT; ++t) last[t] = -1, chunks[t] = 0;
  for (int32_t i = 0; i < pass->binding.num_chunks; ++i) {
    for (int32_t t = 0; t < SLUICE_T_COUNT; ++t) {
      if (t == SLUICE_T_KEPT_DI || t == SLUICE_T_KEPT_M) continue; /* through T_DI and T_M only */
      sluice_slot_ref_t home = home_of(pass, t, i);
      sluice_slots_t* slots = &pass->slots[home.tensor];
      int is_host = t == SLUICE_T_HOST_DI || t == SLUICE_T_HOST_M;
      if (!has_slots(pass, home.tensor) || pass->schedule->ring[home.tensor] <= home.slot) continue;
      if (is_host && !uses_host_slot(&pass->schedule->spec, t, i)) continue;
      if (is_left_out(&pass->schedule->spec, home.tensor, i)) continue;
      uint64_t bytes = rows_of(&pass->binding, home.tensor, i) * slots->row_bytes;
      slots->first[home.slot] = sluice_max_u64(slots->first[home.slot], bytes);
      chunks[home.tensor] += last[home.tensor] != i;
      last[home.tensor] = i;
    }
  }
}

/* Whether slots of T_M also hold activated rows, or their gradients, of another chunk: then chunks cannot be ordered by
 * expert, where a chunk has one place in a tensor. */
static int shares_slots(const sluice_pass_t* pass, int32_t tensor) {
  static const int32_t guests[] = {SLUICE_T_ACT, SLUICE_T_DACT};
  for (int32_t i = 0; i < pass->binding.num_chunks && tensor == SLUICE_T_M; ++i) {
    const sluice_slot_ref_t own = home_of(pass, SLUICE_T_M, i);
    for (size_t g = 0; g < sizeof guests / sizeof guests[0]; ++g) {
      const sluice_slot_ref_t guest = home_of(pass, guests[g], i);
      if (guest.tensor == tensor && (own.tensor != tensor || own.slot != guest.slot)) return 1;
    }
  }
  return 0;
}

/* Converts sizes of slots to offsets. */
static void lay_out(sluice_pass_t* pass, int32_t tensor, int32_t chunks) {
  sluice_slots_t* slots = &pass->slots[tensor];
  int32_t ring = pass->schedule->ring[tensor], n = pass->binding.num_chunks;
  slots->bytes = 0;
  if (!has_slots(pass, tensor)) return;
  const int joins = may_join(pass->moe, tensor) && ring == n && chunks == n && !shares_slots(pass, tensor);
  slots->layout = joins ? SLUICE_LAYOUT_EXPERT_MAJOR : SLUICE_LAYOUT_SLOTS;
  if (slots->layout == SLUICE_LAYOUT_EXPERT_MAJOR) {
    slots->bytes = (uint64_t)pass->binding.num_rows * slots->row_bytes;
    return;
  }
  if (tensor == SLUICE_T_RECV && pass->binding.first_returned[n] > 0) { /* one op reads all chunks: contiguous rows */
    for (int32_t s = 0; s < ring; ++s) slots->first[s] = (uint64_t)pass->binding.first_returned[s] * slots->row_bytes;
    slots->bytes = (uint64_t)pass->binding.first_returned[n] * slots->row_bytes;
    return;
  }
  for (int32_t s = 0; s < ring; ++s) {
    uint64_t bytes = slots->first[s];
    slots->first[s] = slots->bytes;
    slots->bytes += sluice_align_up(bytes);
  }
}

sluice_status_t sluice_pass_measure(sluice_pass_t* pass) {
  uint64_t per_tensor = sluice_align_up((uint64_t)pass->binding.num_chunks * sizeof(uint64_t));
  sluice_arena_t* arena = &pass->memory->layout;
  SLUICE_TRY(sluice_arena_reset(arena, SLUICE_T_COUNT * per_tensor, "places of slots"));
  for (int32_t t = 0; t < SLUICE_T_COUNT; ++t) {
    pass->slots[t].first = sluice_arena_take(arena, per_tensor);
    memset(pass->slots[t].first, 0, per_tensor);
    pass->slots[t].row_bytes = sluice_row_bytes(&pass->moe->shape, t);
  }
  int32_t chunks[SLUICE_T_COUNT];
  collect_homes(pass, chunks);
  for (int32_t t = 0; t < SLUICE_T_COUNT; ++t) lay_out(pass, t, chunks[t]);
  pass->slots[SLUICE_T_DW].bytes =
      sluice_weight_sum_bytes(pass); /* beyond the host's gradients, which have their own memory */
  return SLUICE_OK;
}

/* What kernels and GEMMs read and write lies in row memory, everything else in host memory. */
static void take_scratch(sluice_pass_t* pass, const sluice_pass_scratch_t* s, sluice_arena_t* host,
                         sluice_arena_t* rows) {
  pass->arrays = sluice_exchange_arrays_in(sluice_arena_take(host, s->exchange), pass->context->world_size);
  pass->route_send = sluice_arena_take(rows, s->scalars);
  pass->gate_recv = sluice_arena_take(rows, s->scalars);
  pass->scalar_recv = sluice_arena_take(rows, s->scalars);
  pass->gate_send = pass->schedule->spec.grouped ? sluice_arena_take(rows, s->scalars) : pass->scalar_recv;
  pass->gemms = sluice_arena_take(host, s->gemms);
  pass->packed = NULL;
  if (pass->moe->shape.config.weight_format != SLUICE_WEIGHTS_PLAIN) {
    const int64_t count = sluice_pass_gemms(&pass->moe->shape);
    pass->packed = (sluice_packed_t*)(void*)(pass->gemms + count);
    memset(pass->packed, 0, (size_t)count * sizeof *pass->packed);
  }
  pass->decoded_bytes = s->decoded;
  pass->decoded = s->decoded > 0 ? sluice_arena_take(rows, s->decoded) : NULL;
  pass->times = sluice_arena_take(host, s->times);
  pass->adapter_bytes = s->adapters;
  pass->adapters = s->adapters > 0 ? sluice_arena_take(rows, s->adapters) : NULL;
  memset(pass->times, 0, s->times);
}

static sluice_status_t poison(const sluice_pass_t* pass, const sluice_arena_t* arena) {
  sluice_context_t* context = pass->context;
  if (!context->poison) return SLUICE_OK;
  return context->rows->fill(context, pass->stream, arena->data, 0xff, arena->capacity);
}

/* A candidate may need more slot memory than the final choice. It stays allocated during trials, which so touch no
 * fresh pages; after some settled passes of each layer, memory that only trials needed is freed, once. */
static sluice_status_t give_back_after_trials(const sluice_pass_t* pass, uint64_t bytes) {
  const sluice_moe_t* moe = pass->moe;
  sluice_settled_t* settled = &pass->memory->settled;
  if (!moe->decision.is_settled) {
    *settled = (sluice_settled_t){.had_trials = 1};
    return SLUICE_OK;
  }
  sluice_arena_t* arena = &pass->memory->slots;
  /* A plan counts its slots beforehand, and the slots of a captured graph must not move. */
  if (!settled->had_trials || pass->is_bounded || arena->is_fixed) return SLUICE_OK;
  if (!moe->context->rows->can_give_back) return SLUICE_OK;
  const int32_t wanted = SLUICE_SETTLED_PASSES * moe->context->num_layers;
  /* The first passes may still be a candidate's: a backward has the chunks of its forward. */
  if (++settled->num_passes > wanted / 2) settled->most_bytes = sluice_max_u64(settled->most_bytes, bytes);
  if (settled->num_passes < wanted) return SLUICE_OK;
  uint64_t most = settled->most_bytes;
  *settled = (sluice_settled_t){0};
  if (sluice_align_up(most) >= arena->capacity) return SLUICE_OK;
  sluice_arena_deinit(arena);
  return sluice_arena_reserve(arena, most, "slots of a pass");
}

sluice_status_t sluice_pass_prepare(sluice_pass_t* pass, void* const* given) {
  const sluice_binding_t* b = &pass->binding;
  sluice_context_t* context = pass->context;
  uint64_t rows = sluice_max_u64((uint64_t)b->max_chunk_rows, (uint64_t)b->max_chunk_sent);
  rows = sluice_max_u64(rows, (uint64_t)b->first_returned[b->num_chunks]);
  uint64_t scalar_bytes = rows * sizeof(float);
  const sluice_pass_scratch_t s = sluice_pass_scratch(&pass->moe->shape, scalar_bytes, pass->schedule->num_ops);
  /* Only passes without a plan have groups. */
  const uint64_t of_groups = pass->schedule->spec.grouped ? sluice_align_up(s.scalars) : 0;
  uint64_t total = sluice_pass_scratch_bytes(&pass->moe->shape, scalar_bytes, pass->schedule->num_ops) + of_groups;
  uint64_t tensors = 0;
  for (int32_t t = 0; t < SLUICE_T_COUNT; ++t) {
    if (given[t] == NULL) tensors += sluice_align_up(pass->slots[t].bytes);
  }
  sluice_arena_t *arena = &pass->memory->slots, *host = NULL;
  const uint64_t on_device = sluice_pass_device_scratch_bytes(&pass->moe->shape, s.scalars) + of_groups;
  SLUICE_TRY(context->rows->take_scratch(pass->memory, total, on_device, &host, &total));
  SLUICE_TRY(give_back_after_trials(pass, total + tensors));
  SLUICE_TRY(sluice_arena_reset(arena, total + tensors, "slots of a pass"));
  SLUICE_TRY(poison(pass, arena));
  for (int32_t t = 0; t < SLUICE_T_COUNT; ++t) {
    if (given[t] != NULL) {
      pass->slots[t].data = given[t];
    } else if (pass->slots[t].bytes > 0) {
      pass->slots[t].data = sluice_arena_take(arena, pass->slots[t].bytes);
    }
  }
  context->stats.slot_bytes = tensors;
  take_scratch(pass, &s, host, arena);
  return SLUICE_OK;
}

void* sluice_pass_chunk(const sluice_pass_t* pass, int32_t tensor, int32_t chunk) {
  sluice_slot_ref_t home = home_of(pass, tensor, chunk);
  const sluice_slots_t* slots = &pass->slots[home.tensor];
  return slots->data + slots->first[home.slot];
}

void* sluice_pass_rows(const sluice_pass_t* pass, int32_t tensor, int32_t chunk, int32_t local) {
  const sluice_slots_t* slots = &pass->slots[home_of(pass, tensor, chunk).tensor];
  int64_t at = (int64_t)chunk * pass->binding.num_local + local;
  if (slots->layout == SLUICE_LAYOUT_EXPERT_MAJOR) {
    return slots->data + (uint64_t)pass->binding.first_in_pass[at] * slots->row_bytes;
  }
  return (char*)sluice_pass_chunk(pass, tensor, chunk) + (uint64_t)pass->binding.first_in_chunk[at] * slots->row_bytes;
}

int sluice_pass_is_joined(const sluice_pass_t* pass, int32_t tensor) {
  return pass->slots[home_of(pass, tensor, 0).tensor].layout == SLUICE_LAYOUT_EXPERT_MAJOR;
}

sluice_rows_at_t sluice_pass_rows_at(const sluice_pass_t* pass, int32_t tensor, int32_t chunk) {
  const sluice_slots_t* slots = &pass->slots[home_of(pass, tensor, chunk).tensor];
  const int is_of_pass = slots->layout == SLUICE_LAYOUT_EXPERT_MAJOR;
  return (sluice_rows_at_t){is_of_pass ? slots->data : sluice_pass_chunk(pass, tensor, chunk), is_of_pass,
                            (int64_t)slots->row_bytes};
}

sluice_expert_rows_t sluice_pass_expert_rows(const sluice_pass_t* pass, int32_t chunk) {
  const sluice_binding_t* b = &pass->binding;
  const int64_t first = (int64_t)chunk * b->num_local;
  return (sluice_expert_rows_t){b->num_local, b->rows_of_expert + first, b->first_in_pass + first};
}
