/* Ranks, as threads, that do the same while one call of the system or one allocation fails in turn: of every place that
 * calls the system, and of every way to an allocation, the first, the second and the last hit (with SLUICE_FULL set
 * every hit of an allocation). Each rank has a status before its deadlines, nothing is left behind, and the same works
 * afterwards. What went well although something failed has the same bits. */
#ifndef SLUICE_CAPI_TEST_NTH_NTH_RANKS_H_
#define SLUICE_CAPI_TEST_NTH_NTH_RANKS_H_

#include "sluice/comm.h"

enum { NTH_MOST_RANKS = 4 };

typedef struct nth_rank_s {
  sluice_local_group_t* group;
  sluice_local_group_t* second; /* of all ranks too, for who has to meet after the first has ended */
  sluice_local_group_t* pair;   /* of ranks 2 i and 2 i + 1, where the number of ranks is even */
  int32_t rank, world_size;
  sluice_status_t status; /* the first that is not OK */
  char message[512];      /* its error */
  uint64_t took_ns, digest;
  int64_t live_blocks; /* that a context has left */
  int32_t is_torn;     /* what lies here is neither the old nor the new; or what had to work did not */
} nth_rank_t;

/* Makes what a rank needs, works with it, and gives everything back. */
typedef sluice_status_t (*nth_work_t)(nth_rank_t* me);

/* Keeps the last error of this thread, where `status` is one. Returns it. */
sluice_status_t nth_said(nth_rank_t* me, sluice_status_t status);
/* The rank's end of its group, with the deadline of the suite. */
sluice_status_t nth_local(nth_rank_t* me, sluice_comm_t** out_comm);
/* The same of the others. */
sluice_status_t nth_second(nth_rank_t* me, sluice_comm_t** out_comm);
sluice_status_t nth_pair(nth_rank_t* me, sluice_comm_t** out_comm);
/* Connections among the ranks of `parent`, with the deadline of the suite. */
sluice_status_t nth_tcp(nth_rank_t* me, sluice_comm_t* parent, sluice_comm_t** out_comm);

/* The body of a case of cmocka. */
void nth_call(int32_t num_ranks, nth_work_t work);

/* Before the cases: who hangs says what failed. */
void nth_watch(void);

#endif /* SLUICE_CAPI_TEST_NTH_NTH_RANKS_H_ */
