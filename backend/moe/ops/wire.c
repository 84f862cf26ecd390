// SPDX-License-Identifier: Apache-2.0
#include "backend/moe/ops/wire.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "backend/base/math.h"

/* Conversion in place: source and destination overlap, so blocks are copied first. */
enum { BLOCK = 128, SCALE = sizeof(float) };

/* ---- bf16: to the nearest, ties to even ---- */

static uint64_t bf16_row_bytes(int64_t width) { return 2 * (uint64_t)width; }

static uint16_t to_bf16(uint32_t word) {
  const uint32_t rounded = (word + 0x7fffu + (word >> 16 & 1)) >> 16;
  const uint32_t is_nan = (word & 0x7fffffffu) > 0x7f800000u;
  return (uint16_t)(is_nan ? word >> 16 | 0x40u : rounded);
}

static void bf16_write(char* data, int64_t num_rows, int64_t width) {
  const int64_t count = num_rows * width;
  for (int64_t i = 0; i < count; i += BLOCK) {
    const int64_t n = sluice_min(BLOCK, count - i);
    uint32_t words[BLOCK];
    uint16_t halves[BLOCK];
    memcpy(words, data + 4 * i, (size_t)n * sizeof *words);
    for (int64_t k = 0; k < n; ++k) halves[k] = to_bf16(words[k]);
    memcpy(data + 2 * i, halves, (size_t)n * sizeof *halves);
  }
}

static void bf16_read(char* data, int64_t num_rows, int64_t width) {
  const int64_t count = num_rows * width;
  const char* arrived = data + 2 * count;
  for (int64_t i = 0; i < count; i += BLOCK) {
    const int64_t n = sluice_min(BLOCK, count - i);
    uint32_t words[BLOCK];
    uint16_t halves[BLOCK];
    memcpy(halves, arrived + 2 * i, (size_t)n * sizeof *halves);
    for (int64_t k = 0; k < n; ++k) words[k] = (uint32_t)halves[k] << 16;
    memcpy(data + 4 * i, words, (size_t)n * sizeof *words);
  }
}

const sluice_wire_t sluice_wire_bf16 = {bf16_row_bytes, bf16_write, bf16_read};

/* ---- int8: blocks of a row share a scale ---- */

static uint64_t int8_row_bytes(int64_t width) { return (uint64_t)(width + (width + BLOCK - 1) / BLOCK * SCALE); }

/* The largest magnitude is 127 steps. NaN: some value is not finite, and the whole block becomes NaN. */
static float scale_of(const float* x, int64_t n) {
  float most = 0, no_number = 0;
  for (int64_t k = 0; k < n; ++k) {
    const float size = fabsf(x[k]);
    most = size > most ? size : most;
    no_number += x[k] * 0.0f;
  }
  const float scale = most / 127;
  if (no_number != 0) return NAN;
  return scale * 127 <= FLT_MAX ? scale : nextafterf(scale, 0); /* finite values stay finite */
}

static void to_steps(const float* x, int64_t n, float scale, int8_t* steps) {
  static const float TO_WHOLE = 12582912.0f;            /* 1.5 * 2^23: adding it rounds a small float to an integer */
  const float inverse = scale > 1e-38f ? 1 / scale : 0; /* NaN and tiny scales: no steps */
  for (int64_t k = 0; k < n; ++k) {
    float y = x[k] * inverse;
    y = y > 127 ? 127 : y;
    y = y < -127 ? -127 : y;
    const float whole = y + TO_WHOLE;
    steps[k] = (int8_t)(int32_t)(whole - TO_WHOLE);
  }
}

static void int8_write(char* data, int64_t num_rows, int64_t width) {
  char* out = data;
  for (int64_t i = 0; i < num_rows * width;) {
    const int64_t n = sluice_min(BLOCK, width - i % width);
    float x[BLOCK];
    int8_t steps[BLOCK];
    memcpy(x, data + 4 * i, (size_t)n * sizeof *x);
    const float scale = scale_of(x, n);
    if (scale != scale) memset(x, 0, sizeof x); /* converting a NaN to an integer is undefined */
    to_steps(x, n, scale, steps);
    memcpy(out, &scale, SCALE);
    memcpy(out + SCALE, steps, (size_t)n);
    out += SCALE + n, i += n;
  }
}

static void int8_read(char* data, int64_t num_rows, int64_t width) {
  const char* in = data + num_rows * (4 * width - (int64_t)int8_row_bytes(width));
  for (int64_t i = 0; i < num_rows * width;) {
    const int64_t n = sluice_min(BLOCK, width - i % width);
    float x[BLOCK], scale = 0;
    int8_t steps[BLOCK];
    memcpy(&scale, in, SCALE);
    memcpy(steps, in + SCALE, (size_t)n);
    for (int64_t k = 0; k < n; ++k) x[k] = scale * (float)steps[k];
    memcpy(data + 4 * i, x, (size_t)n * sizeof *x);
    in += SCALE + n, i += n;
  }
}

const sluice_wire_t sluice_wire_int8 = {int8_row_bytes, int8_write, int8_read};

/* ---- transfers ---- */

const sluice_wire_t* sluice_wire_of(const sluice_moe_t* moe) {
  static const sluice_wire_t* const wires[] = {NULL, &sluice_wire_bf16, &sluice_wire_int8};
  return wires[sluice_layer_wire(moe)];
}

void sluice_wire_write_sent(sluice_pass_t* pass, const sluice_wire_t* wire) {
  const int64_t width = pass->moe->shape.config.model_width;
  const uint64_t row = (uint64_t)width * sizeof(float), coded = wire->row_bytes(width);
  for (int32_t r = 0; r < pass->binding.world_size; ++r) {
    const uint64_t sent = pass->arrays.send_bytes[r] / row, received = pass->arrays.recv_bytes[r] / row;
    if (sent > 0) wire->write((char*)(uintptr_t)pass->arrays.send[r], (int64_t)sent, width);
    if (received > 0) pass->arrays.recv[r] = (char*)pass->arrays.recv[r] + received * (row - coded);
    pass->arrays.send_bytes[r] = sent * coded;
    pass->arrays.recv_bytes[r] = received * coded;
  }
}

void sluice_wire_read_received(sluice_pass_t* pass, const sluice_wire_t* wire) {
  const int64_t width = pass->moe->shape.config.model_width;
  const uint64_t row = (uint64_t)width * sizeof(float), coded = wire->row_bytes(width);
  for (int32_t r = 0; r < pass->binding.world_size; ++r) {
    const uint64_t received = pass->arrays.recv_bytes[r] / coded;
    if (received > 0) wire->read((char*)pass->arrays.recv[r] - received * (row - coded), (int64_t)received, width);
  }
}
