/* A rank that is killed, while it is a process: all others are told which, whomever they wait for. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "backend/base/clock.h"
#include "backend/comm/messages.h"

enum { WORLD = 4, VICTIM = 3 };

/* Under TSan bringing in 64 MiB takes a rank longer than the others wait for it. */
#if defined(__SANITIZE_THREAD__)
enum { LARGE = 4 << 20 };
#else
enum { LARGE = 64 << 20 };
#endif

/* ---- a group of processes: a pair of sockets between every two of them ------------------------------------------- */

static int lines[WORLD][WORLD]; /* [own rank][peer], made before the forks */

typedef struct exchange_s {
  sluice_exchange_t sizes;
  int32_t rank;
} exchange_t;

static exchange_t current; /* one at a time, of a few bytes: no write waits for its reader */

static sluice_status_t start(void* user, const sluice_exchange_t* exchange, void** out_request,
                             sluice_host_failure_t* out_failure) {
  (void)out_failure;
  current = (exchange_t){.sizes = *exchange, .rank = *(const int32_t*)user};
  for (int r = 0; r < WORLD; ++r) {
    const ssize_t bytes = r != current.rank ? (ssize_t)exchange->send_bytes[r] : 0;
    if (bytes > 0 && write(lines[current.rank][r], exchange->send[r], (size_t)bytes) != bytes) return SLUICE_E_FOREIGN;
  }
  *out_request = &current;
  return SLUICE_OK;
}

static sluice_status_t finish(void* user, void* request, uint64_t timeout_ns, sluice_host_failure_t* out_failure) {
  (void)user, (void)timeout_ns, (void)out_failure;
  const exchange_t* e = request;
  for (int r = 0; r < WORLD; ++r) {
    const ssize_t bytes = r != e->rank ? (ssize_t)e->sizes.recv_bytes[r] : 0;
    if (bytes > 0 && recv(lines[e->rank][r], e->sizes.recv[r], (size_t)bytes, MSG_WAITALL) != bytes) {
      return SLUICE_E_FOREIGN;
    }
  }
  return SLUICE_OK;
}

/* ---- ranks ------------------------------------------------------------------------------------------------------- */

typedef sluice_status_t (*wait_fn_t)(sluice_messages_t* m, int32_t rank);

static sluice_status_t next_one(sluice_messages_t* m) {
  sluice_message_completion_t c;
  sluice_status_t status;
  do {
    status = sluice_messages_wait(m, "what does not come", &c);
  } while (status == SLUICE_OK);
  return status;
}

/* Rank 0 waits for 1, 1 for 2, 2 for 0: nobody for the one that is killed. */
static sluice_status_t wait_for_another(sluice_messages_t* m, int32_t rank) {
  const sluice_status_t status = sluice_messages_receive(m, (rank + 1) % VICTIM, 1, 0, NULL);
  return status == SLUICE_OK ? next_one(m) : status;
}

/* Halves of messages are under way between all. */
static sluice_status_t send_meanwhile(sluice_messages_t* m, int32_t rank) {
  static char payload[LARGE];
  const sluice_message_span_t span = {.data = payload, .bytes = LARGE};
  for (uint64_t i = 0; i < 1000; ++i) {
    const sluice_message_t message = {.peer = (int32_t)(i % WORLD), .num_spans = 1, .tag = i, .spans = &span};
    sluice_message_completion_t c;
    if (message.peer == rank) continue;
    sluice_status_t status = sluice_messages_receive(m, message.peer, i, 0, NULL);
    if (status == SLUICE_OK) status = sluice_messages_send(m, &message, 0, NULL);
    if (status == SLUICE_OK) status = sluice_messages_wait(m, NULL, &c);
    if (status != SLUICE_OK) return status;
    sluice_messages_release(m, c.arrival);
  }
  return SLUICE_OK;
}

/* In a child. Writes a byte when it is about to wait, then where it is at fault the line. */
static int be_rank(int32_t rank, int ready, wait_fn_t wait) {
  static const sluice_host_comm_vtable_t vtable = {
      .struct_size = sizeof vtable, .exchange_start = start, .exchange_wait = finish};
  sluice_comm_config_t config;
  sluice_comm_t *parent, *comm;
  sluice_messages_t* m;
  sluice_error_info_t why;
  sluice_comm_config_init(&config, sizeof config);
  config.rank = rank;
  config.world_size = WORLD;
  config.timeout_ns = UINT64_C(50000000000);
  if (sluice_comm_create_host(&config, &vtable, &rank, &parent) != SLUICE_OK) return __LINE__;
  if (sluice_comm_create_tcp(parent, NULL, &comm) != SLUICE_OK) return __LINE__;
  if (sluice_messages_open(comm, NULL, &m) != SLUICE_OK) return __LINE__;
  if (write(ready, "r", 1) != 1) return __LINE__;
  if (rank == VICTIM) {
    (void)wait(m, rank);
    pause();
  }
  if (wait(m, rank) != SLUICE_E_PEER_LOST) return __LINE__;
  sluice_error_info_init(&why, sizeof why);
  sluice_error_last(&why);
  if (why.peer != VICTIM) {
    fprintf(stderr, "%s\n", why.message);
    return __LINE__;
  }
  if (write(ready, "t", 1) != 1) return __LINE__;
  sluice_messages_close(m);
  sluice_comm_destroy(comm);
  sluice_comm_destroy(parent);
  return 0;
}

static void await_bytes(int fd, int count) {
  char byte;
  while (count-- > 0) assert_int_equal(read(fd, &byte, 1), 1);
}

static void kill_one(wait_fn_t wait) {
  int ready[2];
  pid_t children[WORLD];
  assert_int_equal(pipe(ready), 0);
  for (int a = 0; a < WORLD; ++a) {
    for (int b = a + 1; b < WORLD; ++b) {
      int pair[2];
      assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
      lines[a][b] = pair[0];
      lines[b][a] = pair[1];
    }
  }
  for (int32_t r = 0; r < WORLD; ++r) {
    children[r] = fork();
    assert_true(children[r] >= 0);
    if (children[r] == 0) _exit(be_rank(r, ready[1], wait) & 0xff);
  }
  close(ready[1]); /* a child that dies early ends the test */
  await_bytes(ready[0], WORLD);
  usleep(200000); /* so that they wait by then, mostly: what they are told is the same */
  const uint64_t begin_ns = sluice_now_ns();
  kill(children[VICTIM], SIGKILL);
  await_bytes(ready[0], WORLD - 1);
  print_message("all were told %.0f ms after the kill\n", (double)(sluice_now_ns() - begin_ns) / 1e6);
  for (int r = 0; r < WORLD; ++r) {
    int code = -1;
    assert_int_equal(waitpid(children[r], &code, 0), children[r]);
    if (r == VICTIM) continue;
    assert_true(WIFEXITED(code));
    assert_int_equal(WEXITSTATUS(code), 0);
  }
  close(ready[0]);
  for (int a = 0; a < WORLD; ++a) {
    for (int b = 0; b < WORLD; ++b) {
      if (a != b) close(lines[a][b]);
    }
  }
}

static void idle(void** state) {
  (void)state;
  kill_one(wait_for_another);
}

static void busy(void** state) {
  (void)state;
  kill_one(send_meanwhile);
}

int main(void) {
  static const struct CMUnitTest tests[] = {
      {"Kill_WhileOthersWaitForEachOther_AllNameIt", idle},
      {"Kill_WithHalvesOfMessagesUnderWay_AllNameIt", busy},
  };
  return cmocka_run_group_tests_name("tcp, killed ranks with messages", tests, NULL, NULL);
}
