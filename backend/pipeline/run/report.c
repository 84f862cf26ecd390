// SPDX-License-Identifier: Apache-2.0
/* The public calls that report about the last batch: statistics, events, metadata, timelines. */
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/structs.h"
#include "backend/base/text.h"
#include "backend/pipeline/run/state.h"

#define NS_PER_S 1e9

sluice_status_t sluice_stage_enter(sluice_pipeline_t* pipeline) {
  if (!atomic_flag_test_and_set(&pipeline->is_busy)) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_BUSY, "pipeline: a batch is running; call this between batches");
}

sluice_status_t sluice_pipeline_get_stats(sluice_pipeline_t* pipeline, sluice_pipeline_stats_t* out_stats) {
  SLUICE_TRY(SLUICE_REQUIRE(pipeline != NULL && out_stats != NULL,
                            "sluice_pipeline_get_stats: pipeline and out_stats may not be NULL"));
  SLUICE_TRY(sluice_struct_check_size(out_stats, "sluice_pipeline_stats_t"));
  SLUICE_TRY(sluice_stage_enter(pipeline));
  const sluice_pipeline_stats_t stats = pipeline->stats;
  atomic_flag_clear(&pipeline->is_busy);
  sluice_struct_give(out_stats, &stats, sizeof stats);
  return SLUICE_OK;
}

