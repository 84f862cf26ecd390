#include "backend/base/structs.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

typedef struct sample_s {
  size_t struct_size;
  int32_t count, limit;
} sample_t;
static const sample_t defaults = {.count = 3, .limit = 5};

enum { ROOM = 40, UNTOUCHED = 0xee };

/* Callers of every age: without room for the size, without `limit`, today's, and one of later headers. */
static void Init_OfAnySize_WritesDefaultsZerosAndNothingBeyond(void** state) {
  (void)state;
  for (size_t size = 0; size <= ROOM - 8; ++size) {
    unsigned char given[ROOM], wanted[ROOM];
    memset(given, UNTOUCHED, sizeof given);
    memset(wanted, UNTOUCHED, sizeof wanted);
    if (size >= sizeof(size_t)) {
      sample_t known = defaults;
      known.struct_size = size;
      memset(wanted, 0, size);
      memcpy(wanted, &known, size < sizeof known ? size : sizeof known);
    }
    sluice_struct_init(given, size, &defaults, sizeof defaults);
    assert_memory_equal(given, wanted, ROOM);
  }
  sluice_struct_init(NULL, sizeof defaults, &defaults, sizeof defaults);
}

static void Init_WithoutDefaults_IsAllZerosButTheSize(void** state) {
  (void)state;
  sample_t given = {.count = 7, .limit = 7};
  sluice_struct_init(&given, sizeof given, NULL, 0);
  assert_true(given.struct_size == sizeof given && given.count == 0 && given.limit == 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(Init_OfAnySize_WritesDefaultsZerosAndNothingBeyond),
      cmocka_unit_test(Init_WithoutDefaults_IsAllZerosButTheSize),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
