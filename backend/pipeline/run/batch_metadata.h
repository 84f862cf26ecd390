// SPDX-License-Identifier: Apache-2.0
/* Numbers of the host that are sent with the ends of batches. Private to backend/pipeline/run. */
#pragma once

#include "sluice/base.h"

/* The numbers of one rank at the end of one batch. */
typedef struct sluice_batch_metadata_s {
  double* numbers; /* [room] */
  int32_t count;   /* of valid numbers */
  int32_t room;
} sluice_batch_metadata_t;

/* numbers: [count], any alignment; copied. Errors: NO_MEMORY; then no numbers are valid. */
sluice_status_t sluice_batch_metadata_store(sluice_batch_metadata_t* note, const void* numbers, int32_t count);
void sluice_batch_metadata_free(sluice_batch_metadata_t* note);
