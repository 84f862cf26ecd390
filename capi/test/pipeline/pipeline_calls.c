// SPDX-License-Identifier: Apache-2.0
/* The callbacks of a rank of a pipeline's world. Each callback checks its call and computes. */
#include "capi/test/pipeline/pipeline_world.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define BOOL_CODE 6 /* DLPack's code, which the library sends without interpreting it */

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

void pw_give_back(pw_rank_t* rank, int32_t micro_batch) {
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
    pw_give_back(rank, i); /* from the previous batch */
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

sluice_pipeline_callbacks_t pw_callbacks_of(const pw_rank_t* rank) {
  sluice_pipeline_callbacks_t given = callbacks;
  if ((rank->world->reduces >> rank->rank & 1) == 0) given.reduce = NULL;
  return given;
}
