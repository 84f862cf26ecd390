// SPDX-License-Identifier: Apache-2.0
/* Ranks of a pipeline's world, and the options of a test. */
#pragma once

#include <pthread.h>

#include "sluice/pipeline.h"

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
  int32_t rank, stage, replica;
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
  uint64_t timeout_ns;
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
