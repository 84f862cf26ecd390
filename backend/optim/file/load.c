// SPDX-License-Identifier: Apache-2.0
/* Copies between files of states and tensors. */
#include <string.h>

#include "backend/base/dtype.h"
#include "backend/base/math.h"
#include "backend/optim/file/state_file.h"

enum { PIECE = 8192 }; /* elements, on the stack: restoring parameters must not need an allocation */

/* Elements of one tensor, and their place in the file. */
typedef struct piece_s {
  const sluice_adam_tensor_t* tensor;
  int64_t first, at, count;
} piece_t;

typedef sluice_status_t (*piece_fn_t)(void* user, const piece_t* piece);

/* Calls fn for elements [0, end) of all tensors. */
static sluice_status_t walk(const sluice_adam_group_t* groups, int64_t num_groups, int64_t end, piece_fn_t fn,
                            void* user) {
  int64_t at = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    for (int64_t t = 0; t < groups[g].num_tensors; ++t) {
      const sluice_adam_tensor_t* tensor = groups[g].tensors + t;
      const int64_t count = sluice_min(tensor->count, end - at);
      for (int64_t first = 0; first < count; first += PIECE) {
        const piece_t piece = {tensor, first, at + first, sluice_min(PIECE, count - first)};
        SLUICE_TRY(fn(user, &piece));
      }
      at += tensor->count;
    }
  }
  return SLUICE_OK;
}

static uint16_t rounded(float x, int32_t dtype) {
  return dtype == SLUICE_DTYPE_BF16 ? sluice_f32_to_bf16(x) : sluice_f32_to_f16(x);
}

static float widened(uint16_t x, int32_t dtype) {
  return dtype == SLUICE_DTYPE_BF16 ? sluice_bf16_to_f32(x) : sluice_f16_to_f32(x);
}

static void round_into(const float* data, const piece_t* piece) {
  const sluice_adam_tensor_t* t = piece->tensor;
  if (t->param_dtype == SLUICE_DTYPE_F32) {
    memcpy((float*)t->param + piece->first, data, (size_t)piece->count * sizeof *data);
    return;
  }
  uint16_t* out = (uint16_t*)t->param + piece->first;
  for (int64_t i = 0; i < piece->count; ++i) {
    out[i] = rounded(data[i], t->param_dtype);
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
    out[i] = widened(half[i], t->param_dtype);
  }
}

/* ---- parameters that the host has written ---- */

int sluice_param_is_rounded(const sluice_adam_tensor_t* t, int64_t first, int64_t count, const float* masters) {
  if (t->param_dtype == SLUICE_DTYPE_F32)
    return memcmp((const float*)t->param + first, masters, (size_t)count * sizeof *masters) == 0;
  const uint16_t* half = (const uint16_t*)t->param + first;
  unsigned differing = 0;
  if (t->param_dtype == SLUICE_DTYPE_BF16) {
    for (int64_t i = 0; i < count; ++i) differing |= half[i] ^ sluice_f32_to_bf16(masters[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) differing |= half[i] ^ sluice_f32_to_f16(masters[i]);
  }
  return differing == 0;
}

void sluice_param_to_masters(const sluice_adam_tensor_t* t, int64_t first, int64_t count, float* masters) {
  if (t->param_dtype == SLUICE_DTYPE_F32) {
    memcpy(masters, (const float*)t->param + first, (size_t)count * sizeof *masters);
    return;
  }
  const uint16_t* half = (const uint16_t*)t->param + first;
  for (int64_t i = 0; i < count; ++i) {
    if (half[i] != rounded(masters[i], t->param_dtype)) masters[i] = widened(half[i], t->param_dtype);
  }
}

/* ---- from the file ---- */

typedef struct loading_s {
  const sluice_state_file_t* file;
  sluice_state_sum_t sums[SLUICE_NUM_STATES];
} loading_t;

static sluice_status_t load_piece(void* user, const piece_t* piece) {
  loading_t* loading = user;
  const sluice_adam_tensor_t* t = piece->tensor;
  float* const states[SLUICE_NUM_STATES] = {t->master, t->exp_avg, t->exp_avg_sq};
  float room[PIECE];
  for (int32_t i = 0; i < SLUICE_NUM_STATES; ++i) {
    SLUICE_TRY(sluice_state_file_read(loading->file, i, piece->at, piece->count, room, loading->sums + i));
    if (i == SLUICE_STATE_MASTER && t->param != NULL) round_into(room, piece);
    if (states[i] != NULL) memcpy(states[i] + piece->first, room, (size_t)piece->count * sizeof *room);
  }
  return SLUICE_OK;
}

static sluice_status_t load_param(void* user, const piece_t* piece) {
  float room[PIECE];
  SLUICE_TRY(sluice_state_file_read(user, SLUICE_STATE_MASTER, piece->at, piece->count, room, NULL));
  round_into(room, piece);
  return SLUICE_OK;
}

/* ---- to the file ---- */

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
  loading_t loading = {.file = file};
  for (int32_t i = 0; i < SLUICE_NUM_STATES; ++i) sluice_state_sum_begin(loading.sums + i);
  SLUICE_TRY(walk(groups, num_groups, INT64_MAX, load_piece, &loading));
  return sluice_state_file_check_sums(file, loading.sums);
}

sluice_status_t sluice_states_load_params(const sluice_state_file_t* file, const sluice_adam_group_t* groups,
                                          int64_t num_groups, int64_t end) {
  return walk(groups, num_groups, end, load_param, (void*)(uintptr_t)file);
}

sluice_status_t sluice_states_store(sluice_state_file_t* file, int64_t step, const sluice_adam_group_t* groups,
                                    int64_t num_groups) {
  SLUICE_TRY(sluice_state_file_begin(file, step));
  SLUICE_TRY(walk(groups, num_groups, INT64_MAX, store_piece, file));
  return sluice_state_file_end(file);
}
