// SPDX-License-Identifier: Apache-2.0
/* Counters of a pass's time outside of its ops. They count only while a trace is kept. */

#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

static sluice_context_stats_t stats_of(const rig_t* rig) {
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  WORKS(sluice_context_get_stats(rig->context, 0, &stats));
  return stats;
}

TEST(WalkStats_WhileATraceIsKept_CountBindingAndWalking) {
  rig_t rig;
  const sluice_moe_config_t config = rig_config();
  WORKS(rig_open(&rig, NULL, &config));
  WORKS(rig_round(&rig, NULL));
  sluice_context_stats_t stats = stats_of(&rig);
  assert_true(stats.num_passes == 2 && stats.num_walks == 0);
  assert_true(stats.bind_cpu_ns == 0 && stats.walk_cpu_ns == 0 && stats.num_wakes == 0 && stats.wait_ns == 0);
  assert_true(stats.num_readings == 0 && stats.readings_cpu_ns == 0);
  WORKS(sluice_context_trace(rig.context, 64));
  for (int i = 0; i < 20; ++i) WORKS(rig_round(&rig, NULL));
  stats = stats_of(&rig);
  assert_int_equal(stats.num_walks, 40);
  assert_true(stats.bind_cpu_ns > 0 && stats.walk_cpu_ns > 0);
  /* Clock readings cover parts of the binding, the ops and the whole pass; no part exceeds the whole. */
  assert_true(stats.num_readings > stats.num_walks && stats.readings_cpu_ns >= stats.num_readings);
  assert_true(stats.readings_cpu_ns < stats.bind_cpu_ns + stats.walk_cpu_ns);
  /* With one rank no op waits, so the clock is read once around all ops, whatever the number of chunks. */
  assert_true(stats.last_num_chunks > 1 && stats.num_readings <= 5 * stats.num_walks);
  /* With one rank all ops run on the calling thread, so there is no lane to wait for. */
  assert_true(stats.num_wakes == 0 && stats.wait_ns == 0 && stats.wake_cpu_ns == 0);
  WORKS(sluice_context_trace(rig.context, 0));
  WORKS(rig_round(&rig, NULL));
  assert_int_equal(stats_of(&rig).num_walks, 40);
  rig_close(&rig);
}
