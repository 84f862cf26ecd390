// SPDX-License-Identifier: Apache-2.0
/* Defines cases of a cmocka program: a case is just TEST(Subject_Condition_Outcome) { ... }. test_main.c runs the cases
 * of a program in the order in which its files define them. Bazel's `--test_filter=PATTERN` (with `*` and `?`) selects
 * cases by name. Tests need not include the standard headers below. */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* For the macros only. */
void test_add(const char* file, int line, struct CMUnitTest test);

#define TEST(name) TEST_FIXTURE(name, NULL, NULL)

/* Defines a case with its own set-up, which may set the `*state` that the case reads. */
#define TEST_FIXTURE(name, set_up, tear_down)                                                    \
  static void name(void** state);                                                                \
  __attribute__((constructor)) static void add_##name(void) {                                    \
    test_add(__FILE__, __LINE__, (struct CMUnitTest){#name, name, (set_up), (tear_down), NULL}); \
  }                                                                                              \
  static void name(__attribute__((unused)) void** state)

/* Runs all cases, with a set-up for the program; for programs with their own main. */
int run_cases(CMFixtureFunction set_up, CMFixtureFunction tear_down);

/* Runs all cases, with this set-up for each case without its own. */
int run_cases_each(CMFixtureFunction set_up, CMFixtureFunction tear_down);

/* Runs the rows of an array, several of which may share a function, and then all cases. */
#define RUN_CASES_AFTER(rows) run_cases_after((rows), sizeof(rows) / sizeof((rows)[0]))
int run_cases_after(const struct CMUnitTest* rows, size_t count);

/* Declares a struct of the C ABI with its defaults: DEFAULTS(sluice_comm_config, config). */
#define DEFAULTS(type, name) \
  type##_t name;             \
  type##_init(&name, sizeof name)

/* Skips a case. The arguments are a format and its values for the reason, which third_party/test/counts.py searches in
 * third_party/test/skips.txt. */
#define skip_because(...)       \
  do {                          \
    print_message("SKIPPED: "); \
    print_message(__VA_ARGS__); \
    print_message("\n");        \
    skip();                     \
  } while (0)
