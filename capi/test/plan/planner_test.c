// SPDX-License-Identifier: Apache-2.0
/* The planner through the C ABI: predictions, choices, and errors. */
#include <math.h>

#include "capi/test/plan/planner_rig.h"
#include "capi/test/rig/refusals.h"
#include "third_party/bazel/test.h"

TEST(Predict_Timeline_EndsWhenThePassDoes) {
  const sluice_planner_workload_t w = new_workload();
  const sluice_planner_choice_t choice = {4, SLUICE_RESTORE_OFFLOAD, SLUICE_RESTORE_RECOMPUTE, SLUICE_WGRAD_DEFERRED};
  static sluice_planner_entry_t entries[512];
  sluice_planner_prediction_t p = {.struct_size = sizeof p};
  WORKS(sluice_planner_predict(planner, &w, &choice, &p, entries, 512));
  assert_true(p.num_entries > 40 && p.num_entries < 512);
  double last[2] = {0, 0}, busy[2][4] = {{0}};
  for (int32_t i = 0; i < p.num_entries; ++i) {
    const sluice_planner_entry_t* e = &entries[i];
    assert_true(e->begin_seconds <= e->end_seconds && e->lane >= 0 && e->lane < 4 && e->op != NULL);
    if (e->end_seconds > last[e->direction]) last[e->direction] = e->end_seconds;
    busy[e->direction][e->lane] += e->end_seconds - e->begin_seconds;
  }
  assert_true(fabs(last[0] + p.overhead_seconds - p.forward_seconds) < 1e-9);
  assert_true(fabs(last[1] + p.overhead_seconds - p.backward_seconds) < 1e-9);
  for (int32_t lane = 0; lane < 4; ++lane) {
    assert_true(fabs(busy[0][lane] - p.forward_busy[lane]) < 1e-9);
    assert_true(fabs(busy[1][lane] - p.backward_busy[lane]) < 1e-9);
  }
  assert_true(p.backward_busy[SLUICE_LANE_COPY_IN] > 0 && p.forward_busy[SLUICE_LANE_COPY_OUT] > 0);
  assert_true(p.mpmoe_forward_seconds > 0 && p.mpipemoe_backward_seconds > 0 && p.fits == 1);
  /* A buffer that is too small is filled, but not exceeded. */
  entries[5].op = NULL;
  WORKS(sluice_planner_predict(planner, &w, &choice, &p, entries, 5));
  assert_true(entries[4].op != NULL && entries[5].op == NULL && p.num_entries > 40);
}

/* Bytes equal those of a plan for a real layer of one rank. */
static void bytes_are_those_of_a_real_plan(int32_t lora_rank, int16_t weight_format) {
  sluice_planner_workload_t w = new_workload();
  w.world_size = 1, w.memory_budget = 1u << 30, w.max_outstanding = 2;
  rig_t rig;
  const sluice_context_config_t context = own_rig_context(0, 0);
  DEFAULTS(sluice_moe_config, layer);
  layer.model_width = w.model_width, layer.hidden_width = w.hidden_width;
  layer.num_experts = w.num_experts, layer.top_k = w.top_k;
  layer.lora_rank = w.lora_rank = lora_rank, layer.weight_format = w.weight_format = weight_format;
  own_rig_open(&rig, &context, &layer);
  for (int32_t n = 1; n <= 8; n *= 2) {
    for (int32_t di = 0; di < 3; ++di) {
      DEFAULTS(sluice_plan_config, config);
      config.max_tokens = w.num_tokens, config.memory_budget = w.memory_budget, config.max_outstanding = 2;
      config.num_chunks = n, config.restore_input = di, config.restore_pre_activation = SLUICE_RESTORE_RECOMPUTE;
      config.wgrad_mode = SLUICE_WGRAD_PER_CHUNK;
      sluice_plan_info_t info;
      sluice_plan_destroy(own_rig_plan(&rig, &config, &info));
      sluice_planner_prediction_t p =
          predict(planner, &w, (sluice_planner_choice_t){n, di, SLUICE_RESTORE_RECOMPUTE, SLUICE_WGRAD_PER_CHUNK});
      assert_int_equal(p.slot_bytes, info.slot_bytes);
      assert_int_equal(p.routing_bytes, info.routing_bytes);
      assert_int_equal(p.schedule_bytes, info.schedule_bytes);
      assert_int_equal(p.step_bytes, info.step_bytes);
      assert_int_equal(p.chunk_rows, info.chunk_rows);
      uint64_t sum = p.base_bytes + p.slot_bytes + p.routing_bytes + p.schedule_bytes + p.header_bytes + p.gemm_bytes +
                     2 * p.step_bytes;
      assert_int_equal(p.total_bytes, sum);
    }
  }
  own_rig_close(&rig);
}

