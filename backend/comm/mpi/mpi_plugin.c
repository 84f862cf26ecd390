// SPDX-License-Identifier: Apache-2.0
/* Exchanges over MPI messages: every receive is posted before any send, and a wait polls them until its deadline.
 *
 * MPI cannot cancel a matched message, and cannot cancel a send at all: buffers of an exchange that failed should
 * outlive the communicator. MPI also does not report a rank that has left; only an abort is announced to the peers, by
 * an empty message with its own tag. */
#include "backend/comm/mpi/mpi_plugin.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef SLUICE_NO_MPI

sluice_status_t sluice_mpi_plugin_open(int64_t mpi_comm_f, uint64_t max_message_bytes, sluice_mpi_plugin_t* out_plugin,
                                       sluice_host_failure_t* out_failure) {
  (void)mpi_comm_f, (void)max_message_bytes;
  memset(out_plugin, 0, sizeof *out_plugin);
  snprintf(out_failure->message, sizeof out_failure->message,
           "this libsluice_mpi.so was built on a machine without Open MPI; install it (Debian: apt-get install "
           "libopenmpi-dev openmpi-bin) and build again");
  return SLUICE_E_UNSUPPORTED;
}

#else

#include <mpi.h>

#include "backend/comm/mpi/mpi_calls.h"
#include "backend/comm/mpi/mpi_messages.h"
#include "backend/comm/requests.h"

enum { TAG_DATA = 1, TAG_ABORT = 2 };
#define DEFAULT_MESSAGE_BYTES (UINT64_C(1) << 30) /* MPI counts are ints */
#define GRACE_NS              UINT64_C(100000000) /* for messages that the notice of an abort has overtaken */
#define SPIN_NS               UINT64_C(50000)     /* polling without sleep; longer only takes a core from the peers */
#define MAX_NAP_NS            500000

typedef struct message_s {
  int32_t peer;
  int32_t is_recv;
  int32_t bytes;
} message_t;

typedef struct mpi_request_s {
  int is_used;
  int num_messages;
  int num_done;
  int capacity;
  MPI_Request* requests; /* [capacity], MPI_REQUEST_NULL if done */
  message_t* messages;
  int* indices; /* scratch of MPI_Testsome */
  MPI_Status* statuses;
} mpi_request_t;

typedef struct mpi_comm_s {
  MPI_Comm comm;
  int rank;
  int world_size;
  uint64_t max_message_bytes;
  atomic_int is_aborted;
  int aborted_peer; /* a rank that announced its abort, or -1 */
  int is_broken;    /* messages may be in flight: the communicator is not reused */
  mpi_request_t requests[SLUICE_MAX_IN_FLIGHT];
  sluice_mpi_messages_t messages;
} mpi_comm_t;

/* MPI may be initialised and finalised once per process: the last communicator finalises it if the first one
 * initialised it. */
static pthread_mutex_t life_mutex = PTHREAD_MUTEX_INITIALIZER;
static int num_open;
static int is_mpi_ours;

static sluice_status_t fail(sluice_host_failure_t* out_failure, sluice_status_t status, int peer, const char* text) {
  out_failure->peer = peer;
  snprintf(out_failure->message, sizeof out_failure->message, "%s", text);
  return status;
}

/* ---- requests --------------------------------------------------------------------------------------------------- */

static int reserve(mpi_request_t* request, uint64_t num_messages) {
  if (num_messages <= (uint64_t)request->capacity) return 1;
  if (num_messages > 1u << 30) return 0;
  size_t n = (size_t)num_messages + 1; /* so that nothing is allocated with size 0 */
  MPI_Request* requests = malloc(n * sizeof *requests);
  message_t* messages = malloc(n * sizeof *messages);
  int* indices = malloc(n * sizeof *indices);
  MPI_Status* statuses = malloc(n * sizeof *statuses);
  if (requests == NULL || messages == NULL || indices == NULL || statuses == NULL) {
    free(requests);
    free(messages);
    free(indices);
    free(statuses);
    return 0;
  }
  free(request->requests);
  free(request->messages);
  free(request->indices);
  free(request->statuses);
  request->requests = requests;
  request->messages = messages;
  request->indices = indices;
  request->statuses = statuses;
  request->capacity = (int)num_messages;
  return 1;
}

