// SPDX-License-Identifier: Apache-2.0
#include "backend/cts/comm/comm_suite_messages.h"

#include <stdlib.h>
#include <string.h>

#include "backend/base/math.h"

enum { PERIOD = 8191 };

unsigned char cts_pattern(int32_t from, uint64_t tag, uint64_t index) {
  const uint64_t i = index % PERIOD;
  return (unsigned char)((uint64_t)from * 89 + tag * 31 + i * 7 + (i >> 8) * 13);
}

unsigned char* cts_make_payload(int32_t from, uint64_t tag, uint64_t bytes) {
  unsigned char* payload = malloc(bytes + 1);
  if (payload == NULL) return NULL;
  for (uint64_t i = 0; i < sluice_min_u64(bytes, PERIOD); ++i) payload[i] = cts_pattern(from, tag, i);
  for (uint64_t done = PERIOD; done < bytes; done += PERIOD) {
    memcpy(payload + done, payload, sluice_min_u64(bytes - done, PERIOD));
  }
  return payload;
}

int cts_is_intact(const sluice_message_completion_t* c, uint64_t head_bytes, uint64_t bytes) {
  if (c->kind != SLUICE_MESSAGE_RECEIVED || c->arrival == NULL || c->payload == NULL || c->head == NULL) return 0;
  if (c->head_bytes != head_bytes || c->payload_bytes != bytes) return 0;
  if ((uintptr_t)c->payload % 64 != 0 || (uintptr_t)c->head % 64 != 0) return 0;
  for (uint64_t i = 0; i < head_bytes; ++i) {
    if (((const unsigned char*)c->head)[i] != cts_pattern(c->peer, c->tag, i)) return 0;
  }
  const unsigned char* payload = c->payload;
  for (uint64_t i = 0; i < sluice_min_u64(bytes, PERIOD); ++i) {
    if (payload[i] != cts_pattern(c->peer, c->tag, i)) return 0;
  }
  return bytes <= PERIOD || memcmp(payload, payload + PERIOD, bytes - PERIOD) == 0;
}

sluice_status_t cts_send(sluice_messages_t* m, int32_t peer, uint64_t tag, const void* payload, uint64_t bytes,
                         uint64_t user) {
  const sluice_message_span_t span = {.data = payload, .bytes = bytes};
  const sluice_message_t message = {.peer = peer, .num_spans = 1, .tag = tag, .spans = &span};
  return sluice_messages_send(m, &message, user, NULL);
}

int cts_await(sluice_messages_t* m, int32_t kind, uint64_t user, sluice_message_completion_t* out_completion) {
  return sluice_messages_wait(m, "the suite's message", out_completion) == SLUICE_OK && out_completion->kind == kind &&
         out_completion->user == user;
}
