// SPDX-License-Identifier: Apache-2.0
/* Executes a template on a device. It runs only ops of the schedule. */
#include "backend/base/clock.h"
#include "backend/base/dtype.h"
#include "backend/model/pass_sizes.h"
#include "backend/moe/pass/lanes.h"
#include "backend/moe/pass/pass.h"
#include "backend/moe/pass/slot_poisoner.h"

#define NO_JOB (-1)

/* Releases the slots of all ops that end here: an op that opens a group ends with the op that closes it, and an op that
 * leaves its exchange to the next op ends with that op. */
static sluice_status_t release_slots(sluice_pass_t* pass, int32_t index) {
  const int32_t group = pass->schedule->ops[index].group, left = pass->exchange_left;
  if (group == SLUICE_GROUP_OPENS || left == SLUICE_EXCHANGE_LEFT) return SLUICE_OK;
  pass->exchange_left = SLUICE_EXCHANGE_DONE;
  if (group == SLUICE_GROUP_CLOSES || left == SLUICE_EXCHANGE_TAKEN)
    SLUICE_TRY(sluice_slot_poisoner_release(pass, index - 1));
  return sluice_slot_poisoner_release(pass, index);
}

static sluice_status_t run_op(sluice_pass_t* pass, int32_t index) {
  const sluice_op_t* op = &pass->schedule->ops[index];
  pass->times[index].begin_ns = sluice_now_ns();
  sluice_status_t status = pass->run_op(pass, op, index);
  if (status == SLUICE_OK) status = release_slots(pass, index);
  pass->times[index].end_ns = sluice_now_ns();
  return status;
}

static sluice_status_t run_ops(sluice_pass_t* pass, int32_t first, int32_t last) {
  for (int32_t i = first; i <= last; ++i) SLUICE_TRY(run_op(pass, i));
  return SLUICE_OK;
}

/* The same, also measuring the calling thread's CPU time within ops, without the time between them. */
static sluice_status_t run_watched(sluice_pass_t* pass, int32_t first, int32_t last) {
  const sluice_op_times_t* times = pass->times;
  uint64_t before_ns = sluice_now_ns(), before_cpu_ns = sluice_thread_cpu_ns();
  SLUICE_TRY(run_ops(pass, first, last));
  uint64_t cpu_ns = sluice_thread_cpu_ns() - before_cpu_ns, after_ns = sluice_now_ns();
  sluice_run_was_read(&pass->host, times[first].begin_ns - before_ns + after_ns - times[last].end_ns,
                      pass->context->reading_cpu_ns);
  for (int32_t i = first; i < last; ++i) {
    cpu_ns -= sluice_between_ops(times[i + 1].begin_ns - times[i].end_ns, pass->context->reading_cpu_ns, cpu_ns);
  }
  pass->host.ops_ns += cpu_ns;
  return SLUICE_OK;
}

/* A job is identified by its last op, the one that others wait for. */
static sluice_status_t run_job(void* user, int32_t last, sluice_stream_t stream) {
  sluice_pass_t* pass = user;
  const sluice_op_t* op = &pass->schedule->ops[last];
  int32_t first = sluice_lanes_first_of_job(pass, last);
  pass->streams[op->lane] = stream;
  if (pass->host.is_on && op->lane == SLUICE_LANE_COMPUTE) return run_watched(pass, first, last);
  if (last == pass->comm_jobs.first) pass->comm_jobs.began_cpu_ns = sluice_thread_cpu_ns();
  sluice_status_t status = run_ops(pass, first, last);
  if (last == pass->comm_jobs.last) pass->comm_jobs.cpu_ns = sluice_thread_cpu_ns() - pass->comm_jobs.began_cpu_ns;
  return status;
}

/* On a device an exchange may be left to the op that unpacks its rows (ops/exchange_ops.h). */
static int may_exchange(const sluice_pass_t* pass, int32_t kind) {
  const int unpacks = kind == SLUICE_OP_UNPACK || kind == SLUICE_OP_UNPACK_GRAD;
  return sluice_op_is_exchange(kind) || (unpacks && pass->context->rows->is_device && pass->context->world_size > 1);
}

static sluice_status_t submit(sluice_pass_t* pass, int32_t first, int32_t last) {
  sluice_device_t* device = pass->context->device;
  const sluice_op_t* op = &pass->schedule->ops[first];
  sluice_job_t job = {.index = last, .lane = op->lane, .run_on_failure = may_exchange(pass, op->kind)};
  job.waits = sluice_slot_poisoner_waits(pass, first, &job.num_waits);
  return device->vtable->submit(device, &job);
}

static sluice_status_t submit_all(sluice_pass_t* pass) {
  const sluice_template_t* schedule = pass->schedule;
  pass->comm_jobs.first = pass->comm_jobs.last = NO_JOB;
  for (int32_t i = 0; i < schedule->num_ops; ++i) {
    if (!sluice_lanes_ends_job(pass, i)) continue;
    if (schedule->ops[i].lane == SLUICE_LANE_COMM) sluice_lanes_note_comm_job(pass, i);
    SLUICE_TRY(submit(pass, sluice_lanes_first_of_job(pass, i), i));
  }
  return SLUICE_OK;
}

