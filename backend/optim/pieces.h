// SPDX-License-Identifier: Apache-2.0
/* The elements of many tensors as one line of pieces, which threads share. The boundaries of pieces depend only on the
 * tensors, so sums by piece do not depend on the number of threads. */
#pragma once

#include "backend/optim/adam.h"

enum { SLUICE_ADAM_PIECE = 1 << 15 }; /* elements; a tensor's last piece is shorter */

typedef void (*sluice_piece_fn_t)(void* user, const sluice_adam_group_t* group, const sluice_adam_tensor_t* tensor,
                                  int64_t first, int64_t count);

int64_t sluice_pieces_count(const sluice_adam_step_t* step);
/* Calls fn for each piece in [begin, end), in order. */
void sluice_pieces_walk(const sluice_adam_step_t* step, int64_t begin, int64_t end, sluice_piece_fn_t fn, void* user);
