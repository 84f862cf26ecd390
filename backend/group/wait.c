// SPDX-License-Identifier: Apache-2.0
#include "backend/group/wait.h"

#include "backend/base/clock.h"
#include "backend/base/log.h"
#include "backend/base/math.h"

#define SECOND_NS     UINT64_C(1000000000)
#define NOTE_AFTER_NS SECOND_NS
#define SLICE_NS      (SECOND_NS / 5) /* an abort that no transport reports still ends a wait within this */

sluice_wait_t sluice_wait_begin(uint64_t timeout_ns, uint64_t warn_ns) {
  const uint64_t now_ns = sluice_now_ns();
  return (sluice_wait_t){.start_ns = now_ns,
                         .deadline_ns = sluice_add_saturating(now_ns, timeout_ns),
                         .note_ns = sluice_add_saturating(now_ns, sluice_min_u64(NOTE_AFTER_NS, timeout_ns / 4)),
                         .warn_ns = warn_ns,
                         .next_warn_ns = sluice_add_saturating(now_ns, warn_ns)};
}

uint64_t sluice_wait_slice_end(const sluice_wait_t* wait) {
  const uint64_t due_ns = sluice_min_u64(wait->deadline_ns, sluice_min_u64(wait->next_warn_ns, wait->note_ns));
  return sluice_min_u64(due_ns, sluice_now_ns() + SLICE_NS);
}

int sluice_wait_takes_note(sluice_wait_t* wait, uint64_t now_ns) {
  if (now_ns < wait->note_ns) return 0;
  wait->note_ns = UINT64_MAX;
  return 1;
}

void sluice_wait_warn(sluice_wait_t* wait, uint64_t now_ns, int32_t rank, int32_t missing, const char* phase) {
  if (now_ns < wait->next_warn_ns) return;
  wait->next_warn_ns = sluice_add_saturating(now_ns, wait->warn_ns);
  sluice_log(SLUICE_LOG_WARN, "rank %d has waited %.1f s for rank %d: %s; it gives up in %.0f s", rank,
             sluice_seconds(now_ns - wait->start_ns), missing, phase, sluice_seconds(wait->deadline_ns - now_ns));
}

int32_t sluice_wait_find_straggler(int32_t missing, int32_t world_size,
                                   int32_t (*waits_for)(const void* user, int32_t rank), const void* user) {
  int32_t straggler = missing;
  for (int32_t step = 0; straggler >= 0 && step < world_size; ++step) {
    const int32_t next = waits_for(user, straggler);
    if (next < 0) break;
    straggler = next;
  }
  return straggler;
}
