// SPDX-License-Identifier: Apache-2.0
/* Encodings of an f32 layer's rows for exchanges: fewer bytes than in memory, if the context asks for it
 * (SLUICE_WIRE_*). Rows are encoded in place, where they were packed, and decoded in place, where they arrived: nothing
 * is allocated, and slots have the size of plain rows. Rows that stay on their rank keep their bits. A row's bits do
 * not depend on which rows are sent with it. */
#pragma once

#include "backend/moe/pass/pass.h"

typedef struct sluice_wire_s {
  uint64_t (*row_bytes)(int64_t width); /* at most the bytes of the row */
  /* Encodes num_rows rows of `width` f32 in sequence at `data`. Afterwards the encoded bytes lie at the front. */
  void (*write)(char* data, int64_t num_rows, int64_t width);
  /* Decodes rows that arrived at the end of the same memory. Afterwards the rows fill it. */
  void (*read)(char* data, int64_t num_rows, int64_t width);
} sluice_wire_t;

extern const sluice_wire_t sluice_wire_bf16;
extern const sluice_wire_t sluice_wire_int8;

/* The encoding of the layer's rows; NULL: plain. */
const sluice_wire_t* sluice_wire_of(const sluice_moe_t* moe);

/* For the transfer that pass->arrays describe: before it is posted, and after it has ended. */
void sluice_wire_write_sent(sluice_pass_t* pass, const sluice_wire_t* wire);
void sluice_wire_read_received(sluice_pass_t* pass, const sluice_wire_t* wire);
