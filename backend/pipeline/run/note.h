/* Numbers of the host that ride with the ends of batches. Private to backend/pipeline/run. */
#ifndef SLUICE_BACKEND_PIPELINE_RUN_NOTE_H_
#define SLUICE_BACKEND_PIPELINE_RUN_NOTE_H_

#include "sluice/base.h"

/* What one rank said with the end of one batch. */
typedef struct sluice_stage_note_s {
  double* numbers; /* [room] */
  int32_t count;   /* of them in force */
  int32_t room;
} sluice_stage_note_t;

/* numbers: [count] at any alignment; copied. Errors: NO_MEMORY, after which nothing is in force. */
sluice_status_t sluice_stage_note_store(sluice_stage_note_t* note, const void* numbers, int32_t count);
void sluice_stage_note_free(sluice_stage_note_t* note);

#endif /* SLUICE_BACKEND_PIPELINE_RUN_NOTE_H_ */
