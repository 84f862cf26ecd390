// SPDX-License-Identifier: Apache-2.0
/* Extensible structs of any size: defaults, sizes and extensions that are refused, and results for older callers. */
#include "backend/base/structs.h"

#include <string.h>

#include "backend/base/test/refused.h"

typedef struct sample_s {
  size_t struct_size;
  int32_t count, limit;
} sample_t;
static const sample_t defaults = {.count = 3, .limit = 5};

enum { ROOM = 40, UNTOUCHED = 0xee };

/* Sizes of all callers: without space for struct_size, without `limit`, as now, and of a later header. */
TEST(Init_OfAnySize_WritesDefaultsZerosAndNothingBeyond) {
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

TEST(Init_WithoutDefaults_IsAllZerosButTheSize) {
  sample_t given = {.count = 7, .limit = 7};
  sluice_struct_init(&given, sizeof given, NULL, 0);
  assert_true(given.struct_size == sizeof given && given.count == 0 && given.limit == 0);
}

TEST(CheckSize_OfAnUnsetStruct_IsRefusedByName) {
  const size_t bad[] = {0, sizeof(size_t) - 1, 65537, SIZE_MAX};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
    const sample_t given = {.struct_size = bad[i]};
    REFUSED(sluice_struct_check_size(&given, "sample_t"), SLUICE_E_ABI, "sample_t: struct_size is ");
  }
  const sample_t least = {.struct_size = sizeof(size_t)}, most = {.struct_size = 65536};
  assert_int_equal(sluice_struct_check_size(&least, "sample_t"), SLUICE_OK);
  assert_int_equal(sluice_struct_check_size(&most, "sample_t"), SLUICE_OK);
}

TEST(CheckNext_OfAnUnknownExtension_IsRefusedWithItsType) {
  const sluice_ext_header_t unknown = {.type = 4711};
  assert_int_equal(sluice_struct_check_next(NULL, "sample_t"), SLUICE_OK);
  REFUSED(sluice_struct_check_next(&unknown, "sample_t"), SLUICE_E_ABI, "sample_t: extension of unknown type 4711");
}

/* Older, equally old and newer callers: known fields are written, then zeros, and nothing after the struct's size. */
TEST(Give_ToAnySize_KeepsTheSizeAndWritesNothingBeyond) {
  const sample_t value = {.struct_size = 1, .count = 7, .limit = 9};
  for (size_t size = sizeof(size_t); size <= ROOM - 8; ++size) {
    unsigned char given[ROOM], wanted[ROOM];
    memset(given, UNTOUCHED, sizeof given);
    memset(wanted, UNTOUCHED, sizeof wanted);
    memcpy(given, &size, sizeof size);
    sample_t known = value;
    known.struct_size = size;
    memset(wanted, 0, size);
    memcpy(wanted, &known, size < sizeof known ? size : sizeof known);
    sluice_struct_give(given, &value, sizeof value);
    assert_memory_equal(given, wanted, ROOM);
  }
}
