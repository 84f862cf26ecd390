/* Plans: results under a budget, memory under any routing, predictions against the allocator, errors. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "capi/test/budget_suite.h"
#include "capi/test/checks.h"
#include "capi/test/rig.h"

static budget_suite_t suite_of(void) {
  return (budget_suite_t){.base = budget_base_case(), .run = world_run, .least_ranks = 1};
}

static case_t base_case(void) { return budget_base_case(); }
static uint64_t smallest_budget(case_t c) { return budget_smallest(&(budget_suite_t){.run = world_run}, c); }
static void check(case_t c) { budget_check(&(budget_suite_t){.run = world_run}, c); }

static void Budget_FromTheSmallestUp_ResultsAreTheSame(void** state) {
  (void)state;
  const budget_suite_t suite = suite_of();
  budget_from_the_smallest_up(&suite);
}

static void Budget_OneHotExpert_StaysWithinThePlan(void** state) {
  (void)state;
  const budget_suite_t suite = suite_of();
  budget_one_hot_expert(&suite);
}

static void Budget_OddShapesAndPolicies_ResultsAreTheSame(void** state) {
  (void)state;
  const budget_suite_t suite = suite_of();
  budget_odd_shapes_and_policies(&suite);
}

static void Budget_MoreOutstandingThanSaid_RefusedByName(void** state) {
  (void)state;
  const budget_suite_t suite = suite_of();
  budget_more_outstanding_than_said(&suite);
}

/* ---- halves apart ---- */

static void Budget_HalvesApart_AreCountedInThePlan(void** state) {
  (void)state;
  const budget_suite_t suite = suite_of();
  budget_halves_apart(&suite);
}

static void Budget_HalvesApartUnsaid_AreRefusedByName(void** state) {
  (void)state;
  const budget_suite_t suite = suite_of();
  budget_halves_unsaid(&suite);
}

/* A layer of one rank that keeps next to nothing, told of one forward and of halves apart. */
static void open_lean(rig_t* rig, uint64_t budget) {
  sluice_context_config_t context;
  sluice_context_config_init(&context, sizeof context);
  context.gemm = "ref", context.max_outstanding = 1, context.halves_apart = 1, context.memory_budget = budget;
  sluice_moe_config_t config = rig_config();
  config.restore_input = SLUICE_RESTORE_REDISPATCH, config.restore_middle = SLUICE_RESTORE_RECOMPUTE;
  config.wgrad_mode = SLUICE_WGRAD_PER_CHUNK;
  memset(rig, 0, sizeof *rig);
  rig->world_size = 1;
  heap_init(&rig->heap);
  assert_int_equal(sluice_context_create(&context, NULL, &rig->context), SLUICE_OK);
  assert_int_equal(rig_open_layer(rig, &config), SLUICE_OK);
}

static sluice_context_stats_t stats_of(sluice_context_t* context) {
  sluice_context_stats_t stats = {.struct_size = sizeof stats};
  assert_int_equal(sluice_context_get_stats(context, 0, &stats), SLUICE_OK);
  return stats;
}

static void halves(rig_t* rig, sluice_step_t* step, int32_t which, sluice_status_t wanted) {
  rig->backward.halves = which;
  if (rig_backward(rig, step) != wanted) fail_msg("half %d: %s", which, last_message());
}

/* What is looked at runs as it would: a trace far larger than the budget takes nothing of it. */
static void Budget_Traced_RunsInTheSameBytes(void** state) {
  (void)state;
  rig_t rig;
  sluice_step_t* step = NULL;
  unsigned long long needs = 0;
  open_lean(&rig, 1);
  assert_int_equal(rig_forward(&rig, &step), SLUICE_E_OVER_BUDGET);
  assert_int_equal(sscanf(strstr(last_message(), ") needs "), ") needs %llu", &needs), 1);
  rig_close(&rig);
  open_lean(&rig, needs);
  assert_int_equal(sluice_context_trace(rig.context, 1 << 16), SLUICE_OK);
  assert_int_equal(rig_forward(&rig, &step), SLUICE_OK);
  halves(&rig, step, SLUICE_HALF_BOTH, SLUICE_OK);
  sluice_trace_event_t event;
  int64_t count = 0;
  assert_int_equal(sluice_context_take_trace(rig.context, &event, 1, &count), SLUICE_OK);
  assert_int_equal(count, 1);
  assert_true(stats_of(rig.context).peak_bytes <= needs);
  rig_close(&rig);
}

