/* Decisions as JSON: what was answered, by kind of layer and size of the batch. */
#ifndef SLUICE_BACKEND_TUNE_DECISIONS_JSON_H_
#define SLUICE_BACKEND_TUNE_DECISIONS_JSON_H_

#include "backend/tune/tuner_state.h"

/* Answers as JSON: the length without the terminator, written as far as `room` goes. */
uint64_t sluice_tuner_write(const sluice_tuner_t* tuner, char* text, uint64_t room);
/* Takes them, all or none. Errors: INVALID_ARGUMENT naming line or field, NO_MEMORY. */
sluice_status_t sluice_tuner_read(sluice_tuner_t* tuner, const char* text, uint64_t length);
/* An answer for layers of the table's kind; one of an n that they cannot have is left out, with a word. */
void sluice_tuner_take_import(sluice_tuner_table_t* table, const sluice_import_t* import);

#endif /* SLUICE_BACKEND_TUNE_DECISIONS_JSON_H_ */
