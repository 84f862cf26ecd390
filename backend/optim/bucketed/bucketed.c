// SPDX-License-Identifier: Apache-2.0
#include "backend/optim/bucketed/bucketed.h"

#include <math.h>

#include "backend/base/clock.h"
#include "backend/base/math.h"
#include "backend/optim/bucketed/handshake.h"
#include "backend/optim/bucketed/job.h"
#include "backend/optim/buckets/simulate.h"

/* Measurements of this rank. 0: not yet measured. */
typedef struct measured_s {
  double exchange_seconds; /* the shortest time of a small exchange */
  double sum_seconds_per_element, update_seconds_per_element, copy_in_seconds_per_element, copy_out_seconds_per_element;
} measured_t;

struct sluice_bucketed_s {
  sluice_device_t* device;
  sluice_allocator_t* allocator;
  void* memory; /* slots, kept from step to step, because faulting in new pages costs as much as a sum */
  uint64_t bytes;
  measured_t measured;
};

/* ---- create and destroy ---- */

sluice_status_t sluice_bucketed_create(sluice_device_t* device, sluice_allocator_t* allocator,
                                       sluice_bucketed_t** out_bucketed) {
  *out_bucketed = NULL;
  sluice_bucketed_t* bucketed = sluice_alloc_zeroed(allocator, sizeof *bucketed, "optimizer: buckets");
  if (bucketed == NULL) return sluice_alloc_status();
  bucketed->device = device;
  bucketed->allocator = allocator;
  *out_bucketed = bucketed;
  return SLUICE_OK;
}

static void free_memory(sluice_bucketed_t* bucketed) {
  sluice_free(bucketed->allocator, bucketed->memory, bucketed->bytes);
  bucketed->memory = NULL;
  bucketed->bytes = 0;
}

void sluice_bucketed_destroy(sluice_bucketed_t* bucketed) {
  if (bucketed == NULL) return;
  free_memory(bucketed);
  sluice_free(bucketed->allocator, bucketed, sizeof *bucketed);
}

static sluice_status_t take_memory(sluice_bucketed_t* bucketed, uint64_t bytes) {
  if (bytes <= bucketed->bytes && bucketed->memory != NULL) return SLUICE_OK;
  free_memory(bucketed);
  bucketed->memory = sluice_alloc(bucketed->allocator, bytes, "optimizer: staging of gradients");
  if (bucketed->memory == NULL) return sluice_alloc_status();
  bucketed->bytes = bytes;
  return SLUICE_OK;
}

/* ---- the form of a step ---- */

static sluice_bucket_form_t form_of(const sluice_bucketed_step_t* step, const sluice_lines_t* lines, int64_t chunk,
                                    int is_decided) {
  int64_t longest = 1;
  for (int32_t i = 0; i < lines->num_lines; ++i) longest = sluice_max(longest, lines->counts[i]);
  return (sluice_bucket_form_t){
      .counts = lines->counts,
      .num_lines = lines->num_lines,
      .num_slots = step->file == NULL ? 0 : SLUICE_BUCKET_MAX_SLOTS,
      .bucket = sluice_min(step->bucket, longest),
      .chunk = chunk,
      .num_grad_slots = step->comm == NULL ? 0 : SLUICE_BUCKET_MAX_SLOTS,
      .sums = 1,
      .decides = is_decided,
  };
}

/* ---- choosing k ---- */

enum { FIRST_CHUNK = 2 }; /* the value of the paper, used until there are measurements */

/* Returns the latency of a sum: two exchanges. With two ranks it is one exchange. */
static double seconds_of_a_sum(const measured_t* m) { return 2.0 * m->exchange_seconds; }

