// SPDX-License-Identifier: Apache-2.0
/* How rows of an f32 layer are written on their way to another rank: in fewer bytes than they have in memory, where the
 * context says so (SLUICE_WIRE_*). They are written in place, where they were packed to be sent, and read in place,
 * where they arrived: nothing is allocated, and slots are those of rows as they are. Rows that stay on their rank keep
 * their bits. A row's bits do not depend on which rows travel with it. */
#ifndef SLUICE_BACKEND_MOE_OPS_WIRE_H_
#define SLUICE_BACKEND_MOE_OPS_WIRE_H_

#include "backend/moe/pass/pass.h"

typedef struct sluice_wire_s {
  uint64_t (*row_bytes)(int64_t width); /* at most those of the row */
  /* num_rows rows of `width` f32 in sequence at `data`. Afterwards what is sent lies at its front. */
  void (*write)(char* data, int64_t num_rows, int64_t width);
  /* What has arrived lies at the end of the same room. Afterwards the rows fill it. */
  void (*read)(char* data, int64_t num_rows, int64_t width);
} sluice_wire_t;

extern const sluice_wire_t sluice_wire_bf16;
extern const sluice_wire_t sluice_wire_int8;

/* Of the layer's rows; NULL: as they are. */
const sluice_wire_t* sluice_wire_of(const sluice_moe_t* moe);

/* Of the transfer that pass->send and ->recv describe: before it is posted, and once it has ended. */
void sluice_wire_write_sent(sluice_pass_t* pass, const sluice_wire_t* wire);
void sluice_wire_read_received(sluice_pass_t* pass, const sluice_wire_t* wire);

#endif /* SLUICE_BACKEND_MOE_OPS_WIRE_H_ */
