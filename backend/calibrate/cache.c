#include "backend/calibrate/cache.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/base/dtype.h"
#include "backend/base/hash.h"
#include "backend/base/log.h"
#include "backend/base/owned.h"

/* 2: exchanges beside GEMMs by size; 3: skewed exchanges, whole passes; 4: relu; 5: buckets, passes of many rows */
#define FORM       "sluice cache 6"
#define MOST_BYTES (1 << 18)

static void processor_name(char* out, size_t room) {
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

void sluice_cache_key(const sluice_context_t* context, const sluice_calibration_t* wanted,
                      char out_key[SLUICE_CACHE_KEY_BYTES]) {
  char processor[128], device[192];
  const sluice_device_memory_t* memory = context->device->memory;
  processor_name(processor, sizeof processor);
  snprintf(device, sizeof device, "%s", context->device->name);
  if (memory != NULL) {
    int name = snprintf(device, sizeof device, "%s, ", context->device->name);
    memory->describe(context->device, device + name, (int32_t)sizeof device - name);
  }
  const char* threads = getenv("OMP_NUM_THREADS");
  snprintf(out_key, SLUICE_CACHE_KEY_BYTES,
           "version %d.%d.%d; device %s, %s, %ld cores, %s threads; link %s, %d ranks; GEMMs %s, %s, M %lld, H "
           "%lld",
           SLUICE_VERSION_MAJOR, SLUICE_VERSION_MINOR, SLUICE_VERSION_PATCH, device, processor,
           sysconf(_SC_NPROCESSORS_ONLN), threads != NULL ? threads : "all",
           context->comm != NULL ? context->comm->name : "none", context->world_size,
           sluice_gemm_made_of(context->gemm), sluice_dtype_name(wanted->dtype), (long long)wanted->model_width,
           (long long)wanted->hidden_width);
}

static uint64_t hash_of(const char* text) { return sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, text, strlen(text)); }

int sluice_cache_path(const char* folder, const char* key, char out_path[SLUICE_CACHE_PATH_BYTES]) {
  const char *own = getenv("SLUICE_CACHE_DIR"), *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
  const char *base = folder, *rest = "";
  if (base == NULL && own != NULL && own[0] != '\0') base = own;
  if (base == NULL && xdg != NULL && xdg[0] == '/') base = xdg, rest = "/sluice";
  if (base == NULL && home != NULL && home[0] == '/') base = home, rest = "/.cache/sluice";
  if (base == NULL || base[0] == '\0') return 0;
  int length = snprintf(out_path, SLUICE_CACHE_PATH_BYTES, "%s%s/machine-%016llx.json", base, rest,
                        (unsigned long long)hash_of(key));
  return length > 0 && length < SLUICE_CACHE_PATH_BYTES;
}

int sluice_cache_is_default(const char* folder) {
  const char* own = getenv("SLUICE_CACHE_DIR");
  return folder == NULL && (own == NULL || own[0] == '\0');
}

/* ---- reading ---- */

static char* read_whole(const char* path, int must_be_ours, size_t* out_length) {
  int descriptor = sluice_owned_open(path, must_be_ours);
  FILE* file = descriptor < 0 ? NULL : fdopen(descriptor, "rb");
  if (file == NULL) {
    if (descriptor >= 0) (void)close(descriptor);
    return NULL;
  }
  char* text = malloc(MOST_BYTES);
  if (text != NULL) *out_length = fread(text, 1, MOST_BYTES - 1, file);
  if (text != NULL) text[*out_length] = '\0';
  fclose(file);
  return text;
}

/* The JSON behind the two lines of form and key, or NULL with the reason. */
static const char* body_of(const char* text, const char* key, const char** out_reason) {
  size_t form = strlen(FORM), length = strlen(key);
  *out_reason = "it is of another version, or no cache file";
  if (strncmp(text, FORM "\n", form + 1) != 0) return NULL;
  *out_reason = "it is of another machine or library";
  if (strncmp(text + form + 1, key, length) != 0 || text[form + 1 + length] != '\n') return NULL;
  return text + form + 1 + length + 1;
}

