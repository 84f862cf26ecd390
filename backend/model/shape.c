#include "backend/model/shape.h"

#include <math.h>
#include <string.h>

static int32_t experts_of(const sluice_moe_config_t* config, int32_t world_size, const int32_t* first_place,
                          int32_t rank) {
  return first_place != NULL ? first_place[rank + 1] - first_place[rank] : config->num_experts / world_size;
}

void sluice_shape_init(sluice_shape_t* out, const sluice_moe_config_t* config, const sluice_chunk_policies_t* policies,
                       int32_t rank, int32_t world_size, const int32_t* first_place, int32_t is_far) {
  memset(out, 0, sizeof *out);
  out->config = *config;
  out->config.next = NULL;
  out->config.expert_rank = NULL;
  out->config.restore_input_of = out->config.restore_middle_of = NULL;
  if (policies != NULL) out->policies = *policies;
  out->rank = rank;
  out->world_size = world_size;
  out->num_local = experts_of(config, world_size, first_place, rank);
  for (int32_t r = 0; r < world_size; ++r) {
    const int32_t experts = experts_of(config, world_size, first_place, r);
    if (experts > out->most_local) out->most_local = experts;
  }
  out->gate_factor = config->gated ? 2 : 1;
  out->is_far = is_far;
}

sluice_shape_t sluice_shape_widest(const sluice_shape_t* shape) {
  sluice_shape_t widest = *shape;
  widest.num_local = shape->most_local;
  return widest;
}

int sluice_shape_cuts_rows(const sluice_shape_t* shape, int32_t num_chunks) {
  const sluice_moe_config_t* c = &shape->config;
  const sluice_chunking_t chunking = {.num_chunks = num_chunks,
                                      .chunk_cut = c->chunk_cut,
                                      .num_experts = c->num_experts,
                                      .world_size = shape->world_size,
                                      .deduplicate = c->deduplicate,
                                      .restore_di = sluice_restore_of(c->restore_input),
                                      .restore_m = sluice_restore_of(c->restore_middle)};
  return sluice_shape_ceiling(shape) == 0 && !shape->is_far && sluice_chunking_is_by_rows(&chunking);
}

double sluice_parcels_share(int32_t num_experts, int32_t world_size, int32_t top_k) {
  double none = 1, elsewhere = num_experts - ceil((double)num_experts / world_size);
  for (int32_t k = 0; k < top_k; ++k) none *= fmax(0, elsewhere - k) / (double)(num_experts - k);
  return world_size * (1 - none) / top_k;
}
