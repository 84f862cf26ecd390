// SPDX-License-Identifier: Apache-2.0
/* Runs the batches of a pipeline's world on ranks that are threads, whose callbacks check their calls and compute, and
 * the same model in one loop as the reference. */
#include "capi/test/pipeline/pipeline_world.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/comm/test/tcp_place.h"

#define TIMEOUT_NS UINT64_C(120000000000)
#define BOOL_CODE  6 /* DLPack's code, which the library sends without interpreting it */

/* ---- received tensors ---- */

void pw_wrong(pw_rank_t* rank, const char* format, ...) {
  if (rank->num_wrong++ > 0) return;
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(rank->wrong, sizeof rank->wrong, format, arguments);
  va_end(arguments);
}

static void check_dense(pw_rank_t* rank, const sluice_tensor_t* t, int32_t code, int32_t bits, int64_t elements) {
  int64_t count = 1;
  for (int32_t d = 0; d < t->ndim; ++d) count *= t->shape[d];
  if (t->type_code != code || t->type_bits != bits || count != elements || t->device_type != SLUICE_DEVICE_CPU) {
    pw_wrong(rank, "a tensor of type %d, %d bits, %lld elements arrived for %d, %d, %lld", t->type_code, t->type_bits,
             (long long)count, code, bits, (long long)elements);
  }
}

static void check_input(pw_rank_t* rank, const sluice_stage_call_t* op) {
  const sluice_stage_tensors_t* in = op->input;
  const int32_t i = op->micro_batch, n = pw_elements_of(i);
  if (op->is_first) {
    if (in != NULL) pw_wrong(rank, "the first virtual stage has an input");
    return;
  }
  if (in == NULL || in->num_tensors != 3 || in->word != (uint64_t)(1000 * (op->virtual_stage - 1) + i)) {
    pw_wrong(rank, "micro-batch %d of virtual stage %d has another input", i, op->virtual_stage);
    return;
  }
  check_dense(rank, &in->tensors[0], SLUICE_TYPE_FLOAT, 32, n);
  check_dense(rank, &in->tensors[1], SLUICE_TYPE_INT, 64, 2);
  check_dense(rank, &in->tensors[2], BOOL_CODE, 8, i % 3);
  const int64_t* id = in->tensors[1].data;
  if (id[0] != i || id[1] != op->virtual_stage - 1) pw_wrong(rank, "integers of micro-batch %d are wrong", i);
  const uint8_t* truth = in->tensors[2].data;
  for (int32_t t = 0; t < i % 3; ++t) {
    if (truth[t] != (uint8_t)(t + 1)) pw_wrong(rank, "truth values of micro-batch %d are wrong", i);
  }
}

static const float* first_of(const sluice_stage_tensors_t* tensors) { return tensors->tensors[0].data; }

/* ---- callbacks ---- */

static pw_stash_t* stash_of(pw_rank_t* rank, int32_t c, int32_t i) { return &rank->stash[c][i]; }

static uint32_t draw(pw_rank_t* rank) {
  rank->random = rank->random * 1664525U + 1013904223U;
  return rank->random >> 8;
}

/* The replicas of a stage meet in the callback, as expert-parallel layers do. All must come with the same op. */
static void meet_column(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op) {
  pw_world_t* world = rank->world;
  const int64_t what = ((int64_t)rank->batch * PW_NUM_CALLS + call) << 32 | op->virtual_stage << 16 | op->micro_batch;
  int64_t* slot = world->column_op[rank->stage];
  pthread_mutex_lock(&world->column_mutex);
  while (world->column_left[rank->stage] > 0) pthread_cond_wait(&world->column_moved, &world->column_mutex);
  if (slot[1] == 0) slot[0] = what;
  if (slot[0] != what) pw_wrong(rank, "replicas of stage %d met in different ops", rank->stage);
  if (++slot[1] == world->num_replicas) {
    world->column_left[rank->stage] = world->num_replicas;
    slot[1] = 0;
    pthread_cond_broadcast(&world->column_moved);
  }
  while (world->column_left[rank->stage] == 0) pthread_cond_wait(&world->column_moved, &world->column_mutex);
  --world->column_left[rank->stage];
  pthread_cond_broadcast(&world->column_moved);
  pthread_mutex_unlock(&world->column_mutex);
}

