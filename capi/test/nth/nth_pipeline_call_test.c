// SPDX-License-Identifier: Apache-2.0
/* One system call or allocation fails (nth_ranks.h) while ranks run two batches of a pipeline, with messages over tcp
 * or within the process, and query the result. A batch that failed without ending its pipeline is repeated, and must
 * succeed. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/alloc.h"
#include "backend/base/hash.h"
#include "backend/base/test/refused.h"
#include "capi/test/nth/nth_ranks.h"
#include "sluice/pipeline.h"

enum {
  NUM_VIRTUAL = 2,
  NUM_MICRO_BATCHES = 3,
  NUM_BATCHES = 2,
  WIDTH = 5000,
  MOST_STAGES = NUM_VIRTUAL * NTH_MOST_RANKS
};

/* Tensors that a virtual stage saves for a micro-batch: y = x * weight, dx = dy * weight. */
typedef struct stash_s {
  float x[WIDTH], y[WIDTH], dx[WIDTH];
  int64_t shape[1];
  sluice_tensor_t out, back;
} stash_t;

typedef struct stages_s {
  sluice_pipeline_t* pipeline;
  float grads[MOST_STAGES];
  stash_t stash[MOST_STAGES][NUM_MICRO_BATCHES];
  void* kept;
} stages_t;

static stages_t of_rank[NTH_MOST_RANKS];

static float weight_of(int32_t virtual_stage) { return 0.5F + 0.125F * (float)virtual_stage; }

static void give(stash_t* stash, float* data, sluice_tensor_t* tensor, sluice_stage_tensors_t* out_result) {
  stash->shape[0] = WIDTH;
  *tensor = (sluice_tensor_t){.data = data,
                              .device_type = SLUICE_DEVICE_CPU,
                              .ndim = 1,
                              .type_code = SLUICE_TYPE_FLOAT,
                              .type_bits = 32,
                              .type_lanes = 1,
                              .shape = stash->shape};
  out_result->tensors = tensor, out_result->num_tensors = 1;
}

static sluice_status_t told(sluice_status_t status, sluice_host_failure_t* out_failure) {
  if (status != SLUICE_OK) snprintf(out_failure->message, sizeof out_failure->message, "the test could not keep it");
  return status;
}

static sluice_status_t forward(void* user, const sluice_stage_call_t* op, sluice_stage_tensors_t* out_result,
                               sluice_host_failure_t* out_failure) {
  stages_t* stages = user;
  stash_t* stash = &stages->stash[op->virtual_stage][op->micro_batch];
  for (int32_t e = 0; e < WIDTH && op->is_first; ++e) stash->x[e] = 0.01F * (float)((op->micro_batch + e) % 17);
  if (!op->is_first) memcpy(stash->x, op->input->tensors[0].data, sizeof stash->x);
  for (int32_t e = 0; e < WIDTH; ++e) stash->y[e] = stash->x[e] * weight_of(op->virtual_stage);
  if (!op->is_last) give(stash, stash->y, &stash->out, out_result);
  if (op->is_first || stages->kept != NULL) return SLUICE_OK;
  return told(sluice_pipeline_keep(stages->pipeline, op->input, &stages->kept), out_failure);
}

static sluice_status_t backward(void* user, const sluice_stage_call_t* op, sluice_stage_tensors_t* out_result,
                                sluice_host_failure_t* out_failure) {
  stages_t* stages = user;
  stash_t* stash = &stages->stash[op->virtual_stage][op->micro_batch];
  const float* dy = op->is_last ? stash->y : op->output_grad->tensors[0].data;
  (void)out_failure;
  for (int32_t e = 0; e < WIDTH; ++e) {
    stages->grads[op->virtual_stage] += dy[e] * stash->x[e];
    stash->dx[e] = dy[e] * weight_of(op->virtual_stage);
  }
  if (!op->is_first) give(stash, stash->dx, &stash->back, out_result);
  return SLUICE_OK;
}

/* Judges by the last error of this thread, which belongs to `status`. */
static int ends_the_pipeline(sluice_status_t status) {
  if (status == SLUICE_E_PEER_LOST || status == SLUICE_E_TIMED_OUT || status == SLUICE_E_ABORTED) return 1;
  return sluice_is_out_of_memory(status) && strstr(last_message(), "can no longer be used") != NULL;
}

static sluice_status_t run_batch(nth_rank_t* me, stages_t* stages) {
  float before[MOST_STAGES];
  DEFAULTS(sluice_pipeline_batch, batch);
  batch.num_micro_batches = NUM_MICRO_BATCHES;
  memcpy(before, stages->grads, sizeof before);
  const sluice_status_t status = nth_said(me, sluice_pipeline_run_batch(stages->pipeline, &batch));
  if (status == SLUICE_OK || ends_the_pipeline(status)) return status;
  memcpy(stages->grads, before, sizeof before);
  /* Other ranks repeat the batch too, unless the pipeline has ended for them. */
  const sluice_status_t again = sluice_pipeline_run_batch(stages->pipeline, &batch);
  if (again != SLUICE_OK && !ends_the_pipeline(again)) me->is_torn = 1;
  return status;
}

static sluice_status_t ask(nth_rank_t* me, sluice_pipeline_t* pipeline) {
  sluice_pipeline_stats_t stats = {.struct_size = sizeof stats};
  uint64_t bytes = 0;
  sluice_status_t status = nth_said(me, sluice_pipeline_get_stats(pipeline, &stats));
  for (int32_t which = SLUICE_PIPELINE_MEASURED; which <= SLUICE_PIPELINE_PREDICTED && status == SLUICE_OK; ++which) {
    status = nth_said(me, sluice_pipeline_timeline_json(pipeline, which, NULL, &bytes));
  }
  return status;
}

static sluice_status_t run(nth_rank_t* me, sluice_comm_t* comm, sluice_comm_t* parent) {
  (void)parent;
  const sluice_pipeline_callbacks_t callbacks = {
      .struct_size = sizeof callbacks, .forward = forward, .backward = backward};
  stages_t* stages = &of_rank[me->rank];
  DEFAULTS(sluice_pipeline_config, config);
  memset(stages, 0, sizeof *stages);
  config.num_virtual = NUM_VIRTUAL;
  sluice_status_t status = nth_said(me, sluice_pipeline_create(&config, comm, &callbacks, stages, &stages->pipeline));
  for (int32_t b = 0; b < NUM_BATCHES && status == SLUICE_OK; ++b) status = run_batch(me, stages);
  if (status == SLUICE_OK) status = ask(me, stages->pipeline);
  sluice_pipeline_destroy(stages->pipeline);
  sluice_pipeline_give_back(stages->kept); /* the tensor outlives the pipeline */
  me->digest = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, stages->grads, sizeof stages->grads);
  return status;
}

TEST(OneRank_NthCallOfAPipelineFails_HasAStatusAndLeavesNothing) { nth_call(1, NTH_OVER_TCP, run); }
TEST(TwoRanks_NthCallOfAPipelineFails_HaveStatusesAndLeaveNothing) { nth_call(2, NTH_OVER_TCP, run); }
TEST(TwoRanks_NthCallOfAPipelineInAProcessFails_HaveStatusesAndLeaveNothing) {
  if (getenv("SLUICE_FULL") == NULL) skip_because("needs SLUICE_FULL");
  nth_call(2, NTH_WITHIN, run);
}
