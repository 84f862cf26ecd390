// SPDX-License-Identifier: Apache-2.0
/* dW2 = sum of dy^T (w a), dW1, dW3 = sum of dT_M^T T_DI, db1, db3 = sum of dT_M, db2 = sum of w dy, over the rows of
 * an expert: at once, or chunk by chunk. If W is frozen, those of its adapters: dB = G^T P, dA = U^T X (low_rank.h).
 *
 * If several chunks add to a 16-bit gradient, their sum is f32 and rounded once, at the end: a running sum in 16 bits
 * would lose small addends. The sums lie in T_DW's slot, one block for each local expert that several chunks touch, or,
 * if one op computes all chunks expert by expert, one block for all. */
#include "backend/moe/ops/run_op.h"

#include <string.h>

#include "backend/base/dtype.h"
#include "backend/moe/ops/expert_math.h"
#include "backend/moe/ops/low_rank.h"
#include "backend/moe/pass/weight_sums.h"

enum {
  W1 = SLUICE_W1,
  W3 = SLUICE_W3,
  W2 = SLUICE_W2,
  B1 = SLUICE_B1,
  B3 = SLUICE_B3,
  B2 = SLUICE_B2,
  NUM_MEMBERS = SLUICE_NUM_PARAMETERS
};

/* ---- rows ---- */

/* Rows of a chunk, or of all chunks (-1), which are then contiguous in expert-major tensors. */
static void* rows_at(const sluice_pass_t* pass, int32_t tensor, int32_t chunk, int32_t local) {
  return sluice_pass_rows(pass, tensor, chunk < 0 ? 0 : chunk, local);
}

/* ---- one expert, one run of rows ---- */

/* Where the gradients of an expert are written: the host's tensors, or sums of the same orientation. */
typedef struct target_s {
  int is_wanted[NUM_MEMBERS];
  sluice_matrix_t matrix[NUM_MEMBERS];
  int64_t rows[NUM_MEMBERS], columns[NUM_MEMBERS];
  void* bias[NUM_MEMBERS]; /* B1 .. B2 */
  int32_t dtype[NUM_MEMBERS];
  int32_t accumulate[NUM_MEMBERS];
} target_t;

static int is_bias(int member) { return member >= B1 && member <= B2; }

/* What one walk over the experts adds: gradients of their own parameters, or of one adapter, whose factors share T_LOW
 * with others. */
typedef struct walk_s {
  sluice_linear_t linear;
  const sluice_low_term_t* term;           /* NULL: the parameters */
  int32_t half;                            /* of T_LOW, in which U is; P is in the first */
  const sluice_tensor_t* all[NUM_MEMBERS]; /* gradients that this walk writes; NULL: not wanted, or of another walk */
} walk_t;

static int is_wanted(const sluice_pass_t* pass, const walk_t* walk, int member) {
  return sluice_gradient_is_wanted(&pass->moe->shape, walk->all, member);
}

/* sums: the expert's block, or NULL. Only 16-bit gradients have sums. */
static target_t target_of(const sluice_pass_t* pass, const walk_t* walk, int32_t e, char* sums, int add_to_host,
                          int add_to_sums) {
  target_t target;
  memset(&target, 0, sizeof target);
  for (int m = 0; m < NUM_MEMBERS; ++m) {
    if (!is_wanted(pass, walk, m)) continue;
    const sluice_tensor_t* grad = &walk->all[m][e];
    target.is_wanted[m] = 1;
    int in_sums = sums != NULL && sluice_is_short_dtype(sluice_tensor_dtype(grad));
    target.dtype[m] = in_sums ? SLUICE_DTYPE_F32 : sluice_tensor_dtype(grad);
    target.accumulate[m] = in_sums ? add_to_sums : add_to_host;
    void* data = in_sums ? sums + sluice_weight_sum_offset(&pass->moe->shape, m) : sluice_tensor_data(grad);
    if (is_bias(m)) {
      target.bias[m] = data;
      continue;
    }
    target.rows[m] = grad->shape[0], target.columns[m] = grad->shape[1];
    target.matrix[m] = sluice_tensor_matrix(grad);
    if (!in_sums) continue;
    int by_rows = sluice_tensor_stride(grad, 1) == 1;
    target.matrix[m] = (sluice_matrix_t){data, by_rows ? grad->shape[1] : 1, by_rows ? 1 : grad->shape[0]};
  }
  return target;
}