static uint64_t num_pieces(const mpi_comm_t* c, uint64_t bytes) {
  return bytes / c->max_message_bytes + (bytes % c->max_message_bytes != 0);
}

static int post(mpi_comm_t* c, mpi_request_t* request, int peer, int is_recv, const void* buffer, uint64_t bytes) {
  for (uint64_t offset = 0; offset < bytes;) {
    uint64_t left = bytes - offset;
    int count = (int)(left < c->max_message_bytes ? left : c->max_message_bytes);
    char* at = (char*)(uintptr_t)buffer + offset;
    MPI_Request* slot = &request->requests[request->num_messages];
    int code = is_recv ? MPI_Irecv(at, count, MPI_BYTE, peer, TAG_DATA, c->comm, slot)
                       : MPI_Isend(at, count, MPI_BYTE, peer, TAG_DATA, c->comm, slot);
    if (code != MPI_SUCCESS) return code;
    request->messages[request->num_messages++] = (message_t){.peer = peer, .is_recv = is_recv, .bytes = count};
    offset += (uint64_t)count;
  }
  return MPI_SUCCESS;
}

/* Cancels what MPI can cancel, in bounded time. Sends that were not received are left to MPI. */
static void put_away(mpi_comm_t* c, mpi_request_t* request) {
  if (request->num_done < request->num_messages) c->is_broken = 1;
  for (int i = 0; i < request->num_messages; ++i) {
    if (request->requests[i] != MPI_REQUEST_NULL && request->messages[i].is_recv)
      (void)MPI_Cancel(&request->requests[i]);
  }
  uint64_t deadline_ns = sluice_mpi_now_ns() + SLUICE_MPI_CANCEL_NS;
  int is_open = 1;
  while (is_open && sluice_mpi_now_ns() < deadline_ns) {
    is_open = 0;
    for (int i = 0; i < request->num_messages; ++i) {
      int done = 1;
      if (request->requests[i] == MPI_REQUEST_NULL) continue;
      (void)MPI_Test(&request->requests[i], &done, MPI_STATUS_IGNORE);
      if (!done && request->messages[i].is_recv) is_open = 1;
    }
  }
  for (int i = 0; i < request->num_messages; ++i) {
    if (request->requests[i] != MPI_REQUEST_NULL) (void)MPI_Request_free(&request->requests[i]);
  }
  request->is_used = 0;
}

static sluice_status_t exchange_start(void* user, const sluice_exchange_t* exchange, void** out_request,
                                      sluice_host_failure_t* out_failure) {
  mpi_comm_t* c = user;
  mpi_request_t* request = SLUICE_FREE_REQUEST(c->requests);
  if (request == NULL) return fail(out_failure, SLUICE_E_INTERNAL, -1, "two exchanges are in flight already");
  uint64_t num_messages = 0;
  for (int p = 0; p < c->world_size; ++p) {
    if (p == c->rank) continue;
    num_messages += num_pieces(c, exchange->send_bytes[p]) + num_pieces(c, exchange->recv_bytes[p]);
  }
  request->num_messages = 0;
  request->num_done = 0;
  if (!reserve(request, num_messages)) {
    return fail(out_failure, SLUICE_E_NO_MEMORY, -1, "no memory for the list of messages");
  }
  request->is_used = 1;
  for (int is_recv = 1; is_recv >= 0; --is_recv) {
    for (int step = 1; step < c->world_size; ++step) { /* so that not all ranks begin with rank 0 */
      int p = is_recv ? (c->rank - step + c->world_size) % c->world_size : (c->rank + step) % c->world_size;
      int code = is_recv ? post(c, request, p, 1, exchange->recv[p], exchange->recv_bytes[p])
                         : post(c, request, p, 0, exchange->send[p], exchange->send_bytes[p]);
      if (code != MPI_SUCCESS) {
        put_away(c, request);
        c->is_broken = 1;
        return sluice_mpi_fail(out_failure, is_recv ? "MPI_Irecv" : "MPI_Isend", code, p);
      }
    }
  }
  *out_request = request;
  return SLUICE_OK;
}

