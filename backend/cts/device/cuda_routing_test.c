/* Routing and gating on the device, run on the CPU from the same source, against plain loops and backend/gate. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "backend/device/cuda/cuda_routing.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "sluice/gate.h"
#include "third_party/bazel/test.h"

static sluice_allocator_t allocator;
static sluice_device_t* device;

static int set_up(void** state) {
  (void)state;
  sluice_fake_cuda_reset();
  sluice_allocator_init(&allocator, NULL, NULL, NULL);
  if (sluice_cuda_device_create_from(sluice_fake_cuda_driver(), sluice_fake_cuda_image(), 0, &allocator, &device) !=
      0) {
    return -1;
  }
  return sluice_cuda_enter(device) == SLUICE_OK ? 0 : -1;
}
static int tear_down(void** state) {
  char live[200];
  (void)state;
  int failed = sluice_cuda_leave(device) != SLUICE_OK;
  device->vtable->destroy(device);
  failed |= sluice_fake_cuda_live(live, sizeof live) != 0 || allocator.num_live != 0;
  sluice_allocator_deinit(&allocator);
  return failed ? -1 : 0;
}

static uint64_t seed = 7;
static uint32_t random_bits(void) {
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(seed >> 33);
}

static void* filled(size_t bytes) {
  void* data = malloc(bytes + 1);
  memset(data, 0x5a, bytes + 1);
  return data;
}

/* One problem: sorted by a plain stable sort, and by the kernels. */
static void route_case(int64_t tokens, int64_t top_k, int64_t experts, int ids_64, int k_major, int permuted, int hot) {
  int64_t routes = tokens * top_k;
  int32_t* ids32 = filled((size_t)routes * 4);
  int64_t* ids64 = filled((size_t)routes * 8);
  int32_t* slot_of = filled((size_t)experts * 4);
  int32_t *counts = filled((size_t)experts * 4), *offsets = filled((size_t)(experts + 1) * 4);
  int32_t *token_of = filled((size_t)routes * 4), *route_of = filled((size_t)routes * 4);
  int32_t *position = filled((size_t)routes * 4), first_bad = 5;
  int32_t* scratch = filled(sluice_cuda_route_scratch_bytes(routes, experts));
  for (int64_t e = 0; e < experts; ++e) slot_of[e] = (int32_t)(permuted ? (e * 7 + 3) % experts : e);
  for (int64_t r = 0; r < routes; ++r) {
    int64_t id = hot && random_bits() % 4 != 0 ? experts / 2 : (int64_t)(random_bits() % (uint32_t)(experts + 1)) - 1;
    ids32[r] = (int32_t)id;
    ids64[r] = id;
  }
  const sluice_route_args_t args = {.ids = ids_64 ? (const void*)ids64 : ids32,
                                    .slot_of = permuted ? slot_of : NULL,
                                    .tile_counts = scratch,
                                    .counts = counts,
                                    .offsets = offsets,
                                    .token_of = token_of,
                                    .route_of = route_of,
                                    .first_bad = &first_bad,
                                    .position = position,
                                    .num_routes = routes,
                                    .top_k = top_k,
                                    .num_experts = experts,
                                    .ids_t = k_major ? 1 : top_k,
                                    .ids_k = k_major ? tokens : 1,
                                    .ids_64 = ids_64,
                                    .first_token = 1000};
  sluice_cuda_route(NULL, &args);
  int32_t row = 0;
  for (int64_t slot = 0; slot < experts; ++slot) {
    assert_int_equal(offsets[slot], row);
    for (int64_t r = 0; r < routes; ++r) {
      int64_t id = ids32[r / top_k * args.ids_t + r % top_k * args.ids_k];
      if (id < 0 || slot_of[id] != slot) continue;
      assert_int_equal(position[r], row);
      assert_int_equal(token_of[row], 1000 + r / top_k);
      assert_int_equal(route_of[row], 1000 * top_k + r); /* routes count from first_token too */
      ++row;
    }
    assert_int_equal(counts[slot], row - offsets[slot]);
  }
  assert_int_equal(offsets[experts], row);
  assert_int_equal(first_bad, INT32_MAX);
  for (int64_t r = 0; r < routes; ++r) {
    if (ids32[r / top_k * args.ids_t + r % top_k * args.ids_k] < 0) assert_int_equal(position[r], -1);
  }
  free(ids32), free(ids64), free(slot_of), free(counts), free(offsets);
  free(token_of), free(route_of), free(position), free(scratch);
}