/* GEMMs that are collected to run as one list, so that threads synchronize once. No two have the same result. */
typedef struct batch_s {
  sluice_pass_t* pass;
  const sluice_op_t* op;
  const walk_t* walk;
  int64_t count;
  int32_t dtype, accumulate; /* of their results */
  int32_t rounds_late;       /* sums are rounded after the GEMMs of all experts */
} batch_t;

static sluice_status_t run_batch(batch_t* batch) {
  const int64_t count = batch->count;
  batch->count = 0;
  return sluice_grouped_gemm_run(batch->pass, batch->op, count, batch->dtype, batch->accumulate ? 1 : 0);
}

static sluice_status_t add_gemm(batch_t* batch, const target_t* to, int member, sluice_matrix_t dy, sluice_matrix_t x,
                                int64_t rows) {
  if (!to->is_wanted[member]) return SLUICE_OK;
  const int fits = batch->count < sluice_pass_gemms(&batch->pass->moe->shape) && batch->dtype == to->dtype[member] &&
                   batch->accumulate == to->accumulate[member];
  if (!fits) SLUICE_TRY(run_batch(batch));
  batch->dtype = to->dtype[member];
  batch->accumulate = to->accumulate[member];
  batch->pass->gemms[batch->count++] =
      (sluice_gemm_problem_t){to->rows[member], to->columns[member], rows, sluice_transpose(dy), x, to->matrix[member]};
  return SLUICE_OK;
}

static sluice_status_t add_adapter(batch_t* batch, int32_t chunk, int32_t e, const target_t* to) {
  const sluice_pass_t* pass = batch->pass;
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  const sluice_low_term_t* term = batch->walk->term;
  const int is_down = batch->walk->linear == SLUICE_LINEAR_DOWN;
  const uint64_t element = sluice_dtype_bytes(c->dtype);
  const int64_t rows = sluice_rows_of_expert(pass, chunk, e), hidden = c->hidden_width;
  void* low = rows_at(pass, SLUICE_T_LOW, chunk, e);
  const sluice_matrix_t p = sluice_low_matrix(pass, low, 0), u = sluice_low_matrix(pass, low, batch->walk->half);
  void* dy = rows_at(pass, is_down ? SLUICE_T_DDO : SLUICE_T_DM, chunk, e);
  const int64_t width = is_down ? c->model_width : pass->moe->shape.gate_factor * hidden;
  const sluice_matrix_t g = sluice_rows_matrix(dy, width, term->first, element);
  const sluice_matrix_t x = sluice_rows_matrix(rows_at(pass, is_down ? SLUICE_T_DACT : SLUICE_T_DI, chunk, e),
                                               is_down ? hidden : c->model_width, 0, element);
  SLUICE_TRY(add_gemm(batch, to, term->parameter, u, x, rows));
  SLUICE_TRY(add_gemm(batch, to, term->parameter + 1, g, p, rows));
  if (term->b_lower == NULL) return SLUICE_OK;
  return add_gemm(batch, to, SLUICE_LB3, sluice_rows_matrix(dy, width, hidden, element), p, rows);
}

/* Whether the gradients of W1 and W3 are one matrix, as the parameters are in most hosts: then one GEMM fills a GPU
 * better. Not used on a CPU, where GEMM libraries choose kernels by size and were measured with separate matrices. */
static int are_one(const sluice_pass_t* pass, const target_t* to) {
  const sluice_matrix_t *w1 = &to->matrix[W1], *w3 = &to->matrix[W3];
  if (pass->context->device_type != SLUICE_DEVICE_CUDA || !to->is_wanted[W1] || !to->is_wanted[W3]) return 0;
  const int64_t distance = to->rows[W1] * w1->row_stride * (int64_t)sluice_dtype_bytes(to->dtype[W1]);
  const int is_matrix =
      w1->col_stride == 1 || (w1->row_stride == 1 && w1->col_stride >= to->rows[W1] + to->rows[W3]); /* transposed */
  return is_matrix && to->dtype[W1] == to->dtype[W3] && to->accumulate[W1] == to->accumulate[W3] &&
         w1->row_stride == w3->row_stride && w1->col_stride == w3->col_stride &&
         (char*)w1->data + distance == (char*)w3->data;
}

