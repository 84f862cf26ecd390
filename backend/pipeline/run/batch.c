// SPDX-License-Identifier: Apache-2.0
/* Runs a batch on one rank. */
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/base/structs.h"
#include "backend/pipeline/run/state.h"

/* ---- before the batch ---- */

static void reset_counts(sluice_pipeline_t* pipeline) {
  sluice_pipeline_stats_t* stats = &pipeline->stats;
  stats->peak_bytes = stats->planned_bytes = stats->most_message_bytes = 0;
  stats->in_flight = stats->most_in_flight = stats->most_held = stats->is_chosen = 0;
  pipeline->in_flight = pipeline->held = 0;
  pipeline->bytes = 0;
  memset(pipeline->own_times, 0, sizeof pipeline->own_times);
  if (pipeline->endpoint != NULL) sluice_allocator_reset_peak(&pipeline->endpoint->memory);
}

static void forget_old_orders(sluice_stage_orders_t* orders, uint64_t number) {
  const int32_t room = (int32_t)(sizeof orders->op / sizeof orders->op[0]);
  while (orders->count > 0 && orders->batch[orders->first] < number) {
    orders->first = (orders->first + 1) % room;
    --orders->count;
  }
}

static void begin(sluice_pipeline_t* pipeline, int32_t num_micro_batches, int32_t forward_only) {
  ++pipeline->number;
  pipeline->num_micro_batches = num_micro_batches;
  pipeline->forward_only = forward_only != 0;
  pipeline->plan = NULL;
  pipeline->has_told = 0;
  pipeline->begin_ns = sluice_now_ns();
  pipeline->phase = SLUICE_STAGE_RUNS;
  pipeline->stopper = -1;
  pipeline->has_news = 1;
  for (int32_t r = 0; r < pipeline->agreed.num_ranks; ++r) {
    if (pipeline->peers[r].stopped == pipeline->number) pipeline->stopper = r;
  }
  if (pipeline->orders != NULL) forget_old_orders(pipeline->orders, pipeline->number);
  reset_counts(pipeline);
  sluice_stage_note_progress(pipeline);
}

static sluice_status_t check_callbacks(const sluice_pipeline_t* pipeline) {
  const sluice_pipeline_callbacks_t* callbacks = &pipeline->callbacks;
  return SLUICE_REQUIRE(pipeline->forward_only || callbacks->backward != NULL,
                        "pipeline: callback backward is NULL; a batch that is not forward_only needs it");
}

static sluice_status_t prepare(sluice_pipeline_t* pipeline) {
  SLUICE_TRY(check_callbacks(pipeline));
  const sluice_stage_handshake_t* agreed = &pipeline->agreed;
  sluice_stage_plan_t* plan = &pipeline->plans[pipeline->forward_only];
  const sluice_stage_times_t* times = pipeline->has_times && !pipeline->forward_only ? pipeline->times : NULL;
  SLUICE_TRY(sluice_stage_plan_make(plan, &agreed->spec, agreed->stage, pipeline->num_micro_batches,
                                    pipeline->forward_only, times));
  sluice_stage_plan_reset(plan);
  SLUICE_TRY(sluice_runner_init(&pipeline->runner, plan->program, agreed->stage, sluice_process_allocator()));
  pipeline->runner.follows = pipeline->orders != NULL && !plan->program->policy->is_planned;
  pipeline->plan = plan;
  const sluice_pipeline_spec_t* spec = &plan->program->spec;
  for (int32_t k = 0; k < spec->num_virtual; ++k) {
    const int32_t c = sluice_pipeline_virtual_stage(spec, agreed->stage, k);
    pipeline->stats.in_flight = (int32_t)sluice_max(pipeline->stats.in_flight, spec->in_flight[c]);
  }
  pipeline->stats.is_chosen = plan->is_chosen;
  pipeline->stats.policy = plan->program->policy->name;
  pipeline->stats.planned_bytes = sluice_pipeline_stage_bytes(spec, agreed->stage);
  return SLUICE_OK;
}

/* ---- running the program ---- */

static sluice_status_t post_ready(sluice_pipeline_t* pipeline) {
  for (int32_t op; (op = sluice_runner_next_post(&pipeline->runner)) >= 0;) {
    SLUICE_TRY(sluice_stage_post(pipeline, op));
  }
  return SLUICE_OK;
}

/* Takes all completions. A rank that has ended the batch for all may have left afterwards: then its reason is
 * reported. */
