/* The all-reduce of transports that have none of their own. Private to backend/comm. */
#ifndef SLUICE_BACKEND_COMM_ALL_REDUCE_H_
#define SLUICE_BACKEND_COMM_ALL_REDUCE_H_

#include "backend/comm/comm.h"

/* By one exchange of small data, two of large. */
sluice_status_t sluice_comm_reduce_by_exchanges(sluice_comm_t* comm, int64_t* data, int64_t count, int32_t op,
                                                const char* phase);

/* A step that failed here before it was posted: the peers would wait for it until their deadlines. Returns status. */
sluice_status_t sluice_comm_fail_and_tell(sluice_comm_t* comm, sluice_status_t status);

#endif /* SLUICE_BACKEND_COMM_ALL_REDUCE_H_ */
