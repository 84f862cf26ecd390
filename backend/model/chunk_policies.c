// SPDX-License-Identifier: Apache-2.0
#include "backend/model/chunk_policies.h"

#include <string.h>

#include "backend/base/status.h"

static sluice_status_t read_list(const char* what, const char* name, int32_t tensor, const int32_t* list,
                                 int32_t policy, int32_t num_chunks, uint8_t* out) {
  for (int32_t i = 0; i < num_chunks; ++i) {
    int32_t value = list != NULL ? list[i] : sluice_restore_of(policy);
    if (!sluice_restore_is_for(value, tensor)) {
      char known[SLUICE_RESTORE_TEXT_BYTES];
      return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s: %s[%d] is %d; known are %s", what, name, i, value,
                         sluice_restore_choices(tensor, known));
    }
    out[i] = (uint8_t)value;
  }
  return SLUICE_OK;
}

static sluice_status_t check_callback(const char* what, const sluice_chunk_policies_t* p) {
  for (int32_t i = 0; i < p->count; ++i) {
    if (sluice_restore_fits_callback(p->di[i], p->m[i])) continue;
    char known[SLUICE_RESTORE_TEXT_BYTES];
    return SLUICE_FAIL(
        SLUICE_E_UNSUPPORTED, "%s: callback experts take %s; chunk %d has restore_input %s, restore_pre_activation %s",
        what, sluice_restore_callback_choices(known), i, sluice_restore_name(p->di[i]), sluice_restore_name(p->m[i]));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_chunk_policies_read(const char* what, int32_t num_chunks, int32_t callback, const int32_t* di,
                                           const int32_t* m, int32_t* inout_di, int32_t* inout_m,
                                           sluice_chunk_policies_t* out) {
  memset(out, 0, sizeof *out);
  if (di == NULL && m == NULL) return SLUICE_OK;
  if (num_chunks < 1) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT,
                       "%s: %s names a policy for each chunk, but num_chunks is 0 (chosen by Sluice): set num_chunks",
                       what, di != NULL ? "restore_input_of" : "restore_pre_activation_of");
  }
  SLUICE_TRY(read_list(what, "restore_input_of", SLUICE_T_DI, di, *inout_di, num_chunks, out->di));
  SLUICE_TRY(read_list(what, "restore_pre_activation_of", SLUICE_T_M, m, *inout_m, num_chunks, out->m));
  out->count = num_chunks;
  if (callback) SLUICE_TRY(check_callback(what, out));
  int same_di = sluice_count_policy(out->di, num_chunks, out->di[0]) == num_chunks;
  int same_m = sluice_count_policy(out->m, num_chunks, out->m[0]) == num_chunks;
  *inout_di = same_di ? out->di[0] : SLUICE_RESTORE_BY_CHUNK;
  *inout_m = same_m ? out->m[0] : SLUICE_RESTORE_BY_CHUNK;
  if (same_di && same_m) memset(out, 0, sizeof *out);
  return SLUICE_OK;
}
