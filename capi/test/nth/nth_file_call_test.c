// SPDX-License-Identifier: Apache-2.0
/* A calibration is written to disk and read again, while each of its file calls and allocations fails in turn. A file
 * with the name of a calibration is complete, no other file remains, and the next attempt works. */
#include <unistd.h>

#include "backend/calibrate/cache.h"
#include "capi/test/nth/failing_calls.h"
#include "third_party/bazel/test.h"

static char folder[] = "/tmp/sluice_nth_XXXXXX", inner[64], path[96];
static sluice_machine_t machine;

static int set_up(void** state) {
  (void)state;
  static const char text[] = "{\"sluice_machine\": 2, \"name\": \"a test\", \"op_seconds\": 3e-6}";
  if (mkdtemp(folder) == NULL) return 1;
  snprintf(inner, sizeof inner, "%s/inner", folder);
  snprintf(path, sizeof path, "%s/machine.json", inner);
  return sluice_machine_read(text, sizeof text - 1, &machine) != SLUICE_OK;
}

static void clean(void) {
  unlink(path);
  rmdir(inner);
}

static int tear_down(void** state) {
  (void)state;
  clean();
  return rmdir(folder);
}

/* Writes and reads, like two consecutive processes. Bits of the outcome: 1 written, 2 read. */
static void write_and_read(void* outcome) {
  sluice_machine_t read;
  *(int*)outcome = sluice_cache_write(path, "a key", &machine);
  *(int*)outcome |= sluice_cache_read(path, "a key", 0, &read) << 1;
}

static void check(const call_place_t* place, int64_t nth, int outcome, int32_t num_descriptors) {
  sluice_machine_t read;
  const int is_there = access(path, F_OK) == 0;
  const int is_whole = is_there && sluice_cache_read(path, "a key", 0, &read) && read.op_seconds == machine.op_seconds;
  const int32_t others = calls_count_entries(inner) > 0 ? calls_count_entries(inner) - 2 - is_there : 0;
  if (is_there == is_whole && is_there == (outcome & 1) && others == 0 &&
      calls_count_entries("/proc/self/fd") == num_descriptors) {
    return;
  }
  fail_msg("%s at 0x%lx, hit %lld fails: written %d, there %d, whole %d, other files %d, descriptors %d of %d",
           place->name, (unsigned long)place->address, (long long)nth, outcome & 1, is_there, is_whole, others,
           calls_count_entries("/proc/self/fd"), num_descriptors);
}

/* place NULL: no call fails. */
static int32_t attempt(const call_place_t* place, int64_t nth, int32_t num_descriptors) {
  int outcome = 0, next = 0;
  assert_int_equal(calls_run(write_and_read, &outcome, place, nth), place != NULL);
  if (place == NULL) assert_int_equal(outcome, 3);
  if (place != NULL) check(place, nth, outcome, num_descriptors);
  write_and_read(&next);
  assert_int_equal(next, 3);
  clean();
  return place != NULL;
}

TEST(Cache_NthCallFails_IsWholeOrNotThere) { calls_fail_each(attempt, 8, 8); }

int main(void) { return run_cases(set_up, tear_down); }