TEST(Predict_Bytes_AreThoseOfARealPlan) {
  for (int32_t rank = 0; rank <= 16; rank += 16) {
    for (int16_t format = SLUICE_WEIGHTS_PLAIN; format <= SLUICE_WEIGHTS_INT4; ++format) {
      bytes_are_those_of_a_real_plan(rank, format);
    }
  }
}

/* Frozen weights have no weight gradients; adapters have small ones. */
TEST(Predict_FrozenWeights_TakeLessBackward) {
  const sluice_planner_choice_t choice = {2, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP, SLUICE_WGRAD_PER_CHUNK};
  sluice_planner_workload_t w = new_workload();
  const sluice_planner_prediction_t trained = predict(planner, &w, choice);
  w.weight_format = SLUICE_WEIGHTS_MXFP4;
  const sluice_planner_prediction_t frozen = predict(planner, &w, choice);
  w.lora_rank = 8;
  const sluice_planner_prediction_t adapted = predict(planner, &w, choice);
  assert_true(frozen.backward_seconds < adapted.backward_seconds);
  assert_true(adapted.backward_seconds < trained.backward_seconds);
  assert_true(frozen.forward_seconds == trained.forward_seconds && frozen.forward_seconds < adapted.forward_seconds);
  assert_true(adapted.slot_bytes > frozen.slot_bytes); /* T_LOW */
}

TEST(Choose_NoBudget_TakesTheFastestAndSaysByHowMuchOthersAreSlower) {
  const sluice_planner_workload_t w = new_workload();
  int32_t count = 0, chosen = choose(planner, &w, NULL, &count), num_chosen = 0;
  assert_int_equal(count, 8 * 9 * 2); /* n x restore policies x weight-gradient modes */
  double best = candidates[chosen].forward_seconds + candidates[chosen].backward_seconds;
  for (int32_t i = 0; i < count; ++i) {
    const sluice_planner_candidate_t* c = &candidates[i];
    sluice_planner_prediction_t p = predict(planner, &w, c->choice);
    assert_true(p.forward_seconds == c->forward_seconds && p.backward_seconds == c->backward_seconds);
    assert_true(p.total_bytes == c->total_bytes);
    double time = c->forward_seconds + c->backward_seconds;
    assert_true(time >= best && fabs(c->slower_by - (time / best - 1)) < 1e-12);
    num_chosen += c->verdict == SLUICE_PLANNER_CHOSEN;
    assert_true(c->verdict != SLUICE_PLANNER_SLOWER || time > best);
    assert_true(c->verdict != SLUICE_PLANNER_OVER_BUDGET);
  }
  assert_int_equal(num_chosen, 1);
  assert_true(candidates[chosen].choice.num_chunks > 1); /* a slow link and long computation: overlap pays */
}

