// SPDX-License-Identifier: Apache-2.0
#include "backend/optim/lines.h"

#include "backend/base/math.h"

static void add_tensors(sluice_lines_t* lines, const sluice_adam_group_t* group) {
  for (int64_t t = 0; t < group->num_tensors; ++t) {
    const sluice_adam_tensor_t* tensor = group->tensors + t;
    if (tensor->count == 0) continue;
    lines->tensors[lines->num_tensors++] =
        (sluice_line_tensor_t){tensor, group, lines->num_elements, lines->num_pieces};
    lines->num_elements += tensor->count;
    lines->num_pieces += sluice_ceil_div(tensor->count, SLUICE_ADAM_PIECE);
  }
}

sluice_status_t sluice_lines_make(const sluice_adam_group_t* groups, int64_t num_groups, sluice_comm_t* const* comms,
                                  sluice_allocator_t* allocator, sluice_lines_t* out_lines) {
  int64_t tensors = 0;
  for (int64_t g = 0; g < num_groups; ++g) tensors += groups[g].num_tensors;
  sluice_lines_t lines = {.num_lines = 0};
  lines.bytes = (uint64_t)num_groups * (sizeof *lines.comms + sizeof *lines.counts + sizeof *lines.first_pieces) +
                sizeof *lines.first_pieces + (uint64_t)tensors * sizeof *lines.tensors;
  lines.block = sluice_alloc(allocator, lines.bytes, "optimizer: the lines of a step");
  if (lines.block == NULL) return sluice_alloc_status();
  lines.comms = lines.block;
  lines.counts = (int64_t*)(void*)(lines.comms + num_groups);
  lines.first_pieces = lines.counts + num_groups;
  lines.tensors = (sluice_line_tensor_t*)(void*)(lines.first_pieces + num_groups + 1);
  for (int64_t g = 0; g < num_groups; ++g) {
    sluice_comm_t* comm = comms != NULL ? comms[g] : NULL;
    const int continues = lines.num_lines > 0 && lines.comms[lines.num_lines - 1] == comm;
    if (!continues) {
      lines.comms[lines.num_lines] = comm;
      lines.first_pieces[lines.num_lines] = lines.num_pieces;
      lines.counts[lines.num_lines++] = 0;
    }
    const int64_t before = lines.num_elements;
    add_tensors(&lines, groups + g);
    lines.counts[lines.num_lines - 1] += lines.num_elements - before;
  }
  lines.first_pieces[lines.num_lines] = lines.num_pieces;
  *out_lines = lines;
  return SLUICE_OK;
}

void sluice_lines_free(sluice_lines_t* lines, sluice_allocator_t* allocator) {
  sluice_free(allocator, lines->block, lines->bytes);
  lines->block = NULL;
}

/* Returns the last tensor that begins at or before an element (or a piece). */
static const sluice_line_tensor_t* find(const sluice_lines_t* lines, int64_t value, int is_piece) {
  int64_t low = 0, high = lines->num_tensors;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    const sluice_line_tensor_t* at = lines->tensors + middle;
    if ((is_piece ? at->first_piece : at->first) <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return lines->tensors + low;
}

sluice_line_run_t sluice_lines_run(const sluice_lines_t* lines, int64_t at, int64_t end) {
  const sluice_line_tensor_t* of = find(lines, at, 0);
  const int64_t first = at - of->first;
  return (sluice_line_run_t){of, first, sluice_min(of->tensor->count - first, end - at)};
}

sluice_line_run_t sluice_lines_piece(const sluice_lines_t* lines, int64_t piece) {
  const sluice_line_tensor_t* of = find(lines, piece, 1);
  const int64_t first = (piece - of->first_piece) * SLUICE_ADAM_PIECE;
  return (sluice_line_run_t){of, first, sluice_min(SLUICE_ADAM_PIECE, of->tensor->count - first)};
}

int64_t sluice_lines_pieces_before(const sluice_lines_t* lines, int64_t at) {
  if (at >= lines->num_elements) return lines->num_pieces;
  const sluice_line_tensor_t* of = find(lines, at, 0);
  return of->first_piece + (at - of->first) / SLUICE_ADAM_PIECE;
}
