// SPDX-License-Identifier: Apache-2.0
/* The public calls of schedules. */
#include "sluice/schedule.h"

#include <math.h>
#include <string.h>

#include "backend/base/alloc.h"
#include "backend/base/structs.h"
#include "backend/cost/predict.h"
#include "backend/model/restore.h"
#include "backend/schedule/check/check.h"
#include "backend/schedule/schedule.h"
#include "backend/schedule/template/template.h"

struct sluice_schedule_s {
  sluice_template_t* schedule; /* owned */
};

SLUICE_DEFINE_INIT(sluice_schedule_config, .num_chunks = 1, .needs_backward = 1, .dgrad = 1,
                   .wgrad = SLUICE_WGRAD_CALL_NOW)

static sluice_status_t check_flags(const sluice_schedule_config_t* c) {
  const struct {
    const char* name;
    int32_t value;
  } flags[] = {{"single_rank", c->single_rank},
               {"needs_backward", c->needs_backward},
               {"callback_experts", c->callback_experts},
               {"gated", c->gated},
               {"dgrad", c->dgrad},
               {"may_reuse_saved", c->may_reuse_saved},
               {"under_plan", c->under_plan},
               {"chunks_by_experts", c->chunks_by_experts},
               {"grouped", c->grouped},
               {"low_rank", c->low_rank}};
  for (size_t i = 0; i < sizeof flags / sizeof flags[0]; ++i) {
    SLUICE_TRY(SLUICE_REQUIRE(flags[i].value == 0 || flags[i].value == 1, "schedule: %s is %d; it must be 0 or 1",
                              flags[i].name, flags[i].value));
  }
  return SLUICE_REQUIRE(c->deduplicate >= SLUICE_DEDUPLICATE_NONE && c->deduplicate <= SLUICE_DEDUPLICATE_NODES,
                        "schedule: deduplicate is %d; it must be 0, 1 (by rank) or 2 (by node)", c->deduplicate);
}

static sluice_status_t check_config(const sluice_schedule_config_t* c) {
  SLUICE_TRY(SLUICE_REQUIRE(c->direction == SLUICE_FORWARD || c->direction == SLUICE_BACKWARD,
                            "schedule: direction is %d; known are forward (0) and backward (1)", c->direction));
  SLUICE_TRY(SLUICE_REQUIRE(c->num_chunks >= 1 && c->num_chunks <= SLUICE_MAX_CHUNKS,
                            "schedule: num_chunks is %d; it must be in [1, %d]", c->num_chunks, SLUICE_MAX_CHUNKS));
  SLUICE_TRY(SLUICE_REQUIRE(c->wgrad >= SLUICE_WGRAD_CALL_NONE && c->wgrad <= SLUICE_WGRAD_CALL_LATER,
                            "schedule: wgrad is %d; known are none (0), now (1) and later (2)", c->wgrad));
  SLUICE_TRY(SLUICE_REQUIRE(c->wgrad_mode == SLUICE_WGRAD_DEFERRED || c->wgrad_mode == SLUICE_WGRAD_PER_CHUNK,
                            "schedule: wgrad_mode is %d; a schedule is deferred (0) or per chunk (1)", c->wgrad_mode));
  return check_flags(c);
}

static sluice_status_t fill_policies(const sluice_schedule_config_t* c, sluice_template_spec_t* spec) {
  char known[SLUICE_RESTORE_TEXT_BYTES];
  for (int32_t i = 0; i < c->num_chunks; ++i) {
    int32_t di = c->restore_input_of != NULL ? c->restore_input_of[i] : c->restore_input;
    int32_t m = c->restore_pre_activation_of != NULL ? c->restore_pre_activation_of[i] : c->restore_pre_activation;
    SLUICE_TRY(SLUICE_REQUIRE(sluice_restore_is_for(di, SLUICE_T_DI),
                              "schedule: restore_input of chunk %d is %d; known are %s", i, di,
                              sluice_restore_choices(SLUICE_T_DI, known)));
    SLUICE_TRY(SLUICE_REQUIRE(sluice_restore_is_for(m, SLUICE_T_M),
                              "schedule: restore_pre_activation of chunk %d is %d; known are %s", i, m,
                              sluice_restore_choices(SLUICE_T_M, known)));
    spec->restore_input[i] = (uint8_t)di;
    spec->restore_pre_activation[i] = (uint8_t)m;
  }
  return SLUICE_OK;
}

/* A field that the direction does not read stays 0, so that a schedule has the same hash as the one that a layer
 * runs. */
static sluice_status_t make_spec(const sluice_schedule_config_t* c, sluice_template_spec_t* out_spec) {
  int backward = c->direction == SLUICE_BACKWARD;
  *out_spec = (sluice_template_spec_t){
      .direction = c->direction,
      .num_chunks = c->num_chunks,
      .single_rank = c->single_rank,
      .keep = backward ? 0 : c->needs_backward,
      .callback = c->callback_experts,
      .gated = c->gated,
      .dgrad = backward ? c->dgrad : 0,
      .wgrad = backward ? c->wgrad : 0,
      .wgrad_mode = backward ? c->wgrad_mode : 0,
      .reuse_saved = backward ? c->may_reuse_saved : 0,
      .bounded = c->under_plan,
      .dedup = c->deduplicate,
      .chunks_by_experts = (int16_t)c->chunks_by_experts,
      .grouped = (int16_t)c->grouped,
      .low_rank = c->low_rank,
  };
  if (backward || c->needs_backward) SLUICE_TRY(fill_policies(c, out_spec));
  out_spec->shares_act = !c->under_plan && sluice_spec_offloads_m(out_spec);
  return SLUICE_OK;
}

