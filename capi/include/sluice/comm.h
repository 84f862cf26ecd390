// SPDX-License-Identifier: Apache-2.0
/* Communicators, over which the ranks of one expert-parallel group exchange rows.
 *
 *   local   the ranks are threads of this process: built in, for examples and tests; also on CUDA
 *   host    callbacks into the host's own process group (torch c10d through the adapter)
 *   mpi     Open MPI, in a shared object of its own that is loaded on demand
 *   nccl    NVIDIA NCCL, loaded by name at run time: for contexts on CUDA
 *   tcp     connections of the library's own, set up through any of the others, or through the address of rank 0 and a
 *           shared secret: for host memory
 *
 * Messages between two ranks (pipelines, migrations) use the transport itself over local, mpi and tcp. With host and
 * nccl they use TCP connections that are set up through the communicator; to choose network interfaces, create a tcp
 * communicator.
 *
 * A communicator belongs to one group of ranks. Every rank issues the same calls in the same order. */
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
  uint64_t timeout_ns;             /* a peer that is silent for this long is TIMED_OUT; 0 = 30 minutes */
  uint64_t warn_ns;                /* interval at which a waiting rank logs the ranks that it waits for; 0 = 30 s */
} sluice_comm_config_t;

SLUICE_EXPORT void sluice_comm_config_init(sluice_comm_config_t* out_config, size_t struct_size);

/* ---- local ------------------------------------------------------------------------------------------------------- */

/* Creates the group through which `world_size` threads communicate. out_group: new, sluice_local_group_destroy (the
 * group's communicators keep it alive). Thread-safe. Errors: INVALID_ARGUMENT, NO_MEMORY. */
SLUICE_API sluice_status_t sluice_local_group_create(int32_t world_size, sluice_local_group_t** out_group);
SLUICE_EXPORT void sluice_local_group_destroy(sluice_local_group_t* group);
/* Creates this rank's communicator. The call does not wait for the other ranks. out_comm: new, sluice_comm_destroy.
 * Thread-safe. Errors: INVALID_ARGUMENT (the rank is taken or out of range, or world sizes differ), NO_MEMORY. */
SLUICE_API sluice_status_t sluice_comm_create_local(sluice_local_group_t* group, const sluice_comm_config_t* config,
                                                    sluice_comm_t** out_comm);

/* ---- host -------------------------------------------------------------------------------------------------------- */

/* One all-to-all-v. Entry r of each array describes the message to or from rank r; the entry of the caller's own rank
 * is never read. Zero bytes mean that there is no message. Buffers are borrowed until a wait for the request has
 * succeeded or failed. */
typedef struct sluice_exchange_s {
  const void* const* send;    /* [W] */
  const uint64_t* send_bytes; /* [W] */
  void* const* recv;          /* [W] */
  const uint64_t* recv_bytes; /* [W] */
} sluice_exchange_t;

/* Details that a callback reports together with its status. */
typedef struct sluice_host_failure_s {
  int32_t peer;        /* the rank at fault, -1 unknown */
  int32_t native_code; /* 0 if none */
  char message[512];   /* terminated */
} sluice_host_failure_t;

/* Callbacks into the host's process group. The library calls them from the calling thread and from its communication
 * thread, but never from two threads at once, except for `abort`. They return a sluice_status_t (PEER_LOST, TIMED_OUT,
 * EXTERNAL) and fill `out_failure` when they fail. They must not throw. */
typedef struct sluice_host_comm_vtable_s {
  size_t struct_size; /* the size of this struct as the host was compiled with it */
  /* Posts all receives, then all sends, and returns at once. Two requests may be in flight. */
  sluice_status_t (*exchange_start)(void* user, const sluice_exchange_t* exchange, void** out_request,
                                    sluice_host_failure_t* out_failure);
  /* Waits up to `timeout_ns` for the request. On TIMED_OUT the request stays valid and may be waited for again, and
   * out_failure->peer names a rank whose message is missing. On every other result the request is released. */
  sluice_status_t (*exchange_wait)(void* user, void* request, uint64_t timeout_ns, sluice_host_failure_t* out_failure);
  /* Optional: makes every wait of this rank return soon. The library may call it from any thread, and more than
   * once. */
  void (*abort)(void* user);
  /* Optional: `publish` stores a note under `key` where all ranks can read it. `lookup` reads a note without waiting:
   * it returns the number of bytes written to `out`, 0 if there is no note, and -1 if the store cannot be reached. The
   * library calls both only when a wait lasts unusually long. */
  void (*publish)(void* user, const char* key, const char* value);
  int32_t (*lookup)(void* user, const char* key, char* out, int32_t out_bytes);
  /* Optional: called once when the communicator is destroyed. */
  void (*destroy)(void* user);
  /* Optional: returns non-zero when the host wants to end its waits (Ctrl-C): the wait then returns ABORTED. Waits of
   * this communicator, and of communicators that were created through it, ask a few times a second. */
  int32_t (*is_interrupted)(void* user);
} sluice_host_comm_vtable_t;

