// SPDX-License-Identifier: Apache-2.0
/* Memory for exchanges of one fixed size with every rank. It is reserved with the first layer, so that a rank without
 * memory can still tell the others. Private to handshake. */
#pragma once

#include "backend/comm/exchange_arrays.h"
#include "backend/moe/context/context.h"

typedef struct sluice_header_buffers_s {
  char* send; /* [W] messages of SLUICE_HEADER_BYTES */
  char* recv;
  sluice_exchange_arrays_t arrays; /* [W] each: one message of SLUICE_HEADER_BYTES to and from each rank, until the
                                      caller changes them */
} sluice_header_buffers_t;

/* Valid until the next take. */
sluice_status_t sluice_header_buffers_take(sluice_context_t* context, sluice_header_buffers_t* out_buffers);

/* Runs one exchange and waits for it. phase: for error messages. */
sluice_status_t sluice_header_exchange(sluice_comm_t* comm, const sluice_exchange_arrays_t* arrays, const char* phase);
