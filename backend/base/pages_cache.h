// SPDX-License-Identifier: Apache-2.0
/* Caches the measured cost of fresh memory, so that a process starts with the measurements of earlier ones. */
#pragma once

#include "backend/base/pages_rates.h"

/* Leaves the rates unchanged if there is no file, or one that cannot be used. */
void sluice_pages_cache_read(sluice_pages_rates_t* rates);

/* Replaces the file. If it cannot be written, later processes measure again. */
void sluice_pages_cache_write(const sluice_pages_rates_t* rates);
