// SPDX-License-Identifier: Apache-2.0
/* Runs a fuzz target on every file of the named folders, whole and truncated after each of its first 600 bytes. */
#include <dirent.h>
#include <string.h>

#include "third_party/fuzz/target.h"

enum { MOST_CUTS = 600 };

static uint64_t num_inputs;

/* Runs the target on a copy of the input, in a block of its exact size. */
static void give(const uint8_t* data, size_t size) {
  uint8_t* copy = malloc(size > 0 ? size : 1);
  if (copy == NULL) abort();
  memcpy(copy, data, size);
  (void)LLVMFuzzerTestOneInput(copy, size);
  free(copy);
  ++num_inputs;
}

static int replay(const char* path) {
  FILE* file = fopen(path, "rb");
  if (file == NULL) return 0;
  static uint8_t data[1 << 20];
  const size_t size = fread(data, 1, sizeof data, file);
  fclose(file);
  fprintf(stderr, "%s\n", path); /* names the file if the target crashes */
  for (size_t cut = 0; cut < size && cut < MOST_CUTS; ++cut) give(data, cut);
  give(data, size);
  return 1;
}

static int replay_folder(const char* folder) {
  DIR* entries = opendir(folder);
  const struct dirent* entry;
  int num_files = 0;
  if (entries == NULL) return 0;
  while ((entry = readdir(entries)) != NULL) {
    char path[4096];
    if (entry->d_name[0] == '.') continue;
    if (snprintf(path, sizeof path, "%s/%s", folder, entry->d_name) < (int)sizeof path) num_files += replay(path);
  }
  closedir(entries);
  return num_files;
}

int main(int argc, char** argv) {
  int num_files = 0;
  for (int i = 1; i < argc; ++i) num_files += replay_folder(argv[i]);
  printf("%d files, %llu inputs, %llu taken\n", num_files, (unsigned long long)num_inputs,
         (unsigned long long)fuzz_num_taken);
  if (fuzz_num_taken == 0) fprintf(stderr, "nothing of the corpus is taken: it has an older form; make it again\n");
  return num_files > 0 && fuzz_num_taken > 0 ? 0 : 1; /* a missing corpus is a failure */
}
