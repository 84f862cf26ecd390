// SPDX-License-Identifier: Apache-2.0
/* Communicators as the engine uses them: one vtable, several transports.
 *
 * The primitive is one all-to-all-v in two calls, start and wait; at most two requests are in flight on a communicator.
 * Requests are matched by issue order, which is the same on all ranks. The engine exchanges counts before any payload,
 * so implementations may assume that the byte counts of peers match.
 *
 * Threads: start, wait and all_reduce are called by one thread at a time (comm-exclusive); abort from any thread. After
 * fork the child's handles are inert: the entries below return STATE, abort and destroy do nothing. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "backend/base/alloc.h"
#include "backend/base/status.h"
#include "backend/group/records.h"
#include "sluice/comm.h"

struct sluice_messages_s; /* messages.h */
struct sluice_wire_s;     /* messages_wire.h */

typedef struct sluice_comm_request_s sluice_comm_request_t; /* defined by each implementation */

enum { SLUICE_REDUCE_SUM = 0, SLUICE_REDUCE_MAX = 1 };

/* The end of messages about a broken communicator. Python replaces it by what its users can do
 * (python_plugin/sluice/errors.py). */
#define SLUICE_COMM_REMEDY "destroy it and make a new one on all ranks"
#define SLUICE_COMM_BROKEN "This communicator is broken: " SLUICE_COMM_REMEDY "."

typedef struct sluice_comm_vtable_s {
  void (*destroy)(sluice_comm_t* comm); /* the first member, so that any object can be released */
  /* Posts all receives, then all sends, and returns. The arrays of `exchange` are copied or used before this returns;
   * the buffers are borrowed until the wait. */
  sluice_status_t (*exchange_start)(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                    sluice_comm_request_t** out_request);
  /* The same for headers, which are in host memory on all ranks. They use connections of their own, so that they do not
   * wait for exchanges that were enqueued before. exchange_wait waits for them. NULL: exchange_start is used. */
  sluice_status_t (*headers_start)(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                   sluice_comm_request_t** out_request);
  /* Waits until `deadline_ns` (sluice_now_ns clock). Consumes the request except on TIMED_OUT, after which the request
   * is still valid; *out_peer (may be NULL) then is a rank whose message is missing, or -1. PEER_LOST and ABORTED are
   * final. TIMED_OUT is returned without an error record (it ends a slice of a longer wait); other failures record
   * themselves. */
  sluice_status_t (*exchange_wait)(sluice_comm_t* comm, sluice_comm_request_t* request, uint64_t deadline_ns,
                                   int32_t* out_peer);
  void (*abort)(sluice_comm_t* comm);
  /* Publish and look up a note that outlives a hang; NULL: there is no store. lookup returns bytes, 0 if absent, -1 if
   * the store is gone. */
  void (*publish)(sluice_comm_t* comm, const char* key, const char* value);
  int32_t (*lookup)(sluice_comm_t* comm, const char* key, char* out, int32_t out_bytes);
  /* Not 0 if the host wants waits to end; called between the slices of a wait. NULL: never. */
  int32_t (*is_interrupted)(sluice_comm_t* comm);
  /* Gives up a request whose wait timed out, in bounded time. Afterwards the implementation no longer touches its
   * buffers, if the transport allows that. MPI does not allow it for a matched receive or for any send: buffers of an
   * exchange that failed over MPI remain in use by MPI, and must outlive the communicator. Releases the request, or
   * keeps it until destroy. NULL: kept until destroy. */
  void (*abandon)(sluice_comm_t* comm, sluice_comm_request_t* request);
  /* Enqueues an exchange of device memory on `stream` and returns; stream-complete. NULL: host memory only. Failures
   * end the communicator and record themselves; errors that the device reports later are returned by a later call. */
  sluice_status_t (*exchange_enqueue)(sluice_comm_t* comm, const sluice_exchange_t* exchange, sluice_stream_t stream);
  /* Between these two calls, exchange_enqueue only collects exchanges, all for one stream, and group_end enqueues them
   * as one operation. `status`: the caller's status since group_begin; on an error nothing is enqueued. NULL: each
   * exchange is enqueued by itself. Either both or none are NULL. */
  void (*group_begin)(sluice_comm_t* comm);
  sluice_status_t (*group_end)(sluice_comm_t* comm, sluice_stream_t stream, sluice_status_t status);
  /* Reports errors of enqueued exchanges, without waiting. After an error the communicator is aborted, and no stream
   * waits for a peer any more. NULL: enqueued work never waits for a peer. */
  sluice_status_t (*poll)(sluice_comm_t* comm);
  /* Registered device memory for exchange_enqueue, freed by `release`. Either all ranks of an exchange have their
   * buffers there or none: the ranks agree before the first allocate (moe/context/registered_buffers.h), if no rank has
   * a memory_refusal. memory_refusal returns why there is no such memory, as a string borrowed until the communicator
   * is destroyed, or NULL. All three functions are NULL or none. Errors: NO_MEMORY; later failures end the
   * communicator. */
  const char* (*memory_refusal)(sluice_comm_t* comm);
  sluice_status_t (*allocate)(sluice_comm_t* comm, uint64_t bytes, void** out_data);
  void (*release)(sluice_comm_t* comm, void* data); /* waits until no exchange uses it */
  int32_t is_capturable; /* 1: exchange_enqueue supports a stream that is being captured into a graph */
  /* Opens the wire that carries the messages of an endpoint on this communicator (messages_wire.h). Collective over the
   * communicator, which is idle. If it fails on one rank alone, it does not tell the other ranks: the caller does.
   * *out_wire is set before any other thread can call the endpoint. NULL: messages are not supported. */
  sluice_status_t (*messages_open)(sluice_comm_t* comm, struct sluice_messages_s* messages,
                                   struct sluice_wire_s** out_wire);
} sluice_comm_vtable_t;

