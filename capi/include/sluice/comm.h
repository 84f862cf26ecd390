/* Communicators: how the ranks of one expert-parallel group exchange rows.
 *
 *   local   the ranks are threads of this process: the embedded default, for examples and tests; on CUDA too
 *   host    callbacks into the host's own process group (torch c10d through the adapter)
 *   mpi     Open MPI, in its own shared object loaded on demand
 *   nccl    NVIDIA's, opened by name at run time: for contexts on CUDA
 *   tcp     connections of the library's own, made through any of the others: for host memory
 *
 * Messages between two ranks (pipelines, migrations) go by the transport's own means over local, mpi and tcp. Beside
 * host and nccl they go over TCP connections that are made through it; to choose interfaces, make a tcp communicator.
 *
 * A communicator belongs to one group of ranks; every rank issues the same calls in the same order.
 */
#ifndef SLUICE_COMM_H_
#define SLUICE_COMM_H_

#include "sluice/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sluice_comm_s sluice_comm_t;
typedef struct sluice_local_group_s sluice_local_group_t;

typedef struct sluice_comm_config_s {
  size_t struct_size;              /* set by sluice_comm_config_init */
  const sluice_ext_header_t* next; /* NULL */
  int32_t rank;                    /* [0, world_size) */
  int32_t world_size;              /* >= 1 */
  uint64_t timeout_ns;             /* a silent peer becomes TIMED_OUT after this; 0 = 30 minutes */
  uint64_t warn_ns;                /* a waiting rank logs whom it waits for this often; 0 = 30 s */
} sluice_comm_config_t;

SLUICE_EXPORT void sluice_comm_config_init(sluice_comm_config_t* out_config, size_t struct_size);

/* ---- local ---------------------------------------------------------------------------------------------------- */

/* Makes the meeting place of `world_size` threads. out_group: new, sluice_local_group_destroy (its communicators keep
 * it alive). Thread-safe. Errors: INVALID_ARGUMENT, NO_MEMORY. */
SLUICE_API sluice_status_t sluice_local_group_create(int32_t world_size, sluice_local_group_t** out_group);
SLUICE_EXPORT void sluice_local_group_destroy(sluice_local_group_t* group);
/* Makes this rank's end. Does not wait for the others. out_comm: new, sluice_comm_destroy. Thread-safe.
 * Errors: INVALID_ARGUMENT (rank taken or out of range, world sizes differ), NO_MEMORY. */
SLUICE_API sluice_status_t sluice_comm_create_local(sluice_local_group_t* group, const sluice_comm_config_t* config,
                                                    sluice_comm_t** out_comm);

/* ---- host ----------------------------------------------------------------------------------------------------- */

/* One all-to-all-v: entry r of each array is about rank r; the entry of the caller's own rank is never read.
 * Zero bytes: no message. Buffers are borrowed until the request has been waited for. */
typedef struct sluice_exchange_s {
  const void* const* send;    /* [W] */
  const uint64_t* send_bytes; /* [W] */
  void* const* recv;          /* [W] */
  const uint64_t* recv_bytes; /* [W] */
} sluice_exchange_t;

/* What a callback reports beside its status. */
typedef struct sluice_host_failure_s {
  int32_t peer;        /* the rank at fault, -1 unknown */
  int32_t native_code; /* 0 if none */
  char message[512];   /* terminated */
} sluice_host_failure_t;

/* Callbacks into the host's process group. They are called from the calling thread and from the library's
 * communication thread, never from two threads at once except `abort`. They return a sluice_status_t (PEER_LOST,
 * TIMED_OUT, EXTERNAL) and fill `out_failure` when they fail; nothing may be thrown through them. */