/* Receives the abort notices of peers. */
static void hear_aborts(mpi_comm_t* c) {
  int is_there = 0;
  MPI_Status status;
  if (c->aborted_peer >= 0) return;
  if (MPI_Iprobe(MPI_ANY_SOURCE, TAG_ABORT, c->comm, &is_there, &status) != MPI_SUCCESS || !is_there) return;
  c->aborted_peer = status.MPI_SOURCE;
  (void)MPI_Recv(NULL, 0, MPI_BYTE, status.MPI_SOURCE, TAG_ABORT, c->comm, MPI_STATUS_IGNORE);
}

/* Checks whether a completed message has the expected size. */
static sluice_status_t check_message(const message_t* m, MPI_Status* status, int code,
                                     sluice_host_failure_t* out_failure) {
  char text[160];
  int class = MPI_SUCCESS;
  int bytes = m->bytes;
  if (code != MPI_SUCCESS) (void)MPI_Error_class(code, &class);
  if (code == MPI_SUCCESS && m->is_recv) (void)MPI_Get_count(status, MPI_BYTE, &bytes);
  if (class == MPI_ERR_TRUNCATE || bytes != m->bytes) {
    snprintf(text, sizeof text,
             "rank %d sent %s than the %d bytes expected from it: the ranks disagree on their counts", m->peer,
             class == MPI_ERR_TRUNCATE ? "more" : "less", m->bytes);
    out_failure->native_code = code;
    return fail(out_failure, SLUICE_E_INTERNAL, m->peer, text);
  }
  return code == MPI_SUCCESS ? SLUICE_OK : sluice_mpi_fail(out_failure, m->is_recv ? "receive" : "send", code, m->peer);
}

static sluice_status_t poll(mpi_request_t* request, sluice_host_failure_t* out_failure) {
  int num_completed = 0;
  if (request->num_done == request->num_messages) return SLUICE_OK;
  int code =
      MPI_Testsome(request->num_messages, request->requests, &num_completed, request->indices, request->statuses);
  if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) return sluice_mpi_fail(out_failure, "MPI_Testsome", code, -1);
  sluice_status_t status = SLUICE_OK;
  for (int i = 0; i < num_completed && num_completed != MPI_UNDEFINED; ++i) {
    /* MPI_ERROR is set only if the call says so. */
    int message_code = code == MPI_ERR_IN_STATUS ? request->statuses[i].MPI_ERROR : MPI_SUCCESS;
    ++request->num_done;
    if (status == SLUICE_OK && message_code != MPI_ERR_PENDING) {
      status = check_message(&request->messages[request->indices[i]], &request->statuses[i], message_code, out_failure);
    }
  }
  return status;
}

static int find_missing(const mpi_request_t* request) {
  int unsent = -1;
  for (int i = 0; i < request->num_messages; ++i) {
    if (request->requests[i] == MPI_REQUEST_NULL) continue;
    if (request->messages[i].is_recv) return request->messages[i].peer;
    if (unsent < 0) unsent = request->messages[i].peer;
  }
  return unsent;
}

