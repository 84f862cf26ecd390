// SPDX-License-Identifier: Apache-2.0
/* Fuzzes frames of the tcp communicator: rank 0 of three exchanges with two peers that send what the input says: right
 * frames, frames of other lengths and kinds, parts of frames, and the end. A request that completes has exactly the
 * bytes that were sent for it; every other request fails, and no wait hangs.
 *
 * Input: the number of requests (one or two) and the order of waits; lengths of messages in units of 3 bytes; then
 * items. The first byte of an item has the peer, the kind, whether rank 0 reads before the next item, and for arbitrary
 * bytes their number. */
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "backend/base/clock.h"
#include "backend/comm/comm.h"
#include "backend/comm/tcp/tcp_connect.h"
#include "third_party/fuzz/target.h"

enum { WORLD = 3, PEERS = 2, REQUESTS = 2, MOST_SAID = 1 << 14, HEAD = 1 + 2 * PEERS * REQUESTS };
enum { SAYS_ANYTHING = 0, SAYS_RIGHT, SAYS_BYE, SAYS_LOST };
enum { FRAME_DATA = 0x736c7531, FRAME_BYE = 0x736c7532, FRAME_LOST = 0x736c7533 };

typedef struct frame_s {
  uint32_t kind, number;
  uint64_t bytes;
} frame_t;

typedef struct peer_s {
  int fd;
  int32_t next; /* request of the next right frame */
  uint8_t said[MOST_SAID];
  size_t num_said;
  int32_t is_full; /* the socket is full until rank 0 reads, so this peer sends nothing more */
} peer_t;

static int ends[WORLD]; /* rank 0's sockets, for the next communicator */
static peer_t peers[PEERS];
static uint64_t wanted[REQUESTS][PEERS], given[REQUESTS][PEERS];
static uint8_t* buffers[REQUESTS][PEERS];
static sluice_comm_request_t* requests[REQUESTS];
static int32_t num_requests;

/* Replaces connecting: the connections exist. */
sluice_status_t __wrap_sluice_tcp_connect(sluice_comm_t* parent, const sluice_tcp_way_t* way, sluice_status_t mine,
                                          sluice_tcp_connection_t* connections);
sluice_status_t __wrap_sluice_tcp_connect(sluice_comm_t* parent, const sluice_tcp_way_t* way, sluice_status_t mine,
                                          sluice_tcp_connection_t* connections) {
  (void)parent, (void)way;
  for (int32_t r = 0; r < WORLD; ++r) connections[r].socket = ends[r];
  return mine;
}

static uint8_t pattern(int32_t request, uint64_t at) { return (uint8_t)(at * 31 + (uint64_t)request * 7 + 1); }

static void say(peer_t* p, const void* words, size_t bytes) {
  if (p->is_full || bytes > MOST_SAID - p->num_said) return;
  const ssize_t n = send(p->fd, words, bytes, MSG_NOSIGNAL);
  p->is_full = n != (ssize_t)bytes;
  if (n <= 0) return;
  memcpy(p->said + p->num_said, words, (size_t)n);
  p->num_said += (size_t)n;
}

/* Sends the whole frame of the next request that has a message from this peer. */
static void say_right(peer_t* p, int32_t peer) {
  while (p->next < num_requests && wanted[p->next][peer] == 0) ++p->next;
  if (p->next >= num_requests) return;
  uint8_t payload[3 * 256];
  const frame_t frame = {.kind = FRAME_DATA, .number = (uint32_t)p->next, .bytes = wanted[p->next][peer]};
  for (uint64_t i = 0; i < frame.bytes; ++i) payload[i] = pattern(p->next, i);
  say(p, &frame, sizeof frame);
  say(p, payload, frame.bytes);
  ++p->next;
}

/* Sends the next item of the input; returns the number of input bytes used. */
static size_t say_next(const uint8_t* data, size_t size) {
  const int32_t peer = data[0] & 1, what = data[0] >> 1 & 3;
  peer_t* p = &peers[peer];
  if (what == SAYS_RIGHT) say_right(p, peer);
  if (what == SAYS_BYE) say(p, &(frame_t){.kind = FRAME_BYE}, sizeof(frame_t));
  if (what == SAYS_LOST) {
    const frame_t frame = {.kind = FRAME_LOST, .number = size > 1 ? data[1] : 0};
    say(p, &frame, sizeof frame);
    return size > 1 ? 2 : 1;
  }
  if (what != SAYS_ANYTHING) return 1;
  const size_t room = size - 1, bytes = (size_t)(data[0] >> 4) + 1;
  say(p, data + 1, bytes < room ? bytes : room);
  return 1 + (bytes < room ? bytes : room);
}