/* More forwards than were said fit the budget, since little of them is kept. One of the input half's turns without a
 * weight half finds no room, is told so before any row is sent, and has it once another step is through. */
static void Budget_MoreInputHalvesThanSaid_AreRefusedByName(void** state) {
  (void)state;
  rig_t rig;
  enum { STEPS = 4 };
  sluice_step_t* steps[STEPS] = {NULL};
  unsigned long long needs = 0;
  open_lean(&rig, 1);
  assert_int_equal(rig_forward(&rig, &steps[0]), SLUICE_E_OVER_BUDGET);
  assert_int_equal(sscanf(strstr(last_message(), ") needs "), ") needs %llu", &needs), 1);
  rig_close(&rig);
  open_lean(&rig, 1u << 30);
  uint64_t bytes[2];
  for (int i = 0; i < 2; ++i) {
    assert_int_equal(rig_forward(&rig, &steps[i]), SLUICE_OK);
    bytes[i] = stats_of(rig.context).current_bytes;
  }
  for (int i = 0; i < 2; ++i) sluice_step_drop(steps[i]);
  rig_close(&rig);

  const uint64_t budget = needs + (STEPS - 1) * (bytes[1] - bytes[0]); /* the plan, and three forwards */
  open_lean(&rig, budget);
  for (int i = 0; i < STEPS; ++i) {
    if (rig_forward(&rig, &steps[i]) != SLUICE_OK) fail_msg("%s", last_message());
  }
  rig.backward.halves = SLUICE_HALF_INPUT;
  int done = 0;
  sluice_status_t status = SLUICE_OK;
  while (done < STEPS && (status = rig_backward(&rig, steps[done])) == SLUICE_OK) ++done;
  assert_true(done > 0 && status == SLUICE_E_OVER_BUDGET);
  assert_non_null(strstr(last_message(), "the input half alone would keep "));
  assert_non_null(strstr(last_message(), "(max_outstanding is 1): run weight halves or whole backwards first"));
  halves(&rig, steps[0], SLUICE_HALF_WEIGHT, SLUICE_OK);
  halves(&rig, steps[done], SLUICE_HALF_INPUT, SLUICE_OK);
  for (int i = 1; i <= done; ++i) halves(&rig, steps[i], SLUICE_HALF_WEIGHT, SLUICE_OK);
  for (int i = 0; i < STEPS; ++i) sluice_step_drop(steps[i]);
  assert_true(stats_of(rig.context).peak_bytes <= budget);
  rig_close(&rig);
}

/* ---- the host pool ---- */

static void HostBudget_OneHotExpert_ResultsAreTheSame(void** state) {
  (void)state;
  const budget_suite_t suite = suite_of();
  host_budget_one_hot_expert(&suite);
}

/* More forwards outstanding than were said: the pool has no room, and all ranks say so before any row is sent. */
static void HostBudget_MoreOutstandingThanSaid_RefusedOnAllRanks(void** state) {
  (void)state;
  for (int32_t w = 1; w <= 4; ++w) {
    case_t c = base_case();
    c.world_size = w, c.top_k = 1, c.hot_expert = 1, c.outstanding = c.max_outstanding = 2;
    c.restore_input = c.restore_middle = SLUICE_RESTORE_OFFLOAD;
    c.host_budget = 1000;
    result_t got;
    world_run(&c, &got);
    unsigned long long needs = 0;
    assert_int_equal(sscanf(strstr(got.message[0], "takes "), "takes %llu", &needs), 1);
    world_free(&got);
    c.host_budget = needs;
    check(c);
    c.outstanding = 4;
    world_run(&c, &got);
    for (int32_t r = 0; r < w; ++r) {
      assert_int_equal(got.status[r], SLUICE_E_OVER_BUDGET);
      if (strstr(got.message[r], "bytes of offloaded rows on one of the ranks") == NULL ||
          strstr(got.message[r], "raise max_outstanding, or raise host_memory_budget") == NULL) {
        fail_msg("rank %d: %s", r, got.message[r]);
      }
    }
    world_free(&got);
  }
}

/* ---- predictions ---- */

typedef struct layer_s {
  sluice_context_t* context;
  sluice_moe_t* moe;
  int64_t tokens, width, hidden;
  int32_t experts, top_k;
  int32_t is_bf16; /* the same bytes, taken for other numbers */
} layer_t;

