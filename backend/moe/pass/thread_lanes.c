// SPDX-License-Identifier: Apache-2.0
/* Lanes that are threads. */
#include "backend/moe/pass/lanes.h"

static int32_t first_of_job(const sluice_template_t* schedule, int32_t last) {
  return schedule->ops[last].first_of_run;
}

static int ends_job(const sluice_template_t* schedule, int32_t i) { return sluice_ends_run(schedule, i); }

/* The clock of the communication lane's thread is read at both ends of its jobs: a system call each. */
static void note_comm_job(sluice_pass_t* pass, int32_t i) {
  if (pass->comm_jobs.first < 0) pass->comm_jobs.first = i;
  pass->comm_jobs.last = i;
}

static sluice_status_t mark(const sluice_pass_t* pass, int32_t is_end) {
  (void)pass, (void)is_end;
  return SLUICE_OK;
}

static void report(sluice_pass_t* pass, const sluice_pass_report_t* report, const uint64_t* lane_ns) {
  sluice_pass_report_t* own = &pass->moe->decision.own.pass[pass->schedule->spec.direction];
  *own = *report;
  own->compute_ns = (float)lane_ns[SLUICE_LANE_COMPUTE];
  own->comm_ns = (float)lane_ns[SLUICE_LANE_COMM];
}

static void take_pass_times(sluice_moe_t* moe) { (void)moe; }
static void begin_op_times(const sluice_pass_t* pass) { (void)pass; }
static void take_op_times(sluice_pass_t* pass, uint64_t begin_ns) { (void)pass, (void)begin_ns; }

const sluice_pass_lanes_t sluice_lanes_of_threads = {.first_of_job = first_of_job,
                                                     .ends_job = ends_job,
                                                     .note_comm_job = note_comm_job,
                                                     .mark = mark,
                                                     .report = report,
                                                     .take_pass_times = take_pass_times,
                                                     .begin_op_times = begin_op_times,
                                                     .take_op_times = take_op_times};
