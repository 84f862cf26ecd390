// SPDX-License-Identifier: Apache-2.0
/* Text in memory of a fixed size that also counts its full length, so that callers may first ask for the length. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "backend/base/status.h"

typedef struct sluice_text_s {
  char* data; /* terminated if it has any space */
  uint64_t room;
  uint64_t used; /* of everything added, even if it did not fit; without the terminator */
} sluice_text_t;

/* data may be NULL: then nothing is written, and `used` is the required size. */
static inline sluice_text_t sluice_text(char* data, uint64_t room) {
  return (sluice_text_t){data, data == NULL ? 0 : room, 0};
}

/* As printf; text that does not fit is truncated. */
__attribute__((format(printf, 2, 3))) void sluice_text_add(sluice_text_t* text, const char* format, ...);
/* Writes a number of bytes for people, "9.3 MiB" or "12.5 KiB", and returns text. */
#define SLUICE_SIZE_TEXT_BYTES 32
const char* sluice_size_text(uint64_t bytes, char text[SLUICE_SIZE_TEXT_BYTES]);
/* Writes a finite number, in ten digits if they read back as the same number, else in seventeen. */
void sluice_text_add_number(sluice_text_t* text, double value);

/* Reads a whole number from an environment variable. *out is not changed if the variable is unset or empty. Errors:
 * INVALID_ARGUMENT if the value is not a whole number in [least, most]; the message has the name, value and range. */
sluice_status_t sluice_read_environment(const char* name, int32_t least, int32_t most, int32_t* out);
