// SPDX-License-Identifier: Apache-2.0
#include "backend/swap/order.h"

#include <string.h>

sluice_status_t sluice_swap_order_init(sluice_swap_order_t* order, const int32_t* swapped, int32_t num_layers,
                                       sluice_allocator_t* allocator) {
  *order = (sluice_swap_order_t){.allocator = allocator, .num_layers = num_layers};
  const uint64_t bytes = (uint64_t)num_layers * sizeof *swapped;
  order->swapped = sluice_alloc(allocator, bytes, "swap: which layers are swapped");
  if (order->swapped == NULL) return sluice_alloc_status();
  memcpy(order->swapped, swapped, bytes);
  return SLUICE_OK;
}

void sluice_swap_order_deinit(sluice_swap_order_t* order) {
  if (order->swapped == NULL) return;
  sluice_free(order->allocator, order->entries, (uint64_t)order->capacity * sizeof *order->entries);
  sluice_free(order->allocator, order->swapped, (uint64_t)order->num_layers * sizeof *order->swapped);
  order->swapped = NULL;
}

void sluice_swap_order_reset(sluice_swap_order_t* order) { order->count = 0; }

static sluice_swap_entry_t* find(sluice_swap_order_t* order, int64_t micro_batch, int32_t layer) {
  for (int32_t i = 0; i < order->count; ++i) {
    sluice_swap_entry_t* entry = order->entries + i;
    if (entry->micro_batch == micro_batch && entry->layer == layer) return entry;
  }
  return NULL;
}

static sluice_swap_entry_t* in_state(sluice_swap_order_t* order, sluice_swap_state_t state) {
  for (int32_t i = 0; i < order->count; ++i) {
    if (order->entries[i].state == state) return order->entries + i;
  }
  return NULL;
}

static sluice_status_t make_room(sluice_swap_order_t* order) {
  if (order->count < order->capacity) return SLUICE_OK;
  const int32_t capacity = 2 * order->capacity + 8;
  sluice_swap_entry_t* entries =
      sluice_alloc(order->allocator, (uint64_t)capacity * sizeof *entries, "swap: the layers that are out");
  if (entries == NULL) return sluice_alloc_status();
  if (order->count > 0) memcpy(entries, order->entries, (size_t)order->count * sizeof *entries);
  sluice_free(order->allocator, order->entries, (uint64_t)order->capacity * sizeof *entries);
  order->entries = entries, order->capacity = capacity;
  return SLUICE_OK;
}

typedef struct ops_s {
  sluice_swap_op_t* ops;
  int32_t count;
} ops_t;

static void add(ops_t* out, int32_t kind, const sluice_swap_entry_t* entry) {
  out->ops[out->count++] = (sluice_swap_op_t){.micro_batch = entry->micro_batch, .kind = kind, .layer = entry->layer};
}

static void settle(ops_t* out, sluice_swap_entry_t* entry) {
  if (entry == NULL) return;
  add(out, SLUICE_SWAP_OP_SETTLE, entry);
  entry->state = SLUICE_SWAP_IS_OUT;
}

static void prefetch(ops_t* out, sluice_swap_entry_t* entry) {
  add(out, SLUICE_SWAP_OP_PREFETCH, entry);
  entry->state = SLUICE_SWAP_COMES;
}

/* Prefetches the next swapped layer below, which runs its backward next, if the rules allow that. */
static void prefetch_below(sluice_swap_order_t* order, int64_t micro_batch, int32_t layer, ops_t* out) {
  if (in_state(order, SLUICE_SWAP_LEAVES) != NULL || in_state(order, SLUICE_SWAP_COMES) != NULL) return;
  for (int32_t below = layer - 1; below >= 0; --below) {
    sluice_swap_entry_t* entry = order->swapped[below] ? find(order, micro_batch, below) : NULL;
    if (entry == NULL) continue;
    if (entry->state == SLUICE_SWAP_IS_OUT) prefetch(out, entry);
    return;
  }
}