/* Four distinct experts out of eight are on 2 (1 - 1/70) of two ranks: a token sends about one row instead of two. */
TEST(Predict_Deduplicated_SendsARowForEachRankOfAToken) {
  sluice_planner_workload_t w = new_workload();
  const sluice_planner_choice_t choice = {4, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP, SLUICE_WGRAD_DEFERRED};
  w.world_size = 2, w.top_k = 4;
  sluice_planner_prediction_t without = predict(planner, &w, choice);
  w.deduplicate = 1;
  sluice_planner_prediction_t with = predict(planner, &w, choice);
  assert_true(fabs(without.sent_rows - 2048.0 * 4 / 2) < 1e-6);
  assert_true(fabs(with.sent_rows - 2048.0 * (1 - 1.0 / 70)) < 1e-6);
  assert_true(with.forward_seconds < without.forward_seconds && with.backward_seconds < without.backward_seconds);
  assert_true(with.forward_busy[SLUICE_LANE_COMM] < without.forward_busy[SLUICE_LANE_COMM]);
  w.world_size = 1; /* nothing is sent */
  with = predict(planner, &w, choice);
  w.deduplicate = 0;
  assert_true(with.forward_seconds == predict(planner, &w, choice).forward_seconds && with.sent_rows == 0);
  /* A caller from before this member existed gets no deduplication. */
  w = new_workload();
  w.world_size = 2, w.top_k = 4, w.deduplicate = 1, w.struct_size = offsetof(sluice_planner_workload_t, deduplicate);
  assert_true(predict(planner, &w, choice).sent_rows == without.sent_rows);
}

/* On a calibrated machine chunks are cut by rows, with fewer experts in each, unless the config says tokens. ReLU has
 * its own time if the machine has one; an unset activation is GELU. */
TEST(Predict_ChunkingAndActivation_ReachTheCosts) {
  char text[1024];
  snprintf(text, sizeof text,
           "{\"provenance\": \"calibrated\", \"gemm_call_seconds\": 1e-4, \"relu_seconds\": 1e-11, "
           "\"relu_grad_seconds\": 2e-11, %s",
           planner_machine + 1);
  sluice_planner_t* own = NULL;
  WORKS(sluice_planner_create(text, strlen(text), &own));
  const sluice_planner_choice_t choice = {2, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_KEEP, SLUICE_WGRAD_DEFERRED};
  sluice_planner_workload_t w = new_workload();
  const double unset = predict(own, &w, choice).forward_busy[SLUICE_LANE_COMPUTE];
  w.activation = SLUICE_ACTIVATION_GELU;
  assert_true(predict(own, &w, choice).forward_busy[SLUICE_LANE_COMPUTE] == unset);
  w.activation = SLUICE_ACTIVATION_RELU;
  assert_true(predict(own, &w, choice).forward_busy[SLUICE_LANE_COMPUTE] < unset);
  w = new_workload(), w.chunking = SLUICE_CHUNKING_TOKENS;
  /* For two experts, two GEMMs each run in both chunks instead of in one. */
  assert_true(predict(own, &w, choice).forward_busy[SLUICE_LANE_COMPUTE] - unset > 3.9e-4);
  sluice_planner_destroy(own);
}

/* Deduplication adds tables to the routes, and slots hold token copies instead of rows. */
TEST(Predict_DeduplicatedUnderABudget_CountsItsTables) {
  sluice_planner_workload_t w = new_workload();
  const sluice_planner_choice_t choice = {4, SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_RECOMPUTE,
                                          SLUICE_WGRAD_PER_CHUNK};
  w.world_size = 2, w.top_k = 4, w.memory_budget = (uint64_t)1 << 40;
  sluice_planner_prediction_t without = predict(planner, &w, choice);
  w.deduplicate = 1;
  sluice_planner_prediction_t with = predict(planner, &w, choice);
  assert_true(with.fits && with.routing_bytes > without.routing_bytes && with.step_bytes > without.step_bytes);
  assert_true(with.slot_bytes < without.slot_bytes && with.total_bytes < without.total_bytes);
  assert_int_equal(with.total_bytes, with.base_bytes + with.slot_bytes + with.routing_bytes + with.schedule_bytes +
                                         with.header_bytes + with.gemm_bytes + with.step_bytes);
  w.memory_budget = with.total_bytes - 1;
  assert_false(predict(planner, &w, choice).fits);
}

