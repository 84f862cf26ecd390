#include "backend/optim/file/load.h"

#include <string.h>

#include "backend/base/check.h"
#include "backend/base/dtype.h"
#include "backend/base/math.h"

enum { PIECE = 8192 }; /* elements, on the stack: giving parameters back must not want for memory */

/* Elements of one tensor, and where the file has them. */
typedef struct piece_s {
  const sluice_adam_tensor_t* tensor;
  int64_t first, at, count;
} piece_t;

typedef sluice_status_t (*piece_fn_t)(void* file, const piece_t* piece);

static sluice_status_t walk(const sluice_adam_group_t* groups, int64_t num_groups, piece_fn_t fn, void* file) {
  int64_t at = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    for (int64_t t = 0; t < groups[g].num_tensors; ++t) {
      const sluice_adam_tensor_t* tensor = groups[g].tensors + t;
      for (int64_t first = 0; first < tensor->count; first += PIECE) {
        const piece_t piece = {tensor, first, at + first, sluice_min(PIECE, tensor->count - first)};
        SLUICE_TRY(fn(file, &piece));
      }
      at += tensor->count;
    }
  }
  return SLUICE_OK;
}

static void round_into(const float* data, const piece_t* piece) {
  const sluice_adam_tensor_t* t = piece->tensor;
  if (t->param_dtype == SLUICE_DTYPE_F32) {
    memcpy((float*)t->param + piece->first, data, (size_t)piece->count * sizeof *data);
    return;
  }
  uint16_t* out = (uint16_t*)t->param + piece->first;
  for (int64_t i = 0; i < piece->count; ++i) {
    out[i] = t->param_dtype == SLUICE_DTYPE_BF16 ? sluice_f32_to_bf16(data[i]) : sluice_f32_to_f16(data[i]);
  }
}

static void widen(const piece_t* piece, float* out) {
  const sluice_adam_tensor_t* t = piece->tensor;
  if (t->param_dtype == SLUICE_DTYPE_F32) {
    memcpy(out, (const float*)t->param + piece->first, (size_t)piece->count * sizeof *out);
    return;
  }
  const uint16_t* half = (const uint16_t*)t->param + piece->first;
  for (int64_t i = 0; i < piece->count; ++i) {
    out[i] = t->param_dtype == SLUICE_DTYPE_BF16 ? sluice_bf16_to_f32(half[i]) : sluice_f16_to_f32(half[i]);
  }
}

static sluice_status_t load_piece(void* user, const piece_t* piece) {
  const sluice_state_file_t* file = user;
  const sluice_adam_tensor_t* t = piece->tensor;
  float room[PIECE];
  SLUICE_TRY(sluice_state_file_read(file, SLUICE_STATE_MASTER, piece->at, piece->count, room));
  if (t->param != NULL) round_into(room, piece);
  if (t->master != NULL) memcpy(t->master + piece->first, room, (size_t)piece->count * sizeof *room);
  float* const moments[] = {t->exp_avg, t->exp_avg_sq};
  for (int i = 0; i < 2; ++i) {
    if (moments[i] == NULL) continue;
    SLUICE_TRY(
        sluice_state_file_read(file, SLUICE_STATE_EXP_AVG + i, piece->at, piece->count, moments[i] + piece->first));
  }
  return SLUICE_OK;
}

static sluice_status_t store_piece(void* user, const piece_t* piece) {
  const sluice_adam_tensor_t* t = piece->tensor;
  const float* const states[SLUICE_NUM_STATES] = {t->master, t->exp_avg, t->exp_avg_sq};
  float room[PIECE];
  for (int32_t i = 0; i < SLUICE_NUM_STATES; ++i) {
    if (states[i] == NULL && i == SLUICE_STATE_MASTER) widen(piece, room);
    if (states[i] == NULL && i != SLUICE_STATE_MASTER) memset(room, 0, sizeof room);
    const float* data = states[i] != NULL ? states[i] + piece->first : room;
    SLUICE_TRY(sluice_state_file_write(user, i, piece->at, piece->count, data));
  }
  return SLUICE_OK;
}

sluice_status_t sluice_states_load(const sluice_state_file_t* file, const sluice_adam_group_t* groups,
                                   int64_t num_groups) {
  return walk(groups, num_groups, load_piece, (void*)(uintptr_t)file);
}

sluice_status_t sluice_states_store(sluice_state_file_t* file, int64_t step, const sluice_adam_group_t* groups,
                                    int64_t num_groups) {
  SLUICE_TRY(sluice_state_file_begin(file, step));
  SLUICE_TRY(walk(groups, num_groups, store_piece, file));
  return sluice_state_file_end(file);
}
