/* The tuner in running layers: ranks decide alike, decisions are told, differing ranks are refused. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "sluice/sluice.h"

#define MAX_RANKS 4
#define M         16
#define H         32
#define MAX_T     256

static const char machine[] =
    "{\"sluice_machine\": 1, \"name\": \"test\", "
    "\"gemm\": {\"f32\": {\"flops_per_second\": 1e10, \"half_rows\": 8}}, "
    "\"rows\": {\"bytes_per_second\": 5e9}, \"activation_seconds\": 1e-10, \"activation_grad_seconds\": 2e-10, "
    "\"exchange\": {\"bytes_per_second\": 1e9, \"startup_seconds\": 2e-5, \"per_peer_seconds\": 2e-6}, "
    "\"host_copy\": {\"bytes_per_second\": 4e9}, \"op_seconds\": 2e-6, \"pass_seconds\": 1e-5}";

typedef struct world_s {
  int32_t world_size, steps, layers;
  int32_t changes;         /* T changes from step to step */
  int32_t grows;           /* T is larger in the second half */
  int32_t mode[MAX_RANKS]; /* of each rank's tuner */
  int32_t has_machine[MAX_RANKS];
  int32_t num_chunks, wgrad_mode;
  const char* import[MAX_RANKS]; /* decisions to begin with */
  uint64_t budget;
  sluice_local_group_t* group;
  /* found */
  sluice_status_t status[MAX_RANKS];
  char message[MAX_RANKS][1024];
  int32_t picks[MAX_RANKS][4096];
  int32_t num_picks[MAX_RANKS];
  int32_t settled[MAX_RANKS];
  sluice_tuner_decision_t decisions[MAX_RANKS][64];
  sluice_tuner_policy_t policies[MAX_RANKS][64];
  uint64_t peak_bytes[MAX_RANKS];
  int32_t num_decisions[MAX_RANKS];
  sluice_tuner_stats_t stats[MAX_RANKS];
  char written[MAX_RANKS][65536];
} world_t;

typedef struct rank_s {
  world_t* world;
  int32_t rank;
  sluice_context_t* context;
  sluice_moe_t* layers[4];
  float *tokens, *out, *grad, *weights;
  int64_t* ids;
  float params[2 * 8 * M * H];
  float grads[2 * 8 * M * H];
} rank_t;

#define TRY(expression)                       \
  do {                                        \
    sluice_status_t status_ = (expression);   \
    if (status_ != SLUICE_OK) return status_; \
  } while (0)

static sluice_tensor_t matrix(void* data, int64_t* shape, int32_t ndim, uint8_t code, uint8_t bits) {
  return (sluice_tensor_t){data, SLUICE_DEVICE_CPU, 0, ndim, code, bits, 1, shape, NULL, 0};
}

static sluice_status_t run_pass(rank_t* r, sluice_moe_t* moe, int64_t count) {
  int64_t rows[] = {count, M}, routes[] = {count, 1}, w1[] = {H, M}, w2[] = {M, H};
  int32_t local = sluice_moe_num_local_experts(moe);
  sluice_tensor_t tokens = matrix(r->tokens, rows, 2, SLUICE_TYPE_FLOAT, 32), out = tokens, grad = tokens;
  sluice_tensor_t ids = matrix(r->ids, routes, 2, SLUICE_TYPE_INT, 64),
                  weights = matrix(r->weights, routes, 2, SLUICE_TYPE_FLOAT, 32);
  out.data = r->out, grad.data = r->grad;
  sluice_tensor_t p1[8], p2[8], g1[8], g2[8];
  for (int32_t e = 0; e < local; ++e) {
    p1[e] = matrix(r->params + 2 * e * M * H, w1, 2, SLUICE_TYPE_FLOAT, 32);
    p2[e] = matrix(r->params + (2 * e + 1) * M * H, w2, 2, SLUICE_TYPE_FLOAT, 32);
    g1[e] = p1[e], g2[e] = p2[e];
    g1[e].data = r->grads + 2 * e * M * H, g2[e].data = r->grads + (2 * e + 1) * M * H;
  }
  sluice_expert_tensors_t params = {.struct_size = sizeof params, .w1 = p1, .w2 = p2}, grads = params;
  grads.w1 = g1, grads.w2 = g2;
  sluice_moe_forward_args_t f;
  sluice_moe_forward_args_init(&f, sizeof f);
  f.tokens = &tokens, f.expert_ids = &ids, f.route_weights = &weights, f.params = &params, f.out_tokens = &out;
  f.needs_backward = 1;
  sluice_step_t* step = NULL;
  TRY(sluice_moe_forward(moe, &f, NULL, &step));
  sluice_moe_backward_args_t b;
  sluice_moe_backward_args_init(&b, sizeof b);
  b.tokens = &tokens, b.route_weights = &weights, b.params = &params, b.grad_out = &grad, b.grad_tokens = &out;
  b.grad_params = &grads, b.halves = SLUICE_HALF_BOTH;
  sluice_status_t status = sluice_moe_backward(moe, step, &b, NULL);
  sluice_step_drop(step);
  return status;
}

