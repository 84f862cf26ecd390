// SPDX-License-Identifier: Apache-2.0
/* Loads and stores of the end of a row for instruction sets without masks: through a few bytes on the stack. */

INLINE vf vf_load_part(int32_t dtype, const void* data, int64_t i, int64_t n) {
  char cell[LANES * 4] = {0};
  size_t bytes = dtype == SLUICE_DTYPE_F32 ? 4 : 2;
  memcpy(cell, (const char*)data + (size_t)i * bytes, (size_t)n * bytes);
  return vf_load(dtype, cell, 0);
}

INLINE void vf_store_part(int32_t dtype, void* data, int64_t i, int64_t n, vf x) {
  char cell[LANES * 4];
  size_t bytes = dtype == SLUICE_DTYPE_F32 ? 4 : 2;
  vf_store(dtype, cell, 0, x);
  memcpy((char*)data + (size_t)i * bytes, cell, (size_t)n * bytes);
}