static void open_layer(layer_t* l, int32_t gated) {
  sluice_context_config_t context;
  sluice_context_config_init(&context, sizeof context);
  context.gemm = "ref";
  assert_int_equal(sluice_context_create(&context, NULL, &l->context), SLUICE_OK);
  sluice_moe_config_t config;
  sluice_moe_config_init(&config, sizeof config);
  config.model_width = l->width, config.hidden_width = l->hidden, config.num_experts = l->experts;
  config.top_k = l->top_k, config.gated = gated;
  config.dtype = l->is_bf16 ? SLUICE_DTYPE_BF16 : SLUICE_DTYPE_F32;
  assert_int_equal(sluice_moe_create(l->context, &config, &l->moe), SLUICE_OK);
}

static void close_layer(layer_t* l) {
  sluice_moe_destroy(l->moe);
  sluice_context_destroy(l->context);
}

typedef struct buffers_s {
  float *x, *y, *w, *dy, *dx, *dw;
  int64_t* ids;
  sluice_tensor_t tensors[7];
  int64_t shapes[7][2];
} buffers_t;

static float* floats(int64_t count) {
  float* data = test_calloc((size_t)count + 1, sizeof *data);
  for (int64_t i = 0; i < count; ++i) data[i] = (float)((i * 37) % 19 - 9) * 0.05f;
  return data;
}

static sluice_tensor_t* tensor(buffers_t* b, int i, void* data, int64_t rows, int64_t cols, int code, int bits) {
  b->shapes[i][0] = rows, b->shapes[i][1] = cols;
  b->tensors[i] = (sluice_tensor_t){.data = data,
                                    .device_type = SLUICE_DEVICE_CPU,
                                    .ndim = 2,
                                    .type_code = (uint8_t)code,
                                    .type_bits = (uint8_t)bits,
                                    .type_lanes = 1,
                                    .shape = b->shapes[i]};
  return &b->tensors[i];
}

