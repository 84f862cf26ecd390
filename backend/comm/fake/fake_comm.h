// SPDX-License-Identifier: Apache-2.0
/* A communicator for tests that wraps another one, fails on command, and records the sequence of calls. */
#pragma once

#include "backend/comm/comm.h"

enum { SLUICE_FAKE_START = 0, SLUICE_FAKE_WAIT = 1 };

/* A call that returns `status` with `peer`. A failing start posts nothing; a failing wait withdraws the request, and
 * peers that need it see PEER_LOST. */
typedef struct sluice_fake_fault_s {
  int32_t on;   /* SLUICE_FAKE_START or _WAIT */
  uint64_t nth; /* counted from 0 over all exchanges started, or over all requests waited for */
  int32_t status;
  int32_t peer; /* -1 unknown */
} sluice_fake_fault_t;

/* One call of the engine; the slices of one wait are one call. */
typedef struct sluice_fake_call_s {
  int32_t op;          /* SLUICE_FAKE_START or _WAIT */
  uint64_t send_bytes; /* START: to all peers together */
} sluice_fake_call_t;

enum { SLUICE_FAKE_MAX_FAULTS = 8, SLUICE_FAKE_MAX_CALLS = 1024 };

/* inner: retained. out_comm: new, release with sluice_comm_destroy. It has the rank, size and timeouts of inner.
 * Errors: NO_MEMORY. */
sluice_status_t sluice_fake_comm_create(sluice_comm_t* inner, sluice_comm_t** out_comm);
/* Adds a fault; at most SLUICE_FAKE_MAX_FAULTS. Each takes effect once. comm-exclusive. */
void sluice_fake_comm_inject(sluice_comm_t* comm, const sluice_fake_fault_t* fault);
/* Returns the number of calls so far; out_calls has the first SLUICE_FAKE_MAX_CALLS. comm-exclusive; borrowed until
 * destroy. */
uint64_t sluice_fake_comm_calls(sluice_comm_t* comm, const sluice_fake_call_t** out_calls);
