// SPDX-License-Identifier: Apache-2.0
/* The public calls of pipelines. */
#include "sluice/pipeline.h"

#include <string.h>

#include "backend/base/check.h"
#include "backend/base/structs.h"
#include "backend/pipeline/policy_table.h"
#include "backend/pipeline/run/run.h"
#include "capi/src/pipeline_policy.h"

/* ---- structs ---- */

void sluice_pipeline_config_init(sluice_pipeline_config_t* out_config, size_t struct_size) {
  const sluice_pipeline_config_t defaults = {.num_virtual = 1,
                                             .placement = -1,
                                             .separate_wgrad = -1,
                                             .receives_ahead = 1,
                                             .num_replicas = 1,
                                             .replica = -1,
                                             .stage = -1};
  sluice_struct_init(out_config, struct_size, &defaults, sizeof defaults);
}

void sluice_pipeline_batch_init(sluice_pipeline_batch_t* out_batch, size_t struct_size) {
  const sluice_pipeline_batch_t defaults = {.num_micro_batches = 1};
  sluice_struct_init(out_batch, struct_size, &defaults, sizeof defaults);
}

/* ---- create and destroy ---- */

static sluice_status_t read_config(const sluice_pipeline_config_t* config, sluice_pipeline_terms_t* out_terms) {
  sluice_pipeline_config_t c;
  sluice_pipeline_config_init(&c, sizeof c);
  SLUICE_TRY(sluice_struct_copy(&c, sizeof c, config, sizeof c, "sluice_pipeline_config_t"));
  SLUICE_TRY(sluice_struct_check_next(c.next, "sluice_pipeline_config_t"));
  SLUICE_TRY(SLUICE_REQUIRE(c.reserved == 0, "pipeline: reserved is %d; set it to 0", c.reserved));
  int32_t number = 0;
  SLUICE_TRY(sluice_capi_policy(c.policy, &number));
  const sluice_policy_t* policy = sluice_policy(number); /* NULL: open */
  const int32_t placement = policy != NULL && policy->placement >= 0 ? policy->placement : SLUICE_PLACEMENT_LOOPED;
  const int32_t apart = policy != NULL && policy->separate_wgrad == 1;
  *out_terms = (sluice_pipeline_terms_t){
      .partition = c.partition,
      .policy = number,
      .num_virtual = c.num_virtual,
      .placement = c.placement == -1 ? placement : c.placement,
      .separate_wgrad = c.separate_wgrad == -1 ? apart : c.separate_wgrad != 0,
      .receives_ahead = c.receives_ahead,
      .in_flight = c.in_flight,
      .held = c.held,
      .num_replicas = c.num_replicas,
      .replica = c.replica,
      .stage = c.stage,
      .in_flight_of = c.in_flight_of,
      .byte_limit = c.memory_budget,
      .activation_bytes = c.activation_bytes,
      .held_bytes = c.held_bytes,
      .has_experts = c.has_experts,
  };
  return SLUICE_OK;
}

static sluice_status_t read_callbacks(const sluice_pipeline_callbacks_t* callbacks,
                                      sluice_pipeline_callbacks_t* out_callbacks) {
  memset(out_callbacks, 0, sizeof *out_callbacks);
  return sluice_struct_copy(out_callbacks, sizeof *out_callbacks, callbacks,
                            offsetof(sluice_pipeline_callbacks_t, weight_grad), "sluice_pipeline_callbacks_t");
}

sluice_status_t sluice_pipeline_create(const sluice_pipeline_config_t* config, sluice_comm_t* comm,
                                       const sluice_pipeline_callbacks_t* callbacks, void* user,
                                       sluice_pipeline_t** out_pipeline) {
  SLUICE_TRY(SLUICE_REQUIRE(out_pipeline != NULL, "sluice_pipeline_create: out_pipeline is NULL"));
  *out_pipeline = NULL;
  sluice_pipeline_terms_t terms = {.policy = 0};
  sluice_pipeline_callbacks_t read;
  sluice_status_t mine = read_config(config, &terms);
  if (mine == SLUICE_OK) mine = read_callbacks(callbacks, &read);
  if (mine == SLUICE_OK) terms.reduces = read.reduce != NULL;
  return sluice_pipeline_open(&terms, mine, comm, &read, user, out_pipeline);
}

void sluice_pipeline_destroy(sluice_pipeline_t* pipeline) { sluice_pipeline_close(pipeline); }

void sluice_pipeline_abort(sluice_pipeline_t* pipeline) { sluice_pipeline_stop(pipeline); }

/* ---- batches ---- */

