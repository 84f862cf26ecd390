// SPDX-License-Identifier: Apache-2.0
/* Builds every form of template, for tests over all forms. */
#pragma once

#include <stddef.h>

#include "backend/schedule/check/check.h"

uint32_t next_random(uint32_t* state);

/* The values of SLUICE_RESTORE_* that T_M can have. */
extern const uint8_t restore_pre_activation_choices[3];

/* A spec of n chunks. Policies 0 to 8: the same for all chunks; above 8: one per chunk, random from the seed. */
sluice_template_spec_t spec_with(int32_t n, int32_t policy, uint32_t seed);

typedef void (*visit_fn_t)(const sluice_template_t* t, void* user);

/* Calls visit for all combinations that build: both directions, both weight-gradient modes, one rank and several, gated
 * or not, built-in experts or a callback, saved rows reused or not, bounded or not, deduplicated by rank, by node or
 * not, chunks of tokens or of expert rows, activations in T_M's slots or not, exchanges grouped or not, a whole
 * backward or dgrad and wgrad separately, and low-rank terms with simple exchanges. Returns their number. */
int64_t for_each_form(int32_t n, int32_t policy, uint32_t seed, visit_fn_t visit, void* user);

/* Writes the form as text, with two digits per chunk: the policies of T_DI and T_M. */
#define FORM_TEXT_BYTES (256 + 3 * SLUICE_MAX_CHUNKS)
void describe_form(const sluice_template_t* t, char* text, size_t bytes);
