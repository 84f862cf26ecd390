/* Token copies on the device (backend/device/device.h), run on the CPU from the same source, against plain loops. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "backend/device/cuda/cuda_device.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "third_party/bazel/test.h"

static sluice_allocator_t allocator;
static sluice_device_t* device;

static int set_up(void** state) {
  (void)state;
  sluice_fake_cuda_reset();
  sluice_allocator_init(&allocator, NULL, NULL, NULL);
  return sluice_cuda_device_create_from(sluice_fake_cuda_driver(), sluice_fake_cuda_image(), 0, &allocator, &device);
}
static int tear_down(void** state) {
  char live[200];
  (void)state;
  device->vtable->destroy(device);
  int failed = sluice_fake_cuda_live(live, sizeof live) != 0 || allocator.num_live != 0;
  sluice_allocator_deinit(&allocator);
  return failed ? -1 : 0;
}

static uint64_t seed = 11;
static uint32_t random_bits(void) {
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(seed >> 33);
}

static int32_t* filled(int64_t count) {
  int32_t* data = malloc((size_t)count * 4 + 1);
  memset(data, 0x5a, (size_t)count * 4 + 1);
  return data;
}

enum { CHUNKS = 3, MOST_RANKS = 5 };

typedef struct shape_s {
  int64_t tokens;
  int32_t top_k, experts, ranks;
} shape_t;
static const shape_t SHAPES[] = {{0, 2, 4, 2},  {1, 1, 1, 1},    {7, 4, 8, 2},
                                 {33, 6, 5, 5}, {401, 8, 40, 4}, {64, 3, 3, 3}};

/* Routes in the order of the device's routing, whose positions are computed here: by rank of the expert, then token. */
typedef struct problem_s {
  const shape_t* s;
  int64_t first_token[CHUNKS + 1];
  int32_t *ids32, *owner, *position;
  int64_t* ids64;
  int32_t most;
} problem_t;

static int32_t rank_of(const problem_t* p, int64_t r) {
  return p->ids32[r] < 0 || p->ids32[r] >= p->s->experts ? -1 : p->owner[p->ids32[r]];
}

static problem_t make(const shape_t* s, int odd) {
  problem_t p = {.s = s, .most = s->top_k < s->ranks ? s->top_k : s->ranks};
  int64_t routes = s->tokens * s->top_k;
  p.ids32 = filled(routes), p.owner = filled(s->experts), p.position = filled(routes);
  p.ids64 = malloc((size_t)routes * 8 + 1);
  for (int32_t e = 0; e < s->experts; ++e) p.owner[e] = odd ? (e * 3 + 1) % s->ranks : e * s->ranks / s->experts;
  for (int64_t r = 0; r < routes; ++r) {
    p.ids32[r] = (int32_t)(random_bits() % (uint32_t)(s->experts + odd)) - odd; /* some dropped, some twice */
    if (odd && random_bits() % 40 == 0) p.ids32[r] = s->experts + 2;
    p.ids64[r] = p.ids32[r];
  }
  for (int i = 0; i <= CHUNKS; ++i) p.first_token[i] = s->tokens * i * i / (CHUNKS * CHUNKS);
  for (int i = 0; i < CHUNKS; ++i) {
    int32_t row = 0;
    for (int32_t w = 0; w < s->ranks; ++w) {
      for (int64_t r = p.first_token[i] * s->top_k; r < p.first_token[i + 1] * s->top_k; ++r) {
        if (rank_of(&p, r) == w) p.position[r] = row++;
      }
    }
  }
  return p;
}

static void drop(problem_t* p) { free(p->ids32), free(p->owner), free(p->position), free(p->ids64); }

