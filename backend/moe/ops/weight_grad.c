/* dW2 = sum of dy^T (w a), dW1, dW3 = sum of dT_M^T T_DI, db1, db3 = sum of dT_M, db2 = sum of w dy, over the rows of
 * an expert: at once, or chunk by chunk. */
#include "backend/moe/ops/weight_grad.h"

#include <string.h>

#include "backend/base/dtype.h"
#include "backend/moe/ops/expert_math.h"
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

/* Rows of a chunk, or of all chunks (-1), which then lie one behind the other in expert-major tensors. */
static void* rows_at(const sluice_pass_t* pass, int32_t tensor, int32_t chunk, int32_t local) {
  return sluice_pass_rows(pass, tensor, chunk < 0 ? 0 : chunk, local);
}

/* ---- one expert, one run of rows ---- */

/* Where the gradients of an expert go: the host's tensors, or sums of the same orientation. */
typedef struct target_s {
  int is_wanted[NUM_MEMBERS];
  sluice_matrix_t matrix[3]; /* W1, W3, W2 */
  int64_t rows[3], columns[3];
  void* bias[NUM_MEMBERS]; /* B1 .. */
  int32_t dtype[NUM_MEMBERS];
  int32_t accumulate[NUM_MEMBERS];
} target_t;

/* sums: the expert's block, or NULL. Only what is 16 bits goes there. */
static target_t target_of(const sluice_pass_t* pass, int32_t e, char* sums, int add_to_host, int add_to_sums) {
  const sluice_tensor_t* all[NUM_MEMBERS];
  sluice_gradients_of(pass->grad_params, all);
  target_t target;
  memset(&target, 0, sizeof target);
  for (int m = 0; m < NUM_MEMBERS; ++m) {
    if (!sluice_gradient_is_wanted(&pass->moe->shape, all, m)) continue;
    const sluice_tensor_t* grad = &all[m][e];
    target.is_wanted[m] = 1;
    int in_sums = sums != NULL && sluice_is_short_dtype(sluice_tensor_dtype(grad));
    target.dtype[m] = in_sums ? SLUICE_DTYPE_F32 : sluice_tensor_dtype(grad);
    target.accumulate[m] = in_sums ? add_to_sums : add_to_host;
    void* data = in_sums ? sums + sluice_weight_sum_offset(&pass->moe->shape, m) : sluice_tensor_data(grad);
    if (m >= B1) {
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

/* GEMMs that wait to run as one list: threads that share many do not wait for each other after each. No two have one
 * result. */
typedef struct batch_s {
  sluice_pass_t* pass;
  const sluice_op_t* op;
  int64_t count;
  int32_t dtype, accumulate; /* of their results */
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
  SLUICE_TRY(add_gemms(batch, chunk, e, to));
  if (batch->pass->moe->shape.config.bias) add_biases(batch->pass, batch->op, chunk, e, to);
  return SLUICE_OK;
}

/* The sums are whole: into the host's tensors, rounded once. */
static void round_sums(const sluice_pass_t* pass, const sluice_op_t* op, int32_t e, const char* sums) {
  const sluice_kernels_t* kernels = pass->context->device->kernels;
  const sluice_tensor_t* all[NUM_MEMBERS];
  sluice_gradients_of(pass->grad_params, all);
  for (int m = 0; m < NUM_MEMBERS; ++m) {
    if (!sluice_gradient_is_wanted(&pass->moe->shape, all, m) ||
        !sluice_is_short_dtype(sluice_tensor_dtype(&all[m][e])))
      continue;
    const sluice_tensor_t* grad = &all[m][e];
    int by_rows = m < B1 && sluice_tensor_stride(grad, 1) == 1;
    int64_t lines = m >= B1 ? 1 : grad->shape[by_rows ? 0 : 1],
            width = (int64_t)sluice_parameter_elements(&pass->moe->shape, m) / lines;
    int64_t stride = m >= B1 ? width : sluice_tensor_stride(grad, by_rows ? 0 : 1);
    kernels->round_rows(sluice_pass_stream(pass, op), sluice_tensor_dtype(grad), lines, width,
                        (const float*)(const void*)(sums + sluice_weight_sum_offset(&pass->moe->shape, m)),
                        pass->grad_mode == SLUICE_GRAD_ACCUMULATE, sluice_tensor_data(grad), stride);
  }
}

/* Adds a chunk's part. sums: the block of an expert that several chunks touch. */
static sluice_status_t add_chunk(batch_t* batch, int32_t chunk, int32_t e, sluice_chunk_span_t span, char* sums) {
  sluice_pass_t* pass = batch->pass;
  int add_to_host = pass->grad_mode == SLUICE_GRAD_ACCUMULATE;
  if (span.count == 0 && (chunk > 0 || add_to_host)) return SLUICE_OK;
  if (span.count > 0 && sluice_rows_of_expert(pass, chunk, e) == 0) return SLUICE_OK;
  int later = chunk > span.first;
  const target_t to = target_of(pass, e, sums, add_to_host || later, later);
  SLUICE_TRY(add_rows(batch, chunk, e, &to));
  if (sums == NULL || chunk != span.last) return SLUICE_OK;
  SLUICE_TRY(run_batch(batch));
  round_sums(pass, batch->op, e, sums);
  return SLUICE_OK;
}

static sluice_status_t add_at_once(batch_t* batch, int32_t e) {
  const target_t to = target_of(batch->pass, e, NULL, batch->pass->grad_mode == SLUICE_GRAD_ACCUMULATE, 0);
  return add_rows(batch, -1, e, &to);
}

sluice_status_t sluice_weight_grad(sluice_pass_t* pass, const sluice_op_t* op) {
  if (pass->grad_params == NULL) return SLUICE_OK; /* other ranks want some */
  int32_t n = pass->binding.num_chunks;
  int joined = op->chunk < 0 && sluice_weight_rows_are_joined(pass), last = op->chunk < 0 || op->chunk == n - 1;
  const sluice_slots_t* slot = &pass->slots[SLUICE_T_DW];
  uint64_t block = sluice_weight_sum_offset(&pass->moe->shape, NUM_MEMBERS);
  char* sums = slot->bytes > 0 ? slot->data : NULL;
  batch_t batch = {.pass = pass, .op = op};
  for (int32_t e = 0; e < pass->binding.num_local; ++e) {
    const sluice_chunk_span_t span = sluice_chunks_of_expert(pass, e);
    char* own = span.count > 1 ? sums : NULL;
    if (joined) SLUICE_TRY(add_at_once(&batch, e));
    for (int32_t i = op->chunk < 0 ? 0 : op->chunk; i <= (op->chunk < 0 ? n - 1 : op->chunk) && !joined; ++i) {
      SLUICE_TRY(add_chunk(&batch, i, e, span, own));
      if (op->chunk < 0) SLUICE_TRY(run_batch(&batch)); /* the next chunk has the same results */
    }
    if (own != NULL && op->chunk >= 0) sums += block;
    if (!last || pass->expert_ready == NULL) continue;
    SLUICE_TRY(run_batch(&batch));
    pass->expert_ready(pass->expert_ready_user, e);
  }
  return run_batch(&batch);
}
