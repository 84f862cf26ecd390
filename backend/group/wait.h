// SPDX-License-Identifier: Apache-2.0
/* One wait for other ranks, in slices: until its deadline, with warnings, and with a note to the others of whom this
 * rank waits for. */
#pragma once

#include <stdint.h>

typedef struct sluice_wait_s {
  uint64_t start_ns, deadline_ns;
  uint64_t note_ns; /* when the others are told; UINT64_MAX: they are not, or have been */
  uint64_t warn_ns, next_warn_ns;
} sluice_wait_t;

/* Begins now. The note is due after a second; under a short deadline earlier, so that it can arrive before the deadline
 * of any rank. */
sluice_wait_t sluice_wait_begin(uint64_t timeout_ns, uint64_t warn_ns);
/* Until when to wait before the next look at everything else. */
uint64_t sluice_wait_slice_end(const sluice_wait_t* wait);
/* 1, once: the note is due. */
int sluice_wait_takes_note(sluice_wait_t* wait, uint64_t now_ns);
/* Logs a warning where one is due: this rank has waited for rank `missing` (-1: unknown), for `phase`. */
void sluice_wait_warn(sluice_wait_t* wait, uint64_t now_ns, int32_t rank, int32_t missing, const char* phase);

/* The rank at the end of those that wait for each other, from `missing` on: waits_for gives the rank that another one
 * says it waits for, -1 where that one is at work. */
int32_t sluice_wait_find_straggler(int32_t missing, int32_t world_size,
                                   int32_t (*waits_for)(const void* user, int32_t rank), const void* user);