typedef struct sluice_host_comm_vtable_s {
  size_t struct_size; /* sizeof this struct as the host knows it */
  /* Posts all receives, then all sends, and returns at once. Two requests may be in flight. */
  sluice_status_t (*exchange_start)(void* user, const sluice_exchange_t* exchange, void** out_request,
                                    sluice_host_failure_t* out_failure);
  /* Waits up to `timeout_ns` for the request. On TIMED_OUT the request lives on and may be waited for again, and
   * out_failure->peer names a rank whose message is missing. On every other result the request is released. */
  sluice_status_t (*exchange_wait)(void* user, void* request, uint64_t timeout_ns, sluice_host_failure_t* out_failure);
  /* Optional: makes every wait of this rank return soon. May be called from any thread, more than once. */
  void (*abort)(void* user);
  /* Optional: leaves a note under `key` where all ranks can read it, and reads one without waiting (returns the bytes
   * written to `out`, 0 if absent, -1 if the store is gone). Only called when a wait lasts unusually long. */
  void (*publish)(void* user, const char* key, const char* value);
  int32_t (*lookup)(void* user, const char* key, char* out, int32_t out_bytes);
  /* Optional: called once when the communicator is destroyed. */
  void (*destroy)(void* user);
  /* Optional: not 0 when the host wants its waits ended (Ctrl-C): the wait returns ABORTED. Asked a few times a second
   * by waits of this communicator and of those made through it. */
  int32_t (*is_interrupted)(void* user);
} sluice_host_comm_vtable_t;

/* vtable is copied; `user` is borrowed until vtable->destroy. out_comm: new, sluice_comm_destroy. Not collective.
 * Thread-safe. Errors: INVALID_ARGUMENT, ABI, NO_MEMORY. On failure vtable->destroy is not called. */
SLUICE_API sluice_status_t sluice_comm_create_host(const sluice_comm_config_t* config,
                                                   const sluice_host_comm_vtable_t* vtable, void* user,
                                                   sluice_comm_t** out_comm);

/* ---- mpi ------------------------------------------------------------------------------------------------------ */

/* Uses a duplicate of the MPI communicator with Fortran handle `mpi_comm_f` (MPI_Comm_c2f), or of MPI_COMM_WORLD when
 * it is negative; MPI must be initialised with MPI_THREAD_MULTIPLE, or not at all (then it is initialised so, and
 * finalised with the last communicator, unless that one is broken). Rank and world_size of the config are ignored.
 * `library` is the path of libsluice_mpi.so, or NULL: beside libsluice, then the loader's search. Collective over that
 * communicator.
 * MPI cannot take back a receive that has been matched, nor any send: after a call over it has failed (PEER_LOST,
 * TIMED_OUT, ABORTED) it may still read what was sent and write into what was to be received. Keep the buffers of such
 * a call until the process ends, or at least until the communicator is destroyed and every rank has gone. Thread-safe.
 * Errors: NOT_FOUND (names the library and what to install), UNSUPPORTED (thread level), EXTERNAL (MPI's text). */
SLUICE_API sluice_status_t sluice_comm_create_mpi(const sluice_comm_config_t* config, int64_t mpi_comm_f,
                                                  const char* library, sluice_comm_t** out_comm);

/* ---- nccl ----------------------------------------------------------------------------------------------------- */

enum { SLUICE_NCCL_ID_BYTES = 128 };

/* Either `id` or `parent`. A rank that is gone can be named only through notes in a store that all ranks share. */
typedef struct sluice_nccl_group_s {
  size_t struct_size;              /* set by sluice_nccl_group_init */
  const sluice_ext_header_t* next; /* NULL */
  int32_t device_id;               /* of this rank: one GPU per rank, that of its context */
  int32_t color;                   /* with parent: ranks of equal colour form the group */
  const void* id;                  /* SLUICE_NCCL_ID_BYTES that one rank made, the same on all ranks; or NULL */
  void* parent;                    /* the host's ncclComm_t, to be split: every rank of it takes part; or NULL */
  const char* library;             /* path of NCCL, or NULL: one that is loaded already, else libnccl.so.2 */
  void* store_user;
  /* Both or neither; as in sluice_host_comm_vtable_t, called from the calling thread and from abort's. */
  void (*publish)(void* user, const char* key, const char* value);
  int32_t (*lookup)(void* user, const char* key, char* out, int32_t out_bytes);
} sluice_nccl_group_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_nccl_group_init(sluice_nccl_group_t* out_group, size_t struct_size);

/* Makes the id of a new group: on one rank, which carries it to the others by its own means. library as in
 * sluice_nccl_group_t. out_id: SLUICE_NCCL_ID_BYTES. Thread-safe. Errors: INVALID_ARGUMENT, NOT_FOUND (says what to
 * install: NCCL 2.18 or later), EXTERNAL (NCCL's text). */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_nccl_id_create(const char* library, void* out_id);