static void run_steps(layer_t* l, int32_t gated, int32_t outstanding, uint32_t seed, uint64_t* step_bytes,
                      const sluice_plan_t* plan) {
  int64_t t = l->tokens, m = l->width, h = l->hidden;
  const int code = l->is_bf16 ? SLUICE_TYPE_BFLOAT : SLUICE_TYPE_FLOAT, bits = l->is_bf16 ? 16 : 32;
  buffers_t b = {.x = floats(t * m),
                 .y = floats(t * m),
                 .w = floats(t * l->top_k),
                 .dy = floats(t * m),
                 .dx = floats(t * m),
                 .dw = floats(t * l->top_k)};
  b.ids = test_calloc((size_t)(t * l->top_k), sizeof *b.ids);
  sluice_step_t* steps[4] = {NULL};
  float* data[4] = {floats(l->experts * h * m), floats(l->experts * m * h), floats(l->experts * h * m), NULL};
  sluice_tensor_t lists[3][64];
  int64_t shapes[3][2] = {{h, m}, {m, h}, {h, m}};
  for (int k = 0; k < 3; ++k) {
    for (int32_t e = 0; e < l->experts; ++e) {
      lists[k][e] = (sluice_tensor_t){.data = data[k] + e * h * m,
                                      .device_type = SLUICE_DEVICE_CPU,
                                      .ndim = 2,
                                      .type_code = (uint8_t)code,
                                      .type_bits = (uint8_t)bits,
                                      .type_lanes = 1,
                                      .shape = shapes[k]};
    }
  }
  float* grads[3] = {floats(l->experts * h * m), floats(l->experts * m * h), floats(l->experts * h * m)};
  sluice_tensor_t grad_lists[3][64];
  for (int k = 0; k < 3; ++k) {
    for (int32_t e = 0; e < l->experts; ++e)
      grad_lists[k][e] = lists[k][e], grad_lists[k][e].data = grads[k] + e * h * m;
  }
  sluice_expert_tensors_t params = {
      .struct_size = sizeof params, .w1 = lists[0], .w2 = lists[1], .w3 = gated ? lists[2] : NULL};
  sluice_expert_tensors_t dparams = {
      .struct_size = sizeof params, .w1 = grad_lists[0], .w2 = grad_lists[1], .w3 = gated ? grad_lists[2] : NULL};
  *step_bytes = 0;
  for (int32_t i = 0; i < outstanding; ++i) {
    for (int64_t r = 0; r < t * l->top_k; ++r) {
      seed = seed * 1664525u + 1013904223u;
      b.ids[r] = (int64_t)(seed >> 16) % l->experts;
    }
    sluice_moe_forward_args_t f;
    sluice_moe_forward_args_init(&f, sizeof f);
    f.tokens = tensor(&b, 0, b.x, t, m, code, bits);
    f.expert_ids = tensor(&b, 1, b.ids, t, l->top_k, SLUICE_TYPE_INT, 64);
    f.route_weights = tensor(&b, 2, b.w, t, l->top_k, SLUICE_TYPE_FLOAT, 32);
    f.out_tokens = tensor(&b, 3, b.y, t, m, code, bits);
    f.params = &params;
    f.needs_backward = 1;
    assert_int_equal(sluice_moe_forward(l->moe, &f, NULL, &steps[i]), SLUICE_OK);
    int32_t n = 0;
    assert_int_equal(sluice_step_info(steps[i], &n, NULL), SLUICE_OK);
    /* One rank: a chunk receives the routes of its tokens, and blocks are cut as the plan says. */
    sluice_plan_info_t info = {.struct_size = sizeof info};
    assert_int_equal(sluice_plan_get_info(plan, &info), SLUICE_OK);
    int64_t rows[256];
    int32_t first = 0, kept = 0;
    int64_t sum = 0;
    for (int32_t c = 0; c < n; ++c) {
      int32_t blocks = (info.num_blocks + info.num_chunks - 1) / info.num_chunks;
      int32_t end = first;
      while (end < info.num_blocks && end - first < blocks &&
             (t * (end + 1) / info.num_blocks - t * first / info.num_blocks) * l->top_k <= info.chunk_rows) {
        ++end;
      }
      rows[c] = (t * end / info.num_blocks - t * first / info.num_blocks) * l->top_k;
      sum += rows[c];
      kept += sum <= info.kept_rows;
      first = end;
    }
    assert_int_equal(first, info.num_blocks);
    uint64_t bytes = 0;
    assert_int_equal(sluice_plan_predict_step(plan, n, rows, kept, t, t * l->top_k, &bytes), SLUICE_OK);
    *step_bytes += bytes;
  }
  for (int32_t i = 0; i < outstanding; ++i) {
    sluice_moe_backward_args_t back;
    sluice_moe_backward_args_init(&back, sizeof back);
    back.tokens = &b.tensors[0], back.route_weights = &b.tensors[2];
    back.grad_out = tensor(&b, 4, b.dy, t, m, code, bits);
    back.grad_tokens = tensor(&b, 5, b.dx, t, m, code, bits);
    back.grad_route_weights = tensor(&b, 6, b.dw, t, l->top_k, SLUICE_TYPE_FLOAT, 32);
    back.params = &params, back.grad_params = &dparams;
    back.may_reuse_saved = i % 2;
    assert_int_equal(sluice_moe_backward(l->moe, steps[i], &back, NULL), SLUICE_OK);
  }
  for (int32_t i = 0; i < outstanding; ++i) sluice_step_drop(steps[i]);
  float* all[] = {b.x, b.y, b.w, b.dy, b.dx, b.dw, data[0], data[1], data[2], grads[0], grads[1], grads[2]};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) test_free(all[i]);
  test_free(b.ids);
}

