// SPDX-License-Identifier: Apache-2.0
/* The NCCL communicator on a fake NCCL and a fake driver: device buffers on a stream, splitting, loading the library,
 * and every error. backend/cts/comm tests what all transports share. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend/base/clock.h"
#include "backend/base/test/refused.h"
#include "backend/comm/nccl/fake/fake_nccl.h"
#include "backend/device/cuda/cuda_memory.h"
#include "backend/device/cuda/fake/fake_cuda.h"

enum { W = 3, BLOCK = 4096 };

/* Device, communicator and buffers of one rank. */
typedef struct rank_s {
  sluice_device_t* device;
  sluice_allocator_t memory;
  sluice_comm_t* comm;
  void* stream;
  unsigned char *send, *recv; /* [W][BLOCK] on the device */
} rank_t;

static rank_t ranks[W];

static sluice_status_t (*open_headers)(sluice_comm_t* comm, sluice_comm_t** out_tcp); /* NULL: connects over TCP */

static sluice_status_t create(rank_t* r, int32_t rank, int32_t world_size, const sluice_nccl_id_t* id, void* parent,
                              int32_t color, uint64_t timeout_ns) {
  sluice_nccl_symbols_t symbols = sluice_fake_nccl();
  const sluice_nccl_options_t options = {.symbols = &symbols,
                                         .device = r->device,
                                         .memory = &r->memory,
                                         .id = id,
                                         .parent = parent,
                                         .color = color,
                                         .open_headers = open_headers};
  DEFAULTS(sluice_comm_config, config);
  config.rank = rank;
  config.world_size = world_size;
  config.timeout_ns = timeout_ns;
  return sluice_nccl_comm_create(&options, &config, &r->comm);
}

static sluice_nccl_id_t new_id(void) {
  sluice_nccl_symbols_t symbols = sluice_fake_nccl();
  sluice_nccl_id_t id;
  assert_int_equal(sluice_nccl_make_id(&symbols, &id), SLUICE_OK);
  return id;
}

/* All ranks, with an id of their own. */
static void create_all(uint64_t timeout_ns) {
  const sluice_nccl_id_t id = new_id();
  for (int i = 0; i < W; ++i) assert_int_equal(create(&ranks[i], i, W, &id, NULL, 0, timeout_ns), SLUICE_OK);
}

static uint64_t timeout_ms; /* deadline and watchdog: long if all calls should succeed, short if calls fail */

static int set_up(void** state) {
  (void)state;
  timeout_ms = 20000;
  open_headers = NULL;
  sluice_fake_cuda_reset();
  memset(ranks, 0, sizeof ranks);
  sluice_fake_nccl_set_version(22809);
  for (int i = 0; i < W; ++i) {
    rank_t* r = &ranks[i];
    if (sluice_fake_cuda_device(sluice_process_allocator(), &r->device) != SLUICE_OK) {
      return -1;
    }
    sluice_cuda_allocator_init(r->device, &r->memory);
    r->stream = sluice_fake_cuda_open_stream(0);
    r->send = sluice_alloc(&r->memory, W * BLOCK, "send");
    r->recv = sluice_alloc(&r->memory, W * BLOCK, "recv");
  }
  return 0;
}
static int tear_down(void** state) {
  char text[200];
  (void)state;
  int64_t live = 0;
  for (int i = 0; i < W; ++i) {
    rank_t* r = &ranks[i];
    sluice_comm_destroy(r->comm);
    sluice_free(&r->memory, r->send, W * BLOCK);
    sluice_free(&r->memory, r->recv, W * BLOCK);
    live += (int64_t)r->memory.num_live;
    sluice_allocator_deinit(&r->memory);
    sluice_fake_cuda_close_stream(r->stream);
    r->device->vtable->destroy(r->device);
  }
  live += sluice_fake_cuda_live(text, sizeof text) + sluice_fake_nccl_live();
  if (live != 0) print_message("left: %s, %lld communicators\n", text, (long long)sluice_fake_nccl_live());
  return live == 0 ? 0 : -1;
}

