// SPDX-License-Identifier: Apache-2.0
/* A pipeline through its public calls has the bits of the model in one loop, for any policy, limits and delays. The
 * executed ops are those of the program. */
#include "capi/test/pipeline/pipeline_world.h"

#include <stdlib.h>

#define ALL_RANKS UINT32_MAX

/* Adds batches of all sizes, with evaluations between them. */
static void add_batches(pw_world_t* world, int32_t most) {
  for (int32_t m = 1; m <= most; ++m) {
    pw_world_add(world, m, 0);
    if (m % 2 == 0) pw_world_add(world, m - 1, 1);
  }
}

static void run_and_check(pw_world_t* world) {
  pw_world_run(world);
  for (int32_t b = 0; b < world->num_batches; ++b) assert_all_work(world, b);
  assert_nothing_wrong(world);
  assert_same_bits(world);
}

static void run_and_finish(pw_world_t* world) {
  run_and_check(world);
  pw_world_free(world);
}

static void try_one(const char* transport, const char* policy, int32_t p, int32_t v, int32_t limit, int32_t split) {
  pw_world_t* world = pw_world_new(transport, p);
  world->config.policy = policy;
  world->config.num_virtual = v;
  world->config.in_flight = limit;
  world->config.separate_wgrad = split;
  world->reduces = ALL_RANKS;
  if (strcmp(policy, "looped") == 0) { /* looped requires whole rounds */
    pw_world_add(world, p, 0);
    pw_world_add(world, 2 * p, 0);
    pw_world_add(world, 3, 1);
  } else {
    add_batches(world, 6);
  }
  run_and_finish(world);
}

static void try_rules(const char* transport, int32_t p) {
  static const char* const rules[] = {"message_driven", "backward_first"};
  for (int32_t v = 1; v <= 2; ++v) {
    if (p * v > PW_MAX_LAYERS) continue;
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; ++i) {
      for (int32_t split = 0; split <= 1; ++split) {
        try_one(transport, rules[i], p, v, 0, split);
        try_one(transport, rules[i], p, v, 1, split);
        try_one(transport, rules[i], p, v, 3, split);
      }
    }
  }
}

static void try_orders(const char* transport, int32_t p) {
  try_one(transport, "1f1b_hint", p, 1, 0, -1);
  try_one(transport, "1f1b_hint", p, 1, 2, -1);
  try_one(transport, "1f1b", p, 1, 0, -1);
  try_one(transport, "1f1b", p, 1, 1, -1);
  try_one(transport, "gpipe", p, 1, 0, -1);
  try_one(transport, "zero_bubble", p, 1, 0, -1);
  if (p > 1) try_one(transport, "looped", p, 2, 0, -1);
  try_one(transport, "v", p, 2, 0, -1);
}

TEST(Batch_AnyPolicyInOneProcess_HasTheBitsOfOneLoop) {
  for (int32_t p = 1; p <= 4; ++p) {
    try_rules("local", p);
    try_orders("local", p);
  }
}

TEST(Batch_AnyPolicyOverTcp_HasTheBitsOfOneLoop) {
  for (int32_t p = 2; p <= 4; ++p) try_orders("tcp", p);
  try_rules("tcp", 2);
  try_rules("tcp", 3);
  try_orders("tcp_at", 3);
}

TEST(Batch_WithoutACommunicator_HasTheBitsOfOneLoop) {
  try_rules("none", 1);
  try_orders("none", 1);
}

TEST(Batch_VPlacementUnderARule_HasTheBitsOfOneLoop) {
  for (int32_t p = 1; p <= 3; ++p) {
    pw_world_t* world = pw_world_new("local", p);
    world->config.policy = "backward_first";
    world->config.placement = SLUICE_PIPELINE_V;
    world->config.num_virtual = 2;
    world->config.separate_wgrad = p % 2;
    add_batches(world, 5);
    run_and_finish(world);
  }
}

