// SPDX-License-Identifier: Apache-2.0
/* Collects ops in program order and derives their dependencies. Private to backend/schedule/template.
 *
 * Callers need no checks: the builder keeps the first error, writes nothing after it, and sluice_builder_finish returns
 * it. */
#pragma once

#include "backend/schedule/schedule.h"

typedef struct sluice_builder_s {
  sluice_op_t* ops;
  int32_t num_ops;
  int32_t capacity;
  int32_t ring[SLUICE_T_COUNT];
  int32_t single_rank;
  int32_t num_chunks;
  sluice_slot_ref_t* homes; /* [T_COUNT][n] */
  sluice_status_t status;   /* of the first error */
  sluice_op_t refused;      /* dummy that is returned for an op that does not fit */
} sluice_builder_t;

/* Chunk i of `tensor` is in slot i mod ring of it, until sluice_builder_set_home changes that. */
void sluice_builder_init_homes(sluice_builder_t* builder);
void sluice_builder_set_home(sluice_builder_t* builder, int32_t tensor, int32_t chunk, int32_t other, int32_t slot);
sluice_slot_ref_t sluice_builder_home(const sluice_builder_t* builder, int32_t tensor, int32_t chunk);

/* Adds an op on the lane of its kind and returns it, for sluice_op_read / sluice_op_write. With one rank the
 * communication lane's ops run on the compute lane; copies keep their lanes. Errors: too many ops, an unknown kind or
 * chunk, a kind without a lane; too many accesses of an op. */
sluice_op_t* sluice_builder_add(sluice_builder_t* builder, int32_t kind, int32_t chunk);
/* Makes the last two ops, which are exchanges, a group. */
void sluice_builder_group(sluice_builder_t* builder);
/* Declares an access of the op's chunk, at its home; a chunk of -1 accesses every slot of every home. */
void sluice_op_read(sluice_builder_t* builder, sluice_op_t* op, int32_t tensor);
void sluice_op_write(sluice_builder_t* builder, sluice_op_t* op, int32_t tensor);

/* Derives dependencies between lanes from the accesses: read after write, write after read, write after write, in
 * program order; those implied by lane order and by other dependencies are omitted. Writes op->first_dep, op->num_deps
 * and the indices, at most `capacity` of them, to `deps`. Errors: INTERNAL, the first error, or more dependencies than
 * fit; NO_MEMORY. */
sluice_status_t sluice_builder_finish(sluice_builder_t* builder, int32_t* deps, int32_t capacity,
                                      int32_t* out_num_deps);