static uint64_t size_of(int from, int to) {
  return from == to || (from + to) % 3 == 0 ? 0 : (uint64_t)(100 * from + 7 * to + 1);
}

static sluice_status_t enqueue_between(rank_t* r, int me, unsigned char* from, unsigned char* to) {
  const void* send[W];
  void* recv[W];
  uint64_t send_bytes[W], recv_bytes[W];
  for (int p = 0; p < W; ++p) {
    send[p] = from + p * BLOCK;
    recv[p] = to + p * BLOCK;
    send_bytes[p] = size_of(me, p);
    recv_bytes[p] = size_of(p, me);
    memset(from + p * BLOCK, 16 * me + p + 1, BLOCK);
  }
  const sluice_exchange_t exchange = {send, send_bytes, recv, recv_bytes};
  return sluice_comm_exchange_enqueue(r->comm, &exchange, r->stream);
}

static sluice_status_t enqueue(rank_t* r, int me) { return enqueue_between(r, me, r->send, r->recv); }

static void clear_received(void) {
  for (int i = 0; i < W; ++i) memset(ranks[i].recv, 0, W * BLOCK);
}

/* All streams have ended, and each rank has received exactly the others' bytes at each multiple of `step`. */
static void check_received(uint64_t step) {
  for (int i = 0; i < W; ++i) assert_true(sluice_fake_cuda_idle(ranks[i].stream));
  for (int me = 0; me < W; ++me) {
    for (int p = 0; p < W; ++p) {
      for (uint64_t b = 0; b < BLOCK; ++b) {
        assert_int_equal(ranks[me].recv[p * BLOCK + b], b % step < size_of(p, me) ? 16 * p + me + 1 : 0);
      }
    }
  }
}

TEST(Enqueue_DeviceBuffers_ArriveOnTheStreamWithoutAHostWait) {
  create_all(0);
  int64_t waits = sluice_fake_cuda_host_waits(), groups = sluice_fake_nccl_groups();
  /* Ranks enqueue one after another on this thread, since enqueueing does not wait for peers. */
  clear_received();
  for (int i = 0; i < W; ++i) {
    assert_int_equal(enqueue(&ranks[i], i), SLUICE_OK);
    assert_int_equal(sluice_comm_poll(ranks[i].comm), SLUICE_OK);
    if (i < W - 1) assert_false(sluice_fake_cuda_idle(ranks[0].stream));
  }
  check_received(BLOCK);
  assert_int_equal(sluice_fake_cuda_host_waits(), waits);
  assert_int_equal(sluice_fake_nccl_groups(), groups + W);
}

/* A thread of NCCL puts a group into its stream, so the call must wait until the communicator is not IN_PROGRESS. */
TEST(Enqueue_GroupsInProgress_AreInTheStreamAfterTheCall) {
  char rule[128];
  const int64_t broken = sluice_fake_nccl_broken_rules(rule, sizeof rule);
  create_all(0);
  sluice_fake_nccl_linger(5);
  for (int round = 0; round < 3; ++round) {
    clear_received();
    for (int i = 0; i < W; ++i) assert_int_equal(enqueue(&ranks[i], i), SLUICE_OK);
    check_received(BLOCK);
  }
  sluice_fake_nccl_linger(0);
  assert_int_equal(sluice_fake_nccl_broken_rules(rule, sizeof rule), broken);
}

/* A non-blocking communicator may answer any call in a group with "in progress"; the remaining calls must follow. */
TEST(Enqueue_AnyCallInProgress_LeavesNothingOut) {
  create_all(0);
  for (int i = 0; i < W; ++i) assert_int_equal(enqueue(&ranks[i], i), SLUICE_OK); /* starts the communicator */
  int seen = 0;
  for (int64_t nth = 1; nth < 12; ++nth) { /* call 0 starts the group and never answers "in progress" */
    clear_received();
    for (int i = 0; i < W; ++i) {
      if (i == 1) sluice_fake_nccl_fail_call(nth, SLUICE_NCCL_IN_PROGRESS);
      if (enqueue(&ranks[i], i) != SLUICE_OK) fail_msg("call %lld, rank %d: %s", (long long)nth, i, last_message());
      if (i == 1) seen += sluice_fake_nccl_failed();
      if (i == 1) sluice_fake_nccl_fail_call(-1, 0);
    }
    check_received(BLOCK);
  }
  assert_true(seen >= 3); /* sends, receives, and the end of the group */
}

