// SPDX-License-Identifier: Apache-2.0
/* Creates, opens and closes files of states. */
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/base/hash.h"
#include "backend/base/log.h"
#include "backend/optim/file/format.h"

sluice_status_t sluice_state_file_says(const sluice_state_file_t* f, const char* doing) {
  return SLUICE_FAIL(SLUICE_E_EXTERNAL, "optimizer: %s: %s: %s", f->path, doing, strerror(errno));
}

/* ---- names ---- */

#define UNFINISHED ".unfinished"
enum { MOST_LINKS = 40 };

/* Replaces the path of a dangling link by its target. Returns 0 if the path is no such link. */
static int follow(char* path) {
  char target[PATH_MAX], all[2 * PATH_MAX];
  const ssize_t bytes = readlink(path, target, sizeof target - 1);
  if (bytes < 0) return errno == EINVAL || errno == ENOENT || errno == ENOTDIR ? 0 : -1;
  target[bytes] = '\0';
  const char* slash = strrchr(path, '/');
  const int folder = slash == NULL || target[0] == '/' ? 0 : (int)(slash - path) + 1;
  const int length = snprintf(all, sizeof all, "%.*s%s", folder, path, target);
  errno = ENAMETOOLONG;
  if (length >= PATH_MAX - (int)sizeof UNFINISHED) return -1;
  memcpy(path, all, (size_t)length + 1);
  return 1;
}

static sluice_status_t resolve(sluice_state_file_t* f, const char* path) {
  char real[PATH_MAX];
  const size_t length = strlen(path);
  SLUICE_TRY(SLUICE_REQUIRE(length > 0 && length < PATH_MAX - sizeof UNFINISHED,
                            "optimizer: a path of %llu bytes is too %s", (unsigned long long)length,
                            length == 0 ? "short" : "long"));
  memcpy(f->path, path, length + 1);
  for (int i = 0; i < MOST_LINKS; ++i) {
    if (realpath(f->path, real) != NULL) {
      SLUICE_TRY(
          SLUICE_REQUIRE(strlen(real) < PATH_MAX - sizeof UNFINISHED, "optimizer: the path %s is too long", path));
      memcpy(f->path, real, strlen(real) + 1);
      return SLUICE_OK;
    }
    if (errno != ENOENT) return sluice_state_file_says(f, "resolving its path");
    const int is_link = follow(f->path);
    if (is_link < 0) return sluice_state_file_says(f, "reading the link");
    if (!is_link) return SLUICE_OK;
  }
  errno = ELOOP;
  return sluice_state_file_says(f, "resolving links");
}

static void name_unfinished(const sluice_state_file_t* f, char* out) {
  (void)snprintf(out, PATH_MAX, "%.*s%s", PATH_MAX - (int)sizeof UNFINISHED, f->path, UNFINISHED);
}

/* ---- lock, close ---- */

static sluice_status_t make(const sluice_state_place_t* place, sluice_allocator_t* allocator,
                            sluice_state_file_t** out_file) {
  *out_file = NULL;
  sluice_state_file_t* f = sluice_alloc_zeroed(allocator, sizeof *f, "optimizer: a file of states");
  if (f == NULL) return sluice_alloc_status();
  f->allocator = allocator;
  f->descriptor.fd = -1;
  f->pid = getpid();
  f->is_durable = place->is_durable;
  f->room = NO_ROOM;
  f->unfinished = SLUICE_NO_STEP;
  const sluice_status_t status = resolve(f, place->path);
  if (status != SLUICE_OK) {
    sluice_state_file_close(f);
    return status;
  }
  *out_file = f;
  return SLUICE_OK;
}

void sluice_state_file_close(sluice_state_file_t* f) {
  if (f == NULL) return;
  if (f->is_new && f->pid == getpid()) {
    char path[PATH_MAX];
    name_unfinished(f, path);
    (void)unlink(path);
  }
  sluice_descriptor_close(&f->descriptor);
  sluice_state_model_free(&f->model, f->allocator);
  sluice_free(f->allocator, f, sizeof *f);
}

