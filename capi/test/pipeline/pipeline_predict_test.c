// SPDX-License-Identifier: Apache-2.0
/* Predictions for a pipeline: published bubbles, chosen limits, and bytes compared with measured batches. */
#include "capi/test/pipeline/pipeline_world.h"

#include <math.h>

#include "backend/base/test/refused.h"

#define STAGES 8
#define MOST   16

typedef struct asked_s {
  double forward[MOST], backward[MOST], weight[MOST], message[MOST];
  uint64_t bytes[MOST], held[MOST], budget[MOST];
  sluice_pipeline_workload_t work;
  sluice_pipeline_prediction_t got;
  sluice_stage_prediction_t stages[MOST];
} asked_t;

/* F = B = W = 1, messages without cost, and one byte for each micro-batch in flight and for each held. */
static void ask_about(asked_t* asked, const char* policy, int32_t p, int32_t v, int32_t m) {
  memset(asked, 0, sizeof *asked);
  for (int32_t c = 0; c < MOST; ++c) {
    asked->forward[c] = asked->backward[c] = asked->weight[c] = 1;
    asked->bytes[c] = asked->held[c] = 1;
  }
  sluice_pipeline_workload_init(&asked->work, sizeof asked->work);
  asked->work.policy = policy;
  asked->work.num_stages = p;
  asked->work.num_virtual = v;
  asked->work.num_micro_batches = m;
  asked->work.forward_seconds = asked->forward;
  asked->work.backward_seconds = asked->backward;
  asked->work.weight_seconds = asked->weight;
  asked->work.message_seconds = asked->message;
  asked->work.activation_bytes = asked->bytes;
  asked->work.held_bytes = asked->held;
  asked->got.struct_size = sizeof asked->got;
}

static sluice_status_t predict(asked_t* asked) {
  return sluice_pipeline_predict(&asked->work, &asked->got, asked->stages);
}

TEST(Predict_PublishedPipelines_HaveTheirBubbles) {
  static const struct {
    const char* policy;
    int32_t v, split, limit;
    double bubble;
  } known[] = {{"1f1b", 1, -1, 0, 0.304},
               {"gpipe", 1, -1, 0, 0.304},
               {"zero_bubble", 1, -1, 0, 0.127},
               {"looped", 2, -1, 0, 0.179},
               {"v", 2, -1, 0, 0.086},
               {"message_driven", 1, 0, 8, 0.360},
               {"backward_first", 1, 0, 8, 0.304},
               {"backward_first", 1, 1, 8, 0.127}};
  for (size_t i = 0; i < sizeof known / sizeof known[0]; ++i) {
    asked_t asked;
    ask_about(&asked, known[i].policy, STAGES, known[i].v, 16);
    asked.work.separate_wgrad = known[i].split;
    asked.work.in_flight = known[i].limit;
    assert_int_equal(predict(&asked), SLUICE_OK);
    if (fabs(asked.got.bubble - known[i].bubble) > 0.0006) {
      fail_msg("%s: the bubble is %.4f, not %.4f", known[i].policy, asked.got.bubble, known[i].bubble);
    }
    double busy = 0;
    for (int32_t s = 0; s < STAGES; ++s) {
      busy += asked.stages[s].busy_seconds;
      assert_true(asked.stages[s].peak_bytes <= asked.stages[s].planned_bytes);
    }
    assert_true(fabs(1 - busy / (STAGES * asked.got.seconds) - asked.got.bubble) < 1e-12);
  }
}

static double seconds_of(const char* policy, int32_t p, double message, int32_t limit) {
  asked_t asked;
  ask_about(&asked, policy, p, 1, 16);
  for (int32_t c = 0; c < p; ++c) {
    asked.forward[c] = 1.0 / 3, asked.backward[c] = 2.0 / 3, asked.weight[c] = 0;
    asked.message[c] = message;
  }
  asked.work.in_flight = limit;
  asked.work.rendezvous = 1;
  assert_int_equal(predict(&asked), SLUICE_OK);
  return asked.got.seconds;
}

TEST(Predict_SlowLinks_AskForMoreInFlight) {
  assert_true(seconds_of("message_driven", 4, 0.25, 8) < 0.8 * seconds_of("message_driven", 4, 0.25, 4));
  asked_t fast, slow;
  ask_about(&fast, "backward_first", 4, 1, 16);
  ask_about(&slow, "backward_first", 4, 1, 16);
  for (int32_t c = 0; c < 4; ++c) slow.message[c] = 1.5;
  assert_int_equal(predict(&fast), SLUICE_OK);
  assert_int_equal(predict(&slow), SLUICE_OK);
  assert_int_equal(fast.got.is_chosen, 1);
  assert_true(slow.got.in_flight > fast.got.in_flight);
  assert_true(slow.got.seconds > fast.got.seconds);
}

