// SPDX-License-Identifier: Apache-2.0
/* A stage, which is a process, is killed. All others report its rank and the batch, whatever they wait for. */
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/test/refused.h"
#include "capi/test/migration/mesh.h"
#include "sluice/pipeline.h"

#define BOUNDED_NS UINT64_C(20000000000)

enum { STAGES = 4, MICRO_BATCHES = 8, ELEMENTS = 1 << 18 }; /* more than a socket buffer holds */

typedef struct note_s {
  _Atomic uint64_t killed_ns, returned_ns[STAGES];
  int32_t victim, status[STAGES], peer[STAGES];
  char message[STAGES][256];
} note_t;

typedef struct process_s {
  int rank;
  note_t* note;
  int64_t shape[1];
  sluice_tensor_t out;
  int32_t batch;
} process_t;

/* ---- a stage ---- */

static sluice_status_t forward(void* user, const sluice_stage_call_t* call, sluice_stage_tensors_t* out_result,
                               sluice_host_failure_t* out_failure) {
  process_t* me = user;
  (void)out_failure;
  if (me->batch == 1 && me->rank == me->note->victim && call->micro_batch == MICRO_BATCHES / 2) {
    atomic_store(&me->note->killed_ns, sluice_now_ns());
    raise(SIGKILL);
  }
  out_result->tensors = &me->out;
  out_result->num_tensors = 1;
  return SLUICE_OK;
}

static sluice_status_t backward(void* user, const sluice_stage_call_t* call, sluice_stage_tensors_t* out_result,
                                sluice_host_failure_t* out_failure) {
  process_t* me = user;
  (void)call, (void)out_failure;
  out_result->tensors = &me->out;
  out_result->num_tensors = 1;
  return SLUICE_OK;
}

static int run_batches(process_t* me, mesh_end_t* end, sluice_pipeline_t* pipeline) {
  DEFAULTS(sluice_pipeline_batch, batch);
  batch.num_micro_batches = MICRO_BATCHES;
  if (sluice_pipeline_run_batch(pipeline, &batch) != SLUICE_OK) return 3;
  if (!mesh_meet(end)) return 4; /* all stages have ended the first batch before the victim dies */
  me->batch = 1;
  me->note->status[me->rank] = sluice_pipeline_run_batch(pipeline, &batch);
  atomic_store(&me->note->returned_ns[me->rank], sluice_now_ns());
  me->note->peer[me->rank] = last_error()->peer;
  (void)snprintf(me->note->message[me->rank], sizeof me->note->message[0], "%.255s", last_message());
  return 0;
}

static int be_stage(mesh_end_t* end, void* shared) {
  static const sluice_pipeline_callbacks_t callbacks = {
      .struct_size = sizeof callbacks, .forward = forward, .backward = backward};
  static float x[ELEMENTS];
  static process_t me;
  me = (process_t){.rank = end->rank, .note = shared, .shape = {ELEMENTS}};
  me.out = (sluice_tensor_t){.data = x,
                             .device_type = SLUICE_DEVICE_CPU,
                             .ndim = 1,
                             .type_code = SLUICE_TYPE_FLOAT,
                             .type_bits = 32,
                             .type_lanes = 1,
                             .shape = me.shape};
  sluice_comm_t *parent = NULL, *comm = NULL;
  sluice_pipeline_t* pipeline = NULL;
  DEFAULTS(sluice_pipeline_config, config);
  if (mesh_comm(end, 0, &parent) != SLUICE_OK) return 1;
  if (sluice_comm_create_tcp(parent, NULL, &comm) != SLUICE_OK) return 2;
  if (sluice_pipeline_create(&config, comm, &callbacks, &me, &pipeline) != SLUICE_OK) return 2;
  const int bad = run_batches(&me, end, pipeline);
  sluice_pipeline_destroy(pipeline);
  sluice_comm_destroy(comm);
  sluice_comm_destroy(parent);
  return bad;
}

static void try_victim(int32_t victim) {
  note_t* note = mesh_share(sizeof *note);
  note->victim = victim;
  assert_true(mesh_run(STAGES, victim, be_stage, note));
  for (int r = 0; r < STAGES; ++r) {
    if (r == victim) continue;
    const uint64_t took_ns = atomic_load(&note->returned_ns[r]) - atomic_load(&note->killed_ns);
    assert_int_equal(note->status[r], SLUICE_E_PEER_LOST);
    assert_int_equal(note->peer[r], victim);
    assert_non_null(strstr(note->message[r], "batch 2"));
    assert_true(took_ns < BOUNDED_NS);
  }
  mesh_unshare(note, sizeof *note);
}

TEST(Stage_IsKilledInABatch_IsNamedOnAll) {
  for (int32_t victim = 0; victim < STAGES; ++victim) try_victim(victim);
}
