// SPDX-License-Identifier: Apache-2.0
/* Decides the memory of slots that ranks exchange: memory of the communicator (NCCL: registered buffers), or the
 * context's.
 *
 * Both ends of every message must use the same kind of memory. The ranks therefore decide together, for each context,
 * in the header of its first call: registered memory if all ranks are willing, else plain memory. The decision is
 * final. If ranks pair different contexts in one call and these have decided differently, the call is a MISMATCH on all
 * ranks. */
#pragma once

#include "backend/moe/context/context.h"

/* States of a context, and its value in a header. PLAIN and OWN are final; WILLING means undecided. */
enum { SLUICE_REGISTRATION_PLAIN = 0, SLUICE_REGISTRATION_WILLING = 1, SLUICE_REGISTRATION_OWN = 2 };

/* Called for a device with memory of its own once the budget is known: the context is willing unless it has a reason
 * against it. owns_memory: the library allocates slots. */
void sluice_registered_buffers_open(sluice_context_t* context, int owns_memory);
/* The value for the next header. */
int32_t sluice_registered_buffers_word(sluice_context_t* context);
/* words: [W], of all ranks. MISMATCH on all ranks if contexts of both final states meet; else the call decides. */
sluice_status_t sluice_registered_buffers_agree(sluice_context_t* context, const int32_t* words, int32_t layer_id);
