// SPDX-License-Identifier: Apache-2.0
/* Files of states with arbitrary bytes. A file of two steps is patched and cut according to the input, then opened,
 * loaded and stepped. Data that does not match its checksums is refused, and data that matches the original checksums
 * is one of the file's two steps. A leftover at PATH.unfinished is reused or refused.
 *
 * Input: a byte of flags (which checksums are recomputed, so that later checks are reached; whether the file is cut;
 * whether it is at PATH.unfinished), a byte for the step to open and for the length of a cut file, then patches: two
 * bytes of offset, one byte of length, and that many bytes. */
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "backend/base/hash.h"
#include "backend/optim/file/state_file.h"
#include "third_party/fuzz/target.h"

enum { COUNT = 300, PAGE = 4096, ROOMS_AT = 8192, ARRAYS = 2 * SLUICE_NUM_STATES };
enum { BYTES = ROOMS_AT + ARRAYS * PAGE, LAST = 5 };
enum { MENDS_HEAD = 1, MENDS_MODEL = 2, MENDS_RECORDS = 4, MENDS_ARRAYS = 8, IS_CUT = 16, IS_LEFTOVER = 32 };
/* Offsets of the fields to recompute, in the layout of state_file.h. */
enum {
  NUM_WORDS_AT = 40,
  MODEL_SUM_AT = 48,
  HEAD_SUM_AT = 56,
  RECORD_AT = 512,
  ARRAY_SUMS_AT = 16,
  RECORD_SUM_AT = 40
};

static char path[512], unfinished[540];
static uint8_t good[BYTES], file_bytes[BYTES];

static float param[COUNT], masters[COUNT], exp_avg[COUNT], exp_avg_sq[COUNT];
static uint16_t half[COUNT];
static const sluice_adam_tensor_t tensors[3] = {
    {.count = 200, .param = param, .exp_avg = exp_avg, .exp_avg_sq = exp_avg_sq, .param_dtype = SLUICE_DTYPE_F32},
    {.count = 0, .param_dtype = SLUICE_DTYPE_F32},
    {.count = 100, .param = half, .master = masters, .param_dtype = SLUICE_DTYPE_BF16}};
static const sluice_adam_group_t group = {.tensors = tensors, .num_tensors = 3};
static const sluice_state_place_t place = {.path = path, .rank = 0, .world_size = 1};

static sluice_state_model_t model(void) {
  static const int32_t num_dims[3] = {2, 1, 1};
  static const int64_t dims[4] = {10, 20, 0, 100};
  sluice_state_model_t made;
  FUZZ_CHECK(sluice_state_model_make(&group, 1, (sluice_state_shapes_t){num_dims, dims}, sluice_process_allocator(),
                                     &made) == SLUICE_OK);
  return made;
}

static float element(int64_t step, int32_t state, int64_t i) { return (float)(1000 * (step % 999) + 400 * state + i); }

static void write_step(sluice_state_file_t* file, int64_t step) {
  float data[COUNT];
  FUZZ_CHECK(sluice_state_file_begin(file, step) == SLUICE_OK);
  for (int32_t state = 0; state < SLUICE_NUM_STATES; ++state) {
    for (int i = 0; i < COUNT; ++i) data[i] = element(step, state, i);
    FUZZ_CHECK(sluice_state_file_write(file, state, 0, COUNT, data) == SLUICE_OK);
  }
  FUZZ_CHECK(sluice_state_file_end(file) == SLUICE_OK);
}

static int has_step(const sluice_state_file_t* file, int64_t step) {
  float data[COUNT];
  if (sluice_state_file_info(file).step != step || sluice_state_file_info(file).count != COUNT) return 0;
  for (int32_t state = 0; state < SLUICE_NUM_STATES; ++state) {
    FUZZ_CHECK(sluice_state_file_read(file, state, 0, COUNT, data, NULL) == SLUICE_OK);
    for (int i = 0; i < COUNT; ++i) {
      if (data[i] != element(step, state, i)) return 0;
    }
  }
  return 1;
}

static void make_good(void) {
  const char* folder = getenv("TEST_TMPDIR");
  (void)snprintf(path, sizeof path, "%s/states.%d", folder != NULL ? folder : "/tmp", (int)getpid());
  (void)snprintf(unfinished, sizeof unfinished, "%s.unfinished", path);
  sluice_state_model_t of = model();
  sluice_state_file_t* file;
  FUZZ_CHECK(sluice_state_file_create(&place, &of, 1, sluice_process_allocator(), &file) == SLUICE_OK);
  for (int64_t step = LAST - 1; step <= LAST; ++step) write_step(file, step);
  FUZZ_CHECK(sluice_state_file_publish(file) == SLUICE_OK);
  sluice_state_file_close(file);
  sluice_state_model_free(&of, sluice_process_allocator());
  const int fd = open(path, O_RDONLY);
  FUZZ_CHECK(fd >= 0 && read(fd, good, BYTES) == BYTES);
  (void)close(fd);
}

static void put(size_t at, uint64_t word) { memcpy(file_bytes + at, &word, sizeof word); }

