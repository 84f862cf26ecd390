// SPDX-License-Identifier: Apache-2.0
/* Predicts a batch of a pipeline without running it: its program, what is in flight, and a simulation. */
#include <string.h>

#include "backend/base/math.h"
#include "backend/base/structs.h"
#include "backend/pipeline/build.h"
#include "backend/pipeline/choose/choose.h"
#include "backend/pipeline/simulate/simulate.h"
#include "sluice/pipeline.h"

/* The accepted loss of time, relative to the best, for fewer micro-batches in flight: as in the executor. */
#define TOLERANCE        0.01
#define POLICY_TOLERANCE 0.02

/* Too large for the stack. */
typedef struct question_s {
  sluice_pipeline_workload_t asked; /* its op_seconds is called */
  sluice_pipeline_spec_t spec;
  sluice_pipeline_times_t times;
  sluice_pipeline_choice_t choice;
  sluice_pipeline_result_t result;
} question_t;

SLUICE_DEFINE_INIT(sluice_pipeline_workload, .num_stages = 1, .num_virtual = 1, .num_micro_batches = 1, .placement = -1,
                   .separate_wgrad = -1, .receives_ahead = 1)

/* ---- the request ---- */

static sluice_status_t require_sizes(const sluice_pipeline_workload_t* w) {
  SLUICE_TRY(SLUICE_REQUIRE(w->num_stages >= 1 && w->num_stages <= SLUICE_PIPELINE_MAX_STAGES,
                            "sluice_pipeline_workload_t: num_stages is %d; give 1 to %d", w->num_stages,
                            SLUICE_PIPELINE_MAX_STAGES));
  SLUICE_TRY(SLUICE_REQUIRE(w->num_virtual >= 1 && w->num_virtual <= SLUICE_PIPELINE_MAX_VIRTUAL_STAGES / w->num_stages,
                            "sluice_pipeline_workload_t: num_virtual is %d; %d stages hold 1 to %d each",
                            w->num_virtual, w->num_stages, SLUICE_PIPELINE_MAX_VIRTUAL_STAGES / w->num_stages));
  return SLUICE_REQUIRE(w->forward_seconds != NULL && w->backward_seconds != NULL,
                        "sluice_pipeline_workload_t: %s is NULL; give seconds of each virtual stage",
                        w->forward_seconds == NULL ? "forward_seconds" : "backward_seconds");
}

static double ask_seconds(void* user, const sluice_stage_op_t* op, double begin_s, double seconds) {
  const sluice_pipeline_workload_t* w = user;
  return w->op_seconds(w->user, sluice_stage_op_name(op->kind), op->virtual_stage, op->micro_batch, begin_s, seconds);
}

static void fill_by_virtual_stage(const sluice_pipeline_workload_t* w, question_t* q) {
  for (int32_t c = 0; c < w->num_stages * w->num_virtual; ++c) {
    q->times.forward_s[c] = w->forward_seconds[c];
    q->times.backward_s[c] = w->backward_seconds[c];
    q->times.weight_s[c] = w->weight_seconds != NULL ? w->weight_seconds[c] : 0;
    q->times.reduce_s[c] = w->reduce_seconds != NULL ? w->reduce_seconds[c] : 0;
    q->times.latency_s[c] = w->message_seconds != NULL ? w->message_seconds[c] : 0;
    q->spec.in_flight[c] = w->in_flight;
    q->spec.activation_bytes[c] = w->activation_bytes != NULL ? w->activation_bytes[c] : 0;
    q->spec.held_bytes[c] = w->held_bytes != NULL ? w->held_bytes[c] : 0;
  }
}

static sluice_status_t read_workload(const sluice_pipeline_workload_t* workload, question_t* q) {
  SLUICE_READ_EXTENSIBLE(sluice_pipeline_workload, w, workload, sizeof w);
  SLUICE_TRY(SLUICE_REQUIRE(w.reserved == 0, "sluice_pipeline_workload_t: reserved is %d; set it to 0", w.reserved));
  int32_t number = 0;
  SLUICE_TRY(sluice_policy_find(w.policy, 1, &number));
  SLUICE_TRY(require_sizes(&w));
  sluice_policy_fill(number, &w.placement, &w.separate_wgrad);
  *q = (question_t){.spec = {.num_stages = w.num_stages,
                             .num_virtual = w.num_virtual,
                             .num_micro_batches = w.num_micro_batches,
                             .placement = w.placement,
                             .policy = number,
                             .separate_wgrad = w.separate_wgrad,
                             .receives_ahead = w.receives_ahead,
                             .reduces = w.reduce_seconds != NULL},
                    .times = {.is_buffered = !w.rendezvous, .shares_cards = w.shares_cards != 0},
                    .asked = w};
  if (w.op_seconds != NULL) {
    q->times.seconds_of = ask_seconds;
    q->times.user = &q->asked;
  }
  fill_by_virtual_stage(&w, q);
  for (int32_t s = 0; w.memory_budget != NULL && s < w.num_stages; ++s) q->spec.byte_limit[s] = w.memory_budget[s];
  SLUICE_TRY(sluice_pipeline_spec_check(&q->spec));
  return q->spec.policy == SLUICE_POLICY_OPEN ? SLUICE_OK : sluice_policy_check(&q->spec);
}

