#include "backend/cts/comm/comm_suite.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "backend/base/clock.h"

#define MS                  UINT64_C(1000000)
#define PATIENT_NS          (20000 * MS) /* deadline where nothing should time out */
#define SHORT_NS            (1000 * MS)  /* deadline of waits that are to see it pass */
#define BOUNDED_NS          (15000 * MS) /* "in bounded time", on a busy machine, and not at PATIENT_NS */
#define SUITE_SECONDS       880
#define NUM_GUARD_BYTES     16
#define MAX_WORLD_SIZE      8
#define LARGE_BLOCK_BYTES   (UINT64_C(2) << 20)
#define MAX_NTH_ALLOCATIONS 64

/* ---- ranks ----------------------------------------------------------------------------------------------------- */

typedef struct cts_case_s cts_case_t;

typedef struct cts_world_s {
  const cts_transport_t* transport;
  const cts_case_t* c;
  int32_t world_size;
  int32_t num_here; /* ranks in this process */
  void* shared;
  pthread_mutex_t mutex;
  pthread_cond_t met;
  int32_t num_waiting;
  uint64_t round;
  int32_t num_warnings; /* guarded by mutex, like their texts one after the other */
  char warnings[4096];
} cts_world_t;

typedef struct cts_rank_s {
  cts_world_t* world;
  sluice_comm_t* comm; /* of this case; the case may destroy it and set NULL */
  int32_t rank;
  char failure[512]; /* first failed check; empty: none */
} cts_rank_t;

struct cts_case_s {
  const char* name;
  void (*run)(cts_rank_t* me);
  int32_t min_world_size;
  int32_t expects_warnings;
  uint64_t warn_ns;
};

static void fail_check(cts_rank_t* me, int line, const char* text) {
  if (me->failure[0] != '\0') return;
  sluice_error_info_t why;
  sluice_error_info_init(&why, sizeof why);
  sluice_error_last(&why);
  snprintf(me->failure, sizeof me->failure, "rank %d, comm_suite.c:%d: %s; last error: %s, peer %d, \"%.300s\"",
           me->rank, line, text, sluice_status_name(why.status), why.peer, why.message);
}

