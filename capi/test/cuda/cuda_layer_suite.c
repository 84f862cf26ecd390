// SPDX-License-Identifier: Apache-2.0
#include "capi/test/cuda/cuda_layer_suite.h"

#include <stdio.h>
#include <string.h>

#include "backend/base/clock.h"

static case_t case_of(int32_t world_size) {
  case_t c = world_small_case();
  c.world_size = world_size;
  return c;
}

/* Tolerance of the comparison with the CPU, in ulps of 1 (distances are relative above 1). GEMMs sum in another order,
 * activations differ in their last bits, and between ops a value may be rounded to either neighbour. */
static double ulps_of_cpu(const case_t* c) {
  switch (c->dtype) {
    case SLUICE_DTYPE_F64: return 3e-7;
    case SLUICE_DTYPE_F32: return 16 * 1.1920929e-7;
    case SLUICE_DTYPE_F16: return 4 * 9.765625e-4;
    default: return 4 * 7.8125e-3;
  }
}

static char problem[1400];

static const char* run_there(const layer_machine_t* machine, const case_t* c, int32_t variant, result_t* out) {
  case_t there = *c;
  machine->open(c->world_size, variant);
  there.machine = machine->world();
  world_run(&there, out);
  const char* left = machine->close();
  for (int32_t r = 0; r < c->world_size; ++r) {
    if (out->status[r] == SLUICE_OK && out->growth[r] == 0) continue;
    snprintf(problem, sizeof problem, "rank %d: status %d: %s; %llu bytes more after the last cycle than the second", r,
             out->status[r], out->message[r], (unsigned long long)out->growth[r]);
    return problem;
  }
  if (left == NULL) return NULL;
  snprintf(problem, sizeof problem, "%s", left);
  return problem;
}

static const char* check_with(const layer_machine_t* machine, const case_t* c, int32_t variant, double room) {
  result_t got, want, cpu;
  const char* why = run_there(machine, c, variant, &got);
  if (why != NULL) {
    world_free(&got);
    return why;
  }
  world_run(c, &cpu);
  world_reference(c, &want);
  double d = world_distance(c, &got, &want), e = world_distance(c, &got, &cpu);
  /* Under a budget, policies may differ. */
  const int sends_as_cpu = c->budget > 0 || memcmp(got.bytes_sent, cpu.bytes_sent, sizeof got.bytes_sent) == 0;
  world_free(&got);
  world_free(&want);
  world_free(&cpu);
  if (d >= 0 && d <= room * world_tolerance(c) && e >= 0 && e <= room * ulps_of_cpu(c) && sends_as_cpu) return NULL;
  snprintf(problem, sizeof problem, "%s: distance %g, of the CPU %g%s", case_text(c), d, e,
           sends_as_cpu ? "" : ", other bytes sent");
  return problem;
}

#define SUITE_TRY_WITH(machine, c, variant)                      \
  do {                                                           \
    const char* why_ = check_with((machine), (c), (variant), 1); \
    if (why_ != NULL) return why_;                               \
  } while (0)
#define SUITE_TRY(machine, c) SUITE_TRY_WITH((machine), (c), 1)

static const int32_t CHUNKS[] = {1, 2, 4};

static const char* chunks(const layer_machine_t* machine, int32_t world_size) {
  for (int n = 0; n < 3; ++n) {
    case_t c = case_of(world_size);
    c.num_chunks = CHUNKS[n];
    c.bias = (world_size + n) % 2 == 0, c.gated = n % 2;
    c.wgrad_mode = n == 1 ? SLUICE_WGRAD_PER_CHUNK : SLUICE_WGRAD_DEFERRED;
    SUITE_TRY(machine, &c);
    c.dtype = SLUICE_DTYPE_BF16, c.gated = !c.gated;
    SUITE_TRY(machine, &c);
  }
  return NULL;
}

static const char* activations(const layer_machine_t* machine, int32_t world_size) {
  for (int32_t a = SLUICE_ACTIVATION_IDENTITY; a <= SLUICE_ACTIVATION_SWIGLU; ++a) {
    case_t c = case_of(world_size);
    c.activation = a, c.num_chunks = 2, c.bias = 1, c.gated = a == SLUICE_ACTIVATION_SWIGLU || a % 2;
    SUITE_TRY(machine, &c);
  }
  return NULL;
}

