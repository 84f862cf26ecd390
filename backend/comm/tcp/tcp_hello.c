// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/tcp/tcp_hello.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/random.h>

#include "backend/comm/tcp/tcp_descriptors.h"

/* The magic includes the version of the handshake: ranks with another version are strangers. */
static const char magic[8] = {'s', 'l', 'u', 'i', 'c', 'e', 't', '2'};

enum { ROLE_LISTENS = 1, ROLE_CONNECTS = 2, WELCOME = 'w' };

static const uint8_t* secret_of(const sluice_tcp_group_t* group, int32_t peer) {
  return peer == SLUICE_TCP_MEETING_POINT ? group->key : group->cards[peer].secret;
}

/* Computes a proof under the listening rank's secret. `role` says which end makes it, so that neither end's proof
 * serves the other. */
static void prove(const sluice_tcp_group_t* group, const sluice_tcp_hello_t* hello, int32_t role,
                  uint8_t out[SLUICE_TCP_MAC_BYTES]) {
  struct {
    sluice_tcp_greeting_t greeting;
    uint8_t answer[SLUICE_TCP_MAC_BYTES];
    int32_t role, zero;
  } said = {.greeting = hello->greeting, .role = role};
  memcpy(said.answer, hello->answer, sizeof said.answer);
  sluice_tcp_mac(secret_of(group, hello->greeting.peer), &said, sizeof said, out);
}

static int challenge(uint8_t out[SLUICE_TCP_MAC_BYTES]) {
  return getrandom(out, SLUICE_TCP_MAC_BYTES, 0) == SLUICE_TCP_MAC_BYTES;
}

