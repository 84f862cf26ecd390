// SPDX-License-Identifier: Apache-2.0
/* The functions that all communicators share, on a scripted transport: config, deadlines, notes, and named ranks. */
#include "backend/comm/comm.h"

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "backend/base/clock.h"
#include "backend/base/test/refused.h"

#define MS UINT64_C(1000000)

/* ---- config ----------------------------------------------------------------------------------------------------- */

TEST(CommConfig_Init_ReadsAsDefaults) {
  sluice_comm_config_t config, read;
  sluice_comm_config_init(&config, sizeof config);
  assert_int_equal(config.struct_size, sizeof config);
  assert_int_equal(sluice_comm_config_read(&config, &read), SLUICE_OK);
  sluice_comm_t comm;
  sluice_comm_init_base(&comm, NULL, "script", &read);
  assert_true(comm.timeout_ns == UINT64_C(1800000000000));
  assert_true(comm.warn_ns == UINT64_C(30000000000));
}

/* ---- a transport that never delivers ---------------------------------------------------------------------------- */

enum { W = 4 };

typedef struct script_s {
  sluice_comm_t base;
  sluice_status_t wait_status;
  int returns_early; /* waits return at once */
  int32_t missing;
  const char* notes[W]; /* notes of ranks in the store; NULL: none */
  int is_store_gone;
  uint64_t answer_ns; /* time of a lookup in the store */
  int num_lookups;
  char published_key[32];
  char published_value[160];
  char published_before[160]; /* the previous value */
  int num_waits, num_published, num_abandoned;
} script_t;

static sluice_status_t script_start(sluice_comm_t* comm, const sluice_exchange_t* exchange,
                                    sluice_comm_request_t** out_request) {
  (void)comm, (void)exchange;
  *out_request = NULL;
  return SLUICE_OK;
}
static sluice_status_t script_wait(sluice_comm_t* comm, sluice_comm_request_t* request, uint64_t deadline_ns,
                                   int32_t* out_peer) {
  script_t* s = (script_t*)comm;
  (void)request;
  ++s->num_waits;
  while (!s->returns_early && sluice_now_ns() < deadline_ns) {
    struct timespec nap = {0, 1000000};
    nanosleep(&nap, NULL);
  }
  if (out_peer != NULL) *out_peer = s->missing;
  return s->wait_status;
}
static void script_abort(sluice_comm_t* comm) { (void)comm; }
static void script_publish(sluice_comm_t* comm, const char* key, const char* value) {
  script_t* s = (script_t*)comm;
  ++s->num_published;
  snprintf(s->published_key, sizeof s->published_key, "%s", key);
  memcpy(s->published_before, s->published_value, sizeof s->published_before);
  snprintf(s->published_value, sizeof s->published_value, "%s", value);
}
static int32_t script_lookup(sluice_comm_t* comm, const char* key, char* out, int32_t out_bytes) {
  script_t* s = (script_t*)comm;
  int rank = -1;
  ++s->num_lookups;
  if (s->answer_ns > 0) {
    const struct timespec nap = {0, (long)s->answer_ns};
    nanosleep(&nap, NULL);
  }
  if (s->is_store_gone) return -1;
  assert_int_equal(sscanf(key, "sluice/%d", &rank), 1);
  assert_in_range(rank, 0, s->base.world_size - 1);
  if (rank >= W) return 0;
  return s->notes[rank] != NULL ? snprintf(out, (size_t)out_bytes, "%s", s->notes[rank]) : 0;
}
static void script_abandon(sluice_comm_t* comm, sluice_comm_request_t* request) {
  (void)request;
  ++((script_t*)comm)->num_abandoned;
}

static const sluice_comm_vtable_t script_vtable = {.exchange_start = script_start,
                                                   .exchange_wait = script_wait,
                                                   .abort = script_abort,
                                                   .publish = script_publish,
                                                   .lookup = script_lookup,
                                                   .abandon = script_abandon};

static script_t s; /* of each case */

static int set_up(void** state) {
  DEFAULTS(sluice_comm_config, config);
  (void)state;
  memset(&s, 0, sizeof s);
  config.world_size = W;
  config.timeout_ns = 60 * MS;
  sluice_comm_init_base(&s.base, &script_vtable, "script", &config);
  s.wait_status = SLUICE_E_TIMED_OUT;
  s.missing = -1;
  s.base.call_number = 7;
  return 0;
}

/* Starts an exchange whose wait times out. */
static void time_out(void) {
  sluice_exchange_t none = {NULL, NULL, NULL, NULL};
  sluice_comm_request_t* request;
  assert_int_equal(sluice_comm_exchange_start(&s.base, &none, &request), SLUICE_OK);
  uint64_t begin_ns = sluice_now_ns();
  assert_int_equal(sluice_comm_exchange_wait(&s.base, request, "dispatch of chunk 2"), SLUICE_E_TIMED_OUT);
  assert_true(sluice_now_ns() - begin_ns >= 60 * MS);
  REFUSED(last_error()->status, SLUICE_E_TIMED_OUT, "dispatch of chunk 2");
  assert_int_equal(s.num_abandoned, 1);
}

