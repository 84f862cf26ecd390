/* Routes of a far device: its kernels order them, and they stay there. */
#ifndef SLUICE_BACKEND_MOE_ROUTING_FAR_ROUTES_H_
#define SLUICE_BACKEND_MOE_ROUTING_FAR_ROUTES_H_

#include "backend/moe/routing/binding.h"

/* As sluice_binding_route on a far device, by its kernels: counts come to the host by the one read of a forward. On
 * `stream`. */
sluice_status_t sluice_binding_route_far(sluice_moe_t* moe, sluice_stream_t stream, const sluice_tensor_t* expert_ids,
                                         int32_t num_chunks, sluice_binding_t* out_binding);
/* The same in two parts, for chunks that are cut by received rows. First counts are read, once, by block of tokens and
 * place: out_counts [SLUICE_PLAN_BLOCKS, E], with what this file puts behind them, in the pass's scratch until the
 * pass is prepared. Then the chunks are known, each of whole blocks, and routes are ordered without another read. */
sluice_status_t sluice_binding_count_far(sluice_moe_t* moe, sluice_pass_memory_t* memory, sluice_stream_t stream,
                                         const sluice_tensor_t* expert_ids, int32_t** out_counts);
sluice_status_t sluice_binding_route_far_blocks(sluice_moe_t* moe, sluice_stream_t stream,
                                                const sluice_tensor_t* expert_ids, int32_t num_chunks,
                                                const int64_t* first_token, const int32_t* first_block,
                                                const int32_t* counts, sluice_binding_t* out_binding);
/* The same under ceilings (ceiling_routes.h): nothing is read. */
sluice_status_t sluice_binding_route_far_under_ceiling(sluice_moe_t* moe, sluice_stream_t stream,
                                                       const sluice_tensor_t* expert_ids, int32_t num_chunks,
                                                       int64_t* tally, sluice_binding_t* out_binding);
/* On a far device: orders and positions lie in `routes`. */
void sluice_binding_place_routes(sluice_binding_t* binding, void* routes);

#endif /* SLUICE_BACKEND_MOE_ROUTING_FAR_ROUTES_H_ */