/* Some ranks start the next pipeline while others are still in the previous one. Kept tensors outlive theirs. */
TEST(Pipelines_OneAfterTheOther_ShareACommunicator) {
  static const char* const transports[] = {"local", "tcp"};
  for (size_t t = 0; t < 2; ++t) {
    pw_world_t* world = pw_world_new(transports[t], 3);
    world->num_pipelines = 5;
    world->keeps = 1;
    world->max_delay_us = 200;
    for (int32_t b = 0; b < 10; ++b) pw_world_add(world, 4, b % 3 == 2);
    run_and_check(world);
    assert_int_equal(world->ranks[1].num_kept, 10 * 4);
    pw_world_free(world);
  }
}

/* ---- executed ops ---- */

static const sluice_stage_event_t* find(const pw_rank_t* rank, int32_t b, const char* op, int32_t c, int32_t i) {
  const sluice_stage_event_t* found = NULL;
  for (int64_t e = 0; e < rank->num_events[b]; ++e) {
    const sluice_stage_event_t* event = &rank->events[b][e];
    if (strcmp(event->op, op) != 0 || event->virtual_stage != c || event->micro_batch != i) continue;
    if (found != NULL) fail_msg("%s of micro-batch %d in virtual stage %d ran twice", op, i, c);
    found = event;
  }
  return found;
}

static void assert_before(const sluice_stage_event_t* a, const sluice_stage_event_t* b) {
  assert_non_null(a);
  assert_non_null(b);
  if (a->end_ns > b->begin_ns) fail_msg("%s of %d ends after the begin of %s", a->op, a->micro_batch, b->op);
}

static void check_micro_batch(const pw_rank_t* rank, int32_t c, int32_t i, int32_t last) {
  const sluice_stage_event_t* forward = find(rank, 0, "forward", c, i);
  const sluice_stage_event_t* backward = find(rank, 0, "backward", c, i);
  assert_before(forward, backward);
  if (i > 0) assert_before(find(rank, 0, "forward", c, i - 1), forward);
  if (i > 0) assert_before(find(rank, 0, "backward", c, i - 1), backward);
  if (c > 0) {
    assert_before(find(rank, 0, "receive_activation", c, i), forward);
    assert_before(backward, find(rank, 0, "send_gradient", c, i));
    assert_true(find(rank, 0, "receive_activation", c, i)->peer == rank->rank - 1);
    assert_true(find(rank, 0, "receive_activation", c, i)->bytes > 0);
  }
  if (c < last) {
    assert_before(forward, find(rank, 0, "send_activation", c, i));
    assert_before(find(rank, 0, "receive_gradient", c, i), backward);
  }
}

static int32_t most_in_flight(const pw_rank_t* rank, int32_t c, int32_t m) {
  int32_t most = 0;
  for (int32_t i = 0; i < m; ++i) {
    const uint64_t at = find(rank, 0, "forward", c, i)->begin_ns;
    int32_t now = 0;
    for (int32_t j = 0; j <= i; ++j) now += find(rank, 0, "backward", c, j)->end_ns > at;
    if (now > most) most = now;
  }
  return most;
}

TEST(Events_OfABatch_AreTheProgramWithinItsLimits) {
  for (int32_t limit = 1; limit <= 4; ++limit) {
    const int32_t p = 3, m = 6;
    pw_world_t* world = pw_world_new("tcp", p);
    const uint64_t bytes[] = {1000};
    world->config.in_flight = limit;
    world->config.activation_bytes = bytes;
    world->max_delay_us = 500;
    pw_world_add(world, m, 0);
    run_and_check(world);
    for (int32_t s = 0; s < p; ++s) {
      const pw_rank_t* rank = &world->ranks[s];
      for (int32_t i = 0; i < m; ++i) check_micro_batch(rank, s, i, p - 1);
      assert_int_equal(rank->num_events[0], m * (2 + (s > 0 ? 2 : 0) + (s < p - 1 ? 2 : 0)));
      const int32_t most = most_in_flight(rank, s, m);
      assert_true(most <= limit);
      assert_int_equal(rank->stats[0].most_in_flight, most);
      assert_int_equal(rank->stats[0].in_flight, limit);
      assert_int_equal(rank->stats[0].peak_bytes, 1000 * most);
      assert_true(rank->stats[0].peak_bytes <= rank->stats[0].planned_bytes);
      assert_int_equal(rank->stats[0].messages_sent, m * ((s > 0) + (s < p - 1)));
      assert_int_equal(rank->calls[PW_FORWARD], m);
      assert_int_equal(rank->calls[PW_BACKWARD], m);
      assert_int_equal(rank->calls[PW_LOAD], s == 0 || s == p - 1 ? m : 0);
      assert_int_equal(rank->calls[PW_LOSS], s == p - 1 ? m : 0);
    }
    pw_world_free(world);
  }
}

