/* What there is to say about each kind of op, as data: one row per kind in op_table.c, and nowhere else. What an op
 * does is in backend/moe; docs/schedule.md says what a new one needs. */
#ifndef SLUICE_BACKEND_SCHEDULE_OP_TABLE_H_
#define SLUICE_BACKEND_SCHEDULE_OP_TABLE_H_

#include "backend/schedule/schedule.h"

#define SLUICE_OP_TABLE_ACCESSES 5

/* Zero means in no column that something was said, so that a row which lacks it is found by op_table_test. */
typedef struct sluice_op_row_s {
  const char* name;    /* in messages, traces and JSON */
  int32_t lane;        /* one more than the SLUICE_LANE_* on which it runs, of several ranks */
  int32_t is_exchange; /* with other ranks */
  int32_t is_copy;     /* what it reads and writes follows from the policy of its chunk, not from the lists below */
  /* The tensors that it reads and writes at the least, whatever the template. */
  int32_t num_reads, num_writes;
  int16_t reads[SLUICE_OP_TABLE_ACCESSES], writes[SLUICE_OP_TABLE_ACCESSES];
} sluice_op_row_t;

/* kind: in [0, SLUICE_OP_COUNT). */
const sluice_op_row_t* sluice_op_row(int32_t kind);
/* Its SLUICE_LANE_*, of several ranks; -1 where its row says none. */
int32_t sluice_op_lane(int32_t kind);

#endif /* SLUICE_BACKEND_SCHEDULE_OP_TABLE_H_ */