TEST(Predict_UnderABudget_StaysInside) {
  asked_t asked;
  ask_about(&asked, "backward_first", 4, 1, 16);
  for (int32_t s = 0; s < 4; ++s) asked.budget[s] = 3;
  asked.work.memory_budget = asked.budget;
  asked.work.receives_ahead = 0;
  assert_int_equal(predict(&asked), SLUICE_OK);
  for (int32_t s = 0; s < 4; ++s) assert_true(asked.stages[s].planned_bytes <= 3 && asked.stages[s].peak_bytes <= 3);
  assert_true(asked.got.in_flight >= 1 && asked.got.in_flight <= 3);
  for (int32_t c = 0; c < 4; ++c) asked.bytes[c] = 4;
  assert_int_equal(predict(&asked), SLUICE_E_OVER_BUDGET);
}

/* m = 16, F + B = 1, messages of 1/4, rendezvous: DeepSpeed's own order has the numbers of docs/pipeline.md. */
TEST(Predict_DeepSpeedsOrder_IsTheBaseline) {
  assert_true(fabs(seconds_of("deepspeed", 2, 0.25, 0) / seconds_of("message_driven", 2, 0.25, 4) - 1.43) < 0.005);
  assert_true(fabs(seconds_of("deepspeed", 4, 0.25, 0) / seconds_of("message_driven", 4, 0.25, 8) - 1.71) < 0.005);
}

TEST(Predict_SharedCards_CostMiddleStages) {
  asked_t asked;
  double seconds[2];
  for (int32_t shared = 0; shared < 2; ++shared) {
    ask_about(&asked, "1f1b", 4, 1, 16);
    for (int32_t c = 0; c < 4; ++c) asked.message[c] = 3;
    asked.work.shares_cards = shared;
    assert_int_equal(predict(&asked), SLUICE_OK);
    seconds[shared] = asked.got.seconds;
  }
  assert_true(seconds[1] > 1.05 * seconds[0] && seconds[1] < 2 * seconds[0]);
}

static double twice_on_one(void* user, const char* op, int32_t virtual_stage, int32_t micro_batch, double begin_seconds,
                           double seconds) {
  int32_t* calls = user;
  ++*calls;
  if (begin_seconds < 0) return -1;
  return virtual_stage == 1 && micro_batch == 2 && strcmp(op, "backward") == 0 ? seconds + 5 : seconds;
}

static double is_negative(void* user, const char* op, int32_t virtual_stage, int32_t micro_batch, double begin_seconds,
                          double seconds) {
  (void)user, (void)virtual_stage, (void)begin_seconds;
  return micro_batch == 3 && strcmp(op, "send_gradient") == 0 ? -seconds - 1 : seconds;
}

TEST(Predict_SecondsOfEachOp_TakeTheirPlace) {
  asked_t asked;
  int32_t calls = 0;
  ask_about(&asked, "gpipe", 2, 1, 4);
  assert_int_equal(predict(&asked), SLUICE_OK);
  const double usual = asked.got.seconds;
  asked.work.op_seconds = twice_on_one;
  asked.work.user = &calls;
  assert_int_equal(predict(&asked), SLUICE_OK);
  assert_true(fabs(asked.got.seconds - usual - 5) < 1e-9);
  assert_int_equal(calls, 2 * (2 * 4) + 2 * 4); /* forwards and backwards of two stages, messages in both directions */
  asked.work.op_seconds = is_negative;
  REFUSED(predict(&asked), BAD, "the time of send_gradient of micro-batch 3 in virtual stage 1 on stage 1 is");
}

TEST(Predict_WhatDoesNotFit_IsRefusedByName) {
  asked_t asked;
#define REFUSES(change, text)                     \
  do {                                            \
    ask_about(&asked, "backward_first", 4, 1, 8); \
    change;                                       \
    REFUSED(predict(&asked), BAD, text);          \
  } while (0)
  REFUSES(asked.work.policy = "fastest", "give one of message_driven");
  REFUSES(asked.work.policy = "zero_bubble"; asked.work.num_virtual = 2, "zero_bubble needs");
  REFUSES(asked.work.num_stages = 65, "num_stages is 65");
  REFUSES(asked.work.num_virtual = 33, "num_virtual is 33");
  REFUSES(asked.work.num_micro_batches = 0, "num_micro_batches");
  REFUSES(asked.work.forward_seconds = NULL, "forward_seconds is NULL");
  REFUSES(asked.work.in_flight = -1, "in_flight");
  REFUSES(asked.work.reserved = 1, "reserved is 1");
  REFUSES(asked.backward[2] = -1, "a time of virtual stage 2 is -1");
#undef REFUSES
  assert_int_equal(sluice_pipeline_predict(&asked.work, NULL, NULL), SLUICE_E_INVALID_ARGUMENT);
  ask_about(&asked, NULL, 1, 1, 1);
  assert_int_equal(sluice_pipeline_predict(&asked.work, &asked.got, NULL), SLUICE_OK);
  assert_true(asked.got.seconds == 3 && asked.got.bubble == 0);
}