TEST(Route_AnyProblem_IsAStableSort) {
  static const int64_t shapes[][3] = {{0, 2, 8},    {1, 1, 1},     {5, 1, 3},    {33, 2, 7},
                                      {700, 3, 33}, {1024, 1, 64}, {1030, 2, 8}, {400, 8, 256}};
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; ++s) {
    for (int bits = 0; bits < 16; ++bits) {
      route_case(shapes[s][0], shapes[s][1], shapes[s][2], bits & 1, bits & 2, (bits & 4) && shapes[s][2] % 7 != 0,
                 bits & 8);
    }
  }
}

/* Counts by block of tokens and slot, and the first invalid id of each block, against a plain loop. */
TEST(Blocks_AnyProblem_AreCountedAsByAPlainLoop) {
  static const int64_t shapes[][4] = {
      {0, 2, 8, 64}, {1, 1, 1, 64}, {70, 3, 33, 64}, {1030, 2, 8, 64}, {400, 8, 256, 7}};
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; ++s) {
    for (int bits = 0; bits < 8; ++bits) {
      const int64_t tokens = shapes[s][0], top_k = shapes[s][1], experts = shapes[s][2], blocks = shapes[s][3];
      const int64_t routes = tokens * top_k, columns = experts + 1;
      int64_t* ids = filled((size_t)routes * 8);
      int32_t* ids32 = filled((size_t)routes * 4);
      int32_t *counts = filled((size_t)(blocks * columns) * 4), *want = calloc((size_t)(blocks * columns), 4);
      int32_t* slot_of = filled((size_t)experts * 4);
      for (int64_t e = 0; e < experts; ++e) slot_of[e] = (int32_t)(experts - 1 - e);
      for (int64_t r = 0; r < routes; ++r) {
        ids[r] = (int64_t)(random_bits() % (uint32_t)(experts + 1)) - 1;
        if (bits & 4 && random_bits() % 50 == 0) ids[r] = experts + 3;
        ids32[r] = (int32_t)ids[r];
      }
      const sluice_block_args_t args = {.ids = bits & 1 ? (const void*)ids : ids32,
                                        .slot_of = bits & 2 ? slot_of : NULL,
                                        .counts = counts,
                                        .units = blocks,
                                        .num_tokens = tokens,
                                        .top_k = top_k,
                                        .num_experts = experts,
                                        .ids_t = bits & 2 ? 1 : top_k,
                                        .ids_k = bits & 2 ? tokens : 1,
                                        .ids_64 = bits & 1};
      for (int64_t g = 0; g < blocks; ++g) {
        want[g * columns + experts] = INT32_MAX;
        for (int64_t r = tokens * g / blocks * top_k; r < tokens * (g + 1) / blocks * top_k; ++r) {
          int64_t id = ids[r / top_k * args.ids_t + r % top_k * args.ids_k];
          if (id >= 0 && id < experts) ++want[g * columns + (args.slot_of == NULL ? id : slot_of[id])];
          if (id >= experts && want[g * columns + experts] == INT32_MAX) want[g * columns + experts] = (int32_t)r;
        }
      }
      sluice_cuda_count_blocks(NULL, &args);
      assert_memory_equal(counts, want, (size_t)(blocks * columns) * 4);
      free(ids), free(ids32), free(counts), free(want), free(slot_of);
    }
  }
}

