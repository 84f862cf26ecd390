// SPDX-License-Identifier: Apache-2.0
/* Opens files that the library reads back or loads, after a check of their owner and permissions. */
#ifndef SLUICE_BACKEND_BASE_FILE_TRUST_H_
#define SLUICE_BACKEND_BASE_FILE_TRUST_H_

/* A descriptor for reading a regular file, which the caller closes; -1 if there is none. must_be_ours: a symbolic link,
 * or a file that users other than this one and root can change, is -1 too, which is logged (WARN) with a remedy.
 * Otherwise the file is the user's choice, and a warning is logged if others can write it. Thread-safe. */
int sluice_trusted_open(const char* path, int must_be_ours);

/* Logs (WARN) if others can write a library that the user named by its path. No file: no log. */
void sluice_warn_if_others_write(const char* path);

#endif /* SLUICE_BACKEND_BASE_FILE_TRUST_H_ */