TEST(Wait_RankWithoutNoteOfThisCall_IsBlamed) {
  s.missing = 1; /* rank 1's message is missing because rank 1 itself waits for rank 3, which never came */
  s.notes[1] = "call=7 started=1 phase=dispatch of chunk 1";
  s.notes[2] = "call=8 started=5 phase=header";
  s.notes[3] = "call=6 started=40 phase=combine";
  time_out();
  assert_int_equal(last_error()->peer, 3);
  assert_non_null(strstr(last_message(), "from rank 1"));
  assert_non_null(strstr(last_message(), "rank 3 (last seen at \"call=6"));
  assert_null(strstr(last_message(), "rank 2"));
  assert_int_equal(s.num_published, 2); /* one during the wait, one at the timeout */
  assert_string_equal(s.published_key, "sluice/0");
  assert_string_equal(s.published_before, "call=7 started=1 phase=dispatch of chunk 2");
  uint64_t waited_ms = 0;
  assert_int_equal(sscanf(s.published_value, "call=7 started=1 given_up_ms=%" SCNu64 " phase", &waited_ms), 1);
  assert_true(waited_ms >= 1);
  assert_non_null(strstr(s.published_value, "phase=dispatch of chunk 2"));
}

TEST(GivenUp_NoteOfThisCall_IsToldAsALoss) {
  sluice_error_info_t why;
  s.notes[1] = "call=7 started=1 phase=header of layer 0, forward";
  s.notes[2] = "call=6 started=1 given_up_ms=5000 phase=of a call before this one";
  s.notes[3] = "call=7 started=1 given_up_ms=5000 phase=header of layer 0, forward";
  for (int32_t r = -1; r <= 2; ++r) assert_int_equal(sluice_comm_check_given_up(&s.base, r, ""), SLUICE_OK);
  assert_int_equal(atomic_load(&s.base.broken), SLUICE_OK);
  assert_int_equal(sluice_comm_check_given_up(&s.base, 3, "one of them sleeps"), SLUICE_E_PEER_LOST);
  sluice_error_capture(&why);
  assert_int_equal(why.peer, 3);
  assert_non_null(strstr(why.message,
                         "rank 0 entered this call after rank 3 had given up: that rank waited 5.0 s for header of "
                         "layer 0, forward (call 7)"));
  assert_non_null(strstr(why.message, "The two calls differ: one of them sleeps"));
  assert_int_equal(atomic_load(&s.base.broken), SLUICE_E_PEER_LOST);
}

TEST(Wait_TwoWithoutNote_ListsBothAndBlamesTheMissing) {
  s.missing = 3;
  s.notes[2] = "call=7 started=1 phase=header";
  time_out();
  assert_int_equal(last_error()->peer, 3); /* of several stragglers, the rank whose message is missing */
  assert_non_null(strstr(last_message(), "rank 1, 3."));
}

TEST(Wait_AllHaveNotes_BlamesTheFurthestBehind) {
  s.base.num_started = 4;
  s.missing = 1;
  s.notes[1] = "call=7 started=3 phase=dispatch of chunk 1";
  s.notes[2] = "call=7 started=2 phase=dispatch of chunk 0"; /* started the fewest exchanges */
  s.notes[3] = "call=7 started=5 phase=dispatch of chunk 2";
  time_out();
  assert_int_equal(last_error()->peer, 2);
}

TEST(Wait_StoreGone_SaysSo) {
  s.missing = 2;
  s.is_store_gone = 1;
  time_out();
  assert_int_equal(last_error()->peer, 2);
  assert_non_null(strstr(last_message(), "store does not answer"));
}

/* Rank 0 of 256 asks a store that takes 50 ms for an answer. The wait ends at most seconds after the deadline, rather
 * than half a minute, and names the rank whose message is missing, which is looked up first. */
TEST(Wait_StoreThatAnswersSlowly_EndsSoonAndBlamesTheMissing) {
  s.base.world_size = 256;
  s.missing = 200;
  s.answer_ns = 50 * MS;
  for (int r = 0; r < W; ++r) s.notes[r] = "call=7 started=1 phase=header";
  time_out();
  assert_int_equal(last_error()->peer, 200);
  assert_non_null(strstr(last_message(), "rank 4, 5, 6"));
  assert_non_null(strstr(last_message(), "The group's store is slow: it was asked about "));
  assert_in_range(s.num_lookups, 2, 41); /* two seconds of lookups; fewer on a busy machine */
}

/* Each rank is looked up once, since a thousand ranks together already make a million lookups. */
TEST(Wait_ManyStragglers_AsksAboutEachOnce) {
  s.base.world_size = 256;
  s.base.num_started = 3;
  s.missing = 2;
  s.notes[1] = "call=7 started=1 phase=a";
  s.notes[2] = "call=7 started=2 phase=b"; /* waits as well */
  s.notes[3] = "call=7 started=3 phase=c";
  time_out();
  assert_int_equal(last_error()->peer, 4);
  assert_int_equal(s.num_lookups, 255);
  assert_non_null(strstr(last_message(), "step: rank 4, 5, 6, 7, 8, 9, 10, 11 and 244 more."));
}

TEST(Wait_NobodyKnown_NamesNobody) {
  for (int r = 0; r < W; ++r) s.notes[r] = "call=7 started=1 phase=x";
  time_out();
  assert_int_equal(last_error()->peer, -1);
  assert_null(strstr(last_message(), "rank -1"));
}

TEST(Wait_TransportReturnsEarly_DoesNotSpin) {
  s.returns_early = 1;
  time_out();
  assert_in_range(s.num_waits, 1, 70); /* at most one per millisecond; fewer on a busy machine */
}

TEST(Wait_ExternalFailureAfterAbort_IsAborted) {
  s.wait_status = SLUICE_E_EXTERNAL; /* "connection closed", as a library reports after our abort */
  sluice_comm_abort(&s.base);
  assert_int_equal(sluice_comm_exchange_wait(&s.base, NULL, NULL), SLUICE_E_ABORTED);
}

int main(void) { return run_cases_each(set_up, NULL); }
