// SPDX-License-Identifier: Apache-2.0
/* Opens files that the library reads back or loads, after a check of their owner and permissions. */
#pragma once

/* Opens a regular file for reading and returns a descriptor, which the caller closes; -1 if there is none.
 * must_be_ours: also returns -1 for a symbolic link, or a file that users other than this one and root can change, and
 * logs a warning with a remedy. Otherwise the file is the user's choice, and a warning is logged if others can write
 * it. Thread-safe. */
int sluice_trusted_open(const char* path, int must_be_ours);

/* Logs a warning if others can write a library that the user named by its path. Logs nothing if there is no file. */
void sluice_warn_if_others_write(const char* path);