/* Collective over the group, but does not wait for it: the first exchange does. With a parent it is collective over
 * that, and waits for all of its ranks until the timeout: when it returns, parent takes the host's calls again. group
 * is copied; parent is the host's and used for the split alone. The communicator has a device and streams of its own,
 * exchanges run in the order of calls, and a layer's payload is enqueued. A peer that is silent in an exchange that was
 * enqueued is noticed by the next call, or by nobody: a host that waits for its stream keeps a watchdog that calls
 * sluice_comm_abort.
 * out_comm: new, sluice_comm_destroy. Thread-safe. Errors: INVALID_ARGUMENT, ABI, NO_MEMORY, NOT_FOUND (driver, device,
 * NCCL or kernels: says which), EXTERNAL (NCCL's text); with a parent TIMED_OUT, PEER_LOST. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_comm_create_nccl(const sluice_comm_config_t* config,
                                                                       const sluice_nccl_group_t* group,
                                                                       sluice_comm_t** out_comm);

/* ---- tcp ------------------------------------------------------------------------------------------------------ */

typedef struct sluice_tcp_config_s {
  size_t struct_size;              /* set by sluice_tcp_config_init */
  const sluice_ext_header_t* next; /* NULL */
  const char* interfaces;          /* names of network interfaces, comma-separated; NULL: all that are up */
  uint64_t connect_timeout_ns;     /* until all connections stand; 0 = 30 s */
} sluice_tcp_config_t;

SLUICE_EXPORT void sluice_tcp_config_init(sluice_tcp_config_t* out_config, size_t struct_size);

/* A communicator of the same ranks as `parent`, with its deadlines, over one TCP connection between every two of them.
 * Addresses and the outcome go through `parent`, which is retained and otherwise left alone (its notes are used at a
 * deadline). The calling thread moves the bytes of its own exchanges, without a thread beside it. Ranks of one machine
 * and network namespace connect over loopback, unless interfaces are named: then those alone are listened on. Both ends
 * prove that they know a secret that the parent's ranks alone have. Strangers delay nobody; where one answers at a
 * rank's address, its next address is tried. What is sent is not encrypted.
 * A rank that is killed is PEER_LOST at once, also where a child that it forked lives on. One whose machine answers
 * nothing for 12 s (no power, no network) is PEER_LOST to ranks that wait. A rank that computes, or is stopped, is
 * waited for until the deadline: its machine answers.
 * config: NULL for the defaults. out_comm: new, sluice_comm_destroy. Collective over `parent`, which must be idle, and
 * alike on all ranks. Comm-exclusive on `parent`. Errors, the parent stays usable: INVALID_ARGUMENT, ABI, NOT_FOUND (no
 * such interface), EXTERNAL (a rank cannot be reached: says where; no descriptors left), PEER_REFUSED (another rank had
 * one of these). What the parent's exchanges return ends the parent, NO_MEMORY may. */
SLUICE_API sluice_status_t sluice_comm_create_tcp(sluice_comm_t* parent, const sluice_tcp_config_t* config,
                                                  sluice_comm_t** out_comm);

/* ---- all ------------------------------------------------------------------------------------------------------ */

/* What it was made with: immutable. NULL: rank -1 of 0. */
SLUICE_EXPORT int32_t sluice_comm_rank(const sluice_comm_t* comm);
SLUICE_EXPORT int32_t sluice_comm_world_size(const sluice_comm_t* comm);
/* "local", "host", "mpi", "nccl", "tcp": immutable string, "" for NULL. */
SLUICE_EXPORT const char* sluice_comm_name(const sluice_comm_t* comm);
/* Makes every present and later wait on this rank fail with ABORTED, in bounded time. Thread-safe, repeatable. */
SLUICE_EXPORT void sluice_comm_abort(sluice_comm_t* comm);
/* Releases the handle; contexts made from it keep the communicator alive. Not collective. */
SLUICE_EXPORT void sluice_comm_destroy(sluice_comm_t* comm);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_COMM_H_ */
