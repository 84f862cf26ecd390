// SPDX-License-Identifier: Apache-2.0
/* The callbacks of a rank of a pipeline's world. Each callback checks its call and computes. */
#pragma once

#include "capi/test/pipeline/pipeline_types.h"

/* The callbacks, without `reduce` if this rank does not reduce. */
sluice_pipeline_callbacks_t pw_callbacks_of(const pw_rank_t* rank);

/* Checks that the saved tensors of a micro-batch are unchanged, and releases them. */
void pw_give_back(pw_rank_t* rank, int32_t micro_batch);

/* Records an error. */
void pw_wrong(pw_rank_t* rank, const char* format, ...) __attribute__((format(printf, 2, 3)));
