/* Under a trace, on a far device: when the ops of a pass ran there, instead of when they were enqueued. */
#ifndef SLUICE_BACKEND_MOE_PASS_OP_TIMES_H_
#define SLUICE_BACKEND_MOE_PASS_OP_TIMES_H_

#include "backend/moe/pass/pass.h"

/* Before the pass: whether its ops are timed. Returns the clock that their times count from. */
uint64_t sluice_op_times_begin(const sluice_pass_t* pass);
/* After its join: waits until the device is through, then fills pass->times. Keeps what is there where the device has
 * no times, where a peer is lost or after the communicator's timeout: the pass itself has not failed. */
void sluice_op_times_take(sluice_pass_t* pass, uint64_t begin_ns);

#endif /* SLUICE_BACKEND_MOE_PASS_OP_TIMES_H_ */
