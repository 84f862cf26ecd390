// SPDX-License-Identifier: Apache-2.0
/* Reads and writes numbers in text with a decimal point in any locale: in half of the world's locales printf writes
 * 0,5, which is not JSON, and strtod stops at the point. */
#pragma once

#include <locale.h>

typedef struct sluice_c_locale_s {
  locale_t c; /* 0: it does not exist, and nothing was changed */
  locale_t before;
} sluice_c_locale_t;

/* Sets the C locale for this thread, until leave. */
static inline sluice_c_locale_t sluice_c_locale_enter(void) {
  locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
  return (sluice_c_locale_t){c, c == (locale_t)0 ? (locale_t)0 : uselocale(c)};
}

static inline void sluice_c_locale_leave(sluice_c_locale_t locale) {
  if (locale.c == (locale_t)0) return;
  uselocale(locale.before);
  freelocale(locale.c);
}
