// SPDX-License-Identifier: Apache-2.0
/* When fresh memory is measured, which size of pages is chosen, and the file that keeps the measured rates for later
 * processes. */
#include <dirent.h>
#include <unistd.h>

#include "backend/base/pages_rates.h"
#include "third_party/bazel/test.h"

static const double huge_faster[] = {3e-10, 1e-10}, huge_slower[] = {3e-10, 20e-10}, similar[] = {3e-10, 2.9e-10};

static void add(sluice_pages_rate_t* rate, const double* took, int times) {
  for (int i = 0; i < times; ++i) sluice_pages_add(rate, took);
}

TEST(Rates_Sizes_AreSeparate) {
  sluice_pages_rates_t rates;
  memset(&rates, 0, sizeof rates);
  assert_ptr_equal(sluice_pages_rate_of(&rates, SLUICE_PAGES_LARGE), &rates.sizes[0]);
  assert_ptr_equal(sluice_pages_rate_of(&rates, 4 * SLUICE_PAGES_LARGE - 1), &rates.sizes[0]);
  assert_ptr_equal(sluice_pages_rate_of(&rates, 4 * SLUICE_PAGES_LARGE), &rates.sizes[1]);
  assert_ptr_equal(sluice_pages_rate_of(&rates, 64 * SLUICE_PAGES_LARGE), &rates.sizes[3]);
  assert_ptr_equal(sluice_pages_rate_of(&rates, UINT64_MAX), &rates.sizes[3]);
  add(&rates.sizes[1], huge_faster, 1);
  assert_true(sluice_pages_are_better_huge(&rates.sizes[1]));
  assert_false(sluice_pages_are_better_huge(&rates.sizes[0]));
}

TEST(Rates_Better_ByATenthAtLeast) {
  sluice_pages_rate_t rate = {{0, 0}, 0, 0};
  add(&rate, similar, 1);
  assert_false(sluice_pages_are_better_huge(&rate));
  add(&rate, huge_faster, 4);
  assert_true(sluice_pages_are_better_huge(&rate));
}

/* The host sometimes still has the pages, which makes one range fast: it must not outweigh the slow ranges. */
TEST(Rates_ThatChange_AreFollowedAndOneIsNotEnough) {
  sluice_pages_rate_t rate = {{0, 0}, 0, 0};
  add(&rate, huge_slower, 4);
  add(&rate, huge_faster, 1);
  assert_false(sluice_pages_are_better_huge(&rate));
  add(&rate, huge_faster, 9);
  assert_true(sluice_pages_are_better_huge(&rate));
  add(&rate, huge_slower, 1);
  assert_false(sluice_pages_are_better_huge(&rate));
}

TEST(Due_TheFirstFour_ThenOneOfSixteen) {
  sluice_pages_rate_t rate = {{0, 0}, 0, 0};
  for (int i = 0; i < 4; ++i) {
    assert_true(sluice_pages_is_due(&rate));
    add(&rate, huge_faster, 1);
  }
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 15; ++i) assert_false(sluice_pages_is_due(&rate));
    assert_true(sluice_pages_is_due(&rate));
    add(&rate, huge_faster, 1);
  }
}

/* ---- the file ---------------------------------------------------------------------------------------------------- */

static char folder[] = "/tmp/sluice_pages_XXXXXX", path[512];

static int set_up(void** state) {
  (void)state;
  if (mkdtemp(folder) == NULL) return 1;
  return setenv("SLUICE_CACHE_DIR", folder, 1);
}

static int tear_down(void** state) {
  (void)state;
  unlink(path);
  return rmdir(folder);
}

static void find_file(void) {
  DIR* entries = opendir(folder);
  assert_non_null(entries);
  for (struct dirent* entry; (entry = readdir(entries)) != NULL;) {
    if (strncmp(entry->d_name, "pages-", 6) == 0) snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
  }
  closedir(entries);
}

static int is_empty(const sluice_pages_rates_t* rates) {
  static const sluice_pages_rates_t none;
  return memcmp(rates, &none, sizeof none) == 0;
}

TEST(Rates_Kept_ReadBackWhereEnoughWasMeasured) {
  sluice_pages_rates_t rates, again;
  memset(&rates, 0, sizeof rates);
  memset(&again, 0, sizeof again);
  sluice_pages_cache_read(&again);
  assert_true(is_empty(&again)); /* no file exists yet */
  rates.sizes[1] = (sluice_pages_rate_t){{3e-10, 1e-9}, 3, 0};
  rates.sizes[3] = (sluice_pages_rate_t){{3e-10, 1e-10}, 9, 5};
  sluice_pages_cache_write(&rates);
  sluice_pages_cache_read(&again);
  assert_true(sluice_pages_are_better_huge(&again.sizes[3]));
  assert_false(sluice_pages_is_due(&again.sizes[3]));
  assert_int_equal(again.sizes[1].measured, 0); /* three ranges are too few to be used */
  assert_float_equal(again.sizes[3].seconds_per_byte[SLUICE_PAGES_SMALL] * 1e10, 3, 1e-3);
}

TEST(Rates_DamagedFile_IsLeftOut) {
  find_file();
  FILE* file = fopen(path, "r");
  assert_non_null(file);
  char text[1024];
  text[fread(text, 1, sizeof text - 1, file)] = '\0';
  fclose(file);
  char* body = strchr(strchr(text, '\n') + 1, '\n') + 1;
  *body = '\0';
  static const char* const wrong[] = {
      "",
      "{}",
      "{\"rates\": [[1, 1]]}",
      "{\"rates\": [[9, 1], [9, 1], [9, 1], [9",
      "{\"rates\": [[9, 1], [9, 1], [9, 1], [9, ]]}",
      "{\"rates\": [[0, 1], [9, 0], [0, 0], [0, 7]]}",
  };
  for (size_t i = 0; i <= sizeof wrong / sizeof wrong[0]; ++i) {
    file = fopen(path, "w");
    if (i < sizeof wrong / sizeof wrong[0]) fprintf(file, "%s%s", text, wrong[i]);
    if (i == sizeof wrong / sizeof wrong[0])
      fprintf(file, "another form\n{\"rates\": [[9, 1], [9, 1], [9, 1], [9, 1]]}");
    fclose(file);
    sluice_pages_rates_t rates;
    memset(&rates, 0, sizeof rates);
    sluice_pages_cache_read(&rates);
    assert_true(is_empty(&rates));
  }
}

int main(void) { return run_cases(set_up, tear_down); }
