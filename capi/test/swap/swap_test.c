// SPDX-License-Identifier: Apache-2.0
/* Swapping through the C ABI: all bytes return unchanged from both tiers, in the order of the schedule. Errors are
 * reported by name, and the next batch runs. */
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/base/test/refused.h"
#include "sluice/swap.h"

enum { LAYERS = 5, PIECES = 2, BATCHES = 6, IN_FLIGHT = 3, MOST_OPS = LAYERS + 1 };
static const int32_t swapped[LAYERS] = {1, 0, 1, 1, 0};
/* Copies are divided into parts of 1 MiB, so the second piece has several. */
static const uint64_t sizes[PIECES] = {777, (3 << 20) + 5};

static char folder[] = "/tmp/sluice_swap_XXXXXX", path[64];

static sluice_swap_config_t config_of(const char* at, uint64_t budget) {
  DEFAULTS(sluice_swap_config, config);
  config.swapped = swapped, config.num_layers = LAYERS, config.path = at, config.budget_bytes = budget;
  return config;
}

static sluice_swap_t* open_at(const char* at, uint64_t budget) {
  const sluice_swap_config_t config = config_of(at, budget);
  sluice_swap_t* swap = NULL;
  WORKS(sluice_swap_create(&config, &swap));
  return swap;
}

static sluice_swap_stats_t stats_of(sluice_swap_t* swap) {
  sluice_swap_stats_t stats = {.struct_size = sizeof stats};
  WORKS(sluice_swap_get_stats(swap, &stats));
  return stats;
}

/* ---- a host with layers whose bytes identify their batch, layer and piece ---- */

typedef struct piece_s {
  uint8_t* data;
  int64_t ticket;
} piece_t;
typedef struct host_s {
  sluice_swap_t* swap;
  piece_t pieces[BATCHES][LAYERS][PIECES];
} host_t;

static uint8_t byte_of(int64_t batch, int32_t layer, int32_t piece, uint64_t at) {
  return (uint8_t)(batch * 31 + layer * 7 + piece * 3 + (int64_t)(at * 2654435761U >> 24));
}

static sluice_status_t run_op(host_t* h, const sluice_swap_op_t* op) {
  for (int32_t p = 0; p < PIECES; ++p) {
    piece_t* piece = &h->pieces[op->micro_batch][op->layer][p];
    sluice_status_t status = SLUICE_OK;
    switch (op->kind) {
      case SLUICE_SWAP_OP_PUT: status = sluice_swap_put(h->swap, piece->data, sizes[p], &piece->ticket); break;
      case SLUICE_SWAP_OP_SETTLE:
        status = sluice_swap_settle(h->swap, piece->ticket);
        if (status == SLUICE_OK) {
          memset(piece->data, 0xEE, sizes[p]); /* freed */
          free(piece->data);
          piece->data = NULL;
        }
        break;
      case SLUICE_SWAP_OP_PREFETCH:
        piece->data = malloc(sizes[p]);
        status = sluice_swap_prefetch(h->swap, piece->ticket, piece->data);
        break;
      case SLUICE_SWAP_OP_TAKE: status = sluice_swap_take(h->swap, piece->ticket); break;
      default: sluice_swap_release(h->swap, piece->ticket); break;
    }
    if (status != SLUICE_OK) return status;
  }
  return SLUICE_OK;
}

static sluice_status_t reach(host_t* h, int32_t event, int64_t batch, int32_t layer) {
  sluice_swap_op_t ops[MOST_OPS];
  int32_t count = 0;
  sluice_status_t status = sluice_swap_reach(h->swap, event, batch, layer, ops, MOST_OPS, &count);
  for (int32_t i = 0; i < count && status == SLUICE_OK; ++i) status = run_op(h, ops + i);
  return status;
}

static sluice_status_t forward(host_t* h, int64_t batch) {
  for (int32_t layer = 0; layer < LAYERS; ++layer) {
    for (int32_t p = 0; p < PIECES; ++p) {
      uint8_t* data = h->pieces[batch][layer][p].data = malloc(sizes[p]);
      for (uint64_t at = 0; at < sizes[p]; ++at) data[at] = byte_of(batch, layer, p, at);
    }
    const sluice_status_t status = reach(h, SLUICE_SWAP_FORWARD_ENDS, batch, layer);
    if (status != SLUICE_OK) return status;
  }
  return SLUICE_OK;
}

static sluice_status_t backward(host_t* h, int64_t batch) {
  for (int32_t layer = LAYERS - 1; layer >= 0; --layer) {
    const sluice_status_t status = reach(h, SLUICE_SWAP_BACKWARD_BEGINS, batch, layer);
    if (status != SLUICE_OK) return status;
    for (int32_t p = 0; p < PIECES; ++p) {
      uint8_t* data = h->pieces[batch][layer][p].data;
      for (uint64_t at = 0; at < sizes[p]; ++at) assert_int_equal(data[at], byte_of(batch, layer, p, at));
      free(data);
      h->pieces[batch][layer][p].data = NULL;
    }
  }
  return reach(h, SLUICE_SWAP_BACKWARD_ENDS, batch, 0);
}

