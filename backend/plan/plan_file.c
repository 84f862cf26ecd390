// SPDX-License-Identifier: Apache-2.0
#include "backend/plan/plan_file.h"

#include <assert.h>
#include <stddef.h>
#include <string.h>

#include "backend/base/check.h"
#include "backend/base/hash.h"

#define PLAN_MAGIC 0x51ce504cu
#define PLAN_FORM  4u

typedef struct plan_file_s {
  uint32_t magic;
  uint32_t form;
  uint64_t fingerprint; /* of the layer */
  sluice_plan_data_t data;
  uint64_t checksum; /* of everything before it */
} plan_file_t;
static_assert(sizeof(plan_file_t) == SLUICE_PLAN_FILE_BYTES, "callers bring so much room");

static uint64_t checksum_of(const plan_file_t* file) {
  return sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, file, offsetof(plan_file_t, checksum));
}

void sluice_plan_file_write(const sluice_plan_data_t* plan, uint64_t fingerprint, void* data) {
  plan_file_t file;
  memset(&file, 0, sizeof file);
  file.magic = PLAN_MAGIC, file.form = PLAN_FORM, file.fingerprint = fingerprint;
  memcpy(&file.data, plan, sizeof file.data);
  file.checksum = checksum_of(&file);
  memcpy(data, &file, sizeof file);
}

sluice_status_t sluice_plan_file_read(const void* data, uint64_t bytes, uint64_t fingerprint, int32_t layer_id,
                                      sluice_plan_data_t* out_plan) {
  plan_file_t file;
  SLUICE_TRY(SLUICE_REQUIRE(bytes == sizeof file, "sluice_plan_read: %llu bytes; a plan has %llu",
                            (unsigned long long)bytes, (unsigned long long)sizeof file));
  memcpy(&file, data, sizeof file);
  SLUICE_TRY(
      SLUICE_REQUIRE(file.magic == PLAN_MAGIC, "sluice_plan_read: magic is %#x; this is not a plan", file.magic));
  SLUICE_TRY(SLUICE_REQUIRE(file.form == PLAN_FORM, "sluice_plan_read: form is %u; this library reads form %u",
                            file.form, PLAN_FORM));
  SLUICE_TRY(SLUICE_REQUIRE(file.checksum == checksum_of(&file),
                            "sluice_plan_read: checksum is wrong; the bytes were changed"));
  SLUICE_TRY(SLUICE_REQUIRE(file.fingerprint == fingerprint,
                            "sluice_plan_read: fingerprint is of another layer than layer %d", layer_id));
  *out_plan = file.data;
  return SLUICE_OK;
}
