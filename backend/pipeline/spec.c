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
