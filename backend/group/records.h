// SPDX-License-Identifier: Apache-2.0
/* Records that all ranks give each other, one each, before they do something together: compared field by field by a
 * table, or with a refusal instead. Knows no communicator: sluice_comm_agree gathers records. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "backend/base/status.h"

/* ---- refusals ---- */

/* Why a rank does not take part. The first member of records that may carry one. */
typedef struct sluice_refusal_s {
  int32_t status; /* SLUICE_OK: it does */
  char message[252];
} sluice_refusal_t;

/* `status`, with this thread's record if it is an error. */
void sluice_refusal_note(sluice_refusal_t* refusal, sluice_status_t status);

/* ---- fields ---- */

/* Two records that differ, each with its rank. */
typedef struct sluice_record_pair_s {
  const void *own, *peer;
  int32_t rank, peer_rank;
} sluice_record_pair_t;

typedef struct sluice_record_field_s {
  uint16_t offset;
  uint8_t bytes;                      /* 1, 2, 4 or 8 */
  uint8_t is_signed, is_hash;         /* is_hash: its numbers are written in hexadecimal */
  const char* name;                   /* in messages */
  const char* (*word)(int64_t value); /* what a value is called; NULL: it is a number */
  const char* hint;                   /* ends the message; NULL: "; give all ranks the same" */
  /* In place of these three: writes what a difference means, and returns how long that is; 0: it means nothing. */
  int (*describe)(const sluice_record_pair_t* pair, char* text, size_t room);
} sluice_record_field_t;

/* Fields are listed once, as X(type, member, value, the rest of the row): this is the member, the next one the row. */
#define SLUICE_RECORD_MEMBER(type, member, ...) type member;
/* The beginning of a row: where the field lies, and how wide it is. */
#define SLUICE_RECORD_FIELD(type, member)                                         \
  .offset = offsetof(type, member), .bytes = (uint8_t)sizeof(((type*)0)->member), \
  .is_signed = (__typeof__(((type*)0)->member))-1 < (__typeof__(((type*)0)->member))1

/* The first difference that means something, in words: "NAME is X on rank 1 and Y on rank 0; give all ranks the same".
 * Returns its length; 0: there is none. */
int sluice_record_describe(const sluice_record_field_t* fields, int32_t num_fields, const sluice_record_pair_t* pair,
                           char* text, size_t room);

/* ---- the records of all ranks ---- */

typedef struct sluice_records_s {
  char* data;     /* [world_size] of `bytes` each */
  uint64_t bytes; /* of one */
  int32_t rank, world_size;
  const char* what; /* begins messages: "optimizer" */
} sluice_records_t;

void sluice_records_free(sluice_records_t* records);

static inline const void* sluice_record_of(const sluice_records_t* records, int32_t rank) {
  return records->data + (uint64_t)rank * records->bytes;
}

/* Records begin with a sluice_refusal_t. PEER_REFUSED names the first rank that has one: "WHAT: rank 1 VERB: STATUS:
 * MESSAGE". */
sluice_status_t sluice_records_check_refusals(const sluice_records_t* records, const char* verb);
/* Each with that of rank 0, so that all ranks find the same. MISMATCH names the first rank that differs. */
sluice_status_t sluice_records_compare(const sluice_records_t* records, const sluice_record_field_t* fields,
                                       int32_t num_fields);

#define SLUICE_NUM_FIELDS(fields) ((int32_t)(sizeof(fields) / sizeof((fields)[0])))