static sluice_status_t take_all(sluice_pipeline_t* pipeline, int32_t* out_taken) {
  sluice_status_t status = SLUICE_OK;
  *out_taken = 0;
  for (int32_t is_taken = 1; is_taken && status == SLUICE_OK; *out_taken |= is_taken) {
    status = sluice_stage_take(pipeline, 0, &is_taken);
  }
  return pipeline->stopper >= 0 ? SLUICE_OK : status;
}

/* Takes completions and posts messages until neither makes anything ready, before a callback takes the thread. */
static sluice_status_t move_messages(sluice_pipeline_t* pipeline) {
  if (pipeline->endpoint == NULL) return post_ready(pipeline);
  int32_t is_taken = 0;
  SLUICE_TRY(take_all(pipeline, &is_taken));
  do {
    if (pipeline->stopper >= 0) return SLUICE_OK;
    SLUICE_TRY(post_ready(pipeline));
    SLUICE_TRY(take_all(pipeline, &is_taken));
  } while (is_taken);
  return SLUICE_OK;
}

static int32_t next_ordered(sluice_pipeline_t* pipeline) {
  sluice_stage_orders_t* orders = pipeline->orders;
  if (!pipeline->runner.follows || orders->count == 0 || orders->batch[orders->first] != pipeline->number) return -1;
  const int32_t op = orders->op[orders->first];
  if (!sluice_runner_take(&pipeline->runner, op)) return -1;
  orders->first = (orders->first + 1) % (int32_t)(sizeof orders->op / sizeof orders->op[0]);
  --orders->count;
  return op;
}

static int32_t next(sluice_pipeline_t* pipeline) {
  const int32_t ordered = next_ordered(pipeline);
  return ordered >= 0 ? ordered : sluice_runner_next(&pipeline->runner);
}

static sluice_status_t check_aborted(sluice_pipeline_t* pipeline) {
  if (!atomic_load(&pipeline->is_aborted)) return SLUICE_OK;
  return sluice_stage_break(pipeline, SLUICE_FAIL_PEER(SLUICE_E_ABORTED, pipeline->agreed.rank, -1,
                                                       "pipeline: rank %d was aborted in batch %llu",
                                                       pipeline->agreed.rank, (unsigned long long)pipeline->number));
}

static sluice_status_t walk(sluice_pipeline_t* pipeline) {
  for (;;) {
    SLUICE_TRY(check_aborted(pipeline));
    SLUICE_TRY(move_messages(pipeline)); /* after the last callback too: other ranks may have ended the batch */
    SLUICE_TRY(sluice_stage_check_peers(pipeline));
    if (sluice_runner_is_done(&pipeline->runner)) return SLUICE_OK;
    const int32_t op = next(pipeline);
    if (op >= 0) {
      SLUICE_TRY(sluice_stage_work(pipeline, op));
    } else if (pipeline->endpoint != NULL) {
      SLUICE_TRY(sluice_stage_wait(pipeline));
    } else {
      return SLUICE_FAIL(SLUICE_E_INTERNAL, "pipeline: no op can run, but %d ops are left",
                         pipeline->runner.num_ops - pipeline->runner.num_ended);
    }
  }
}

/* ---- the end of a batch ---- */

static sluice_status_t tell_done(sluice_pipeline_t* pipeline) {
  const sluice_stage_head_t head = sluice_stage_new_head(pipeline, SLUICE_STAGE_HEAD_DONE);
  const sluice_batch_metadata_t* note = &pipeline->peers[pipeline->agreed.rank].notes[pipeline->number % 2];
  const sluice_message_span_t payload[] = {
      {pipeline->own_times, (uint64_t)pipeline->agreed.spec.num_virtual * sizeof pipeline->own_times[0]},
      {note->numbers, (uint64_t)note->count * sizeof note->numbers[0]}};
  const int32_t num_spans = note->count > 0 ? 2 : 1;
  for (int32_t r = 0; r < pipeline->agreed.num_ranks; ++r) {
    if (r != pipeline->agreed.rank) SLUICE_TRY(sluice_stage_tell(pipeline, r, &head, sizeof head, payload, num_spans));
  }
  return SLUICE_OK;
}

static int all_have_ended(const sluice_pipeline_t* pipeline) {
  for (int32_t r = 0; r < pipeline->agreed.num_ranks; ++r) {
    if (r != pipeline->agreed.rank && pipeline->peers[r].done.batch < pipeline->number) return 0;
  }
  return 1;
}

