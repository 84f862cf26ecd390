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

#define MS UINT64_C(1000000)

/* A message between two ranks. The next message waits until this one has been taken. */
typedef struct slot_s {
  _Atomic uint32_t written, taken;
  char data[PROCESS_MESSAGE_BYTES];
} slot_t;

struct process_board_s {
  int32_t world_size;
  _Atomic int64_t num_lookups;
  process_report_t reports[PROCESS_MOST_RANKS];
  char notes[PROCESS_MOST_RANKS][160];
  slot_t slots[]; /* [from][to] */
};

static process_board_t* board;
static size_t board_bytes;
static uint64_t store_answer_ns;

static slot_t* slot_of(process_board_t* b, int32_t from, int32_t to) {
  return &b->slots[(size_t)from * (size_t)b->world_size + (size_t)to];
}

static void nap(uint64_t ns) {
  const struct timespec pause = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
  nanosleep(&pause, NULL);
}

/* ---- the communicator over shared memory ------------------------------------------------------------------------- */

static sluice_exchange_t current; /* one exchange at a time */
static int8_t has_come[PROCESS_MOST_RANKS];

static sluice_status_t start(void* user, const sluice_exchange_t* exchange, void** out_request,
                             sluice_host_failure_t* out_failure) {
  process_rank_t* me = user;
  (void)out_failure;
  for (int32_t r = 0; r < me->world_size; ++r) {
    slot_t* slot = slot_of(me->board, me->rank, r);
    if (r == me->rank || exchange->send_bytes[r] == 0) continue;
    if (exchange->send_bytes[r] > PROCESS_MESSAGE_BYTES) return SLUICE_E_UNSUPPORTED;
    while (atomic_load(&slot->taken) != atomic_load(&slot->written)) nap(2 * MS);
    memcpy(slot->data, exchange->send[r], exchange->send_bytes[r]);
    atomic_fetch_add(&slot->written, 1);
  }
  current = *exchange;
  memset(has_come, 0, sizeof has_come);
  *out_request = &current;
  return SLUICE_OK;
}

static sluice_status_t finish(void* user, void* request, uint64_t timeout_ns, sluice_host_failure_t* out_failure) {
  process_rank_t* me = user;
  const sluice_exchange_t* exchange = request;
  const uint64_t deadline_ns = sluice_now_ns() + timeout_ns;
  for (int32_t r = 0; r < me->world_size; ++r) {
    slot_t* slot = slot_of(me->board, r, me->rank);
    if (r == me->rank || has_come[r] || exchange->recv_bytes[r] == 0) continue;
    while (atomic_load(&slot->written) == atomic_load(&slot->taken)) {
      if (sluice_now_ns() > deadline_ns) {
        out_failure->peer = r;
        return SLUICE_E_TIMED_OUT; /* end of a slice of the wait; the next slice continues the exchange */
      }
      nap(2 * MS);
    }
    memcpy(exchange->recv[r], slot->data, exchange->recv_bytes[r]);
    has_come[r] = 1;
    atomic_fetch_add(&slot->taken, 1);
  }
  return SLUICE_OK;
}

static void publish(void* user, const char* key, const char* value) {
  process_rank_t* me = user;
  (void)key; /* "sluice/<rank>" */
  (void)snprintf(me->board->notes[me->rank], sizeof me->board->notes[0], "%s", value);
}

static int32_t lookup(void* user, const char* key, char* out, int32_t out_bytes) {
  process_rank_t* me = user;
  int rank = -1;
  if (store_answer_ns > 0) nap(store_answer_ns);
  atomic_fetch_add(&me->board->num_lookups, 1);
  if (sscanf(key, "sluice/%d", &rank) != 1 || rank < 0 || rank >= me->world_size) return -1;
  return snprintf(out, (size_t)out_bytes, "%s", me->board->notes[rank]);
}

/* ---- one rank ---------------------------------------------------------------------------------------------------- */

static sluice_status_t connect_rank(process_rank_t* me) {
  static const sluice_host_comm_vtable_t vtable = {.struct_size = sizeof vtable,
                                                   .exchange_start = start,
                                                   .exchange_wait = finish,
                                                   .publish = publish,
                                                   .lookup = lookup};
  sluice_comm_config_t config;
  sluice_tcp_config_t tcp;
  sluice_comm_config_init(&config, sizeof config);
  sluice_tcp_config_init(&tcp, sizeof tcp);
  config.rank = me->rank, config.world_size = me->world_size, config.timeout_ns = me->timeout_ns;
  tcp.connect_timeout_ns = 120000 * MS;
  const sluice_status_t status = sluice_comm_create_host(&config, &vtable, me, &me->parent);
  return status != SLUICE_OK ? status : sluice_comm_create_tcp(me->parent, &tcp, &me->comm);
}

static void note(process_report_t* report, sluice_status_t status) {
  report->status = status, report->peer = -1;
  if (status == SLUICE_OK) return;
  report->peer = last_error()->peer;
  (void)snprintf(report->message, sizeof report->message, "%.*s", (int)sizeof report->message - 1, last_message());
}

static void be_rank(process_rank_t* me, process_body_t body) {
  process_report_t* report = &me->board->reports[me->rank];
  const uint64_t began_ns = sluice_now_ns();
  sluice_status_t status = connect_rank(me);
  report->created_ns = sluice_now_ns() - began_ns;
  note(report, status);
  int32_t line = status == SLUICE_OK ? 0 : __LINE__;
  if (line == 0) line = body(me, report);
  if (line != 0 && report->status == SLUICE_OK) note(report, SLUICE_E_INTERNAL); /* with the last error, if any */
  sluice_comm_destroy(me->comm);
  sluice_comm_destroy(me->parent);
  report->line = line;
}

/* ---- all of them ------------------------------------------------------------------------------------------------- */

void process_ranks_answer_after(uint64_t answer_ns) { store_answer_ns = answer_ns; }

int64_t process_ranks_lookups(void) { return atomic_load(&board->num_lookups); }

void process_ranks_start(int32_t world_size, uint64_t timeout_ns, process_body_t body, pid_t* children) {
  board_bytes = sizeof *board + (size_t)world_size * (size_t)world_size * sizeof board->slots[0];
  board = mmap(NULL, board_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (board == MAP_FAILED || world_size > PROCESS_MOST_RANKS) abort();
  board->world_size = world_size;
  for (int32_t r = 0; r < world_size; ++r) board->reports[r].line = -1;
  for (int32_t r = 0; r < world_size; ++r) {
    children[r] = fork();
    if (children[r] < 0) abort();
    if (children[r] > 0) continue;
    process_rank_t me = {.board = board, .rank = r, .world_size = world_size, .timeout_ns = timeout_ns};
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
  munmap(board, board_bytes);
  board = NULL;
}
