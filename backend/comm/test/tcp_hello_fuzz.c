// SPDX-License-Identifier: Apache-2.0
/* Fuzzes the handshake of a connection in both roles, with a peer that sends what the input says: right data, arbitrary
 * data, and parts. The connection is accepted exactly if all data was right.
 *
 * Input: a byte for the role; then items. An item begins with a byte: from 0x80 on it stands for all right data that
 * comes next, otherwise it is one less than the number of bytes that follow. */
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "backend/comm/tcp/tcp_hello.h"
#include "third_party/fuzz/target.h"

enum { WORLD = 3, LISTENER = 0, CONNECTOR = 1, MAC = SLUICE_TCP_MAC_BYTES, MOST_SAID = 4096 };

static const sluice_tcp_card_t cards[WORLD] = {{.secret = {7, 1, 2}}, {.secret = {9}}, {.secret = {11}}};

typedef struct talk_s {
  int is_listening; /* role of the tested code */
  int fd;           /* the peer's socket */
  sluice_tcp_group_t group;
  sluice_tcp_hello_t hello;
  uint8_t heard[2 * MAC], said[MOST_SAID]; /* received and sent by the peer */
  size_t num_heard, num_said;
} talk_t;

static sluice_tcp_greeting_t greeting(void) {
  return (sluice_tcp_greeting_t){
      .magic = {'s', 'l', 'u', 'i', 'c', 'e', 't', '2'}, .rank = CONNECTOR, .peer = LISTENER, .challenge = {3, 5}};
}

/* Computes the proof independently, as tcp_hello.h describes it. */
static void prove(const sluice_tcp_greeting_t* g, const uint8_t* answer, int32_t role, uint8_t* out) {
  uint8_t words[sizeof *g + MAC + 8] = {0};
  memcpy(words, g, sizeof *g);
  memcpy(words + sizeof *g, answer, MAC);
  memcpy(words + sizeof *g + MAC, &role, sizeof role);
  sluice_tcp_mac(cards[LISTENER].secret, words, sizeof words, out);
}

/* Reads what the tested code has sent so far. */
static void listen_to(talk_t* t) {
  ssize_t n;
  while (t->num_heard < sizeof t->heard &&
         (n = recv(t->fd, t->heard + t->num_heard, sizeof t->heard - t->num_heard, MSG_DONTWAIT)) > 0) {
    t->num_heard += (size_t)n;
  }
}

/* Returns 1 if the peer has sent all data, and all of it is right. */
static int is_right(const talk_t* t) {
  uint8_t proof[MAC];
  sluice_tcp_greeting_t g;
  if (t->is_listening) {
    if (t->num_said < sizeof g + MAC || t->num_heard < 2 * MAC) return 0;
    memcpy(&g, t->said, sizeof g);
    const sluice_tcp_greeting_t right = greeting();
    if (memcmp(g.magic, right.magic, sizeof g.magic) != 0 || g.peer != LISTENER) return 0;
    if (g.rank <= LISTENER || g.rank >= WORLD) return 0;
    prove(&g, t->heard, 2, proof);
    return memcmp(proof, t->said + sizeof g, MAC) == 0;
  }
  if (t->num_said < 2 * MAC + 1 || t->num_heard < sizeof g) return 0;
  memcpy(&g, t->heard, sizeof g);
  prove(&g, t->said, 1, proof);
  return memcmp(proof, t->said + MAC, MAC) == 0 && t->said[2 * MAC] == 'w';
}

/* Writes the right data that comes next; returns its length. */
static size_t right_words(const talk_t* t, uint8_t* out) {
  sluice_tcp_greeting_t g = greeting();
  if (t->is_listening && t->num_said < sizeof g) {
    memcpy(out, &g, sizeof g);
    return sizeof g;
  }
  if (t->is_listening) {
    memcpy(&g, t->said, sizeof g);
    prove(&g, t->heard, 2, out);
    return MAC;
  }
  if (t->num_said >= 2 * MAC) {
    out[0] = 'w';
    return 1;
  }
  memset(out, 42, MAC);
  memcpy(&g, t->heard, sizeof g);
  prove(&g, out, 1, out + MAC);
  return 2 * MAC;
}

static int say(talk_t* t, const uint8_t* words, size_t bytes) {
  if (bytes > MOST_SAID - t->num_said) bytes = MOST_SAID - t->num_said;
  memcpy(t->said + t->num_said, words, bytes);
  t->num_said += bytes;
  FUZZ_CHECK(send(t->fd, words, bytes, MSG_NOSIGNAL) == (ssize_t)bytes);
  const int now = sluice_tcp_hello_advance(&t->group, &t->hello);
  listen_to(t);
  FUZZ_CHECK(t->hello.in_used <= sizeof t->hello.in);
  return now;
}

static int say_all(talk_t* t, const uint8_t* data, size_t size) {
  int now = sluice_tcp_hello_advance(&t->group, &t->hello);
  listen_to(t);
  for (size_t at = 0; at < size && now == SLUICE_TCP_GOES_ON;) {
    uint8_t right[3 * MAC];
    const uint8_t word = data[at++];
    const size_t bytes = word >= 0x80                   ? right_words(t, right)
                         : (size_t)word + 1 < size - at ? (size_t)word + 1
                                                        : size - at;
    now = say(t, word >= 0x80 ? right : data + at, bytes);
    at += word >= 0x80 ? 0 : bytes;
  }
  return now;
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  int fds[2];
  if (size < 1) return 0;
  FUZZ_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0);
  talk_t t = {.is_listening = data[0] & 1, .fd = fds[1]};
  t.group = (sluice_tcp_group_t){.rank = t.is_listening ? LISTENER : CONNECTOR, .world_size = WORLD, .cards = cards};
  if (t.is_listening) {
    sluice_tcp_hello_accept(fds[0], &t.hello);
  } else {
    t.hello = (sluice_tcp_hello_t){.fd = fds[0], .peer = LISTENER, .greeting = greeting()};
  }
  int now = say_all(&t, data + 1, size - 1);
  (void)shutdown(t.fd, SHUT_WR);
  if (now == SLUICE_TCP_GOES_ON) now = sluice_tcp_hello_advance(&t.group, &t.hello);
  FUZZ_CHECK(now != SLUICE_TCP_GOES_ON);
  FUZZ_CHECK((now == SLUICE_TCP_IS_DONE) == is_right(&t));
  fuzz_num_taken += now == SLUICE_TCP_IS_DONE;
  if (now == SLUICE_TCP_IS_DONE) FUZZ_CHECK(t.hello.peer > t.group.rank || t.hello.peer == LISTENER);
  close(fds[0]), close(fds[1]);
  return 0;
}
