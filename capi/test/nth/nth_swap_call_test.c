// SPDX-License-Identifier: Apache-2.0
/* A swap over a file while every file call and every allocation of it fails in turn: bytes come back as they were, or a
 * call says what failed; nothing stays open or in the folder, and after a reset the next batch works. */
#include <dirent.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "capi/test/nth/failing_calls.h"
#include "sluice/swap.h"

enum { LAYERS = 10, BYTES = 5000 };

static char folder[] = "/tmp/sluice_swaps_XXXXXX", path[64];

typedef struct host_s {
  sluice_swap_t* swap;
  char data[LAYERS][BYTES];
  int64_t tickets[LAYERS];
} host_t;

static sluice_status_t run_op(host_t* h, const sluice_swap_op_t* op) {
  char* data = h->data[op->layer];
  int64_t* ticket = &h->tickets[op->layer];
  switch (op->kind) {
    case SLUICE_SWAP_OP_PUT: return sluice_swap_put(h->swap, data, BYTES, ticket);
    case SLUICE_SWAP_OP_SETTLE: {
      const sluice_status_t status = sluice_swap_settle(h->swap, *ticket);
      memset(data, 0, BYTES);
      return status;
    }
    case SLUICE_SWAP_OP_PREFETCH: return sluice_swap_prefetch(h->swap, *ticket, data);
    case SLUICE_SWAP_OP_TAKE: return sluice_swap_take(h->swap, *ticket);
    default: sluice_swap_release(h->swap, *ticket); return SLUICE_OK;
  }
}

static sluice_status_t reach(host_t* h, int32_t event, int32_t layer) {
  sluice_swap_op_t ops[LAYERS + 1];
  int32_t count = 0;
  sluice_status_t status = sluice_swap_reach(h->swap, event, 0, layer, ops, LAYERS + 1, &count);
  for (int32_t i = 0; i < count && status == SLUICE_OK; ++i) status = run_op(h, ops + i);
  return status;
}

/* Whether a forward and backward ran; -1: and gave other bytes. */
static int run_batch(host_t* h) {
  sluice_status_t status = SLUICE_OK;
  int is_right = 1;
  for (int32_t layer = 0; layer < LAYERS && status == SLUICE_OK; ++layer) {
    memset(h->data[layer], 'a' + layer, BYTES);
    status = reach(h, SLUICE_SWAP_FORWARD_ENDS, layer);
  }
  for (int32_t layer = LAYERS; layer-- > 0 && status == SLUICE_OK;) {
    status = reach(h, SLUICE_SWAP_BACKWARD_BEGINS, layer);
    for (int32_t at = 0; at < BYTES && status == SLUICE_OK; ++at) is_right &= h->data[layer][at] == 'a' + layer;
  }
  if (status == SLUICE_OK) status = reach(h, SLUICE_SWAP_BACKWARD_ENDS, 0);
  if (!is_right) return -1;
  return status == SLUICE_OK;
}

static const call_place_t* failing;
static int64_t failing_nth;
static int32_t num_struck;

typedef struct outcome_s {
  int is_made, ran, ran_again; /* after a reset */
  int32_t has_failed;
} outcome_t;

static void* run(void* data) {
  static const int32_t swapped[LAYERS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  outcome_t* out = data;
  host_t* h = calloc(1, sizeof *h);
  sluice_swap_config_t config;
  sluice_swap_config_init(&config, sizeof config);
  config.swapped = swapped, config.num_layers = LAYERS, config.path = path, config.budget_bytes = LAYERS * BYTES;
  if (failing == NULL) calls_count();
  if (failing != NULL) calls_fail(failing, failing_nth);
  out->is_made = sluice_swap_create(&config, &h->swap) == SLUICE_OK;
  if (out->is_made) {
    out->ran = run_batch(h);
    out->has_failed = calls_end();
    sluice_swap_reset(h->swap);
    out->ran_again = run_batch(h);
  } else {
    out->has_failed = calls_end();
  }
  sluice_swap_destroy(h->swap);
  free(h);
  return NULL;
}

static int32_t count_entries(const char* name) {
  DIR* entries = opendir(name);
  int32_t count = 0;
  while (readdir(entries) != NULL) ++count;
  closedir(entries);
  return count;
}

/* On a thread, so that the call stacks of allocations begin the same. */
static void attempt(const call_place_t* place, int64_t nth, int32_t num_descriptors) {
  pthread_t thread;
  outcome_t out = {0};
  failing = place, failing_nth = nth;
  assert_int_equal(pthread_create(&thread, NULL, run, &out), 0);
  pthread_join(thread, NULL);
  num_struck += out.has_failed;
  if (unlink(path) == 0 && (place == NULL || strcmp(place->name, "unlink") != 0)) fail_msg("the file is still there");
  const int is_as_told = out.has_failed ? (!out.is_made || out.ran == 0) : (out.is_made && out.ran == 1);
  if (is_as_told && (!out.is_made || out.ran_again == 1) && count_entries("/proc/self/fd") == num_descriptors) return;
  fail_msg("%s, hit %lld fails (%d): made %d, ran %d, then %d; descriptors %d of %d", place ? place->name : "none",
           (long long)nth, out.has_failed, out.is_made, out.ran, out.ran_again, count_entries("/proc/self/fd"),
           num_descriptors);
}

static void nth_call(void** state) {
  (void)state;
  int32_t num_places = 0;
  const int32_t num_descriptors = count_entries("/proc/self/fd");
  attempt(NULL, 0, num_descriptors);
  const call_place_t* places = calls_places(&num_places);
  assert_in_range(num_places, 8, 64);
  for (int32_t p = 0; p < num_places; ++p) {
    const call_place_t place = places[p];
    if (strcmp(place.name, "close") == 0) continue; /* its status changes nothing: the descriptor is gone */
    for (int64_t nth = 0; nth < place.num_hits; ++nth) attempt(&place, nth, num_descriptors);
  }
  assert_true(num_struck > 30);
  print_message("%d places, %d calls have failed\n", num_places, num_struck);
}

static int set_up(void** state) {
  (void)state;
  if (mkdtemp(folder) == NULL) return 1;
  return snprintf(path, sizeof path, "%s/swap", folder) < 0;
}

static int tear_down(void** state) {
  (void)state;
  return rmdir(folder);
}

int main(void) {
  static const struct CMUnitTest tests[] = {{"Swap_NthCallFails_SaysSoAndTheNextBatchWorks", nth_call}};
  return cmocka_run_group_tests_name("nth call of a swap", tests, set_up, tear_down);
}
