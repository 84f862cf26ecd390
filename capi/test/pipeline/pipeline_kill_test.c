/* A stage that is killed, a process of its own, is named on all others, whichever they wait for, with the batch. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "backend/base/clock.h"
#include "sluice/pipeline.h"

#define BOUNDED_NS UINT64_C(20000000000)

enum { STAGES = 4, MICRO_BATCHES = 8, ELEMENTS = 1 << 18 }; /* more than a socket holds */

/* ---- processes that share a mesh of sockets, and by it a host communicator for addresses alone ---- */

typedef struct note_s {
  _Atomic uint64_t killed_ns, returned_ns[STAGES];
  int32_t status[STAGES], peer[STAGES];
  char message[STAGES][256];
} note_t;

typedef struct process_s {
  int rank;
  int sockets[STAGES];
  void* recv[STAGES];
  uint64_t recv_bytes[STAGES];
  int32_t victim;
  note_t* note;
  float* x;
  int64_t shape[1];
  sluice_tensor_t out, back;
  int32_t batch;
} process_t;

static int move_all(int fd, void* data, uint64_t bytes, int is_send) {
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t moved = is_send ? send(fd, (char*)data + done, bytes - done, MSG_NOSIGNAL)
                                  : recv(fd, (char*)data + done, bytes - done, 0);
    if (moved <= 0) return 0;
    done += (uint64_t)moved;
  }
  return 1;
}

/* What is exchanged before connections stand fits into the sockets. */
static sluice_status_t exchange_start(void* user, const sluice_exchange_t* exchange, void** out_request,
                                      sluice_host_failure_t* out_failure) {
  process_t* me = user;
  (void)out_failure;
  for (int r = 0; r < STAGES; ++r) {
    if (r == me->rank) continue;
    me->recv[r] = exchange->recv[r];
    me->recv_bytes[r] = exchange->recv_bytes[r];
    if (!move_all(me->sockets[r], (void*)exchange->send[r], exchange->send_bytes[r], 1)) return SLUICE_E_PEER_LOST;
  }
  *out_request = me;
  return SLUICE_OK;
}

static sluice_status_t exchange_wait(void* user, void* request, uint64_t timeout_ns,
                                     sluice_host_failure_t* out_failure) {
  process_t* me = user;
  (void)request, (void)timeout_ns, (void)out_failure;
  for (int r = 0; r < STAGES; ++r) {
    if (r != me->rank && !move_all(me->sockets[r], me->recv[r], me->recv_bytes[r], 0)) return SLUICE_E_PEER_LOST;
  }
  return SLUICE_OK;
}

/* ---- a stage ---- */

static sluice_status_t forward(void* user, const sluice_stage_call_t* call, sluice_stage_tensors_t* out_result,
                               sluice_host_failure_t* out_failure) {
  process_t* me = user;
  (void)out_failure;
  if (me->batch == 1 && me->rank == me->victim && call->micro_batch == MICRO_BATCHES / 2) {
    atomic_store(&me->note->killed_ns, sluice_now_ns());
    raise(SIGKILL);
  }
  out_result->tensors = &me->out;
  out_result->num_tensors = 1;
  return SLUICE_OK;
}

static sluice_status_t backward(void* user, const sluice_stage_call_t* call, sluice_stage_tensors_t* out_result,
                                sluice_host_failure_t* out_failure) {
  process_t* me = user;
  (void)call, (void)out_failure;
  out_result->tensors = &me->back;
  out_result->num_tensors = 1;
  return SLUICE_OK;
}

static int run_batches(process_t* me, sluice_pipeline_t* pipeline) {
  sluice_pipeline_batch_t batch;
  sluice_pipeline_batch_init(&batch, sizeof batch);
  batch.num_micro_batches = MICRO_BATCHES;
  if (sluice_pipeline_run_batch(pipeline, &batch) != SLUICE_OK) return 3;
  /* All have ended the first one before the victim goes. */
  char byte = 0;
  for (int r = 0; r < STAGES; ++r) {
    if (r != me->rank && !move_all(me->sockets[r], &byte, 1, 1)) return 4;
  }
  for (int r = 0; r < STAGES; ++r) {
    if (r != me->rank && !move_all(me->sockets[r], &byte, 1, 0)) return 4;
  }
  me->batch = 1;
  me->note->status[me->rank] = sluice_pipeline_run_batch(pipeline, &batch);
  atomic_store(&me->note->returned_ns[me->rank], sluice_now_ns());
  sluice_error_info_t why;
  sluice_error_info_init(&why, sizeof why);
  sluice_error_last(&why);
  me->note->peer[me->rank] = why.peer;
  (void)snprintf(me->note->message[me->rank], sizeof me->note->message[0], "%.255s", why.message);
  return 0;
}

