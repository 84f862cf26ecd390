// SPDX-License-Identifier: Apache-2.0
/* Checks whether memory is populated, and populates it. */
#pragma once

#include <stdint.h>

/* Returns whether most of a range of at least a page is in memory already, by samples: then it is not fresh, and
 * writing it does not wait. */
int sluice_pages_are_resident(uintptr_t begin, uintptr_t end);

/* Populates whole pages. Their contents are unchanged, and other threads may write them at the same time. Returns 0 if
 * the system cannot (Linux before 5.14), or is out of memory: pages are then populated as they are written. */
int sluice_pages_populate(uintptr_t begin, uintptr_t end);