static sluice_status_t set_up(rank_t* r, sluice_comm_t** out_comm) {
  world_t* w = r->world;
  sluice_comm_config_t comm_config;
  sluice_comm_config_init(&comm_config, sizeof comm_config);
  comm_config.rank = r->rank, comm_config.world_size = w->world_size, comm_config.timeout_ns = 20000000000u;
  TRY(sluice_comm_create_local(w->group, &comm_config, out_comm));
  sluice_context_config_t context_config;
  sluice_context_config_init(&context_config, sizeof context_config);
  context_config.gemm = "ref";
  context_config.memory_budget = w->budget;
  TRY(sluice_context_create(&context_config, *out_comm, &r->context));
  sluice_planner_t* planner = NULL;
  TRY(sluice_planner_create(machine, sizeof machine - 1, &planner));
  sluice_tuner_config_t tuner;
  sluice_tuner_config_init(&tuner, sizeof tuner);
  tuner.mode = w->mode[r->rank];
  tuner.machine = w->has_machine[r->rank] ? planner : NULL;
  sluice_status_t status = sluice_context_tune(r->context, &tuner);
  sluice_planner_destroy(planner);
  TRY(status);
  const char* import = w->import[r->rank];
  if (import != NULL) TRY(sluice_context_read_decisions(r->context, import, strlen(import)));
  for (int32_t i = 0; i < w->layers; ++i) {
    sluice_moe_config_t c;
    sluice_moe_config_init(&c, sizeof c);
    c.model_width = M, c.hidden_width = H, c.num_experts = 2 * w->world_size, c.layer_id = i;
    c.num_chunks = w->num_chunks, c.wgrad_mode = w->wgrad_mode;
    TRY(sluice_moe_create(r->context, &c, &r->layers[i]));
  }
  return SLUICE_OK;
}

static sluice_status_t run_steps(rank_t* r) {
  world_t* w = r->world;
  static const int64_t sizes[] = {256, 32, 128, 64};
  for (int32_t step = 0; step < w->steps; ++step) {
    int64_t count = w->changes ? sizes[step / 3 % 4] : w->grows && step < w->steps / 2 ? 32 : 128;
    for (int64_t t = 0; t < count; ++t) {
      r->ids[t] = (t * 7 + step + r->rank) % (2 * w->world_size);
      r->weights[t] = 0.5f;
    }
    for (int32_t i = 0; i < w->layers; ++i) {
      TRY(run_pass(r, r->layers[i], count));
      sluice_context_stats_t stats = {.struct_size = sizeof stats};
      TRY(sluice_context_get_stats(r->context, 0, &stats));
      if (w->num_picks[r->rank] < 4096) w->picks[r->rank][w->num_picks[r->rank]++] = stats.last_num_chunks;
      w->settled[r->rank] = stats.last_is_settled;
      w->peak_bytes[r->rank] = stats.peak_bytes;
    }
  }
  TRY(sluice_context_decisions(r->context, w->decisions[r->rank], 64, &w->num_decisions[r->rank]));
  int32_t num_policies = 0;
  TRY(sluice_context_decided_policies(r->context, w->policies[r->rank], 64, &num_policies));
  if (num_policies != w->num_decisions[r->rank]) return SLUICE_E_INTERNAL;
  uint64_t bytes = sizeof w->written[0];
  TRY(sluice_context_write_decisions(r->context, w->written[r->rank], &bytes));
  w->stats[r->rank].struct_size = sizeof(sluice_tuner_stats_t);
  return sluice_context_tuner_stats(r->context, &w->stats[r->rank]);
}