/* cmocka's assertions jump, which only its own thread may do. */
#define CHECK(me, condition)                  \
  do {                                        \
    if (!(condition)) {                       \
      fail_check((me), __LINE__, #condition); \
      return;                                 \
    }                                         \
  } while (0)

static int32_t last_peer(void) {
  sluice_error_info_t why;
  sluice_error_info_init(&why, sizeof why);
  sluice_error_last(&why);
  return why.peer;
}

static void sleep_ns(uint64_t ns) {
  struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
  nanosleep(&t, NULL);
}

/* All ranks meet, outside the communicator under test. A rank that never comes fails the others. */
static int meet(cts_rank_t* me) {
  cts_world_t* world = me->world;
  if (world->transport->meeting != NULL) {
    int64_t one = 1;
    return sluice_comm_all_reduce_i64(world->transport->meeting, &one, 1, SLUICE_REDUCE_SUM, "the suite's meeting") ==
           SLUICE_OK;
  }
  uint64_t deadline_ns = sluice_now_ns() + 2 * PATIENT_NS;
  int came = 1;
  pthread_mutex_lock(&world->mutex);
  uint64_t round = world->round;
  if (++world->num_waiting == world->world_size) {
    world->num_waiting = 0;
    ++world->round;
    pthread_cond_broadcast(&world->met);
  }
  while (world->round == round && came) came = sluice_cond_wait_until(&world->met, &world->mutex, deadline_ns) == 0;
  pthread_mutex_unlock(&world->mutex);
  return came;
}

static sluice_status_t create_end(cts_world_t* world, void* shared, int32_t rank, int32_t world_size,
                                  uint64_t timeout_ns, sluice_comm_t** out_comm) {
  sluice_comm_config_t config;
  sluice_comm_config_init(&config, sizeof config);
  config.rank = rank;
  config.world_size = world_size;
  config.timeout_ns = timeout_ns != 0 ? timeout_ns : PATIENT_NS;
  config.warn_ns = world->c->warn_ns;
  return world->transport->create(shared, &config, out_comm);
}

/* ---- one exchange with data that knows where it comes from ------------------------------------------------------ */

typedef uint64_t (*size_fn_t)(int32_t source, int32_t target, int32_t index);

typedef struct exchange_s {
  sluice_comm_request_t* request;
  int32_t index;
  size_fn_t size;
  const void* send[MAX_WORLD_SIZE];
  void* recv[MAX_WORLD_SIZE];
  uint64_t send_bytes[MAX_WORLD_SIZE];
  uint64_t recv_bytes[MAX_WORLD_SIZE];
} exchange_t;

static uint64_t uneven_size(int32_t source, int32_t target, int32_t index) {
  if ((source * 7 + target * 3 + index * 5) % 4 == 0) return 0;
  return 1 + (uint64_t)(source * 1009 + target * 377 + index * 131) % 5000;
}
static uint64_t one_sided_size(int32_t source, int32_t target, int32_t index) {
  (void)target;
  return source == index ? 1234 : 0;
}
static uint64_t zero_size(int32_t source, int32_t target, int32_t index) {
  (void)source, (void)target, (void)index;
  return 0;
}
static uint64_t large_size(int32_t source, int32_t target, int32_t index) {
  return LARGE_BLOCK_BYTES + (uint64_t)(source * 3 + target + index);
}
/* Beyond what a transport sends eagerly, yet filled in no time beside SHORT_NS. */
static uint64_t medium_size(int32_t source, int32_t target, int32_t index) {
  return 100000 + (uint64_t)(source * 3 + target + index);
}
static uint64_t small_size(int32_t source, int32_t target, int32_t index) {
  (void)source, (void)target, (void)index;
  return 64;
}

/* Word i of a block: nothing else in the suite has the same. Words, not bytes: sanitizers make each access slow. */
static uint64_t identity_word(int32_t source, int32_t target, int32_t index, uint64_t i) {
  uint64_t block = (uint64_t)source << 48 | (uint64_t)target << 40 | (uint64_t)index << 24;
  return (block + i) * UINT64_C(0x9E3779B97F4A7C15);
}

static void fill_block(unsigned char* data, uint64_t bytes, int32_t source, int32_t target, int32_t index) {
  for (uint64_t at = 0; at < bytes; at += 8) {
    uint64_t word = identity_word(source, target, index, at / 8);
    memcpy(data + at, &word, bytes - at < 8 ? bytes - at : 8);
  }
}

static int is_block_intact(const unsigned char* data, uint64_t bytes, int32_t source, int32_t target, int32_t index) {
  for (uint64_t at = 0; at < bytes; at += 8) {
    uint64_t word = identity_word(source, target, index, at / 8);
    if (memcmp(data + at, &word, bytes - at < 8 ? bytes - at : 8) != 0) return 0;
  }
  return 1;
}

/* Starts exchange `index`. The entry of the own rank must not be read: it holds nonsense. */
static sluice_status_t start(cts_rank_t* me, sluice_comm_t* comm, int32_t index, size_fn_t size, exchange_t* e) {
  memset(e, 0, sizeof *e);
  e->index = index;
  e->size = size;
  for (int32_t p = 0; p < me->world->world_size; ++p) {
    if (p == me->rank) {
      e->send_bytes[p] = 77;
      e->recv_bytes[p] = 99;
      continue;
    }
    e->send_bytes[p] = size(me->rank, p, index);
    e->recv_bytes[p] = size(p, me->rank, index);
    unsigned char* send = malloc(e->send_bytes[p] + 1);
    fill_block(send, e->send_bytes[p], me->rank, p, index);
    e->send[p] = send;
    e->recv[p] = malloc(e->recv_bytes[p] + NUM_GUARD_BYTES);
    memset(e->recv[p], 0xEE, e->recv_bytes[p] + NUM_GUARD_BYTES);
  }
  /* The buffers live until the wait, the arrays only until the start returns. */
  struct {
    const void* send[MAX_WORLD_SIZE];
    void* recv[MAX_WORLD_SIZE];
    uint64_t send_bytes[MAX_WORLD_SIZE];
    uint64_t recv_bytes[MAX_WORLD_SIZE];
  } passing;
  memcpy(passing.send, e->send, sizeof passing.send);
  memcpy(passing.recv, e->recv, sizeof passing.recv);
  memcpy(passing.send_bytes, e->send_bytes, sizeof passing.send_bytes);
  memcpy(passing.recv_bytes, e->recv_bytes, sizeof passing.recv_bytes);
  sluice_exchange_t exchange = {
      .send = passing.send, .send_bytes = passing.send_bytes, .recv = passing.recv, .recv_bytes = passing.recv_bytes};
  sluice_status_t status = sluice_comm_exchange_start(comm, &exchange, &e->request);
  memset(&passing, 0x55, sizeof passing);
  return status;
}

static void release(exchange_t* e) {
  for (int32_t p = 0; p < MAX_WORLD_SIZE; ++p) {
    free((void*)(uintptr_t)e->send[p]);
    free(e->recv[p]);
    e->send[p] = NULL;
    e->recv[p] = NULL;
  }
}

/* True when everything arrived unchanged and nothing was written beyond it. */
static int is_intact(const cts_rank_t* me, const exchange_t* e) {
  for (int32_t p = 0; p < me->world->world_size; ++p) {
    if (p == me->rank) continue;
    const unsigned char* recv = e->recv[p];
    if (!is_block_intact(recv, e->recv_bytes[p], p, me->rank, e->index)) return 0;
    for (uint64_t i = 0; i < NUM_GUARD_BYTES; ++i) {
      if (recv[e->recv_bytes[p] + i] != 0xEE) return 0;
    }
  }
  return 1;
}

/* Waits, checks, releases. On a failure of the wait the status is returned. */
static sluice_status_t finish(cts_rank_t* me, sluice_comm_t* comm, exchange_t* e) {
  sluice_status_t status = sluice_comm_exchange_wait(comm, e->request, "the suite's exchange");
  if (status == SLUICE_OK && !is_intact(me, e)) fail_check(me, __LINE__, "the data arrived unchanged");
  release(e);
  return status;
}

static sluice_status_t run_exchange(cts_rank_t* me, sluice_comm_t* comm, int32_t index, size_fn_t size) {
  exchange_t e;
  sluice_status_t status = start(me, comm, index, size, &e);
  if (status != SLUICE_OK) {
    release(&e);
    return status;
  }
  return finish(me, comm, &e);
}

/* ---- cases: data ------------------------------------------------------------------------------------------------ */

static void exchange_uneven(cts_rank_t* me) {
  for (int32_t i = 0; i < 8; ++i) CHECK(me, run_exchange(me, me->comm, i, uneven_size) == SLUICE_OK);
}

static void exchange_one_sided(cts_rank_t* me) {
  for (int32_t i = 0; i < me->world->world_size; ++i) {
    CHECK(me, run_exchange(me, me->comm, i, one_sided_size) == SLUICE_OK);
  }
}

static void exchange_empty(cts_rank_t* me) {
  for (int32_t i = 0; i < 10; ++i) CHECK(me, run_exchange(me, me->comm, i, zero_size) == SLUICE_OK);
  CHECK(me, run_exchange(me, me->comm, 0, small_size) == SLUICE_OK);
}

static void exchange_large(cts_rank_t* me) {
  for (int32_t i = 0; i < 2; ++i) CHECK(me, run_exchange(me, me->comm, i, large_size) == SLUICE_OK);
}

static void exchange_reversed(cts_rank_t* me) {
  for (int32_t i = 0; i < 20; i += 2) {
    size_fn_t size = i == 10 ? large_size : uneven_size;
    exchange_t first, second;
    CHECK(me, start(me, me->comm, i, size, &first) == SLUICE_OK);
    CHECK(me, start(me, me->comm, i + 1, size, &second) == SLUICE_OK);
    int in_order = (me->rank + i / 2) % 2; /* every mixture of orders across the ranks */
    CHECK(me, finish(me, me->comm, in_order ? &first : &second) == SLUICE_OK);
    CHECK(me, finish(me, me->comm, in_order ? &second : &first) == SLUICE_OK);
  }
}

static void exchange_hundred(cts_rank_t* me) {
  /* A pipeline: the next is started before the one before has been waited for, and one stays behind now and then. */
  exchange_t e[2];
  CHECK(me, start(me, me->comm, 0, uneven_size, &e[0]) == SLUICE_OK);
  int32_t oldest = 0;
  for (int32_t i = 1; i < 100; ++i) {
    int32_t slot = 1 - oldest;
    CHECK(me, start(me, me->comm, i, uneven_size, &e[slot]) == SLUICE_OK);
    if (i % 7 == 3) {
      CHECK(me, finish(me, me->comm, &e[slot]) == SLUICE_OK);
    } else {
      CHECK(me, finish(me, me->comm, &e[oldest]) == SLUICE_OK);
      oldest = slot;
    }
  }
  CHECK(me, finish(me, me->comm, &e[oldest]) == SLUICE_OK);
}

static void all_reduce_sum_max(cts_rank_t* me) {
  static const int64_t counts[] = {1, 3, 1000, 20001};
  int64_t w = me->world->world_size;
  for (size_t c = 0; c < sizeof counts / sizeof counts[0]; ++c) {
    int64_t n = counts[c];
    int64_t* data = malloc((size_t)n * sizeof *data);
    for (int32_t op = SLUICE_REDUCE_SUM; op <= SLUICE_REDUCE_MAX; ++op) {
      for (int64_t i = 0; i < n; ++i) data[i] = (i - n / 2) * (me->rank + 1) + (INT64_C(1) << 40);
      sluice_status_t status = sluice_comm_all_reduce_i64(me->comm, data, n, op, "the suite's all-reduce");
      int64_t num_wrong = 0;
      for (int64_t i = 0; i < n; ++i) {
        int64_t x = i - n / 2;
        int64_t want = op == SLUICE_REDUCE_SUM ? x * (w * (w + 1) / 2) + w * (INT64_C(1) << 40)
                                               : (x > 0 ? x * w : x) + (INT64_C(1) << 40);
        num_wrong += data[i] != want;
      }
      if (status != SLUICE_OK || num_wrong != 0) free(data);
      CHECK(me, status == SLUICE_OK);
      CHECK(me, num_wrong == 0);
    }
    free(data);
  }
  CHECK(me, sluice_comm_all_reduce_i64(me->comm, NULL, 0, SLUICE_REDUCE_SUM, NULL) == SLUICE_OK);
}

static void comm_accessors(cts_rank_t* me) {
  CHECK(me, sluice_comm_rank(me->comm) == me->rank);
  CHECK(me, sluice_comm_world_size(me->comm) == me->world->world_size);
  CHECK(me, strcmp(sluice_comm_name(me->comm), me->world->transport->name) == 0);
}

/* ---- cases: failures -------------------------------------------------------------------------------------------- */

/* The last rank is the one that misbehaves. */
static int is_culprit(const cts_rank_t* me) { return me->rank == me->world->world_size - 1; }

static void check_broken_and_destroy(cts_rank_t* me, sluice_status_t status) {
  CHECK(me, run_exchange(me, me->comm, 0, small_size) == status);
  int64_t x = 0;
  CHECK(me, sluice_comm_all_reduce_i64(me->comm, &x, 1, SLUICE_REDUCE_SUM, NULL) == status);
  uint64_t begin_ns = sluice_now_ns();
  sluice_comm_abort(me->comm);
  sluice_comm_abort(me->comm);
  sluice_comm_destroy(me->comm);
  me->comm = NULL;
  CHECK(me, sluice_now_ns() - begin_ns < BOUNDED_NS);
}

/* A new group of the same ranks, after the old one failed. */
static void renew(cts_rank_t* me) {
  cts_world_t* world = me->world;
  sluice_comm_destroy(me->comm);
  me->comm = NULL;
  CHECK(me, meet(me));
  if (world->num_here == 1 || me->rank == 0) {
    world->transport->close(world->shared);
    world->shared = world->transport->open(world->world_size);
  }
  CHECK(me, meet(me));
  CHECK(me, world->shared != NULL);
  CHECK(me, create_end(world, world->shared, me->rank, world->world_size, PATIENT_NS, &me->comm) == SLUICE_OK);
  CHECK(me, run_exchange(me, me->comm, 1, uneven_size) == SLUICE_OK);
  CHECK(me, run_exchange(me, me->comm, 2, small_size) == SLUICE_OK);
}

/* Why this transport cannot pass a case, NULL where it must. */
static const cts_exception_t* exception_of(const cts_transport_t* transport, const cts_case_t* c) {
  const cts_exception_t* e = transport->cannot;
  while (e != NULL && e->case_name != NULL && strcmp(e->case_name, c->name) != 0) ++e;
  return e != NULL && e->case_name != NULL ? e : NULL;
}

/* From here on deadlines are short, on all ranks: the last line before the wait that is to see its deadline pass. What
 * comes before has all the time that a busy machine takes for it. */
static int hurry(cts_rank_t* me, uint64_t timeout_ns) {
  me->comm->timeout_ns = timeout_ns;
  return meet(me);
}

static void wait_silent_rank(cts_rank_t* me) {
  CHECK(me, run_exchange(me, me->comm, 0, small_size) == SLUICE_OK);
  CHECK(me, hurry(me, SHORT_NS));
  if (!is_culprit(me)) {
    uint64_t begin_ns = sluice_now_ns();
    CHECK(me, run_exchange(me, me->comm, 1, small_size) == SLUICE_E_TIMED_OUT);
    CHECK(me, last_peer() == me->world->world_size - 1);
    uint64_t took_ns = sluice_now_ns() - begin_ns;
    CHECK(me, took_ns >= SHORT_NS && took_ns < SHORT_NS + BOUNDED_NS);
    CHECK(me, meet(me));
    check_broken_and_destroy(me, SLUICE_E_TIMED_OUT);
  } else {
    CHECK(me, meet(me));
  }
  if (me->failure[0] == '\0') renew(me);
}

static void wait_silent_rank_two_in_flight(cts_rank_t* me) {
  CHECK(me, hurry(me, SHORT_NS));
  if (!is_culprit(me)) {
    exchange_t first, second;
    CHECK(me, start(me, me->comm, 0, small_size, &first) == SLUICE_OK);
    CHECK(me, start(me, me->comm, 1, medium_size, &second) == SLUICE_OK);
    CHECK(me, finish(me, me->comm, &first) == SLUICE_E_TIMED_OUT);
    CHECK(me, last_peer() == me->world->world_size - 1);
    uint64_t begin_ns = sluice_now_ns();
    CHECK(me, sluice_comm_exchange_wait(me->comm, second.request, NULL) == SLUICE_E_TIMED_OUT);
    CHECK(me, sluice_now_ns() - begin_ns < BOUNDED_NS);
    CHECK(me, meet(me));
    sluice_comm_destroy(me->comm); /* before the buffers: some transports cannot take a message back */
    me->comm = NULL;
    release(&second);
  } else {
    CHECK(me, meet(me));
  }
  renew(me);
}

/* Whether a rank in this process has been warned that it waits for the last one. */
static int is_warned(cts_world_t* world) {
  char expected[32];
  snprintf(expected, sizeof expected, "for rank %d", world->world_size - 1);
  pthread_mutex_lock(&world->mutex);
  int is_named = world->num_warnings > 0 && strstr(world->warnings, expected) != NULL;
  pthread_mutex_unlock(&world->mutex);
  return is_named;
}

static void wait_late_rank(cts_rank_t* me) {
  cts_world_t* world = me->world;
  CHECK(me, meet(me));
  if (is_culprit(me)) { /* it comes once somebody has been warned; what other processes are told it cannot see */
    int sees_it = world->num_here > 1 && exception_of(world->transport, world->c) == NULL;
    uint64_t give_up_ns = sluice_now_ns() + (sees_it ? PATIENT_NS / 2 : SHORT_NS);
    while (!is_warned(world) && sluice_now_ns() < give_up_ns) sleep_ns(5 * MS);
  }
  CHECK(me, run_exchange(me, me->comm, 0, uneven_size) == SLUICE_OK);
  CHECK(me, run_exchange(me, me->comm, 0, small_size) == SLUICE_OK);
  CHECK(me, meet(me));
  if (is_culprit(me)) return;
  CHECK(me, is_warned(world));
}

static void abort_peer(cts_rank_t* me) {
  CHECK(me, run_exchange(me, me->comm, 0, small_size) == SLUICE_OK);
  if (is_culprit(me)) {
    sleep_ns(100 * MS);
    sluice_comm_abort(me->comm);
    CHECK(me, run_exchange(me, me->comm, 1, small_size) == SLUICE_E_ABORTED);
    CHECK(me, meet(me));
    check_broken_and_destroy(me, SLUICE_E_ABORTED);
  } else {
    uint64_t begin_ns = sluice_now_ns();
    CHECK(me, run_exchange(me, me->comm, 1, medium_size) == SLUICE_E_PEER_LOST);
    CHECK(me, last_peer() == me->world->world_size - 1);
    CHECK(me, sluice_now_ns() - begin_ns < BOUNDED_NS);
    CHECK(me, meet(me));
    check_broken_and_destroy(me, SLUICE_E_PEER_LOST);
  }
  if (me->failure[0] == '\0') renew(me);
}

static void* abort_soon(void* comm) {
  sleep_ns(100 * MS);
  sluice_comm_abort(comm);
  return NULL;
}

static void abort_other_thread(cts_rank_t* me) {
  if (me->rank == 0) {
    pthread_t thread;
    CHECK(me, pthread_create(&thread, NULL, abort_soon, me->comm) == 0);
    uint64_t begin_ns = sluice_now_ns();
    sluice_status_t status = run_exchange(me, me->comm, 0, small_size);
    uint64_t took_ns = sluice_now_ns() - begin_ns;
    pthread_join(thread, NULL);
    CHECK(me, status == SLUICE_E_ABORTED);
    CHECK(me, took_ns < BOUNDED_NS);
  }
  CHECK(me, meet(me));
  renew(me);
}

static void destroy_while_peers_wait(cts_rank_t* me) {
  CHECK(me, run_exchange(me, me->comm, 0, small_size) == SLUICE_OK);
  int is_noticed = exception_of(me->world->transport, me->world->c) == NULL;
  CHECK(me, hurry(me, is_noticed ? PATIENT_NS : SHORT_NS)); /* where nobody is told, the deadline tells */
  if (is_culprit(me)) {
    sluice_comm_destroy(me->comm);
    me->comm = NULL;
    CHECK(me, meet(me));
  } else {
    sluice_status_t status = run_exchange(me, me->comm, 1, small_size);
    int32_t peer = last_peer();
    CHECK(me, meet(me));
    CHECK(me, status == SLUICE_E_PEER_LOST);
    CHECK(me, peer == me->world->world_size - 1);
  }
}

static void destroy_early(cts_rank_t* me) {
  /* All has arrived at rank 0: its leaving must not hurt the others, and must not wait for them. */
  CHECK(me, run_exchange(me, me->comm, 0, uneven_size) == SLUICE_OK);
  if (me->rank == 0) {
    uint64_t begin_ns = sluice_now_ns();
    sluice_comm_destroy(me->comm);
    me->comm = NULL;
    CHECK(me, sluice_now_ns() - begin_ns < BOUNDED_NS);
    CHECK(me, meet(me));
    return;
  }
  CHECK(me, meet(me));
  CHECK(me, run_exchange(me, me->comm, 0, zero_size) == SLUICE_OK);
}

/* Rank 0 sends rank 1 other than it expects. */
static void sizes_differ(cts_rank_t* me, uint64_t sent, uint64_t expected) {
  unsigned char data[64] = {0};
  const void* send[MAX_WORLD_SIZE] = {NULL};
  void* recv[MAX_WORLD_SIZE] = {NULL};
  uint64_t send_bytes[MAX_WORLD_SIZE] = {0};
  uint64_t recv_bytes[MAX_WORLD_SIZE] = {0};
  sluice_exchange_t exchange = {.send = send, .send_bytes = send_bytes, .recv = recv, .recv_bytes = recv_bytes};
  sluice_comm_request_t* request;
  if (me->rank == 0) {
    send[1] = data;
    send_bytes[1] = sent;
  } else if (me->rank == 1) {
    recv[0] = data;
    recv_bytes[0] = expected;
  }
  CHECK(me, hurry(me, 4 * SHORT_NS)); /* who sends too much may wait in vain for its end */
  CHECK(me, sluice_comm_exchange_start(me->comm, &exchange, &request) == SLUICE_OK);
  sluice_status_t status = sluice_comm_exchange_wait(me->comm, request, "blocks of different sizes");
  int32_t peer = last_peer();
  CHECK(me, meet(me));
  if (me->rank == 1) {
    CHECK(me, status == SLUICE_E_INTERNAL);
    CHECK(me, peer == 0);
  }
}

static void sizes_too_many(cts_rank_t* me) { sizes_differ(me, 48, 40); }
static void sizes_too_few(cts_rank_t* me) { sizes_differ(me, 40, 48); }

/* ---- cases: resources ------------------------------------------------------------------------------------------- */

static void create_nth_allocation_fails(cts_rank_t* me) {
  cts_world_t* world = me->world;
  sluice_allocator_t* allocator = sluice_process_allocator();
  for (int64_t n = 0; n < MAX_NTH_ALLOCATIONS; ++n) {
    uint64_t num_before = allocator->num_live;
    sluice_comm_t* comm = NULL;
    sluice_status_t status = SLUICE_E_NO_MEMORY;
    allocator->fail_after = n;
    void* shared = world->transport->open(1);
    if (shared != NULL) status = create_end(world, shared, 0, 1, 0, &comm);
    int is_over = allocator->fail_after >= 0; /* fewer allocations than n: nothing failed */
    allocator->fail_after = -1;
    CHECK(me, status == (is_over ? SLUICE_OK : SLUICE_E_NO_MEMORY));
    CHECK(me, (comm != NULL) == is_over);
    sluice_comm_destroy(comm);
    if (shared != NULL) world->transport->close(shared);
    CHECK(me, allocator->num_live == num_before);
    if (is_over) return;
  }
  fail_check(me, __LINE__, "creation ends after a few allocations");
}

static void all_reduce_allocation_fails(cts_rank_t* me) {
  int64_t data[4] = {0};
  CHECK(me, meet(me));
  if (me->rank == 0) {
    sluice_process_allocator()->fail_after = 0; /* the others wait below until it has struck */
    sluice_status_t status = sluice_comm_all_reduce_i64(me->comm, data, 4, SLUICE_REDUCE_SUM, NULL);
    CHECK(me, meet(me));
    CHECK(me, status == SLUICE_E_NO_MEMORY);
    check_broken_and_destroy(me, SLUICE_E_NO_MEMORY);
  } else {
    CHECK(me, meet(me));
    CHECK(me, sluice_comm_all_reduce_i64(me->comm, data, 4, SLUICE_REDUCE_SUM, NULL) == SLUICE_E_PEER_LOST);
    CHECK(me, last_peer() == 0);
  }
}

/* Runs in the child: every entry returns at once and says why. Exit code 0 or the line that failed. */
static int use_inherited(sluice_comm_t* comm, sluice_comm_request_t* request) {
  sluice_exchange_t none = {NULL, NULL, NULL, NULL};
  sluice_comm_request_t* other;
  int64_t x = 1;
  sluice_error_info_t why;
  if (sluice_comm_exchange_wait(comm, request, NULL) != SLUICE_E_STATE) return 2;
  if (sluice_comm_exchange_start(comm, &none, &other) != SLUICE_E_STATE) return 3;
  if (sluice_comm_all_reduce_i64(comm, &x, 1, SLUICE_REDUCE_SUM, NULL) != SLUICE_E_STATE) return 4;
  sluice_error_info_init(&why, sizeof why);
  sluice_error_last(&why);
  if (strstr(why.message, "fork") == NULL) return 5;
  sluice_comm_abort(comm);
  sluice_comm_destroy(comm);
  return 0;
}

static void fork_with_request(cts_rank_t* me) {
  exchange_t e;
  CHECK(me, start(me, me->comm, 0, small_size, &e) == SLUICE_OK);
  CHECK(me, meet(me));
  if (me->rank == 0) {
    pid_t child = fork();
    if (child == 0) _exit(use_inherited(me->comm, e.request));
    int code = -1;
    CHECK(me, child > 0 && waitpid(child, &code, 0) == child);
    CHECK(me, WIFEXITED(code));
    CHECK(me, WEXITSTATUS(code) == 0);
  }
  CHECK(me, finish(me, me->comm, &e) == SLUICE_OK);
  CHECK(me, run_exchange(me, me->comm, 1, uneven_size) == SLUICE_OK);
}

static const cts_case_t all_cases[] = {
    {"Comm_Accessors_ReturnTheConfig", comm_accessors, 1, 0, 0},
    {"Exchange_UnevenSizesAndZero_ArriveIntact", exchange_uneven, 1, 0, 0},
    {"Exchange_OneSender_ArrivesIntact", exchange_one_sided, 1, 0, 0},
    {"Exchange_AllEmpty_Completes", exchange_empty, 1, 0, 0},
    {"Exchange_LargeBlocks_ArriveIntact", exchange_large, 1, 0, 0},
    {"Exchange_TwoInFlightWaitedInAnyOrder_ArriveIntact", exchange_reversed, 1, 0, 0},
    {"Exchange_HundredPipelined_KeepOrder", exchange_hundred, 1, 0, 0},
    {"AllReduce_SumAndMax_AreExact", all_reduce_sum_max, 1, 0, 0},
    {"Wait_SilentRank_TimesOutNamingIt", wait_silent_rank, 2, 0, 0},
    {"Wait_SilentRankWithTwoInFlight_ReleasesBoth", wait_silent_rank_two_in_flight, 2, 0, 0},
    {"Wait_LateRank_WarnsAndSucceeds", wait_late_rank, 2, 1, 50 * MS},
    {"Abort_WhilePeersWait_IsPeerLostNamingIt", abort_peer, 2, 0, 0},
    {"Abort_FromAnotherThread_EndsTheWait", abort_other_thread, 2, 0, 0},
    {"Destroy_WhilePeersWait_IsPeerLostNamingIt", destroy_while_peers_wait, 2, 0, 0},
    {"Destroy_NothingOutstanding_LeavesOthersAlone", destroy_early, 2, 0, 0},
    {"Exchange_MoreSentThanExpected_IsInternalNamingIt", sizes_too_many, 2, 0, 0},
    {"Exchange_LessSentThanExpected_IsInternalNamingIt", sizes_too_few, 2, 0, 0},
    {"Create_NthAllocationFails_LeaksNothing", create_nth_allocation_fails, 1, 0, 0},
    {"AllReduce_AllocationFails_PeersLearn", all_reduce_allocation_fails, 2, 0, 0},
    {"Fork_ChildHandles_AreInert", fork_with_request, 1, 0, 0},
};
enum { NUM_CASES = sizeof all_cases / sizeof all_cases[0] };

/* ---- runner ----------------------------------------------------------------------------------------------------- */

typedef struct instance_s {
  const cts_transport_t* transport;
  const cts_case_t* c;
  int32_t world_size;
  char name[160];
} instance_t;

static void count_warnings(void* user, int32_t level, const char* message) {
  cts_world_t* world = user;
  if (level != SLUICE_LOG_WARN) return;
  pthread_mutex_lock(&world->mutex);
  ++world->num_warnings;
  size_t used = strlen(world->warnings);
  snprintf(world->warnings + used, sizeof world->warnings - used, "%s\n", message);
  pthread_mutex_unlock(&world->mutex);
}

static void* run_rank(void* arg) {
  cts_rank_t* me = arg;
  cts_world_t* world = me->world;
  if (create_end(world, world->shared, me->rank, world->world_size, PATIENT_NS, &me->comm) != SLUICE_OK) {
    fail_check(me, __LINE__, "the communicator is created");
  } else {
    world->c->run(me);
  }
  sluice_comm_destroy(me->comm);
  return NULL;
}

/* The first failure of any rank here, or "". */
static void run_world(const instance_t* instance, char* out_failure, size_t failure_bytes) {
  cts_world_t world = {.transport = instance->transport, .c = instance->c, .world_size = instance->world_size};
  cts_rank_t ranks[MAX_WORLD_SIZE];
  pthread_t threads[MAX_WORLD_SIZE];
  uint64_t num_before = sluice_process_allocator()->num_live;
  memset(ranks, 0, sizeof ranks);
  pthread_mutex_init(&world.mutex, NULL);
  sluice_cond_init(&world.met);
  sluice_set_log(count_warnings, &world, SLUICE_LOG_WARN);
  world.shared = instance->transport->open(instance->world_size);
  assert_non_null(world.shared);

  int is_process = instance->transport->meeting != NULL;
  world.num_here = is_process ? 1 : instance->world_size;
  for (int32_t i = 0; i < world.num_here; ++i) {
    ranks[i].world = &world;
    ranks[i].rank = is_process ? sluice_comm_rank(instance->transport->meeting) : i;
    assert_int_equal(pthread_create(&threads[i], NULL, run_rank, &ranks[i]), 0);
  }
  for (int32_t i = 0; i < world.num_here; ++i) pthread_join(threads[i], NULL);
  instance->transport->close(world.shared);
  sluice_set_log(NULL, NULL, SLUICE_LOG_WARN);

  out_failure[0] = '\0';
  for (int32_t i = 0; i < world.num_here && out_failure[0] == '\0'; ++i) {
    snprintf(out_failure, failure_bytes, "%s", ranks[i].failure);
  }
  if (out_failure[0] == '\0' && !instance->c->expects_warnings && world.num_warnings > 0) {
    snprintf(out_failure, failure_bytes, "unexpected warnings: %.400s", world.warnings);
  }
  if (out_failure[0] == '\0' && sluice_process_allocator()->num_live != num_before) {
    snprintf(out_failure, failure_bytes, "%lld allocations leaked",
             (long long)(sluice_process_allocator()->num_live - num_before));
  }
  pthread_cond_destroy(&world.met);
  pthread_mutex_destroy(&world.mutex);
}

static void run_instance(void** state) {
  const instance_t* instance = *state;
  const cts_exception_t* exception = exception_of(instance->transport, instance->c);
  int is_expected_to_fail = exception != NULL;
  char failure[512];
  run_world(instance, failure, sizeof failure);
  int failed = failure[0] != '\0';
  if (instance->transport->meeting != NULL) {
    /* A case fails or passes on all ranks together. */
    int64_t any = failed;
    assert_int_equal(sluice_comm_all_reduce_i64(instance->transport->meeting, &any, 1, SLUICE_REDUCE_MAX, "verdict"),
                     0);
    if (any && !failed) snprintf(failure, sizeof failure, "failed on another rank");
    failed = any != 0;
  }
  if (failed && is_expected_to_fail) {
    print_message("             cannot: %s\n", exception->reason);
  } else if (failed) {
    fail_msg("%s", failure);
  } else if (is_expected_to_fail) {
    fail_msg("passes although listed as impossible (%s): strike it off the list", exception->reason);
  }
}

int cts_comm_suite_run(const cts_transport_t* transport, const int32_t* world_sizes, int32_t num_world_sizes) {
  static instance_t instances[NUM_CASES * MAX_WORLD_SIZE];
  static struct CMUnitTest tests[NUM_CASES * MAX_WORLD_SIZE];
  size_t n = 0;
  alarm(SUITE_SECONDS); /* a hang ends with the name of its case on the last line */
  for (int32_t w = 0; w < num_world_sizes; ++w) {
    for (size_t c = 0; c < NUM_CASES; ++c) {
      if (world_sizes[w] < all_cases[c].min_world_size) continue;
      if (all_cases[c].run == create_nth_allocation_fails && world_sizes[w] != 1) continue; /* makes its own world */
      instance_t* instance = &instances[n];
      instance->transport = transport;
      instance->c = &all_cases[c];
      instance->world_size = world_sizes[w];
      snprintf(instance->name, sizeof instance->name, "%s/W=%d/%s", transport->name, world_sizes[w], all_cases[c].name);
      tests[n] = (struct CMUnitTest){.name = instance->name, .test_func = run_instance, .initial_state = instance};
      ++n;
    }
  }
  return _cmocka_run_group_tests(transport->name, tests, n, NULL, NULL);
}