/* Sends few bytes on a connection that has carried next to nothing: its buffer has room for all of them. */
static int say(const sluice_tcp_hello_t* hello, const void* data, size_t bytes) {
  const ssize_t n = send(hello->fd, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
  return n == (ssize_t)bytes ? SLUICE_TCP_GOES_ON : n < 0 ? -errno : -EPIPE;
}

int sluice_tcp_hello_hear(sluice_tcp_hello_t* hello, uint32_t bytes) {
  while (hello->in_used < bytes) {
    const ssize_t n = recv(hello->fd, hello->in + hello->in_used, bytes - hello->in_used, MSG_DONTWAIT);
    if (n == 0) return -ECONNRESET;
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? SLUICE_TCP_GOES_ON : -errno;
    hello->in_used += (uint32_t)n;
    /* Most strangers can be recognised by their first bytes. */
    const uint32_t told = hello->in_used < sizeof magic ? hello->in_used : (uint32_t)sizeof magic;
    if (hello->phase == SLUICE_TCP_AWAITS_HELLO && memcmp(hello->in, magic, told) != 0) return SLUICE_TCP_IS_STRANGER;
  }
  hello->in_used = 0;
  return SLUICE_TCP_IS_DONE;
}

static int next(sluice_tcp_hello_t* hello, sluice_tcp_phase_t phase, int said) {
  if (said == SLUICE_TCP_GOES_ON) hello->phase = phase;
  return said;
}

/* ---- the connecting end ------------------------------------------------------------------------------------------ */

int sluice_tcp_hello_connect(const sluice_tcp_group_t* group, int32_t peer, const struct sockaddr_storage* target,
                             socklen_t length, sluice_tcp_hello_t* out_hello) {
  *out_hello = (sluice_tcp_hello_t){.fd = -1, .phase = SLUICE_TCP_CONNECTING, .peer = peer};
  out_hello->greeting = (sluice_tcp_greeting_t){.rank = group->rank, .peer = peer};
  memcpy(out_hello->greeting.magic, magic, sizeof magic);
  if (!challenge(out_hello->greeting.challenge)) return -errno;
  const int fd = sluice_tcp_open_socket(target->ss_family);
  if (fd < 0) return -errno;
  if (connect(fd, (const struct sockaddr*)target, length) != 0 && errno != EINPROGRESS && errno != EINTR) {
    const int error = errno;
    sluice_tcp_close(fd);
    return -error;
  }
  out_hello->fd = fd;
  return 0;
}

static int finish_connect(sluice_tcp_hello_t* hello) {
  int error = 0;
  socklen_t size = sizeof error;
  struct pollfd p = {.fd = hello->fd, .events = POLLOUT};
  if (poll(&p, 1, 0) <= 0) return SLUICE_TCP_GOES_ON;
  if (getsockopt(hello->fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) return -errno;
  if (error != 0) return -error;
  return next(hello, SLUICE_TCP_AWAITS_ANSWER, say(hello, &hello->greeting, sizeof hello->greeting));
}

static int read_answer(const sluice_tcp_group_t* group, sluice_tcp_hello_t* hello) {
  uint8_t proof[SLUICE_TCP_MAC_BYTES];
  const int heard = sluice_tcp_hello_hear(hello, sizeof hello->answer + sizeof proof);
  if (heard != SLUICE_TCP_IS_DONE) return heard;
  memcpy(hello->answer, hello->in, sizeof hello->answer);
  prove(group, hello, ROLE_LISTENS, proof);
  if (!sluice_tcp_mac_is_equal(proof, hello->in + sizeof hello->answer)) return SLUICE_TCP_IS_STRANGER;
  prove(group, hello, ROLE_CONNECTS, proof);
  return next(hello, SLUICE_TCP_AWAITS_WELCOME, say(hello, proof, sizeof proof));
}

static int read_welcome(sluice_tcp_hello_t* hello) {
  const int heard = sluice_tcp_hello_hear(hello, 1);
  if (heard != SLUICE_TCP_IS_DONE) return heard;
  if (hello->in[0] != WELCOME) return SLUICE_TCP_IS_STRANGER;
  hello->phase = SLUICE_TCP_GREETED;
  return SLUICE_TCP_IS_DONE;
}

/* ---- the listening end ------------------------------------------------------------------------------------------- */

void sluice_tcp_hello_accept(int fd, sluice_tcp_hello_t* out_hello) {
  *out_hello = (sluice_tcp_hello_t){.fd = fd, .phase = SLUICE_TCP_AWAITS_HELLO, .peer = -1, .attempt = -1};
}

static int read_hello(const sluice_tcp_group_t* group, sluice_tcp_hello_t* hello) {
  const int heard = sluice_tcp_hello_hear(hello, sizeof hello->greeting);
  if (heard != SLUICE_TCP_IS_DONE) return heard;
  memcpy(&hello->greeting, hello->in, sizeof hello->greeting);
  const sluice_tcp_greeting_t* g = &hello->greeting;
  /* Ranks connect to lower ones. */
  if (g->peer != group->rank || g->rank <= group->rank || g->rank >= group->world_size) return SLUICE_TCP_IS_STRANGER;
  if (!challenge(hello->answer)) return -errno;
  hello->peer = g->rank;
  uint8_t words[2 * SLUICE_TCP_MAC_BYTES];
  memcpy(words, hello->answer, sizeof hello->answer);
  prove(group, hello, ROLE_LISTENS, words + sizeof hello->answer);
  return next(hello, SLUICE_TCP_AWAITS_PROOF, say(hello, words, sizeof words));
}

static int read_proof(const sluice_tcp_group_t* group, sluice_tcp_hello_t* hello) {
  static const uint8_t welcome = WELCOME;
  uint8_t proof[SLUICE_TCP_MAC_BYTES];
  const int heard = sluice_tcp_hello_hear(hello, sizeof proof);
  if (heard != SLUICE_TCP_IS_DONE) return heard;
  prove(group, hello, ROLE_CONNECTS, proof);
  if (!sluice_tcp_mac_is_equal(proof, hello->in)) return SLUICE_TCP_IS_STRANGER;
  const int said = next(hello, SLUICE_TCP_GREETED, say(hello, &welcome, sizeof welcome));
  return said == SLUICE_TCP_GOES_ON ? SLUICE_TCP_IS_DONE : said;
}

/* ---- both -------------------------------------------------------------------------------------------------------- */

short sluice_tcp_hello_events(const sluice_tcp_hello_t* hello) {
  return hello->phase == SLUICE_TCP_CONNECTING ? POLLOUT : POLLIN;
}

static int advance_once(const sluice_tcp_group_t* group, sluice_tcp_hello_t* hello) {
  switch (hello->phase) {
    case SLUICE_TCP_CONNECTING: return finish_connect(hello);
    case SLUICE_TCP_AWAITS_ANSWER: return read_answer(group, hello);
    case SLUICE_TCP_AWAITS_WELCOME: return read_welcome(hello);
    case SLUICE_TCP_AWAITS_HELLO: return read_hello(group, hello);
    case SLUICE_TCP_AWAITS_PROOF: return read_proof(group, hello);
    case SLUICE_TCP_GREETED: break;
  }
  return SLUICE_TCP_IS_DONE;
}

int sluice_tcp_hello_advance(const sluice_tcp_group_t* group, sluice_tcp_hello_t* hello) {
  for (;;) {
    const sluice_tcp_phase_t before = hello->phase;
    const int now = advance_once(group, hello);
    if (now != SLUICE_TCP_GOES_ON || hello->phase == before) return now;
  }
}

/* ---- several ----------------------------------------------------------------------------------------------------- */

void sluice_tcp_hellos_add(sluice_tcp_hellos_t* hellos, const sluice_tcp_hello_t* hello, uint64_t now_ns,
                           uint64_t limit_ns) {
  sluice_tcp_hello_t* h = &hellos->list[hellos->count++];
  *h = *hello;
  h->began_ns = now_ns;
  h->until_ns = now_ns + limit_ns;
  hellos->num_accepted += h->attempt < 0;
}

int sluice_tcp_hellos_remove(sluice_tcp_hellos_t* hellos, int32_t at) {
  const int fd = hellos->list[at].fd;
  hellos->num_accepted -= hellos->list[at].attempt < 0;
  hellos->list[at] = hellos->list[--hellos->count];
  return fd;
}

int sluice_tcp_hellos_turn_out_oldest(sluice_tcp_hellos_t* hellos, uint64_t age_ns, uint64_t now_ns) {
  int32_t oldest = -1;
  for (int32_t i = 0; i < hellos->count; ++i) {
    const sluice_tcp_hello_t* h = &hellos->list[i];
    if (h->attempt < 0 && (oldest < 0 || h->began_ns < hellos->list[oldest].began_ns)) oldest = i;
  }
  if (oldest < 0 || now_ns - hellos->list[oldest].began_ns < age_ns) return 0;
  sluice_tcp_close(sluice_tcp_hellos_remove(hellos, oldest));
  return 1;
}

void sluice_tcp_hellos_close(sluice_tcp_hellos_t* hellos) {
  while (hellos->count > 0) sluice_tcp_close(sluice_tcp_hellos_remove(hellos, hellos->count - 1));
}
