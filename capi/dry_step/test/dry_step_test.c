// SPDX-License-Identifier: Apache-2.0
/* Tests dry steps: their records, the number of calls of each kind, and refused requests. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/test/refused.h"
#include "backend/device/cuda/fake/fake_record.h"
#include "capi/dry_step/dry_step.h"

static const sluice_dry_step_t small = {.ranks = 2,
                                        .tokens = 64,
                                        .model_width = 32,
                                        .hidden_width = 16,
                                        .experts = 4,
                                        .top_k = 2,
                                        .chunks = 1,
                                        .seed = 7,
                                        .device_bytes = (int64_t)1 << 40};

/* Returns the record as text, which the caller frees. Fails the test if the step fails. */
static char* record_of(const sluice_dry_step_t* step) {
  char* text = NULL;
  size_t bytes = 0;
  FILE* out = open_memstream(&text, &bytes);
  const sluice_status_t status = sluice_dry_step_run(step, out);
  fclose(out);
  if (status != SLUICE_OK) fail_msg("%d: %s", status, last_message());
  return text;
}

static int64_t count_after(const sluice_dry_step_t* step, sluice_fake_event_kind_t kind) {
  free(record_of(step));
  return sluice_fake_cuda_recorded(kind);
}

TEST(DryStep_TheSameTwice_IsTheSameRecord) {
  sluice_dry_step_t one = small;
  one.ranks = 1;
  char *first = record_of(&one), *second = record_of(&one);
  assert_string_equal(first, second);
  assert_non_null(strstr(first, "\"forward\""));
  assert_non_null(strstr(first, "\"sluice_route_count\", 1, 128, ")); /* one tile with all routes */
  /* After the settling steps nothing is allocated, and no event is made. */
  assert_int_equal(sluice_fake_cuda_recorded(SLUICE_FAKE_HOST_CALL), 0);
  free(first);
  free(second);
}

/* An additional call of any kind, on any rank, changes a number. */
TEST(DryStep_SmallStep_HasTheseCalls) {
  static const int64_t wanted[] = {
      [SLUICE_FAKE_LAUNCH] = 48,  [SLUICE_FAKE_COPY] = 4,  [SLUICE_FAKE_GEMM] = 24,     [SLUICE_FAKE_MESSAGES] = 10,
      [SLUICE_FAKE_RECORD] = 72,  [SLUICE_FAKE_WAIT] = 50, [SLUICE_FAKE_HOST_WAIT] = 2, [SLUICE_FAKE_HEADER] = 4,
      [SLUICE_FAKE_PRIORITY] = 4, [SLUICE_FAKE_MARK] = 4};
  free(record_of(&small));
  for (int kind = 0; kind <= SLUICE_FAKE_MARK; ++kind) {
    if (sluice_fake_cuda_recorded(kind) == wanted[kind]) continue;
    fail_msg("%lld events of kind %d, wanted %lld", (long long)sluice_fake_cuda_recorded(kind), kind,
             (long long)wanted[kind]);
  }
}

/* ---- refusals --------------------------------------------------------------------------------------------------- */

static void refuses(sluice_dry_step_t step, sluice_status_t want, const char* words) {
  char text[16];
  FILE* out = fmemopen(text, sizeof text, "w");
  const sluice_status_t status = sluice_dry_step_run(&step, out);
  fclose(out);
  if (status != want || strstr(last_message(), words) == NULL) {
    fail_msg("%d: %s; wanted %d: ..%s..", status, status == SLUICE_OK ? "" : last_message(), want, words);
  }
}

TEST(DryStep_WhatItCannotHold_IsRefusedByNameWithTheRemedy) {
  sluice_dry_step_t step = small;
  step.ranks = 9;
  refuses(step, SLUICE_E_INVALID_ARGUMENT, "ranks is 9; it must be from 1 to 8");
  step = small, step.top_k = 5;
  refuses(step, SLUICE_E_INVALID_ARGUMENT, "top_k is 5; it must be from 1 to 4");
  step = small, step.ranks = 3;
  refuses(step, SLUICE_E_INVALID_ARGUMENT, "4 experts do not divide over 3 ranks");
  step = small, step.device_bytes = 8192;
  refuses(step, SLUICE_E_NO_MEMORY, "and the device has 8192");
  refuses(step, SLUICE_E_NO_MEMORY, "ask for more ranks or fewer tokens");
  /* The host's tensors fit, the engine's slots do not: cuBLAS's workspace alone takes 32 MiB. */
  step = small, step.device_bytes = 1 << 20;
  refuses(step, SLUICE_E_NO_MEMORY, "does not hold this layer");
  refuses(step, SLUICE_E_NO_MEMORY, "ask for more ranks or fewer tokens");
  free(record_of(&small)); /* a refused request leaves no state */
}

TEST(DryStep_MoreExperts_TakeNoMoreLaunchesOrGroups) {
  sluice_dry_step_t step = small;
  step.tokens = 2048;
  const int64_t launches = count_after(&step, SLUICE_FAKE_LAUNCH),
                groups = sluice_fake_cuda_recorded(SLUICE_FAKE_MESSAGES);
  step.experts = 64;
  assert_int_equal(count_after(&step, SLUICE_FAKE_LAUNCH), launches);
  assert_int_equal(sluice_fake_cuda_recorded(SLUICE_FAKE_MESSAGES), groups);
}

/* Launches pack tokens, output gradients, and tokens again. Each reads a token's row once for all ranks. */
TEST(DryStep_DeduplicatedLayer_PacksCopiesByOneLaunch) {
  sluice_dry_step_t step = small;
  int64_t launches = 0;
  step.ranks = 4, step.tokens = 2048, step.experts = 16, step.deduplicate = SLUICE_DEDUPLICATE_RANKS;
  char* text = record_of(&step);
  for (const char* at = text; (at = strstr(at, "\"sluice_scatter_rows\"")) != NULL; ++at) ++launches;
  free(text);
  assert_int_equal(launches, 3 * step.ranks);
  /* And unpacks them by one launch. */
  launches = sluice_fake_cuda_recorded(SLUICE_FAKE_LAUNCH);
  step.experts = 64;
  assert_int_equal(count_after(&step, SLUICE_FAKE_LAUNCH), launches);
}

/* Gradients of gate and up that are one matrix take one GEMM in either layout. */
TEST(DryStep_TransposedExperts_TakeNoMoreGemms) {
  sluice_dry_step_t step = small;
  const int64_t gemms = count_after(&step, SLUICE_FAKE_GEMM);
  step.is_transposed = 1;
  assert_int_equal(count_after(&step, SLUICE_FAKE_GEMM), gemms);
}

TEST(DryStep_MoreChunks_AreMoreOfEverythingButReads) {
  sluice_dry_step_t step = small;
  const int64_t launches = count_after(&step, SLUICE_FAKE_LAUNCH),
                groups = sluice_fake_cuda_recorded(SLUICE_FAKE_MESSAGES);
  const int64_t reads = sluice_fake_cuda_recorded(SLUICE_FAKE_HOST_WAIT);
  step.chunks = 4;
  assert_true(count_after(&step, SLUICE_FAKE_LAUNCH) > 3 * launches);
  assert_int_equal(sluice_fake_cuda_recorded(SLUICE_FAKE_MESSAGES), groups + 2 * 3 * 5);
  assert_int_equal(sluice_fake_cuda_recorded(SLUICE_FAKE_HOST_WAIT), reads);
}