/* Only one process may have a file open, since two would overwrite each other's steps. After taking the lock, checks
 * that the path still names this file. */
static sluice_status_t lock(const sluice_state_file_t* f, const char* path) {
  struct stat held, named;
  if (flock(f->descriptor.fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return sluice_state_file_says(f, "locking it");
    return SLUICE_FAIL(SLUICE_E_BUSY, "optimizer: %s: another process, or another optimizer of this one, has it open",
                       path);
  }
  if (fstat(f->descriptor.fd, &held) != 0 || stat(path, &named) != 0)
    return sluice_state_file_says(f, "reading its metadata");
  if (held.st_dev == named.st_dev && held.st_ino == named.st_ino) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_BUSY, "optimizer: %s: another process has just replaced it; open it again", path);
}

/* ---- creating ---- */

/* Accepts a file that another process has left unfinished; no other file is overwritten. */
static sluice_status_t take_leftover(const sluice_state_file_t* f, const char* path) {
  uint64_t magic = 0;
  const ssize_t bytes = pread(f->descriptor.fd, &magic, sizeof magic, 0);
  if (bytes < 0) return sluice_state_file_says(f, "reading the file of an earlier process");
  if (bytes > 0 && magic != MAGIC && magic != 0) {
    return SLUICE_FAIL(SLUICE_E_EXTERNAL, "optimizer: %s exists and is not a state file; move it", path);
  }
  return ftruncate(f->descriptor.fd, 0) == 0 ? SLUICE_OK
                                             : sluice_state_file_says(f, "truncating the file of an earlier process");
}

static sluice_status_t write_head(const sluice_state_file_t* f, const sluice_state_place_t* place) {
  const uint64_t model_bytes = (uint64_t)f->model.num_words * sizeof *f->model.words;
  head_t head = {.magic = MAGIC,
                 .form = FORM,
                 .count = f->count,
                 .rank = place->rank,
                 .world_size = place->world_size,
                 .num_words = f->model.num_words,
                 .model_sum = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, f->model.words, model_bytes)};
  head.sum = sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, &head, offsetof(head_t, sum));
  SLUICE_TRY(sluice_file_write_at(f->descriptor.fd, "optimizer", f->path, PAGE, f->model.words, model_bytes));
  return sluice_file_write_at(f->descriptor.fd, "optimizer", f->path, 0, &head, sizeof head);
}

static sluice_status_t check_path_is_free(const sluice_state_file_t* f) {
  struct stat named;
  if (f->replaces) return SLUICE_OK;
  if (stat(f->path, &named) != 0) return errno == ENOENT ? SLUICE_OK : sluice_state_file_says(f, "resolving its path");
  return SLUICE_FAIL(SLUICE_E_EXTERNAL,
                     "optimizer: %s: creating it: File exists; open it to continue its steps, or give another path",
                     f->path);
}

static sluice_status_t copy_model(sluice_state_file_t* f, const sluice_state_model_t* model) {
  const uint64_t bytes = (uint64_t)(model->num_words + 1) * sizeof *model->words;
  int64_t* words = sluice_alloc(f->allocator, bytes, "optimizer: a file of states");
  if (words == NULL) return sluice_alloc_status();
  memcpy(words, model->words, (size_t)model->num_words * sizeof *words);
  f->model = *model;
  f->model.words = words;
  f->count = model->count;
  return SLUICE_OK;
}