/* One rank receives all rows. With several ranks, each kept row that does not arrive saves its bytes. */
TEST(Predict_UsualBytes_AreThoseOfTheRowsThatCome) {
  const sluice_planner_choice_t keep = {1, SLUICE_RESTORE_KEEP, SLUICE_RESTORE_RECOMPUTE, SLUICE_WGRAD_PER_CHUNK};
  const sluice_planner_choice_t again = {1, SLUICE_RESTORE_REDISPATCH, SLUICE_RESTORE_RECOMPUTE,
                                         SLUICE_WGRAD_PER_CHUNK};
  sluice_planner_workload_t w = new_workload();
  w.world_size = 1, w.max_outstanding = 3;
  sluice_planner_prediction_t p = predict(planner, &w, keep);
  assert_int_equal(p.usual_bytes, p.total_bytes);
  w.world_size = 4, w.num_experts = 8, w.top_k = 2;
  uint64_t before = 0;
  for (double skew = 1; skew <= 1.5; skew += 0.25) {
    w.skew = skew;
    p = predict(planner, &w, keep);
    const uint64_t without = predict(planner, &w, again).usual_bytes;
    const double rows = (double)(w.num_tokens * w.top_k) * skew;
    /* T_DI of three forwards; the one that is sent again needs a slot */
    const double kept = 2 * rows * (double)w.model_width * 4;
    assert_true(p.usual_bytes > before && p.usual_bytes < p.total_bytes);
    assert_true(fabs((double)(p.usual_bytes - without) - kept) < 0.02 * kept);
    before = p.usual_bytes;
  }
}

/* Candidates that offload more rows than the host budget holds are refused; the others do not change. */
TEST(Choose_HostBudget_BoundsOffloadedRows) {
  sluice_planner_workload_t w = new_workload();
  int32_t count = 0;
  w.host_memory_budget = 1;
  choose(planner, &w, NULL, &count);
  for (int32_t i = 0; i < count; ++i) {
    const sluice_planner_candidate_t* c = &candidates[i];
    int offloads =
        c->choice.restore_input == SLUICE_RESTORE_OFFLOAD || c->choice.restore_pre_activation == SLUICE_RESTORE_OFFLOAD;
    assert_int_equal(c->verdict == SLUICE_PLANNER_OVER_HOST_BUDGET, offloads);
    assert_int_equal(c->bytes_over > 0, offloads);
    sluice_planner_prediction_t p = predict(planner, &w, c->choice);
    assert_int_equal(p.fits, !offloads);
  }
  assert_string_equal(sluice_planner_verdict_name(SLUICE_PLANNER_OVER_HOST_BUDGET), "over host budget");
  /* A caller from before this member existed has no host budget. */
  w.struct_size = offsetof(sluice_planner_workload_t, host_memory_budget);
  choose(planner, &w, NULL, &count);
  for (int32_t i = 0; i < count; ++i) assert_int_equal(candidates[i].bytes_over, 0);
}

TEST(Choose_TightBudget_RefusesWithTheBytesThatAreTooMany) {
  sluice_planner_workload_t w = new_workload();
  int32_t count = 0, chosen = 0;
  w.memory_budget = (uint64_t)1 << 40;
  choose(planner, &w, NULL, &count);
  uint64_t least = UINT64_MAX, most = 0;
  for (int32_t i = 0; i < count; ++i) {
    if (candidates[i].total_bytes < least) least = candidates[i].total_bytes;
    if (candidates[i].total_bytes > most) most = candidates[i].total_bytes;
  }
  assert_true(least < most);
  w.memory_budget = least;
  choose(planner, &w, NULL, &count);
  for (int32_t i = 0; i < count; ++i) {
    int over = candidates[i].total_bytes > w.memory_budget;
    assert_int_equal(candidates[i].verdict == SLUICE_PLANNER_OVER_BUDGET, over);
    assert_int_equal(candidates[i].bytes_over, over ? candidates[i].total_bytes - w.memory_budget : 0);
  }
  w.memory_budget = 1 << 20;
  assert_int_equal(sluice_planner_choose(planner, &w, NULL, candidates, 512, &count, &chosen), SLUICE_E_OVER_BUDGET);
  assert_true(chosen == -1 && count > 100 && candidates[0].bytes_over > 0);
  assert_non_null(strstr(last_message(), "no plan fits the memory budget of 1048576 bytes (1.0 MiB): the leanest"));
  assert_non_null(strstr(last_message(), " MiB; 8.0 MiB of it for GEMMs, whatever the layer's size), "));
  sluice_planner_prediction_t p = predict(planner, &w, (sluice_planner_choice_t){1, 0, 0, 0});
  assert_int_equal(p.fits, 0);
}

