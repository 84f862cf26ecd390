// SPDX-License-Identifier: Apache-2.0
/* Cases of messages that arrive: sizes, matching, order, progress. */
#include <stdlib.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/cts/comm/comm_suite_case.h"

/* ---- sizes ------------------------------------------------------------------------------------------------------- */

enum { MAX_CUTS = 100 };

/* A payload from memory with gaps, in `num_spans` uneven parts of which some are empty. */
static sluice_status_t send_scattered(sluice_messages_t* m, int32_t from, int32_t to, uint64_t tag, uint64_t head_bytes,
                                      uint64_t bytes, int32_t num_spans, unsigned char** out_memory) {
  sluice_message_span_t spans[MAX_CUTS];
  unsigned char head[SLUICE_MESSAGE_MAX_HEAD_BYTES];
  unsigned char* memory = malloc(bytes + (uint64_t)num_spans * 8 + 1);
  uint64_t done = 0;
  *out_memory = memory;
  if (memory == NULL) return SLUICE_E_NO_MEMORY;
  for (uint64_t i = 0; i < head_bytes; ++i) head[i] = cts_pattern(from, tag, i);
  for (int32_t s = 0; s < num_spans; ++s) {
    const uint64_t left = bytes - done;
    const uint64_t n = s == num_spans - 1 ? left : s % 5 == 3 ? 0 : left / (uint64_t)(num_spans - s);
    unsigned char* at = memory + done + (uint64_t)s * 8;
    for (uint64_t i = 0; i < n; ++i) at[i] = cts_pattern(from, tag, done + i);
    spans[s] = (sluice_message_span_t){.data = n > 0 ? at : NULL, .bytes = n};
    done += n;
  }
  const sluice_message_t message = {
      .peer = to, .num_spans = num_spans, .tag = tag, .head = head, .head_bytes = head_bytes, .spans = spans};
  const sluice_status_t status = sluice_messages_send(m, &message, tag, NULL);
  memset(head, 0xee, sizeof head); /* the payload and the list of spans have been copied */
  memset(spans, 0xee, sizeof spans);
  return status;
}

static void sizes(cts_rank_t* me) {
  static const struct {
    uint64_t head_bytes, bytes;
    int32_t num_spans;
  } shapes[] = {{0, 0, 0},     {1024, 0, 3},    {0, 1, 1},      {17, 63, 2},        {64, 64, 1},         {1000, 65, 7},
                {24, 4096, 1}, {8, 65536, 100}, {8, 65535, 12}, {512, 1048579, 31}, {1, 5 * 1048576, 9}, {0, 3, 100}};
  enum { NUM_SHAPES = sizeof shapes / sizeof shapes[0] };
  sluice_messages_t* m;
  sluice_message_completion_t c;
  CTS_TRY(me, sluice_messages_open(me->comm, NULL, &m) == SLUICE_OK);
  for (uint64_t i = 0; i < NUM_SHAPES; ++i) {
    unsigned char* memory;
    int num_sent = 0, num_received = 0;
    CTS_TRY(me, sluice_messages_receive(m, cts_previous_rank(me), i, 1000 + i, NULL) == SLUICE_OK);
    CTS_TRY(me, send_scattered(m, me->rank, cts_next_rank(me), i, shapes[i].head_bytes, shapes[i].bytes,
                               shapes[i].num_spans, &memory) == SLUICE_OK);
    CTS_TRY(me, sluice_messages_outstanding(m) == 2);
    for (int both = 0; both < 2; ++both) {
      CTS_TRY(me, sluice_messages_wait(m, "a message of the suite", &c) == SLUICE_OK);
      CTS_TRY(me, c.tag == i && c.request != 0);
      if (c.kind == SLUICE_MESSAGE_SENT) {
        CTS_TRY(me, c.user == i && c.peer == cts_next_rank(me) && c.arrival == NULL);
        ++num_sent;
        continue;
      }
      ++num_received;
      CTS_TRY(me, c.user == 1000 + i && c.peer == cts_previous_rank(me));
      CTS_TRY(me, cts_is_intact(&c, shapes[i].head_bytes, shapes[i].bytes));
      memset(c.payload, 0xee, c.payload_bytes); /* the receiver owns it */
      sluice_messages_release(m, c.arrival);
    }
    CTS_TRY(me, num_sent == 1 && num_received == 1);
    CTS_TRY(me, sluice_messages_outstanding(m) == 0);
    free(memory);
  }
  sluice_messages_close(m);
}