static sluice_status_t forward_ends(sluice_swap_order_t* order, int64_t micro_batch, int32_t layer, ops_t* out) {
  if (!order->swapped[layer]) return SLUICE_OK;
  if (find(order, micro_batch, layer) != NULL) {
    return SLUICE_FAIL(SLUICE_E_STATE,
                       "sluice_swap_reach: the forward of layer %d has ended twice for micro-batch %lld: give each "
                       "forward its own number",
                       layer, (long long)micro_batch);
  }
  SLUICE_TRY(make_room(order));
  settle(out, in_state(order, SLUICE_SWAP_LEAVES));
  sluice_swap_entry_t* entry = order->entries + order->count++;
  *entry = (sluice_swap_entry_t){.micro_batch = micro_batch, .layer = layer, .state = SLUICE_SWAP_LEAVES};
  add(out, SLUICE_SWAP_OP_PUT, entry);
  if (in_state(order, SLUICE_SWAP_COMES) != NULL) settle(out, entry);
  return SLUICE_OK;
}

/* Removes the entries of layers above `above` whose backward has run. */
static void forget_used(sluice_swap_order_t* order, int64_t micro_batch, int32_t above) {
  int32_t kept = 0;
  for (int32_t i = 0; i < order->count; ++i) {
    const sluice_swap_entry_t* entry = order->entries + i;
    const int is_over =
        entry->state == SLUICE_SWAP_IS_USED && entry->micro_batch == micro_batch && entry->layer > above;
    if (!is_over) order->entries[kept++] = *entry;
  }
  order->count = kept;
}

static void backward_begins(sluice_swap_order_t* order, int64_t micro_batch, int32_t layer, ops_t* out) {
  sluice_swap_entry_t* entry = order->swapped[layer] ? find(order, micro_batch, layer) : NULL;
  if (entry != NULL && entry->state != SLUICE_SWAP_IS_USED) {
    if (entry->state == SLUICE_SWAP_LEAVES) settle(out, entry);
    if (entry->state == SLUICE_SWAP_IS_OUT) prefetch(out, entry);
    add(out, SLUICE_SWAP_OP_TAKE, entry);
    entry->state = SLUICE_SWAP_IS_USED;
  }
  forget_used(order, micro_batch, layer);
  prefetch_below(order, micro_batch, layer, out);
}

static void backward_ends(sluice_swap_order_t* order, int64_t micro_batch, ops_t* out) {
  int32_t kept = 0;
  for (int32_t i = 0; i < order->count; ++i) {
    const sluice_swap_entry_t entry = order->entries[i];
    if (entry.micro_batch != micro_batch) {
      order->entries[kept++] = entry;
    } else if (entry.state != SLUICE_SWAP_IS_USED) {
      add(out, SLUICE_SWAP_OP_RELEASE, &entry);
    }
  }
  order->count = kept;
}

sluice_status_t sluice_swap_order_reach(sluice_swap_order_t* order, int32_t event, int64_t micro_batch, int32_t layer,
                                        int32_t has_left, sluice_swap_op_t* ops, int32_t room, int32_t* out_count) {
  ops_t out = {.ops = ops};
  const int is_of_layer = event == SLUICE_SWAP_FORWARD_ENDS || event == SLUICE_SWAP_BACKWARD_BEGINS;
  const int32_t most = event == SLUICE_SWAP_BACKWARD_ENDS && order->num_layers >= SLUICE_SWAP_MOST_OPS
                           ? order->num_layers + 1
                           : SLUICE_SWAP_MOST_OPS;
  SLUICE_TRY(SLUICE_REQUIRE(event >= SLUICE_SWAP_FORWARD_ENDS && event <= SLUICE_SWAP_BACKWARD_ENDS,
                            "sluice_swap_reach: event is %d; it must be a SLUICE_SWAP_* event", event));
  SLUICE_TRY(SLUICE_REQUIRE(!is_of_layer || (layer >= 0 && layer < order->num_layers),
                            "sluice_swap_reach: layer is %d; it must be in [0, %d)", layer, order->num_layers));
  SLUICE_TRY(SLUICE_REQUIRE(room >= most, "sluice_swap_reach: room is %d; it must be at least %d", room, most));
  if (has_left) settle(&out, in_state(order, SLUICE_SWAP_LEAVES));
  sluice_status_t status = SLUICE_OK;
  switch (event) {
    case SLUICE_SWAP_FORWARD_ENDS: status = forward_ends(order, micro_batch, layer, &out); break;
    case SLUICE_SWAP_BACKWARD_BEGINS: backward_begins(order, micro_batch, layer, &out); break;
    case SLUICE_SWAP_BACKWARD_NEXT: prefetch_below(order, micro_batch, order->num_layers, &out); break;
    default: backward_ends(order, micro_batch, &out); break;
  }
  *out_count = out.count;
  return status;
}