/* Slots of a fixed number of rows: their first routes take them in order, the rest is dropped and counted. */
TEST(Route_UnderACapacity_FillsPlacesAndCountsTheRest) {
  enum { TOKENS = 700, TOP_K = 3, EXPERTS = 33, ROUTES = TOKENS * TOP_K };
  static int32_t ids[ROUTES], counts[EXPERTS], offsets[EXPERTS + 1], position[ROUTES], first_bad;
  static int32_t token_of[EXPERTS * 80], route_of[EXPERTS * 80];
  int32_t* scratch = filled(sluice_cuda_route_scratch_bytes(ROUTES, EXPERTS));
  for (int32_t capacity = 1; capacity <= 80; capacity += 13) {
    int64_t drop_counters[SLUICE_NUM_DROP_COUNTERS] = {0}, dropped = 0, kept = 0, most = 0, next[EXPERTS] = {0};
    memset(token_of, 0xff, sizeof token_of), memset(route_of, 0xff, sizeof route_of);
    for (int32_t r = 0; r < ROUTES; ++r) ids[r] = (int32_t)(random_bits() % (EXPERTS + 1)) - 1;
    sluice_route_args_t args = {.ids = ids,
                                .tile_counts = scratch,
                                .counts = counts,
                                .offsets = offsets,
                                .token_of = token_of,
                                .route_of = route_of,
                                .first_bad = &first_bad,
                                .position = position,
                                .num_routes = ROUTES,
                                .top_k = TOP_K,
                                .num_experts = EXPERTS,
                                .ids_t = TOP_K,
                                .ids_k = 1,
                                .capacity = capacity,
                                .drop_counters = drop_counters,
                                .begins = 1};
    sluice_cuda_route(NULL, &args);
    for (int32_t r = 0; r < ROUTES; ++r) {
      int64_t row = -1;
      if (ids[r] >= 0) {
        int64_t inside = next[ids[r]]++;
        if (inside < capacity) row = (int64_t)ids[r] * capacity + inside;
        dropped += inside >= capacity, ++kept;
        int64_t key = (next[ids[r]] << 32) + ids[r];
        if (key > most) most = key;
      }
      assert_int_equal(position[r], row);
      if (row >= 0) assert_true(token_of[row] == r / TOP_K && route_of[row] == r);
    }
    for (int32_t e = 0; e < EXPERTS; ++e) {
      assert_int_equal(counts[e], next[e]);
      for (int64_t i = next[e]; i < capacity; ++i) assert_int_equal(route_of[e * capacity + i], -1);
    }
    assert_int_equal(drop_counters[SLUICE_DROP_COUNTER_FORWARDS], 1);
    assert_int_equal(drop_counters[SLUICE_DROP_COUNTER_ROUTES], kept);
    assert_int_equal(drop_counters[SLUICE_DROP_COUNTER_DROPPED], dropped);
    assert_int_equal(drop_counters[SLUICE_DROP_COUNTER_MOST], most);
    assert_int_equal(drop_counters[SLUICE_DROP_COUNTER_BAD], 0);
    ids[5] = EXPERTS, args.begins = 0; /* a later chunk */
    sluice_cuda_route(NULL, &args);
    assert_int_equal(drop_counters[SLUICE_DROP_COUNTER_FORWARDS], 1);
    assert_int_equal(drop_counters[SLUICE_DROP_COUNTER_BAD], 6);
    assert_true(drop_counters[SLUICE_DROP_COUNTER_ROUTES] >= 2 * kept - 1);
  }
  free(scratch);
}

/* Invalid ids: dropped, and nothing is written outside the arrays (the address sanitizer checks that). */
TEST(Route_IdsOutOfRange_CountAsDropped) {
  const int32_t ids[4] = {7, 2, -5, 1};
  int32_t scratch[4], counts[3], offsets[4], token_of[4] = {9, 9, 9, 9}, position[4], first_bad = 0;
  assert_int_equal(sluice_cuda_route_scratch_bytes(4, 3), sizeof scratch);
  const sluice_route_args_t args = {.ids = ids,
                                    .tile_counts = scratch,
                                    .counts = counts,
                                    .offsets = offsets,
                                    .token_of = token_of,
                                    .first_bad = &first_bad,
                                    .position = position,
                                    .num_routes = 4,
                                    .top_k = 1,
                                    .num_experts = 3,
                                    .ids_t = 1,
                                    .ids_k = 1};
  sluice_cuda_route(NULL, &args);
  assert_int_equal(offsets[3], 2);
  assert_int_equal(position[0], -1);
  assert_int_equal(position[2], -1);
  assert_int_equal(token_of[0], 3);
  assert_int_equal(token_of[1], 1);
  assert_int_equal(token_of[2], 9);
  assert_int_equal(first_bad, 0);
}

