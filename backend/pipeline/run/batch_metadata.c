// SPDX-License-Identifier: Apache-2.0
#include "backend/pipeline/run/batch_metadata.h"

#include <string.h>

#include "backend/base/alloc.h"

sluice_status_t sluice_batch_metadata_store(sluice_batch_metadata_t* note, const void* numbers, int32_t count) {
  note->count = 0;
  if (count > note->room) {
    double* more = sluice_alloc(sluice_process_allocator(), (uint64_t)count * sizeof *more, "pipeline: a note");
    if (more == NULL) return sluice_alloc_status();
    sluice_batch_metadata_free(note);
    *note = (sluice_batch_metadata_t){.numbers = more, .room = count};
  }
  if (count > 0) memcpy(note->numbers, numbers, (size_t)count * sizeof *note->numbers);
  note->count = count;
  return SLUICE_OK;
}

void sluice_batch_metadata_free(sluice_batch_metadata_t* note) {
  sluice_free(sluice_process_allocator(), note->numbers, (uint64_t)note->room * sizeof *note->numbers);
  *note = (sluice_batch_metadata_t){.numbers = NULL};
}
