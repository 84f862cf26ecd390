// SPDX-License-Identifier: Apache-2.0
/* Checks of a pipeline's world for tests under cmocka. */
#pragma once

#include "capi/test/pipeline/pipeline_world.h"
#include "third_party/bazel/test.h"

/* For messages, such as "tcp, backward_first, p 3, v 1, L 2". */
static inline const char* pw_name(const pw_world_t* world) {
  static char name[160];
  (void)snprintf(name, sizeof name, "%s, %s, p %d, v %d, L %d, split %d", world->transport,
                 world->config.policy != NULL ? world->config.policy : "the default", world->num_stages,
                 world->config.num_virtual, world->config.in_flight, pw_is_split(world));
  return name;
}

/* No rank received a wrong tensor or a wrong call. */
static inline void assert_nothing_wrong(const pw_world_t* world) {
  for (int32_t r = 0; r < world->num_stages * world->num_replicas; ++r) {
    const pw_rank_t* rank = &world->ranks[r];
    if (rank->num_wrong > 0) fail_msg("%s: rank %d: %s (%d times)", pw_name(world), r, rank->wrong, rank->num_wrong);
  }
}

static inline void assert_status(const pw_world_t* world, int32_t r, int32_t batch, sluice_status_t status,
                                 const char* text) {
  const pw_rank_t* rank = &world->ranks[r];
  if (rank->ended[batch] != status || (text != NULL && strstr(rank->errors[batch].message, text) == NULL)) {
    fail_msg("%s: batch %d on rank %d ended with %s (%s), not with %s (%s)", pw_name(world), batch, r,
             sluice_status_name(rank->ended[batch]), rank->errors[batch].message, sluice_status_name(status),
             text != NULL ? text : "");
  }
}

static inline void assert_all_work(const pw_world_t* world, int32_t batch) {
  for (int32_t r = 0; r < world->num_stages * world->num_replicas; ++r) {
    const pw_rank_t* rank = &world->ranks[r];
    if (rank->made != SLUICE_OK) fail_msg("%s: rank %d: %s", pw_name(world), r, rank->made_error.message);
    assert_status(world, r, batch, SLUICE_OK, NULL);
  }
}

/* Losses of successful batches, and gradients, have the bits of the model in one loop. */
static inline void assert_same_bits(const pw_world_t* world) {
  const int32_t last = pw_num_layers(world) - 1;
  for (int32_t r = 0; r < world->num_stages * world->num_replicas; ++r) {
    const pw_rank_t* rank = &world->ranks[r];
    for (int32_t k = 0; k < world->config.num_virtual; ++k) {
      const int32_t c = pw_layer_of(world, rank->stage, k);
      if (memcmp(rank->layers[c].grad, world->reference[c].grad, sizeof rank->layers[c].grad) != 0) {
        fail_msg("%s: gradients of layer %d on rank %d differ: %.9g, not %.9g", pw_name(world), c, r,
                 (double)rank->layers[c].grad[0], (double)world->reference[c].grad[0]);
      }
      for (int32_t b = 0; c == last && b < world->num_batches; ++b) {
        if (rank->ended[b] != SLUICE_OK) continue;
        const size_t bytes = (size_t)world->batches[b].num_micro_batches * sizeof(float);
        if (memcmp(rank->losses[b], world->reference_losses[b], bytes) != 0) {
          fail_msg("%s: losses of batch %d on rank %d differ", pw_name(world), b, r);
        }
      }
    }
  }
}

/* The end of a case: nothing went wrong, bits are the same, and the world is freed. */
static inline void finish(pw_world_t* world) {
  assert_nothing_wrong(world);
  assert_same_bits(world);
  pw_world_free(world);
}