static int32_t count_of(const char* text, const char* what) {
  int32_t count = 0;
  for (const char* at = text; (at = strstr(at, what)) != NULL; ++at) ++count;
  return count;
}

/* Returns the number of events in the timeline, and records wrong results. */
static int32_t count_events(pw_rank_t* rank, int32_t which) {
  uint64_t bytes = 0;
  if (sluice_pipeline_timeline_json(rank->pipeline, which, NULL, &bytes) != SLUICE_OK) pw_wrong(rank, "no timeline");
  char* text = calloc(1, (size_t)bytes);
  if (text == NULL) abort();
  uint64_t room = bytes - 1;
  if (sluice_pipeline_timeline_json(rank->pipeline, which, text, &room) != SLUICE_E_INVALID_ARGUMENT) {
    pw_wrong(rank, "a timeline without room");
  }
  room = bytes;
  if (sluice_pipeline_timeline_json(rank->pipeline, which, text, &room) != SLUICE_OK) pw_wrong(rank, "no timeline");
  if (strlen(text) + 1 != bytes) pw_wrong(rank, "a timeline of another length");
  const int32_t count = count_of(text, "\"begin_ns\"");
  free(text);
  return count;
}

static void check_timelines(pw_rank_t* rank) {
  const int32_t m = 5, p = rank->world->num_stages, s = rank->stage;
  const int32_t measured = count_events(rank, SLUICE_PIPELINE_MEASURED);
  const int32_t predicted = count_events(rank, SLUICE_PIPELINE_PREDICTED);
  if (measured != m * (2 + (s > 0) + (s < p - 1))) pw_wrong(rank, "%d ops were measured", measured);
  if (predicted != m * (2 * p + 2 * (p - 1))) pw_wrong(rank, "%d ops were predicted", predicted);
}

static void ask_too_early(pw_rank_t* rank) {
  uint64_t bytes = 0;
  if (rank->num_events[0] > 0) return;
  if (sluice_pipeline_timeline_json(rank->pipeline, SLUICE_PIPELINE_MEASURED, NULL, &bytes) != SLUICE_E_STATE) {
    pw_wrong(rank, "a timeline of no batch");
  }
}

TEST(Timelines_OfABatch_AreMeasuredAndPredicted) {
  pw_world_t* world = pw_world_new("tcp", 3);
  world->between = ask_too_early;
  world->after = check_timelines;
  world->max_delay_us = 300;
  for (int32_t b = 0; b < 2; ++b) pw_world_add(world, 5, 0);
  run_and_finish(world);
}

/* ---- the number in flight ---- */

TEST(InFlight_LeftOpen_IsChosenForAllAfterTheFirstBatch) {
  pw_world_t* world = pw_world_new("tcp", 3);
  for (int32_t b = 0; b < 3; ++b) pw_world_add(world, 8, 0);
  run_and_check(world); /* ranks with different programs would hang */
  for (int32_t r = 0; r < 3; ++r) {
    assert_int_equal(world->ranks[r].stats[0].is_chosen, 0);
    assert_int_equal(world->ranks[r].stats[0].in_flight, 3);
    assert_int_equal(world->ranks[r].stats[1].is_chosen, 1);
    assert_int_equal(world->ranks[r].stats[2].in_flight, world->ranks[r].stats[1].in_flight);
  }
  pw_world_free(world);
}

