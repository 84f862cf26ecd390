// SPDX-License-Identifier: Apache-2.0
/* The table of the including file's instruction set. */
static const sluice_kernels_t table = {
    .gather_rows = gather_rows,
    .move_rows = move_rows,
    .combine_rows = combine_rows,
    .add_bias = add_bias,
    .dot_rows = dot_rows,
    .sum_columns = sum_columns,
    .round_rows = round_rows,
    .scale_rows = scale_rows,
    .unit_forward = unit_forward,
    .unit_backward = unit_backward,
    .gather_scalars = gather_scalars,
    .spread_scalars = spread_scalars,
};