/* Returns the k with the shortest predicted step for these lines. */
static int64_t choose(const sluice_bucketed_t* bucketed, const sluice_bucketed_step_t* step,
                      const sluice_lines_t* lines) {
  const measured_t* m = &bucketed->measured;
  if (m->sum_seconds_per_element <= 0.0 || m->update_seconds_per_element <= 0.0) return FIRST_CHUNK;
  const sluice_bucket_prices_t prices = {
      .seconds = {[SLUICE_BUCKET_STAGE] = seconds_of_a_sum(m)},
      .seconds_per_element = {[SLUICE_BUCKET_STAGE] = m->sum_seconds_per_element,
                              [SLUICE_BUCKET_UPDATE] = m->update_seconds_per_element,
                              [SLUICE_BUCKET_COPY_IN] = m->copy_in_seconds_per_element,
                              [SLUICE_BUCKET_COPY_OUT] = m->copy_out_seconds_per_element},
  };
  const sluice_bucket_form_t form = form_of(step, lines, 1, 0);
  return sluice_bucket_best_chunk(&form, &prices, bucketed->allocator, FIRST_CHUNK);
}

static void learn(sluice_bucketed_t* bucketed, const sluice_agreed_t* agreed, const sluice_bucketed_job_t* job) {
  measured_t* m = &bucketed->measured;
  const double latency = (double)agreed->latency_ns * 1e-9;
  if (latency > 0.0 && (m->exchange_seconds <= 0.0 || latency < m->exchange_seconds)) m->exchange_seconds = latency;
  const double sums = (double)job->sum_ns * 1e-9 - (double)job->num_sums * seconds_of_a_sum(m);
  if (job->summed > 0) m->sum_seconds_per_element = (sums > 0.0 ? sums : 0.0) / (double)job->summed;
  if (job->updated == 0) return;
  const double each = 1e-9 / (double)job->updated;
  m->update_seconds_per_element = (double)job->update_ns * each;
  m->copy_in_seconds_per_element = (double)job->copy_in_ns * each;
  m->copy_out_seconds_per_element = (double)job->copy_out_ns * each;
}

/* ---- a step ---- */

static sluice_status_t prepare(sluice_bucketed_t* bucketed, sluice_bucketed_job_t* job,
                               const sluice_bucket_form_t* form, sluice_bucket_plan_t** out_plan) {
  SLUICE_TRY(sluice_bucket_plan_create(form, bucketed->allocator, out_plan));
  SLUICE_TRY(take_memory(bucketed, sluice_bucket_plan_bytes(*out_plan)));
  return form->decides ? sluice_bucketed_job_take_scans(job, bucketed->allocator) : SLUICE_OK;
}

/* A verdict that skips the step ends the run as a failure does, but it is no error and leaves no error record. */
static sluice_status_t run_plan(sluice_bucketed_t* bucketed, sluice_bucketed_job_t* job,
                                const sluice_bucket_plan_t* plan) {
  sluice_error_info_t before;
  sluice_error_capture(&before);
  const sluice_bucket_mode_t* mode = job->step->file != NULL ? &sluice_bucketed_file_mode : &sluice_bucketed_mode;
  const sluice_status_t status = sluice_bucket_run(bucketed->device, plan, bucketed->memory, mode, job, NULL);
  if (!job->is_skipped) return status;
  (void)sluice_error_adopt(&before);
  return SLUICE_OK;
}

/* Aborts the step's communicators, in which other ranks wait for sums that this rank will not send. After PEER_LOST or
 * TIMED_OUT the other ranks fail by themselves and name the lost rank. */
static void tell(const sluice_bucketed_job_t* job, sluice_status_t status) {
  if (job->step->comm == NULL || status == SLUICE_OK || status == SLUICE_E_PEER_LOST || status == SLUICE_E_TIMED_OUT)
    return;
  for (int32_t i = 0; i < job->lines->num_lines; ++i) sluice_comm_abort(job->lines->comms[i]);
  sluice_comm_abort(job->step->comm);
}

/* If all sums were formed, no rank waits for one: with a file, the ranks learn of a failure at the end of the step. */
static int is_heard_later(const sluice_bucketed_job_t* job) {
  int64_t elements = 0;
  for (int32_t i = 0; i < job->lines->num_lines; ++i) elements += job->lines->counts[i];
  return job->step->file != NULL && job->summed == elements && !job->is_unsummed;
}

