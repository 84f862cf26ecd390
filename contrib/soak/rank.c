// SPDX-License-Identifier: Apache-2.0
/* Trains a layer as one rank, in turns that soak.py orders, and saves its weights every ten steps. In each turn the
 * rank receives sockets to the other ranks and the first step, creates its communicators and its layer, loads its
 * weights of that step, and trains until the last step, or until a call fails; then it releases everything and waits
 * for the next turn.
 *
 *   rank CONTROL FOLDER RANK RANKS TIMEOUT_MS
 *
 * Prints lines: `made TURN`, `step TURN STEP LOSS` (the loss in hexadecimal, with all of its bits), and
 * `end TURN STATUS PEER MS DESCRIPTORS THREADS MESSAGE`. MS: the duration of the last call, which may have failed. */
#include <dirent.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "capi/test/migration/mesh.h"
#include "examples/c/host.h"

enum { M = 24, H = 40, T = 96, K = 2, EXPERTS_OF_A_RANK = 2, KEEP_EVERY = 10 };

typedef struct {
  float x[T][M], target[T][M], y[T][M], grad_y[T][M], route_weights[T][K];
  int32_t ids[T][K];
  struct {
    float w1[EXPERTS_OF_A_RANK][H][M], w2[EXPERTS_OF_A_RANK][M][H];
  } weights, grads;
} memory_t;

typedef struct {
  int32_t turn, first_step, num_steps, world_size;
} order_t;

static memory_t my;
static const char* folder; /* has the weights: weights-RANK-STEP */
static int my_rank, world_size;
static uint64_t timeout_ns, began_ms; /* the beginning of the last call */

static uint64_t now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* ---- weights ----------------------------------------------------------------------------------------------------- */

static void name_of(int step, const char* end, char out[512]) {
  snprintf(out, 512, "%s/weights-%d-%d%s", folder, my_rank, step, end);
}

static void keep(int step) {
  char part[512], path[512];
  name_of(step, ".new", part), name_of(step, "", path);
  FILE* file = fopen(part, "wb");
  const int is_whole = file != NULL && fwrite(&my.weights, sizeof my.weights, 1, file) == 1;
  if (file != NULL && fclose(file) == 0 && is_whole) rename(part, path);
}

static int take(int step) {
  char path[512];
  if (step == 0) {
    for (size_t i = 0; i < sizeof my.weights / sizeof(float); ++i) {
      ((float*)&my.weights)[i] = 0.3f * noise(2, (uint32_t)(my_rank * 100000 + (int)i));
    }
    return 1;
  }
  name_of(step, "", path);
  FILE* file = fopen(path, "rb");
  const int is_whole = file != NULL && fread(&my.weights, sizeof my.weights, 1, file) == 1;
  if (file != NULL) fclose(file);
  return is_whole;
}

/* ---- a step ------------------------------------------------------------------------------------------------------ */

static void make_batch(int step) {
  for (int t = 0; t < T; ++t) {
    const uint32_t token = (uint32_t)((step * world_size + my_rank) * T + t);
    for (int m = 0; m < M; ++m) my.x[t][m] = noise(1, token * M + (uint32_t)m);
    for (int m = 0; m < M; ++m) my.target[t][m] = 0.5f * my.x[t][(m + 1) % M];
    for (int k = 0; k < K; ++k) {
      my.ids[t][k] = (int32_t)((token * 7 + token / 3 + (uint32_t)k) % (uint32_t)(EXPERTS_OF_A_RANK * world_size));
      my.route_weights[t][k] = 0.5f;
    }
  }
}

static sluice_status_t train_step(sluice_moe_t* moe, int step, double* out_loss) {
  int64_t rows[] = {T, M}, routes[] = {T, K}, up[] = {H, M}, down[] = {M, H};
  sluice_tensor_t x = describe(my.x, SLUICE_TYPE_FLOAT, rows), y = describe(my.y, SLUICE_TYPE_FLOAT, rows);
  sluice_tensor_t grad_y = describe(my.grad_y, SLUICE_TYPE_FLOAT, rows),
                  ids = describe(my.ids, SLUICE_TYPE_INT, routes);
  sluice_tensor_t route_weights = describe(my.route_weights, SLUICE_TYPE_FLOAT, routes);
  sluice_tensor_t lists[4][EXPERTS_OF_A_RANK];
  for (int e = 0; e < EXPERTS_OF_A_RANK; ++e) {
    lists[0][e] = describe(my.weights.w1[e], SLUICE_TYPE_FLOAT, up);
    lists[1][e] = describe(my.weights.w2[e], SLUICE_TYPE_FLOAT, down);
    lists[2][e] = describe(my.grads.w1[e], SLUICE_TYPE_FLOAT, up);
    lists[3][e] = describe(my.grads.w2[e], SLUICE_TYPE_FLOAT, down);
  }
  sluice_expert_tensors_t params, grads;
  memset(&params, 0, sizeof params), memset(&grads, 0, sizeof grads);
  params.struct_size = grads.struct_size = sizeof params;
  params.w1 = lists[0], params.w2 = lists[1], grads.w1 = lists[2], grads.w2 = lists[3];
  sluice_moe_forward_args_t forward;
  sluice_moe_backward_args_t backward;
  sluice_step_t* saved = NULL;
  make_batch(step);
  sluice_moe_forward_args_init(&forward, sizeof forward);
  forward.tokens = &x, forward.expert_ids = &ids, forward.route_weights = &route_weights, forward.out_tokens = &y;
  forward.params = &params, forward.needs_backward = 1;
  began_ms = now_ms();
  sluice_status_t status = sluice_moe_forward(moe, &forward, NULL, &saved);
  if (status != SLUICE_OK) return status;
  *out_loss = 0;
  for (int t = 0; t < T; ++t) {
    for (int m = 0; m < M; ++m) {
      const double error = (double)my.y[t][m] - my.target[t][m];
      *out_loss += error * error / (T * M);
      my.grad_y[t][m] = (float)(2 * error / (T * M));
    }
  }
  sluice_moe_backward_args_init(&backward, sizeof backward);
  backward.tokens = &x, backward.route_weights = &route_weights, backward.params = &params;
  backward.grad_out = &grad_y, backward.grad_params = &grads;
  began_ms = now_ms();
  status = sluice_moe_backward(moe, saved, &backward, NULL);
  sluice_step_drop(saved);
  if (status != SLUICE_OK) return status;
  for (size_t i = 0; i < sizeof my.weights / sizeof(float); ++i) {
    ((float*)&my.weights)[i] -= 0.5f / (float)world_size * ((const float*)&my.grads)[i];
  }
  return SLUICE_OK;
}