static void mend_arrays(void) {
  for (size_t array = 0; array < ARRAYS; ++array) {
    sluice_state_sum_t sum;
    sluice_state_sum_begin(&sum);
    sluice_state_sum_add(&sum, (const float*)(const void*)(file_bytes + ROOMS_AT + array * PAGE), COUNT);
    put(RECORD_AT * (1 + array / SLUICE_NUM_STATES) + ARRAY_SUMS_AT + 8 * (array % SLUICE_NUM_STATES),
        sluice_state_sum_end(&sum));
  }
}

static void mend(int flags) {
  uint64_t words;
  memcpy(&words, file_bytes + NUM_WORDS_AT, sizeof words);
  if ((flags & MENDS_ARRAYS) != 0) mend_arrays();
  if ((flags & MENDS_MODEL) != 0 && words <= (BYTES - PAGE) / 8)
    put(MODEL_SUM_AT, sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, file_bytes + PAGE, words * 8));
  if ((flags & MENDS_HEAD) != 0) put(HEAD_SUM_AT, sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, file_bytes, HEAD_SUM_AT));
  for (size_t at = RECORD_AT; at <= 2 * RECORD_AT && (flags & MENDS_RECORDS) != 0; at += RECORD_AT) {
    put(at + RECORD_SUM_AT, sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, file_bytes + at, RECORD_SUM_AT));
  }
}

static void patch(const uint8_t* data, size_t size) {
  for (size_t i = 0; i + 3 <= size;) {
    const size_t at = (size_t)(data[i] | data[i + 1] << 8) % BYTES, left = size - i - 3;
    size_t bytes = data[i + 2];
    if (bytes > left) bytes = left;
    if (bytes > BYTES - at) bytes = BYTES - at;
    memcpy(file_bytes + at, data + i + 3, bytes);
    i += 3 + bytes;
  }
}

static void write_file(const char* at, size_t bytes) {
  const int fd = open(at, O_RDWR | O_CREAT | O_TRUNC, 0600);
  FUZZ_CHECK(fd >= 0 && write(fd, file_bytes, bytes) == (ssize_t)bytes);
  (void)close(fd);
}

/* Writes the next step to a file that was accepted, and opens the file at that step. */
static void step_on(sluice_state_file_t* file) {
  const int64_t next = sluice_state_file_info(file).step + 1;
  if (sluice_state_file_info(file).count != COUNT || next >= INT64_C(1) << 62) return;
  write_step(file, next);
  sluice_state_file_close(file);
  FUZZ_CHECK(sluice_state_file_open(&place, next, sluice_process_allocator(), &file) == SLUICE_OK);
  FUZZ_CHECK(has_step(file, next));
  sluice_state_file_close(file);
}

static void open_it(int flags, int64_t step) {
  sluice_state_file_t* file;
  const sluice_status_t status = sluice_state_file_open(&place, step, sluice_process_allocator(), &file);
  if (status != SLUICE_OK) {
    FUZZ_CHECK(file == NULL);
    return;
  }
  ++fuzz_num_taken;
  if ((flags & (MENDS_HEAD | MENDS_MODEL | MENDS_RECORDS | MENDS_ARRAYS)) == 0)
    FUZZ_CHECK(has_step(file, LAST) || has_step(file, LAST - 1));
  sluice_state_model_t wanted = model();
  if (sluice_state_model_compare(sluice_state_file_model(file), &wanted, path) == SLUICE_OK) {
    FUZZ_CHECK(sluice_states_load(file, &group, 1) == SLUICE_OK);
    step_on(file);
  } else {
    sluice_state_file_close(file);
  }
  sluice_state_model_free(&wanted, sluice_process_allocator());
}

static void take_leftover(void) {
  sluice_state_model_t of = model();
  sluice_state_file_t* file;
  const sluice_status_t status = sluice_state_file_create(&place, &of, 1, sluice_process_allocator(), &file);
  uint64_t magic = 0;
  memcpy(&magic, file_bytes, sizeof magic);
  FUZZ_CHECK((status == SLUICE_OK) == (magic == 0 || memcmp(&magic, good, sizeof magic) == 0));
  sluice_state_model_free(&of, sluice_process_allocator());
  fuzz_num_taken += status == SLUICE_OK;
  if (status == SLUICE_OK) {
    write_step(file, 0);
    FUZZ_CHECK(sluice_state_file_publish(file) == SLUICE_OK && has_step(file, 0));
    sluice_state_file_close(file);
  }
  FUZZ_CHECK((access(unfinished, F_OK) == 0) == (status != SLUICE_OK));
  (void)unlink(unfinished);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  if (path[0] == '\0') make_good();
  const int flags = data[0];
  memcpy(file_bytes, good, BYTES);
  patch(data + 2, size - 2);
  mend(flags);
  const size_t bytes = (flags & IS_CUT) != 0 ? (size_t)data[1] * (BYTES / 256) : BYTES;
  if ((flags & IS_LEFTOVER) != 0 && bytes >= sizeof(uint64_t)) {
    write_file(unfinished, bytes);
    take_leftover();
  } else {
    write_file(path, bytes);
    open_it(flags, data[1] % 8 == 0 ? SLUICE_NO_STEP : data[1] % 8);
  }
  (void)unlink(path);
  return 0;
}
