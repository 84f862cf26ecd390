// SPDX-License-Identifier: Apache-2.0
/* The main of test programs without their own. Runs the cases that match the argument, or all without an argument. */
#include "third_party/bazel/test.h"

int main(int argc, char** argv) {
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return run_cases(NULL, NULL);
}
