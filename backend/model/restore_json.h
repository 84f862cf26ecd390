// SPDX-License-Identifier: Apache-2.0
/* Writes the table of restore policies as JSON, for readers outside of C. */
#pragma once

#include <stdint.h>

/* Writes at most `room` bytes to data (NULL: none), terminated. Returns the full length without the terminator. */
uint64_t sluice_restore_write_json(char* data, uint64_t room);