/* ---- the result ---- */

static sluice_status_t choose(question_t* q, int32_t* out_is_chosen) {
  *out_is_chosen = 0;
  if (q->spec.policy == SLUICE_POLICY_OPEN) {
    const int was_open = q->spec.in_flight[0] == 0;
    SLUICE_TRY(sluice_pipeline_choose_policy(&q->spec, &q->times, POLICY_TOLERANCE, sluice_process_allocator()));
    *out_is_chosen = was_open && !sluice_policy(q->spec.policy)->is_planned;
    return SLUICE_OK;
  }
  if (q->spec.in_flight[0] > 0 || sluice_policy(q->spec.policy)->is_planned) return SLUICE_OK;
  SLUICE_TRY(sluice_pipeline_choose(&q->spec, &q->times, TOLERANCE, sluice_process_allocator(), &q->choice));
  memcpy(q->spec.in_flight, q->choice.in_flight, sizeof q->spec.in_flight);
  memcpy(q->spec.held, q->choice.held, sizeof q->spec.held);
  *out_is_chosen = 1;
  return SLUICE_OK;
}

static int32_t in_flight_of(const sluice_pipeline_spec_t* spec, int32_t stage) {
  int32_t most = 0;
  for (int32_t k = 0; k < spec->num_virtual; ++k) {
    most = (int32_t)sluice_max(most, spec->in_flight[sluice_pipeline_virtual_stage(spec, stage, k)]);
  }
  return most;
}

static void give(const question_t* q, const sluice_pipeline_spec_t* in_force, int32_t is_chosen,
                 sluice_pipeline_prediction_t* out, sluice_stage_prediction_t* out_stages) {
  *out = (sluice_pipeline_prediction_t){.seconds = q->result.makespan_s,
                                        .bubble = q->result.bubble,
                                        .is_chosen = is_chosen,
                                        .policy = sluice_policy(in_force->policy)->name};
  for (int32_t s = 0; s < in_force->num_stages; ++s) {
    const sluice_stage_result_t* of = &q->result.stages[s];
    out->in_flight = (int32_t)sluice_max(out->in_flight, in_flight_of(in_force, s));
    if (out_stages == NULL) continue;
    out_stages[s] = (sluice_stage_prediction_t){.busy_seconds = of->busy_s,
                                                .bubble = of->bubble,
                                                .planned_bytes = sluice_pipeline_stage_bytes(in_force, s),
                                                .peak_bytes = of->peak_bytes,
                                                .in_flight = in_flight_of(in_force, s),
                                                .most_in_flight = of->most_in_flight,
                                                .most_held = of->most_held};
  }
}

static sluice_status_t answer(question_t* q, sluice_pipeline_prediction_t* out_prediction,
                              sluice_stage_prediction_t* out_stages) {
  int32_t is_chosen;
  SLUICE_TRY(choose(q, &is_chosen));
  sluice_pipeline_program_t* program;
  SLUICE_TRY(sluice_pipeline_program_build(&q->spec, sluice_process_allocator(), &program));
  const sluice_status_t status =
      sluice_pipeline_simulate(program, &q->times, sluice_process_allocator(), &q->result, NULL, NULL);
  if (status == SLUICE_OK) give(q, &program->spec, is_chosen, out_prediction, out_stages);
  sluice_pipeline_program_destroy(program, sluice_process_allocator());
  return status;
}

sluice_status_t sluice_pipeline_predict(const sluice_pipeline_workload_t* workload,
                                        sluice_pipeline_prediction_t* out_prediction,
                                        sluice_stage_prediction_t* out_stages) {
  SLUICE_TRY(SLUICE_REQUIRE(out_prediction != NULL, "sluice_pipeline_predict: out_prediction is NULL"));
  SLUICE_TRY(sluice_struct_check_size(out_prediction, "sluice_pipeline_prediction_t"));
  question_t* question = sluice_alloc(sluice_process_allocator(), sizeof *question, "pipeline: a prediction");
  if (question == NULL) return sluice_alloc_status();
  sluice_pipeline_prediction_t made;
  sluice_status_t status = read_workload(workload, question);
  if (status == SLUICE_OK) status = answer(question, &made, out_stages);
  if (status == SLUICE_OK) sluice_struct_give(out_prediction, &made, sizeof made);
  sluice_free(sluice_process_allocator(), question, sizeof *question);
  return status;
}
