// SPDX-License-Identifier: Apache-2.0
/* W ranks, which are threads with a rig each, run one scenario together, on this CPU or on another machine. Checks
 * inside a rank are recorded and reported by `perform`, since cmocka's checks use longjmp, which only the main thread
 * may do. */
#pragma once

#include <pthread.h>

#include "backend/base/test/refused.h"
#include "backend/comm/fake/fake_comm.h"
#include "capi/test/cuda/cuda_layer_suite.h"
#include "capi/test/rig/rig.h"
#include "third_party/bazel/test.h"

#define MS         UINT64_C(1000000)
#define PATIENT_NS (30000 * MS) /* for calls that should not time out: a hang shows as TIMED_OUT */
#define SHORT_NS   (1000 * MS)  /* for tests of the deadline itself */
#define BRIEF_NS   (300 * MS)   /* if a timeout is one of the allowed results */
#define BOUNDED_NS (20000 * MS) /* "in bounded time", on a busy machine and under sanitizers */
#define MAX_RANKS  4

typedef struct play_s play_t;

typedef struct part_s {
  play_t* play;
  int32_t rank;
  int32_t world_size;
  sluice_comm_t* comm; /* the communicator of the context; NULL: one rank on another machine */
  sluice_comm_t* fake; /* the same communicator, if faults are planned */
  rig_t rig;
  char failure[1024]; /* the first failed check */
} part_t;

struct play_s {
  void (*run)(part_t* me);
  const void* scene; /* data of the test */
  int32_t world_size;
  const layer_machine_t* machine; /* NULL: this CPU, with a local communicator */
  uint64_t timeout_ns;            /* 0: PATIENT_NS, or ten times that on another machine */
  int32_t with_fakes;
  sluice_local_group_t* group;
  sluice_local_group_t* second; /* for new communicators after a loss */
  pthread_barrier_t barrier;    /* may be used only while all ranks are present */
  part_t parts[MAX_RANKS];
};

/* Runs the scenario on all ranks. Slots start as NaN in every pass. The first failed check of any rank fails the test.
 * */
void perform(play_t* play);

void note(part_t* me, int line, const char* format, ...) __attribute__((format(printf, 3, 4)));
void expect_status(part_t* me, int line, const char* call, sluice_status_t got, sluice_status_t want, const char* text);

#define EXPECT(condition) \
  if (!(condition)) note(me, __LINE__, "%s (last error: %s)", #condition, last_message())
#define STATUS(call, status, text) expect_status(me, __LINE__, #call, (call), (status), (text))
#undef WORKS /* of refused.h, for the main thread */
#define WORKS(call) STATUS(call, SLUICE_OK, "")

/* A barrier outside the communicator. */
void meet(part_t* me);
/* The rig's config with two experts on each rank. */
sluice_moe_config_t config_for(int32_t world_size);
/* Checks that a valid step works on this rank, and returns the digest of its outputs. */
uint64_t good_round(part_t* me, int line);
/* Checks that a new communicator works in the same process after the first was lost. */
void check_new_comm(part_t* me, int line);
