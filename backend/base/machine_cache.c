// SPDX-License-Identifier: Apache-2.0
#include "backend/base/machine_cache.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/base/hash.h"
#include "backend/base/file_trust.h"

#define MOST_BYTES (1 << 18)

static uint64_t hash_of(const char* text) { return sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, text, strlen(text)); }

int sluice_machine_cache_path(const char* folder, const char* name, const char* key,
                              char out_path[SLUICE_FINDING_PATH_BYTES]) {
  const char *own = getenv("SLUICE_CACHE_DIR"), *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
  const char *base = folder, *rest = "";
  if (base == NULL && own != NULL && own[0] != '\0') base = own;
  if (base == NULL && xdg != NULL && xdg[0] == '/') base = xdg, rest = "/sluice";
  if (base == NULL && home != NULL && home[0] == '/') base = home, rest = "/.cache/sluice";
  if (base == NULL || base[0] == '\0') return 0;
  int length = snprintf(out_path, SLUICE_FINDING_PATH_BYTES, "%s%s/%s-%016llx.json", base, rest, name,
                        (unsigned long long)hash_of(key));
  return length > 0 && length < SLUICE_FINDING_PATH_BYTES;
}

int sluice_machine_cache_is_default(const char* folder) {
  const char* own = getenv("SLUICE_CACHE_DIR");
  return folder == NULL && (own == NULL || own[0] == '\0');
}

void sluice_machine_cache_processor(char* out, size_t room) {
  snprintf(out, room, "unknown processor");
  FILE* file = fopen("/proc/cpuinfo", "r");
  if (file == NULL) return;
  char line[256];
  while (fgets(line, sizeof line, file) != NULL) {
    const char* colon = strchr(line, ':');
    if (strncmp(line, "model name", 10) != 0 || colon == NULL) continue;
    snprintf(out, room, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
    break;
  }
  fclose(file);
}

/* ---- reading ---- */

/* Returns the bytes to reserve, including the terminating zero. */
static size_t room_for(int descriptor) {
  struct stat info;
  const int is_known = fstat(descriptor, &info) == 0 && S_ISREG(info.st_mode);
  return is_known && info.st_size < MOST_BYTES - 1 ? (size_t)info.st_size + 1 : MOST_BYTES;
}

static char* read_whole(const char* path, int must_be_ours, size_t* out_length) {
  int descriptor = sluice_trusted_open(path, must_be_ours);
  FILE* file = descriptor < 0 ? NULL : fdopen(descriptor, "rb");
  if (file == NULL) {
    if (descriptor >= 0) (void)close(descriptor);
    return NULL;
  }
  const size_t room = room_for(descriptor);
  char* text = malloc(room);
  if (text != NULL) *out_length = fread(text, 1, room - 1, file);
  if (text != NULL) text[*out_length] = '\0';
  fclose(file);
  return text;
}

/* Returns the text after the lines with form and key, or NULL with the reason. */
static const char* body_of(const char* text, const char* form, const char* key, const char** out_reason) {
  const size_t form_length = strlen(form), key_length = strlen(key);
  *out_reason = "it was written by another version, or is not a cache file";
  if (strncmp(text, form, form_length) != 0 || text[form_length] != '\n') return NULL;
  *out_reason = "it was written for another machine or library";
  text += form_length + 1;
  if (strncmp(text, key, key_length) != 0 || text[key_length] != '\n') return NULL;
  *out_reason = NULL;
  return text + key_length + 1;
}

const char* sluice_machine_cache_read(const char* path, const char* form, const char* key, int must_be_ours,
                                      char** out_memory, size_t* out_length, const char** out_reason) {
  size_t length = 0;
  *out_reason = NULL;
  *out_memory = read_whole(path, must_be_ours, &length);
  if (*out_memory == NULL) return NULL;
  const char* body = body_of(*out_memory, form, key, out_reason);
  if (body == NULL) {
    free(*out_memory);
    *out_memory = NULL;
    return NULL;
  }
  *out_length = length - (size_t)(body - *out_memory);
  return body;
}

/* ---- writing ---- */

static void make_folders(const char* path) {
  char part[SLUICE_FINDING_PATH_BYTES];
  snprintf(part, sizeof part, "%s", path);
  for (char* slash = strchr(part + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
    *slash = '\0';
    (void)mkdir(part, 0700); /* it exists already, or opening the file fails as well */
    *slash = '/';
  }
}

static int write_file(const char* path, const char* form, const char* key, const char* text) {
  /* Not writable by others, whatever the umask: such a file would not be read back. */
  int descriptor = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  FILE* file = descriptor < 0 ? NULL : fdopen(descriptor, "wb");
  if (file == NULL && descriptor >= 0) (void)close(descriptor);
  if (file == NULL) return 0;
  /* Synced before it gets its name: otherwise a power failure may leave the name with no bytes. */
  const int done = fprintf(file, "%s\n%s\n%s", form, key, text) > 0 && fflush(file) == 0 && fsync(descriptor) == 0;
  return fclose(file) == 0 && done;
}

int sluice_machine_cache_write(const char* path, const char* form, const char* key, const char* text) {
  char temporary[SLUICE_FINDING_PATH_BYTES + 64];
  make_folders(path);
  /* Ranks may be threads: the address of a local variable makes the name unique. */
  snprintf(temporary, sizeof temporary, "%s.%ld.%p", path, (long)getpid(), (void*)temporary);
  if (write_file(temporary, form, key, text) && rename(temporary, path) == 0) return 1;
  const int why = errno;
  (void)unlink(temporary);
  errno = why;
  return 0;
}
