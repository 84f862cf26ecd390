// SPDX-License-Identifier: Apache-2.0
/* Sets up the choice of options within one stage, and computes the cost of a choice. */
#include <math.h>
#include <string.h>

#include "backend/base/math.h"
#include "backend/planner/stages/local.h"

/* ---- memory ---- */

sluice_status_t sluice_stages_local_make(const sluice_stages_tables_t* t, sluice_stages_local_t* local) {
  memset(local, 0, sizeof *local);
  const uint64_t n = (uint64_t)t->num_layers + 1, items = (uint64_t)t->num_items;
  const uint64_t sizes[] = {n * sizeof *local->first,     items * sizeof *local->items,
                            n * sizeof *local->pick,      n * sizeof *local->best,
                            items * sizeof *local->order, n * sizeof *local->least,
                            6 * n * sizeof(double),       2 * items * sizeof(sluice_stages_local_increment_t)};
  enum { PARTS = sizeof sizes / sizeof sizes[0] };
  char* at[PARTS];
  for (int i = 0; i < PARTS; ++i) local->block_bytes += sluice_align_up(sizes[i]);
  local->block = sluice_alloc_zeroed(t->allocator, local->block_bytes, "choice of options within a stage");
  if (local->block == NULL) return sluice_alloc_status();
  at[0] = local->block;
  for (int i = 1; i < PARTS; ++i) at[i] = at[i - 1] + sluice_align_up(sizes[i - 1]);
  local->tables = t;
  local->first = (int32_t*)at[0], local->items = (sluice_stages_local_item_t*)at[1], local->pick = (int32_t*)at[2];
  local->best = (int32_t*)at[3], local->order = (int32_t*)at[4], local->least = (uint64_t*)at[5];
  local->suffix = (double*)at[6], local->increments = at[7];
  return SLUICE_OK;
}

void sluice_stages_local_deinit(sluice_stages_local_t* local) {
  if (local->tables != NULL) sluice_free(local->tables->allocator, local->block, local->block_bytes);
  memset(local, 0, sizeof *local);
}

/* ---- a stage ---- */

/* gap: least time from the end of the layer's forward to the start of its backward. */
static void add_layer(sluice_stages_local_t* local, int32_t layer, double gap) {
  const sluice_stages_tables_t* t = local->tables;
  const int32_t k = t->in_flight[local->stage];
  int32_t at = local->first[local->count];
  for (int32_t a = t->first_item[layer]; a < t->first_item[layer + 1]; ++a) {
    const sluice_stages_item_t* item = &t->items[a];
    const double copies = sluice_stages_copy_seconds(t->problem, item->copied);
    if (item->copied > 0 && !(copies <= gap)) continue;
    local->items[at++] = (sluice_stages_local_item_t){.seconds = item->seconds,
                                                      .copy_seconds = copies,
                                                      .bytes = item->resident + (uint64_t)k * item->held,
                                                      .working = item->working,
                                                      .staging = item->copied,
                                                      .arena = item->arena,
                                                      .option = item->option,
                                                      .layer = local->count};
  }
  local->first[++local->count] = at;
  local->steps += (uint64_t)(t->first_item[layer + 1] - t->first_item[layer]);
}

static double fastest_of(const sluice_stages_tables_t* t, int32_t layer) {
  return t->items[t->first_item[layer]].seconds;
}

void sluice_stages_local_set(sluice_stages_local_t* local, const int32_t* layers, int32_t count, int32_t stage,
                             uint64_t in_bytes, uint64_t out_bytes) {
  const sluice_stages_tables_t* t = local->tables;
  const sluice_stages_problem_t* p = t->problem;
  local->count = 0, local->stage = stage, local->first[0] = 0;
  local->budget = t->budget[stage];
  local->fixed_bytes = p->base_bytes + sluice_stages_message_bytes(t, stage, in_bytes, out_bytes);
  local->messages = sluice_stages_message_seconds(p, stage, in_bytes, out_bytes);
  double all = 0;
  for (int32_t i = 0; i < count; ++i) all += fastest_of(t, layers[i]);
  double after = all;
  for (int32_t i = 0; i < count; ++i) {
    const sluice_stages_layer_t* layer = &p->layers[layers[i]];
    after -= fastest_of(t, layers[i]);
    local->fixed_bytes += (uint64_t)t->versions[stage] * layer->parameter_bytes + layer->state_bytes;
    add_layer(local, layers[i], fmax(after, 0) + (t->in_flight[stage] - 1) * all);
  }
}

void sluice_stages_local_set_run(sluice_stages_local_t* local, int32_t stage, int32_t first, int32_t end) {
  for (int32_t i = first; i < end; ++i) local->order[i - first] = i; /* there are at least as many items as layers */
  sluice_stages_local_set(local, local->order, end - first, stage, local->tables->cut[first], local->tables->cut[end]);
}

/* ---- the cost of a choice ---- */

sluice_stages_local_sum_t sluice_stages_local_sum(const sluice_stages_local_t* local, const int32_t* pick) {
  sluice_stages_local_sum_t sum = {.bytes = local->fixed_bytes};
  uint64_t working = 0, staging = 0, arena = 0;
  for (int32_t i = 0; i < local->count; ++i) {
    const sluice_stages_local_item_t* item = &local->items[pick[i]];
    sum.compute += item->seconds, sum.copies += item->copy_seconds, sum.bytes += item->bytes;
    working = sluice_max_u64(working, item->working), staging = sluice_max_u64(staging, item->staging);
    arena = sluice_max_u64(arena, item->arena);
  }
  sum.bytes += working + staging + arena;
  sum.turn = sluice_stages_turn_seconds(local->tables->problem, sum.compute, local->messages, sum.copies);
  return sum;
}

/* Sums of the same choices differ by rounding if they were added in another order. */
static int compare(double a, double b) {
  const double rounding = 1e-12 * (fabs(a) + fabs(b));
  return a < b - rounding ? -1 : a > b + rounding;
}

int sluice_stages_local_is_better(const sluice_stages_local_sum_t* a, const sluice_stages_local_sum_t* b) {
  int order = compare(a->turn, b->turn);
  if (order == 0) order = compare(a->compute, b->compute);
  if (order == 0) order = compare(a->copies, b->copies);
  return order < 0;
}
