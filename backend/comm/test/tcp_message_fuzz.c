// SPDX-License-Identifier: Apache-2.0
/* Fuzzes messages over tcp: rank 0 of three, whose peers send what the input says: whole messages, parts, frames of
 * other kinds and lengths, arbitrary bytes, and the end. Receives from a peer that sent only valid data get its
 * messages by tag and in order. All other requests fail, no wait hangs, and no allocation exceeds a limit. The target
 * plays the endpoint's thread and pulls when the input says so.
 *
 * Input: limits; then items that begin with a byte: the peer and the kind. */
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "backend/comm/test/said.h"
#include "backend/comm/tcp/tcp_messages.h"
#include "third_party/fuzz/target.h"

enum { WORLD = 3, MOST = 256, TAGS = 4, UNIT = 40, HEAD_UNIT = 5 };
enum { SAYS_MESSAGE = 0, SAYS_ANYTHING, SAYS_FRAME, RECEIVES, RECEIVES_FEW, TAKES_BACK, ENDS, PULLS };

typedef struct message_s {
  uint64_t tag, head_bytes, payload_bytes;
  int32_t is_taken;
} message_t;

typedef struct peer_s {
  int fd;
  int32_t is_wrong; /* has sent invalid data, or a part of a message */
  int32_t num_said;
  message_t said[MOST];
} peer_t;

static said_t said;
static peer_t peers[WORLD];
static tcp_wire_t* wire;
static sluice_messages_t* messages;
static sluice_allocator_t memory;
static uint64_t limit; /* max_unexpected_bytes and max_message_bytes */

static uint8_t pattern(int32_t peer, int32_t number, uint64_t at) {
  return (uint8_t)(at * 31 + (uint64_t)number * 7 + (uint64_t)peer);
}

/* ---- peers ---- */

static void say(peer_t* p, const void* bytes, size_t count) {
  if (send(p->fd, bytes, count, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)count) p->is_wrong = 1;
}

static void say_message(int32_t peer, uint8_t kind, uint8_t sizes) {
  peer_t* p = &peers[peer];
  if (p->num_said == MOST) return;
  const int32_t number = p->num_said++;
  message_t* m = &p->said[number];
  *m = (message_t){.tag = kind % TAGS, .head_bytes = (sizes & 7u) * HEAD_UNIT, .payload_bytes = (sizes >> 3) * UNIT};
  const sluice_frame_t frame = {.kind = SLUICE_FRAME_MESSAGE,
                                .head_bytes = (uint32_t)m->head_bytes,
                                .tag = m->tag,
                                .payload_bytes = m->payload_bytes};
  uint8_t body[7 * HEAD_UNIT + 31 * UNIT];
  for (uint64_t i = 0; i < sizeof body; ++i) body[i] = pattern(peer, number, i);
  say(p, &frame, sizeof frame);
  say(p, body, m->head_bytes + m->payload_bytes);
}

/* ---- rank 0 ---- */

static void check_received(const sluice_message_completion_t* c) {
  peer_t* p = &peers[c->peer];
  const uint8_t *head = c->head, *payload = c->payload;
  FUZZ_CHECK(c->payload_bytes <= limit);
  for (int32_t i = 0; i < p->num_said; ++i) {
    message_t* m = &p->said[i];
    if (m->is_taken || m->tag != c->tag) continue;
    m->is_taken = 1;
    if (p->is_wrong) return;
    FUZZ_CHECK(c->head_bytes == m->head_bytes && c->payload_bytes == m->payload_bytes);
    for (uint64_t at = 0; at < m->head_bytes; ++at) FUZZ_CHECK(head[at] == pattern(c->peer, i, at));
    for (uint64_t at = 0; at < m->payload_bytes; ++at)
      FUZZ_CHECK(payload[at] == pattern(c->peer, i, m->head_bytes + at));
    ++fuzz_num_taken;
    return;
  }
  FUZZ_CHECK(p->is_wrong);
}

static void look(void) {
  sluice_message_completion_t c;
  for (int32_t r = 1; r < WORLD; ++r) {
    wire->connections[r].can_read = 1;
    for (int turns = 0; turns < 64 && sluice_tcp_messages_pull(wire, r); ++turns) {
    }
  }
  while (sluice_messages_next(messages, 0, &c) == SLUICE_OK) {
    FUZZ_CHECK(c.kind == SLUICE_MESSAGE_RECEIVED && c.peer > 0 && c.peer < WORLD);
    check_received(&c);
    sluice_messages_release(messages, c.arrival);
  }
}

