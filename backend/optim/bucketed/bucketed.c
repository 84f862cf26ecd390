// SPDX-License-Identifier: Apache-2.0
#include "backend/optim/bucketed/bucketed.h"

#include <math.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/dtype.h"
#include "backend/base/log.h"
#include "backend/base/math.h"
#include "backend/optim/bucketed/handshake.h"
#include "backend/optim/buckets/plan.h"
#include "backend/optim/file/state_file.h"
#include "backend/optim/lines.h"

/* ---- the ops of a step ---- */

/* Elements of a parameter before the step. */
typedef struct saved_params_s {
  struct saved_params_s* next;
  void* param;
  uint64_t bytes; /* of the elements, which follow this struct */
} saved_params_t;

typedef struct job_s {
  const sluice_bucketed_step_t* step;
  const sluice_lines_t* lines;
  sluice_allocator_t* allocator;
  double grad_scale; /* of updates; set by the verdict */
  /* Times of the sum lane and of the update lane. Valid after the run. */
  uint64_t sum_ns, update_ns, copy_in_ns, copy_out_ns;
  int64_t summed, updated; /* elements */
  int64_t num_sums;
  int32_t is_unsummed; /* a sum failed on this rank */
  /* Only for states in a file. */
  int32_t has_begun; /* the file's next step has begun, with the first bucket that was written */
  sluice_state_sum_t sums[SLUICE_NUM_STATES]; /* checksums of what was read */
  saved_params_t* saved; /* earlier values of parameters that are not the file's masters, rounded */
  /* Only if the plan decides. */
  sluice_adam_scan_t* scans; /* [lines->num_pieces] */
  double norm;
  int32_t is_skipped; /* the verdict ended the run */
} job_t;

static sluice_status_t take_scans(job_t* job, sluice_allocator_t* allocator) {
  job->scans = sluice_alloc_zeroed(allocator, (uint64_t)job->lines->num_pieces * sizeof *job->scans,
                                   "optimizer: what is in pieces of sums");
  return job->scans != NULL ? SLUICE_OK : sluice_alloc_status();
}

static void free_scans(job_t* job, sluice_allocator_t* allocator) {
  sluice_free(allocator, job->scans, (uint64_t)job->lines->num_pieces * sizeof *job->scans);
  job->scans = NULL;
}

static const char* grad_at(const sluice_adam_tensor_t* tensor, int64_t first) {
  return (const char*)tensor->grad + first * (int64_t)sluice_dtype_bytes(tensor->grad_dtype);
}

/* ---- sums ---- */

/* Returns the dtype of all gradients of a part; f32 if they differ. */
static int32_t common_dtype(const sluice_lines_t* lines, const sluice_bucket_part_t* part) {
  const int64_t end = part->first + part->count;
  int32_t dtype = 0;
  for (int64_t at = part->first; at < end;) {
    const sluice_line_run_t run = sluice_lines_run(lines, at, end);
    if (dtype != 0 && dtype != run.of->tensor->grad_dtype) return SLUICE_DTYPE_F32;
    dtype = run.of->tensor->grad_dtype;
    at += run.count;
  }
  return dtype;
}

static void widen(const void* from, int32_t dtype, int64_t count, float* out) {
  const uint16_t* half = from;
  for (int64_t i = 0; i < count; ++i) {
    out[i] = dtype == SLUICE_DTYPE_BF16 ? sluice_bf16_to_f32(half[i]) : sluice_f16_to_f32(half[i]);
  }
}

/* Packs the gradients of several tensors in `dtype`, at the end of the memory that receives their sum. */
static const void* pack(const sluice_lines_t* lines, const sluice_bucket_part_t* part, int32_t dtype) {
  const int64_t bytes = (int64_t)sluice_dtype_bytes(dtype), end = part->first + part->count;
  char* packed = (char*)(void*)(part->grad + part->count) - part->count * bytes;
  for (int64_t at = part->first; at < end;) {
    const sluice_line_run_t run = sluice_lines_run(lines, at, end);
    const sluice_adam_tensor_t* tensor = run.of->tensor;
    char* to = packed + (at - part->first) * bytes;
    if (tensor->grad_dtype == dtype) {
      memcpy(to, grad_at(tensor, run.first), (size_t)(run.count * bytes));
    } else {
      widen(grad_at(tensor, run.first), tensor->grad_dtype, run.count, (float*)(void*)to);
    }
    at += run.count;
  }
  return packed;
}