static sluice_status_t add_gemms(batch_t* batch, int32_t chunk, int32_t e, const target_t* to) {
  const sluice_pass_t* pass = batch->pass;
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  uint64_t element = sluice_dtype_bytes(c->dtype);
  int64_t rows = sluice_rows_of_expert(pass, chunk, e), width = pass->moe->shape.gate_factor * c->hidden_width;
  sluice_matrix_t dy = sluice_rows_matrix(rows_at(pass, SLUICE_T_DDO, chunk, e), c->model_width, 0, element);
  sluice_matrix_t x = sluice_rows_matrix(rows_at(pass, SLUICE_T_DI, chunk, e), c->model_width, 0, element);
  sluice_matrix_t act = sluice_rows_matrix(rows_at(pass, SLUICE_T_DACT, chunk, e), c->hidden_width, 0, element);
  void* dm = rows_at(pass, SLUICE_T_DM, chunk, e);
  sluice_matrix_t dm1 = sluice_rows_matrix(dm, width, 0, element);
  sluice_matrix_t dm3 = sluice_rows_matrix(dm, width, c->hidden_width, element);
  SLUICE_TRY(add_gemm(batch, to, W2, dy, act, rows));
  if (are_one(pass, to)) {
    target_t both = *to;
    both.rows[W1] += to->rows[W3];
    return add_gemm(batch, &both, W1, dm1, x, rows);
  }
  SLUICE_TRY(add_gemm(batch, to, W1, dm1, x, rows));
  return add_gemm(batch, to, W3, dm3, x, rows);
}

static void add_biases(const sluice_pass_t* pass, const sluice_op_t* op, int32_t chunk, int32_t e, const target_t* to) {
  const sluice_moe_config_t* c = &pass->moe->shape.config;
  const sluice_kernels_t* kernels = pass->context->device->kernels;
  sluice_stream_t stream = sluice_pass_stream(pass, op);
  int64_t rows = sluice_rows_of_expert(pass, chunk, e), width = pass->moe->shape.gate_factor * c->hidden_width;
  char* dm = rows_at(pass, SLUICE_T_DM, chunk, e);
  if (to->is_wanted[B2]) {
    kernels->sum_columns(stream, c->dtype, rows, c->model_width, rows_at(pass, SLUICE_T_DDO, chunk, e), c->model_width,
                         rows_at(pass, SLUICE_T_ROUTE, chunk, e), to->accumulate[B2], to->dtype[B2], to->bias[B2]);
  }
  if (to->is_wanted[B1]) {
    kernels->sum_columns(stream, c->dtype, rows, (int64_t)sluice_parameter_elements(&pass->moe->shape, B1), dm, width,
                         NULL, to->accumulate[B1], to->dtype[B1], to->bias[B1]);
  }
  if (!to->is_wanted[B3]) return;
  kernels->sum_columns(stream, c->dtype, rows, c->hidden_width,
                       dm + (uint64_t)c->hidden_width * sluice_dtype_bytes(c->dtype), width, NULL, to->accumulate[B3],
                       to->dtype[B3], to->bias[B3]);
}

static sluice_status_t add_rows(batch_t* batch, int32_t chunk, int32_t e, const target_t* to) {
  if (batch->walk->term != NULL) return add_adapter(batch, chunk, e, to);
  SLUICE_TRY(add_gemms(batch, chunk, e, to));
  if (batch->pass->moe->shape.config.bias) add_biases(batch->pass, batch->op, chunk, e, to);
  return SLUICE_OK;
}

/* Sums that are rounded by one call: lines that follow each other in the sums and in the host's memory. */
typedef struct lines_s {
  const float* sums;
  char* out;
  int64_t count, width, stride;
  int32_t dtype;
} lines_t;