int sluice_cache_read(const char* path, const char* key, int must_be_ours, sluice_machine_t* out_machine) {
  size_t length = 0;
  char* text = read_whole(path, must_be_ours, &length);
  if (text == NULL) return 0;
  const char* reason = NULL;
  const char* body = body_of(text, key, &reason);
  sluice_error_info_t why;
  if (body != NULL && sluice_machine_read(body, length - (size_t)(body - text), out_machine) != SLUICE_OK) {
    sluice_error_capture(&why);
    reason = why.message;
    body = NULL;
  }
  if (body == NULL) sluice_log(SLUICE_LOG_WARN, "%s cannot be used (%s): calibrating again", path, reason);
  free(text);
  return body != NULL;
}

/* ---- writing ---- */

static void make_folders(const char* path) {
  char part[SLUICE_CACHE_PATH_BYTES];
  snprintf(part, sizeof part, "%s", path);
  for (char* slash = strchr(part + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
    *slash = '\0';
    (void)mkdir(part, 0700); /* there already, or the file cannot be opened either */
    *slash = '/';
  }
}

static int write_file(const char* path, const char* key, const sluice_machine_t* machine) {
  uint64_t length = sluice_machine_write(machine, NULL, 0);
  char* text = malloc(length + 1);
  /* Whatever the umask, nobody else may write it: it would not be read back. */
  int descriptor = text == NULL ? -1 : open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  FILE* file = descriptor < 0 ? NULL : fdopen(descriptor, "wb");
  int done = 0;
  if (file == NULL && descriptor >= 0) (void)close(descriptor);
  if (file != NULL) {
    sluice_machine_write(machine, text, length + 1);
    /* On the disk before it gets its name: else a power cut may leave the name with no bytes. */
    done = fprintf(file, FORM "\n%s\n%s", key, text) > 0 && fflush(file) == 0 && fsync(descriptor) == 0;
    done = fclose(file) == 0 && done;
  }
  free(text);
  return done;
}

int sluice_cache_write(const char* path, const char* key, const sluice_machine_t* machine) {
  char beside[SLUICE_CACHE_PATH_BYTES + 64];
  make_folders(path);
  /* Threads may be ranks: the address of a local tells them apart. */
  snprintf(beside, sizeof beside, "%s.%ld.%p", path, (long)getpid(), (void*)beside);
  int done = write_file(beside, key, machine) && rename(beside, path) == 0;
  if (!done) {
    sluice_log(SLUICE_LOG_WARN, "%s cannot be written (%s): the next process calibrates again", path, strerror(errno));
    (void)unlink(beside);
  }
  return done;
}

/* ---- with all ranks ---- */

/* Whether every rank found a machine, and all the same. Says so where some did and the rest did not, or another. */
static sluice_status_t all_have_it(sluice_context_t* context, const sluice_machine_t* machine, int found,
                                   int* out_all) {
  *out_all = found;
  if (context->comm == NULL) return SLUICE_OK;
  const uint64_t hash = found ? sluice_hash_bytes(SLUICE_HASH_OF_NOTHING, machine, sizeof *machine) : 0;
  int64_t own = found ? (int64_t)(hash >> 2) : 0, range[] = {own, -own, found};
  SLUICE_TRY(sluice_comm_all_reduce_i64(context->comm, range, 3, SLUICE_REDUCE_MAX, "comparing calibrations"));
  *out_all = found && range[0] == -range[1];
  if (!*out_all && range[2] && context->rank == 0) {
    sluice_log(SLUICE_LOG_WARN,
               "ranks have different calibrations in their caches, or some have none: calibrating again");
  }
  return SLUICE_OK;
}

sluice_status_t sluice_calibrate_cached(sluice_context_t* context, const sluice_calibration_t* wanted,
                                        const char* folder, int32_t refresh, sluice_machine_t* out_machine) {
  char key[SLUICE_CACHE_KEY_BYTES], path[SLUICE_CACHE_PATH_BYTES];
  sluice_machine_t machine;
  memset(&machine, 0, sizeof machine);
  sluice_cache_key(context, wanted, key);
  int has_path = (folder == NULL || folder[0] != '\0') && sluice_cache_path(folder, key, path), all = 0;
  int found = has_path && !refresh && sluice_cache_read(path, key, sluice_cache_is_default(folder), &machine);
  SLUICE_TRY(all_have_it(context, &machine, found, &all));
  if (!all) {
    SLUICE_TRY(sluice_calibrate(context, wanted, &machine));
    if (has_path) (void)sluice_cache_write(path, key, &machine);
  }
  *out_machine = machine;
  return SLUICE_OK;
}
