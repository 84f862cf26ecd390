// SPDX-License-Identifier: Apache-2.0
#include "backend/optim/bucketed/job.h"

#include <math.h>
#include <string.h>

#include "backend/base/clock.h"
#include "backend/base/dtype.h"
#include "backend/base/log.h"
#include "backend/base/math.h"
#include "backend/optim/bucketed/handshake.h"
#include "backend/optim/file/load.h"

sluice_status_t sluice_bucketed_job_take_scans(sluice_bucketed_job_t* job, sluice_allocator_t* allocator) {
  job->scans = sluice_alloc_zeroed(allocator, (uint64_t)job->lines->num_pieces * sizeof *job->scans,
                                   "optimizer: what is in pieces of sums");
  return job->scans != NULL ? SLUICE_OK : sluice_alloc_status();
}

void sluice_bucketed_job_free_scans(sluice_bucketed_job_t* job, sluice_allocator_t* allocator) {
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

static sluice_status_t sum(const sluice_bucketed_job_t* job, const sluice_bucket_part_t* part) {
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
  sluice_bucketed_job_t* job = user;
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
  const sluice_bucketed_job_t* job;
  const float* grads; /* of all lines */
  int64_t begin, end; /* pieces */
} looking_t;

static void look_on_thread(void* data, int index, int count) {
  const looking_t* looking = data;
  const sluice_bucketed_job_t* job = looking->job;
  const int64_t pieces = looking->end - looking->begin;
  const int64_t end = looking->begin + pieces * (index + 1) / count;
  for (int64_t p = looking->begin + pieces * index / count; p < end; ++p) {
    const sluice_line_run_t piece = sluice_lines_piece(job->lines, p);
    job->scans[p] =
        job->step->adam.kernels->scan(looking->grads + piece.of->first, SLUICE_DTYPE_F32, piece.first, piece.count);
  }
}

static int threads_for(const sluice_bucketed_job_t* job, int64_t most) {
  return (int)sluice_min(sluice_threads_available(job->step->adam.threads), sluice_max(most, 1));
}

/* Scans the pieces that end in this chunk. Their first elements may have been staged with an earlier chunk. */
static sluice_status_t look(void* user, sluice_stream_t stream, const sluice_bucket_part_t* part) {
  (void)stream;
  const sluice_bucketed_job_t* job = user;
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
  sluice_bucketed_job_t* job = user;
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
  const sluice_bucketed_job_t* job;
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
  const sluice_bucketed_job_t* job = updating->job;
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
  sluice_bucketed_job_t* job = user;
  const uint64_t begin_ns = sluice_now_ns();
  updating_t updating = {job, part};
  sluice_threads_run(job->step->adam.threads, threads_for(job, part->count / LEAST_FOR_A_THREAD), update_on_thread,
                     &updating);
  job->update_ns += sluice_now_ns() - begin_ns;
  job->updated += part->count;
  return SLUICE_OK;
}

/* ---- states in a file ---- */

void sluice_bucketed_job_begin(sluice_bucketed_job_t* job) {
  for (int32_t i = 0; i < SLUICE_NUM_STATES; ++i) sluice_state_sum_begin(job->sums + i);
}

/* The host has written these parameters, so they cannot be restored from the file. */
static sluice_status_t save_params(sluice_bucketed_job_t* job, const sluice_line_run_t* run) {
  const sluice_adam_tensor_t* t = run->of->tensor;
  const uint64_t of_one = sluice_dtype_bytes(t->param_dtype), bytes = (uint64_t)run->count * of_one;
  sluice_saved_params_t* saved =
      sluice_alloc(job->allocator, sizeof *saved + bytes, "optimizer: parameters before a step");
  if (saved == NULL) return sluice_alloc_status();
  *saved = (sluice_saved_params_t){job->saved, (char*)t->param + (uint64_t)run->first * of_one, bytes};
  memcpy(saved + 1, saved->param, bytes);
  job->saved = saved;
  return SLUICE_OK;
}

/* The parameter is the truth, since the host reads and writes it. The file's master is used only as long as the
 * parameter is that master, rounded. */
static sluice_status_t take_params(sluice_bucketed_job_t* job, int64_t first, int64_t count, float* masters) {
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
  sluice_bucketed_job_t* job = user;
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
  sluice_bucketed_job_t* job = user;
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
static void give_back(const sluice_bucketed_job_t* job) {
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
  for (const sluice_saved_params_t* saved = job->saved; saved != NULL; saved = saved->next) {
    memcpy(saved->param, saved + 1, saved->bytes);
  }
  (void)sluice_error_adopt(&why);
}

static void free_saved(sluice_bucketed_job_t* job) {
  while (job->saved != NULL) {
    sluice_saved_params_t* saved = job->saved;
    job->saved = saved->next;
    sluice_free(job->allocator, saved, sizeof *saved + saved->bytes);
  }
}

/* All ranks have written everything; now each marks the step as whole in its file. If one rank fails, all ranks undo
 * it. */
static sluice_status_t end_file(const sluice_bucketed_job_t* job) {
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

sluice_status_t sluice_bucketed_job_end(sluice_bucketed_job_t* job, sluice_status_t ran) {
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

/* ---- modes ---- */

const sluice_bucket_mode_t sluice_bucketed_mode = {.ops = {
                                                       [SLUICE_BUCKET_STAGE] = stage,
                                                       [SLUICE_BUCKET_LOOK] = look,
                                                       [SLUICE_BUCKET_DECIDE] = decide,
                                                       [SLUICE_BUCKET_UPDATE] = update,
                                                   }};

/* A rank whose file fails still sums: the other ranks learn of the failure after the last bucket, and then restore
 * their parameters. */
const sluice_bucket_mode_t sluice_bucketed_file_mode = {.ops =
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
