// SPDX-License-Identifier: Apache-2.0
/* Every form of template that builds, for tests over all of them. */
#ifndef SLUICE_BACKEND_SCHEDULE_TEST_FORMS_H_
#define SLUICE_BACKEND_SCHEDULE_TEST_FORMS_H_

#include <stddef.h>

#include "backend/schedule/check/check.h"

uint32_t next_random(uint32_t* state);

/* The policies of T_M: SLUICE_RESTORE_*. */
extern const uint8_t restore_pre_activation_choices[3];

/* Policies 0 to 8 are uniform; above, every chunk has its own, from the seed. */
sluice_template_spec_t spec_with(int32_t n, int32_t policy, uint32_t seed);

typedef void (*visit_fn_t)(const sluice_template_t* t, void* user);

/* All combinations that build: both directions, both weight-gradient modes, one rank and several, gated or not, our
 * experts or the host's, saved rows reused or not, under a plan or not, deduplicated by rank, by node or not, chunks
 * cut out of tokens or of rows, exchanges grouped or not, whole backward or dgrad and wgrad separately, the
 * plainest of them also with low-rank terms. Returns their number. */
int64_t for_each_form(int32_t n, int32_t policy, uint32_t seed, visit_fn_t visit, void* user);

/* The form as text; policies as two digits per chunk: of T_DI and of T_M. */
#define FORM_TEXT_BYTES (256 + 3 * SLUICE_MAX_CHUNKS)
void describe_form(const sluice_template_t* t, char* text, size_t bytes);

#endif /* SLUICE_BACKEND_SCHEDULE_TEST_FORMS_H_ */