static void* run_rank(void* argument) {
  rank_t* r = argument;
  world_t* w = r->world;
  sluice_comm_t* comm = NULL;
  r->tokens = calloc(MAX_T * M, sizeof(float)), r->out = calloc(MAX_T * M, sizeof(float));
  r->grad = calloc(MAX_T * M, sizeof(float)), r->weights = calloc(MAX_T, sizeof(float));
  r->ids = calloc(MAX_T, sizeof(int64_t));
  sluice_status_t status = set_up(r, &comm);
  if (status == SLUICE_OK) status = run_steps(r);
  sluice_error_info_t why;
  sluice_error_info_init(&why, sizeof why);
  if (status != SLUICE_OK) sluice_error_last(&why);
  w->status[r->rank] = status;
  memcpy(w->message[r->rank], why.message, sizeof why.message);
  for (int32_t i = 0; i < w->layers; ++i) sluice_moe_destroy(r->layers[i]);
  sluice_context_destroy(r->context);
  sluice_comm_destroy(comm);
  free(r->tokens), free(r->out), free(r->grad), free(r->weights), free(r->ids);
  return NULL;
}

static void run(world_t* w) {
  pthread_t threads[MAX_RANKS];
  rank_t* ranks = calloc(MAX_RANKS, sizeof *ranks);
  assert_int_equal(sluice_local_group_create(w->world_size, &w->group), SLUICE_OK);
  for (int32_t r = 0; r < w->world_size; ++r) {
    ranks[r].world = w, ranks[r].rank = r;
    assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &ranks[r]), 0);
  }
  for (int32_t r = 0; r < w->world_size; ++r) pthread_join(threads[r], NULL);
  sluice_local_group_destroy(w->group);
  free(ranks);
}

static world_t* new_world(int32_t world_size, int32_t mode, int32_t has_machine) {
  static world_t w;
  memset(&w, 0, sizeof w);
  w.world_size = world_size, w.steps = 120, w.layers = 2, w.wgrad_mode = SLUICE_WGRAD_ADAPTIVE;
  for (int32_t r = 0; r < MAX_RANKS; ++r) w.mode[r] = mode, w.has_machine[r] = has_machine;
  return &w;
}

static void must_agree(const world_t* w) {
  for (int32_t r = 0; r < w->world_size; ++r) {
    if (w->status[r] != SLUICE_OK) fail_msg("rank %d: %s", r, w->message[r]);
    assert_int_equal(w->num_picks[r], w->steps * w->layers);
    assert_memory_equal(w->picks[r], w->picks[0], (size_t)w->num_picks[0] * sizeof(int32_t));
    assert_int_equal(w->num_decisions[r], w->num_decisions[0]);
    assert_memory_equal(w->decisions[r], w->decisions[0],
                        (size_t)w->num_decisions[0] * sizeof(sluice_tuner_decision_t));
  }
}

static void EveryMode_RanksDecideAlikeAndSettle(void** state) {
  (void)state;
  static const struct {
    int32_t ranks, mode, machine, why;
  } cases[] = {{2, SLUICE_TUNER_PROFILE, 0, SLUICE_WHY_RACED},
               {3, SLUICE_TUNER_ADAPTIVE, 1, SLUICE_WHY_RACED},
               {4, SLUICE_TUNER_ADAPTIVE, 0, SLUICE_WHY_RACED},
               {2, SLUICE_TUNER_MODEL, 1, SLUICE_WHY_PREDICTED}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    world_t* w = new_world(cases[i].ranks, cases[i].mode, cases[i].machine);
    run(w);
    must_agree(w);
    assert_true(w->settled[0] && w->num_decisions[0] >= 1);
    const sluice_tuner_decision_t* d = &w->decisions[0][0];
    int sketches = cases[i].mode == SLUICE_TUNER_ADAPTIVE && !cases[i].machine;
    /* A sketch that speaks clearly for one chunk needs no race. */
    if (!sketches || d->why != SLUICE_WHY_PREDICTED) assert_int_equal(d->why, cases[i].why);
    assert_true(d->model_width == M && d->hidden_width == H && d->num_experts == 2 * w->world_size);
    assert_true((d->seconds > 0) == (sketches || d->why == SLUICE_WHY_RACED));
    assert_true((d->predicted_seconds > 0) == (sketches || cases[i].machine == 1));
    assert_true(d->num_raced >= 2 || d->why == SLUICE_WHY_PREDICTED);
    assert_true(w->stats[0].timed_passes > 400 && w->stats[0].total_seconds > 0);
    assert_true(w->stats[0].race_passes < w->stats[0].timed_passes);
    printf("%d ranks, mode %d: n = %d (%s), %lld of %lld passes raced\n", w->world_size, w->mode[0], d->num_chunks,
           sluice_tuner_why_name(d->why), (long long)w->stats[0].race_passes, (long long)w->stats[0].timed_passes);
  }
}