/* ---- training ---------------------------------------------------------------------------------------------------- */

/* Begins with the weights of the order's first step. Returns the first status that is not OK, after releasing the layer
 * and the context. */
static sluice_status_t train(sluice_comm_t* comm, const order_t* order) {
  sluice_context_t* context = NULL;
  sluice_moe_t* moe = NULL;
  sluice_context_config_t context_config;
  sluice_moe_config_t config;
  sluice_context_config_init(&context_config, sizeof context_config);
  context_config.gemm = "ref"; /* gives the same bits in every run */
  sluice_status_t status = sluice_context_create(&context_config, comm, &context);
  sluice_moe_config_init(&config, sizeof config);
  config.model_width = M, config.hidden_width = H, config.num_experts = EXPERTS_OF_A_RANK * world_size,
  config.top_k = K;
  config.num_chunks = 2;
  if (status == SLUICE_OK) status = sluice_moe_create(context, &config, &moe);
  if (status == SLUICE_OK && !take(order->first_step)) exit(3);
  printf("made %d\n", order->turn);
  for (int step = order->first_step; status == SLUICE_OK && step < order->first_step + order->num_steps; ++step) {
    double loss = 0;
    status = train_step(moe, step, &loss);
    if (status != SLUICE_OK) break;
    printf("step %d %d %a\n", order->turn, step, loss);
    if ((step + 1) % KEEP_EVERY == 0) keep(step + 1);
  }
  sluice_moe_destroy(moe);
  sluice_context_destroy(context);
  return status;
}

/* ---- turns ------------------------------------------------------------------------------------------------------- */

/* out_ms: the duration of the last call. */
static sluice_status_t join(const order_t* order, const int* fds, sluice_error_info_t* why, uint64_t* out_ms) {
  sluice_comm_t *mesh = NULL, *comm = NULL;
  mesh_end_t end = {.rank = my_rank, .world = world_size};
  memcpy(end.sockets, fds, sizeof end.sockets);
  sluice_tcp_config_t config;
  sluice_tcp_config_init(&config, sizeof config);
  config.connect_timeout_ns = timeout_ns;
  began_ms = now_ms();
  sluice_status_t status = mesh_comm(&end, timeout_ns, &mesh);
  if (status == SLUICE_OK) status = sluice_comm_create_tcp(mesh, &config, &comm);
  if (status == SLUICE_OK) status = train(comm, order);
  sluice_error_info_init(why, sizeof *why);
  if (status != SLUICE_OK) sluice_error_last(why);
  *out_ms = now_ms() - began_ms;
  sluice_comm_destroy(comm);
  sluice_comm_destroy(mesh);
  for (int r = 0; r < world_size; ++r) {
    if (r != my_rank) close(fds[r]);
  }
  return status;
}

static int count_entries(const char* name) {
  DIR* entries = opendir(name);
  int count = 0;
  while (entries != NULL && readdir(entries) != NULL) ++count;
  if (entries != NULL) closedir(entries);
  return count;
}

/* Receives the next order and its sockets. Returns 0 if soak.py has closed the connection. */
static int receive(int control, order_t* order, int* fds) {
  char room[CMSG_SPACE(MESH_MAX_RANKS * sizeof(int))];
  struct iovec part = {.iov_base = order, .iov_len = sizeof *order};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
  if (recvmsg(control, &message, MSG_WAITALL | MSG_CMSG_CLOEXEC) != (ssize_t)sizeof *order) return 0;
  const struct cmsghdr* c = CMSG_FIRSTHDR(&message);
  const int* given = c != NULL ? (const int*)(const void*)CMSG_DATA(c) : NULL;
  for (int r = 0; r < order->world_size; ++r) fds[r] = r == my_rank || given == NULL ? -1 : *given++;
  return 1;
}

int main(int argc, char** argv) {
  order_t order;
  int fds[MESH_MAX_RANKS];
  if (argc != 6) return 2;
  const int control = atoi(argv[1]);
  folder = argv[2], my_rank = atoi(argv[3]), world_size = atoi(argv[4]);
  timeout_ns = (uint64_t)atoi(argv[5]) * 1000000;
  setvbuf(stdout, NULL, _IOLBF, 0);
  while (receive(control, &order, fds)) {
    sluice_error_info_t why;
    uint64_t ms = 0;
    const sluice_status_t status = join(&order, fds, &why, &ms);
    printf("end %d %s %d %llu %d %d %s\n", order.turn, sluice_status_name(status), status == SLUICE_OK ? -1 : why.peer,
           (unsigned long long)ms, count_entries("/proc/self/fd"), count_entries("/proc/self/task"),
           status == SLUICE_OK ? "" : why.message);
  }
  return 0;
}
