// SPDX-License-Identifier: Apache-2.0
/* Times of a message and an all-reduce on each transport, by size, in the form of Fig. 3 and 4 of AxoNN: half of a
 * round trip between two ranks (as osu_latency), and one all-reduce of floats over all ranks. Ranks are threads of this
 * program; over MPI they are processes that mpirun starts. For inspection: no claim depends on it.
 *
 *   bazel run -c opt //backend/cts/comm:messages_bench -- [world_size]
 *   mpirun -np 2 messages_bench --mpi libsluice_mpi.so */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/test/last_error.h"
#include "backend/comm/messages.h"
#include "backend/comm/mpi_loader/mpi_loader.h"

enum { MAX_RANKS = 16, NUM_SIZES = 10, NUM_ROUNDS = 12, NUM_WARM = 2 };

static uint64_t size_of(int i) { return UINT64_C(256) << (2 * i); } /* 256 bytes to 64 MiB */

typedef struct times_s {
  double message_us[NUM_SIZES]; /* the median */
  double all_reduce_us[NUM_SIZES];
} times_t;

typedef struct rank_s {
  int32_t rank;
  int32_t world_size;
  sluice_local_group_t* group;
  int is_tcp;
  times_t* times; /* rank 0 writes them */
} rank_t;

static void die(const char* what) {
  fprintf(stderr, "%s: %s: %s\n", what, sluice_status_name(last_error()->status), last_message());
  exit(1);
}

