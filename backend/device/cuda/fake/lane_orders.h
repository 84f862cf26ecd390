// SPDX-License-Identifier: Apache-2.0
/* Runs kernels in several orders of lanes and warps, and checks their accesses.
 *
 * The kernels are built a second time, with -fsanitize=thread but without its runtime library: before each access to
 * memory the compiler then calls a function, which lane_orders.c defines. Each byte has a shadow of its last write and
 * its last reads in this launch. Two accesses, one of them a write, are a race if they are of different units, or of
 * different lanes without a warp_fence between them; shuffles order no memory. Writes of the same value are no race.
 * Every launch runs once in each order, from the same contents of memory, and must leave the same bits.
 *
 * Launches of the fake driver must access only what kernel_accesses.c lists: hazards between kernels are computed from
 * these lists.
 *
 * This file is also included before lanes.cu.h, whose hooks it defines. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef void (*sluice_ordered_kernel_fn_t)(int64_t warps, const void* args);

/* Runs a kernel of the second build in all orders. One thread at a time, as the fake driver's lock makes it. */
void sluice_fake_run_in_orders(const char* name, sluice_ordered_kernel_fn_t fn, int64_t warps, const void* args);
/* From now on the launches of the fake driver run so. Returns 0 and does nothing under ThreadSanitizer. */
int sluice_fake_orders_begin(void);
/* Returns the number of problems since then, or since the last call, and describes the first. */
int64_t sluice_fake_orders_end(char* out, size_t out_bytes);

/* Hooks of lanes.cu.h. lane_at returns the lane at a position of the order, -1 at the end. */
int sluice_fake_lane_at(int at);
int64_t sluice_fake_warp_at(int64_t at, int64_t warps);
void sluice_fake_at_unit(int64_t unit);
void sluice_fake_at_lane(int lane);
void sluice_fake_at_warp_op(void);
void sluice_fake_at_fence(void);

#ifdef __cplusplus
}
#define SLUICE_LANES(lane)        for (int lane##_at = 0, lane; (lane = sluice_fake_lane_at(lane##_at)) >= 0; ++lane##_at)
#define SLUICE_AT_LANE(lane)      sluice_fake_at_lane(lane)
#define SLUICE_AT_WARP_OP()       sluice_fake_at_warp_op()
#define SLUICE_AT_FENCE()         sluice_fake_at_fence()
#define SLUICE_AT_UNIT(unit)      sluice_fake_at_unit(unit)
#define SLUICE_WARP_AT(at, warps) sluice_fake_warp_at(at, warps)
#endif