/* The restore set of a layer that reuses buffers without a plan: all its chunks restore the same way. */
static int32_t restore_set_of(const sluice_pass_t* pass) {
  const sluice_binding_t* b = &pass->binding;
  for (int32_t i = 1; i < SLUICE_NUM_RESTORE_SETS && pass->moe->shape.config.reuse && b->plan == 0; ++i) {
    const sluice_restore_set_t* set = &sluice_restore_sets[i];
    if (set->restore_input == b->restore_input[0] && set->restore_pre_activation == b->restore_pre_activation[0])
      return i;
  }
  return 0;
}

/* The choice that the pass ran with, from its schedule, because a restored binding holds no choice. */
static sluice_pass_choice_t choice_of(const sluice_pass_t* pass) {
  const sluice_template_spec_t* spec = &pass->schedule->spec;
  return (sluice_pass_choice_t){
      .num_chunks = (int16_t)spec->num_chunks,
      .wgrad_mode = (uint8_t)(spec->direction == SLUICE_FORWARD ? pass->binding.wgrad_mode : spec->wgrad_mode),
      .restore_set = (uint8_t)restore_set_of(pass),
      .grouped = spec->grouped != 0,
      .deduplicate = (uint8_t)spec->dedup,
  };
}

static int is_sum(int32_t kind) { return kind == SLUICE_OP_REDUCE || kind == SLUICE_OP_REDUCE_GRAD; }

static int is_copy(int32_t kind) { return kind == SLUICE_OP_COPY_OUT || kind == SLUICE_OP_COPY_IN; }

/* Summing only reads the returned rows and writes one row per token. With token copies fewer rows return than were
 * routed, and a backward without an input gradient sums nothing. */
static uint64_t summed_bytes(const sluice_pass_t* pass) {
  const sluice_binding_t* b = &pass->binding;
  if (pass->schedule->spec.dedup != SLUICE_DEDUPLICATE_NONE || pass->out_rows == NULL) return 0;
  return (uint64_t)(b->num_sent + b->num_tokens) * sluice_row_bytes(&pass->moe->shape, SLUICE_T_DI);
}

static void note_rate(uint16_t* slowest, uint64_t bytes, uint64_t ns) {
  if (bytes == 0 || ns == 0) return;
  const uint16_t rate = sluice_f32_to_bf16((float)bytes / (float)ns);
  if (*slowest == 0 || rate < *slowest) *slowest = rate; /* bits of positive bf16 have the same order */
}

static void note_rates(sluice_pass_t* pass) {
  uint64_t sum_ns = 0, copy_ns = 0, copy_bytes = 0;
  for (int32_t i = 0; i < pass->schedule->num_ops; ++i) {
    const sluice_op_times_t* t = &pass->times[i];
    const int32_t kind = pass->schedule->ops[i].kind;
    if (is_sum(kind)) sum_ns += t->end_ns - t->begin_ns;
    if (is_copy(kind)) copy_ns += t->end_ns - t->begin_ns, copy_bytes += t->bytes;
  }
  note_rate(&pass->moe->decision.own.memory_rate, summed_bytes(pass), sum_ns);
  note_rate(&pass->moe->decision.own.copy_rate, copy_bytes, copy_ns);
}

/* Records the report of a pass for the policy hook. */
static void report_pass(sluice_pass_t* pass, const uint64_t* lane_ns) {
  const sluice_template_spec_t* spec = &pass->schedule->spec;
  sluice_decision_state_t* decision = &pass->moe->decision;
  const sluice_pass_report_t report = {
      .pass_ns = pass->end_ns - pass->agreed_ns,
      .rows = pass->binding.num_rows,
      .choice = choice_of(pass),
      .plan = pass->binding.plan,
      .comm_cpu_ns = (float)pass->comm_jobs.cpu_ns,
      .header_ns = (float)pass->header_ns,
  };
  sluice_pass_lanes(pass)->report(pass, &report, lane_ns);
  if (!sluice_pass_lanes(pass)->are_streams || pass->has_device_times) note_rates(pass); /* else only enqueued */
  if (spec->direction != SLUICE_FORWARD) return;
  decision->own.rows = pass->binding.num_rows;
  decision->own.num_tokens = (int32_t)pass->binding.num_tokens;
}