static int compare(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static double median(double* values) {
  qsort(values, NUM_ROUNDS, sizeof *values, compare);
  return (values[NUM_ROUNDS / 2 - 1] + values[NUM_ROUNDS / 2]) / 2;
}

static void send_one(sluice_messages_t* m, int32_t peer, const void* data, uint64_t bytes) {
  const sluice_message_span_t span = {.data = data, .bytes = bytes};
  const sluice_message_t message = {.peer = peer, .num_spans = 1, .spans = &span};
  if (sluice_messages_send(m, &message, 0, NULL) != SLUICE_OK) die("send");
}

/* Until the message has arrived; on the way, completions of own sends are taken too. */
static void receive_one(sluice_messages_t* m, int32_t peer) {
  sluice_message_completion_t c;
  if (sluice_messages_receive(m, peer, 0, 0, NULL) != SLUICE_OK) die("receive");
  do {
    if (sluice_messages_wait(m, NULL, &c) != SLUICE_OK) die("wait");
    sluice_messages_release(m, c.arrival);
  } while (c.kind != SLUICE_MESSAGE_RECEIVED);
}

static double time_message(sluice_messages_t* m, int32_t rank, const void* data, uint64_t bytes) {
  double us[NUM_ROUNDS];
  for (int i = -NUM_WARM; i < NUM_ROUNDS; ++i) {
    const uint64_t begin_ns = sluice_now_ns();
    if (rank == 0) send_one(m, 1, data, bytes);
    receive_one(m, 1 - rank);
    if (rank == 1) send_one(m, 0, data, bytes);
    if (i >= 0) us[i] = (double)(sluice_now_ns() - begin_ns) / 2e3;
  }
  return median(us);
}

static double time_all_reduce(sluice_comm_t* comm, void* data, uint64_t bytes) {
  double us[NUM_ROUNDS];
  for (int i = -NUM_WARM; i < NUM_ROUNDS; ++i) {
    const uint64_t begin_ns = sluice_now_ns();
    if (sluice_comm_all_reduce_f32(comm, data, (int64_t)bytes / 4, SLUICE_DTYPE_F32, NULL) != SLUICE_OK) die("sum");
    if (i >= 0) us[i] = (double)(sluice_now_ns() - begin_ns) / 1e3;
  }
  return median(us);
}

static void measure(sluice_comm_t* comm, times_t* times) {
  const int32_t rank = sluice_comm_rank(comm);
  void* data = calloc(1, size_of(NUM_SIZES - 1));
  sluice_messages_t* m;
  if (data == NULL || sluice_messages_open(comm, NULL, &m) != SLUICE_OK) die("open");
  for (int i = 0; i < NUM_SIZES; ++i) {
    const double message_us = rank < 2 ? time_message(m, rank, data, size_of(i)) : 0;
    const double all_reduce_us = time_all_reduce(comm, data, size_of(i));
    if (rank != 0) continue;
    times->message_us[i] = message_us;
    times->all_reduce_us[i] = all_reduce_us;
  }
  sluice_messages_close(m);
  free(data);
}

static void* run_rank(void* argument) {
  const rank_t* me = argument;
  sluice_comm_config_t config;
  sluice_comm_t *local, *tcp = NULL;
  sluice_comm_config_init(&config, sizeof config);
  config.rank = me->rank;
  config.world_size = me->world_size;
  if (sluice_comm_create_local(me->group, &config, &local) != SLUICE_OK) die("local");
  if (me->is_tcp && sluice_comm_create_tcp(local, NULL, &tcp) != SLUICE_OK) die("tcp");
  measure(me->is_tcp ? tcp : local, me->times);
  sluice_comm_destroy(tcp);
  sluice_comm_destroy(local);
  return NULL;
}

static void measure_threads(int32_t world_size, int is_tcp, times_t* times) {
  pthread_t threads[MAX_RANKS];
  rank_t ranks[MAX_RANKS];
  sluice_local_group_t* group;
  if (sluice_local_group_create(world_size, &group) != SLUICE_OK) die("group");
  for (int32_t r = 0; r < world_size; ++r) {
    ranks[r] = (rank_t){.rank = r, .world_size = world_size, .group = group, .is_tcp = is_tcp, .times = times};
    if (pthread_create(&threads[r], NULL, run_rank, &ranks[r]) != 0) exit(1);
  }
  for (int32_t r = 0; r < world_size; ++r) pthread_join(threads[r], NULL);
  sluice_local_group_destroy(group);
}

static void print(const char* what, int32_t world_size, const char* const* names, const double* const* us, int count) {
  printf("%s, %d ranks, microseconds\n%12s", what, world_size, "bytes");
  for (int n = 0; n < count; ++n) printf("%12s", names[n]);
  printf("\n");
  for (int i = 0; i < NUM_SIZES; ++i) {
    printf("%12llu", (unsigned long long)size_of(i));
    for (int n = 0; n < count; ++n) printf("%12.1f", us[n][i]);
    printf("\n");
  }
}

static int run_mpi(const char* plugin) {
  static const char* const names[] = {"mpi"};
  static times_t times;
  sluice_comm_config_t config;
  sluice_comm_t* comm;
  sluice_comm_config_init(&config, sizeof config);
  if (sluice_comm_create_mpi(&config, -1, plugin, &comm) != SLUICE_OK) die("mpi");
  measure(comm, &times);
  const int32_t world_size = sluice_comm_world_size(comm);
  const double *message = times.message_us, *all_reduce = times.all_reduce_us;
  if (sluice_comm_rank(comm) == 0) {
    print("a message (Fig. 3)", 2, names, &message, 1);
    print("an all-reduce of f32 (Fig. 4)", world_size, names, &all_reduce, 1);
  }
  sluice_comm_destroy(comm);
  return 0;
}

int main(int argc, char** argv) {
  static const char* const names[] = {"local", "tcp"};
  static times_t times[2];
  if (argc == 3 && strcmp(argv[1], "--mpi") == 0) return run_mpi(argv[2]);
  const int32_t world_size = argc > 1 ? (int32_t)strtol(argv[1], NULL, 10) : 2;
  if (world_size < 2 || world_size > MAX_RANKS) {
    fprintf(stderr, "usage: messages_bench [world_size, 2 to %d] | --mpi libsluice_mpi.so\n", MAX_RANKS);
    return 2;
  }
  for (int t = 0; t < 2; ++t) measure_threads(world_size, t, &times[t]);
  const double* message[] = {times[0].message_us, times[1].message_us};
  const double* all_reduce[] = {times[0].all_reduce_us, times[1].all_reduce_us};
  print("a message (Fig. 3)", 2, names, message, 2);
  print("an all-reduce of f32 (Fig. 4)", world_size, names, all_reduce, 2);
  return 0;
}
