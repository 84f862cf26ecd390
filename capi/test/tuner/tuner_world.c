// SPDX-License-Identifier: Apache-2.0
#include "capi/test/tuner/tuner_world.h"

#include <pthread.h>

#include "backend/base/status.h"
#include "capi/test/rig/rig.h"
#include "third_party/bazel/test.h"

#define MAX_T           256
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
  rig_t layers[MAX_LAYERS]; /* on this context */
  int32_t step;
} rank_t;

static int32_t top_k_of(const tuner_world_t* w) { return w->top_k > 0 ? w->top_k : 1; }

/* Sets the routing of outstanding forward number `which` of a layer. */
static void route(const rank_t* r, rig_t* layer, int32_t which) {
  const tuner_world_t* w = r->world;
  const int64_t count = layer->num_tokens;
  int32_t* ids = layer->ids.tensor.data;
  if (w->same_routing == r->rank + 1) which = 0;
  int64_t hot = 0; /* out of eight tokens */
  for (int64_t least = MAX_T; w->uneven && least > count; least /= 2) hot += 2;
  for (int64_t t = 0; t < count; ++t) {
    const int is_hot = t % 8 < hot;
    const int64_t first = is_hot ? t : t * 7 + r->step + r->rank + (which > 0 && t % (which + 1) == 0);
    for (int32_t k = 0; k < top_k_of(w); ++k) *ids++ = (int32_t)((first + k) % (is_hot ? 2 : 2 * w->world_size));
  }
}

static int is_different(const sluice_context_stats_t* a, const sluice_context_stats_t* b) {
  return a->last_num_chunks != b->last_num_chunks || a->saved_bytes != b->saved_bytes;
}

/* Runs all outstanding forwards except the one whose backward comes next. Their steps are dropped, as in a host with
 * activation checkpointing. */
static sluice_status_t run_forwards(rank_t* r, rig_t* layer, sluice_context_stats_t* first) {
  tuner_world_t* w = r->world;
  int32_t is_mixed = 0;
  for (int32_t i = 0; i < w->repeats; ++i) {
    sluice_step_t* step = NULL;
    route(r, layer, i);
    SLUICE_TRY(rig_forward(layer, &step));
    sluice_step_drop(step);
    first[i].struct_size = sizeof first[i];
    SLUICE_TRY(sluice_context_get_stats(r->context, 0, &first[i]));
    is_mixed |= first[i].last_num_chunks != first[0].last_num_chunks;
  }
  w->num_mixed[r->rank] += is_mixed;
  layer->forward.repeats = w->repeats > 0 && w->forgets != r->rank + 1;
  return SLUICE_OK;
}

static sluice_moe_config_t config_of(const tuner_world_t* w, int32_t number) {
  DEFAULTS(sluice_moe_config, c);
  c.model_width = M, c.hidden_width = w->shapes == 2 && number % 2 ? H / 2 : H, c.num_experts = 2 * w->world_size;
  c.layer_id = number, c.top_k = top_k_of(w);
  c.num_chunks = w->num_chunks, c.wgrad_mode = w->wgrad_mode, c.deduplicate = w->deduplicate;
  c.reuse = w->reuse;
  return c;
}

static sluice_status_t new_layer(rank_t* r, int32_t number) {
  const sluice_moe_config_t config = config_of(r->world, number);
  rig_t* layer = &r->layers[number];
  layer->rank = r->rank, layer->world_size = r->world->world_size, layer->context = r->context;
  return rig_open_layer(layer, &config);
}

static sluice_status_t run_pass(rank_t* r, rig_t* layer, int64_t count, int32_t is_training) {
  layer->num_tokens = count;
  rig_reset(layer);
  layer->backward.grad_route_weights = NULL;
  if (!is_training) {
    layer->forward.needs_backward = 0;
    route(r, layer, 0);
    return rig_forward(layer, NULL);
  }
  const int32_t num = r->world->repeats;
  sluice_context_stats_t first[MAX_OUTSTANDING];
  SLUICE_TRY(run_forwards(r, layer, first));
  for (int32_t i = 0; i < (num > 0 ? num : 1); ++i) {
    const int32_t which = r->world->reverse ? num - 1 - i : i;
    sluice_context_stats_t stats = {.struct_size = sizeof stats};
    route(r, layer, which);
    SLUICE_TRY(rig_step(layer));
    SLUICE_TRY(sluice_context_get_stats(r->context, 0, &stats));
    if (num > 0) r->world->num_different[r->rank] += is_different(&stats, &first[which]);
  }
  return SLUICE_OK;
}