static sluice_status_t run(sluice_bucketed_t* bucketed, sluice_bucketed_job_t* job, const sluice_bucket_form_t* form,
                           sluice_bucketed_outcome_t* outcome) {
  sluice_bucket_plan_t* plan = NULL;
  sluice_status_t status = prepare(bucketed, job, form, &plan);
  if (status == SLUICE_OK) {
    outcome->staging_bytes = (uint64_t)plan->grad_elements * sizeof(float);
    status = run_plan(bucketed, job, plan);
  }
  if (!is_heard_later(job)) tell(job, status);
  if (plan != NULL && job->step->file != NULL) status = sluice_bucketed_job_end(job, status);
  sluice_bucketed_job_free_scans(job, bucketed->allocator);
  sluice_bucket_plan_destroy(plan, bucketed->allocator);
  return status;
}

static sluice_status_t step_over(sluice_bucketed_t* bucketed, const sluice_bucketed_step_t* step,
                                 const sluice_lines_t* lines, sluice_bucketed_outcome_t* outcome) {
  sluice_agreed_t agreed;
  sluice_agreed_t mine = {.largest = 0.0F};
  sluice_adam_outcome_t looked = {.norm = 0.0};
  if (step->refused == SLUICE_OK) {
    /* With clipping the sums are scanned anyway, and a gradient that is not finite here makes its sum not finite. */
    const int clips = step->adam.max_norm > 0.0;
    if (step->comm == NULL ? step->adam.looks_first || clips : step->adam.looks_first && !clips)
      looked = sluice_adam_look(&step->adam);
    mine.largest = looked.largest;
    mine.proposal = step->chunk > 0 ? step->chunk : choose(bucketed, step, lines);
  }
  SLUICE_TRY(sluice_step_handshake(step, lines, &mine, &agreed));
  outcome->adam.largest = agreed.largest;
  outcome->adam.is_skipped = !(agreed.largest < INFINITY);
  outcome->chunk = step->chunk > 0 ? step->chunk : agreed.proposal;
  if (outcome->adam.is_skipped) return SLUICE_OK;
  outcome->is_decided =
      step->comm != NULL && (step->adam.max_norm > 0.0 || agreed.largest > sluice_largest_safe_gradient(lines));
  sluice_bucketed_job_t job = {.step = step, .lines = lines, .allocator = bucketed->allocator};
  if (step->file != NULL) sluice_bucketed_job_begin(&job);
  job.grad_scale = sluice_adam_clip_factor(step->adam.max_norm, looked.norm) / step->adam.loss_scale;
  outcome->adam.norm = step->comm == NULL ? looked.norm : 0.0;
  const sluice_bucket_form_t form = form_of(step, lines, outcome->chunk, outcome->is_decided);
  SLUICE_TRY(run(bucketed, &job, &form, outcome));
  if (outcome->is_decided) outcome->adam.norm = job.norm, outcome->adam.is_skipped = job.is_skipped;
  outcome->sum_ns = job.sum_ns;
  outcome->update_ns = job.update_ns;
  outcome->copy_in_ns = job.copy_in_ns;
  outcome->copy_out_ns = job.copy_out_ns;
  learn(bucketed, &agreed, &job);
  return SLUICE_OK;
}

sluice_status_t sluice_bucketed_step(sluice_bucketed_t* bucketed, const sluice_bucketed_step_t* step,
                                     sluice_bucketed_outcome_t* out_outcome) {
  const uint64_t begin_ns = sluice_now_ns();
  *out_outcome = (sluice_bucketed_outcome_t){.chunk = 0};
  sluice_bucketed_step_t checked = *step;
  sluice_lines_t lines = {.num_lines = 0};
  if (checked.refused == SLUICE_OK) checked.refused = sluice_adam_check_step(&step->adam);
  if (checked.refused == SLUICE_OK) {
    checked.refused = SLUICE_REQUIRE(step->bucket >= 1, "optimizer: buckets of %lld elements; give at least 1",
                                     (long long)step->bucket);
  }
  if (checked.refused == SLUICE_OK) {
    checked.refused =
        sluice_lines_make(step->adam.groups, step->adam.num_groups, step->comms, bucketed->allocator, &lines);
  }
  const sluice_status_t status = step_over(bucketed, &checked, &lines, out_outcome);
  if (lines.block != NULL) sluice_lines_free(&lines, bucketed->allocator);
  out_outcome->step_ns = sluice_now_ns() - begin_ns;
  return status;
}