static sluice_status_t enter(pw_rank_t* rank, int32_t call, const sluice_stage_call_t* op,
                             sluice_host_failure_t* out_failure) {
  ++rank->calls[call];
  if (rank->is_in_callback++ != 0) pw_wrong(rank, "two callbacks at one time");
  if (op->struct_size != sizeof *op) pw_wrong(rank, "a call of another size");
  if (rank->world->max_delay_us > 0 && call != PW_LOAD) usleep(draw(rank) % (uint32_t)rank->world->max_delay_us);
  const int is_pass = call == PW_FORWARD || call == PW_BACKWARD;
  const int meets = call == PW_REDUCE || (is_pass && !rank->world->meets_in_reduce_alone);
  if (rank->world->has_column && meets) meet_column(rank, call, op);
  sluice_status_t status = SLUICE_OK;
  if (rank->world->in_call != NULL) status = rank->world->in_call(rank, call, op, out_failure);
  --rank->is_in_callback;
  return status;
}

static sluice_status_t load(void* user, const sluice_stage_call_t* op, sluice_host_failure_t* out_failure) {
  pw_rank_t* rank = user;
  int32_t* next = &rank->next_load[op->is_first ? 0 : 1];
  if (*next != op->micro_batch || !(op->is_first || op->is_last)) pw_wrong(rank, "loads are out of order");
  ++*next;
  if (op->is_first) pw_make_input(stash_of(rank, 0, op->micro_batch)->x, rank->batch, op->micro_batch);
  return enter(rank, PW_LOAD, op, out_failure);
}

static sluice_tensor_t tensor(void* data, uint8_t code, uint8_t bits, int32_t ndim, int64_t* shape) {
  return (sluice_tensor_t){.data = data,
                           .device_type = SLUICE_DEVICE_CPU,
                           .ndim = ndim,
                           .type_code = code,
                           .type_bits = bits,
                           .type_lanes = 1,
                           .shape = shape};
}

static void give_back(pw_rank_t* rank, int32_t micro_batch) {
  if (rank->kept[micro_batch] == NULL) return;
  if (rank->kept_data[micro_batch][0] != rank->kept_first[micro_batch]) pw_wrong(rank, "what was kept has changed");
  sluice_pipeline_give_back(rank->kept[micro_batch]);
  rank->kept[micro_batch] = NULL;
  ++rank->num_kept;
}

static sluice_status_t forward(void* user, const sluice_stage_call_t* op, sluice_stage_tensors_t* out_result,
                               sluice_host_failure_t* out_failure) {
  pw_rank_t* rank = user;
  const int32_t c = op->virtual_stage, i = op->micro_batch, n = pw_elements_of(i);
  pw_stash_t* stash = stash_of(rank, c, i);
  check_input(rank, op);
  if (!op->is_first) memcpy(stash->x, first_of(op->input), (size_t)n * sizeof(float));
  if (!op->is_first && rank->world->keeps) {
    give_back(rank, i); /* from the previous batch */
    if (sluice_pipeline_keep(rank->pipeline, op->input, &rank->kept[i]) != SLUICE_OK) pw_wrong(rank, "keep failed");
    rank->kept_data[i] = first_of(op->input);
    rank->kept_first[i] = rank->kept_data[i][0];
  }
  sluice_status_t status = enter(rank, PW_FORWARD, op, out_failure);
  if (status != SLUICE_OK) return status;
  if (stash->is_out) pw_wrong(rank, "an output is written while the library reads it");
  pw_layer_forward(&rank->layers[c], stash->x, stash->y, n);
  if (op->is_last) {
    rank->losses[rank->batch][i] = pw_loss_of(stash->y, n);
    return SLUICE_OK;
  }
  stash->shape[0] = 1, stash->shape[1] = n;
  stash->id_shape[0] = 2, stash->id[0] = i, stash->id[1] = c;
  stash->truth_shape[0] = i % 3, stash->truth_shape[1] = 1;
  for (uint8_t t = 0; t < 3; ++t) stash->truth[t] = (uint8_t)(t + 1);
  stash->out[0] = tensor(stash->y, SLUICE_TYPE_FLOAT, 32, 2, stash->shape);
  stash->out[1] = tensor(stash->id, SLUICE_TYPE_INT, 64, 1, stash->id_shape);
  stash->out[2] = tensor(i % 3 > 0 ? stash->truth : NULL, BOOL_CODE, 8, 2, stash->truth_shape);
  stash->is_out = 1;
  *out_result = (sluice_stage_tensors_t){.tensors = stash->out, .num_tensors = 3, .word = (uint64_t)(1000 * c + i)};
  if (rank->world->bend_output != NULL) rank->world->bend_output(rank, op, out_result);
  return SLUICE_OK;
}

