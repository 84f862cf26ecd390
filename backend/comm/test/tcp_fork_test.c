// SPDX-License-Identifier: Apache-2.0
/* A forked child has no descriptor of the tcp transport, whichever process forks and at any time. */
#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/comm/test/tcp_ranks.h"
#include "third_party/bazel/test.h"

enum { WORLD = 3, NUM_LOOKED_AT = 512 };

/* Counts stream sockets except Unix sockets, and descriptors of epoll and eventfd. The C library's own descriptors, for
 * looking up names and addresses, are of other kinds. */
static int count_held(void) {
  int count = 0;
  for (int fd = 0; fd < NUM_LOOKED_AT; ++fd) {
    char path[32], target[64];
    struct sockaddr_storage address;
    socklen_t length = sizeof address, size = sizeof(int);
    int type = 0;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(path, target, sizeof target - 1);
    if (n < 0) continue;
    target[n] = '\0';
    const int is_socket = getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM &&
                          getsockname(fd, (struct sockaddr*)&address, &length) == 0 && address.ss_family != AF_UNIX;
    count += is_socket || strcmp(target, "anon_inode:[eventpoll]") == 0 || strcmp(target, "anon_inode:[eventfd]") == 0;
  }
  return count;
}

static int num_before; /* inherited from the process that started the test */

/* Returns the result of `body` in a child, if it fits into a byte. */
static int run_in_child(int (*body)(void)) {
  int code = -1;
  const pid_t child = fork();
  if (child == 0) _exit(body());
  if (child < 0 || waitpid(child, &code, 0) != child || !WIFEXITED(code)) return -1;
  return WEXITSTATUS(code);
}

/* ---- what a child holds ------------------------------------------------------------------------------------------ */

static int held_in_parent, held_in_child;

static void fork_on_rank_0(tcp_rank_t* me) {
  tcp_ranks_meet(me);
  if (me->rank == 0) {
    held_in_parent = count_held();
    held_in_child = run_in_child(count_held);
  }
  tcp_ranks_meet(me);
}

TEST(Fork_Child_HoldsNothingOfTheTransport) {
  tcp_rank_t ranks[WORLD] = {{.then = fork_on_rank_0}, {.then = fork_on_rank_0}, {.then = fork_on_rank_0}};
  tcp_ranks_run(ranks, WORLD);
  /* Six ends of three connections, and an epoll and an eventfd on each rank. */
  assert_int_equal(held_in_parent, num_before + 12);
  assert_int_equal(held_in_child, num_before);
  for (int r = 0; r < WORLD; ++r) assert_int_equal(ranks[r].status, SLUICE_OK);
}

/* ---- a child of the child ---- */

static int own[NUM_LOOKED_AT];
static int num_own;

static int count_own(void) {
  int count = 0;
  for (int i = 0; i < num_own; ++i) count += fcntl(own[i], F_GETFD) >= 0;
  return count;
}

/* The child opens descriptors, which get the numbers of the parent's descriptors, and forks. */
static int fork_again(void) {
  for (num_own = 0; num_own < 24; ++num_own) own[num_own] = eventfd(0, 0);
  return run_in_child(count_own);
}

static int kept_in_grandchild;

static void fork_twice_on_rank_0(tcp_rank_t* me) {
  tcp_ranks_meet(me);
  if (me->rank == 0) kept_in_grandchild = run_in_child(fork_again);
  tcp_ranks_meet(me);
}

TEST(Fork_ChildOfAChild_KeepsWhatTheChildOpened) {
  tcp_rank_t ranks[WORLD] = {
      {.then = fork_twice_on_rank_0}, {.then = fork_twice_on_rank_0}, {.then = fork_twice_on_rank_0}};
  tcp_ranks_run(ranks, WORLD);
  assert_int_equal(kept_in_grandchild, 24);
}

/* ---- at any moment ----------------------------------------------------------------------------------------------- */

static _Atomic int is_over;
static int num_forks, num_bad_children;

static void* fork_all_the_time(void* unused) {
  while (!is_over) {
    ++num_forks;
    num_bad_children += run_in_child(count_held) != num_before;
  }
  return unused;
}

TEST(Fork_WhileRanksConnect_ChildHoldsNothing) {
  pthread_t thread;
  assert_int_equal(pthread_create(&thread, NULL, fork_all_the_time, NULL), 0);
  for (int turn = 0; turn < 100; ++turn) {
    tcp_rank_t ranks[WORLD] = {{.then = NULL}};
    tcp_ranks_run(ranks, WORLD);
    for (int r = 0; r < WORLD; ++r) assert_int_equal(ranks[r].status, SLUICE_OK);
  }
  is_over = 1;
  pthread_join(thread, NULL);
  print_message("%d forks\n", num_forks);
  assert_true(num_forks > 0);
  assert_int_equal(num_bad_children, 0);
}

int main(void) {
  num_before = count_held();
  return run_cases(NULL, NULL);
}
