// SPDX-License-Identifier: Apache-2.0
/* Text in memory of a fixed size: it is never exceeded, and the full length is counted. */
#include "backend/base/text.h"

#include "third_party/bazel/test.h"

TEST(Text_OfAnyRoom_KnowsItsWholeLengthAndStaysInside) {
  const char* whole = "n 12, T_DI keep, T_M recompute";
  for (uint64_t room = 0; room < 40; ++room) {
    char data[41];
    memset(data, '#', sizeof data);
    sluice_text_t text = sluice_text(data, room);
    sluice_text_add(&text, "n %d", 12);
    sluice_text_add(&text, ", T_DI %s", "keep");
    sluice_text_add(&text, "%s", "");
    sluice_text_add(&text, ", T_M %s", "recompute");
    assert_int_equal(text.used, strlen(whole));
    uint64_t written = room == 0 ? 0 : room <= text.used ? room - 1 : text.used;
    assert_memory_equal(data, whole, written);
    if (room > 0) assert_int_equal(data[written], '\0');
    for (uint64_t i = room; i < sizeof data; ++i) assert_int_equal(data[i], '#');
  }
}

TEST(Text_OfSizes_IsInTheUnitOfPeople) {
  char text[SLUICE_SIZE_TEXT_BYTES];
  assert_string_equal(sluice_size_text(0, text), "0.0 KiB");
  assert_string_equal(sluice_size_text(1286400, text), "1.2 MiB");
  assert_string_equal(sluice_size_text(9675008, text), "9.2 MiB");
  assert_string_equal(sluice_size_text(12800, text), "12.5 KiB");
  assert_string_equal(sluice_size_text(UINT64_MAX, text), "17592186044416.0 MiB");
}