TEST(Group_TwoExchanges_AreOneGroupOfNccl) {
  create_all(timeout_ms * UINT64_C(1000000));
  const int64_t groups = sluice_fake_nccl_groups();
  clear_received();
  for (int i = 0; i < W; ++i) {
    rank_t* r = &ranks[i];
    sluice_comm_group_begin(r->comm);
    assert_int_equal(enqueue(r, i), SLUICE_OK);
    assert_int_equal(enqueue_between(r, i, r->send, r->recv + BLOCK / 2), SLUICE_OK);
    assert_int_equal(sluice_fake_nccl_groups(), groups + i);
    assert_int_equal(sluice_comm_group_end(r->comm, r->stream, SLUICE_OK), SLUICE_OK);
  }
  assert_int_equal(sluice_fake_nccl_groups(), groups + W);
  check_received(BLOCK / 2);
  /* The end of a group returns the error of a call in the group; nothing is enqueued, now or by the next group. */
  for (int i = 0; i < W; ++i) {
    sluice_comm_group_begin(ranks[i].comm);
    assert_int_equal(enqueue(&ranks[i], i), SLUICE_OK);
    assert_int_equal(sluice_comm_group_end(ranks[i].comm, ranks[i].stream, SLUICE_E_EXTERNAL), SLUICE_E_EXTERNAL);
    sluice_comm_group_begin(ranks[i].comm);
    assert_int_equal(sluice_comm_group_end(ranks[i].comm, ranks[i].stream, SLUICE_OK), SLUICE_OK);
  }
  assert_int_equal(sluice_fake_nccl_groups(), groups + W);
}

/* ---- headers ---------------------------------------------------------------------------------------------------- */

typedef struct header_call_s {
  int rank, aborts;
  int received[W];
  sluice_status_t status;
  sluice_error_info_t why;
} header_call_t;

static void* header_main(void* argument) {
  header_call_t* call = argument;
  const void* send[W];
  void* recv[W];
  uint64_t bytes[W];
  int mine = 100 + call->rank;
  for (int p = 0; p < W; ++p) {
    send[p] = &mine, recv[p] = &call->received[p];
    bytes[p] = p == call->rank ? 0 : sizeof mine;
  }
  const sluice_exchange_t exchange = {send, bytes, recv, bytes};
  call->status = SLUICE_OK;
  if (call->aborts) {
    sluice_comm_abort(ranks[call->rank].comm);
  } else {
    call->status = sluice_comm_exchange_headers(ranks[call->rank].comm, &exchange, "a header of the test");
  }
  sluice_error_info_init(&call->why, sizeof call->why);
  sluice_error_last(&call->why);
  return NULL;
}

/* Exchanges headers on all ranks, one thread for each. aborts: the rank that aborts instead, or -1. */
static void exchange_headers(header_call_t* calls, int aborts) {
  pthread_t threads[W];
  for (int i = 0; i < W; ++i) {
    calls[i] = (header_call_t){.rank = i, .aborts = i == aborts};
    pthread_create(&threads[i], NULL, header_main, &calls[i]);
  }
  for (int i = 0; i < W; ++i) pthread_join(threads[i], NULL);
  for (int i = 0; i < W && aborts < 0; ++i) {
    if (calls[i].status != SLUICE_OK) fail_msg("rank %d: %s", i, calls[i].why.message);
    for (int p = 0; p < W; ++p) assert_int_equal(calls[i].received[p], p == i ? 0 : 100 + p);
  }
}

