// SPDX-License-Identifier: Apache-2.0
/* A swap over a file, while each of its file calls and allocations fails in turn. Either all bytes return unchanged or
 * a call reports the failure; no descriptor stays open, no file remains, and after a reset the next batch works. */
#include <unistd.h>

#include "capi/test/nth/failing_calls.h"
#include "sluice/swap.h"
#include "third_party/bazel/test.h"

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

/* Returns 1 if a forward and backward ran, 0 if a call failed, -1 if bytes are wrong. */
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

typedef struct outcome_s {
  host_t host;
  int ran; /* result of run_batch */
} outcome_t;

static void run(void* user) {
  static const int32_t swapped[LAYERS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  outcome_t* out = user;
  DEFAULTS(sluice_swap_config, config);
  config.swapped = swapped, config.num_layers = LAYERS, config.path = path, config.budget_bytes = LAYERS * BYTES;
  if (sluice_swap_create(&config, &out->host.swap) == SLUICE_OK) out->ran = run_batch(&out->host);
}

static int32_t attempt(const call_place_t* place, int64_t nth, int32_t num_descriptors) {
  if (place != NULL && strcmp(place->name, "close") == 0) return 0; /* a close that fails still closes the descriptor */
  outcome_t* out = calloc(1, sizeof *out);
  assert_non_null(out);
  const int32_t has_failed = calls_run(run, out, place, nth);
  const int is_made = out->host.swap != NULL, ran = out->ran;
  sluice_swap_reset(out->host.swap);
  const int ran_again = is_made ? run_batch(&out->host) : 1;
  sluice_swap_destroy(out->host.swap);
  free(out);
  if (unlink(path) == 0 && (place == NULL || strcmp(place->name, "unlink") != 0)) fail_msg("the file is still there");
  const int32_t now = calls_count_entries("/proc/self/fd");
  if (ran == !has_failed && (is_made || has_failed) && ran_again == 1 && now == num_descriptors) return has_failed;
  fail_msg("%s, hit %lld fails (%d): made %d, ran %d, then %d; descriptors %d of %d", place ? place->name : "none",
           (long long)nth, has_failed, is_made, ran, ran_again, now, num_descriptors);
  return has_failed;
}

TEST(Swap_NthCallFails_SaysSoAndTheNextBatchWorks) { calls_fail_each(attempt, 8, 31); }

static int set_up(void** state) {
  (void)state;
  if (mkdtemp(folder) == NULL) return 1;
  return snprintf(path, sizeof path, "%s/swap", folder) < 0;
}

static int tear_down(void** state) {
  (void)state;
  return rmdir(folder);
}

int main(void) { return run_cases(set_up, tear_down); }
