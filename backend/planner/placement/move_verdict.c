// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/placement/move_verdict.h"

#include <math.h>

#include "backend/base/status.h"

static sluice_status_t check_time(double value, const char* name) {
  return SLUICE_REQUIRE(isfinite(value) && value >= 0, "move: %s is %g; it must be finite and at least 0", name, value);
}

sluice_status_t sluice_move_verdict(const sluice_planner_move_t* m, int32_t* out_verdict) {
  SLUICE_TRY(check_time(m->step_seconds, "step_seconds"));
  SLUICE_TRY(check_time(m->planned_step_seconds, "planned_step_seconds"));
  SLUICE_TRY(check_time(m->move_seconds, "move_seconds"));
  SLUICE_TRY(check_time(m->horizon_steps, "horizon_steps"));
  SLUICE_TRY(SLUICE_REQUIRE(m->least_gain >= 0 && m->least_gain < 1,
                            "move: least_gain is %g; it must be in [0, 1): a share of a step", m->least_gain));
  SLUICE_TRY(SLUICE_REQUIRE(m->least_steps >= 0, "move: least_steps is %lld; it must be at least 0",
                            (long long)m->least_steps));
  const double gain = m->step_seconds - m->planned_step_seconds;
  *out_verdict = SLUICE_MOVE_PAYS;
  if (gain <= 0) {
    *out_verdict = SLUICE_MOVE_NO_GAIN;
  } else if (gain < m->least_gain * m->step_seconds) {
    *out_verdict = SLUICE_MOVE_SMALL;
  } else if (m->steps_since_move >= 0 && m->steps_since_move < m->least_steps) {
    *out_verdict = SLUICE_MOVE_TOO_SOON;
  } else if (gain * m->horizon_steps <= m->move_seconds) {
    *out_verdict = SLUICE_MOVE_COSTS_MORE;
  }
  return SLUICE_OK;
}