struct sluice_comm_s {
  const sluice_comm_vtable_t* vtable;
  _Atomic int32_t references;
  const char* name;
  int32_t rank;
  int32_t world_size;
  uint64_t timeout_ns; /* with the default filled in: never 0 */
  uint64_t warn_ns;
  _Atomic int32_t
      broken; /* the first failure of a collective step, or ABORTED; then only abort and destroy are allowed */
  uint64_t call_number; /* number of collective calls of the engine on this communicator, for headers and notes */
  uint64_t num_started; /* number of exchanges started on this rank, for notes */
  pid_t pid;            /* the process that created it */
  pthread_mutex_t messages_mutex;     /* guards `messages`, because an abort may come from any thread */
  struct sluice_messages_s* messages; /* its endpoint (messages.h), or NULL */
};

/* Copies and checks a caller's config. Errors: INVALID_ARGUMENT, ABI. */
sluice_status_t sluice_comm_config_read(const sluice_comm_config_t* config, sluice_comm_config_t* out_config);
/* Fills the common members. config has been validated and copied. */
void sluice_comm_init_base(sluice_comm_t* comm, const sluice_comm_vtable_t* vtable, const char* name,
                           const sluice_comm_config_t* config);
void sluice_comm_retain(sluice_comm_t* comm);
void sluice_comm_release(sluice_comm_t* comm); /* accepts NULL; destroys at zero references */
/* Keeps the first failure; OK is none. */
void sluice_comm_mark_broken(sluice_comm_t* comm, sluice_status_t status);
/* Returns INTERNAL: exchange_start was called with two requests in flight. */
sluice_status_t sluice_comm_fail_third(const sluice_comm_t* comm);

/* Checked entries for the engine: they refuse a broken communicator (with the status that broke it) and remember the
 * first failure. A step that fails on this rank before its messages were posted aborts the communicator, so that peers
 * fail at once instead of waiting for messages that never come. */
sluice_status_t sluice_comm_exchange_start(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                           sluice_comm_request_t** out_request);
/* Waits until the communicator's deadline; logs a warning every warn_ns that names the awaited rank; at the deadline
 * names the straggler (from the published notes if there are any, else the rank whose message is missing). `phase`
 * describes the exchange ("dispatch of chunk 2 of layer 3, forward"). The request is always consumed: after a failure
 * the communicator is broken, and a request that cannot be released safely is kept until destroy. The caller must still
 * wait for other requests in flight; those waits return soon. */
sluice_status_t sluice_comm_exchange_wait(sluice_comm_t* comm, sluice_comm_request_t* request, const char* phase);
/* Returns PEER_LOST, and ends the communicator, if `peer` has given up this call: it waited for this rank until its
 * deadline and left a note. `more`: "", or how the two ranks' calls differ. Returns OK otherwise, or if there are no
 * notes. */