/* The allocator's high-water mark is what the plan says, to the byte. */
static void Prediction_AnyShapePolicyAndN_EqualsTheAllocator(void** state) {
  (void)state;
  int64_t checked = 0;
  uint32_t random = 7;
  const int32_t chunks[] = {1, 2, 3, 8};
  const int32_t middle[] = {SLUICE_RESTORE_KEEP, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE};
  for (int32_t variant = 0; variant < 9 * 4 * 2 * 2 * 2; ++variant) {
    random = random * 1664525u + 1013904223u;
    layer_t l = {.tokens = 1 + (random >> 8) % 90,
                 .width = 1 + (random >> 14) % 20,
                 .hidden = 1 + (random >> 18) % 30,
                 .experts = 2 + (int32_t)(random >> 22) % 6,
                 .top_k = 1 + (int32_t)(random >> 27) % 2,
                 .is_bf16 = variant / (9 * 4 * 2 * 2)};
    int32_t gated = variant % 2, outstanding = 1 + variant % 3;
    open_layer(&l, gated);
    sluice_plan_config_t config;
    sluice_plan_config_init(&config, sizeof config);
    config.max_tokens = l.tokens, config.max_outstanding = outstanding;
    config.num_chunks = chunks[variant / 4 % 4];
    config.wgrad_mode = variant / 2 % 2;
    config.restore_input = variant / 16 % 3, config.restore_middle = middle[variant / 48 % 3];
    sluice_plan_t* plan = NULL;
    assert_int_equal(sluice_plan_create(l.moe, &config, &plan), SLUICE_OK);
    sluice_plan_info_t info = {.struct_size = sizeof info};
    assert_int_equal(sluice_plan_get_info(plan, &info), SLUICE_OK);
    assert_int_equal(info.total_bytes, info.base_bytes + info.slot_bytes + info.routing_bytes + info.schedule_bytes +
                                           info.header_bytes + info.product_bytes +
                                           (uint64_t)outstanding * info.step_bytes);
    assert_int_equal(sluice_moe_use_plan(l.moe, plan), SLUICE_OK);
    uint64_t steps = 0;
    run_steps(&l, gated, outstanding, random, &steps, plan);
    sluice_context_stats_t stats = {.struct_size = sizeof stats};
    assert_int_equal(sluice_context_get_stats(l.context, 0, &stats), SLUICE_OK);
    uint64_t predicted = info.total_bytes - (uint64_t)outstanding * info.step_bytes + steps;
    if (stats.peak_bytes != predicted) {
      fail_msg("variant %d: T %lld M %lld H %lld E %d K %d n %d restore %d %d wgrad %d: peak %llu, predicted %llu",
               variant, (long long)l.tokens, (long long)l.width, (long long)l.hidden, l.experts, l.top_k,
               config.num_chunks, config.restore_input, config.restore_middle, config.wgrad_mode,
               (unsigned long long)stats.peak_bytes, (unsigned long long)predicted);
    }
    assert_true(predicted <= info.total_bytes);
    ++checked;
    sluice_plan_destroy(plan);
    close_layer(&l);
  }
  printf("predicted bytes equal the allocator's peak in %lld of %lld cases\n", (long long)checked, (long long)checked);
}

/* Several ranks, uneven batches and owners: on each the peak is what the plan and the counts say. */
static void Prediction_SeveralRanks_EqualsTheAllocatorOfEach(void** state) {
  (void)state;
  budget_predictions(&(budget_suite_t){.base = world_small_case(), .run = world_run});
}

/* Hosts may give an expert twice within a token, and so one rank more rows than distinct ids could: more slots of
 * weight gradients that wait, more rows of a pass, and still no byte that was not planned. */
static void Prediction_RepeatedIds_EqualsTheAllocatorOfEach(void** state) {
  (void)state;
  for (int32_t every = 1; every <= 2; ++every) {
    case_t c = world_small_case();
    c.num_experts = 12, c.top_k = 7, c.repeat_every = every; /* more routes than a rank has experts */
    for (int32_t r = 0; r < 4; ++r) c.tokens[r] = 30 - 5 * r;
    budget_predictions(&(budget_suite_t){.base = c, .run = world_run});
  }
}

/* From the smallest budget up, all rows of all ranks to one expert, K times each. */
static void Budget_RepeatedIds_ResultsAreTheSame(void** state) {
  (void)state;
  for (int32_t w = 2; w <= 4; ++w) {
    for (int32_t i = 0; i < 6; ++i) {
      case_t c = base_case();
      c.world_size = w, c.num_experts = w, c.top_k = 2; /* more routes than a rank has experts */
      c.repeat_every = 1 + i % 2, c.hot_expert = i % 4 < 2 ? 1 : -1;
      c.tokens[0] = c.tokens[2] = 64;
      c.wgrad_mode = i % 3 == 2 ? SLUICE_WGRAD_ADAPTIVE : i % 3;
      c.restore_input = i % 4 == 3 || i == 5 ? SLUICE_RESTORE_ADAPTIVE : i % 4;
      c.callback_experts = i == 5;
      c.budget = 1;
      const uint64_t least = smallest_budget(c);
      for (uint64_t more = 0; more <= 2; more += 2) {
        c.budget = least + more * least / 2;
        check(c);
      }
    }
  }
}

/* ---- the handle ---- */

#define REFUSED(call, status, text)                                         \
  do {                                                                      \
    assert_int_equal(call, status);                                         \
    sluice_error_info_t info_;                                              \
    sluice_error_info_init(&info_, sizeof info_);                           \
    sluice_error_last(&info_);                                              \
    if (strstr(info_.message, text) == NULL) fail_msg("%s", info_.message); \
  } while (0)

