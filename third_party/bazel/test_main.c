// SPDX-License-Identifier: Apache-2.0
/* The main of test programs that have none of their own. The argument: a pattern of the cases that run, else all. */
#include "third_party/bazel/test.h"

int main(int argc, char** argv) {
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  return run_cases(NULL, NULL);
}