TEST(Choose_FixedParts_LeavesTheRestOpen) {
  const sluice_planner_workload_t w = new_workload();
  const sluice_planner_choice_t wanted = {6, SLUICE_RESTORE_ADAPTIVE, SLUICE_RESTORE_RECOMPUTE, SLUICE_WGRAD_PER_CHUNK};
  int32_t count = 0;
  choose(planner, &w, &wanted, &count);
  assert_int_equal(count, 3);
  for (int32_t i = 0; i < count; ++i) {
    assert_true(candidates[i].choice.num_chunks == 6 && candidates[i].choice.restore_input == i);
  }
}

TEST(Predict_SkewUnderABudget_RunsMoreChunks) {
  sluice_planner_workload_t w = new_workload();
  w.memory_budget = (uint64_t)1 << 32;
  const sluice_planner_choice_t choice = {2, 0, 0, 0};
  assert_int_equal(predict(planner, &w, choice).run_chunks, 2);
  w.skew = 3;
  assert_true(predict(planner, &w, choice).run_chunks > 2);
  w.memory_budget = 0;
  assert_int_equal(predict(planner, &w, choice).run_chunks, 2);
}

TEST(Machine_WrittenAndReadAgain_PredictsTheSame) {
  sluice_planner_t* again = NULL;
  uint64_t bytes = 0;
  WORKS(sluice_planner_write_machine(planner, NULL, &bytes));
  char* text = malloc(bytes);
  WORKS(sluice_planner_write_machine(planner, text, &bytes));
  assert_int_equal(strlen(text) + 1, bytes);
  WORKS(sluice_planner_create(text, bytes - 1, &again));
  uint64_t small = bytes - 1;
  assert_int_equal(sluice_planner_write_machine(planner, text, &small), SLUICE_E_INVALID_ARGUMENT);
  const sluice_planner_workload_t w = new_workload();
  const sluice_planner_choice_t choice = {3, 1, 1, 1};
  double a = predict(planner, &w, choice).backward_seconds, b = predict(again, &w, choice).backward_seconds;
  assert_true(fabs(a - b) < 1e-8 * a);
  free(text);
  sluice_planner_destroy(again);
}

static void refuse(sluice_planner_workload_t w, sluice_planner_choice_t c, sluice_status_t want, const char* says) {
  sluice_planner_prediction_t p = {.struct_size = sizeof p};
  REFUSED(sluice_planner_predict(planner, &w, &c, &p, NULL, 0), want, says);
}

