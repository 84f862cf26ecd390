// SPDX-License-Identifier: Apache-2.0
#include "backend/base/file_trust.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/base/log.h"

/* Returns the users other than the owner who can write the file, or NULL. */
static const char* writers(const struct stat* info) {
  if (info->st_mode & S_IWOTH) return "every user";
  return info->st_mode & S_IWGRP ? "its group" : NULL;
}

static int refuse(const char* path, int descriptor, const char* why) {
  sluice_log(SLUICE_LOG_WARN, "%s is not read: %s; remove it, or set SLUICE_CACHE_DIR to a folder of your own", path,
             why);
  if (descriptor >= 0) (void)close(descriptor);
  return -1;
}

static int check_ours(const char* path, int descriptor, const struct stat* info) {
  char why[64];
  const char* who = writers(info);
  if (info->st_uid != geteuid() && info->st_uid != 0) {
    snprintf(why, sizeof why, "it belongs to user %ld", (long)info->st_uid);
  } else if (who != NULL) {
    snprintf(why, sizeof why, "%s can write it", who);
  } else {
    return descriptor;
  }
  return refuse(path, descriptor, why);
}

static void warn(const char* path, const struct stat* info) {
  const char* who = writers(info);
  if (who != NULL) sluice_log(SLUICE_LOG_WARN, "%s is used although %s can write it: chmod go-w %s", path, who, path);
}

int sluice_trusted_open(const char* path, int must_be_ours) {
  /* O_NONBLOCK: opening a FIFO must not block. */
  int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | (must_be_ours ? O_NOFOLLOW : 0));
  if (descriptor < 0) return must_be_ours && errno == ELOOP ? refuse(path, -1, "it is a symbolic link") : -1;
  struct stat info;
  if (fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode)) {
    return refuse(path, descriptor, "it is not a regular file");
  }
  if (must_be_ours) return check_ours(path, descriptor, &info);
  warn(path, &info);
  return descriptor;
}

void sluice_warn_if_others_write(const char* path) {
  struct stat info;
  if (strchr(path, '/') != NULL && stat(path, &info) == 0) warn(path, &info);
}