static void start(sluice_comm_t* comm, int32_t number) {
  static const uint8_t sent[3 * 256] = {1};
  const void* send[WORLD] = {NULL, sent, sent};
  void* recv[WORLD] = {NULL, buffers[number][0], buffers[number][1]};
  const uint64_t out[WORLD] = {0, given[number][0], given[number][1]};
  const uint64_t in[WORLD] = {0, wanted[number][0], wanted[number][1]};
  const sluice_exchange_t exchange = {.send = send, .send_bytes = out, .recv = recv, .recv_bytes = in};
  FUZZ_CHECK(comm->vtable->exchange_start(comm, &exchange, &requests[number]) == SLUICE_OK);
}

/* Checks that the request has received the bytes that peers sent for it, after those of earlier requests. */
static void check_received(int32_t number) {
  for (int32_t peer = 0; peer < PEERS; ++peer) {
    const peer_t* p = &peers[peer];
    size_t at = 0;
    for (int32_t r = 0; r <= number && wanted[number][peer] > 0; ++r) {
      frame_t frame;
      if (wanted[r][peer] == 0) continue;
      FUZZ_CHECK(p->num_said - at >= sizeof frame + wanted[r][peer]);
      memcpy(&frame, p->said + at, sizeof frame);
      FUZZ_CHECK(frame.kind == FRAME_DATA && frame.number == (uint32_t)r && frame.bytes == wanted[r][peer]);
      at += sizeof frame;
      if (r == number) FUZZ_CHECK(memcmp(buffers[r][peer], p->said + at, wanted[r][peer]) == 0);
      at += wanted[r][peer];
    }
  }
}

/* Returns 1 if the request has completed or failed. */
static int wait(sluice_comm_t* comm, int32_t number, uint64_t deadline_ns) {
  const sluice_status_t status = comm->vtable->exchange_wait(comm, requests[number], deadline_ns, NULL);
  if (status == SLUICE_E_TIMED_OUT) return 0;
  if (status == SLUICE_OK) check_received(number);
  fuzz_num_taken += status == SLUICE_OK;
  FUZZ_CHECK(status == SLUICE_OK || status == SLUICE_E_PEER_LOST || status == SLUICE_E_INTERNAL);
  requests[number] = NULL;
  return 1;
}

static void talk(sluice_comm_t* comm, const uint8_t* data, size_t size, int is_reversed) {
  for (int32_t i = 0; i < num_requests; ++i) start(comm, i);
  for (size_t at = 0; at < size;) {
    const int32_t looks = data[at] & 8;
    at += say_next(data + at, size - at);
    for (int32_t i = 0; i < num_requests && looks; ++i) {
      if (requests[i] != NULL) (void)wait(comm, i, 0);
    }
  }
  for (int32_t peer = 0; peer < PEERS; ++peer) (void)shutdown(peers[peer].fd, SHUT_WR);
  const uint64_t until_ns = sluice_now_ns() + UINT64_C(10000000000);
  for (int32_t i = 0; i < num_requests; ++i) {
    const int32_t number = is_reversed ? num_requests - 1 - i : i;
    if (requests[number] != NULL) FUZZ_CHECK(wait(comm, number, until_ns));
  }
}

static void open_ends(void) {
  ends[0] = -1;
  for (int32_t peer = 0; peer < PEERS; ++peer) {
    int fds[2];
    FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0);
    ends[1 + peer] = fds[0];
    peers[peer].fd = fds[1];
    peers[peer].next = 0, peers[peer].num_said = 0, peers[peer].is_full = 0;
  }
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  sluice_local_group_t* group;
  sluice_comm_config_t config;
  sluice_comm_t *parent, *comm;
  if (size < HEAD) return 0;
  num_requests = 1 + (data[0] & 1);
  for (int32_t i = 0; i < REQUESTS * PEERS; ++i) {
    const int32_t r = i / PEERS, peer = i % PEERS;
    wanted[r][peer] = UINT64_C(3) * data[1 + i], given[r][peer] = UINT64_C(3) * data[1 + REQUESTS * PEERS + i];
    buffers[r][peer] = malloc(wanted[r][peer] > 0 ? wanted[r][peer] : 1);
    FUZZ_CHECK(buffers[r][peer] != NULL);
  }
  sluice_comm_config_init(&config, sizeof config);
  config.world_size = WORLD;
  FUZZ_CHECK(sluice_local_group_create(WORLD, &group) == SLUICE_OK);
  FUZZ_CHECK(sluice_comm_create_local(group, &config, &parent) == SLUICE_OK);
  open_ends();
  FUZZ_CHECK(sluice_comm_create_tcp(parent, NULL, &comm) == SLUICE_OK);
  talk(comm, data + HEAD, size - HEAD, data[0] >> 1 & 1);
  for (int32_t peer = 0; peer < PEERS; ++peer) close(peers[peer].fd);
  sluice_comm_destroy(comm);
  sluice_comm_destroy(parent);
  sluice_local_group_destroy(group);
  for (int32_t i = 0; i < REQUESTS * PEERS; ++i) free(buffers[i / PEERS][i % PEERS]);
  return 0;
}
