// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/spec.h"

int32_t sluice_pipeline_stage_of(const sluice_pipeline_spec_t* spec, int32_t virtual_stage) {
  int32_t turn = virtual_stage / spec->num_stages, place = virtual_stage % spec->num_stages;
  return spec->placement == SLUICE_PLACEMENT_V && turn % 2 == 1 ? spec->num_stages - 1 - place : place;
}

int32_t sluice_pipeline_virtual_stage(const sluice_pipeline_spec_t* spec, int32_t stage, int32_t k) {
  int32_t place = spec->placement == SLUICE_PLACEMENT_V && k % 2 == 1 ? spec->num_stages - 1 - stage : stage;
  return k * spec->num_stages + place;
}

int sluice_pipeline_crosses(const sluice_pipeline_spec_t* spec, int32_t virtual_stage) {
  return sluice_pipeline_stage_of(spec, virtual_stage) != sluice_pipeline_stage_of(spec, virtual_stage + 1);
}

int sluice_pipeline_is_open(const sluice_pipeline_spec_t* spec) {
  for (int32_t c = 0; c < sluice_pipeline_num_virtual_stages(spec); ++c) {
    if (spec->in_flight[c] > 0) return 0;
  }
  return 1;
}

static sluice_status_t check_limits(const sluice_pipeline_spec_t* spec) {
  for (int32_t c = 0; c < sluice_pipeline_num_virtual_stages(spec); ++c) {
    SLUICE_TRY(SLUICE_REQUIRE(spec->in_flight[c] >= 0 && spec->held[c] >= 0,
                              "pipeline: virtual stage %d: in_flight is %d and held is %d; give at least 0", c,
                              spec->in_flight[c], spec->held[c]));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_pipeline_spec_check(const sluice_pipeline_spec_t* spec) {
  SLUICE_TRY(SLUICE_REQUIRE(spec->num_stages >= 1 && spec->num_stages <= SLUICE_PIPELINE_MAX_STAGES,
                            "pipeline: num_stages is %d; give 1 to %d", spec->num_stages, SLUICE_PIPELINE_MAX_STAGES));
  int32_t most = SLUICE_PIPELINE_MAX_VIRTUAL_STAGES / spec->num_stages;
  SLUICE_TRY(SLUICE_REQUIRE(spec->num_virtual >= 1 && spec->num_virtual <= most,
                            "pipeline: num_virtual is %d; %d stages may hold 1 to %d virtual stages each",
                            spec->num_virtual, spec->num_stages, most));
  most = SLUICE_PIPELINE_MAX_TURNS / spec->num_virtual;
  SLUICE_TRY(SLUICE_REQUIRE(spec->num_micro_batches >= 1 && spec->num_micro_batches <= most,
                            "pipeline: num_micro_batches is %d; with %d virtual stages on a stage give 1 to %d",
                            spec->num_micro_batches, spec->num_virtual, most));
  SLUICE_TRY(SLUICE_REQUIRE(spec->placement == SLUICE_PLACEMENT_LOOPED || spec->placement == SLUICE_PLACEMENT_V,
                            "pipeline: placement is %d; give 0 (looped) or 1 (V)", spec->placement));
  SLUICE_TRY(SLUICE_REQUIRE(spec->receives_ahead >= 0, "pipeline: receives_ahead is %d; give at least 0",
                            spec->receives_ahead));
  SLUICE_TRY(SLUICE_REQUIRE(!(spec->separate_wgrad && spec->forward_only),
                            "pipeline: separate_wgrad and forward_only exclude each other; clear one"));
  return check_limits(spec);
}

/* ---- ops ---- */

const char* sluice_stage_op_name(int32_t kind) {
  static const char* const names[SLUICE_STAGE_OP_COUNT] = {"receive_activation", "forward",  "send_activation",
                                                           "receive_gradient",   "backward", "send_gradient",
                                                           "weight_grad",        "reduce",   "flush"};
  return kind >= 0 && kind < SLUICE_STAGE_OP_COUNT ? names[kind] : "?";
}

static int is_last(const sluice_pipeline_spec_t* spec, int32_t c) {
  return c + 1 == sluice_pipeline_num_virtual_stages(spec);
}

static int comes_from_elsewhere(const sluice_pipeline_spec_t* spec, int32_t c) {
  return c > 0 && sluice_pipeline_crosses(spec, c - 1);
}

static int goes_elsewhere(const sluice_pipeline_spec_t* spec, int32_t c) {
  return !is_last(spec, c) && sluice_pipeline_crosses(spec, c);
}

int sluice_stage_op_exists(const sluice_pipeline_spec_t* spec, int32_t kind, int32_t c) {
  switch (kind) {
    case SLUICE_STAGE_RECEIVE_ACTIVATION: return comes_from_elsewhere(spec, c);
    case SLUICE_STAGE_FORWARD: return 1;
    case SLUICE_STAGE_SEND_ACTIVATION: return goes_elsewhere(spec, c);
    case SLUICE_STAGE_RECEIVE_GRADIENT: return !spec->forward_only && goes_elsewhere(spec, c);
    case SLUICE_STAGE_BACKWARD: return !spec->forward_only;
    case SLUICE_STAGE_SEND_GRADIENT: return !spec->forward_only && comes_from_elsewhere(spec, c);
    case SLUICE_STAGE_WEIGHT_GRAD: return spec->separate_wgrad;
    default: return 0;
  }
}

int32_t sluice_stage_op_other_end(int32_t kind, int32_t c) {
  return kind == SLUICE_STAGE_SEND_ACTIVATION || kind == SLUICE_STAGE_RECEIVE_GRADIENT ? c + 1 : c - 1;
}

int sluice_stage_op_is_collective(const sluice_pipeline_spec_t* spec, int32_t kind, int32_t c) {
  if (kind == SLUICE_STAGE_REDUCE) return 1;
  return (kind == SLUICE_STAGE_FORWARD || kind == SLUICE_STAGE_BACKWARD) && spec->expert_parallel[c];
}

static void reads(sluice_stage_accesses_t* to, int32_t tensor, int32_t c) {
  to->reads[to->num_reads++] = (sluice_stage_access_t){tensor, c};
}

static void writes(sluice_stage_accesses_t* to, int32_t tensor, int32_t c) {
  to->writes[to->num_writes++] = (sluice_stage_access_t){tensor, c};
}

/* Adds the slot of c's input: one that a message filled, or the output of c - 1. The first virtual stage loads its own
 * input. */
static void reads_input(const sluice_pipeline_spec_t* spec, sluice_stage_accesses_t* to, int32_t c) {
  if (c == 0) return;
  if (comes_from_elsewhere(spec, c)) {
    reads(to, SLUICE_STAGE_T_INPUT, c);
  } else {
    reads(to, SLUICE_STAGE_T_OUTPUT, c - 1);
  }
}

/* Adds the gradient of c's output; the last virtual stage has its loss instead. */
static void reads_output_grad(const sluice_pipeline_spec_t* spec, sluice_stage_accesses_t* to, int32_t c) {
  if (is_last(spec, c)) return;
  if (goes_elsewhere(spec, c)) {
    reads(to, SLUICE_STAGE_T_OUTPUT_GRAD, c);
  } else {
    reads(to, SLUICE_STAGE_T_INPUT_GRAD, c + 1);
  }
}

static void forward(const sluice_pipeline_spec_t* spec, sluice_stage_accesses_t* to, int32_t c) {
  reads_input(spec, to, c);
  if (!spec->forward_only) writes(to, SLUICE_STAGE_T_STASH, c);
  writes(to, SLUICE_STAGE_T_OUTPUT, c);
  writes(to, SLUICE_STAGE_T_FORWARD_STATE, c);
}

/* A host's backward starts from the output tensor and stores the gradient in the input tensor, so both are read. */
static void backward(const sluice_pipeline_spec_t* spec, sluice_stage_accesses_t* to, int32_t c) {
  reads(to, SLUICE_STAGE_T_STASH, c);
  reads(to, SLUICE_STAGE_T_OUTPUT, c);
  reads_input(spec, to, c);
  reads_output_grad(spec, to, c);
  if (c > 0) writes(to, SLUICE_STAGE_T_INPUT_GRAD, c);
  if (spec->separate_wgrad) writes(to, SLUICE_STAGE_T_HELD, c);
  writes(to, spec->separate_wgrad ? SLUICE_STAGE_T_BACKWARD_STATE : SLUICE_STAGE_T_GRADIENTS, c);
}

sluice_stage_accesses_t sluice_stage_op_accesses(const sluice_pipeline_spec_t* spec, int32_t kind, int32_t c) {
  sluice_stage_accesses_t to = {.num_reads = 0};
  switch (kind) {
    case SLUICE_STAGE_RECEIVE_ACTIVATION: writes(&to, SLUICE_STAGE_T_INPUT, c); break;
    case SLUICE_STAGE_FORWARD: forward(spec, &to, c); break;
    case SLUICE_STAGE_SEND_ACTIVATION: reads(&to, SLUICE_STAGE_T_OUTPUT, c); break;
    case SLUICE_STAGE_RECEIVE_GRADIENT: writes(&to, SLUICE_STAGE_T_OUTPUT_GRAD, c); break;
    case SLUICE_STAGE_BACKWARD: backward(spec, &to, c); break;
    case SLUICE_STAGE_SEND_GRADIENT: reads(&to, SLUICE_STAGE_T_INPUT_GRAD, c); break;
    case SLUICE_STAGE_WEIGHT_GRAD:
      reads(&to, SLUICE_STAGE_T_HELD, c);
      writes(&to, SLUICE_STAGE_T_GRADIENTS, c);
      break;
    case SLUICE_STAGE_REDUCE: writes(&to, SLUICE_STAGE_T_GRADIENTS, c); break;
    default: break;
  }
  return to;
}
