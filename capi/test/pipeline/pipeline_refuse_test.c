// SPDX-License-Identifier: Apache-2.0
/* Errors if ranks disagree, and if arguments are wrong. */
#include "backend/base/test/refused.h"
#include "capi/test/pipeline/pipeline_world.h"

static const char* const transports[] = {"local", "tcp"};

/* ---- ranks disagree ---- */

static int32_t odd_rank, odd_m, odd_forward_only;

static void bend_batch(pw_rank_t* rank, sluice_pipeline_batch_t* batch) {
  if (rank->batch != 1 || rank->rank != odd_rank) return;
  if (odd_m >= 0) batch->num_micro_batches = odd_m;
  if (odd_forward_only >= 0) batch->forward_only = odd_forward_only;
}

static void try_odd(const char* transport, int32_t p, int32_t rank, int32_t m, int32_t forward_only, int32_t evaluates,
                    sluice_status_t status, const char* text) {
  odd_rank = rank, odd_m = m, odd_forward_only = forward_only;
  pw_world_t* world = pw_world_new(transport, p);
  world->bend_batch = bend_batch;
  pw_world_add(world, 4, 0);
  pw_world_add(world, 4, evaluates);
  pw_world_add(world, 4, 0);
  pw_world_run(world);
  for (int32_t r = 0; r < p; ++r) {
    const int is_alone = status != SLUICE_E_MISMATCH && r != rank;
    assert_status(world, r, 1, is_alone ? SLUICE_E_PEER_REFUSED : status, text);
  }
  assert_all_work(world, 0);
  assert_all_work(world, 2);
  finish(world);
}

TEST(Batch_RanksDiffer_IsAMismatchOnAll) {
  for (size_t t = 0; t < 2; ++t) {
    for (int32_t p = 2; p <= 3; ++p) {
      for (int32_t rank = 0; rank < p; ++rank) {
        try_odd(transports[t], p, rank, 3, -1, 0, SLUICE_E_MISMATCH, "the number of micro-batches is");
        try_odd(transports[t], p, rank, 6, -1, 0, SLUICE_E_MISMATCH, "the number of micro-batches is");
        try_odd(transports[t], p, rank, 3, -1, 1, SLUICE_E_MISMATCH, "the number of micro-batches is");
        try_odd(transports[t], p, rank, -1, 1, 0, SLUICE_E_MISMATCH, "forward_only");
        try_odd(transports[t], p, rank, 0, -1, 0, SLUICE_E_INVALID_ARGUMENT, "num_micro_batches is 0");
      }
    }
  }
}

static int32_t config_field;

static void bend_config(pw_rank_t* rank, sluice_pipeline_config_t* config) {
  static const int32_t limits[] = {1, 1, 1};
  if (rank->rank != 1) return;
  switch (config_field) {
    case 0: config->policy = "gpipe"; break;
    case 1: config->partition = "0,3,8"; break;
    case 2: config->num_virtual = 2; break;
    case 3: config->separate_wgrad = 1; break;
    case 4: config->in_flight = 2; break;
    case 5: config->in_flight_of = limits; break;
    case 6: config->receives_ahead = 0; break;
    case 7: config->stage = 0; break;
    case 8: config->policy = "fastest"; break;
    case 9: config->num_virtual = 0; break;
    case 10: config->memory_budget = 1; break;
    case 11: config->num_replicas = 2; break;
    default: config->policy = "adaptive"; break;
  }
}

TEST(Config_RanksDiffer_AllAreToldAndCommStaysUsable) {
  static const struct {
    sluice_status_t there, here;
    const char* text;
  } wanted[] = {
      {SLUICE_E_MISMATCH, SLUICE_E_MISMATCH, "policy is gpipe on rank 1 and backward_first on rank 0"},
      {SLUICE_E_MISMATCH, SLUICE_E_MISMATCH, "partition is \"0,3,8\" on rank 1 and \"0,4,8\" on rank 0"},
      {SLUICE_E_MISMATCH, SLUICE_E_MISMATCH, "num_virtual is 2 on rank 1"},
      {SLUICE_E_MISMATCH, SLUICE_E_MISMATCH, "separate_wgrad is 1 on rank 1"},
      {SLUICE_E_MISMATCH, SLUICE_E_MISMATCH, "in_flight is 2 on rank 1"},
      {SLUICE_E_MISMATCH, SLUICE_E_MISMATCH, "in_flight_of differs on ranks 1 and 0"},
      {SLUICE_E_MISMATCH, SLUICE_E_MISMATCH, "receives_ahead is 0 on rank 1"},
      {SLUICE_E_MISMATCH, SLUICE_E_MISMATCH, "ranks 0 and 1 are both stage 0"},
      {SLUICE_E_INVALID_ARGUMENT, SLUICE_E_PEER_REFUSED, "policy \"fastest\" is not known; give one of message_driven"},
      {SLUICE_E_INVALID_ARGUMENT, SLUICE_E_PEER_REFUSED, "num_virtual is 0"},
      {SLUICE_E_INVALID_ARGUMENT, SLUICE_E_PEER_REFUSED, "memory_budget needs activation_bytes"},
      {SLUICE_E_INVALID_ARGUMENT, SLUICE_E_PEER_REFUSED, "num_replicas is 2, which does not divide the 3 ranks"},
      {SLUICE_E_MISMATCH, SLUICE_E_MISMATCH, "policy is adaptive on rank 1 and backward_first on rank 0"},
  };
  for (size_t t = 0; t < 2; ++t) {
    for (config_field = 0; config_field < 13; ++config_field) {
      pw_world_t* world = pw_world_new(transports[t], 3);
      world->config.partition = "0,4,8";
      world->bend_config = bend_config;
      world->tries_again = 1;
      pw_world_add(world, 3, 0);
      pw_world_run(world);
      for (int32_t r = 0; r < 3; ++r) {
        const pw_rank_t* rank = &world->ranks[r];
        const sluice_status_t status = r == 1 ? wanted[config_field].there : wanted[config_field].here;
        if (rank->made != status || strstr(rank->made_error.message, wanted[config_field].text) == NULL) {
          fail_msg("field %d, rank %d: %s: %s", config_field, r, sluice_status_name(rank->made),
                   rank->made_error.message);
        }
        assert_int_equal(rank->made_again, SLUICE_OK);
      }
      for (int32_t r = 0; r < 3; ++r) assert_status(world, r, 0, SLUICE_OK, NULL);
      finish(world);
    }
  }
}

