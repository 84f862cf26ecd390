/* Skips a case of cmocka with its reason, which third_party/test/counts.py looks for in third_party/test/skips.txt. */
#ifndef SLUICE_THIRD_PARTY_BAZEL_SKIP_H
#define SLUICE_THIRD_PARTY_BAZEL_SKIP_H

/* After <cmocka.h>. Takes a format and its values. */
#define skip_because(...)       \
  do {                          \
    print_message("SKIPPED: "); \
    print_message(__VA_ARGS__); \
    print_message("\n");        \
    skip();                     \
  } while (0)

#endif
