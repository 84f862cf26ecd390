// SPDX-License-Identifier: Apache-2.0
#include "backend/optim/adam_step.h"

#include <math.h>
#include <stdatomic.h>

#include "backend/base/math.h"

/* ---- pieces ---- */

typedef void (*piece_fn_t)(void* user, const sluice_adam_group_t* group, const sluice_adam_tensor_t* tensor,
                           int64_t first, int64_t count);

static int64_t pieces_of(const sluice_adam_tensor_t* tensor) {
  return sluice_ceil_div(tensor->count, SLUICE_ADAM_PIECE);
}

static int64_t count_pieces(const sluice_adam_step_t* step) {
  int64_t pieces = 0;
  for (int64_t g = 0; g < step->num_groups; ++g) {
    for (int64_t t = 0; t < step->groups[g].num_tensors; ++t) pieces += pieces_of(step->groups[g].tensors + t);
  }
  return pieces;
}

/* Calls fn for each piece in [begin, end), in order. */
static void walk_pieces(const sluice_adam_step_t* step, int64_t begin, int64_t end, piece_fn_t fn, void* user) {
  int64_t before = 0; /* pieces of the previous tensors */
  for (int64_t g = 0; g < step->num_groups; ++g) {
    const sluice_adam_group_t* group = step->groups + g;
    for (int64_t t = 0; t < group->num_tensors; ++t) {
      const sluice_adam_tensor_t* tensor = group->tensors + t;
      const int64_t pieces = pieces_of(tensor);
      const int64_t last = sluice_min(end - before, pieces);
      for (int64_t i = sluice_max(begin - before, 0); i < last; ++i) {
        const int64_t first = i * SLUICE_ADAM_PIECE;
        fn(user, group, tensor, first, sluice_min(SLUICE_ADAM_PIECE, tensor->count - first));
      }
      before += pieces;
      if (before >= end) return;
    }
  }
}

/* ---- scanning gradients ---- */

/* Sums are formed by share of the pieces. The number of shares is fixed, so sums do not depend on the number of
 * threads. */
enum { SHARES = 256 };

typedef struct look_s {
  const sluice_adam_step_t* step;
  int64_t pieces;
  sluice_adam_scan_t shares[SHARES];
} look_t;

typedef struct share_s {
  sluice_adam_scan_t (*scan)(const void* grad, int32_t dtype, int64_t first, int64_t count);
  sluice_adam_scan_t* sum;
} share_t;

static void add_scan(sluice_adam_scan_t* sum, sluice_adam_scan_t found) {
  sum->sum_of_squares += found.sum_of_squares;
  sum->largest = found.largest > sum->largest ? found.largest : sum->largest;
}

/* Adds in two levels, like the threads of a scan. */
sluice_adam_scan_t sluice_adam_fold(const sluice_adam_scan_t* scans, int64_t pieces) {
  sluice_adam_scan_t all = {.sum_of_squares = 0.0};
  for (int64_t i = 0; i < SHARES; ++i) {
    sluice_adam_scan_t share = {.sum_of_squares = 0.0};
    for (int64_t p = pieces * i / SHARES; p < pieces * (i + 1) / SHARES; ++p) add_scan(&share, scans[p]);
    add_scan(&all, share);
  }
  return all;
}

static void look_at_piece(void* user, const sluice_adam_group_t* group, const sluice_adam_tensor_t* tensor,
                          int64_t first, int64_t count) {
  (void)group;
  const share_t* share = user;
  add_scan(share->sum, share->scan(tensor->grad, tensor->grad_dtype, first, count));
}

static void look_on_thread(void* data, int index, int count) {
  look_t* look = data;
  for (int i = index; i < SHARES; i += count) {
    const sluice_adam_kernels_t* kernels = look->step->kernels;
    share_t share = {look->step->max_norm > 0.0 ? kernels->scan : kernels->look, look->shares + i};
    walk_pieces(look->step, look->pieces * i / SHARES, look->pieces * (i + 1) / SHARES, look_at_piece, &share);
  }
}

static int threads_for(const sluice_adam_step_t* step, int64_t pieces) {
  return (int)sluice_min(sluice_threads_available(step->threads), sluice_max(pieces, 1));
}

