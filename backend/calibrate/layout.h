/* Where ranks lie: a link between processes of one machine is not that between machines. */
#ifndef SLUICE_BACKEND_CALIBRATE_LAYOUT_H_
#define SLUICE_BACKEND_CALIBRATE_LAYOUT_H_

#include "backend/comm/comm.h"

enum { SLUICE_LAYOUT_BYTES = 64 };

/* "1 host", or "2 hosts (<hash of which ranks share one>)"; the same on all ranks. comm NULL: "1 host". Collective.
 * Errors: those of exchanges. */
sluice_status_t sluice_layout_describe(sluice_comm_t* comm, char out[SLUICE_LAYOUT_BYTES]);

/* The same for a rank that says that it is on `host`: a number that tells machines apart, >= 0. */
sluice_status_t sluice_layout_of(sluice_comm_t* comm, int64_t host, char out[SLUICE_LAYOUT_BYTES]);

#endif /* SLUICE_BACKEND_CALIBRATE_LAYOUT_H_ */
