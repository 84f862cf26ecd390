// SPDX-License-Identifier: Apache-2.0
/* The public calls that create and destroy pipelines, and keep arrivals for a host. */
#include <stddef.h>

#include "backend/base/hash.h"
#include "backend/base/structs.h"
#include "backend/pipeline/policy.h"
#include "backend/pipeline/run/state.h"

/* The peers' programs limit what they may send before this rank asks for it; for a faulty peer, this machine's memory
 * is the limit. */
#define MAX_UNEXPECTED_BYTES (UINT64_MAX / 2)

static sluice_pipeline_t* new_pipeline(int32_t num_ranks) {
  sluice_pipeline_t* pipeline = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *pipeline, "pipeline");
  if (pipeline == NULL) return NULL;
  const uint64_t bytes = (uint64_t)num_ranks * sizeof *pipeline->peers;
  pipeline->peers = sluice_alloc_zeroed(sluice_process_allocator(), bytes, "pipeline: peers");
  pipeline->orders = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *pipeline->orders, "pipeline: orders");
  if (pipeline->peers == NULL || pipeline->orders == NULL) {
    sluice_free(sluice_process_allocator(), pipeline->peers, bytes);
    sluice_free(sluice_process_allocator(), pipeline->orders, sizeof *pipeline->orders);
    sluice_free(sluice_process_allocator(), pipeline, sizeof *pipeline);
    return NULL;
  }
  atomic_flag_clear(&pipeline->is_busy);
  atomic_init(&pipeline->is_aborted, 0);
  pipeline->stopper = -1;
  return pipeline;
}

/* Either all ranks have an endpoint, or none. */
static sluice_status_t connect(sluice_pipeline_t* pipeline) {
  sluice_stage_endpoint_t* endpoint = pipeline->endpoint;
  const sluice_pipeline_spec_t* spec = &pipeline->agreed.spec;
  const sluice_messages_config_t config = {
      .fingerprint = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, spec, sizeof *spec),
      .max_unexpected_bytes = MAX_UNEXPECTED_BYTES,
      .allocator = &endpoint->memory,
  };
  return sluice_messages_open(endpoint->comm, &config, &endpoint->messages);
}

static sluice_status_t open_with(sluice_pipeline_t* pipeline, const sluice_pipeline_terms_t* terms,
                                 sluice_status_t mine, sluice_comm_t* comm) {
  if (mine == SLUICE_OK && comm != NULL) {
    pipeline->endpoint = sluice_stage_endpoint_new(comm);
    if (pipeline->endpoint == NULL) mine = sluice_alloc_status();
  }
  SLUICE_TRY(sluice_stage_shake_hands(terms, mine, comm, &pipeline->agreed));
  if (comm != NULL) SLUICE_TRY(connect(pipeline));
  if (pipeline->agreed.replica == 0) { /* the leader, or a rank without replicas, receives no orders */
    sluice_free(sluice_process_allocator(), pipeline->orders, sizeof *pipeline->orders);
    pipeline->orders = NULL;
  }
  return SLUICE_OK;
}

SLUICE_DEFINE_INIT(sluice_pipeline_config, .num_virtual = 1, .placement = -1, .separate_wgrad = -1, .receives_ahead = 1,
                   .num_replicas = 1, .replica = -1, .stage = -1)

static sluice_status_t read_terms(const sluice_pipeline_config_t* config, sluice_pipeline_terms_t* out) {
  sluice_pipeline_config_t* c = &out->config;
  SLUICE_READ_INTO(sluice_pipeline_config, c, config, sizeof *c);
  SLUICE_TRY(SLUICE_REQUIRE(c->reserved == 0, "pipeline: reserved is %d; set it to 0", c->reserved));
  SLUICE_TRY(sluice_policy_find(c->policy, 0, &out->policy));
  sluice_policy_fill(out->policy, &c->placement, &c->separate_wgrad);
  return SLUICE_OK;
}

static sluice_status_t read_callbacks(const sluice_pipeline_callbacks_t* callbacks, sluice_pipeline_terms_t* terms,
                                      sluice_pipeline_callbacks_t* out) {
  SLUICE_TRY(sluice_struct_copy(out, sizeof *out, callbacks, offsetof(sluice_pipeline_callbacks_t, weight_grad),
                                "sluice_pipeline_callbacks_t"));
  terms->reduces = out->reduce != NULL;
  SLUICE_TRY(SLUICE_REQUIRE(out->forward != NULL, "pipeline: callback forward is NULL"));
  return SLUICE_REQUIRE(!terms->config.separate_wgrad || out->weight_grad != NULL,
                        "pipeline: weight gradients are separate ops, but callback weight_grad is NULL; set it");
}

