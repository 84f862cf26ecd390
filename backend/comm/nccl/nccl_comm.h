// SPDX-License-Identifier: Apache-2.0
/* NCCL as a communicator: an exchange is one group of ncclRecv and ncclSend.
 *
 * There are three kinds of exchange. exchange_enqueue is for payloads: it enqueues an exchange of device buffers on the
 * caller's stream and returns; exchanges between group_begin and group_end are one group. headers_start and
 * exchange_wait are for headers and counts: they use TCP connections, which the first call makes through NCCL, since
 * NCCL runs a group after all groups before it. exchange_start is for all else: buffers in host memory go through
 * pinned and device staging on a stream of the communicator's own, and the wait polls, so that a deadline or an abort
 * can end it. Headers use exchange_start if the ranks cannot make the connections; the log then warns.
 *
 * The NCCL communicator is non-blocking: creation by an id returns at once, and the first exchange waits for the other
 * ranks until the deadline. A split waits itself, so that the host can use its communicator when the split returns. An
 * error, a timeout or an abort calls ncclCommAbort, which also frees the stream from kernels that would wait for ever;
 * then only destroy is allowed, and the same process may make a new communicator. NCCL does not say which rank is at
 * fault: notes in the host's store do, if there is one. Two ranks that disagree on sizes hang until the deadline.
 *
 * Registered buffers: `allocate` returns registered memory of ncclMemAlloc, if NCCL can register (2.23) and
 * SLUICE_NCCL_REGISTER is not 0. NCCL requires that either all ranks' buffers of an exchange are registered or none
 * (mixing is undefined); the caller must agree on that. A registration that fails ends the communicator. */
#pragma once

#include "backend/comm/comm.h"
#include "backend/comm/nccl/nccl_library.h"
#include "backend/device/device.h"

/* Notes that outlive a hang: the host's store (PyTorch's TCPStore). As publish and lookup in comm.h. */
typedef struct sluice_nccl_store_s {
  void* user;
  void (*publish)(void* user, const char* key, const char* value);
  int32_t (*lookup)(void* user, const char* key, char* out, int32_t out_bytes);
} sluice_nccl_store_t;

typedef struct sluice_nccl_options_s {
  const sluice_nccl_symbols_t* symbols; /* copied */
  sluice_device_t* device;              /* a CUDA device; borrowed until the communicator is destroyed */
  sluice_allocator_t* memory;           /* of device memory, for staging; borrowed likewise */
  /* Either an id that one rank made and sent to the others, or the host's communicator to split. */
  const sluice_nccl_id_t* id;
  void* parent; /* ncclComm_t; ranks with equal `color` form a group, the rank in config is the key */
  int32_t color;
  const sluice_nccl_store_t* store; /* or NULL: then no error names a rank; copied */
  /* Creates the communicator for headers (tcp/tcp_side_channel.h); tests pass another one. NULL:
   * sluice_tcp_open_headers. */
  sluice_status_t (*open_headers)(sluice_comm_t* comm, sluice_comm_t** out_tcp);
  void (*released)(void* user); /* called last, when the communicator is destroyed (also if create fails); or NULL */
  void* released_user;
} sluice_nccl_options_t;

/* Collective over the group, or over the host's communicator. Only a split waits for the other ranks. out_comm: new,
 * release with sluice_comm_destroy. Errors: INVALID_ARGUMENT, ABI, NO_MEMORY, EXTERNAL (NCCL's text); for a split
 * TIMED_OUT, PEER_LOST. */
sluice_status_t sluice_nccl_comm_create(const sluice_nccl_options_t* options, const sluice_comm_config_t* config,
                                        sluice_comm_t** out_comm);