/* Batches that change every third step: a size has its own answer, and ranks still agree. */
static void ChangingBatches_EachSizeHasItsAnswer(void** state) {
  (void)state;
  world_t* w = new_world(2, SLUICE_TUNER_PROFILE, 0);
  w->changes = 1, w->steps = 400;
  run(w);
  must_agree(w);
  int64_t least = INT64_MAX, most = 0;
  for (int32_t i = 0; i < w->num_decisions[0]; ++i) {
    if (w->decisions[0][i].rows < least) least = w->decisions[0][i].rows;
    if (w->decisions[0][i].rows > most) most = w->decisions[0][i].rows;
  }
  assert_true(w->num_decisions[0] >= 4 && most >= 6 * least);
  for (int32_t r = 0; r < 2; ++r) { /* on all ranks alike, since from the same reports */
    const sluice_tuner_stats_t* s = &w->stats[r];
    assert_true(s->num_switches > 4 && s->switch_seconds > 0 && s->switch_seconds < s->total_seconds);
    assert_true(s->switch_seconds == w->stats[0].switch_seconds && s->num_switches == w->stats[0].num_switches);
    assert_true(s->one_valley + s->not_one_valley > 0);
  }
  printf("%lld switches cost %.2f ms of %.2f ms\n", (long long)w->stats[0].num_switches,
         1e3 * w->stats[0].switch_seconds, 1e3 * w->stats[0].total_seconds);
}

/* One chunk has one mode, and a configured mode at a configured n leaves nothing. */
static void FixedChunks_NothingOpen_NothingIsAsked(void** state) {
  (void)state;
  static const struct {
    int32_t num_chunks, wgrad_mode;
  } cases[] = {{3, SLUICE_WGRAD_DEFERRED}, {5, SLUICE_WGRAD_PER_CHUNK}, {1, SLUICE_WGRAD_ADAPTIVE}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    world_t* w = new_world(2, SLUICE_TUNER_ADAPTIVE, 1);
    w->num_chunks = cases[i].num_chunks, w->wgrad_mode = cases[i].wgrad_mode, w->steps = 10;
    run(w);
    must_agree(w);
    for (int32_t k = 0; k < w->num_picks[0]; ++k) assert_int_equal(w->picks[0][k], w->num_chunks);
    assert_true(w->settled[0] && w->num_decisions[0] == 0 && w->stats[0].timed_passes == 0);
  }
}

/* At a fixed n, whatever it is, both modes of weight gradients run, and the faster one stays. */
static void FixedChunks_OpenMode_IsRacedAtThatN(void** state) {
  (void)state;
  static const struct {
    int32_t mode, machine;
  } cases[] = {
      {SLUICE_TUNER_PROFILE, 0}, {SLUICE_TUNER_ADAPTIVE, 0}, {SLUICE_TUNER_ADAPTIVE, 1}, {SLUICE_TUNER_MODEL, 1}};
  static const int32_t chunks[] = {4, 2, 5, 20}; /* of the sizes that an open n is searched among, and of no such */
  for (size_t i = 0; i < 2 * sizeof cases / sizeof cases[0]; ++i) {
    const int32_t mode = cases[i % 4].mode, has_machine = cases[i % 4].machine, n = chunks[(i + i / 4) % 4];
    world_t* w = new_world(2, mode, has_machine);
    w->num_chunks = n, w->steps = 40;
    run(w);
    must_agree(w);
    for (int32_t k = 0; k < w->num_picks[0]; ++k) assert_int_equal(w->picks[0][k], n);
    assert_true(w->settled[0] && w->num_decisions[0] >= 1);
    const sluice_tuner_decision_t* d = &w->decisions[0][0];
    assert_int_equal(d->num_chunks, n);
    if (!has_machine) assert_true(d->why == SLUICE_WHY_RACED && d->num_raced == 2);
    if (has_machine) assert_true(d->predicted_seconds > 0);
    if (mode == SLUICE_TUNER_MODEL) assert_int_equal(d->why, SLUICE_WHY_PREDICTED);
    printf("mode %d, machine %d: weight gradients %s at n = %d (%s, %d raced)\n", mode, has_machine,
           d->wgrad_mode == SLUICE_WGRAD_DEFERRED ? "deferred" : "per chunk", n, sluice_tuner_why_name(d->why),
           d->num_raced);
  }
}

