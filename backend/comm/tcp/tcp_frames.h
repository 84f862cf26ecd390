// SPDX-License-Identifier: Apache-2.0
/* Frames on the connections of a TCP communicator: the next bytes to send, what has arrived, which peers are gone.
 * Private to backend/comm/tcp; one thread at a time.
 *
 * A connection carries frames in issue order, in both directions at once: a header, then the payload. Data that arrives
 * before this rank has started its request stays in the socket. Everything is sent as soon as the socket accepts it,
 * without asking whether the peer is ready. */
#pragma once

#include <stdint.h>

#include "backend/comm/comm.h"
#include "backend/comm/requests.h"
#include "backend/comm/tcp/tcp_connection.h"

typedef struct sluice_tcp_frame_s {
  uint32_t kind;
  uint32_t number; /* of the request; for FRAME_LOST the rank */
  uint64_t bytes;  /* of the payload that follows */
} sluice_tcp_frame_t;

/* One request's messages with one peer. */
typedef struct sluice_tcp_transfer_s {
  const char* send;
  char* recv;
  uint64_t send_left; /* of the payload */
  uint64_t recv_left;
  int32_t is_sending; /* there is a message, and the system has not accepted all of it */
  int32_t is_receiving;
} sluice_tcp_transfer_t;

struct sluice_comm_request_s {
  int32_t is_used;
  uint32_t number;
  int64_t pending;                  /* messages not yet sent plus not yet received */
  sluice_tcp_transfer_t* transfers; /* [W] */
};

/* The connection's native_error is EPROTO if the peer sent something other than `expected` bytes of that request. For a
 * live peer it is an error of a send, which the system reports only once. */
typedef struct sluice_tcp_peer_s {
  uint64_t expected;
  sluice_tcp_frame_t out;
  uint32_t out_used; /* bytes of `out` that the system has accepted */
  sluice_tcp_frame_t in;
  uint32_t in_used;
} sluice_tcp_peer_t;

typedef struct sluice_tcp_frames_s {
  int32_t rank, world_size;
  sluice_tcp_connection_t* connections; /* [W] */
  sluice_tcp_peer_t* peers;             /* [W] */
  int32_t lost;     /* the peer whose connection ended first, or that another rank has lost; -1: none */
  int32_t has_told; /* the other ranks were told which one */
  sluice_comm_request_t requests[SLUICE_MAX_IN_FLIGHT];
} sluice_tcp_frames_t;

/* Sends to this peer as much as the system accepts. */
void sluice_tcp_push(sluice_tcp_frames_t* frames, int32_t peer);
/* Sends to all peers, and receives the data that has arrived for requests in flight. */
void sluice_tcp_progress(sluice_tcp_frames_t* frames);

/* Sets the numbers of bytes at which sockets wake a wait, as sluice_tcp_set_low_water. */
int sluice_tcp_set_low_waters(sluice_tcp_frames_t* frames);

/* Tells the other ranks, once, which rank this one has lost. */
void sluice_tcp_tell_of_loss(sluice_tcp_frames_t* frames, int32_t culprit);
/* Tells the peers that nothing is missing. */
void sluice_tcp_leave(sluice_tcp_frames_t* frames);
