// SPDX-License-Identifier: Apache-2.0
/* The public table of restore policies. */
#include "backend/base/check.h"
#include "backend/model/restore_json.h"
#include "sluice/moe.h"

sluice_status_t sluice_restore_policies_json(char* text, uint64_t* inout_bytes) {
  SLUICE_TRY(SLUICE_REQUIRE(inout_bytes != NULL, "sluice_restore_policies_json: inout_bytes is NULL"));
  const uint64_t room = *inout_bytes;
  *inout_bytes = sluice_restore_write_json(NULL, 0) + 1;
  if (text == NULL) return SLUICE_OK;
  SLUICE_TRY(SLUICE_REQUIRE(room >= *inout_bytes,
                            "sluice_restore_policies_json: room for %llu bytes, the text has %llu",
                            (unsigned long long)room, (unsigned long long)*inout_bytes));
  sluice_restore_write_json(text, room);
  return SLUICE_OK;
}