static sluice_status_t sum(const job_t* job, const sluice_bucket_part_t* part) {
  sluice_comm_t* comm = job->lines->comms[part->line];
  const sluice_line_run_t run = sluice_lines_run(job->lines, part->first, part->first + part->count);
  const int is_one = run.count == part->count;
  const int32_t dtype = is_one ? run.of->tensor->grad_dtype : common_dtype(job->lines, part);
  const void* data = is_one ? grad_at(run.of->tensor, run.first) : pack(job->lines, part, dtype);
  /* With f32, packed gradients fill exactly the memory of their sum. */
  if (data == part->grad) {
    return sluice_comm_all_reduce_f32(comm, part->grad, part->count, SLUICE_DTYPE_F32, "the sum of a chunk");
  }
  return sluice_comm_sum_f32(comm, data, part->count, dtype, part->grad, "the sum of a chunk");
}

static sluice_status_t stage(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  (void)stream;
  job_t* job = user;
  const uint64_t begin_ns = sluice_now_ns();
  const sluice_status_t status = sum(job, part);
  if (status != SLUICE_OK) job->is_unsummed = 1;
  job->sum_ns += sluice_now_ns() - begin_ns;
  job->summed += part->count;
  ++job->num_sums;
  return status;
}

/* ---- the verdict ---- */

typedef struct looking_s {
  const job_t* job;
  const float* grads; /* of all lines */
  int64_t begin, end; /* pieces */
} looking_t;

static void look_on_thread(void* data, int index, int count) {
  const looking_t* looking = data;
  const job_t* job = looking->job;
  const int64_t pieces = looking->end - looking->begin;
  const int64_t end = looking->begin + pieces * (index + 1) / count;
  for (int64_t p = looking->begin + pieces * index / count; p < end; ++p) {
    const sluice_line_run_t piece = sluice_lines_piece(job->lines, p);
    job->scans[p] =
        job->step->adam.kernels->scan(looking->grads + piece.of->first, SLUICE_DTYPE_F32, piece.first, piece.count);
  }
}

static int threads_for(const job_t* job, int64_t most) {
  return (int)sluice_min(sluice_threads_available(job->step->adam.threads), sluice_max(most, 1));
}

/* Scans the pieces that end in this chunk. Their first elements may have been staged with an earlier chunk. */
static sluice_status_t look(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  (void)stream;
  const job_t* job = user;
  looking_t looking = {job, part->grads, sluice_lines_pieces_before(job->lines, part->first),
                       sluice_lines_pieces_before(job->lines, part->first + part->count)};
  sluice_threads_run(job->step->adam.threads, threads_for(job, looking.end - looking.begin), look_on_thread, &looking);
  return SLUICE_OK;
}

/* Sums of squares of lines that all ranks have are the same on all ranks. For other lines, each of their ranks
 * contributes an equal share. */
static sluice_status_t decide(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  (void)stream;
  (void)part;
  job_t* job = user;
  const sluice_lines_t* lines = job->lines;
  const sluice_adam_step_t* adam = &job->step->adam;
  sluice_found_t mine = {.squares = 0.0};
  double squares = 0.0;
  for (int32_t i = 0; i < lines->num_lines; ++i) {
    const int64_t first = lines->first_pieces[i];
    const sluice_adam_scan_t found = sluice_adam_fold(job->scans + first, lines->first_pieces[i + 1] - first);
    const int is_own = lines->comms[i] != job->step->comm;
    if (is_own) mine.squares += found.sum_of_squares / sluice_comm_world_size(lines->comms[i]);
    if (!is_own) squares += found.sum_of_squares;
    mine.largest = found.largest > mine.largest ? found.largest : mine.largest;
  }
  sluice_found_t all;
  SLUICE_TRY(sluice_handshake_on_sums(job->step->comm, &mine, &all));
  job->norm = sqrt(squares + all.squares) / adam->loss_scale;
  job->is_skipped = !(all.largest < INFINITY);
  job->grad_scale = sluice_adam_clip_factor(adam->max_norm, job->norm) / adam->loss_scale;
  /* This error ends the run before the first update; sluice_bucketed_step checks is_skipped. */
  return job->is_skipped ? SLUICE_FAIL(SLUICE_E_STATE, "optimizer: a sum of gradients is infinite or NaN") : SLUICE_OK;
}