TEST(BadInput_EveryField_IsRefusedByName) {
  const sluice_planner_choice_t ok = {1, 0, 0, 0};
  sluice_planner_workload_t w;
#define REFUSE(change, says) \
  w = new_workload();        \
  change;                    \
  refuse(w, ok, SLUICE_E_INVALID_ARGUMENT, says)
  REFUSE(w.model_width = 0, "model_width is 0");
  REFUSE(w.hidden_width = -1, "hidden_width is -1");
  REFUSE(w.num_tokens = 0, "num_tokens is 0");
  REFUSE(w.num_experts = 6, "num_experts is 6 and world_size 4");
  REFUSE(w.top_k = 9, "top_k is 9");
  REFUSE(w.world_size = 0, "world_size is 0");
  REFUSE(w.skew = 0.5, "skew is 0.5");
  REFUSE(w.skew = NAN, "skew is");
  REFUSE(w.dtype = 7, "dtype is unknown (7)");
  REFUSE(w.dtype = SLUICE_DTYPE_BF16, "gemm.bf16 is missing");
  REFUSE(w.gated = 3, "gated is 3");
  REFUSE(w.callback_experts = 2, "callback_experts is 2");
  REFUSE(w.max_outstanding = 0, "max_outstanding is 0");
  REFUSE(w.reserved = 1, "reserved is 1");
  REFUSE(w.chunking = 2, "chunking is 2");
  REFUSE(w.deduplicate = 3, "deduplicate is 3");
  REFUSE(w.activation = -1, "activation is -1");
  REFUSE(w.activation = 7, "activation is 7");
  REFUSE(w.grouped = 2, "grouped is 2");
  REFUSE(w.lora_rank = -1, "lora_rank is -1");
  REFUSE(w.lora_rank = 65536, "lora_rank is 65536");
  REFUSE((w.lora_rank = 8, w.callback_experts = 1), "callback experts have weights and adapters of their own");
  REFUSE(w.weight_format = 9, "workload: weight_format is 9; known are plain (0)");
  REFUSE(w.weight_block = 32, "weight_block is 32, but weight_format is plain");
  REFUSE((w.weight_format = SLUICE_WEIGHTS_MXFP4, w.hidden_width = 48), "w2: a width of 48, but mxfp4");
  REFUSE((w.grouped = 1, w.memory_budget = 1 << 20), "grouped is 1 under a budget");
  w = new_workload();
  refuse(w, (sluice_planner_choice_t){0, 0, 0, 0}, SLUICE_E_INVALID_ARGUMENT, "num_chunks is 0");
  refuse(w, (sluice_planner_choice_t){257, 0, 0, 0}, SLUICE_E_INVALID_ARGUMENT, "num_chunks is 257");
  refuse(w, (sluice_planner_choice_t){1, -1, 0, 0}, SLUICE_E_INVALID_ARGUMENT, "restore_input is -1");
  refuse(w, (sluice_planner_choice_t){1, 0, 2, 0}, SLUICE_E_INVALID_ARGUMENT, "restore_pre_activation is 2");
  refuse(w, (sluice_planner_choice_t){1, 0, 0, 2}, SLUICE_E_INVALID_ARGUMENT, "wgrad_mode is 2");
  w.callback_experts = 1;
  refuse(w, (sluice_planner_choice_t){1, 0, 1, 0}, SLUICE_E_UNSUPPORTED, "callback experts");
  w = new_workload();
  w.struct_size = 8;
  refuse(w, ok, SLUICE_E_ABI, "sluice_planner_workload_t");
  sluice_planner_t* own = (sluice_planner_t*)&w;
  assert_int_equal(sluice_planner_create(NULL, 0, &own), SLUICE_E_INVALID_ARGUMENT);
  assert_null(own);
  assert_int_equal(sluice_planner_create("{", 1, &own), SLUICE_E_INVALID_ARGUMENT);
  sluice_planner_destroy(NULL);
}

