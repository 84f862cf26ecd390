// SPDX-License-Identifier: Apache-2.0
/* Advises the system to use huge pages for large memory that is about to be written for the first time, if they have
 * been measured to be faster. On a dedicated machine they are several times faster; on a machine whose host reclaims
 * free memory they can take six times as long (pages_rates.h). So the first ranges are populated half with each kind
 * and timed (pages_measure.h). */
#pragma once

#include <stdint.h>

#include "backend/base/pages_prefault.h"
#include "sluice/base.h"

/* A hint, never an error; the contents of the memory are unchanged. Only whole huge pages within the range are
 * affected; smaller ranges, systems without huge pages, and processes with SLUICE_HUGE_PAGES=0 are left alone; with 1
 * all ranges are advised. The caller will write the whole range, and no other thread touches it during the call. Any
 * thread. */
void sluice_pages_advise(const void* data, uint64_t bytes);

/* The same if only some of it may be written: decided by earlier measurements, never measured. */
void sluice_pages_advise_room(const void* data, uint64_t bytes);

/* The same for a host's tensor that a call overwrites, if it is on the CPU and without gaps. Accepts NULL. */
void sluice_pages_advise_tensor(const sluice_tensor_t* tensor);

/* The same for lists of tensors that may be slices of one allocation: slice i of all lists, then slice i + 1, and so
 * on; adjacent slices form one range. NULL lists are skipped. ahead: receives the fresh ranges; may be NULL. */
void sluice_pages_advise_slices(const sluice_tensor_t* const* lists, int32_t num_lists, int32_t count,
                                sluice_pages_prefault_t* ahead);