/* ---- updates ---- */

typedef struct updating_s {
  const job_t* job;
  const sluice_bucket_part_t* part;
} updating_t;

/* Returns the elements of a run as a tensor. Its states are those of the slot, or else those of the tensor. */
static sluice_adam_tensor_t view(const sluice_bucket_part_t* part, const sluice_line_run_t* run, int64_t at) {
  const sluice_adam_tensor_t* t = run->of->tensor;
  const int64_t in_part = at - part->first;
  return (sluice_adam_tensor_t){
      .count = run->count,
      .step = t->step,
      .param = (char*)t->param + run->first * (int64_t)sluice_dtype_bytes(t->param_dtype),
      .master = part->slot.master != NULL ? part->slot.master + in_part
                : t->master == NULL       ? NULL
                                          : t->master + run->first,
      .grad = part->grad != NULL ? (const void*)(part->grad + in_part) : grad_at(t, run->first),
      .exp_avg = part->slot.exp_avg != NULL ? part->slot.exp_avg + in_part : t->exp_avg + run->first,
      .exp_avg_sq = part->slot.exp_avg_sq != NULL ? part->slot.exp_avg_sq + in_part : t->exp_avg_sq + run->first,
      .param_dtype = t->param_dtype,
      .grad_dtype = part->grad != NULL ? SLUICE_DTYPE_F32 : t->grad_dtype,
  };
}

static void update_on_thread(void* data, int index, int count) {
  const updating_t* updating = data;
  const job_t* job = updating->job;
  const sluice_bucket_part_t* part = updating->part;
  const int64_t end = part->first + part->count * (index + 1) / count;
  for (int64_t at = part->first + part->count * index / count; at < end;) {
    const sluice_line_run_t run = sluice_lines_run(job->lines, at, end);
    const sluice_adam_tensor_t tensor = view(part, &run, at);
    const sluice_adam_numbers_t numbers = sluice_adam_numbers_of(&run.of->group->rule, tensor.step, job->grad_scale);
    job->step->adam.kernels->update(&tensor, 0, run.count, &numbers);
    at += run.count;
  }
}

enum { LEAST_FOR_A_THREAD = 4096 }; /* elements; fewer are updated before another thread wakes up */

static sluice_status_t update(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  (void)stream;
  job_t* job = user;
  const uint64_t begin_ns = sluice_now_ns();
  updating_t updating = {job, part};
  sluice_threads_run(job->step->adam.threads, threads_for(job, part->count / LEAST_FOR_A_THREAD), update_on_thread,
                     &updating);
  job->update_ns += sluice_now_ns() - begin_ns;
  job->updated += part->count;
  return SLUICE_OK;
}

/* ---- states in a file ---- */

static void begin_sums(job_t* job) {
  for (int32_t i = 0; i < SLUICE_NUM_STATES; ++i) sluice_state_sum_begin(job->sums + i);
}

/* The host has written these parameters, so they cannot be restored from the file. */
static sluice_status_t save_params(job_t* job, const sluice_line_run_t* run) {
  const sluice_adam_tensor_t* t = run->of->tensor;
  const uint64_t of_one = sluice_dtype_bytes(t->param_dtype), bytes = (uint64_t)run->count * of_one;
  saved_params_t* saved = sluice_alloc(job->allocator, sizeof *saved + bytes, "optimizer: parameters before a step");
  if (saved == NULL) return sluice_alloc_status();
  *saved = (saved_params_t){job->saved, (char*)t->param + (uint64_t)run->first * of_one, bytes};
  memcpy(saved + 1, saved->param, bytes);
  job->saved = saved;
  return SLUICE_OK;
}

/* The parameter is the truth, since the host reads and writes it. The file's master is used only as long as the
 * parameter is that master, rounded. */
static sluice_status_t take_params(job_t* job, int64_t first, int64_t count, float* masters) {
  for (int64_t at = first; at < first + count;) {
    const sluice_line_run_t run = sluice_lines_run(job->lines, at, first + count);
    float* of_run = masters + (at - first);
    if (!sluice_param_is_rounded(run.of->tensor, run.first, run.count, of_run)) {
      SLUICE_TRY(save_params(job, &run));
      sluice_param_to_masters(run.of->tensor, run.first, run.count, of_run);
    }
    at += run.count;
  }
  return SLUICE_OK;
}

enum { COMPARED_AT_ONCE = 1 << 15 }; /* elements that are still in the caches */

