// SPDX-License-Identifier: Apache-2.0
#include "capi/src/pipeline_policy.h"

#include <string.h>

#include "backend/base/status.h"
#include "backend/base/text.h"
#include "backend/pipeline/policy_table.h"
#include "sluice/pipeline.h"

/* Returns whether a host may name the policy: evaluation has its own, and the baseline is only simulated. */
static int is_offered(int32_t policy) {
  return policy != SLUICE_POLICY_FORWARD_ONLY && policy != SLUICE_POLICY_DEEPSPEED;
}

const char* sluice_pipeline_policy_name(int32_t index) {
  for (int32_t policy = 0; policy < SLUICE_POLICY_COUNT; ++policy) {
    if (is_offered(policy) && index-- == 0) return sluice_policy(policy)->name;
  }
  return index == 0 ? sluice_policy_name(SLUICE_POLICY_OPEN) : NULL;
}

static sluice_status_t fail_policy(const char* name) {
  char names[256];
  sluice_text_t text = sluice_text(names, sizeof names);
  const char* known;
  for (int32_t i = 0; (known = sluice_pipeline_policy_name(i)) != NULL; ++i) {
    sluice_text_add(&text, "%s%s", i == 0 ? "" : ", ", known);
  }
  return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "pipeline: policy \"%s\" is not known; give one of %s", name, names);
}

sluice_status_t sluice_capi_policy(const char* name, int32_t* out_policy) {
  if (name == NULL) name = "backward_first";
  if (strcmp(name, sluice_policy_name(SLUICE_POLICY_OPEN)) == 0) {
    *out_policy = SLUICE_POLICY_OPEN;
    return SLUICE_OK;
  }
  for (int32_t policy = 0; policy < SLUICE_POLICY_COUNT; ++policy) {
    if (!is_offered(policy) || strcmp(sluice_policy(policy)->name, name) != 0) continue;
    *out_policy = policy;
    return SLUICE_OK;
  }
  return fail_policy(name);
}

sluice_status_t sluice_capi_simulated_policy(const char* name, int32_t* out_policy) {
  if (name == NULL || strcmp(name, sluice_policy(SLUICE_POLICY_DEEPSPEED)->name) != 0) {
    return sluice_capi_policy(name, out_policy);
  }
  *out_policy = SLUICE_POLICY_DEEPSPEED;
  return SLUICE_OK;
}
