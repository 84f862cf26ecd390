// SPDX-License-Identifier: Apache-2.0
/* Failures of a communicator: errors, the rank at fault, and the end of the group. Private to this folder. */
#pragma once

#include "backend/comm/nccl/nccl_state.h"

/* Publishes why this rank is gone: "aborted", "left", or "because N" if it gives up because of rank N. */
void sluice_nccl_note_gone(nccl_comm_t* comm, const char* why);
/* Aborts NCCL's communicator, which frees streams from kernels that would wait for ever. May be called repeatedly. */
void sluice_nccl_end_kernels(nccl_comm_t* comm);
/* The same, and aborts the connections for headers. For a rank that is at fault: the other ranks learn it at once. */
void sluice_nccl_abort_group(nccl_comm_t* comm);
/* Records NCCL's error, with the rank at fault if notes name one, and aborts. */
sluice_status_t sluice_nccl_fail(nccl_comm_t* comm, int code, const char* what);
sluice_status_t sluice_nccl_fail_aborted(nccl_comm_t* comm);
void sluice_nccl_mark_broken(sluice_comm_t* comm, sluice_status_t status);
