// SPDX-License-Identifier: Apache-2.0
/* Plans as bytes: raw, and with the head of a plan of this layer and a matching checksum. A valid plan behaves like any
 * other: it writes, reads back, and the layer accepts it or reports why not. */
#include <string.h>

#include "backend/base/hash.h"
#include "sluice/sluice.h"
#include "third_party/fuzz/target.h"

enum { HEAD_BYTES = 16, CHECKSUM_BYTES = 8, MOST_PLAN_BYTES = 4096 };

#define USE_UP_TO_BYTES (UINT64_C(1) << 22) /* limit of a plan that a layer runs under */

static sluice_context_t* context;
static sluice_moe_t* moe;
static uint8_t plain[MOST_PLAN_BYTES]; /* a plan of this layer */
static uint64_t plain_bytes;

static void begin(void) {
  sluice_context_config_t c;
  sluice_moe_config_t layer;
  sluice_plan_config_t config;
  sluice_plan_t* plan = NULL;
  sluice_context_config_init(&c, sizeof c);
  c.gemm = "ref";
  FUZZ_CHECK(sluice_context_create(&c, NULL, &context) == SLUICE_OK);
  sluice_moe_config_init(&layer, sizeof layer);
  layer.model_width = 5, layer.hidden_width = 7, layer.num_experts = 4, layer.top_k = 2;
  layer.gated = 1, layer.bias = 1, layer.layer_id = 3;
  FUZZ_CHECK(sluice_moe_create(context, &layer, &moe) == SLUICE_OK);
  sluice_plan_config_init(&config, sizeof config);
  config.max_tokens = 40;
  FUZZ_CHECK(sluice_plan_create(moe, &config, &plan) == SLUICE_OK);
  plain_bytes = sizeof plain;
  FUZZ_CHECK(sluice_plan_write(plan, plain, &plain_bytes) == SLUICE_OK);
  sluice_plan_destroy(plan);
}

static void try_to_read(const uint8_t* data, size_t size) {
  sluice_plan_t *plan = NULL, *again = NULL;
  sluice_plan_info_t info = {.struct_size = sizeof info}, info_again = {.struct_size = sizeof info_again};
  uint8_t bytes[MOST_PLAN_BYTES];
  uint64_t used = sizeof bytes;
  if (sluice_plan_read(moe, data, size, &plan) != SLUICE_OK) {
    FUZZ_CHECK(plan == NULL);
    return;
  }
  ++fuzz_num_taken;
  FUZZ_CHECK(sluice_plan_get_info(plan, &info) == SLUICE_OK);
  FUZZ_CHECK(sluice_plan_write(plan, bytes, &used) == SLUICE_OK);
  FUZZ_CHECK(sluice_plan_read(moe, bytes, used, &again) == SLUICE_OK);
  FUZZ_CHECK(sluice_plan_get_info(again, &info_again) == SLUICE_OK);
  FUZZ_CHECK(info.total_bytes == info_again.total_bytes && info.chunk_rows == info_again.chunk_rows);
  if (info.total_bytes <= USE_UP_TO_BYTES) {
    const sluice_status_t status = sluice_moe_use_plan(moe, plan);
    FUZZ_CHECK(status == SLUICE_OK || status == SLUICE_E_OVER_BUDGET);
    FUZZ_CHECK(sluice_moe_use_plan(moe, NULL) == SLUICE_OK);
  }
  sluice_plan_destroy(plan);
  sluice_plan_destroy(again);
}

/* Puts the input between the head and the checksum of a plan, and corrects the checksum. */
static void try_sealed(const uint8_t* data, size_t size) {
  const size_t room = (size_t)plain_bytes - HEAD_BYTES - CHECKSUM_BYTES;
  uint8_t* sealed = malloc((size_t)plain_bytes);
  FUZZ_CHECK(sealed != NULL);
  memcpy(sealed, plain, (size_t)plain_bytes);
  memcpy(sealed + HEAD_BYTES, data, size < room ? size : room);
  const uint64_t sum = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, sealed, plain_bytes - CHECKSUM_BYTES);
  memcpy(sealed + plain_bytes - CHECKSUM_BYTES, &sum, sizeof sum);
  try_to_read(sealed, (size_t)plain_bytes);
  free(sealed);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (moe == NULL) begin();
  try_to_read(data, size);
  if (size > 0) try_sealed(data, size);
  return 0;
}
