// SPDX-License-Identifier: Apache-2.0
/* An NCCL for tests whose ranks are threads of one process, on the fake CUDA driver's streams. If
 * SLUICE_FAKE_NCCL_FOLDER names a folder, ranks may be processes that share it, and messages are files there.
 *
 * A group of sends and receives is one operation of its stream: it moves bytes when both sides have reached it, and
 * ends when all of its messages have been moved. A communicator is IN_PROGRESS until all its ranks exist. If a rank
 * aborts or is destroyed with messages outstanding, ranks that wait for it get ncclRemoteError; no error names a rank.
 * Messages of different sizes never match.
 *
 * A split of a communicator is in progress until all its ranks have called it. Its handle is set later than that, when
 * the communicator's state has been queried once more, or when the communicator is aborted.
 *
 * Buffers may be registered (from version 2.19 on). Violations of NCCL's rules are counted: a message with one side
 * registered and the other not; memory freed or a communicator destroyed with a registration left; a registration that
 * ends while groups of its communicator run; a communicator that is used while its split is in progress, or ended
 * twice. */
#pragma once

#include "backend/comm/nccl/nccl_comm.h"

sluice_nccl_symbols_t sluice_fake_nccl(void);
void sluice_fake_nccl_set_version(int version);
/* As in the fake driver; error texts and versions are not counted. With the code IN_PROGRESS a send, a receive, or the
 * end of a group or communicator still takes effect. */
void sluice_fake_nccl_fail_call(int64_t nth, int code);
int sluice_fake_nccl_failed(void);
/* From now on ncclGroupEnd returns IN_PROGRESS, and the group's messages enter their stream only after `looks` queries
 * of the communicator's state; using the communicator before that breaks a rule. 0: messages enter it at once. */
void sluice_fake_nccl_linger(int looks);
int64_t sluice_fake_nccl_live(void);          /* communicators */
int sluice_fake_nccl_max_ctas(void);          /* of the newest communicator; SLUICE_NCCL_UNDEFINED: NCCL's choice */
int64_t sluice_fake_nccl_registrations(void); /* alive */
int64_t sluice_fake_nccl_registered(void);    /* messages between registered buffers, since the start */
int64_t sluice_fake_nccl_broken_rules(char* out, size_t out_bytes); /* since the start; `out`: the first one in words */
int64_t sluice_fake_nccl_groups(void);                              /* since the start */
int sluice_fake_nccl_open_groups(void); /* of this thread: 0 unless ncclGroupEnd was forgotten */
