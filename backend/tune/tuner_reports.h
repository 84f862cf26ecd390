// SPDX-License-Identifier: Apache-2.0
/* Reads the reports in a header about passes that all ranks ran with the same choice. Private to backend/tune. */
#pragma once

#include "backend/tune/tuner_state.h"

void sluice_tuner_note_switch(sluice_tuner_table_t* table, sluice_decision_state_t* decision);
/* Whether the received report is of a first pass after a switch; true once. */
int sluice_tuner_is_first(sluice_decision_state_t* decision, int32_t direction);
/* The time in ns, on the slowest rank, of the pass that all ranks ran with the same choice; 0: none. out_rows: of the
 * fullest rank. out_lanes: a rank that waits for another counts the wait as communication, so the rank with the least
 * communication shows the cost of exchanges. */
uint64_t sluice_tuner_slowest(const sluice_step_report_t* const* reports, int32_t world_size, int32_t direction,
                              int64_t* out_rows, sluice_lanes_t* out_lanes);
/* Bytes per second on the slowest rank that measured them; 0: no rank did. */
void sluice_tuner_slowest_bytes(const sluice_step_report_t* const* reports, int32_t world_size, double* out_memory,
                                double* out_copies);
/* Whether any rank ran a training pass since the last forward. */
int sluice_tuner_has_trained(const sluice_step_report_t* const* reports, int32_t world_size);