/* -1 drops a route and is no error; the first invalid id is found in any tile and lane. */
TEST(Route_IdsOutOfRange_FirstOneIsNamed) {
  enum { ROUTES = 40000, E = 5 };
  int32_t* ids = filled(ROUTES * 4);
  int32_t *token_of = filled(ROUTES * 4), *position = filled(ROUTES * 4);
  int32_t counts[E], offsets[E + 1], first_bad = 0;
  int32_t* scratch = filled(sluice_cuda_route_scratch_bytes(ROUTES, E));
  static const int32_t bad[] = {0, 31, 1023, 1024, 33333, ROUTES - 1};
  for (size_t b = 0; b < sizeof bad / sizeof bad[0]; ++b) {
    for (int32_t r = 0; r < ROUTES; ++r) ids[r] = r % (E + 1) - 1;
    ids[bad[b]] = b % 2 ? E : -2;
    if (bad[b] + 700 < ROUTES) ids[bad[b] + 700] = 99;
    const sluice_route_args_t args = {.ids = ids,
                                      .tile_counts = scratch,
                                      .counts = counts,
                                      .offsets = offsets,
                                      .token_of = token_of,
                                      .first_bad = &first_bad,
                                      .position = position,
                                      .num_routes = ROUTES,
                                      .top_k = 2,
                                      .num_experts = E,
                                      .ids_t = 2,
                                      .ids_k = 1,
                                      .first_token = 50};
    sluice_cuda_route(NULL, &args);
    assert_int_equal(first_bad, 100 + bad[b]);
  }
  free(ids), free(token_of), free(position), free(scratch);
}

TEST(Arrivals_AnyCounts_AreByExpertThenRank) {
  for (int64_t ranks = 1; ranks <= 9; ranks += 2) {
    for (int64_t local = 1; local <= 41; local += 8) {
      int32_t *counts = filled((size_t)(ranks * local) * 4), *offset = filled((size_t)(local + 1) * 4);
      int32_t total = 0, row = 0;
      for (int64_t i = 0; i < ranks * local; ++i) total += counts[i] = (int32_t)(random_bits() % 70) * (i % 3 != 1);
      int32_t* index = filled((size_t)total * 4);
      const sluice_arrival_args_t args = {
          .counts = counts, .index = index, .expert_offset = offset, .num_ranks = ranks, .num_local = local};
      sluice_cuda_arrivals(NULL, &args);
      for (int64_t e = 0; e < local; ++e) {
        assert_int_equal(offset[e], row);
        for (int64_t w = 0; w < ranks; ++w) {
          int32_t received = 0;
          for (int64_t i = 0; i < w * local + e; ++i) received += counts[i];
          for (int32_t i = 0; i < counts[w * local + e]; ++i) assert_int_equal(index[row++], received + i);
        }
      }
      assert_int_equal(offset[local], total);
      free(counts), free(offset), free(index);
    }
  }
}

/* ---- gate ------------------------------------------------------------------------------------------------------ */

static sluice_tensor_t tensor(void* data, int64_t* shape, int32_t ndim, int32_t type, int32_t bits) {
  return (sluice_tensor_t){.data = data,
                           .device_type = SLUICE_DEVICE_CPU,
                           .ndim = ndim,
                           .type_code = (uint8_t)type,
                           .type_bits = (uint8_t)bits,
                           .type_lanes = 1,
                           .shape = shape};
}