TEST(Policy_LeftOpen_IsChosenForAllAfterTheFirstBatch) {
  static const char* const transports[] = {"local", "tcp"};
  for (size_t t = 0; t < 2; ++t) {
    pw_world_t* world = pw_world_new(transports[t], 4);
    world->config.policy = "adaptive";
    world->config.in_flight = 4;
    for (int32_t b = 0; b < 3; ++b) pw_world_add(world, 8, b == 1);
    pw_world_add(world, 5, 0);
    run_and_check(world); /* exact bits, and ranks with different programs would hang */
    for (int32_t r = 0; r < 4; ++r) {
      const sluice_pipeline_stats_t* stats = world->ranks[r].stats;
      assert_string_equal(stats[0].policy, "1f1b_hint");
      assert_string_equal(stats[1].policy, "forward_only");
      assert_string_equal(stats[2].policy, world->ranks[0].stats[2].policy);
      assert_string_equal(stats[3].policy, world->ranks[0].stats[3].policy);
      assert_in_range(stats[2].in_flight, 1, 4);
    }
    pw_world_free(world);
  }
}

TEST(InFlight_UnderABudget_StaysInside) {
  pw_world_t* world = pw_world_new("local", 4);
  const uint64_t bytes[] = {1000};
  world->config.activation_bytes = bytes;
  world->config.memory_budget = 2500;
  for (int32_t b = 0; b < 3; ++b) pw_world_add(world, 8, 0);
  run_and_check(world);
  for (int32_t r = 0; r < 4; ++r) {
    for (int32_t b = 0; b < 3; ++b) {
      assert_true(world->ranks[r].stats[b].in_flight <= 2);
      assert_true(world->ranks[r].stats[b].planned_bytes <= 2500);
      assert_true(world->ranks[r].stats[b].peak_bytes <= 2500);
    }
  }
  pw_world_free(world);
}

/* ---- replicas ---- */

static void try_column(const char* transport, const char* policy, int32_t p, int32_t v, int32_t replicas) {
  static const int32_t experts[] = {1, 1};
  pw_world_t* world = pw_world_new(transport, p);
  world->num_replicas = replicas;
  world->config.policy = policy;
  world->config.num_virtual = v;
  world->config.has_experts = experts;
  world->has_column = 1;
  world->reduces = ALL_RANKS;
  world->max_delay_us = 300;
  for (int32_t b = 0; b < 3; ++b) pw_world_add(world, 5, b == 1);
  run_and_finish(world);
}

/* Weight gradients of two virtual stages end in any order, but replicas reduce the stages in one order. */
TEST(Replicas_WithoutExperts_ReduceInOneOrder) {
  pw_world_t* world = pw_world_new("tcp", 2);
  world->num_replicas = 2;
  world->config.policy = "backward_first";
  world->config.num_virtual = 2;
  world->config.separate_wgrad = 1;
  world->has_column = 1;
  world->meets_in_reduce_alone = 1;
  world->reduces = ALL_RANKS;
  world->max_delay_us = 500;
  for (int32_t b = 0; b < 6; ++b) pw_world_add(world, 5, 0);
  run_and_check(world);
  for (int32_t r = 0; r < 4; ++r) assert_int_equal(world->ranks[r].calls[PW_REDUCE], 2 * 6);
  pw_world_free(world);
}

TEST(Replicas_StagesWithExperts_MeetInTheSameOps) {
  try_column("local", "message_driven", 2, 1, 2);
  try_column("local", "backward_first", 2, 2, 2);
  try_column("local", "backward_first", 4, 1, 2);
  try_column("local", "1f1b", 4, 1, 2);
  try_column("tcp", "message_driven", 2, 2, 2);
  try_column("tcp", "backward_first", 2, 1, 3);
}

static void place_by_replica(pw_rank_t* rank, sluice_pipeline_config_t* config) {
  config->stage = rank->stage = rank->rank / rank->world->num_replicas;
  config->replica = rank->rank % rank->world->num_replicas;
}

TEST(Replicas_NumberedByTheHost_FindTheirPlaces) {
  pw_world_t* world = pw_world_new("local", 3);
  world->num_replicas = 2;
  world->bend_config = place_by_replica;
  pw_world_add(world, 4, 0);
  run_and_finish(world);
}
