#include "backend/base/text.h"

#include <stdarg.h>
#include <stdio.h>

void sluice_text_add(sluice_text_t* text, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  uint64_t left = text->used < text->room ? text->room - text->used : 0;
  int length = vsnprintf(left > 0 ? text->data + text->used : NULL, left, format, arguments);
  va_end(arguments);
  if (length > 0) text->used += (uint64_t)length;
}
