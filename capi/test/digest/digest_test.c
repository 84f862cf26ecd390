// SPDX-License-Identifier: Apache-2.0
/* Runs layers that are drawn by a seed, and prints hashes of the bits of outputs and gradients. A family is one layer
 * with its inputs, run in several ways. Its outputs and the gradients of its inputs must not depend on the way: chunks,
 * policies, plans, budgets, capacities, graphs, rebuilt steps.
 *
 *   digest_test [PART PARTS]      only the families whose number modulo PARTS is PART
 *
 * Exit 1: ways of a family differ, or one could not run. compare.py compares the lines of two commits. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "capi/test/cuda/fakes.h"
#include "capi/test/world/world.h"

enum { FAMILIES = 72, WAYS = 9, MOST_CHUNKS = 12, NUM_PARAMS = 12 };
enum { ON_CPU, ON_FAKES, ON_LOCAL_FAKES }; /* where a family runs */

static uint64_t dice;
static int32_t throw_dice(int32_t sides) {
  dice = dice * 6364136223846793005u + 1442695040888963407u;
  return (int32_t)((dice >> 33) % (uint64_t)sides);
}
static int32_t one_of(int32_t sides) { return throw_dice(sides) == 0; }

/* ---- draws; combinations that the library refuses are not drawn ------------------------------------------------- */

static case_t draw_layer(int32_t where) {
  static const int32_t dtypes[] = {SLUICE_DTYPE_F32, SLUICE_DTYPE_BF16, SLUICE_DTYPE_F16, SLUICE_DTYPE_F64};
  static const int32_t top[] = {1, 2, 3, 12};
  case_t c = world_small_case();
  c.world_size = 1 + throw_dice(4);
  for (int r = 0; r < WORLD_MAX_RANKS; ++r) c.tokens[r] = one_of(6) ? 0 : 1 + throw_dice(where == ON_CPU ? 60 : 14);
  c.model_width = 1 + throw_dice(40), c.hidden_width = 1 + throw_dice(70);
  c.top_k = top[throw_dice(4)], c.dtype = dtypes[throw_dice(4)];
  c.activation = throw_dice(SLUICE_ACTIVATION_SWIGLU + 1), c.gated = throw_dice(3), c.bias = throw_dice(2);
  if (c.activation == SLUICE_ACTIVATION_SWIGLU && c.gated == SLUICE_GATED_NO) c.gated = SLUICE_GATED_HALVES;
  c.transposed = throw_dice(2), c.uneven_owners = one_of(3);
  c.deduplicate = c.world_size > 1 && one_of(3) ? SLUICE_DEDUPLICATE_RANKS : SLUICE_DEDUPLICATE_NONE;
  if (one_of(3)) c.drop_every = 1 + throw_dice(5);
  if (c.top_k < c.num_experts && one_of(4)) c.hot_expert = throw_dice(c.num_experts);
  if (c.hot_expert < 0 && one_of(4)) c.repeat_every = 3;
  if (one_of(5)) c.callback_experts = 1, c.bias = 0, c.gated = SLUICE_GATED_NO, c.activation = SLUICE_ACTIVATION_GELU;
  if (!c.callback_experts && one_of(5)) {
    c.lora_rank = 4, c.lora = WORLD_LORA_GATE | WORLD_LORA_DOWN;
    if (c.gated == SLUICE_GATED_HALVES) c.lora |= one_of(2) ? WORLD_LORA_UP : WORLD_LORA_JOINT;
  }
  if (where == ON_CPU) c.gemm = c.dtype == SLUICE_DTYPE_F64 || one_of(2) ? "ref" : "native";
  return c;
}

static int64_t most_tokens(const case_t* c) {
  int64_t most = 1;
  for (int32_t r = 0; r < c->world_size; ++r) most = c->tokens[r] > most ? c->tokens[r] : most;
  return most;
}

/* The smallest budget of a case, which the refusal of a budget of 1 byte names; 0 if it is refused otherwise. */
static uint64_t smallest_budget(case_t c, void (*run)(const case_t*, result_t*)) {
  unsigned long long least = 0;
  result_t got;
  c.budget = 1, c.cycles = 0; /* the smallest is that of the largest batch */
  run(&c, &got);
  for (int32_t r = 0; r < c.world_size; ++r) {
    unsigned long long needs = 0;
    const char* text = strstr(got.message[r], ") needs ");
    if (text != NULL && sscanf(text, ") needs %llu", &needs) == 1 && needs > least) least = needs;
  }
  world_free(&got);
  return least;
}

