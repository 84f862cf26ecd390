// SPDX-License-Identifier: Apache-2.0
/* Messages of the suite: endpoints, patterns that identify the sender, and waits for one kind of completion. */
#pragma once

#include "backend/comm/messages.h"
#include "backend/cts/comm/comm_suite_case.h"
#include "backend/cts/comm/comm_suite_ranks.h"

/* More than the socket buffers of both sides hold. */
#define CTS_LARGE_BYTES (UINT64_C(16) << 20)

/* The byte at `index` of a message from `from` with this tag. The pattern repeats, so that a sanitizer need not check
 * each byte. */
unsigned char cts_pattern(int32_t from, uint64_t tag, uint64_t index);
/* New memory of the test; release with free(). */
unsigned char* cts_make_payload(int32_t from, uint64_t tag, uint64_t bytes);
/* 1: a received message of this size, with the pattern of its peer and tag; the head is its first bytes. */
int cts_is_intact(const sluice_message_completion_t* c, uint64_t head_bytes, uint64_t bytes);

/* Sends `bytes` of payload in one span, without a head. */
sluice_status_t cts_send(sluice_messages_t* m, int32_t peer, uint64_t tag, const void* payload, uint64_t bytes,
                         uint64_t user);
/* Waits for the only outstanding completion: 1 if it is of this kind and user. */
int cts_await(sluice_messages_t* m, int32_t kind, uint64_t user, sluice_message_completion_t* out_completion);