static void round_lines(const batch_t* batch, const lines_t* l) {
  const sluice_pass_t* pass = batch->pass;
  pass->context->device->kernels->round_rows(sluice_pass_stream(pass, batch->op), l->dtype, l->count, l->width, l->sums,
                                             pass->grad_mode == SLUICE_GRAD_ACCUMULATE, l->out, l->stride);
}

static int follows(const lines_t* next, const lines_t* l) {
  return next->dtype == l->dtype && next->width == l->width && next->stride == l->stride &&
         next->sums == l->sums + l->count * l->width &&
         next->out == l->out + l->count * l->stride * (int64_t)sluice_dtype_bytes(l->dtype);
}

/* Rounds the complete sums once, into the host's tensors. */
static void round_sums(const batch_t* batch, int32_t e, const char* sums) {
  lines_t lines = {.count = 0};
  for (int m = 0; m < NUM_MEMBERS; ++m) {
    if (!is_wanted(batch->pass, batch->walk, m)) continue;
    const sluice_tensor_t* grad = &batch->walk->all[m][e];
    if (!sluice_is_short_dtype(sluice_tensor_dtype(grad))) continue;
    const int by_rows = !is_bias(m) && sluice_tensor_stride(grad, 1) == 1;
    lines_t next = {.sums = (const float*)(const void*)(sums + sluice_weight_sum_offset(&batch->pass->moe->shape, m)),
                    .out = sluice_tensor_data(grad),
                    .count = is_bias(m) ? 1 : grad->shape[by_rows ? 0 : 1],
                    .dtype = sluice_tensor_dtype(grad)};
    next.width = sluice_tensor_elements(grad) / next.count;
    next.stride = is_bias(m) ? next.width : sluice_tensor_stride(grad, by_rows ? 0 : 1);
    if (lines.count > 0 && follows(&next, &lines)) {
      lines.count += next.count;
      continue;
    }
    if (lines.count > 0) round_lines(batch, &lines);
    lines = next;
  }
  if (lines.count > 0) round_lines(batch, &lines);
}

/* Adds the gradients of one chunk. sums: the block of an expert that several chunks touch. */
static sluice_status_t add_chunk(batch_t* batch, int32_t chunk, int32_t e, sluice_chunk_span_t span, char* sums) {
  sluice_pass_t* pass = batch->pass;
  int add_to_host = pass->grad_mode == SLUICE_GRAD_ACCUMULATE;
  if (span.count == 0 && (chunk > 0 || add_to_host)) return SLUICE_OK;
  if (span.count > 0 && sluice_rows_of_expert(pass, chunk, e) == 0) return SLUICE_OK;
  int later = chunk > span.first;
  const target_t to = target_of(pass, batch->walk, e, sums, add_to_host || later, later);
  SLUICE_TRY(add_rows(batch, chunk, e, &to));
  if (sums == NULL || chunk != span.last || batch->rounds_late) return SLUICE_OK;
  SLUICE_TRY(run_batch(batch));
  round_sums(batch, e, sums);
  return SLUICE_OK;
}

/* Runs the remaining GEMMs, and rounds the sums of the experts whose last rows are in the chunk. */
static sluice_status_t round_all(batch_t* batch, int32_t chunk, const char* sums) {
  const sluice_pass_t* pass = batch->pass;
  SLUICE_TRY(run_batch(batch));
  for (int32_t e = 0; e < pass->binding.num_local && sums != NULL; ++e) {
    const sluice_chunk_span_t span = sluice_chunks_of_expert(pass, e);
    if (span.count <= 1) continue;
    if (span.last == chunk) round_sums(batch, e, sums);
    sums += sluice_weight_sum_offset(&pass->moe->shape, NUM_MEMBERS);
  }
  return SLUICE_OK;
}

static sluice_status_t add_at_once(batch_t* batch, int32_t e) {
  const int add_to_host = batch->pass->grad_mode == SLUICE_GRAD_ACCUMULATE;
  const target_t to = target_of(batch->pass, batch->walk, e, NULL, add_to_host, 0);
  return add_rows(batch, -1, e, &to);
}