static int run_process(process_t* me) {
  static const sluice_host_comm_vtable_t vtable = {
      .struct_size = sizeof vtable, .exchange_start = exchange_start, .exchange_wait = exchange_wait};
  static const sluice_pipeline_callbacks_t callbacks = {
      .struct_size = sizeof callbacks, .forward = forward, .backward = backward};
  me->x = calloc(ELEMENTS, sizeof *me->x);
  me->shape[0] = ELEMENTS;
  me->out = (sluice_tensor_t){.data = me->x,
                              .device_type = SLUICE_DEVICE_CPU,
                              .ndim = 1,
                              .type_code = SLUICE_TYPE_FLOAT,
                              .type_bits = 32,
                              .type_lanes = 1,
                              .shape = me->shape};
  me->back = me->out;
  sluice_comm_config_t config;
  sluice_comm_config_init(&config, sizeof config);
  config.rank = me->rank;
  config.world_size = STAGES;
  sluice_comm_t *parent = NULL, *comm = NULL;
  sluice_pipeline_t* pipeline = NULL;
  sluice_pipeline_config_t pipeline_config;
  sluice_pipeline_config_init(&pipeline_config, sizeof pipeline_config);
  int bad = sluice_comm_create_host(&config, &vtable, me, &parent) != SLUICE_OK ? 1 : 0;
  if (bad == 0 && sluice_comm_create_tcp(parent, NULL, &comm) != SLUICE_OK) bad = 2;
  if (bad == 0 && sluice_pipeline_create(&pipeline_config, comm, &callbacks, me, &pipeline) != SLUICE_OK) bad = 2;
  if (bad == 0) bad = run_batches(me, pipeline);
  sluice_pipeline_destroy(pipeline);
  sluice_comm_destroy(comm);
  sluice_comm_destroy(parent);
  free(me->x);
  return bad;
}

static void try_victim(int32_t victim) {
  note_t* note = mmap(NULL, sizeof *note, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  assert_true(note != MAP_FAILED);
  int sockets[STAGES][STAGES];
  for (int a = 0; a < STAGES; ++a) {
    for (int b = a + 1; b < STAGES; ++b) {
      int pair[2];
      assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
      sockets[a][b] = pair[0];
      sockets[b][a] = pair[1];
    }
  }
  pid_t pids[STAGES];
  for (int r = 0; r < STAGES; ++r) {
    pids[r] = fork();
    assert_true(pids[r] >= 0);
    if (pids[r] != 0) continue;
    static process_t me;
    me = (process_t){.rank = r, .victim = victim, .note = note};
    for (int a = 0; a < STAGES; ++a) {
      for (int b = 0; b < STAGES; ++b) {
        if (a != b && a != r) close(sockets[a][b]);
      }
    }
    memcpy(me.sockets, sockets[r], sizeof me.sockets);
    _exit(run_process(&me));
  }
  for (int a = 0; a < STAGES; ++a) {
    for (int b = 0; b < STAGES; ++b) {
      if (a != b) close(sockets[a][b]);
    }
  }
  for (int r = 0; r < STAGES; ++r) {
    int status = 0;
    assert_int_equal(waitpid(pids[r], &status, 0), pids[r]);
    if (r == victim) {
      assert_true(WIFSIGNALED(status));
      continue;
    }
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    const uint64_t took_ns = atomic_load(&note->returned_ns[r]) - atomic_load(&note->killed_ns);
    assert_int_equal(note->status[r], SLUICE_E_PEER_LOST);
    assert_int_equal(note->peer[r], victim);
    assert_non_null(strstr(note->message[r], "batch 2"));
    assert_true(took_ns < BOUNDED_NS);
  }
  munmap(note, sizeof *note);
}

static void Stage_IsKilledInABatch_IsNamedOnAll(void** state) {
  (void)state;
  for (int32_t victim = 0; victim < STAGES; ++victim) try_victim(victim);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(Stage_IsKilledInABatch_IsNamedOnAll)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