/* ---- matching ---------------------------------------------------------------------------------------------------- */

enum { NUM_TAGS = 300 };

static uint64_t interleaved_bytes(uint64_t tag) { return tag % 7 == 0 ? 20000 + tag : tag; }

/* All ranks send to all at once, each in its own order: 17 and 23 are coprime to 300. */
static void interleaved(cts_rank_t* me) {
  const int32_t w = me->world->world_size;
  sluice_messages_t* m;
  sluice_message_completion_t c;
  unsigned char* payloads[MAX_WORLD_SIZE][NUM_TAGS];
  unsigned char seen[MAX_WORLD_SIZE][NUM_TAGS];
  memset(seen, 0, sizeof seen);
  CTS_TRY(me, sluice_messages_open(me->comm, NULL, &m) == SLUICE_OK);
  for (uint64_t i = 0; i < NUM_TAGS; ++i) {
    for (int32_t r = 0; r < w; ++r) {
      const uint64_t out_tag = i * 17 % NUM_TAGS, in_tag = i * 23 % NUM_TAGS;
      payloads[r][out_tag] = cts_make_payload(me->rank, out_tag, interleaved_bytes(out_tag));
      CTS_TRY(me, payloads[r][out_tag] != NULL);
      CTS_TRY(me, cts_send(m, r, out_tag, payloads[r][out_tag], interleaved_bytes(out_tag), 0) == SLUICE_OK);
      CTS_TRY(me, sluice_messages_receive(m, r, in_tag, in_tag, NULL) == SLUICE_OK);
    }
  }
  for (int64_t left = 2 * (int64_t)NUM_TAGS * w; left > 0; --left) {
    CTS_TRY(me, sluice_messages_wait(m, NULL, &c) == SLUICE_OK);
    if (c.kind == SLUICE_MESSAGE_SENT) {
      free(payloads[c.peer][c.tag]);
      continue;
    }
    CTS_TRY(me, c.user == c.tag && c.tag < NUM_TAGS && !seen[c.peer][c.tag]);
    CTS_TRY(me, cts_is_intact(&c, 0, interleaved_bytes(c.tag)));
    seen[c.peer][c.tag] = 1;
    sluice_messages_release(m, c.arrival);
  }
  CTS_TRY(me, sluice_messages_outstanding(m) == 0);
  CTS_TRY(me, sluice_messages_next(m, 0, &c) == SLUICE_E_TIMED_OUT);
  sluice_messages_close(m);
}

/* Messages with one tag, half of which arrive before their receives are posted: the k-th receive gets the k-th
 * message. */
static void same_tag(cts_rank_t* me) {
  enum { NUM = 200, TAG = 77 };
  uint32_t numbers[NUM];
  uint32_t expected = 0;
  int num_sent = 0;
  sluice_messages_t* m;
  sluice_message_completion_t c;
  CTS_TRY(me, sluice_messages_open(me->comm, NULL, &m) == SLUICE_OK);
  for (uint32_t i = 0; i < NUM; ++i) {
    numbers[i] = i;
    if (i < NUM / 2) CTS_TRY(me, sluice_messages_receive(m, cts_previous_rank(me), TAG, i, NULL) == SLUICE_OK);
    CTS_TRY(me, cts_send(m, cts_next_rank(me), TAG, &numbers[i], sizeof numbers[i], i) == SLUICE_OK);
  }
  while (expected < NUM || num_sent < NUM) {
    CTS_TRY(me, sluice_messages_wait(m, NULL, &c) == SLUICE_OK);
    if (c.kind == SLUICE_MESSAGE_SENT) {
      ++num_sent;
      continue;
    }
    CTS_TRY(me, c.user == expected && c.payload_bytes == sizeof expected && *(uint32_t*)c.payload == expected);
    sluice_messages_release(m, c.arrival);
    if (++expected < NUM / 2) continue;
    if (expected < NUM)
      CTS_TRY(me, sluice_messages_receive(m, cts_previous_rank(me), TAG, expected, NULL) == SLUICE_OK);
  }
  sluice_messages_close(m);
}

