// SPDX-License-Identifier: Apache-2.0
/* Divides rows among the chunks of a pass if they may be cut anywhere: the first and the last chunk get half as many as
 * each other one.
 *
 * Nothing overlaps the first dispatch and the last combine, so with equal chunks 1/n of the exchanges is never hidden
 * at either end; with half chunks at the ends it is 1/(2 (n - 1)). Three such chunks hide as much as four equal ones,
 * and GEMMs keep more rows. Half is the right size for a pass whose exchanges take up to half of its computation: GEMMs
 * of half a chunk then still cover the dispatch of a whole one. */
#pragma once

#include <stdint.h>

/* Returns the first row of chunk `chunk` of n, 0 <= chunk <= n, in [0, rows]; n >= 1. */
int64_t sluice_uneven_chunk_start(int64_t rows, int32_t chunk, int32_t num_chunks);

/* Returns the share of all rows in chunk `chunk`: the n shares sum to 1. */
double sluice_uneven_chunk_share(int32_t chunk, int32_t num_chunks);