/* Headers do not wait for an exchange that waits for a peer. As a group of NCCL they would run after it. */
TEST(Headers_ExchangeBeforeThem_IsNotWaitedFor) {
  header_call_t calls[W];
  create_all(timeout_ms * UINT64_C(1000000));
  exchange_headers(calls, -1); /* connects the ranks */
  const int64_t groups = sluice_fake_nccl_groups();
  assert_int_equal(enqueue(&ranks[0], 0), SLUICE_OK);
  exchange_headers(calls, -1);
  assert_int_equal(sluice_fake_nccl_groups(), groups + 1);
  assert_false(sluice_fake_cuda_idle(ranks[0].stream));
  for (int i = 1; i < W; ++i) assert_int_equal(enqueue(&ranks[i], i), SLUICE_OK);
  for (int i = 0; i < W; ++i) assert_true(sluice_fake_cuda_idle(ranks[i].stream));
}

static sluice_status_t open_none(sluice_comm_t* comm, sluice_comm_t** out_tcp) {
  (void)out_tcp;
  return SLUICE_FAIL_PEER(SLUICE_E_EXTERNAL, comm->rank, -1, "there is no network");
}

TEST(Headers_NoConnections_GoThroughNccl) {
  header_call_t calls[W];
  open_headers = open_none;
  create_all(timeout_ms * UINT64_C(1000000));
  const int64_t groups = sluice_fake_nccl_groups();
  exchange_headers(calls, -1);
  assert_int_equal(sluice_fake_nccl_groups(), groups + W);
}

TEST(Headers_RankAborts_OthersLoseItAndTheirStreamsEnd) {
  header_call_t calls[W];
  create_all(timeout_ms * UINT64_C(1000000));
  exchange_headers(calls, -1);
  assert_int_equal(enqueue(&ranks[0], 0), SLUICE_OK); /* waits for the other ranks */
  exchange_headers(calls, 1);
  for (int i = 0; i < W; i += 2) {
    assert_int_equal(calls[i].status, SLUICE_E_PEER_LOST);
    assert_int_equal(calls[i].why.peer, 1);
  }
  assert_true(sluice_fake_cuda_idle(ranks[0].stream));
}

/* ---- the host's own communicator, split ------------------------------------------------------------------------- */

static void* hosts[W];

/* Creates the host's communicators: non-blocking, and started. */
static void open_hosts(void) {
  sluice_nccl_symbols_t symbols = sluice_fake_nccl();
  const sluice_nccl_id_t id = new_id();
  for (int i = 0; i < W; ++i) {
    sluice_nccl_config_t config = sluice_nccl_config(0);
    assert_int_equal(symbols.ncclCommInitRankConfig(&hosts[i], W, id, i, &config), SLUICE_NCCL_IN_PROGRESS);
  }
}

/* What a context does if all ranks register buffers: a communicator (of id, or split from the host's, which waits for
 * all ranks), a first exchange, then a block of the communicator's memory. */
