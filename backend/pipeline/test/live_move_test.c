/* A layer changes its stage while a batch runs, over sluice_pipeline_* and sluice_migration_* by the rules of
 * backend/pipeline/live.h: no drain, and losses, weights and moments with the bits of one loop in which nothing moves.
 *
 * Every stage has a layer of its own; one more lies at the cut between two of them and goes down and up in turns.
 * A layer is y = x * w, element by element, whose update needs weight, gradient and moment. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "backend/pipeline/live.h"
#include "sluice/migration.h"
#include "sluice/pipeline.h"

enum { MOST_STAGES = 4, WIDTH = 1500, M = 8, BATCHES = 12 };

typedef struct layer_s {
  float weight[WIDTH], moment[WIDTH], grad[WIDTH];
} layer_t;

/* What a stage keeps of a micro-batch: inputs of its own layer and of L. */
typedef struct stash_s {
  float own[WIDTH], moving[WIDTH], y[WIDTH], dx[WIDTH];
  int ran; /* L */
  int64_t shape[1];
  sluice_tensor_t out, back;
} stash_t;

typedef struct world_s {
  int32_t p, upper; /* L lies between the stages upper and upper + 1 */
  int is_tcp;
  uint64_t rate;
  sluice_local_group_t *of_batches, *of_moves;
  int32_t in_batch, at_flush; /* how often L moved so, as the upper stage has it */
} world_t;

typedef struct rank_s {
  world_t* world;
  int32_t stage, batch;
  pthread_t thread;
  sluice_pipeline_t* pipeline;
  sluice_migration_t* migration;
  layer_t own, moving;
  int has_moving; /* L's owner between batches */
  int is_moving;  /* this batch */
  sluice_live_t live;
  float held[M][WIDTH];
  int is_held[M];
  float losses[BATCHES][M];
  stash_t stash[M];
  int bad; /* the line that did not hold */
} rank_t;

#define EXPECT(condition)                                     \
  do {                                                        \
    if (!(condition) && rank->bad == 0) rank->bad = __LINE__; \
  } while (0)

/* ---- the mathematics, of both runs ---- */

static void init_layer(layer_t* layer, int32_t number) {
  for (int32_t e = 0; e < WIDTH; ++e) {
    layer->weight[e] = 0.7F + 0.013F * (float)((number * 7 + e) % 23);
    layer->moment[e] = layer->grad[e] = 0;
  }
}

static void input_of(int32_t batch, int32_t micro_batch, float x[WIDTH]) {
  for (int32_t e = 0; e < WIDTH; ++e) x[e] = 0.3F + 0.017F * (float)((batch * 5 + micro_batch * 3 + e) % 19);
}

static void forward_layer(const layer_t* layer, const float* x, float* y) {
  for (int32_t e = 0; e < WIDTH; ++e) y[e] = x[e] * layer->weight[e];
}

static void backward_layer(const layer_t* layer, const float* x, const float* dy, float* grad, float* dx) {
  for (int32_t e = 0; e < WIDTH; ++e) {
    grad[e] += dy[e] * x[e];
    dx[e] = dy[e] * layer->weight[e];
  }
}

static void update_layer(layer_t* layer) {
  for (int32_t e = 0; e < WIDTH; ++e) {
    layer->moment[e] = 0.9F * layer->moment[e] + layer->grad[e];
    layer->weight[e] -= 1e-3F * layer->moment[e];
    layer->grad[e] = 0;
  }
}

/* Layers in their order: own ones of the stages up to upper, L, the others. The loss is half of y squared. */
static void run_reference(const world_t* world, layer_t own[MOST_STAGES], layer_t* moving, float losses[BATCHES][M]) {
  layer_t* chain[MOST_STAGES + 1];
  int32_t count = 0;
  for (int32_t s = 0; s < world->p; ++s) {
    init_layer(&own[s], s);
    chain[count++] = &own[s];
    if (s == world->upper) chain[count++] = moving;
  }
  init_layer(moving, 9);
  static float x[MOST_STAGES + 2][WIDTH], dy[WIDTH], dx[WIDTH];
  for (int32_t b = 0; b < BATCHES; ++b) {
    for (int32_t i = 0; i < M; ++i) {
      input_of(b, i, x[0]);
      for (int32_t l = 0; l < count; ++l) forward_layer(chain[l], x[l], x[l + 1]);
      losses[b][i] = 0.5F * x[count][0] * x[count][0];
      memcpy(dy, x[count], sizeof dy);
      for (int32_t l = count; l-- > 0;) {
        backward_layer(chain[l], x[l], dy, chain[l]->grad, dx);
        memcpy(dy, dx, sizeof dy);
      }
    }
    for (int32_t l = 0; l < count; ++l) update_layer(chain[l]);
  }
}

