// SPDX-License-Identifier: Apache-2.0
/* The table of restore policies as JSON, for those who cannot read C. */
#ifndef SLUICE_BACKEND_MODEL_RESTORE_JSON_H_
#define SLUICE_BACKEND_MODEL_RESTORE_JSON_H_

#include <stdint.h>

/* Writes what fits into `room` bytes of data (NULL: none), terminated. Returns the bytes of all, without the end. */
uint64_t sluice_restore_write_json(char* data, uint64_t room);

#endif /* SLUICE_BACKEND_MODEL_RESTORE_JSON_H_ */
