// SPDX-License-Identifier: Apache-2.0
/* Runs the batches of a pipeline's world on ranks that are threads, and the same model in one loop as the reference. */
#include "backend/comm/test/tcp_place.h"
#include "capi/test/pipeline/pipeline_world.h"

#include <stdlib.h>
#include <string.h>

#include "backend/base/clock.h"

#define SECOND_NS UINT64_C(1000000000)

/* ---- one process ---- */

static int all_ended_well(const pw_world_t* world, int32_t batch) {
  for (int32_t r = 0; r < world->num_stages * world->num_replicas; ++r) {
    if (world->ranks[r].ended[batch] != SLUICE_OK) return 0;
  }
  return 1;
}

static void run_reference(pw_world_t* world) {
  const int32_t layers = pw_num_layers(world);
  float x[PW_MAX_LAYERS + 1][PW_MAX_ELEMENTS], dy[PW_MAX_ELEMENTS], dx[PW_MAX_ELEMENTS];
  for (int32_t c = 0; c < layers; ++c) pw_init_layer(&world->reference[c], c);
  for (int32_t b = 0; b < world->num_batches; ++b) {
    if (!all_ended_well(world, b)) continue;
    for (int32_t i = 0; i < world->batches[b].num_micro_batches; ++i) {
      const int32_t n = pw_elements_of(i);
      pw_make_input(x[0], b, i);
      for (int32_t c = 0; c < layers; ++c) pw_layer_forward(&world->reference[c], x[c], x[c + 1], n);
      world->reference_losses[b][i] = pw_loss_of(x[layers], n);
      if (world->batches[b].forward_only) continue;
      memcpy(dy, x[layers], sizeof dy);
      for (int32_t c = layers - 1; c >= 0; --c) {
        pw_layer_backward(&world->reference[c], x[c], dy, dx, n);
        pw_layer_weight_grad(&world->reference[c], x[c], dy, n);
        memcpy(dy, dx, sizeof dy);
      }
    }
  }
}

/* ---- a rank ---- */

static void check_released(pw_rank_t* rank) {
  for (int32_t c = 0; c < PW_MAX_LAYERS; ++c) {
    for (int32_t i = 0; i < PW_MAX_MICRO_BATCHES; ++i) {
      if (rank->stash[c][i].is_out || rank->stash[c][i].is_back) {
        pw_wrong(rank, "a result of micro-batch %d in virtual stage %d is still lent", i, c);
      }
    }
  }
}

/* In a training batch, each layer is reduced once, when its gradients are complete. */
static void check_reduced(pw_rank_t* rank, int32_t forward_only) {
  const int32_t times = (int32_t)(rank->world->reduces >> rank->rank & 1) && !forward_only;
  for (int32_t k = 0; k < rank->world->config.num_virtual; ++k) {
    const int32_t c = pw_layer_of(rank->world, rank->stage, k);
    if (rank->num_reduced[c] != times) pw_wrong(rank, "layer %d was reduced %d times", c, rank->num_reduced[c]);
    if (times > 0 && memcmp(rank->reduced[c], rank->layers[c].grad, sizeof rank->reduced[c]) != 0) {
      pw_wrong(rank, "gradients of layer %d changed after their reduction", c);
    }
  }
}

static void put_grads_back(pw_rank_t* rank, const pw_layer_t* before) {
  for (int32_t c = 0; c < PW_MAX_LAYERS; ++c) memcpy(rank->layers[c].grad, before[c].grad, sizeof before[c].grad);
}

static void run_batch(pw_rank_t* rank, int32_t b) {
  pw_world_t* world = rank->world;
  pw_layer_t before[PW_MAX_LAYERS];
  memcpy(before, rank->layers, sizeof before);
  rank->batch = b;
  memset(rank->next_load, 0, sizeof rank->next_load);
  memset(rank->num_reduced, 0, sizeof rank->num_reduced);
  sluice_pipeline_batch_t batch;
  sluice_pipeline_batch_init(&batch, sizeof batch);
  batch.num_micro_batches = world->batches[b].num_micro_batches;
  batch.forward_only = world->batches[b].forward_only;
  if (world->bend_batch != NULL) world->bend_batch(rank, &batch);
  const uint64_t begin_ns = sluice_now_ns();
  rank->ended[b] = sluice_pipeline_run_batch(rank->pipeline, &batch);
  rank->returned_ns[b] = sluice_now_ns();
  rank->took_ns[b] = rank->returned_ns[b] - begin_ns;
  sluice_error_info_init(&rank->errors[b], sizeof rank->errors[b]);
  sluice_error_last(&rank->errors[b]);
  check_released(rank);
  if (rank->ended[b] == SLUICE_OK) check_reduced(rank, batch.forward_only);
  if (rank->ended[b] != SLUICE_OK) put_grads_back(rank, before);
  rank->stats[b].struct_size = sizeof rank->stats[b];
  if (sluice_pipeline_get_stats(rank->pipeline, &rank->stats[b]) != SLUICE_OK) pw_wrong(rank, "no stats");
  if (sluice_pipeline_get_events(rank->pipeline, rank->events[b], PW_MAX_EVENTS, &rank->num_events[b]) != SLUICE_OK) {
    pw_wrong(rank, "no events");
  }
}

static void close_kept(pw_rank_t* rank) {
  for (int32_t i = 0; i < PW_MAX_MICRO_BATCHES; ++i) pw_give_back(rank, i);
}

