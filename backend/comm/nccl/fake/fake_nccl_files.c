// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/nccl/fake/fake_nccl_files.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct path_s {
  char text[1024];
} path_t;

static const char* folder(void) { return getenv("SLUICE_FAKE_NCCL_FOLDER"); }
int sluice_fake_nccl_has_folder(void) { return folder() != NULL; }

static _Noreturn void give_up(const path_t* path) {
  perror(path->text);
  abort();
}

/* Renames a complete file, so that readers never see a partial one. */
static void write_file(const path_t* path, char head, const void* data, size_t bytes) {
  path_t unfinished;
  snprintf(unfinished.text, sizeof unfinished.text, "%.1000s.new", path->text);
  FILE* file = fopen(unfinished.text, "wb");
  if (file == NULL) give_up(&unfinished);
  int is_written = fputc(head, file) != EOF && fwrite(data, 1, bytes, file) == bytes;
  if (fclose(file) != 0 || !is_written || rename(unfinished.text, path->text) != 0) give_up(path);
}

static path_t note_path(uint64_t group, int rank, sluice_fake_note_t what) {
  path_t path;
  snprintf(path.text, sizeof path.text, "%.900s/%llx-%s-%d", folder(), (unsigned long long)group,
           what == SLUICE_FAKE_HERE ? "here" : "gone", rank);
  return path;
}

void sluice_fake_nccl_note(uint64_t group, int rank, sluice_fake_note_t what) {
  const path_t path = note_path(group, rank, what);
  write_file(&path, '\n', "", 0);
}

int sluice_fake_nccl_is_noted(uint64_t group, int rank, sluice_fake_note_t what) {
  const path_t path = note_path(group, rank, what);
  return access(path.text, F_OK) == 0;
}

static path_t letter_path(const sluice_fake_letter_t* letter) {
  path_t path;
  snprintf(path.text, sizeof path.text, "%.900s/%llx-%d-to-%d-%lld", folder(), (unsigned long long)letter->group,
           letter->from, letter->to, (long long)letter->number);
  return path;
}

void sluice_fake_nccl_post(const sluice_fake_letter_t* letter, const void* data, size_t bytes) {
  const path_t path = letter_path(letter);
  write_file(&path, letter->is_registered ? 'r' : '-', data, bytes);
}

int sluice_fake_nccl_collect(sluice_fake_letter_t* letter, void* data, size_t bytes) {
  const path_t path = letter_path(letter);
  struct stat found;
  if (stat(path.text, &found) != 0 || (uint64_t)found.st_size != bytes + 1) return 0;
  FILE* file = fopen(path.text, "rb");
  if (file == NULL) give_up(&path);
  int head = fgetc(file);
  if (head == EOF || fread(data, 1, bytes, file) != bytes || fclose(file) != 0) give_up(&path);
  letter->is_registered = head == 'r';
  (void)unlink(path.text);
  return 1;
}
