// SPDX-License-Identifier: Apache-2.0
/* How a communicator breaks: errors, whose fault they are, and the end of the group. Private to this folder. */
#ifndef SLUICE_BACKEND_COMM_NCCL_NCCL_FAILURE_H_
#define SLUICE_BACKEND_COMM_NCCL_NCCL_FAILURE_H_

#include "backend/comm/nccl/nccl_state.h"

/* Leaves a note why this rank is gone: "aborted", "left", or "because N" when it gives up for another one's sake. */
void sluice_nccl_note_gone(nccl_comm_t* comm, const char* why);
/* Ends NCCL's communicator, which frees streams of kernels that wait for ever. May be repeated. */
void sluice_nccl_end_kernels(nccl_comm_t* comm);
/* And the connections for headers, where this rank is at fault: the others learn it at once. */
void sluice_nccl_abort_group(nccl_comm_t* comm);
/* Records NCCL's error, with the rank that is at fault where notes say so, and aborts. */
sluice_status_t sluice_nccl_fail(nccl_comm_t* comm, int code, const char* what);
sluice_status_t sluice_nccl_fail_aborted(nccl_comm_t* comm);
void sluice_nccl_mark_broken(sluice_comm_t* comm, sluice_status_t status);

#endif /* SLUICE_BACKEND_COMM_NCCL_NCCL_FAILURE_H_ */
