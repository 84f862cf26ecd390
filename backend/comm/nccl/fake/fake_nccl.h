// SPDX-License-Identifier: Apache-2.0
/* An NCCL whose ranks are threads of one process, on the fake CUDA driver's streams: for tests. Where
 * SLUICE_FAKE_NCCL_FOLDER names a folder, its ranks may be processes that share it, and messages are files there.
 *
 * A group of sends and receives is one operation of its stream: it moves bytes only when both sides have come to it,
 * and ends when all of its messages have. A communicator is IN_PROGRESS until all its ranks exist. When a rank aborts
 * or goes with messages outstanding, ranks that wait for it get ncclRemoteError; no error names a rank. Messages of
 * different sizes never meet.
 *
 * A split of a communicator is in progress until all its ranks have called it. Its handle comes later than that, when
 * the communicator has been asked for its state once more, or when that one is aborted.
 *
 * Buffers may be registered (from version 2.19 on). What NCCL forbids is counted: a message of which one side is
 * registered and the other is not, memory that is freed or a communicator destroyed with a registration left, a
 * registration that ends while groups of its communicator are under way; a communicator that is used while its split is
 * in progress, or ended twice. */
#ifndef SLUICE_BACKEND_COMM_NCCL_FAKE_FAKE_NCCL_H_
#define SLUICE_BACKEND_COMM_NCCL_FAKE_FAKE_NCCL_H_

#include "backend/comm/nccl/nccl_comm.h"

sluice_nccl_symbols_t sluice_fake_nccl(void);
void sluice_fake_nccl_set_version(int version);
/* As the fake driver's; error texts and versions are not counted. With the code IN_PROGRESS a send, a receive,
 * the end of a group or of a communicator is done all the same. */
void sluice_fake_nccl_fail_call(int64_t nth, int code);
int sluice_fake_nccl_failed(void);
int64_t sluice_fake_nccl_live(void);          /* communicators */
int64_t sluice_fake_nccl_registrations(void); /* alive */
int64_t sluice_fake_nccl_registered(void);    /* messages between registered buffers, since the start */
int64_t sluice_fake_nccl_broken_rules(char* out, size_t out_bytes); /* since the start; the first of them in words */
int64_t sluice_fake_nccl_groups(void);                              /* since the start */
int sluice_fake_nccl_open_groups(void); /* of this thread: 0 unless somebody forgot ncclGroupEnd */

#endif /* SLUICE_BACKEND_COMM_NCCL_FAKE_FAKE_NCCL_H_ */
