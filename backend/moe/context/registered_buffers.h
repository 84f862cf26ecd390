// SPDX-License-Identifier: Apache-2.0
/* Where the slots that travel between ranks lie: in memory of the communicator's own (NCCL: registered buffers), or in
 * the context's.
 *
 * Both sides of every message must be of the one kind, so that the ranks decide together, for each context by itself,
 * in the header that opens its first call: all ranks willing, or none does. What was decided once stands. A call in
 * which contexts meet that have decided differently (possible only where ranks pair different contexts in one call) is
 * a MISMATCH on all ranks. */
#ifndef SLUICE_BACKEND_MOE_CONTEXT_REGISTERED_BUFFERS_H_
#define SLUICE_BACKEND_MOE_CONTEXT_REGISTERED_BUFFERS_H_

#include "backend/moe/context/context.h"

/* States of a context, and its word in a header: plain is for good, willing follows the others, own is for good. */
enum { SLUICE_REGISTRATION_PLAIN = 0, SLUICE_REGISTRATION_WILLING = 1, SLUICE_REGISTRATION_OWN = 2 };

/* Of a device with memory of its own, once its budget is known: the context is willing unless it has a reason not to
 * be. owns_memory: slots are the library's to allocate. */
void sluice_registered_buffers_open(sluice_context_t* context, int owns_memory);
/* What the next header says. */
int32_t sluice_registered_buffers_word(sluice_context_t* context);
/* words: [W], of all ranks. MISMATCH, alike on all ranks, where one has decided for each kind; else decides. */
sluice_status_t sluice_registered_buffers_agree(sluice_context_t* context, const int32_t* words, int32_t layer_id);

#endif /* SLUICE_BACKEND_MOE_CONTEXT_REGISTERED_BUFFERS_H_ */