static const char* policies(const layer_machine_t* machine, int32_t world_size) {
  for (int p = 0; p < 9; ++p) {
    case_t c = case_of(world_size);
    c.num_chunks = CHUNKS[p % 3], c.bias = 1, c.gated = p % 2;
    c.restore_input = p / 3, c.restore_pre_activation = world_pre_activations[p % 3];
    c.reuse_saved = p % 2, c.restore = p % 4 == 3;
    SUITE_TRY(machine, &c);
    c.num_chunks = 4, c.dtype = SLUICE_DTYPE_BF16, c.restore = !c.restore;
    SUITE_TRY(machine, &c);
  }
  return NULL;
}

static const char* dtypes(const layer_machine_t* machine, int32_t world_size) {
  const int32_t types[] = {SLUICE_DTYPE_F16, SLUICE_DTYPE_F64, SLUICE_DTYPE_BF16};
  for (int d = 0; d < 3; ++d) {
    case_t c = case_of(world_size);
    c.num_chunks = 3, c.bias = 1, c.dtype = types[d], c.gated = 1;
    SUITE_TRY(machine, &c);
    c.grad_f32 = c.dtype != SLUICE_DTYPE_F64, c.accumulate = 1;
    SUITE_TRY(machine, &c);
    SUITE_TRY_WITH(machine, &c, 0);
    SUITE_TRY_WITH(machine, &c, 2);
  }
  return NULL;
}

static const char* odd_shapes(const layer_machine_t* machine, int32_t world_size) {
  case_t c = case_of(world_size);
  c.num_chunks = 3, c.drop_every = 3;
  SUITE_TRY(machine, &c);
  c.drop_every = 1;
  SUITE_TRY(machine, &c);
  c.drop_every = 0, c.top_k = 12;
  SUITE_TRY(machine, &c);
  c.top_k = 1, c.hot_expert = 11, c.transposed = 1;
  SUITE_TRY(machine, &c);
  case_t stacked = c; /* one GEMM computes the gradients of W1 and W3 */
  stacked.gated = SLUICE_GATED_HALVES, stacked.stacked = 1;
  SUITE_TRY(machine, &stacked);
  stacked.transposed = 0;
  SUITE_TRY(machine, &stacked);
  c.hot_expert = -1, c.uneven_owners = 1, c.num_chunks = 16;
  SUITE_TRY(machine, &c);
  c.tokens[0] = 0;
  SUITE_TRY(machine, &c);
  return NULL;
}

static const char* halves_and_steps(const layer_machine_t* machine, int32_t world_size) {
  case_t c = case_of(world_size);
  c.num_chunks = 2, c.separate_wgrad = 1, c.gated = 1, c.bias = 1;
  SUITE_TRY(machine, &c);
  c.separate_wgrad = 0, c.outstanding = 3;
  SUITE_TRY(machine, &c);
  c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_OFFLOAD;
  SUITE_TRY(machine, &c);
  return NULL;
}

/* Callback experts on the host's stream: kept and recomputed rows, experts and ranks without rows, one hot expert,
 * callbacks that wait for their stream, several outstanding steps, steps that are rebuilt from saved buffers, and
 * deduplication. */
static const char* callbacks(const layer_machine_t* machine, int32_t world_size) {
  for (int32_t p = 0; p < 4; ++p) {
    case_t c = case_of(world_size);
    c.callback_experts = 1, c.num_chunks = CHUNKS[p % 3], c.drop_every = p == 2 ? 3 : 0, c.restore = p % 2;
    c.restore_pre_activation = p == 0 ? SLUICE_RESTORE_KEEP : SLUICE_RESTORE_RECOMPUTE;
    c.restore_input =
        (int32_t[]){SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_REDISPATCH}[p];
    SUITE_TRY(machine, &c);
    c.hot_expert = 11, c.top_k = 1, c.tokens[0] = p == 1 ? 0 : c.tokens[0], c.callback_waits = 1;
    SUITE_TRY(machine, &c);
    c.dtype = SLUICE_DTYPE_BF16, c.uneven_owners = 1, c.hot_expert = -1, c.top_k = 3, c.callback_waits = 0;
    c.restore = 0, c.outstanding = 2;
    SUITE_TRY(machine, &c);
    c.deduplicate = 1, c.repeat_every = 2;
    SUITE_TRY(machine, &c);
    c.dtype = SLUICE_DTYPE_F32, c.drop_every = 3;
    SUITE_TRY(machine, &c);
  }
  return NULL;
}

