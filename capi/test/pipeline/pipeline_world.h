// SPDX-License-Identifier: Apache-2.0
/* A small model on the ranks of a pipeline, which are threads: a chain of layers, one per virtual stage, whose
 * gradients accumulate in micro-batch order. The reference is the same model in one loop; both must have the same bits.
 * Shapes differ between micro-batches, and messages also contain integers, booleans and empty tensors. */
#pragma once

#include <pthread.h>
#include <string.h>

#include "sluice/pipeline.h"
#include "third_party/bazel/test.h"

enum {
  PW_MAX_RANKS = 8,
  PW_MAX_LAYERS = 8,
  PW_MAX_MICRO_BATCHES = 16,
  PW_MAX_ELEMENTS = 64,
  PW_WEIGHTS = 4,
  PW_MAX_BATCHES = 16,
  PW_MAX_EVENTS = 1024
};

/* Callbacks of the host, as numbers for tests that fail or count them. */
enum { PW_LOAD = 0, PW_FORWARD, PW_LOSS, PW_BACKWARD, PW_WEIGHT_GRAD, PW_REDUCE, PW_NUM_CALLS };

typedef struct pw_batch_s {
  int32_t num_micro_batches;
  int32_t forward_only;
} pw_batch_t;

typedef struct pw_layer_s {
  float weight[PW_WEIGHTS], grad[PW_WEIGHTS];
} pw_layer_t;

/* Tensors that a layer saves for a micro-batch. */
typedef struct pw_stash_s {
  float x[PW_MAX_ELEMENTS], y[PW_MAX_ELEMENTS], dy[PW_MAX_ELEMENTS], dx[PW_MAX_ELEMENTS];
  int64_t shape[2], id_shape[1], id[2], truth_shape[2], scalar[1];
  uint8_t truth[4];
  sluice_tensor_t out[3], back[2];
  int32_t is_out, is_back; /* the library has not yet released these results */
} pw_stash_t;

typedef struct pw_rank_s {
  struct pw_world_s* world;
  int32_t rank, stage;
  sluice_comm_t *parent, *comm;
  sluice_pipeline_t* pipeline;
  pw_layer_t layers[PW_MAX_LAYERS];
  float losses[PW_MAX_BATCHES][PW_MAX_MICRO_BATCHES];
  pw_stash_t stash[PW_MAX_LAYERS][PW_MAX_MICRO_BATCHES];
  int32_t calls[PW_NUM_CALLS];
  int32_t next_load[2];
  int32_t num_reduced[PW_MAX_LAYERS];       /* in the current batch */
  float reduced[PW_MAX_LAYERS][PW_WEIGHTS]; /* gradients as the callback saw them */
  int32_t num_wrong;                        /* errors, such as wrong received tensors */
  char wrong[128];                          /* the first error */
  int32_t is_in_callback;
  uint32_t random;
  int32_t batch; /* the current batch */
  sluice_status_t made;
  sluice_error_info_t made_error;
  sluice_status_t made_again;
  sluice_status_t ended[PW_MAX_BATCHES];
  sluice_error_info_t errors[PW_MAX_BATCHES];
  uint64_t took_ns[PW_MAX_BATCHES], returned_ns[PW_MAX_BATCHES];
  sluice_stage_event_t events[PW_MAX_BATCHES][PW_MAX_EVENTS];
  int64_t num_events[PW_MAX_BATCHES];
  sluice_pipeline_stats_t stats[PW_MAX_BATCHES];
  int32_t num_kept; /* over all batches */
  void* kept[PW_MAX_MICRO_BATCHES];
  const float* kept_data[PW_MAX_MICRO_BATCHES];
  float kept_first[PW_MAX_MICRO_BATCHES];
} pw_rank_t;

