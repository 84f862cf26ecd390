// SPDX-License-Identifier: Apache-2.0
/* The public calls of swaps: read the structs, then call backend/swap. */
#include "sluice/swap.h"

#include "backend/base/alloc.h"
#include "backend/base/structs.h"
#include "backend/swap/order.h"
#include "backend/swap/run/run.h"

SLUICE_DEFINE_INIT(sluice_swap_config, 0)
SLUICE_DEFINE_INIT(sluice_swap_workload, .num_micro_batches = 1, .in_flight = 1)

static sluice_status_t check_config(const sluice_swap_config_t* c) {
  SLUICE_TRY(SLUICE_REQUIRE(c->num_layers >= 1 && c->num_layers <= 1 << 16 && c->swapped != NULL,
                            "sluice_swap_config_t: num_layers is %d; give 1 to 65536, and swapped for each of them",
                            c->num_layers));
  SLUICE_TRY(
      SLUICE_REQUIRE(c->budget_bytes > 0,
                     "sluice_swap_config_t: budget_bytes is 0; give the bytes that may be swapped out at one time"));
  SLUICE_TRY(SLUICE_REQUIRE(c->path == NULL || c->path[0] != 0,
                            "sluice_swap_config_t: path is empty; give one, or NULL "
                            "for host memory"));
  SLUICE_TRY(SLUICE_REQUIRE(c->bytes_per_second >= 0, "sluice_swap_config_t: bytes_per_second is %g; give a rate, or 0",
                            c->bytes_per_second));
  return SLUICE_REQUIRE(c->reserved == 0, "sluice_swap_config_t: reserved is %d; set it to 0", c->reserved);
}

sluice_status_t sluice_swap_create(const sluice_swap_config_t* config, sluice_swap_t** out_swap) {
  SLUICE_TRY(SLUICE_REQUIRE(out_swap != NULL, "sluice_swap_create: out_swap is NULL"));
  *out_swap = NULL;
  SLUICE_READ_EXTENSIBLE(sluice_swap_config, c, config, sizeof c);
  SLUICE_TRY(check_config(&c));
  return sluice_swapper_open(&c, out_swap);
}

void sluice_swap_destroy(sluice_swap_t* swap) { sluice_swapper_close(swap); }

sluice_status_t sluice_swap_reach(sluice_swap_t* swap, int32_t event, int64_t micro_batch, int32_t layer,
                                  sluice_swap_op_t* ops, int32_t room, int32_t* out_count) {
  SLUICE_TRY(SLUICE_REQUIRE(swap != NULL && ops != NULL && out_count != NULL,
                            "sluice_swap_reach: swap, ops and out_count may not be NULL"));
  *out_count = 0;
  return sluice_swapper_reach(swap, event, micro_batch, layer, ops, room, out_count);
}

sluice_status_t sluice_swap_put(sluice_swap_t* swap, const void* data, uint64_t bytes, int64_t* out_ticket) {
  SLUICE_TRY(SLUICE_REQUIRE(swap != NULL && data != NULL && out_ticket != NULL,
                            "sluice_swap_put: swap, data and out_ticket may not be NULL"));
  *out_ticket = 0;
  SLUICE_TRY(SLUICE_REQUIRE(bytes > 0, "sluice_swap_put: bytes is 0"));
  return sluice_swapper_put(swap, data, bytes, out_ticket);
}

sluice_status_t sluice_swap_settle(sluice_swap_t* swap, int64_t ticket) {
  SLUICE_TRY(SLUICE_REQUIRE(swap != NULL, "sluice_swap_settle: swap is NULL"));
  return sluice_swapper_settle(swap, ticket);
}

sluice_status_t sluice_swap_prefetch(sluice_swap_t* swap, int64_t ticket, void* to) {
  SLUICE_TRY(SLUICE_REQUIRE(swap != NULL && to != NULL, "sluice_swap_prefetch: swap and to may not be NULL"));
  return sluice_swapper_prefetch(swap, ticket, to);
}

sluice_status_t sluice_swap_take(sluice_swap_t* swap, int64_t ticket) {
  SLUICE_TRY(SLUICE_REQUIRE(swap != NULL, "sluice_swap_take: swap is NULL"));
  return sluice_swapper_take(swap, ticket);
}

void sluice_swap_release(sluice_swap_t* swap, int64_t ticket) {
  if (swap != NULL) sluice_swapper_release(swap, ticket);
}

void sluice_swap_reset(sluice_swap_t* swap) {
  if (swap != NULL) sluice_swapper_reset(swap);
}

sluice_status_t sluice_swap_get_stats(sluice_swap_t* swap, sluice_swap_stats_t* out_stats) {
  SLUICE_TRY(
      SLUICE_REQUIRE(swap != NULL && out_stats != NULL, "sluice_swap_get_stats: swap and out_stats may not be NULL"));
  SLUICE_TRY(sluice_struct_check_size(out_stats, "sluice_swap_stats_t"));
  sluice_swap_stats_t stats;
  sluice_swapper_read_stats(swap, &stats);
  sluice_struct_give(out_stats, &stats, sizeof stats);
  return SLUICE_OK;
}

sluice_status_t sluice_swap_predict(const sluice_swap_workload_t* workload, sluice_swap_prediction_t* out_prediction) {
  SLUICE_TRY(SLUICE_REQUIRE(out_prediction != NULL, "sluice_swap_predict: out_prediction is NULL"));
  SLUICE_TRY(sluice_struct_check_size(out_prediction, "sluice_swap_prediction_t"));
  SLUICE_READ_EXTENSIBLE(sluice_swap_workload, w, workload, sizeof w);
  sluice_swap_prediction_t prediction = {.seconds = 0};
  SLUICE_TRY(sluice_swap_simulate(&w, sluice_process_allocator(), &prediction));
  sluice_struct_give(out_prediction, &prediction, sizeof prediction);
  return SLUICE_OK;
}
