/* Callbacks into a host's process group as a communicator; also the frame for plugins (mpi). */
#ifndef SLUICE_BACKEND_COMM_HOST_HOST_COMM_H_
#define SLUICE_BACKEND_COMM_HOST_HOST_COMM_H_

#include "backend/comm/comm.h"

/* sluice_comm_create_host under another name ("mpi"; an immutable string). */
sluice_status_t sluice_host_comm_create(const sluice_comm_config_t* config, const sluice_host_comm_vtable_t* vtable,
                                        void* user, const char* name, sluice_comm_t** out_comm);

#endif /* SLUICE_BACKEND_COMM_HOST_HOST_COMM_H_ */