/* ---- progress ---------------------------------------------------------------------------------------------------- */

/* No receive is posted before the own message has been sent. */
static void both_send(cts_rank_t* me) {
  const uint64_t bytes = UINT64_C(8) << 20;
  sluice_messages_t* m;
  sluice_message_completion_t c;
  unsigned char* payload = cts_make_payload(me->rank, 5, bytes);
  CTS_TRY(me, sluice_messages_open(me->comm, NULL, &m) == SLUICE_OK);
  CTS_TRY(me, cts_send(m, cts_next_rank(me), 5, payload, bytes, 1) == SLUICE_OK);
  CTS_TRY(me, cts_await(m, SLUICE_MESSAGE_SENT, 1, &c));
  memset(payload, 0xee, bytes); /* the rank owns it again */
  CTS_TRY(me, sluice_messages_receive(m, cts_previous_rank(me), 5, 2, NULL) == SLUICE_OK);
  CTS_TRY(me, cts_await(m, SLUICE_MESSAGE_RECEIVED, 2, &c));
  CTS_TRY(me, cts_is_intact(&c, 0, bytes));
  sluice_messages_close(m); /* frees everything that was not released */
  free(payload);
}

/* Rank 0 sends rank 1 more than any socket holds; rank 1 only runs `meanwhile`, until the message has been sent. */
static void while_peer_is_busy(cts_rank_t* me, void (*meanwhile)(cts_rank_t* me)) {
  sluice_messages_t* m;
  sluice_message_completion_t c;
  unsigned char* payload = NULL;
  CTS_TRY(me, sluice_messages_open(me->comm, NULL, &m) == SLUICE_OK);
  if (me->rank == 0) {
    payload = cts_make_payload(0, 9, CTS_LARGE_BYTES);
    CTS_TRY(me, cts_send(m, 1, 9, payload, CTS_LARGE_BYTES, 1) == SLUICE_OK);
    CTS_TRY(me, cts_await(m, SLUICE_MESSAGE_SENT, 1, &c));
  } else if (me->rank == 1) {
    CTS_TRY(me, sluice_messages_receive(m, 0, 9, 2, NULL) == SLUICE_OK);
  }
  meanwhile(me);
  if (me->failure[0] != '\0') return;
  if (me->rank == 1) {
    CTS_TRY(me, cts_await(m, SLUICE_MESSAGE_RECEIVED, 2, &c));
    CTS_TRY(me, cts_is_intact(&c, 0, CTS_LARGE_BYTES));
    sluice_messages_release(m, c.arrival);
  }
  sluice_messages_close(m);
  free(payload);
}

static void meet(cts_rank_t* me) { CTS_TRY(me, cts_meet(me)); }
static void exchange(cts_rank_t* me) { CTS_TRY(me, cts_run_exchange(me, me->comm, 0, cts_uneven_size) == SLUICE_OK); }

static void while_peer_is_elsewhere(cts_rank_t* me) { while_peer_is_busy(me, meet); }
static void while_peer_exchanges(cts_rank_t* me) { while_peer_is_busy(me, exchange); }

