// SPDX-License-Identifier: Apache-2.0
/* Communicators behind the public handle: one vtable, several transports.
 *
 * The primitive is one all-to-all-v in two calls, start and wait; at most two requests are in flight on a communicator.
 * Requests are matched by issue order, which is the same on all ranks. The engine agrees on counts before any payload,
 * so implementations may trust that the peers' byte counts fit.
 *
 * Threads: start, wait and all_reduce are called by one thread at a time (comm-exclusive); abort from any thread.
 * After fork the child's handles are inert: the entries below return STATE, abort and destroy do nothing.
 */
#ifndef SLUICE_BACKEND_COMM_COMM_H_
#define SLUICE_BACKEND_COMM_COMM_H_

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

/* The end of a message about a communicator that is at its end. Python says what its users can do instead
 * (python_plugin/sluice/errors.py). */
#define SLUICE_COMM_REMEDY "destroy it and make a new one on all ranks"
#define SLUICE_COMM_BROKEN "This communicator is broken: " SLUICE_COMM_REMEDY "."

typedef struct sluice_comm_vtable_s {
  void (*destroy)(sluice_comm_t* comm); /* first, so that any object can be released */
  /* Posts all receives, then all sends, and returns. exchange's arrays are copied or used before returning; the
   * buffers are borrowed until the wait. */
  sluice_status_t (*exchange_start)(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                    sluice_comm_request_t** out_request);
  /* The same for headers, which lie in host memory on all ranks, where they do not wait for what was enqueued before:
   * on connections of their own. exchange_wait waits for them. NULL: exchange_start. */
  sluice_status_t (*headers_start)(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                   sluice_comm_request_t** out_request);
  /* Waits until `deadline_ns` (sluice_now_ns clock). Consumes the request except on TIMED_OUT, where it lives on;
   * *out_peer (may be NULL) then names a rank whose message is missing, or -1. PEER_LOST and ABORTED are final.
   * TIMED_OUT is returned without a record (it ends a slice of a longer wait); other failures record themselves. */
  sluice_status_t (*exchange_wait)(sluice_comm_t* comm, sluice_comm_request_t* request, uint64_t deadline_ns,
                                   int32_t* out_peer);
  /* Element-wise over all ranks, in place; NULL: built from exchanges. */
  sluice_status_t (*all_reduce_i64)(sluice_comm_t* comm, int64_t* data, int64_t count, int32_t op,
                                    uint64_t deadline_ns);
  void (*abort)(sluice_comm_t* comm);
  /* Leaves / reads a note that outlives a hang; NULL: no store. lookup returns bytes, 0 absent, -1 store gone. */
  void (*publish)(sluice_comm_t* comm, const char* key, const char* value);
  int32_t (*lookup)(sluice_comm_t* comm, const char* key, char* out, int32_t out_bytes);
  /* Not 0 when the host wants waits ended; asked between the slices of a wait. NULL: it never does. */
  int32_t (*is_interrupted)(sluice_comm_t* comm);
  /* Gives up a request whose wait timed out, in bounded time: afterwards the implementation touches its buffers no more
   * where the transport allows that. MPI does not, for a receive that had been matched and for every send: buffers of
   * an exchange that failed over MPI stay the transport's, and outlive the communicator. Releases it, or keeps it until
   * destroy. NULL: kept until destroy. */
  void (*abandon)(sluice_comm_t* comm, sluice_comm_request_t* request);
  /* Enqueues an exchange of device memory on `stream` and returns; stream-complete. NULL: host memory only. Failures
   * end the communicator and record themselves; what the device reports later comes from a later call. */
  sluice_status_t (*exchange_enqueue)(sluice_comm_t* comm, const sluice_exchange_t* exchange, sluice_stream_t stream);
  /* Between the two, exchange_enqueue only takes note of exchanges, all for one stream, and group_end enqueues them as
   * one operation there. `status`: of what the caller did in between; on an error nothing is enqueued. NULL: each
   * exchange goes by itself. Both or none. */
  void (*group_begin)(sluice_comm_t* comm);
  sluice_status_t (*group_end)(sluice_comm_t* comm, sluice_stream_t stream, sluice_status_t status);
  /* What has become of enqueued exchanges, without waiting: after an error the communicator is aborted, and no stream
   * waits for a peer any more. NULL where exchange_enqueue is. */
  sluice_status_t (*poll)(sluice_comm_t* comm);
  /* Device memory that the transport moves best, for what exchange_enqueue sends and receives; *out_data is given back
   * by release. All ranks of an exchange have their buffers there or none has: so the ranks agree before the first
   * allocate (moe/context/registered_buffers.h), none of them having a refusal: why there is no such memory here,
   * borrowed until the communicator goes, or NULL. All three or none. Errors: NO_MEMORY; what fails later ends the
   * communicator.
   */
  const char* (*memory_refusal)(sluice_comm_t* comm);
  sluice_status_t (*allocate)(sluice_comm_t* comm, uint64_t bytes, void** out_data);
  void (*release)(sluice_comm_t* comm, void* data); /* waits until no exchange uses it */
  int32_t is_capturable; /* 1: exchange_enqueue works on a stream that is being captured into a graph */
  /* What carries the messages of an endpoint on this communicator (messages_wire.h); collective over it, which is idle.
   * A rank on which it fails alone says so to nobody: the caller does. *out_wire is set before any other thread can
   * call the endpoint. NULL: there are no messages. */
  sluice_status_t (*messages_open)(sluice_comm_t* comm, struct sluice_messages_s* messages,
                                   struct sluice_wire_s** out_wire);
} sluice_comm_vtable_t;