TEST(Callbacks_OneRankReduces_IsAMismatch) {
  pw_world_t* world = pw_world_new("local", 3);
  world->reduces = 1u << 1;
  pw_world_add(world, 3, 0);
  pw_world_run(world);
  for (int32_t r = 0; r < 3; ++r) {
    assert_int_equal(world->ranks[r].made, SLUICE_E_MISMATCH);
    assert_non_null(strstr(world->ranks[r].made_error.message, "whether callback reduce is given is 1 on rank 1"));
  }
  pw_world_free(world);
}

/* ---- arguments ---- */

static sluice_status_t do_nothing(void* user, const sluice_stage_call_t* op, sluice_stage_tensors_t* out_result,
                                  sluice_host_failure_t* out_failure) {
  (void)user, (void)op, (void)out_result, (void)out_failure;
  return SLUICE_OK;
}

TEST(Arguments_Wrong_AreRefused) {
  sluice_pipeline_callbacks_t callbacks = {.struct_size = sizeof callbacks, .forward = do_nothing};
  DEFAULTS(sluice_pipeline_config, config);
  sluice_pipeline_t* pipeline = NULL;
  REFUSED(sluice_pipeline_create(&config, NULL, &callbacks, NULL, NULL), BAD, "out_pipeline is NULL");
  REFUSED(sluice_pipeline_create(NULL, NULL, &callbacks, NULL, &pipeline), BAD, "sluice_pipeline_config_t");
  REFUSED(sluice_pipeline_create(&config, NULL, NULL, NULL, &pipeline), BAD, "sluice_pipeline_callbacks_t");
#define REFUSES(field, value, usual, status, text)                                           \
  field = (value);                                                                           \
  REFUSED(sluice_pipeline_create(&config, NULL, &callbacks, NULL, &pipeline), status, text); \
  field = (usual)
  REFUSES(config.struct_size, 8, sizeof config, SLUICE_E_ABI, "config_t");
  REFUSES(config.reserved, 1, 0, BAD, "reserved");
  REFUSES(config.separate_wgrad, 1, -1, BAD, "weight_grad is NULL");
  REFUSES(callbacks.forward, NULL, do_nothing, BAD, "forward is NULL");
  WORKS(sluice_pipeline_create(&config, NULL, &callbacks, NULL, &pipeline));
  DEFAULTS(sluice_pipeline_batch, batch);
  void* kept = NULL;
  int64_t count = 0;
  sluice_stage_tensors_t none = {.num_tensors = 0};
  REFUSED(sluice_pipeline_run_batch(NULL, &batch), BAD, "pipeline is NULL");
  REFUSED(sluice_pipeline_run_batch(pipeline, NULL), BAD, "sluice_pipeline_batch_t");
  REFUSED(sluice_pipeline_run_batch(pipeline, &batch), BAD, "backward is NULL");
  REFUSED(sluice_pipeline_keep(pipeline, &none, &kept), BAD, "of the callback that runs");
  REFUSED(sluice_pipeline_get_events(pipeline, NULL, 3, &count), BAD, "capacity is 3");
  batch.forward_only = 1;
  assert_int_equal(sluice_pipeline_run_batch(pipeline, &batch), SLUICE_OK);
  sluice_pipeline_abort(pipeline);
  REFUSED(sluice_pipeline_run_batch(pipeline, &batch), SLUICE_E_ABORTED, "was aborted");
  sluice_pipeline_destroy(pipeline);
  sluice_pipeline_destroy(NULL);
  sluice_pipeline_abort(NULL);
  sluice_pipeline_give_back(NULL);
}