/* The mode of an n that no search tries comes back from a file, and to layers of another n it is nothing. */
static void FixedChunks_DecisionOfAFile_StandsForThatN(void** state) {
  (void)state;
  world_t* w = new_world(2, SLUICE_TUNER_PROFILE, 0);
  w->num_chunks = 5, w->steps = 40;
  run(w);
  must_agree(w);
  assert_non_null(strstr(w->written[0], "\"num_chunks\": 5"));
  int32_t mode = w->decisions[0][w->num_decisions[0] - 1].wgrad_mode;
  char* text = strdup(w->written[0]);
  w = new_world(2, SLUICE_TUNER_PROFILE, 0);
  w->num_chunks = 5, w->steps = 10, w->import[0] = w->import[1] = text;
  run(w);
  must_agree(w);
  assert_int_equal(w->stats[0].race_passes, 0);
  assert_true(w->decisions[0][0].why == SLUICE_WHY_IMPORTED && w->decisions[0][0].num_chunks == 5);
  assert_int_equal(w->decisions[0][0].wgrad_mode, mode);
  memcpy(strstr(text, "\"num_chunks\": 5"), "\"num_chunks\": 7", 15);
  w = new_world(2, SLUICE_TUNER_PROFILE, 0);
  w->num_chunks = 5, w->steps = 40, w->import[0] = w->import[1] = text;
  run(w);
  must_agree(w);
  assert_int_equal(w->decisions[0][0].why, SLUICE_WHY_RACED);
  free(text);
}

static void RanksConfiguredDifferently_FailAlikeAndSayWhy(void** state) {
  (void)state;
  for (int which = 0; which < 2; ++which) {
    world_t* w = new_world(3, SLUICE_TUNER_ADAPTIVE, 1);
    if (which == 0) w->mode[1] = SLUICE_TUNER_PROFILE;
    if (which == 1) w->has_machine[2] = 0;
    run(w);
    for (int32_t r = 0; r < 3; ++r) {
      assert_int_equal(w->status[r], SLUICE_E_MISMATCH);
      assert_non_null(strstr(w->message[r], "tune by different machines, modes or imported decisions"));
    }
  }
}

/* What one run decided, the next one knows: nothing is raced again. */
static void Decisions_WrittenAndReadAgain_StandFromTheFirstStep(void** state) {
  (void)state;
  world_t* w = new_world(2, SLUICE_TUNER_PROFILE, 0);
  run(w);
  must_agree(w);
  assert_string_equal(w->written[0], w->written[1]);
  int32_t chosen = w->decisions[0][w->num_decisions[0] - 1].num_chunks;
  char* text = strdup(w->written[0]);
  w = new_world(2, SLUICE_TUNER_PROFILE, 0);
  w->import[0] = w->import[1] = text;
  w->steps = 20;
  run(w);
  must_agree(w);
  for (int32_t i = 2 * w->layers; i < w->num_picks[0]; ++i) assert_int_equal(w->picks[0][i], chosen);
  assert_int_equal(w->stats[0].race_passes, 0);
  assert_int_equal(w->decisions[0][0].why, SLUICE_WHY_IMPORTED);
  assert_string_equal(w->written[0], text); /* the same answers again */
  free(text);
}

static void Decisions_OfOneRankOnly_AreAMismatch(void** state) {
  (void)state;
  world_t* w = new_world(2, SLUICE_TUNER_PROFILE, 0);
  w->import[1] =
      "{\"sluice_decisions\": 1, \"answers\": [{\"layer\": \"0123456789abcdef\", \"rows\": 64, "
      "\"num_chunks\": 4, \"wgrad_mode\": \"deferred\"}]}";
  run(w);
  for (int32_t r = 0; r < 2; ++r) assert_int_equal(w->status[r], SLUICE_E_MISMATCH);
}