static sluice_status_t loss(void* user, const sluice_stage_call_t* op, sluice_host_failure_t* out_failure) {
  pw_rank_t* rank = user;
  if (!op->is_last) pw_wrong(rank, "a loss that is not the last's");
  return enter(rank, PW_LOSS, op, out_failure);
}

static sluice_status_t backward(void* user, const sluice_stage_call_t* op, sluice_stage_tensors_t* out_result,
                                sluice_host_failure_t* out_failure) {
  pw_rank_t* rank = user;
  const int32_t c = op->virtual_stage, i = op->micro_batch, n = pw_elements_of(i);
  pw_stash_t* stash = stash_of(rank, c, i);
  check_input(rank, op);
  if (!op->is_first && memcmp(first_of(op->input), stash->x, (size_t)n * sizeof(float)) != 0) {
    pw_wrong(rank, "the input of micro-batch %d did not last until its backward", i);
  }
  if (!op->is_last && (op->output == NULL || op->output->tensors[0].data != stash->y)) {
    pw_wrong(rank, "backward of micro-batch %d has another output", i);
  }
  if (op->is_last != (op->output_grad == NULL)) pw_wrong(rank, "an output_grad too much or too little");
  if (!op->is_last) {
    const sluice_stage_tensors_t* grad = op->output_grad;
    if (grad->num_tensors != 1 + i % 2 || grad->word != (uint64_t)(c + 1) << 40) pw_wrong(rank, "another gradient");
    memcpy(stash->dy, first_of(grad), (size_t)n * sizeof(float));
  } else {
    memcpy(stash->dy, stash->y, sizeof stash->dy);
  }
  sluice_status_t status = enter(rank, PW_BACKWARD, op, out_failure);
  if (status != SLUICE_OK) return status;
  if (stash->is_back) pw_wrong(rank, "a gradient is written while the library reads it");
  pw_layer_backward(&rank->layers[c], stash->x, stash->dy, stash->dx, n);
  if (!pw_is_split(rank->world)) pw_layer_weight_grad(&rank->layers[c], stash->x, stash->dy, n);
  if (op->is_first) return SLUICE_OK;
  stash->scalar[0] = i;
  stash->shape[0] = 1, stash->shape[1] = n;
  stash->back[0] = tensor(stash->dx, SLUICE_TYPE_FLOAT, 32, 2, stash->shape);
  stash->back[1] = tensor(stash->scalar, SLUICE_TYPE_INT, 64, 0, NULL);
  stash->is_back = 1;
  *out_result = (sluice_stage_tensors_t){.tensors = stash->back, .num_tensors = 1 + i % 2, .word = (uint64_t)c << 40};
  return SLUICE_OK;
}

