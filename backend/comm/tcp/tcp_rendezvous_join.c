// SPDX-License-Identifier: Apache-2.0
/* Ranks above 0: each connects to rank 0, sends what it expects, and waits for rank 0. Nothing is trusted before rank 0
 * has proved that it has the secret. */
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <string.h>
#include <time.h>

#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/comm/tcp/tcp_descriptors.h"
#include "backend/comm/tcp/tcp_hello.h"
#include "backend/comm/tcp/tcp_rendezvous.h"

/* The time that one address has to answer; doubled in each round. */
#define ANSWER_NS UINT64_C(3000000000)
/* Rank 0's message at its deadline says more than this rank knows at its own. */
#define GRACE_NS UINT64_C(1000000000)

/* The pause between two rounds, doubled after each, up to a tenth of a second. */
#define FIRST_PAUSE_NS 2000000L

enum { MAX_ROUND = 4, MAX_PAUSE = 6 };

/* Returns 0 if the connection is made; SLUICE_TCP_IS_STRANGER if the other end does not have this secret; else
 * -errno. */
static int try_address(sluice_tcp_rendezvous_t* m, int32_t at, uint64_t until_ns) {
  const sluice_tcp_group_t group = {.rank = m->base.rank, .world_size = m->base.world_size, .key = m->key};
  struct sockaddr_storage target;
  const socklen_t length = sluice_tcp_address_fill(&m->root->addresses[at], &target);
  sluice_tcp_hello_t hello;
  int now = sluice_tcp_hello_connect(&group, SLUICE_TCP_MEETING_POINT, &target, length, &hello);
  if (now < 0) return now;
  while ((now = sluice_tcp_hello_advance(&group, &hello)) == SLUICE_TCP_GOES_ON) {
    const uint64_t now_ns = sluice_now_ns();
    struct pollfd p = {.fd = hello.fd, .events = sluice_tcp_hello_events(&hello)};
    if (now_ns >= until_ns) {
      now = -ETIMEDOUT;
      break;
    }
    (void)poll(&p, 1, (int)sluice_min_u64((until_ns - now_ns + 999999) / 1000000, 1000));
  }
  if (now == SLUICE_TCP_IS_DONE) {
    sluice_meet_hurry(hello.fd);
    m->sockets[0] = hello.fd;
    return 0;
  }
  sluice_tcp_close(hello.fd);
  return now;
}

static sluice_status_t fail_unreached(const sluice_tcp_rendezvous_t* m, int error) {
  return sluice_error_record(
      SLUICE_E_EXTERNAL, m->base.rank, 0, -error,
      "tcp communicator: rank %d cannot reach rank 0 at %s within %.1f s: %s. Start rank 0 there, "
      "and let this machine reach that port",
      m->base.rank, m->root->text, sluice_seconds(m->timeout_ns),
      error == -ECONNRESET ? "the process at this address closes the connection" : strerror(-error));
}

static sluice_status_t fail_secret(const sluice_tcp_rendezvous_t* m) {
  return SLUICE_FAIL_PEER(SLUICE_E_MISMATCH, m->base.rank, 0,
                          "tcp communicator: the process that answers rank %d at %s does not have the same secret: "
                          "give all ranks one secret, or another address if another program has this port",
                          m->base.rank, m->root->text);
}

/* Tries all addresses until rank 0 answers, because rank 0 may start later. */
static sluice_status_t reach_root(sluice_tcp_rendezvous_t* m) {
  int error = -ETIMEDOUT;
  for (int32_t round = 0; sluice_now_ns() < m->deadline_ns; ++round) {
    const uint64_t limit_ns = ANSWER_NS << sluice_min(round, MAX_ROUND);
    int has_other_secret = 0;
    for (int32_t at = 0; at < m->root->num_addresses; ++at) {
      const int what = try_address(m, at, sluice_min_u64(sluice_now_ns() + limit_ns, m->deadline_ns));
      if (what == 0) return SLUICE_OK;
      has_other_secret |= what == SLUICE_TCP_IS_STRANGER;
      if (what != SLUICE_TCP_IS_STRANGER) error = what;
    }
    if (has_other_secret) return fail_secret(m);
    const struct timespec pause = {.tv_nsec = FIRST_PAUSE_NS << sluice_min(round, MAX_PAUSE)};
    nanosleep(&pause, NULL);
  }
  return fail_unreached(m, error);
}

/* Receives a frame, and its data in out_words. */
static int next_frame(sluice_tcp_rendezvous_t* m, uint64_t deadline_ns, sluice_meet_frame_t* out_frame,
                      sluice_meet_refused_t* out_words) {
  int error = sluice_meet_receive(m->sockets[0], out_frame, sizeof *out_frame, deadline_ns);
  if (error == 0 && out_frame->bytes > sizeof *out_words) error = -EPROTO;
  return error != 0 ? error : sluice_meet_receive(m->sockets[0], out_words, out_frame->bytes, deadline_ns);
}

static sluice_status_t await_all(sluice_tcp_rendezvous_t* m) {
  const uint64_t deadline_ns = m->deadline_ns + GRACE_NS;
  sluice_meet_waits_t waits = {.missing = 0, .present = 0};
  for (;;) {
    sluice_meet_frame_t frame;
    sluice_meet_refused_t words;
    const int error = next_frame(m, deadline_ns, &frame, &words);
    if (error == -ETIMEDOUT) return sluice_meet_fail_late(m, &waits, "");
    if (error != 0) {
      return sluice_error_record(
          SLUICE_E_PEER_LOST, m->base.rank, 0, -error,
          "tcp communicator: rank %d lost rank 0 at %s before all ranks had connected: see the log of rank 0 (tcp: %s)",
          m->base.rank, m->root->text, strerror(-error));
    }
    if (frame.kind == SLUICE_MEET_BEGINS) return SLUICE_OK;
    if (frame.kind == SLUICE_MEET_REFUSED && frame.bytes == sizeof words) return sluice_meet_adopt(m, &words);
    if (frame.kind == SLUICE_MEET_WAITS && frame.bytes == sizeof waits) memcpy(&waits, &words, sizeof waits);
  }
}

sluice_status_t sluice_tcp_rendezvous_join(sluice_tcp_rendezvous_t* m) {
  const sluice_meet_join_t join = {
      .version = SLUICE_MEET_VERSION, .world_size = m->base.world_size, .card_bytes = sizeof(sluice_tcp_card_t)};
  SLUICE_TRY(reach_root(m));
  (void)sluice_meet_send(m->sockets[0], &join, sizeof join,
                         m->deadline_ns); /* if it fails, the answer of rank 0 says why */
  return await_all(m);
}