static sluice_status_t run_batch(host_t* h) {
  for (int64_t begun = 0, ended = 0; ended < BATCHES;) {
    const int64_t may_begin = begun < BATCHES && begun - ended < IN_FLIGHT;
    const sluice_status_t status = may_begin ? forward(h, begun++) : backward(h, ended++);
    if (status != SLUICE_OK) return status;
  }
  return SLUICE_OK;
}

/* Called after a batch that failed. */
static void abandon(host_t* h) {
  sluice_swap_reset(h->swap);
  for (size_t i = 0; i < sizeof h->pieces / sizeof(piece_t); ++i) free((&h->pieces[0][0][0])[i].data);
  memset(h->pieces, 0, sizeof h->pieces);
  assert_int_equal(stats_of(h->swap).held_bytes, 0);
}

/* ---- cases ---- */

static const uint64_t ENOUGH = 1 << 30;

TEST(Swap_BothTiers_BringEveryByteBack) {
  const uint64_t whole = BATCHES * 3 * (sizes[0] + sizes[1]);
  for (int32_t is_file = 0; is_file < 2; ++is_file) {
    host_t h = {.swap = open_at(is_file ? path : NULL, ENOUGH)};
    assert_int_not_equal(access(path, F_OK), 0); /* the file is unlinked */
    for (int32_t batch = 1; batch <= 2; ++batch) {
      WORKS(run_batch(&h));
      const sluice_swap_stats_t stats = stats_of(h.swap);
      assert_int_equal(stats.out_bytes, batch * whole);
      assert_int_equal(stats.in_bytes, batch * whole);
      assert_int_equal(stats.held_bytes, 0);
      assert_int_equal(stats.most_bytes, IN_FLIGHT * 3 * (sizes[0] + sizes[1]));
    }
    sluice_swap_destroy(h.swap);
  }
}

TEST(Swap_PastItsBudget_NamesTheBytesAndRunsAgain) {
  const uint64_t needed = IN_FLIGHT * 3 * (sizes[0] + sizes[1]);
  host_t h = {.swap = open_at(NULL, needed - 1)};
  REFUSED(run_batch(&h), SLUICE_E_OVER_BUDGET, "more than the budget of");
  abandon(&h);
  WORKS(forward(&h, 0));
  WORKS(backward(&h, 0));
  sluice_swap_destroy(h.swap);
  h.swap = open_at(path, needed);
  WORKS(run_batch(&h));
  sluice_swap_destroy(h.swap);
}

/* The system refuses a write because of a limit on the size of files. */
TEST(Swap_FullDisk_NamesThePathAndTheNextBatchRuns) {
  struct rlimit limit, small;
  int64_t ticket;
  host_t h = {.swap = open_at(path, ENOUGH)};
  (void)signal(SIGXFSZ, SIG_IGN);
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
  small = limit;
  small.rlim_cur = sizes[1] * 2;
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
  const sluice_status_t status = run_batch(&h);
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
  REFUSED(status, SLUICE_E_EXTERNAL, path);
  assert_non_null(strstr(last_message(), "File too large"));
  assert_int_equal(sluice_swap_put(h.swap, "x", 1, &ticket), SLUICE_E_EXTERNAL); /* fails until the reset */
  abandon(&h);
  WORKS(run_batch(&h));
  sluice_swap_destroy(h.swap);
}

/* Cuts the unlinked file of this process. */
static void cut_file(void) {
  DIR* entries = opendir("/proc/self/fd");
  int32_t num_cut = 0;
  for (struct dirent* entry; (entry = readdir(entries)) != NULL;) {
    char target[256];
    const ssize_t bytes = readlinkat(dirfd(entries), entry->d_name, target, sizeof target - 1);
    if (bytes <= 0) continue;
    target[bytes] = 0;
    if (strstr(target, path) != NULL) num_cut += ftruncate(atoi(entry->d_name), 100) == 0;
  }
  closedir(entries);
  assert_int_equal(num_cut, 1);
}

TEST(Swap_FileThatIsCut_IsToldAndTheNextBatchRuns) {
  host_t h = {.swap = open_at(path, ENOUGH)};
  WORKS(forward(&h, 0));
  for (int32_t p = 0; p < PIECES; ++p) WORKS(sluice_swap_settle(h.swap, h.pieces[0][3][p].ticket)); /* all is out */
  cut_file();
  REFUSED(backward(&h, 0), SLUICE_E_EXTERNAL, "bytes too early");
  abandon(&h);
  WORKS(run_batch(&h));
  sluice_swap_destroy(h.swap);
}