/* Exchanges and messages of the same ranks, both in flight. */
static void during_exchanges(cts_rank_t* me) {
  enum { NUM = 30, BYTES = 100000 };
  sluice_messages_t* m;
  sluice_message_completion_t c;
  unsigned char* payloads[NUM];
  CTS_TRY(me, sluice_messages_open(me->comm, NULL, &m) == SLUICE_OK);
  for (uint64_t i = 0; i < NUM; ++i) {
    payloads[i] = cts_make_payload(me->rank, i, BYTES);
    CTS_TRY(me, sluice_messages_receive(m, cts_previous_rank(me), i, i, NULL) == SLUICE_OK);
    CTS_TRY(me, cts_send(m, cts_next_rank(me), i, payloads[i], BYTES, i) == SLUICE_OK);
    CTS_TRY(me, cts_run_exchange(me, me->comm, (int32_t)i, cts_uneven_size) == SLUICE_OK);
  }
  for (int32_t left = 2 * NUM; left > 0; --left) {
    CTS_TRY(me, sluice_messages_wait(m, NULL, &c) == SLUICE_OK);
    CTS_TRY(me, c.kind == SLUICE_MESSAGE_SENT || cts_is_intact(&c, 0, BYTES));
    sluice_messages_release(m, c.arrival);
  }
  for (int i = 0; i < NUM; ++i) free(payloads[i]);
  sluice_messages_close(m);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Messages of changing sizes in a steady state: memory is returned and reused. */
static void steady(cts_rank_t* me) {
  enum { NUM = 40, WARM = 8 };
  sluice_allocator_t memory;
  sluice_messages_t* m;
  sluice_message_completion_t c;
  uint64_t num_live = 0;
  unsigned char* payload = cts_make_payload(me->rank, 1, 300000);
  sluice_allocator_init(&memory, NULL, NULL, NULL);
  const sluice_messages_config_t config = {.allocator = &memory};
  CTS_TRY(me, sluice_messages_open(me->comm, &config, &m) == SLUICE_OK);
  for (uint64_t i = 0; i < NUM; ++i) {
    const uint64_t bytes = 200000 + i * 37 % WARM * 10000;
    CTS_TRY(me, cts_send(m, cts_next_rank(me), 1, payload, bytes, 0) == SLUICE_OK);
    CTS_TRY(me, sluice_messages_receive(m, cts_previous_rank(me), 1, 0, NULL) == SLUICE_OK);
    for (int both = 0; both < 2; ++both) {
      CTS_TRY(me, sluice_messages_wait(m, NULL, &c) == SLUICE_OK);
      CTS_TRY(me, c.kind == SLUICE_MESSAGE_SENT || cts_is_intact(&c, 0, bytes));
      sluice_messages_release(m, c.arrival);
    }
    CTS_TRY(me, cts_meet(me)); /* no rank is a message ahead */
    if (i == WARM) num_live = memory.num_live;
    CTS_TRY(me, i <= WARM || memory.num_live <= num_live);
  }
  CTS_TRY(me, num_live >= 1 && memory.peak_bytes < 2 * 300000);
  sluice_messages_close(m);
  CTS_TRY(me, memory.num_live == 0 && memory.current_bytes == 0);
  sluice_allocator_deinit(&memory);
  free(payload);
}

const cts_case_t cts_messages_data_cases[] = {
    {"Message_SizesFromZeroToMegabytes_ArriveIntact", sizes, 1, 0, 0},
    {"Messages_HundredsOfTagsBetweenAll_EachReachesItsReceive", interleaved, 1, 0, 0},
    {"Messages_OfOneTag_KeepOrder", same_tag, 1, 0, 0},
    {"Messages_BothSend8MiBFirst_BothArrive", both_send, 2, 0, 0},
    {"Message_WhilePeerIsElsewhere_Arrives", while_peer_is_elsewhere, 2, 0, 0},
    {"Message_WhilePeerWaitsInAnExchange_Arrives", while_peer_exchanges, 2, 0, 0},
    {"Messages_DuringExchanges_BothArrive", during_exchanges, 1, 0, 0},
    {"Messages_InASteadyState_UseMemoryAgain", steady, 1, 0, 0},
    {NULL, NULL, 0, 0, 0},
};
