// SPDX-License-Identifier: Apache-2.0
/* Cases of a cmocka program: TEST(Subject_Condition_Outcome) { ... } is all that a case needs. test_main.c runs the
 * cases of a program in the order in which its files define them. Bazel's `--test_filter=PATTERN` (with `*` and `?`)
 * selects cases by name. */
#ifndef SLUICE_THIRD_PARTY_BAZEL_TEST_H_
#define SLUICE_THIRD_PARTY_BAZEL_TEST_H_

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

/* Used by the macros alone. */
void test_add(const char* file, int line, struct CMUnitTest test);

#define TEST(name) TEST_FIXTURE(name, NULL, NULL)

/* A case with a set-up of its own, which may set the `*state` that the case reads. */
#define TEST_FIXTURE(name, set_up, tear_down)                                                    \
  static void name(void** state);                                                                \
  __attribute__((constructor)) static void add_##name(void) {                                    \
    test_add(__FILE__, __LINE__, (struct CMUnitTest){#name, name, (set_up), (tear_down), NULL}); \
  }                                                                                              \
  static void name(__attribute__((unused)) void** state)

/* For programs with a main of their own: runs all cases, with a set-up for the program. */
int run_cases(CMFixtureFunction set_up, CMFixtureFunction tear_down);

/* The same with a set-up for each case that has none. */
int run_cases_each(CMFixtureFunction set_up, CMFixtureFunction tear_down);

/* The same after the rows of an array, where several rows share a function. */
#define RUN_CASES_AFTER(rows) run_cases_after((rows), sizeof(rows) / sizeof((rows)[0]))
int run_cases_after(const struct CMUnitTest* rows, size_t count);

/* A struct of the C ABI with its defaults: DEFAULTS(sluice_comm_config, config). */
#define DEFAULTS(type, name) \
  type##_t name;             \
  type##_init(&name, sizeof name)

/* Skips a case with its reason, which third_party/test/counts.py looks for in third_party/test/skips.txt. Takes a
 * format and its values. */
#define skip_because(...)       \
  do {                          \
    print_message("SKIPPED: "); \
    print_message(__VA_ARGS__); \
    print_message("\n");        \
    skip();                     \
  } while (0)

#endif /* SLUICE_THIRD_PARTY_BAZEL_TEST_H_ */
