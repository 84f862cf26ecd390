// SPDX-License-Identifier: Apache-2.0
/* The public calls of pipelines. */
#include "sluice/pipeline.h"

#include <string.h>

#include "backend/base/structs.h"
#include "backend/base/text.h"
#include "backend/pipeline/layer_move.h"
#include "backend/pipeline/policy.h"
#include "backend/pipeline/run/run.h"
#include "capi/src/pipeline.h"

/* ---- structs ---- */

SLUICE_DEFINE_INIT(sluice_pipeline_config, .num_virtual = 1, .placement = -1, .separate_wgrad = -1, .receives_ahead = 1,
                   .num_replicas = 1, .replica = -1, .stage = -1)
SLUICE_DEFINE_INIT(sluice_pipeline_batch, .num_micro_batches = 1)

/* ---- policies by name ---- */

/* Returns whether a host may name the policy: evaluation has its own, and the baseline is only simulated. */
static int is_offered(int32_t policy) {
  return policy != SLUICE_POLICY_FORWARD_ONLY && policy != SLUICE_POLICY_DEEPSPEED;
}

const char* sluice_pipeline_policy_name(int32_t index) {
  for (int32_t policy = 0; policy < SLUICE_POLICY_COUNT; ++policy) {
    if (is_offered(policy) && index-- == 0) return sluice_policy(policy)->name;
  }
  return index == 0 ? sluice_policy_name(SLUICE_POLICY_OPEN) : NULL;
}

static sluice_status_t fail_policy(const char* name) {
  char names[256];
  sluice_text_t text = sluice_text(names, sizeof names);
  const char* known;
  for (int32_t i = 0; (known = sluice_pipeline_policy_name(i)) != NULL; ++i) {
    sluice_text_add(&text, "%s%s", i == 0 ? "" : ", ", known);
  }
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "pipeline: policy \"%s\" is not known; give one of %s", name, names);
}

sluice_status_t sluice_capi_policy(const char* name, int32_t* out_policy) {
  if (name == NULL) name = "backward_first";
  if (strcmp(name, sluice_policy_name(SLUICE_POLICY_OPEN)) == 0) {
    *out_policy = SLUICE_POLICY_OPEN;
    return SLUICE_OK;
  }
  for (int32_t policy = 0; policy < SLUICE_POLICY_COUNT; ++policy) {
    if (!is_offered(policy) || strcmp(sluice_policy(policy)->name, name) != 0) continue;
    *out_policy = policy;
    return SLUICE_OK;
  }
  return fail_policy(name);
}

sluice_status_t sluice_capi_simulated_policy(const char* name, int32_t* out_policy) {
  if (name == NULL || strcmp(name, sluice_policy(SLUICE_POLICY_DEEPSPEED)->name) != 0) {
    return sluice_capi_policy(name, out_policy);
  }
  *out_policy = SLUICE_POLICY_DEEPSPEED;
  return SLUICE_OK;
}

/* ---- create and destroy ---- */

static sluice_status_t read_config(const sluice_pipeline_config_t* config, sluice_pipeline_terms_t* out_terms) {
  SLUICE_READ_EXTENSIBLE(sluice_pipeline_config, c, config, sizeof c);
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

/* ---- a layer that moves during a batch ---- */

void sluice_layer_move_begin(int32_t role, int32_t to_lower, sluice_layer_move_t* out_move) {
  if (out_move != NULL) *out_move = sluice_live_begin(role, to_lower);
}

void sluice_layer_move_arrived(sluice_layer_move_t* move) {
  if (move != NULL) sluice_live_arrived(move);
}

void sluice_layer_move_heard(sluice_layer_move_t* move, uint64_t word) {
  if (move != NULL) sluice_live_heard(move, word);
}

int32_t sluice_layer_move_runs(sluice_layer_move_t* move, int32_t micro_batch, uint64_t word) {
  return move != NULL && sluice_live_forward(move, micro_batch, word);
}

uint64_t sluice_layer_move_activation_word(int32_t ran) { return sluice_live_activation_word(ran); }

uint64_t sluice_layer_move_gradient_word(const sluice_layer_move_t* move) {
  return move != NULL ? sluice_live_gradient_word(move) : 0;
}

void sluice_layer_move_ended(sluice_layer_move_t* move) {
  if (move != NULL) sluice_live_ended(move);
}

int32_t sluice_layer_move_is_final(const sluice_layer_move_t* move) {
  return move != NULL && sluice_live_is_final(move);
}

int32_t sluice_layer_move_receives(const sluice_layer_move_t* move) {
  return move != NULL && sluice_live_receives(move);
}