/* Checks every pointer and buffer size of every call. */
TEST(BadCalls_EveryArgument_IsRefusedByName) {
  sluice_planner_t* other = NULL;
  const sluice_planner_workload_t w = new_workload();
  const sluice_planner_choice_t c = {1, 0, 0, 0};
  sluice_planner_prediction_t p = {.struct_size = sizeof p};
  sluice_planner_entry_t entry;
  int32_t count = 7, chosen = 7;
  uint64_t bytes = 0, length = strlen(planner_machine);
  char text[8];
  REFUSED(sluice_planner_create(planner_machine, length, NULL), BAD, "out_planner is NULL");
  REFUSED(sluice_planner_create(planner_machine, (1 << 24) + 1, &other), BAD, "has 16777217 bytes; at most 16 MiB");
  REFUSED(sluice_planner_create(planner_machine, 0, &other), BAD, "machine profile");
  REFUSED(sluice_planner_create("{\"sluice_machine\": 3}", 21, &other), BAD, "this library reads version 2");
  REFUSED(sluice_planner_create(planner_machine, length - 8, &other), BAD, "machine profile: line");
  assert_null(other);
  REFUSED(sluice_planner_write_machine(NULL, text, &bytes), BAD, "planner is NULL");
  REFUSED(sluice_planner_write_machine(planner, text, NULL), BAD, "inout_bytes is NULL");
  bytes = sizeof text;
  REFUSED(sluice_planner_write_machine(planner, text, &bytes), BAD, "room for 8 bytes, the machine has ");
  REFUSED(sluice_planner_calibrate(NULL, NULL, &other), BAD, "context is NULL");
  REFUSED(sluice_planner_calibrate(NULL, NULL, NULL), BAD, "out_planner is NULL");
  REFUSED(sluice_planner_predict(NULL, &w, &c, &p, NULL, 0), BAD, "planner is NULL");
  REFUSED(sluice_planner_predict(planner, NULL, &c, &p, NULL, 0), BAD, "workload is NULL");
  REFUSED(sluice_planner_predict(planner, &w, NULL, &p, NULL, 0), BAD, "choice is NULL");
  REFUSED(sluice_planner_predict(planner, &w, &c, NULL, NULL, 0), BAD, "out_prediction is NULL");
  REFUSED(sluice_planner_predict(planner, &w, &c, &p, &entry, -1), BAD, "capacity is -1");
  REFUSED(sluice_planner_predict(planner, &w, &c, &p, NULL, 3), BAD, "capacity is 3 and out_entries NULL");
  p.struct_size = 0;
  REFUSED(sluice_planner_predict(planner, &w, &c, &p, NULL, 0), SLUICE_E_ABI, "struct_size is 0");
  REFUSED(sluice_planner_choose(NULL, &w, NULL, NULL, 0, &count, &chosen), BAD, "planner is NULL");
  REFUSED(sluice_planner_choose(planner, &w, NULL, NULL, 0, NULL, &chosen), BAD, "out_count is NULL");
  REFUSED(sluice_planner_choose(planner, &w, NULL, NULL, 2, &count, &chosen), BAD, "capacity is 2 and out_candidates");
  REFUSED(sluice_planner_choose(planner, NULL, NULL, NULL, 0, &count, &chosen), BAD, "workload is NULL");
  assert_true(count == 0 && chosen == -1);
  WORKS(sluice_planner_choose(planner, &w, NULL, NULL, 0, &count, NULL)); /* asks for the number only */
  assert_int_equal(count, 8 * 9 * 2);
  const sluice_planner_choice_t open = {0, -2, -1, -1};
  REFUSED(sluice_planner_choose(planner, &w, &open, NULL, 0, &count, NULL), BAD, "restore_input is -2");
  assert_string_equal(sluice_planner_verdict_name(-1), "unknown");
  assert_string_equal(sluice_planner_verdict_name(99), "unknown");
}

/* The largest worlds are planned. Valid sizes with absurd products are refused before they overflow. */
TEST(Workload_AbsurdWorlds_ArePlannedOrRefusedByName) {
  const sluice_planner_choice_t ok = {1, 0, 0, 0};
  sluice_planner_workload_t w = new_workload();
  w.world_size = w.num_experts = 1 << 20, w.num_tokens = 4096;
  sluice_planner_prediction_t p = predict(planner, &w, ok);
  assert_true(isfinite(p.forward_seconds) && p.forward_seconds > 0 && p.total_bytes > p.slot_bytes);
  w = new_workload();
  w.num_tokens = 1; /* fewer tokens than chunks */
  p = predict(planner, &w, (sluice_planner_choice_t){256, 0, 0, 0});
  assert_true(isfinite(p.forward_seconds) && p.forward_seconds > 0);
  w = new_workload();
  w.memory_budget = 1;
  int32_t count = 0;
  REFUSED(sluice_planner_choose(planner, &w, NULL, NULL, 0, &count, NULL), SLUICE_E_OVER_BUDGET,
          "no plan fits the memory budget of 1 bytes");
  assert_int_equal(count, 8 * 9 * 2);
  w.memory_budget = 0, w.num_tokens = INT32_MAX, w.world_size = w.num_experts = 1 << 20, w.top_k = 1 << 20;
  refuse(w, ok, SLUICE_E_INVALID_ARGUMENT, "is one of them wrong?");
  w = new_workload();
  w.model_width = INT32_MAX, w.hidden_width = INT32_MAX / 2, w.num_tokens = 1;
  refuse(w, ok, SLUICE_E_INVALID_ARGUMENT, "parameters on a rank, more than plans count");
  w = new_workload();
  w.num_tokens = 1 << 26, w.max_outstanding = INT32_MAX;
  refuse(w, ok, SLUICE_E_INVALID_ARGUMENT, "max_outstanding is 2147483647 forwards");
}

int main(void) { return run_cases(planner_open, planner_close); }
