// SPDX-License-Identifier: Apache-2.0
#include "capi/test/tuner/tuner_world.h"

#include <pthread.h>

#include "third_party/bazel/test.h"

#define MAX_T           256
#define MAX_K           8
#define MAX_OUTSTANDING 64

const char* const tuner_machine =
    "{\"sluice_machine\": 2, \"name\": \"test\", "
    "\"gemm\": {\"f32\": {\"flops_per_second\": 1e10, \"half_rows\": 8}}, "
    "\"rows\": {\"bytes_per_second\": 5e9}, \"activation_seconds\": 1e-10, \"activation_grad_seconds\": 2e-10, "
    "\"exchange\": {\"bytes_per_second\": 1e9, \"startup_seconds\": 2e-5, \"per_peer_seconds\": 2e-6}, "
    "\"host_copy\": {\"bytes_per_second\": 4e9}, \"op_seconds\": 2e-6, \"pass_seconds\": 1e-5}";

typedef struct rank_s {
  tuner_world_t* world;
  int32_t rank;
  sluice_context_t* context;
  sluice_moe_t* layers[MAX_LAYERS];
  int32_t step;
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

static int32_t top_k_of(const tuner_world_t* w) { return w->top_k > 0 ? w->top_k : 1; }

/* Sets the routing of outstanding forward number `which`. */
static void route(const rank_t* r, int64_t count, int32_t which) {
  const tuner_world_t* w = r->world;
  if (w->same_routing == r->rank + 1) which = 0;
  int64_t hot = 0; /* out of eight tokens */
  for (int64_t least = MAX_T; w->uneven && least > count; least /= 2) hot += 2;
  for (int64_t t = 0; t < count; ++t) {
    if (t % 8 < hot) {
      for (int32_t k = 0; k < top_k_of(w); ++k) r->ids[t * top_k_of(w) + k] = (t + k) % 2;
      continue;
    }
    const int64_t first = t * 7 + r->step + r->rank + (which > 0 && t % (which + 1) == 0);
    for (int32_t k = 0; k < top_k_of(w); ++k) r->ids[t * top_k_of(w) + k] = (first + k) % (2 * w->world_size);
  }
}

static int is_different(const sluice_context_stats_t* a, const sluice_context_stats_t* b) {
  return a->last_num_chunks != b->last_num_chunks || a->saved_bytes != b->saved_bytes;
}

/* Runs all outstanding forwards except the one whose backward comes next. Their steps are dropped, as in a host with
 * activation checkpointing. */
static sluice_status_t run_forwards(rank_t* r, sluice_moe_t* moe, sluice_moe_forward_args_t* f, int64_t count,
                                    sluice_context_stats_t* first) {
  tuner_world_t* w = r->world;
  int32_t is_mixed = 0;
  for (int32_t i = 0; i < w->repeats; ++i) {
    sluice_step_t* step = NULL;
    route(r, count, i);
    TRY(sluice_moe_forward(moe, f, NULL, &step));
    sluice_step_drop(step);
    first[i].struct_size = sizeof first[i];
    TRY(sluice_context_get_stats(r->context, 0, &first[i]));
    is_mixed |= first[i].last_num_chunks != first[0].last_num_chunks;
  }
  w->num_mixed[r->rank] += is_mixed;
  f->repeats = w->repeats > 0 && w->forgets != r->rank + 1;
  return SLUICE_OK;
}

static sluice_status_t run_backward(rank_t* r, sluice_moe_t* moe, const sluice_moe_forward_args_t* f,
                                    const sluice_expert_tensors_t* grads) {
  sluice_step_t* step = NULL;
  TRY(sluice_moe_forward(moe, f, NULL, &step));
  sluice_tensor_t grad = *f->tokens;
  grad.data = r->grad;
  DEFAULTS(sluice_moe_backward_args, b);
  b.tokens = f->tokens, b.route_weights = f->route_weights, b.params = f->params, b.grad_out = &grad;
  b.grad_tokens = f->out_tokens, b.grad_params = grads, b.parts = SLUICE_BACKWARD_BOTH;
  sluice_status_t status = sluice_moe_backward(moe, step, &b, NULL);
  sluice_step_drop(step);
  return status;
}

static int64_t hidden_width_of(const tuner_world_t* w, int32_t layer) {
  return w->shapes == 2 && layer % 2 ? H / 2 : H;
}

static sluice_status_t new_layer(rank_t* r, int32_t number) {
  const tuner_world_t* w = r->world;
  DEFAULTS(sluice_moe_config, c);
  c.model_width = M, c.hidden_width = hidden_width_of(w, number), c.num_experts = 2 * w->world_size;
  c.layer_id = number, c.top_k = top_k_of(w);
  c.num_chunks = w->num_chunks, c.wgrad_mode = w->wgrad_mode, c.deduplicate = w->deduplicate;
  c.reuse = w->reuse;
  return sluice_moe_create(r->context, &c, &r->layers[number]);
}

static sluice_status_t run_pass(rank_t* r, int32_t layer, int64_t count, int32_t is_training) {
  sluice_moe_t* moe = r->layers[layer];
  const int64_t hidden = hidden_width_of(r->world, layer);
  int64_t rows[] = {count, M}, routes[] = {count, top_k_of(r->world)}, w1[] = {hidden, M}, w2[] = {M, hidden};
  int32_t local = sluice_moe_num_local_experts(moe);
  sluice_tensor_t tokens = matrix(r->tokens, rows, 2, SLUICE_TYPE_FLOAT, 32), out = tokens;
  sluice_tensor_t ids = matrix(r->ids, routes, 2, SLUICE_TYPE_INT, 64),
                  weights = matrix(r->weights, routes, 2, SLUICE_TYPE_FLOAT, 32);
  out.data = r->out;
  sluice_tensor_t p1[8], p2[8], g1[8], g2[8];
  for (int32_t e = 0; e < local; ++e) {
    p1[e] = matrix(r->params + 2 * e * M * H, w1, 2, SLUICE_TYPE_FLOAT, 32);
    p2[e] = matrix(r->params + (2 * e + 1) * M * H, w2, 2, SLUICE_TYPE_FLOAT, 32);
    g1[e] = p1[e], g2[e] = p2[e];
    g1[e].data = r->grads + 2 * e * M * H, g2[e].data = r->grads + (2 * e + 1) * M * H;
  }
  sluice_expert_tensors_t params = {.struct_size = sizeof params, .w1 = p1, .w2 = p2}, grads = params;
  grads.w1 = g1, grads.w2 = g2;
  DEFAULTS(sluice_moe_forward_args, f);
  f.tokens = &tokens, f.expert_ids = &ids, f.route_weights = &weights, f.params = &params, f.out_tokens = &out;
  f.needs_backward = is_training;
  if (!is_training) {
    route(r, count, 0);
    return sluice_moe_forward(moe, &f, NULL, NULL);
  }
  const int32_t num = r->world->repeats;
  sluice_context_stats_t first[MAX_OUTSTANDING];
  TRY(run_forwards(r, moe, &f, count, first));
  for (int32_t i = 0; i < (num > 0 ? num : 1); ++i) {
    const int32_t which = r->world->reverse ? num - 1 - i : i;
    sluice_context_stats_t stats = {.struct_size = sizeof stats};
    route(r, count, which);
    TRY(run_backward(r, moe, &f, &grads));
    TRY(sluice_context_get_stats(r->context, 0, &stats));
    if (num > 0) r->world->num_different[r->rank] += is_different(&stats, &first[which]);
  }
  return SLUICE_OK;
}

static sluice_status_t set_up(rank_t* r, sluice_comm_t** out_comm) {
  tuner_world_t* w = r->world;
  DEFAULTS(sluice_comm_config, comm_config);
  comm_config.rank = r->rank, comm_config.world_size = w->world_size, comm_config.timeout_ns = 300000000000u;
  TRY(sluice_comm_create_local(w->group, &comm_config, out_comm));
  DEFAULTS(sluice_context_config, context_config);
  context_config.gemm = "ref";
  context_config.memory_budget = w->budget, context_config.ranks_per_node = w->ranks_per_node;
  TRY(sluice_context_create(&context_config, *out_comm, &r->context));
  sluice_planner_t* planner = NULL;
  const char* machine = w->machine[r->rank] != NULL ? w->machine[r->rank] : tuner_machine;
  TRY(sluice_planner_create(machine, strlen(machine), &planner));
  DEFAULTS(sluice_tuner_config, tuner);
  tuner.mode = w->mode[r->rank];
  tuner.machine = w->has_machine[r->rank] ? planner : NULL;
  sluice_status_t status = sluice_context_tune(r->context, &tuner);
  sluice_planner_destroy(planner);
  TRY(status);
  const char *import = w->import[r->rank], *refused = w->refused[r->rank];
  if (refused != NULL && sluice_context_read_decisions(r->context, refused, strlen(refused)) == SLUICE_OK)
    return SLUICE_E_INTERNAL;
  if (import != NULL) TRY(sluice_context_read_decisions(r->context, import, strlen(import)));
  for (int32_t i = 0; i < w->layers; ++i) TRY(new_layer(r, i));
  return SLUICE_OK;
}

static sluice_status_t run_steps(rank_t* r) {
  tuner_world_t* w = r->world;
  static const int64_t sizes[] = {256, 32, 128, 64};
  const int32_t cycle = w->changes == 1 ? 3 : 4;
  const int32_t most = w->waits ? 3 * w->steps : w->steps;
  for (int32_t step = 0; step < w->steps || (step < most && w->settled[r->rank] < w->waits); ++step) {
    int64_t count = w->changes > 0 ? sizes[step / w->changes % cycle] : w->grows && step < w->steps / 2 ? 32 : 128;
    if (w->empty == r->rank + 1 && step % 2) count = 0;
    if (w->replaces > 0 && step % w->replaces == w->replaces - 1) {
      sluice_moe_destroy(r->layers[0]);
      r->layers[0] = NULL;
      TRY(new_layer(r, 0));
    }
    r->step = step;
    for (int64_t t = 0; t < count * top_k_of(w); ++t) r->weights[t] = 0.5f;
    for (int32_t i = 0; i < w->layers; ++i) {
      for (int32_t e = 0; e < w->evaluates; ++e) TRY(run_pass(r, i, count / 2, 0));
      sluice_context_stats_t stats = {.struct_size = sizeof stats}, before = stats;
      TRY(sluice_context_get_stats(r->context, 0, &before));
      TRY(run_pass(r, i, count, 1));
      TRY(sluice_context_get_stats(r->context, 0, &stats));
      w->sent_bytes[r->rank] = stats.bytes_sent - before.bytes_sent;
      if (w->num_picks[r->rank] < 4096) w->picks[r->rank][w->num_picks[r->rank]++] = stats.last_num_chunks;
      w->last_deduplicate[r->rank] = stats.last_deduplicate;
      w->num_copied[r->rank] += stats.last_deduplicate != SLUICE_DEDUPLICATE_NONE;
      w->settled[r->rank] = stats.last_is_settled ? w->settled[r->rank] + 1 : 0;
      w->peak_bytes[r->rank] = stats.peak_bytes;
      w->last_bytes[r->rank] = stats.current_bytes;
      if (w->first_bytes[r->rank] == 0) w->first_bytes[r->rank] = stats.current_bytes;
    }
  }
  TRY(sluice_context_decisions(r->context, w->decisions[r->rank], 64, &w->num_decisions[r->rank]));
  int32_t num_policies = 0, num_parts = 0, num_forms = 0;
  TRY(sluice_context_decided_policies(r->context, w->policies[r->rank], 64, &num_policies));
  TRY(sluice_context_decided_parts(r->context, w->parts[r->rank], 64, &num_parts));
  TRY(sluice_context_decided_forms(r->context, w->forms[r->rank], 64, &num_forms));
  if (num_policies != w->num_decisions[r->rank] || num_parts != num_policies || num_forms != num_parts)
    return SLUICE_E_INTERNAL;
  uint64_t bytes = sizeof w->written[0];
  TRY(sluice_context_write_decisions(r->context, w->written[r->rank], &bytes));
  w->refined[r->rank][0] = '\0';
  bytes = sizeof w->refined[0];
  if (w->has_machine[r->rank] && w->budget == 0 &&
      sluice_context_write_machine(r->context, w->refined[r->rank], &bytes) != SLUICE_OK) {
    w->refined[r->rank][0] = '\0'; /* too few steps */
  }
  w->stats[r->rank].struct_size = sizeof(sluice_tuner_stats_t);
  return sluice_context_tuner_stats(r->context, &w->stats[r->rank]);
}

static void* run_rank(void* argument) {
  rank_t* r = argument;
  tuner_world_t* w = r->world;
  sluice_comm_t* comm = NULL;
  r->tokens = calloc(MAX_T * M, sizeof(float)), r->out = calloc(MAX_T * M, sizeof(float));
  r->grad = calloc(MAX_T * M, sizeof(float)), r->weights = calloc(MAX_T * MAX_K, sizeof(float));
  r->ids = calloc(MAX_T * MAX_K, sizeof(int64_t));
  sluice_status_t status = set_up(r, &comm);
  if (status == SLUICE_OK) status = run_steps(r);
  DEFAULTS(sluice_error_info, why);
  if (status != SLUICE_OK) sluice_error_last(&why);
  w->status[r->rank] = status;
  memcpy(w->message[r->rank], why.message, sizeof why.message);
  for (int32_t i = 0; i < w->layers; ++i) sluice_moe_destroy(r->layers[i]);
  sluice_context_destroy(r->context);
  sluice_comm_destroy(comm);
  free(r->tokens), free(r->out), free(r->grad), free(r->weights), free(r->ids);
  return NULL;
}

void tuner_run(tuner_world_t* w) {
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

tuner_world_t* tuner_world(int32_t world_size, int32_t mode, int32_t has_machine) {
  static tuner_world_t w;
  memset(&w, 0, sizeof w);
  w.world_size = world_size, w.steps = 120, w.layers = 2, w.wgrad_mode = SLUICE_WGRAD_ADAPTIVE;
  for (int32_t r = 0; r < MAX_RANKS; ++r) w.mode[r] = mode, w.has_machine[r] = has_machine;
  return &w;
}

void must_agree(const tuner_world_t* w) {
  for (int32_t r = 0; r < w->world_size; ++r) {
    if (w->status[r] != SLUICE_OK) fail_msg("rank %d: %s", r, w->message[r]);
    assert_int_equal(w->num_picks[r], w->waits ? w->num_picks[0] : w->steps * w->layers);
    assert_memory_equal(w->picks[r], w->picks[0], (size_t)w->num_picks[0] * sizeof(int32_t));
    assert_int_equal(w->num_decisions[r], w->num_decisions[0]);
    assert_memory_equal(w->decisions[r], w->decisions[0],
                        (size_t)w->num_decisions[0] * sizeof(sluice_tuner_decision_t));
    assert_memory_equal(w->forms[r], w->forms[0], (size_t)w->num_decisions[0] * sizeof(sluice_tuner_form_t));
  }
}

void run_and_agree(tuner_world_t* w) {
  tuner_run(w);
  must_agree(w);
}
