/* Shared by the files of the suite: ranks and the exchanges that they check. */
#ifndef SLUICE_BACKEND_CTS_COMM_COMM_SUITE_PARTS_H_
#define SLUICE_BACKEND_CTS_COMM_COMM_SUITE_PARTS_H_

#include <pthread.h>

#include "backend/cts/comm/comm_suite.h"

#define MS             UINT64_C(1000000)
#define PATIENT_NS     (20000 * MS) /* deadline where nothing should time out */
#define SHORT_NS       (1000 * MS)  /* deadline of waits that are to see it pass */
#define BOUNDED_NS     (15000 * MS) /* "in bounded time", on a busy machine, and not at PATIENT_NS */
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
  int32_t num_warnings; /* guarded by mutex, like their texts one after the other */
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
  int32_t min_world_size; /* 0: in a world of its own, once */
  int32_t expects_warnings;
  uint64_t warn_ns;
};

/* Tables of cases; each ends with a NULL name. */
extern const cts_case_t cts_data_cases[], cts_waits_cases[], cts_losses_cases[], cts_resources_cases[];

void cts_fail_check(cts_rank_t* me, const char* file, int line, const char* text);

/* cmocka's assertions jump, which only its own thread may do. */
#define CHECK(me, condition)                                \
  do {                                                      \
    if (!(condition)) {                                     \
      cts_fail_check((me), __FILE__, __LINE__, #condition); \
      return;                                               \
    }                                                       \
  } while (0)

/* ---- ranks ---- */

/* The peer that this thread's last error names. */
int32_t cts_last_peer(void);
void cts_sleep_ns(uint64_t ns);
/* All ranks meet, outside the communicator under test. A rank that never comes fails the others. */
int cts_meet(cts_rank_t* me);
sluice_status_t cts_create_end(cts_world_t* world, void* shared, int32_t rank, int32_t world_size, uint64_t timeout_ns,
                               sluice_comm_t** out_comm);
/* The last rank is the one that misbehaves. */
int cts_is_culprit(const cts_rank_t* me);
/* Why this transport cannot pass a case, NULL where it must. */
const cts_exception_t* cts_exception_of(const cts_transport_t* transport, const cts_case_t* c);
/* From here on deadlines are short, on all ranks: the last line before the wait that is to see its deadline pass. What
 * comes before has all the time that a busy machine takes for it. */
int cts_hurry(cts_rank_t* me, uint64_t timeout_ns);
/* Every call gives `status` by now; abort, twice, and destroy are quick. */
void cts_check_broken_and_destroy(cts_rank_t* me, sluice_status_t status);
/* A new group of the same ranks, after the old one failed. */
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
/* Beyond what a transport sends eagerly, yet filled in no time beside SHORT_NS. */
uint64_t cts_medium_size(int32_t source, int32_t target, int32_t index);
uint64_t cts_small_size(int32_t source, int32_t target, int32_t index);

/* Starts exchange `index`. The entry of the own rank must not be read: it holds nonsense. */
sluice_status_t cts_start(cts_rank_t* me, sluice_comm_t* comm, int32_t index, cts_size_fn_t size, cts_exchange_t* e);
void cts_release(cts_exchange_t* e);
/* Waits, checks, releases. On a failure of the wait the status is returned. */
sluice_status_t cts_finish(cts_rank_t* me, sluice_comm_t* comm, cts_exchange_t* e);
sluice_status_t cts_run_exchange(cts_rank_t* me, sluice_comm_t* comm, int32_t index, cts_size_fn_t size);

#endif /* SLUICE_BACKEND_CTS_COMM_COMM_SUITE_PARTS_H_ */