/* Under a budget the best few plans by price run as ordinary steps, on all ranks alike, and inside the budget. */
static void Budget_BestPlansRace_InsideTheBudget(void** state) {
  (void)state;
  static const uint64_t budgets[][2] = {{64 << 20, 64 << 20}, {1 << 20, 1 << 20}, {215000, 620000}}; /* by ranks */
  for (int32_t i = 0; i < 6; ++i) {
    int32_t ranks = 1 + i % 2, has_machine = (i + i / 2) % 2;
    world_t* w = new_world(ranks, SLUICE_TUNER_ADAPTIVE, has_machine);
    w->budget = budgets[i / 2][ranks - 1], w->changes = i == 1, w->steps = w->changes ? 60 : 24;
    run(w);
    must_agree(w);
    assert_memory_equal(w->policies[0], w->policies[ranks - 1], sizeof w->policies[0]);
    assert_true(w->num_decisions[0] >= 1 && w->settled[0]);
    const sluice_tuner_decision_t* d = &w->decisions[0][w->num_decisions[0] - 1];
    const sluice_tuner_policy_t* p = &w->policies[0][w->num_decisions[0] - 1];
    assert_true(p->restore_input >= 0 && p->restore_middle >= 0 && p->memory_budget == w->budget);
    assert_true(p->total_bytes > 0 && p->total_bytes <= w->budget);
    for (int32_t r = 0; r < ranks; ++r) assert_true(w->peak_bytes[r] <= p->total_bytes);
    assert_true((d->why == SLUICE_WHY_RACED) == (d->num_raced >= 2) && (d->why != SLUICE_WHY_RACED || d->seconds > 0));
    assert_true(d->why == SLUICE_WHY_RACED || i >= 4);
    assert_true((d->predicted_seconds > 0) == has_machine);
    if (d->why == SLUICE_WHY_RACED) assert_true(w->stats[0].race_passes > 0);
    assert_true(w->stats[0].timed_passes > w->stats[0].race_passes);
    printf("budget %8llu, %d ranks: n %d, T_DI %d, T_M %d, mode %d (%s of %d in %lld passes), %llu bytes, peak %llu\n",
           (unsigned long long)w->budget, ranks, d->num_chunks, p->restore_input, p->restore_middle, d->wgrad_mode,
           sluice_tuner_why_name(d->why), d->num_raced, (long long)d->race_passes, (unsigned long long)p->total_bytes,
           (unsigned long long)w->peak_bytes[0]);
  }
}

/* A larger batch has plans of its own. By then passes have shown what lanes take: all ranks and all layers of a kind
 * begin with the same plans, so that they share a race. */
static void Budget_BatchesGrow_PlansBeginWithWhatWasSeen(void** state) {
  (void)state;
  for (int32_t ranks = 2; ranks <= 3; ++ranks) {
    world_t* w = new_world(ranks, SLUICE_TUNER_ADAPTIVE, 0);
    w->grows = 1, w->budget = 1 << 20, w->steps = 60, w->layers = 3;
    run(w);
    must_agree(w);
    int32_t decided = 0;
    for (int32_t i = 0; i < w->num_decisions[0]; ++i) {
      if (w->decisions[0][i].rows > 64) ++decided;
      assert_true(w->policies[0][i].total_bytes <= w->budget);
    }
    printf("%d ranks: %d decisions of three layers, %d of the larger batch\n", ranks, w->num_decisions[0], decided);
    assert_true(w->settled[0] && w->num_decisions[0] == 2 && decided == 1);
    for (int32_t r = 0; r < ranks; ++r) assert_true(w->peak_bytes[r] <= w->budget);
  }
}

/* A plan from a file stands; where it does not fit, another is chosen, with a word in the log. */
static void Budget_PlanOfAFile_StandsWhereItFits(void** state) {
  (void)state;
  world_t* w = new_world(2, SLUICE_TUNER_ADAPTIVE, 1);
  w->budget = 1 << 20, w->steps = 24;
  run(w);
  must_agree(w);
  char* text = strdup(w->written[0]);
  sluice_tuner_decision_t found = w->decisions[0][w->num_decisions[0] - 1];
  sluice_tuner_policy_t policy = w->policies[0][w->num_decisions[0] - 1];
  assert_non_null(strstr(text, "{\"sluice_decisions\": 2"));
  assert_non_null(strstr(text, "\"restore_input\": \""));
  w = new_world(2, SLUICE_TUNER_ADAPTIVE, 1);
  w->budget = 1 << 20, w->steps = 10, w->import[0] = w->import[1] = text;
  run(w);
  must_agree(w);
  assert_int_equal(w->stats[0].race_passes, 0);
  assert_int_equal(w->decisions[0][0].why, SLUICE_WHY_IMPORTED);
  assert_true(w->decisions[0][0].num_chunks == found.num_chunks && w->decisions[0][0].wgrad_mode == found.wgrad_mode);
  assert_true(w->policies[0][0].restore_input == policy.restore_input &&
              w->policies[0][0].restore_middle == policy.restore_middle);
  free(text);
  /* of a layer that exists, but far too large for the budget: n = 256 of anything has more schedules than it allows */
  char other[512];
  snprintf(other, sizeof other,
           "{\"sluice_decisions\": 2, \"answers\": [{\"layer\": \"%.16s\", \"rows\": 1, \"num_chunks\": 256, "
           "\"wgrad_mode\": \"deferred\", \"restore_input\": \"keep\", \"restore_middle\": \"keep\"}]}",
           strstr(w->written[0], "\"layer\": \"") + strlen("\"layer\": \""));
  w = new_world(2, SLUICE_TUNER_ADAPTIVE, 1);
  w->budget = 1 << 20, w->steps = 24, w->import[0] = w->import[1] = other;
  run(w);
  must_agree(w);
  assert_int_equal(w->decisions[0][w->num_decisions[0] - 1].why, SLUICE_WHY_RACED);
}