typedef struct visit_s {
  int rank, has_block, wrong_bytes, open_groups;
  const sluice_nccl_id_t* id;
  sluice_status_t status;
} visit_t;
static void* visit_main(void* argument) {
  visit_t* visit = argument;
  rank_t* r = &ranks[visit->rank];
  const struct timespec nap = {.tv_nsec = 100000};
  void* block = NULL;
  void* parent = visit->id == NULL ? hosts[visit->rank] : NULL;
  visit->status = create(r, visit->rank, W, visit->id, parent, 0, timeout_ms * UINT64_C(1000000));
  if (visit->status == SLUICE_OK) visit->status = enqueue(r, visit->rank);
  if (visit->status == SLUICE_OK) visit->status = r->comm->vtable->allocate(r->comm, 2 * W * BLOCK, &block);
  visit->has_block = block != NULL;
  unsigned char* from = block != NULL ? block : r->send;
  unsigned char* to = block != NULL ? from + W * BLOCK : r->recv;
  if (visit->status == SLUICE_OK) visit->status = enqueue_between(r, visit->rank, from, to);
  visit->open_groups = sluice_fake_nccl_open_groups();
  if (visit->status != SLUICE_OK) sluice_comm_abort(r->comm);
  const uint64_t patient_until_ns = sluice_now_ns() + timeout_ms * UINT64_C(1000000);
  while (!sluice_fake_cuda_idle(r->stream)) {
    nanosleep(&nap, NULL);
    if (sluice_now_ns() > patient_until_ns) sluice_comm_abort(r->comm); /* as the host's watchdog would */
  }
  if (visit->status == SLUICE_OK) visit->status = sluice_comm_poll(r->comm); /* also if a peer or watchdog aborted */
  for (int p = 0; p < W && visit->status == SLUICE_OK; ++p) {
    for (uint64_t b = 0; b < size_of(p, visit->rank); ++b) {
      visit->wrong_bytes += to[p * BLOCK + b] != 16 * p + visit->rank + 1;
    }
  }
  if (block != NULL) r->comm->vtable->release(r->comm, block);
  return NULL;
}
static void visit_all(visit_t* visits, const sluice_nccl_id_t* id) {
  pthread_t threads[W];
  for (int i = 0; i < W; ++i) {
    visits[i] = (visit_t){.rank = i, .id = id};
    pthread_create(&threads[i], NULL, visit_main, &visits[i]);
  }
  for (int i = 0; i < W; ++i) pthread_join(threads[i], NULL);
}
static int open_and_visit(visit_t* visits) {
  sluice_nccl_symbols_t symbols = sluice_fake_nccl();
  sluice_nccl_id_t id;
  const int has_id = sluice_nccl_make_id(&symbols, &id) == SLUICE_OK;
  if (has_id) visit_all(visits, &id);
  return has_id;
}
static void check_rules(void) {
  char rule[128];
  if (sluice_fake_nccl_broken_rules(rule, sizeof rule) != 0) fail_msg("%s", rule);
  assert_int_equal(sluice_fake_nccl_registrations(), 0);
}
static void destroy_all(void) {
  for (int i = 0; i < W; ++i) {
    sluice_comm_destroy(ranks[i].comm);
    ranks[i].comm = NULL;
  }
}

/* Ranks keep their numbers. The host may destroy its communicator at once. */
TEST(Split_OfTheHostsCommunicator_Exchanges) {
  sluice_nccl_symbols_t symbols = sluice_fake_nccl();
  visit_t visits[W];
  open_hosts();
  visit_all(visits, NULL);
  for (int i = 0; i < W; ++i) assert_true(visits[i].status == SLUICE_OK && visits[i].wrong_bytes == 0);
  for (int i = 0; i < W; ++i) assert_int_equal(symbols.ncclCommDestroy(hosts[i]), 0);
  for (int i = 0; i < W; ++i) assert_true(sluice_fake_cuda_idle(ranks[i].stream));
  check_rules();
}

/* A split times out and its memory stays: NCCL writes the handle only when the host aborts its own communicator. */
TEST(Split_RankTakesNoPart_TimesOutAndTheHandleMayStillCome) {
  sluice_nccl_symbols_t symbols = sluice_fake_nccl();
  open_hosts();
  REFUSED(create(&ranks[0], 0, W, NULL, hosts[0], 0, 50000000), SLUICE_E_TIMED_OUT,
          "the split of the host's communicator took longer than 0.1 s");
  assert_null(ranks[0].comm);
  for (int i = 0; i < W; ++i) assert_int_equal(symbols.ncclCommAbort(hosts[i]), 0);
  assert_int_equal(sluice_fake_nccl_live(), 0);
}

