// SPDX-License-Identifier: Apache-2.0
/* A case of the suite, the world of ranks that it runs in, the check that fails it, and exchanges and messages whose
 * data identifies its origin. */
#pragma once

#include <pthread.h>

#include "backend/base/test/last_error.h"
#include "backend/comm/messages.h"
#include "backend/cts/comm/comm_suite.h"

#define MS             UINT64_C(1000000)
#define PATIENT_NS     (20000 * MS) /* deadline for calls that should not time out */
#define SHORT_NS       (1000 * MS)  /* deadline of waits that must time out */
#define BOUNDED_NS     (15000 * MS) /* "in bounded time" on a busy machine, well below PATIENT_NS */
#define MAX_WORLD_SIZE 8

typedef struct cts_case_s cts_case_t;

typedef struct cts_world_s {
  const cts_transport_t* transport;
  const cts_case_t* c;
  int32_t world_size;
  int32_t num_here; /* ranks in this process */
  void* shared;
  pthread_mutex_t mutex;
  pthread_cond_t met;
  int32_t num_waiting;
  uint64_t round;
  int32_t num_warnings; /* guarded by mutex, like their concatenated texts */
  char warnings[4096];
} cts_world_t;

typedef struct cts_rank_s {
  cts_world_t* world;
  sluice_comm_t* comm; /* of this case; the case may destroy it and set NULL */
  int32_t rank;
  char failure[512]; /* first failed check; empty: none */
} cts_rank_t;

struct cts_case_s {
  const char* name;
  void (*run)(cts_rank_t* me);
  int32_t min_world_size; /* 0: only in the program with one rank */
  int32_t expects_warnings;
  uint64_t warn_ns;
};

/* Tables of cases; each ends with a NULL name. */
extern const cts_case_t cts_data_cases[], cts_waits_cases[], cts_losses_cases[], cts_resources_cases[];
extern const cts_case_t cts_reduce_cases[];
extern const cts_case_t cts_messages_data_cases[], cts_messages_requests_cases[], cts_messages_losses_cases[];

/* The reason why this transport cannot pass a case, NULL if it must. */
const cts_exception_t* cts_exception_of(const cts_transport_t* transport, const cts_case_t* c);

/* The peer that this thread's last error names. */
int32_t cts_last_peer(void);
void cts_fail_check(cts_rank_t* me, const char* file, int line, const char* text);

/* cmocka's assertions jump, which only its own thread may do. */
#define CTS_TRY(me, condition)                              \
  do {                                                      \
    if (!(condition)) {                                     \
      cts_fail_check((me), __FILE__, __LINE__, #condition); \
      return;                                               \
    }                                                       \
  } while (0)

/* ---- ranks: barriers, short deadlines, a new group after a failure ---- */

void cts_sleep_ns(uint64_t ns);
/* A barrier of all ranks that does not use the communicator under test. Returns 0 if a rank does not arrive. */
int cts_meet(cts_rank_t* me);
sluice_status_t cts_create_end(cts_world_t* world, void* shared, int32_t rank, int32_t world_size, uint64_t timeout_ns,
                               sluice_comm_t** out_comm);
/* Whether this is the last rank, which misbehaves. */
int cts_is_culprit(const cts_rank_t* me);
/* Sets a short deadline on all ranks. Call it just before the wait that must time out, so that earlier calls have all
 * the time that a busy machine needs. */
int cts_hurry(cts_rank_t* me, uint64_t timeout_ns);
/* Checks that every call returns `status`, and that two aborts and destroy are quick. */
void cts_check_broken_and_destroy(cts_rank_t* me, sluice_status_t status);
/* Makes and checks a new group of the same ranks after the old one has failed. */
void cts_renew(cts_rank_t* me);

/* ---- exchanges ---- */

typedef uint64_t (*cts_size_fn_t)(int32_t source, int32_t target, int32_t index);

typedef struct cts_exchange_pair_s {
  sluice_comm_request_t* request;
  int32_t index;
  cts_size_fn_t size;
  const void* send[MAX_WORLD_SIZE];
  void* recv[MAX_WORLD_SIZE];
  uint64_t send_bytes[MAX_WORLD_SIZE];
  uint64_t recv_bytes[MAX_WORLD_SIZE];
} cts_exchange_t;

uint64_t cts_uneven_size(int32_t source, int32_t target, int32_t index);
uint64_t cts_one_sided_size(int32_t source, int32_t target, int32_t index);
uint64_t cts_zero_size(int32_t source, int32_t target, int32_t index);
uint64_t cts_large_size(int32_t source, int32_t target, int32_t index);
/* More than a transport sends eagerly, yet filled in much less than SHORT_NS. */
uint64_t cts_medium_size(int32_t source, int32_t target, int32_t index);
uint64_t cts_small_size(int32_t source, int32_t target, int32_t index);

/* Starts exchange `index`. The entry of the own rank must not be read: it is invalid. */
sluice_status_t cts_start(cts_rank_t* me, sluice_comm_t* comm, int32_t index, cts_size_fn_t size, cts_exchange_t* e);
void cts_release(cts_exchange_t* e);
/* Waits, checks, releases. If the wait fails, returns its status. */
sluice_status_t cts_finish(cts_rank_t* me, sluice_comm_t* comm, cts_exchange_t* e);
sluice_status_t cts_run_exchange(cts_rank_t* me, sluice_comm_t* comm, int32_t index, cts_size_fn_t size);

/* ---- messages ---- */

static inline int32_t cts_next_rank(const cts_rank_t* me) { return (me->rank + 1) % me->world->world_size; }
static inline int32_t cts_previous_rank(const cts_rank_t* me) {
  return (me->rank + me->world->world_size - 1) % me->world->world_size;
}

/* More than the socket buffers of both sides hold. */
#define CTS_LARGE_BYTES (UINT64_C(16) << 20)

/* The byte at `index` of a message from `from` with this tag. The pattern repeats, so that a sanitizer need not check
 * each byte. */
unsigned char cts_pattern(int32_t from, uint64_t tag, uint64_t index);
/* New memory of the test; release with free(). */
unsigned char* cts_make_payload(int32_t from, uint64_t tag, uint64_t bytes);
/* 1: a received message of this size, with the pattern of its peer and tag; the head is its first bytes. */
int cts_is_intact(const sluice_message_completion_t* c, uint64_t head_bytes, uint64_t bytes);

/* Sends `bytes` of payload in one span, without a head. */
sluice_status_t cts_send(sluice_messages_t* m, int32_t peer, uint64_t tag, const void* payload, uint64_t bytes,
                         uint64_t user);
/* Waits for the only outstanding completion: 1 if it is of this kind and user. */
int cts_await(sluice_messages_t* m, int32_t kind, uint64_t user, sluice_message_completion_t* out_completion);
