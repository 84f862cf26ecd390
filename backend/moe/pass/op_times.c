#include "backend/moe/pass/op_times.h"

#include <time.h>

#include "backend/base/clock.h"

#define NAP_NS        20000
#define ALONE_WAIT_NS (UINT64_C(600) * 1000000000) /* without a communicator, whose timeout counts otherwise */

static int is_timed(const sluice_pass_t* pass) {
  return pass->moe->shape.is_far && pass->context->trace.capacity > 0 && !pass->captured;
}

uint64_t sluice_op_times_begin(const sluice_pass_t* pass) {
  if (pass->moe->shape.is_far) pass->context->device->far->time_ops(pass->context->device, is_timed(pass));
  return sluice_now_ns();
}

static int peers_are_there(sluice_comm_t* comm) {
  return comm == NULL || comm->vtable->poll == NULL || comm->vtable->poll(comm) == SLUICE_OK;
}

/* *out_waited: the pass ended while this looked on. */
static int wait_for_times(const sluice_pass_t* pass, uint64_t* begins, uint64_t* ends, int* out_waited) {
  sluice_device_t* device = pass->context->device;
  sluice_comm_t* comm = pass->context->comm;
  const struct timespec nap = {.tv_nsec = NAP_NS};
  uint64_t begin_ns = sluice_now_ns(), most_ns = comm != NULL ? comm->timeout_ns : ALONE_WAIT_NS;
  for (*out_waited = 0;; *out_waited = 1) {
    int32_t found = device->far->op_times(device, pass->schedule->num_ops, begins, ends);
    if (found != SLUICE_OP_TIMES_LATER) return found == SLUICE_OP_TIMES_TAKEN;
    if (!peers_are_there(comm) || sluice_now_ns() - begin_ns > most_ns) return 0;
    nanosleep(&nap, NULL);
  }
}

/* The device's times count from the pass's first event, which may have waited long for the host's own work before it.
 * Where the end was seen, they are laid so that the last op ends then. */
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

void sluice_op_times_take(sluice_pass_t* pass, uint64_t begin_ns) {
  if (!is_timed(pass)) return;
  int32_t num_ops = pass->schedule->num_ops;
  uint64_t bytes = 2 * (uint64_t)num_ops * sizeof(uint64_t);
  uint64_t* times = sluice_alloc(&pass->context->allocator, bytes, "times of ops");
  if (times == NULL) return;
  int waited = 0;
  if (wait_for_times(pass, times, times + num_ops, &waited)) place(pass, begin_ns, times, times + num_ops, waited);
  sluice_free(&pass->context->allocator, times, bytes);
}
