// SPDX-License-Identifier: Apache-2.0
/* How the ops of a pass reach their lanes, and whose clock times them. Lanes are threads where rows lie in host memory:
 * ops that none but the first waits within are one job, and the host's clock times each. They are streams where rows
 * lie in a device's memory: an op is only enqueued, by the calling thread in program order, and its time is the
 * device's. */
#ifndef SLUICE_BACKEND_MOE_PASS_LANES_H_
#define SLUICE_BACKEND_MOE_PASS_LANES_H_

#include "backend/moe/pass/pass.h"

typedef struct sluice_pass_lanes_s {
  int32_t are_streams; /* ops are enqueued in program order, by one thread */
  /* The first op of the job that ends with op `last`; whether op i ends one; a job of the communication lane is about
   * to be submitted. */
  int32_t (*first_of_job)(const sluice_template_t* schedule, int32_t last);
  int (*ends_job)(const sluice_template_t* schedule, int32_t i);
  void (*note_comm_job)(sluice_pass_t* pass, int32_t i);
  /* Where somebody chooses by times: a mark before the pass and behind it. A pass without its time is one that nobody
   * chooses by, and no failure. */
  sluice_status_t (*mark)(const sluice_pass_t* pass, int32_t is_end);
  /* What choosing learns of a pass of training that was joined. lane_ns: times of its ops by lane. */
  void (*report)(sluice_pass_t* pass, const sluice_pass_report_t* report, const uint64_t* lane_ns);
  /* The times of the layer's last passes go into its next report, if they are through. */
  void (*take_pass_times)(sluice_moe_t* moe);
  /* Around a pass: its ops may be timed on the device, whose times then replace those of enqueueing, if it gives them.
   * begin_ns: when it began. */
  void (*begin_op_times)(const sluice_pass_t* pass);
  void (*take_op_times)(sluice_pass_t* pass, uint64_t begin_ns);
} sluice_pass_lanes_t;

extern const sluice_pass_lanes_t sluice_lanes_of_threads;
extern const sluice_pass_lanes_t sluice_lanes_of_streams;

/* Only passes of training count: a forward that keeps nothing and wgrad alone take other times. */
static inline int sluice_pass_is_of_training(const sluice_pass_t* pass) {
  const sluice_template_spec_t* spec = &pass->schedule->spec;
  return spec->only == 0 && (spec->direction == SLUICE_FORWARD ? spec->keep : spec->dgrad);
}

static inline const sluice_pass_lanes_t* sluice_pass_lanes(const sluice_pass_t* pass) {
  return pass->moe->strategies->lanes;
}

#endif /* SLUICE_BACKEND_MOE_PASS_LANES_H_ */