static void record(sluice_pass_t* pass) {
  sluice_context_stats_t* stats = &pass->context->stats;
  const sluice_template_t* schedule = pass->schedule;
  uint64_t lane_ns[SLUICE_NUM_LANES] = {0};
  pass->end_ns = sluice_now_ns();
  for (int32_t i = 0; i < schedule->num_ops; ++i) {
    const sluice_op_times_t* t = &pass->times[i];
    lane_ns[schedule->ops[i].lane] += t->end_ns - t->begin_ns;
    stats->bytes_sent += t->bytes;
  }
  stats->bytes_sent += pass->binding.token_copies.exchanged_bytes;
  ++stats->num_passes;
  stats->compute_ns += lane_ns[SLUICE_LANE_COMPUTE];
  stats->comm_ns += lane_ns[SLUICE_LANE_COMM];
  stats->comm_cpu_ns += pass->comm_jobs.cpu_ns;
  stats->pass_ns += pass->end_ns - pass->begin_ns;
  stats->last_num_chunks = schedule->spec.num_chunks;
  stats->last_is_settled = pass->moe->decision.is_settled;
  stats->last_deduplicate = schedule->spec.dedup;
  if (sluice_pass_is_of_training(pass)) report_pass(pass, lane_ns);
}

static void add_to_trace(const sluice_pass_t* pass, const sluice_trace_event_t* of_what) {
  sluice_trace_event_t event = *of_what;
  event.layer = pass->moe->shape.config.layer_id;
  event.direction = pass->schedule->spec.direction;
  sluice_trace_add(&pass->context->trace, &event);
}

/* Not counted as walking, which would not happen without a trace. */
static void trace(const sluice_pass_t* pass) {
  if (pass->context->trace.capacity == 0) return;
  for (int32_t i = 0; i < pass->schedule->num_ops; ++i) {
    const sluice_op_t* op = &pass->schedule->ops[i];
    const sluice_op_times_t* t = &pass->times[i];
    const sluice_trace_event_t event = {.begin_ns = t->begin_ns,
                                        .end_ns = t->end_ns,
                                        .op = sluice_op_name(op->kind),
                                        .chunk = op->chunk,
                                        .lane = op->lane,
                                        .bytes = t->bytes};
    add_to_trace(pass, &event);
  }
  const sluice_trace_event_t whole = {.begin_ns = pass->begin_ns,
                                      .end_ns = pass->end_ns,
                                      .op = "pass",
                                      .chunk = -1,
                                      .lane = SLUICE_LANE_COMPUTE,
                                      .bytes = pass->binding.token_copies.exchanged_bytes};
  add_to_trace(pass, &whole);
}

/* began_ns: the calling thread's CPU time when the walk began. */
static void record_walk(sluice_pass_t* pass, uint64_t began_ns) {
  sluice_context_stats_t* stats = &pass->context->stats;
  const sluice_lane_waits_t* waits = &pass->context->device->waits;
  uint64_t took = sluice_thread_cpu_ns() - began_ns, other = pass->host.ops_ns + waits->caller_cpu_ns;
  uint64_t others = pass->host.num_readings + waits->num_caller_wakes + waits->num_caller_posts;
  ++others; /* the readings above and at the beginning */
  ++stats->num_walks;
  stats->bind_cpu_ns += pass->host.bind_ns;
  stats->walk_cpu_ns += took > other ? took - other : 0;
  stats->wait_ns += waits->caller_ns;
  stats->num_wakes += waits->num_wakes;
  stats->wake_cpu_ns += waits->cpu_ns;
  stats->num_readings += pass->host.num_op_readings + others;
  stats->readings_cpu_ns += pass->host.op_readings_ns + others * pass->context->reading_cpu_ns;
}

static sluice_status_t run(sluice_pass_t* pass) {
  sluice_device_t* device = pass->context->device;
  sluice_pass_report_t* enqueued = &pass->moe->decision.enqueued[pass->schedule->spec.direction];
  enqueued->pass_ns = 0;
  if (!pass->is_marked) pass->is_marked = sluice_lanes_mark(pass, 0) == SLUICE_OK;
  pass->has_begun = 1;
  sluice_lanes_begin_op_times(pass);
  uint64_t begin_ns = sluice_now_ns();
  uint64_t begin_cpu_ns = pass->host.is_on ? sluice_thread_cpu_ns() : 0;
  device->counts_waits = pass->host.is_on;
  SLUICE_TRY(device->vtable->begin(device, pass->schedule->num_ops, run_job, pass, pass->stream));
  sluice_status_t submitted = submit_all(pass);
  pass->is_complete = submitted == SLUICE_OK;
  /* Join in any case: lanes may be running submitted jobs. join reports the first failure. */
  sluice_status_t status = device->vtable->join(device);
  if (status == SLUICE_OK) status = submitted;
  int has_end = pass->is_marked && status == SLUICE_OK && sluice_lanes_mark(pass, 1) == SLUICE_OK;
  if (status == SLUICE_OK) {
    sluice_lanes_take_op_times(pass, begin_ns);
    record(pass);
    if (pass->host.is_on) record_walk(pass, begin_cpu_ns);
    trace(pass);
  }
  if (!has_end) enqueued->pass_ns = 0;
  return status;
}

sluice_status_t sluice_pass_run(sluice_pass_t* pass) {
  SLUICE_TRY(sluice_slot_poisoner_begin(pass));
  sluice_status_t status = run(pass);
  sluice_slot_poisoner_end(pass);
  return status;
}
