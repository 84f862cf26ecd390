// SPDX-License-Identifier: Apache-2.0
/* Reads the reports in a header about passes that all ranks ran with the same choice. */
#include "backend/base/dtype.h"
#include "backend/tune/tuner_state.h"

void sluice_tuner_note_switch(sluice_tuner_table_t* table, sluice_decision_state_t* decision) {
  ++table->num_switches;
  decision->switched = 1u << SLUICE_FORWARD | 1u << SLUICE_BACKWARD;
}

int sluice_tuner_is_first(sluice_decision_state_t* decision, int32_t direction) {
  int first = (int)(decision->switched >> direction & 1);
  decision->switched &= ~(1u << direction);
  return first;
}

uint64_t sluice_tuner_slowest(const sluice_step_report_t* const* reports, int32_t world_size, int32_t direction,
                              int64_t* out_rows, sluice_lanes_t* out_lanes) {
  const sluice_pass_report_t* first = &reports[0]->pass[direction];
  uint64_t ns = 0;
  *out_rows = 0;
  *out_lanes = (sluice_lanes_t){(double)first->compute_ns, (double)first->comm_ns, (double)first->comm_cpu_ns,
                                (double)first->header_ns};
  for (int32_t r = 0; r < world_size; ++r) {
    const sluice_pass_report_t* p = &reports[r]->pass[direction];
    if (p->pass_ns == 0 || p->plan != first->plan || !sluice_pass_choice_is(&p->choice, &first->choice)) return 0;
    if (p->pass_ns > ns) ns = p->pass_ns;
    if (p->rows > *out_rows) *out_rows = p->rows;
    if ((double)p->compute_ns > out_lanes->compute) out_lanes->compute = (double)p->compute_ns;
    if ((double)p->header_ns < out_lanes->startup) out_lanes->startup = (double)p->header_ns;
    if ((double)p->comm_ns < out_lanes->comm) {
      out_lanes->comm = (double)p->comm_ns, out_lanes->comm_cpu = (double)p->comm_cpu_ns;
    }
  }
  return ns;
}

static double slower_of(double least, uint16_t rate) {
  const double bytes = (double)sluice_bf16_to_f32(rate) * 1e9;
  return bytes > 0 && (least <= 0 || bytes < least) ? bytes : least;
}

void sluice_tuner_slowest_bytes(const sluice_step_report_t* const* reports, int32_t world_size, double* out_memory,
                                double* out_copies) {
  *out_memory = *out_copies = 0;
  for (int32_t r = 0; r < world_size; ++r) {
    *out_memory = slower_of(*out_memory, reports[r]->memory_rate);
    *out_copies = slower_of(*out_copies, reports[r]->copy_rate);
  }
}

int sluice_tuner_has_trained(const sluice_step_report_t* const* reports, int32_t world_size) {
  for (int32_t r = 0; r < world_size; ++r) {
    if (reports[r]->pass[SLUICE_FORWARD].pass_ns > 0 || reports[r]->pass[SLUICE_BACKWARD].pass_ns > 0) return 1;
  }
  return 0;
}
