// SPDX-License-Identifier: Apache-2.0
/* The experts of a rank: parameters, gradients, and callback experts that scale rows. */
#include "capi/test/world/world_split.h"

#include <stdlib.h>
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/moe/context/context.h"

/* One array holds gate and up of an interleaved layer, in alternating rows. */
static int is_interleaved(const case_t* c, int kind) {
  const int is_down = kind == W2 || kind == B2 || kind >= LA2;
  return c->gated == SLUICE_GATED_INTERLEAVED && !is_down && kind != LA1;
}

/* One array holds W1 and then W3. */
static int is_stacked(const case_t* c, int kind) {
  return c->stacked && c->gated == SLUICE_GATED_HALVES && (kind == W1 || kind == W3);
}

int world_param_array(const case_t* c, int kind) {
  if (is_stacked(c, kind)) return W1;
  if (!is_interleaved(c, kind)) return kind;
  return kind == W3 ? W1 : kind == B3 ? B1 : kind == LB3 ? LB1 : kind;
}

int64_t world_param_place(const case_t* c, const array_t* a, int kind, int64_t i) {
  int64_t cols = world_param_cols(c, kind), row = i / cols;
  if (is_interleaved(c, kind)) row = 2 * row + (kind == W3 || kind == B3 || kind == LB3);
  if (is_stacked(c, kind) && kind == W3) row += world_param_rows(c, W1);
  return row * a->strides[0] + (i % cols) * a->strides[1];
}

static void make_param_arrays(experts_t* x, const case_t* c, int32_t dtype, int32_t count, int kind, int gradients) {
  int64_t rows = world_param_rows(c, kind) * (is_interleaved(c, kind) || is_stacked(c, kind) ? 2 : 1),
          cols = world_param_cols(c, kind);
  const int is_matrix = kind <= W2 || kind >= LA1, is_odd = c->lora_odd && kind >= LA1 && !gradients;
  int transposed = is_matrix && c->transposed;
  enum { ODD = 3 };
  x->arrays[kind] = calloc((size_t)count, sizeof(array_t));
  x->tensors[kind] = calloc((size_t)count, sizeof(sluice_tensor_t));
  const int64_t odd = c->lora_odd > 1 ? count : ODD;
  for (int32_t l = 0; l < count; ++l) {
    array_t* a = &x->arrays[kind][l];
    if (is_odd && c->lora_odd > 1 && l > 0) {
      const uint64_t after = (uint64_t)l * sluice_dtype_bytes(dtype);
      *a = x->arrays[kind][0];
      a->is_part = 1, a->bytes -= after;
      a->host = (char*)a->host + after, a->tensor.data = (char*)a->tensor.data + after;
      continue;
    }
    world_make_array(a, dtype, is_matrix ? 2 : 1, rows, cols,
                     is_odd       ? odd * cols
                     : transposed ? 1
                                  : cols,
                     is_odd       ? odd
                     : transposed ? rows
                                  : 1);
  }
}

void world_make_experts(experts_t* x, const case_t* c, int32_t grad_dtype, const int32_t* ids, int32_t count,
                        int gradients) {
  memset(x, 0, sizeof *x);
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    if (!world_param_used(c, kind) || count == 0) continue;
    if (c->weights != SLUICE_WEIGHTS_PLAIN && kind <= W2) continue;
    const int of = world_param_array(c, kind);
    const int32_t dtype = gradients ? grad_dtype : world_param_dtype(c, kind);
    if (x->arrays[of] == NULL) make_param_arrays(x, c, dtype, count, of, gradients);
    for (int32_t l = 0; l < count; ++l) {
      array_t* a = &x->arrays[of][l];
      for (int64_t i = 0; i < world_param_size(c, kind); ++i) {
        int64_t at = world_param_place(c, a, kind, i);
        if (gradients) {
          if (c->accumulate) set_element(a->host, at, dtype, 1);
        } else {
          set_element(a->host, at, dtype, world_param_value(c, kind, ids[l], i));
        }
      }
      world_push(a);
      x->tensors[of][l] = *world_tensor_of(a);
    }
  }
  /* One array holds W1 and W3: makes descriptors for both halves. */
  for (int32_t l = 0; l < count && is_stacked(c, W3) && x->arrays[W1] != NULL; ++l) {
    array_t* a = &x->arrays[W1][l];
    if (x->tensors[W3] == NULL) x->tensors[W3] = calloc((size_t)count, sizeof(sluice_tensor_t));
    a->shape[0] = world_param_rows(c, W1);
    x->tensors[W3][l] = x->tensors[W1][l];
    x->tensors[W3][l].data =
        (char*)a->tensor.data + a->shape[0] * a->strides[0] * (int64_t)sluice_dtype_bytes(world_dtype_of(a));
  }
  const int is_frozen = gradients && c->lora_rank > 0;
  x->table = (sluice_expert_tensors_t){.struct_size = sizeof x->table,
                                       .w1 = is_frozen ? NULL : x->tensors[W1],
                                       .w3 = is_frozen ? NULL : x->tensors[W3],
                                       .w2 = is_frozen ? NULL : x->tensors[W2],
                                       .b1 = x->tensors[B1],
                                       .b3 = x->tensors[B3],
                                       .b2 = x->tensors[B2],
                                       .la1 = x->tensors[LA1],
                                       .lb1 = x->tensors[LB1],
                                       .la3 = x->tensors[LA3],
                                       .lb3 = x->tensors[LB3],
                                       .la2 = x->tensors[LA2],
                                       .lb2 = x->tensors[LB2],
                                       .lora_scale1 = world_lora_scale(LA1),
                                       .lora_scale3 = world_lora_scale(LA3),
                                       .lora_scale2 = world_lora_scale(LA2)};
  if (c->weights != SLUICE_WEIGHTS_PLAIN && !gradients) world_make_packed(&x->packed, c, ids, count, &x->table);
}