/* ---- a stage ---- */

static int32_t role_of(const rank_t* rank) { return rank->stage - rank->world->upper; }
static int is_at_the_cut(const rank_t* rank) { return role_of(rank) == 0 || role_of(rank) == 1; }

static void rest(void) {
  const struct timespec time = {.tv_nsec = 300 * 1000};
  (void)nanosleep(&time, NULL);
}

static void give(float* data, sluice_tensor_t* tensor, stash_t* stash, sluice_stage_tensors_t* out_result) {
  stash->shape[0] = WIDTH;
  *tensor = (sluice_tensor_t){.data = data,
                              .device_type = SLUICE_DEVICE_CPU,
                              .ndim = 1,
                              .type_code = SLUICE_TYPE_FLOAT,
                              .type_bits = 32,
                              .type_lanes = 1,
                              .shape = stash->shape};
  out_result->tensors = tensor, out_result->num_tensors = 1;
}

enum { SPANS = 3 };

static void spans_of(layer_t* layer, sluice_migration_span_t spans[SPANS]) {
  spans[0] = (sluice_migration_span_t){.data = layer->weight, .bytes = sizeof layer->weight};
  spans[1] = (sluice_migration_span_t){.data = layer->moment, .bytes = sizeof layer->moment};
  spans[2] =
      (sluice_migration_span_t){.data = layer->grad, .bytes = sizeof layer->grad, .when = SLUICE_MIGRATION_AT_COMMIT};
}

/* The stage to which L goes looks whether its parameters are there. */
static void look(rank_t* rank) {
  if (!rank->is_moving || !sluice_live_receives(&rank->live) || rank->live.has) return;
  const int32_t peer = rank->world->upper + 1 - role_of(rank);
  sluice_migration_span_t spans[SPANS];
  int32_t is_there = 0;
  spans_of(&rank->moving, spans);
  spans[1].bytes = spans[2].bytes = 0;
  EXPECT(sluice_migration_read_still(rank->migration, 1, peer, spans, SPANS, &is_there) == SLUICE_OK);
  if (is_there) sluice_live_arrived(&rank->live);
}

static int runs_moving(rank_t* rank, const sluice_stage_call_t* op) {
  if (!is_at_the_cut(rank)) return 0;
  if (!rank->is_moving) return rank->has_moving;
  return sluice_live_forward(&rank->live, op->micro_batch, op->is_first ? 0 : op->input->word);
}

static sluice_status_t forward(void* user, const sluice_stage_call_t* op, sluice_stage_tensors_t* out_result,
                               sluice_host_failure_t* out_failure) {
  rank_t* rank = user;
  stash_t* stash = &rank->stash[op->micro_batch];
  float x[WIDTH];
  (void)out_failure;
  rest();
  look(rank);
  if (op->is_first) {
    input_of(rank->batch, op->micro_batch, x);
  } else {
    memcpy(x, op->input->tensors[0].data, sizeof x);
  }
  stash->ran = runs_moving(rank, op);
  if (stash->ran && role_of(rank) == SLUICE_LIVE_LOWER) {
    memcpy(stash->moving, x, sizeof x);
    forward_layer(&rank->moving, stash->moving, x);
  }
  memcpy(stash->own, x, sizeof x);
  forward_layer(&rank->own, stash->own, stash->y);
  if (stash->ran && role_of(rank) == SLUICE_LIVE_UPPER) {
    memcpy(stash->moving, stash->y, sizeof x);
    forward_layer(&rank->moving, stash->moving, stash->y);
  }
  if (op->is_last) {
    rank->losses[rank->batch][op->micro_batch] = 0.5F * stash->y[0] * stash->y[0];
  } else {
    give(stash->y, &stash->out, stash, out_result);
    if (role_of(rank) == SLUICE_LIVE_UPPER) out_result->word = sluice_live_activation_word(stash->ran);
  }
  return SLUICE_OK;
}

/* dy to dx, where the gradient of L is held apart if L has come in this batch. */
static void backward_moving(rank_t* rank, int32_t i, const float* dy, float* dx) {
  const int holds = rank->is_moving && sluice_live_holds(&rank->live);
  if (holds) memset(rank->held[i], 0, sizeof rank->held[i]);
  rank->is_held[i] = holds;
  backward_layer(&rank->moving, rank->stash[i].moving, dy, holds ? rank->held[i] : rank->moving.grad, dx);
}