/* Runs the next item of the input; returns the number of input bytes used. */
static size_t say_next(const uint8_t* data, size_t size) {
  static sluice_message_request_t last;
  const int32_t peer = 1 + (data[0] & 1);
  const uint8_t a = size > 1 ? data[1] : 0, b = size > 2 ? data[2] : 0;
  const size_t two = size < 3 ? size : 3;
  peer_t* p = &peers[peer];
  switch (data[0] >> 1 & 7) {
    case SAYS_MESSAGE: say_message(peer, a, b); return two;
    case SAYS_FRAME: { /* a valid frame of another kind, or one with invalid sizes */
      static const uint32_t kinds[] = {SLUICE_FRAME_WAITS, SLUICE_FRAME_LEAVES, SLUICE_FRAME_LOST,
                                       SLUICE_FRAME_MESSAGE};
      const sluice_frame_t frame = {.kind = kinds[a & 3],
                                    .head_bytes = (a & 3) == 3 ? (uint32_t)b << (a >> 4) : 0,
                                    .tag = b,
                                    .payload_bytes = (a & 3) == 3 ? (uint64_t)b << (a >> 2) : 0};
      p->is_wrong |= (a & 3) != 0;
      say(p, &frame, sizeof frame);
      return two;
    }
    case RECEIVES: (void)sluice_messages_receive(messages, peer, a % TAGS, a, &last); return size < 2 ? size : 2;
    case RECEIVES_FEW: (void)sluice_messages_receive_up_to(messages, peer, a % TAGS, (uint64_t)b, a, &last); return two;
    case TAKES_BACK: (void)sluice_messages_cancel(messages, last); return 1;
    case ENDS: (void)shutdown(p->fd, SHUT_WR); return 1;
    case PULLS: look(); return 1;
    default: {
      const size_t room = size - 1, bytes = (size_t)(data[0] >> 4) + 1;
      p->is_wrong = 1;
      say(p, data + 1, bytes < room ? bytes : room);
      return 1 + (bytes < room ? bytes : room);
    }
  }
}

/* ---- the endpoint, whose wire has no thread ---- */

static void wire_send(sluice_wire_t* base, sluice_outgoing_t* out) {
  (void)base;
  sluice_messages_sent(messages, out);
}
static void wire_fail(sluice_wire_t* base, int32_t culprit) { (void)base, (void)culprit; }
static void wire_close(sluice_wire_t* base, int32_t is_orderly) {
  (void)base, (void)is_orderly;
  for (int32_t r = 1; r < WORLD; ++r) sluice_messages_drop(messages, wire->peers[r].arrival);
}

static sluice_status_t open_messages(sluice_comm_t* comm, sluice_messages_t* m, sluice_wire_t** out_wire) {
  static const sluice_wire_vtable_t vtable = {.send = wire_send, .fail = wire_fail, .close = wire_close};
  (void)comm;
  messages = wire->messages = m;
  wire->base.vtable = &vtable;
  *out_wire = &wire->base;
  return SLUICE_OK;
}

static void open_wire(void) {
  static sluice_tcp_connection_t connections[WORLD];
  wire = calloc(1, sizeof *wire + WORLD * sizeof *wire->peers);
  FUZZ_CHECK(wire != NULL);
  wire->connections = connections;
  sluice_tcp_connections_init(connections, WORLD);
  wire->world_size = WORLD;
  pthread_mutex_init(&wire->mutex, NULL);
  memset(peers, 0, sizeof peers);
  for (int32_t r = 1; r < WORLD; ++r) {
    int fds[2];
    FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0);
    connections[r].socket = fds[0];
    sluice_list_init(&wire->peers[r].queue);
    peers[r].fd = fds[1];
  }
}

static void close_wire(void) {
  for (int32_t r = 1; r < WORLD; ++r) close(peers[r].fd), close(wire->connections[r].socket);
  pthread_mutex_destroy(&wire->mutex);
  free(wire);
}

/* A message within the limit, with its header. */
static void* allocate(void* user, uint64_t bytes) {
  (void)user;
  FUZZ_CHECK(bytes <= 2 * limit + 2048);
  return aligned_alloc(SLUICE_ALIGNMENT, sluice_align_up(bytes));
}
static void give_back(void* user, void* data, uint64_t bytes) {
  (void)user, (void)bytes;
  free(data);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  limit = UINT64_C(64) << (data[0] % 6);
  said_init(&said, 0, WORLD, UINT64_C(1000000));
  sluice_comm_vtable_t vtable = *said.base.vtable;
  vtable.messages_open = open_messages;
  said.base.vtable = &vtable;
  sluice_allocator_init(&memory, allocate, give_back, NULL);
  open_wire();
  const sluice_messages_config_t config = {
      .max_unexpected_bytes = limit, .max_message_bytes = limit, .allocator = &memory};
  FUZZ_CHECK(sluice_messages_open(&said.base, &config, &messages) == SLUICE_OK);
  sluice_messages_t* open = messages;
  for (size_t at = 1; at < size;) at += say_next(data + at, size - at);
  look();
  sluice_messages_close(open);
  sluice_comm_release(&said.base);
  close_wire();
  FUZZ_CHECK(memory.num_live == 0);
  sluice_allocator_deinit(&memory);
  return 0;
}
