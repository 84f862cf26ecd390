// SPDX-License-Identifier: Apache-2.0
#include "backend/base/pages_rates.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/utsname.h>

#include "backend/base/machine_cache.h"

/* After the first ones, one of EVERY is measured; NEWEST is the weight of a new measurement among several. */
enum { EVERY = 16 };
static const double NEWEST = 0.25;
static const double LEAST_GAIN = 0.9;

sluice_pages_rate_t* sluice_pages_rate_of(sluice_pages_rates_t* rates, uint64_t bytes) {
  int size = 0;
  for (uint64_t next = SLUICE_PAGES_LARGE * 4; size + 1 < SLUICE_PAGES_SIZES && bytes >= next; next *= 4) ++size;
  return &rates->sizes[size];
}

int sluice_pages_is_due(sluice_pages_rate_t* rate) {
  if (rate->measured >= SLUICE_PAGES_FIRST && ++rate->asked < EVERY) return 0;
  rate->asked = 0;
  return 1;
}

void sluice_pages_add(sluice_pages_rate_t* rate, const double seconds_per_byte[SLUICE_PAGES_WAYS]) {
  const double least = rate->measured == 0 ? 1.0 : 1.0 / (rate->measured + 1.0);
  const double share = least > NEWEST ? least : NEWEST;
  for (int way = 0; way < SLUICE_PAGES_WAYS; ++way) {
    double* mean = &rate->seconds_per_byte[way];
    *mean += share * (seconds_per_byte[way] - *mean);
  }
  if (rate->measured < UINT32_MAX) ++rate->measured;
}

int sluice_pages_are_better_huge(const sluice_pages_rate_t* rate) {
  const double* took = rate->seconds_per_byte;
  return rate->measured > 0 && took[SLUICE_PAGES_HUGE] < LEAST_GAIN * took[SLUICE_PAGES_SMALL];
}

/* ---- the cache --------------------------------------------------------------------------------------------------- */

#define FORM "sluice fresh memory 1"
enum { KEY_BYTES = 512, NUMBERS = SLUICE_PAGES_SIZES * SLUICE_PAGES_WAYS };
_Static_assert(NUMBERS == 8, "as many as the text has");

/* The kernel is part of the key, since it also determines how pages are populated. */
static int path_of(char key[KEY_BYTES], char path[SLUICE_FINDING_PATH_BYTES]) {
  char processor[128];
  struct utsname kernel;
  sluice_machine_cache_processor(processor, sizeof processor);
  if (uname(&kernel) != 0) kernel.release[0] = '\0';
  snprintf(key, KEY_BYTES, "%s; Linux %s", processor, kernel.release);
  return sluice_machine_cache_path(NULL, "pages", key, path);
}

/* Femtoseconds per byte, because integers look the same in every locale. 0 and 0: not measured. */
static const char form_of_text[] = "{\"rates\": [[%lu, %lu], [%lu, %lu], [%lu, %lu], [%lu, %lu]]}";
static const double UNIT = 1e-15;

void sluice_pages_cache_read(sluice_pages_rates_t* rates) {
  char key[KEY_BYTES], path[SLUICE_FINDING_PATH_BYTES];
  if (!path_of(key, path)) return;
  char* memory = NULL;
  size_t length = 0;
  const char* reason = NULL;
  const char* body =
      sluice_machine_cache_read(path, FORM, key, sluice_machine_cache_is_default(NULL), &memory, &length, &reason);
  unsigned long v[NUMBERS];
  const int found =
      body == NULL ? 0 : sscanf(body, form_of_text, &v[0], &v[1], &v[2], &v[3], &v[4], &v[5], &v[6], &v[7]);
  free(memory);
  for (int i = 0; found == NUMBERS && i < SLUICE_PAGES_SIZES; ++i) {
    if (v[2 * i] == 0 || v[2 * i + 1] == 0) continue;
    rates->sizes[i] =
        (sluice_pages_rate_t){{UNIT * (double)v[2 * i], UNIT * (double)v[2 * i + 1]}, SLUICE_PAGES_FIRST, 0};
  }
}

void sluice_pages_cache_write(const sluice_pages_rates_t* rates) {
  char key[KEY_BYTES], path[SLUICE_FINDING_PATH_BYTES], text[256];
  if (!path_of(key, path)) return;
  unsigned long v[NUMBERS] = {0};
  for (int i = 0; i < SLUICE_PAGES_SIZES; ++i) {
    const sluice_pages_rate_t* rate = &rates->sizes[i];
    for (int way = 0; way < SLUICE_PAGES_WAYS && rate->measured >= SLUICE_PAGES_FIRST; ++way) {
      v[2 * i + way] = (unsigned long)(rate->seconds_per_byte[way] / UNIT) + 1;
    }
  }
  snprintf(text, sizeof text, form_of_text, v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]);
  (void)sluice_machine_cache_write(path, FORM, key, text);
}