static void gate_case(int64_t tokens, int32_t experts, int32_t top_k, int32_t score, int32_t renormalize, int biased,
                      int ties) {
  int64_t at_logits[2] = {tokens, experts}, at_routes[2] = {tokens, top_k}, at_bias[1] = {experts};
  float *logits = filled((size_t)(tokens * experts) * 4), *bias = filled((size_t)experts * 4);
  int32_t *want_ids = filled((size_t)(tokens * top_k) * 4), *ids = filled((size_t)(tokens * top_k) * 4);
  float *want = filled((size_t)(tokens * top_k) * 4), *got = filled((size_t)(tokens * top_k) * 4);
  /* Far from each other, so that scores with different rounding give the same choice; or exactly equal. */
  for (int64_t t = 0; t < tokens; ++t) {
    for (int32_t e = 0; e < experts; ++e) {
      logits[t * experts + e] = (float)((e * 37 + (int32_t)t * 11) % (ties ? 5 : 997)) * 0.0117f - 4;
    }
  }
  for (int32_t e = 0; e < experts; ++e) bias[e] = (float)(e % 3);
  DEFAULTS(sluice_gate_config, config);
  config.num_experts = experts;
  config.top_k = top_k;
  config.score = score;
  config.renormalize = renormalize;
  config.scaling = 2.5f;
  sluice_tensor_t l = tensor(logits, at_logits, 2, SLUICE_TYPE_FLOAT, 32),
                  b = tensor(bias, at_bias, 1, SLUICE_TYPE_FLOAT, 32);
  sluice_tensor_t i = tensor(want_ids, at_routes, 2, SLUICE_TYPE_INT, 32),
                  w = tensor(want, at_routes, 2, SLUICE_TYPE_FLOAT, 32);
  assert_int_equal(sluice_gate_forward(&config, &l, biased ? &b : NULL, &i, &w, NULL, NULL, NULL), SLUICE_OK);
  const sluice_gate_kernel_args_t args = {.logits = logits,
                                          .bias = biased ? bias : NULL,
                                          .ids = ids,
                                          .weights = got,
                                          .units = tokens,
                                          .num_experts = experts,
                                          .top_k = top_k,
                                          .logits_stride = experts,
                                          .ids_t = 1,
                                          .ids_k = tokens,
                                          .weights_t = top_k,
                                          .weights_k = 1,
                                          .score = score,
                                          .renormalize = renormalize,
                                          .scaling = 2.5f};
  sluice_cuda_gate(NULL, &args);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int32_t k = 0; k < top_k; ++k) {
      assert_int_equal(ids[k * tokens + t], want_ids[t * top_k + k]);
      double x = (double)want[t * top_k + k], y = (double)got[t * top_k + k];
      assert_true(fabs(x - y) <= 4 * 0x1p-24 * fabs(x)); /* f64 sums in another order, then a few roundings */
    }
  }
  free(logits), free(bias), free(want_ids), free(ids), free(want), free(got);
}

TEST(Gate_AnyConfig_ChoosesAsTheHostsGate) {
  static const int32_t shapes[][2] = {{1, 1}, {8, 2}, {33, 5}, {64, 1}, {256, 8}, {40, 40}};
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; ++s) {
    for (int bits = 0; bits < 16; ++bits) {
      gate_case(9, shapes[s][0], shapes[s][1], bits & 1, (bits & 2) != 0, bits & 4, bits & 8);
    }
  }
}

TEST(Gate_NanLogits_ChoosesValidIds) {
  const float logits[6] = {NAN, NAN, NAN, 1, NAN, 3};
  int32_t ids[4];
  float weights[4];
  const sluice_gate_kernel_args_t args = {.logits = logits,
                                          .ids = ids,
                                          .weights = weights,
                                          .units = 2,
                                          .num_experts = 3,
                                          .top_k = 2,
                                          .logits_stride = 3,
                                          .ids_t = 2,
                                          .ids_k = 1,
                                          .weights_t = 2,
                                          .weights_k = 1,
                                          .score = SLUICE_SCORE_SIGMOID,
                                          .scaling = 1};
  sluice_cuda_gate(NULL, &args);
  assert_int_equal(ids[0], 0);
  assert_int_equal(ids[1], 1);
  assert_true(isnan(weights[0]));
  assert_int_equal(ids[2], 2);
  assert_int_equal(ids[3], 0);
}

int main(void) { return run_cases_each(set_up, tear_down); }
