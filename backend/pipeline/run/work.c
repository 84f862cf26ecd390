// SPDX-License-Identifier: Apache-2.0
/* The ops of the stage's thread: the host's callbacks, and their results in the slots. */
#include <stdio.h>

#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/pipeline/run/state.h"

/* ---- arguments of an op ---- */

static sluice_stage_value_t* input_of(const sluice_pipeline_t* pipeline, int32_t c, int32_t i) {
  if (c == 0) return NULL;
  if (sluice_stage_is_in_place(pipeline, c)) return sluice_stage_value(pipeline, SLUICE_STAGE_VALUE_OUTPUT, c - 1, i);
  return sluice_stage_value(pipeline, SLUICE_STAGE_VALUE_INPUT, c, i);
}

static sluice_stage_value_t* output_grad_of(const sluice_pipeline_t* pipeline, int32_t c, int32_t i) {
  if (sluice_stage_is_last(pipeline, c)) return NULL;
  if (sluice_stage_is_in_place(pipeline, c + 1)) {
    return sluice_stage_value(pipeline, SLUICE_STAGE_VALUE_INPUT_GRAD, c + 1, i);
  }
  return sluice_stage_value(pipeline, SLUICE_STAGE_VALUE_OUTPUT_GRAD, c, i);
}

static const sluice_stage_tensors_t* view_of(const sluice_stage_value_t* value) {
  return value != NULL ? &value->view : NULL;
}

static sluice_stage_call_t call_of(sluice_pipeline_t* pipeline, const sluice_stage_op_t* op) {
  const int32_t c = op->virtual_stage, i = op->micro_batch;
  const int is_forward = op->kind == SLUICE_STAGE_FORWARD, is_last = sluice_stage_is_last(pipeline, c);
  pipeline->input_value = input_of(pipeline, c, i);
  pipeline->output_grad_value = is_forward ? NULL : output_grad_of(pipeline, c, i);
  return (sluice_stage_call_t){
      .struct_size = sizeof(sluice_stage_call_t),
      .virtual_stage = c,
      .micro_batch = i,
      .is_first = c == 0,
      .is_last = is_last,
      .forward_only = pipeline->forward_only,
      .input = view_of(pipeline->input_value),
      .output = is_forward || is_last ? NULL : view_of(sluice_stage_value(pipeline, SLUICE_STAGE_VALUE_OUTPUT, c, i)),
      .output_grad = view_of(pipeline->output_grad_value),
  };
}

/* ---- callbacks ---- */

static sluice_status_t outcome(const sluice_pipeline_t* pipeline, const sluice_stage_op_t* op, const char* what,
                               sluice_status_t status, const sluice_host_failure_t* failure) {
  if (status == SLUICE_OK) return SLUICE_OK;
  const sluice_status_t known = status < 0 && status >= SLUICE_E_CAPACITY ? status : SLUICE_E_EXTERNAL;
  return sluice_error_record(known, pipeline->agreed.rank, failure->peer, failure->native_code,
                             "pipeline: %s of micro-batch %d in virtual stage %d on stage %d failed: %.*s", what,
                             op->micro_batch, op->virtual_stage, op->stage, (int)sizeof failure->message - 1,
                             failure->message[0] != 0 ? failure->message : "the callback gave no message");
}

static sluice_status_t load(sluice_pipeline_t* pipeline, const sluice_stage_op_t* op, const sluice_stage_call_t* call) {
  const sluice_pipeline_callbacks_t* callbacks = &pipeline->callbacks;
  if (callbacks->load == NULL || !(call->is_first || call->is_last)) return SLUICE_OK;
  sluice_host_failure_t failure = {.peer = -1};
  return outcome(pipeline, op, "load", callbacks->load(pipeline->user, call, &failure), &failure);
}

static sluice_status_t loss(sluice_pipeline_t* pipeline, const sluice_stage_op_t* op, const sluice_stage_call_t* call) {
  const sluice_pipeline_callbacks_t* callbacks = &pipeline->callbacks;
  if (callbacks->loss == NULL || !call->is_last) return SLUICE_OK;
  sluice_host_failure_t failure = {.peer = -1};
  return outcome(pipeline, op, "loss", callbacks->loss(pipeline->user, call, &failure), &failure);
}

