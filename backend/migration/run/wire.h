// SPDX-License-Identifier: Apache-2.0
/* The messages between ranks of a migration, as bytes. All ranks have the same build, so structs are sent as they are.
 * Private to backend/migration/run. */
#pragma once

#include <stdint.h>

#define SLUICE_MOVE_MAGIC 0x4d564c53u /* "SLVM" */

/* Precedes a chunk's bytes. */
typedef struct sluice_move_chunk_head_s {
  uint32_t magic;
  uint32_t reserved;
  uint64_t epoch;
  uint64_t item;
  uint64_t bytes;
} sluice_move_chunk_head_t;

enum { SLUICE_MOVE_WORD_ANNOUNCE = 16 }; /* in addition to SLUICE_MOVE_SAY_* */

/* A control message, without payload. */
typedef struct sluice_move_word_s {
  uint32_t magic;
  int32_t kind; /* SLUICE_MOVE_SAY_READY, _AGREE, _REFUSE; SLUICE_MOVE_WORD_ANNOUNCE */
  uint64_t epoch;
  uint64_t leaves, arrives; /* in an announcement: hashes of what is sent to the receiver, and expected from it */
  int32_t status, rank;     /* in a refusal */
  char reason[512];
} sluice_move_word_t;

/* Messages of one peer and tag arrive in the order in which they were sent. */
#define SLUICE_MOVE_WORD_TAG UINT64_MAX
static inline uint64_t sluice_move_chunk_tag(int32_t when) { return (uint64_t)when; }

/* The user word of a request. */
#define SLUICE_MOVE_IS_CHUNK (UINT64_C(1) << 32)
static inline uint64_t sluice_move_word_of_chunk(int32_t index) { return SLUICE_MOVE_IS_CHUNK | (uint64_t)index; }