sluice_status_t sluice_pipeline_get_events(sluice_pipeline_t* pipeline, sluice_stage_event_t* out_events,
                                           int64_t capacity, int64_t* out_count) {
  SLUICE_TRY(SLUICE_REQUIRE(pipeline != NULL && out_count != NULL,
                            "sluice_pipeline_get_events: pipeline and out_count may not be NULL"));
  SLUICE_TRY(SLUICE_REQUIRE(capacity >= 0 && (capacity == 0 || out_events != NULL),
                            "sluice_pipeline_get_events: capacity is %lld and out_events is %s", (long long)capacity,
                            out_events == NULL ? "NULL" : "given"));
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

/* ---- batch metadata ---- */

sluice_status_t sluice_batch_metadata_store(sluice_batch_metadata_t* note, const void* numbers, int32_t count) {
  note->count = 0;
  if (count > note->room) {
    double* more = sluice_alloc(sluice_process_allocator(), (uint64_t)count * sizeof *more, "pipeline: a note");
    if (more == NULL) return sluice_alloc_status();
    sluice_batch_metadata_free(note);
    *note = (sluice_batch_metadata_t){.numbers = more, .room = count};
  }
  if (count > 0) memcpy(note->numbers, numbers, (size_t)count * sizeof *note->numbers);
  note->count = count;
  return SLUICE_OK;
}

void sluice_batch_metadata_free(sluice_batch_metadata_t* note) {
  sluice_free(sluice_process_allocator(), note->numbers, (uint64_t)note->room * sizeof *note->numbers);
  *note = (sluice_batch_metadata_t){.numbers = NULL};
}

sluice_status_t sluice_pipeline_set_note(sluice_pipeline_t* pipeline, const double* numbers, int32_t count) {
  SLUICE_TRY(SLUICE_REQUIRE(pipeline != NULL, "sluice_pipeline_set_note: pipeline is NULL"));
  SLUICE_TRY(SLUICE_REQUIRE(count >= 0 && count <= SLUICE_PIPELINE_MAX_NOTE && (count == 0 || numbers != NULL),
                            "sluice_pipeline_set_note: count is %d and numbers is %s; give 0 to %d numbers", count,
                            numbers == NULL ? "NULL" : "given", SLUICE_PIPELINE_MAX_NOTE));
  SLUICE_TRY(sluice_stage_enter(pipeline));
  pipeline->note = numbers;
  pipeline->note_count = count;
  atomic_flag_clear(&pipeline->is_busy);
  return SLUICE_OK;
}

static sluice_status_t read_note(const sluice_pipeline_t* pipeline, int32_t rank, double* out_numbers, int32_t capacity,
                                 int32_t* out_count) {
  const int32_t num_ranks = pipeline->agreed.num_ranks;
  SLUICE_TRY(SLUICE_REQUIRE(rank >= 0 && rank < num_ranks, "sluice_pipeline_get_note: rank is %d; give 0 to %d", rank,
                            num_ranks - 1));
  if (!pipeline->has_told) {
    return SLUICE_FAIL(SLUICE_E_STATE, "sluice_pipeline_get_note: call it after a batch that succeeded");
  }
  const sluice_batch_metadata_t* note = &pipeline->peers[rank].notes[pipeline->number % 2];
  *out_count = note->count;
  for (int32_t i = 0; i < note->count && i < capacity; ++i) out_numbers[i] = note->numbers[i];
  return SLUICE_OK;
}

sluice_status_t sluice_pipeline_get_note(sluice_pipeline_t* pipeline, int32_t rank, double* out_numbers,
                                         int32_t capacity, int32_t* out_count) {
  SLUICE_TRY(SLUICE_REQUIRE(pipeline != NULL && out_count != NULL,
                            "sluice_pipeline_get_note: pipeline and out_count may not be NULL"));
  SLUICE_TRY(SLUICE_REQUIRE(capacity >= 0 && (capacity == 0 || out_numbers != NULL),
                            "sluice_pipeline_get_note: capacity is %d and out_numbers is %s", capacity,
                            out_numbers == NULL ? "NULL" : "given"));
  *out_count = 0;
  SLUICE_TRY(sluice_stage_enter(pipeline));
  const sluice_status_t status = read_note(pipeline, rank, out_numbers, capacity, out_count);
  atomic_flag_clear(&pipeline->is_busy);
  return status;
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

static int is_shown(const sluice_stage_op_t* op) {
  if (op->kind == SLUICE_STAGE_FLUSH) return 0;
  return !sluice_stage_op_is_message(op->kind) || sluice_stage_op_is_send(op->kind);
}

static int is_beside(const sluice_stage_op_t* op) {
  return sluice_stage_op_is_message(op->kind) || op->kind == SLUICE_STAGE_REDUCE;
}

/* Writes {"events": [...]} in the form that `sluice.timeline.from_trace` reads: op, lane, begin_ns, end_ns, with the
 * stage as rank, the virtual stage as layer, and the micro-batch as chunk. Messages are on the communication lane of
 * their sender, reductions on that of their stage. begin, end: [num_ops] seconds; an op that ends before it begins has
 * not run and is omitted. Writes at most `room` bytes, with a terminating zero; returns the length of the whole
 * text. */
static uint64_t write_timeline(const sluice_pipeline_program_t* program, const double* begin, const double* end,
                               char* data, uint64_t room) {
  sluice_text_t text = sluice_text(data, room);
  const char* separator = "";
  sluice_text_add(&text, "{\"events\": [");
  for (int32_t i = 0; i < program->num_ops; ++i) {
    const sluice_stage_op_t* op = &program->ops[i];
    if (!is_shown(op) || end[i] < begin[i]) continue;
    sluice_text_add(&text,
                    "%s\n {\"op\": \"%s\", \"lane\": \"%s\", \"begin_ns\": %.0f, \"end_ns\": %.0f, \"chunk\": %d, "
                    "\"direction\": \"%s\", \"layer\": %d, \"rank\": %d}",
                    separator, sluice_stage_op_name(op->kind), is_beside(op) ? "comm" : "compute", begin[i] * NS_PER_S,
                    end[i] * NS_PER_S, op->micro_batch,
                    op->kind <= SLUICE_STAGE_SEND_ACTIVATION ? "forward" : "backward", op->virtual_stage, op->stage);
    separator = ",";
  }
  sluice_text_add(&text, "\n]}\n");
  return text.used;
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
  *inout_bytes = write_timeline(program, begin, end, NULL, 0) + 1;
  if (text == NULL) return SLUICE_OK;
  SLUICE_TRY(SLUICE_REQUIRE(room >= *inout_bytes,
                            "sluice_pipeline_timeline_json: room for %llu bytes, the text has %llu",
                            (unsigned long long)room, (unsigned long long)*inout_bytes));
  (void)write_timeline(program, begin, end, text, room);
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

sluice_status_t sluice_pipeline_timeline_json(sluice_pipeline_t* pipeline, int32_t which, char* text,
                                              uint64_t* inout_bytes) {
  SLUICE_TRY(SLUICE_REQUIRE(pipeline != NULL && inout_bytes != NULL, "sluice_pipeline_timeline_json: %s is NULL",
                            pipeline == NULL ? "pipeline" : "inout_bytes"));
  SLUICE_TRY(SLUICE_REQUIRE(which == SLUICE_PIPELINE_MEASURED || which == SLUICE_PIPELINE_PREDICTED,
                            "sluice_pipeline_timeline_json: which is %d; give 0 (measured) or 1 (predicted)", which));
  SLUICE_TRY(sluice_stage_enter(pipeline));
  const sluice_status_t status = write_last(pipeline, which, text, inout_bytes);
  atomic_flag_clear(&pipeline->is_busy);
  return status;
}