static sluice_status_t set_up(rank_t* r, sluice_comm_t** out_comm) {
  tuner_world_t* w = r->world;
  DEFAULTS(sluice_comm_config, comm_config);
  comm_config.rank = r->rank, comm_config.world_size = w->world_size, comm_config.timeout_ns = 300000000000u;
  SLUICE_TRY(sluice_comm_create_local(w->group, &comm_config, out_comm));
  DEFAULTS(sluice_context_config, context_config);
  context_config.gemm = "ref";
  context_config.memory_budget = w->budget, context_config.ranks_per_node = w->ranks_per_node;
  SLUICE_TRY(sluice_context_create(&context_config, *out_comm, &r->context));
  sluice_planner_t* planner = NULL;
  const char* machine = w->machine[r->rank] != NULL ? w->machine[r->rank] : tuner_machine;
  SLUICE_TRY(sluice_planner_create(machine, strlen(machine), &planner));
  DEFAULTS(sluice_tuner_config, tuner);
  tuner.mode = w->mode[r->rank];
  tuner.machine = w->has_machine[r->rank] ? planner : NULL;
  sluice_status_t status = sluice_context_tune(r->context, &tuner);
  sluice_planner_destroy(planner);
  SLUICE_TRY(status);
  const char *import = w->import[r->rank], *refused = w->refused[r->rank];
  if (refused != NULL && sluice_context_read_decisions(r->context, refused, strlen(refused)) == SLUICE_OK)
    return SLUICE_E_INTERNAL;
  if (import != NULL) SLUICE_TRY(sluice_context_read_decisions(r->context, import, strlen(import)));
  for (int32_t i = 0; i < w->layers; ++i) SLUICE_TRY(new_layer(r, i));
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
      SLUICE_TRY(rig_swap_layer(&r->layers[0], &r->layers[0].config));
    }
    r->step = step;
    for (int32_t i = 0; i < w->layers; ++i) {
      for (int32_t e = 0; e < w->evaluates; ++e) SLUICE_TRY(run_pass(r, &r->layers[i], count / 2, 0));
      sluice_context_stats_t stats = {.struct_size = sizeof stats}, before = stats;
      SLUICE_TRY(sluice_context_get_stats(r->context, 0, &before));
      SLUICE_TRY(run_pass(r, &r->layers[i], count, 1));
      SLUICE_TRY(sluice_context_get_stats(r->context, 0, &stats));
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
  SLUICE_TRY(sluice_context_decisions(r->context, w->decisions[r->rank], 64, &w->num_decisions[r->rank]));
  int32_t num_policies = 0, num_parts = 0, num_forms = 0;
  SLUICE_TRY(sluice_context_decided_policies(r->context, w->policies[r->rank], 64, &num_policies));
  SLUICE_TRY(sluice_context_decided_parts(r->context, w->parts[r->rank], 64, &num_parts));
  SLUICE_TRY(sluice_context_decided_forms(r->context, w->forms[r->rank], 64, &num_forms));
  if (num_policies != w->num_decisions[r->rank] || num_parts != num_policies || num_forms != num_parts)
    return SLUICE_E_INTERNAL;
  uint64_t bytes = sizeof w->written[0];
  SLUICE_TRY(sluice_context_write_decisions(r->context, w->written[r->rank], &bytes));
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
  sluice_status_t status = set_up(r, &comm);
  if (status == SLUICE_OK) status = run_steps(r);
  DEFAULTS(sluice_error_info, why);
  if (status != SLUICE_OK) sluice_error_last(&why);
  w->status[r->rank] = status;
  memcpy(w->message[r->rank], why.message, sizeof why.message);
  for (int32_t i = 0; i < w->layers; ++i) {
    r->layers[i].context = NULL; /* all layers have the same one */
    rig_close(&r->layers[i]);
  }
  sluice_context_destroy(r->context);
  sluice_comm_destroy(comm);
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