struct sluice_comm_s {
  const sluice_comm_vtable_t* vtable;
  _Atomic int32_t references;
  const char* name;
  int32_t rank;
  int32_t world_size;
  uint64_t timeout_ns; /* resolved: never 0 */
  uint64_t warn_ns;
  _Atomic int32_t broken;             /* first failure of a collective step, or ABORTED; then only abort and destroy */
  uint64_t call_number;               /* collective calls of the engine on this communicator, for headers and notes */
  uint64_t num_started;               /* exchanges started on this rank: how far it has come, for notes */
  pid_t pid;                          /* of the process that made it */
  pthread_mutex_t messages_mutex;     /* guards the next: an abort comes from any thread */
  struct sluice_messages_s* messages; /* its endpoint (messages.h), or NULL */
};

/* Copies and checks a caller's config. Errors: INVALID_ARGUMENT, ABI. */
sluice_status_t sluice_comm_config_read(const sluice_comm_config_t* config, sluice_comm_config_t* out_config);
/* Fills the common part. config has been validated and copied. */
void sluice_comm_init_base(sluice_comm_t* comm, const sluice_comm_vtable_t* vtable, const char* name,
                           const sluice_comm_config_t* config);
void sluice_comm_retain(sluice_comm_t* comm);
void sluice_comm_release(sluice_comm_t* comm); /* accepts NULL; destroys at zero */
/* INTERNAL: what exchange_start gives where both requests are in flight. */
sluice_status_t sluice_comm_fail_third(const sluice_comm_t* comm);

/* Checked entries, used by the engine: refuse a broken communicator (with the status that broke it), remember the
 * first failure. A step that fails on this rank before its messages were posted aborts the communicator, so that the
 * peers learn at once instead of waiting for messages that never come. */
sluice_status_t sluice_comm_exchange_start(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                           sluice_comm_request_t** out_request);
/* Waits until the communicator's deadline; warns every warn_ns with the rank waited for; at the deadline names the
 * straggler (from the published notes if there are any, else the rank whose message is missing). `phase` says what is
 * waited for ("dispatch of chunk 2 of layer 3, forward"). The request is consumed in every case: on a failure the
 * communicator is broken, and a request that cannot be released safely is leaked to its implementation's destroy.
 * Other requests in flight are still to be waited for; that returns soon. */
