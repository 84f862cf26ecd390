// SPDX-License-Identifier: Apache-2.0
/* The saved form of a binding. */
#ifndef SLUICE_BACKEND_MOE_ROUTING_SAVED_ROUTES_H_
#define SLUICE_BACKEND_MOE_ROUTING_SAVED_ROUTES_H_

#include "backend/moe/routing/binding.h"

/* The saved form, from which a backward is bound without ids and without an exchange. */
uint64_t sluice_binding_meta_bytes(const sluice_binding_t* binding);
/* saved_bytes: [SLUICE_SAVED_COUNT], written down so that a restored step can be checked. */
void sluice_binding_save(const sluice_binding_t* binding, const uint64_t* saved_bytes, void* meta);
/* From now on the saved buffers behind `meta` may hold gradients: no other backward can start from them. */
void sluice_binding_use_up(void* meta);
int sluice_binding_is_used_up(const void* meta);
/* INVALID_ARGUMENT when the bytes are not of this layer, or damaged. `meta` is borrowed by the binding, and so is
 * `kept`, what lies in front of the step's rows (sluice_binding_kept_bytes; parts have none: NULL). stream: where rows
 * lie on a device, of the call. */
sluice_status_t sluice_binding_restore(sluice_moe_t* moe, sluice_stream_t stream, const void* meta, uint64_t meta_bytes,
                                       void* kept, sluice_binding_t* out_binding);
/* What sluice_step_info needs, without binding. */
sluice_status_t sluice_binding_peek(const sluice_moe_t* moe, const void* meta, uint64_t meta_bytes,
                                    int32_t* out_num_chunks, uint64_t* out_saved_bytes, int64_t* out_rows_per_expert);

#endif /* SLUICE_BACKEND_MOE_ROUTING_SAVED_ROUTES_H_ */