/* Policies by chunk and the plan of a way, to which its case points. */
static int32_t input_of[MOST_CHUNKS], pre_activation_of[MOST_CHUNKS];
static sluice_plan_config_t plan;

static case_t draw_way(const case_t* layer, int32_t where, void (*run)(const case_t*, result_t*)) {
  static const int32_t chunks[] = {1, 2, 3, 4, 7, MOST_CHUNKS};
  case_t c = *layer;
  c.num_chunks = chunks[throw_dice(6)], c.wgrad_mode = throw_dice(2);
  c.restore_input = throw_dice(3), c.restore_pre_activation = world_pre_activations[throw_dice(3)];
  if (c.callback_experts) { /* their rows are kept, or their forward runs again */
    c.restore_pre_activation = c.restore_input == 0 && one_of(2) ? SLUICE_RESTORE_KEEP : SLUICE_RESTORE_RECOMPUTE;
  } else if (one_of(4)) {
    for (int32_t i = 0; i < MOST_CHUNKS; ++i) {
      input_of[i] = throw_dice(3), pre_activation_of[i] = world_pre_activations[throw_dice(3)];
    }
    c.restore_input_of = input_of, c.restore_pre_activation_of = pre_activation_of;
  }
  c.accumulate = throw_dice(2), c.grad_f32 = throw_dice(2), c.reuse_saved = throw_dice(2);
  c.separate_wgrad = !c.callback_experts && one_of(3);
  c.frozen = !c.callback_experts && !c.separate_wgrad && one_of(5);
  c.outstanding = 1 + throw_dice(3), c.cycles = where == ON_CPU && one_of(6);
  c.restore = c.outstanding == 1 && one_of(2), c.chunking = throw_dice(2);
  if (!c.deduplicate && one_of(3)) {
    c.capacity = most_tokens(&c) * (c.repeat_every > 0 ? c.top_k : 1);
    c.captured = where == ON_FAKES && !c.restore && !c.separate_wgrad && c.outstanding == 1 && one_of(2);
  } else if (c.repeat_every == 0 && one_of(3)) { /* plans count distinct experts of a token */
    sluice_plan_config_init(&plan, sizeof plan);
    plan.max_tokens = most_tokens(&c), plan.max_outstanding = c.outstanding, plan.num_chunks = c.num_chunks;
    plan.restore_input = c.restore_input, plan.restore_pre_activation = c.restore_pre_activation;
    plan.restore_input_of = c.restore_input_of, plan.restore_pre_activation_of = c.restore_pre_activation_of;
    plan.wgrad_mode = c.wgrad_mode, plan.separate_wgrad = c.separate_wgrad;
    c.plan = &plan;
  } else if (c.repeat_every == 0 && one_of(2)) {
    if (!c.callback_experts && one_of(2)) {
      c.num_chunks = 0, c.restore_input_of = c.restore_pre_activation_of = NULL;
      c.restore_input = c.restore_pre_activation = SLUICE_RESTORE_ADAPTIVE, c.wgrad_mode = SLUICE_WGRAD_ADAPTIVE;
    }
    c.budget = smallest_budget(c, run) * (uint64_t)(4 + throw_dice(4)) / 4;
  }
  return c;
}

/* ---- runs -------------------------------------------------------------------------------------------------------- */

static int run_on_fakes(const case_t* c, result_t* out, int is_local) {
  const layer_machine_t* machine = fakes_layer_machine(is_local);
  case_t there = *c;
  machine->open(c->world_size, 1);
  there.machine = machine->world(), there.gemm = NULL;
  world_run(&there, out);
  const char* why = machine->close();
  if (why != NULL) printf("%s\n", why);
  return why != NULL;
}

static int has_failed; /* a fake found a leak or a hazard */
static void on_fakes(const case_t* c, result_t* out) { has_failed |= run_on_fakes(c, out, 0); }
static void on_local_fakes(const case_t* c, result_t* out) { has_failed |= run_on_fakes(c, out, 1); }

