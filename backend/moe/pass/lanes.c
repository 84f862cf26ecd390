// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/pass/lanes.h"

#include <time.h>

#include "backend/base/clock.h"

/* ---- lanes that are threads ---- */

static int32_t thread_first_of_job(const sluice_template_t* schedule, int32_t last) {
  return schedule->ops[last].first_of_run;
}

/* The clock of the communication lane's thread is read at both ends of its jobs: a system call each. */
static void thread_note_comm_job(sluice_pass_t* pass, int32_t i) {
  if (pass->comm_jobs.first < 0) pass->comm_jobs.first = i;
  pass->comm_jobs.last = i;
}

static void thread_report(sluice_pass_t* pass, const sluice_pass_report_t* report, const uint64_t* lane_ns) {
  sluice_pass_report_t* own = &pass->moe->decision.own.pass[pass->schedule->spec.direction];
  *own = *report;
  own->compute_ns = (float)lane_ns[SLUICE_LANE_COMPUTE];
  own->comm_ns = (float)lane_ns[SLUICE_LANE_COMM];
}

const sluice_pass_lanes_t sluice_lanes_of_threads = {.first_of_job = thread_first_of_job,
                                                     .ends_job = sluice_ends_run,
                                                     .note_comm_job = thread_note_comm_job,
                                                     .report = thread_report};

/* ---- lanes that are streams of a device, which times passes and ops ---- */

#define TIMED_PASSES  8 /* passes of a layer and direction whose lanes are timed: as many as medians of rates use */
#define NAP_NS        20000
#define ALONE_WAIT_NS (UINT64_C(600) * 1000000000) /* without a communicator; else its timeout counts */

static sluice_status_t stream_mark(const sluice_pass_t* pass, int32_t is_end) {
  sluice_device_t* device = pass->context->device;
  sluice_decision_state_t* decision = &pass->moe->decision;
  int32_t direction = pass->schedule->spec.direction;
  if (decision->table == NULL || pass->captured) return SLUICE_OK;
  if (decision->timers[direction] == NULL)
    SLUICE_TRY(device->memory->clock->timer_create(device, &decision->timers[direction]));
  return device->memory->clock->timer_mark(device, decision->timers[direction], is_end, pass->stream);
}

/* Ops are only enqueued by now: lanes have times only in passes that the device timed. The header's time says nothing
 * about exchanges between devices. */
static void stream_report(sluice_pass_t* pass, const sluice_pass_report_t* report, const uint64_t* lane_ns) {
  sluice_decision_state_t* decision = &pass->moe->decision;
  const int32_t direction = pass->schedule->spec.direction;
  sluice_pass_report_t* enqueued = &decision->enqueued[direction];
  *enqueued = *report;
  enqueued->header_ns = 0;
  if (!pass->has_device_times) return;
  enqueued->compute_ns = (float)lane_ns[SLUICE_LANE_COMPUTE];
  enqueued->comm_ns = (float)lane_ns[SLUICE_LANE_COMM];
  if (decision->timed[direction] < TIMED_PASSES) ++decision->timed[direction];
}

static void stream_take_pass_times(sluice_moe_t* moe) {
  sluice_device_t* device = moe->context->device;
  sluice_decision_state_t* decision = &moe->decision;
  for (int32_t direction = SLUICE_FORWARD; direction <= SLUICE_BACKWARD; ++direction) {
    sluice_pass_report_t* report = &decision->enqueued[direction];
    uint64_t ns = 0;
    if (report->pass_ns == 0 || decision->timers[direction] == NULL) continue;
    sluice_status_t status = device->memory->clock->timer_ns(device, decision->timers[direction], &ns);
    if (status == SLUICE_OK && ns == 0) continue; /* still running: the next forward asks again */
    if (status == SLUICE_OK) {
      decision->own.pass[direction] = *report;
      decision->own.pass[direction].pass_ns = ns;
    }
    report->pass_ns = 0;
  }
}

/* The policy hook needs times of the lanes in the first passes. Like passes with a trace, these end before the call
 * returns. */
static int is_one_of_the_first(const sluice_pass_t* pass) {
  const sluice_decision_state_t* decision = &pass->moe->decision;
  return decision->table != NULL && sluice_pass_is_of_training(pass) &&
         decision->timed[pass->schedule->spec.direction] < TIMED_PASSES;
}

static int is_timed(const sluice_pass_t* pass) {
  return (pass->context->trace.capacity > 0 || is_one_of_the_first(pass)) && !pass->captured;
}

static void stream_begin_op_times(const sluice_pass_t* pass) {
  pass->context->device->memory->clock->time_ops(pass->context->device, is_timed(pass));
}

static int peers_are_there(sluice_comm_t* comm) { return comm == NULL || sluice_comm_poll(comm) == SLUICE_OK; }

/* *out_waited: the pass was still running when this was called. */
static int wait_for_times(const sluice_pass_t* pass, uint64_t* begins, uint64_t* ends, int* out_waited) {
  sluice_device_t* device = pass->context->device;
  sluice_comm_t* comm = pass->context->comm;
  const struct timespec nap = {.tv_nsec = NAP_NS};
  uint64_t begin_ns = sluice_now_ns(), most_ns = comm != NULL ? comm->timeout_ns : ALONE_WAIT_NS;
  for (*out_waited = 0;; *out_waited = 1) {
    int32_t found = device->memory->clock->op_times(device, pass->schedule->num_ops, begins, ends);
    if (found != SLUICE_OP_TIMES_LATER) return found == SLUICE_OP_TIMES_TAKEN;
    if (!peers_are_there(comm) || sluice_now_ns() - begin_ns > most_ns) return 0;
    nanosleep(&nap, NULL);
  }
}

/* The device's times count from the pass's first event, which may have waited for earlier work of the host. If the end
 * was observed, times are shifted so that the last op ends then. */
static void place(sluice_pass_t* pass, uint64_t begin_ns, const uint64_t* begins, const uint64_t* ends, int waited) {
  uint64_t now = sluice_now_ns(), last = 0;
  int32_t num_ops = pass->schedule->num_ops;
  for (int32_t i = 0; i < num_ops; ++i) last = ends[i] > last ? ends[i] : last;
  if (waited && now > begin_ns + last) begin_ns = now - last;
  for (int32_t i = 0; i < num_ops; ++i) {
    pass->times[i].begin_ns = begin_ns + begins[i];
    pass->times[i].end_ns = begin_ns + ends[i];
  }
}

static void stream_take_op_times(sluice_pass_t* pass, uint64_t begin_ns) {
  pass->has_device_times = 0;
  if (!is_timed(pass)) return;
  int32_t num_ops = pass->schedule->num_ops;
  uint64_t bytes = 2 * (uint64_t)num_ops * sizeof(uint64_t);
  uint64_t* times = sluice_alloc(&pass->context->allocator, bytes, "times of ops");
  if (times == NULL) return;
  int waited = 0;
  pass->has_device_times = wait_for_times(pass, times, times + num_ops, &waited);
  if (pass->has_device_times) place(pass, begin_ns, times, times + num_ops, waited);
  sluice_free(&pass->context->allocator, times, bytes);
}

/* Each op is a job: enqueueing several as one gains nothing. */
const sluice_pass_lanes_t sluice_lanes_of_streams = {.are_streams = 1,
                                                     .mark = stream_mark,
                                                     .report = stream_report,
                                                     .take_pass_times = stream_take_pass_times,
                                                     .begin_op_times = stream_begin_op_times,
                                                     .take_op_times = stream_take_op_times};
