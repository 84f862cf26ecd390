// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/stages/problem/in_flight.h"

#include <stddef.h>

#include "backend/base/math.h"

int32_t sluice_stages_in_flight(const sluice_stages_problem_t* p, int32_t stage) {
  const int32_t m = p->num_micro_batches;
  if (p->in_flight != NULL) return p->in_flight[stage];
  if (p->schedule == SLUICE_STAGES_GPIPE) return m;
  if (p->schedule == SLUICE_STAGES_1F1B) return (int32_t)sluice_min(m, p->num_stages - stage);
  /* The last stage gets the gradient of a forward at once, and backwards have priority. */
  if (stage == p->num_stages - 1) return 1;
  return (int32_t)sluice_min(m, p->in_flight_limit > 0 ? p->in_flight_limit : p->num_stages);
}
