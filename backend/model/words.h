// SPDX-License-Identifier: Apache-2.0
/* The names of config values in messages: "silu", not 4. One function for each enum, and "unknown" for other numbers;
 * sluice_dtype_name and sluice_restore_name do the same for theirs. */
#pragma once

#include <stdint.h>

const char* sluice_activation_word(int64_t activation);
const char* sluice_gated_word(int64_t gated);
const char* sluice_wgrad_word(int64_t wgrad_mode);
const char* sluice_chunking_word(int64_t chunking);
const char* sluice_grouping_word(int64_t grouping);
const char* sluice_deduplicate_word(int64_t deduplicate);
const char* sluice_wire_word(int64_t wire_dtype);
const char* sluice_weights_word(int64_t weight_format);
const char* sluice_restore_word(int64_t policy); /* of a config, which may be open */
