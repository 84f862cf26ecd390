// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/test/pipelines.h"

sluice_pipeline_spec_t pipeline_of(int32_t p, int32_t v, int32_t m, int32_t policy, int32_t in_flight) {
  const sluice_policy_t* row = sluice_policy(policy);
  sluice_pipeline_spec_t spec = {.num_stages = p,
                                 .num_virtual = v,
                                 .num_micro_batches = m,
                                 .policy = policy,
                                 .placement = row->placement < 0 ? SLUICE_PLACEMENT_LOOPED : row->placement,
                                 .separate_wgrad = row->separate_wgrad == 1,
                                 .forward_only = row->forward_only,
                                 .receives_ahead = 1};
  for (int32_t c = 0; c < p * v; ++c) spec.in_flight[c] = in_flight;
  return spec;
}

sluice_pipeline_program_t* program_of(const sluice_pipeline_spec_t* spec) {
  sluice_pipeline_program_t* program = NULL;
  WORKS(sluice_pipeline_program_build(spec, sluice_process_allocator(), &program));
  assert_non_null(program);
  return program;
}

void free_program(sluice_pipeline_program_t* program) {
  sluice_pipeline_program_destroy(program, sluice_process_allocator());
}

void assert_refused(const sluice_pipeline_spec_t* spec, sluice_status_t status, const char* text) {
  sluice_pipeline_program_t* program = (sluice_pipeline_program_t*)(void*)&program;
  REFUSED(sluice_pipeline_program_build(spec, sluice_process_allocator(), &program), status, text);
  assert_null(program);
}
