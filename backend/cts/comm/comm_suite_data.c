// SPDX-License-Identifier: Apache-2.0
/* Cases of data: blocks of all sizes arrive intact, in any order of waits, and sums are exact. */
#include <stdlib.h>
#include <string.h>

#include "backend/cts/comm/comm_suite_case.h"

static void exchange_one_sided(cts_rank_t* me) {
  for (int32_t i = 0; i < me->world->world_size; ++i) {
    CTS_TRY(me, cts_run_exchange(me, me->comm, i, cts_one_sided_size) == SLUICE_OK);
  }
}

static void exchange_empty(cts_rank_t* me) {
  for (int32_t i = 0; i < 10; ++i) CTS_TRY(me, cts_run_exchange(me, me->comm, i, cts_zero_size) == SLUICE_OK);
  CTS_TRY(me, cts_run_exchange(me, me->comm, 0, cts_small_size) == SLUICE_OK);
}

static void exchange_large(cts_rank_t* me) {
  for (int32_t i = 0; i < 2; ++i) CTS_TRY(me, cts_run_exchange(me, me->comm, i, cts_large_size) == SLUICE_OK);
}

static void exchange_reversed(cts_rank_t* me) {
  for (int32_t i = 0; i < 20; i += 2) {
    cts_size_fn_t size = i == 10 ? cts_large_size : cts_uneven_size;
    cts_exchange_t first, second;
    CTS_TRY(me, cts_start(me, me->comm, i, size, &first) == SLUICE_OK);
    CTS_TRY(me, cts_start(me, me->comm, i + 1, size, &second) == SLUICE_OK);
    int in_order = (me->rank + i / 2) % 2; /* every mixture of orders across the ranks */
    CTS_TRY(me, cts_finish(me, me->comm, in_order ? &first : &second) == SLUICE_OK);
    CTS_TRY(me, cts_finish(me, me->comm, in_order ? &second : &first) == SLUICE_OK);
  }
}

/* Calls the transport's own entry: the checked one would end the communicator. */
static void exchange_third(cts_rank_t* me) {
  cts_exchange_t first, second;
  sluice_comm_request_t* third = NULL;
  CTS_TRY(me, cts_start(me, me->comm, 0, cts_uneven_size, &first) == SLUICE_OK);
  CTS_TRY(me, cts_start(me, me->comm, 1, cts_uneven_size, &second) == SLUICE_OK);
  const sluice_exchange_t more = {second.send, second.send_bytes, second.recv, second.recv_bytes};
  CTS_TRY(me, me->comm->vtable->exchange_start(me->comm, &more, &third) == SLUICE_E_INTERNAL);
  CTS_TRY(me, cts_finish(me, me->comm, &first) == SLUICE_OK);
  CTS_TRY(me, cts_finish(me, me->comm, &second) == SLUICE_OK);
  CTS_TRY(me, cts_run_exchange(me, me->comm, 2, cts_uneven_size) == SLUICE_OK);
}

static void exchange_hundred(cts_rank_t* me) {
  /* A pipeline: each exchange starts before the previous one is waited for, and one rank lags now and then. */
  cts_exchange_t e[2];
  CTS_TRY(me, cts_start(me, me->comm, 0, cts_uneven_size, &e[0]) == SLUICE_OK);
  int32_t oldest = 0;
  for (int32_t i = 1; i < 100; ++i) {
    int32_t slot = 1 - oldest;
    CTS_TRY(me, cts_start(me, me->comm, i, cts_uneven_size, &e[slot]) == SLUICE_OK);
    if (i % 7 == 3) {
      CTS_TRY(me, cts_finish(me, me->comm, &e[slot]) == SLUICE_OK);
    } else {
      CTS_TRY(me, cts_finish(me, me->comm, &e[oldest]) == SLUICE_OK);
      oldest = slot;
    }
  }
  CTS_TRY(me, cts_finish(me, me->comm, &e[oldest]) == SLUICE_OK);
}

static void all_reduce_sum_max(cts_rank_t* me) {
  static const int64_t counts[] = {1, 3, 1000, 20001};
  int64_t w = me->world->world_size;
  for (size_t c = 0; c < sizeof counts / sizeof counts[0]; ++c) {
    int64_t n = counts[c];
    int64_t* data = malloc((size_t)n * sizeof *data);
    for (int32_t op = SLUICE_REDUCE_SUM; op <= SLUICE_REDUCE_MAX; ++op) {
      for (int64_t i = 0; i < n; ++i) data[i] = (i - n / 2) * (me->rank + 1) + (INT64_C(1) << 40);
      sluice_status_t status = sluice_comm_all_reduce_i64(me->comm, data, n, op, "the suite's all-reduce");
      int64_t num_wrong = 0;
      for (int64_t i = 0; i < n; ++i) {
        int64_t x = i - n / 2;
        int64_t want = op == SLUICE_REDUCE_SUM ? x * (w * (w + 1) / 2) + w * (INT64_C(1) << 40)
                                               : (x > 0 ? x * w : x) + (INT64_C(1) << 40);
        num_wrong += data[i] != want;
      }
      if (status != SLUICE_OK || num_wrong != 0) free(data);
      CTS_TRY(me, status == SLUICE_OK);
      CTS_TRY(me, num_wrong == 0);
    }
    free(data);
  }
  CTS_TRY(me, sluice_comm_all_reduce_i64(me->comm, NULL, 0, SLUICE_REDUCE_SUM, NULL) == SLUICE_OK);
}