TEST(PolicyNames_AreThoseThatPredictTakes) {
  int32_t count = 0;
  for (const char* name; (name = sluice_pipeline_policy_name(count)) != NULL; ++count) {
    asked_t asked;
    ask_about(&asked, name, 2, strcmp(name, "looped") == 0 || strcmp(name, "v") == 0 ? 2 : 1, 4);
    assert_int_equal(predict(&asked), SLUICE_OK);
  }
  assert_int_equal(count, 9);
  assert_null(sluice_pipeline_policy_name(-1));
}

/* Predicted bytes equal the bytes measured in a batch; they are an upper bound if the order is not fixed. */
TEST(Bytes_OfABatch_AreThosePredicted) {
  static const char* const policies[] = {"1f1b", "zero_bubble", "gpipe", "backward_first", "message_driven"};
  for (size_t i = 0; i < sizeof policies / sizeof policies[0]; ++i) {
    const int32_t p = 4, m = 8, is_rule = i > 2;
    const uint64_t bytes[] = {1000}, held[] = {300};
    pw_world_t* world = pw_world_new("tcp", p);
    world->config.policy = policies[i];
    world->config.in_flight = is_rule ? 3 : 0;
    world->config.separate_wgrad = is_rule ? 1 : -1;
    world->config.activation_bytes = bytes;
    world->config.held_bytes = held;
    world->max_delay_us = 500;
    pw_world_add(world, m, 0);
    pw_world_run(world);
    assert_nothing_wrong(world);
    asked_t asked;
    ask_about(&asked, policies[i], p, 1, m);
    for (int32_t c = 0; c < p; ++c) asked.bytes[c] = 1000, asked.held[c] = 300;
    asked.work.in_flight = world->config.in_flight;
    asked.work.separate_wgrad = world->config.separate_wgrad;
    assert_int_equal(predict(&asked), SLUICE_OK);
    for (int32_t s = 0; s < p; ++s) {
      const sluice_pipeline_stats_t* found = &world->ranks[s].stats[0];
      const sluice_stage_prediction_t* told = &asked.stages[s];
      assert_int_equal(found->planned_bytes, told->planned_bytes);
      assert_int_equal(found->in_flight, told->in_flight);
      assert_true(found->most_in_flight <= told->in_flight);
      assert_true(found->peak_bytes <= told->planned_bytes);
      if (!is_rule) {
        assert_int_equal(found->peak_bytes, told->peak_bytes);
        assert_int_equal(found->most_held, told->most_held);
      }
    }
    pw_world_free(world);
  }
}

/* In 1F1B, stage s has p - s in flight. A policy that runs any ready op has no more if L limits it. */
TEST(Memory_AtEqualInFlight_IsAtMostThatOf1F1B) {
  const int32_t p = 4;
  asked_t stock;
  ask_about(&stock, "1f1b", p, 1, 16);
  assert_int_equal(predict(&stock), SLUICE_OK);
  asked_t hint;
  ask_about(&hint, "1f1b_hint", p, 1, 16);
  hint.work.in_flight = p;
  assert_int_equal(predict(&hint), SLUICE_OK);
  for (int32_t s = 0; s < p; ++s) {
    assert_int_equal(stock.stages[s].peak_bytes, p - s);
    assert_true(hint.stages[s].most_in_flight <= p);
    assert_true(hint.stages[s].peak_bytes <= stock.stages[0].peak_bytes);
  }
}

TEST(Predict_AnOpenPolicy_TakesTheFastest) {
  asked_t asked;
  ask_about(&asked, "adaptive", 4, 1, 16);
  asked.work.separate_wgrad = 0;
  asked.work.in_flight = 4;
  for (int32_t s = 0; s < 4; ++s) {
    asked.forward[s] = s == 1 ? 0.5 : 1.0 / 3;
    asked.backward[s] = 2 * asked.forward[s];
    asked.message[s] = 0.25;
  }
  assert_int_equal(predict(&asked), SLUICE_OK);
  assert_string_equal(asked.got.policy, "1f1b"); /* one stage is slower, and L is the number of stages */
  const double seconds = asked.got.seconds;
  assert_int_equal(asked.got.is_chosen, 0);
  asked.work.in_flight = 0;
  assert_int_equal(predict(&asked), SLUICE_OK);
  assert_string_not_equal(asked.got.policy, "1f1b");
  assert_int_equal(asked.got.is_chosen, 1);
  assert_true(asked.got.seconds < seconds);
}
