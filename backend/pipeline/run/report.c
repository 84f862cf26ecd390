// SPDX-License-Identifier: Apache-2.0
/* Reports about the last batch: statistics, events, timelines. */
#include "backend/base/check.h"
#include "backend/base/clock.h"
#include "backend/pipeline/run/state.h"
#include "backend/pipeline/timeline_json.h"

sluice_status_t sluice_stage_enter(sluice_pipeline_t* pipeline) {
  if (!atomic_flag_test_and_set(&pipeline->is_busy)) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_BUSY, "pipeline: a batch is running; call this between batches");
}

sluice_status_t sluice_pipeline_read_stats(sluice_pipeline_t* pipeline, sluice_pipeline_stats_t* out_stats) {
  SLUICE_TRY(sluice_stage_enter(pipeline));
  *out_stats = pipeline->stats;
  atomic_flag_clear(&pipeline->is_busy);
  return SLUICE_OK;
}

sluice_status_t sluice_pipeline_read_events(sluice_pipeline_t* pipeline, sluice_stage_event_t* out_events,
                                            int64_t capacity, int64_t* out_count) {
  *out_count = 0;
  SLUICE_TRY(sluice_stage_enter(pipeline));
  const sluice_stage_plan_t* plan = pipeline->plan;
  const sluice_stage_handshake_t* agreed = &pipeline->agreed;
  for (int32_t i = 0; plan != NULL && i < plan->num_ends; ++i) {
    const sluice_stage_op_t* op = &plan->program->ops[plan->ends[i]];
    if (op->kind == SLUICE_STAGE_FLUSH) continue;
    const int64_t at = (*out_count)++;
    if (at >= capacity) continue;
    const sluice_stage_record_t* record = &plan->records[plan->ends[i] - plan->first_op];
    out_events[at] = (sluice_stage_event_t){
        .begin_ns = record->begin_ns,
        .end_ns = record->end_ns,
        .op = sluice_stage_op_name(op->kind),
        .virtual_stage = op->virtual_stage,
        .micro_batch = op->micro_batch,
        .peer = op->peer >= 0 ? agreed->rank_of[op->peer * agreed->num_replicas + agreed->replica] : -1,
        .bytes = record->bytes,
    };
  }
  atomic_flag_clear(&pipeline->is_busy);
  return SLUICE_OK;
}

/* ---- timelines ---- */

/* Fills the times of this stage's ops, in seconds; all others are marked as not run. */
static void fill_measured(const sluice_pipeline_t* pipeline, double* begin, double* end) {
  const sluice_stage_plan_t* plan = pipeline->plan;
  for (int32_t i = 0; i < plan->program->num_ops; ++i) {
    begin[i] = 0;
    end[i] = -1;
  }
  for (int32_t i = 0; i < plan->num_ops; ++i) {
    if (plan->records[i].end_ns == 0) continue;
    begin[plan->first_op + i] = sluice_seconds(plan->records[i].begin_ns);
    end[plan->first_op + i] = sluice_seconds(plan->records[i].end_ns);
  }
}

static sluice_status_t fill_predicted(const sluice_pipeline_t* pipeline, double* begin, double* end) {
  const sluice_pipeline_program_t* program = pipeline->plan->program;
  struct {
    sluice_pipeline_times_t times;
    sluice_pipeline_result_t result;
  }* work = sluice_alloc(sluice_process_allocator(), sizeof *work, "pipeline: a simulation");
  if (work == NULL) return sluice_alloc_status();
  sluice_stage_fill_times(&program->spec, pipeline->told[pipeline->number % 2], &work->times);
  sluice_status_t status =
      sluice_pipeline_simulate(program, &work->times, sluice_process_allocator(), &work->result, begin, end);
  sluice_free(sluice_process_allocator(), work, sizeof *work);
  const double from_s = sluice_seconds(pipeline->begin_ns);
  for (int32_t i = 0; status == SLUICE_OK && i < program->num_ops; ++i) {
    begin[i] += from_s;
    end[i] += from_s;
  }
  return status;
}

static sluice_status_t write_batch(const sluice_pipeline_t* pipeline, int32_t which, double* begin, char* text,
                                   uint64_t* inout_bytes) {
  const sluice_pipeline_program_t* program = pipeline->plan->program;
  double* end = begin + program->num_ops;
  if (which == SLUICE_PIPELINE_PREDICTED) {
    SLUICE_TRY(fill_predicted(pipeline, begin, end));
  } else {
    fill_measured(pipeline, begin, end);
  }
  const uint64_t room = *inout_bytes;
  *inout_bytes = sluice_pipeline_write_timeline(program, begin, end, NULL, 0) + 1;
  if (text == NULL) return SLUICE_OK;
  SLUICE_TRY(SLUICE_REQUIRE(room >= *inout_bytes,
                            "sluice_pipeline_timeline_json: room for %llu bytes, the text has %llu",
                            (unsigned long long)room, (unsigned long long)*inout_bytes));
  (void)sluice_pipeline_write_timeline(program, begin, end, text, room);
  return SLUICE_OK;
}

static sluice_status_t write_last(const sluice_pipeline_t* pipeline, int32_t which, char* text, uint64_t* inout_bytes) {
  if (pipeline->plan == NULL || (which == SLUICE_PIPELINE_PREDICTED && !pipeline->has_told)) {
    return SLUICE_FAIL(
        SLUICE_E_STATE, "sluice_pipeline_timeline_json: %s; call it after a batch that succeeded",
        pipeline->plan == NULL ? "no batch has run" : "not all ranks' times of the last batch are known");
  }
  const uint64_t bytes = 2 * (uint64_t)pipeline->plan->program->num_ops * sizeof(double);
  double* times = sluice_alloc(sluice_process_allocator(), bytes, "pipeline: a timeline");
  if (times == NULL) return sluice_alloc_status();
  const sluice_status_t status = write_batch(pipeline, which, times, text, inout_bytes);
  sluice_free(sluice_process_allocator(), times, bytes);
  return status;
}

sluice_status_t sluice_pipeline_write_batch(sluice_pipeline_t* pipeline, int32_t which, char* text,
                                            uint64_t* inout_bytes) {
  SLUICE_TRY(sluice_stage_enter(pipeline));
  const sluice_status_t status = write_last(pipeline, which, text, inout_bytes);
  atomic_flag_clear(&pipeline->is_busy);
  return status;
}