/* No rank ends before all have: a failure on one rank fails the batch on all. */
static sluice_status_t end_together(sluice_pipeline_t* pipeline) {
  sluice_batch_metadata_t* note = &pipeline->peers[pipeline->agreed.rank].notes[pipeline->number % 2];
  SLUICE_TRY(sluice_batch_metadata_store(note, pipeline->note, pipeline->note_count));
  if (pipeline->endpoint == NULL) return SLUICE_OK;
  const uint64_t begin_ns = sluice_now_ns();
  SLUICE_TRY(tell_done(pipeline));
  for (;;) {
    SLUICE_TRY(sluice_stage_check_peers(pipeline));
    if (all_have_ended(pipeline) && pipeline->num_sends == 0) break;
    SLUICE_TRY(sluice_stage_wait(pipeline));
  }
  pipeline->stats.agree_ns += sluice_now_ns() - begin_ns;
  return SLUICE_OK;
}

/* The times of the first training batch, which are the same on all ranks, determine what is in flight from now on. */
static void adopt_times(sluice_pipeline_t* pipeline) {
  const sluice_stage_handshake_t* agreed = &pipeline->agreed;
  if (agreed->replica == 0) {
    for (int32_t k = 0; k < agreed->spec.num_virtual; ++k) {
      const int32_t c = sluice_pipeline_virtual_stage(&agreed->spec, agreed->stage, k);
      pipeline->told[pipeline->number % 2][c] = pipeline->own_times[k];
    }
  }
  pipeline->has_told = 1;
  if (pipeline->has_times || pipeline->forward_only) return;
  memcpy(pipeline->times, pipeline->told[pipeline->number % 2], sizeof pipeline->times);
  pipeline->has_times = 1;
}

static void put_away(sluice_pipeline_t* pipeline) {
  if (pipeline->endpoint != NULL) pipeline->stats.most_message_bytes = sluice_stage_endpoint_peak(pipeline->endpoint);
  if (pipeline->plan == NULL) return;
  sluice_stage_drop_all(pipeline);
  sluice_runner_deinit(&pipeline->runner, sluice_process_allocator());
}

static sluice_status_t run(sluice_pipeline_t* pipeline, sluice_status_t mine) {
  SLUICE_TRY(mine);
  if (pipeline->endpoint != NULL) SLUICE_TRY(sluice_stage_listen(pipeline));
  SLUICE_TRY(prepare(pipeline));
  SLUICE_TRY(walk(pipeline));
  return end_together(pipeline);
}

/* Drains. If this rank cannot even tell the others that it has finished a failed batch, the pipeline ends. */
static sluice_status_t drain(sluice_pipeline_t* pipeline) {
  sluice_status_t status = sluice_stage_drain(pipeline);
  if (status == SLUICE_OK) return SLUICE_OK;
  (void)sluice_stage_break(pipeline, status);
  return sluice_stage_stop(pipeline, status);
}

SLUICE_DEFINE_INIT(sluice_pipeline_batch, .num_micro_batches = 1)

/* A batch that this rank refuses is counted too, so that ranks stay in step. */
sluice_status_t sluice_pipeline_run_batch(sluice_pipeline_t* pipeline, const sluice_pipeline_batch_t* batch) {
  SLUICE_TRY(SLUICE_REQUIRE(pipeline != NULL, "sluice_pipeline_run_batch: pipeline is NULL"));
  sluice_pipeline_batch_t b;
  sluice_pipeline_batch_init(&b, sizeof b);
  const sluice_status_t mine = sluice_struct_copy(&b, sizeof b, batch, sizeof b, "sluice_pipeline_batch_t");
  if (atomic_flag_test_and_set(&pipeline->is_busy)) {
    return SLUICE_FAIL(
        SLUICE_E_BUSY,
        "pipeline: a batch of this pipeline runs already, in another thread or in the batch that called this callback");
  }
  const uint64_t begin_ns = sluice_now_ns();
  sluice_status_t status = pipeline->broken != SLUICE_OK ? sluice_error_adopt(&pipeline->why) : SLUICE_OK;
  if (status == SLUICE_OK) {
    sluice_error_info_t own;
    sluice_error_capture(&own);
    sluice_stage_note_progress(pipeline);
    status = drain(pipeline);
    if (status == SLUICE_OK) {
      begin(pipeline, b.num_micro_batches, b.forward_only);
      if (mine != SLUICE_OK) (void)sluice_error_adopt(&own);
      status = run(pipeline, mine);
      if (status != SLUICE_OK) status = sluice_stage_stop(pipeline, status);
      pipeline->phase = SLUICE_STAGE_IDLE;
      put_away(pipeline);
    }
  }
  if (status == SLUICE_OK) {
    adopt_times(pipeline);
    ++pipeline->stats.num_batches;
  } else {
    ++pipeline->stats.num_failed;
  }
  pipeline->stats.batch_ns += sluice_now_ns() - begin_ns;
  atomic_flag_clear(&pipeline->is_busy);
  return status;
}