sluice_status_t sluice_comm_exchange_wait(sluice_comm_t* comm, sluice_comm_request_t* request, const char* phase);
/* PEER_LOST, which ends the communicator, where `peer` has given up the call that this rank is in: it has waited for it
 * until its deadline and left a note. `more`: "", or how the two ranks' calls differ. OK where it has not, or where
 * there are no notes. */
sluice_status_t sluice_comm_check_given_up(sluice_comm_t* comm, int32_t peer, const char* more);
/* One, to its end. */
sluice_status_t sluice_comm_exchange(sluice_comm_t* comm, const sluice_exchange_t* exchange, const char* phase);
/* One of headers, to its end: of few bytes, in host memory on all ranks. */
sluice_status_t sluice_comm_exchange_headers(sluice_comm_t* comm, const sluice_exchange_t* exchange, const char* phase);
/* An exchange of device memory in the order of a stream; for transports that have it. */
sluice_status_t sluice_comm_exchange_enqueue(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                             sluice_stream_t stream);
/* What is enqueued between the two is one operation of the stream where the transport can; status as in the table. */
void sluice_comm_group_begin(sluice_comm_t* comm);
sluice_status_t sluice_comm_group_end(sluice_comm_t* comm, sluice_stream_t stream, sluice_status_t status);
/* One record of every rank, at `records`: [W] of record_bytes, where the own one is filled in. NO_MEMORY and what
 * exchanges return break the communicator. */
sluice_status_t sluice_comm_all_gather(sluice_comm_t* comm, void* records, uint64_t record_bytes, const char* phase);
/* What all ranks say before they go on together, or when they have: one record each. */
typedef struct sluice_agreement_s {
  const char* what;  /* begins messages: "optimizer" */
  const char* verb;  /* what a rank that refuses has done: "took no step" */
  const char* phase; /* of the exchange */
} sluice_agreement_t;
/* Collective over comm (NULL: one rank). The own record, which begins with a sluice_refusal_t, is filled in but for
 * that, where `mine` and this thread's record go. out_records: of all ranks, sluice_records_free; no data on an error.
 * Errors: `mine`; PEER_REFUSED, which names the first other rank that refuses; what the all-gather returns. */
sluice_status_t sluice_comm_agree(sluice_comm_t* comm, const sluice_agreement_t* agreement, sluice_status_t mine,
                                  void* record, uint64_t record_bytes, sluice_records_t* out_records);
/* The same of records that say nothing else: one outcome for all. */
sluice_status_t sluice_comm_agree_on_status(sluice_comm_t* comm, const sluice_agreement_t* agreement,
                                            sluice_status_t mine);
/* Sums wrap around. Without an all-reduce of the transport's own: one exchange for small data, two (reduce-scatter,
 * then all-gather) for large; no request need be free, but at most one may be in flight. */
sluice_status_t sluice_comm_all_reduce_i64(sluice_comm_t* comm, int64_t* data, int64_t count, int32_t op,
                                           const char* phase);
/* The sum over all ranks of `count` elements at `data`, in place: of f32, bf16 and f16 in f32, of f64 in f64. Ranks are
 * added in rank order and the sum is rounded to dtype once: all ranks get the same bits, and the same ones however the
 * data is cut into calls. One exchange for small data; of large data two for each piece (reduce-scatter, then
 * all-gather), which run while the next piece is summed; no other request is in flight. dtype and count are alike on
 * all ranks. data: host memory. NaN and infinity spread as in any sum. Errors: INVALID_ARGUMENT (another dtype);
 * NO_MEMORY and what exchanges return break the communicator.
 */
sluice_status_t sluice_comm_all_reduce_f32(sluice_comm_t* comm, void* data, int64_t count, int32_t dtype,
                                           const char* phase);
/* The same sum, unrounded, of `count` f32, bf16 or f16 elements at `data`, which stay as they are and go over the link
 * in their own dtype. out_sum: [count], apart from data or ending at the same byte: data may be packed into its end. */
sluice_status_t sluice_comm_sum_f32(sluice_comm_t* comm, const void* data, int64_t count, int32_t dtype, float* out_sum,
                                    const char* phase);

#endif /* SLUICE_BACKEND_COMM_COMM_H_ */
