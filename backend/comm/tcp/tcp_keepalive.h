// SPDX-License-Identifier: Apache-2.0
/* Detects peers whose machine no longer answers: no power, or no network in between. */
#pragma once

#include <stdint.h>

enum { SLUICE_TCP_KEEPALIVE_S = 12 };

/* On an idle connection, the system probes the peer's system, and ends the connection after SLUICE_TCP_KEEPALIVE_S
 * without an answer: a wait is woken with ETIMEDOUT, or with the network's error. Call before the socket connects or
 * listens. */
void sluice_tcp_enable_keepalive(int fd);

/* The observations of one connection; initially zero. */
typedef struct sluice_tcp_keepalive_s {
  uint32_t num_heard;  /* segments received from the peer at the last check */
  uint32_t num_asked;  /* segments sent to it at the first check since then */
  uint64_t looked_ns;  /* 0: never */
  uint64_t watched_ns; /* time since the peer's last segment */
  int32_t is_silent;
} sluice_tcp_keepalive_t;

/* Checks one connection; waits call it as often as they like. Returns 1 (and sets is_silent) if the peer's system has
 * sent nothing during SLUICE_TCP_KEEPALIVE_S of checks at most a second apart, and several probes were not answered.
 * For connections that are not idle, which the system itself gives up late. now_ns: of sluice_now_ns. */
int sluice_tcp_check_keepalive(int fd, sluice_tcp_keepalive_t* silence, uint64_t now_ns);