/* Destroying a non-blocking communicator may go on in the background; it is not aborted as well. */
TEST(Destroy_InProgress_EndsItOnce) {
  char rule[128];
  int64_t broken = sluice_fake_nccl_broken_rules(rule, sizeof rule);
  create_all(0);
  for (int i = 0; i < W; ++i) assert_int_equal(enqueue(&ranks[i], i), SLUICE_OK);
  for (int i = 0; i < W; ++i) assert_true(sluice_fake_cuda_idle(ranks[i].stream));
  sluice_fake_nccl_fail_call(1, SLUICE_NCCL_IN_PROGRESS); /* ncclCommDestroy, after ncclCommFinalize */
  sluice_comm_destroy(ranks[0].comm);
  ranks[0].comm = NULL;
  assert_true(sluice_fake_nccl_failed());
  sluice_fake_nccl_fail_call(-1, 0);
  assert_int_equal(sluice_fake_nccl_live(), W - 1);
  assert_int_equal(sluice_fake_nccl_broken_rules(rule, sizeof rule), broken);
}

TEST(Create_MaxCtas_ReachesNcclOrIsRefused) {
  static const struct {
    const char* text;
    int wanted; /* 0: refused */
  } cases[] = {
      {NULL, SLUICE_NCCL_UNDEFINED}, {"", SLUICE_NCCL_UNDEFINED}, {"8", 8}, {"0", 0}, {"65", 0}, {"8 CTAs", 0}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    const sluice_nccl_id_t id = new_id();
    unsetenv("SLUICE_NCCL_MAX_CTAS");
    if (cases[i].text != NULL) setenv("SLUICE_NCCL_MAX_CTAS", cases[i].text, 1);
    const sluice_status_t status = create(&ranks[0], 0, 1, &id, NULL, 0, 0);
    unsetenv("SLUICE_NCCL_MAX_CTAS");
    assert_int_equal(status, cases[i].wanted == 0 ? SLUICE_E_INVALID_ARGUMENT : SLUICE_OK);
    if (cases[i].wanted != 0) assert_int_equal(sluice_fake_nccl_max_ctas(), cases[i].wanted);
    sluice_comm_destroy(ranks[0].comm);
    ranks[0].comm = NULL;
  }
}

/* A rank never creates its communicator: the first exchange of another rank times out, and everything is released. */
TEST(Enqueue_RankNeverCreated_TimesOutAndIsBroken) {
  const sluice_nccl_id_t id = new_id();
  assert_int_equal(create(&ranks[0], 0, W, &id, NULL, 0, 50000000), SLUICE_OK);
  REFUSED(enqueue(&ranks[0], 0), SLUICE_E_TIMED_OUT, "the start of the group");
  assert_int_equal(enqueue(&ranks[0], 0), SLUICE_E_TIMED_OUT); /* the communicator stays broken */
}

/* A peer aborts after it has enqueued: poll reports the loss, and the stream no longer waits. */
TEST(Poll_PeerAborted_IsPeerLostAndTheStreamEnds) {
  create_all(0);
  assert_int_equal(enqueue(&ranks[0], 0), SLUICE_OK);
  assert_false(sluice_fake_cuda_idle(ranks[0].stream));
  sluice_comm_abort(ranks[1].comm);
  assert_int_equal(sluice_comm_poll(ranks[1].comm), SLUICE_E_ABORTED);
  assert_int_equal(sluice_comm_poll(ranks[0].comm), SLUICE_E_PEER_LOST);
  assert_true(sluice_fake_cuda_idle(ranks[0].stream));
  /* A new group works in the same process. */
  for (int i = 0; i < W; ++i) sluice_comm_destroy(ranks[i].comm);
  create_all(0);
  for (int i = 0; i < W; ++i) assert_int_equal(enqueue(&ranks[i], i), SLUICE_OK);
  for (int i = 0; i < W; ++i) assert_true(sluice_fake_cuda_idle(ranks[i].stream));
}