sluice_status_t sluice_comm_check_given_up(sluice_comm_t* comm, int32_t peer, const char* more);
/* Starts an exchange and waits for it. */
sluice_status_t sluice_comm_exchange(sluice_comm_t* comm, const sluice_exchange_t* exchange, const char* phase);
/* Starts an exchange of headers and waits for it. Headers are small, and in host memory on all ranks. */
sluice_status_t sluice_comm_exchange_headers(sluice_comm_t* comm, const sluice_exchange_t* exchange, const char* phase);
/* Enqueues an exchange of device memory on a stream, for transports that support it. */
sluice_status_t sluice_comm_exchange_enqueue(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                             sluice_stream_t stream);
/* Exchanges enqueued between these two calls are one operation of the stream if the transport supports that; status as
 * in the vtable. */
void sluice_comm_group_begin(sluice_comm_t* comm);
sluice_status_t sluice_comm_group_end(sluice_comm_t* comm, sluice_stream_t stream, sluice_status_t status);
/* `poll` of the vtable. */
static inline sluice_status_t sluice_comm_poll(sluice_comm_t* comm) {
  return comm->vtable->poll == NULL ? SLUICE_OK : comm->vtable->poll(comm);
}
/* Gathers one record of every rank in `records`: [W] of record_bytes, with this rank's record filled in. Errors:
 * NO_MEMORY and errors of exchanges break the communicator. */
sluice_status_t sluice_comm_all_gather(sluice_comm_t* comm, void* records, uint64_t record_bytes, const char* phase);
/* The texts for an agreement: an exchange of one record per rank, before or after a common action. */
typedef struct sluice_agreement_s {
  const char* what;  /* first word of messages: "optimizer" */
  const char* verb;  /* what a refusing rank has done: "took no step" */
  const char* phase; /* of the exchange */
} sluice_agreement_t;
/* Collective over comm (NULL: one rank). record: this rank's record, filled in except for the sluice_refusal_t at its
 * beginning, which receives `mine` and this thread's error record. out_records: of all ranks, release with
 * sluice_records_free; no data after an error. Errors: `mine`; PEER_REFUSED, which names the first other rank that
 * refuses; errors of the all-gather. */
sluice_status_t sluice_comm_agree(sluice_comm_t* comm, const sluice_agreement_t* agreement, sluice_status_t mine,
                                  void* record, uint64_t record_bytes, sluice_records_t* out_records);
/* The same with records that contain only the refusal: one outcome for all ranks. */
sluice_status_t sluice_comm_agree_on_status(sluice_comm_t* comm, const sluice_agreement_t* agreement,
                                            sluice_status_t mine);
/* Element-wise over all ranks, in place; sums wrap around. One exchange for small data, two (reduce-scatter, then
 * all-gather) for large data; at most one other request may be in flight. */
sluice_status_t sluice_comm_all_reduce_i64(sluice_comm_t* comm, int64_t* data, int64_t count, int32_t op,
                                           const char* phase);
/* Sums `count` elements at `data` over all ranks, in place: f32, bf16 and f16 in f32, f64 in f64. Ranks are added in
 * rank order and the sum is rounded to dtype once: all ranks get the same bits, however the data is divided into calls.
 * Small data takes one exchange. Each piece of large data takes two (reduce-scatter, then all-gather), which overlap
 * with the sum of the next piece; no other request is in flight. dtype and count are the same on all ranks. data: host
 * memory. NaN and infinity propagate as in any sum. Errors: INVALID_ARGUMENT (another dtype); NO_MEMORY and errors of
 * exchanges break the communicator. */
sluice_status_t sluice_comm_all_reduce_f32(sluice_comm_t* comm, void* data, int64_t count, int32_t dtype,
                                           const char* phase);
/* The same sum, unrounded, of `count` f32, bf16 or f16 elements at `data`, which are not changed and are sent in their
 * own dtype. out_sum: [count]; it does not overlap data, or data is packed into its end (both end at the same byte). */
sluice_status_t sluice_comm_sum_f32(sluice_comm_t* comm, const void* data, int64_t count, int32_t dtype, float* out_sum,
                                    const char* phase);
