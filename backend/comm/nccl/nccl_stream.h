// SPDX-License-Identifier: Apache-2.0
/* Exchanges in the order of a stream. nccl_comm.h has the entries of the table. Private to this folder. */
#ifndef SLUICE_BACKEND_COMM_NCCL_NCCL_STREAM_H_
#define SLUICE_BACKEND_COMM_NCCL_NCCL_STREAM_H_

#include "backend/comm/nccl/nccl_state.h"

/* One exchange of device memory on a stream. The device is entered. */
sluice_status_t sluice_nccl_run_group(nccl_comm_t* comm, const sluice_exchange_t* e, void* stream);
/* Exchanges that are enqueued between the two are one group of NCCL's (comm.h). */
void sluice_nccl_group_begin(sluice_comm_t* base);
sluice_status_t sluice_nccl_group_end(sluice_comm_t* base, sluice_stream_t stream, sluice_status_t status);
/* The memory of the list of messages goes. */
void sluice_nccl_forget_posted(nccl_comm_t* comm);

#endif /* SLUICE_BACKEND_COMM_NCCL_NCCL_STREAM_H_ */
