// SPDX-License-Identifier: Apache-2.0
/* Saves a binding into META, and restores it for the backward. */
#pragma once

#include "backend/moe/routing/binding.h"

/* Size of the saved form, from which a backward is bound without ids and without an exchange. */
uint64_t sluice_binding_meta_bytes(const sluice_binding_t* binding);
/* saved_bytes: [SLUICE_SAVED_COUNT], recorded so that a restored step can be checked. */
void sluice_binding_save(const sluice_binding_t* binding, const uint64_t* saved_bytes, void* meta);
/* Marks that the saved buffers of `meta` may hold gradients: no other backward can start from them. */
void sluice_binding_use_up(void* meta);
int sluice_binding_is_used_up(const void* meta);
/* INVALID_ARGUMENT if the bytes are damaged or of another layer. The binding borrows `meta` and `kept`, the block
 * before the step's rows (sluice_binding_kept_bytes; split calls have none: NULL). stream: of the call, with device
 * memory. */
sluice_status_t sluice_binding_restore(sluice_moe_t* moe, sluice_stream_t stream, const void* meta, uint64_t meta_bytes,
                                       void* kept, sluice_binding_t* out_binding);
/* Reads what sluice_step_info needs, without binding. */
sluice_status_t sluice_binding_peek(const sluice_moe_t* moe, const void* meta, uint64_t meta_bytes,
                                    int32_t* out_num_chunks, uint64_t* out_saved_bytes, int64_t* out_rows_per_expert);