/* is_last: no other walk adds to any expert after this one. */
static sluice_status_t add_walk(sluice_pass_t* pass, const sluice_op_t* op, const walk_t* walk, int is_last) {
  int32_t n = pass->binding.num_chunks;
  int joined = op->chunk < 0 && sluice_weight_rows_are_joined(pass), last = op->chunk < 0 || op->chunk == n - 1;
  const sluice_slots_t* slot = &pass->slots[SLUICE_T_DW];
  uint64_t block = sluice_weight_sum_offset(&pass->moe->shape, NUM_MEMBERS);
  char *const first_sums = slot->bytes > 0 ? slot->data : NULL, *sums = first_sums;
  batch_t batch = {.pass = pass, .op = op, .walk = walk};
  /* GEMMs of one expert do not fill a GPU. On a CPU sums are rounded while they are in the caches. */
  batch.rounds_late = op->chunk >= 0 && pass->context->device_type == SLUICE_DEVICE_CUDA && pass->expert_ready == NULL;
  for (int32_t e = 0; e < pass->binding.num_local; ++e) {
    const sluice_chunk_span_t span = sluice_chunks_of_expert(pass, e);
    char* own = span.count > 1 ? sums : NULL;
    if (joined) SLUICE_TRY(add_at_once(&batch, e));
    for (int32_t i = op->chunk < 0 ? 0 : op->chunk; i <= (op->chunk < 0 ? n - 1 : op->chunk) && !joined; ++i) {
      SLUICE_TRY(add_chunk(&batch, i, e, span, own));
      if (op->chunk < 0) SLUICE_TRY(run_batch(&batch)); /* the next chunk writes the same results */
    }
    if (own != NULL && op->chunk >= 0) sums += block;
    if (!last || !is_last || pass->expert_ready == NULL) continue;
    SLUICE_TRY(run_batch(&batch));
    pass->expert_ready(pass->expert_ready_user, e);
  }
  return batch.rounds_late ? round_all(&batch, op->chunk, first_sums) : run_batch(&batch);
}

/* Adds gradients of an adapter: first that of A, since P takes the place of U. */
static sluice_status_t add_term(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* const* all,
                                sluice_linear_t linear, const sluice_low_term_t* term) {
  const int32_t a = term->parameter;
  walk_t of_a = {.linear = linear, .term = term}, of_b = of_a;
  of_a.all[a] = all[a], of_b.all[a + 1] = all[a + 1];
  if (term->b_lower != NULL) of_b.all[SLUICE_LB3] = all[SLUICE_LB3];
  if (all[a] != NULL) {
    SLUICE_TRY(sluice_low_u(pass, op, linear, term, &of_a.half));
    SLUICE_TRY(add_walk(pass, op, &of_a, 0));
  }
  if (all[a + 1] == NULL && of_b.all[SLUICE_LB3] == NULL) return SLUICE_OK;
  SLUICE_TRY(sluice_low_p(pass, op, linear, term));
  return add_walk(pass, op, &of_b, 0);
}

static sluice_status_t add_adapters(sluice_pass_t* pass, const sluice_op_t* op, const sluice_tensor_t* const* all) {
  for (int32_t linear = SLUICE_LINEAR_UP; linear <= SLUICE_LINEAR_DOWN; ++linear) {
    sluice_low_term_t terms[SLUICE_MAX_LOW_TERMS];
    const int32_t count = sluice_low_terms(pass, (sluice_linear_t)linear, terms);
    for (int32_t i = 0; i < count; ++i) SLUICE_TRY(add_term(pass, op, all, (sluice_linear_t)linear, &terms[i]));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_weight_grad(sluice_pass_t* pass, const sluice_op_t* op) {
  if (pass->grad_params == NULL) return SLUICE_OK; /* only other ranks want gradients */
  const sluice_tensor_t* all[NUM_MEMBERS];
  sluice_gradients_of(pass->grad_params, all);
  SLUICE_TRY(add_adapters(pass, op, all));
  walk_t walk = {.term = NULL};
  for (int m = 0; m <= B2; ++m) walk.all[m] = all[m];
  return add_walk(pass, op, &walk, 1);
}
