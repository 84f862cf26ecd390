// SPDX-License-Identifier: Apache-2.0
/* The connections between ranks after they are made: what is common to exchanges (tcp_frames.h) and messages
 * (tcp_messages.h). Private to backend/comm/tcp.
 *
 * A wait for a large message is woken once for 256 KiB and once for the rest, not for every packet: on a 0.4 Gbit/s
 * link, where packets arrive one by one, interrupts and wake-ups took a twentieth of the core from GEMMs. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "backend/comm/tcp/tcp_keepalive.h"

enum { SLUICE_TCP_LIVE = 0, SLUICE_TCP_LEFT, SLUICE_TCP_LOST };

typedef struct sluice_tcp_connection_s {
  int socket; /* -1 for the own rank */
  int32_t state;
  int32_t native_error; /* of a lost peer: the system's error; 0: its end was read */
  int32_t can_read;     /* not known to be empty; set by epoll edges, as is can_write */
  int32_t can_write;
  int32_t low_water; /* bytes at which the socket wakes a wait */
  int32_t is_told;   /* this peer was told which rank was lost */
  uint32_t said;     /* bytes of the farewell that were sent */
  sluice_tcp_keepalive_t silence;
} sluice_tcp_connection_t;

/* Initializes connections without sockets. connections: [world_size], here and below. */
void sluice_tcp_connections_init(sluice_tcp_connection_t* connections, int32_t world_size);

/* Adds a descriptor to an epoll, with the rank as its data. Returns 0 with errno if that fails, or fd is -1. */
int sluice_tcp_watch(int epoll, int fd, uint32_t events, int32_t rank);
/* Adds the sockets of all connections to an epoll. Returns world_size, or the first rank that cannot be watched. */
int32_t sluice_tcp_watch_all(int epoll, const sluice_tcp_connection_t* connections, int32_t world_size);
/* Wakes a thread that waits for this eventfd. */
void sluice_tcp_wake(int eventfd);
/* Sets can_read and can_write from the events that an epoll reports. */
void sluice_tcp_note_events(sluice_tcp_connection_t* connection, uint32_t events);

/* Returns whether a send or receive failed because the socket's buffer is full or empty (EAGAIN). */
int sluice_tcp_is_full(int error);
/* Returns whether the system reports that the peer's machine did not answer. */
int sluice_tcp_is_network(int error);
/* Reads up to `room` bytes. Returns 0 if the buffer is empty, and if the connection has ended, which marks the peer as
 * lost. */
size_t sluice_tcp_take(sluice_tcp_connection_t* connection, void* to, uint64_t room);
/* Marks the peer as lost, unless it has left or was lost before. error: of the system, or 0. */
void sluice_tcp_lose(sluice_tcp_connection_t* connection, int error);
/* Sets the number of bytes at which the socket wakes a wait; `left` bytes are still expected. The end of a connection,
 * or a full buffer, wakes it in any case. Returns 1 if the number has changed and that many bytes may already be there:
 * read again, since no edge reports them. */
int sluice_tcp_set_low_water(sluice_tcp_connection_t* connection, uint64_t left);
/* Marks silent peers as lost. If a peer's machine is gone, idle connections end by themselves, but those with unsent
 * bytes only after a quarter of an hour. */
void sluice_tcp_lose_silent(sluice_tcp_connection_t* connections, int32_t world_size);

/* Sends the frame that says goodbye to all live peers, and waits in bounded time until their systems have everything:
 * closing a socket with unread bytes resets the connection and discards what is still in flight to the peer. */
void sluice_tcp_say_goodbye(sluice_tcp_connection_t* connections, int32_t world_size, const void* frame,
                            uint32_t bytes);
/* Call after a loss of another rank, before the connections are closed: waits in bounded time until the other ranks
 * know which rank was lost. */
void sluice_tcp_part(const sluice_tcp_connection_t* connections, int32_t world_size);