static void check_numbers(const problem_t* p, int ids_64) {
  const shape_t* s = p->s;
  int64_t routes = s->tokens * s->top_k, w = s->ranks;
  int32_t *counts = filled(CHUNKS * (w + 1)), *token = filled(s->tokens * p->most), *table = filled(s->tokens * w);
  int32_t* route_index = filled(routes);
  void* scratch = malloc(device->memory->routing->token_copy_scratch_bytes(routes, s->experts, s->ranks));
  const sluice_device_token_copies_t token_copies = {
      .ids = ids_64 ? (const void*)p->ids64 : p->ids32,
      .ids_t = s->top_k,
      .ids_k = 1,
      .ids_64 = ids_64,
      .num_chunks = CHUNKS,
      .first_token = p->first_token,
      .rank_of_expert = p->owner,
      .top_k = s->top_k,
      .num_experts = s->experts,
      .num_ranks = s->ranks,
      .most = p->most,
      .position = p->position,
      .counts = counts,
      .token = token,
      .position_of_token = table,
      .route_index = route_index,
      .scratch = scratch,
  };
  assert_int_equal(device->memory->routing->number_token_copies(device, NULL, &token_copies), SLUICE_OK);
  for (int i = 0; i < CHUNKS; ++i) {
    int32_t row = 0;
    int64_t begin = p->first_token[i], end = p->first_token[i + 1];
    for (int32_t r = 0; r < w; ++r) {
      int32_t first = row;
      for (int64_t t = begin; t < end; ++t) {
        int any = 0;
        for (int32_t k = 0; k < s->top_k; ++k) {
          if (rank_of(p, t * s->top_k + k) != r) continue;
          any = 1;
          int64_t at = begin * s->top_k + p->position[t * s->top_k + k];
          assert_int_equal(route_index[at], (row - first) * s->top_k + k);
        }
        assert_int_equal(table[t * w + r], any ? row : -1);
        if (any) assert_int_equal(token[begin * p->most + row++], t);
      }
      assert_int_equal(counts[i * (w + 1) + r], row - first);
    }
  }
  free(counts), free(token), free(table), free(route_index), free(scratch);
}

TEST(TokenCopies_AnyRoutes_AreNumberedAsByAPlainLoop) {
  for (size_t i = 0; i < sizeof SHAPES / sizeof SHAPES[0]; ++i) {
    for (int bits = 0; bits < 4; ++bits) {
      problem_t p = make(&SHAPES[i], bits & 1);
      check_numbers(&p, bits >> 1);
      drop(&p);
    }
  }
}

/* Token copies by block of tokens: those of chunks that consist of whole blocks are their sums. */
static void check_blocks(const problem_t* p, int ids_64, int32_t num_blocks) {
  const shape_t* s = p->s;
  int64_t routes = s->tokens * s->top_k, w = s->ranks;
  int32_t *counts = filled(num_blocks * (s->experts + 1)), *token_copies = filled(num_blocks * (w + 1));
  int32_t* places = filled(s->experts);
  for (int32_t e = 0; e < s->experts; ++e) places[e] = s->experts - 1 - e;
  void* scratch = malloc(device->memory->routing->route_scratch_bytes(0, s->experts) + 1);
  void* token_copy_scratch = malloc(device->memory->routing->token_copy_scratch_bytes(routes, s->experts, s->ranks));
  const sluice_device_blocks_t blocks = {
      .ids = ids_64 ? (const void*)p->ids64 : p->ids32,
      .ids_t = s->top_k,
      .ids_k = 1,
      .ids_64 = ids_64,
      .num_blocks = num_blocks,
      .num_tokens = s->tokens,
      .expert_position = places,
      .top_k = s->top_k,
      .num_experts = s->experts,
      .counts = counts,
      .scratch = scratch,
      .num_ranks = s->ranks,
      .rank_of_expert = p->owner,
      .token_copies = token_copies,
      .token_copy_scratch = token_copy_scratch,
  };
  assert_int_equal(device->memory->routing->count_blocks(device, NULL, &blocks), SLUICE_OK);
  for (int32_t g = 0; g < num_blocks; ++g) {
    for (int32_t r = 0; r < w; ++r) {
      int32_t want = 0;
      for (int64_t t = s->tokens * g / num_blocks; t < s->tokens * (g + 1) / num_blocks; ++t) {
        int any = 0;
        for (int32_t k = 0; k < s->top_k; ++k) any |= rank_of(p, t * s->top_k + k) == r;
        want += any;
      }
      assert_int_equal(token_copies[g * (w + 1) + r], want);
    }
    for (int32_t e = 0; e < s->experts; ++e) {
      int32_t want = 0;
      for (int64_t i = s->tokens * g / num_blocks * s->top_k; i < s->tokens * (g + 1) / num_blocks * s->top_k; ++i) {
        want += p->ids32[i] == e;
      }
      assert_int_equal(counts[g * (s->experts + 1) + places[e]], want);
    }
  }
  free(counts), free(token_copies), free(places), free(scratch), free(token_copy_scratch);
}