static sluice_status_t exchange_wait(void* user, void* native, uint64_t timeout_ns,
                                     sluice_host_failure_t* out_failure) {
  mpi_comm_t* c = user;
  mpi_request_t* request = native;
  uint64_t begin_ns = sluice_mpi_now_ns();
  uint64_t heard_ns = 0;
  long nap_ns = 10000;
  for (;;) {
    sluice_status_t status = poll(request, out_failure);
    if (status == SLUICE_OK && request->num_done == request->num_messages) {
      request->is_used = 0;
      return SLUICE_OK;
    }
    hear_aborts(c);
    /* The notice of an abort may overtake earlier messages of its rank: those count, and get some time to arrive. */
    if (status == SLUICE_OK && c->aborted_peer >= 0 && !atomic_load(&c->is_aborted)) {
      if (heard_ns == 0) heard_ns = sluice_mpi_now_ns();
      if (sluice_mpi_now_ns() - heard_ns < GRACE_NS) continue;
    }
    if (status == SLUICE_OK && atomic_load(&c->is_aborted)) {
      status = fail(out_failure, SLUICE_E_ABORTED, -1, "this communicator was aborted");
    } else if (status == SLUICE_OK && c->aborted_peer >= 0) {
      char text[80];
      snprintf(text, sizeof text, "rank %d aborted; see its log for the reason", c->aborted_peer);
      status = fail(out_failure, SLUICE_E_PEER_LOST, c->aborted_peer, text);
    }
    if (status != SLUICE_OK) {
      put_away(c, request);
      return status;
    }
    uint64_t waited_ns = sluice_mpi_now_ns() - begin_ns;
    if (waited_ns >= timeout_ns) {
      out_failure->peer = find_missing(request);
      return SLUICE_E_TIMED_OUT;
    }
    if (waited_ns < SPIN_NS) continue;
    struct timespec nap = {.tv_sec = 0, .tv_nsec = nap_ns};
    nanosleep(&nap, NULL);
    if (nap_ns < MAX_NAP_NS) nap_ns *= 2;
  }
}

/* The empty messages are eager: they complete without a receiver, and this rank does not wait for them. */
/* NOLINTBEGIN(clang-analyzer-optin.mpi.MPI-Checker): the requests are freed at once. */
static void abort_comm(void* user) {
  mpi_comm_t* c = user;
  if (atomic_exchange(&c->is_aborted, 1)) return;
  for (int p = 0; p < c->world_size; ++p) {
    MPI_Request request;
    if (p == c->rank) continue;
    if (MPI_Isend(NULL, 0, MPI_BYTE, p, TAG_ABORT, c->comm, &request) == MPI_SUCCESS) (void)MPI_Request_free(&request);
  }
}
/* NOLINTEND(clang-analyzer-optin.mpi.MPI-Checker) */

sluice_mpi_messages_t* sluice_mpi_messages_of(void* user, MPI_Comm* out_comm) {
  mpi_comm_t* c = user;
  *out_comm = c->comm;
  return &c->messages;
}

/* ---- life ------------------------------------------------------------------------------------------------------- */

/* MPI_Finalize waits for every rank. If the last communicator is broken, some rank may never come: then mpirun's
 * complaint about a missing finalize is the lesser evil. */
static void close_mpi(int is_broken) {
  pthread_mutex_lock(&life_mutex);
  if (--num_open == 0 && is_mpi_ours && !is_broken) (void)MPI_Finalize();
  pthread_mutex_unlock(&life_mutex);
}

static void destroy(void* user) {
  mpi_comm_t* c = user;
  for (int i = 0; i < SLUICE_MAX_IN_FLIGHT; ++i) {
    if (c->requests[i].is_used) put_away(c, &c->requests[i]);
    free(c->requests[i].requests);
    free(c->requests[i].messages);
    free(c->requests[i].indices);
    free(c->requests[i].statuses);
  }
  hear_aborts(c);
  int is_broken = c->is_broken || atomic_load(&c->is_aborted) || c->aborted_peer >= 0;
  /* The context of a broken communicator is not freed: late messages must not reach a new one. */
  if (!is_broken) (void)MPI_Comm_free(&c->comm);
  const int has_messages = c->messages.comm != MPI_COMM_NULL;
  if (!is_broken && has_messages && !c->messages.is_dirty) (void)MPI_Comm_free(&c->messages.comm);
  free(c);
  close_mpi(is_broken);
}

