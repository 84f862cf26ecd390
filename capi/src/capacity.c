// SPDX-License-Identifier: Apache-2.0
/* Counts the routes that layers with a capacity have dropped. */
#include "backend/moe/run/capacity.h"

#include "backend/base/structs.h"
#include "capi/src/check_layer.h"

SLUICE_DEFINE_INIT(sluice_capacity_report, 0)

static int32_t expert_at(const sluice_moe_t* moe, int64_t place) {
  for (int32_t e = 0; e < moe->shape.config.num_experts; ++e) {
    if (moe->expert_position[e] == place) return e;
  }
  return -1;
}

static void fill_report(const sluice_moe_t* moe, const int64_t* drop_counters, sluice_capacity_report_t* out) {
  out->num_forwards = drop_counters[SLUICE_DROP_COUNTER_FORWARDS];
  out->num_routes = drop_counters[SLUICE_DROP_COUNTER_ROUTES];
  out->num_dropped = drop_counters[SLUICE_DROP_COUNTER_DROPPED];
  out->most_rows = drop_counters[SLUICE_DROP_COUNTER_MOST] >> 32;
  out->most_expert = out->most_rows > 0 ? expert_at(moe, drop_counters[SLUICE_DROP_COUNTER_MOST] & INT32_MAX) : -1;
  out->bad_route = drop_counters[SLUICE_DROP_COUNTER_BAD] - 1;
}

static sluice_status_t judge(const sluice_moe_t* moe, const sluice_capacity_report_t* r) {
  const sluice_moe_config_t* c = &moe->shape.config;
  if (r->bad_route >= 0) {
    return SLUICE_FAIL_PEER(SLUICE_E_INVALID_ARGUMENT, moe->context->rank, -1,
                            "layer %d, rank %d: expert_ids[%lld, %lld] was out of range and dropped; ids lie in [0, "
                            "%d), or -1 to drop the route",
                            c->layer_id, moe->context->rank, (long long)(r->bad_route / c->top_k),
                            (long long)(r->bad_route % c->top_k), c->num_experts);
  }
  if (r->num_dropped == 0) return SLUICE_OK;
  return SLUICE_FAIL_PEER(SLUICE_E_CAPACITY, moe->context->rank, -1,
                          "layer %d, rank %d: %lld of %lld routes in %lld forwards were beyond the capacity and "
                          "dropped: expert %d would have had %lld rows in one chunk, capacity_rows is %lld; raise it, "
                          "or limit the routes of each expert in the gate",
                          c->layer_id, moe->context->rank, (long long)r->num_dropped, (long long)r->num_routes,
                          (long long)r->num_forwards, r->most_expert, (long long)r->most_rows,
                          (long long)c->capacity_rows);
}

static sluice_status_t take(sluice_moe_t* moe, sluice_stream_t stream, sluice_capacity_report_t* report) {
  int64_t drop_counters[SLUICE_NUM_DROP_COUNTERS];
  if (moe->capacity == NULL) {
    return SLUICE_FAIL(SLUICE_E_STATE, "layer %d: exchange_mode is exact, so no routes are dropped or counted",
                       moe->shape.config.layer_id);
  }
  SLUICE_TRY(sluice_check_stream(moe, stream));
  SLUICE_TRY(sluice_capacity_take_drop_counters(moe, stream, drop_counters));
  fill_report(moe, drop_counters, report);
  return SLUICE_OK;
}

sluice_status_t sluice_moe_take_capacity_report(sluice_moe_t* moe, sluice_stream_t stream,
                                                sluice_capacity_report_t* out_report) {
  SLUICE_TRY(SLUICE_REQUIRE(moe != NULL && out_report != NULL, "sluice_moe_take_capacity_report: %s is NULL",
                            moe == NULL ? "moe" : "out_report"));
  SLUICE_TRY(sluice_struct_check_size(out_report, "sluice_capacity_report_t"));
  sluice_capacity_report_t report;
  sluice_capacity_report_init(&report, sizeof report);
  SLUICE_TRY(sluice_engine_enter(moe->context, "sluice_moe_take_capacity_report"));
  sluice_status_t status = take(moe, stream, &report);
  sluice_engine_leave(moe->context);
  if (status != SLUICE_OK) return status;
  sluice_struct_give(out_report, &report, sizeof report);
  return judge(moe, &report);
}