sluice_adam_outcome_t sluice_adam_look(const sluice_adam_step_t* step) {
  look_t look = {.step = step, .pieces = count_pieces(step)};
  sluice_threads_run(step->threads, threads_for(step, look.pieces), look_on_thread, &look);
  sluice_adam_scan_t all = {.sum_of_squares = 0.0};
  for (int i = 0; i < SHARES; ++i) add_scan(&all, look.shares[i]);
  return (sluice_adam_outcome_t){.norm = sqrt(all.sum_of_squares) / step->loss_scale,
                                 .largest = all.largest,
                                 .is_skipped = !(all.largest < INFINITY)};
}

/* ---- updating parameters ---- */

/* A thread takes the next share when it has finished one, so that no thread waits long for one whose core was
 * preempted. The result does not depend on the thread that updates an element. */
enum { SHARES_PER_THREAD = 16 };

typedef struct update_s {
  const sluice_adam_step_t* step;
  double grad_scale;
  int64_t pieces;
  _Atomic int64_t next; /* the first share that no thread has taken */
} update_t;

static void update_piece(void* user, const sluice_adam_group_t* group, const sluice_adam_tensor_t* tensor,
                         int64_t first, int64_t count) {
  const update_t* update = user;
  /* Computed for each piece: two calls of pow per up to 32,768 elements, and no array with one entry for each
   * tensor. */
  const sluice_adam_numbers_t numbers = sluice_adam_numbers_of(&group->rule, tensor->step, update->grad_scale);
  update->step->kernels->update(tensor, first, count, &numbers);
}

static void update_on_thread(void* data, int index, int count) {
  (void)index;
  update_t* update = data;
  const int64_t shares = count == 1 ? 1 : sluice_min(update->pieces, (int64_t)count * SHARES_PER_THREAD);
  for (int64_t i; (i = atomic_fetch_add(&update->next, 1)) < shares;) {
    walk_pieces(update->step, update->pieces * i / shares, update->pieces * (i + 1) / shares, update_piece, update);
  }
}

double sluice_adam_clip_factor(double max_norm, double norm) {
  if (max_norm <= 0.0) return 1.0;
  const double factor = max_norm / (norm + 1e-6);
  return factor < 1.0 ? factor : 1.0;
}

static sluice_status_t check_group(const sluice_adam_group_t* group, int64_t index) {
  SLUICE_TRY(sluice_adam_check(&group->rule));
  for (int64_t t = 0; t < group->num_tensors; ++t) {
    const int64_t number = group->tensors[t].step;
    SLUICE_TRY(SLUICE_REQUIRE(number >= 1,
                              "optimizer: tensor %lld of group %lld is at step %lld; step numbers begin at 1",
                              (long long)t, (long long)index, (long long)number));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_adam_check_step(const sluice_adam_step_t* step) {
  SLUICE_TRY(SLUICE_REQUIRE(isfinite(step->loss_scale) && step->loss_scale > 0.0,
                            "optimizer: loss_scale is %g; it must be finite and above 0", step->loss_scale));
  SLUICE_TRY(SLUICE_REQUIRE(isfinite(step->max_norm) && step->max_norm >= 0.0,
                            "optimizer: max_norm is %g; it must be finite and above 0, or 0 for no clipping",
                            step->max_norm));
  for (int64_t g = 0; g < step->num_groups; ++g) SLUICE_TRY(check_group(step->groups + g, g));
  return SLUICE_OK;
}

sluice_status_t sluice_adam_step(const sluice_adam_step_t* step, sluice_adam_outcome_t* out_outcome) {
  *out_outcome = (sluice_adam_outcome_t){.norm = 0.0};
  SLUICE_TRY(sluice_adam_check_step(step));
  if (step->looks_first || step->max_norm > 0.0) *out_outcome = sluice_adam_look(step);
  if (out_outcome->is_skipped) return SLUICE_OK;
  update_t update = {.step = step, .pieces = count_pieces(step)};
  update.grad_scale = sluice_adam_clip_factor(step->max_norm, out_outcome->norm) / step->loss_scale;
  sluice_threads_run(step->threads, threads_for(step, update.pieces), update_on_thread, &update);
  return SLUICE_OK;
}
