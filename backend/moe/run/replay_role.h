/* What a forward has to do with earlier ones, where somebody chooses n or plans. What activation checkpointing runs
 * again must leave what the first time left, or the host cannot put one in the other's place: the same n and the same
 * plan. So a first forward is noted, and a repetition looks back for it (layer/replay.h). Private to moe/run. */
#ifndef SLUICE_BACKEND_MOE_RUN_REPLAY_ROLE_H_
#define SLUICE_BACKEND_MOE_RUN_REPLAY_ROLE_H_

#include "backend/moe/run/forward_call.h"

typedef struct sluice_replay_role_s {
  int32_t is_repetition;
  /* Before the header: what this rank's routing says. */
  void (*look_back)(sluice_forward_t* f);
  /* Behind it: the forward that this one repeats on all ranks; NULL: none. */
  const sluice_replay_forward_t* (*choose)(sluice_forward_t* f, uint32_t like);
  /* Once all ranks go on. They do this for the same forwards. */
  void (*note)(const sluice_forward_t* f);
} sluice_replay_role_t;

/* Where nobody chooses, all forwards are alike. */
const sluice_replay_role_t* sluice_replay_role_of(const sluice_moe_t* moe, const sluice_moe_forward_args_t* args);

#endif /* SLUICE_BACKEND_MOE_RUN_REPLAY_ROLE_H_ */