static sluice_status_t give(sluice_pipeline_t* pipeline, const sluice_stage_op_t* op, int32_t which,
                            const sluice_stage_tensors_t* result, int32_t readers) {
  char where[96];
  (void)snprintf(where, sizeof where, "the %s of micro-batch %d in virtual stage %d",
                 which == SLUICE_STAGE_VALUE_OUTPUT ? "output" : "gradient of the input", op->micro_batch,
                 op->virtual_stage);
  sluice_stage_value_t* value = sluice_stage_value(pipeline, which, op->virtual_stage, op->micro_batch);
  const sluice_status_t status = sluice_stage_value_give(value, result, where, readers);
  if (status != SLUICE_OK && result->num_tensors > 0) {
    sluice_stage_tell_released(pipeline, which, op->virtual_stage, op->micro_batch);
  }
  return status;
}

static sluice_status_t forward(sluice_pipeline_t* pipeline, const sluice_stage_op_t* op) {
  const sluice_stage_call_t call = call_of(pipeline, op);
  SLUICE_TRY(load(pipeline, op, &call));
  sluice_stage_tensors_t result = {.tensors = NULL};
  sluice_host_failure_t failure = {.peer = -1};
  SLUICE_TRY(outcome(pipeline, op, "forward", pipeline->callbacks.forward(pipeline->user, &call, &result, &failure),
                     &failure));
  if (call.is_last) return loss(pipeline, op, &call);
  /* Read by the next virtual stage, on this stage or through a send, and by the backward of this one. */
  return give(pipeline, op, SLUICE_STAGE_VALUE_OUTPUT, &result, pipeline->forward_only ? 1 : 2);
}

static sluice_status_t backward(sluice_pipeline_t* pipeline, const sluice_stage_op_t* op) {
  const sluice_stage_call_t call = call_of(pipeline, op);
  sluice_stage_tensors_t result = {.tensors = NULL};
  sluice_host_failure_t failure = {.peer = -1};
  SLUICE_TRY(outcome(pipeline, op, "backward", pipeline->callbacks.backward(pipeline->user, &call, &result, &failure),
                     &failure));
  return call.is_first ? SLUICE_OK : give(pipeline, op, SLUICE_STAGE_VALUE_INPUT_GRAD, &result, 1);
}

static sluice_status_t weight_grad(sluice_pipeline_t* pipeline, const sluice_stage_op_t* op) {
  const sluice_stage_call_t call = call_of(pipeline, op);
  sluice_host_failure_t failure = {.peer = -1};
  return outcome(pipeline, op, "weight_grad", pipeline->callbacks.weight_grad(pipeline->user, &call, &failure),
                 &failure);
}

/* Belongs to no micro-batch, and gives no result. */
static sluice_status_t reduce(sluice_pipeline_t* pipeline, const sluice_stage_op_t* op) {
  const int32_t c = op->virtual_stage;
  const sluice_stage_call_t call = {.struct_size = sizeof call,
                                    .virtual_stage = c,
                                    .micro_batch = op->micro_batch,
                                    .is_first = c == 0,
                                    .is_last = sluice_stage_is_last(pipeline, c)};
  sluice_host_failure_t failure = {.peer = -1};
  return outcome(pipeline, op, "reduce", pipeline->callbacks.reduce(pipeline->user, &call, &failure), &failure);
}

static sluice_status_t run(sluice_pipeline_t* pipeline, const sluice_stage_op_t* op) {
  switch (op->kind) {
    case SLUICE_STAGE_FORWARD: return forward(pipeline, op);
    case SLUICE_STAGE_BACKWARD: return backward(pipeline, op);
    case SLUICE_STAGE_WEIGHT_GRAD: return weight_grad(pipeline, op);
    case SLUICE_STAGE_REDUCE: return reduce(pipeline, op);
    default: return SLUICE_OK; /* a flush: it only has to be ready */
  }
}

/* ---- results of an op ---- */