/* Creates a communicator from callbacks. vtable is copied; `user` is borrowed until vtable->destroy. out_comm: new,
 * sluice_comm_destroy. Not collective. Thread-safe. Errors: INVALID_ARGUMENT, ABI, NO_MEMORY. If the call fails,
 * vtable->destroy is not called. */
SLUICE_API sluice_status_t sluice_comm_create_host(const sluice_comm_config_t* config,
                                                   const sluice_host_comm_vtable_t* vtable, void* user,
                                                   sluice_comm_t** out_comm);

/* ---- mpi --------------------------------------------------------------------------------------------------------- */

/* Creates a communicator over MPI. It uses a duplicate of the MPI communicator with Fortran handle `mpi_comm_f`
 * (MPI_Comm_c2f), or of MPI_COMM_WORLD when the handle is negative. MPI must be initialised with MPI_THREAD_MULTIPLE or
 * not at all. In the second case the library initialises MPI with this thread level, and finalises it with the last
 * communicator unless that communicator is broken. Rank and world_size of the config are ignored. `library` is the path
 * of libsluice_mpi.so; with NULL the library searches the folder of libsluice, then the loader's path. Collective over
 * the MPI communicator.
 *
 * MPI cannot cancel a receive that has been matched, nor any send. After a call over this communicator has failed
 * (PEER_LOST, TIMED_OUT, ABORTED), MPI may still read the send buffers and write the receive buffers. Keep the buffers
 * of such a call until the process ends, or at least until the communicator is destroyed and every rank has exited.
 * Thread-safe. Errors: NOT_FOUND (names the library and the package to install), UNSUPPORTED (thread level), EXTERNAL
 * (MPI's text). */
SLUICE_API sluice_status_t sluice_comm_create_mpi(const sluice_comm_config_t* config, int64_t mpi_comm_f,
                                                  const char* library, sluice_comm_t** out_comm);

/* ---- nccl -------------------------------------------------------------------------------------------------------- */

enum { SLUICE_NCCL_ID_BYTES = 128 };

/* The group of an NCCL communicator: give either `id` or `parent`. The library can name a lost rank only by notes in a
 * store that all ranks share. */
typedef struct sluice_nccl_group_s {
  size_t struct_size;              /* set by sluice_nccl_group_init */
  const sluice_ext_header_t* next; /* NULL */
  int32_t device_id;               /* device of this rank: one GPU per rank, the GPU of its context */
  int32_t color;                   /* with parent: ranks with the same color form the group */
  const void* id;                  /* SLUICE_NCCL_ID_BYTES that one rank created, the same on all ranks; or NULL */
  void* parent;                    /* the host's ncclComm_t, to be split: all of its ranks take part; or NULL */
  const char* library;             /* path of NCCL, or NULL: an NCCL that is already loaded, else libnccl.so.2 */
  void* store_user;
  /* Give both or neither. As in sluice_host_comm_vtable_t; called from the calling thread and from the thread of an
   * abort. */
  void (*publish)(void* user, const char* key, const char* value);
  int32_t (*lookup)(void* user, const char* key, char* out, int32_t out_bytes);
} sluice_nccl_group_t;

SLUICE_EXPORT SLUICE_EXPERIMENTAL void sluice_nccl_group_init(sluice_nccl_group_t* out_group, size_t struct_size);

/* Creates the id of a new group, on one rank; the host sends it to the other ranks by its own means. library as in
 * sluice_nccl_group_t. out_id: SLUICE_NCCL_ID_BYTES. Thread-safe. Errors: INVALID_ARGUMENT, NOT_FOUND (says what to
 * install: NCCL 2.18 or later), EXTERNAL (NCCL's text). */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_nccl_id_create(const char* library, void* out_id);

/* Creates a communicator over NCCL. Collective over the group, but the call does not wait for the group: the first
 * exchange does. With a parent the call is collective over the parent, and waits for all of its ranks until the
 * timeout; when it returns, the host may use parent again. group is copied; parent belongs to the host and is used only
 * for the split. The communicator has a device and streams of its own. Exchanges run in the order of calls, and the
 * payload of a layer is enqueued. If a peer falls silent during an exchange that was enqueued, only the next call
 * notices it; without a next call nothing does. A host that waits for its stream should therefore run a watchdog that
 * calls sluice_comm_abort.
 *
 * out_comm: new, sluice_comm_destroy. Thread-safe. Errors: INVALID_ARGUMENT, ABI, NO_MEMORY, NOT_FOUND (driver, device,
 * NCCL or kernels: the message says which), EXTERNAL (NCCL's text); with a parent also TIMED_OUT, PEER_LOST. */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_comm_create_nccl(const sluice_comm_config_t* config,
                                                                       const sluice_nccl_group_t* group,
                                                                       sluice_comm_t** out_comm);

/* ---- tcp --------------------------------------------------------------------------------------------------------- */