static sluice_status_t backward(void* user, const sluice_stage_call_t* op, sluice_stage_tensors_t* out_result,
                                sluice_host_failure_t* out_failure) {
  rank_t* rank = user;
  stash_t* stash = &rank->stash[op->micro_batch];
  float dy[WIDTH], dx[WIDTH];
  (void)out_failure;
  rest();
  look(rank);
  memcpy(dy, op->is_last ? stash->y : (const float*)op->output_grad->tensors[0].data, sizeof dy);
  if (rank->is_moving && role_of(rank) == SLUICE_LIVE_UPPER && !op->is_last) {
    sluice_live_heard(&rank->live, op->output_grad->word);
  }
  if (stash->ran && role_of(rank) == SLUICE_LIVE_UPPER) {
    backward_moving(rank, op->micro_batch, dy, dx);
    memcpy(dy, dx, sizeof dy);
  }
  backward_layer(&rank->own, stash->own, dy, rank->own.grad, dx);
  if (stash->ran && role_of(rank) == SLUICE_LIVE_LOWER) {
    memcpy(dy, dx, sizeof dy);
    backward_moving(rank, op->micro_batch, dy, dx);
  }
  memcpy(stash->dx, dx, sizeof dx);
  if (op->is_first) return SLUICE_OK;
  give(stash->dx, &stash->back, stash, out_result);
  if (rank->is_moving && role_of(rank) == SLUICE_LIVE_LOWER) out_result->word = sluice_live_gradient_word(&rank->live);
  return SLUICE_OK;
}

/* ---- batches ---- */

/* L sets out behind an update, in every second batch; on all ranks alike. */
static void set_out(rank_t* rank, int to_lower) {
  const int32_t role = role_of(rank), from = to_lower ? SLUICE_LIVE_UPPER : SLUICE_LIVE_LOWER;
  sluice_migration_span_t spans[SPANS];
  spans_of(&rank->moving, spans);
  const sluice_migration_item_t item = {.id = 1,
                                        .peer = rank->world->upper + 1 - role,
                                        .direction = role == from ? SLUICE_MIGRATION_LEAVES : SLUICE_MIGRATION_ARRIVES,
                                        .spans = spans,
                                        .num_spans = SPANS};
  rank->live = sluice_live_begin(role, to_lower);
  memset(rank->is_held, 0, sizeof rank->is_held);
  EXPECT(sluice_migration_begin(rank->migration, (uint64_t)rank->batch + 1, &item, is_at_the_cut(rank)) == SLUICE_OK);
}

/* At the flush: the sum follows, and what was held is added to it. */
static void arrive(rank_t* rank) {
  EXPECT(sluice_migration_commit(rank->migration, NULL) == SLUICE_OK);
  if (!is_at_the_cut(rank)) return;
  rank->has_moving = sluice_live_receives(&rank->live);
  if (!rank->has_moving) memset(rank->moving.grad, 0, sizeof rank->moving.grad);
  for (int32_t i = 0; i < M; ++i) {
    for (int32_t e = 0; e < WIDTH && rank->is_held[i]; ++e) rank->moving.grad[e] += rank->held[i][e];
  }
  if (role_of(rank) != SLUICE_LIVE_UPPER) return;
  rank->world->in_batch += rank->live.trigger >= 0;
  rank->world->at_flush += rank->live.trigger < 0;
}

static void run_batches(rank_t* rank) {
  sluice_pipeline_batch_t batch;
  sluice_pipeline_batch_init(&batch, sizeof batch);
  batch.num_micro_batches = M;
  rank->has_moving = role_of(rank) == SLUICE_LIVE_UPPER;
  for (rank->batch = 0; rank->batch < BATCHES && rank->bad == 0; ++rank->batch) {
    rank->is_moving = rank->batch % 2;
    if (rank->is_moving) set_out(rank, rank->batch / 2 % 2 == 0);
    EXPECT(sluice_pipeline_run_batch(rank->pipeline, &batch) == SLUICE_OK);
    if (rank->is_moving) arrive(rank);
    update_layer(&rank->own);
    if (is_at_the_cut(rank) && rank->has_moving) update_layer(&rank->moving);
  }
}

static sluice_comm_t* comm_of(rank_t* rank, sluice_local_group_t* group, sluice_comm_t** out_parent) {
  sluice_comm_config_t config;
  sluice_comm_t* tcp = NULL;
  sluice_comm_config_init(&config, sizeof config);
  config.rank = rank->stage;
  config.world_size = rank->world->p;
  EXPECT(sluice_comm_create_local(group, &config, out_parent) == SLUICE_OK);
  if (rank->world->is_tcp) EXPECT(sluice_comm_create_tcp(*out_parent, NULL, &tcp) == SLUICE_OK);
  return tcp != NULL ? tcp : *out_parent;
}