/* Shapes with more than one block in every kernel and in the routing. Sums are longer, so the tolerance is larger. */
static const char* larger(const layer_machine_t* machine, int32_t world_size) {
  case_t c = case_of(world_size);
  for (int r = 0; r < 4; ++r) c.tokens[r] = machine->is_slow ? 40 + 7 * r : 300 + 37 * r;
  c.model_width = 96, c.hidden_width = 136, c.num_experts = 16, c.top_k = 4, c.num_chunks = 4, c.gated = 1;
  c.activation = SLUICE_ACTIVATION_SILU;
  const char* why = check_with(machine, &c, 1, 4);
  c.dtype = SLUICE_DTYPE_BF16, c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_OFFLOAD;
  return why != NULL ? why : check_with(machine, &c, 1, 4);
}

/* Exact mode: a forward reads its counts once; a backward reads nothing. */
static const char* host_waits(const layer_machine_t* machine, int32_t world_size) {
  for (int i = 0; i < 4; ++i) {
    case_t c = case_of(world_size);
    result_t out;
    c.num_chunks = 4, c.bias = 1, c.callback_experts = i % 2, c.deduplicate = i / 2;
    const char* why = run_there(machine, &c, 1, &out);
    world_free(&out);
    for (int32_t r = 0; r < world_size && why == NULL; ++r) {
      uint64_t forward = machine->reads(r, SLUICE_FORWARD), backward = machine->reads(r, SLUICE_BACKWARD);
      if (forward == 1 && backward == 0) continue;
      snprintf(problem, sizeof problem, "rank %d: %llu reads in forward and %llu in backward, want 1 and 0", r,
               (unsigned long long)forward, (unsigned long long)backward);
      why = problem;
    }
    if (why != NULL) return why;
  }
  return NULL;
}

/* Graph mode with a capacity that holds all routes of an expert, so that nothing is dropped. */
static const char* capacity(const layer_machine_t* machine, int32_t world_size) {
  case_t c = case_of(world_size);
  c.capacity = 18, c.bias = 1, c.gated = 1;
  for (int n = 0; n < 3; n += 2) {
    c.num_chunks = CHUNKS[n];
    SUITE_TRY(machine, &c);
    c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_OFFLOAD, c.dtype = SLUICE_DTYPE_BF16;
    SUITE_TRY(machine, &c);
  }
  c.callback_experts = 1, c.bias = c.gated = 0, c.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
  SUITE_TRY(machine, &c);
  return NULL;
}

#define AMPLE ((uint64_t)1 << 28) /* enough for a plan with every policy */

/* Budgets with exchanges by route, with deduplication, and under a capacity. */
static const char* budgets(const layer_machine_t* machine, int32_t world_size) {
  for (int i = 0; i < 6; ++i) {
    case_t c = case_of(world_size);
    c.budget = AMPLE, c.num_chunks = CHUNKS[1 + i % 2], c.bias = 1, c.gated = i % 2, c.outstanding = 1 + i / 3;
    c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_ADAPTIVE;
    if (i % 3 == 1) c.deduplicate = 1, c.top_k = 4;
    if (i % 3 == 2) c.capacity = 18;
    if (i >= 3) c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_OFFLOAD, c.dtype = SLUICE_DTYPE_BF16;
    SUITE_TRY(machine, &c);
  }
  return NULL;
}

/* Captures forward and backward as one graph, with other routes than those of the launch. Ranks that are threads
 * synchronize on the host, which a capture does not allow, so they must get an error. */