static void comm_accessors(cts_rank_t* me) {
  CTS_TRY(me, sluice_comm_rank(me->comm) == me->rank);
  CTS_TRY(me, sluice_comm_world_size(me->comm) == me->world->world_size);
  CTS_TRY(me, strcmp(sluice_comm_name(me->comm), me->world->transport->name) == 0);
}

typedef struct record_s {
  int32_t rank;
  char text[29]; /* an odd size */
} record_t;

static void all_gather(cts_rank_t* me) {
  for (int32_t i = 0; i < 3; ++i) {
    record_t records[MAX_WORLD_SIZE];
    records[me->rank] = (record_t){.rank = me->rank};
    memset(records[me->rank].text, 'a' + i + me->rank % 20, sizeof records->text);
    const sluice_status_t status = sluice_comm_all_gather(me->comm, records, sizeof *records, "records of the suite");
    int is_right = status == SLUICE_OK;
    for (int32_t r = 0; r < me->world->world_size; ++r) {
      is_right &= records[r].rank == r && records[r].text[0] == 'a' + i + r % 20 &&
                  records[r].text[sizeof records->text - 1] == 'a' + i + r % 20;
    }
    CTS_TRY(me, is_right);
  }
}

/* Rank 0 sends rank 1 another size than rank 1 expects. */
static void sizes_differ(cts_rank_t* me, uint64_t sent, uint64_t expected) {
  unsigned char data[64] = {0};
  const void* send[MAX_WORLD_SIZE] = {NULL};
  void* recv[MAX_WORLD_SIZE] = {NULL};
  uint64_t send_bytes[MAX_WORLD_SIZE] = {0};
  uint64_t recv_bytes[MAX_WORLD_SIZE] = {0};
  sluice_exchange_t exchange = {.send = send, .send_bytes = send_bytes, .recv = recv, .recv_bytes = recv_bytes};
  sluice_comm_request_t* request;
  if (me->rank == 0) {
    send[1] = data;
    send_bytes[1] = sent;
  } else if (me->rank == 1) {
    recv[0] = data;
    recv_bytes[0] = expected;
  }
  CTS_TRY(me, cts_hurry(me, 4 * SHORT_NS)); /* a rank that sends too much may wait for its end in vain */
  CTS_TRY(me, sluice_comm_exchange_start(me->comm, &exchange, &request) == SLUICE_OK);
  sluice_status_t status = sluice_comm_exchange_wait(me->comm, request, "blocks of different sizes");
  int32_t peer = cts_last_peer();
  CTS_TRY(me, cts_meet(me));
  if (me->rank == 1) {
    CTS_TRY(me, status == SLUICE_E_INTERNAL);
    CTS_TRY(me, peer == 0);
  }
}

static void sizes_too_many(cts_rank_t* me) { sizes_differ(me, 48, 40); }
static void sizes_too_few(cts_rank_t* me) { sizes_differ(me, 40, 48); }

const cts_case_t cts_data_cases[] = {
    {"Comm_Accessors_ReturnTheConfig", comm_accessors, 1, 0, 0},
    {"Exchange_OneSender_ArrivesIntact", exchange_one_sided, 1, 0, 0},
    {"Exchange_AllEmpty_Completes", exchange_empty, 1, 0, 0},
    {"Exchange_LargeBlocks_ArriveIntact", exchange_large, 1, 0, 0},
    {"Exchange_TwoInFlightWaitedInAnyOrder_ArriveIntact", exchange_reversed, 1, 0, 0},
    {"Exchange_ThirdInFlight_IsRefusedAndNothingIsLost", exchange_third, 1, 0, 0},
    {"Exchange_HundredPipelined_KeepOrder", exchange_hundred, 1, 0, 0},
    {"AllReduce_SumAndMax_AreExact", all_reduce_sum_max, 1, 0, 0},
    {"AllGather_RecordsOfAllRanks_ArriveIntact", all_gather, 1, 0, 0},
    {"Exchange_MoreSentThanExpected_IsInternalNamingIt", sizes_too_many, 2, 0, 0},
    {"Exchange_LessSentThanExpected_IsInternalNamingIt", sizes_too_few, 2, 0, 0},
    {NULL, NULL, 0, 0, 0},
};