static void* be_rank(void* data) {
  rank_t* rank = data;
  const sluice_pipeline_callbacks_t callbacks = {
      .struct_size = sizeof callbacks, .forward = forward, .backward = backward};
  sluice_comm_t* parents[2] = {NULL, NULL};
  sluice_comm_t* comms[2] = {comm_of(rank, rank->world->of_batches, &parents[0]),
                             comm_of(rank, rank->world->of_moves, &parents[1])};
  sluice_pipeline_config_t config;
  sluice_migration_config_t moves;
  sluice_pipeline_config_init(&config, sizeof config);
  sluice_migration_config_init(&moves, sizeof moves);
  config.in_flight = 2;
  moves.bytes_per_second = rank->world->rate;
  moves.chunk_bytes = 4096;
  EXPECT(sluice_pipeline_create(&config, comms[0], &callbacks, rank, &rank->pipeline) == SLUICE_OK);
  EXPECT(sluice_migration_create(comms[1], &moves, &rank->migration) == SLUICE_OK);
  if (rank->bad == 0) run_batches(rank);
  sluice_migration_destroy(rank->migration);
  sluice_pipeline_destroy(rank->pipeline);
  for (int32_t i = 0; i < 2; ++i) {
    if (comms[i] != parents[i]) sluice_comm_destroy(comms[i]);
    sluice_comm_destroy(parents[i]);
  }
  return NULL;
}

static void check_bits(const world_t* world, rank_t* ranks) {
  static layer_t own[MOST_STAGES], moving;
  static float losses[BATCHES][M];
  run_reference(world, own, &moving, losses);
  assert_memory_equal(ranks[world->p - 1].losses, losses, sizeof losses);
  int32_t owners = 0;
  for (int32_t s = 0; s < world->p; ++s) {
    assert_memory_equal(&ranks[s].own, &own[s], sizeof own[s]);
    if (!is_at_the_cut(&ranks[s]) || !ranks[s].has_moving) continue;
    ++owners;
    assert_memory_equal(&ranks[s].moving, &moving, sizeof moving);
  }
  assert_int_equal(owners, 1);
}

static world_t run_world(int32_t p, int32_t upper, int is_tcp, uint64_t rate) {
  world_t world = {.p = p, .upper = upper, .is_tcp = is_tcp, .rate = rate};
  rank_t* ranks = calloc((size_t)p, sizeof *ranks);
  assert_non_null(ranks);
  assert_int_equal(sluice_local_group_create(p, &world.of_batches), SLUICE_OK);
  assert_int_equal(sluice_local_group_create(p, &world.of_moves), SLUICE_OK);
  for (int32_t s = 0; s < p; ++s) {
    ranks[s].world = &world;
    ranks[s].stage = s;
    init_layer(&ranks[s].own, s);
    init_layer(&ranks[s].moving, 9); /* the lower stage's is overwritten when L comes */
    if (s != upper) memset(&ranks[s].moving, 0xff, sizeof ranks[s].moving);
    assert_int_equal(pthread_create(&ranks[s].thread, NULL, be_rank, &ranks[s]), 0);
  }
  for (int32_t s = 0; s < p; ++s) pthread_join(ranks[s].thread, NULL);
  for (int32_t s = 0; s < p; ++s) {
    if (ranks[s].bad != 0) fail_msg("p %d, cut %d: line %d does not hold on stage %d", p, upper, ranks[s].bad, s);
  }
  check_bits(&world, ranks);
  sluice_local_group_destroy(world.of_batches);
  sluice_local_group_destroy(world.of_moves);
  free(ranks);
  return world;
}

static void Layer_ThatMovesInABatch_HasTheBitsOfOneLoop(void** state) {
  (void)state;
  int32_t in_batch = 0;
  for (int32_t is_tcp = 0; is_tcp < 2; ++is_tcp) {
    for (int32_t p = 2; p <= MOST_STAGES; ++p) {
      for (int32_t upper = 0; upper + 1 < p; ++upper) in_batch += run_world(p, upper, is_tcp, 0).in_batch;
    }
  }
  print_message("%d moves in batches, without a drain\n", in_batch);
  assert_true(in_batch >= 12);
}

static void Layer_WhoseParametersComeLate_MovesAtTheFlush(void** state) {
  (void)state;
  const world_t world = run_world(2, 0, 0, 100 * 1000); /* 12 kB at 100 kB a second: behind the batch */
  assert_true(world.at_flush > 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(Layer_ThatMovesInABatch_HasTheBitsOfOneLoop),
      cmocka_unit_test(Layer_WhoseParametersComeLate_MovesAtTheFlush),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
