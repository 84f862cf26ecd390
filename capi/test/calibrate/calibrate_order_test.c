// SPDX-License-Identifier: Apache-2.0
/* Calibration runs a barrier before it times an exchange. A fake communicator records the order of the exchanges. */

#include "sluice/sluice.h"
#include "third_party/bazel/test.h"

enum {
  MOST = 1 << 16,
  BARRIER = sizeof(int64_t), /* a barrier is an all-reduce of one number, by exchanges */
  SIZE = 3 << 15             /* used by one probe only */
};

static uint64_t bytes_of[MOST]; /* bytes that each exchange sends to rank 1 */
static int64_t count;

/* Rank 1 sends zeros at once. */
static sluice_status_t start(void* user, const sluice_exchange_t* exchange, void** out_request,
                             sluice_host_failure_t* out_failure) {
  (void)user, (void)out_failure;
  if (exchange->recv_bytes[1] > 0) memset(exchange->recv[1], 0, exchange->recv_bytes[1]);
  if (count < MOST) bytes_of[count++] = exchange->send_bytes[1];
  *out_request = bytes_of;
  return SLUICE_OK;
}

static sluice_status_t wait_for(void* user, void* request, uint64_t timeout_ns, sluice_host_failure_t* out_failure) {
  (void)user, (void)request, (void)timeout_ns, (void)out_failure;
  return SLUICE_OK;
}

/* Without the barrier, the first exchange after the GEMMs would include the time that the faster rank waits. */
TEST(Exchanges_OfEachSize_BeginAfterABarrier) {
  DEFAULTS(sluice_comm_config, comm_config);
  comm_config.rank = 0, comm_config.world_size = 2;
  const sluice_host_comm_vtable_t vtable = {
      .struct_size = sizeof vtable, .exchange_start = start, .exchange_wait = wait_for};
  sluice_comm_t* comm = NULL;
  assert_int_equal(sluice_comm_create_host(&comm_config, &vtable, NULL, &comm), SLUICE_OK);
  DEFAULTS(sluice_context_config, context_config);
  context_config.gemm = "ref";
  sluice_context_t* context = NULL;
  assert_int_equal(sluice_context_create(&context_config, comm, &context), SLUICE_OK);
  DEFAULTS(sluice_calibration_config, config);
  config.model_width = 64, config.hidden_width = 128, config.seconds = 0.1, config.refresh = 1;
  sluice_planner_t* planner = NULL;
  const int64_t before = count;
  /* The passes of calibration fail, since rank 1 sends no headers. This test reads the measurements before them. */
  assert_true(sluice_planner_calibrate(context, &config, &planner) != SLUICE_OK);
  int32_t num_samples = 0;
  for (int64_t i = before + 1; i < count; ++i) {
    if (bytes_of[i] != SIZE || bytes_of[i - 1] == SIZE) continue; /* the first of several of this size */
    ++num_samples;
    assert_int_equal(bytes_of[i - 1], BARRIER);
  }
  printf("%d samples of an exchange of %d bytes in %lld exchanges\n", num_samples, SIZE, (long long)(count - before));
  assert_true(num_samples >= 5);
  sluice_planner_destroy(planner);
  sluice_context_destroy(context);
  sluice_comm_destroy(comm);
}