TEST(Library_MissingOldOrWrong_IsNotFound) {
  sluice_nccl_symbols_t symbols = sluice_fake_nccl();
  assert_int_equal(sluice_nccl_check_version(&symbols), SLUICE_OK);
  sluice_fake_nccl_set_version(21703);
  REFUSED(sluice_nccl_check_version(&symbols), SLUICE_E_NOT_FOUND, "21703");
  REFUSED(sluice_nccl_open("libnccl_not_there.so.2", &symbols), SLUICE_E_NOT_FOUND, "2.18");
  REFUSED(sluice_nccl_open("libm.so.6", &symbols), SLUICE_E_NOT_FOUND, "ncclGetVersion");
}

/* ---- registered buffers ---------------------------------------------------------------------------------------- */

TEST(Register_AllRanksWill_MessagesLieInRegisteredBuffers) {
  visit_t visits[W];
  int64_t before = sluice_fake_nccl_registered();
  assert_true(open_and_visit(visits));
  for (int i = 0; i < W; ++i) {
    if (visits[i].status != SLUICE_OK || !visits[i].has_block || visits[i].wrong_bytes != 0) fail_msg("rank %d", i);
  }
  int messages = 0;
  for (int i = 0; i < W * W; ++i) messages += size_of(i / W, i % W) > 0;
  assert_int_equal(sluice_fake_nccl_registered() - before, messages);
  check_rules();
}

/* A block outlives an abort: NCCL has ended the registration with the communicator, and the memory is still freed. */
TEST(Register_AbortedWithABlock_GivesItBack) {
  visit_t visits[W];
  void* block = NULL;
  assert_true(open_and_visit(visits));
  assert_int_equal(ranks[0].comm->vtable->allocate(ranks[0].comm, 1000, &block), SLUICE_OK);
  assert_non_null(block);
  sluice_comm_abort(ranks[0].comm);
  assert_int_equal(sluice_fake_nccl_registrations(), 0);
  ranks[0].comm->vtable->release(ranks[0].comm, block);
  assert_int_equal(ranks[0].comm->vtable->allocate(ranks[0].comm, 1000, &block), SLUICE_E_ABORTED);
  assert_null(block);
  check_rules();
}

/* One call of NCCL or the driver fails while ranks are created, register, exchange and are destroyed: no rank hangs, no
 * group of calls stays open, and nothing leaks. For split communicators only the first calls fail: later ones ask for
 * the state, and their number depends on how long ranks wait for each other. */
TEST(Calls_NthFails_NobodyHangsOrLeaks) {
  enum { OF_NCCL, OF_DRIVER, OF_SPLIT, KINDS, SPLIT_CALLS = 48 };
  sluice_nccl_symbols_t symbols = sluice_fake_nccl();
  for (int kind = 0; kind < KINDS; ++kind) {
    int64_t failures = 0, nth = 0;
    timeout_ms = kind == OF_SPLIT ? 100 : 200; /* a timeout is one more failure; this test expects no success */
    for (int done = 0; !done; ++nth) {
      char before[200], after[200];
      visit_t visits[W];
      assert_true(nth < 900);
      int64_t live = sluice_fake_cuda_live(before, sizeof before);
      if (kind == OF_SPLIT) open_hosts();
      if (kind == OF_DRIVER) sluice_fake_cuda_fail_call(nth, 719);
      if (kind != OF_DRIVER) sluice_fake_nccl_fail_call(nth, 2);
      int opened = 1;
      if (kind == OF_SPLIT) visit_all(visits, NULL);
      if (kind != OF_SPLIT) opened = open_and_visit(visits);
      failures += !opened;
      for (int i = 0; i < W && opened; ++i) {
        failures += visits[i].status != SLUICE_OK;
        assert_int_equal(visits[i].wrong_bytes + visits[i].open_groups, 0);
      }
      destroy_all();
      done = kind == OF_DRIVER ? !sluice_fake_cuda_failed() : !sluice_fake_nccl_failed();
      if (kind == OF_SPLIT && nth + 1 == SPLIT_CALLS) done = 1;
      sluice_fake_cuda_fail_call(-1, 0);
      sluice_fake_nccl_fail_call(-1, 0);
      for (int i = 0; i < W && kind == OF_SPLIT; ++i) assert_int_equal(symbols.ncclCommAbort(hosts[i]), 0);
      for (int i = 0; i < W; ++i) assert_true(sluice_fake_cuda_idle(ranks[i].stream));
      assert_int_equal(sluice_fake_nccl_live(), 0);
      check_rules();
      if (sluice_fake_cuda_live(after, sizeof after) != live)
        fail_msg("call %lld: %s, then %s", (long long)nth, before, after);
    }
    print_message("%lld calls, %lld failures reported\n", (long long)nth, (long long)failures);
    assert_true(failures > 10);
  }
}

