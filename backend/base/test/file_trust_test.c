// SPDX-License-Identifier: Apache-2.0
/* Files that the library opens: only those of this user that others cannot write. */
#include "backend/base/file_trust.h"

#include <sys/stat.h>
#include <unistd.h>

#include "sluice/sluice.h"
#include "third_party/bazel/test.h"

#define SOMEBODY 4242 /* a user other than this one */

static char folder[64], path[96], link_path[96], warned[1300];

static void on_log(void* user, int32_t level, const char* message) {
  (void)user;
  if (level == SLUICE_LOG_WARN) snprintf(warned, sizeof warned, "%s", message);
}

static int set_up(void** state) {
  (void)state;
  snprintf(folder, sizeof folder, "/tmp/sluice-owned-XXXXXX");
  if (mkdtemp(folder) == NULL) return -1;
  snprintf(path, sizeof path, "%s/file", folder);
  snprintf(link_path, sizeof link_path, "%s/link", folder);
  FILE* file = fopen(path, "w");
  if (file == NULL || fclose(file) != 0 || chmod(path, 0644) != 0 || symlink(path, link_path) != 0) return -1;
  warned[0] = '\0';
  sluice_set_log(on_log, NULL, SLUICE_LOG_INFO);
  return 0;
}

static int tear_down(void** state) {
  (void)state;
  sluice_set_log(NULL, NULL, 0);
  (void)unlink(link_path);
  (void)unlink(path);
  return rmdir(folder);
}

/* Opens and closes a file. Returns whether it was opened. says: a part of the expected warning; NULL: no warning. */
static int opens(const char* what, int must_be_ours, const char* says) {
  warned[0] = '\0';
  int descriptor = sluice_trusted_open(what, must_be_ours);
  if (says == NULL) assert_string_equal(warned, "");
  if (says != NULL && (strstr(warned, says) == NULL || strstr(warned, what) == NULL)) fail_msg("said: %s", warned);
  return descriptor >= 0 && close(descriptor) == 0;
}

TEST(Open_OurFile_IsRead) {
  assert_true(opens(path, 1, NULL));
  assert_true(opens(path, 0, NULL));
  assert_true(opens(link_path, 0, NULL)); /* the user has chosen this link */
  assert_false(opens("/tmp/sluice-owned/not/there", 1, NULL));
}

TEST(Open_FileThatOthersWrite_IsRefusedOrWarnedOf) {
  assert_int_equal(chmod(path, 0664), 0);
  assert_false(opens(path, 1, "its group can write it"));
  assert_true(opens(path, 0, "chmod go-w"));
  assert_int_equal(chmod(path, 0646), 0);
  assert_false(opens(path, 1, "every user can write it"));
  assert_true(opens(path, 0, "every user can write it"));
}

TEST(Open_LinkOrFifo_IsRefusedAtOnce) {
  assert_false(opens(link_path, 1, "it is a symbolic link"));
  assert_int_equal(unlink(path), 0);
  assert_int_equal(mkfifo(path, 0600), 0); /* without O_NONBLOCK this would wait for a writer */
  assert_false(opens(path, 1, "not a regular file"));
  assert_false(opens(path, 0, "not a regular file"));
}

TEST(Open_FileOfAnotherUser_IsRefusedWithItsNumber) {
  if (chown(path, SOMEBODY, (gid_t)-1) != 0) skip_because("only root gives files away");
  assert_false(opens(path, 1, "it belongs to user 4242"));
  assert_true(opens(path, 0, NULL));
  /* Another user accepts files of root too, since root may do anything. */
  assert_int_equal(seteuid(SOMEBODY), 0);
  int own = opens(path, 1, NULL), roots = opens("/etc/passwd", 1, NULL);
  assert_int_equal(seteuid(0), 0);
  assert_false(own); /* only root can enter the folder */
  assert_true(roots);
}

TEST(Warn_LibraryThatOthersWrite_IsNamed) {
  sluice_warn_if_others_write(path);
  sluice_warn_if_others_write("libc.so.6");
  assert_string_equal(warned, "");
  assert_int_equal(chmod(path, 0666), 0);
  sluice_warn_if_others_write(link_path);
  assert_non_null(strstr(warned, "is used although every user can write it"));
}

int main(void) { return run_cases_each(set_up, tear_down); }
