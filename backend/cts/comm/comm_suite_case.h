// SPDX-License-Identifier: Apache-2.0
/* A case of the suite, the world of ranks that it runs in, and the check that fails it. */
#pragma once

#include <pthread.h>

#include "backend/base/test/last_error.h"
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
/* For transports without messages, instead of those three. */
extern const cts_case_t cts_no_messages_cases[];

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