TEST(TokenCopies_AnyRoutes_AreCountedByBlockAsByAPlainLoop) {
  for (size_t i = 0; i < sizeof SHAPES / sizeof SHAPES[0]; ++i) {
    for (int bits = 0; bits < 4; ++bits) {
      problem_t p = make(&SHAPES[i], bits & 1);
      check_blocks(&p, bits >> 1, 64);
      check_blocks(&p, bits >> 1, 3);
      drop(&p);
    }
  }
}

/* More runs than a launch holds; own routes among them; every seventh index is out of range. */
static void place(int64_t num_runs, int32_t top_k, int32_t rows, int spoilt) {
  int64_t routes = num_runs * rows;
  int32_t *route_index = filled(routes), *token = filled(routes), *position = filled(routes * top_k);
  int32_t *weight = filled(routes * top_k), *origin = filled(routes);
  sluice_device_token_copy_run_t* runs = malloc((size_t)num_runs * sizeof *runs);
  for (int64_t i = 0; i < routes; ++i) {
    token[i] = (int32_t)(1000 + i);
    route_index[i] = (int32_t)(i % rows) * top_k + (int32_t)(i * 5 % top_k); /* a token copy for each route of a run */
    if (spoilt && i % 7 == 0) route_index[i] = i % 2 == 0 ? -1 - (int32_t)i : rows * top_k + (int32_t)i;
  }
  for (int32_t i = 0; i < num_runs; ++i) {
    int is_own = i % 3 == 1;
    runs[i] = (sluice_device_token_copy_run_t){
        rows, i * rows, rows, i * rows, 3 * i, i * rows, is_own ? i * rows : 7 * i, is_own ? -1 : 11 * i};
  }
  const sluice_device_arrivals_t arrivals = {runs,  num_runs, top_k,  routes, route_index,
                                             token, position, weight, origin};
  assert_int_equal(device->memory->routing->place_token_copies(device, NULL, &arrivals), SLUICE_OK);
  for (int64_t i = 0; i < routes; ++i) {
    int64_t run = i / rows, inside = i % rows;
    int32_t k = (int32_t)(i * 5 % top_k), is_own = run % 3 == 1, is_bad = spoilt && i % 7 == 0;
    int32_t from = is_own ? token[i] : (int32_t)(7 * run + inside);
    assert_int_equal(origin[i], is_bad ? -1 : from);
    for (int32_t j = 0; j < top_k; ++j) {
      int is_there = j == k && !is_bad;
      assert_int_equal(position[i * top_k + j], is_there ? (int32_t)(3 * run + inside) : -1);
      int32_t at = is_own ? from * top_k + k : (int32_t)(11 * run + inside);
      assert_int_equal(weight[i * top_k + j], is_there ? at : -1);
    }
  }
  free(route_index), free(token), free(position), free(weight), free(origin), free(runs);
}

TEST(TokenCopies_SlotsThatArrive_BecomeTables) {
  place(0, 2, 1, 0);
  place(1, 1, 1, 0);
  place(3, 4, 50, 0);
  place(112, 2, 3, 0);
  place(113, 3, 2, 0);
  place(500, 8, 5, 0);
}

TEST(TokenCopies_SlotsOutside_ArePassedOver) {
  place(5, 4, 20, 1);
  place(300, 2, 3, 1);
}

int main(void) { return run_cases_each(set_up, tear_down); }
