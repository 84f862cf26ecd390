// SPDX-License-Identifier: Apache-2.0
#include "backend/planner/stages/problem/messages.h"

#include <math.h>

uint64_t sluice_stages_boundary_bytes(const sluice_stages_tables_t* t, const int32_t* stage_of, int32_t boundary) {
  uint64_t bytes = 0;
  for (int32_t i = 0; i < t->num_layers; ++i) {
    if (stage_of[i] > boundary) continue;
    for (int32_t a = t->first_reader[i]; a < t->first_reader[i + 1]; ++a) {
      if (stage_of[t->readers[a]] <= boundary) continue;
      bytes += t->problem->layers[i].output_bytes;
      break;
    }
  }
  return bytes;
}

uint64_t sluice_stages_message_bytes(const sluice_stages_tables_t* t, int32_t stage, uint64_t in_bytes,
                                     uint64_t out_bytes) {
  return in_bytes + (uint64_t)t->in_flight[stage] * out_bytes;
}

double sluice_stages_link_seconds(const sluice_stages_problem_t* p, int32_t boundary, uint64_t bytes) {
  if (p->links == NULL || bytes == 0 || boundary < 0 || boundary >= p->num_stages - 1) return 0;
  const sluice_stages_link_t* link = &p->links[boundary];
  const double once = link->latency_seconds + (double)bytes / link->bytes_per_second;
  return link->full_duplex ? once : 2 * once;
}

double sluice_stages_message_seconds(const sluice_stages_problem_t* p, int32_t stage, uint64_t in_bytes,
                                     uint64_t out_bytes) {
  const double in = sluice_stages_link_seconds(p, stage - 1, in_bytes);
  const double out = sluice_stages_link_seconds(p, stage, out_bytes);
  /* Two wires work concurrently; the one that copies share is the machine's own, which both cross. */
  return p->copies_share_links ? in + out : fmax(in, out);
}

double sluice_stages_turn_seconds(const sluice_stages_problem_t* p, double compute, double messages, double copies) {
  return fmax(compute, p->copies_share_links ? messages + copies : fmax(messages, copies));
}

double sluice_stages_copy_seconds(const sluice_stages_problem_t* p, uint64_t bytes) {
  if (bytes == 0) return 0;
  return p->copy_bytes_per_second > 0 ? 2 * (double)bytes / p->copy_bytes_per_second : INFINITY;
}
