// SPDX-License-Identifier: Apache-2.0
/* The faults of the fake communicator, between two ranks over local communicators, on one thread where possible. */
#include "backend/comm/fake/fake_comm.h"

#include "backend/base/clock.h"
#include "third_party/bazel/test.h"

#define MS UINT64_C(1000000)

typedef struct pair_s {
  sluice_comm_t* fake; /* rank 0 */
  sluice_comm_t* peer; /* rank 1, over a local communicator without faults */
  unsigned char data[4];
} pair_t;

static void open_pair(pair_t* pair, uint64_t timeout_ns) {
  sluice_local_group_t* group;
  sluice_comm_t* ends[2];
  assert_int_equal(sluice_local_group_create(2, &group), SLUICE_OK);
  for (int32_t r = 0; r < 2; ++r) {
    DEFAULTS(sluice_comm_config, config);
    config.rank = r;
    config.world_size = 2;
    config.timeout_ns = timeout_ns;
    assert_int_equal(sluice_comm_create_local(group, &config, &ends[r]), SLUICE_OK);
  }
  assert_int_equal(sluice_fake_comm_create(ends[0], &pair->fake), SLUICE_OK);
  sluice_comm_destroy(ends[0]);
  pair->peer = ends[1];
  sluice_local_group_destroy(group);
}

static void close_pair(pair_t* pair) {
  sluice_comm_destroy(pair->fake);
  sluice_comm_destroy(pair->peer);
  assert_int_equal(sluice_process_allocator()->num_live, 0);
}

/* Rank 1 sends 4 bytes to rank 0. Its exchange completes when rank 0 has waited. */
static sluice_status_t start_at(pair_t* pair, int32_t rank, sluice_comm_request_t** out_request) {
  const void* send[2] = {pair->data, pair->data};
  void* recv[2] = {pair->data, pair->data};
  uint64_t send_bytes[2] = {rank == 1 ? 4 : 99, 0};
  uint64_t recv_bytes[2] = {0, rank == 0 ? 4 : 99};
  sluice_exchange_t exchange = {send, send_bytes, recv, recv_bytes};
  return sluice_comm_exchange_start(rank == 0 ? pair->fake : pair->peer, &exchange, out_request);
}

TEST(Fake_NthStartFails_RecordsCallsAndPeerLearns) {
  pair_t pair;
  sluice_comm_request_t *ours, *theirs;
  open_pair(&pair, 60000 * MS);
  sluice_fake_comm_inject(
      pair.fake,
      &(sluice_fake_fault_t){
          .on = SLUICE_FAKE_START, .action = SLUICE_FAKE_FAIL, .nth = 1, .status = SLUICE_E_EXTERNAL, .peer = 1});
  assert_int_equal(start_at(&pair, 0, &ours), SLUICE_OK);
  assert_int_equal(start_at(&pair, 1, &theirs), SLUICE_OK);
  assert_int_equal(sluice_comm_exchange_wait(pair.fake, ours, NULL), SLUICE_OK);
  assert_int_equal(sluice_comm_exchange_wait(pair.peer, theirs, NULL), SLUICE_OK);
  assert_int_equal(start_at(&pair, 1, &theirs), SLUICE_OK);
  assert_int_equal(start_at(&pair, 0, &ours), SLUICE_E_EXTERNAL);
  assert_int_equal(sluice_comm_exchange_wait(pair.peer, theirs, NULL), SLUICE_E_PEER_LOST);

  const sluice_fake_call_t* calls;
  assert_int_equal(sluice_fake_comm_calls(pair.fake, &calls), 3);
  assert_int_equal(calls[0].op, SLUICE_FAKE_START);
  assert_int_equal(calls[0].send_bytes, 0);
  assert_int_equal(calls[0].recv_bytes, 4);
  assert_int_equal(calls[1].op, SLUICE_FAKE_WAIT);
  assert_int_equal(calls[1].status, SLUICE_OK);
  assert_int_equal(calls[2].exchange, 1);
  assert_int_equal(calls[2].status, SLUICE_E_EXTERNAL);
  close_pair(&pair);
}

/* Starts an exchange on both ranks with `fault` in rank 0's first wait. Returns rank 0's status and error. */
static sluice_status_t wait_with(const sluice_fake_fault_t* fault, uint64_t timeout_ns, sluice_error_info_t* out_why,
                                 uint64_t* out_took_ns, sluice_status_t* out_peer_status) {
  pair_t pair;
  sluice_comm_request_t *ours, *theirs;
  open_pair(&pair, timeout_ns);
  sluice_fake_comm_inject(pair.fake, fault);
  assert_int_equal(start_at(&pair, 0, &ours), SLUICE_OK);
  assert_int_equal(start_at(&pair, 1, &theirs), SLUICE_OK);
  uint64_t begin_ns = sluice_now_ns();
  sluice_status_t status = sluice_comm_exchange_wait(pair.fake, ours, "the test");
  *out_took_ns = sluice_now_ns() - begin_ns;
  sluice_error_info_init(out_why, sizeof *out_why);
  sluice_error_last(out_why);
  *out_peer_status = sluice_comm_exchange_wait(pair.peer, theirs, NULL);
  close_pair(&pair);
  return status;
}

TEST(Fake_WaitFails_NamesThePeer) {
  sluice_error_info_t why;
  uint64_t took_ns;
  sluice_status_t peer_status;
  sluice_fake_fault_t fault = {
      .on = SLUICE_FAKE_WAIT, .action = SLUICE_FAKE_FAIL, .status = SLUICE_E_PEER_LOST, .peer = 1};
  assert_int_equal(wait_with(&fault, 60000 * MS, &why, &took_ns, &peer_status), SLUICE_E_PEER_LOST);
  assert_int_equal(why.peer, 1);
}

TEST(Fake_SilentPeer_TimesOutNamingIt) {
  sluice_error_info_t why;
  uint64_t took_ns;
  sluice_status_t peer_status;
  sluice_fake_fault_t fault = {.on = SLUICE_FAKE_WAIT, .action = SLUICE_FAKE_SILENCE, .peer = 1};
  assert_int_equal(wait_with(&fault, 300 * MS, &why, &took_ns, &peer_status), SLUICE_E_TIMED_OUT);
  assert_int_equal(why.peer, 1);
  assert_true(took_ns >= 300 * MS);
}

TEST(Fake_Delay_PassesAfterwards) {
  sluice_error_info_t why;
  uint64_t took_ns;
  sluice_status_t peer_status;
  sluice_fake_fault_t fault = {.on = SLUICE_FAKE_WAIT, .action = SLUICE_FAKE_DELAY, .peer = 1, .delay_ns = 300 * MS};
  assert_int_equal(wait_with(&fault, 60000 * MS, &why, &took_ns, &peer_status), SLUICE_OK);
  assert_int_equal(peer_status, SLUICE_OK);
  assert_true(took_ns >= 300 * MS);
}

TEST(Fake_Abort_EndsTheWait) {
  sluice_error_info_t why;
  uint64_t took_ns;
  sluice_status_t peer_status;
  sluice_fake_fault_t fault = {.on = SLUICE_FAKE_START, .action = SLUICE_FAKE_ABORT};
  assert_int_equal(wait_with(&fault, 60000 * MS, &why, &took_ns, &peer_status), SLUICE_E_ABORTED);
  assert_true(took_ns < 30000 * MS);
}
