// SPDX-License-Identifier: Apache-2.0
/* The table of policies. */
#include "backend/pipeline/policies/policies.h"

const sluice_policy_t* sluice_policy(int32_t policy) {
  static const sluice_policy_t* const rows[SLUICE_POLICY_COUNT] = {
      [SLUICE_POLICY_MESSAGE_DRIVEN] = &sluice_policy_message_driven,
      [SLUICE_POLICY_BACKWARD_FIRST] = &sluice_policy_backward_first,
      [SLUICE_POLICY_1F1B_HINT] = &sluice_policy_1f1b_hint,
      [SLUICE_POLICY_1F1B] = &sluice_policy_1f1b,
      [SLUICE_POLICY_GPIPE] = &sluice_policy_gpipe,
      [SLUICE_POLICY_ZERO_BUBBLE] = &sluice_policy_zero_bubble,
      [SLUICE_POLICY_LOOPED] = &sluice_policy_looped,
      [SLUICE_POLICY_V] = &sluice_policy_v,
      [SLUICE_POLICY_FORWARD_ONLY] = &sluice_policy_forward_only,
      [SLUICE_POLICY_DEEPSPEED] = &sluice_policy_deepspeed,
  };
  return policy >= 0 && policy < SLUICE_POLICY_COUNT ? rows[policy] : NULL;
}

const char* sluice_policy_name(int32_t policy) {
  const sluice_policy_t* row = sluice_policy(policy);
  if (row != NULL) return row->name;
  return policy == SLUICE_POLICY_OPEN ? "adaptive" : "?";
}

sluice_status_t sluice_policy_check(const sluice_pipeline_spec_t* spec) {
  const sluice_policy_t* row = sluice_policy(spec->policy);
  SLUICE_TRY(
      SLUICE_REQUIRE(row != NULL, "pipeline: policy is %d; give 0 to %d", spec->policy, SLUICE_POLICY_COUNT - 1));
  SLUICE_TRY(SLUICE_REQUIRE(row->placement < 0 || row->placement == spec->placement,
                            "pipeline: policy %s needs placement %d; it is %d", row->name, row->placement,
                            spec->placement));
  int32_t most = row->max_virtual > 0 ? row->max_virtual : SLUICE_PIPELINE_MAX_VIRTUAL_STAGES;
  SLUICE_TRY(SLUICE_REQUIRE(spec->num_virtual >= row->min_virtual && spec->num_virtual <= most,
                            "pipeline: policy %s needs %d to %d virtual stages on a stage; num_virtual is %d",
                            row->name, row->min_virtual, most, spec->num_virtual));
  SLUICE_TRY(SLUICE_REQUIRE(row->separate_wgrad < 0 || row->separate_wgrad == (spec->separate_wgrad != 0),
                            "pipeline: policy %s needs separate_wgrad = %d", row->name, row->separate_wgrad));
  SLUICE_TRY(SLUICE_REQUIRE(row->forward_only == (spec->forward_only != 0),
                            "pipeline: policy %s needs forward_only = %d", row->name, row->forward_only));
  return row->check == NULL ? SLUICE_OK : row->check(spec);
}
