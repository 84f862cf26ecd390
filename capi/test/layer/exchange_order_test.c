// SPDX-License-Identifier: Apache-2.0
/* The exchanges that a layer passes to its host's process group, in order. A transport may post all receives before all
 * sends, so a rank's sends must come in the same exchange as its receives, and the peer must expect them in the
 * exchange of the same number. A pass begins with its header and counts. At most two exchanges are in flight. */

#include "backend/base/clock.h"
#include "backend/comm/comm.h"
#include "capi/test/world/checks.h"
#include "third_party/bazel/test.h"

enum { RANKS = 3, MAX_EXCHANGES = 256, NARROW = 8, WIDE = 56 };

typedef struct posted_s {
  int32_t direction;
  uint64_t send_bytes[RANKS];
  uint64_t recv_bytes[RANKS];
} posted_t;

/* One rank's process group: the local transport with callbacks that record their calls. */
typedef struct host_s {
  sluice_comm_t* group;
  int32_t direction; /* direction of this rank's current pass */
  int32_t under_way, most_under_way;
  int32_t count;
  posted_t posted[MAX_EXCHANGES];
} host_t;

static sluice_local_group_t* shared;
static host_t hosts[RANKS];

static sluice_status_t exchange_start(void* user, const sluice_exchange_t* exchange, void** out_request,
                                      sluice_host_failure_t* out_failure) {
  (void)out_failure;
  host_t* host = user;
  if (host->count == MAX_EXCHANGES) return SLUICE_E_INTERNAL;
  posted_t* p = &host->posted[host->count++];
  p->direction = host->direction;
  for (int32_t r = 0; r < RANKS; ++r) {
    if (r == host->group->rank) continue; /* never read */
    p->send_bytes[r] = exchange->send_bytes[r];
    p->recv_bytes[r] = exchange->recv_bytes[r];
  }
  if (++host->under_way > host->most_under_way) host->most_under_way = host->under_way;
  sluice_comm_request_t* request = NULL;
  sluice_status_t status = host->group->vtable->exchange_start(host->group, exchange, &request);
  *out_request = request;
  return status;
}

static sluice_status_t exchange_wait(void* user, void* request, uint64_t timeout_ns,
                                     sluice_host_failure_t* out_failure) {
  host_t* host = user;
  sluice_status_t status =
      host->group->vtable->exchange_wait(host->group, request, sluice_now_ns() + timeout_ns, &out_failure->peer);
  if (status == SLUICE_OK) --host->under_way;
  return status;
}

static void destroy(void* user) { sluice_comm_destroy(((host_t*)user)->group); }

static sluice_status_t make_comm(int32_t rank, const sluice_comm_config_t* config, sluice_comm_t** out_comm) {
  static const sluice_host_comm_vtable_t vtable = {.struct_size = sizeof vtable,
                                                   .exchange_start = exchange_start,
                                                   .exchange_wait = exchange_wait,
                                                   .destroy = destroy};
  SLUICE_TRY(sluice_comm_create_local(shared, config, &hosts[rank].group));
  return sluice_comm_create_host(config, &vtable, &hosts[rank], out_comm);
}
static void note(int32_t rank, int32_t direction, int32_t has_returned) {
  if (!has_returned) hosts[rank].direction = direction;
}

/* Runs a forward and a backward of a layer of this width; `hosts` records the exchanges of each rank. */
static void run(int32_t num_chunks, int64_t width, int32_t grouping) {
  memset(hosts, 0, sizeof hosts);
  assert_int_equal(sluice_local_group_create(RANKS, &shared), SLUICE_OK);
  case_t c = world_small_case();
  c.world_size = RANKS, c.model_width = width, c.num_chunks = num_chunks, c.make_comm = make_comm, c.note = note;
  c.chunking = SLUICE_CHUNKING_TOKENS, c.grouping = grouping;
  check_matches(&c);
  sluice_local_group_destroy(shared);
}

static uint64_t total(const posted_t* p) {
  uint64_t bytes = 0;
  for (int32_t r = 0; r < RANKS; ++r) bytes += p->send_bytes[r] + p->recv_bytes[r];
  return bytes;
}

static void check(int32_t num_chunks, int32_t grouping) {
  run(num_chunks, NARROW, grouping);
  host_t* narrow = malloc(sizeof hosts);
  memcpy(narrow, hosts, sizeof hosts);
  run(num_chunks, WIDE, grouping);
  for (int32_t r = 0; r < RANKS; ++r) {
    const host_t* h = &hosts[r];
    assert_int_equal(h->under_way, 0);
    assert_in_range(h->most_under_way, 1, 2);
    assert_int_equal(h->count, hosts[0].count);
    assert_int_equal(h->count, narrow[r].count);
    int32_t passes_begun = 0, direction = -1, rows_of[2] = {0, 0}, scalars_of[2] = {0, 0};
    uint64_t row_bytes[2] = {0, 0}, scalar_bytes[2] = {0, 0};
    for (int32_t i = 0; i < h->count; ++i) {
      const posted_t *p = &h->posted[i], *n = &narrow[r].posted[i];
      for (int32_t peer = 0; peer < RANKS; ++peer) {
        if (peer == r) continue;
        /* The peer posted the matching receive in its exchange of this number. */
        assert_int_equal(p->send_bytes[peer], hosts[peer].posted[i].recv_bytes[r]);
        assert_int_equal(p->direction, hosts[peer].posted[i].direction);
      }
      const int grows = total(p) != total(n); /* depends on the width of rows; header, counts and scalars do not */
      const int is_backward = p->direction == SLUICE_BACKWARD;
      if (p->direction != direction) {
        assert_false(grows); /* a pass begins with its header and counts in one exchange */
        direction = p->direction, ++passes_begun;
      } else if (grows) {
        assert_int_equal(total(p) * NARROW, total(n) * WIDE);
        ++rows_of[is_backward], row_bytes[is_backward] += total(p);
      } else {
        ++scalars_of[is_backward], scalar_bytes[is_backward] += total(p);
      }
    }
    assert_int_equal(passes_begun, 2);
    assert_int_equal(rows_of[0], 2 * num_chunks); /* dispatch and combine */
    assert_int_equal(rows_of[1], 2 * num_chunks); /* the gradients of both; scalars of routes follow separately */
    assert_int_equal(scalars_of[0], 0);
    assert_int_equal(scalars_of[1], 2 * num_chunks);
    assert_int_equal(scalar_bytes[1] * WIDE, row_bytes[1]);
  }
  free(narrow);
}

TEST(Layer_OneChunk_SendsWithItsReceivesAndHeaderFirst) { check(1, SLUICE_GROUPING_OFF); }

TEST(Layer_FourChunks_SendsWithItsReceivesAndHeaderFirst) { check(4, SLUICE_GROUPING_OFF); }

/* Grouped exchanges also keep at most two in flight, which is all that a host must support. */
TEST(Layer_GroupedChunks_SendsWithItsReceivesAndHeaderFirst) {
  check(4, SLUICE_GROUPING_ON);
  check(7, SLUICE_GROUPING_ON);
}