/* Plans of a context whose tuner has a machine carry the planner's seconds, and the fastest that fits is taken. */
static void Plans_WithAMachine_CarryThePlannersSeconds(void** state) {
  (void)state;
  sluice_context_config_t context_config;
  sluice_context_config_init(&context_config, sizeof context_config);
  context_config.gemm = "ref";
  sluice_context_t* context = NULL;
  assert_int_equal(sluice_context_create(&context_config, NULL, &context), SLUICE_OK);
  sluice_planner_t* planner = NULL;
  assert_int_equal(sluice_planner_create(machine, sizeof machine - 1, &planner), SLUICE_OK);
  sluice_tuner_config_t tuner;
  sluice_tuner_config_init(&tuner, sizeof tuner);
  tuner.machine = planner;
  assert_int_equal(sluice_context_tune(context, &tuner), SLUICE_OK);
  sluice_moe_config_t layer;
  sluice_moe_config_init(&layer, sizeof layer);
  layer.model_width = M, layer.hidden_width = H, layer.num_experts = 4;
  sluice_moe_t* moe = NULL;
  assert_int_equal(sluice_moe_create(context, &layer, &moe), SLUICE_OK);
  sluice_plan_config_t config;
  sluice_plan_config_init(&config, sizeof config);
  config.max_tokens = 512, config.memory_budget = (uint64_t)1 << 30;
  sluice_plan_t* plan = NULL;
  assert_int_equal(sluice_plan_create(moe, &config, &plan), SLUICE_OK);
  static sluice_plan_candidate_t lines[512];
  static sluice_planner_candidate_t priced[512];
  int32_t num_lines = 0, num_priced = 0;
  assert_int_equal(sluice_plan_candidates(plan, lines, 512, &num_lines), SLUICE_OK);
  sluice_planner_workload_t work;
  sluice_planner_workload_init(&work, sizeof work);
  work.model_width = M, work.hidden_width = H, work.num_experts = 4, work.num_tokens = 512;
  work.memory_budget = config.memory_budget;
  assert_int_equal(sluice_planner_choose(planner, &work, NULL, priced, 512, &num_priced, NULL), SLUICE_OK);
  assert_int_equal(num_lines, num_priced);
  sluice_plan_info_t info = {.struct_size = sizeof info};
  assert_int_equal(sluice_plan_get_info(plan, &info), SLUICE_OK);
  for (int32_t i = 0; i < num_lines; ++i) {
    assert_true(lines[i].relative_time == priced[i].forward_seconds + priced[i].backward_seconds);
    assert_true(info.relative_time <= lines[i].relative_time);
  }
  sluice_plan_destroy(plan);
  sluice_moe_destroy(moe);
  sluice_planner_destroy(planner);
  sluice_context_destroy(context);
}