/* The options of a test. */
typedef struct pw_world_s {
  const char* transport; /* "local", "tcp", "tcp_at"; "none": one rank without a communicator */
  int32_t num_stages, num_replicas;
  int32_t num_pipelines; /* pipelines in sequence on the same communicator, which share the batches; 1 */
  int32_t num_batches;
  pw_batch_t batches[PW_MAX_BATCHES];
  sluice_pipeline_config_t config; /* pw_world_new sets defaults */
  int32_t max_delay_us;            /* largest random delay of callbacks */
  int32_t keeps;                   /* received tensors are kept until the pipeline is destroyed */
  /* Modifies a rank's config or batch before use; may be NULL. */
  void (*bend_config)(pw_rank_t* rank, sluice_pipeline_config_t* config);
  void (*bend_batch)(pw_rank_t* rank, sluice_pipeline_batch_t* batch);
  /* Called in each callback, which returns its status; may be NULL. */
  sluice_status_t (*in_call)(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op,
                             sluice_host_failure_t* out_failure);
  /* Modifies the outputs of forward. */
  void (*bend_output)(pw_rank_t* rank, const sluice_stage_call_t* op, sluice_stage_tensors_t* result);
  /* Called when the library has released a result. */
  void (*released)(pw_rank_t* rank, int32_t which, int32_t virtual_stage, int32_t micro_batch);
  void (*between)(pw_rank_t* rank); /* before each batch */
  void (*after)(pw_rank_t* rank);   /* before the pipeline is destroyed */
  uint32_t reduces;                 /* a bit for each rank with the callback */
  int32_t has_column;               /* replicas of a stage meet in callbacks */
  int32_t meets_in_reduce_alone;    /* only in reduce; else also in forward and backward */
  int32_t tries_again;              /* a failed creation is repeated with the unmodified config */
  int32_t (*is_interrupted)(pw_rank_t* rank);

  /* Results. */
  pw_rank_t ranks[PW_MAX_RANKS];
  pw_layer_t reference[PW_MAX_LAYERS];
  float reference_losses[PW_MAX_BATCHES][PW_MAX_MICRO_BATCHES];
  pthread_barrier_t meeting;
  pthread_mutex_t column_mutex;
  pthread_cond_t column_moved;
  int64_t column_op[PW_MAX_RANKS][2]; /* by stage: the current collective, and the number of ranks in it */
  int32_t column_left[PW_MAX_RANKS];
} pw_world_t;

/* p stages, one replica, v = 1, in_flight as the library chooses. Free: pw_world_free. */
pw_world_t* pw_world_new(const char* transport, int32_t num_stages);
void pw_world_add(pw_world_t* world, int32_t num_micro_batches, int32_t forward_only);
/* Runs all batches on all ranks, then the reference. Each rank restores its gradients after a failed batch, so
 * gradients are those of the successful batches. */
void pw_world_run(pw_world_t* world);
void pw_world_free(pw_world_t* world);

/* Records an error. */
void pw_wrong(pw_rank_t* rank, const char* format, ...) __attribute__((format(printf, 2, 3)));

/* ---- the model: layers of a few weights, whose rows differ between micro-batches ---- */

static inline int32_t pw_elements_of(int32_t micro_batch) { return 3 + 7 * (micro_batch % 5); }

static inline void pw_init_layer(pw_layer_t* layer, int32_t c) {
  for (int32_t w = 0; w < PW_WEIGHTS; ++w) layer->weight[w] = 0.5F + 0.125F * (float)((c * 3 + w * 5) % 7);
}

static inline void pw_make_input(float* x, int32_t batch, int32_t i) {
  for (int32_t e = 0; e < pw_elements_of(i); ++e) x[e] = 0.01F * (float)((batch * 31 + i * 17 + e * 13) % 101) - 0.5F;
}

static inline void pw_layer_forward(const pw_layer_t* layer, const float* x, float* y, int32_t n) {
  for (int32_t e = 0; e < n; ++e) y[e] = x[e] * layer->weight[e % PW_WEIGHTS] + 0.1F * x[e] * x[e];
}

static inline void pw_layer_backward(const pw_layer_t* layer, const float* x, const float* dy, float* dx, int32_t n) {
  for (int32_t e = 0; e < n; ++e) dx[e] = dy[e] * (layer->weight[e % PW_WEIGHTS] + 0.2F * x[e]);
}

static inline void pw_layer_weight_grad(pw_layer_t* layer, const float* x, const float* dy, int32_t n) {
  for (int32_t e = 0; e < n; ++e) layer->grad[e % PW_WEIGHTS] += dy[e] * x[e];
}

static inline float pw_loss_of(const float* y, int32_t n) {
  float sum = 0;
  for (int32_t e = 0; e < n; ++e) sum += 0.5F * y[e] * y[e];
  return sum;
}

static inline int32_t pw_num_layers(const pw_world_t* world) { return world->num_stages * world->config.num_virtual; }