/* The last op of a micro-batch in a virtual stage releases its tensors. */
static void leave_all(sluice_pipeline_t* pipeline, int32_t c, int32_t i) {
  if (c > 0) {
    const int in_place = sluice_stage_is_in_place(pipeline, c);
    sluice_stage_leave(pipeline, in_place ? SLUICE_STAGE_VALUE_OUTPUT : SLUICE_STAGE_VALUE_INPUT, in_place ? c - 1 : c,
                       i);
  }
  if (sluice_stage_is_last(pipeline, c) || pipeline->forward_only) return;
  const int in_place = sluice_stage_is_in_place(pipeline, c + 1);
  sluice_stage_leave(pipeline, in_place ? SLUICE_STAGE_VALUE_INPUT_GRAD : SLUICE_STAGE_VALUE_OUTPUT_GRAD,
                     in_place ? c + 1 : c, i);
  sluice_stage_leave(pipeline, SLUICE_STAGE_VALUE_OUTPUT, c, i);
}

static int is_last_op(const sluice_pipeline_t* pipeline, int32_t kind) {
  if (pipeline->forward_only) return kind == SLUICE_STAGE_FORWARD;
  return kind == sluice_stage_gradient_kind(&pipeline->plan->program->spec);
}

static void note_bytes(sluice_pipeline_t* pipeline) {
  pipeline->stats.peak_bytes = sluice_max_u64(pipeline->stats.peak_bytes, pipeline->bytes);
}

static void count_begin(sluice_pipeline_t* pipeline, const sluice_stage_op_t* op) {
  if (op->kind != SLUICE_STAGE_FORWARD || pipeline->forward_only) return;
  ++pipeline->in_flight;
  pipeline->bytes += pipeline->agreed.spec.activation_bytes[op->virtual_stage];
  pipeline->stats.most_in_flight = (int32_t)sluice_max(pipeline->stats.most_in_flight, pipeline->in_flight);
  note_bytes(pipeline);
}

static void count_end(sluice_pipeline_t* pipeline, const sluice_stage_op_t* op) {
  const sluice_pipeline_spec_t* spec = &pipeline->agreed.spec;
  const int32_t c = op->virtual_stage;
  if (op->kind == SLUICE_STAGE_BACKWARD) {
    --pipeline->in_flight;
    pipeline->bytes -= spec->activation_bytes[c];
    if (!spec->separate_wgrad) return;
    ++pipeline->held;
    pipeline->bytes += spec->held_bytes[c];
    pipeline->stats.most_held = (int32_t)sluice_max(pipeline->stats.most_held, pipeline->held);
    note_bytes(pipeline);
  } else if (op->kind == SLUICE_STAGE_WEIGHT_GRAD) {
    --pipeline->held;
    pipeline->bytes -= spec->held_bytes[c];
  }
}

/* The mean of all but the first micro-batch, in which hosts warm up, if there are others. */
static void note_time(sluice_pipeline_t* pipeline, const sluice_stage_op_t* op, uint64_t took_ns) {
  if (op->micro_batch == 0 && pipeline->num_micro_batches > 1) return;
  const double share = sluice_seconds(took_ns) / (double)sluice_max(1, pipeline->num_micro_batches - 1);
  sluice_stage_times_t* times = &pipeline->own_times[sluice_stage_local(pipeline, op->virtual_stage)];
  if (op->kind == SLUICE_STAGE_FORWARD) times->forward_s += share;
  if (op->kind == SLUICE_STAGE_BACKWARD) times->backward_s += share;
  if (op->kind == SLUICE_STAGE_WEIGHT_GRAD) times->weight_s += share;
}

void sluice_stage_ended(sluice_pipeline_t* pipeline, int32_t index) {
  sluice_stage_plan_t* plan = pipeline->plan;
  sluice_stage_record_t* record = &plan->records[index - plan->first_op];
  record->end_ns = sluice_now_ns();
  record->has_ended = 1;
  plan->ends[plan->num_ends++] = index;
  sluice_runner_end(&pipeline->runner, index);
}

