// SPDX-License-Identifier: Apache-2.0
/* A small model on the ranks of a pipeline, which are threads: a chain of layers, one per virtual stage, whose
 * gradients accumulate in micro-batch order. The reference is the same model in one loop; both must have the same bits.
 * Shapes differ between micro-batches, and messages also contain integers, booleans and empty tensors. */
#pragma once

#include "capi/test/pipeline/pipeline_calls.h"
#include "capi/test/pipeline/pipeline_model.h"
#include "capi/test/pipeline/pipeline_types.h"

/* p stages, one replica, v = 1, in_flight as the library chooses. Free: pw_world_free. */
pw_world_t* pw_world_new(const char* transport, int32_t num_stages);
void pw_world_add(pw_world_t* world, int32_t num_micro_batches, int32_t forward_only);
/* Runs all batches on all ranks, then the reference. Each rank restores its gradients after a failed batch, so
 * gradients are those of the successful batches. */
void pw_world_run(pw_world_t* world);
void pw_world_free(pw_world_t* world);