typedef struct sluice_tcp_config_s {
  size_t struct_size;              /* set by sluice_tcp_config_init */
  const sluice_ext_header_t* next; /* NULL */
  const char* interfaces;          /* names of network interfaces, comma-separated; NULL: all that are up */
  uint64_t connect_timeout_ns;     /* time limit for setting up all connections; 0 = 30 s */
} sluice_tcp_config_t;

SLUICE_EXPORT void sluice_tcp_config_init(sluice_tcp_config_t* out_config, size_t struct_size);

/* Creates a communicator of the same ranks as `parent`, with the parent's deadlines, over one TCP connection between
 * every two ranks. Addresses and the outcome of the setup are exchanged over `parent`, which is retained and otherwise
 * not used, except for its notes when a deadline passes. The calling thread moves the bytes of its own exchanges; there
 * is no additional thread. Ranks of one machine and network namespace connect over loopback, unless interfaces are
 * named: then the ranks listen only on those. Both ends prove knowledge of a secret that only the ranks of the parent
 * have. Connections of other programs cause no delay; if another program answers at a rank's address, the rank's next
 * address is tried. Data are not encrypted.
 *
 * A rank that is killed is PEER_LOST at once, even if a child that it forked is still alive. A rank whose machine does
 * not answer for 12 s (no power, no network) is PEER_LOST to the ranks that wait for it. A rank that computes or is
 * stopped is waited for until the deadline, because its machine answers.
 *
 * config: NULL for the defaults. out_comm: new, sluice_comm_destroy. Collective over `parent`, which must be idle, with
 * equal arguments on all ranks. Comm-exclusive on `parent`. Errors after which the parent stays usable:
 * INVALID_ARGUMENT, ABI, NOT_FOUND (no such interface), EXTERNAL (a rank cannot be reached, with the address; or no
 * descriptors are left), PEER_REFUSED (another rank had one of these). An error of the parent's own exchanges ends the
 * parent; NO_MEMORY may end it. */
SLUICE_API sluice_status_t sluice_comm_create_tcp(sluice_comm_t* parent, const sluice_tcp_config_t* config,
                                                  sluice_comm_t** out_comm);

/* Creates a tcp communicator without a parent. The ranks connect to the address of rank 0, and prove to each other that
 * they have the same secret; no other program takes part. Ranks may be started in any order. Data are not encrypted.
 * Collective over the ranks.
 *
 *   config     rank, world_size and deadlines of the communicator
 *   addresses  "host:port" of rank 0 alone: other ranks listen as with sluice_comm_create_tcp. Or one "host:port" for
 *              each rank, in rank order, separated by commas: each rank listens at its own entry, on its address if
 *              that is a number and on all addresses if it is a name. IPv6 is written "[host]:port"
 *   secret     secret_bytes, at least 16, that nobody can guess, the same on all ranks (openssl rand -hex 16). It is
 *              never sent: a rank proves its knowledge with codes of new random numbers. Copied
 *   tcp        NULL for the defaults. connect_timeout_ns limits the time until all ranks have arrived, and then the
 *              time until all are connected. interfaces may be given only if addresses is that of rank 0 alone
 *   out_comm   new, sluice_comm_destroy
 *   Threads    thread-safe
 *   Errors     INVALID_ARGUMENT, ABI, NO_MEMORY, NOT_FOUND (host or interface), MISMATCH (another secret, world_size
 *              or build; two processes of one rank), TIMED_OUT (a rank has not arrived), EXTERNAL (rank 0 cannot
 *              listen there, or nothing answers; a rank cannot be reached), PEER_REFUSED, PEER_LOST. If one rank does
 *              not match, the call fails on all ranks within connect_timeout_ns plus 1 s, and `peer` of the error is
 *              the rank at fault */
SLUICE_API SLUICE_EXPERIMENTAL sluice_status_t sluice_comm_create_tcp_at(const sluice_comm_config_t* config,
                                                                         const char* addresses, const void* secret,
                                                                         uint64_t secret_bytes,
                                                                         const sluice_tcp_config_t* tcp,
                                                                         sluice_comm_t** out_comm);

/* ---- all --------------------------------------------------------------------------------------------------------- */

/* Return the rank and the world size of the communicator: immutable. NULL: rank -1 of 0. */
SLUICE_EXPORT int32_t sluice_comm_rank(const sluice_comm_t* comm);
SLUICE_EXPORT int32_t sluice_comm_world_size(const sluice_comm_t* comm);
/* Returns "local", "host", "mpi", "nccl" or "tcp": immutable string, "" for NULL. */
SLUICE_EXPORT const char* sluice_comm_name(const sluice_comm_t* comm);
/* Makes every wait on this rank, now and later, fail with ABORTED in bounded time. Thread-safe; may be repeated. */
SLUICE_EXPORT void sluice_comm_abort(sluice_comm_t* comm);
/* Releases the handle. Contexts that use the communicator keep it alive. Not collective. */
SLUICE_EXPORT void sluice_comm_destroy(sluice_comm_t* comm);

#ifdef __cplusplus
}
#endif

#endif /* SLUICE_COMM_H_ */
