// SPDX-License-Identifier: Apache-2.0
#include "third_party/bazel/test.h"

typedef struct place_s {
  const char* file;
  int line;
} place_t;

enum { MOST_TESTS = 256 };
static struct CMUnitTest tests[MOST_TESTS];
static place_t places[MOST_TESTS];
static size_t num_tests;

void test_add(const char* file, int line, struct CMUnitTest test) {
  if (num_tests == MOST_TESTS) abort();
  /* A compiler may run the constructors of a file in another order than the file's. */
  size_t at = num_tests++;
  for (; at > 0 && places[at - 1].line > line && strcmp(places[at - 1].file, file) == 0; --at) {
    tests[at] = tests[at - 1];
    places[at] = places[at - 1];
  }
  tests[at] = test;
  places[at] = (place_t){file, line};
}

int run_cases(CMFixtureFunction set_up, CMFixtureFunction tear_down) {
  const char* filter = getenv("TESTBRIDGE_TEST_ONLY");
  if (filter != NULL) cmocka_set_test_filter(filter);
  if (num_tests == 0) return print_error("no TEST\n"), 1;
  return _cmocka_run_group_tests("tests", tests, num_tests, set_up, tear_down);
}

int run_cases_each(CMFixtureFunction set_up, CMFixtureFunction tear_down) {
  for (size_t i = 0; i < num_tests; ++i) {
    if (tests[i].setup_func != NULL || tests[i].teardown_func != NULL) continue;
    tests[i].setup_func = set_up;
    tests[i].teardown_func = tear_down;
  }
  return run_cases(NULL, NULL);
}

int run_cases_after(const struct CMUnitTest* rows, size_t count) {
  if (num_tests + count > MOST_TESTS) abort();
  memmove(tests + count, tests, num_tests * sizeof *tests);
  memcpy(tests, rows, count * sizeof *tests);
  num_tests += count;
  return run_cases(NULL, NULL);
}