static sluice_status_t copy_in(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  (void)stream;
  job_t* job = user;
  const uint64_t begin_ns = sluice_now_ns();
  float* const slot[SLUICE_NUM_STATES] = {part->slot.master, part->slot.exp_avg, part->slot.exp_avg_sq};
  for (int32_t i = 0; i < SLUICE_NUM_STATES; ++i) {
    for (int64_t done = 0; done < part->count; done += COMPARED_AT_ONCE) {
      const int64_t first = part->first + done, count = sluice_min(COMPARED_AT_ONCE, part->count - done);
      SLUICE_TRY(sluice_state_file_read(job->step->file, i, first, count, slot[i] + done, job->sums + i));
      if (i == SLUICE_STATE_MASTER) SLUICE_TRY(take_params(job, first, count, slot[i] + done));
    }
  }
  job->copy_in_ns += sluice_now_ns() - begin_ns;
  return SLUICE_OK;
}

static sluice_status_t copy_out(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  (void)stream;
  job_t* job = user;
  const uint64_t begin_ns = sluice_now_ns();
  const float* const slot[SLUICE_NUM_STATES] = {part->slot.master, part->slot.exp_avg, part->slot.exp_avg_sq};
  if (!job->has_begun) {
    SLUICE_TRY(sluice_state_file_begin(job->step->file, job->lines->tensors[0].tensor->step));
    job->has_begun = 1;
  }
  for (int32_t i = 0; i < SLUICE_NUM_STATES; ++i) {
    SLUICE_TRY(sluice_state_file_write(job->step->file, i, part->first, part->count, slot[i]));
  }
  job->copy_out_ns += sluice_now_ns() - begin_ns;
  return SLUICE_OK;
}

/* Restores parameters. Buckets are updated in order, so [0, job->updated) is what changed. The first failure is
 * returned; a failure to restore is logged, and no step runs until the parameters are loaded. */
static void give_back(const job_t* job) {
  sluice_error_info_t why;
  sluice_error_capture(&why);
  const sluice_adam_step_t* adam = &job->step->adam;
  sluice_state_file_give_up(job->step->file);
  if (sluice_states_load_params(job->step->file, adam->groups, adam->num_groups, job->updated) != SLUICE_OK) {
    sluice_error_info_t second;
    sluice_error_capture(&second);
    sluice_state_file_set_mixed(job->step->file, 1);
    sluice_log(SLUICE_LOG_ERROR,
               "optimizer: a step failed, and parameters could not be restored: %s; load them from the file",
               second.message);
  }
  for (const saved_params_t* saved = job->saved; saved != NULL; saved = saved->next) {
    memcpy(saved->param, saved + 1, saved->bytes);
  }
  (void)sluice_error_adopt(&why);
}

static void free_saved(job_t* job) {
  while (job->saved != NULL) {
    saved_params_t* saved = job->saved;
    job->saved = saved->next;
    sluice_free(job->allocator, saved, sizeof *saved + saved->bytes);
  }
}

/* All ranks have written everything; now each marks the step as whole in its file. If one rank fails, all ranks undo
 * it. */
static sluice_status_t end_file(const job_t* job) {
  sluice_state_file_t* file = job->step->file;
  const sluice_status_t ended = sluice_state_file_end(file);
  const sluice_status_t status = sluice_handshake_on_end(job->step->comm, ended);
  if (ended == SLUICE_OK && status != SLUICE_OK) {
    sluice_error_info_t why;
    sluice_error_capture(&why);
    sluice_state_file_take_back(file);
    return sluice_error_adopt(&why);
  }
  return status;
}

/* ran: how the run ended. The file advances to the next step on all ranks or on none; on none, parameters are restored
 * to their values before the step. Errors: `ran`, or an error of this or another rank's file. */
static sluice_status_t end_with_file(job_t* job, sluice_status_t ran) {
  sluice_status_t status = ran;
  if (!job->is_skipped) {
    if (status == SLUICE_OK) status = sluice_state_file_check_sums(job->step->file, job->sums);
    if (status == SLUICE_OK) status = sluice_state_file_seal(job->step->file);
    status = sluice_handshake_on_end(job->step->comm, status);
    if (status == SLUICE_OK) status = end_file(job);
    if (status != SLUICE_OK) give_back(job);
  }
  free_saved(job);
  return status;
}