static void Plan_BadInput_IsNamed(void** state) {
  (void)state;
  layer_t l = {.tokens = 64, .width = 8, .hidden = 16, .experts = 4, .top_k = 1};
  open_layer(&l, 0);
  sluice_plan_t* plan = NULL;
  sluice_plan_config_t config;
  sluice_plan_config_init(&config, sizeof config);
  REFUSED(sluice_plan_create(l.moe, &config, &plan), SLUICE_E_INVALID_ARGUMENT, "max_tokens is 0");
  config.max_tokens = 64, config.max_outstanding = 0;
  REFUSED(sluice_plan_create(l.moe, &config, &plan), SLUICE_E_INVALID_ARGUMENT, "max_outstanding is 0");
  config.max_outstanding = 4, config.num_chunks = 300;
  REFUSED(sluice_plan_create(l.moe, &config, &plan), SLUICE_E_INVALID_ARGUMENT, "num_chunks is 300");
  config.num_chunks = 0, config.restore_middle = SLUICE_RESTORE_REDISPATCH;
  REFUSED(sluice_plan_create(l.moe, &config, &plan), SLUICE_E_INVALID_ARGUMENT, "restore_middle is 2");
  config.restore_middle = SLUICE_RESTORE_ADAPTIVE;
  REFUSED(sluice_plan_create(NULL, &config, &plan), SLUICE_E_INVALID_ARGUMENT, "moe is NULL");
  REFUSED(sluice_plan_create(l.moe, &config, NULL), SLUICE_E_INVALID_ARGUMENT, "out_plan is NULL");
  config.memory_budget = 1000;
  REFUSED(sluice_plan_create(l.moe, &config, &plan), SLUICE_E_OVER_BUDGET,
          "no plan fits the memory budget of 1000 bytes");
  assert_null(plan);

  config.memory_budget = 0;
  assert_int_equal(sluice_plan_create(l.moe, &config, &plan), SLUICE_OK);
  int32_t count = 0;
  sluice_plan_candidate_t lines[512];
  assert_int_equal(sluice_plan_candidates(plan, lines, 512, &count), SLUICE_OK);
  assert_int_equal(count, 8 * 9 * 2); /* n, policies, weight-gradient modes */
  for (int32_t i = 0; i < count; ++i) assert_true(lines[i].fits && lines[i].total_bytes > 0);

  char bytes[1024];
  uint64_t size = 0;
  assert_int_equal(sluice_plan_write(plan, NULL, &size), SLUICE_OK);
  assert_true(size < sizeof bytes);
  assert_int_equal(sluice_plan_write(plan, bytes, &size), SLUICE_OK);
  sluice_plan_t* again = NULL;
  for (uint64_t at = 0; at < size; ++at) {
    bytes[at] ^= 1;
    assert_int_equal(sluice_plan_read(l.moe, bytes, size, &again), SLUICE_E_INVALID_ARGUMENT);
    bytes[at] ^= 1;
  }
  REFUSED(sluice_plan_read(l.moe, bytes, size - 1, &again), SLUICE_E_INVALID_ARGUMENT, "bytes; a plan has");
  assert_int_equal(sluice_plan_read(l.moe, bytes, size, &again), SLUICE_OK);
  sluice_plan_info_t a = {.struct_size = sizeof a}, b = {.struct_size = sizeof b};
  assert_int_equal(sluice_plan_get_info(plan, &a), SLUICE_OK);
  assert_int_equal(sluice_plan_get_info(again, &b), SLUICE_OK);
  assert_memory_equal(&a, &b, sizeof a);

  layer_t other = {.tokens = 64, .width = 9, .hidden = 16, .experts = 4, .top_k = 1};
  open_layer(&other, 0);
  REFUSED(sluice_moe_use_plan(other.moe, plan), SLUICE_E_INVALID_ARGUMENT, "not alike");
  REFUSED(sluice_plan_read(other.moe, bytes, size, &again), SLUICE_E_INVALID_ARGUMENT, "another layer");
  close_layer(&other);
  assert_int_equal(sluice_moe_use_plan(l.moe, plan), SLUICE_OK);
  assert_int_equal(sluice_moe_use_plan(l.moe, NULL), SLUICE_OK);
  sluice_plan_destroy(plan);
  sluice_plan_destroy(again);
  sluice_plan_destroy(NULL);
  close_layer(&l);
}