void world_free_experts(experts_t* x, int32_t count) {
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    for (int32_t l = 0; x->arrays[kind] != NULL && l < count; ++l) world_drop_array(&x->arrays[kind][l]);
    free(x->arrays[kind]);
    free(x->tensors[kind]);
  }
  world_free_packed(&x->packed);
}

static void toy_scale(const toy_t* toy, int32_t local, int64_t rows, const void* in, void* out) {
  if (world_here.machine != NULL) {
    toy->context->device->kernels->scale_rows(world_stream_here(), toy->c->dtype, rows, toy->c->model_width, in,
                                              toy->factors + local * toy->most_factors, out);
    if (toy->c->callback_waits) world_settle();
    return;
  }
  for (int64_t i = 0; i < rows * toy->c->model_width; ++i) {
    set_element(out, i, toy->c->dtype, get_element(in, i, toy->c->dtype) * (toy->ids[local] + 2));
  }
}
int32_t world_toy_forward(void* user, int32_t chunk, int32_t local, int64_t rows, const void* x, void* y) {
  toy_t* toy = user;
  toy->rows_of_chunk = (chunk == toy->chunk ? toy->rows_of_chunk : 0) + rows;
  toy->chunk = chunk;
  if (toy->rows_of_chunk > *toy->most_rows) *toy->most_rows = toy->rows_of_chunk;
  ++*toy->calls;
  toy_scale(toy, local, rows, x, y);
  return 0;
}
int32_t world_toy_backward(void* user, int32_t chunk, int32_t local, int64_t rows, const void* x, const void* dy,
                           void* dx) {
  (void)chunk, (void)x;
  toy_scale(user, local, rows, dy, dx);
  return 0;
}

/* ---- experts that change owner between steps; ranks are threads, so they exchange experts over a shared board ---- */

static uint32_t next_number(uint32_t* state) {
  *state = *state * 1664525u + 1013904223u;
  return *state >> 8;
}

/* Fills items with a random permutation of [0, count). */
static void shuffle(int32_t* items, int32_t count, uint32_t* state) {
  for (int32_t i = 0; i < count; ++i) items[i] = i;
  for (int32_t i = count - 1; i > 0; --i) {
    const int32_t other = (int32_t)(next_number(state) % (uint32_t)(i + 1)), item = items[i];
    items[i] = items[other], items[other] = item;
  }
}

void world_place_experts(const case_t* c, int32_t move, int32_t* out_owner, int32_t* out_slot) {
  uint32_t state = 77u * (uint32_t)move + (uint32_t)c->moves;
  const int32_t empty = c->world_size > 1 && move % 2 == 1 ? move / 2 % c->world_size : -1;
  int32_t* order = calloc((size_t)c->num_experts, sizeof *order);
  int32_t count[WORLD_MAX_RANKS] = {0};
  shuffle(order, c->num_experts, &state);
  for (int32_t e = 0; e < c->num_experts; ++e) {
    out_owner[e] = world_owner(c, order[e]);
    if (c->moves == WORLD_MOVES_UNEVEN) out_owner[e] = (int32_t)(next_number(&state) % (uint32_t)c->world_size);
    if (c->moves == WORLD_MOVES_UNEVEN && out_owner[e] == empty) out_owner[e] = (empty + 1) % c->world_size;
  }
  shuffle(order, c->num_experts, &state);
  for (int32_t i = 0; i < c->num_experts; ++i) out_slot[order[i]] = count[out_owner[order[i]]]++;
  free(order);
}

int32_t world_experts_of(const case_t* c, int32_t rank, const int32_t* owners, const int32_t* slots, int32_t* out_ids) {
  int32_t count = 0;
  for (int32_t e = 0; e < c->num_experts; ++e) {
    if (owners[e] == rank) out_ids[slots[e]] = e, ++count;
  }
  return count;
}

void world_update(const case_t* c, experts_t* params, const experts_t* grads, int32_t count) {
  for (int kind = 0; kind < NUM_PARAMS && !c->callback_experts; ++kind) {
    const int of = world_param_array(c, kind);
    for (int32_t l = 0; world_param_trained(c, kind) && l < count; ++l) {
      const array_t *p = &params->arrays[of][l], *g = &grads->arrays[of][l];
      world_pull(p);
      world_pull(g);
      for (int64_t i = 0; i < world_param_size(c, kind); ++i) {
        const double step = get_element(g->host, world_param_place(c, g, kind, i), world_dtype_of(g)) / 64;
        const int64_t at = world_param_place(c, p, kind, i);
        set_element(p->host, at, world_dtype_of(p), get_element(p->host, at, world_dtype_of(p)) - step);
      }
      world_push(p);
    }
  }
}

void world_copy_experts(const case_t* c, const experts_t* x, const int32_t* ids, int32_t count, double* const* board,
                        int is_put) {
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    const int of = world_param_array(c, kind);
    for (int32_t l = 0; world_param_used(c, kind) && l < count; ++l) {
      const array_t* a = &x->arrays[of][l];
      double* there = board[kind] + ids[l] * world_param_size(c, kind);
      if (is_put) world_pull(a);
      for (int64_t i = 0; i < world_param_size(c, kind); ++i) {
        const int64_t at = world_param_place(c, a, kind, i);
        if (is_put) there[i] = get_element(a->host, at, world_dtype_of(a));
        if (!is_put) set_element(a->host, at, world_dtype_of(a), there[i]);
      }
      if (!is_put) world_push(a);
    }
  }
}