static sluice_status_t make_new(sluice_state_file_t* f, const sluice_state_place_t* place,
                                const sluice_state_model_t* model) {
  char path[PATH_MAX];
  name_unfinished(f, path);
  SLUICE_TRY(copy_model(f, model));
  SLUICE_TRY(check_path_is_free(f));
  if (sluice_descriptor_open(&f->descriptor, path, O_RDWR | O_CREAT | O_NOFOLLOW) < 0)
    return sluice_state_file_says(f, "making it");
  SLUICE_TRY(lock(f, path));
  SLUICE_TRY(take_leftover(f, path));
  f->is_new = 1;
  const uint64_t bytes = sluice_state_file_bytes(f);
  const int error = posix_fallocate(f->descriptor.fd, 0, (off_t)bytes);
  if (error != 0) {
    return SLUICE_FAIL(SLUICE_E_EXTERNAL, "optimizer: %s: no room for %llu bytes (%lld elements, two steps): %s",
                       f->path, (unsigned long long)bytes, (long long)f->count, strerror(error));
  }
  return write_head(f, place);
}

sluice_status_t sluice_state_file_create(const sluice_state_place_t* place, const sluice_state_model_t* model,
                                         int32_t replaces, sluice_allocator_t* allocator,
                                         sluice_state_file_t** out_file) {
  *out_file = NULL;
  SLUICE_TRY(SLUICE_REQUIRE(model->count >= 1 && model->count <= INT64_C(1) << 48,
                            "optimizer: %s: %lld elements; give 1 to 2^48", place->path, (long long)model->count));
  sluice_state_file_t* f;
  SLUICE_TRY(make(place, allocator, &f));
  f->replaces = replaces;
  const sluice_status_t status = make_new(f, place, model);
  if (status != SLUICE_OK) {
    sluice_state_file_close(f);
    return status;
  }
  *out_file = f;
  return SLUICE_OK;
}

/* Makes the new name durable as well. */
static sluice_status_t sync_folder(const sluice_state_file_t* f) {
  char folder[PATH_MAX];
  memcpy(folder, f->path, sizeof folder);
  char* slash = strrchr(folder, '/');
  if (slash != NULL) slash[slash == folder ? 1 : 0] = '\0';
  const int fd = open(slash != NULL ? folder : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return sluice_state_file_says(f, "opening its folder");
  const sluice_status_t status = fsync(fd) == 0 ? SLUICE_OK : sluice_state_file_says(f, "syncing its folder");
  (void)close(fd);
  return status;
}

sluice_status_t sluice_state_file_publish(sluice_state_file_t* f) {
  char path[PATH_MAX];
  name_unfinished(f, path);
  SLUICE_TRY(check_path_is_free(f));
  if (rename(path, f->path) != 0) return sluice_state_file_says(f, "renaming it");
  f->is_new = 0;
  const sluice_status_t status = f->is_durable ? sync_folder(f) : SLUICE_OK;
  if (status == SLUICE_OK) return SLUICE_OK;
  sluice_error_info_t why;
  sluice_error_capture(&why);
  if (f->replaces) { /* the previous file is gone: keep this one rather than none */
    sluice_log(SLUICE_LOG_WARN, "%s", why.message);
    return SLUICE_OK;
  }
  (void)unlink(f->path);
  return sluice_error_adopt(&why);
}

/* ---- opening ---- */

static sluice_status_t read_model(sluice_state_file_t* f, const head_t* head) {
  const uint64_t bytes = (uint64_t)head->num_words * sizeof *f->model.words;
  f->model.words = sluice_alloc(f->allocator, bytes + sizeof *f->model.words, "optimizer: a file of states");
  if (f->model.words == NULL) return sluice_alloc_status();
  f->model.num_words = head->num_words;
  SLUICE_TRY(sluice_file_read_at(f->descriptor.fd, "optimizer", f->path, PAGE, f->model.words, bytes));
  if (head->model_sum == sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, f->model.words, bytes) &&
      sluice_state_model_read(&f->model) && f->model.count == head->count)
    return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_EXTERNAL, "optimizer: %s: its description of tensors is damaged", f->path);
}