static void HostBudget_Plans_KeepWhatThePoolHolds(void** state) {
  (void)state;
  layer_t l = {.tokens = 4096, .width = 8, .hidden = 16, .experts = 4, .top_k = 1};
  open_layer(&l, 0);
  sluice_plan_config_t config;
  sluice_plan_config_init(&config, sizeof config);
  config.max_tokens = 4096, config.max_outstanding = 3;
  config.restore_input = config.restore_middle = SLUICE_RESTORE_OFFLOAD;
  sluice_plan_t* plan = NULL;
  sluice_plan_info_t info = {.struct_size = sizeof info};
  assert_int_equal(sluice_plan_create(l.moe, &config, &plan), SLUICE_OK);
  assert_int_equal(sluice_plan_get_info(plan, &info), SLUICE_OK);
  uint64_t all = info.host_pool_bytes;
  assert_true(all >= 3u * 4096u * (8 + 16) * sizeof(float) && all < info.total_bytes);
  sluice_plan_destroy(plan);
  config.host_memory_budget = all;
  assert_int_equal(sluice_plan_create(l.moe, &config, &plan), SLUICE_OK);
  assert_int_equal(sluice_plan_get_info(plan, &info), SLUICE_OK);
  assert_true(info.host_pool_bytes <= all && info.kept_rows == 4096);
  sluice_plan_destroy(plan);
  config.host_memory_budget = all / 2; /* one rank receives all it sends: fewer rows are no choice */
  REFUSED(sluice_plan_create(l.moe, &config, &plan), SLUICE_E_OVER_BUDGET, "host_memory_budget to that");
  config.restore_input = config.restore_middle = SLUICE_RESTORE_ADAPTIVE;
  assert_int_equal(sluice_plan_create(l.moe, &config, &plan), SLUICE_OK);
  assert_int_equal(sluice_plan_get_info(plan, &info), SLUICE_OK);
  assert_true(info.host_pool_bytes <= all / 2);
  sluice_plan_candidate_t lines[512];
  int32_t count = 0, refused = 0;
  assert_int_equal(sluice_plan_candidates(plan, lines, 512, &count), SLUICE_OK);
  for (int32_t i = 0; i < count; ++i) {
    int both = lines[i].restore_input == SLUICE_RESTORE_OFFLOAD && lines[i].restore_middle == SLUICE_RESTORE_OFFLOAD;
    assert_false(both && lines[i].fits);
    refused += !lines[i].fits;
  }
  assert_true(refused > 0 && refused < count);
  sluice_plan_destroy(plan);
  close_layer(&l);
}

/* The pool by the host's own count: offloaded rows live from the callback that makes them to the free. */
typedef struct pool_s {
  sluice_context_t* context; /* NULL: memory of the test's own, which Sluice counts until the step is dropped */
  uint64_t live, most;
  void* data[16];
  uint64_t bytes[16];
  int32_t count;
} pool_t;

static void* save_to_pool(void* user, int32_t which, uint64_t bytes) {
  pool_t* pool = user;
  void* data = NULL;
  assert_true(pool->count < 16);
  if (pool->context == NULL) data = test_malloc(bytes + 1);
  if (pool->context != NULL) assert_int_equal(sluice_context_allocate(pool->context, bytes, &data), SLUICE_OK);
  if (which == SLUICE_SAVED_HOST_INPUT || which == SLUICE_SAVED_HOST_MIDDLE) pool->live += bytes;
  if (pool->live > pool->most) pool->most = pool->live;
  pool->data[pool->count] = data, pool->bytes[pool->count++] = bytes;
  return data;
}

static void empty_pool(pool_t* pool) {
  for (int32_t i = 0; i < pool->count; ++i) {
    if (pool->context == NULL) test_free(pool->data[i]);
    if (pool->context != NULL) sluice_context_free(pool->context, pool->data[i], pool->bytes[i]);
  }
  pool->count = 0, pool->live = 0;
}

/* Forwards until one is refused; their number, or -1 for another error. With `drops` the
 * step goes at once and its buffers stay, as hosts with an autograd of their own have it. */
