/* A calibration that is written to disk and read again, while every file call and every allocation of it fails in turn:
 * a file with the name of a calibration is complete, no other file remains, and the next attempt works. */
#include <dirent.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

static int32_t count_entries(const char* name) {
  DIR* entries = opendir(name);
  int32_t count = 0;
  if (entries == NULL) return 0;
  while (readdir(entries) != NULL) ++count;
  closedir(entries);
  return count;
}

/* The call that fails in it; NULL: none. */
static const call_place_t* failing;
static int64_t failing_nth;
static int32_t has_failed, is_counted;

static void* run(void* out) {
  sluice_machine_t read;
  if (is_counted && failing == NULL) calls_count();
  if (is_counted && failing != NULL) calls_fail(failing, failing_nth);
  *(int*)out = sluice_cache_write(path, "a key", &machine);
  *(int*)out |= sluice_cache_read(path, "a key", 0, &read) << 1;
  has_failed = is_counted && calls_end();
  return NULL;
}

/* Writes and reads, like two consecutive processes: on a thread, so that the call stacks of allocations begin the same.
 * Bits: written, read. */
static int write_and_read(void) {
  pthread_t thread;
  int outcome = 0;
  assert_int_equal(pthread_create(&thread, NULL, run, &outcome), 0);
  pthread_join(thread, NULL);
  return outcome;
}

static void check(const call_place_t* place, int64_t nth, int outcome, int32_t num_descriptors) {
  sluice_machine_t read;
  const int is_there = access(path, F_OK) == 0;
  const int is_whole = is_there && sluice_cache_read(path, "a key", 0, &read) && read.op_seconds == machine.op_seconds;
  const int32_t others = count_entries(inner) > 0 ? count_entries(inner) - 2 - is_there : 0;
  if (is_there == is_whole && is_there == (outcome & 1) && others == 0 &&
      count_entries("/proc/self/fd") == num_descriptors) {
    return;
  }
  fail_msg("%s at 0x%lx, hit %lld fails: written %d, there %d, whole %d, other files %d, descriptors %d of %d",
           place->name, (unsigned long)place->address, (long long)nth, outcome & 1, is_there, is_whole, others,
           count_entries("/proc/self/fd"), num_descriptors);
}

/* place NULL: none fails. */
static void attempt(const call_place_t* place, int64_t nth, int32_t num_descriptors) {
  failing = place, failing_nth = nth, is_counted = 1;
  const int outcome = write_and_read();
  is_counted = 0;
  assert_int_equal(has_failed, place != NULL);
  if (place == NULL) assert_int_equal(outcome, 3);
  if (place != NULL) check(place, nth, outcome, num_descriptors);
  assert_int_equal(write_and_read(), 3); /* the next time */
  clean();
}

TEST(Cache_NthCallFails_IsWholeOrNotThere) {
  int32_t num_places = 0, num_struck = 0;
  const int32_t num_descriptors = count_entries("/proc/self/fd");
  attempt(NULL, 0, num_descriptors);
  const call_place_t* places = calls_places(&num_places);
  assert_in_range(num_places, 8, 64);
  for (int32_t p = 0; p < num_places; ++p) {
    const call_place_t place = places[p];
    for (int64_t nth = 0; nth < place.num_hits; ++nth, ++num_struck) attempt(&place, nth, num_descriptors);
  }
  print_message("%d places, %d calls have failed\n", num_places, num_struck);
}

int main(void) { return run_cases(set_up, tear_down); }
