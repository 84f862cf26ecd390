// SPDX-License-Identifier: Apache-2.0
/* At an address of a rank another machine may answer, since private networks overlap, or nobody yet. The connecting
 * rank then tries the next address, or the same address again. */
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <unistd.h>

#include "backend/comm/tcp/tcp_address.h"
#include "backend/comm/test/tcp_ranks.h"
#include "third_party/bazel/test.h"

#define SECOND_NS UINT64_C(1000000000)

enum { WORLD = 2, TURNS = 3 };

typedef enum detour_kind_e {
  DETOUR_SILENT = 0, /* its kernel accepts connections, but it sends nothing */
  DETOUR_GARBAGE,    /* sends data that no rank sends */
  DETOUR_ECHO,       /* sends back what it receives */
  DETOUR_LATE,       /* closes two connections and forwards the third; there is no other address */
  DETOUR_FORWARDS,   /* forwards; there is no other address */
  DETOUR_NOBODY      /* sends garbage; there is no other address */
} detour_kind_t;

static detour_kind_t kind;
static int32_t num_accepted; /* by the other machine */
static int listener;
static struct sockaddr_in other_machine;
static _Atomic uint16_t true_port; /* rank 0's */
static _Atomic int is_over;

static struct sockaddr_in loopback(uint16_t port) {
  return (struct sockaddr_in){
      .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

/* Rank 1 looks up the addresses of rank 0: the first one is replaced by the other machine's. */
socklen_t __real_sluice_tcp_card_target(const sluice_tcp_card_t* mine, const sluice_tcp_card_t* theirs, int32_t attempt,
                                        struct sockaddr_storage* out_target);
socklen_t __wrap_sluice_tcp_card_target(const sluice_tcp_card_t* mine, const sluice_tcp_card_t* theirs, int32_t attempt,
                                        struct sockaddr_storage* out_target);
socklen_t __wrap_sluice_tcp_card_target(const sluice_tcp_card_t* mine, const sluice_tcp_card_t* theirs, int32_t attempt,
                                        struct sockaddr_storage* out_target) {
  atomic_store(&true_port, theirs->any_port);
  memcpy(out_target, &other_machine, sizeof other_machine);
  if (attempt == 0) return sizeof other_machine;
  return kind >= DETOUR_LATE ? 0 : __real_sluice_tcp_card_target(mine, theirs, attempt, out_target);
}

/* ---- the other machine ---- */

static int is_ready(int fd) {
  struct pollfd p = {.fd = fd, .events = POLLIN};
  return poll(&p, 1, 20) > 0;
}

/* Forwards bytes in both directions until one end closes. */
static void hand_on(int client) {
  const struct sockaddr_in target = loopback(atomic_load(&true_port));
  char bytes[4096];
  const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (server < 0 || connect(server, (const struct sockaddr*)&target, sizeof target) != 0) abort();
  for (int is_up = 1; is_up;) {
    struct pollfd both[2] = {{.fd = client, .events = POLLIN}, {.fd = server, .events = POLLIN}};
    (void)poll(both, 2, -1);
    for (int side = 0; side < 2 && is_up; ++side) {
      if (both[side].revents == 0) continue;
      const ssize_t n = recv(both[side].fd, bytes, sizeof bytes, 0);
      is_up = n > 0 && send(both[1 - side].fd, bytes, (size_t)n, MSG_NOSIGNAL) == n;
    }
  }
  close(server);
}

static void answer(int client) {
  static const char garbage[64] = "HTTP/1.1 400 Bad Request\r\n\r\n";
  char words[64];
  ssize_t n;
  if (kind == DETOUR_GARBAGE || kind == DETOUR_NOBODY) (void)send(client, garbage, sizeof garbage, MSG_NOSIGNAL);
  while (kind == DETOUR_ECHO && (n = recv(client, words, sizeof words, 0)) > 0) {
    (void)send(client, words, (size_t)n, MSG_NOSIGNAL);
  }
  if (kind == DETOUR_FORWARDS || (kind == DETOUR_LATE && num_accepted > 2)) hand_on(client);
}

static void* stand_there(void* unused) {
  while (!atomic_load(&is_over)) {
    if (kind == DETOUR_SILENT || !is_ready(listener)) {
      usleep(1000);
      continue;
    }
    const int client = accept(listener, NULL, NULL);
    if (client < 0) continue;
    ++num_accepted;
    answer(client);
    close(client);
  }
  return unused;
}

/* Rank 1 tries to connect to the other machine. */
static void run_with(detour_kind_t of, tcp_rank_t ranks[WORLD]) {
  socklen_t length = sizeof other_machine;
  pthread_t thread;
  kind = of, num_accepted = 0;
  other_machine = loopback(0);
  atomic_store(&is_over, 0);
  listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener < 0 || bind(listener, (struct sockaddr*)&other_machine, length) != 0 || listen(listener, 64) != 0 ||
      getsockname(listener, (struct sockaddr*)&other_machine, &length) != 0) {
    abort();
  }
  if (pthread_create(&thread, NULL, stand_there, NULL) != 0) abort();
  tcp_ranks_run(ranks, WORLD);
  atomic_store(&is_over, 1);
  pthread_join(thread, NULL);
  close(listener);
}

/* ---- cases ------------------------------------------------------------------------------------------------------- */

/* The best of three turns, since the machine may be busy. */
static uint64_t best_start_ns(detour_kind_t of, int32_t least_accepted) {
  uint64_t best_ns = UINT64_MAX;
  for (int turn = 0; turn < TURNS; ++turn) {
    tcp_rank_t ranks[WORLD] = {{.then = NULL}};
    run_with(of, ranks);
    for (int r = 0; r < WORLD; ++r) {
      if (ranks[r].status != SLUICE_OK) fail_msg("rank %d: %d, %s", r, ranks[r].status, ranks[r].why.message);
    }
    assert_in_range(num_accepted, least_accepted, 1000);
    if (ranks[1].created_ns < best_ns) best_ns = ranks[1].created_ns;
  }
  print_message("started in %.3f s\n", (double)best_ns / 1e9);
  return best_ns;
}

static void does_not_delay(detour_kind_t of, int32_t least_accepted) {
  const uint64_t clean_ns = best_start_ns(DETOUR_FORWARDS, 1); /* forwarding costs almost no time */
  assert_true(best_start_ns(of, least_accepted) < clean_ns + SECOND_NS);
}

TEST(TcpConnect_AnotherMachineSaysNothing_NextAddressIsTaken) { does_not_delay(DETOUR_SILENT, 0); }

TEST(TcpConnect_AnotherMachineTalksGarbage_NextAddressIsTaken) { does_not_delay(DETOUR_GARBAGE, 1); }

TEST(TcpConnect_AnotherMachineEchoes_NextAddressIsTaken) { does_not_delay(DETOUR_ECHO, 1); }

TEST(TcpConnect_NobodyAnswersAtFirst_IsTriedAgain) { (void)best_start_ns(DETOUR_LATE, 3); }

/* Rank 0 is never found: the error names the address and what answered. */
TEST(TcpConnect_AnotherMachineIsAllThereIs_FailsSayingSo) {
  tcp_rank_t ranks[WORLD] = {{.connect_timeout_ns = SECOND_NS}, {.connect_timeout_ns = SECOND_NS}};
  run_with(DETOUR_NOBODY, ranks);
  assert_int_equal(ranks[1].status, SLUICE_E_EXTERNAL);
  assert_int_equal(ranks[1].why.peer, 0);
  if (strstr(ranks[1].why.message, "127.0.0.1 port") == NULL ||
      strstr(ranks[1].why.message, "the process that answers is not that rank") == NULL) {
    fail_msg("%s", ranks[1].why.message);
  }
  for (int r = 0; r < WORLD; ++r) assert_int_equal(ranks[r].again, SLUICE_OK);
}