sluice_status_t sluice_pipeline_run_batch(sluice_pipeline_t* pipeline, const sluice_pipeline_batch_t* batch) {
  SLUICE_TRY(SLUICE_REQUIRE(pipeline != NULL, "sluice_pipeline_run_batch: pipeline is NULL"));
  sluice_pipeline_batch_t b;
  sluice_pipeline_batch_init(&b, sizeof b);
  const sluice_status_t mine = sluice_struct_copy(&b, sizeof b, batch, sizeof b, "sluice_pipeline_batch_t");
  return sluice_pipeline_batch(pipeline, mine, b.num_micro_batches, b.forward_only);
}

sluice_status_t sluice_pipeline_keep(sluice_pipeline_t* pipeline, const sluice_stage_tensors_t* received,
                                     void** out_kept) {
  SLUICE_TRY(SLUICE_REQUIRE(pipeline != NULL && received != NULL && out_kept != NULL,
                            "sluice_pipeline_keep: pipeline, received and out_kept may not be NULL"));
  return sluice_pipeline_keep_tensors(pipeline, received, out_kept);
}

void sluice_pipeline_give_back(void* kept) { sluice_pipeline_release_kept(kept); }

/* ---- batch metadata ---- */

sluice_status_t sluice_pipeline_set_note(sluice_pipeline_t* pipeline, const double* numbers, int32_t count) {
  SLUICE_TRY(SLUICE_REQUIRE(pipeline != NULL, "sluice_pipeline_set_note: pipeline is NULL"));
  SLUICE_TRY(SLUICE_REQUIRE(count >= 0 && count <= SLUICE_PIPELINE_MAX_NOTE && (count == 0 || numbers != NULL),
                            "sluice_pipeline_set_note: count is %d and numbers is %s; give 0 to %d numbers", count,
                            numbers == NULL ? "NULL" : "given", SLUICE_PIPELINE_MAX_NOTE));
  return sluice_pipeline_give_note(pipeline, numbers, count);
}

sluice_status_t sluice_pipeline_get_note(sluice_pipeline_t* pipeline, int32_t rank, double* out_numbers,
                                         int32_t capacity, int32_t* out_count) {
  SLUICE_TRY(SLUICE_REQUIRE(pipeline != NULL && out_count != NULL,
                            "sluice_pipeline_get_note: pipeline and out_count may not be NULL"));
  SLUICE_TRY(SLUICE_REQUIRE(capacity >= 0 && (capacity == 0 || out_numbers != NULL),
                            "sluice_pipeline_get_note: capacity is %d and out_numbers is %s", capacity,
                            out_numbers == NULL ? "NULL" : "given"));
  return sluice_pipeline_read_note(pipeline, rank, out_numbers, capacity, out_count);
}

/* ---- reports ---- */

sluice_status_t sluice_pipeline_get_stats(sluice_pipeline_t* pipeline, sluice_pipeline_stats_t* out_stats) {
  SLUICE_TRY(SLUICE_REQUIRE(pipeline != NULL && out_stats != NULL,
                            "sluice_pipeline_get_stats: pipeline and out_stats may not be NULL"));
  SLUICE_TRY(sluice_struct_check_size(out_stats, "sluice_pipeline_stats_t"));
  sluice_pipeline_stats_t stats;
  memset(&stats, 0, sizeof stats);
  SLUICE_TRY(sluice_pipeline_read_stats(pipeline, &stats));
  sluice_struct_give(out_stats, &stats, sizeof stats);
  return SLUICE_OK;
}

sluice_status_t sluice_pipeline_get_events(sluice_pipeline_t* pipeline, sluice_stage_event_t* out_events,
                                           int64_t capacity, int64_t* out_count) {
  SLUICE_TRY(SLUICE_REQUIRE(pipeline != NULL && out_count != NULL,
                            "sluice_pipeline_get_events: pipeline and out_count may not be NULL"));
  SLUICE_TRY(SLUICE_REQUIRE(capacity >= 0 && (capacity == 0 || out_events != NULL),
                            "sluice_pipeline_get_events: capacity is %lld and out_events is %s", (long long)capacity,
                            out_events == NULL ? "NULL" : "given"));
  return sluice_pipeline_read_events(pipeline, out_events, capacity, out_count);
}

sluice_status_t sluice_pipeline_timeline_json(sluice_pipeline_t* pipeline, int32_t which, char* text,
                                              uint64_t* inout_bytes) {
  SLUICE_TRY(SLUICE_REQUIRE(pipeline != NULL && inout_bytes != NULL, "sluice_pipeline_timeline_json: %s is NULL",
                            pipeline == NULL ? "pipeline" : "inout_bytes"));
  SLUICE_TRY(SLUICE_REQUIRE(which == SLUICE_PIPELINE_MEASURED || which == SLUICE_PIPELINE_PREDICTED,
                            "sluice_pipeline_timeline_json: which is %d; give 0 (measured) or 1 (predicted)", which));
  return sluice_pipeline_write_batch(pipeline, which, text, inout_bytes);
}