static sluice_status_t weight_grad(void* user, const sluice_stage_call_t* op, sluice_host_failure_t* out_failure) {
  pw_rank_t* rank = user;
  const int32_t n = pw_elements_of(op->micro_batch);
  pw_stash_t* stash = stash_of(rank, op->virtual_stage, op->micro_batch);
  if (!op->is_first && memcmp(first_of(op->input), stash->x, (size_t)n * sizeof(float)) != 0) {
    pw_wrong(rank, "the input of micro-batch %d did not last until its weight gradient", op->micro_batch);
  }
  if (!op->is_last && memcmp(first_of(op->output_grad), stash->dy, (size_t)n * sizeof(float)) != 0) {
    pw_wrong(rank, "the gradient of micro-batch %d did not last until its weight gradient", op->micro_batch);
  }
  sluice_status_t status = enter(rank, PW_WEIGHT_GRAD, op, out_failure);
  if (status != SLUICE_OK) return status;
  pw_layer_weight_grad(&rank->layers[op->virtual_stage], stash->x, stash->dy, n);
  return SLUICE_OK;
}

/* Keeps the gradients of this call. They must equal the gradients at the end of the batch. */
static sluice_status_t reduce(void* user, const sluice_stage_call_t* op, sluice_host_failure_t* out_failure) {
  pw_rank_t* rank = user;
  const int32_t c = op->virtual_stage;
  if (op->input != NULL || op->output != NULL || op->output_grad != NULL) pw_wrong(rank, "reduce has tensors");
  ++rank->num_reduced[c];
  memcpy(rank->reduced[c], rank->layers[c].grad, sizeof rank->reduced[c]);
  return enter(rank, PW_REDUCE, op, out_failure);
}

static void release(void* user, int32_t which, int32_t c, int32_t i) {
  pw_rank_t* rank = user;
  pw_stash_t* stash = stash_of(rank, c, i);
  int32_t* is_lent = which == SLUICE_STAGE_OUTPUT ? &stash->is_out : &stash->is_back;
  if (!*is_lent) pw_wrong(rank, "a result of micro-batch %d was released twice", i);
  *is_lent = 0;
  if (rank->world->released != NULL) rank->world->released(rank, which, c, i);
}

static int32_t is_interrupted(void* user) {
  pw_rank_t* rank = user;
  return rank->world->is_interrupted != NULL && rank->world->is_interrupted(rank);
}

static const sluice_pipeline_callbacks_t callbacks = {.struct_size = sizeof callbacks,
                                                      .load = load,
                                                      .forward = forward,
                                                      .loss = loss,
                                                      .backward = backward,
                                                      .weight_grad = weight_grad,
                                                      .release = release,
                                                      .is_interrupted = is_interrupted,
                                                      .reduce = reduce};

static sluice_pipeline_callbacks_t callbacks_of(const pw_rank_t* rank) {
  sluice_pipeline_callbacks_t given = callbacks;
  if ((rank->world->reduces >> rank->rank & 1) == 0) given.reduce = NULL;
  return given;
}

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
  DEFAULTS(sluice_pipeline_batch, batch);
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
  for (int32_t i = 0; i < PW_MAX_MICRO_BATCHES; ++i) give_back(rank, i);
}

/* Runs the batches from `first` to before `end` with one pipeline. */
static void run_pipeline(pw_rank_t* rank, int32_t first, int32_t end) {
  pw_world_t* world = rank->world;
  sluice_pipeline_config_t config = world->config;
  if (world->bend_config != NULL) world->bend_config(rank, &config);
  const sluice_pipeline_callbacks_t given = callbacks_of(rank);
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
    DEFAULTS(sluice_comm_config, config);
    config.rank = r;
    config.world_size = num_ranks;
    config.timeout_ns = TIMEOUT_NS;
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
  DEFAULTS(sluice_comm_config, config);
  config.rank = rank->rank;
  config.world_size = sluice_comm_world_size(rank->parent);
  config.timeout_ns = TIMEOUT_NS;
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
