// SPDX-License-Identifier: Apache-2.0
/* Writes and reads the tuner's decisions as JSON: answers by kind of layer and size of the batch. */
#pragma once

#include "backend/tune/tuner_state.h"

/* Writes the answers as JSON, at most `room` bytes. Returns the full length without the terminator. */
uint64_t sluice_tuner_write(const sluice_tuner_t* tuner, char* text, uint64_t room);
/* Imports answers, all or none. Errors: INVALID_ARGUMENT with the line or field, NO_MEMORY. */
sluice_status_t sluice_tuner_read(sluice_tuner_t* tuner, const char* text, uint64_t length);
/* Takes an answer for layers of the table's kind. An n that these layers cannot have is skipped, with a log line. */
void sluice_tuner_take_import(sluice_tuner_table_t* table, const sluice_import_t* import);