/* ---- modes, for states in tensors and in a file ---- */

static const sluice_bucket_mode_t in_tensors = {.ops = {
                                                    [SLUICE_BUCKET_STAGE] = stage,
                                                    [SLUICE_BUCKET_LOOK] = look,
                                                    [SLUICE_BUCKET_DECIDE] = decide,
                                                    [SLUICE_BUCKET_UPDATE] = update,
                                                }};

/* A rank whose file fails still sums: the other ranks learn of the failure after the last bucket, and then restore
 * their parameters. */
static const sluice_bucket_mode_t in_file = {.ops =
                                                 {
                                                     [SLUICE_BUCKET_COPY_IN] = copy_in,
                                                     [SLUICE_BUCKET_STAGE] = stage,
                                                     [SLUICE_BUCKET_LOOK] = look,
                                                     [SLUICE_BUCKET_DECIDE] = decide,
                                                     [SLUICE_BUCKET_UPDATE] = update,
                                                     [SLUICE_BUCKET_COPY_OUT] = copy_out,
                                                 },
                                             .runs_on_failure = {
                                                 [SLUICE_BUCKET_STAGE] = 1,
                                                 [SLUICE_BUCKET_LOOK] = 1,
                                                 [SLUICE_BUCKET_DECIDE] = 1,
                                             }};

/* ---- a state that lasts from step to step ---- */

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

static void learn(sluice_bucketed_t* bucketed, const sluice_agreed_t* agreed, const job_t* job) {
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

static sluice_status_t prepare(sluice_bucketed_t* bucketed, job_t* job, const sluice_bucket_form_t* form,
                               sluice_bucket_plan_t** out_plan) {
  SLUICE_TRY(sluice_bucket_plan_create(form, bucketed->allocator, out_plan));
  SLUICE_TRY(take_memory(bucketed, sluice_bucket_plan_bytes(*out_plan)));
  return form->decides ? take_scans(job, bucketed->allocator) : SLUICE_OK;
}

/* A verdict that skips the step ends the run as a failure does, but it is no error and leaves no error record. */
static sluice_status_t run_plan(sluice_bucketed_t* bucketed, job_t* job, const sluice_bucket_plan_t* plan) {
  sluice_error_info_t before;
  sluice_error_capture(&before);
  const sluice_bucket_mode_t* mode = job->step->file != NULL ? &in_file : &in_tensors;
  const sluice_status_t status = sluice_bucket_run(bucketed->device, plan, bucketed->memory, mode, job, NULL);
  if (!job->is_skipped) return status;
  (void)sluice_error_adopt(&before);
  return SLUICE_OK;
}

/* Aborts the step's communicators, in which other ranks wait for sums that this rank will not send. After PEER_LOST or
 * TIMED_OUT the other ranks fail by themselves and name the lost rank. */
static void tell(const job_t* job, sluice_status_t status) {
  if (job->step->comm == NULL || status == SLUICE_OK || status == SLUICE_E_PEER_LOST || status == SLUICE_E_TIMED_OUT)
    return;
  for (int32_t i = 0; i < job->lines->num_lines; ++i) sluice_comm_abort(job->lines->comms[i]);
  sluice_comm_abort(job->step->comm);
}

/* If all sums were formed, no rank waits for one: with a file, the ranks learn of a failure at the end of the step. */
static int is_heard_later(const job_t* job) {
  int64_t elements = 0;
  for (int32_t i = 0; i < job->lines->num_lines; ++i) elements += job->lines->counts[i];
  return job->step->file != NULL && job->summed == elements && !job->is_unsummed;
}

static sluice_status_t run(sluice_bucketed_t* bucketed, job_t* job, const sluice_bucket_form_t* form,
                           sluice_bucketed_outcome_t* outcome) {
  sluice_bucket_plan_t* plan = NULL;
  sluice_status_t status = prepare(bucketed, job, form, &plan);
  if (status == SLUICE_OK) {
    outcome->staging_bytes = (uint64_t)plan->grad_elements * sizeof(float);
    status = run_plan(bucketed, job, plan);
  }
  if (!is_heard_later(job)) tell(job, status);
  if (plan != NULL && job->step->file != NULL) status = end_with_file(job, status);
  free_scans(job, bucketed->allocator);
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
  job_t job = {.step = step, .lines = lines, .allocator = bucketed->allocator};
  if (step->file != NULL) begin_sums(&job);
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
