// SPDX-License-Identifier: Apache-2.0
/* Runs one call of the list and prints a line: hashes of the exact bits of its outputs.
 *
 *   digest [--each-rank] ID
 *
 * The ranks of the call are threads. --each-rank prints a line for each rank. A line says if the call was refused. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "caller.h"
#include "integration_tests/digest/listed.h" /* written by calls.py */

void omp_set_num_threads(int threads); /* of libgomp: the library uses its caller's number of threads */

enum { OUT, DX, DW, FIRST_PARAM, NUM_HASHES = FIRST_PARAM + NUM_PARAMS };
static const char* const hash_names[NUM_HASHES] = {"out", "dx", "dw", "w1", "w3", "w2", "b1", "b3", "b2"};

struct meet_s {
  pthread_barrier_t barrier;
  pthread_mutex_t lock;
  uint64_t most;
};

uint64_t meet_most(meet_t* meet, uint64_t mine) {
  pthread_mutex_lock(&meet->lock);
  if (mine > meet->most) meet->most = mine;
  pthread_mutex_unlock(&meet->lock);
  pthread_barrier_wait(&meet->barrier);
  uint64_t most = meet->most;
  if (pthread_barrier_wait(&meet->barrier) == PTHREAD_BARRIER_SERIAL_THREAD) meet->most = 0;
  pthread_barrier_wait(&meet->barrier);
  return most;
}

typedef struct rank_s {
  const call_t* call;
  caller_group_t* group;
  meet_t* meet;
  int32_t rank;
  uint64_t hash[NUM_HASHES];
  outcome_t outcome;
} rank_t;

static void add_hashes(rank_t* r, const rank_data_t* d) {
  r->hash[OUT] = data_hash(r->hash[OUT], d->y.data, d->y.bytes);
  r->hash[DX] = data_hash(r->hash[DX], d->dx.data, d->dx.bytes);
  r->hash[DW] = data_hash(r->hash[DW], d->dw.data, d->dw.bytes);
  for (int kind = 0; kind < NUM_PARAMS; ++kind) {
    uint64_t* hash = &r->hash[FIRST_PARAM + kind];
    for (int32_t l = 0; l < d->num_local; ++l)
      *hash = data_hash(*hash, d->grads[kind][l].data, d->grads[kind][l].bytes);
  }
}

/* Every other step has half the tokens, so that smaller and larger steps use the buffers that a context keeps. */
static void* run_rank(void* argument) {
  rank_t* r = argument;
  static _Thread_local rank_data_t data;
  omp_set_num_threads(r->call->threads);
  data_make(&data, r->call, r->rank);
  for (int i = 0; i < NUM_HASHES; ++i) r->hash[i] = DATA_HASH;
  caller_t* caller = caller_open(r->group, &data, r->meet, &r->outcome);
  for (int32_t s = 0; s < r->call->steps; ++s) {
    data_begin(&data, s, s % 2 == 0 ? r->call->tokens[r->rank] : r->call->tokens[r->rank] / 2, 0);
    caller_step(caller);
    add_hashes(r, &data);
  }
  caller_report(caller);
  caller_close(caller);
  data_drop(&data);
  return NULL;
}

static int is_printed(const call_t* c, int kind) {
  if (kind < FIRST_PARAM) return 1;
  if (c->callback) return 0;
  const int param = kind - FIRST_PARAM;
  if (param == W3 || param == B3) return c->gated == GATE_HALVES && (param == W3 || c->bias);
  return param == B1 || param == B2 ? c->bias : 1;
}