/* Two communicators of two devices, whose groups the ranks enqueue in different orders: with a queue for each stream
 * both end; in one queue they wait for each other. */
TEST(FakeNccl_GroupsInDifferentOrders_WaitForEachOtherInOneQueue) {
  sluice_nccl_symbols_t symbols = sluice_fake_nccl();
  for (int queues = 8; queues > 0; queues -= 7) {
    void *comms[2][2], *streams[2][2]; /* [communicator][rank] */
    char data[2][2], why[400];
    sluice_fake_cuda_set_queues(queues);
    for (int c = 0; c < 2; ++c) {
      const sluice_nccl_id_t id = new_id();
      for (int r = 0; r < 2; ++r) {
        sluice_nccl_config_t config = sluice_nccl_config(0);
        assert_int_equal(symbols.ncclCommInitRankConfig(&comms[c][r], 2, id, r, &config), SLUICE_NCCL_IN_PROGRESS);
        streams[c][r] = sluice_fake_cuda_open_stream(1 + r);
      }
    }
    for (int i = 0; i < 4; ++i) {
      const int r = i / 2, c = i % 2 ^ r;
      assert_int_equal(symbols.ncclGroupStart(), 0);
      assert_int_equal((r == 0 ? symbols.ncclSend(data[c], 1, SLUICE_NCCL_UINT8, 1, comms[c][r], streams[c][r])
                               : symbols.ncclRecv(data[c] + 1, 1, SLUICE_NCCL_UINT8, 0, comms[c][r], streams[c][r])),
                       0);
      assert_int_equal(symbols.ncclGroupEnd(), 0);
    }
    assert_int_equal(sluice_fake_cuda_deadlocked(why, sizeof why), queues == 1);
    if (queues == 1) assert_non_null(strstr(why, "a group of NCCL (stream"));
    for (int i = 0; i < 4; ++i) assert_int_equal(symbols.ncclCommAbort(comms[i / 2][i % 2]), 0);
    for (int i = 0; i < 4; ++i) {
      assert_true(sluice_fake_cuda_idle(streams[i / 2][i % 2]));
      sluice_fake_cuda_close_stream(streams[i / 2][i % 2]);
    }
  }
  sluice_fake_cuda_set_queues(8);
}

/* Violations of NCCL's rules are counted. This case is the last, since the counts persist. */
TEST(FakeNccl_BrokenRules_AreCounted) {
  char rule[128];
  visit_t visits[W];
  assert_true(open_and_visit(visits));
  int64_t before = sluice_fake_nccl_broken_rules(rule, sizeof rule);
  void* block = NULL;
  assert_int_equal(ranks[0].comm->vtable->allocate(ranks[0].comm, 2 * W * BLOCK, &block), SLUICE_OK);
  unsigned char* from = block;
  assert_int_equal(enqueue_between(&ranks[0], 0, from, from + W * BLOCK), SLUICE_OK); /* other ranks use plain memory */
  for (int i = 1; i < W; ++i) assert_int_equal(enqueue(&ranks[i], i), SLUICE_OK);
  assert_true(sluice_fake_nccl_broken_rules(rule, sizeof rule) > before);
  assert_non_null(strstr(rule, "one side of a message"));
  sluice_comm_abort(ranks[0].comm);
  ranks[0].comm->vtable->release(ranks[0].comm, block);
}

int main(void) { return run_cases_each(set_up, tear_down); }
