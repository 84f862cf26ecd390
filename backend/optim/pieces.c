// SPDX-License-Identifier: Apache-2.0
#include "backend/optim/pieces.h"

#include "backend/base/math.h"

static int64_t pieces_of(const sluice_adam_tensor_t* tensor) {
  return sluice_ceil_div(tensor->count, SLUICE_ADAM_PIECE);
}

int64_t sluice_pieces_count(const sluice_adam_step_t* step) {
  int64_t pieces = 0;
  for (int64_t g = 0; g < step->num_groups; ++g) {
    for (int64_t t = 0; t < step->groups[g].num_tensors; ++t) pieces += pieces_of(step->groups[g].tensors + t);
  }
  return pieces;
}

void sluice_pieces_walk(const sluice_adam_step_t* step, int64_t begin, int64_t end, sluice_piece_fn_t fn, void* user) {
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
