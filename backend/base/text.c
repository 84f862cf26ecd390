// SPDX-License-Identifier: Apache-2.0
#include "backend/base/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/base/c_locale.h"

void sluice_text_add(sluice_text_t* text, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  uint64_t left = text->used < text->room ? text->room - text->used : 0;
  sluice_c_locale_t locale = sluice_c_locale_enter();
  int length = vsnprintf(left > 0 ? text->data + text->used : NULL, left, format, arguments);
  sluice_c_locale_leave(locale);
  va_end(arguments);
  if (length > 0) text->used += (uint64_t)length;
}

void sluice_text_add_number(sluice_text_t* text, double value) {
  char digits[32];
  sluice_c_locale_t locale = sluice_c_locale_enter();
  snprintf(digits, sizeof digits, "%.10g", value);
  const int is_exact = strtod(digits, NULL) == value;
  sluice_c_locale_leave(locale);
  sluice_text_add(text, is_exact ? "%.10g" : "%.17g", value);
}

const char* sluice_size_text(uint64_t bytes, char text[SLUICE_SIZE_TEXT_BYTES]) {
  const int is_small = bytes < 1 << 20;
  sluice_text_t out = sluice_text(text, SLUICE_SIZE_TEXT_BYTES);
  sluice_text_add(&out, "%.1f %s", (double)bytes / (is_small ? 1024.0 : 1048576.0), is_small ? "KiB" : "MiB");
  return text;
}

sluice_status_t sluice_read_environment(const char* name, int32_t least, int32_t most, int32_t* out) {
  const char* text = getenv(name);
  char* end = NULL;
  if (text == NULL || *text == '\0') return SLUICE_OK;
  const long long value = strtoll(text, &end, 10);
  if (*end != '\0' || value < least || value > most) {
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "%s is '%s'; it must be a whole number from %d to %d", name, text,
                       least, most);
  }
  *out = (int32_t)value;
  return SLUICE_OK;
}