static sluice_status_t check_head(const sluice_state_file_t* f, const head_t* head) {
  if (head->magic == MAGIC && head->form == 1) {
    return SLUICE_FAIL(SLUICE_E_EXTERNAL,
                       "optimizer: %s was written by 0.1.0-dev, whose files have neither checksums nor a description "
                       "of the model; open it with that version, save its state_dict, and load that into a new file",
                       f->path);
  }
  if (head->magic == MAGIC && head->form != FORM) {
    return SLUICE_FAIL(SLUICE_E_EXTERNAL, "optimizer: %s has format version %lld; this library reads version %d",
                       f->path, (long long)head->form, FORM);
  }
  if (head->magic != MAGIC || head->sum != sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, head, offsetof(head_t, sum)) ||
      head->count < 1 || head->count > INT64_C(1) << 48) {
    return SLUICE_FAIL(SLUICE_E_EXTERNAL,
                       "optimizer: %s is not a state file, or was written on another kind of machine", f->path);
  }
  return SLUICE_OK;
}

static sluice_status_t check_rank(const sluice_state_file_t* f, const head_t* head, const sluice_state_place_t* place) {
  if (head->rank == place->rank && head->world_size == place->world_size) return SLUICE_OK;
  return SLUICE_FAIL(
      SLUICE_E_MISMATCH,
      "optimizer: %s is the file of rank %lld of %lld, and this is rank %d of %d; give each rank its own", f->path,
      (long long)head->rank, (long long)head->world_size, place->rank, place->world_size);
}

static sluice_status_t check_size(const sluice_state_file_t* f, uint64_t size, uint64_t wanted) {
  if (size >= wanted) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_EXTERNAL, "optimizer: %s is truncated: it has %llu of %llu bytes", f->path,
                     (unsigned long long)size, (unsigned long long)wanted);
}

static sluice_status_t read_head(sluice_state_file_t* f, const sluice_state_place_t* place) {
  head_t head;
  struct stat stat_of;
  if (fstat(f->descriptor.fd, &stat_of) != 0) return sluice_state_file_says(f, "reading its metadata");
  const uint64_t size = (uint64_t)stat_of.st_size;
  if (size < PAGE) {
    return SLUICE_FAIL(SLUICE_E_EXTERNAL, "optimizer: %s has %llu bytes: it is not a state file", f->path,
                       (unsigned long long)size);
  }
  SLUICE_TRY(sluice_file_read_at(f->descriptor.fd, "optimizer", f->path, 0, &head, sizeof head));
  SLUICE_TRY(check_head(f, &head));
  if (head.num_words < 0 || (uint64_t)head.num_words > size / sizeof(int64_t))
    return check_size(f, size, PAGE + (uint64_t)head.num_words * sizeof(int64_t));
  f->count = head.count;
  SLUICE_TRY(read_model(f, &head));
  SLUICE_TRY(check_size(f, size, sluice_state_file_bytes(f)));
  return check_rank(f, &head, place);
}

static sluice_status_t read_all(sluice_state_file_t* f, const sluice_state_place_t* place, int64_t step) {
  SLUICE_TRY(lock(f, f->path));
  SLUICE_TRY(read_head(f, place));
  for (int32_t room = 0; room < NUM_ROOMS; ++room) {
    SLUICE_TRY(sluice_state_file_read_record(f, room));
    SLUICE_TRY(sluice_state_file_verify(f, room));
  }
  return sluice_state_file_choose(f, step);
}

sluice_status_t sluice_state_file_open(const sluice_state_place_t* place, int64_t step, sluice_allocator_t* allocator,
                                       sluice_state_file_t** out_file) {
  *out_file = NULL;
  sluice_state_file_t* f;
  SLUICE_TRY(make(place, allocator, &f));
  sluice_status_t status = SLUICE_OK;
  if (sluice_descriptor_open(&f->descriptor, f->path, O_RDWR) < 0) {
    status = errno != ENOENT ? sluice_state_file_says(f, "opening it")
                             : SLUICE_FAIL(SLUICE_E_NOT_FOUND, "optimizer: there is no file %s", f->path);
  }
  if (status == SLUICE_OK) status = read_all(f, place, step);
  if (status != SLUICE_OK) {
    sluice_state_file_close(f);
    return status;
  }
  *out_file = f;
  return SLUICE_OK;
}