/* Prints the line of ranks first to end - 1 together. */
static int print_line(char* to, size_t room, const call_t* c, const rank_t* ranks, int32_t first, int32_t end) {
  outcome_t sum = {.chunks = ranks[first].outcome.chunks};
  int at = snprintf(to, room, "%s", c->id);
  if (end - first < c->ranks) at += snprintf(to + at, room - (size_t)at, "@%d", first);
  for (int32_t r = first; r < end; ++r) {
    const outcome_t* o = &ranks[r].outcome;
    if (o->refusal[0] != '\0')
      return at + snprintf(to + at, room - (size_t)at, " refused: rank %d: %s\n", r, o->refusal);
    sum.sent += o->sent, sum.saved += o->saved, sum.planned += o->planned, sum.fallback += o->fallback;
    sum.rows_hash = (int64_t)data_hash((uint64_t)sum.rows_hash, &o->rows_hash, sizeof o->rows_hash);
    sum.num_dropped += o->num_dropped, sum.most_rows = o->most_rows > sum.most_rows ? o->most_rows : sum.most_rows;
  }
  at += snprintf(to + at, room - (size_t)at, " n=%lld sent=%llu saved=%llu", (long long)sum.chunks,
                 (unsigned long long)sum.sent, (unsigned long long)sum.saved);
  if (c->plan != PLAN_NONE)
    at += snprintf(to + at, room - (size_t)at, " planned=%llu fallback=%llu", (unsigned long long)sum.planned,
                   (unsigned long long)sum.fallback);
  if (c->ceiling > 0)
    at += snprintf(to + at, room - (size_t)at, " dropped=%lld most=%lld", (long long)sum.num_dropped,
                   (long long)sum.most_rows);
  at += snprintf(to + at, room - (size_t)at, " rows=%016llx", (unsigned long long)sum.rows_hash);
  for (int kind = 0; kind < NUM_HASHES; ++kind) {
    uint64_t hash = DATA_HASH;
    for (int32_t r = first; r < end; ++r) hash = data_hash(hash, &ranks[r].hash[kind], sizeof hash);
    if (is_printed(c, kind))
      at += snprintf(to + at, room - (size_t)at, " %s=%016llx", hash_names[kind], (unsigned long long)hash);
  }
  return at + snprintf(to + at, room - (size_t)at, "\n");
}

static void run_call(const call_t* c, int each_rank, char* answer, size_t room) {
  rank_t ranks[CALL_MAX_RANKS];
  pthread_t threads[CALL_MAX_RANKS];
  meet_t meet;
  memset(ranks, 0, sizeof ranks);
  memset(&meet, 0, sizeof meet);
  pthread_barrier_init(&meet.barrier, NULL, (unsigned)c->ranks);
  pthread_mutex_init(&meet.lock, NULL);
  caller_group_t* group = caller_open_group(c);
  for (int32_t r = 0; r < c->ranks; ++r) {
    ranks[r].call = c, ranks[r].group = group, ranks[r].meet = &meet, ranks[r].rank = r;
    if (pthread_create(&threads[r], NULL, run_rank, &ranks[r]) != 0) abort();
  }
  for (int32_t r = 0; r < c->ranks; ++r) pthread_join(threads[r], NULL);
  caller_close_group(group);
  int at = 0;
  for (int32_t r = 0; each_rank && r < c->ranks; ++r)
    at += print_line(answer + at, room - (size_t)at, c, ranks, r, r + 1);
  if (!each_rank) (void)print_line(answer, room, c, ranks, 0, c->ranks);
}

int main(int argc, char** argv) {
  static char answer[4096];
  const call_t* call = NULL;
  for (size_t i = 0; argc > 1 && i < sizeof listed / sizeof listed[0]; ++i) {
    if (strcmp(argv[argc - 1], listed[i].id) == 0) call = &listed[i];
  }
  if (call == NULL || argc > 3 || (argc == 3 && strcmp(argv[1], "--each-rank") != 0)) {
    fprintf(stderr, "usage: digest [--each-rank] ID\n");
    return 2;
  }
  /* Settings that would change values are fixed: kernels that every processor has, and the gemm of the list. */
  setenv("SLUICE_NATIVE", "avx2", 1);
  unsetenv("SLUICE_GEMM"), unsetenv("SLUICE_CUBLAS"), unsetenv("SLUICE_POISON"), unsetenv("SLUICE_HUGE_PAGES");
  run_call(call, argc == 3, answer, sizeof answer);
  fputs(answer, stdout);
  return 0;
}
