// SPDX-License-Identifier: Apache-2.0
/* How ops are submitted to lanes, and which clock times them. With rows in host memory lanes are threads: consecutive
 * ops of which only the first waits are one job, and the host's clock times each op. With rows in device memory lanes
 * are streams: the calling thread enqueues ops in program order, and the device times them. */
#pragma once

#include "backend/moe/pass/pass.h"

typedef struct sluice_pass_lanes_s {
  int32_t are_streams; /* ops are enqueued in program order, by one thread */
  /* The first op of the job that ends with op `last`; whether op i ends a job; called before a job of the communication
   * lane is submitted. */
  int32_t (*first_of_job)(const sluice_template_t* schedule, int32_t last);
  int (*ends_job)(const sluice_template_t* schedule, int32_t i);
  void (*note_comm_job)(sluice_pass_t* pass, int32_t i);
  /* If options are chosen by times: marks the begin and the end of the pass. A failed mark is not an error: such a pass
   * has no time and is ignored. */
  sluice_status_t (*mark)(const sluice_pass_t* pass, int32_t is_end);
  /* Reports a training pass after the join. lane_ns: times of its ops by lane. */
  void (*report)(sluice_pass_t* pass, const sluice_pass_report_t* report, const uint64_t* lane_ns);
  /* Puts the times of the layer's last passes into its next report, if they have ended. */
  void (*take_pass_times)(sluice_moe_t* moe);
  /* Before and after a pass: the device may time its ops; these times then replace the times of enqueueing. begin_ns:
   * when the pass began. */
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
