// SPDX-License-Identifier: Apache-2.0
/* Ranks of the fake NCCL in several processes: a shared folder with a file for each rank that has come or gone, and for
 * each message. SLUICE_FAKE_NCCL_FOLDER names it; without it all ranks are threads of this process. */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef enum sluice_fake_note_e { SLUICE_FAKE_HERE = 0, SLUICE_FAKE_GONE = 1 } sluice_fake_note_t;

int sluice_fake_nccl_has_folder(void);
void sluice_fake_nccl_note(uint64_t group, int rank, sluice_fake_note_t what);
int sluice_fake_nccl_is_noted(uint64_t group, int rank, sluice_fake_note_t what);

/* The message with this number between two ranks. */
typedef struct sluice_fake_letter_s {
  uint64_t group;
  int from, to;
  int64_t number;
  int is_registered; /* whether its buffer is registered */
} sluice_fake_letter_t;

/* Does not wait for the receiver; NCCL may or may not wait. */
void sluice_fake_nccl_post(const sluice_fake_letter_t* letter, const void* data, size_t bytes);
/* Returns whether the message was there, with that many bytes; then removes it. */
int sluice_fake_nccl_collect(sluice_fake_letter_t* letter, void* data, size_t bytes);
