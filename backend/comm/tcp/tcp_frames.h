// SPDX-License-Identifier: Apache-2.0
/* Frames on the connections of a TCP communicator: whose bytes are next, what has arrived, who is gone. Private to
 * backend/comm/tcp; one thread at a time.
 *
 * A connection carries frames in issue order, in both directions at once: a header, then the payload. What arrives
 * before this rank has started its request stays in the socket. Everything is sent as soon as the socket takes it,
 * without asking whether the peer is ready.
 *
 * Of a large message a wait is woken once for WAKE_BYTES, and for the rest, not for every packet: over a link of
 * 0.4 Gbit/s, whose packets arrive one by one, their interrupts and wake-ups took a twentieth of the core from
 * GEMMs. */
#ifndef SLUICE_BACKEND_COMM_TCP_TCP_FRAMES_H_
#define SLUICE_BACKEND_COMM_TCP_TCP_FRAMES_H_

#include <stdint.h>

#include "backend/comm/comm.h"
#include "backend/comm/requests.h"
#include "backend/comm/tcp/tcp_keepalive.h"

typedef struct sluice_tcp_frame_s {
  uint32_t kind;
  uint32_t number; /* of the request; of FRAME_LOST the rank */
  uint64_t bytes;  /* of the payload that follows */
} sluice_tcp_frame_t;

/* One request's messages with one peer. */
typedef struct sluice_tcp_transfer_s {
  const char* send;
  char* recv;
  uint64_t send_left; /* of the payload */
  uint64_t recv_left;
  int32_t is_sending; /* there is a message, and not all of it is with the system */
  int32_t is_receiving;
} sluice_tcp_transfer_t;

struct sluice_comm_request_s {
  int32_t is_used;
  uint32_t number;
  int64_t pending;                  /* messages not yet sent plus not yet received */
  sluice_tcp_transfer_t* transfers; /* [W] */
};

enum { SLUICE_TCP_LIVE = 0, SLUICE_TCP_LEFT, SLUICE_TCP_LOST };

typedef struct sluice_tcp_peer_s {
  int32_t state;
  /* Of a lost one; EPROTO: it sent something else than `expected` bytes of that request. Of a live one: what a send
   * was told, which the system says once. */
  int32_t native_error;
  uint64_t expected;
  int32_t can_read; /* not known to be empty; edges of epoll set it */
  int32_t can_write;
  int32_t low_water; /* bytes that have to be there before the socket wakes a wait */
  sluice_tcp_frame_t out;
  uint32_t out_used; /* bytes of `out` that are with the system */
  sluice_tcp_frame_t in;
  uint32_t in_used;
  int32_t is_told; /* whom this rank has lost */
  sluice_tcp_keepalive_t silence;
} sluice_tcp_peer_t;

typedef struct sluice_tcp_frames_s {
  int32_t rank, world_size;
  sluice_tcp_peer_t* peers; /* [W] */
  int* sockets;             /* [W], -1 for the own rank */
  int32_t lost;             /* the peer whose connection ended first, or that another rank has lost; -1 */
  int32_t has_told;         /* the others which it was */
  sluice_comm_request_t requests[SLUICE_MAX_IN_FLIGHT];
} sluice_tcp_frames_t;

/* Gives the system what it takes of the messages to this peer. */
void sluice_tcp_push(sluice_tcp_frames_t* frames, int32_t peer);
/* The same of all peers, and takes what has arrived from them, as far as it is wanted. */
void sluice_tcp_progress(sluice_tcp_frames_t* frames);

/* Tells the sockets for how many bytes to wake a wait. 1: that has changed, and as many may have come before. */
int sluice_tcp_set_low_water(sluice_tcp_frames_t* frames);
/* Idle connections end by themselves when the peer's machine is gone, those with bytes for it only after a quarter of
 * an hour: such peers are lost here. */
void sluice_tcp_lose_silent(sluice_tcp_frames_t* frames);

/* Tells the others, once, whom this rank has lost. */
void sluice_tcp_tell_of_loss(sluice_tcp_frames_t* frames, int32_t culprit);
/* Where another rank was lost, before the connections are closed: waits in bounded time for the others to know it. */
void sluice_tcp_part(sluice_tcp_frames_t* frames);
/* Tells the peers that nothing is missing. A socket that is closed with bytes unread resets the connection, which would
 * take back what is still on its way to the peer: so the peers' systems have it all before that. */
void sluice_tcp_say_goodbye(sluice_tcp_frames_t* frames);

#endif /* SLUICE_BACKEND_COMM_TCP_TCP_FRAMES_H_ */