static void add(uint64_t* hash, const double* values, int64_t count) {
  for (int64_t i = 0; i < count * (int64_t)sizeof(double); ++i) {
    *hash = (*hash ^ ((const uint8_t*)values)[i]) * UINT64_C(0x100000001b3); /* FNV-1a */
  }
}

static void print_digest(const char* id, const case_t* c, const result_t* got) {
  static const char* const names[NUM_PARAMS] = {"w1",  "w3",  "w2",  "b1",  "b3",  "b2",
                                                "la1", "lb1", "la3", "lb3", "la2", "lb2"};
  uint64_t out = 1, dx = 1, dw = 1, sent = 0, saved = 0, planned = 0, fallback = 0;
  int64_t dropped = 0, most = 0;
  for (int32_t r = 0; r < c->world_size; ++r) {
    add(&out, got->out[r], c->tokens[r] * c->model_width);
    add(&dx, got->grad_tokens[r], c->tokens[r] * c->model_width);
    add(&dw, got->grad_weights[r], c->tokens[r] * c->top_k);
    sent += got->bytes_sent[r], saved += got->saved_bytes[r], planned += got->planned_bytes[r];
    fallback += got->fallback_chunks[r], dropped += got->report[r].num_dropped;
    most = got->report[r].most_rows > most ? got->report[r].most_rows : most;
  }
  printf("%s n=%d sent=%llu saved=%llu planned=%llu fallback=%llu dropped=%lld most=%lld out=%llx dx=%llx dw=%llx", id,
         got->num_chunks[0], (unsigned long long)sent, (unsigned long long)saved, (unsigned long long)planned,
         (unsigned long long)fallback, (long long)dropped, (long long)most, (unsigned long long)out,
         (unsigned long long)dx, (unsigned long long)dw);
  for (int kind = 0; kind < NUM_PARAMS && !c->callback_experts && !c->frozen; ++kind) {
    uint64_t hash = 1;
    add(&hash, got->grad_params[kind], world_count(c, 2 + kind));
    if (world_count(c, 2 + kind) > 0) printf(" %s=%llx", names[kind], (unsigned long long)hash);
  }
  printf("\n");
}

/* Returns whether it ran; otherwise prints why not. */
static int has_run(const char* id, const case_t* c, const result_t* got) {
  for (int32_t r = 0; r < c->world_size; ++r) {
    if (got->status[r] == SLUICE_OK) continue;
    printf("%s refused=%d rank %d: %s: %s\n", id, got->status[r], r, got->message[r], case_text(c));
    return 0;
  }
  return 1;
}

static int run_family(int32_t family) {
  static void (*const runs[])(const case_t*, result_t*) = {world_run, on_fakes, on_local_fakes};
  dice = 20261128 + (uint64_t)family;
  (void)throw_dice(2);
  const int32_t draw = throw_dice(4), where = draw < 2 ? ON_CPU : draw - 1;
  const case_t layer = draw_layer(where);
  result_t first, got;
  char id[24];
  int failed = 0;
  snprintf(id, sizeof id, "%02d.0", family);
  runs[where](&layer, &first);
  if (!has_run(id, &layer, &first)) return world_free(&first), 1;
  print_digest(id, &layer, &first);
  for (int32_t way = 1; way < WAYS; ++way) {
    const case_t c = draw_way(&layer, where, runs[where]);
    snprintf(id, sizeof id, "%02d.%d", family, way);
    runs[where](&c, &got);
    const int is_well = has_run(id, &c, &got);
    if (is_well) print_digest(id, &c, &got);
    const int is_same = is_well && world_identical(&layer, &first, &got, 0);
    if (is_well && !is_same) printf("%s differs from %02d.0: %s\n", id, family, case_text(&c));
    failed |= !is_same;
    world_free(&got);
  }
  world_free(&first);
  return failed;
}

int main(int argc, char** argv) {
  const int32_t part = argc == 3 ? atoi(argv[1]) : 0, parts = argc == 3 ? atoi(argv[2]) : 1;
  setenv("SLUICE_NATIVE", "avx2", 1); /* kernels that every processor has */
  for (int32_t family = part; parts > 0 && family < FAMILIES; family += parts) has_failed |= run_family(family);
  return has_failed;
}