/* Tells the other replicas the op before it runs, so that they reach its collectives as soon as this rank. */
static sluice_status_t lead(sluice_pipeline_t* pipeline, int32_t index) {
  const sluice_stage_handshake_t* agreed = &pipeline->agreed;
  const sluice_pipeline_program_t* program = pipeline->plan->program;
  const sluice_stage_op_t* op = &program->ops[index];
  if (agreed->num_replicas == 1 || agreed->replica != 0 || program->policy->is_planned || op->virtual_stage < 0 ||
      !sluice_stage_op_is_collective(&program->spec, op->kind, op->virtual_stage)) {
    return SLUICE_OK;
  }
  sluice_stage_head_t head = sluice_stage_new_head(pipeline, SLUICE_STAGE_HEAD_ORDER);
  head.about = index;
  for (int32_t d = 1; d < agreed->num_replicas; ++d) {
    const int32_t rank = agreed->rank_of[agreed->stage * agreed->num_replicas + d];
    SLUICE_TRY(sluice_stage_tell(pipeline, rank, &head, sizeof head, NULL, 0));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_stage_work(sluice_pipeline_t* pipeline, int32_t index) {
  const sluice_stage_op_t* op = &pipeline->plan->program->ops[index];
  sluice_stage_record_t* record = &pipeline->plan->records[index - pipeline->plan->first_op];
  SLUICE_TRY(lead(pipeline, index));
  record->begin_ns = sluice_now_ns();
  count_begin(pipeline, op);
  sluice_status_t status = run(pipeline, op);
  pipeline->input_value = pipeline->output_grad_value = NULL;
  sluice_stage_note_progress(pipeline);
  const uint64_t took_ns = sluice_now_ns() - record->begin_ns;
  pipeline->stats.callback_ns += took_ns;
  if (status != SLUICE_OK) return status;
  if (op->kind != SLUICE_STAGE_FLUSH) {
    note_time(pipeline, op, took_ns);
    count_end(pipeline, op);
    if (is_last_op(pipeline, op->kind)) leave_all(pipeline, op->virtual_stage, op->micro_batch);
  }
  sluice_stage_ended(pipeline, index);
  return SLUICE_OK;
}

/* ---- releases: values, and telling the host when its own are released ---- */

void sluice_stage_tell_released(const sluice_pipeline_t* pipeline, int32_t which, int32_t c, int32_t micro_batch) {
  const int32_t name = which == SLUICE_STAGE_VALUE_OUTPUT ? SLUICE_STAGE_OUTPUT : SLUICE_STAGE_INPUT_GRAD;
  if (pipeline->callbacks.release != NULL) pipeline->callbacks.release(pipeline->user, name, c, micro_batch);
}

/* Returns whether the host must be told. Call before the release. */
static int is_owed(const sluice_stage_value_t* value) {
  return value->readers > 0 && value->view.is_local && value->view.num_tensors > 0;
}

void sluice_stage_leave(sluice_pipeline_t* pipeline, int32_t which, int32_t c, int32_t micro_batch) {
  sluice_stage_value_t* value = sluice_stage_value(pipeline, which, c, micro_batch);
  const int owed = is_owed(value);
  if (sluice_stage_value_leave(value, pipeline->endpoint) && owed) {
    sluice_stage_tell_released(pipeline, which, c, micro_batch);
  }
}

void sluice_stage_drop_all(sluice_pipeline_t* pipeline) {
  const sluice_pipeline_spec_t* spec = &pipeline->agreed.spec;
  for (int32_t k = 0; k < spec->num_virtual; ++k) {
    const int32_t c = sluice_pipeline_virtual_stage(spec, pipeline->agreed.stage, k);
    for (int32_t which = 0; which < SLUICE_STAGE_VALUE_COUNT; ++which) {
      for (int32_t i = 0; i < pipeline->num_micro_batches; ++i) {
        sluice_stage_value_t* value = sluice_stage_value(pipeline, which, c, i);
        const int owed = is_owed(value);
        if (sluice_stage_value_drop(value, pipeline->endpoint) && owed) {
          sluice_stage_tell_released(pipeline, which, c, i);
        }
      }
    }
  }
}