static sluice_status_t build(const sluice_template_spec_t* spec, sluice_schedule_t** out_schedule) {
  sluice_allocator_t* allocator = sluice_process_allocator();
  sluice_schedule_t* made = sluice_alloc_zeroed(allocator, sizeof *made, "schedule");
  if (made == NULL) return sluice_alloc_status();
  sluice_status_t status = sluice_template_build(spec, allocator, &made->schedule);
  if (status == SLUICE_OK) status = sluice_schedule_check_or_fail(made->schedule, allocator);
  if (status != SLUICE_OK) {
    sluice_schedule_destroy(made);
    return status;
  }
  *out_schedule = made;
  return SLUICE_OK;
}

sluice_status_t sluice_schedule_create(const sluice_schedule_config_t* config, sluice_schedule_t** out_schedule) {
  SLUICE_TRY(SLUICE_REQUIRE(out_schedule != NULL, "sluice_schedule_create: out_schedule is NULL"));
  *out_schedule = NULL;
  SLUICE_READ_EXTENSIBLE(sluice_schedule_config, checked, config, offsetof(sluice_schedule_config_t, deduplicate));
  SLUICE_TRY(check_config(&checked));
  sluice_template_spec_t spec;
  SLUICE_TRY(make_spec(&checked, &spec));
  return build(&spec, out_schedule);
}

void sluice_schedule_destroy(sluice_schedule_t* schedule) {
  if (schedule == NULL) return;
  sluice_template_destroy(schedule->schedule, sluice_process_allocator());
  sluice_free(sluice_process_allocator(), schedule, sizeof *schedule);
}

int32_t sluice_schedule_num_ops(const sluice_schedule_t* schedule) {
  return schedule == NULL ? 0 : schedule->schedule->num_ops;
}

sluice_status_t sluice_schedule_json(const sluice_schedule_t* schedule, char* text, uint64_t* inout_bytes) {
  SLUICE_TRY(SLUICE_REQUIRE(schedule != NULL && inout_bytes != NULL, "sluice_schedule_json: %s is NULL",
                            schedule == NULL ? "schedule" : "inout_bytes"));
  uint64_t room = *inout_bytes;
  *inout_bytes = sluice_schedule_write_json(schedule->schedule, NULL, 0) + 1;
  if (text == NULL) return SLUICE_OK;
  SLUICE_TRY(SLUICE_REQUIRE(room >= *inout_bytes, "sluice_schedule_json: room for %llu bytes, the text has %llu",
                            (unsigned long long)room, (unsigned long long)*inout_bytes));
  sluice_schedule_write_json(schedule->schedule, text, room);
  return SLUICE_OK;
}

typedef struct given_s {
  const sluice_op_t* ops;
  const double* seconds;
} given_t;

static double given_seconds(void* user, const sluice_op_t* op) {
  const given_t* given = user;
  return given->seconds[op - given->ops];
}

sluice_status_t sluice_schedule_predict(const sluice_schedule_t* schedule, const double* op_seconds,
                                        const double* share, double* out_begin, double* out_end,
                                        sluice_schedule_prediction_t* out_prediction) {
  SLUICE_TRY(SLUICE_REQUIRE(schedule != NULL && op_seconds != NULL && out_prediction != NULL,
                            "sluice_schedule_predict: %s is NULL",
                            schedule == NULL     ? "schedule"
                            : op_seconds == NULL ? "op_seconds"
                                                 : "out_prediction"));
  SLUICE_TRY(sluice_struct_check_size(out_prediction, "sluice_schedule_prediction_t"));
  const sluice_template_t* t = schedule->schedule;
  for (int32_t i = 0; i < t->num_ops; ++i) {
    SLUICE_TRY(SLUICE_REQUIRE(isfinite(op_seconds[i]) && op_seconds[i] >= 0,
                              "sluice_schedule_predict: op_seconds[%d] (%s of chunk %d) is %g", i,
                              sluice_op_name(t->ops[i].kind), t->ops[i].chunk, op_seconds[i]));
  }
  double shares[SLUICE_NUM_LANES][1 << SLUICE_NUM_LANES];
  for (int32_t i = 0; i < SLUICE_NUM_LANES << SLUICE_NUM_LANES && share != NULL; ++i) {
    SLUICE_TRY(SLUICE_REQUIRE(share[i] >= 0 && share[i] <= 1,
                              "sluice_schedule_predict: share[%d][%d] is %g; it must be in (0, 1], or 0 for 1",
                              i >> SLUICE_NUM_LANES, i & ((1 << SLUICE_NUM_LANES) - 1), share[i]));
    shares[i >> SLUICE_NUM_LANES][i & ((1 << SLUICE_NUM_LANES) - 1)] = share[i];
  }
  given_t given = {t->ops, op_seconds};
  sluice_prediction_t walked;
  const sluice_op_costs_t costs = {.seconds = given_seconds, .user = &given, .share = share != NULL ? shares : NULL};
  SLUICE_TRY(sluice_predict(t, &costs, sluice_process_allocator(), &walked, out_begin, out_end));
  sluice_schedule_prediction_t prediction = {.seconds = walked.total};
  memcpy(prediction.busy_seconds, walked.busy, sizeof prediction.busy_seconds);
  sluice_struct_give(out_prediction, &prediction, sizeof prediction);
  return SLUICE_OK;
}