static int32_t forwards_until_refused(rig_t* rig, pool_t* pool, int drops) {
  rig->forward.save = save_to_pool, rig->forward.save_user = pool;
  rig->forward.save_is_counted = pool->context != NULL;
  sluice_step_t* steps[4] = {NULL};
  int32_t count = 0;
  sluice_status_t status = SLUICE_OK;
  while (count < 4 && status == SLUICE_OK) {
    status = rig_forward(rig, &steps[count]);
    if (drops) sluice_step_drop(steps[count]), steps[count] = NULL;
    count += status == SLUICE_OK;
  }
  if (status != SLUICE_OK && strstr(last_message(), "host_memory_budget") == NULL) fail_msg("%s", last_message());
  for (int32_t i = 0; i < 4; ++i) sluice_step_drop(steps[i]);
  empty_pool(pool);
  return status == SLUICE_E_OVER_BUDGET ? count : -1;
}

static void HostBudget_WhoeverHoldsTheRows_ThePoolStaysWithinIt(void** state) {
  (void)state;
  sluice_context_config_t context;
  sluice_context_config_init(&context, sizeof context);
  context.gemm = "ref", context.host_memory_budget = 3400, context.max_outstanding = 2;
  rig_t rig;
  memset(&rig, 0, sizeof rig);
  rig.world_size = 1;
  heap_init(&rig.heap);
  assert_int_equal(sluice_context_create(&context, NULL, &rig.context), SLUICE_OK);
  sluice_moe_config_t config = rig_config();
  config.restore_input = config.restore_middle = SLUICE_RESTORE_OFFLOAD;
  assert_int_equal(rig_open_layer(&rig, &config), SLUICE_OK);
  for (int drops = 0; drops < 2; ++drops) {
    for (int again = 0; again < 2; ++again) { /* what was freed has room again */
      pool_t pool = {.context = drops ? rig.context : NULL};
      assert_int_equal(forwards_until_refused(&rig, &pool, drops), 2);
      assert_true(pool.most > 0 && pool.most <= context.host_memory_budget);
      printf("two forwards hold %llu bytes of offloaded rows of %llu\n", (unsigned long long)pool.most,
             (unsigned long long)context.host_memory_budget);
    }
  }
  rig_close(&rig);
}

static void PaperFootprint_IsAsPrinted(void** state) {
  (void)state;
  sluice_paper_footprint_t f;
  sluice_paper_footprint(1024, 768, 3072, 64, 4, &f);
  assert_true(f.states == 4.0 * (64 * 768.0 + 2.0 * 3072 * 768));
  assert_true(f.activations == 4.0 * 1024 * 768 + 1024.0 * 3072);
  assert_true(f.temporaries == 1024.0 * 768 + 1024.0 * 3072);
  assert_true(f.saving == 1024 * (2 * 768.0 * 2 / 4 + 3072.0 * 3 / 4));
  assert_true(f.saved_share == 2 * f.saving / (f.states + 2 * f.activations));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(Budget_FromTheSmallestUp_ResultsAreTheSame),
      cmocka_unit_test(Budget_OneHotExpert_StaysWithinThePlan),
      cmocka_unit_test(Budget_OddShapesAndPolicies_ResultsAreTheSame),
      cmocka_unit_test(Budget_MoreOutstandingThanSaid_RefusedByName),
      cmocka_unit_test(Budget_HalvesApart_AreCountedInThePlan),
      cmocka_unit_test(Budget_HalvesApartUnsaid_AreRefusedByName),
      cmocka_unit_test(Budget_MoreInputHalvesThanSaid_AreRefusedByName),
      cmocka_unit_test(Budget_Traced_RunsInTheSameBytes),
      cmocka_unit_test(HostBudget_OneHotExpert_ResultsAreTheSame),
      cmocka_unit_test(HostBudget_Plans_KeepWhatThePoolHolds),
      cmocka_unit_test(HostBudget_MoreOutstandingThanSaid_RefusedOnAllRanks),
      cmocka_unit_test(HostBudget_WhoeverHoldsTheRows_ThePoolStaysWithinIt),
      cmocka_unit_test(Prediction_AnyShapePolicyAndN_EqualsTheAllocator),
      cmocka_unit_test(Prediction_SeveralRanks_EqualsTheAllocatorOfEach),
      cmocka_unit_test(Prediction_RepeatedIds_EqualsTheAllocatorOfEach),
      cmocka_unit_test(Budget_RepeatedIds_ResultsAreTheSame),
      cmocka_unit_test(Plan_BadInput_IsNamed),
      cmocka_unit_test(PaperFootprint_IsAsPrinted),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