sluice_status_t sluice_pipeline_create(const sluice_pipeline_config_t* config, sluice_comm_t* comm,
                                       const sluice_pipeline_callbacks_t* callbacks, void* user,
                                       sluice_pipeline_t** out_pipeline) {
  SLUICE_TRY(SLUICE_REQUIRE(out_pipeline != NULL, "sluice_pipeline_create: out_pipeline is NULL"));
  *out_pipeline = NULL;
  sluice_pipeline_terms_t terms = {.policy = 0};
  sluice_pipeline_callbacks_t own = {.struct_size = 0};
  sluice_status_t mine = read_terms(config, &terms);
  if (mine == SLUICE_OK) mine = read_callbacks(callbacks, &terms, &own);
  const int32_t num_ranks = comm != NULL ? comm->world_size : 1;
  sluice_pipeline_t* pipeline = NULL;
  if (mine == SLUICE_OK) {
    pipeline = new_pipeline(num_ranks);
    if (pipeline == NULL) mine = sluice_alloc_status();
  }
  if (pipeline == NULL) { /* the other ranks must still be told */
    sluice_stage_handshake_t nothing;
    return sluice_stage_shake_hands(&terms, mine, comm, &nothing);
  }
  pipeline->callbacks = own;
  pipeline->user = user;
  sluice_status_t status = open_with(pipeline, &terms, mine, comm);
  if (status != SLUICE_OK) {
    sluice_error_info_t why;
    sluice_error_capture(&why);
    pipeline->agreed.num_ranks = num_ranks;
    sluice_pipeline_destroy(pipeline);
    return sluice_error_adopt(&why);
  }
  *out_pipeline = pipeline;
  return SLUICE_OK;
}

void sluice_pipeline_destroy(sluice_pipeline_t* pipeline) {
  if (pipeline == NULL) return;
  const uint64_t peer_bytes = (uint64_t)pipeline->agreed.num_ranks * sizeof *pipeline->peers;
  for (int32_t i = 0; i < 2; ++i) sluice_stage_plan_free(&pipeline->plans[i]);
  sluice_stage_endpoint_close(pipeline->endpoint);
  for (int32_t i = 0; i < 2 * pipeline->agreed.num_ranks; ++i) {
    sluice_batch_metadata_free(&pipeline->peers[i / 2].notes[i % 2]);
  }
  sluice_free(sluice_process_allocator(), pipeline->peers, peer_bytes);
  sluice_free(sluice_process_allocator(), pipeline->orders, sizeof *pipeline->orders);
  sluice_stage_handshake_free(&pipeline->agreed);
  sluice_free(sluice_process_allocator(), pipeline, sizeof *pipeline);
}

void sluice_pipeline_abort(sluice_pipeline_t* pipeline) {
  if (pipeline == NULL) return;
  atomic_store(&pipeline->is_aborted, 1);
  if (pipeline->endpoint != NULL) sluice_messages_abort(pipeline->endpoint->messages);
}

/* ---- arrivals ---- */

sluice_status_t sluice_pipeline_keep(sluice_pipeline_t* pipeline, const sluice_stage_tensors_t* received,
                                     void** out_kept) {
  SLUICE_TRY(SLUICE_REQUIRE(pipeline != NULL && received != NULL && out_kept != NULL,
                            "sluice_pipeline_keep: pipeline, received and out_kept may not be NULL"));
  *out_kept = NULL;
  sluice_stage_value_t* value = NULL;
  if (pipeline->input_value != NULL && received == &pipeline->input_value->view) value = pipeline->input_value;
  if (pipeline->output_grad_value != NULL && received == &pipeline->output_grad_value->view) {
    value = pipeline->output_grad_value;
  }
  SLUICE_TRY(SLUICE_REQUIRE(value != NULL,
                            "sluice_pipeline_keep: give call->input or call->output_grad of the callback that runs"));
  if (value->arrival == NULL || value->bytes == 0) return SLUICE_OK;
  sluice_stage_kept_t* kept;
  SLUICE_TRY(sluice_stage_value_keep(value, pipeline->endpoint, &kept));
  *out_kept = kept;
  return SLUICE_OK;
}

void sluice_pipeline_give_back(void* kept) { sluice_stage_kept_release(kept); }