TEST(Swap_WrongCalls_AreRefusedByName) {
  sluice_swap_t* swap = NULL;
  sluice_swap_config_t config;
#define REFUSES(change, status, text)  \
  config = config_of(NULL, 1), change; \
  REFUSED(sluice_swap_create(&config, &swap), status, text)
  REFUSES(config.budget_bytes = 0, BAD, "budget_bytes is 0");
  REFUSES(config.path = "/no/such/folder/x", SLUICE_E_EXTERNAL, "/no/such/folder/x: creating the file");
  REFUSES(config.path = "", BAD, "path is empty");
  REFUSES(config.num_layers = 0, BAD, "num_layers is 0");
  REFUSES(config.bytes_per_second = -1, BAD, "bytes_per_second is -1");
  REFUSED(sluice_swap_create(&config, NULL), BAD, "out_swap is NULL");
  FILE* there = fopen(path, "w"); /* an existing file stays unchanged */
  assert_non_null(there);
  fputs("mine", there);
  fclose(there);
  REFUSES(config.path = path, SLUICE_E_EXTERNAL, "File exists");
  assert_int_equal(unlink(path), 0);
  sluice_swap_destroy(NULL);

  swap = open_at(NULL, ENOUGH);
  char data[8] = "abcdefg", back[8] = "";
  int64_t ticket = 0;
  REFUSED(sluice_swap_put(swap, data, 0, &ticket), BAD, "bytes is 0");
  REFUSED(sluice_swap_put(swap, NULL, 8, &ticket), BAD, "may not be NULL");
  WORKS(sluice_swap_put(swap, data, 8, &ticket));
  REFUSED(sluice_swap_settle(swap, ticket + 1), BAD, "ticket 2 does not exist");
  REFUSED(sluice_swap_take(swap, ticket), SLUICE_E_STATE, "was not fetched");
  WORKS(sluice_swap_prefetch(swap, ticket, back));
  REFUSED(sluice_swap_prefetch(swap, ticket, back), SLUICE_E_STATE, "has begun before");
  WORKS(sluice_swap_take(swap, ticket));
  assert_string_equal(back, data);
  REFUSED(sluice_swap_take(swap, ticket), BAD, "does not exist");
  sluice_swap_release(swap, ticket);
  sluice_swap_destroy(swap);
}

/* On a link of 0.1 MB/s the copies take minutes. Dropping them does not wait for their end. */
TEST(Swap_DroppedDuringSlowCopies_Ends) {
  sluice_swap_config_t config = config_of(NULL, ENOUGH);
  config.bytes_per_second = 1e5;
  enum { BYTES = 8 << 20, COUNT = 3 };
  char* data = malloc(BYTES);
  memset(data, 1, BYTES);
  for (int32_t way = 0; way < 3; ++way) {
    sluice_swap_t* swap = NULL;
    int64_t tickets[COUNT];
    WORKS(sluice_swap_create(&config, &swap));
    for (int32_t i = 0; i < COUNT; ++i) WORKS(sluice_swap_put(swap, data, BYTES, tickets + i));
    if (way == 0) {
      for (int32_t i = COUNT; i-- > 0;) sluice_swap_release(swap, tickets[i]);
    }
    if (way == 1) sluice_swap_reset(swap);
    if (way < 2) assert_int_equal(stats_of(swap).held_bytes, 0);
    sluice_swap_destroy(swap);
  }
  free(data);
}

TEST(Swap_InAForkedChild_SaysSo) {
  host_t h = {.swap = open_at(path, ENOUGH)};
  WORKS(forward(&h, 0));
  const pid_t child = fork();
  if (child == 0) {
    int64_t ticket;
    const sluice_status_t status = sluice_swap_put(h.swap, "x", 1, &ticket);
    sluice_swap_reset(h.swap);
    sluice_swap_destroy(h.swap);
    _exit(status == SLUICE_E_STATE ? 0 : 2);
  }
  int ended = 0;
  assert_int_equal(waitpid(child, &ended, 0), child);
  assert_true(WIFEXITED(ended) && WEXITSTATUS(ended) == 0);
  WORKS(backward(&h, 0));
  sluice_swap_destroy(h.swap);
}

TEST(Predict_OfAStage_IsTheScheduleInVirtualTime) {
  const sluice_swap_layer_t layers[] = {{1, 2, 80}, {1, 2, 80}, {1, 2, 80}, {1, 2, 0}};
  sluice_swap_workload_t workload;
  sluice_swap_prediction_t found = {.struct_size = sizeof found};
  sluice_swap_workload_init(&workload, sizeof workload);
  workload.layers = layers, workload.num_layers = 4, workload.bytes_per_second = 100;
  workload.num_micro_batches = 4, workload.in_flight = 2;
  WORKS(sluice_swap_predict(&workload, &found)); /* copies take 0.8 s */
  assert_true(found.seconds == 48 && found.compute_seconds == 48 && found.wait_seconds == 0);
  assert_int_equal(found.out_bytes, 4 * 240);
  assert_int_equal(found.in_bytes, 4 * 240);
  assert_int_equal(found.most_near_bytes, 160);
  assert_int_equal(found.most_out_bytes, 480);
  workload.in_flight = 5;
  REFUSED(sluice_swap_predict(&workload, &found), BAD, "in_flight is 5; it must be in");
  workload.in_flight = 1, workload.bytes_per_second = 0;
  REFUSED(sluice_swap_predict(&workload, &found), BAD, "bytes_per_second is 0");
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

int main(void) { return run_cases(set_up, tear_down); }
