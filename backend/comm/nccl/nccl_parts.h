/* What the files of the NCCL communicator share.
 *
 * nccl_comm.c      making and ending it, errors, exchanges in the order of a stream
 * nccl_split.c     making it from the host's own
 * nccl_host.c      the host's way: exchanges of host memory through staging, with a wait
 * nccl_register.c  registered buffers: the blocks of a communicator
 * nccl_memory.c    one such block
 * nccl_library.c   the library and its version */
#ifndef SLUICE_BACKEND_COMM_NCCL_NCCL_PARTS_H_
#define SLUICE_BACKEND_COMM_NCCL_NCCL_PARTS_H_

#include <pthread.h>
#include <stdatomic.h>

#include "backend/comm/nccl/nccl_comm.h"
#include "backend/comm/nccl/nccl_memory.h"
#include "backend/comm/requests.h"
#include "backend/device/cuda/cuda_device.h"

/* Where a request's host buffers pass through: the same layout in pinned and in device memory. */
typedef struct staging_s {
  char* pinned;
  char* on_device;
  uint64_t bytes;
} staging_t;

struct sluice_comm_request_s {
  int32_t is_used;
  void* done; /* event */
  staging_t staging;
  void** host_recv; /* [W] where received bytes go in the wait, NULL: nothing to do */
  uint64_t* recv_bytes;
  uint64_t* recv_at; /* in the staging */
};

typedef struct sluice_nccl_comm_s {
  sluice_comm_t base;
  sluice_nccl_symbols_t nccl;
  sluice_device_t* device;
  const sluice_cuda_driver_t* driver;
  sluice_allocator_t* memory;
  pthread_mutex_t mutex; /* around every use of `comm`: abort comes from any thread */
  void* comm;            /* NULL after ncclCommAbort */
  int32_t is_ready;
  int32_t has_note;
  _Atomic int32_t is_aborted; /* by this rank's abort() */
  void* stream;
  sluice_nccl_store_t store;
  void (*released)(void* user);
  void* released_user;
  uint64_t arrays_bytes;
  char refusal_text[160];
  sluice_nccl_block_t* blocks;
  sluice_comm_request_t requests[SLUICE_MAX_IN_FLIGHT];
} nccl_comm_t;

static inline nccl_comm_t* sluice_nccl_downcast(sluice_comm_t* comm) { return (nccl_comm_t*)comm; }

/* nccl_comm.c */
/* Ends NCCL's communicator, which frees streams of kernels that wait for ever. May be repeated. */
void sluice_nccl_abort_group(nccl_comm_t* comm);
/* Records NCCL's error, with the rank that is at fault where notes say so, and aborts. */
sluice_status_t sluice_nccl_fail(nccl_comm_t* comm, int code, const char* what);
sluice_status_t sluice_nccl_fail_aborted(nccl_comm_t* comm);
/* The state of the communicator: 0, IN_PROGRESS, or an error. */
int sluice_nccl_state(nccl_comm_t* comm);
void sluice_nccl_nap(void);
uint64_t sluice_nccl_deadline_of(const nccl_comm_t* comm);
/* Until NCCL has done in the background what it was asked: start, connect, launch. */
sluice_status_t sluice_nccl_settle(nccl_comm_t* comm, const char* what, uint64_t deadline_ns);
/* Until the group has started. The device is entered. */
sluice_status_t sluice_nccl_make_ready(nccl_comm_t* comm, uint64_t deadline_ns);
/* One exchange of device memory on a stream. The device is entered. */
sluice_status_t sluice_nccl_run_group(nccl_comm_t* comm, const sluice_exchange_t* e, void* stream);
/* Leaves the device; the first error wins. */
sluice_status_t sluice_nccl_leave_with(nccl_comm_t* comm, sluice_status_t status);
void sluice_nccl_mark_broken(sluice_comm_t* comm, sluice_status_t status);

/* nccl_split.c */
/* comm->comm from the host's communicator; waits until that one is through with it, or until the deadline. */
sluice_status_t sluice_nccl_split(nccl_comm_t* comm, void* parent, int32_t color, sluice_nccl_config_t* config);

/* nccl_host.c */
sluice_status_t sluice_nccl_exchange_start(sluice_comm_t* base, const sluice_exchange_t* exchange,
                                           sluice_comm_request_t** out_request);
sluice_status_t sluice_nccl_exchange_wait(sluice_comm_t* base, sluice_comm_request_t* request, uint64_t deadline_ns,
                                          int32_t* out_peer);
void sluice_nccl_abandon(sluice_comm_t* base, sluice_comm_request_t* request);

/* nccl_register.c */
const char* sluice_nccl_refusal_of_memory(sluice_comm_t* base);
sluice_status_t sluice_nccl_allocate(sluice_comm_t* base, uint64_t bytes, void** out_data);
void sluice_nccl_release(sluice_comm_t* base, void* data);

#endif /* SLUICE_BACKEND_COMM_NCCL_NCCL_PARTS_H_ */
