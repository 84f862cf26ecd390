// SPDX-License-Identifier: Apache-2.0
/* How ops are submitted to lanes, and which clock times them. With rows in host memory lanes are threads: consecutive
 * ops of which only the first waits are one job, and the host's clock times each op. With rows in device memory lanes
 * are streams: the calling thread enqueues ops in program order, and the device times them.
 *
 * Entries that may be NULL say what NULL means. Call these by the functions below the table. */
#pragma once

#include "backend/moe/pass/pass.h"

typedef struct sluice_pass_lanes_s {
  int32_t are_streams; /* ops are enqueued in program order, by one thread */
  /* The first op of the job that ends with op `last`; whether op i ends a job. Both NULL: each op is a job. */
  int32_t (*first_of_job)(const sluice_template_t* schedule, int32_t last);
  int (*ends_job)(const sluice_template_t* schedule, int32_t i);
  /* Called before a job of the communication lane is submitted. NULL: lanes have no threads with a clock. */
  void (*note_comm_job)(sluice_pass_t* pass, int32_t i);
  /* If options are chosen by times: marks the begin and the end of the pass. A failed mark is not an error: such a pass
   * has no time and is ignored. NULL: the host's clock needs no marks. */
  sluice_status_t (*mark)(const sluice_pass_t* pass, int32_t is_end);
  /* Reports a training pass after the join. lane_ns: times of its ops by lane. */
  void (*report)(sluice_pass_t* pass, const sluice_pass_report_t* report, const uint64_t* lane_ns);
  /* Puts the times of the layer's last passes into its next report, if they have ended. NULL: `report` has done it. */
  void (*take_pass_times)(sluice_moe_t* moe);
  /* Before and after a pass: the device may time its ops; these times then replace the times of enqueueing. begin_ns:
   * when the pass began. Both NULL: the host times ops while it runs them. */
  void (*begin_op_times)(const sluice_pass_t* pass);
  void (*take_op_times)(sluice_pass_t* pass, uint64_t begin_ns);
} sluice_pass_lanes_t;

extern const sluice_pass_lanes_t sluice_lanes_of_threads;
extern const sluice_pass_lanes_t sluice_lanes_of_streams;

/* Only training passes count: a forward that keeps nothing, and wgrad alone, take other times. */
static inline int sluice_pass_is_of_training(const sluice_pass_t* pass) {
  const sluice_template_spec_t* spec = &pass->schedule->spec;
  return spec->only == 0 && (spec->direction == SLUICE_FORWARD ? spec->keep : spec->dgrad);
}

static inline const sluice_pass_lanes_t* sluice_pass_lanes(const sluice_pass_t* pass) {
  return pass->moe->strategies->lanes;
}

static inline int32_t sluice_lanes_first_of_job(const sluice_pass_t* pass, int32_t last) {
  const sluice_pass_lanes_t* lanes = sluice_pass_lanes(pass);
  return lanes->first_of_job == NULL ? last : lanes->first_of_job(pass->schedule, last);
}
static inline int sluice_lanes_ends_job(const sluice_pass_t* pass, int32_t i) {
  const sluice_pass_lanes_t* lanes = sluice_pass_lanes(pass);
  return lanes->ends_job == NULL || lanes->ends_job(pass->schedule, i);
}
static inline void sluice_lanes_note_comm_job(sluice_pass_t* pass, int32_t i) {
  const sluice_pass_lanes_t* lanes = sluice_pass_lanes(pass);
  if (lanes->note_comm_job != NULL) lanes->note_comm_job(pass, i);
}
static inline sluice_status_t sluice_lanes_mark(const sluice_pass_t* pass, int32_t is_end) {
  const sluice_pass_lanes_t* lanes = sluice_pass_lanes(pass);
  return lanes->mark == NULL ? SLUICE_OK : lanes->mark(pass, is_end);
}
static inline void sluice_lanes_take_pass_times(sluice_moe_t* moe) {
  const sluice_pass_lanes_t* lanes = moe->strategies->lanes;
  if (lanes->take_pass_times != NULL) lanes->take_pass_times(moe);
}
static inline void sluice_lanes_begin_op_times(const sluice_pass_t* pass) {
  const sluice_pass_lanes_t* lanes = sluice_pass_lanes(pass);
  if (lanes->begin_op_times != NULL) lanes->begin_op_times(pass);
}
static inline void sluice_lanes_take_op_times(sluice_pass_t* pass, uint64_t begin_ns) {
  const sluice_pass_lanes_t* lanes = sluice_pass_lanes(pass);
  if (lanes->take_op_times != NULL) lanes->take_op_times(pass, begin_ns);
}