/* Returns whether weight gradients are separate ops. */
static inline int32_t pw_is_split(const pw_world_t* world) {
  const char* policy = world->config.policy;
  if (world->config.separate_wgrad >= 0) return world->config.separate_wgrad;
  return policy != NULL && (strcmp(policy, "zero_bubble") == 0 || strcmp(policy, "v") == 0);
}

static inline int pw_is_v(const pw_world_t* world) {
  return world->config.placement == SLUICE_PIPELINE_V ||
         (world->config.policy != NULL && strcmp(world->config.policy, "v") == 0);
}

/* Returns the k-th layer of a stage. */
static inline int32_t pw_layer_of(const pw_world_t* world, int32_t stage, int32_t k) {
  const int32_t p = world->num_stages;
  return k * p + (pw_is_v(world) && k % 2 == 1 ? p - 1 - stage : stage);
}

/* ---- checks, which fail the test ---- */

/* For messages, such as "tcp, backward_first, p 3, v 1, L 2". */
static inline const char* pw_name(const pw_world_t* world) {
  static char name[160];
  (void)snprintf(name, sizeof name, "%s, %s, p %d, v %d, L %d, split %d", world->transport,
                 world->config.policy != NULL ? world->config.policy : "the default", world->num_stages,
                 world->config.num_virtual, world->config.in_flight, pw_is_split(world));
  return name;
}

/* No rank received a wrong tensor or a wrong call. */
static inline void assert_nothing_wrong(const pw_world_t* world) {
  for (int32_t r = 0; r < world->num_stages * world->num_replicas; ++r) {
    const pw_rank_t* rank = &world->ranks[r];
    if (rank->num_wrong > 0) fail_msg("%s: rank %d: %s (%d times)", pw_name(world), r, rank->wrong, rank->num_wrong);
  }
}

static inline void assert_status(const pw_world_t* world, int32_t r, int32_t batch, sluice_status_t status,
                                 const char* text) {
  const pw_rank_t* rank = &world->ranks[r];
  if (rank->ended[batch] != status || (text != NULL && strstr(rank->errors[batch].message, text) == NULL)) {
    fail_msg("%s: batch %d on rank %d ended with %s (%s), not with %s (%s)", pw_name(world), batch, r,
             sluice_status_name(rank->ended[batch]), rank->errors[batch].message, sluice_status_name(status),
             text != NULL ? text : "");
  }
}

static inline void assert_all_work(const pw_world_t* world, int32_t batch) {
  for (int32_t r = 0; r < world->num_stages * world->num_replicas; ++r) {
    const pw_rank_t* rank = &world->ranks[r];
    if (rank->made != SLUICE_OK) fail_msg("%s: rank %d: %s", pw_name(world), r, rank->made_error.message);
    assert_status(world, r, batch, SLUICE_OK, NULL);
  }
}

/* Losses of successful batches, and gradients, have the bits of the model in one loop. */
static inline void assert_same_bits(const pw_world_t* world) {
  const int32_t last = pw_num_layers(world) - 1;
  for (int32_t r = 0; r < world->num_stages * world->num_replicas; ++r) {
    const pw_rank_t* rank = &world->ranks[r];
    for (int32_t k = 0; k < world->config.num_virtual; ++k) {
      const int32_t c = pw_layer_of(world, rank->stage, k);
      if (memcmp(rank->layers[c].grad, world->reference[c].grad, sizeof rank->layers[c].grad) != 0) {
        fail_msg("%s: gradients of layer %d on rank %d differ: %.9g, not %.9g", pw_name(world), c, r,
                 (double)rank->layers[c].grad[0], (double)world->reference[c].grad[0]);
      }
      for (int32_t b = 0; c == last && b < world->num_batches; ++b) {
        if (rank->ended[b] != SLUICE_OK) continue;
        const size_t bytes = (size_t)world->batches[b].num_micro_batches * sizeof(float);
        if (memcmp(rank->losses[b], world->reference_losses[b], bytes) != 0) {
          fail_msg("%s: losses of batch %d on rank %d differ", pw_name(world), b, r);
        }
      }
    }
  }
}

/* The end of a case: nothing went wrong, bits are the same, and the world is freed. */
static inline void finish(pw_world_t* world) {
  assert_nothing_wrong(world);
  assert_same_bits(world);
  pw_world_free(world);
}