static void BadDecisions_AreRefusedByName(void** state) {
  (void)state;
  static const char* const cases[][2] = {
      {"[]", "the outermost value must be an object"},
      {"{\"answers\": []}", "begin with \"sluice_decisions\": 2"},
      {"{\"sluice_decisions\": 3, \"answers\": []}", "form 3; this version reads forms 1 and 2"},
      {"{\"sluice_decisions\": 1}", "exactly \"answers\""},
#define ANSWER(text) "{\"sluice_decisions\": 1, \"answers\": [" text "]}"
      {ANSWER("3"), "answer 0 must be an object"},
      {ANSWER("{\"n\": 3}"), "unknown field \"n\" in answer 0"},
      {ANSWER("{\"layer\": \"12\", \"rows\": 1, \"num_chunks\": 1}"), "layer of answer 0"},
      {ANSWER("{\"layer\": \"zz23456789abcdef\", \"rows\": 1, \"num_chunks\": 1}"), "layer of answer 0"},
      {ANSWER("{\"layer\": \"0123456789abcdef\", \"rows\": 0, \"num_chunks\": 1}"), "rows of answer 0"},
      {ANSWER("{\"layer\": \"0123456789abcdef\", \"rows\": 9, \"num_chunks\": 2.5}"), "num_chunks of answer 0 is 2.5"},
      {ANSWER("{\"layer\": \"0123456789abcdef\", \"rows\": 9, \"num_chunks\": 4, \"wgrad_mode\": 1}"), "wgrad_mode"},
#define PLAN(rest) ANSWER("{\"layer\": \"0123456789abcdef\", \"rows\": 9, \"num_chunks\": " rest "}")
      {PLAN("4, \"restore_input\": \"keep\""), "restore_middle of answer 0"},
      {PLAN("4, \"restore_input\": \"recompute\", \"restore_middle\": \"keep\""), "restore_input of answer 0"},
      {PLAN("4, \"restore_input\": \"keep\", \"restore_middle\": 3"), "restore_middle of answer 0"},
      {PLAN("300, \"restore_input\": \"keep\", \"restore_middle\": \"keep\""), "num_chunks of answer 0 is 300"},
  };
  sluice_context_config_t config;
  sluice_context_config_init(&config, sizeof config);
  config.gemm = "ref";
  sluice_context_t* context = NULL;
  assert_int_equal(sluice_context_create(&config, NULL, &context), SLUICE_OK);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
    sluice_error_info_t why;
    sluice_error_info_init(&why, sizeof why);
    assert_int_equal(sluice_context_read_decisions(context, cases[i][0], strlen(cases[i][0])),
                     SLUICE_E_INVALID_ARGUMENT);
    sluice_error_last(&why);
    if (strstr(why.message, cases[i][1]) == NULL) fail_msg("%s: says %s", cases[i][0], why.message);
  }
  char text[256];
  uint64_t bytes = sizeof text;
  assert_int_equal(sluice_context_write_decisions(context, text, &bytes), SLUICE_OK);
  assert_string_equal(text, "{\"sluice_decisions\": 2, \"answers\": []}\n"); /* nothing of them was taken */
  sluice_context_destroy(context);
}

static void BadConfig_IsRefusedByName(void** state) {
  (void)state;
  sluice_context_config_t context_config;
  sluice_context_config_init(&context_config, sizeof context_config);
  sluice_context_t* context = NULL;
  assert_int_equal(sluice_context_create(&context_config, NULL, &context), SLUICE_OK);
  sluice_error_info_t why;
  sluice_error_info_init(&why, sizeof why);
  sluice_tuner_config_t c;
  sluice_tuner_config_init(&c, sizeof c);
  assert_int_equal(sluice_context_tune(context, &c), SLUICE_OK);
  c.mode = 3;
  assert_int_equal(sluice_context_tune(context, &c), SLUICE_E_INVALID_ARGUMENT);
  sluice_error_last(&why);
  assert_non_null(strstr(why.message, "mode is 3"));
  c.mode = SLUICE_TUNER_MODEL;
  assert_int_equal(sluice_context_tune(context, &c), SLUICE_E_INVALID_ARGUMENT);
  sluice_error_last(&why);
  assert_non_null(strstr(why.message, "needs a machine"));
  c.mode = 0, c.reserved = 1;
  assert_int_equal(sluice_context_tune(context, &c), SLUICE_E_INVALID_ARGUMENT);
  int32_t count = -1;
  assert_int_equal(sluice_context_decisions(context, NULL, 1, &count), SLUICE_E_INVALID_ARGUMENT);
  assert_int_equal(sluice_context_decisions(context, NULL, 0, &count), SLUICE_OK);
  assert_int_equal(count, 0);
  sluice_tuner_stats_t stats = {.struct_size = 0};
  assert_int_equal(sluice_context_tuner_stats(context, &stats), SLUICE_E_ABI);
  sluice_context_destroy(context);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(EveryMode_RanksDecideAlikeAndSettle),
      cmocka_unit_test(ChangingBatches_EachSizeHasItsAnswer),
      cmocka_unit_test(FixedChunks_NothingOpen_NothingIsAsked),
      cmocka_unit_test(FixedChunks_OpenMode_IsRacedAtThatN),
      cmocka_unit_test(FixedChunks_DecisionOfAFile_StandsForThatN),
      cmocka_unit_test(RanksConfiguredDifferently_FailAlikeAndSayWhy),
      cmocka_unit_test(Decisions_WrittenAndReadAgain_StandFromTheFirstStep),
      cmocka_unit_test(Decisions_OfOneRankOnly_AreAMismatch),
      cmocka_unit_test(Budget_BestPlansRace_InsideTheBudget),
      cmocka_unit_test(Budget_BatchesGrow_PlansBeginWithWhatWasSeen),
      cmocka_unit_test(Budget_PlanOfAFile_StandsWhereItFits),
      cmocka_unit_test(Plans_WithAMachine_CarryThePlannersSeconds),
      cmocka_unit_test(BadDecisions_AreRefusedByName),
      cmocka_unit_test(BadConfig_IsRefusedByName),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