/* Runs the batches from `first` to before `end` with one pipeline. */
static void run_pipeline(pw_rank_t* rank, int32_t first, int32_t end) {
  pw_world_t* world = rank->world;
  sluice_pipeline_config_t config = world->config;
  if (world->bend_config != NULL) world->bend_config(rank, &config);
  const sluice_pipeline_callbacks_t given = pw_callbacks_of(rank);
  rank->made = sluice_pipeline_create(&config, rank->comm, &given, rank, &rank->pipeline);
  sluice_error_info_init(&rank->made_error, sizeof rank->made_error);
  sluice_error_last(&rank->made_error);
  if (rank->made != SLUICE_OK && world->tries_again) {
    rank->made_again = sluice_pipeline_create(&world->config, rank->comm, &given, rank, &rank->pipeline);
  }
  if (rank->pipeline == NULL) return;
  for (int32_t b = first; b < end; ++b) {
    if (world->between != NULL) world->between(rank);
    if (rank->pipeline == NULL) return;
    run_batch(rank, b);
  }
  if (world->after != NULL) world->after(rank);
  sluice_pipeline_destroy(rank->pipeline);
  rank->pipeline = NULL;
  close_kept(rank);
}

static void* run_rank(void* argument) {
  pw_rank_t* rank = argument;
  const pw_world_t* world = rank->world;
  const int32_t share = world->num_batches / world->num_pipelines;
  for (int32_t i = 0; i < world->num_pipelines; ++i) run_pipeline(rank, i * share, (i + 1) * share);
  return NULL;
}

/* ---- the world ---- */

pw_world_t* pw_world_new(const char* transport, int32_t num_stages) {
  pw_world_t* world = calloc(1, sizeof *world);
  if (world == NULL) abort();
  world->transport = transport;
  world->num_stages = num_stages;
  world->num_replicas = 1;
  world->num_pipelines = 1;
  world->timeout_ns = 120 * SECOND_NS;
  sluice_pipeline_config_init(&world->config, sizeof world->config);
  pthread_mutex_init(&world->column_mutex, NULL);
  pthread_cond_init(&world->column_moved, NULL);
  return world;
}

void pw_world_add(pw_world_t* world, int32_t num_micro_batches, int32_t forward_only) {
  world->batches[world->num_batches++] = (pw_batch_t){num_micro_batches, forward_only};
}

static sluice_local_group_t* open_comms(pw_world_t* world, int32_t num_ranks) {
  sluice_local_group_t* group = NULL;
  if (sluice_local_group_create(num_ranks, &group) != SLUICE_OK) abort();
  for (int32_t r = 0; r < num_ranks; ++r) {
    sluice_comm_config_t config;
    sluice_comm_config_init(&config, sizeof config);
    config.rank = r;
    config.world_size = num_ranks;
    config.timeout_ns = world->timeout_ns;
    if (sluice_comm_create_local(group, &config, &world->ranks[r].parent) != SLUICE_OK) abort();
  }
  return group;
}

static void* connect_rank(void* argument) {
  pw_rank_t* rank = argument;
  if (sluice_comm_create_tcp(rank->parent, NULL, &rank->comm) != SLUICE_OK) abort();
  return NULL;
}

/* Connects ranks without the local group, through an address. */
static char place[TCP_PLACE_BYTES];
static void* meet_rank(void* argument) {
  pw_rank_t* rank = argument;
  sluice_comm_config_t config;
  sluice_comm_config_init(&config, sizeof config);
  config.rank = rank->rank;
  config.world_size = sluice_comm_world_size(rank->parent);
  config.timeout_ns = rank->world->timeout_ns;
  if (sluice_comm_create_tcp_at(&config, place, tcp_place_secret, sizeof tcp_place_secret, NULL, &rank->comm) !=
      SLUICE_OK) {
    abort();
  }
  return NULL;
}

static void on_threads(pw_world_t* world, int32_t num_ranks, void* (*run)(void*)) {
  pthread_t threads[PW_MAX_RANKS];
  for (int32_t r = 0; r < num_ranks; ++r) {
    if (pthread_create(&threads[r], NULL, run, &world->ranks[r]) != 0) abort();
  }
  for (int32_t r = 0; r < num_ranks; ++r) pthread_join(threads[r], NULL);
}

void pw_world_run(pw_world_t* world) {
  const int32_t num_ranks = world->num_stages * world->num_replicas;
  if (num_ranks > PW_MAX_RANKS || pw_num_layers(world) > PW_MAX_LAYERS) abort();
  world->config.num_replicas = world->num_replicas;
  pthread_barrier_init(&world->meeting, NULL, (unsigned)num_ranks);
  sluice_local_group_t* group = open_comms(world, num_ranks);
  for (int32_t r = 0; r < num_ranks; ++r) {
    pw_rank_t* rank = &world->ranks[r];
    rank->world = world;
    rank->rank = r;
    rank->stage = r % world->num_stages;
    rank->replica = r / world->num_stages;
    rank->random = (uint32_t)(r * 7919 + 1);
    for (int32_t c = 0; c < PW_MAX_LAYERS; ++c) pw_init_layer(&rank->layers[c], c);
  }
  const int is_at = strcmp(world->transport, "tcp_at") == 0, is_tcp = is_at || strcmp(world->transport, "tcp") == 0;
  tcp_place_init(place);
  if (is_tcp) on_threads(world, num_ranks, is_at ? meet_rank : connect_rank);
  const int is_none = strcmp(world->transport, "none") == 0;
  for (int32_t r = 0; r < num_ranks && !is_tcp && !is_none; ++r) world->ranks[r].comm = world->ranks[r].parent;
  on_threads(world, num_ranks, run_rank);
  for (int32_t r = 0; r < num_ranks; ++r) {
    if (is_tcp) sluice_comm_destroy(world->ranks[r].comm);
    sluice_comm_destroy(world->ranks[r].parent);
  }
  sluice_local_group_destroy(group);
  pthread_barrier_destroy(&world->meeting);
  run_reference(world);
}

void pw_world_free(pw_world_t* world) { free(world); }
