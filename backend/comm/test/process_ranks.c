// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/test/process_ranks.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/base/test/last_error.h"
#include "backend/comm/test/tcp_place.h"

#define MS UINT64_C(1000000)

static struct board_s {
  _Atomic int64_t num_lookups;
  process_report_t reports[PROCESS_MOST_RANKS];
  char notes[PROCESS_MOST_RANKS][160];
} * board; /* in shared memory */
static uint64_t store_answer_ns;
static char place[TCP_PLACE_BYTES];

/* ---- exchanges of the tcp communicator, with a store of notes ---------------------------------------------------- */

static sluice_status_t start(void* user, const sluice_exchange_t* exchange, void** out_request,
                             sluice_host_failure_t* out_failure) {
  sluice_comm_t* tcp = ((process_rank_t*)user)->tcp;
  sluice_comm_request_t* request = NULL;
  (void)out_failure;
  const sluice_status_t status = tcp->vtable->exchange_start(tcp, exchange, &request);
  *out_request = request;
  return status;
}

static sluice_status_t finish(void* user, void* request, uint64_t timeout_ns, sluice_host_failure_t* out_failure) {
  sluice_comm_t* tcp = ((process_rank_t*)user)->tcp;
  return tcp->vtable->exchange_wait(tcp, request, sluice_now_ns() + timeout_ns, &out_failure->peer);
}

static void destroy(void* user) { sluice_comm_destroy(((process_rank_t*)user)->tcp); }

static void publish(void* user, const char* key, const char* value) {
  process_rank_t* me = user;
  (void)key; /* "sluice/<rank>" */
  (void)snprintf(board->notes[me->rank], sizeof board->notes[0], "%s", value);
}

static int32_t lookup(void* user, const char* key, char* out, int32_t out_bytes) {
  process_rank_t* me = user;
  int rank = -1;
  const struct timespec answer = {.tv_nsec = (long)store_answer_ns};
  nanosleep(&answer, NULL);
  atomic_fetch_add(&board->num_lookups, 1);
  if (sscanf(key, "sluice/%d", &rank) != 1 || rank < 0 || rank >= me->world_size) return -1;
  return snprintf(out, (size_t)out_bytes, "%s", board->notes[rank]);
}

/* ---- one rank ---------------------------------------------------------------------------------------------------- */

static sluice_status_t connect_rank(process_rank_t* me) {
  static const sluice_host_comm_vtable_t vtable = {.struct_size = sizeof vtable,
                                                   .exchange_start = start,
                                                   .exchange_wait = finish,
                                                   .publish = publish,
                                                   .lookup = lookup,
                                                   .destroy = destroy};
  sluice_comm_config_t config;
  sluice_tcp_config_t tcp;
  sluice_comm_config_init(&config, sizeof config);
  sluice_tcp_config_init(&tcp, sizeof tcp);
  config.rank = me->rank, config.world_size = me->world_size, config.timeout_ns = me->timeout_ns;
  tcp.connect_timeout_ns = 120000 * MS;
  SLUICE_TRY(sluice_comm_create_tcp_at(&config, place, tcp_place_secret, sizeof tcp_place_secret, &tcp, &me->tcp));
  return sluice_comm_create_host(&config, &vtable, me, &me->comm);
}

static void note(process_report_t* report, sluice_status_t status) {
  report->status = status, report->peer = -1;
  if (status == SLUICE_OK) return;
  report->peer = last_error()->peer;
  (void)snprintf(report->message, sizeof report->message, "%.*s", (int)sizeof report->message - 1, last_message());
}

static void be_rank(process_rank_t* me, process_body_t body) {
  process_report_t* report = &board->reports[me->rank];
  const uint64_t began_ns = sluice_now_ns();
  sluice_status_t status = connect_rank(me);
  report->created_ns = sluice_now_ns() - began_ns;
  note(report, status);
  int32_t line = status == SLUICE_OK ? 0 : __LINE__;
  if (line == 0) line = body(me, report);
  if (line != 0 && report->status == SLUICE_OK) note(report, SLUICE_E_INTERNAL); /* with the last error, if any */
  sluice_comm_destroy(me->comm);
  report->line = line;
}

/* ---- all of them ------------------------------------------------------------------------------------------------- */

void process_ranks_answer_after(uint64_t answer_ns) { store_answer_ns = answer_ns; }

int64_t process_ranks_lookups(void) { return atomic_load(&board->num_lookups); }

void process_ranks_start(int32_t world_size, uint64_t timeout_ns, process_body_t body, pid_t* children) {
  tcp_place_init(place);
  board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (board == MAP_FAILED || world_size > PROCESS_MOST_RANKS) abort();
  for (int32_t r = 0; r < world_size; ++r) board->reports[r].line = -1;
  for (int32_t r = 0; r < world_size; ++r) {
    children[r] = fork();
    if (children[r] < 0) abort();
    if (children[r] > 0) continue;
    process_rank_t me = {.rank = r, .world_size = world_size, .timeout_ns = timeout_ns};
    be_rank(&me, body);
    _exit(0);
  }
}

void process_ranks_await_stop(pid_t child) {
  int code = 0;
  if (waitpid(child, &code, WUNTRACED) != child || !WIFSTOPPED(code)) abort();
}

void process_ranks_join(pid_t child) { (void)waitpid(child, NULL, 0); }

const process_report_t* process_ranks_report(int32_t rank) { return &board->reports[rank]; }

void process_ranks_end(void) {
  munmap(board, sizeof *board);
  board = NULL;
}