static sluice_status_t init_mpi(sluice_host_failure_t* out_failure) {
  static const char* const level_text =
      "MPI was initialised without MPI_THREAD_MULTIPLE; call MPI_Init_thread with it, or leave the initialisation to "
      "Sluice";
  int is_initialized = 0;
  int is_finalized = 0;
  int level = MPI_THREAD_SINGLE;
  (void)MPI_Initialized(&is_initialized);
  (void)MPI_Finalized(&is_finalized);
  if (is_finalized) {
    return fail(out_failure, SLUICE_E_STATE, -1,
                "MPI has been finalised, and MPI cannot be initialised twice in a process; keep one communicator alive "
                "until the last has been made");
  }
  if (is_initialized) {
    (void)MPI_Query_thread(&level);
    return level >= MPI_THREAD_MULTIPLE ? SLUICE_OK : fail(out_failure, SLUICE_E_UNSUPPORTED, -1, level_text);
  }
  int code = MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
  if (code != MPI_SUCCESS) return sluice_mpi_fail(out_failure, "MPI_Init_thread", code, -1);
  is_mpi_ours = 1;
  return level >= MPI_THREAD_MULTIPLE
             ? SLUICE_OK
             : fail(out_failure, SLUICE_E_UNSUPPORTED, -1, "this Open MPI was built without MPI_THREAD_MULTIPLE");
}

sluice_status_t sluice_mpi_plugin_open(int64_t mpi_comm_f, uint64_t max_message_bytes, sluice_mpi_plugin_t* out_plugin,
                                       sluice_host_failure_t* out_failure) {
  memset(out_plugin, 0, sizeof *out_plugin);
  pthread_mutex_lock(&life_mutex);
  sluice_status_t status = init_mpi(out_failure);
  if (status == SLUICE_OK) ++num_open;
  pthread_mutex_unlock(&life_mutex);
  if (status != SLUICE_OK) return status;

  mpi_comm_t* c = calloc(1, sizeof *c);
  if (c == NULL) {
    close_mpi(1); /* the other ranks wait in MPI_Comm_dup: no MPI_Finalize either */
    return fail(out_failure, SLUICE_E_NO_MEMORY, -1, "no memory for an MPI communicator");
  }
  MPI_Comm from = mpi_comm_f < 0 ? MPI_COMM_WORLD : MPI_Comm_f2c((MPI_Fint)mpi_comm_f);
  int code = from == MPI_COMM_NULL ? MPI_ERR_COMM : MPI_Comm_dup(from, &c->comm);
  if (code != MPI_SUCCESS) {
    free(c);
    close_mpi(1);
    return sluice_mpi_fail(out_failure, "MPI_Comm_dup", code, -1);
  }
  (void)MPI_Comm_set_errhandler(c->comm, MPI_ERRORS_RETURN);
  (void)MPI_Comm_rank(c->comm, &c->rank);
  (void)MPI_Comm_size(c->comm, &c->world_size);
  c->max_message_bytes =
      max_message_bytes != 0 && max_message_bytes < DEFAULT_MESSAGE_BYTES ? max_message_bytes : DEFAULT_MESSAGE_BYTES;
  c->aborted_peer = -1;
  c->messages.comm = MPI_COMM_NULL;
  out_plugin->vtable = (sluice_host_comm_vtable_t){
      .struct_size = sizeof out_plugin->vtable,
      .exchange_start = exchange_start,
      .exchange_wait = exchange_wait,
      .abort = abort_comm,
      .destroy = destroy,
  };
  out_plugin->messages = sluice_mpi_sized_messages;
  out_plugin->user = c;
  out_plugin->rank = c->rank;
  out_plugin->world_size = c->world_size;
  return SLUICE_OK;
}

#endif /* SLUICE_NO_MPI */

int32_t sluice_mpi_plugin_version(void) { return SLUICE_MPI_PLUGIN_VERSION; }
