/* What both kinds of parcels share: those of a CPU (parcels.c) and of a far device (parcels_far.c). Private to moe. */
#ifndef SLUICE_BACKEND_MOE_ROUTING_PARCELS_COMMON_H_
#define SLUICE_BACKEND_MOE_ROUTING_PARCELS_COMMON_H_

#include "backend/moe/routing/binding.h"

static inline int64_t sluice_routes_from(const sluice_binding_t* b, int32_t source, int32_t chunk) {
  int64_t count = 0;
  for (int32_t e = 0; e < b->num_local; ++e) count += sluice_recv_count(b, source, chunk, e);
  return count;
}

/* For the tables of both. */
static inline int64_t sluice_parcels_max_chunk_remote(const sluice_binding_t* b) { return b->parcels.max_chunk_remote; }
static inline int64_t sluice_parcels_max_chunk_sent(const sluice_binding_t* b) { return b->parcels.max_chunk_sent; }
static inline int64_t sluice_parcels_num_weighted(const sluice_binding_t* b, int32_t chunk) {
  return b->parcels.first_arrived[chunk + 1] - b->parcels.first_arrived[chunk];
}

/* MISMATCH naming the rank. */
sluice_status_t sluice_parcels_refuse(const sluice_binding_t* b, int32_t source);

#endif /* SLUICE_BACKEND_MOE_ROUTING_PARCELS_COMMON_H_ */