static const char* captured(const layer_machine_t* machine, int32_t world_size) {
  for (int n = 0; n < 3; n += 2) {
    case_t c = case_of(world_size);
    c.capacity = 18, c.bias = 1, c.gated = n == 0, c.captured = 1, c.num_chunks = CHUNKS[n];
    if (n > 0) c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_OFFLOAD, c.dtype = SLUICE_DTYPE_BF16;
    if (n > 0) c.budget = AMPLE;
    if (world_size == 1 || strcmp(machine->name, "nccl") == 0) {
      case_t plain = c;
      result_t got, cpu;
      plain.captured = 0;
      const char* why = run_there(machine, &c, 1, &got);
      world_run(&plain, &cpu);
      double d = why == NULL ? world_distance(&c, &got, &cpu) : 0;
      world_free(&got);
      world_free(&cpu);
      if (why != NULL) return why;
      snprintf(problem, sizeof problem, "W %d n %d: distance %g of the CPU", world_size, c.num_chunks, d);
      if (!(d >= 0 && d <= ulps_of_cpu(&c))) return problem;
      continue;
    }
    result_t out;
    (void)run_there(machine, &c, 1, &out);
    int is_told = 1;
    for (int32_t r = 0; r < world_size; ++r) {
      is_told &= out.status[r] == SLUICE_E_UNSUPPORTED && strstr(out.message[r], "local communicator") != NULL;
    }
    snprintf(problem, sizeof problem, "not refused: %d, %s", out.status[0], out.message[0]);
    world_free(&out);
    if (!is_told) return problem;
  }
  return NULL;
}

/* By node, if the ranks are two nodes. */
static case_t copies_case_of(int32_t world_size, int by_node) {
  case_t c = case_of(world_size);
  c.deduplicate = by_node ? SLUICE_DEDUPLICATE_NODES : SLUICE_DEDUPLICATE_RANKS;
  c.ranks_per_node = by_node ? world_size / 2 : 0;
  return c;
}

/* Deduplication: routes that share a row, are dropped or repeat an expert, and ranks without tokens. */
static const char* deduplicated(const layer_machine_t* machine, int32_t world_size) {
  for (int i = 0; i < (world_size == 4 ? 6 : 3); ++i) {
    const int n = i % 3;
    case_t c = copies_case_of(world_size, i / 3);
    c.top_k = 4, c.num_chunks = CHUNKS[n], c.bias = 1, c.gated = n % 2;
    c.wgrad_mode = n == 1 ? SLUICE_WGRAD_PER_CHUNK : SLUICE_WGRAD_DEFERRED;
    SUITE_TRY(machine, &c);
    c.dtype = SLUICE_DTYPE_BF16, c.drop_every = 3, c.repeat_every = 2;
    c.restore_input = n == 2 ? SLUICE_RESTORE_REDISPATCH : SLUICE_RESTORE_KEEP;
    SUITE_TRY(machine, &c);
    c.drop_every = c.repeat_every = 0, c.hot_expert = 11, c.uneven_owners = 1, c.tokens[n % world_size] = 0;
    c.restore_pre_activation = SLUICE_RESTORE_OFFLOAD;
    SUITE_TRY(machine, &c);
  }
  return NULL;
}

static const char* deduplicated_policies(const layer_machine_t* machine, int32_t world_size) {
  const int32_t types[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_F16, SLUICE_DTYPE_F64};
  for (int i = 0; i < (world_size == 4 ? 18 : 9); ++i) {
    const int p = i % 9;
    case_t c = copies_case_of(world_size, i / 9);
    c.top_k = 1 + p, c.num_chunks = CHUNKS[p % 3], c.gated = p % 2, c.dtype = types[p / 3];
    c.restore_input = p / 3, c.restore_pre_activation = world_pre_activations[p % 3];
    c.reuse_saved = p % 2, c.restore = p % 4 == 3, c.separate_wgrad = p % 3 == 1, c.outstanding = p % 4 == 2 ? 3 : 1;
    c.num_experts = 12;
    SUITE_TRY(machine, &c);
  }
  return NULL;
}

/* A training loop runs one layer with alternating numbers of tokens; the allocated bytes stay constant. */
static const char* many_rounds(const layer_machine_t* machine, int32_t world_size) {
  case_t c = case_of(world_size);
  for (int r = 0; r < 4; ++r) c.tokens[r] = 5 + r % 2;
  c.model_width = 4, c.hidden_width = 5, c.num_experts = 4, c.num_chunks = 2, c.gated = 1, c.cycles = 3;
  SUITE_TRY(machine, &c);
  c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_OFFLOAD;
  SUITE_TRY(machine, &c);
  c.deduplicate = 1;
  SUITE_TRY(machine, &c);
  return NULL;
}

