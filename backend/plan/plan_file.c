#include "backend/plan/plan_file.h"

#include <assert.h>
#include <stddef.h>
#include <string.h>

#include "backend/base/hash.h"

#define PLAN_MAGIC 0x51ce504cu
#define PLAN_FORM  3u

typedef struct plan_file_s {
  uint32_t magic;
  uint32_t form;
  uint64_t fingerprint; /* of the layer */
  sluice_plan_data_t data;
  uint64_t checksum; /* of everything before */
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

#define CHECK(condition, ...) \
  if (!(condition)) return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_plan_read: " __VA_ARGS__)

sluice_status_t sluice_plan_file_read(const void* data, uint64_t bytes, uint64_t fingerprint, int32_t layer_id,
                                      sluice_plan_data_t* out_plan) {
  plan_file_t file;
  CHECK(bytes == sizeof file, "%llu bytes; a plan has %llu", (unsigned long long)bytes,
        (unsigned long long)sizeof file);
  memcpy(&file, data, sizeof file);
  CHECK(file.magic == PLAN_MAGIC, "magic is %#x; this is no plan", file.magic);
  CHECK(file.form == PLAN_FORM, "form is %u; this version reads form %u", file.form, PLAN_FORM);
  CHECK(file.checksum == checksum_of(&file), "checksum is wrong; the bytes were changed");
  CHECK(file.fingerprint == fingerprint, "fingerprint is of another layer than layer %d", layer_id);
  *out_plan = file.data;
  return SLUICE_OK;
}
