// SPDX-License-Identifier: Apache-2.0
/* Fuzzes the file of choices of GEMMs: any bytes after a valid head are refused, or read as choices that are the same
 * after they are written and read again. cache_fuzz.c fuzzes the head. */
#include <dirent.h>
#include <string.h>
#include <unistd.h>

#include "backend/base/machine_cache.h"
#include "backend/base/log.h"
#include "backend/gemm/auto/auto_cache.h"
#include "third_party/fuzz/target.h"

enum { MOST = 64, HEAD_BYTES = 1024 };
static const char candidates[] = "auto of native + ref, host of nobody";
static char folder[SLUICE_FINDING_PATH_BYTES / 2], path[SLUICE_FINDING_PATH_BYTES], head[HEAD_BYTES];
static size_t head_bytes;

static void clean_up(void) {
  (void)unlink(path);
  (void)rmdir(folder);
}

/* With this log set, messages are formatted. */
static void hear(void* user, int32_t level, const char* message) {
  (void)user, (void)level;
  FUZZ_CHECK(message[0] != '\0');
}

/* Finds the path of the file, and its first two lines. The folder is one that Bazel deletes, or that of libFuzzer's
 * artifacts. */
static void find_file(void) {
  const char* parent = getenv("TEST_TMPDIR");
  snprintf(folder, sizeof folder, "%s/kept_choices", parent != NULL ? parent : ".");
  FUZZ_CHECK(setenv("SLUICE_CACHE_DIR", folder, 1) == 0);
  sluice_gemm_choices_write(candidates, NULL, 0);
  DIR* entries = opendir(folder);
  FUZZ_CHECK(entries != NULL);
  for (struct dirent* entry; (entry = readdir(entries)) != NULL;) {
    if (strncmp(entry->d_name, "gemm-", 5) == 0) snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
  }
  (void)closedir(entries);
  FUZZ_CHECK(path[0] != '\0' && atexit(clean_up) == 0);
  FILE* file = fopen(path, "r");
  FUZZ_CHECK(file != NULL);
  for (int line = 0; line < 2; ++line, head_bytes = strlen(head)) {
    FUZZ_CHECK(fgets(head + head_bytes, (int)(sizeof head - head_bytes), file) != NULL);
  }
  (void)fclose(file);
  sluice_set_log(hear, NULL, SLUICE_LOG_WARN);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  sluice_gemm_choice_t choices[MOST], again[MOST];
  if (head_bytes == 0) find_file();
  FILE* file = fopen(path, "w");
  FUZZ_CHECK(file != NULL && fwrite(head, 1, head_bytes, file) == head_bytes && fwrite(data, 1, size, file) == size);
  FUZZ_CHECK(fclose(file) == 0);
  const int count = sluice_gemm_choices_read(candidates, choices, MOST);
  FUZZ_CHECK(count >= 0 && count <= MOST);
  for (int i = 0; i < count; ++i) FUZZ_CHECK(choices[i].class_id >= 0);
  if (count == 0) return 0;
  ++fuzz_num_taken;
  sluice_gemm_choices_write(candidates, choices, count);
  FUZZ_CHECK(sluice_gemm_choices_read(candidates, again, MOST) == count);
  FUZZ_CHECK(memcmp(choices, again, (size_t)count * sizeof *choices) == 0);
  return 0;
}