const layer_case_t layer_cases[] = {
    {"Chunks_MatchReferenceAndCpu", chunks, 1},
    {"EveryActivation_MatchesReferenceAndCpu", activations, 0},
    {"EveryPolicy_MatchesReferenceAndCpu", policies, 1},
    {"OtherDtypesAndGradientsInF32_MatchReferenceAndCpu", dtypes, 0},
    {"OddShapesAndOwners_MatchReferenceAndCpu", odd_shapes, 0},
    {"SeparateWgradAndOutstandingSteps_MatchReferenceAndCpu", halves_and_steps, 0},
    {"CallbackExperts_MatchReferenceAndCpu", callbacks, 1},
    {"LargerShapes_MatchReferenceAndCpu", larger, 0},
    {"HostWaits_OneInForwardNoneInBackward", host_waits, 0},
    {"Deduplicated_MatchesReferenceAndCpu", deduplicated, 1},
    {"DeduplicatedEveryPolicy_MatchesReferenceAndCpu", deduplicated_policies, 0},
    {"UnderACapacity_MatchesReferenceAndCpu", capacity, 0},
    {"UnderABudget_MatchesReferenceAndCpu", budgets, 0},
    {"CapturedIntoAGraph_MatchesCpu", captured, 0},
    {"ManyRounds_KeepTheirBytes", many_rounds, 0},
    {NULL, NULL, 0},
};

/* ---- soak ------------------------------------------------------------------------------------------------------ */

static uint64_t dice;
static int32_t throw_dice(int32_t sides) {
  dice = dice * 6364136223846793005u + 1442695040888963407u;
  return (int32_t)((dice >> 33) % (uint64_t)sides);
}

static case_t random_case(const layer_machine_t* machine, int32_t most_ranks) {
  static const int32_t types[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16};
  case_t c = world_small_case();
  c.world_size = 1 + throw_dice(most_ranks);
  for (int r = 0; r < c.world_size; ++r) c.tokens[r] = throw_dice(4) == 0 ? 0 : throw_dice(machine->is_slow ? 20 : 300);
  c.model_width = 1 + throw_dice(40), c.hidden_width = 1 + throw_dice(40);
  c.num_experts = c.world_size * (1 + throw_dice(5));
  c.top_k = 1 + throw_dice(c.num_experts < 4 ? c.num_experts : 4);
  c.num_chunks = 1 + throw_dice(6), c.dtype = types[throw_dice(3)];
  c.activation = throw_dice(6), c.gated = throw_dice(2), c.bias = throw_dice(2), c.wgrad_mode = throw_dice(2);
  c.drop_every = throw_dice(3) == 0 ? 2 + throw_dice(5) : 0;
  c.hot_expert = throw_dice(4) == 0 && c.top_k < c.num_experts ? throw_dice(c.num_experts) : -1;
  c.transposed = throw_dice(2), c.uneven_owners = throw_dice(3) == 0, c.reuse_saved = throw_dice(2);
  c.restore_input = throw_dice(3), c.restore_pre_activation = world_pre_activations[throw_dice(3)];
  c.deduplicate = throw_dice(3) == 0;
  c.cycles = throw_dice(8) == 0 && !machine->is_slow ? 4 : 0;
  /* Sums of 16-bit numbers in another order put one in thousands of preactivations on the other side of 0, where relu's
   * derivative jumps: correct results then differ widely, and no distance separates them from wrong ones. */
  if (c.dtype != SLUICE_DTYPE_F32 && c.activation == SLUICE_ACTIVATION_RELU) c.activation = SLUICE_ACTIVATION_GELU;
  return c;
}

const char* layer_soak(const layer_machine_t* machine, int32_t most_ranks, uint64_t seed, double seconds,
                       int64_t* out_cases) {
  uint64_t end_ns = sluice_now_ns() + (uint64_t)(seconds * 1e9);
  dice = seed;
  for (*out_cases = 0; sluice_now_ns() < end_ns; ++*out_cases) {
    const case_t c = random_case(machine, most_ranks);
    const char* why = check_with(machine, &c, 1, 4); /* sums may be longer than in the base case */
    if (why != NULL) return why;
  }
  return NULL;
}
